"""`pipejax compare`: schedules at three levels, side by side."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.markup import escape

import pipejax as pj
from pipejax.analysis.step.outputs import OUTPUTS, RUN_OUTPUTS, run_outputs
from pipejax.base.checks import MismatchError
from pipejax.base.ties import TIE
from pipejax.cli.options.option import options, parse_counts
from pipejax.cli.options.scenario import memory_room, required
from pipejax.cli.options.tables import (
    OF_RUNS,
    ListedRunOptions,
    ScheduleList,
    SizedSchedule,
    naming,
    with_labels,
)
from pipejax.cli.output.files import DRAWING, NO_OUTPUT, Output
from pipejax.cli.output.numbers import digits, gigabytes, percent, quantity, seconds
from pipejax.cli.output.plans import layout_json
from pipejax.cli.output.report import Answer, has_details, has_lines, pick, plain, progress
from pipejax.cli.output.runs import step_json
from pipejax.cli.output.tables import Column, TextTable, grid, rows_table
from pipejax.schedules.cells.ops import COMMUNICATION
from pipejax.schedules.table.links import LINK_TEXTS

if TYPE_CHECKING:
    from pipejax.analysis.comparison import RowDifference, TableDifference
    from pipejax.schedules.cells.grammar import Grammar


Row = dict[str, Any]  # of --json
Best = dict[tuple[int, int, int], float]  # least makespan [s] by sizes, as `_size` returns them


@options
def compare(
    *,
    run: ListedRunOptions = ListedRunOptions(),
    microbatches: str | None = None,
    labels: str | None = None,
    diff: bool = False,
    exchange: bool = False,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Compare schedules by step time, idle time and memory, at your costs."""
    counts = None if microbatches is None else parse_counts(microbatches, "--microbatches")
    listed, link = run.listed, run.links()
    if diff:
        if figure.path is not None:
            raise ValueError("--figure has no effect with --diff: it draws all runs")
        return difference(run, listed, counts, labels, exchange)
    settings = listed.options._replace(run_options=OF_RUNS if run.model is not None else ())
    settings.check(listed.names)
    points = listed.sized(counts)
    first = required(listed.scenario(run, points[0]))
    row_labels = with_labels(labels, [*map(settings.label, listed.names)])
    label_of_name = dict(zip(listed.names, row_labels, strict=True))
    rows: list[Row] = []
    scenarios: list[pj.Scenario] = []  # of the rows without an error
    slots: dict[str, float] | None = None  # op times of the first row, in slots, for all rows
    with progress("evaluating", len(points)) as on_progress:
        for point in points:
            rows.append(_row(run, listed, point, slots, scenarios))
            rows[-1]["schedule"] = label_of_name[point.name]
            slots = slots or rows[-1].get("slots")
            on_progress(len(rows), None, "evaluating")
    if slots is None:
        raise ValueError(rows[0]["error"])
    listed.check_used(scenarios)
    if _is_unequal_work(scenarios):
        for row in rows:
            row["unequal_stages"] = row.get("stages")
    best: Best = {}
    ranked = [row for row in rows if "error" not in row and row.get("fits", True)]
    for row in ranked:
        best[_size(row)] = min(row["makespan"], best.get(_size(row), math.inf))
    for row in ranked:
        least = best[_size(row)]  # 0 s if all ops take no time
        row["above_best"] = row["makespan"] / least - 1 if least else 0.0
    numbers_of_workers = {point.workers for point in points}  # tables may differ
    workers = numbers_of_workers.pop() if len(numbers_of_workers) == 1 else None
    if figure.path is not None:
        names = [_name_row(row, _varying_sizes(rows)) for row in rows if "error" not in row]
        runs = [scenario.evaluate() for scenario in scenarios]
        figure.save_timelines(dict(zip(names, runs, strict=True)))
    result = {"workers": workers, "link": link.model, "slots": slots, "rows": rows}
    view = _view(rows, best, link.model, first)
    details = {"idle time counted in three ways": _reasons(rows, slots)}
    return Answer(result, view, details=details)


