"""Simulation of a table without messages, in which ops take slots: the idealised table.

Builders use it to draw a table with its idle slots; the rendezvous link model uses it to order
transfers of a table without SEND and RECV cells.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, Num, NumpyArray
from pipejax.base.checks import wrong
from pipejax.base.longest_path import CycleError, run_edges, topological_order
from pipejax.schedules.cells.cells import (
    NEWEST,
    NOWHERE,
    Cells,
    Content,
    Placement,
    WeightRule,
    empty_cells,
    looped,
)
from pipejax.schedules.cells.dependencies import cell_edges
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import HOST, NO_PIPE, Cell, Op, Phase, Slots, is_phase
from pipejax.schedules.table.links import Groups, Links
from pipejax.schedules.table.table import ScheduleTable, op_before, phase_cells

# Host links, and the order of offloads and loads on them.
#
# Each worker has its own host link, unless a group of workers shares one. A link carries one op at
# a time, in the order of columns, then of workers. The row of a worker issues its ops on the link.

CellPositions = Int[NumpyArray, " edges"]  # worker * slots + slot


def host_link_ids(links: Links, num_workers: int) -> Int[NumpyArray, " workers"]:
    """Return each worker's host link, named by the first worker of the group that shares it."""
    host_link = np.arange(num_workers)
    for group in links.host_links:
        if max(group) >= num_workers:
            last = num_workers - 1
            raise wrong("host_links", f"names worker {max(group)}: workers are 0 to {last}")
        host_link[list(group)] = group[0]
    return host_link


def check_host_groups(groups: Groups, num_workers: int) -> Groups:
    """Check groups of workers that share a host link, with no worker in two; return the groups."""
    links = Links(host_links=groups)
    host_link_ids(links, num_workers)
    return links.host_links


def host_edges(table: Content, links: Links) -> tuple[CellPositions, CellPositions]:
    """Return edges (earlier, later cells) to offloads and loads, by row and by host link."""
    link, grammar = host_link_ids(links, table.num_workers), table.grammar
    cells = phase_cells(table, grammar.host_phases)
    executed = phase_cells(table, links.executed_phases(grammar))
    issuer = op_before(table, executed, cells)  # index in `executed`
    is_issued = issuer != NOWHERE
    worker, slot = np.divmod(cells, table.num_slots)
    order = np.lexsort((worker, slot, link[worker]))  # link by link, by column, then by worker
    queue, queue_link = cells[order], link[worker[order]]
    is_same_link = queue_link[1:] == queue_link[:-1]
    return (
        np.concatenate([executed[issuer[is_issued]], queue[:-1][is_same_link]]),
        np.concatenate([cells[is_issued], queue[1:][is_same_link]]),
    )


def waiting_cells(table: Content, links: Links) -> tuple[CellPositions, CellPositions]:
    """Return (awaited cells, waiting cells), also by host links, but without messages."""
    phases = (*links.executed_phases(table.grammar), *table.grammar.side_phases)
    tail, head = cell_edges(table, phase_cells(table, phases))
    host_tail, host_head = host_edges(table, links)
    if table.first_cells is not None:
        host_tail = table.first_cells[host_tail]
    return np.concatenate([tail, host_tail]), np.concatenate([head, host_head])


def align_columns(
    rows: Sequence[Sequence[Cell]], queues: Iterable[Sequence[tuple[int, int]]]
) -> list[list[Cell]]:
    """Insert the fewest idle cells with which the columns of each queue's cells ascend."""
    # Queues hold (worker, index in its row). The column of a cell is one more than the columns of
    # the cells before it in its row and in its queue: a longest path over edges between cells,
    # numbered row by row. Rows a b and c d with the queue b c have the columns 0 1 and 2 3.
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


