"""`pipejax compare`: schedules at three levels, side by side."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.analysis.comparison.closed_forms import NO_FORM
from pipejax.base.checks import MismatchError
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, ListedRunOptions
from pipejax.cli.options.scenario import memory_room, required
from pipejax.cli.options.tables import OF_RUNS, ScheduleList, SizedSchedule, naming, with_labels
from pipejax.cli.options.values import Text, parse_counts
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.launches import layout_json
from pipejax.cli.output.numbers import above, gigabytes, percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import Column, grid, has_lines, pick, plain, table_of
from pipejax.cli.output.runs import step_json
from pipejax.schedules.cells.ops import COMMUNICATION

if TYPE_CHECKING:
    from pipejax.analysis.comparison.comparison import Comparison
    from pipejax.analysis.comparison.table_difference import (
        RowDifference,
        TableDifference,
    )
    from pipejax.schedules.cells.grammar import Grammar


@options
def compare(
    *,
    run: ListedRunOptions = ListedRunOptions(),
    links: LinkOptions = LinkOptions(),
    microbatches: Text = None,
    labels: Text = None,
    diff: bool = False,
    exchange: bool = False,
) -> Answer:
    """Compare schedules as published formula, idealised table and communication-aware run.

    Options:
      microbatches: or several, as 8,16,32; those of the tables if not given.
      labels: in place of their own names.
      diff: order, workers, phases, messages; in units of F = I = W = 1, B = 2 without times.
      exchange: each worker in turn, in large tables too, where that takes long.

    Example:
      pipejax compare -S gpipe,1f1b,chimera -P 8 -M 8,16,32 -W F=1,B=2 --comm 0.1
    """
    counts = None if microbatches is None else parse_counts(microbatches, "--microbatches")
    listed, link = run.listed, links.links()
    if diff:
        return difference(run, listed, link, counts, labels, exchange)
    settings = listed.options._replace(of_runs=OF_RUNS if run.model is not None else ())
    settings.check(listed.names)
    points = listed.sized(counts)
    first = required(listed.scenario(run, link, points[0]))
    names = listed.names
    shown = dict(zip(names, with_labels(labels, [*map(settings.called, names)]), strict=True))
    rows: list[dict[str, Any]] = []
    scenarios: list[pj.Scenario] = []
    slots: dict[str, float] | None = None  # one ratio of B to F for all: the first that there is
    with progress("evaluating", len(points)) as bar:
        for point in points:
            rows.append(_row(run, listed, link, point, slots, scenarios))
            rows[-1]["schedule"] = shown[point.name]
            slots = slots or rows[-1].get("slots")
            bar.move(advance=1)
    if slots is None:
        raise ValueError(rows[0]["error"])
    listed.check_used(scenarios)
    best = _best(rows)
    for row in rows:
        if "error" not in row and row.get("fits", True) and best.get(_size(row)):
            row["above_best"] = row["makespan"] / best[_size(row)] - 1
    sizes = {point.workers for point in points}
    workers = sizes.pop() if len(sizes) == 1 else None  # tables may differ
    result = {"workers": workers, "link": link.model, "slots": slots, "rows": rows}
    return Answer(result, _said(rows, slots, first))


def _row(
    run: ListedRunOptions,
    listed: ScheduleList,
    links: pj.Links,
    at: SizedSchedule,
    slots: dict[str, float] | None,
    scenarios: "list[pj.Scenario]",
) -> dict[str, Any]:
    """Evaluate one point and add its scenario; one that does not exist says why instead."""
    name, workers, count = at
    try:
        scenario = listed.scenario(run, links, at)
        table = scenario.table()
        scenarios.append(scenario)
        costs = scenario.table_costs()
        point: Comparison = pj.compare(table, costs, link=links, slots=slots)
    except MismatchError as error:
        reason = getattr(error, "reason", str(error))
        return {"schedule": name, "workers": workers, "microbatches": count, "error": reason}
    except ValueError as error:
        raise ValueError(f"{name}, M = {count}: {error}") from error
    row = point._asdict()
    workload, system = scenario.workload, scenario.system
    if workload is not None and system is not None:
        row |= step_json(scenario.evaluate(), workload, system)
        row |= layout_json(workload, table)
    return row | memory_room(scenario, table)


def _said(
    rows: list[dict[str, Any]], slots: dict[str, float], scenario: "pj.Scenario"
) -> Iterator[object]:
    """Tell who is fastest, all rows from the fastest on, and where their three levels disagree."""
    best = _best(rows)
    ranked = sorted(rows, key=lambda row: (*_size(row), row.get("makespan", math.inf)))
    sizes = [name for name in ("workers", "microbatches") if len({row[name] for row in rows}) > 1]
    alike = ", ".join(f"{rows[0][name]} {name}" for name in WORDS if name not in sizes)
    yield plain(f"{alike}{': ' * bool(alike)}sorted by makespan")
    columns = [*(Column(WORDS[name], name) for name in sizes), Column("schedule", "schedule")]
    keys = len(columns)
    columns += [
        Column("makespan", partial(_makespan, best)),
        Column("above best", "above_best", above),
        Column("bubble: formula", "formula_bubble_ratio", percent),
        Column("bubble: table", "table_bubble_ratio", percent),
        Column("bubble: run", "bubble_ratio", percent),
        Column("in flight", "peak_microbatches", "{:.4g}".format),
        Column("copies", "weight_copies"),
    ]
    if scenario.workload is None:
        columns.append(Column("bound by", "bound_by"))
    else:
        columns.append(Column("MFU", "mfu", percent))
        columns.append(Column("memory [GB]", lambda row: _gigabytes(row, "[red]")))
    if has_lines():
        columns = [column for column in columns if not _says_nothing(column, rows)]
    else:
        columns.append(Column("fits", "fits", lambda fits: "yes" if fits else "no"))
        columns.append(Column("reason", lambda row: escape(_reason(row))))
    ratio = ", ".join(f"{letter} = {time:.4g}" for letter, time in slots.items())
    title = f"formula: as published; table: idealised, in slots of {ratio}; run: with messages"
    yield table_of(ranked, columns, keys=keys, title=title)
    yield "in flight: microbatches held at once, of all layers of a worker"
    yield from map(plain, _winners(ranked, best, sizes))
    large = [row for row in ranked if not row.get("fits", True)]
    if large and scenario.system is not None:
        each = ", ".join(f"{_named(row, sizes)} ({_gigabytes(row)} GB)" for row in large)
        have = gigabytes(float(scenario.system.memory_available))
        yield plain(f"not ranked, for the memory is {have}: {each}")
    notes: dict[str, list[str]] = {}
    for row in ranked:
        for note in row.get("notes", ()):
            notes.setdefault(note, []).append(_named(row, sizes))
    yield from (plain(f"{', '.join(names)}: {note}") for note, names in notes.items())
    yield "where the levels disagree, and why:"
    yield from map(plain, _reasons(ranked, sizes))


WORDS = {"workers": "P", "microbatches": "M"}  # sizes of a row, and their columns
NOTHING = {"formula_bubble_ratio": None, "weight_copies": 1}  # values that say nothing if all agree


def _says_nothing(column: Column, rows: list[dict[str, Any]]) -> bool:
    """Whether a column holds in all rows what most readers take for granted."""
    name = str(column.value)
    return name in NOTHING and all(row.get(name, NOTHING[name]) == NOTHING[name] for row in rows)


TIE = 1e-9  # by which makespans differ that are told as equal


def _best(rows: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """The least makespan of those that fit, by numbers of workers and microbatches."""
    best: dict[tuple[int, int], float] = {}
    for row in rows:
        if "error" not in row and row.get("fits", True):
            best[_size(row)] = min(row["makespan"], best.get(_size(row), math.inf))
    return best


def _winners(
    ranked: list[dict[str, Any]], best: dict[tuple[int, int], float], sizes: list[str]
) -> Iterator[str]:
    """Say who is fastest at each size, and how far ahead of the next."""
    for size, least in best.items():
        fitting = [row for row in ranked if _size(row) == size and row.get("fits", True)]
        times = {row["schedule"]: row["makespan"] for row in fitting if "error" not in row}
        first = [name for name, time in times.items() if _is_least(time, least)]
        rest = {name: time for name, time in times.items() if name not in first}
        ahead = "".join(
            f"; next {name}, {above(t / least - 1)}" for name, t in list(rest.items())[:1]
        )
        at = dict(zip(WORDS, size, strict=True))
        where = "".join(f", {WORDS[name]} = {at[name]}" for name in sizes)
        yield f"fastest{where}: {' and '.join(first)}, {seconds(least)}{ahead}"


def _reasons(rows: list[dict[str, Any]], sizes: list[str]) -> Iterator[str]:
    """Say each reason once, behind all rows that have it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        # the lack of a formula is a reason beside others, and the same for many
        for reason in _reason(row).replace(f"{UNPUBLISHED}; ", f"{UNPUBLISHED}\n").split("\n"):
            found.setdefault(reason, []).append(_named(row, sizes))
    return (f"  {', '.join(names)}: {reason}" for reason, names in found.items())


