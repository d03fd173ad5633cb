"""`pipejax compare`: schedules at three levels, side by side."""

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.markup import escape

import pipejax as pj
from pipejax.analysis.comparison.closed_forms import NO_FORM
from pipejax.base.checks import MismatchError
from pipejax.cli.commands.compare_diff import difference
from pipejax.cli.options.pricing import Pricing, required
from pipejax.cli.options.tables import (
    OF_RUNS,
    ScheduleList,
    SizedSchedule,
    TableOptions,
    with_labels,
)
from pipejax.cli.options.values import Text, parse_counts
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.launches import layout_json
from pipejax.cli.output.numbers import above, gigabytes, percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import Column, plain, table_of, tells_lines
from pipejax.cli.output.runs import step_json

if TYPE_CHECKING:
    from pipejax.analysis.comparison.comparison import Comparison


def compare(
    pricing: Pricing | None,
    links: pj.Links,
    listed: ScheduleList,
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
    if diff:
        return difference(listed, pricing, links, counts, labels, exchange)
    priced = required(pricing)
    options = listed.options._replace(of_runs=OF_RUNS if priced.workload is not None else ())
    options.check(listed.names)
    points = listed.sized(counts)
    names = listed.names
    shown = dict(zip(names, with_labels(labels, [*map(options.called, names)]), strict=True))
    rows: list[dict[str, Any]] = []
    tables: list[pj.ScheduleTable] = []
    slots: dict[str, float] | None = None  # one ratio of B to F for all: the first that there is
    with progress("evaluating", len(points)) as bar:
        for point in points:
            rows.append(_row(point, options, priced, links, slots, tables))
            rows[-1]["schedule"] = shown[point.name]
            slots = slots or rows[-1].get("slots")
            bar.move(advance=1)
    if slots is None:
        raise ValueError(rows[0]["error"])
    priced.check_used(tables, map(options.builder, listed.names))
    best = _best(rows)
    for row in rows:
        if "error" not in row and row.get("fits", True) and best.get(_size(row)):
            row["above_best"] = row["makespan"] / best[_size(row)] - 1
    sizes = {point.workers for point in points}
    workers = sizes.pop() if len(sizes) == 1 else None  # tables may differ
    result = {"workers": workers, "link": links.model, "slots": slots, "rows": rows}
    return Answer(result, _said(rows, slots, priced))


def _row(
    at: SizedSchedule,
    options: TableOptions,
    pricing: Pricing,
    links: pj.Links,
    slots: dict[str, float] | None,
    tables: list[pj.ScheduleTable],
) -> dict[str, Any]:
    """Evaluate one point and add its table; one that does not exist says why instead."""
    name, workers, count = at
    own = options.of(name)
    try:
        table = own.build(name, workers, count, pricing)
        tables.append(table)
        costs = pricing.of(table)
        point: Comparison = pj.compare(table, costs, link=links, slots=slots)
    except MismatchError as error:
        reason = getattr(error, "reason", str(error))
        return {"schedule": name, "workers": workers, "microbatches": count, "error": reason}
    except ValueError as error:
        raise ValueError(f"{name}, M = {count}: {error}") from error
    row = point._asdict()
    if pricing.workload is not None and pricing.system is not None:
        run = pj.evaluate(table, costs, link=links)
        row |= step_json(run, pricing.workload, pricing.system)
        row |= layout_json(pricing.workload, table)
    return row | pricing.memory(table)


def _said(
    rows: list[dict[str, Any]], slots: dict[str, float], pricing: Pricing
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
    if pricing.workload is None:
        columns.append(Column("bound by", "bound_by"))
    else:
        columns.append(Column("MFU", "mfu", percent))
        columns.append(Column("memory [GB]", lambda row: _gigabytes(row, "[red]")))
    if tells_lines():
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
    if large and pricing.system is not None:
        each = ", ".join(f"{_named(row, sizes)} ({_gigabytes(row)} GB)" for row in large)
        have = gigabytes(float(pricing.system.memory_available))
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
