"""Options that commands share: tables, schedules to build, costs, links."""

import dataclasses
import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pipejax as pj
from pipejax.base.checks import MismatchError, nearest, resolve_choice, share
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.memory import ActivationOptions, MemoryLimit
from pipejax.cli.options.option import options, parse_list, parse_number, parse_pairs, parse_seconds
from pipejax.cli.options.scenario import (
    OPTION_NAMES,
    CostFields,
    build,
    check_used,
    flag_name,
    is_free_form,
    named_launch,
    option_text,
    parse_costs,
    parse_gathering,
    parse_scenario,
)
from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS
from pipejax.schedules import Builder, find, listed
from pipejax.schedules.naming import named, options_text
from pipejax.schedules.table.links import LINK_OPTIONS
from pipejax.schedules.table.table_files import REPAIRS

if TYPE_CHECKING:
    from pipejax.plots.style import Paper


# Options of pictures that several commands share: the paper, and names of schedules


@options
class PaperSettings:
    """Size and font of a drawing."""

    size: str | None = None
    font: str | None = None
    font_size: float | None = None

    def paper(self, size: str = "page") -> "Paper":
        """Return the paper of a drawing; `size` is its default width."""
        from pipejax.plots import style  # matplotlib is an extra, slow to import

        font_size = style.FONT_SIZE if self.font_size is None else self.font_size
        return style.paper(self.size or size, self.font, font_size)


PLANNED_LETTERS = {"c": "transfer", "O": "offload", "L": "load"}
# where a limit does go, behind the error that a schedule takes none
MEMORY_LIMITS = "; pipejax optimize searches one that keeps it, show --memory draws it"
OF_RUNS = ("weight_share",)  # options of schedules that are options of runs too


class TableOptions(NamedTuple):
    """Options of schedules, and edits of their tables."""

    options: dict[str, Any]  # of the line, by argument of builders
    run_options: tuple[str, ...] = ()  # allowed under any schedule, as the command reads them too
    repair: str | None = None  # known fault of tables, see `read_table`
    edits: tuple[Any, ...] = ()  # of the tables

    def builder(self, schedule: str) -> Builder:
        """Return the builder of a schedule."""
        return find(schedule, repair=self.repair)

    def check(self, schedules: Sequence[str]) -> None:
        """Refuse an option that none of the schedules has."""
        builders = {name: self.builder(name) for name in schedules}
        takes = dict.fromkeys(name for builder in builders.values() for name in builder.takes)
        for option in self.options:
            if option in self.run_options or option in takes:
                continue
            text, suggestion = option_text(option), ""
            if is_free_form(option):  # perhaps misspelt
                suggestion = nearest(option, [*filter(is_free_form, takes)])
            if len(builders) > 1:
                names = ", ".join(builders)
                raise ValueError(f"{text}: none of {names} has this option{suggestion}")
            ((name, builder),) = builders.items()
            more = MEMORY_LIMITS if option == "memory_limit" else ""
            raise ValueError(
                f"{text}: {name} takes no {option.replace('_', ' ')}: "
                f"{options_text(builder, flag_name)}{more}{suggestion}"
            )

    def planned_for(self, schedule: str, table: pj.ScheduleTable) -> dict[str, Any]:
        """Return the times [slots] for which the order of a table was planned, by letter."""
        # The letter c stands for a message. Empty if the schedule plans no order.
        builder = self.builder(schedule)
        if not builder.planned:
            return {}
        parameters = inspect.signature(inspect.unwrap(builder.function)).parameters
        values = {k: p.default for k, p in parameters.items()} | self.only(schedule).options
        times = {letter: table.slots[letter] for letter in "FIW"}
        more = {letter: values.get(name) for letter, name in PLANNED_LETTERS.items()}
        return times | {letter: time for letter, time in more.items() if time is not None}

    def label(self, schedule: str) -> str:
        """Return a schedule with those of its options that are not the default: hanayo waves=4."""
        defaults = inspect.signature(self.builder(schedule).function).parameters
        texts = [
            f"{name}={value}"
            for name, value in self.only(schedule).options.items()
            if isinstance(value, int | float | str)
            and (name not in defaults or defaults[name].default != value)
        ]
        return " ".join([schedule, *texts])

    def without(self, name: str) -> "TableOptions":
        """Leave out an option that is not for building the table."""
        return self._replace(options={k: v for k, v in self.options.items() if k != name})

    def only(self, schedule: str) -> "TableOptions":
        """Keep the options that a schedule has."""
        names = self.builder(schedule).takes
        options = {k: v for k, v in self.options.items() if k in names}
        return self._replace(options=options, run_options=())