def _named(row: dict[str, Any], sizes: list[str]) -> str:
    """A row by its schedule, and by the sizes that differ."""
    return row["schedule"] + "".join(f" {WORDS[name]} = {row[name]}" for name in sizes)


def _gigabytes(row: dict[str, Any], mark: str = "") -> str:
    """What the fullest worker needs, marked where there is less."""
    if "memory_bytes" not in row:
        return "-"
    return mark * (not row["fits"]) + f"{max(row['memory_bytes']) / 1e9:.1f}"


UNPUBLISHED = f"no formula: {NO_FORM.assumes}"


def _reason(row: dict[str, Any]) -> str:
    return row.get("why") or f"not evaluated: {row['error']}"


def _size(row: dict[str, Any]) -> tuple[int, int]:
    return row["workers"], row["microbatches"]


def _is_least(time: float, least: float) -> bool:
    return time <= least * (1 + TIE)


def _makespan(best: dict[tuple[int, int], float], row: dict[str, Any]) -> str:
    """Mark the fastest of those that fit, for its numbers of workers and microbatches."""
    if "error" in row:
        return "-"
    is_fastest = _is_least(row["makespan"], best.get(_size(row), 0.0)) and row.get("fits", True)
    return "[bold green]" * is_fastest + seconds(row["makespan"])


