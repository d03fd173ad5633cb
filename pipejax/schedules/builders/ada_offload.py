"""AdaOffload: a greedy schedule that offloads only when a memory limit asks for it."""

from collections.abc import Mapping
from functools import partial

from pipejax.base.checks import number
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.heuristics.ada_offload_search import ada_offload_starts
from pipejax.schedules.heuristics.plan_table import plan_table
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.table import ScheduleTable


def ada_offload(
    num_workers: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    offload: float | None = 1.0,
    load: float | None = None,
    slots: Mapping[str, float] = UNIT_SLOTS,
) -> ScheduleTable:
    """Greedy schedule with split backwards that offloads activations when memory is short.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      memory_limit: activations that a worker may hold, at least 1; no limit if None.
      weight_share: share of an activation that only W frees; I frees the rest.
      transfer: time of a message, in slots.
      offload: time of O, in slots; nothing is offloaded if None.
      load: time of L, in slots; that of O if None.
      slots: durations of F, I and W that the schedule is planned for.

    Returns:
      The table.

    Raises:
      ValueError: if the limit is below 1, or a share or time is out of range.

    Example:
      >>> tables = [ada_offload(4, 8, memory_limit=2, offload=t) for t in (None, 0.5)]
      >>> [table.offloads for table in tables]
      [False, True]
    """
    search = partial(
        ada_offload_starts,
        offload=None if offload is None else number(offload, "offload"),
        load=None if load is None else number(load, "load"),
    )
    return plan_table(
        "ada-offload",
        search,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        memory_limit=memory_limit,
        weight_share=weight_share,
        transfer=transfer,
        slots=slots,
    )
