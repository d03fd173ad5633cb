"""`pipejax explain`: why a step takes so long, what would make it shorter, and the commands."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.markup import escape
from rich.text import Text as Marked

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.given import Line
from pipejax.cli.options.memory import ActivationOptions, MemoryLimit
from pipejax.cli.options.pricing import Pricing, required
from pipejax.cli.options.tables import ScheduleSettings, TableChoice
from pipejax.cli.options.values import Text, parse_counts
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output
from pipejax.cli.output.kinds import PAGE, TABLES
from pipejax.cli.output.launches import launch_json, launch_lines
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.progress import progress, waiting
from pipejax.cli.output.report import Column, heading, plain, sizes_of, table_of
from pipejax.schedules.naming import find
from pipejax.schedules.table.table_files import is_csv, text_for

if TYPE_CHECKING:
    from pipejax.search.remedies.explain import Explanation, Remedy
    from pipejax.search.remedies.setup import Setup


# options that say something of this command alone
OWN = (
    "memory_limit",
    "search",
    "stage_layers",
    "out",
    "write_tables",
    "force",
    "format",
    "json",
    "config",
)
OF_LINKS = ("link", "posting", "shared_links", "pair_links", "eager_below")
# options that say which table it is
OF_TABLE = ("schedule", "workers", "microbatches", *ScheduleSettings._fields)
LONGEST = 40  # letters of what a file's name says of its table
# causes that another schedule is held against: nothing is undone
OF_SCHEDULES = ("schedule", "memory")
ROUNDING = 1e-12  # of the step: a part below it is what sums in double precision leave
SHOWN = 8  # remedies that a person reads


def explain(
    choice: TableChoice,
    pricing: Pricing | None,
    links: pj.Links,
    line: Line,
    memory_limit: Text = None,
    stage_layers: Text = None,
    search: bool = False,
    out: Annotated[Output, PAGE] = NO_OUTPUT,
    write_tables: Annotated[Output, TABLES] = NO_OUTPUT,
) -> Answer:
    """Say why a step takes so long, and what would make it shorter, with the commands.

    Every cause is undone and every remedy applied, and the run repeated.

    Options:
      memory_limit: remedies that need more are left out; what the system has if not given. Without
        any limit, those that need more than the run now.
      stage_layers: one number for all stages, or one each; layers are moved whole then.
      out: a report as one page (.html), with the explorer in it.
      write_tables: of every remedy that has another, for `--table`.
      search: schedules in the memory of now, layers over stages, schedules that take long to plan.

    Example:
      pipejax explain -s 1f1b -P 4 -M 16 --stage-times F=10ms,B=20ms --comm 2ms
      --stragglers 2=1.4
    """
    from pipejax.search.remedies.explain import explain_setup
    from pipejax.search.remedies.setup import Schedule, begin

    if choice.repair is not None:
        raise ValueError(f"--repair {choice.repair}: write the table with `pipejax export` first")
    is_limited = memory_limit is not None and _takes_limit(choice.schedule)
    if memory_limit is not None and is_limited:  # it is planned for it too
        planned = {**choice.options.options, "memory_limit": MemoryLimit.read(memory_limit)}
        choice = choice._replace(options=choice.options._replace(options=planned))
    table = choice.build()
    priced = required(pricing)
    schedule = None  # as a table where it is planned for a limit: that of other sizes is another
    if choice.schedule is not None and not is_limited:
        schedule = Schedule(choice.schedule, choice.options.of_table(choice.schedule))
    layers = None if stage_layers is None else _stage_layers(stage_layers, table.num_stages)
    setup = begin(table, links, priced.of_stages(table.num_stages), schedule, layers)
    limit = _limit(memory_limit, setup)
    with progress("explaining", None) as bar:
        found = explain_setup(setup, limit, search=search, on_progress=bar.tell)
    files = dict(_tables_of(found, write_tables.path))
    result = (
        sizes_of(table)
        | {"link": links.model}
        | _as_json(found, line, files)
        | write_tables.as_json()
    )
    write_tables.save(lambda draft: _write_tables(draft, found, files))
    if out.path is not None:
        text = _page(found, result)
        out.save(lambda draft: write_file(draft, text))
    return Answer(
        result, _said(found, result), {"wrote the report to": out, "wrote tables to": write_tables}
    )


def _takes_limit(schedule: Text) -> bool:
    return schedule is not None and "memory_limit" in find(schedule).options


def _stage_layers(text: str, stages: int) -> list[int]:
    """Read layers: one number for all stages, or one for each."""
    counts = parse_counts(text, "--stage-layers")
    return counts * stages if len(counts) == 1 else counts


def _limit(text: Text, setup: "Setup") -> Any:
    """What each worker may hold, in the unit in which needs are counted."""
    if text is None:
        system = setup.source.system
        return None if system is None else float(system.memory_available)
    read = MemoryLimit.read(text)
    if read.in_bytes != (setup.source.workload is not None):
        wanted = "activations" if read.in_bytes else "bytes, as 80GB"
        raise ValueError(f"--memory-limit {text}: memory is counted in {wanted} here")
    workers = setup.table.num_workers
    if len(read.values) not in (1, workers):
        raise ValueError(f"--memory-limit must have one entry or {workers}, got {text!r}")
    return np.broadcast_to(np.array(read.values, float), workers)


def _tables_of(found: "Explanation", folder: Path | None) -> Iterator[tuple[int, Path]]:
    """The file of each remedy's table, by its number, where it is another than now."""
    for number, remedy in enumerate(found.remedies if folder else (), 1):
        table = remedy.setup.table
        if table is not found.memory.begin.table:
            what = re.sub("[^a-z0-9]+", "-", remedy.what.lower()).strip("-")[:LONGEST]
            suffix = ".csv" if is_csv(table) else ".json"
            yield number, (folder or Path()) / f"{number}-{what}{suffix}"


