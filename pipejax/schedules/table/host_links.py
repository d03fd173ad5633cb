"""Host links: in which order offloads and loads go over them.

A worker has a host link of its own, unless groups of workers share one, as two accelerators on
one switch do. Groups belong to the machine, not to the table. A link carries one op at a time, in
the order of the columns of the table, ties by worker; an op is issued where it stands in its row.
"""

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.base.longest_path import CycleError, topological_order
from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.dependencies import find_dependencies
from pipejax.schedules.cells.ops import HOST
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, op_before, row_order

Cells = Int[NumpyArray, " edges"]  # worker * slots + slot


def link_of_worker(links: Links, num_workers: int) -> Int[NumpyArray, " workers"]:
    """Identify the host link of each worker by the first worker of its group.

    Returns (workers) first worker of the group.
    """
    first = np.arange(num_workers)
    for group in links.host_links:
        if max(group) >= num_workers:
            raise wrong(
                "host_links", f"names worker {max(group)}: workers are 0 to {num_workers - 1}"
            )
        first[list(group)] = group[0]
    return first


def host_edges(table: Content, links: Links) -> tuple[Cells, Cells]:
    """Return the cells (edges) that offloads and loads wait for: the issuing op, the link."""
    link = link_of_worker(links, table.num_workers)
    cells, executed = row_order(table, HOST), row_order(table, links.executed)
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
    cells, edges = row_order(table, links.executed), find_dependencies(table)
    same_row = cells[1:] // table.num_slots == cells[:-1] // table.num_slots
    tail, head = host_edges(table, links)
    return (
        np.concatenate([cells[:-1][same_row], edges.producer, tail]),
        np.concatenate([cells[1:][same_row], edges.consumer, head]),
    )


def check_host_links(table: Content, links: Links) -> None:
    """Check that groups of workers can share host links in a table."""
    link = link_of_worker(links, table.num_workers)
    if len(set(link.tolist())) == table.num_workers or not isinstance(table, ScheduleTable):
        return  # rows alone cannot disagree with themselves
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
