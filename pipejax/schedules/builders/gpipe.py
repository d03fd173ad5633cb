"""GPipe: all forwards, then all backwards (arXiv:1811.06965)."""

from collections.abc import Mapping

from pipejax.schedules.cells.ops import Op, Phase
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable


def gpipe(
    num_workers: int, num_microbatches: int, *, slots: Mapping[str, float] = UNIT_SLOTS
) -> ScheduleTable:
    """All forwards, then all backwards; holds every microbatch.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      slots: slot durations of F and B.

    Returns:
      The table.

    Raises:
      ScheduleError: if a count is below 1 or a slot duration is not above 0.

    Example:
      >>> print(gpipe(2, 2, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5
        worker 0  0F0  0F1   .    .   0B0  0B1
        worker 1   .   1F0  1F1  1B0  1B1   .
    """
    rows = [
        [(Op(phase, stage, m),) for phase in (Phase.F, Phase.B) for m in range(num_microbatches)]
        for stage in range(num_workers)
    ]
    packed = ScheduleTable.from_rows(rows, placement=looped(num_workers), name="gpipe", slots=slots)
    return spread(packed)
