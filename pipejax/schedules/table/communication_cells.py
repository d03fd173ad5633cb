"""SEND and RECV cells: removed from a table, and inserted along one order of all transfers.

Where it is asked for, PyTorch's other cells are put in beside them.

An order of transfers is a permutation of the messages of a program, as `Program.messages` numbers
them (communication cells do not change these numbers). Where every transfer stands after all that
must have arrived before its producer can run, the queues that follow the order cannot deadlock.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.base.checks import MismatchError, check_types, resolve_name
from pipejax.schedules.cells.dependencies import BACKWARD, Dependencies
from pipejax.schedules.cells.ops import (
    COMMUNICATION,
    HOST,
    INPUT_GRADS,
    Cell,
    Op,
    Phase,
    matching_receive,
)
from pipejax.schedules.table.host_links import (
    check_host_links,
    host_edges,
    in_host_order,
    waiting_cells,
)
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.sharding import (
    STAGES,
    Lookahead,
    dense_rows,
    with_gathers,
    with_reductions,
)
from pipejax.schedules.table.table import ScheduleTable, row_order, without

# What PyTorch's runtime puts into a table of computation before it runs it, beside SEND and RECV.
#
# Passes over rows without idle cells: parameters are gathered before the first op that needs them
# and dropped when other stages come next (UNSHARD, RESHARD), gradients are reduced after the last
# backward of a stage, and every SEND has its wait. A pass leaves alone what a table has of its
# kind.

Rows = list[list[Cell]]

LOWERINGS = ("pytorch",)
GATHERED = Lookahead(2, 3, STAGES)  # by default of PyTorch's `_PipelineScheduleRuntime`
_WAIT_OF = {Phase.SEND_F: Phase.WAIT_SEND_F, Phase.SEND_B: Phase.WAIT_SEND_B}


def with_sharding(table: ScheduleTable) -> ScheduleTable:
    """Put in what gathers parameters and reduces gradients, and leave out idle cells."""
    if table.offloads:
        raise ValueError("lowering: PyTorch offloads nothing, the table has O and L cells")
    rows = dense_rows(table)
    held = {op.phase for row in rows for cell in row for op in cell}
    if not held & {Phase.UNSHARD, Phase.RESHARD}:
        rows = [with_gathers(row, table.grammar.compute, GATHERED) for row in rows]
    if not held & {Phase.REDUCE_GRAD, Phase.WAIT_REDUCE_GRAD}:
        ends = table.grammar.ends_backward
        rows = [with_reductions(row, deferred=False, ends=ends) for row in rows]
    return table.with_rows(rows)


def with_waits(row: Sequence[Cell]) -> list[Cell]:
    """Put a wait for every SEND without one into a row."""
    # That of an activation stands behind the backward of its microbatch, which shows that the
    # message has arrived; that of a gradient at the end of the row. So no wait delays anything.
    held = {op for cell in row for op in cell}
    cells: list[Cell] = []
    pending: dict[Op, None] = {}
    for cell in row:
        cells.append(cell)
        for op in cell:
            if op.phase in _WAIT_OF:
                pending[op._replace(phase=_WAIT_OF[op.phase])] = None
            wait = op._replace(phase=Phase.WAIT_SEND_F)
            if op.phase in INPUT_GRADS and wait in pending and wait not in held:
                cells.append((wait,))
                del pending[wait]
    return cells + [(wait,) for wait in pending if wait not in held]


Order = Int[NumpyArray, " transfers"]


def table_messages(table: ScheduleTable) -> Dependencies:
    """Return the messages between workers, in the order in which producers stand in their rows."""
    # Those of one op go with activations first, then by the stage that they go to.
    messages = table.dependencies.messages()
    return messages.take(np.lexsort((messages.to_stage, messages.direction, messages.producer)))


class RunOrder(NamedTuple):
    """Order in which a table runs under some links, and its messages."""

    executed: Int[NumpyArray, " executed"]  # cells that workers execute, row by row
    host: Int[NumpyArray, " host"]  # cells of offloads and loads, row by row
    host_edges: tuple[Int[NumpyArray, " edges"], Int[NumpyArray, " edges"]]
    messages: Dependencies  # what is sent between workers
    models: Int[NumpyArray, " messages"]  # position in `LINK_MODELS`


def run_order(table: ScheduleTable, links: Links) -> RunOrder:
    """Read it off a table; refuse a deadlock on a shared host link."""
    sent = table_messages(table)
    ends = sent.producer // table.num_slots, sent.consumer // table.num_slots
    none = np.zeros(0, int)
    order = RunOrder(
        executed=row_order(table, links.executed(table.grammar)),
        host=row_order(table, table.grammar.host) if table.offloads else none,
        host_edges=host_edges(table, links) if table.offloads else (none, none),
        messages=sent,
        models=links.message_models(table.num_workers, *ends),
    )
    check_host_links(table, links)
    return order


def without_transfers(table: ScheduleTable) -> ScheduleTable:
    """Remove SEND and RECV cells from a table, and the waits for them."""
    # Each row closes up behind them, which may not change who goes first over a shared host link.
    bare = without(table, COMMUNICATION)
    return _in_host_order(table, bare) if bare.offloads and bare is not table else bare


@cached_method
def _in_host_order(table: ScheduleTable, bare: ScheduleTable) -> ScheduleTable:
    return bare.with_rows(in_host_order(table, dense_rows(bare)))


def producer_order(table: ScheduleTable, link: str | Links = "delay") -> Order:
    """Order the transfers producer by producer, as PyTorch lowers a schedule."""
    # The messages of an op follow it at once, however late their consumers are. Of the links only
    # shared host links matter, since ops wait for them.
    rounds = _in_rounds(without_transfers(table), Links.resolve(link))
    return np.array([transfer for _, transfers in rounds for transfer in transfers], int)


def _in_rounds(bare: ScheduleTable, links: Links) -> list[tuple[int, list[int]]]:
    """List cells with their messages round by round: each worker in turn runs an op, if it can."""
    # An offload or load is issued in its turn, and its row goes on; it has run as soon as all that
    # it waits for has, which on a shared host link may be of another row.
    check_host_links(bare, links)
    waits_for: dict[int, list[int]] = {}
    for before, cell in zip(*(ends.tolist() for ends in waiting_cells(bare, links)), strict=True):
        waits_for.setdefault(cell, []).append(before)
    sends: dict[int, list[int]] = {}
    for transfer, producer in enumerate(table_messages(bare).producer.tolist()):
        sends.setdefault(producer, []).append(transfer)
    on_host = set(row_order(bare, HOST).tolist())
    remaining = [row[::-1] for row in _held_cells(bare)]
    has_run = [False] * bare.phase.size
    steps: list[tuple[int, list[int]]] = []
    issued: list[int] = []  # and has not run yet

    def can_run(cell: int) -> bool:
        return all(has_run[before] for before in waits_for.get(cell, ()))

    while any(remaining):
        for row in filter(None, remaining):
            if not can_run(row[-1]) and row[-1] not in on_host:
                continue
            issued.append(row.pop())
            steps.append((issued[-1], sends.get(issued[-1], [])))
            while ready := [cell for cell in issued if can_run(cell)]:
                for cell in ready:
                    has_run[cell] = True
                issued = [cell for cell in issued if not has_run[cell]]
    return steps


def insert_transfers(
    table: ScheduleTable,
    order: Order | None = None,
    *,
    link: str | Links = "delay",
    lowering: str | None = None,
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
      >>> print(pj.links.insert_transfers(table))
                 0        1        2        3
        worker 0 0F0      0SEND_F0 0RECV_B0 0B0
        worker 1 1RECV_F0 1F0      1B0      1SEND_B0
    """
    check_types(table=(table, ScheduleTable))
    if lowering is not None:
        check_types(lowering=(lowering, str))
        resolve_name(lowering, LOWERINGS, "lowering")
    is_torch = lowering is not None
    bare = without_transfers(table)
    return with_transfers(bare, order, Links.resolve(link), waits=is_torch, sharding=is_torch)


