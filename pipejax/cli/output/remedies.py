"""Remedies as commands, as JSON and as a table, and the files of the tables that they have."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.line import changed_command
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.tables import SCHEDULE_OPTIONS
from pipejax.cli.options.values import Text
from pipejax.cli.output.launches import launch_json, launch_lines
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.report import Column, plain, table_of
from pipejax.cli.output.report_pages import share_bar
from pipejax.schedules.naming import find
from pipejax.schedules.table.links import POSTINGS
from pipejax.schedules.table.table_files import is_csv, text_for

if TYPE_CHECKING:
    from pipejax.search.remedies.explain import Explanation, Remedy
    from pipejax.search.remedies.setup import Setup


# options that say something of this command alone
CHOICE = ("memory_limit", "stage_layers", "schedules", "search")  # of remedies
OWN = (*CHOICE, "out", "write_tables", "force", "format", "json", "details", "config")
OF_LINKS = ("link", "posting", "shared_links", "pair_links", "eager_below")
# options that say which table it is
OF_TABLE = ("schedule", "workers", "microbatches", *SCHEDULE_OPTIONS)
MADE_BY = ("order", "optimise", "rules")  # ways to a table that no option of `evaluate` gives
TABLES = Path("tables")  # of remedies, unless they are written
FOUND = "better.csv"  # of what a search finds, unless tables are written
LONGEST = 40  # letters of what a file's name says of its table
# causes that another schedule is held against: nothing is undone
OF_SCHEDULES = ("schedule", "memory")
ROUNDING = 1e-12  # of the step: a part below it is what sums in double precision leave
NEGLIGIBLE = 0.005  # change of the memory that a first screen does not name


def takes_limit(schedule: Text) -> bool:
    """Whether a schedule is planned for a memory limit."""
    return schedule is not None and "memory_limit" in find(schedule).options


def tables_of(found: "Explanation", folder: Path | None) -> Iterator[tuple[int, Path]]:
    """The file of each remedy's table, by its number, where it is another than now."""
    for number, remedy in enumerate(found.remedies if folder else (), 1):
        table = remedy.setup.table
        if table is not found.memory.begin.table:
            what = re.sub("[^a-z0-9]+", "-", remedy.what.lower()).strip("-")[:LONGEST]
            suffix = ".csv" if is_csv(table) else ".json"
            yield number, (folder or Path()) / f"{number}-{what}{suffix}"


def write_tables_of(draft: Path, found: "Explanation", files: Mapping[int, Path]) -> None:
    """Write the tables of remedies into a new folder."""
    draft.mkdir()
    for number, path in files.items():
        text = text_for(found.remedies[number - 1].setup.table, path)
        write_file(draft / path.name, text)


def command_of(
    remedy: "Remedy",
    first: "Setup",
    line: Mapping[str, Any],
    table: Path | None,
    written: Path | None,
) -> str:
    """The command that repeats a remedy, whose table is in a file if nothing else builds it."""
    setup = remedy.setup
    changes = dict(setup.options)
    called = "evaluate"
    keeps_limit = "schedule" not in changes and takes_limit(line.get("schedule"))
    without = tuple(name for name in OWN if name != "memory_limit" or not keeps_limit)
    if changes.get("scale") and "scale" in line:
        changes["scale"] = f"{line['scale']},{changes['scale']}"
    is_measured = getattr(setup.source, "is_of_stages", False)
    if is_measured and setup.table.num_stages != first.table.num_stages:
        changes.setdefault("measured_stages", str(first.table.num_stages))
    given = setup.source.microbatches.order if isinstance(setup.source, Pricing) else None
    if given is not None and setup.order:  # the order found is one of the order given
        changes["microbatch_order"] = ",".join(str(given[k]) for k in setup.order)
    searched = {name: changes.pop(name) for name in MADE_BY if name in changes}
    if "rules" in searched and table is None and written is not None:
        own = tuple(name for name in OWN if name not in CHOICE)
        tables = changed_command("explain", line, {"write_tables": str(written.parent)}, own)
        from_file = {**changes, **dict.fromkeys(OF_TABLE), "table": str(written)}
        return f"{tables} && {changed_command('evaluate', line, from_file, OWN)}"
    from_file = {**changes, **dict.fromkeys(OF_TABLE), "table": str(table or FOUND)}
    if searched and table is not None:
        changes = from_file
    elif "order" in searched:
        called, without = "tune messages", (*without, *OF_LINKS)
        changes |= {"iterations": searched["order"], "time_limit": "1000s", "out": FOUND}
    elif "optimise" in searched:
        called = "optimize"
        changes |= {"memory_limit": searched["optimise"], "time_limit": "8s", "out": FOUND}
    command = changed_command(called, line, changes, without)
    if called == "tune messages" and setup.links.posting != POSTINGS[0]:  # it runs early posts
        command += f" && {changed_command('evaluate', line, from_file, OWN)}"
    return command


