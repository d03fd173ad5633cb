"""`pipejax compare --diff`: what two tables do differently, and what it costs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.pricing_steps import TableSlots
from pipejax.cli.options.tables import ScheduleList, naming, with_labels
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import grid, pick, plain
from pipejax.schedules.cells.ops import COMMUNICATION

if TYPE_CHECKING:
    from pipejax.analysis.comparison.table_difference import (
        RowDifference,
        TableDifference,
    )
    from pipejax.schedules.cells.grammar import Grammar

QUICK = 10**6  # cells of all tables that are made of two: a few seconds
AROUND = 3  # cells shown on both sides of the first that differs


def difference(
    listed: ScheduleList,
    pricing: Pricing | None,
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
    priced = pricing or Pricing(TableSlots(in_units=True))
    tables = [options.of(point.name).build(*point, priced) for point in listed.sized(microbatches)]
    priced.check_used(tables, map(options.builder, names))
    runs = []
    for table in tables:
        with naming(table):
            runs.append(pj.evaluate(table, priced.of(table), link=links))
    found = table_difference(tables[0], tables[1])
    cells = len(found.rows) * tables[0].num_workers * tables[0].num_slots
    exchanged = _exchanged(found, runs) if exchange or cells <= QUICK else []
    called = with_labels(labels, [run.schedule for run in runs])
    result = {
        "link": links.model,
        "unit": "slots" if pricing is None else "seconds",
        "tables": [
            _run_json(run, priced) | {"schedule": name}
            for run, name in zip(runs, called, strict=True)
        ],
        **_as_json(found, tables[0].grammar),
        "exchanges": [
            {"worker": row.worker, "makespan": makespan}
            for row, makespan in zip(found.rows, exchanged, strict=bool(exchanged))
        ],
    }
    return Answer(result, _said(found, result, tables[0].grammar))


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


def _run_json(run: "pj.Evaluation", pricing: Pricing) -> dict[str, Any]:
    names = "schedule workers stages microbatches makespan bubble_ratio max_span peak_in_flight"
    return pick(run, names) | pricing.memory(run.table)


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


def _said(found: "TableDifference", result: dict[str, Any], grammar: "Grammar") -> Iterator[object]:
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