@options
class ScheduleSettings:
    """Options of a schedule besides workers and microbatches."""

    stages_per_worker: int | None = None
    waves: int | None = None
    slices: int | None = None
    pipes: int | None = None
    accumulation: int | None = None
    admission: str | None = None
    runs: int | None = None
    local_steps: int | None = None
    stage_shares: str | None = None
    slots: str | None = None
    memory_limit: str | None = None
    weight_share: float | None = None
    planned_comm: float | None = None
    planned_offload: str | None = None
    planned_load: str | None = None
    offload_share: float | None = None
    group_size: int | None = None
    schedule_options: str | None = None
    recompute_cells: bool = False
    sharding_lane: str | None = None
    lookahead: str | None = None
    residency: str | None = None

    def table_options(self, run_options: tuple[str, ...] = ()) -> TableOptions:
        """Return the options that are set; `run_options` are those that also apply to runs."""
        fields = {name: getattr(self, name) for name in SCHEDULE_OPTIONS if name not in EDITS}
        options = {name: value for name, value in fields.items() if value is not None}
        gathering = parse_gathering(self.sharding_lane, self.lookahead, self.residency)
        if self.schedule_options is not None:
            custom = _parse_options(options.pop("schedule_options"))
            for name in custom:
                if name in SCHEDULE_OPTIONS:
                    raise ValueError(f"--schedule-options {name}: it has an option, {flag(name)}")
            options |= custom
        if self.weight_share is not None:
            share(self.weight_share, "--weight-share")
        if self.stage_shares is not None:
            options["stage_shares"] = parse_list(self.stage_shares, "--stage-shares")
        for argument, name in OPTION_NAMES.items():
            value = options.pop(name, None)
            if isinstance(value, str):
                times = parse_list(value, flag(name))
                value = times if len(times) > 1 else times[0]
            options |= {} if value is None else {argument: value}
        if self.memory_limit is not None:
            options["memory_limit"] = MemoryLimit.read(self.memory_limit)
        if self.slots is not None:
            options["slots"] = _parse_slots(self.slots)
        from pipejax.costs.edits import RecomputeCells

        edits = (*([RecomputeCells()] if self.recompute_cells else []), gathering)
        return TableOptions(options, run_options, edits=tuple(filter(None, edits)))


SCHEDULE_OPTIONS = tuple(field.name for field in dataclasses.fields(ScheduleSettings))
EDITS = ("recompute_cells", "sharding_lane", "lookahead", "residency")  # of tables