def _write_tables(draft: Path, found: "Explanation", files: Mapping[int, Path]) -> None:
    draft.mkdir()
    for number, path in files.items():
        text = text_for(found.remedies[number - 1].setup.table, path)
        write_file(draft / path.name, text)


def command_of(remedy: "Remedy", first: "Setup", line: Line, table: Path | None = None) -> str:
    """The command that repeats a remedy, whose table is in a file if nothing else builds it."""
    setup = remedy.setup
    changes = dict(setup.options)
    called = "evaluate"
    keeps_limit = "schedule" not in changes and _takes_limit(line.given.get("schedule"))
    without = tuple(name for name in OWN if name != "memory_limit" or not keeps_limit)
    if changes.get("scale") and "scale" in line.given:
        changes["scale"] = f"{line.given['scale']},{changes['scale']}"
    is_measured = getattr(setup.source, "is_of_stages", False)
    if is_measured and setup.table.num_stages != first.table.num_stages:
        changes.setdefault("measured_stages", str(first.table.num_stages))
    given = setup.source.microbatches.order if isinstance(setup.source, Pricing) else None
    if given is not None and setup.order:  # the order found is one of the order given
        changes["microbatch_order"] = ",".join(str(given[k]) for k in setup.order)
    searched = {name: changes.pop(name) for name in ("order", "optimise") if name in changes}
    if searched and table is not None:
        changes |= dict.fromkeys(OF_TABLE) | {"table": str(table)}
    elif "order" in searched:
        called, without = "tune messages", (*without, *OF_LINKS)
        changes |= {"iterations": searched["order"], "time_limit": "1000s", "out": "better.csv"}
    elif "optimise" in searched:
        called = "optimize"
        changes |= {"memory_limit": searched["optimise"], "time_limit": "8s", "out": "better.csv"}
    return line.command(called, changes, without)


def _launches(remedy: "Remedy") -> "Sequence[pj.results.Launch]":
    """What launchers are told to run a remedy; of measured times, of the pipeline alone."""
    setup = remedy.setup
    if setup.source.workload is not None:
        return pj.costing.launches(setup.source.workload, setup.table)
    return pj.costing.pipeline_launches(setup.table, setup.layers or None)


def _as_json(found: "Explanation", line: Line, files: Mapping[int, Path]) -> dict[str, Any]:
    first = found.memory.begin
    worst = found.bottleneck
    return {
        "step_time": found.step_time,
        "parts": [part._asdict() for part in found.parts],
        "bottleneck": worst._asdict(),
        "faults": [fault._asdict() for fault in found.faults],
        # JSON has no infinity: what tolerates any time has none
        "tolerated": found.tolerated if math.isfinite(found.tolerated or math.inf) else None,
        "memory": {
            "unit": found.memory.unit,
            "needs": found.memory.at_first,
            "limit": found.memory.limit,
            "fits": found.memory.fits(first),
        },
        "remedies": [
            {
                "what": remedy.what,
                "command": command_of(remedy, first, line, files.get(number)),
                "saves": remedy.saves,
                "step_time": remedy.step_time,
                "assumes": "; ".join(remedy.assumes),
                "bound": remedy.bound,
                "kind": remedy.kind,
                "memory": remedy.memory,
                "launch": launch_json(_launches(remedy)),
                "fits": remedy.fits,
            }
            for number, remedy in enumerate(found.remedies, 1)
        ],
    }