def _row(
    run: ListedRunOptions,
    listed: ScheduleList,
    point: SizedSchedule,
    slots: dict[str, float] | None,
    scenarios: "list[pj.Scenario]",
) -> dict[str, Any]:
    """Return the row of a point, or the reason that it has no table; append its scenario."""
    name, workers, count = point
    try:
        scenario = listed.built(run, point)
        table = scenario.table()
        costs = scenario.table_costs()
        comparison = pj.compare(table, costs, link=scenario.links, slots=slots)
    except MismatchError as error:
        reason = getattr(error, "reason", str(error))
        return {"schedule": name, "workers": workers, "microbatches": count, "error": reason}
    except ValueError as error:
        raise ValueError(f"{name}, M = {count}: {error}") from error
    scenarios.append(scenario)
    row = comparison._asdict()
    if any(output.column for output in RUN_OUTPUTS.values()):
        outputs = run_outputs(scenario.evaluate())
        row |= {name: value for name, value in outputs.items() if OUTPUTS[name].column}
    workload, system = scenario.workload, scenario.system
    if workload is not None and system is not None:
        row |= step_json(scenario.evaluate(), workload, system)
        row |= layout_json(workload, table, scenario.files.get("launcher"))
    return row | memory_room(scenario, table)


def _is_unequal_work(scenarios: "Sequence[pj.Scenario]") -> bool:
    """Return whether runs differ in stages per worker, although their times are per stage."""
    # runs with more stages then do more work, unless `source.stages` rescales the times
    tables = [s.table() for s in scenarios if s.source.is_per_stage and s.source.stages is None]
    return len({table.num_stages / table.num_workers for table in tables}) > 1


def _view(rows: list[Row], best: Best, link: str, scenario: "pj.Scenario") -> Iterator[object]:
    """Yield the fastest schedules, a table of all rows, and schedules that do not fit or exist."""
    sizes, compared = _varying_sizes(rows), _varying_sizes(rows, LABELS)
    ranked = _ranked(rows)
    yield from _winners(ranked, best, compared)
    shared_sizes = [f"{rows[0][name]} {name}" for name in SIZES if name not in sizes]
    yield plain(f"{', '.join(shared_sizes)}; {LINK_TEXTS[link]}")
    if "unequal_stages" in rows[0]:
        yield (
            "not ranked together: times are of a stage, and schedules with more stages do more "
            "work; --measured-stages N or --worker-times compares equal work"
        )
    columns = [*(Column(LABELS[name], name) for name in compared), Column("schedule", "schedule")]
    keys = len(columns)
    columns.append(Column("step time", partial(_makespan, best)))
    columns.append(Column("longer than the fastest", "above_best", percent))
    if has_details():
        columns += LEVELS
    columns += [
        Column("bubble: run" if has_details() else "bubble", "bubble_ratio", percent),
        Column("peak activations of a worker [microbatches]", "peak_microbatches", "{:.3g}".format),
    ]
    columns += [
        Column(output.column, name, partial(quantity, unit=output.unit))
        for name, output in OUTPUTS.items()
        if output.column and any(name in row for row in rows)
    ]
    if scenario.workload is not None:
        columns.append(Column("memory [GB]", lambda row: _gigabytes(row, "[red]")))
    if not has_lines():
        columns.append(Column("fits", "fits", lambda fits: "yes" if fits else "no"))
        reason = "not evaluated: {error}".format_map
        columns.append(Column("reason", lambda row: escape(row.get("why") or reason(row))))
    yield rows_table(ranked, columns, keys=keys)
    too_large = [row for row in ranked if not row.get("fits", True)]
    if too_large and scenario.system is not None:
        names = ", ".join(f"{_name_row(row, sizes)} ({_gigabytes(row)} GB)" for row in too_large)
        available = gigabytes(float(scenario.system.memory_available))
        yield plain(f"not ranked, need more than {available}: {names}")
    yield from _by_text(((row["error"], row) for row in ranked if "error" in row), sizes)
    yield from _by_text(((note, row) for row in ranked for note in row.get("notes", ())), sizes)


def _reasons(rows: list[Row], slots: dict[str, float]) -> Iterator[object]:
    """Yield what the three bubbles of a row are, and why they differ."""
    ratio = ", ".join(f"{letter} = {time:.4g}" for letter, time in slots.items())
    yield f"bubbles: by the published formula; of the schedule if {ratio}; of the run"
    reasons = ((row["why"], row) for row in _ranked(rows) if "why" in row)
    yield from _by_text(reasons, _varying_sizes(rows))