QUICK = 10**6  # cells of all tables that are made of two: a few seconds
AROUND = 3  # cells shown on both sides of the first that differs


def difference(
    run: ListedRunOptions,
    listed: ScheduleList,
    links: pj.Links,
    microbatches: list[int] | None,
    labels: str | None,
    exchange: bool,
) -> Answer:
    """Compare two tables cell by cell."""
    from pipejax.analysis.comparison.table_difference import table_difference

    names, options = listed.names, listed.options
    if len(names) != 2 or len(microbatches or [1]) > 1:
        counts = "" if microbatches is None else f" at M = {', '.join(map(str, microbatches))}"
        raise ValueError(
            f"--diff compares two schedules at one --microbatches, got {', '.join(names)}{counts}"
        )
    options.check(names)
    scenarios = [listed.scenario(run, links, point) for point in listed.sized(microbatches)]
    has_times = scenarios[0].has_times
    if not has_times:
        scenarios = [one.replace(costs=pj.costing.SlotCosts(in_units=True)) for one in scenarios]
    tables, runs = [scenario.table() for scenario in scenarios], []
    listed.check_used(scenarios)
    for scenario in scenarios:
        with naming(scenario.table()):
            runs.append(scenario.evaluate())
    found = table_difference(tables[0], tables[1])
    cells = len(found.rows) * tables[0].num_workers * tables[0].num_slots
    exchanged = _exchanged(found, runs) if exchange or cells <= QUICK else []
    called = with_labels(labels, [run.schedule for run in runs])
    result = {
        "link": links.model,
        "unit": "seconds" if has_times else "slots",
        "tables": [
            _run_json(scenario) | {"schedule": name}
            for scenario, name in zip(scenarios, called, strict=True)
        ],
        **_as_json(found, tables[0].grammar),
        "exchanges": [
            {"worker": row.worker, "makespan": makespan}
            for row, makespan in zip(found.rows, exchanged, strict=bool(exchanged))
        ],
    }
    return Answer(result, _difference_text(found, result, tables[0].grammar))


