"""Options that say which tables: one, several, or schedules to build, and built with what."""

import dataclasses
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pipejax as pj
from pipejax.base.checks import MismatchError, nearest, resolve_choice, share
from pipejax.cli.options.catalogue import OF_ARGUMENTS, flag
from pipejax.cli.options.memory import ActivationOptions, MemoryLimit
from pipejax.cli.options.option import options
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.sharding import ShardingChoice
from pipejax.cli.options.values import (
    CountIfGiven,
    Text,
    WeightShare,
    parse_list,
    parse_number,
)
from pipejax.schedules import Builder, find, listed
from pipejax.schedules.naming import options_text
from pipejax.schedules.table.table_files import REPAIRS

# options of builders that the command line calls otherwise: runs have these names too
PLANNED = {argument: OF_ARGUMENTS[argument] for argument in ("transfer", "offload", "load")}
PLANNED_LETTERS = {"c": "transfer", "O": "offload", "L": "load"}
# where a limit does go, behind the error that a schedule takes none
MEMORY_LIMITS = "; pipejax optimize searches one that keeps it, show --memory draws it"
OF_BUILDERS = ("host_links",)  # options of links that schedules are planned for, too
OF_RUNS = ("weight_share",)  # options that say something of a run too, under any schedule


class TableOptions(NamedTuple):
    """Options of schedules that build tables for given workers and microbatches."""

    options: dict[str, Any]  # those that are given
    of_runs: tuple[str, ...] = ()  # those that the command reads too, under any schedule
    repair: str | None = None  # what is known to be wrong with tables, see `read_table`
    recomputes: bool = False  # whether every backward recomputes its forward first
    sharding: ShardingChoice | None = None  # how weights are gathered, if that is said

    def builder(self, schedule: str) -> Builder:
        """Return what builds a schedule."""
        return find(schedule, repair=self.repair)

    def build(
        self,
        schedule: str,
        workers: int,
        microbatches: int,
        pricing: Pricing | None = None,
    ) -> pj.ScheduleTable:
        """Build a table; options that the schedule does not have are an error.

        A schedule that is planned for times is planned for those of the run, if they are known
        and no slots are given.

        Raises:
          ValueError: if the schedule does not exist for these numbers.
        """
        self.check([schedule])
        size = {"num_workers": workers, "num_microbatches": microbatches}
        builder = self.builder(schedule)
        given = self.of_table(schedule)
        # needs JAX, and a table in its own slots does not
        from pipejax.costs.planning import build_for_run, similar_table

        if "memory_limit" in given:
            sized = ActivationOptions(given.get("weight_share"), None)
            workload = None if pricing is None else pricing.workload
            room = given["memory_limit"].room(similar_table(builder, size, given), sized, workload)
            given["memory_limit"] = room.activations
        if pricing:
            return self.finished(build_for_run(builder, size, given, pricing.table_costs))
        return self.finished(builder.function(**size, **given))

    def finished(self, table: pj.ScheduleTable) -> pj.ScheduleTable:
        """Put into a table what options put into any."""
        table = table.with_recomputation() if self.recomputes else table
        return table if self.sharding is None else self.sharding.apply(table)

    def of_table(self, schedule: str) -> dict[str, Any]:
        """Leave out what says something of the run alone: the schedule does not have it."""
        takes = self.builder(schedule).takes
        return {k: v for k, v in self.options.items() if k in takes or k not in self.of_runs}

    def check(self, schedules: Sequence[str]) -> None:
        """Refuse an option that none of the schedules has."""
        builders = {name: self.builder(name) for name in schedules}
        for option in self.options:
            if option in self.of_runs or any(option in own.takes for own in builders.values()):
                continue
            words = option.replace("_", " ")
            more = MEMORY_LIMITS * (option == "memory_limit")
            own = dict.fromkeys(name for each in builders.values() for name in each.takes)
            suggestion = (
                "" if is_flag(option) else nearest(option, [n for n in own if not is_flag(n)])
            )
            if len(builders) > 1:
                raise ValueError(
                    f"{told(option)}: none of {', '.join(builders)} has this option{suggestion}"
                )
            ((name, builder),) = builders.items()
            raise ValueError(
                f"{told(option)}: {name} takes no {words}: {options_text(builder, written)}"
                f"{more}{suggestion}"
            )

    def planned_for(self, schedule: str, table: pj.ScheduleTable) -> dict[str, Any]:
        """Times that the order of a table was planned for, by letter; c is that of a message."""
        builder = self.builder(schedule)
        if not builder.planned:
            return {}
        takes = inspect.signature(inspect.unwrap(builder.function)).parameters
        given = {k: p.default for k, p in takes.items()} | self.of_table(schedule)
        found = {letter: table.slots[letter] for letter in "FIW"}
        more = {letter: given.get(name) for letter, name in PLANNED_LETTERS.items()}
        return found | {letter: time for letter, time in more.items() if time is not None}

    def called(self, schedule: str) -> str:
        """Name a schedule with those of the options that are not as they are if left out."""
        builder = self.builder(schedule)
        usual = inspect.signature(builder.function).parameters
        own = {
            name: value
            for name, value in self.of(schedule).options.items()
            if isinstance(value, int | float | str)
            and (name not in usual or usual[name].default != value)
        }
        return " ".join([schedule, *(f"{name}={value}" for name, value in own.items())])

    def without(self, name: str) -> "TableOptions":
        """Leave out an option that is not for building the table."""
        return self._replace(options={k: v for k, v in self.options.items() if k != name})

    def of(self, schedule: str) -> "TableOptions":
        """Keep the options that a schedule has."""
        takes = self.builder(schedule).takes
        own = {k: v for k, v in self.options.items() if k in takes}
        return self._replace(options=own, of_runs=())