def _page(found: "Explanation", result: Mapping[str, Any]) -> str:
    """The report, with the run as it is and with the first remedy."""
    from pipejax.plots.explorer.page import page
    from pipejax.plots.explorer.payload import Explored, MemoryShown
    from pipejax.plots.report import PartShown, RemedyShown, report

    setups = [found.memory.begin, *(remedy.setup for remedy in found.remedies[:1])]
    # what holds of the table, whatever a model says of bytes
    sized = ActivationOptions(None, None)
    explored = [
        Explored(setup.run, MemoryShown(*sized.of(setup.table, None)[:4], None)) for setup in setups
    ]
    remedies = [
        RemedyShown(
            row["what"],
            seconds(row["saves"]),
            seconds(row["step_time"]),
            f"x {row['memory']:.3g}",
            seconds(row["bound"]),
            row["assumes"],
            row["command"],
        )
        for row in result["remedies"]
    ]
    parts = [
        PartShown(name, seconds(time), time / (found.step_time or 1.0), of)
        for name, time, of in found.parts
        if abs(time) > ROUNDING * found.step_time
    ]
    title = Marked.from_markup(f"{heading(result)}: {seconds(found.step_time)}").plain
    lines = [*_diagnosis(found), *filter(None, (_slower(found), _room(found)))]
    shown = "As it is" if len(setups) == 1 else f"As it is, and below: {found.remedies[0].what}"
    with waiting("looking for closed forms"):
        explorer = page(explored)
    return report(title, lines, parts, remedies, shown, explorer)


def _diagnosis(found: "Explanation") -> Iterator[str]:
    """The cause, what it costs, and what comes next."""
    worst = found.bottleneck
    yield worst.why
    if worst.seconds > 0 and worst.kind not in OF_SCHEDULES:
        without = seconds(found.step_time - worst.seconds)
        yield f"that costs {seconds(worst.seconds)}: without it the step takes {without}"
    for fault in found.faults[1:3]:
        yield f"then: {fault.why} ({seconds(fault.seconds)})"


def _slower(found: "Explanation") -> str:
    """How much slower messages may be."""
    if found.tolerated is None:
        return ""
    if math.isinf(found.tolerated):
        return "messages may take any time: none is waited for"
    return f"messages may take {found.tolerated:.3g} times as long before the step is 1 % longer"


def _room(found: "Explanation") -> str:
    """What remedies may need, where the system says it and no option."""
    from pipejax.sweep.plan.request import HEADROOM

    memory = found.memory
    if memory.limit is None or np.ndim(memory.limit):
        return ""
    whole = float(np.asarray(memory.limit))
    left = f"--memory-limit {(1 - HEADROOM) * whole / 1e9:.1f}GB"
    return (
        f"remedies may need {memory.text(whole)}, all that tensors can have; plan leaves "
        f"{100 * HEADROOM:g} % of it free: {left}"
    )


def _said(found: "Explanation", result: Mapping[str, Any]) -> Iterator[object]:
    yield f"{heading(result)}: [bold]{seconds(found.step_time)}[/]"
    first, *others = _diagnosis(found)
    yield f"  [bold]{escape(first)}[/]"
    yield from (f"  {escape(line)}" for line in others)
    least = ROUNDING * found.step_time
    parts = [part for part in result["parts"] if abs(part["seconds"]) > least]
    yield table_of(
        parts,
        (
            Column("part", "name"),
            Column("time", "seconds", seconds),
            Column("of the step", lambda row: percent(row["seconds"] / found.step_time)),
            Column("what it is", "of"),
        ),
    )
    yield from map(plain, filter(None, (_slower(found), _room(found))))
    if not found.remedies:
        yield "nothing that was tried makes it shorter"
        return
    shown = [{"number": k, **row} for k, row in enumerate(result["remedies"][:SHOWN], 1)]
    yield table_of(
        shown,
        (
            Column("", "number"),
            Column("remedy", "what", escape),
            Column("saves", "saves", seconds),
            Column("step time", "step_time", seconds),
            Column("memory", "memory", lambda ratio: f"x {ratio:.3g}"),
            Column("at least", "bound", seconds),
        ),
        title="what would make it shorter",
        caption="memory: of the fullest worker, against now; at least: no schedule is shorter then",
    )
    for row in shown:
        if row["assumes"]:
            yield plain(f"{row['number']}. assumes: {row['assumes']}")
        yield plain(f"{row['number']}. {row['command']}")
    yield plain("launchers are told of 1.:")
    yield from launch_lines(_launches(found.remedies[0]))