def _exchanged(found: "TableDifference", runs: Sequence["pj.Evaluation"]) -> list[float | None]:
    """Makespans of the first table with one row of the second; none where they do not match."""
    from pipejax.analysis.comparison.table_difference import row_exchanges

    if found.sizes or found.other_placement:
        return []
    run, workers = runs[0], [row.worker for row in found.rows]
    with progress("exchanging rows", len(workers)) as bar:
        made = []
        for makespan in row_exchanges(run.table, runs[1].table, workers, run.costs, run.links):
            made.append(makespan)
            bar.move(advance=1)
    return made


def _run_json(scenario: "pj.Scenario") -> dict[str, Any]:
    names = "schedule workers stages microbatches makespan bubble_ratio max_span peak_in_flight"
    return pick(scenario.evaluate(), names) | memory_room(scenario, scenario.table())


def _as_json(found: "TableDifference", grammar: "Grammar") -> dict[str, Any]:
    """What `--json` says; cells are written as in a grammar, of one number of slices."""
    return {
        "equal": found.is_none,
        "sizes": found.sizes,
        "other_placement": found.other_placement,
        "moved": [
            {"op": grammar.text((op,)), "workers": workers} for op, workers in found.moved.items()
        ],
        "split": found.split,
        "fused": found.fused,
        "only": {phase.name: pair for phase, pair in found.only.items()},
        "communication": found.communication,
        "rows": [
            {
                **pick(row, "worker first reordered only"),
                "cells": [grammar.text(cells[at]) if at < len(cells) else "" for at, cells in near],
            }
            for row in found.rows
            for near in [[*row.around(0)]]
        ],
    }


def _difference_text(
    found: "TableDifference", result: dict[str, Any], grammar: "Grammar"
) -> Iterator[object]:
    one, other = result["tables"]
    names = [escape(each["schedule"]) for each in (one, other)]
    in_slots = result["unit"] == "slots"
    told = {True: "  in units of F = I = W = 1, B = 2: no times are given"}.get(in_slots, "")
    yield f"[bold]A[/] {names[0]}   [bold]B[/] {names[1]}   {result['link']} links{told}"
    yield _costs(one, other, in_slots)
    if found.is_none:
        yield "the tables have the same cells in the same order"
        return
    yield from (plain(f"  {line}") for line in _sentences(found, grammar))
    if found.rows:
        yield _first_differences(found.rows, grammar)
    if result["exchanges"]:
        yield _exchanges(result["exchanges"], one["makespan"], in_slots)


