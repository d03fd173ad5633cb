"""How layers are assigned, and how many are recomputed: step time and memory by stage.

At a given number of microbatches both are functions of whole numbers of layers per stage that make
sense in between, so that they are relaxed, descended and rounded in the same way.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.costs.costs import Costs
from pipejax.costs.workload import StageLayers
from pipejax.search.tuning.descent import descend
from pipejax.search.tuning.microbatch_sizes import OVERRUN, TuningProblem
from pipejax.search.tuning.step_time_objective import StepTimeObjective, in_bucket
from pipejax.search.tuning.workload_system_pairs import (
    Pair,
    lasting_bytes,
    pair_bytes,
    pair_costs,
    peak_bytes,
)

Points = Int[NumpyArray, "points stages"]
AssignedOf = Callable[[Array, Pair], StageLayers]


class TunedLayers(NamedTuple):
    """Whole layers of each stage, for each pair.

    Attributes:
      layers: (pairs, stages) layers.
      recomputed: (pairs, stages) those of them that are recomputed.
      step_time: (pairs) exact [s].
      memory_bytes: (pairs) need of the fullest worker [B].
      relaxed_layers: (pairs, stages) best of the relaxation; whole after an exhaustive search.
      relaxed_recomputed: (pairs, stages) likewise.
      relaxed_step_time: (pairs) [s], with the penalty of memory beyond the limit.
      evaluated: points that were evaluated exactly, over all pairs.
    """

    layers: Int[NumpyArray, "pairs stages"]
    recomputed: Int[NumpyArray, "pairs stages"]
    step_time: Float[NumpyArray, " pairs"]
    memory_bytes: Float[NumpyArray, " pairs"]
    relaxed_layers: Float[NumpyArray, "pairs stages"]
    relaxed_recomputed: Float[NumpyArray, "pairs stages"]
    relaxed_step_time: Float[NumpyArray, " pairs"]
    evaluated: int


@dataclasses.dataclass(frozen=True, eq=False)
class LayerAssignment:
    """Pairs under one schedule with one number of microbatches.

    Attributes:
      problem: the pairs.
      num_microbatches: M, which divides every minibatch.
    """

    problem: TuningProblem
    num_microbatches: int

    def __post_init__(self) -> None:
        """Check that M divides the minibatches and that the schedule exists."""
        for total in np.unique(self.problem.pairs.minibatch).astype(int).tolist():
            if total % self.num_microbatches:
                raise ValueError(
                    f"{self.num_microbatches} microbatches do not divide a minibatch of {total}"
                )
        self.problem.family.table(self.num_microbatches)

    def relaxed(self, assigned_of: AssignedOf) -> StepTimeObjective:
        """Step time, with a penalty where memory is short, by variables of any kind."""

        def value(variables: Array, ends: Array, given: tuple[Pair, Array]) -> Array:
            pair, capacity = given
            need = self._need(assigned_of(variables, pair), pair)
            return ends[0] * (1 + OVERRUN * jnp.maximum(need / capacity - 1, 0))

        return StepTimeObjective(
            programs=(self.problem.family.program(self.num_microbatches),),
            price=lambda variables, given: self._price(assigned_of(variables, given[0]), given[0]),
            value=value,
        )

    def descend(
        self,
        assigned_of: AssignedOf,
        starts: Float[NumpyArray, "starts pairs ..."],
        *,
        steps: int,
        rate: float,
    ) -> tuple[StageLayers, Float[NumpyArray, "starts pairs"]]:
        """Descend from several starts of each pair.

        Returns (starts, pairs, stages) relaxed layers, and their values [s].
        """
        count, pairs = starts.shape[:2]
        owner = np.tile(np.arange(pairs), count)
        given = self.given(owner)
        objective = self._once(assigned_of, lambda: self.relaxed(assigned_of))
        flat = starts.reshape(count * pairs, -1)
        first, given = in_bucket((flat, given), len(flat))
        found = descend(lambda x: objective.value_and_grad(x, given), first, steps=steps, rate=rate)
        of_all = self._once(("assigned", assigned_of), lambda: jax.jit(jax.vmap(assigned_of)))
        assigned = of_all(found.points, given[0])
        layers, recomputed = (
            np.asarray(each)[: len(flat)].reshape(count, pairs, -1) for each in assigned
        )
        return StageLayers(layers, recomputed), found.values[: len(flat)].reshape(count, pairs)

    def given(self, owner: Int[NumpyArray, " points"]) -> tuple[Pair, NumpyArray]:
        """Return pairs and capacities of points."""
        return jax.tree.map(lambda leaf: leaf[owner], (self.problem.pairs, self.problem.capacity))

    def step_times(
        self, assigned: StageLayers, owner: Int[NumpyArray, " points"]
    ) -> Float[NumpyArray, " points"]:
        """Evaluate layers exactly: step times [s], infinite where memory is short."""
        as_floats = StageLayers(*(np.asarray(each, float) for each in assigned))
        given = self.given(owner)
        times = self._exact.values(as_floats, given)
        return np.where(self.memory_bytes(assigned, owner) <= given[1], times, np.inf)

    def memory_bytes(
        self, assigned: StageLayers, owner: Int[NumpyArray, " points"]
    ) -> Float[NumpyArray, " points"]:
        """Need of the fullest worker [B]."""
        as_floats = StageLayers(*(np.asarray(each, float) for each in assigned))
        batch = in_bucket((as_floats, self.given(owner)[0]), len(owner))
        return np.asarray(self._needs(*batch))[: len(owner)]

    def pick(
        self,
        assigned: StageLayers,
        owner: Int[NumpyArray, " points"],
        times: Float[NumpyArray, " points"],
        relaxed: tuple[StageLayers, Float[NumpyArray, "starts pairs"]] | None = None,
        evaluated: int | None = None,
    ) -> TunedLayers:
        """Pick each pair's best point."""
        order = np.lexsort((times, owner))
        best = order[np.unique(owner[order], return_index=True)[1]]
        memory = self.memory_bytes(assigned, owner)
        for pair in np.flatnonzero(~np.isfinite(times[best])).tolist():
            which = f"pair {pair}: " if len(best) > 1 else ""
            raise ValueError(
                f"{which}nothing fits: the smallest need found is "
                f"{memory[owner == pair].min() / 1e9:.1f} GB per accelerator; the system has "
                f"{self.problem.capacity[pair] / 1e9:.1f} GB"
            )
        layers, recomputed = (np.asarray(each)[best] for each in assigned)
        soft, value = StageLayers(layers, recomputed), times[best]
        if relaxed is not None:
            first, pairs = relaxed[1].argmin(axis=0), np.arange(len(best))
            soft = StageLayers(*(each[first, pairs] for each in relaxed[0]))
            value = relaxed[1][first, pairs]
        return TunedLayers(
            layers=layers.astype(int),
            recomputed=recomputed.astype(int),
            step_time=times[best],
            memory_bytes=memory[best],
            relaxed_layers=np.asarray(soft.layers, float),
            relaxed_recomputed=np.asarray(soft.recomputed, float),
            relaxed_step_time=value,
            evaluated=len(owner) if evaluated is None else evaluated,
        )

    def _price(self, assigned: StageLayers, pair: Pair) -> Costs:
        problem, table = self.problem, self.problem.family.table(self.num_microbatches)
        own = pair._replace(assigned=assigned)
        return pair_costs(problem.workload, table, own, pair.minibatch / self.num_microbatches)

    def _need(self, assigned: StageLayers, pair: Pair) -> Array:
        table = self.problem.family.table(self.num_microbatches)
        held = self.problem.family.held(self.num_microbatches)
        size = pair.minibatch / self.num_microbatches
        memory = pair_bytes(self.problem.workload, table, pair._replace(assigned=assigned), size)
        return jnp.max(lasting_bytes(held, memory) + peak_bytes(held, memory))

    @property
    def _exact(self) -> StepTimeObjective:
        def value(assigned: StageLayers, ends: Array, given: Any) -> Array:
            del assigned, given
            return ends[0]

        def make() -> StepTimeObjective:
            return StepTimeObjective(
                programs=(self.problem.family.program(self.num_microbatches),),
                price=lambda assigned, given: self._price(assigned, given[0]),
                value=value,
            )

        return self._once("exact", make)

    def _needs(self, assigned: StageLayers, pairs: Pair) -> Array:
        return self._once("need", lambda: jax.jit(jax.vmap(self._need)))(assigned, pairs)

    def _once(self, what: Hashable, make: Callable[[], Any]) -> Any:
        return self.problem.once((what, self.num_microbatches), make)


