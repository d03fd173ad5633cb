"""Options that commands share: which table, at what costs, over which links."""

import dataclasses
from functools import cached_property
from typing import Any

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.memory import ActivationOptions
from pipejax.cli.options.option import options, parse_list, parse_seconds
from pipejax.cli.options.scenario import CostFields, build, parse_costs, parse_scenario
from pipejax.cli.options.tables import OF_RUNS, ScheduleList, ScheduleSettings, TableOptions
from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS
from pipejax.schedules.naming import named
from pipejax.schedules.table.links import LINK_OPTIONS

# Options of costs: times of ops and messages, a file of costs, or a model on a system


def _workload_options(name: str, *, in_plan: bool) -> type:
    """Make a record of options from a workload's fields; with `in_plan`, from those of plans."""
    kinds = {"whole": int | None, "flag": bool}
    fields = {n: f for n, f in WORKLOAD_FIELDS.items() if f.head and (f.in_plan or not in_plan)}
    details = {n: f.detail for n, f in fields.items()}
    defaults: dict[str, Any] = {n: False if f.kind == "flag" else None for n, f in fields.items()}
    annotations = {n: kinds.get(f.kind, str | None) for n, f in fields.items()}
    record = type(name, (), {"__annotations__": annotations, **defaults})
    return options(record, details)


SharedOptions: Any = _workload_options("SharedOptions", in_plan=True)
WorkloadOptions: Any = _workload_options("WorkloadOptions", in_plan=False)
SHARED = tuple(field.name for field in dataclasses.fields(SharedOptions))


@options
class CostOptions(WorkloadOptions):  # type: ignore[misc]  # made of the fields of a workload
    """Options of the costs of ops and messages."""

    stage_times: str | None = None
    worker_times: str | None = None
    model: str | None = None
    system: str | None = None
    minibatch: int | None = None
    stack: str | None = None
    launcher: str | None = None
    sequence: int | None = None
    weight_share: float | None = None
    comm: str | None = None
    latency: str | None = None
    transmit: str | None = None
    costs: str | None = None
    offload: str | None = None
    load: str | None = None
    lengths: str | None = None
    microbatch_scale: str | None = None
    microbatch_order: str | None = None
    stragglers: str | None = None
    scale: str | None = None
    measured_stages: int | None = None
    pair_factor: str | None = None
    recompute_again: bool = False
    workers_per_node: str | None = None
    worker_places: str | None = None

    @cached_property
    def cost_fields(self) -> CostFields:
        """Read costs and edits of the costs."""
        return parse_costs(self)


@options
class RendezvousOptions:
    """Queues and host links, for commands that know no other link model."""

    queues: str = "worker"
    host_links: str | None = None

    def links(self) -> pj.Links:
        """Read the options."""
        texts = {name: getattr(self, _LINK_FLAGS.get(name, name), None) for name in LINK_OPTIONS}
        values = {name: _read_link(name, text) for name, text in texts.items() if text is not None}
        return pj.Links(**{"model": "rendezvous"} | values)


@options
class LinkOptions(RendezvousOptions):
    """The link model, and the links that messages share."""

    link: str = "delay"
    posting: str = "early"
    shared_links: str | None = None
    pair_links: str | None = None
    eager_below: str | None = None


_LINK_FLAGS = {"model": "link"}  # options that have another name than the field of `Links`


def _read_link(name: str, text: str) -> Any:
    option, where = LINK_OPTIONS[name], flag(_LINK_FLAGS.get(name, name))
    if option.names:
        return resolve_choice(text, option.names, where)
    return option.parse(text, where) if option.form else parse_seconds(text, where)


@options
class TableFields(ScheduleSettings):
    """A schedule and its size, or a table."""

    schedule: str | None = None
    table: str | None = None
    workers: int | None = None
    microbatches: int | None = None
    repair: str | None = None

    @property
    def settings(self) -> TableOptions:
        """The options of the schedule."""
        return self.table_options()

    @cached_property
    def name(self) -> str | None:
        """The name of the schedule; None if a table is read."""
        return None if self.schedule is None else named(self.schedule)

    def scenario(self, settings: TableOptions | None = None) -> "pj.Scenario":
        """Read the scenario, with other options of its schedule if these are given."""
        return parse_scenario(self, settings=settings)

    def planned_for(self, table: pj.ScheduleTable) -> dict[str, Any]:
        """Times for which the schedule was planned, by letter; none for a table that is read."""
        return self.settings.planned_for(self.name, table) if self.name else {}


@options
class RunOptions(TableFields, CostOptions, LinkOptions):
    """A table with times of its ops and messages, and links."""


@options
class RendezvousRun(TableFields, CostOptions, RendezvousOptions):
    """A table with times of its ops and messages, under rendezvous."""


@options
class SizedCostOptions(CostOptions):
    """Times of ops and messages, and sizes of activations."""

    activation_sizes: str | None = None

    @property
    def activations(self) -> ActivationOptions:
        """Read the sizes of activations."""
        sizes = self.activation_sizes
        listed = None if sizes is None else parse_list(sizes, "--activation-sizes")
        return ActivationOptions(self.weight_share, listed)


@options
class SizedRunOptions(TableFields, SizedCostOptions, LinkOptions):
    """A table with times of its ops and messages and sizes of its activations."""

    @property
    def settings(self) -> TableOptions:
        """The options of the schedule; some are options of its run too."""
        return self.table_options(OF_RUNS)


@options
class ListedRunOptions(ScheduleSettings, CostOptions, LinkOptions):
    """Several schedules with times of their ops and messages."""

    schedules: str | None = None
    tables: list[str] | None = None
    workers: int | None = None
    repair: str | None = None

    @property
    def listed(self) -> ScheduleList:
        """Find the schedules that are meant."""
        return ScheduleList.read(
            self.table_options(), self.schedules, self.tables, self.workers, self.repair
        )


@options
class PricedSettings(ScheduleSettings, CostOptions, LinkOptions):
    """Options of schedules, and times of their ops and messages."""


def shown_scenarios(
    run: SizedRunOptions, settings: TableOptions, schedules: str | None
) -> "tuple[list[pj.Scenario], dict[str, str]]":
    """Return the scenarios that `show` draws, and the errors of schedules that cannot be built."""
    if schedules is None:
        scenario = run.scenario(settings)
        build(scenario)
        return [scenario], {}
    if run.schedule is not None or run.table is not None:
        raise ValueError(f"--schedules {schedules} and --schedule or --table: choose one")
    several = ScheduleList.read(settings, schedules, workers=run.workers)
    counts = None if run.microbatches is None else [run.microbatches]
    scenarios, missing = several.build(run, several.sized(counts))
    if not scenarios:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in missing.items()))
    several.check_used(scenarios.values())
    return list(scenarios.values()), missing
