"""LocalSGD in a pipeline: several runs share it, so that no weights are stale.

Microbatch i belongs to run i mod R. Within a round of H local steps a run's next forward on a
stage waits for its last backward there; after R * H microbatches the pipe runs empty and the
models of all runs are averaged (the pipeline form that arXiv:2606.03498 compares PipeDream with).
"""

from collections.abc import Iterator, Mapping

from pipejax.base.checks import whole_number
from pipejax.schedules.builders.one_f_one_b import alternate
from pipejax.schedules.cells.ops import Cell, Op, Phase
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.cells.weight_rule import WeightRule
from pipejax.schedules.table.slot_durations import EQUAL_SLOTS
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable


def local_sgd(
    num_workers: int,
    num_microbatches: int,
    *,
    runs: int | None = None,
    local_steps: int = 1,
    slots: Mapping[str, float] = EQUAL_SLOTS,
) -> ScheduleTable:
    """R runs in turn, H local steps each, then a flush and an average; no staleness.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M, over all rounds; the last round may be smaller than the others.
      runs: R; P if None, which fills the pipe.
      local_steps: H.
      slots: slot durations of F and B.

    Returns:
      The table, with a U after every backward.

    Raises:
      ValueError: if runs or local_steps is below 1.
      ScheduleError: if a count is below 1 or a slot duration is not above 0.

    Example:
      >>> print(local_sgd(2, 3))
                   0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
        worker 0  0F0  0F1   .    .   0B0  0U0   .    .   0B1  0U1  0F2   .    .    .   0B2  0U2
        worker 1   .   1F0  1B0  1U0  1F1   .   1B1  1U1   .    .    .   1F2  1B2  1U2   .    .
    """
    rule = WeightRule(
        runs=num_workers if runs is None else whole_number(runs, "runs"), local_steps=local_steps
    )
    rounds = [
        range(first, min(first + rule.round_size, num_microbatches))
        for first in range(0, num_microbatches, rule.round_size)
    ]
    rows = [
        [cell for microbatches in rounds for cell in _round(stage, microbatches, num_workers, rule)]
        for stage in range(num_workers)
    ]
    packed = ScheduleTable.from_rows(
        rows, placement=looped(num_workers), name="local-sgd", slots=slots, weights=rule
    )
    return spread(packed)


def _round(stage: int, microbatches: range, workers: int, rule: WeightRule) -> Iterator[Cell]:
    """1F1B in which no more microbatches are in flight than there are runs."""
    forwards, backwards = (
        [Op(phase, stage, m) for m in microbatches] for phase in (Phase.F, Phase.B)
    )
    for cell in alternate(forwards, backwards, min(workers - stage, rule.runs) - 1):
        yield cell
        (op,) = cell
        if op.phase is Phase.B:
            yield (op._replace(phase=Phase.U),)