class Evaluate:
    """Step times of whole numbers by stage, with a count of the exact evaluations.

    Attributes:
      count: points that were evaluated.
    """

    def __init__(
        self,
        assignment: LayerAssignment,
        assigned_of: Callable[[Points, StageLayers], StageLayers],
        is_legal: Callable[[Points, StageLayers], NumpyArray],
    ) -> None:
        """Keep what points mean: layers of each stage, given the even split of their pairs."""
        self.assignment, self._dealt_of, self._is_legal = assignment, assigned_of, is_legal
        self.count = 0

    def assigned(self, points: Points, owner: Int[NumpyArray, " points"]) -> StageLayers:
        """Return the layers of each stage that points stand for.

        Returns (points, stages) layers, and those that are recomputed.
        """
        return self._dealt_of(points, self._given(owner))

    def __call__(
        self, points: Points, owner: Int[NumpyArray, " points"]
    ) -> Float[NumpyArray, " points"]:
        """Return step times [s]; infinite where a point is not legal or memory is short."""
        times = np.full(len(points), np.inf)
        legal = np.flatnonzero(self._is_legal(points, self._given(owner)))
        self.count += len(legal)
        if len(legal):
            own = owner[legal]
            times[legal] = self.assignment.step_times(self.assigned(points[legal], own), own)
        return times

    def _given(self, owner: Int[NumpyArray, " points"]) -> StageLayers:
        return StageLayers(
            *(np.asarray(part)[owner] for part in self.assignment.problem.pairs.assigned)
        )
