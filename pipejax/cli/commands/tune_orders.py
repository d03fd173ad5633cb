"""`pipejax tune messages|microbatches|places`: what stands in which order, by local search.

Messages are SEND and RECV cells, of which the command says too which wait for which. Microbatches
that differ are given an order, workers are given places: permutations, searched alike.
"""

import json as json_text
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.pricing import Pricing, required
from pipejax.cli.options.values import Seed, TimeLimit, parse_seconds
from pipejax.cli.output.files import (
    CERTIFICATE,
    DRAWING,
    NO_OUTPUT,
    ORDER,
    TABLE,
    Output,
    certify,
    draw_runs,
    end_all,
    save_table,
)
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
from pipejax.schedules.table.links import QUEUES
from pipejax.search.found import gap

if TYPE_CHECKING:
    from pipejax.analysis.paths.head_of_line_blocking import TransferWaits
    from pipejax.costs.topology import PlacedCosts
    from pipejax.search.found import Found
    from pipejax.search.orders.permutations import PermutationSearch
    from pipejax.search.orders.transfers import TransferOrder


BETTER = "found"  # the order found, among others


def messages(
    table: pj.ScheduleTable,
    pricing: Pricing | None,
    rendezvous: pj.Links,
    iterations: int = 1000,
    time_limit: TimeLimit = "60",
    seed: Seed = 0,
    worst: int = 10,
    out: Annotated[Output, TABLE] = NO_OUTPUT,
    certificate: Annotated[Output, CERTIFICATE] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> None:
    """Find which transfers block others under rendezvous, and search a better order of them.

    Options:
      certificate: for `pipejax verify`.
      out: the better table (.csv or .json).
      figure: runs before and after (.png, .pdf or .svg).

    Example:
      pipejax tune messages -s interleaved-1f1b -P 8 -M 16 -V 2 -T F=1,I=1.5,W=0.7 --comm 0.95
    """
    from pipejax.analysis.paths.head_of_line_blocking import queue_makespans
    from pipejax.search.orders.transfers import TransferSearch

    limit = parse_seconds(time_limit, "--time-limit")
    costs = required(pricing).of(table)

    def report(found: "Found[TransferOrder]") -> Callable[[], None]:
        """Work out what the report says; return what writes and prints it."""
        tables = {"own": table, "by producer": pj.links.insert_transfers(table, link=rendezvous)}
        makespans = {
            name: queue_makespans(each, costs, link=rendezvous)
            for name, each in {**tables, BETTER: found.best.table}.items()
        }
        # where the table's own order deadlocks, nothing waits: the next best thing is looked at
        shown = "by producer" if found.baselines["own"] is None else "own"
        runs = [
            pj.evaluate(each, costs, link=rendezvous) for each in (tables[shown], found.best.table)
        ]
        waits, after = map(pj.links.transfer_waits, runs)

        def show() -> None:
            save_table(found.best.table, out)
            draw_runs({"before": runs[0], "after": runs[1]}, figure, messages=True)
            if found.stopped != "interrupted" or certificate.path is not None:
                bounds = {"path": found.best.free_bound, "queue": found.lower_bound}
                certify(pj.certificate(runs[1], lower_bounds=bounds), certificate)
            if json:
                looked_at = {"makespans": makespans, "waits_of": shown, **out.as_json()}
                looked_at["wait"] = {shown: _total(waits), BETTER: _total(after)}
                beside = certificate.as_json() | figure.as_json()
                print_json(_messages_as_json(table, found, waits) | looked_at | beside)
                return end_all(out, certificate, figure, json=True)
            _print_messages(table, found, _who_waits(shown, waits, after))
            print_all(
                _makespan_grid(makespans),
                _wait_grid(shown, waits, worst),
                "wait by worker: " + ", ".join(map(seconds, waits.by_worker)),
            )
            print_written("wrote the better table to", out.written)
            print_written("wrote the certificate to", certificate.written)
            print_written("drawn to", figure.written)
            end_all(out, certificate, figure, json=False)

        return show

    search = TransferSearch(table, costs, rendezvous, seed)
    search_and_report(search, iterations, limit, report)


Makespans = dict[str, dict[str, float | None]]


def _messages_as_json(
    table: pj.ScheduleTable, found: "Found[TransferOrder]", waits: "TransferWaits"
) -> dict[str, Any]:
    return {
        **_sizes(table),
        "queues": found.best.links.queues,
        "own_order": "cells" if table.has_communication else "default",
        "best": {"order": found.best.order.tolist()},
        **pick(found, FOUND),
        "gain": _gain(found),
        "free_bound": found.best.free_bound,
        "free_gap": gap(found.value, found.best.free_bound),
        "waits": [
            pick(w, "sender receiver ready start wait blocked worker")
            | {name: str(cell) for name, cell in pick(w, "send cell front").items()}
            for w in waits.transfers
            if w.wait > 0
        ],
        "waits_by_front": [
            {"worker": worker, "front": str(front), "wait": wait}
            for (worker, front), wait in waits.by_front.items()
        ],
        "waits_by_worker": waits.by_worker,
    }


def _print_messages(table: pj.ScheduleTable, found: "Found[TransferOrder]", who_waits: str) -> None:
    producer = found.baselines["by producer"] or 0.0
    less = 1 - found.value / producer if producer else 0.0
    free = gap(found.value, found.best.free_bound)
    print_all(
        f"[bold]{escape(table.name)}[/] on {table.num_workers} workers, one queue per "
        f"{found.best.links.queues}: {seconds(found.value)} in the order found",
        f"  {_against_own(table, found)}",
        f"  {who_waits}",
        f"  {percent(less)} less than producer by producer ({seconds(producer)})",
        f"  messages that use no resource would save {percent(free)} of it "
        f"({seconds(found.best.free_bound)})",
        f"  no order saves more than {percent(found.gap)} of it ({seconds(found.lower_bound)})",
        f"  {found.evaluated} orders evaluated; search ended: {found.stopped}\n",
    )


def _against_own(table: pj.ScheduleTable, found: "Found[TransferOrder]") -> str:
    """Say what the order gains over that of the table, or over the one that it runs in."""
    own, gain = found.baselines["own"], _gain(found)
    if gain is None or own is None:
        return "its own order of SEND and RECV cells deadlocks"
    order = "its own order of SEND and RECV cells"
    if not table.has_communication:
        order = "the default order of transfers"
    return f"{percent(gain)} less than in {order} ({seconds(own)})"


def _gain(found: "Found[TransferOrder]") -> float | None:
    """What the order saves of the makespan of the table's own; None where that deadlocks."""
    own = found.baselines["own"]
    if own is None:
        return None
    return 1 - found.value / own if own else 0.0


def _total(waits: "TransferWaits") -> float:
    return float(waits.by_worker.sum())


def _who_waits(shown: str, waits: "TransferWaits", after: "TransferWaits") -> str:
    """Say in a sentence what waits longest for what, and how much all wait before and after."""
    order = "that order" if shown == "own" else "the order producer by producer"
    if not waits.transfers or waits.transfers[0].wait <= 0:
        return f"no transfer waits in {order}"
    worst = waits.transfers[0]
    return (
        f"on worker {worst.worker}, {worst.cell} waits longest: {seconds(worst.wait)} behind "
        f"{worst.front}\n"
        f"  all transfers wait {seconds(_total(waits))} in {order}, "
        f"{seconds(_total(after))} in the one found"
    )


def _makespan_grid(makespans: Makespans) -> Table:
    queues = makespans[BETTER]
    columns = {
        order: ["deadlock" if each[name] is None else seconds(each[name] or 0.0) for name in queues]
        for order, each in makespans.items()
    }
    labels = [f"one per {name}" if name in QUEUES else name for name in queues]
    title = "makespan by order of the transfers"
    return grid([("queues", labels), *columns.items()], title=title)


def _wait_grid(shown: str, waits: "TransferWaits", worst: int) -> Table:
    late = [waited for waited in waits.transfers if waited.wait > 0]
    listed = late[:worst]
    return grid(
        [
            ("transfer", (w.send for w in listed)),
            ("workers", (f"{w.sender} to {w.receiver}" for w in listed)),
            ("ready", (seconds(w.ready) for w in listed)),
            ("waits", (seconds(w.wait) for w in listed)),
            ("blocked", (seconds(w.blocked) for w in listed)),
            ("on worker", (w.worker for w in listed)),
            ("cell", (w.cell for w in listed)),
            ("behind", (w.front for w in listed)),
        ],
        title=f"{len(late)} transfers wait, order: {shown}",
        caption="blocked: while the one in front had not started either",
    )


class _Permuted(NamedTuple):
    """What is said of the best permutation that a search found.

    Attributes:
      best: for `--json`; the file that other commands read holds it too.
      found: is what, of what none saves more.
      lines: behind the comparison with others.
      draw: writes a picture of it.
    """

    best: Mapping[str, Any]
    found: tuple[str, str, str]
    lines: tuple[object, ...]
    draw: Callable[[Output], None] = lambda figure: None


def microbatches(
    table: pj.ScheduleTable,
    pricing: Pricing | None,
    links: pj.Links,
    iterations: int = 200,
    time_limit: TimeLimit = "60",
    seed: Seed = 0,
    out: Annotated[Output, ORDER] = NO_OUTPUT,
) -> None:
    """Search the order of microbatches that differ, against sorted and random ones.

    Options:
      out: the order, and the lengths in it (.json), for `--microbatch-order`.

    Example:
      pipejax tune microbatches -s 1f1b -P 4 -M 6 -T F=1,B=2 --microbatch-scale 1,3,1,2,1,5
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
    lengths = priced.microbatches.lengths

    def said(found: "Found[Any]") -> _Permuted:
        order = found.best.order.tolist()
        own = {} if lengths is None else {"lengths": [lengths[m] for m in order]}
        line = f"order: {' '.join(map(str, order))}"
        return _Permuted({"order": order, **own}, ("order", "order", "orders"), (line,))

    _search_permutations(table, links, search, (iterations, limit), said, out, NO_OUTPUT, json=json)


def places(
    table: pj.ScheduleTable,
    pricing: Pricing | None,
    links: pj.Links,
    iterations: int = 200,
    time_limit: TimeLimit = "60",
    seed: Seed = 0,
    out: Annotated[Output, ORDER] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> None:
    """Search the places of workers on a machine of nodes, against in order and round robin.

    Options:
      out: the places (.json), for `--worker-places`.
      figure: who sits where, in order and as found (.png, .pdf or .svg).

    Example:
      pipejax tune places -s interleaved-1f1b -P 8 -M 16 -T F=1,B=2 --workers-per-node 4
      --comm 0,0.5
    """
    from pipejax.costs.topology import places_on
    from pipejax.search.orders.places import PlacementSearch

    limit = parse_seconds(time_limit, "--time-limit")
    priced = required(pricing)
    if priced.placed is None:
        raise ValueError(
            "tune places needs a machine of nodes: give --workers-per-node N and --comm with a "
            "time for each level, --costs with a file that says so, or --model with "
            "microbatches alike"
        )
    placed = priced.placed(table)
    given = places_on(table, priced.places, "--worker-places")
    search = PlacementSearch(placed, given, links, seed)

    def said(found: "Found[Any]") -> _Permuted:
        seats = found.best.places
        best = {
            "places": seats.tolist(),
            "nodes": [workers.tolist() for workers in placed.seated(seats)],
            "boundaries": placed.crossed(seats).tolist(),
        }
        lines = (_seats(placed, seats), f"places: {' '.join(map(str, best['places']))}")
        words = ("placement", "places", "different placements")
        return _Permuted(best, words, lines, lambda figure: _draw_seats(placed, found, figure))

    _search_permutations(table, links, search, (iterations, limit), said, out, figure, json=json)


def _search_permutations(
    table: pj.ScheduleTable,
    links: pj.Links,
    search: "PermutationSearch[Any]",
    limits: tuple[int, float],
    said: "Callable[[Found[Any]], _Permuted]",
    out: Output,
    figure: Output,
    *,
    json: bool,
) -> None:
    """Search, print and write; if interrupted, what was found by then."""

    def report(found: "Found[Any]") -> Callable[[], None]:
        """Work out what the report says; return what writes and prints it."""
        own = said(found)
        result = _sizes(table) | {"link": links.model, "best": own.best} | pick(found, FOUND)
        names = ("schedule", "workers", "microbatches")  # what an order is of
        kept = ("order", "lengths", "places")
        saved = {k: result[k] for k in names} | {
            **{k: own.best[k] for k in kept if k in own.best},
            "makespan": found.value,
        }
        text = json_text.dumps(saved, indent=2) + "\n"

        def show() -> None:
            out.save(lambda draft: write_file(draft, text), lambda: text)
            own.draw(figure)
            if json:
                print_json(result | figure.as_json() | out.as_json())
            else:
                _print_permuted(table, links, found, own)
                print_written(f"wrote the {own.found[1]} to", out.written)
                print_written("drawn to", figure.written)
            end_all(out, figure, json=json)

        return show

    search_and_report(search, *limits, report)


def _sizes(table: pj.ScheduleTable) -> dict[str, Any]:
    """What a report is of, for `--json`."""
    return {
        "schedule": table.name,
        "workers": table.num_workers,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
    }


def _print_permuted(
    table: pj.ScheduleTable, links: pj.Links, found: "Found[Any]", own: _Permuted
) -> None:
    one, those, every = own.found
    others = {name: time or 0.0 for name, time in found.baselines.items()}
    times = {"found": found.value, **others}
    saved = (percent(1 - found.value / (time or 1.0)) for time in times.values())
    columns = (one, times), ("makespan", map(seconds, times.values())), ("found saves", saved)
    print_all(
        f"[bold]{escape(table.name)}[/], {table.num_workers} workers, {table.num_microbatches} "
        f"microbatches, {links.model} links: {seconds(found.value)} in the {those} found",
        f"  no {one} saves more than {percent(found.gap)} of it ({seconds(found.lower_bound)})",
        f"  {found.evaluated} {every} evaluated; search ended: {found.stopped}\n",
        grid(columns),
        *own.lines,
    )


def _seats(placed: "PlacedCosts", found: Any) -> Table:
    """Who sits on which node, in order and as found, and which boundaries leave it."""
    in_order = np.arange(placed.table.num_workers)
    both = {"in order": in_order, "found": found}
    nodes = range(int(placed.nodes.max()) + 1)
    columns: list[tuple[str, list[str]]] = [("node", [*map(str, nodes), "between nodes"])]
    for name, places in both.items():
        seats = [" ".join(map(str, workers)) for workers in placed.seated(places)]
        crossed = placed.crossed(places)
        columns.append((f"workers {name}", [*seats, f"{crossed[1:].sum()} of {crossed.sum()}"]))
    return grid(columns, caption="between nodes: stage boundaries whose messages leave a node")


def _draw_seats(placed: "PlacedCosts", found: "Found[Any]", figure: Output) -> None:
    """Draw who sits where, in order and as found."""
    if figure.path is None:
        return
    from pipejax.plots.charts import machine_picture  # matplotlib is an extra, slow to import
    from pipejax.plots.timeline import save

    in_order = np.arange(placed.table.num_workers)
    shown = {
        f"in order: {seconds(found.baselines['in order'] or 0.0)}": in_order,
        f"found: {seconds(found.value)}": found.best.places,
    }
    picture = machine_picture(placed, shown)
    figure.save(lambda draft: save(picture, draft))
