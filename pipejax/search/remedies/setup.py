"""A setup: a table at costs over links, with what can be changed about it and what has been."""

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
from pipejax.costs.scaling import restaged_costs, scaled_costs, stage_overlaps
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
        """The workload, where a model gives the costs."""

    @property
    def system(self) -> System | None:
        """Likewise the machine."""

    def table_costs(self, table: ScheduleTable) -> Costs:
        """Return the costs of a table."""

    def with_workload(self, workload: Workload) -> "Source":
        """Price another workload, where a model gives the costs."""

    @property
    def placed(self) -> Callable[[ScheduleTable], PlacedCosts] | None:
        """Return a function from a table to its costs by place, on a machine of nodes."""

    @property
    def places(self) -> tuple[int, ...]:
        """Place of each worker; empty for the order of the workers."""

    def with_places(self, places: tuple[int, ...]) -> "Source":
        """Let workers sit elsewhere, on a machine of nodes."""


class MeasuredTimes(NamedTuple):
    """Times that were measured on the stages of one table."""

    costs: Costs  # the times [s]
    stages: int  # of how many stages
    workload: None = None
    system: None = None
    placed: None = None
    places: tuple[int, ...] = ()
    is_of_stages: bool = True

    def table_costs(self, table: ScheduleTable) -> Costs:
        """Merge or divide the stages to match a table."""
        return restaged_costs(self.costs, self.stages, table)

    def with_workload(self, workload: Workload) -> "MeasuredTimes":
        """Return the same times: there is no workload."""
        del workload
        return self

    def with_places(self, places: tuple[int, ...]) -> "MeasuredTimes":
        """Return the same times: there is no machine."""
        del places
        return self


class ModelTimes(NamedTuple):
    """Times of a model on a system."""

    workload: Workload
    system: System

    def table_costs(self, table: ScheduleTable) -> Costs:
        """Price a table."""
        return stage_costs(self.workload, self.system, table)

    def with_workload(self, workload: Workload) -> "ModelTimes":
        """Price another workload."""
        return self._replace(workload=workload)

    def placed(self, table: ScheduleTable) -> PlacedCosts:
        """Price a table by where its workers sit."""
        return model_placements(self.workload, self.system, table)

    @property
    def places(self) -> tuple[int, ...]:
        """Place of each worker."""
        return tuple(self.workload.worker_places)

    def with_places(self, places: tuple[int, ...]) -> "ModelTimes":
        """Put the workers on other places."""
        return self.with_workload(dataclasses.replace(self.workload, worker_places=places))


@short_repr
class Schedule(NamedTuple):
    """A schedule that can be built for other sizes."""

    name: str  # of its builder
    options: Mapping[str, Any]  # of its builder, as they are given
    # the same with the times that it was planned for; empty where it is not planned
    plan: Mapping[str, Any] = MappingProxyType({})

    def built(self, size: Mapping[str, int]) -> ScheduleTable:
        """Build the table for these workers and microbatches."""
        return find(self.name).function(**size, **(self.plan or self.options))

    @property
    def pinned(self) -> dict[str, str | None]:
        """Options of the command line that reproduce the plan for any times."""
        return {PLANNED_AS.get(name, name): _written(value) for name, value in self.plan.items()}


# options of builders that the command line calls otherwise
PLANNED_AS = {"transfer": "planned_comm", "offload": "planned_offload", "load": "planned_load"}


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={entry!r}" for key, entry in value.items())
    return ",".join(map(repr, value)) if isinstance(value, list) else str(value)


