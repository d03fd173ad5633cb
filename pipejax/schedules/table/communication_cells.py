"""SEND and RECV cells: removal, and insertion in an order of all transfers.

An order of transfers is a permutation of the messages of a program, as `Program.messages` numbers
them. Queues cannot deadlock if each transfer comes after those for which its producer waits.
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
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.sharding import STAGES, Lookahead, with_gathers, with_reductions
from pipejax.schedules.table.slot_simulation import (
    check_host_links,
    host_edges,
    waiting_cells,
    with_host_order,
)
from pipejax.schedules.table.table import ScheduleTable, dense_rows, phase_cells, without_phases

# PyTorch's runtime inserts more cells into a table: it gathers parameters before ops that need them
# and drops them (UNSHARD, RESHARD), reduces gradients after the last backward of a stage, and waits
# for every SEND. If a table has cells of one kind already, no more are inserted.

Rows = list[list[Cell]]

LOWERINGS = ("pytorch",)
TORCH_LOOKAHEAD = Lookahead(2, 3, STAGES)  # default of PyTorch's `_PipelineScheduleRuntime`
_SEND_WAITS = {Phase.SEND_F: Phase.WAIT_SEND_F, Phase.SEND_B: Phase.WAIT_SEND_B}


def with_sharding(table: ScheduleTable) -> ScheduleTable:
    """Insert cells that gather parameters and reduce gradients as PyTorch does; drop idle cells."""
    if table.offloads:
        raise ValueError("lowering: PyTorch offloads nothing, the table has O and L cells")
    rows, used_phases = dense_rows(table), {*table.used_phases}
    if used_phases.isdisjoint({Phase.UNSHARD, Phase.RESHARD}):
        rows = [with_gathers(row, table.grammar.compute_phases, TORCH_LOOKAHEAD) for row in rows]
    if used_phases.isdisjoint({Phase.REDUCE_GRAD, Phase.WAIT_REDUCE_GRAD}):
        ends = table.grammar.backward_ends
        rows = [with_reductions(row, deferred=False, ends=ends) for row in rows]
    return table.with_rows(rows)


def with_waits(row: Sequence[Cell]) -> list[Cell]:
    """Return a row with a cell that waits for the end of each SEND, so late that no op waits."""
    # The wait for an activation's SEND follows the backward of its microbatch, and the waits for
    # gradients' SENDs end the row. So no wait delays an op.
    row_ops = {op for cell in row for op in cell}
    cells: list[Cell] = []
    pending: dict[Op, None] = {}  # waits, in order
    for cell in row:
        cells.append(cell)
        for op in cell:
            if op.phase in _SEND_WAITS:
                pending[op._replace(phase=_SEND_WAITS[op.phase])] = None
            wait = op._replace(phase=Phase.WAIT_SEND_F)
            if op.phase in INPUT_GRADS and wait in pending and wait not in row_ops:
                cells.append((wait,))
                del pending[wait]
    return cells + [(wait,) for wait in pending if wait not in row_ops]


Order = Int[NumpyArray, " transfers"]


def table_messages(table: ScheduleTable) -> Dependencies:
    """Return the messages between workers, sorted by the cell of the producer."""
    # messages of one op: activations first, then by target stage
    messages = table.dependencies.messages()
    return messages.take(np.lexsort((messages.to_stage, messages.direction, messages.producer)))


class RunOrder(NamedTuple):
    """Cells of a table that run in order under given links, and the table's messages."""

    executed: Int[NumpyArray, " executed"]  # cells that workers execute, row by row
    host: Int[NumpyArray, " host"]  # cells of offloads and loads, row by row
    host_edges: tuple[Int[NumpyArray, " edges"], Int[NumpyArray, " edges"]]
    messages: Dependencies  # edges between workers
    models: Int[NumpyArray, " messages"]  # position in `LINK_MODELS`


def run_order(table: ScheduleTable, links: Links) -> RunOrder:
    """Return the cells of a table that run in order under links; refuse a deadlock of offloads."""
    messages = table_messages(table)
    ends = messages.producer // table.num_slots, messages.consumer // table.num_slots
    none = np.zeros(0, int)
    order = RunOrder(
        executed=phase_cells(table, links.executed_phases(table.grammar)),
        host=phase_cells(table, table.grammar.host_phases) if table.offloads else none,
        host_edges=host_edges(table, links) if table.offloads else (none, none),
        messages=messages,
        models=links.message_models(table.num_workers, *ends),
    )
    check_host_links(table, links)
    return order


def without_transfers(table: ScheduleTable) -> ScheduleTable:
    """Remove from a table the SEND and RECV cells, and the cells that wait for these."""
    # Rows become shorter, but the order of offloads on a shared host link must not change.
    bare = without_phases(table, COMMUNICATION)
    return _in_host_order(table, bare) if bare.offloads and bare is not table else bare


@cached_method
def _in_host_order(table: ScheduleTable, bare: ScheduleTable) -> ScheduleTable:
    return bare.with_rows(with_host_order(table, dense_rows(bare)))


def producer_order(table: ScheduleTable, link: str | Links = "delay") -> Order:
    """Return the transfers ordered producer by producer, as PyTorch lowers a schedule."""
    # the messages of an op come right after it; only the shared host links of `link` matter
    steps = _runnable_steps(without_transfers(table), Links.resolve(link))
    return np.array([transfer for _, transfers in steps for transfer in transfers], int)


