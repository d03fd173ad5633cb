"""Gathered weights of a run: of which stages each worker holds them, and when most at once."""

from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.activation_memory import Sizes, per_stage
from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import short_repr_of
from pipejax.schedules.cells.memory_ledger import HeldOps, HeldParts


@short_repr_of("peak peak_at time held worker")
class GatheredWeights(NamedTuple):
    """Gathered weights by worker as steps; in the unit of the sizes.

    Attributes:
      worker: (steps) worker, ascending.
      time: (steps) when its level changes, ascending for each worker [s].
      held: (steps) what it holds from then on.
      peak: (workers) most that it holds at once.
      peak_at: (workers) when it first holds that much [s].
    """

    worker: Int[NumpyArray, " steps"]
    time: Float[NumpyArray, " steps"]
    held: Float[NumpyArray, " steps"]
    peak: Float[NumpyArray, " workers"]
    peak_at: Float[NumpyArray, " workers"]


def gathered_weights(evaluation: Evaluation, *, sizes: Sizes = 1.0) -> GatheredWeights:
    """Follow whose weights each worker holds during a run, beside its shards.

    UNSHARD takes those of a stage at its start, RESHARD frees them at its end; what no cell gathers
    is not counted. At one moment releases come before takes.

    Args:
      evaluation: a run.
      sizes: what the weights of a stage take, a number or (stages), in any unit.

    Returns:
      The steps and peaks.

    Raises:
      ValueError: if a size is no finite number of at least 0, or there are not as many as stages.

    Example:
      >>> import pipejax as pj
      >>> table = pj.ScheduleTable.from_rows([["0F0", "1F0", "1B0", "0B0"]])
      >>> table = pj.schedules.insert_sharding(table, lookahead=1)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, unshard=0.25))
      >>> weights = pj.analysis.gathered_weights(run, sizes=[3.0, 4.0])
      >>> weights.time.tolist(), weights.held.tolist(), weights.peak.tolist()
      ([0.0, 0.25, 4.25, 6.25], [3.0, 7.0, 3.0, 0.0], [7.0])
    """
    check_types(evaluation=(evaluation, Evaluation))
    size = per_stage("sizes", sizes, (evaluation.stages, 0))
    ops = HeldOps.gathering(evaluation.table)
    cell = ops.worker, ops.start
    parts = HeldParts.gathered(
        ops._replace(start=evaluation.start[cell], end=evaluation.finish[cell])
    )
    held = parts.levels(size[None])
    worker, time = parts.worker[parts.settled], parts.time[parts.settled]
    peak, peak_at = np.zeros((2, evaluation.workers))
    np.maximum.at(peak, worker, held)
    is_peak = np.flatnonzero(held == peak[worker])[::-1]  # the first one is written last
    peak_at[worker[is_peak]] = time[is_peak]
    return GatheredWeights(worker, time, held, peak, peak_at)
