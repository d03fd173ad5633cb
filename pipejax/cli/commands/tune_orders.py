"""`pipejax tune messages|microbatches|places`: what stands in which order, by local search."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.cli.options.line import command_line
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, RendezvousOptions, RunOptions
from pipejax.cli.options.scenario import build, required
from pipejax.cli.options.values import Seed, TimeLimit, parse_seconds, parse_share
from pipejax.cli.output.answer import Answer, searched
from pipejax.cli.output.files import NO_OUTPUT, Output, certify, draw_runs, save_table
from pipejax.cli.output.kinds import CERTIFICATE, DRAWING, ORDER, TABLE
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.report import FOUND, Column, grid, pick, sizes_of, table_of
from pipejax.schedules.table.links import QUEUES
from pipejax.search.found import gap as gap_of

if TYPE_CHECKING:
    from pipejax.analysis.paths.head_of_line_blocking import TransferWaits
    from pipejax.costs.topology import PlacedCosts
    from pipejax.search.found import Found
    from pipejax.search.orders.microbatches import MicrobatchOrder
    from pipejax.search.orders.places import WorkerPlaces
    from pipejax.search.orders.transfers import TransferOrder


BETTER = "found"  # the order found, among others
WAITS = (
    Column("transfer", "send"),
    Column("workers", lambda row: f"{row['sender']} to {row['receiver']}"),
    Column("ready", "ready", seconds),
    Column("waits", "wait", seconds),
    Column("blocked", "blocked", seconds),
    Column("on worker", "worker"),
    Column("cell", "cell"),
    Column("behind", "front"),
)


@options
def messages(
    *,
    run: RunOptions = RunOptions(),
    shared: RendezvousOptions = RendezvousOptions(),
    iterations: int = 1000,
    time_limit: TimeLimit = "60",
    gap: str = "0.1%",
    seed: Seed = 0,
    worst: int = 10,
    out: Annotated[Output, TABLE] = NO_OUTPUT,
    certificate: Annotated[Output, CERTIFICATE] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
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

    limit, enough = parse_seconds(time_limit, "--time-limit"), parse_share(gap, "--gap")
    scenario = run.scenario(shared.links())
    table, costs = build(scenario), required(scenario).table_costs()
    rendezvous = scenario.links

    def report(found: "Found[TransferOrder]") -> Callable[[], Answer]:
        """Work out what is said; return what writes the files and answers."""
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

        def answer() -> Answer:
            save_table(found.best.table, out)
            draw_runs({"before": runs[0], "after": runs[1]}, figure, messages=True)
            if found.stopped != "interrupted" or certificate.path is not None:
                bounds = {"path": found.best.free_bound, "queue": found.lower_bound}
                certify(pj.certificate(runs[1], lower_bounds=bounds), certificate)
            result = _messages_as_json(table, found, waits) | {
                "makespans": makespans,
                "waits_of": shown,
                **out.as_json(),
                "wait": {shown: _total(waits), BETTER: _total(after)},
            }
            written = {
                "wrote the better table to": out,
                "wrote the certificate to": certificate,
                "drawn to": figure,
            }
            # what PyTorch needs beside SEND and RECV, export puts in
            torch = {"table": str(out.path), "format": "torch-csv", "out": "torch.csv"}
            go_on = () if out.path is None else (command_line("export", torch),)
            return Answer(result, _said_of_messages(result, found, worst), written, next=go_on)

        return answer

    search = TransferSearch(table, costs, rendezvous, seed)
    return searched(search, iterations, limit, report, enough)


def _messages_as_json(
    table: pj.ScheduleTable, found: "Found[TransferOrder]", waits: "TransferWaits"
) -> dict[str, Any]:
    return {
        **sizes_of(table),
        "queues": found.best.links.queues,
        "own_order": "cells" if table.has_communication else "default",
        "best": {"order": found.best.order.tolist()},
        **pick(found, FOUND),
        "gain": _gain(found),
        "free_bound": found.best.free_bound,
        "free_gap": gap_of(found.value, found.best.free_bound),
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


def _said_of_messages(
    result: Mapping[str, Any], found: "Found[TransferOrder]", worst: int
) -> Iterator[object]:
    producer = found.baselines["by producer"] or 0.0
    less = 1 - found.value / producer if producer else 0.0
    yield (
        f"[bold]{escape(result['schedule'])}[/] on {result['workers']} workers, one queue per "
        f"{result['queues']}: {seconds(found.value)} in the order found"
    )
    yield f"  {_against_own(result, found.baselines['own'])}"
    yield f"  {_who_waits(result)}"
    yield f"  {percent(less)} less than producer by producer ({seconds(producer)})"
    yield (
        f"  messages that use no resource would save {percent(result['free_gap'])} of it "
        f"({seconds(result['free_bound'])})"
    )
    yield from proof(found, "order", "orders")
    yield _makespans(result["makespans"])
    yield table_of(
        result["waits"][:worst],
        WAITS,
        title=f"{len(result['waits'])} transfers wait, order: {result['waits_of']}",
        caption="blocked: while the one in front had not started either",
    )
    yield "wait by worker: " + ", ".join(map(seconds, result["waits_by_worker"]))


def proof(found: "Found[Any]", one: str, every: str) -> Iterator[str]:
    """Say how much better another might be, and how the search went."""
    yield f"  no {one} saves more than {percent(found.gap)} of it ({seconds(found.lower_bound)})"
    yield f"  {found.evaluated} {every} evaluated; search ended: {found.stopped}\n"


def _against_own(result: Mapping[str, Any], own: float | None) -> str:
    """Say what the order gains over that of the table, or over the one that it runs in."""
    order = "its own order of SEND and RECV cells"
    if own is None:
        return f"{order} deadlocks"
    if result["own_order"] == "default":
        order = "the default order of transfers"
    return f"{percent(result['gain'])} less than in {order} ({seconds(own)})"


def _gain(found: "Found[TransferOrder]") -> float | None:
    """What the order saves of the makespan of the table's own; None where that deadlocks."""
    own = found.baselines["own"]
    if own is None:
        return None
    return 1 - found.value / own if own else 0.0


