"""SEND and RECV cells: removed from a table, and inserted along one order of all transfers.

An order of transfers is a permutation of the messages of a program, as `Program.messages` numbers
them (communication cells do not change these numbers). Where every transfer stands after all that
must have arrived before its producer can run, the queues that follow the order cannot deadlock.
"""

import dataclasses
import itertools

import numpy as np

from pipejax.base.array_types import Index, Int, NumpyArray
from pipejax.base.longest_path import run_edges
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, Program, receive_of
from pipejax.schedules.cells.ops import COMMUNICATION, HOST, Cell, Op, Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, without

Order = Int[NumpyArray, " transfers"]


def send_and_receive(program: Program, transfer: Index) -> tuple[Op, Op]:
    """Return the two cells of a transfer."""
    sent = program.messages
    phase, stage, microbatch = (
        int(field[transfer]) for field in (sent.phase, sent.stage, sent.microbatch)
    )
    send = Op(Phase(phase), stage, microbatch)
    return send, receive_of(send)


def without_transfers(table: ScheduleTable) -> ScheduleTable:
    """Remove the SEND and RECV cells from a table."""
    return without(table, COMMUNICATION)


def order_of(program: Program) -> Order:
    """Return an order of all transfers that is consistent with every queue of a program.

    Returns (transfers) messages, each after all that it waits for.
    """
    return np.argsort(program.messages.carrier, kind="stable")


def producer_order(table: ScheduleTable, link: str | Links = "delay") -> Order:
    """Order the transfers producer by producer, as PyTorch lowers a schedule.

    In every round each worker in turn runs its next op, if that can run; the messages of an op
    follow it at once, however late their consumers are. Of the links only shared host links matter,
    since ops wait for them.

    Returns (transfers) messages in the order in which their cells are appended.
    """
    program = _bare_program(without_transfers(table), link)
    preds = program.preds.tolist()
    sends: dict[int, list[int]] = {}
    for transfer, producer in enumerate(program.messages.producer.tolist()):
        sends.setdefault(producer, []).append(transfer)
    left = [[node for node in row if node != SOURCE][::-1] for row in program.node_of_cell.tolist()]
    has_run = [False] * program.num_nodes
    has_run[SOURCE] = True
    order: list[int] = []
    late: list[int] = []  # offloads and loads behind another row's: their own row goes on
    while any(left):
        for row in (*([node] for node in late), *left):
            able = bool(row) and all(has_run[before] for before in preds[row[-1]])
            if row and (able or program.worker[row[-1]] == NO_WORKER):
                node = row.pop()
                has_run[node] = able
                order += sends.get(node, [])
                late += [] if able or node in late else [node]
        late = [node for node in late if not has_run[node]]
    return np.array(order, int)


def insert_transfers(
    table: ScheduleTable, order: Order | None = None, *, link: str | Links = "delay"
) -> ScheduleTable:
    """Put SEND and RECV cells into a table, so that every queue follows one order.

    Args:
      table: the schedule; communication cells that it has give way.
      order: (transfers) messages as `Program.messages` numbers them; producer by producer, as
        PyTorch lowers a schedule, if None.
      link: `Links`, if workers share host links, for which that order has to wait.

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
    bare = without_transfers(table)
    program = _bare_program(bare, link)
    sent = program.messages
    chosen = producer_order(bare, link) if order is None else np.asarray(order)
    if sorted(chosen.tolist()) != list(range(len(sent.producer))):
        raise ValueError(
            f"order must hold each of the {len(sent.producer)} transfers once, got {chosen!r}"
        )
    cells = [
        [(node, cell) for node, cell in zip(nodes, row, strict=True) if node != SOURCE]
        for nodes, row in zip(program.node_of_cell.tolist(), bare.rows(), strict=True)
    ]
    place = {node: k for row in cells for k, (node, _) in enumerate(row)}
    rows: list[list[Cell]] = [[] for _ in cells]
    next_op = [0] * len(cells)
    waits_for: dict[int, set[int]] = {}
    for transfer, consumer in enumerate(sent.consumer.tolist()):
        waits_for.setdefault(consumer, set()).add(transfer)
    for transfer in chosen.tolist():
        send, receive = send_and_receive(program, transfer)
        worker, producer = int(sent.sender[transfer]), int(sent.producer[transfer])
        ops = cells[worker]
        # an op is put down only when a transfer behind it asks for it
        while next_op[worker] <= place[producer]:
            node, cell = ops[next_op[worker]]
            if waits_for.get(node):
                late, _ = send_and_receive(program, min(waits_for[node]))
                raise ValueError(f"order: {send} stands before {late}, which it waits for")
            rows[worker].append(cell)
            next_op[worker] += 1
        rows[worker].append((send,))
        rows[int(sent.receiver[transfer])].append((receive,))
        waits_for[int(sent.consumer[transfer])].remove(transfer)
    for row, ops, first in zip(rows, cells, next_op, strict=True):
        row += [cell for _, cell in ops[first:]]
    return bare.with_rows(_aligned(bare, rows) if bare.offloads else rows)


def _bare_program(table: ScheduleTable, link: str | Links) -> Program:
    return lower(table, link=dataclasses.replace(Links.of(link), model="delay"), step_end=False)


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