def with_transfers(
    table: ScheduleTable,
    order: Order | None,
    links: Links,
    *,
    waits: bool = False,
    sharding: bool = False,
) -> ScheduleTable:
    """Put SEND and RECV cells into a table that has none, with waits and sharding if wanted."""
    if not table.grammar.has_usual_messages:
        has = f"{table.name} has {table.grammar.unusual}"
        raise MismatchError(f"SEND and RECV cells carry the usual messages alone, and {has}")
    bare = with_sharding(table) if sharding else table
    sent = table_messages(bare)
    if order is None:
        steps = _in_rounds(bare, links)
    else:
        chosen = np.asarray(order).tolist()
        if sorted(chosen) != list(range(len(sent.producer))):
            raise ValueError(
                f"order must hold each of the {len(sent.producer)} transfers once, got {order!r}"
            )
        steps = [(int(sent.producer[transfer]), [transfer]) for transfer in chosen]
    rows = _rows(bare, sent, steps)
    if waits:
        rows = [with_waits(row) for row in rows]
    return bare.with_rows(in_host_order(bare, rows) if bare.offloads else rows)


def _rows(
    bare: ScheduleTable, sent: Dependencies, steps: Sequence[tuple[int, list[int]]]
) -> list[list[Cell]]:
    """Put each cell of some steps down with all before it in its row, then its messages."""
    # An op comes down only when a step asks for it or for one behind it.
    fields = (sent.direction, sent.from_stage, sent.microbatch)
    sends = [
        Op(Phase.SEND_B if direction == BACKWARD else Phase.SEND_F, stage, microbatch)
        for direction, stage, microbatch in zip(*(f.tolist() for f in fields), strict=True)
    ]
    cells = _held_cells(bare)
    place = {cell: k for row in cells for k, cell in enumerate(row)}
    held = [[cell for cell in row if cell] for row in bare.rows()]
    rows: list[list[Cell]] = [[] for _ in cells]
    next_op = [0] * len(cells)
    waits_for: dict[int, set[int]] = {}
    for transfer, consumer in enumerate(sent.consumer.tolist()):
        waits_for.setdefault(consumer, set()).add(transfer)
    for last, transfers in steps:
        worker = last // bare.num_slots
        while next_op[worker] <= place[last]:
            cell = cells[worker][next_op[worker]]
            if waits_for.get(cell):
                early, late = sends[transfers[0]], sends[min(waits_for[cell])]
                raise ValueError(f"order: {early} stands before {late}, which it waits for")
            rows[worker].append(held[worker][next_op[worker]])
            next_op[worker] += 1
        for transfer in transfers:
            consumer, send = int(sent.consumer[transfer]), sends[transfer]
            rows[worker].append((send,))
            rows[consumer // bare.num_slots].append((matching_receive(send),))
            waits_for[consumer].remove(transfer)
    for row, ops, first in zip(rows, held, next_op, strict=True):
        row += ops[first:]
    return rows


def _held_cells(table: ScheduleTable) -> list[list[int]]:
    return [
        (worker * table.num_slots + np.flatnonzero(row)).tolist()
        for worker, row in enumerate(table.phase)
    ]
