"""`pipejax compare`: schedules at three levels, side by side."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.markup import escape

import pipejax as pj
from pipejax.base.checks import MismatchError
from pipejax.cli.options.pricing import Pricing, required
from pipejax.cli.options.tables import OF_RUNS, ScheduleList, SizedSchedule, TableOptions
from pipejax.cli.options.values import Text, is_plain
from pipejax.cli.output.report import (
    grid,
    percent,
    print_all,
    print_json,
    print_plain,
    progress,
    seconds,
    tells_lines,
)
from pipejax.cli.output.runs import step_json

if TYPE_CHECKING:
    from pipejax.analysis.comparison.comparison import Comparison


def compare(
    pricing: Pricing | None,
    links: pj.Links,
    listed: ScheduleList,
    microbatches: Text = None,
) -> None:
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
    if json:
        sizes = {point.workers for point in points}
        workers = sizes.pop() if len(sizes) == 1 else None  # tables may differ
        print_json({"workers": workers, "link": links.model, "slots": slots, "rows": rows})
        return
    _print(rows, slots, priced)


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


def _print(rows: list[dict[str, Any]], slots: dict[str, float], pricing: Pricing) -> None:
    fitting = [row for row in rows if "error" not in row and row.get("fits", True)]
    best = {
        size: min(row["makespan"] for row in fitting if _size(row) == size)
        for size in {_size(row) for row in fitting}
    }
    columns: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
        ("makespan", lambda row: _fastest(row, best) + seconds(row["makespan"])),
        ("bubble: formula", lambda row: percent(row["formula_bubble_ratio"])),
        ("bubble: table", lambda row: percent(row["table_bubble_ratio"])),
        ("bubble: run", lambda row: percent(row["bubble_ratio"])),
        ("in flight: formula", lambda row: _or_dash(row["formula_in_flight"])),
        ("in flight: table", lambda row: row["peak_in_flight"]),
        ("copies", lambda row: row["weight_copies"]),
        ("bound by", lambda row: row["bound_by"]),
    ]
    if pricing.workload is not None:
        columns.append(("MFU", lambda row: percent(row["mfu"])))
        columns.append(("memory", lambda row: f"{max(row['memory_bytes']) / 1e9:.1f} GB"))
        columns.append(("fits", lambda row: "yes" if row["fits"] else "[red]no"))
    workers = [row["workers"] for row in rows]
    keys = [
        *([("P", workers)] if len({*workers}) > 1 else []),  # tables may differ
        ("M", [row["microbatches"] for row in rows]),
        ("schedule", [row["schedule"] for row in rows]),
    ]
    cells = [(name, ["-" if "error" in r else cell(r) for r in rows]) for name, cell in columns]
    reasons = [row.get("why") or f"not evaluated: {row['error']}" for row in rows]
    if not tells_lines():
        cells.append(("reason", list(map(escape, reasons))))
    ratio = ", ".join(f"{letter} = {slots[letter]:.4g}" for letter in "FBIW")
    title = f"formula: as published; table: idealised, in slots of {ratio}; run: with messages"
    print_all(
        grid([*keys, *cells], keys=len(keys), title=title), "where the levels disagree, and why:"
    )
    for row, reason in zip(rows, reasons, strict=True):
        print_plain(f"  {row['schedule']}, M = {row['microbatches']}: {reason}")


def _size(row: dict[str, Any]) -> tuple[int, int]:
    return row["workers"], row["microbatches"]


def _fastest(row: dict[str, Any], best: dict[tuple[int, int], float]) -> str:
    """Mark the fastest of those that fit, for its numbers of workers and microbatches."""
    is_fastest = row["makespan"] <= best.get(_size(row), 0.0) * (1 + 1e-12)
    return "[bold green]" * (is_fastest and row.get("fits", True))


def _or_dash(value: object) -> object:
    return "-" if value is None else value
