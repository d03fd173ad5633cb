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

if TYPE_CHECKING:
    from pipejax.analysis.paths.head_of_line_blocking import TransferWaits
    from pipejax.search.orders.transfers import TransferOrder


FOUND = "found"


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
    from pipejax.search.orders.transfers import OrderSearch

    limit = parse_seconds(time_limit, "--time-limit")
    costs = required(pricing).of(table)

    def report(found: "TransferOrder") -> Callable[[], None]:
        """Work out what the report says; return what writes and prints it."""
        tables = {"own": table, "by producer": pj.insert_transfers(table, link=rendezvous)}
        makespans = {
            name: queue_makespans(each, costs, link=rendezvous)
            for name, each in {**tables, FOUND: found.table}.items()
        }
        # where the table's own order deadlocks, nothing waits: the next best thing is looked at
        shown = "by producer" if found.baselines["own"] is None else "own"
        runs = [pj.evaluate(each, costs, link=rendezvous) for each in (tables[shown], found.table)]
        waits, after = map(pj.transfer_waits, runs)

        def show() -> None:
            save_table(found.table, out)
            draw_runs({"before": runs[0], "after": runs[1]}, figure, messages=True)
            if found.stopped != "interrupted" or certificate.path is not None:
                bounds = {"path": found.free_bound, "queue": found.queue_bound}
                certify(pj.certificate(runs[1], lower_bounds=bounds), certificate)
            if json:
                looked_at = {"makespans": makespans, "waits_of": shown, **out.as_json()}
                looked_at["wait"] = {shown: _total(waits), FOUND: _total(after)}
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

    search = OrderSearch(table, costs, rendezvous, seed)
    search_and_report(search, iterations, limit, report)


Makespans = dict[str, dict[str, float | None]]


def _as_json(
    table: pj.ScheduleTable, found: "TransferOrder", waits: "TransferWaits"
) -> dict[str, Any]:
    return {
        "schedule": table.name,
        "workers": table.num_workers,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "queues": found.links.queues,
        "own_order": "cells" if table.has_communication else "default",
        **pick(
            found,
            "makespan gain baselines free_bound free_gap queue_bound gap evaluated stopped",
        ),
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


def _print(table: pj.ScheduleTable, found: "TransferOrder", who_waits: str) -> None:
    producer = found.baselines["by producer"] or 0.0
    less = 1 - found.makespan / producer if producer else 0.0
    print_all(
        f"[bold]{escape(table.name)}[/] on {table.num_workers} workers, one queue per "
        f"{found.links.queues}: {seconds(found.makespan)} in the order found",
        f"  {_against_own(table, found)}",
        f"  {who_waits}",
        f"  {percent(less)} less than producer by producer ({seconds(producer)})",
        f"  messages that use no resource would save {percent(found.free_gap)} of it "
        f"({seconds(found.free_bound)})",
        f"  no order saves more than {percent(found.gap)} of it ({seconds(found.queue_bound)})",
        f"  {found.evaluated} orders evaluated; search ended: {found.stopped}\n",
    )


def _against_own(table: pj.ScheduleTable, found: "TransferOrder") -> str:
    """Say what the order gains over that of the table, or over the one that it runs in."""
    own = found.baselines["own"]
    if found.gain is None or own is None:
        return "its own order of SEND and RECV cells deadlocks"
    order = "its own order of SEND and RECV cells"
    if not table.has_communication:
        order = "the default order of transfers"
    return f"{percent(found.gain)} less than in {order} ({seconds(own)})"


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
    queues = makespans[FOUND]
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
