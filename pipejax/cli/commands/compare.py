"""`pipejax compare`: schedules at three levels, side by side."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.groups import Pricing, required
from pipejax.cli.options.schedule import OF_RUNS, TableOptions
from pipejax.cli.output.numbers import console, percent, print_json, seconds
from pipejax.schedules import REGISTRY
from pipejax.schedules.table.links import Links

if TYPE_CHECKING:
    from pipejax.analysis.comparison import Comparison


def compare(
    options: TableOptions,
    pricing: Pricing | None,
    links: Links,
    schedules: Annotated[str, typer.Option(help="Schedules, as gpipe,1f1b,chimera.")],
    workers: Annotated[int, typer.Option(help="Workers P.", min=1)],
    microbatches: Annotated[str, typer.Option(help="Microbatches, as 8,16,32.")],
    json: JsonFlag = False,
) -> None:
    """Compare schedules as published formula, idealised table and communication-aware run."""
    priced = required(pricing)
    names = schedule_names(schedules)
    check_options(options, names, OF_RUNS if priced.workload is not None else ())
    points = [(name, count) for count in _counts(microbatches) for name in names]
    rows = [_row(name, workers, count, options, priced, links) for name, count in _track(points)]
    if all("error" in row for row in rows):
        raise ValueError(rows[0]["error"])
    if json:
        print_json({"workers": workers, "link": links.model, "rows": rows})
        return
    _print(rows, priced)


def _track(points: list[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    """Show progress on stderr where a person sees it."""
    console = Console(stderr=True)
    return track(
        points, "evaluating", console=console, transient=True, disable=not console.is_terminal
    )


def schedule_names(text: str) -> list[str]:
    """Read a list of schedules, as gpipe,1f1b.

    Raises:
      ValueError: if one is unknown.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in REGISTRY:
            raise ValueError(f"unknown schedule {name!r}: known are {', '.join(REGISTRY)}")
    return names


def check_options(options: TableOptions, names: list[str], also: Sequence[str] = ()) -> None:
    """Refuse an option that none of the schedules has.

    Raises:
      ValueError: if there is one.
    """
    for option in options.options:
        known = any(option in REGISTRY[name].options for name in names)
        if option not in ("slots", *also) and not known:
            flag = f"--{option.replace('_', '-')}"
            raise ValueError(f"{flag}: none of {', '.join(names)} has this option")


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"--microbatches must be whole numbers of at least 1, got {text!r}")
    return counts


def _row(
    name: str, workers: int, count: int, options: TableOptions, pricing: Pricing, links: Links
) -> dict[str, Any]:
    """Evaluate one point; one that does not exist says why instead."""
    from pipejax.analysis.comparison import compare as compare_levels
    from pipejax.costs.workload import memory_bytes

    own = options.of(name)
    try:
        table = own.build(name, workers, count, pricing.of)
        point: Comparison = compare_levels(table, pricing.of(table), link=links)
    except ValueError as error:
        return {"schedule": name, "microbatches": count, "error": str(error)}
    row = point._asdict()
    if pricing.workload is not None:
        row["step_time"] = point.makespan
        row["memory_bytes"] = memory_bytes(pricing.workload, table)
    return row


def _print(rows: list[dict[str, Any]], pricing: Pricing) -> None:
    best = {
        count: min(r["makespan"] for r in rows if r["microbatches"] == count and "makespan" in r)
        for count in {r["microbatches"] for r in rows if "makespan" in r}
    }
    grid = Table(
        "M",
        "schedule",
        "makespan",
        "bubble: formula",
        "table",
        "run",
        "in flight: formula",
        "table",
        "copies",
        "bound by",
        title="formula: as published; table: idealised, in slots; run: with messages",
    )
    if pricing.workload is not None:
        grid.add_column("memory")
    for row in rows:
        if "error" in row:
            grid.add_row(
                str(row["microbatches"]), row["schedule"], "-", "-", "-", "-", "-", "-", "-", "-"
            )
            continue
        fastest = row["makespan"] <= best[row["microbatches"]] * (1 + 1e-12)
        style = "[bold green]" if fastest else ""
        cells = [
            str(row["microbatches"]),
            row["schedule"],
            f"{style}{seconds(row['makespan'])}",
            percent(row["formula_bubble_ratio"]),
            percent(row["table_bubble_ratio"]),
            percent(row["bubble_ratio"]),
            "-" if row["formula_in_flight"] is None else str(row["formula_in_flight"]),
            str(row["peak_in_flight"]),
            str(row["weight_copies"]),
            row["bound_by"],
        ]
        if pricing.workload is not None:
            cells.append(f"{max(row['memory_bytes']) / 1e9:.1f} GB")
        grid.add_row(*cells)
    out = console()
    out.print(grid)
    out.print("where the levels disagree, and why:")
    for row in rows:
        reason = row.get("why") or f"not evaluated: {row['error']}"
        out.print(
            f"  {row['schedule']}, M = {row['microbatches']}: {reason}",
            soft_wrap=True,
            markup=False,
        )
