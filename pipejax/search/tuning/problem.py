"""Inputs of every tuning method: a model on a system under a family of schedules."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pipejax import schedules
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.costs.costs import Costs
from pipejax.costs.model.workload import PricingShape, StageLayers, Workload, assign_layers
from pipejax.costs.planning import build_for_run, is_planned
from pipejax.costs.stage.slices import check_whole
from pipejax.costs.stage.stage_costs import check_machine, costs_of_microbatch, costs_of_shape
from pipejax.costs.stage.stage_work import stage_bytes
from pipejax.costs.system.system import System
from pipejax.engine.batched.makespans import makespans
from pipejax.engine.batched.pricing import batch_length, padded, priced_on_host
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program, makespan_on_host
from pipejax.engine.pricing import cost_vector, program_for
from pipejax.schedules.registry import check_size
from pipejax.schedules.table.held_activations import HeldCounts, held_counts
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

FEW_RUNS = 8  # number of makespans up to which the host is faster than compilation
PerConfiguration = Float[NumpyArray, " batch"]


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleFamily:
    """Tables of one schedule for any number of microbatches; each is built once, at first use."""

    schedule: str  # name of the schedule
    num_workers: int  # P
    # further options of the schedule, as for `schedules.build`
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    link: str | Links = "delay"  # link model, or `Links`
    # function from a table to its costs, for a schedule that is planned for the run's times
    price: Callable[[ScheduleTable], Costs] | None = None

    @functools.cached_property
    def is_planned(self) -> bool:
        """Return whether the order of the schedule follows from the run's times."""
        return is_planned(schedules.find(self.schedule), self.options)

    @functools.cached_property
    def usual_microbatches(self) -> int:
        """Return a legal number of microbatches: 4 P, or the number of a table from a file."""
        file_sizes = schedules.find(self.schedule).sizes
        count = 4 * self.num_workers if file_sizes is None else file_sizes[1]
        if refusal := self.refusal(count):
            raise ValueError(refusal)
        return count

    @functools.cached_property
    def table(self) -> Callable[[int], ScheduleTable]:
        """Return a cached function from the number of microbatches to the table."""
        return functools.cache(self._build)

    def _build(self, num_microbatches: int) -> ScheduleTable:
        size = {"num_workers": self.num_workers, "num_microbatches": num_microbatches}
        if not self.is_planned:
            return schedules.build(self.schedule, **size, **self.options)
        if self.price is None:
            raise ValueError(f"{self.schedule} is planned for the times of one run")
        return build_for_run(schedules.find(self.schedule), size, self.options, self.price)

    @functools.cached_property
    def lowered(self) -> Callable[[int], tuple[Program, HeldCounts]]:
        """Return a cached function from M to the program of a step and the held activations."""

        def lower_table(num_microbatches: int) -> tuple[Program, HeldCounts]:
            table = self.table(num_microbatches)
            return lower(table, link=self.link, step_end=True), held_counts(table)

        return functools.cache(lower_table)

    def check_size(self, num_microbatches: int) -> None:
        """Refuse a number of microbatches whose table exceeds the memory of this machine."""
        check_size(
            schedules.find(self.schedule),
            num_workers=self.num_workers,
            num_microbatches=num_microbatches,
            **self.options,
        )

    def refusal(self, num_microbatches: int) -> str:
        """Return why the schedule does not exist for M microbatches; empty if it exists."""
        try:
            self.table(num_microbatches)
        except MismatchError as error:
            return str(error)
        return ""


def price(workload: Workload, system: System, table: ScheduleTable) -> Costs:
    """Price a table; its number of microbatches need not divide the minibatch."""
    size = workload.minibatch / table.num_microbatches
    return costs_of_microbatch(workload.model, system, workload, table, size)


@dataclasses.dataclass(frozen=True, eq=False)
class TuningProblem:
    """A model on a system under a family of schedules, the input of every tuning method."""

    family: ScheduleFamily  # the schedule
    workload: Workload  # model, parallelism and recomputation
    system: System  # the machine
    assigned: StageLayers  # layers and recomputed layers of each stage
    capacity: float  # memory limit [B]; infinite without a limit

    @classmethod
    def from_workload(
        cls,
        family: ScheduleFamily,
        workload: Workload,
        system: System,
        *,
        memory_limit: bool = True,
    ) -> "TuningProblem":
        """Make a tuning problem that starts from the layers that the workload assigns."""
        table = family.table(family.usual_microbatches)
        check_whole(table, "tuning")
        if workload.stragglers and (table.placement != table.placement[0]).any():
            raise ValueError(
                "stragglers: with a stage on several workers, a slow worker makes costs differ by "
                "microbatch, but tuning assumes equal microbatches"
            )
        assigned = StageLayers(*map(np.asarray, assign_layers(workload, table)))
        check_machine(workload, system)
        limit = float(system.memory_available) if memory_limit else math.inf
        return cls(family, workload, system, assigned, limit)

    def evaluate_batch(
        self, num_microbatches: int, assigned: StageLayers
    ) -> tuple[PerConfiguration, PerConfiguration]:
        """Return step times [s] and memory needs [B] of a batch of layer assignments."""
        size, table = len(assigned.layers), self.family.table(num_microbatches)  # size of the batch
        program, held_counts = self.family.lowered(num_microbatches)
        microbatch_size = self.workload.minibatch / num_microbatches

        def price_one(shape: PricingShape, assigned: StageLayers, _: tuple[()]) -> tuple[Any, Any]:
            """Return the costs and the memory need of one assignment; `_` is unused."""
            model = shape.workload.model
            costs = costs_of_shape(shape, model, self.system, assigned, microbatch_size)
            memory = stage_bytes(*shape, assigned, microbatch_size)
            static = held_counts.static_bytes(memory.static, memory.version)
            return costs, (static + held_counts.activation_bytes(memory.parts)).max(axis=-1)

        batch_shape = PricingShape(self.workload, table)
        (costs, needs), _ = priced_on_host(price_one, batch_shape, assigned, ())
        if size > FEW_RUNS:  # the batch is padded to one of a few lengths, so few programs compile
            costs = padded(costs, size)
            times = makespans(program, costs, batch_size=batch_length(costs), unroll=False)
            return np.asarray(times)[:size], np.asarray(needs)[:size]
        times = np.empty(size)
        for k in range(size):
            row_costs = jax.tree.map(lambda leaf, k=k: leaf[k], costs)
            row_program = program_for(program, row_costs)  # per microbatch, if these costs are
            vector = np.asarray(cost_vector(row_program, row_costs))
            times[k] = makespan_on_host(row_program, vector)
        return times, np.asarray(needs)[:size]

    def evaluate(self, num_microbatches: int, assigned: StageLayers) -> tuple[float, float]:
        """Return the exact step time [s] and memory need [B] of a layer assignment."""
        batch = StageLayers(*(np.asarray(stages, float)[None] for stages in assigned))
        (step,), (need,) = self.evaluate_batch(num_microbatches, batch)
        return float(step), float(need)
