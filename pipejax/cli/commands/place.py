"""`pipejax place`: which worker sits where on a machine of nodes."""

import json as json_text
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.pricing import Pricing, required
from pipejax.cli.options.values import JsonFlag, Seed, TimeLimit, parse_seconds
from pipejax.cli.output.files import DRAWING, NO_OUTPUT, ORDER, Output, end_all
from pipejax.cli.output.report import (
    FOUND,
    grid,
    percent,
    pick,
    print_all,
    print_json,
    print_written,
    search_and_report,
    seconds,
)

if TYPE_CHECKING:
    from pipejax.costs.topology import PlacedCosts
    from pipejax.search.found import Found
    from pipejax.search.orders.places import WorkerPlaces


def place(
    table: pj.ScheduleTable,
    pricing: Pricing | None,
    links: pj.Links,
    iterations: int = 200,
    time_limit: TimeLimit = "60",
    seed: Seed = 0,
    out: Annotated[Output, ORDER] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
    json: JsonFlag = False,
) -> None:
    """Search the places of workers on a machine of nodes, against in order and round robin.

    Options:
      out: the places (.json), for `--worker-places`.
      figure: who sits where, in order and as found (.png, .pdf or .svg).

    Example:
      pipejax place -s interleaved-1f1b -P 8 -M 16 -T F=1,B=2 --workers-per-node 4 --comm 0,0.5
    """
    from pipejax.costs.topology import places_on
    from pipejax.search.orders.places import PlacementSearch

    limit = parse_seconds(time_limit, "--time-limit")
    priced = required(pricing)
    if priced.placed is None:
        raise ValueError(
            "place needs a machine of nodes: give --workers-per-node N and --comm with a time for "
            "each level, --costs with a file that says so, or --model with microbatches alike"
        )
    placed = priced.placed(table)
    given = places_on(table, priced.places, "--worker-places")
    search = PlacementSearch(placed, given, links, seed)

    def report(found: "Found[WorkerPlaces]") -> Callable[[], None]:
        """Work out what the report says; return what writes and prints it."""
        result = _as_json(placed, links, found)
        text = json_text.dumps(_saved(result), indent=2) + "\n"

        def show() -> None:
            out.save(lambda draft: write_file(draft, text), lambda: text)
            _draw(placed, found, figure)
            if json:
                print_json(result | out.as_json() | figure.as_json())
            else:
                _print(placed, links, found)
                print_written("wrote the places to", out.written)
                print_written("drawn to", figure.written)
            end_all(out, figure, json=json)

        return show

    search_and_report(search, iterations, limit, report)


def _saved(result: dict[str, Any]) -> dict[str, Any]:
    """What a file of the places holds: enough to price them again, and to know what they are of."""
    names = ("schedule", "workers", "microbatches")
    own = {"places": result["best"]["places"], "makespan": result["value"]}
    return {name: result[name] for name in names} | own


def _as_json(
    placed: "PlacedCosts", links: pj.Links, found: "Found[WorkerPlaces]"
) -> dict[str, Any]:
    table = placed.table
    return {
        "schedule": table.name,
        "workers": table.num_workers,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "link": links.model,
        "best": {
            "places": found.best.places.tolist(),
            "nodes": [workers.tolist() for workers in placed.seated(found.best.places)],
            "boundaries": placed.crossed(found.best.places).tolist(),
        },
        **pick(found, FOUND),
    }


def _print(placed: "PlacedCosts", links: pj.Links, found: "Found[WorkerPlaces]") -> None:
    table = placed.table
    places = {"found": found.value, **found.baselines}
    saved = (percent(1 - found.value / (time or 1.0)) for time in places.values())
    columns = ("placement", places), ("makespan", map(seconds, places.values()))
    print_all(
        f"[bold]{escape(table.name)}[/], {table.num_workers} workers, {table.num_microbatches} "
        f"microbatches, {links.model} links: {seconds(found.value)} in the places found",
        f"  no placement saves more than {percent(found.gap)} of it ({seconds(found.lower_bound)})",
        f"  {found.evaluated} different placements evaluated; search ended: {found.stopped}\n",
        grid((*columns, ("found saves", saved))),
        _seats(placed, found),
        f"places: {' '.join(map(str, found.best.places.tolist()))}",
    )


def _seats(placed: "PlacedCosts", found: "Found[WorkerPlaces]") -> Table:
    """Who sits on which node, in order and as found, and which boundaries leave it."""
    in_order = np.arange(placed.table.num_workers)
    both = {"in order": in_order, "found": found.best.places}
    nodes = range(int(placed.nodes.max()) + 1)
    columns: list[tuple[str, list[str]]] = [("node", [*map(str, nodes), "between nodes"])]
    for name, places in both.items():
        seats = [" ".join(map(str, workers)) for workers in placed.seated(places)]
        crossed = placed.crossed(places)
        columns.append((f"workers {name}", [*seats, f"{crossed[1:].sum()} of {crossed.sum()}"]))
    return grid(columns, caption="between nodes: stage boundaries whose messages leave a node")


def _draw(placed: "PlacedCosts", found: "Found[WorkerPlaces]", figure: Output) -> None:
    """Draw who sits where, in order and as found."""
    if figure.path is None:
        return
    from pipejax.plots.charts import machine_picture  # matplotlib is an extra, slow to import
    from pipejax.plots.timeline import save

    in_order = np.arange(placed.table.num_workers)
    shown = {
        f"in order: {seconds(found.baselines['in order'])}": in_order,
        f"found: {seconds(found.value)}": found.best.places,
    }
    picture = machine_picture(placed, shown)
    figure.save(lambda draft: save(picture, draft))