def _runnable_steps(bare: ScheduleTable, links: Links) -> list[tuple[int, list[int]]]:
    """List all cells in an order in which they can run, with the transfers that each causes."""
    # Workers take turns, and each runs its next cell if that can start. Offloads and loads queue up
    # instead (`pending`), and run once all cells have run that they wait for.
    check_host_links(bare, links)
    producers: dict[int, list[int]] = {}  # {cell: cells that it waits for}
    for tail, head in zip(*(ends.tolist() for ends in waiting_cells(bare, links)), strict=True):
        producers.setdefault(head, []).append(tail)
    transfers: dict[int, list[int]] = {}  # {cell: transfers of its messages}
    for transfer, producer in enumerate(table_messages(bare).producer.tolist()):
        transfers.setdefault(producer, []).append(transfer)
    on_host = set(phase_cells(bare, HOST).tolist())
    remaining = [row[::-1] for row in _occupied_cells(bare)]  # the next cell last
    has_run = [False] * bare.phase.size
    steps: list[tuple[int, list[int]]] = []
    pending: list[int] = []  # cells that their rows have reached, but that have not run

    def can_run(cell: int) -> bool:
        return all(has_run[producer] for producer in producers.get(cell, ()))

    while any(remaining):
        for row in filter(None, remaining):
            if not can_run(row[-1]) and row[-1] not in on_host:
                continue
            cell = row.pop()
            pending.append(cell)
            steps.append((cell, transfers.get(cell, [])))
            while ready := [cell for cell in pending if can_run(cell)]:
                for ready_cell in ready:
                    has_run[ready_cell] = True
                pending = [cell for cell in pending if not has_run[cell]]
    return steps


def insert_transfers(
    table: ScheduleTable,
    order: Order | None = None,
    *,
    link: str | Links = "delay",
    lowering: str | None = None,
) -> ScheduleTable:
    """Add SEND and RECV cells to a table, so that all queues follow one order of transfers.

    Args:
      table: the schedule; its communication cells are replaced.
      order: (transfers) messages as `Program.messages` numbers them; None for producer by producer,
        as PyTorch lowers a schedule.
      link: `Links`, needed if workers share host links, because the order depends on them.
      lowering: "pytorch" to add all other cells that PyTorch's runtime needs: a wait for each SEND,
        and cells that gather parameters and reduce gradients, if the table has none. Without an
        order, the cells then equal those of PyTorch 2.15. None for SEND and RECV alone.

    Returns:
      The same ops in the same order; each SEND after its producer, each RECV before its consumer.
      The table cannot deadlock, whatever the scope of the queues. Idle slots remain only before
      offloads and loads, whose order over all rows stays as it is.

    Raises:
      ValueError: if the order is no permutation of the messages, or a transfer comes before one for
        which its producer waits.

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
    """Insert SEND and RECV cells into a table; `waits` and `sharding` add PyTorch's other cells."""
    # `order` has indices of `table_messages(table)` in the order of sending; None: any that can
    # run.
    if not table.grammar.has_usual_messages:
        has = f"{table.name} has {table.grammar.first_difference}"
        raise MismatchError(f"SEND and RECV cells carry the usual messages alone, and {has}")
    bare = with_sharding(table) if sharding else table
    messages = table_messages(bare)
    if order is None:
        steps = _runnable_steps(bare, links)
    else:
        transfers, producers = np.asarray(order).tolist(), messages.producer.tolist()
        if sorted(transfers) != list(range(len(producers))):
            count = len(producers)
            raise ValueError(f"order must hold each of the {count} transfers once, got {order!r}")
        steps = [(producers[transfer], [transfer]) for transfer in transfers]
    rows = _rows_with_transfers(bare, messages, steps)
    if waits:
        rows = [with_waits(row) for row in rows]
    return bare.with_rows(with_host_order(bare, rows) if bare.offloads else rows)


def _rows_with_transfers(
    bare: ScheduleTable, messages: Dependencies, steps: Sequence[tuple[int, list[int]]]
) -> list[list[Cell]]:
    """Return rows with SEND and RECV cells; a step is (cell, transfers that follow the cell)."""
    # A step also adds all earlier cells of its row; cells without a step are added at the end.
    # the step of 0F0 with its message adds 0F0 and 0SEND_F0 to row 0, and 1RECV_F0 to row 1
    fields = (messages.direction, messages.from_stage, messages.microbatch)
    sends = [
        Op(Phase.SEND_B if direction == BACKWARD else Phase.SEND_F, stage, microbatch)
        for direction, stage, microbatch in zip(*(f.tolist() for f in fields), strict=True)
    ]
    cells, ops = _occupied_cells(bare), dense_rows(bare)
    positions = {cell: k for row in cells for k, cell in enumerate(row)}  # position in its row
    rows: list[list[Cell]] = [[] for _ in cells]
    next_position = [0] * len(cells)
    missing_inputs: dict[int, set[int]] = {}  # transfers that a cell still waits for
    for transfer, consumer in enumerate(messages.consumer.tolist()):
        missing_inputs.setdefault(consumer, set()).add(transfer)
    for step_cell, transfers in steps:
        worker = step_cell // bare.num_slots
        while next_position[worker] <= positions[step_cell]:
            cell = cells[worker][next_position[worker]]
            if missing_inputs.get(cell):
                early, late = sends[transfers[0]], sends[min(missing_inputs[cell])]
                raise ValueError(f"order: {early} waits for {late}, which comes later in the order")
            rows[worker].append(ops[worker][next_position[worker]])
            next_position[worker] += 1
        for transfer in transfers:
            consumer, send = int(messages.consumer[transfer]), sends[transfer]
            rows[worker].append((send,))
            rows[consumer // bare.num_slots].append((matching_receive(send),))
            missing_inputs[consumer].remove(transfer)
    for row, row_ops, position in zip(rows, ops, next_position, strict=True):
        row += row_ops[position:]
    return rows


def _occupied_cells(table: ScheduleTable) -> list[list[int]]:
    return [
        (worker * table.num_slots + np.flatnonzero(row)).tolist()
        for worker, row in enumerate(table.phase)
    ]
