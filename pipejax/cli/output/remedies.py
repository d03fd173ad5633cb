"""Remedies as commands, as JSON and as a table, and the files of the tables that they have."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.line import written
from pipejax.cli.options.scenario import command_line
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.plans import launch_json, launch_lines
from pipejax.cli.output.report import pick, plain
from pipejax.cli.output.tables import Column, rows_table
from pipejax.schedules.table.links import LINK_OPTIONS, POSTINGS
from pipejax.schedules.table.table_files import is_csv, text_for

if TYPE_CHECKING:
    from pipejax.search.remedies.explain import Effect, Explanation, Remedy


DEFAULT_FOLDER = Path("tables")  # folder of remedies' tables in commands, if none is written
SEARCH_FILE = "better.csv"  # file of the result in commands that search
ITERATIONS = 10  # of a search of an order of messages
MAX_NAME_LETTERS = 40  # of the remedy, in the name of its table's file
# parts and causes that cannot be removed alone: only another schedule changes them
ROUNDING = 1e-12  # of the step: a part below it is what sums in double precision leave
SCHEDULE_CAUSES = ("schedule", "microbatches", "memory")
WORTH_COMBINING = 0.01  # of the step, that a combination must save beyond a single remedy
MAX_OTHER_CAUSES = 2  # on a first screen
ALWAYS_SHOWN = ("joint", "memory")  # kinds of causes that a first screen never drops
NEGLIGIBLE = 0.005  # change of the memory that a first screen does not name


def table_files(explanation: "Explanation", folder: Path | None) -> Iterator[tuple[int, Path]]:
    """Yield number and file of each remedy whose table differs from that of the run."""
    if folder is None:
        return
    from pipejax.search.remedies.explain import is_same_table

    table = explanation.memory.begin.scenario.table()
    for number, remedy in enumerate(explanation.remedies, 1):
        if not is_same_table(remedy.scenario.table(), table):
            suffix = ".csv" if is_csv(remedy.scenario.table()) else ".json"
            name = re.sub("[^a-z0-9]+", "-", remedy.what.lower()).strip("-")[:MAX_NAME_LETTERS]
            yield number, folder / f"{number}-{name}{suffix}"


def write_table_files(draft: Path, explanation: "Explanation", files: Mapping[int, Path]) -> None:
    """Write the tables of remedies into a new folder."""
    draft.mkdir()
    for number, path in files.items():
        text = text_for(explanation.remedies[number - 1].scenario.table(), path)
        write_file(draft / path.name, text)


# options of links that a remedy's command repeats, except queues, which `tune messages` chooses
LINK_FIELDS = (name for name in LINK_OPTIONS if name not in ("model", "queues", "host_links"))
REPEATED_LINK_OPTIONS = ("link", *LINK_FIELDS)
# options of `explain` that choose the remedies
REMEDY_OPTIONS = ("memory_limit", "stage_layers", "schedules", "launcher", "search")


def remedy_command(
    remedy: "Remedy",
    table: Path | None,
    default: Path | None,
    base: "pj.Scenario",
    saved: "pj.Scenario | None",
) -> str:
    """Return the command that repeats a remedy of the run `base`.

    `table` is the file of the remedy's table if it was written, `default` the file to which the
    command writes the table otherwise, if it can. `saved` is the run with its table and costs in
    saved files, which the command then names.
    """
    scenario, search = _with_files(remedy.scenario, base, saved), remedy.search
    if search is None:
        return command_line(scenario)
    if table is not None:
        return command_line(scenario.replace(schedule=pj.costing.TableFile(str(table))))
    start = _with_files(search.scenario, base, saved)
    if search.kind == "ring" and default is not None:
        options = {**written(*REMEDY_OPTIONS), "write_tables": str(default.parent)}
        explanation = scenario.replace(schedule=pj.costing.TableFile(str(default)))
        return f"{command_line(base, 'explain', **options)} && {command_line(explanation)}"
    if search.kind == "optimize":
        limit = ",".join(f"{limit:g}" for limit in search.limits)
        more = {"memory_limit": limit, "time_limit": "8s", "out": SEARCH_FILE}
        return command_line(start, "optimize", **more)
    more = {"iterations": str(ITERATIONS), "time_limit": "1000s", "out": SEARCH_FILE}
    command = command_line(start, "tune messages", REPEATED_LINK_OPTIONS, **more)
    if scenario.links.posting != POSTINGS[0]:  # `tune messages` answers for early posts
        explanation = scenario.replace(schedule=pj.costing.TableFile(SEARCH_FILE))
        command += f" && {command_line(explanation)}"
    return command


def _with_files(
    scenario: "pj.Scenario", base: "pj.Scenario", saved: "pj.Scenario | None"
) -> "pj.Scenario":
    """Let a remedy read the saved files of the run `base`, where the remedy has its values."""
    source = scenario.source
    # unless the user typed --measured-stages, the table tells this number
    if source.stages == scenario.table().num_stages and not written("measured_stages"):
        source = dataclasses.replace(source, stages=None)
    scenario = scenario.replace(costs=source)
    if saved is None:
        return scenario
    files = dataclasses.replace(saved.source, stages=source.stages, places=source.places)
    edits = tuple(e for e in scenario.edits if not isinstance(e, pj.costing.SlowWorkers))
    scenario = scenario.replace(costs=files, edits=edits)  # the file has the slow workers
    names = "schedule num_workers num_microbatches options"
    is_same_table = pick(scenario, names) == pick(base, names)
    return scenario.replace(**pick(saved, names)) if is_same_table else scenario


def remedies_json(
    explanation: "Explanation", files: Mapping[int, Path], saved: "pj.Scenario | None" = None
) -> list[dict[str, Any]]:
    """Return remedies with their commands; `files` has written tables, by number of the remedy."""
    has_ring = any(r.search is not None and r.search.kind == "ring" for r in explanation.remedies)
    defaults = dict(table_files(explanation, DEFAULT_FOLDER if has_ring else None))
    base = explanation.memory.begin.scenario
    return [
        {
            **pick(remedy, "what shelf launchers"),
            "command": remedy_command(remedy, files.get(number), defaults.get(number), base, saved),
            **pick(remedy, "saves step_time"),
            "assumes": "; ".join(remedy.assumes),
            **pick(remedy, "bound kind memory"),
            "launch": launch_json(remedy.launches),
            "fits": remedy.fits,
        }
        for number, remedy in enumerate(explanation.remedies, 1)
    ]


def first_fault(explanation: "Explanation") -> str:
    """Return the bottleneck, and the time that it costs."""
    worst = explanation.bottleneck
    why = worst.why.partition("; ")[0]
    if worst.seconds <= 0 or worst.kind in SCHEDULE_CAUSES:
        return why
    return f"{why}, which costs {_with_share(worst.seconds, explanation)}"


def _with_share(time: float, explanation: "Explanation") -> str:
    return f"{seconds(time)} ({percent(time / (explanation.step_time or 1.0))} of the step)"


def advice_view(explanation: "Explanation", rows: Sequence[Mapping[str, Any]]) -> Iterator[object]:
    """Yield the next causes, and the best remedy of each launcher and shelf."""
    from pipejax.search.remedies.changes import can_change_schedule

    worst, kinds = explanation.bottleneck, {fault.kind for fault in explanation.faults}
    ends = sum(part.seconds for part in explanation.parts if part.name in ("start", "end"))
    if ends > worst.seconds and not kinds & {"schedule", "microbatches"}:
        text = f"also: start and end of the pipeline take {_with_share(ends, explanation)}"
        name = explanation.launcher
        schedules = [r for r in explanation.remedies if r.kind == "schedule" and r.fits]
        saving = [r for r in schedules if r.saves > 0 and name in (None, *r.launchers)]
        end = f"no schedule{f' of {name}' if name else ''} that fits makes the step shorter"
        if not can_change_schedule(explanation.memory.begin):
            end = "no built-in schedule has the same ops"
        if best := max(saving, key=lambda r: r.saves, default=None):
            end = f"{best.what} saves {_with_share(best.saves, explanation)}"
        yield plain(f"{text}; {end}")
    others = [fault for fault in explanation.faults if fault is not worst]
    for place, fault in enumerate(others):
        if place < MAX_OTHER_CAUSES or fault.kind in ALWAYS_SHOWN:
            why = fault.why.partition("; ")[0].replace(": ", ", ")
            text = f"{why}; costs {seconds(fault.seconds)}"
            if fault.kind == "memory":
                text = why.replace("would save", f"would save {seconds(fault.seconds)},")
            yield plain(f"also: {text}")
    yield from remedies_view(explanation, rows, rows)


def remedies_view(
    explanation: "Explanation",
    rows: Sequence[Mapping[str, Any]],
    named: Sequence[Mapping[str, Any]],
    before_command: Sequence[object] = (),
    lead: str | None = None,
) -> Iterator[object]:
    """Yield the best of the `named` remedies for each launcher and shelf, and the first command.

    A shelf is what a remedy needs: options of a launcher, a table file or code, or hardware. Each
    remedy begins with `lead`; without it, a line says whether the first one shortens the cause.
    """
    if not rows:
        fits = explanation.memory.fits(explanation.memory.begin)
        is_limited = any(fault.kind == "memory" for fault in explanation.faults)
        also = " and no more memory" if fits and is_limited else ""
        text = f"no change with the same number of workers{also} makes the step "
        yield text + ("shorter" if fits else "fit; other layouts of the job may")
        return
    best_rows = _best_rows(named, explanation.step_time)
    yield from _memory_doubt(explanation, best_rows)
    if lead is None:
        yield from _other_cause(explanation, explanation.remedies[rows.index(best_rows[0])])
    launcher = explanation.launcher
    texts = [_remedy_text(row, explanation) + _means(row, launcher) for row in best_rows]
    for before, text in itertools.pairwise(["", *texts]):
        _, _, assumed = before.partition("; assumes ")
        yield plain((lead or "") + (text.replace(assumed, "the same") if assumed else text))
    place = rows.index(best_rows[0]) if best_rows else 0
    yield from before_command
    if lead is not None and launcher and not rows[place]["launchers"]:
        return  # no option of the launcher that ran the trace
    yield plain(f"next: {rows[place]['command']}")
    yield from launch_lines(_able_launches(explanation.remedies[place]), short=True)


def shown_first(explanation: "Explanation", rows: Sequence[Mapping[str, Any]]) -> "Remedy | None":
    """Return the remedy that a first screen shows first; None without remedies."""
    best_rows = _best_rows(rows, explanation.step_time)
    return explanation.remedies[rows.index(best_rows[0])] if best_rows else None


def _memory_doubt(
    explanation: "Explanation", rows: Sequence[Mapping[str, Any]]
) -> Iterator[object]:
    """Yield a line if the run, or the remedy that makes it fit, may need more than predicted."""
    memory, need, subject = explanation.memory, explanation.memory.begin_needs.max(), "this run"
    if rows and not memory.fits(memory.begin):
        need, subject = rows[0]["memory"] * need, "the first remedy"
    if memory.factors and need <= memory.available < need * memory.factors[-1]:
        smallest, largest = memory.factors[0], memory.factors[-1]
        yield plain(
            f"{subject} fits by {percent(1 - need / memory.available)}; measured runs of "
            f"{explanation.launcher} needed {smallest:.3g} to {largest:.3g} times as much"
        )


def _other_cause(explanation: "Explanation", shown_first: "Remedy") -> Iterator[object]:
    """Yield lines if the first remedy does not shorten the bottleneck, or none removes it."""
    from pipejax.search.remedies.explain import shortens

    if explanation.bottleneck.seconds > 0 and not shortens(shown_first, explanation):
        text = "the first remedy does not shorten this cause"
        if other := next((r for r in explanation.remedies if shortens(r, explanation)), None):
            text += f"; {other.what} does, and saves {_with_share(other.saves, explanation)}"
        yield plain(text)
        return
    fault, remedies = explanation.bottleneck, explanation.remedies
    saved = max((r.saves for r in remedies if r.shelf != "hardware"), default=0.0)
    if 0 < saved < (1 - WORTH_COMBINING) * fault.seconds:
        reasons = {"imbalance": "launchers move whole layers"}
        why = reasons.get(fault.kind, "the rest needs faster hardware")
        yield plain(f"settings and schedules save at most {seconds(saved)} of it: {why}")


def _best_rows(rows: Sequence[Mapping[str, Any]], step: float) -> list[Mapping[str, Any]]:
    """Return the best remedy of each launcher, and of each shelf without a launcher.

    `rows` are sorted by saving within a shelf. A combined remedy replaces the best single one if it
    saves at least `WORTH_COMBINING` of the step time `step` [s] more.
    """
    best: dict[str, Mapping[str, Any]] = {}  # by launcher, or by shelf without one
    for row in rows:
        for group in row["launchers"] or [row["shelf"]]:
            added = row["saves"] - best.setdefault(group, row)["saves"]
            if row["kind"] == "combined" and added >= WORTH_COMBINING * step:
                best[group] = row
    selected = {id(row) for row in best.values()}  # a row may be the best of several groups
    best_rows = [row for row in rows if id(row) in selected]
    with_launcher = [row for row in best_rows if row["launchers"]]
    others = [row for row in best_rows if not row["launchers"]]
    return [*sorted(with_launcher, key=lambda row: -row["saves"]), *others]


def _needs(row: Mapping[str, Any]) -> str:
    """Name the launchers or the shelf that a remedy needs."""
    from pipejax.search.remedies.candidates import SHELVES

    launchers = " or ".join(row["launchers"])
    return f"options of {launchers}" if launchers else SHELVES[row["shelf"]]


def _means(row: Mapping[str, Any], launcher: str | None) -> str:
    """Write what applies a remedy, and its assumption; hardware needs what it assumes."""
    assumes = row["assumes"].replace("; ", " and ")
    if row["shelf"] == "hardware":
        return f"; needs {assumes or _needs(row)}"
    means = f"; set by {_needs(row)}"
    if not row["launchers"]:
        means = f"; no option of {launcher or 'a launcher'} does it: needs {_needs(row)}"
        lacks = row["launch"].get(launcher, {}).get("lacks")
        if row["kind"] == "settings" and lacks:  # the options exist, but not for this run
            means = f"; {launcher} lacks {', '.join(lacks)}"
    if row["kind"] == "layers" and row["what"].endswith("equally long"):
        means = LAYERS_HINT
    return means + (f"; assumes {assumes}" if assumes else "")


def _able_launches(remedy: "Remedy") -> "list[pj.results.Launch]":
    """Return the options of the launchers that run a remedy."""
    return [launch for launch in remedy.launches if launch.launcher in remedy.launchers]


def _effects(explanation: "Explanation") -> Iterator[object]:
    """Yield one line with the cause's time and the savings of remedies, without repetitions."""
    phrases = {"part": f"{explanation.bottleneck.kind} takes", "cause": "its removal saves"}
    distinct: dict[tuple[float, str], Effect] = {}  # the first of equal times and causing parts
    for effect in explanation.effects:
        distinct.setdefault((effect.seconds, effect.part), effect)
    effects = distinct.values()
    texts = [f"{phrases.get(e.what, f'{e.what} saves')} {seconds(e.seconds)}" for e in effects]
    if texts:
        yield plain("; ".join(texts))


