"""Whole numbers of layers by stage: how many a stage holds, and how many are recomputed.

At a given number of microbatches step time and memory are functions of them that make sense in
between. A `StageChoice` says what may be chosen; relaxation, descent, rounding, improvement by
one layer at a time and exact evaluation are the same for all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.costs.workload import StageLayers
from pipejax.search.tuning.problem import Owners, TuningProblem
from pipejax.search.tuning.rounding import improve
from pipejax.search.tuning.step_time_objective import Given, Relax

Points = Int[NumpyArray, "points stages"]


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
    """Find the whole numbers by stage that make the step shortest, by gradient.

    Args:
      problem: pairs under a schedule, with their memory limits.
      num_microbatches: M, which divides every minibatch.
      choice: what is chosen: `LAYERS` or `RECOMPUTED` of stage_choices.py.
      starts: starts of each pair.
      steps: gradients to take.
      seed: of random starts.

    Returns:
      The best of each pair.

    Raises:
      ValueError: if M does not divide a minibatch, or nothing fits.

    Example:
      >>> from pipejax import Workload, load_model, load_system
      >>> from pipejax.search.tuning.schedule_family import ScheduleFamily
      >>> from pipejax.search.tuning.stage_choices import LAYERS
      >>> workload = Workload(load_model("llama3-70b"), minibatch=16, tensor_parallel=8)
      >>> problem = TuningProblem.of(ScheduleFamily("1f1b", 4), [workload], [load_system("b200")])
      >>> tune_stages(problem, 16, LAYERS).layers.tolist()  # the best of all 79,079 splits
      [[21, 19, 20, 20]]
    """
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
    """Evaluate all that may be chosen; for few layers and stages.

    Raises:
      TooManyError: if there is more to evaluate than the limit of rounding.py.
    """
    layers, which = np.unique(
        problem.pairs.assigned.layers.astype(int), axis=0, return_inverse=True
    )
    every = [choice.every(each) for each in layers]
    points = np.concatenate([every[k] for k in which])
    owner = np.repeat(np.arange(len(which)), [len(every[k]) for k in which])
    evaluate = _Evaluate(problem, num_microbatches, choice)
    return evaluate.pick(points, owner, evaluate(points, owner))


class _Evaluate:
    """Step times of points, infinite where one is not legal or memory is short; counts them."""

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