def _by_text(texts: Iterable[tuple[str, Row]], sizes: list[str]) -> Iterator[object]:
    """Yield each text once, after the names of all rows that have it."""
    names_by_text: dict[str, list[str]] = {}
    for text, row in texts:
        names_by_text.setdefault(text, []).append(_name_row(row, sizes))
    return (plain(f"{', '.join(names)}: {text}") for text, names in names_by_text.items())


SIZES = ("workers", "microbatches")
# sizes of a row and their columns; rows of unequal work have their stages too
LABELS = {"workers": "P", "microbatches": "M", "unequal_stages": "S"}
LEVELS = (
    Column("bubble: formula", "formula_bubble_ratio", percent),
    Column("bubble: schedule", "table_bubble_ratio", percent),
    Column("weight copies", "weight_copies"),
    Column("bound by", "bound_by"),
)


def _varying_sizes(rows: list[Row], names: Iterable[str] = SIZES) -> list[str]:
    return [name for name in names if len({row.get(name) for row in rows}) > 1]


def _ranked(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (*_size(row), row.get("makespan", math.inf)))


def _winners(ranked: list[Row], best: Best, shown_sizes: list[str]) -> Iterator[object]:
    """Yield, for the sizes of each run, the fastest schedules and their lead over the next."""
    if not best:
        yield "no schedule fits the memory"
    for sizes, least in best.items():
        rows = [row for row in ranked if _size(row) == sizes and "above_best" in row]
        fastest = [row["schedule"] for row in rows if _is_least(row["makespan"], least)]
        lead = ""
        if len(rows) > len(fastest):
            next_row = rows[len(fastest)]
            lead = f"; next is {next_row['schedule']}, {percent(next_row['above_best'])} longer"
        numbers = dict(zip(LABELS, sizes, strict=True))
        where = "".join(f" at {LABELS[name]} = {numbers[name]}" for name in shown_sizes)
        verb = "are" if len(fastest) > 1 else "is"
        yield plain(f"{' and '.join(fastest)} {verb} fastest{where}: {seconds(least)}{lead}")


def _name_row(row: Row, shown_sizes: list[str]) -> str:
    """Return the schedule of a row with the sizes that differ."""
    return row["schedule"] + "".join(f" {LABELS[name]} = {row[name]}" for name in shown_sizes)


def _gigabytes(row: Row, mark: str = "") -> str:
    """Return the memory of the fullest worker [GB], with a mark in front if it does not fit."""
    if "memory_bytes" not in row:
        return "-"
    return ("" if row["fits"] else mark) + f"{max(row['memory_bytes']) / 1e9:.1f}"


def _size(row: Row) -> tuple[int, int, int]:
    """Return the sizes of a row as in `LABELS`; rows of equal sizes are ranked together."""
    return row["workers"], row["microbatches"], row.get("unequal_stages") or 0


def _is_least(time: float, least: float) -> bool:
    return time <= least * (1 + TIE)


def _makespan(best: Best, row: Row) -> str:
    """Return the makespan of a row; that of the fastest row of a size is green."""
    if "error" in row:
        return "-"
    is_fastest = "above_best" in row and _is_least(row["makespan"], best[_size(row)])
    return ("[bold green]" if is_fastest else "") + seconds(row["makespan"])


MAX_QUICK_CELLS = 10**6  # of all tables with an exchanged row: a few seconds
NEAR_CELLS = 3  # cells shown on both sides of the first that differs
RUN_FIELDS = "schedule workers stages microbatches makespan bubble_ratio max_span peak_in_flight"