def with_host_order(table: ScheduleTable, rows: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """Insert idle cells so that offloads and loads keep their order across a table's columns."""
    places = {cell: (worker, k) for worker, row in enumerate(rows) for k, cell in enumerate(row)}
    slots, workers = np.nonzero(is_phase(table.phase, HOST).T)  # by column, then by worker
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


OpsOfRow = Int[NumpyArray, "_ 3"] | Int[NumpyArray, "_ 2 3"] | Sequence[Op]
MAX_COLUMNS_PER_START = 64  # beyond this, columns of a drawn table are not to scale


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows(Content):
    """Rows of a builder, before their columns are chosen and checked."""

    cells: Cells
    partners: Cells
    placement: Placement
    slots: Slots
    stage_shares: Sequence[float]
    weights: WeightRule
    grammar: Grammar = USUAL


def slot_times(
    table: ScheduleTable | _Rows,
    slots: Slots | None = None,
    *,
    is_scaled: bool = True,
    link: str | Links = "delay",
) -> tuple[Float[NumpyArray, "workers slots"], Float[NumpyArray, "workers slots"]]:
    """Run a table without messages, with each op as early as possible.

    Only the host links of `link` matter. If `is_scaled`, durations are multiplied by stage shares.
    Return start and finish of each cell (workers, slots) [slots]; 0 for idle cells.
    """
    links = Links.resolve(link)
    check_host_links(table, links)
    duration = cell_durations(table, slots, is_scaled)
    shape, order = duration.shape, None
    earlier, later = waiting_cells(table, links)  # cells (waits): the later waits for the earlier
    first_cells = table.first_cells  # (cells) first cell of each collective; None without one
    # without collectives, columns are a topological order if all waits are for earlier columns
    if first_cells is None and np.all(earlier % table.num_slots < later % table.num_slots):
        order = np.arange(duration.size).reshape(shape).T.ravel()
    start, finish = run_edges(earlier, later, duration.ravel(), order, table.num_workers)
    if first_cells is not None:
        start, finish = start[first_cells], finish[first_cells]
    return start.reshape(shape), finish.reshape(shape)


def cell_durations(
    table: ScheduleTable | _Rows, slots: Slots | None = None, is_scaled: bool = True
) -> Float[NumpyArray, "workers slots"]:
    """Return each cell's duration (workers, slots), from `slots` or the table's slot durations."""
    # A fused pair takes the sum of both ops; `is_scaled` multiplies durations by stage shares.
    slots = table.slots if slots is None else slots
    phase_durations = np.array([slots.get(phase.name, 0) for phase in table.grammar.phases], float)
    # the last entry serves `NO_STAGE`, -1: idle cells, and ops of a worker
    share = np.append(table.stage_shares if is_scaled else np.ones(table.num_stages), 1.0)
    total = np.zeros(table.cells.phase.shape)
    for cells in (table.cells, table.partners):
        total += phase_durations[cells.phase] * share[cells.stage]
    return total


def with_idle_slots(table: ScheduleTable) -> ScheduleTable:
    """Return a table with idle slots, in which every op's column shows its start."""
    # Columns of starts put offloads and loads after the op that issues them, also across rows. With
    # columns in such an order, workers can share any host link without a deadlock.
    if table.grammar.side_phases:  # ops of two lanes may start at once: one column would hold both
        return table
    cells, partners = _cells_by_start(table)
    placement = table.placement.copy()
    return dataclasses.replace(table, cells=cells, partners=partners, placement=placement)


def _cells_by_start(table: ScheduleTable | _Rows) -> tuple[Cells, Cells]:
    """Return first and second ops of all cells, in the columns of their start slots."""
    start, finish = slot_times(table)
    is_op = table.cells.phase != Phase.IDLE
    worker = np.nonzero(is_op)[0]
    column = columns_of_starts(worker, start[is_op], (finish > start)[is_op])
    shape = table.num_workers, int(column.max()) + 1
    results = empty_cells(shape), empty_cells(shape)
    for result, cells in zip(results, (table.cells, table.partners), strict=True):
        for field, values in zip(result, cells, strict=True):
            field[worker, column] = values[is_op]
    return results


_has_idle_slots = contextvars.ContextVar("has_idle_slots", default=True)


@contextlib.contextmanager
def without_idle_slots() -> Iterator[None]:
    """Build tables in less time, without idle slots. Runs and memory stay the same."""
    token = _has_idle_slots.set(False)
    try:
        yield
    finally:
        _has_idle_slots.reset(token)


def table_from_ops(
    name: str,
    rows: Sequence[OpsOfRow],
    slots: Slots,
    placement: Placement | None = None,
    *,
    pipe_of_microbatch: Sequence[int] | None = None,
    stage_shares: Sequence[float] = (),
    weights: WeightRule = NEWEST,
    grammar: Grammar = USUAL,
) -> ScheduleTable:
    """Build a table from rows of ops, with idle slots added; by default worker r has stage r."""
    # A row is a sequence of `Op` or an array (ops, 3) of phase, stage and microbatch; or an array
    # (ops, 2, 3) with partners of fused pairs, whose phase is IDLE if there is none. Rows get no
    # idle slots in `without_idle_slots`, nor if the grammar has ops that run beside compute.
    placement = looped(len(rows)) if placement is None else placement
    arrays = []  # (ops, 1 or 2, 3)
    for row in rows:
        array = np.asarray(row, np.int32)
        arrays.append(array.reshape(len(array), 2 if array.ndim == 3 else 1, 3))
    lengths = [len(row) for row in arrays]
    is_op = np.arange(max(lengths)) < np.array(lengths)[:, None]  # (workers, slots)
    cells, partners = empty_cells(is_op.shape), empty_cells(is_op.shape)
    ops = np.concatenate(arrays)
    for fields, values in zip((cells, partners), np.moveaxis(ops, 1, 0), strict=False):
        phase, stage, microbatch = values.T
        pipe = 0 if pipe_of_microbatch is None else np.asarray(pipe_of_microbatch)[microbatch]
        pipe = np.where(phase == Phase.IDLE, NO_PIPE, pipe)
        for field, column in zip(fields, (phase, stage, microbatch, pipe), strict=True):
            field[is_op] = column
    shares = stage_shares or (1.0,) * placement.shape[1]
    slot_lengths = {**grammar.unit_slots, **slots}
    dense_rows = _Rows(cells, partners, placement, slot_lengths, shares, weights, grammar)
    # offloads and loads share a link in the order of their columns, so they always need the slots
    is_spread = _has_idle_slots.get() or bool(is_phase(ops[..., 0], HOST).any())
    if is_spread and not grammar.side_phases:
        with contextlib.suppress(CycleError):  # the check of the table names the deadlock
            cells, partners = _cells_by_start(dense_rows)
    return ScheduleTable(cells, partners, placement, name, slots, stage_shares, weights, grammar)


def columns_of_starts(
    worker: Int[NumpyArray, " ops"],
    start: Num[NumpyArray, " ops"],
    has_duration: Bool[NumpyArray, " ops"],
) -> Int[NumpyArray, " ops"]:
    """Return each op's column in a table drawn by start times; ops come by row, then by start."""
    # A column is one slot if all starts are whole numbers and not far apart, otherwise one distinct
    # start. Ops without duration have columns before other ops of the same start.
    starts, time = np.unique(start, return_inverse=True)
    is_to_scale = starts[-1] <= MAX_COLUMNS_PER_START * len(starts)
    if is_to_scale and np.all(starts == np.round(starts)):
        time = start.astype(np.int64)
    num_times = int(time.max()) + 1
    # Number the ops without duration at each time of a row. Of a row with ops a b C at time 0 and d
    # E at time 1, capitals with duration: `rank` is 0 1 2 0 1 (earlier ops
    # without duration at its time), `num_instant` 2 1, `offset` 0 3, and the columns 0 1 2 3 4.
    key = worker * num_times + time
    is_instant = ~has_duration
    num_before = np.cumsum(is_instant) - is_instant
    is_first = np.append(True, key[1:] != key[:-1])
    rank = num_before - np.maximum.accumulate(np.where(is_first, num_before, 0))
    num_instant = np.zeros(num_times, np.int64)  # columns of each time for ops without duration
    np.maximum.at(num_instant, time[is_instant], rank[is_instant] + 1)
    last_time = int(time[has_duration].max(initial=-1))
    num_columns = num_instant + (np.arange(num_times) <= last_time)
    offset = np.cumsum(num_columns) - num_columns
    column = offset[time] + np.where(has_duration, num_instant[time], rank)
    return column.astype(np.int64)