@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A table at costs over links, and what has been changed."""

    table: ScheduleTable  # the schedule
    links: Links  # link model, and what else was said of the links
    source: Source  # gives the costs of tables
    schedule: Schedule | None = None  # what the table was built by, where that is known
    rules: tuple[str, ...] = ()  # that scale the costs, see `scaled_costs`
    size: float = 1.0  # of a microbatch, as a share of that in the beginning
    # which of the microbatches is number k of the table; as they are if empty
    order: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()  # of each stage, where that is known of stages that were measured
    # options of the command line that differ from those in the beginning; None for those that are
    # not given any more
    options: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    assumes: tuple[str, ...] = ()  # what must hold for the change to do what is said of it

    def price(self, table: ScheduleTable) -> Costs:
        """Return the costs of a table, scaled, its microbatches in order."""
        costs = scaled_costs(self.source.table_costs(table), table, ",".join(self.rules) or None)
        return in_order(costs, np.array(self.order)) if self.order else costs

    @functools.cached_property
    def costs(self) -> Costs:
        """Costs of the table [s]."""
        return self.price(self.table)

    @functools.cached_property
    def run(self) -> Evaluation:
        """Evaluation of the table at these costs."""
        return evaluate(self.table, self.costs, link=self.links)

    @property
    def step_time(self) -> float:
        """Step time of the run [s]."""
        return self.run.step_time

    @functools.cached_property
    def step_parts(self) -> list[Part]:
        """Parts of the step time."""
        return step_parts(self.run)

    @property
    def parts(self) -> Mapping[str, float]:
        """Parts of the step time by name [s]."""
        return {part.name: part.seconds for part in self.step_parts}

    @functools.cached_property
    def faults(self) -> list[Fault]:
        """Faults of the run, which make it slow."""
        return find_faults(self.run, self.step_parts)

    @property
    def times(self) -> ComputeTimes:
        """Compute times of stages and workers [s]."""
        return ComputeTimes.from_run(self.run)

    @functools.cached_property
    def bound(self) -> float:
        """Lower bound on the step time of any schedule of these stages and workers [s]."""
        # the ops of the busiest worker, if `optimize` does not support the problem
        busy = float(self.run.busy.max())
        try:
            no_limit = float(self.table.num_stages * self.table.num_microbatches)
            problem = build_problem(self.table, self.costs, no_limit)
        except (ValueError, MismatchError):
            return busy
        return max(busy, min(lower_bound(problem).value * problem.unit, self.step_time))

    def scaled(self, *rules: str, assumes: tuple[str, ...] = ()) -> "Setup":
        """Return the setup with further scaled costs."""
        all_rules = (*self.rules, *rules)
        # the table stays as it is, where it was planned for times before
        pinned = self.schedule.pinned if self.schedule else {}
        return dataclasses.replace(
            self,
            rules=all_rules,
            options={**self.options, **pinned, "scale": ",".join(all_rules)},
            assumes=(*self.assumes, *assumes),
        )

    def rebuilt(self, schedule: Schedule, num_microbatches: int) -> "Setup":
        """Return the setup with another schedule or number of microbatches."""
        # rules of single stages do not hold for the stages of another table
        rules = tuple(rule for rule in self.rules if "@" not in rule)
        bare = dataclasses.replace(self, rules=rules)
        size = {"num_workers": self.table.num_workers, "num_microbatches": num_microbatches}
        before = self.schedule or schedule
        schedule = planned(schedule, size, bare.price)
        table = schedule.built(size)
        schedule_options = {name: _written(value) for name, value in schedule.options.items()}
        options: dict[str, str | None] = {
            **self.options,
            **dict.fromkeys((*before.options, *before.pinned)),
            "table": None,
            "schedule": schedule.name,
            "workers": str(table.num_workers),
            "microbatches": str(num_microbatches),
            **schedule_options,
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
    """Return the layers of other stages of the model; empty if a layer would be divided."""
    if not layers:
        return ()
    layers_per_stage = stage_overlaps(len(layers), stages) @ np.array(layers)
    whole = tuple(round(layer_count) for layer_count in layers_per_stage.tolist())
    return whole if np.allclose(layers_per_stage, whole, rtol=0, atol=1e-9) else ()


def planned(
    schedule: Schedule, size: Mapping[str, int], price: Callable[[ScheduleTable], Costs]
) -> Schedule:
    """A schedule with the times that it is planned for."""
    builder = find(schedule.name)
    plan = for_times(builder, size, schedule.options, price) if builder.planned else {}
    return schedule._replace(plan=plan)


def _checked(layers: Sequence[int] | None, table: ScheduleTable, source: Source) -> tuple[int, ...]:
    """Layers of each stage that was measured; none if they are not known."""
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

    begin: Setup  # the setup in the beginning
    # what a worker may hold, in the unit of the needs; None if nothing says so
    limit: Needs | float | None = None

    @property
    def unit(self) -> str:
        """Bytes of an accelerator if there is a model, else activations of the first table."""
        return "activations" if self.begin.source.workload is None else "bytes"

    def text(self, amount: float) -> str:
        """Write a need with its unit."""
        return f"{amount / 1e9:.1f} GB" if self.unit == "bytes" else f"{amount:.4g} activations"

    def needs(self, setup: Setup) -> Needs:
        """Return the peak need of each worker (workers)."""
        workload = setup.source.workload
        if workload is not None:
            return np.asarray(memory_bytes(workload, setup.table), float)
        largest_part = self.begin.table.worker_parts.max()  # of what a worker has of a microbatch
        sizes = setup.size * setup.table.worker_parts / largest_part
        return activation_memory(setup.run, sizes=sizes).peak

    @functools.cached_property
    def at_first(self) -> Needs:
        """Needs of the unchanged run."""
        return self.needs(self.begin)

    def fits(self, setup: Setup) -> bool:
        """Return whether a setup keeps the limit, or without one the peak of the unchanged run."""
        limit = self.at_first.max() if self.limit is None else self.limit
        return bool((self.needs(setup) <= np.asarray(limit) * (1 + 1e-9)).all())

    def ratio(self, setup: Setup) -> float:
        """Return the need of the fullest worker over that of the unchanged run; 1 if both are 0."""
        needs, first = self.needs(setup).max(), self.at_first.max()
        return 1.0 if needs == first else float(needs / first)


def begin(
    table: ScheduleTable,
    links: Links,
    source: Source,
    schedule: Schedule | None = None,
    layers: Sequence[int] | None = None,
) -> Setup:
    """The setup that is to be explained, which must run as it is."""
    if schedule is not None:
        size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
        schedule = planned(schedule, size, source.table_costs)
    setup = Setup(table, links, source, schedule, layers=_checked(layers, table, source))
    if table.updates_within:
        raise ValueError(
            f"{table.name} updates weights before its end: an asynchronous schedule has no step to "
            "explain; pipejax sensitivity says what bounds it"
        )
    return setup