def difference(
    run: ListedRunOptions,
    listed: ScheduleList,
    microbatches: list[int] | None,
    labels: str | None,
    exchange: bool,
) -> Answer:
    """Answer with the differences of two tables, cell by cell, and of their runs."""
    # Each row of the second table is also put into the first one and evaluated: always with
    # `exchange`, else if the tables are small.
    from pipejax.analysis.comparison import row_exchanges, table_difference

    names, options = listed.names, listed.options
    if len(names) != 2 or len(microbatches or [1]) > 1:
        counts = "" if microbatches is None else f" at M = {', '.join(map(str, microbatches))}"
        raise ValueError(
            f"--diff compares two schedules at one --microbatches, got {', '.join(names)}{counts}"
        )
    options.check(names)
    scenarios = [listed.scenario(run, point) for point in listed.sized(microbatches)]
    has_times = scenarios[0].has_times
    if not has_times:
        unit_slots = pj.costing.SlotCosts(in_units=True)
        scenarios = [scenario.replace(costs=unit_slots) for scenario in scenarios]
    tables, runs = [scenario.table() for scenario in scenarios], []
    listed.check_used(scenarios)
    for scenario in scenarios:
        with naming(scenario.table()):
            runs.append(scenario.evaluate())
    differences = table_difference(tables[0], tables[1])
    num_cells = len(differences.rows) * tables[0].num_workers * tables[0].num_slots
    is_quick = exchange or num_cells <= MAX_QUICK_CELLS
    exchanges: list[dict[str, Any]] = []  # of the first table with each row of the second
    if is_quick and not (differences.sizes or differences.other_placement):
        workers = [row.worker for row in differences.rows]
        costs, links = runs[0].costs, runs[0].links
        with progress("exchanging rows"):
            makespans = [*row_exchanges(tables[0], tables[1], workers, costs, links)]
        pairs = zip(workers, makespans, strict=True)
        exchanges = [{"worker": worker, "makespan": makespan} for worker, makespan in pairs]
    names = with_labels(labels, [run.schedule for run in runs])
    result = {
        "link": scenarios[0].links.model,
        "unit": "seconds" if has_times else "slots",
        "tables": [
            pick(run, RUN_FIELDS) | memory_room(scenario, scenario.table()) | {"schedule": name}
            for run, scenario, name in zip(runs, scenarios, names, strict=True)
        ],
        **_as_json(differences, tables[0].grammar),
        "exchanges": exchanges,
    }
    parts = differences, result, tables[0].grammar
    return Answer(result, _difference_view(*parts), details=_difference_details(*parts))


def _as_json(differences: "TableDifference", grammar: "Grammar") -> dict[str, Any]:
    """Return differences for `--json`; cells are written as in a grammar."""
    return {
        "equal": differences.is_none,
        **pick(differences, "sizes other_placement"),
        "moved": [
            {"op": grammar.text((op,)), "workers": workers}
            for op, workers in differences.moved.items()
        ],
        **pick(differences, "split fused"),
        "only": {phase.name: pair for phase, pair in differences.only.items()},
        "communication": differences.communication,
        "rows": [
            {
                **pick(row, "worker first reordered only"),
                "cells": [
                    grammar.text(cells[at]) if at < len(cells) else ""
                    for at, cells in row.around(0)
                ],
            }
            for row in differences.rows
        ],
    }


def _difference_view(
    differences: "TableDifference", result: dict[str, Any], grammar: "Grammar"
) -> Iterator[object]:
    """Yield which of two runs is faster, their numbers, and how the tables differ."""
    first, other = result["tables"]
    names = [escape(table["schedule"]) for table in (first, other)]
    in_slots = result["unit"] == "slots"
    time = digits if in_slots else seconds
    change = _ratio(first["makespan"], other["makespan"])
    verdict = f"takes {time(other['makespan'])}, {names[0]} {time(first['makespan'])} ({change})"
    if change == "=":
        verdict = f"is as fast as {names[0]}: {time(first['makespan'])}"
    cells = "; the schedules have the same cells in the same order" if differences.is_none else ""
    yield f"{names[1]} {verdict}{cells}"
    unit = ", in units of F = I = W = 1, B = 2: no times are given" if in_slots else ""
    yield f"A is {names[0]}, B is {names[1]}; {LINK_TEXTS[result['link']]}{unit}"
    yield _run_table(first, other, time)
    yield from map(plain, _sentences(differences, grammar))


