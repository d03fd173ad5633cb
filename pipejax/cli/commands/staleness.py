"""`pipejax staleness`: with which weights an asynchronous table computes its gradients."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from pipejax.base.array_types import Float, NumpyArray
from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.groups import Pricing
from pipejax.cli.output.files import DRAWING, check_out, drawing
from pipejax.cli.output.numbers import console, gigabytes, percent, print_json
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

if TYPE_CHECKING:
    from pipejax.analysis.staleness import Staleness


BAR, ROWS = 40, 16  # columns of the longest bar, and rows of the histogram in the terminal


def staleness(
    table: ScheduleTable,
    pricing: Pricing | None,
    links: Links,
    out: Annotated[
        Path | None, typer.Option(help="Draw the delays to this file (.png, .pdf, .svg).")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show weight versions and delays of an asynchronous table; in unit slots without times."""
    from pipejax.analysis.staleness import staleness as find
    from pipejax.costs.workload import stage_bytes

    check_out(out, DRAWING)
    costs = None if pricing is None else pricing.of(table)
    found = find(table, costs, link=links)
    result: dict[str, Any] = {
        name: getattr(found, name)
        for name in (
            "schedule",
            "workers",
            "stages",
            "microbatches",
            "weight_versions",
            "own_lag",
            "max_delay",
            "mean_delay",
        )
    }
    if pricing is not None:
        result["link"] = links.model
    if pricing is not None and pricing.workload is not None:
        version = np.asarray(stage_bytes(pricing.workload, table).version)
        result["weight_bytes"] = found.versions @ version
    if out is not None:
        _draw(out, found)
        result["out"] = str(out)
    if json:
        print_json(result)
        return
    shown = console()
    shown.print(
        f"[bold]{escape(table.name)}[/], {found.workers} workers, {found.stages} stages, "
        f"{found.microbatches} microbatches, "
        + ("unit slots" if costs is None else f"{links.model} links")
    )
    shown.print(_workers(found, result.get("weight_bytes")))
    if not table.updates_within:
        shown.print("no cell updates weights: the table is synchronous, nothing is stale")
        return
    shown.print(
        f"delay of an update in steady state: mean [bold]{found.mean_delay:.4g}[/], "
        f"largest [bold]{found.max_delay}[/] block updates"
    )
    shown.print(_histogram(found))
    if out is not None:
        shown.print(f"drawn to {out}", markup=False, soft_wrap=True)


def _workers(found: "Staleness", held: Float[NumpyArray, " workers"] | None) -> Table:
    grid = Table("worker", "stages", "weight versions", "own lag")
    if held is not None:
        grid.add_column("weights")
    for worker, versions in enumerate(found.weight_versions):
        row = [
            str(worker),
            " ".join(map(str, np.flatnonzero(found.versions[worker]))),
            str(versions),
            str(found.own_lag[worker]),
        ]
        grid.add_row(*row, *([] if held is None else [gigabytes(float(held[worker]))]))
    return grid


def _histogram(found: "Staleness") -> Table:
    """Share of the delays, in at most `ROWS` rows of equal width."""
    counts = found.histogram()
    width = -(-len(counts) // ROWS)
    share = np.add.reduceat(counts, np.arange(0, len(counts), width)) / counts.sum()
    grid = Table("delay", "", "share", box=None)
    for row, part in enumerate(share):
        first, last = row * width, min((row + 1) * width, len(counts)) - 1
        label = str(first) if first == last else f"{first}-{last}"
        grid.add_row(label, f"[cyan]{'█' * round(BAR * part / share.max())}[/]", percent(part))
    return grid


def _draw(out: Path, found: "Staleness") -> None:
    from pipejax.plots.staleness import draw_delays  # matplotlib is an extra, slow to import

    with drawing(out, 0.5, 2.4) as (_, axes):
        draw_delays(axes, found.histogram(), found.mean_delay)
        axes.set_title(f"{found.schedule}, {found.stages} stages", loc="left")