def _parse_options(text: str) -> dict[str, Any]:
    """Read options of a schedule of the user's own: numbers, true, false, or texts."""
    form = "--schedule-options must be as depth=2,kind=wide"
    options: dict[str, Any] = {}
    for name, value in parse_pairs(text, form).items():
        if not name.isidentifier():
            raise ValueError(f"{form}, got {text!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _parse_slots(text: str) -> dict[str, float]:
    """Parse slots such as "F=1,B=2"; B is I + W, or I and W are half of B."""
    form = "--slots: expected F, B, I, W once each, above 0"
    texts = parse_pairs(text, form)
    slots = {letter: parse_number(value, f"--slots: {letter}") for letter, value in texts.items()}
    if slots.keys() - {*"FBIW"} or 0 in slots.values():
        raise ValueError(f"{form}, got {text!r}")
    if {"I", "W"} <= set(slots):
        slots.setdefault("B", slots["I"] + slots["W"])
    if not {"F", "B"} <= set(slots):
        raise ValueError(f"--slots: expected F and B, or F, I and W, as F=1,B=2, got {text!r}")
    half = slots["B"] / 2  # of a backward that is split, as in costs
    return {"I": half, "W": half, **slots}


def with_labels(labels: str | None, names: Sequence[str]) -> list[str]:
    """Return the labels of schedules: those of --labels, else their names, numbered if equal."""
    from pipejax.plots.caption import named

    if labels is None:
        return [*named((name, None) for name in names)]
    texts = [label.strip() for label in labels.split(",")]
    if len({*texts}) < len(texts) or "" in texts or len(texts) != len(names):
        raise ValueError(
            f"--labels must be {len(names)} different names, of {', '.join(names)}, got {labels!r}"
        )
    return texts


class SizedSchedule(NamedTuple):
    """A schedule at one size."""

    name: str  # for `schedules.find`.
    workers: int  # P
    microbatches: int | None  # M, if known


class ScheduleList(NamedTuple):
    """Schedules that a command compares."""

    options: TableOptions  # of schedules that are built
    names: list[str]  # names of schedules and files of tables
    workers: int | None = None  # option --workers; by default those of the tables

    @classmethod
    def read(
        cls,
        options: TableOptions,
        schedules: str | None,
        tables: Sequence[str] | None = None,
        workers: int | None = None,
        repair: str | None = None,
    ) -> "ScheduleList":
        """Read the names of --schedules and the files of --tables, also all files of a folder."""
        if schedules is None and tables is None:
            raise ValueError("--schedules or --tables is missing: as gpipe,1f1b,mine.csv")
        for text in tables or ():
            if not Path(text).exists() and ".py:" not in text:  # FILE.py:FUNCTION
                raise ValueError(f"--tables {text}: no such file or folder")
        repair = None if repair is None else resolve_choice(repair, REPAIRS, "--repair")
        options = options._replace(repair=repair)
        texts = [] if schedules is None else [text.strip() for text in schedules.split(",")]
        names = [n for text in (*texts, *(tables or ())) for n in listed(text, repair=repair)]
        for name in names:
            if names.count(name) > 1:
                option = "--schedules" if tables is None else "--schedules and --tables"
                raise ValueError(f"{option} names {name} twice")
        # options of `OF_RUNS` also apply to runs, so they are legal if no schedule has them
        options._replace(run_options=(*options.run_options, *OF_RUNS)).check(names)
        if repair and all(options.builder(name).sizes is None for name in names):
            raise ValueError(f"--repair {repair} has no effect without a table")
        return cls(options, names, workers)

    def sized(self, microbatches: Sequence[int] | None) -> list[SizedSchedule]:
        """Return all schedules at the first M of `microbatches`, then at the second, and so on."""
        # Without an option, a table in a file has its own size. Any other schedule has the size of
        # the tables if these agree.
        table_sizes = {name: self.options.builder(name).sizes for name in self.names}
        tables = [sizes for sizes in table_sizes.values() if sizes is not None]

        def size(name: str, place: int, option: str, value: int | None) -> int:
            """Return P (place 0) or M (place 1) of a schedule; `value` is that of the option."""
            sizes = table_sizes[name]
            in_tables = {sizes[place] for sizes in tables} if sizes is None else {sizes[place]}
            if value is None and len(in_tables) != 1:
                differ = " and the tables differ" if tables else ""
                raise ValueError(f"{option} is missing: {name} is of any size{differ}")
            return in_tables.pop() if value is None else value

        workers = {name: size(name, 0, "--workers", self.workers) for name in table_sizes}
        return [
            SizedSchedule(name, workers[name], size(name, 1, "--microbatches", count))
            for count in microbatches or (None,)
            for name in table_sizes
        ]

    def build(
        self, run: Any, points: Iterable[SizedSchedule]
    ) -> "tuple[dict[str, pj.Scenario], dict[str, str]]":
        """Return the scenario of each schedule by name, and the reason of each impossible one."""
        scenarios: dict[str, pj.Scenario] = {}
        missing: dict[str, str] = {}
        for point in points:
            try:
                scenarios[point.name] = self.built(run, point)
            except MismatchError as error:
                missing[point.name] = getattr(error, "reason", str(error))
        return scenarios, missing

    def scenario(self, run: Any, point: SizedSchedule) -> "pj.Scenario":
        """Read the scenario of a schedule, with the options that it has."""
        return parse_scenario(run, settings=self.options.only(point.name), point=point)

    def built(self, run: Any, point: SizedSchedule) -> "pj.Scenario":
        """Build a schedule; refuse one that does not exist, or that the launcher lacks."""
        scenario = self.scenario(run, point)
        scenario.table()
        if (launch := named_launch(scenario)) and launch.lacks:
            raise MismatchError(launch.refusal)
        return scenario

    def check_used(self, scenarios: "Iterable[pj.Scenario]") -> None:
        """Refuse a time of ops that no table has, and that none is planned for."""
        listed = list(scenarios)
        builders = map(self.options.builder, self.names)
        check_used(listed[0], [scenario.table() for scenario in listed], builders)


@contextmanager
def naming(table: pj.ScheduleTable) -> Iterator[None]:
    """Put the name of a table in front of a ScheduleError that the block raises."""
    try:
        yield
    except pj.ScheduleError as error:
        raise pj.ScheduleError(f"{table.name}: {error.reason}", error.grid) from error


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
        settings = self.table_options()
        return ScheduleList.read(settings, self.schedules, self.tables, self.workers, self.repair)


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