# of an even split, which no launcher runs
LAYERS_HINT = "; launchers move whole layers: for these, repeat with --stage-layers N"


def _remedy_text(row: Mapping[str, Any], explanation: "Explanation") -> str:
    """Return the name of a remedy, its saving, and the memory that it needs."""
    is_same = abs(row["memory"] - 1) <= NEGLIGIBLE
    needs = "" if is_same else f" with {row['memory']:.3g} times the memory"
    verb, memory = "saves", explanation.memory
    if row["shelf"] != "hardware" and not memory.fits(memory.begin):  # remedies that fit alone
        verb = "fits and saves"
    if row["saves"] < 0:
        verb = "fits and takes longer by"
    saves = _with_share(abs(row["saves"]), explanation)
    what = row["what"].removeprefix("combined: ").replace(": all", " so that all")
    name = what.replace(": ", " ").replace("; ", " + ")
    name = name.replace("order of", "a better order of").replace("over stages so", "moved so")
    return f"{name}: {verb} {saves}{needs}"


def advice_details(
    explanation: "Explanation", rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[object]]:
    """Return the parts of the step, and the remedies with their commands."""
    rounding = ROUNDING * explanation.step_time
    parts = [part for part in explanation.parts if abs(part.seconds) > rounding]
    columns = (
        Column("part", "name"),
        Column("time", "seconds", seconds),
        Column("of the step", lambda row: percent(row["seconds"] / (explanation.step_time or 1.0))),
        Column("meaning", "meaning"),
    )
    causes = (plain(f"{seconds(fault.seconds)}: {fault.why}") for fault in explanation.faults)
    details: dict[str, list[object]] = {
        "parts of the step": [rows_table((part._asdict() for part in parts), columns)],
        "causes": [*causes, *_effects(explanation)],
    }
    if not rows:
        return details
    numbered = [{"number": k, **row} for k, row in enumerate(rows, 1)]
    table = rows_table(numbered, REMEDIES, caption="memory: of the fullest worker, relative to now")
    commands = []
    for remedy, row in zip(explanation.remedies, numbered, strict=True):
        if row["assumes"]:
            commands.append(plain(f"{row['number']}. assumes: {row['assumes']}"))
        commands.append(plain(f"{row['number']}. {row['command']}"))
        lines = launch_lines(_able_launches(remedy))
        commands += [plain(f"{row['number']}. {line.plain}") for line in lines]
    if explanation.skipped:
        skipped = "; ".join(explanation.skipped)
        commands.append(plain(f"left out, as they rest on several assumptions: {skipped}"))
    first = explanation.remedies[0].launches
    shown_launches = [launch for launch in first if explanation.launcher in (None, launch.launcher)]
    return details | {
        "remedies": [table, *commands],
        "first remedy in launchers": [plain(f"1. {x.plain}") for x in launch_lines(shown_launches)],
    }


REMEDIES = (
    Column("", "number"),
    Column("needs", _needs),
    Column("remedy", "what", escape),
    Column("saves", "saves", seconds),
    Column("step time", "step_time", seconds),
    Column("memory", "memory", lambda ratio: f"x {ratio:.3g}"),
    Column("lower bound", "bound", seconds),
)