def _difference_details(
    differences: "TableDifference", result: dict[str, Any], grammar: "Grammar"
) -> dict[str, list[object]]:
    """Return the first differences, and makespans with one row exchanged, by title."""
    details: dict[str, list[object]] = {}
    if differences.rows:
        details["first differences"] = [_first_differences(differences.rows, grammar)]
    rows = [row for row in result["exchanges"] if row["makespan"] is not None]
    if rows:
        before = result["tables"][0]["makespan"]
        time = digits if result["unit"] == "slots" else seconds
        makespan = Column("makespan", "makespan", time)
        change = Column("against A", "makespan", partial(_ratio, before))
        columns = Column("worker with the row of B", "worker"), makespan, change
        details["exchanges of one row"] = [rows_table(rows, columns)]
    return details


def _run_table(
    first: dict[str, Any], other: dict[str, Any], time: Callable[[float], str]
) -> TextTable:
    """Show the numbers of both runs side by side."""
    lines: list[tuple[str, str, Callable[[float], str], Callable[[float, float], str]]] = [
        ("step time", "makespan", time, _ratio),
        ("bubble ratio", "bubble_ratio", percent, lambda a, b: f"{100 * (b - a):+.3g} points"),
        ("longest from first to last op of a worker", "max_span", time, _ratio),
        ("most microbatches in flight", "peak_in_flight", digits, lambda a, b: f"{b - a:+.0f}"),
    ]
    if "memory_bytes" in first:
        lines.append(("most memory", "memory_bytes", gigabytes, _ratio))
    rows = []
    for title, key, text, change_text in lines:
        a, b = (float(np.max(run[key])) for run in (first, other))  # of the worker with the most
        rows.append((title, text(a), text(b), "=" if a == b else change_text(a, b)))
    return grid(zip(("measure", "A", "B", "B against A"), zip(*rows, strict=True), strict=True))


def _ratio(before: float, after: float) -> str:
    if before == after:
        return "="
    return f"{100 * (after / before - 1):+.3g} %" if before else f"{after:+.4g}"


def _sentences(differences: "TableDifference", grammar: "Grammar") -> list[str]:
    """Return the differences of the tables, called A and B, in sentences."""
    sentences = [f"{name}: A has {a}, B has {b}" for name, (a, b) in differences.sizes.items()]
    if differences.other_placement and not differences.sizes:
        sentences.append("stages lie on other workers, or microbatches go another way")
    if differences.fused != (0, 0):
        sentences.append("fused pairs: A has {}, B has {}".format(*differences.fused))
    counts_by_noun = {  # numbers that only A has, and only B
        "backwards that are split into I and W": differences.split,
        "cells of communication": differences.communication,
    }
    for phase, counts in differences.only.items():
        if phase not in COMMUNICATION:
            counts_by_noun[f"ops {phase.name}"] = counts
    for noun, counts in counts_by_noun.items():
        for table, count in zip("AB", counts, strict=True):
            sentences += [f"{noun}, only in {table}: {count}"] if count else []
    if differences.moved:
        op, (worker_in_a, worker_in_b) = next(iter(differences.moved.items()))
        example = f"{grammar.text((op,))}: {worker_in_a} in A, {worker_in_b} in B"
        sentences.append(f"ops on another worker: {len(differences.moved)}, as {example}")
    if differences.rows:
        count = sum(row.reordered for row in differences.rows)
        note = f"; at least {count} of their ops run in another order" if count else ""
        sentences.append(f"workers whose rows differ: {len(differences.rows)}{note}")
    return sentences


def _first_differences(rows: Sequence["RowDifference"], grammar: "Grammar") -> TextTable:
    """Show both rows of each worker around the first cell that differs, which is marked."""
    cells: list[tuple[object, ...]] = []
    for row in rows:
        texts = [_mark_cell(cell, map(grammar.text, ops)) for cell, ops in row.around(NEAR_CELLS)]
        cells.append((row.worker, "A", row.first, texts[0], row.reordered))
        cells.append(("", "B", "", texts[1], ""))
    heads = ("worker", "table", "from cell", "cells", "reordered")
    title = "first difference of each worker, idle slots left out"
    return grid(zip(heads, zip(*cells, strict=True), strict=True), title=title)


def _mark_cell(index: int, cells: Iterable[str]) -> str:
    """Write cells with the cell at an index marked; of a shorter row its end is marked."""
    texts = [*map(escape, cells)]
    if index == len(texts):
        texts.append("end")
    texts[index] = f"[bold]>{texts[index]}<[/]"
    return " ".join(texts)