def _total(waits: "TransferWaits") -> float:
    return float(waits.by_worker.sum())


def _who_waits(result: Mapping[str, Any]) -> str:
    """Say in a sentence what waits longest for what, and how much all wait before and after."""
    order = "that order" if result["waits_of"] == "own" else "the order producer by producer"
    if not result["waits"]:
        return f"no transfer waits in {order}"
    worst, (before, after) = result["waits"][0], result["wait"].values()
    return (
        f"on worker {worst['worker']}, {worst['cell']} waits longest: {seconds(worst['wait'])} "
        f"behind {worst['front']}\n"
        f"  all transfers wait {seconds(before)} in {order}, {seconds(after)} in the one found"
    )


def _makespans(makespans: Mapping[str, Mapping[str, float | None]]) -> Table:
    queues = makespans[BETTER]
    columns = {
        order: ["deadlock" if each[name] is None else seconds(each[name] or 0.0) for name in queues]
        for order, each in makespans.items()
    }
    labels = [f"one per {name}" if name in QUEUES else name for name in queues]
    title = "makespan by order of the transfers"
    return grid([("queues", labels), *columns.items()], title=title)


SAVED = ("order", "lengths", "places")  # of the best permutation, in the file of it


class _Permuted(NamedTuple):
    """The best permutation that a search found."""

    table: pj.ScheduleTable  # what is permuted
    links: pj.Links  # what it runs under
    found: "Found[Any]"  # the result of the search
    best: Mapping[str, Any]  # what `--json` says of the permutation
    words: tuple[str, str, str]  # what it is, what was found, and of what none saves more

    @property
    def result(self) -> dict[str, Any]:
        """What `--json` says."""
        sizes = sizes_of(self.table) | {"link": self.links.model}
        return sizes | {"best": self.best, **pick(self.found, FOUND)}

    def save(self, out: Output) -> None:
        """Write the file that other commands read: the permutation, and what it is one of."""
        sizes = {k: v for k, v in sizes_of(self.table).items() if k != "stages"}
        saved = {name: self.best[name] for name in SAVED if name in self.best}
        out.save_json({**sizes, **saved, "makespan": self.found.value})

    def said(self, *lines: object) -> Iterator[object]:
        """Say how it compares with others; these lines follow."""
        found, (one, those, every) = self.found, self.words
        others = {name: time or 0.0 for name, time in found.baselines.items()}
        times = {"found": found.value, **others}
        saved = (percent(1 - found.value / (time or 1.0)) for time in times.values())
        yield (
            f"[bold]{escape(self.table.name)}[/], {self.table.num_workers} workers, "
            f"{self.table.num_microbatches} microbatches, {self.links.model} links: "
            f"{seconds(found.value)} in the {those} found"
        )
        yield from proof(found, one, every)
        yield grid(
            [(one, times), ("makespan", map(seconds, times.values())), ("found saves", saved)]
        )
        yield from lines


