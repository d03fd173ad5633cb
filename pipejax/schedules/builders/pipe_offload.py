"""PipeOffload: activations go to the host and return at fixed places of a 1F1B schedule."""

from collections.abc import Mapping
from math import floor

from pipejax.base.checks import is_number
from pipejax.schedules.builders.one_f_one_b import alternate
from pipejax.schedules.cells.ops import Cell, Op, Phase
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable

NEAR = 2  # microbatches between a forward and the wait for its offload, and a load and its backward


def pipe_offload(
    num_workers: int,
    num_microbatches: int,
    *,
    offload_share: float = 0.5,
    slots: Mapping[str, float] = UNIT_SLOTS,
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
      ScheduleError: if a count is below 1 or a slot duration is not above 0.

    Example:
      >>> row = next(pipe_offload(5, 5, offload_share=1).rows())
      >>> " ".join(str(op) for cell in row for op in cell)[:70]
      '0F0 0O0 0F1 0O1 0WAIT_O0 0F2 0O2 0WAIT_O1 0L0 0F3 0WAIT_O2 0L1 0F4 0B0'
    """
    if not is_number(offload_share) or offload_share > 1:
        raise ValueError(f"offload_share must be a number from 0 to 1, got {offload_share!r}")
    goes = {
        m
        for m in range(num_microbatches - NEAR)
        if floor((m + 1) * offload_share) > floor(m * offload_share)
    }
    rows = [
        _row(r, min(num_workers - r, num_microbatches), num_microbatches, goes)
        for r in range(num_workers)
    ]
    return spread(
        ScheduleTable.from_rows(
            rows, placement=looped(num_workers), name="pipe-offload", slots=slots
        )
    )


def _row(stage: int, in_flight: int, microbatches: int, goes: set[int]) -> list[Cell]:
    """Cells of a worker with so many microbatches in flight."""
    if in_flight <= 2 * NEAR:
        goes = set()
    forwards, backwards = (
        [Op(phase, stage, m) for m in range(microbatches)] for phase in (Phase.F, Phase.B)
    )
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
