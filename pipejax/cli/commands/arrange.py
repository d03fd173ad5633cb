"""`pipejax arrange`: which microbatch enters the pipeline when, where they differ."""

import json as json_text
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.pricing import Pricing, required
from pipejax.cli.options.values import JsonFlag, Seed, TimeLimit, parse_seconds
from pipejax.cli.output.files import NO_OUTPUT, ORDER, Output
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
    from pipejax.search.found import Found
    from pipejax.search.orders.microbatches import MicrobatchOrder


def arrange(
    table: pj.ScheduleTable,
    pricing: Pricing | None,
    links: pj.Links,
    iterations: int = 200,
    time_limit: TimeLimit = "60",
    seed: Seed = 0,
    out: Annotated[Output, ORDER] = NO_OUTPUT,
    json: JsonFlag = False,
) -> None:
    """Search the order of microbatches that differ, against sorted and random ones.

    Options:
      out: the order, and the lengths in it (.json), for `--microbatch-order`.

    Example:
      pipejax arrange -s 1f1b -P 4 -M 6 -T F=1,B=2 --microbatch-scale 1,3,1,2,1,5
    """
    from pipejax.search.orders.microbatches import MicrobatchSearch

    limit = parse_seconds(time_limit, "--time-limit")
    priced = required(pricing)
    if priced.stragglers and table.num_pipes > 1:
        raise ValueError(
            "--stragglers: a microbatch of another pipe meets a stage on another worker, so slow "
            "workers do not go with a new order: leave it out"
        )
    search = MicrobatchSearch(table, priced.of(table), links, seed)

    def report(found: "Found[MicrobatchOrder]") -> Callable[[], None]:
        """Work out what the report says; return what writes and prints it."""
        result = _as_json(table, links, found, priced.microbatches.lengths)
        text = json_text.dumps(_saved(result), indent=2) + "\n"

        def show() -> None:
            out.save(lambda draft: write_file(draft, text), lambda: text)
            if json:
                print_json(result | out.as_json())
            else:
                _print(table, links, found)
                print_written("wrote the order to", out.written)
            out.end(json=json)

        return show

    search_and_report(search, iterations, limit, report)


def _saved(result: dict[str, Any]) -> dict[str, Any]:
    """What a file of the order holds: enough to price it again, and to know what it is of."""
    names = ("schedule", "workers", "microbatches")
    return {name: result[name] for name in names} | result["best"] | {"makespan": result["value"]}


def _as_json(
    table: pj.ScheduleTable,
    links: pj.Links,
    found: "Found[MicrobatchOrder]",
    lengths: list[Any] | None,
) -> dict[str, Any]:
    order = found.best.order.tolist()
    given = {} if lengths is None else {"lengths": [lengths[m] for m in order]}
    return {
        "schedule": table.name,
        "workers": table.num_workers,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "link": links.model,
        "best": {"order": order, **given},
        **pick(found, FOUND),
    }


def _print(table: pj.ScheduleTable, links: pj.Links, found: "Found[MicrobatchOrder]") -> None:
    orders = {"found": found.value, **found.baselines}
    saved = (percent(1 - found.value / (time or 1.0)) for time in orders.values())
    columns = ("order", orders), ("makespan", map(seconds, orders.values())), ("found saves", saved)
    print_all(
        f"[bold]{escape(table.name)}[/], {table.num_workers} workers, {table.num_microbatches} "
        f"microbatches, {links.model} links: {seconds(found.value)} in the order found",
        f"  no order saves more than {percent(found.gap)} of it ({seconds(found.lower_bound)})",
        f"  {found.evaluated} orders evaluated; search ended: {found.stopped}\n",
        grid(columns),
        f"order: {' '.join(map(str, found.best.order.tolist()))}",
    )