def launches_of(remedy: "Remedy") -> "Sequence[pj.results.Launch]":
    """What launchers are told to run a remedy; of measured times, of the pipeline alone."""
    setup = remedy.setup
    if setup.source.workload is not None:
        return pj.costing.launches(setup.source.workload, setup.table)
    return pj.costing.pipeline_launches(setup.table, setup.layers or None)


def remedies_json(
    found: "Explanation", line: Mapping[str, Any], files: Mapping[int, Path]
) -> list[dict[str, Any]]:
    """Remedies with their commands; tables of some are in files."""
    first, written = found.memory.begin, dict(tables_of(found, TABLES))
    return [
        {
            "what": remedy.what,
            "command": command_of(remedy, first, line, files.get(number), written.get(number)),
            "saves": remedy.saves,
            "step_time": remedy.step_time,
            "assumes": "; ".join(remedy.assumes),
            "bound": remedy.bound,
            "kind": remedy.kind,
            "memory": remedy.memory,
            "launch": launch_json(launches_of(remedy)),
            "fits": remedy.fits,
        }
        for number, remedy in enumerate(found.remedies, 1)
    ]


def first_fault(found: "Explanation") -> str:
    """Return the bottleneck, and the time that it costs."""
    worst = found.bottleneck
    why = worst.why.partition("; ")[0]
    if worst.seconds <= 0 or worst.kind in OF_SCHEDULES:
        return why
    return f"{why}, which costs {_with_share(worst.seconds, found)}"


def _with_share(time: float, found: "Explanation") -> str:
    return f"{seconds(time)} ({percent(time / (found.step_time or 1.0))})"


def advice_view(found: "Explanation", rows: Sequence[Mapping[str, Any]]) -> Iterator[object]:
    """Yield the next causes, the remedy that saves most, and the best that a launcher can run."""
    for fault in found.faults[1:3]:
        yield plain(f"also: {fault.why.partition('; ')[0]} ({seconds(fault.seconds)})")
    if not rows:
        yield "no remedy that was tried makes it shorter"
        return
    yield plain(f"best remedy {_remedy_text(rows[0], found)}")
    if rows[0]["assumes"]:
        yield plain(f"  assumes: {rows[0]['assumes']}")
    for remedy, row in zip(found.remedies, rows, strict=True):
        names = [name for name, launch in row["launch"].items() if not launch["lacks"]]
        if names and not remedy.setup.rules:
            if row is not rows[0]:
                yield plain(
                    f"best with options of {' and '.join(names)} {_remedy_text(row, found)}"
                )
            break
    yield plain(f"next: {rows[0]['command']}")


def _remedy_text(row: Mapping[str, Any], found: "Explanation") -> str:
    needs = f", {row['memory']:.3g} times the memory" * (abs(row["memory"] - 1) > NEGLIGIBLE)
    return f"saves {_with_share(row['saves'], found)}{needs}: {row['what']}"


def advice_details(
    found: "Explanation", rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[object]]:
    """Return the parts of the step, and the remedies with their commands."""
    parts = [part for part in found.parts if abs(part.seconds) > ROUNDING * found.step_time]
    columns = (
        Column("part", "name"),
        Column("time", "seconds", seconds),
        Column("of the step", lambda row: percent(row["seconds"] / (found.step_time or 1.0))),
        Column("meaning", "meaning"),
    )
    details: dict[str, list[object]] = {
        "parts of the step": [
            share_bar({part.name: part.seconds for part in parts}),
            table_of((part._asdict() for part in parts), columns),
        ],
        "causes": [plain(f"{seconds(fault.seconds)}: {fault.why}") for fault in found.faults],
    }
    if not rows:
        return details
    numbered = [{"number": k, **row} for k, row in enumerate(rows, 1)]
    table = table_of(numbered, REMEDIES, caption="memory: of the fullest worker, relative to now")
    commands = []
    for row in numbered:
        if row["assumes"]:
            commands.append(plain(f"{row['number']}. assumes: {row['assumes']}"))
        commands.append(plain(f"{row['number']}. {row['command']}"))
    scaled = found.remedies[0].setup.rules
    unchanged = ["launchers cannot change the times of ops that remedy 1 changes"]
    return details | {
        "remedies": [table, *commands],
        "launcher options of remedy 1": [
            *unchanged[: bool(scaled)],
            *launch_lines(launches_of(found.remedies[0])),
        ],
    }


REMEDIES = (
    Column("", "number"),
    Column("remedy", "what", escape),
    Column("saves", "saves", seconds),
    Column("step time", "step_time", seconds),
    Column("memory", "memory", lambda ratio: f"x {ratio:.3g}"),
    Column("lower bound", "bound", seconds),
)
