"""What is tuned: models on systems under one family of schedules."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.costs.pricing_shape import PricingShape
from pipejax.costs.system import Number, System
from pipejax.costs.workload import StageLayers, Workload
from pipejax.search.tuning.schedule_family import ScheduleFamily
from pipejax.search.tuning.step_time_objective import (
    Given,
    PerConfiguration,
    Relax,
    StepTimeObjective,
)
from pipejax.search.tuning.workload_system_pairs import Pair, stack_pairs

Owners = Int[NumpyArray, " batch"]  # pair of each configuration


@dataclasses.dataclass(frozen=True, eq=False)
class TuningProblem:
    """Pairs under one family of schedules, with what all ways to solve them need.

    Attributes:
      family: the schedule.
      workload: parallelism and recomputation, the same for all.
      pairs: models, systems, layers and minibatches.
      capacity: (pairs) memory limit, infinite for none [B].
    """

    family: ScheduleFamily
    workload: Workload
    pairs: Pair
    capacity: Float[NumpyArray, " pairs"]

    @classmethod
    def of(
        cls,
        family: ScheduleFamily,
        workloads: Sequence[Workload],
        systems: Sequence[System],
        *,
        memory_limit: bool = True,
    ) -> "TuningProblem":
        """Lay pairs out as arrays."""
        pairs = stack_pairs(workloads, systems, family.table(family.few_microbatches[0]))
        limit = pairs.system.memory_capacity
        capacity = np.asarray(limit) if memory_limit else np.full(len(workloads), np.inf)
        return cls(family, workloads[0], pairs, capacity)

    @functools.cached_property
    def shape(self) -> PricingShape:
        """What the prices of all pairs are compiled for."""
        return PricingShape.of(self.workload, self.family.table(self.family.few_microbatches[0]))

    def objective(self, relax: Relax, *counts: int) -> StepTimeObjective:
        """Step time by variables of any kind, from the programs of so many microbatches."""
        programs, held = map(self.family.program, counts), map(self.family.held, counts)
        return StepTimeObjective(counts, tuple(programs), tuple(held), self.shape, relax)

    def given(self, owner: Owners, num_microbatches: int = 1, *, limited: bool = True) -> Given:
        """What the step time takes, for configurations of pairs."""
        for total in np.unique(self.pairs.minibatch[owner]).astype(int).tolist():
            if total % num_microbatches:
                raise ValueError(
                    f"{num_microbatches} microbatches do not divide a minibatch of {total}"
                )
        pair = jax.tree.map(lambda leaf: leaf[owner], self.pairs)
        capacity = self.capacity[owner] if limited else np.full(len(owner), np.inf)
        return Given(pair, pair.minibatch / num_microbatches, capacity, np.zeros(len(owner)))

    def evaluate(
        self, num_microbatches: int, assigned: StageLayers, owner: Owners
    ) -> tuple[PerConfiguration, PerConfiguration]:
        """Evaluate layers of each stage exactly: (batch) step times [s], and needs [B]."""
        objective = self.objective(_as_they_are, num_microbatches)
        layers = StageLayers(*(np.asarray(each, float) for each in assigned))
        return objective.evaluate(layers, self.given(owner, num_microbatches, limited=False))


def _as_they_are(assigned: StageLayers, given: Given) -> tuple[Pair, Number]:
    return given.pair._replace(assigned=assigned), given.size
