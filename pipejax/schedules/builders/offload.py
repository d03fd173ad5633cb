"""Activations that go to the host: at fixed places of 1F1B, or where memory is short."""

from math import floor

from pipejax.base.checks import number, share
from pipejax.schedules.builders.one_f_one_b import alternate, ops_of
from pipejax.schedules.builders.zero_bubble import pipe_of_slots, planned
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.cells.ops import Cell, Op, Phase
from pipejax.schedules.heuristics.ada_offload_search import ada_offload_starts
from pipejax.schedules.table.slot_durations import UNIT_SLOTS, Slots
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable

NEAR = 2  # microbatches between a forward and the wait for its offload, and a load and its backward


def pipe_offload(
    num_workers: int,
    num_microbatches: int,
    *,
    offload_share: float = 0.5,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B that keeps a share of its activations on the host between forward and backward.

    An offload is issued behind its forward and has to end before the second forward after it; a
    load is issued behind the second backward before its own. Where fewer than five microbatches
    are in flight, an activation would be called back before it is away, and none goes; neither
    do the last two, whose memory no forward needs.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      offload_share: share of the microbatches whose activations go, evenly spread: 1/2 is every
        other one (selective offload of the source), 1 all of them.
      slots: slot durations of F and B.

    Returns:
      The table.

    Raises:
      ValueError: if the share is not a number from 0 to 1.
      ValueError: if a count is no whole number of at least 1, or a slot duration is not above 0.

    Example:
      >>> row = next(pipe_offload(5, 5, offload_share=1).rows())
      >>> " ".join(str(op) for cell in row for op in cell)[:70]
      '0F0 0O0 0F1 0O1 0WAIT_O0 0F2 0O2 0WAIT_O1 0L0 0F3 0WAIT_O2 0L1 0F4 0B0'
    """
    part = share(offload_share, "offload_share")
    goes = {m for m in range(num_microbatches - NEAR) if floor((m + 1) * part) > floor(m * part)}
    rows = [
        _row(r, min(num_workers - r, num_microbatches), num_microbatches, goes)
        for r in range(num_workers)
    ]
    return spread_rows("pipe-offload", rows, slots)


def _row(stage: int, in_flight: int, microbatches: int, goes: set[int]) -> list[Cell]:
    """Cells of a worker with so many microbatches in flight."""
    if in_flight <= 2 * NEAR:
        goes = set()
    forwards, backwards = (ops_of(p, stage, range(microbatches)) for p in (Phase.F, Phase.B))
    row: list[Cell] = []

    def put(phase: Phase, microbatch: int) -> None:
        if microbatch in goes:
            row.append((Op(phase, stage, microbatch),))

    for cell in alternate(forwards, backwards, in_flight - 1):
        phase, _, microbatch = cell[0]
        if phase is Phase.F:
            put(Phase.WAIT_O, microbatch - NEAR)
            if microbatch < in_flight:  # no backward has been yet
                put(Phase.L, microbatch + NEAR - in_flight)
        row.append(cell)
        put(*((Phase.O, microbatch) if phase is Phase.F else (Phase.L, microbatch + NEAR)))
    return row


def ada_offload(
    num_workers: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    offload: float | None = 1.0,
    load: float | None = None,
    slots: Slots = UNIT_SLOTS,
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
    there = None if offload is None else number(offload, "offload")
    back = None if load is None else number(load, "load")
    pipe = pipe_of_slots(num_workers, num_microbatches, memory_limit, weight_share, transfer, slots)
    return planned("ada-offload", pipe, ada_offload_starts(pipe, offload=there, load=back), slots)
