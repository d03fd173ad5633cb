"""SEND and RECV cells: removed from a table, and inserted along one order of all transfers.

An order of transfers is a permutation of the messages of a program, as `Program.messages` numbers
them (communication cells do not change these numbers). Where every transfer stands after all that
must have arrived before its producer can run, the queues that follow the order cannot deadlock.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.longest_path import run_edges
from pipejax.schedules.cells.dependencies import BACKWARD, Dependencies
from pipejax.schedules.cells.ops import (
    COMMUNICATION,
    HOST,
    Cell,
    Op,
    Phase,
    receive_of,
)
from pipejax.schedules.table.host_links import check_host_links, waiting_cells
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, row_order, without
from pipejax.schedules.table.torch_lowering import TorchLowering

Order = Int[NumpyArray, " transfers"]


def messages_of(table: ScheduleTable) -> Dependencies:
    """Return the messages between workers, in the order in which producers stand in their rows."""
    found = table.dependencies.messages()
    return found.take(np.lexsort((found.direction, found.producer)))


def without_transfers(table: ScheduleTable) -> ScheduleTable:
    """Remove SEND and RECV cells from a table, and the waits for them."""
    return without(table, COMMUNICATION)


def producer_order(table: ScheduleTable, link: str | Links = "delay") -> Order:
    """Order the transfers producer by producer, as PyTorch lowers a schedule.

    The messages of an op follow it at once, however late their consumers are. Of the links only
    shared host links matter, since ops wait for them.

    Returns (transfers) messages in the order in which their cells are appended.
    """
    rounds = _in_rounds(without_transfers(table), Links.of(link))
    return np.array([transfer for _, behind in rounds for transfer in behind], int)


def _in_rounds(bare: ScheduleTable, links: Links) -> list[tuple[int, list[int]]]:
    """List cells with their messages round by round: each worker in turn runs an op, if it can."""
    check_host_links(bare, links)
    waits_for: dict[int, list[int]] = {}
    for before, cell in zip(*(ends.tolist() for ends in waiting_cells(bare, links)), strict=True):
        waits_for.setdefault(cell, []).append(before)
    sends: dict[int, list[int]] = {}
    for transfer, producer in enumerate(messages_of(bare).producer.tolist()):
        sends.setdefault(producer, []).append(transfer)
    on_host = set(row_order(bare, HOST).tolist())
    left = [row[::-1] for row in _held_cells(bare)]
    has_run = [False] * bare.phase.size
    steps: list[tuple[int, list[int]]] = []
    late: list[int] = []  # offloads and loads behind another row's: their own row goes on
    while any(left):
        for row in (*([cell] for cell in late), *left):
            able = bool(row) and all(has_run[before] for before in waits_for.get(row[-1], []))
            if row and (able or row[-1] in on_host):
                cell = row.pop()
                has_run[cell] = able
                if cell not in late:
                    steps.append((cell, sends.get(cell, [])))
                    late += [] if able else [cell]
        late = [cell for cell in late if not has_run[cell]]
    return steps


def insert_transfers(
    table: ScheduleTable,
    order: Order | None = None,
    *,
    link: str | Links = "delay",
    lowering: str | TorchLowering | None = None,
) -> ScheduleTable:
    """Put SEND and RECV cells into a table, so that every queue follows one order.

    Args:
      table: the schedule; communication cells that it has give way.
      order: (transfers) messages as `Program.messages` numbers them; producer by producer, as
        PyTorch lowers a schedule, if None.
      link: `Links`, if workers share host links, for which that order has to wait.
      lowering: "pytorch" to put in all else that PyTorch's runtime needs too: a wait for each SEND,
        and cells that gather parameters and reduce gradients where the table has none; cell by
        cell what PyTorch 2.15 makes of a table without communication, if no order is given. None
        for SEND and RECV alone.

    Returns:
      The same ops in the same order; each SEND after its producer, each RECV before its consumer.
      It cannot deadlock, whatever the scope of the queues. Idle slots remain only before offloads
      and loads, whose order over all rows stays as it is.

    Raises:
      ValueError: if the order is no permutation of the messages, or has a transfer stand before
        one that its producer waits for.

    Example:
      >>> import pipejax as pj
      >>> table = pj.ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
      >>> print(pj.insert_transfers(table))
                 0        1        2        3
        worker 0 0F0      0SEND_F0 0RECV_B0 0B0
        worker 1 1RECV_F0 1F0      1B0      1SEND_B0
    """
    check_types(table=(table, ScheduleTable))
    given = without_transfers(table)
    torch = None if lowering is None else TorchLowering.of(lowering)
    bare = given if torch is None else torch.sharded(given)
    sent = messages_of(bare)
    if order is None:
        steps = _in_rounds(bare, Links.of(link))
    else:
        chosen = np.asarray(order).tolist()
        if sorted(chosen) != list(range(len(sent.producer))):
            raise ValueError(
                f"order must hold each of the {len(sent.producer)} transfers once, got {order!r}"
            )
        steps = [(int(sent.producer[transfer]), [transfer]) for transfer in chosen]
    rows = _rows(bare, sent, steps)
    if torch is not None:
        rows = torch.waiting(bare, rows)
    return bare.with_rows(_aligned(bare, rows) if bare.offloads else rows)


def _rows(
    bare: ScheduleTable, sent: Dependencies, steps: Sequence[tuple[int, list[int]]]
) -> list[list[Cell]]:
    """Put each cell of some steps down with all before it in its row, then its messages.

    An op comes down only when a step asks for it or for one behind it.
    """
    sends = _send_cells(sent)
    cells = _held_cells(bare)
    place = {cell: k for row in cells for k, cell in enumerate(row)}
    held = [[cell for cell in row if cell] for row in bare.rows()]
    rows: list[list[Cell]] = [[] for _ in cells]
    next_op = [0] * len(cells)
    waits_for: dict[int, set[int]] = {}
    for transfer, consumer in enumerate(sent.consumer.tolist()):
        waits_for.setdefault(consumer, set()).add(transfer)
    for last, behind in steps:
        worker = last // bare.num_slots
        while next_op[worker] <= place[last]:
            cell = cells[worker][next_op[worker]]
            if waits_for.get(cell):
                early, late = sends[behind[0]], sends[min(waits_for[cell])]
                raise ValueError(f"order: {early} stands before {late}, which it waits for")
            rows[worker].append(held[worker][next_op[worker]])
            next_op[worker] += 1
        for transfer in behind:
            consumer, send = int(sent.consumer[transfer]), sends[transfer]
            rows[worker].append((send,))
            rows[consumer // bare.num_slots].append((receive_of(send),))
            waits_for[consumer].remove(transfer)
    for row, ops, first in zip(rows, held, next_op, strict=True):
        row += ops[first:]
    return rows


def _held_cells(table: ScheduleTable) -> list[list[int]]:
    """List the cells that hold an op, row by row."""
    return [
        (worker * table.num_slots + np.flatnonzero(row)).tolist()
        for worker, row in enumerate(table.phase)
    ]


def _send_cells(sent: Dependencies) -> list[Op]:
    """List the SEND of every message."""
    fields = (sent.direction, sent.from_stage, sent.microbatch)
    return [
        Op(Phase.SEND_B if direction == BACKWARD else Phase.SEND_F, stage, microbatch)
        for direction, stage, microbatch in zip(*(f.tolist() for f in fields), strict=True)
    ]


def _aligned(table: ScheduleTable, rows: list[list[Cell]]) -> list[list[Cell]]:
    """Move cells to later columns until offloads and loads keep their order over all rows."""
    cells = [cell for row in rows for cell in row]
    place = {cell: number for number, cell in enumerate(cells)}
    slots, workers = np.nonzero(np.isin(table.phase, HOST).T)  # by column, then by worker
    on_host = np.array([place[table.cell(*at)] for at in zip(workers, slots, strict=True)], int)
    begins = np.cumsum([0, *map(len, rows)])
    in_row = np.setdiff1d(np.arange(1, len(cells)), begins)
    tail, head = np.append(in_row - 1, on_host[:-1]), np.append(in_row, on_host[1:])
    column, _ = run_edges(tail, head, np.ones(len(cells)))
    aligned: list[list[Cell]] = []
    for low, high in itertools.pairwise(begins.tolist()):
        aligned.append([()] * int(column[low:high].max(initial=-1) + 1))
        for number in range(low, high):
            aligned[-1][int(column[number])] = cells[number]
    return aligned
