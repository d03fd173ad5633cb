"""`pipejax compare`: schedules at three levels, side by side."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.markup import escape

import pipejax as pj
from pipejax.base.checks import MismatchError
from pipejax.cli.options.pricing import Pricing, required
from pipejax.cli.options.tables import OF_RUNS, ScheduleList, SizedSchedule, TableOptions
from pipejax.cli.options.values import Text, is_plain
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.numbers import percent, seconds
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
) -> Answer:
    """Compare schedules as published formula, idealised table and communication-aware run.

    Options:
      microbatches: or several, as 8,16,32; those of the tables if not given.

    Example:
      pipejax compare -S gpipe,1f1b,chimera -P 8 -M 8,16,32 -W F=1,B=2 --comm 0.1
    """
    priced = required(pricing)
    options = listed.options._replace(of_runs=OF_RUNS if priced.workload is not None else ())
    options.check(listed.names)
    points = listed.sized(None if microbatches is None else _counts(microbatches))
    rows: list[dict[str, Any]] = []
    tables: list[pj.ScheduleTable] = []
    slots: dict[str, float] | None = None  # one ratio of B to F for all: the first that there is
    with progress("evaluating", len(points)) as bar:
        for point in points:
            rows.append(_row(point, options, priced, links, slots, tables))
            slots = slots or rows[-1].get("slots")
            bar.move(advance=1)
    if slots is None:
        raise ValueError(rows[0]["error"])
    priced.check_used(tables, map(options.builder, listed.names))
    sizes = {point.workers for point in points}
    workers = sizes.pop() if len(sizes) == 1 else None  # tables may differ
    result = {"workers": workers, "link": links.model, "slots": slots, "rows": rows}
    return Answer(result, _said(rows, slots, priced))


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) if is_plain(part) else 0 for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"--microbatches must be whole numbers of at least 1, got {text!r}")
    return counts


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
    return row | pricing.memory(table)


def _said(
    rows: list[dict[str, Any]], slots: dict[str, float], pricing: Pricing
) -> Iterator[object]:
    fitting = [row for row in rows if "error" not in row and row.get("fits", True)]
    best = {
        size: min(row["makespan"] for row in fitting if _size(row) == size)
        for size in {_size(row) for row in fitting}
    }
    keys = [Column("M", "microbatches"), Column("schedule", "schedule")]
    if len({row["workers"] for row in rows}) > 1:  # tables may differ
        keys.insert(0, Column("P", "workers"))
    columns = [
        *keys,
        Column("makespan", partial(_makespan, best)),
        Column("bubble: formula", "formula_bubble_ratio", percent),
        Column("bubble: table", "table_bubble_ratio", percent),
        Column("bubble: run", "bubble_ratio", percent),
        Column("in flight: formula", "formula_in_flight"),
        Column("in flight: table", "peak_in_flight"),
        Column("copies", "weight_copies"),
        Column("bound by", "bound_by"),
    ]
    if pricing.workload is not None:
        columns += [
            Column("MFU", "mfu", percent),
            Column("memory", "memory_bytes", lambda held: f"{max(held) / 1e9:.1f} GB"),
            Column("fits", "fits", lambda fits: "yes" if fits else "[red]no"),
        ]
    if not tells_lines():
        columns.append(Column("reason", lambda row: escape(_reason(row))))
    ratio = ", ".join(f"{letter} = {slots[letter]:.4g}" for letter in "FBIW")
    title = f"formula: as published; table: idealised, in slots of {ratio}; run: with messages"
    yield table_of(rows, columns, keys=len(keys), title=title)
    yield "where the levels disagree, and why:"
    for row in rows:
        yield plain(f"  {row['schedule']}, M = {row['microbatches']}: {_reason(row)}")


def _reason(row: dict[str, Any]) -> str:
    return row.get("why") or f"not evaluated: {row['error']}"


def _size(row: dict[str, Any]) -> tuple[int, int]:
    return row["workers"], row["microbatches"]


def _makespan(best: dict[tuple[int, int], float], row: dict[str, Any]) -> str:
    """Mark the fastest of those that fit, for its numbers of workers and microbatches."""
    if "error" in row:
        return "-"
    is_fastest = row["makespan"] <= best.get(_size(row), 0.0) * (1 + 1e-12)
    return "[bold green]" * (is_fastest and row.get("fits", True)) + seconds(row["makespan"])
