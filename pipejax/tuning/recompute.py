"""The recompute share: as few layers run their forward again as memory allows."""

import math

import jax
import numpy as np

from pipejax.shapes import Array, Float, Int, NumpyArray
from pipejax.tuning.dealing import Dealing, TunedLayers
from pipejax.tuning.pairs import Pair
from pipejax.tuning.rounding import MOST, TooManyError, improve, swaps
from pipejax.tuning.sizes import Problem
from pipejax.workload import StageLayers


def tune_recompute(
    problem: Problem, num_microbatches: int, *, starts: int = 6, steps: int = 60
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
      >>> from pipejax.tuning.family import Family
      >>> workload = Workload(load_model("gpt3-175b"), minibatch=8, tensor_parallel=8)
      >>> problem = Problem.of(Family("1f1b", 8), [workload], [load_system("h100")])
      >>> tune_recompute(problem, 8).recomputed.tolist()
      [[5, 4, 2, 0, 0, 0, 0, 0]]
    """
    dealing = Dealing(problem, num_microbatches)
    layers = problem.pairs.dealt.layers
    pairs, stages = layers.shape
    levels = np.linspace(-3, 3, starts)[:, None, None]
    relaxed, values = dealing.descend(
        _shares, np.broadcast_to(levels, (starts, pairs, stages)), steps=steps, rate=0.3
    )
    rounded = np.ceil(relaxed.recomputed - 1e-6).reshape(-1, stages)
    points = np.concatenate([rounded, np.zeros_like(layers), layers]).astype(int)
    owner = np.tile(np.arange(pairs), starts + 2)
    one = np.eye(stages, dtype=int)
    evaluate = _Evaluate(dealing)
    points, times = improve(points, owner, np.concatenate([-one, one, swaps(stages)]), evaluate)
    dealt = StageLayers(layers[owner], points)
    return dealing.pick(dealt, owner, times, (relaxed, values), evaluate.count)


def search_recompute(
    problem: Problem, num_microbatches: int, *, common: bool = False
) -> TunedLayers:
    """Evaluate every number of recomputed layers; for few layers and stages.

    Args:
      problem: pairs under a schedule, with its memory limits.
      num_microbatches: M, which divides every minibatch.
      common: only the same number on all stages, as far as they have so many layers.

    Returns:
      The best of each pair.

    Raises:
      TooManyError: if there are too many ways.
      ValueError: as `tune_recompute`.

    Example:
      >>> from pipejax import Workload, load_model, load_system
      >>> from pipejax.tuning.family import Family
      >>> workload = Workload(load_model("gpt3-175b"), minibatch=8, tensor_parallel=8)
      >>> problem = Problem.of(Family("1f1b", 8), [workload], [load_system("h100")])
      >>> search_recompute(problem, 8, common=True).recomputed.tolist()
      [[5, 5, 5, 5, 5, 5, 5, 5]]
    """
    dealing = Dealing(problem, num_microbatches)
    every = [_ways(layers, common) for layers in problem.pairs.dealt.layers.astype(int)]
    points = np.concatenate(every)
    owner = np.repeat(np.arange(len(every)), list(map(len, every)))
    dealt = StageLayers(problem.pairs.dealt.layers[owner], points)
    return dealing.pick(dealt, owner, _Evaluate(dealing)(points, owner))


def _ways(layers: Int[NumpyArray, " stages"], common: bool) -> Int[NumpyArray, "points stages"]:
    if common:
        return np.minimum(np.arange(layers.max() + 1)[:, None], layers)
    count = math.prod((layers + 1).tolist())
    if count > MOST:
        raise TooManyError(f"{count:.3g} ways to recompute: at most {MOST} are tried")
    return np.stack(np.unravel_index(np.arange(count), tuple(layers + 1)), axis=1)


def _shares(variables: Array, pair: Pair) -> StageLayers:
    return StageLayers(pair.dealt.layers, jax.nn.sigmoid(variables) * pair.dealt.layers)


class _Evaluate:
    """Step times of numbers of recomputed layers, with a count of them."""

    def __init__(self, dealing: Dealing) -> None:
        self.dealing, self.count = dealing, 0

    def __call__(
        self, recomputed: Int[NumpyArray, "points stages"], owner: Int[NumpyArray, " points"]
    ) -> Float[NumpyArray, " points"]:
        """Return step times [s]; fewer than none or more than all is not legal."""
        layers = self.dealing.problem.pairs.dealt.layers[owner]
        times = np.full(len(recomputed), np.inf)
        legal = np.flatnonzero(((recomputed >= 0) & (recomputed <= layers)).all(axis=1))
        self.count += len(legal)
        if len(legal):
            dealt = StageLayers(layers[legal], recomputed[legal])
            times[legal] = self.dealing.step_times(dealt, owner[legal])
        return times
