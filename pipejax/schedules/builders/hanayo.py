"""Hanayo: one pipe that goes down and up the workers in waves (arXiv:2308.15762).

The zigzag placement gives Chimera's overlap without a second copy of the weights. The paper
describes M = P; for more microbatches the pipe admits one when one has left, as 1F1B does.
"""

from collections.abc import Mapping

from pipejax.schedules.cells.placement import zigzag
from pipejax.schedules.heuristics.plan_table import admission_table
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.table import ScheduleTable


def hanayo(
    num_workers: int,
    num_microbatches: int,
    *,
    waves: int = 1,
    slots: Mapping[str, float] = UNIT_SLOTS,
) -> ScheduleTable:
    """Waves down and up the workers; more waves, less idle time and more messages.

    Args:
      num_workers: P.
      num_microbatches: M.
      waves: times down and up; 2 * waves stages per worker.
      slots: slot durations of F and B.

    Returns:
      The table, with 2 * waves * P stages.

    Example:
      >>> print(hanayo(2, 2, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5    6    7    8    9
        worker 0  0F0  0F1   .   3F0  3B0  3F1  3B1  0B0   .   0B1
        worker 1   .   1F0  2F0  1F1  2F1  2B0  1B0  2B1  1B1   .
    """
    placement = zigzag(num_workers, waves)
    return admission_table(
        "hanayo",
        placement,
        [0] * num_microbatches,
        in_flight_limit=2 * num_workers,
        slots=slots,
        stage_shares=[1.0] * placement.shape[1],
    )
