"""Whole numbers of layers by stage: how many a stage holds, and how many are recomputed.

At a given number of microbatches step time and memory are functions of them that make sense in
between. A `StageChoice` says what may be chosen; relaxation, descent, rounding, improvement by
one layer at a time and exact evaluation are the same for all. Stages that hold embedding or head,
or wait for messages, take fewer layers; of those that are recomputed there are as few as memory
allows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.costs.model.workload import StageLayers
from pipejax.costs.system.system import Number
from pipejax.search.tuning.problem import Owners, TuningProblem
from pipejax.search.tuning.rounding import (
    MOST,
    Points,
    TooManyError,
    compositions,
    improve,
    swaps,
    whole_with_sum,
)
from pipejax.search.tuning.step_time_objective import Given, Pair, Relax


class StageChoice(NamedTuple):
    """What may be chosen for every stage, as whole numbers.

    `given` stands for the layers that each pair has by the table's shares.

    Attributes:
      relax: what variables mean: a pair with real layers.
      starts: (number of starts, seed, (pairs, stages)) -> variables to descend from.
      rate: first step size of the descent.
      whole: relaxed layers -> points.
      plain: given -> points that need no descent, of which one is legal if any is.
      moves: stages -> changes to a neighbour.
      assign: (points, given) -> layers.
      is_legal: (points, given) -> which of them may be.
      every: layers of one pair -> all its points.
    """

    relax: Relax
    starts: Callable[[int, int, tuple[int, ...]], Float[NumpyArray, "starts pairs stages"]]
    rate: float
    whole: Callable[[StageLayers], Points]
    plain: Callable[[StageLayers], Points]
    moves: Callable[[int], Int[NumpyArray, "moves stages"]]
    assign: Callable[[Points, StageLayers], StageLayers]
    is_legal: Callable[[Points, StageLayers], NumpyArray]
    every: Callable[[Int[NumpyArray, " stages"]], Points]


class TunedLayers(NamedTuple):
    """Whole layers of each stage, for each pair.

    Attributes:
      layers: (pairs, stages) layers.
      recomputed: (pairs, stages) those of them that are recomputed.
      step_time: (pairs) exact [s].
      memory_bytes: (pairs) need of the fullest worker [B].
      evaluated: points that were evaluated exactly, over all pairs.
      relaxed: (pairs, stages) best of the relaxation; None after an exhaustive search.
      relaxed_step_time: (pairs) [s], with the penalty of memory beyond the limit.
    """

    layers: Int[NumpyArray, "pairs stages"]
    recomputed: Int[NumpyArray, "pairs stages"]
    step_time: Float[NumpyArray, " pairs"]
    memory_bytes: Float[NumpyArray, " pairs"]
    evaluated: int
    relaxed: StageLayers | None = None
    relaxed_step_time: Float[NumpyArray, " pairs"] | None = None


def tune_stages(
    problem: TuningProblem,
    num_microbatches: int,
    choice: StageChoice,
    *,
    starts: int = 8,
    steps: int = 60,
    seed: int = 0,
) -> TunedLayers:
    """Find the whole numbers by stage that make the step shortest, by gradient."""
    even = problem.pairs.assigned
    pairs, stages = even.layers.shape
    owner = np.arange(pairs)
    found = problem.objective(choice.relax, num_microbatches).minima(
        choice.starts(starts, seed, (pairs, stages)),
        problem.given(owner, num_microbatches),
        steps=steps,
        rate=choice.rate,
    )
    given = problem.given(np.tile(owner, starts))
    every = _relaxed(found.points.reshape(-1, stages), given, relax=choice.relax)
    soft = StageLayers(*map(np.asarray, every))
    points = np.concatenate([choice.whole(soft), choice.plain(even)])
    owner = np.tile(owner, len(points) // pairs)
    evaluate = _Evaluate(problem, num_microbatches, choice)
    points, times = improve(points, owner, choice.moves(stages), evaluate)
    best = found.values.argmin(axis=0) * pairs + np.arange(pairs)
    return evaluate.pick(points, owner, times)._replace(
        relaxed=_of(soft, best), relaxed_step_time=found.values.min(axis=0)
    )


def search_stages(
    problem: TuningProblem, num_microbatches: int, choice: StageChoice
) -> TunedLayers:
    """Evaluate all choices exhaustively, for few layers and stages."""
    layers, which = np.unique(
        problem.pairs.assigned.layers.astype(int), axis=0, return_inverse=True
    )
    every = [choice.every(each) for each in layers]
    points = np.concatenate([every[k] for k in which])
    owner = np.repeat(np.arange(len(which)), [len(every[k]) for k in which])
    evaluate = _Evaluate(problem, num_microbatches, choice)
    return evaluate.pick(points, owner, evaluate(points, owner))


class _Evaluate:
    """Step times of points, infinite where illegal or out of memory; counts evaluations."""

    def __init__(self, problem: TuningProblem, microbatches: int, choice: StageChoice) -> None:
        self.problem, self.microbatches, self.choice = problem, microbatches, choice
        self.count = 0

    def __call__(self, points: Points, owner: Owners) -> Float[NumpyArray, " points"]:
        times = np.full(len(points), np.inf)
        even = self.problem.pairs.assigned
        legal = np.flatnonzero(self.choice.is_legal(points, _of(even, owner)))
        self.count += len(legal)
        if len(legal):
            step, need = self.exact(points[legal], owner[legal])
            times[legal] = np.where(need <= self.problem.capacity[owner[legal]], step, np.inf)
        return times

    def exact(self, points: Points, owner: Owners) -> Any:
        """Step times [s] and needs [B] of legal points."""
        assigned = self.choice.assign(points, _of(self.problem.pairs.assigned, owner))
        return self.problem.evaluate(self.microbatches, assigned, owner)

    def pick(
        self, points: Points, owner: Owners, times: Float[NumpyArray, " points"]
    ) -> TunedLayers:
        """Pick each pair's best point."""
        order = np.lexsort((times, owner))
        best = order[np.unique(owner[order], return_index=True)[1]]
        for pair in np.flatnonzero(~np.isfinite(times[best])).tolist():
            which = f"pair {pair}: " if len(best) > 1 else ""
            own = owner == pair
            raise ValueError(
                f"{which}nothing fits: the smallest need found is "
                f"{self.exact(points[own], owner[own])[1].min() / 1e9:.1f} GB per accelerator; "
                f"the system has {self.problem.capacity[pair] / 1e9:.1f} GB"
            )
        assigned = self.choice.assign(points[best], _of(self.problem.pairs.assigned, owner[best]))
        layers, recomputed = (np.asarray(each).astype(int) for each in assigned)
        need = self.exact(points[best], owner[best])[1]
        return TunedLayers(layers, recomputed, times[best], need, self.count)


