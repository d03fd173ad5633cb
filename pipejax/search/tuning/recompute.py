"""The recompute share: as few layers run their forward again as memory allows."""

import math

import jax
import numpy as np

from pipejax.base.array_types import Array, Int, NumpyArray
from pipejax.costs.workload import StageLayers
from pipejax.search.tuning.layer_assignment import Evaluate, LayerAssignment, TunedLayers
from pipejax.search.tuning.microbatch_sizes import TuningProblem
from pipejax.search.tuning.rounding import MOST, TooManyError, improve, swaps
from pipejax.search.tuning.workload_system_pairs import Pair


def tune_recompute(
    problem: TuningProblem, num_microbatches: int, *, starts: int = 6, steps: int = 60
) -> TunedLayers:
    """Find how many layers of each stage to recompute so that memory fits and steps are short.

    Shares of the layers are a logistic function of the variables. They are rounded up, for that
    fits where the relaxation does, and then improved one layer at a time.

    Args:
      problem: pairs under a schedule, with its memory limits.
      num_microbatches: M, which divides every minibatch.
      starts: starts of each pair, from hardly any to nearly all layers.
      steps: gradients to take.

    Returns:
      The best of each pair.

    Raises:
      ValueError: if M does not divide a minibatch, or nothing fits.

    Example:
      >>> from pipejax import Workload, load_model, load_system
      >>> from pipejax.search.tuning.schedule_family import ScheduleFamily
      >>> workload = Workload(load_model("gpt3-175b"), minibatch=8, tensor_parallel=8)
      >>> problem = TuningProblem.of(ScheduleFamily("1f1b", 8), [workload], [load_system("h100")])
      >>> tune_recompute(problem, 8).recomputed.tolist()
      [[5, 4, 2, 0, 0, 0, 0, 0]]
    """
    assignment = LayerAssignment(problem, num_microbatches)
    layers = problem.pairs.assigned.layers
    pairs, stages = layers.shape
    levels = np.linspace(-3, 3, starts)[:, None, None]
    relaxed, values = assignment.descend(
        _shares, np.broadcast_to(levels, (starts, pairs, stages)), steps=steps, rate=0.3
    )
    rounded = np.ceil(relaxed.recomputed - 1e-6).reshape(-1, stages)
    points = np.concatenate([rounded, np.zeros_like(layers), layers]).astype(int)
    owner = np.tile(np.arange(pairs), starts + 2)
    one = np.eye(stages, dtype=int)
    evaluate = Evaluate(assignment, _of_all, _is_legal)
    points, times = improve(points, owner, np.concatenate([-one, one, swaps(stages)]), evaluate)
    return assignment.pick(
        evaluate.assigned(points, owner), owner, times, (relaxed, values), evaluate.count
    )


def search_recompute(
    problem: TuningProblem, num_microbatches: int, *, common: bool = False
) -> TunedLayers:
    """Evaluate every number of recomputed layers; for few layers and stages."""
    assignment = LayerAssignment(problem, num_microbatches)
    every = [_ways(layers, common) for layers in problem.pairs.assigned.layers.astype(int)]
    points = np.concatenate(every)
    owner = np.repeat(np.arange(len(every)), list(map(len, every)))
    evaluate = Evaluate(assignment, _of_all, _is_legal)
    return assignment.pick(evaluate.assigned(points, owner), owner, evaluate(points, owner))


def _ways(layers: Int[NumpyArray, " stages"], common: bool) -> Int[NumpyArray, "points stages"]:
    if common:
        return np.minimum(np.arange(layers.max() + 1)[:, None], layers)
    count = math.prod((layers + 1).tolist())
    if count > MOST:
        raise TooManyError(f"{count:.3g} ways to recompute: at most {MOST} are tried")
    return np.stack(np.unravel_index(np.arange(count), tuple(layers + 1)), axis=1)


def _shares(variables: Array, pair: Pair) -> StageLayers:
    return StageLayers(pair.assigned.layers, jax.nn.sigmoid(variables) * pair.assigned.layers)


def _of_all(recomputed: Int[NumpyArray, "points stages"], given: StageLayers) -> StageLayers:
    return StageLayers(given.layers, recomputed)


def _is_legal(recomputed: Int[NumpyArray, "points stages"], given: StageLayers) -> NumpyArray:
    """Fewer than none and more than all layers cannot be recomputed."""
    in_range = (recomputed >= 0) & (recomputed <= np.asarray(given.layers))
    return np.asarray(in_range.all(axis=1))