@options
class ScheduleSettings:
    """What a schedule takes besides workers and microbatches.

    Attributes:
      admission: each-stage (if not given) or first-stage.
      slots: with I and W as F=1,I=1,W=1; schedules planned for times take those of the run if not
        given.
      memory_limit: what the orders of zero-bubble and ada-offload are made for; others take none.
      planned_comm: that of the run if not given.
      planned_offload: a number or one per stage, for ada-offload and pipe-offload; that of the run
        if not given.
      planned_load: a number or one per stage; as O if not given.
      slices: of seq-1f1b and terapipe, 2 if not given; of slimpipe a multiple of P, P if not given.
      group_size: of pipe-offload from 1 to P; of interleaved-1f1b from P to M, as Megatron-LM's
        microbatch_group_size_per_vp_stage.
      recompute_cells: under any schedule, and into a table of --table.
      sharding_lane: compute, net or a name of your own; as a table has it if not given, net beside
        --lookahead.
      lookahead: uses by which UNSHARD cells stand before their own; one number, or one for each
        worker. Puts sharding cells in, under any schedule; 1 where --residency alone is given.
      residency: one number, or one for each worker; all that it has if not given.
    """

    stages_per_worker: CountIfGiven = None
    waves: CountIfGiven = None
    slices: CountIfGiven = None
    pipes: CountIfGiven = None
    accumulation: CountIfGiven = None
    admission: Text = None
    runs: CountIfGiven = None
    local_steps: CountIfGiven = None
    stage_shares: Text = None
    slots: Text = None
    memory_limit: Text = None
    weight_share: WeightShare = None
    planned_comm: float | None = None
    planned_offload: Text = None
    planned_load: Text = None
    offload_share: float | None = None
    group_size: CountIfGiven = None
    schedule_options: Text = None
    recompute_cells: bool = False
    sharding_lane: Text = None
    lookahead: Text = None
    residency: Text = None

    def table_options(self, of_runs: tuple[str, ...] = ()) -> TableOptions:
        """Keep the options that are given; `of_runs` are those that say something of a run too."""
        fields = {name: getattr(self, name) for name in SCHEDULE_OPTIONS}
        options = {name: value for name, value in fields.items() if value is not None}
        recomputes = options.pop("recompute_cells")
        given = (options.pop(name, None) for name in ("sharding_lane", "lookahead", "residency"))
        sharding = ShardingChoice.read(*given)
        if self.schedule_options is not None:
            own = _parse_options(options.pop("schedule_options"))
            for name in own:
                if name in SCHEDULE_OPTIONS:
                    raise ValueError(f"--schedule-options {name}: it has an option, {flag(name)}")
            options |= own
        if self.weight_share is not None:
            share(self.weight_share, "--weight-share")
        if self.stage_shares is not None:
            options["stage_shares"] = parse_list(self.stage_shares, "--stage-shares")
        for name in ("planned_offload", "planned_load"):
            if name in options:
                times = parse_list(options[name], flag(name))
                options[name] = times if len(times) > 1 else times[0]
        for name, written_as in PLANNED.items():
            if written_as in options:
                options[name] = options.pop(written_as)
        if self.memory_limit is not None:
            options["memory_limit"] = MemoryLimit.read(self.memory_limit)
        if self.slots is not None:
            options["slots"] = _parse_slots(self.slots)
        return TableOptions(options, of_runs, recomputes=recomputes, sharding=sharding)


SCHEDULE_OPTIONS = tuple(field.name for field in dataclasses.fields(ScheduleSettings))


