"""Inputs of every tuning method: a model on a system under a family of schedules."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pipejax import schedules
from pipejax.base.checks import MismatchError
from pipejax.costs.costs import Costs
from pipejax.costs.model.workload import PricingShape, StageLayers, Workload, assign_layers
from pipejax.costs.planning import build_for_run, is_planned
from pipejax.costs.stage.slices import check_whole
from pipejax.costs.stage.stage_costs import check_machine, costs_of_microbatch
from pipejax.costs.system.system import Number, System
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program
from pipejax.schedules.registry import check_size
from pipejax.schedules.table.held_activations import HeldCounts, held_counts
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.tuning.step_time_objective import Inputs, Pair, Relax, StepTimeObjective


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleFamily:
    """Tables of one schedule on so many workers, each built once at first use."""

    schedule: str  # name of the schedule
    num_workers: int  # P
    # what the schedule takes besides, as for `schedules.build`
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    link: str | Links = "delay"  # link model, or `Links`
    # returns the costs of a table, for a schedule that is planned for the run's times
    price: Callable[[ScheduleTable], Costs] | None = None

    @functools.cached_property
    def is_planned(self) -> bool:
        """Return whether the order of the schedule follows from the run's times."""
        return is_planned(schedules.find(self.schedule), self.options)

    @functools.cached_property
    def few_microbatches(self) -> tuple[int, ...]:
        """List microbatch counts at which a relaxation interpolates: 1 or 2, P, 2 P and 4 P."""
        # Counts without a schedule are skipped; a table from a file has its own count alone.
        file_sizes = schedules.find(self.schedule).sizes
        if file_sizes is not None:
            if self.refusal(file_sizes[1]):
                raise ValueError(self.refusal(file_sizes[1]))
            return (file_sizes[1],)
        few = [count for count in (1, 2) if not self.refusal(count)][:1]
        many = [times * self.num_workers for times in (1, 2, 4)]
        if self.refusal(many[-1]):
            raise ValueError(self.refusal(many[-1]))
        return tuple(sorted({*few, *(count for count in many if not self.refusal(count))}))

    @functools.cached_property
    def table(self) -> Callable[[int], ScheduleTable]:
        """Return a cached function from M to the table."""

        def build(num_microbatches: int) -> ScheduleTable:
            size = {"num_workers": self.num_workers, "num_microbatches": num_microbatches}
            if not self.is_planned:
                return schedules.build(self.schedule, **size, **self.options)
            if self.price is None:
                raise ValueError(f"{self.schedule} is planned for the times of one run")
            builder = schedules.find(self.schedule)
            return build_for_run(builder, size, self.options, self.price)

        return functools.cache(build)

    def program(self, num_microbatches: int) -> Program:
        """Return the program for M microbatches, with all-reduce and update."""
        return lower(self.table(num_microbatches), link=self.link, step_end=True)

    @functools.cached_property
    def held(self) -> Callable[[int], HeldCounts]:
        """Return a cached function from M to the counts that workers hold; few shapes are made."""

        def make(num_microbatches: int) -> HeldCounts:
            held = held_counts(self.table(num_microbatches))
            moments = held.parts.shape[-1]
            fill = 2 ** math.ceil(math.log2(moments)) - moments
            return held._replace(parts=np.pad(held.parts, [*[(0, 0)] * 3, (0, fill)]))

        return functools.cache(make)

    def check_size(self, num_microbatches: int) -> None:
        """Refuse so many microbatches if their table cannot fit into the memory of this machine."""
        check_size(
            schedules.find(self.schedule),
            num_workers=self.num_workers,
            num_microbatches=num_microbatches,
            **self.options,
        )

    def refusal(self, num_microbatches: int) -> str:
        """Say why the schedule does not exist for M microbatches; nothing if it does."""
        try:
            self.table(num_microbatches)
        except MismatchError as error:
            return str(error)
        return ""


def price(workload: Workload, system: System, table: ScheduleTable) -> Costs:
    """Price a table of any M: a relaxation takes those that do not divide the minibatch, too."""
    size = workload.minibatch / table.num_microbatches
    return costs_of_microbatch(workload.model, system, workload, table, size)


@dataclasses.dataclass(frozen=True, eq=False)
class TuningProblem:
    """A model on a system under a family of schedules, the input of every tuning method."""

    family: ScheduleFamily  # the schedule
    workload: Workload  # model, parallelism and recomputation
    pair: Pair  # numbers of the model and the system, layers and minibatch
    capacity: float  # memory limit, infinite for none [B]

    @classmethod
    def from_workload(
        cls,
        family: ScheduleFamily,
        workload: Workload,
        system: System,
        *,
        memory_limit: bool = True,
    ) -> "TuningProblem":
        """Turn the model and the system into trees of numbers."""
        table = family.table(family.few_microbatches[0])
        check_whole(table, "tuning")
        if workload.stragglers and (table.placement != table.placement[0]).any():
            raise ValueError(
                "stragglers: where pipes place a stage on several workers, slow ones make costs "
                "differ by microbatch, and tuning takes microbatches as alike"
            )
        assigned = StageLayers(*map(np.asarray, assign_layers(workload, table)))
        minibatch = np.array(workload.minibatch, float)
        pair = Pair(_numbers(workload.model), _numbers(system), assigned, minibatch)
        check_machine(workload, system)
        limit = float(pair.system.memory_available) if memory_limit else math.inf
        return cls(family, workload, pair, limit)

    @functools.cached_property
    def shape(self) -> PricingShape:
        """Return the static argument of the compiled prices."""
        return PricingShape.from_workload(
            self.workload, self.family.table(self.family.few_microbatches[-1])
        )

    def objective(self, relax: Relax, *counts: int) -> StepTimeObjective:
        """Step time by variables of any kind, from the programs of so many microbatches."""
        programs, held = map(self.family.program, counts), map(self.family.held, counts)
        return StepTimeObjective(counts, tuple(programs), tuple(held), self.shape, relax)

    def inputs(self, size: int, num_microbatches: int = 1, *, limited: bool = True) -> Inputs:
        """Return the fixed inputs of the step time for a batch of configurations."""
        total = self.workload.minibatch
        if total % num_microbatches:
            raise ValueError(
                f"{num_microbatches} microbatches do not divide a minibatch of {total}"
            )
        pair = jax.tree.map(lambda leaf: np.repeat(leaf[None], size, axis=0), self.pair)
        capacity = np.full(size, self.capacity if limited else np.inf)
        return Inputs(pair, pair.minibatch / num_microbatches, capacity)

    def evaluate(self, num_microbatches: int, assigned: StageLayers) -> tuple[float, float]:
        """Evaluate layers of each stage exactly: step time [s], and need [B]."""
        objective = self.objective(identity_relaxation, num_microbatches)
        layers = StageLayers(*(np.asarray(stages, float)[None] for stages in assigned))
        (step,), (need,) = objective.evaluate(
            layers, self.inputs(1, num_microbatches, limited=False)
        )
        return float(step), float(need)


def identity_relaxation(assigned: StageLayers, inputs: Inputs) -> tuple[Pair, Number]:
    """Return the pair with these layers: the variables are the layers themselves."""
    return inputs.pair._replace(assigned=assigned), inputs.size


def _numbers(record: Any) -> Any:
    """Turn a record into a tree of arrays, whose name compiles nothing anew."""
    record = dataclasses.replace(record, name="", source="")
    return jax.tree.map(lambda leaf: np.array(leaf, float), record)
