"""The layer split: stages that hold embedding or head, or wait for messages, take fewer layers."""

import jax
import numpy as np

from pipejax.base.array_types import Array, Int, NumpyArray
from pipejax.costs.workload import StageLayers
from pipejax.search.tuning.layer_assignment import Evaluate, LayerAssignment, TunedLayers
from pipejax.search.tuning.microbatch_sizes import TuningProblem
from pipejax.search.tuning.rounding import compositions, improve, swaps, whole_with_sum
from pipejax.search.tuning.workload_system_pairs import Pair

SPREAD = 0.5  # of the starts, in logarithms of shares


def tune_layers(
    problem: TuningProblem,
    num_microbatches: int,
    *,
    starts: int = 8,
    steps: int = 60,
    seed: int = 0,
) -> TunedLayers:
    """Find the whole layers of each stage that make the step shortest.

    Shares are a softmax, and every stage has at least one layer. Rounded splits are improved one
    layer at a time until no move helps.

    Args:
      problem: pairs under a schedule.
      num_microbatches: M, which divides every minibatch.
      starts: starts of each pair: the even split, and random ones.
      steps: gradients to take.
      seed: of the random starts.

    Returns:
      The best split of each pair.

    Raises:
      ValueError: if M does not divide a minibatch, or nothing fits.

    Example:
      >>> from pipejax import Workload, load_model, load_system
      >>> from pipejax.search.tuning.schedule_family import ScheduleFamily
      >>> workload = Workload(load_model("llama3-70b"), minibatch=16, tensor_parallel=8)
      >>> problem = TuningProblem.of(ScheduleFamily("1f1b", 4), [workload], [load_system("b200")])
      >>> tune_layers(problem, 16).layers.tolist()  # the best of all 79,079 splits
      [[21, 19, 20, 20]]
    """
    assignment = LayerAssignment(problem, num_microbatches)
    pairs, stages = problem.pairs.assigned.layers.shape
    noise = np.random.default_rng(seed).normal(0, SPREAD, (starts, pairs, stages))
    noise[0] = 0
    relaxed, values = assignment.descend(_split, noise, steps=steps, rate=0.1)
    owner = np.tile(np.arange(pairs), starts + 1)
    splits = whole_with_sum(np.asarray(relaxed.layers).reshape(-1, stages))
    points = np.concatenate([splits, problem.pairs.assigned.layers.astype(int)])
    evaluate = Evaluate(assignment, _with_recomputed, _is_legal)
    points, times = improve(points, owner, swaps(stages), evaluate)
    assigned = evaluate.assigned(points, owner)
    return assignment.pick(assigned, owner, times, (relaxed, values), evaluate.count)


def search_layers(problem: TuningProblem, num_microbatches: int) -> TunedLayers:
    """Evaluate every way to split the layers; for few layers and stages."""
    assignment = LayerAssignment(problem, num_microbatches)
    stages = problem.pairs.assigned.layers.shape[1]
    totals = problem.pairs.assigned.layers.sum(axis=1).astype(int)
    ways = {total: compositions(total, stages) for total in np.unique(totals).tolist()}
    points = np.concatenate([ways[total] for total in totals.tolist()])
    owner = np.repeat(np.arange(len(totals)), [len(ways[total]) for total in totals.tolist()])
    evaluate = Evaluate(assignment, _with_recomputed, _is_legal)
    return assignment.pick(evaluate.assigned(points, owner), owner, evaluate(points, owner))


def _split(variables: Array, pair: Pair) -> StageLayers:
    """One layer for each stage, the rest by a softmax; recomputed as the even split is."""
    given, recomputed = pair.assigned
    layers = 1 + jax.nn.softmax(variables) * (given.sum() - len(given))
    return StageLayers(layers, layers * recomputed / given)


def _with_recomputed(layers: Int[NumpyArray, "points stages"], given: StageLayers) -> StageLayers:
    """Recompute on the stages where the even split does: all layers or none."""
    return StageLayers(layers, layers * (np.asarray(given.recomputed) > 0))


def _is_legal(layers: Int[NumpyArray, "points stages"], given: StageLayers) -> NumpyArray:
    """Every stage needs a layer."""
    del given
    return layers.min(axis=1) >= 1