def _parse_options(text: str) -> dict[str, Any]:
    """Read options of a schedule of the user's own: numbers, true, false, or texts."""
    found: dict[str, Any] = {}
    for entry in text.split(","):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not (name.isidentifier() and equals and value) or name in found:
            raise ValueError(f"--schedule-options must be as depth=2,kind=wide, got {text!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def is_flag(option: str) -> bool:
    """Whether an option of builders is one of the command line too; of own functions few are."""
    return option in OF_BUILDERS or PLANNED.get(option, option) in SCHEDULE_OPTIONS


def written(option: str) -> str:
    """Return how an option of builders is written on the command line: of own functions bare."""
    return flag(PLANNED.get(option, option)) if is_flag(option) else option


def told(option: str) -> str:
    """Return how an option of builders is given on the command line."""
    return written(option) if is_flag(option) else f"--schedule-options {option}"


def _parse_slots(text: str) -> dict[str, float]:
    slots: dict[str, float] = {}
    for entry in text.split(","):
        letter, _, value = (part.strip() for part in entry.partition("="))
        duration = parse_number(value, f"--slots: {letter}")
        if letter not in "FBIW" or letter in slots or duration == 0:
            raise ValueError(f"--slots: expected F, B, I, W once each, above 0, got {text!r}")
        slots[letter] = duration
    if {"I", "W"} <= set(slots):
        slots.setdefault("B", slots["I"] + slots["W"])
    if not {"F", "B"} <= set(slots):
        raise ValueError(f"--slots: expected F and B, or F, I and W, as F=1,B=2, got {text!r}")
    half = slots["B"] / 2  # of a backward that is split, as in costs
    return {"I": half, "W": half, **slots}


def with_labels(labels: str | None, names: Sequence[str]) -> list[str]:
    """Return names that --labels gives in place of others, or these."""
    if labels is None:
        return [*names]
    found = [label.strip() for label in labels.split(",")]
    if len({*found}) < len(found) or "" in found or len(found) != len(names):
        what = ", ".join(names)
        raise ValueError(
            f"--labels must be {len(names)} different names, of {what}, got {labels!r}"
        )
    return found


class SizedSchedule(NamedTuple):
    """A schedule at one size."""

    name: str  # for `schedules.find`.
    workers: int  # P
    microbatches: int  # M


class ScheduleList(NamedTuple):
    """Which schedules are looked at.

    Attributes:
      options: of those that are built.
      tables: may be given several times.
      workers: those of the tables if not given.
    """

    options: TableOptions
    schedules: Text = None
    tables: list[str] | None = None
    workers: CountIfGiven = None
    repair: Text = None

    def chosen(self) -> "ScheduleList":
        """Check what is named, and the options."""
        if self.schedules is None and self.tables is None:
            raise ValueError("--schedules or --tables is missing: as gpipe,1f1b,mine.csv")
        repair = None if self.repair is None else resolve_choice(self.repair, REPAIRS, "--repair")
        made = self._replace(options=self.options._replace(repair=repair))
        made.check()
        return made

    def check(self) -> None:
        """Refuse a schedule that is named twice, and an option without effect."""
        names = self.names
        for name in names:
            if names.count(name) > 1:
                option = "--schedules" if self.tables is None else "--schedules and --tables"
                raise ValueError(f"{option} names {name} twice")
        # whether an option that says something of runs too has an effect, the command knows
        self.options._replace(of_runs=(*self.options.of_runs, *OF_RUNS)).check(names)
        repair = self.options.repair
        if repair and all(self.options.builder(name).sizes is None for name in names):
            raise ValueError(f"--repair {repair} has no effect without a table")

    @property
    def names(self) -> list[str]:
        """Names of all, folders unfolded."""
        texts = [] if self.schedules is None else [t.strip() for t in self.schedules.split(",")]
        return [name for text in (*texts, *(self.tables or ())) for name in self._listed(text)]

    def _listed(self, text: str) -> list[str]:
        return listed(text, repair=self.options.repair)

    def sized(self, microbatches: Sequence[int] | None) -> list[SizedSchedule]:
        """Give each its size: as asked for, else that of its table, else that of all tables."""
        own = {name: self.options.builder(name).sizes for name in self.names}
        tables = [sizes for sizes in own.values() if sizes is not None]
        alike = [{sizes[k] for sizes in tables} for k in range(2)]
        given = [None if self.workers is None else [self.workers], microbatches]
        every: dict[str, list[Sequence[int]]] = {name: [] for name in own}
        for place, option in enumerate(("--workers", "--microbatches")):
            common = sorted(alike[place]) if len(alike[place]) == 1 else None
            for name, sizes in own.items():
                of_table = None if sizes is None else [sizes[place]]
                found = given[place] or of_table or common
                if found is None:
                    differ = " and the tables differ" if tables else ""
                    raise ValueError(f"{option} is missing: {name} is of any size{differ}")
                every[name].append(found)
        rounds = range(len(microbatches or [1]))  # of all schedules, one for each M
        return [
            SizedSchedule(name, workers[0], counts[k])
            for k in rounds
            for name, (workers, counts) in every.items()
        ]


@contextmanager
def naming(table: pj.ScheduleTable) -> Iterator[None]:
    """Say which of several tables it is that cannot run."""
    try:
        yield
    except pj.ScheduleError as error:
        raise pj.ScheduleError(f"{table.name}: {error.reason}", error.grid) from error


def built(
    points: Sequence[SizedSchedule], options: TableOptions, pricing: Pricing | None
) -> tuple[dict[str, pj.ScheduleTable], dict[str, str]]:
    """Build every schedule; one that does not exist for these numbers says why instead."""
    tables, missing = {}, {}
    for point in points:
        own = options.of(point.name)
        try:
            tables[point.name] = own.build(*point, pricing)
        except MismatchError as error:
            missing[point.name] = getattr(error, "reason", str(error))
    return tables, missing
