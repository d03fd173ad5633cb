"""Setups: a table at costs over links, with the changes made to it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from pipejax.analysis.runs.activation_memory import activation_memory
from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.analysis.step.faults import ComputeTimes, Fault, find_faults
from pipejax.analysis.step.step_parts import Part, step_parts
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, whole_number, wrong
from pipejax.base.display import short_repr, with_short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.model.workload import Workload
from pipejax.costs.planning import for_times
from pipejax.costs.scaling import restaged_costs, scaled_costs, shares_of_stages
from pipejax.costs.stage.microbatches import in_order
from pipejax.costs.stage.model_topology import model_placements
from pipejax.costs.stage.stage_costs import stage_costs
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.costs.system.system import System
from pipejax.costs.topology import PlacedCosts
from pipejax.schedules.naming import find
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.bounds import lower_bound
from pipejax.search.schedule.problem import build_problem

Needs = Float[NumpyArray, " workers"]


@runtime_checkable
class Source(Protocol):
    """Source of the costs of any table: measured times, or a model on a system."""

    @property
    def workload(self) -> Workload | None:
        """Workload of the model; None for measured times."""

    @property
    def system(self) -> System | None:
        """Machine of the model; None for measured times."""

    def table_costs(self, table: ScheduleTable) -> Costs:
        """Return the costs of a table."""

    def with_workload(self, workload: Workload) -> "Source":
        """Return a source for another workload; measured times stay."""

    @property
    def placed(self) -> Callable[[ScheduleTable], PlacedCosts] | None:
        """Function from a table to its costs by place; None for measured times."""

    @property
    def places(self) -> tuple[int, ...]:
        """Place of each worker; empty for the order of the workers."""

    def with_places(self, places: tuple[int, ...]) -> "Source":
        """Return a source with other places of the workers; measured times stay."""


class MeasuredTimes(NamedTuple):
    """Times that were measured on the stages of one table."""

    costs: Costs  # the times [s]
    stages: int  # number of stages that the times cover
    workload: None = None
    system: None = None
    placed: None = None
    places: tuple[int, ...] = ()
    is_of_stages: bool = True

    def table_costs(self, table: ScheduleTable) -> Costs:
        """Merge or divide the stages to match a table."""
        return restaged_costs(self.costs, self.stages, table)

    def with_workload(self, workload: Workload) -> "MeasuredTimes":
        """Return self: measured times have no workload."""
        del workload
        return self

    def with_places(self, places: tuple[int, ...]) -> "MeasuredTimes":
        """Return self: measured times have no machine."""
        del places
        return self


class ModelTimes(NamedTuple):
    """Times of a model on a system."""

    workload: Workload
    system: System

    def table_costs(self, table: ScheduleTable) -> Costs:
        """Price a table by the model."""
        return stage_costs(self.workload, self.system, table)

    def with_workload(self, workload: Workload) -> "ModelTimes":
        """Return a source for another workload."""
        return self._replace(workload=workload)

    def placed(self, table: ScheduleTable) -> PlacedCosts:
        """Price a table by the places of its workers."""
        return model_placements(self.workload, self.system, table)

    @property
    def places(self) -> tuple[int, ...]:
        """Place of each worker."""
        return tuple(self.workload.worker_places)

    def with_places(self, places: tuple[int, ...]) -> "ModelTimes":
        """Return a source with other places of the workers."""
        return self.with_workload(dataclasses.replace(self.workload, worker_places=places))


@short_repr
class Schedule(NamedTuple):
    """A schedule that can be built for other sizes."""

    name: str  # of its builder
    options: Mapping[str, Any]  # of its builder, as the user set them
    # the options with the times of the plan; empty for a schedule that is not planned
    plan: Mapping[str, Any] = MappingProxyType({})

    def build(self, size: Mapping[str, int]) -> ScheduleTable:
        """Build the table for these workers and microbatches."""
        return find(self.name).function(**size, **(self.plan or self.options))

    @property
    def plan_options(self) -> dict[str, str | None]:
        """Return options of the command line that reproduce the plan for any times."""
        return {PLAN_OPTIONS.get(name, name): _option(value) for name, value in self.plan.items()}


# names of builder options on the command line, if they differ
PLAN_OPTIONS = {"transfer": "planned_comm", "offload": "planned_offload", "load": "planned_load"}


def _option(value: Any) -> str:
    """Format the value of an option for the command line."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={entry!r}" for key, entry in value.items())
    return ",".join(map(repr, value)) if isinstance(value, list) else str(value)