def _costs(one: dict[str, Any], other: dict[str, Any], in_slots: bool) -> Table:
    """What both cost, side by side."""
    time = (lambda value: f"{value:.6g}") if in_slots else seconds
    lines: list[tuple[str, str, Callable[[float], str], Callable[[float, float], str]]] = [
        ("makespan", "makespan", time, _ratio),
        ("bubble ratio", "bubble_ratio", percent, _points),
        ("largest span", "max_span", time, _ratio),
        ("most in flight", "peak_in_flight", lambda peak: f"{peak:.0f}", _count),
    ]
    if "memory_bytes" in one:
        lines.append(("most memory", "memory_bytes", gigabytes, _ratio))
    rows = []
    for title, key, form, against in lines:
        values = [float(np.max(run[key])) for run in (one, other)]  # of the worker with the most
        told = "=" if values[0] == values[1] else against(values[0], values[1])
        rows.append((title, *map(form, values), told))
    return grid(zip(("measure", "A", "B", "B against A"), zip(*rows, strict=True), strict=True))


def _ratio(before: float, after: float) -> str:
    if before == after:
        return "="
    return f"{100 * (after / before - 1):+.2f} %" if before else f"{after:+.4g}"


def _points(before: float, after: float) -> str:
    return f"{100 * (after - before):+.2f} points"


def _count(before: float, after: float) -> str:
    return f"{after - before:+.0f}"


def _sentences(found: "TableDifference", grammar: "Grammar") -> list[str]:
    """Say in words what differs over the whole tables."""
    said = [f"{name}: A has {a}, B has {b}" for name, (a, b) in found.sizes.items()]
    if found.other_placement and not found.sizes:
        said.append("stages lie on other workers, or microbatches go another way")
    for name, count in zip("AB", found.split, strict=True):
        if count:
            said.append(f"backwards that {name} alone splits into I and W: {count}")
    if found.fused != (0, 0):
        said.append("fused pairs: A has {}, B has {}".format(*found.fused))
    if found.communication != (0, 0):
        told = "cells of communication that only A has: {}, only B: {}"
        said.append(told.format(*found.communication))
    for phase, (a, b) in found.only.items():
        if phase not in COMMUNICATION:
            said.append(f"ops {phase.name} that only A has: {a}, only B: {b}")
    if found.moved:
        (op, (was, now)), *_ = found.moved.items()
        where = f"{grammar.text((op,))}: {was} in A, {now} in B"
        said.append(f"ops on another worker: {len(found.moved)}, as {where}")
    if found.rows:
        order = sum(row.reordered for row in found.rows)
        said.append(
            f"rows that differ: {len(found.rows)}; ops in another order there: at least {order}"
        )
    return said


def _first_differences(rows: Sequence["RowDifference"], grammar: "Grammar") -> Table:
    """Around the first cell that differs on each worker, both rows with the cell marked."""
    cells = []
    for row in rows:
        of_row = (row.worker, row.first, row.reordered), ("", "", "")
        for name, near, said in zip("AB", row.around(AROUND), of_row, strict=True):
            (at, ops), (worker, first, reordered) = near, said
            cells.append((worker, name, first, _marked(at, map(grammar.text, ops)), reordered))
    heads = ("worker", "table", "from cell", "cells", "reordered")
    title = "first difference of each worker, idle slots left out"
    return grid(zip(heads, zip(*cells, strict=True), strict=True), title=title)


def _marked(at: int, cells: Iterable[str]) -> str:
    """Write cells with one marked; a row that ends before it says so."""
    texts = [*map(escape, cells)]
    if at < len(texts):
        texts[at] = f"[bold]>{texts[at]}<[/]"
    else:
        texts.append("[bold]>end<[/]")
    return " ".join(texts)


def _exchanges(exchanges: Sequence[dict[str, Any]], makespan: float, in_slots: bool) -> Table:
    """What the first table takes with one row of the second."""
    time = (lambda value: f"{value:.6g}") if in_slots else seconds
    ran = [each["makespan"] for each in exchanges]
    return grid(
        [
            ("worker", [each["worker"] for each in exchanges]),
            ("makespan", ["cannot run" if each is None else time(each) for each in ran]),
            ("against A", ["-" if each is None else _ratio(makespan, each) for each in ran]),
        ],
        title="A with the row of B on one worker",
    )
