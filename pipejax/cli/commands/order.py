"""`pipejax order`: which transfers wait, and a better order of SEND and RECV cells."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.groups import Pricing, required
from pipejax.cli.options.numbers import parse_seconds
from pipejax.cli.output.files import TABLE, check_out
from pipejax.cli.output.numbers import console, percent, print_json, seconds
from pipejax.schedules.table.links import QUEUES, Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import write_table

if TYPE_CHECKING:
    from pipejax.analysis.head_of_line_blocking import TransferWaits
    from pipejax.search.transfers import search as transfer_order
    from pipejax.search.transfers.search import TransferOrder


FOUND = "found"


def order(
    table: ScheduleTable,
    pricing: Pricing | None,
    rendezvous: Links,
    iterations: Annotated[int, typer.Option(help="Most batches of orders to try.", min=0)] = 1000,
    time_limit: Annotated[
        str, typer.Option(help="Seconds after which the search ends; Ctrl-C ends it sooner.")
    ] = "60",
    seed: Annotated[int, typer.Option(help="Seed of the search.", min=0)] = 0,
    worst: Annotated[int, typer.Option(help="Waiting transfers to list.", min=0)] = 10,
    out: Annotated[
        Path | None, typer.Option(help="Write the better table to this file (.csv or .json).")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Find which transfers block others under rendezvous, and search a better order of them."""
    from pipejax.analysis.evaluate import evaluate
    from pipejax.analysis.head_of_line_blocking import queue_makespans, transfer_waits
    from pipejax.engine.lowering.communication_cells import insert_transfers
    from pipejax.search.transfers.search import order as search_order

    limit = parse_seconds(time_limit, "--time-limit")
    check_out(out, TABLE)
    costs = required(pricing).of(table)
    with _progress(iterations) as progress:
        found = search_order(
            table,
            costs,
            link=rendezvous,
            iterations=iterations,
            time_limit=limit,
            seed=seed,
            on_progress=progress,
        )
    if out is not None:
        write_table(found.table, out)
    tables = {
        "own": table,
        "by producer": insert_transfers(table, link=rendezvous),
        FOUND: found.table,
    }
    makespans = {
        name: queue_makespans(each, costs, link=rendezvous) for name, each in tables.items()
    }
    # where the table's own order deadlocks, nothing waits: the next best thing is looked at
    shown = "by producer" if found.baselines["own"] is None else "own"
    waits = transfer_waits(evaluate(tables[shown], costs, link=rendezvous))
    if json:
        print_json(_as_json(table, found, makespans, shown, waits, out))
    else:
        _print(table, found, makespans, shown, waits, worst, out)


@contextmanager
def _progress(iterations: int) -> "Iterator[transfer_order.OnProgress]":
    """Show progress on stderr where a person sees it."""
    err = Console(stderr=True)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("searching", total=iterations)
        yield lambda done, makespan: bar.update(
            task, completed=done, description=f"best {seconds(makespan)}"
        )


Makespans = dict[str, dict[str, float | None]]


def _as_json(
    table: ScheduleTable,
    found: "TransferOrder",
    makespans: Makespans,
    shown: str,
    waits: "TransferWaits",
    out: Path | None,
) -> dict[str, Any]:
    return {
        "schedule": table.name,
        "workers": table.num_workers,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "queues": found.links.queues,
        "makespan": found.makespan,
        "baselines": dict(found.baselines),
        "free_bound": found.free_bound,
        "free_gap": found.free_gap,
        "queue_bound": found.queue_bound,
        "gap": found.gap,
        "evaluated": found.evaluated,
        "stopped": found.stopped,
        "out": None if out is None else str(out),
        "makespans": makespans,
        "waits_of": shown,
        "waits": [
            {
                "send": str(w.send),
                "sender": w.sender,
                "receiver": w.receiver,
                "ready": w.ready,
                "start": w.start,
                "wait": w.wait,
                "blocked": w.blocked,
                "worker": w.worker,
                "cell": str(w.cell),
                "front": str(w.front),
            }
            for w in waits.transfers
            if w.wait > 0
        ],
        "waits_by_front": [
            {"worker": worker, "front": str(front), "wait": wait}
            for (worker, front), wait in waits.by_front.items()
        ],
        "waits_by_worker": waits.by_worker,
    }


def _print(
    table: ScheduleTable,
    found: "TransferOrder",
    makespans: Makespans,
    shown: str,
    waits: "TransferWaits",
    worst: int,
    out: Path | None,
) -> None:
    to = console()
    to.print(
        f"[bold]{escape(table.name)}[/] on {table.num_workers} workers, one queue per "
        f"{found.links.queues}: {seconds(found.makespan)} in the order found"
    )
    producer = found.baselines["by producer"] or 0.0
    to.print(
        f"  {percent(1 - found.makespan / producer if producer else 0.0)} less than producer "
        f"by producer ({seconds(producer)})"
    )
    to.print(
        f"  {percent(found.free_gap)} above the run in which messages use no resource "
        f"({seconds(found.free_bound)})"
    )
    to.print(
        f"  {percent(found.gap)} above what no order can undercut ({seconds(found.queue_bound)})"
    )
    to.print(f"  {found.evaluated} orders evaluated; search ended: {found.stopped}\n")
    to.print(_makespan_grid(makespans))
    to.print(_wait_grid(shown, waits, worst))
    to.print("wait by worker: " + ", ".join(seconds(wait) for wait in waits.by_worker))
    if out is not None:
        to.print(f"wrote the better table to {out}", markup=False, soft_wrap=True)


def _makespan_grid(makespans: Makespans) -> Table:
    grid = Table("queues", *makespans, title="makespan by order of the transfers")
    for name in makespans[FOUND]:
        row = [makespans[order][name] for order in makespans]
        label = f"one per {name}" if name in QUEUES else name
        grid.add_row(label, *("deadlock" if value is None else seconds(value) for value in row))
    return grid


def _wait_grid(shown: str, waits: "TransferWaits", worst: int) -> Table:
    late = [waited for waited in waits.transfers if waited.wait > 0]
    grid = Table(
        "transfer",
        "workers",
        "ready",
        "waits",
        "blocked",
        "on worker",
        "cell",
        "behind",
        title=f"{len(late)} transfers wait, order: {shown}",
        caption="blocked: while the one in front had not started either",
    )
    for waited in late[:worst]:
        grid.add_row(
            str(waited.send),
            f"{waited.sender} to {waited.receiver}",
            seconds(waited.ready),
            seconds(waited.wait),
            seconds(waited.blocked),
            str(waited.worker),
            str(waited.cell),
            str(waited.front),
        )
    return grid
