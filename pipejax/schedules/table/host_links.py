"""Host links: in which order offloads and loads go over them.

A worker has a host link of its own, unless groups of workers share one, as two accelerators on
one switch do. Groups belong to the machine, not to the table. A link carries one op at a time, in
the order of the columns of the table, ties by worker; an op is issued where it stands in its row.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.base.longest_path import CycleError, run_edges, topological_order
from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.dependencies import order_of_cells
from pipejax.schedules.cells.ops import HOST, Cell
from pipejax.schedules.table.links import Groups, Links
from pipejax.schedules.table.table import ScheduleTable, op_before, row_order

Cells = Int[NumpyArray, " edges"]  # worker * slots + slot


def link_of_worker(links: Links, num_workers: int) -> Int[NumpyArray, " workers"]:
    """Identify the host link of each worker by the first worker of its group."""
    first = np.arange(num_workers)
    for group in links.host_links:
        if max(group) >= num_workers:
            raise wrong(
                "host_links", f"names worker {max(group)}: workers are 0 to {num_workers - 1}"
            )
        first[list(group)] = group[0]
    return first


def known_groups(groups: Groups, num_workers: int) -> Groups:
    """Check groups of workers that share a host link: each worker exists, and is in one group."""
    links = Links(host_links=groups)
    link_of_worker(links, num_workers)
    return links.host_links


def tied_rows(table: ScheduleTable, links: Links) -> Int[NumpyArray, "workers rows"]:
    """List the rows that offloads and loads tie to each worker's own: those on its host link."""
    workers = np.arange(table.num_workers)
    link = link_of_worker(links, len(workers)) if table.offloads else workers
    groups = [np.flatnonzero(link == link[worker]) for worker in workers]
    width = max(map(len, groups))
    return np.stack([np.resize(group, width) for group in groups])


def host_edges(table: Content, links: Links) -> tuple[Cells, Cells]:
    """Return the cells (edges) that offloads and loads wait for: the issuing op, the link."""
    link = link_of_worker(links, table.num_workers)
    grammar = table.grammar
    cells, executed = row_order(table, grammar.host), row_order(table, links.executed(grammar))
    before = op_before(table, executed, cells)
    issued = before != NOWHERE
    worker, slot = np.divmod(cells, table.num_slots)
    order = np.lexsort((worker, slot, link[worker]))
    same = link[worker[order[1:]]] == link[worker[order[:-1]]]
    queue = cells[order]
    return (
        np.concatenate([executed[before[issued]], queue[:-1][same]]),
        np.concatenate([cells[issued], queue[1:][same]]),
    )


def waiting_cells(table: Content, links: Links) -> tuple[Cells, Cells]:
    """Return all edges between cells (edges) of a run in which messages take no time."""
    queued = (*links.executed(table.grammar), *table.grammar.off_row)
    tail, head = order_of_cells(table, row_order(table, queued))
    before, waiting = host_edges(table, links)
    if (merged := table.op_of_cell) is not None:
        before = merged[before]
    return np.concatenate([tail, before]), np.concatenate([head, waiting])


def aligned(
    rows: Sequence[Sequence[Cell]], queues: Iterable[Sequence[tuple[int, int]]]
) -> list[list[Cell]]:
    """Insert as few idle cells as possible, so that the cells of each queue go by column."""
    # A cell of a queue is its worker and its place in the row; it stands behind the one before it.
    begins = np.cumsum([0, *map(len, rows)])  # all cells are numbered, row by row
    numbers = [[int(begins[worker]) + place for worker, place in queue] for queue in queues]
    in_row = np.setdiff1d(np.arange(1, begins[-1]), begins)
    # the column of a cell is the longest path to it: one more than that of what stands before it
    tail = np.concatenate([in_row - 1, *(queue[:-1] for queue in numbers)])
    head = np.concatenate([in_row, *(queue[1:] for queue in numbers)])
    column, _ = run_edges(tail.astype(int), head.astype(int), np.ones(begins[-1]))
    moved: list[list[Cell]] = []
    for row, first in zip(rows, begins[:-1].tolist(), strict=True):
        at = column[first : first + len(row)].astype(int).tolist()
        moved.append([()] * (at[-1] + 1 if at else 0))
        for place, cell in zip(at, row, strict=True):
            moved[-1][place] = cell
    return moved


def in_host_order(table: ScheduleTable, rows: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """Move cells to later columns until offloads and loads keep their order over all rows."""
    at = {
        cell: (worker, place) for worker, row in enumerate(rows) for place, cell in enumerate(row)
    }
    slots, workers = np.nonzero(np.isin(table.phase, HOST).T)  # by column, then by worker
    on_host = [at[table.cell(*place)] for place in zip(workers, slots, strict=True)]
    return aligned(rows, [on_host])


def check_host_links(table: Content, links: Links) -> None:
    """Check that groups of workers can share host links in a table."""
    link = link_of_worker(links, table.num_workers)
    if len(set(link.tolist())) == table.num_workers or not isinstance(table, ScheduleTable):
        return  # rows alone cannot disagree with themselves
    if not table.offloads:
        return
    waiting = waiting_cells(table, links)
    try:
        topological_order(table.phase.size, *waiting)
    except CycleError as error:
        raise table.error(
            "deadlock on a shared host link, where ops go in the order of the columns: nothing in "
            f"this cycle can start: {table.text_of_cycle(error.cycle)}",
            *table.place(error.cycle[0]),
        ) from None
