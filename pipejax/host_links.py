"""Host links: in which order offloads and loads go over them.

A worker has a host link of its own, unless groups of workers share one, as two accelerators on
one switch do. Groups belong to the machine, not to the table. A link carries one op at a time, in
the order of the columns of the table, ties by worker; an op is issued where it stands in its row.
"""

from collections.abc import Sequence

import numpy as np

from pipejax.graph import CycleError, topological_order
from pipejax.ops import EXECUTED, HOST, format_cell
from pipejax.shapes import Int, NumpyArray
from pipejax.table import ScheduleTable, dependencies_of, row_order

HostLinks = Sequence[Sequence[int]]  # groups of workers that share a host link
Cells = Int[NumpyArray, " edges"]  # worker * slots + slot


def link_of_worker(host_links: HostLinks, num_workers: int) -> Int[NumpyArray, " workers"]:
    """Name the host link of each worker by the first worker of its group.

    Args:
      host_links: groups of workers that share a host link; a worker in none has its own.
      num_workers: P.

    Returns:
      (workers) first worker of the group.

    Raises:
      ValueError: if a worker does not exist or is named twice, or a group is empty.

    Example:
      >>> link_of_worker([[1, 2]], num_workers=4).tolist()
      [0, 1, 1, 3]
      >>> link_of_worker([[0, 1], [1, 2]], num_workers=4)
      Traceback (most recent call last):
      ...
      ValueError: host_links names worker 1 twice: each worker has one host link
    """
    links = np.arange(num_workers)
    named: set[int] = set()
    for group in host_links:
        if len(group) == 0:
            raise ValueError("host_links has an empty group: a group is the workers of one link")
        for worker in group:
            if worker not in range(num_workers):
                raise ValueError(
                    f"host_links names worker {worker}: workers are 0 to {num_workers - 1}"
                )
            if worker in named:
                raise ValueError(
                    f"host_links names worker {worker} twice: each worker has one host link"
                )
            named.add(worker)
        links[list(group)] = group[0]
    return links


def host_edges(table: ScheduleTable, host_links: HostLinks = ()) -> tuple[Cells, Cells]:
    """Return which cells offloads and loads wait for: where they are issued, and for their link.

    Args:
      table: the schedule.
      host_links: groups of workers that share a host link.

    Returns:
      Cells to wait for and cells that wait; the dependencies of `dependencies_of` come on top.

    Raises:
      ValueError: as `link_of_worker`.

    Example:
      >>> table = ScheduleTable.from_rows([["0F0", "0O0", "0F1", "0L0", "0B0", "0B1"]])
      >>> [cells.tolist() for cells in host_edges(table)]  # 0O0 after 0F0, 0L0 after 0F1 and 0O0
      [[0, 2, 1], [1, 3, 3]]
    """
    links = link_of_worker(host_links, table.num_workers)
    cells, executed = row_order(table, HOST), row_order(table, EXECUTED)
    place = np.searchsorted(executed, cells) - 1
    before = executed[place] if len(executed) else place
    issued = (place >= 0) & (before // table.num_slots == cells // table.num_slots)
    worker, slot = np.divmod(cells, table.num_slots)
    order = np.lexsort((worker, slot, links[worker]))
    same = links[worker[order[1:]]] == links[worker[order[:-1]]]
    queue = cells[order]
    return (
        np.concatenate([before[issued], queue[:-1][same]]),
        np.concatenate([cells[issued], queue[1:][same]]),
    )


def waiting_cells(table: ScheduleTable, host_links: HostLinks = ()) -> tuple[Cells, Cells]:
    """Return all that cells wait for where messages take no time.

    Args:
      table: the schedule.
      host_links: groups of workers that share a host link.

    Returns:
      Cells to wait for and cells that wait: along rows, by dependencies, on host links.

    Raises:
      ValueError: as `link_of_worker`.

    Example:
      >>> table = ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
      >>> [cells.tolist() for cells in waiting_cells(table)]
      [[0, 2, 0, 0, 2, 3], [1, 3, 2, 1, 3, 1]]
    """
    cells, edges = row_order(table, EXECUTED), dependencies_of(table)
    same_row = cells[1:] // table.num_slots == cells[:-1] // table.num_slots
    tail, head = host_edges(table, host_links)
    return (
        np.concatenate([cells[:-1][same_row], edges.producer, tail]),
        np.concatenate([cells[1:][same_row], edges.consumer, head]),
    )


def check_host_links(table: ScheduleTable, host_links: HostLinks) -> None:
    """Check that groups of workers can share host links under a table.

    Args:
      table: the schedule.
      host_links: groups of workers that share a host link.

    Raises:
      ValueError: as `link_of_worker`.
      ScheduleError: if the order of the columns on a shared link is a deadlock.

    Example:
      >>> table = ScheduleTable.from_rows([  # the offload of worker 1 comes first, in column 1
      ...     ["", "0F1", "0O1", "0WAIT_O1", "0F0", "0B0", "0L1", "0B1"],
      ...     ["1F0", "1O0", "1L0", "1B0", "1F1", "1B1"],
      ... ])
      >>> check_host_links(table, ())
      >>> check_host_links(table, [[0, 1]])
      Traceback (most recent call last):
      pipejax.table.ScheduleError: deadlock on a shared host link, ...
    """
    links = link_of_worker(host_links, table.num_workers)
    if len(set(links.tolist())) == table.num_workers or not table.offloads:
        return  # rows alone cannot disagree with themselves
    try:
        topological_order(table.phase.size, *waiting_cells(table, host_links))
    except CycleError as error:
        places = [table.content.place(cell) for cell in error.cycle]
        names = [f"{format_cell(table.cell(w, t))} (worker {w})" for w, t in places]
        cycle = " -> ".join([*names, names[0]])
        raise table.error(
            "deadlock on a shared host link, where ops go in the order of the columns: nothing in "
            f"this cycle can start: {cycle}",
            *places[0],
        ) from None