@options
def microbatches(
    *,
    run: RunOptions = RunOptions(),
    links: LinkOptions = LinkOptions(),
    iterations: int = 200,
    time_limit: TimeLimit = "60",
    seed: Seed = 0,
    out: Annotated[Output, ORDER] = NO_OUTPUT,
) -> Answer:
    """Search the order of microbatches that differ, against sorted and random ones.

    Options:
      out: the order, and the lengths in it (.json), for `--microbatch-order`.

    Example:
      pipejax tune microbatches -s 1f1b -P 4 -M 6 -T F=1,B=2 --microbatch-scale 1,3,1,2,1,5
    """
    from pipejax.search.orders.microbatches import MicrobatchSearch

    limit = parse_seconds(time_limit, "--time-limit")
    scenario = run.scenario(links.links())
    table, link = build(scenario), scenario.links
    required(scenario)
    if run.stragglers is not None and table.num_pipes > 1:
        raise ValueError(
            "--stragglers: a microbatch of another pipe meets a stage on another worker, so slow "
            "workers do not go with a new order: leave it out"
        )
    search = MicrobatchSearch(table, scenario.table_costs(), link, seed)
    lengths = scenario.microbatches.lengths

    def report(found: "Found[MicrobatchOrder]") -> Callable[[], Answer]:
        order = found.best.order.tolist()
        own = {} if lengths is None else {"lengths": [lengths[m] for m in order]}
        words = "order", "order", "orders"
        best = _Permuted(table, link, found, {"order": order, **own}, words)

        def answer() -> Answer:
            best.save(out)
            said = best.said(f"order: {' '.join(map(str, order))}")
            return Answer(best.result, said, {"wrote the order to": out})

        return answer

    return searched(search, iterations, limit, report)


@options
def places(
    *,
    run: RunOptions = RunOptions(),
    links: LinkOptions = LinkOptions(),
    iterations: int = 200,
    time_limit: TimeLimit = "60",
    seed: Seed = 0,
    out: Annotated[Output, ORDER] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
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
    scenario = run.scenario(links.links())
    table, link = build(scenario), scenario.links
    required(scenario)
    if scenario.placed is None:
        raise ValueError(
            "tune places needs a machine of nodes: give --workers-per-node N and --comm with a "
            "time for each level, --costs with a file that says so, or --model with "
            "microbatches alike"
        )
    placed = scenario.placed(table)
    given = places_on(table, scenario.source.worker_places, "--worker-places")
    search = PlacementSearch(placed, given, link, seed)

    def report(found: "Found[WorkerPlaces]") -> Callable[[], Answer]:
        seats = found.best.places
        own = {
            "places": seats.tolist(),
            "nodes": [workers.tolist() for workers in placed.seated(seats)],
            "boundaries": placed.crossed(seats).tolist(),
        }
        words = "placement", "places", "different placements"
        best = _Permuted(table, link, found, own, words)

        def answer() -> Answer:
            best.save(out)
            _draw_seats(placed, found, figure)
            said = best.said(_seats(placed, seats), f"places: {' '.join(map(str, own['places']))}")
            written = {"wrote the places to": out, "drawn to": figure}
            return Answer(best.result | figure.as_json(), said, written)

        return answer

    return searched(search, iterations, limit, report)


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