@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A table at costs over links, with the changes made to it."""

    table: ScheduleTable
    links: Links
    source: Source  # of the costs
    schedule: Schedule | None = None  # builder of the table, if known
    rules: tuple[str, ...] = ()  # that scale the costs, see `scaled_costs`
    size: float = 1.0  # of a microbatch, relative to the unchanged run
    order: tuple[int, ...] = ()  # microbatch that the table runs as number k; unchanged if empty
    layers: tuple[int, ...] = ()  # of each measured stage, if known
    # changed options of the command line; None for dropped ones
    options: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    assumes: tuple[str, ...] = ()  # assumptions of the changes

    def price(self, table: ScheduleTable) -> Costs:
        """Return the costs of a table, scaled, its microbatches in order."""
        costs = scaled_costs(self.source.table_costs(table), table, ",".join(self.rules) or None)
        return in_order(costs, np.array(self.order)) if self.order else costs

    @functools.cached_property
    def costs(self) -> Costs:
        """Return the costs of the table [s]."""
        return self.price(self.table)

    @functools.cached_property
    def run(self) -> Evaluation:
        """Evaluate the table at these costs."""
        return evaluate(self.table, self.costs, link=self.links)

    @property
    def step_time(self) -> float:
        """Return the step time of the run [s]."""
        return self.run.step_time

    @functools.cached_property
    def step_parts(self) -> list[Part]:
        """List the parts of the step time."""
        return step_parts(self.run)

    @property
    def parts(self) -> Mapping[str, float]:
        """Return the parts of the step time by name [s]."""
        return {part.name: part.seconds for part in self.step_parts}

    @functools.cached_property
    def faults(self) -> list[Fault]:
        """List the faults that make the run slow."""
        return find_faults(self.run, self.step_parts)

    @property
    def times(self) -> ComputeTimes:
        """Return the compute times of stages and workers [s]."""
        return ComputeTimes.from_run(self.run)

    @functools.cached_property
    def bound(self) -> float:
        """Bound the step time of any schedule of these stages and workers from below [s]."""
        # If `optimize` does not support the problem, it is the work of the busiest worker.
        busy = float(self.run.busy.max())
        try:
            no_limit = float(self.table.num_stages * self.table.num_microbatches)
            problem = build_problem(self.table, self.costs, no_limit)
        except (ValueError, MismatchError):
            return busy
        return max(busy, min(lower_bound(problem).value * problem.unit, self.step_time))

    def scaled(self, *rules: str, assumes: tuple[str, ...] = ()) -> "Setup":
        """Return the setup with further scaled costs, at the same table."""
        all_rules = (*self.rules, *rules)
        plan_options = self.schedule.plan_options if self.schedule else {}
        return dataclasses.replace(
            self,
            rules=all_rules,
            options={**self.options, **plan_options, "scale": ",".join(all_rules)},
            assumes=(*self.assumes, *assumes),
        )

    def rebuilt(self, schedule: Schedule, num_microbatches: int) -> "Setup":
        """Return the setup with another schedule or number of microbatches."""
        # Scaling rules of single stages are dropped: another table has other stages.
        rules = tuple(rule for rule in self.rules if "@" not in rule)
        size = {"num_workers": self.table.num_workers, "num_microbatches": num_microbatches}
        old_schedule = self.schedule or schedule
        schedule = plan_schedule(schedule, size, dataclasses.replace(self, rules=rules).price)
        table = schedule.build(size)
        options: dict[str, str | None] = {
            **self.options,
            **dict.fromkeys((*old_schedule.options, *old_schedule.plan_options)),
            "table": None,
            "schedule": schedule.name,
            "workers": str(table.num_workers),
            "microbatches": str(num_microbatches),
            **{name: _option(value) for name, value in schedule.options.items()},
        }
        if "scale" in options:
            options["scale"] = ",".join(rules) or None
        return dataclasses.replace(
            self,
            table=table,
            schedule=schedule,
            rules=rules,
            options=options,
            layers=_restaged(self.layers, table.num_stages),
        )


def _restaged(layers: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Merge or divide stages, and return the layers of each; empty if a layer would be divided."""
    if not layers:
        return ()
    layers_per_stage = shares_of_stages(len(layers), stages) @ np.array(layers)
    rounded = tuple(round(layer_count) for layer_count in layers_per_stage.tolist())
    return rounded if np.allclose(layers_per_stage, rounded, rtol=0, atol=1e-9) else ()


