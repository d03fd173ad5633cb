"""ZB-H1 and ZB-H2: 1F1B with the backward split, and weight gradients where it would idle.

A worker goes through its microbatches in a fixed pattern, whatever its ops cost: forwards for the
warm-up, then input gradient, weight gradient and forward in turn. Its weight gradients stay
behind its input gradients by a fixed number of microbatches, more of them on later workers, whose
last weight gradients fill the time in which earlier workers end their input gradients.
"""

from collections.abc import Mapping

from pipejax.schedules.cells.ops import Cell, Op, Phase
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable


def zb_h1(
    num_workers: int, num_microbatches: int, *, slots: Mapping[str, float] = UNIT_SLOTS
) -> ScheduleTable:
    """1F1B with split backwards in the memory of 1F1B; its bubble is a third of it at F = I = W.

    Worker r holds P - r whole activations and, of r more, what their weight gradients need.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      slots: slot durations of F, I and W.

    Returns:
      The table.

    Raises:
      ScheduleError: if a count is below 1 or a slot duration is not above 0.

    Example:
      >>> print(zb_h1(2, 2))
                   0    1    2    3    4    5    6
        worker 0  0F0  0F1   .   0I0  0W0  0I1  0W1
        worker 1   .   1F0  1I0  1F1  1I1  1W0  1W1
    """
    behind = range(num_workers)
    return _table("zb-h1", [num_workers - r for r in behind], behind, num_microbatches, slots)


def zb_h2(
    num_workers: int, num_microbatches: int, *, slots: Mapping[str, float] = UNIT_SLOTS
) -> ScheduleTable:
    """ZB-H1 with a warm-up twice as long: no bubble within a worker's span at F = I = W.

    Worker r holds 2 (P - r) - 1 whole activations and, of 2 r more, what their weight gradients
    need. Steps have to overlap for its span to count: no worker may wait for all others before
    it updates its weights.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      slots: slot durations of F, I and W.

    Returns:
      The table.

    Raises:
      ScheduleError: if a count is below 1 or a slot duration is not above 0.

    Example:
      >>> print(zb_h2(2, 3))
                   0    1    2    3    4    5    6    7    8    9
        worker 0  0F0  0F1  0F2  0I0  0W0  0I1  0W1  0I2  0W2   .
        worker 1   .   1F0  1I0  1F1  1I1  1F2  1I2  1W0  1W1  1W2
    """
    warmup = [2 * (num_workers - r) - 1 for r in range(num_workers)]
    behind = range(0, 2 * num_workers, 2)
    return _table("zb-h2", warmup, behind, num_microbatches, slots)


def _table(
    name: str, warmup: list[int], behind: range, microbatches: int, slots: Mapping[str, float]
) -> ScheduleTable:
    """One stage per worker: forwards of the warm-up, weight gradients so far behind."""
    rows = [
        _row(stage, forwards, behind[stage], microbatches) for stage, forwards in enumerate(warmup)
    ]
    return spread(
        ScheduleTable.from_rows(rows, placement=looped(len(warmup)), name=name, slots=slots)
    )


def _row(stage: int, warmup: int, behind: int, microbatches: int) -> list[Cell]:
    """Cells of one worker."""
    forwards, gradients, weights = (
        [(Op(phase, stage, m),) for m in range(microbatches)]
        for phase in (Phase.F, Phase.I, Phase.W)
    )
    row: list[Cell] = [*forwards[:warmup]]
    for m in range(microbatches):
        row.append(gradients[m])
        row += weights[max(m - behind, 0) : max(m - behind + 1, 0)]
        row += forwards[warmup + m : warmup + m + 1]
    return row + weights[max(microbatches - behind, 0) :]
