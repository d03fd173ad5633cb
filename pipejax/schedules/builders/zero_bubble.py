"""Zero-bubble schedules under a memory limit, planned for given times."""

from collections.abc import Mapping

from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.heuristics.plan_table import plan_table
from pipejax.schedules.heuristics.zero_bubble_search import zero_bubble_starts
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.table import ScheduleTable


def zero_bubble(
    num_workers: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Mapping[str, float] = UNIT_SLOTS,
) -> ScheduleTable:
    """Split backwards by a heuristic that fills waiting time under a memory limit.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      memory_limit: activations that a worker may hold, at least 1; no limit if None.
      weight_share: share of an activation that W frees; I frees the rest.
      transfer: time of a message, in slots.
      slots: durations of F, I and W that the schedule is planned for.

    Returns:
      The table.

    Raises:
      ValueError: if the limit is below 1, or a share or time is out of range.

    Example:
      >>> print(zero_bubble(2, 3, memory_limit=2))
                   0    1    2    3    4    5    6    7    8    9
        worker 0  0F0  0F1   .   0I0  0W0  0F2  0I1  0W1  0I2  0W2
        worker 1   .   1F0  1I0  1F1  1I1  1W0  1F2  1I2  1W1  1W2
    """
    return plan_table(
        "zero-bubble",
        zero_bubble_starts,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        memory_limit=memory_limit,
        weight_share=weight_share,
        transfer=transfer,
        slots=slots,
    )


def zb_1p(
    num_workers: int,
    num_microbatches: int,
    *,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Mapping[str, float] = UNIT_SLOTS,
) -> ScheduleTable:
    """Zero-bubble heuristic in the memory of 1F1B: P activations on every worker.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      weight_share: share of an activation that W frees; I frees the rest.
      transfer: time of a message, in slots.
      slots: durations of F, I and W that the schedule is planned for.

    Returns:
      The table.

    Raises:
      ValueError: if a share or time is out of range.

    Example:
      >>> table = zb_1p(4, 8)
      >>> table.name, table.num_slots
      ('zb-1p', 27)
    """
    return plan_table(
        "zb-1p",
        zero_bubble_starts,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        memory_limit=num_workers,
        weight_share=weight_share,
        transfer=transfer,
        slots=slots,
    )


def zb_2p(
    num_workers: int,
    num_microbatches: int,
    *,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Mapping[str, float] = UNIT_SLOTS,
) -> ScheduleTable:
    """Zero-bubble heuristic in twice the memory of 1F1B; made for steps that overlap.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      weight_share: share of an activation that W frees; I frees the rest.
      transfer: time of a message, in slots.
      slots: durations of F, I and W that the schedule is planned for.

    Returns:
      The table.

    Raises:
      ValueError: if a share or time is out of range.

    Example:
      >>> table = zb_2p(4, 8)
      >>> table.name, table.num_slots
      ('zb-2p', 27)
    """
    return plan_table(
        "zb-2p",
        zero_bubble_starts,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        memory_limit=2 * num_workers,
        weight_share=weight_share,
        transfer=transfer,
        slots=slots,
    )