def plan_schedule(
    schedule: Schedule, size: Mapping[str, int], price: Callable[[ScheduleTable], Costs]
) -> Schedule:
    """Return a schedule with a plan for the times of `price`, if its builder plans."""
    builder = find(schedule.name)
    plan = for_times(builder, size, schedule.options, price) if builder.planned else {}
    return schedule._replace(plan=plan)


def _check_layers(
    layers: Sequence[int] | None, table: ScheduleTable, source: Source
) -> tuple[int, ...]:
    """Check the layers of measured stages, and return them; empty if unknown."""
    if layers is None:
        return ()
    if source.workload is not None:
        raise wrong("stage_layers", "go with measured times: a model has its own layers")
    counts = tuple(whole_number(count, "stage_layers") for count in layers)
    if len(counts) != table.num_stages:
        raise MismatchError(
            f"stage_layers has {len(counts)} entries, the table has {table.num_stages} stages",
            "stage_layers",
        )
    return counts


@with_short_repr("limit begin")
@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """Memory needs and limits of the workers."""

    begin: Setup  # the unchanged setup
    limit: Needs | float | None = None  # of a worker, in the unit of the needs; None if unknown

    @property
    def unit(self) -> str:
        """Return "bytes" if a model gives them, else "activations" of the unchanged table."""
        return "activations" if self.begin.source.workload is None else "bytes"

    def text(self, amount: float) -> str:
        """Format a need with its unit."""
        return f"{amount / 1e9:.1f} GB" if self.unit == "bytes" else f"{amount:.4g} activations"

    def needs(self, setup: Setup) -> Needs:
        """Return the peak need of each worker (workers)."""
        workload = setup.source.workload
        if workload is not None:
            return np.asarray(memory_bytes(workload, setup.table), float)
        # activations count relative to the largest share of the layers on a worker
        sizes = setup.size * setup.table.worker_parts / self.begin.table.worker_parts.max()
        return activation_memory(setup.run, sizes=sizes).peak

    @functools.cached_property
    def begin_needs(self) -> Needs:
        """Return the peak need of each worker in the unchanged run (workers)."""
        return self.needs(self.begin)

    def fits(self, setup: Setup) -> bool:
        """Return whether a setup stays within the limit; default: the unchanged run's peak."""
        limit = self.begin_needs.max() if self.limit is None else self.limit
        return bool((self.needs(setup) <= np.asarray(limit) * (1 + 1e-9)).all())

    def ratio(self, setup: Setup) -> float:
        """Return the need of the fullest worker over that of the unchanged run; 1 if both are 0."""
        need, begin_need = self.needs(setup).max(), self.begin_needs.max()
        return 1.0 if need == begin_need else float(need / begin_need)


def begin_setup(
    table: ScheduleTable,
    links: Links,
    source: Source,
    schedule: Schedule | None = None,
    layers: Sequence[int] | None = None,
) -> Setup:
    """Return the unchanged setup of a table; refuse an asynchronous one."""
    if schedule is not None:
        size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
        schedule = plan_schedule(schedule, size, source.table_costs)
    setup = Setup(table, links, source, schedule, layers=_check_layers(layers, table, source))
    if table.updates_within:
        raise ValueError(
            f"{table.name} updates weights before its end: an asynchronous schedule has no step to "
            "explain; pipejax sensitivity says what bounds it"
        )
    return setup
