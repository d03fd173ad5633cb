"""Host links, and the order of offloads and loads on them.

Each worker has its own host link, unless a group of workers shares one, as two accelerators on one
switch do. Groups belong to the machine, not to the table. A link carries one op at a time, in the
order of the columns of the table, ties by worker; the row of a worker issues an op in its turn.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.base.longest_path import CycleError, run_edges, topological_order
from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.dependencies import cell_edges
from pipejax.schedules.cells.ops import HOST, Cell
from pipejax.schedules.table.links import Groups, Links
from pipejax.schedules.table.table import ScheduleTable, op_before, row_order

Cells = Int[NumpyArray, " edges"]  # worker * slots + slot


def host_link_ids(links: Links, num_workers: int) -> Int[NumpyArray, " workers"]:
    """Return the host link of each worker, as the first worker of its group: (workers)."""
    host_link = np.arange(num_workers)
    for group in links.host_links:
        if max(group) >= num_workers:
            raise wrong(
                "host_links", f"names worker {max(group)}: workers are 0 to {num_workers - 1}"
            )
        host_link[list(group)] = group[0]
    return host_link


def known_groups(groups: Groups, num_workers: int) -> Groups:
    """Return checked groups of workers that share a host link: each worker exists, in one group."""
    links = Links(host_links=groups)
    host_link_ids(links, num_workers)
    return links.host_links


def host_edges(table: Content, links: Links) -> tuple[Cells, Cells]:
    """Return the edges to offloads and loads: from the op that issues each, and on its host link.

    Returns (edges) cells from and to, worker * slots + slot.
    """
    link = host_link_ids(links, table.num_workers)
    grammar = table.grammar
    cells, executed = row_order(table, grammar.host), row_order(table, links.executed(grammar))
    before = op_before(table, executed, cells)
    is_issued = before != NOWHERE
    worker, slot = np.divmod(cells, table.num_slots)
    order = np.lexsort((worker, slot, link[worker]))  # link by link, by column, then by worker
    queue, queue_link = cells[order], link[worker[order]]
    is_same_link = queue_link[1:] == queue_link[:-1]
    return (
        np.concatenate([executed[before[is_issued]], queue[:-1][is_same_link]]),
        np.concatenate([cells[is_issued], queue[1:][is_same_link]]),
    )


def waiting_cells(table: Content, links: Links) -> tuple[Cells, Cells]:
    """Return all edges of a run in which messages take no time: (edges) cells from and to."""
    phases = (*links.executed(table.grammar), *table.grammar.side_phases)
    tail, head = cell_edges(table, row_order(table, phases))
    host_tail, host_head = host_edges(table, links)
    if table.first_cells is not None:
        host_tail = table.first_cells[host_tail]
    return np.concatenate([tail, host_tail]), np.concatenate([head, host_head])


def align_columns(
    rows: Sequence[Sequence[Cell]], queues: Iterable[Sequence[tuple[int, int]]]
) -> list[list[Cell]]:
    """Insert as few idle cells as possible, so that columns of each queue's cells ascend."""
    # A cell of a queue is given as (worker, index in its row).
    # Number all cells row by row. The column of a cell is one more than the columns of the cells
    # before it in its row and in its queue: a longest path over edges between cell numbers.
    row_starts = np.cumsum([0, *map(len, rows)])
    queue_cells = [[int(row_starts[worker]) + k for worker, k in queue] for queue in queues]
    not_first = np.setdiff1d(np.arange(1, row_starts[-1]), row_starts)
    tail = np.concatenate([not_first - 1, *(queue[:-1] for queue in queue_cells)])
    head = np.concatenate([not_first, *(queue[1:] for queue in queue_cells)])
    column, _ = run_edges(tail.astype(int), head.astype(int), np.ones(row_starts[-1]))
    aligned_rows: list[list[Cell]] = []
    for row, start in zip(rows, row_starts[:-1].tolist(), strict=True):
        columns = column[start : start + len(row)].astype(int).tolist()
        aligned_rows.append([()] * (columns[-1] + 1 if columns else 0))
        for slot, cell in zip(columns, row, strict=True):
            aligned_rows[-1][slot] = cell
    return aligned_rows


def in_host_order(table: ScheduleTable, rows: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """Insert idle cells into rows until offloads and loads have the order of a table's columns."""
    places = {cell: (worker, k) for worker, row in enumerate(rows) for k, cell in enumerate(row)}
    slots, workers = np.nonzero(np.isin(table.phase, HOST).T)  # by column, then by worker
    transfers = [places[table.cell(*place)] for place in zip(workers, slots, strict=True)]
    return align_columns(rows, [transfers])


def check_host_links(table: Content, links: Links) -> None:
    """Refuse shared host links that make the offloads and loads of a table deadlock."""
    link = host_link_ids(links, table.num_workers)
    if len(set(link.tolist())) == table.num_workers or not isinstance(table, ScheduleTable):
        return  # a link of one worker has the order of its row
    if not table.offloads:
        return
    try:
        topological_order(table.phase.size, *waiting_cells(table, links))
    except CycleError as error:
        raise table.error(
            "deadlock on a shared host link, where ops go in the order of the columns: nothing in "
            f"this cycle can start: {table.text_of_cycle(error.cycle)}",
            *table.place(error.cycle[0]),
        ) from None
