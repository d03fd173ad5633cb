"""`pipejax order`: which transfers wait, and a better order of SEND and RECV cells."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.cli.options.pricing import Pricing, required
from pipejax.cli.options.values import JsonFlag, Seed, TimeLimit, parse_seconds
from pipejax.cli.output.files import (
    CERTIFICATE,
    DRAWING,
    NO_OUTPUT,
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
    from pipejax.search.found import Found
    from pipejax.search.orders.transfers import TransferOrder


BETTER = "found"  # the order found, among others


def order(
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
    json: JsonFlag = False,
) -> None:
    """Find which transfers block others under rendezvous, and search a better order of them.

    Options:
      certificate: for `pipejax verify`.
      out: the better table (.csv or .json).
      figure: runs before and after (.png, .pdf or .svg).

    Example:
      pipejax order -s interleaved-1f1b -P 8 -M 16 -V 2 -T F=1,I=1.5,W=0.7 --comm 0.95
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
                print_json(_as_json(table, found, waits) | looked_at | beside)
                return end_all(out, certificate, figure, json=True)
            _print(table, found, _who_waits(shown, waits, after))
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


def _as_json(
    table: pj.ScheduleTable, found: "Found[TransferOrder]", waits: "TransferWaits"
) -> dict[str, Any]:
    return {
        "schedule": table.name,
        "workers": table.num_workers,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
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


def _print(table: pj.ScheduleTable, found: "Found[TransferOrder]", who_waits: str) -> None:
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