def _of(tree: Any, owner: Owners) -> Any:
    return jax.tree.map(lambda leaf: leaf[owner], tree)


@functools.partial(jax.jit, static_argnames="relax")
def _relaxed(
    variables: Float[NumpyArray, "points stages"], given: Given, *, relax: Relax
) -> StageLayers:
    return jax.vmap(lambda one, of: relax(one, of)[0].assigned)(variables, given)


SPREAD = 0.5  # of the starts, in logarithms of shares


def _split(variables: Array, given: Given) -> tuple[Pair, Number]:
    """One layer for each stage, the rest by a softmax; recomputed as the even split is."""
    even, recomputed = given.pair.assigned
    layers = 1 + jax.nn.softmax(variables) * (even.sum() - len(even))
    assigned = StageLayers(layers, layers * recomputed / even)
    return given.pair._replace(assigned=assigned), given.size


def _even_and_random(
    starts: int, seed: int, shape: tuple[int, ...]
) -> Float[NumpyArray, "starts pairs stages"]:
    noise = np.random.default_rng(seed).normal(0, SPREAD, (starts, *shape))
    noise[0] = 0
    return noise


def _with_recomputed(layers: Points, given: StageLayers) -> StageLayers:
    """Recompute on the stages where the even split does: all layers or none."""
    return StageLayers(layers, layers * (np.asarray(given.recomputed) > 0))


LAYERS = StageChoice(
    relax=_split,
    starts=_even_and_random,
    rate=0.1,
    whole=lambda relaxed: whole_with_sum(np.asarray(relaxed.layers)),
    plain=lambda given: np.asarray(given.layers, int),
    moves=swaps,
    assign=_with_recomputed,
    is_legal=lambda layers, given: layers.min(axis=1) >= 1,
    every=lambda layers: compositions(int(layers.sum()), len(layers)),
)


def _share(variables: Array, given: Given) -> tuple[Pair, Number]:
    layers = given.pair.assigned.layers
    assigned = StageLayers(layers, jax.nn.sigmoid(variables) * layers)
    return given.pair._replace(assigned=assigned), given.size


def _few_to_most(
    starts: int, seed: int, shape: tuple[int, ...]
) -> Float[NumpyArray, "starts pairs stages"]:
    """Start from hardly any to nearly all layers, the same on every stage."""
    del seed
    return np.broadcast_to(np.linspace(-3, 3, starts)[:, None, None], (starts, *shape))


def _one_more_or_less(stages: int) -> Int[NumpyArray, "moves stages"]:
    one = np.eye(stages, dtype=int)
    return np.concatenate([-one, one, swaps(stages)])


def _in_range(recomputed: Points, given: StageLayers) -> Bool[NumpyArray, " points"]:
    """Fewer than none and more than all layers cannot be recomputed."""
    in_range = (recomputed >= 0) & (recomputed <= np.asarray(given.layers))
    return np.asarray(in_range.all(axis=1))


def _every(layers: Int[NumpyArray, " stages"]) -> Points:
    count = math.prod((layers + 1).tolist())
    if count > MOST:
        raise TooManyError(f"{count:.3g} ways to recompute: at most {MOST} are tried")
    return np.stack(np.unravel_index(np.arange(count), tuple(layers + 1)), axis=1)


RECOMPUTED = StageChoice(
    relax=_share,
    starts=_few_to_most,
    rate=0.3,
    # up: what fits in the relaxation fits then, too
    whole=lambda relaxed: np.ceil(relaxed.recomputed - 1e-6).astype(int),
    plain=lambda given: np.concatenate([0 * given.layers, given.layers]).astype(int),
    moves=_one_more_or_less,
    assign=lambda recomputed, given: StageLayers(given.layers, recomputed),
    is_legal=_in_range,
    every=_every,
)
# where there are too many ways: the same number on every stage
RECOMPUTED_ALIKE = RECOMPUTED._replace(
    every=lambda layers: np.minimum(np.arange(layers.max() + 1)[:, None], layers)
)
