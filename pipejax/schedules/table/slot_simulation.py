"""The idealised table: the schedule run in slots, without messages.

This is the middle one of the three levels that the literature compares (formula, table,
communication-aware run). Builders use it to draw a table with its idle slots, and the rendezvous
link model to order transfers where a table does not say how.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, Num, NumpyArray
from pipejax.base.longest_path import CycleError, run_edges
from pipejax.schedules.cells.cells import NEWEST, Cells, Content, WeightRule, empty_cells
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import NO_PIPE, PHASES, Op, Phase, Slots
from pipejax.schedules.cells.placement import Placement, looped
from pipejax.schedules.legality import check_slots
from pipejax.schedules.table.host_links import check_host_links, waiting_cells
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

OpsOfRow = Int[NumpyArray, "_ 3"] | Int[NumpyArray, "_ 2 3"] | Sequence[Op]
MOST_IDLE = 64  # columns per distinct start beyond which a table is drawn without its scale


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows(Content):
    """Rows of a builder before they are drawn: nobody has checked yet that they can run."""

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
    shares: bool = True,
    link: str | Links = "delay",
) -> tuple[Float[NumpyArray, "workers slots"], Float[NumpyArray, "workers slots"]]:
    """Run a table without messages, each op as early as it can; only host links matter.

    Returns (workers, slots) start and finish of each cell [slots]; 0 where a cell is idle.
    """
    links = Links.of(link)
    check_host_links(table, links)
    duration = durations(table, slots, shares)
    shape, order = duration.shape, None
    tail, head = waiting_cells(table, links)
    merged = table.op_of_cell
    # the columns are an order, where no cells are one op
    if merged is None and np.all(tail % table.num_slots < head % table.num_slots):
        order = np.arange(duration.size).reshape(shape).T.ravel()
    start, finish = run_edges(tail, head, duration.ravel(), order, table.num_workers)
    if merged is not None:
        start, finish = start[merged], finish[merged]
    return start.reshape(shape), finish.reshape(shape)


def durations(
    table: ScheduleTable | _Rows, slots: Slots | None = None, shares: bool = True
) -> Float[NumpyArray, "workers slots"]:
    """Duration of each cell (workers, slots) [slots]; by default in those of the table."""
    slots = table.slots if slots is None else slots
    by_phase = np.array([slots.get(phase.name, 0) for phase in table.grammar.phases], float)
    # the last entry serves idle cells, which take no time, and what is of a worker
    share = np.append(table.stage_shares if shares else np.ones(table.num_stages), 1.0)
    return sum(
        (by_phase[cells.phase] * share[cells.stage] for cells in (table.cells, table.partners)),
        np.zeros(table.cells.phase.shape),
    )


def spread(table: ScheduleTable) -> ScheduleTable:
    """Draw a table with its idle slots: every op in the column of its start."""
    # Offloads and loads stand behind the op at whose end they are issued. Across rows their columns
    # follow those ends, an order in which workers can share any host link without a deadlock.
    if table.grammar.off_row:  # ops of two lanes may start at once: one column would hold both
        return table
    cells, partners = _moved(table)
    placement = table.placement.copy()
    return dataclasses.replace(table, cells=cells, partners=partners, placement=placement)


def _moved(table: ScheduleTable | _Rows) -> tuple[Cells, Cells]:
    """The cells of a table and their partners, each in the column of its start."""
    start, finish = slot_times(table)
    held = table.cells.phase != Phase.IDLE
    worker = np.nonzero(held)[0]
    column = columns(worker, start[held], (finish > start)[held])

    def move(cells: Cells) -> Cells:
        moved = empty_cells((table.num_workers, int(column.max()) + 1))
        for field, values in zip(moved, cells, strict=True):
            field[worker, column] = values[held]
        return moved

    return move(table.cells), move(table.partners)


def spread_rows(
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
    """Draw rows with their idle slots; by default, worker r has stage r alone."""
    # A row is an array (ops, 3): phase, stage and microbatch of each op, which `Op` are too; or
    # (ops, 2, 3), where a partner that is no op has the phase IDLE. No op becomes an object, and
    # only what is drawn becomes a table, with its checks. As in `spread`, lanes beside compute have
    # none.
    check_slots(slots)
    placement = looped(len(rows)) if placement is None else placement
    arrays = [np.asarray(row, np.int32) for row in rows]
    arrays = [np.reshape(row, (len(row), 2 if row.ndim == 3 else 1, 3)) for row in arrays]
    lengths = [len(row) for row in arrays]
    is_held = np.arange(max(lengths)) < np.array(lengths)[:, None]
    compact, partners = empty_cells(is_held.shape), empty_cells(is_held.shape)
    ops = np.concatenate(arrays)
    for cells, values in zip((compact, partners), np.moveaxis(ops, 1, 0), strict=False):
        phase, stage, microbatch = values.T
        pipe = 0 if pipe_of_microbatch is None else np.asarray(pipe_of_microbatch)[microbatch]
        pipe = np.where(phase == Phase.IDLE, NO_PIPE, pipe)
        for field, column in zip(cells, (phase, stage, microbatch, pipe), strict=True):
            field[is_held] = column
    shares = stage_shares or (1.0,) * placement.shape[1]
    slot_lengths = {**grammar.unit_slots, **slots}
    compact_rows = _Rows(compact, partners, placement, slot_lengths, shares, weights, grammar)
    try:
        moved = (compact, partners) if grammar.off_row else _moved(compact_rows)
    except CycleError:  # the table itself says where
        moved = compact, partners
    return ScheduleTable(*moved, placement, name, slots, stage_shares, weights, grammar)


def columns(
    worker: Int[NumpyArray, " ops"],
    start: Num[NumpyArray, " ops"],
    has_duration: Bool[NumpyArray, " ops"],
) -> Int[NumpyArray, " ops"]:
    """Return the column of each op in a drawing with idle slots: (ops) columns."""
    # A column is one slot where all starts are whole numbers and not far apart; otherwise there is
    # one column per distinct start. Ops that take no time stand in columns of their own, before
    # those that begin at the same moment.
    # how many distinct starts there are is told without a sort, if they are few whole numbers
    in_slots = start.max() <= MOST_IDLE * len(start) and bool(np.all(start == np.round(start)))
    if in_slots:
        moment = start.astype(np.int64)
        in_slots = moment.max() <= MOST_IDLE * np.count_nonzero(np.bincount(moment))
    if not in_slots:
        moment = np.unique(start, return_inverse=True)[1]
    num_moments = int(moment.max()) + 1
    # how many ops without a duration the row has had at this moment
    key = worker * num_moments + moment
    before = np.cumsum(~has_duration) - ~has_duration
    first = np.append(True, key[1:] != key[:-1])
    rank = before - np.maximum.accumulate(np.where(first, before, 0))
    instant = np.zeros(num_moments, np.int64)  # columns for them
    np.maximum.at(instant, moment[~has_duration], rank[~has_duration] + 1)
    last = int(moment[has_duration].max(initial=-1))
    width = instant + (np.arange(num_moments) <= last)
    offset = np.cumsum(width) - width
    column = offset[moment] + np.where(has_duration, instant[moment], rank)
    return column.astype(np.int64)


def draw(
    name: str,
    slots: Slots,
    weights: WeightRule,
    worker: Int[NumpyArray, " ops"],
    start: Num[NumpyArray, " ops"],
    phase: Int[NumpyArray, " ops"],
    microbatch: Int[NumpyArray, " ops"],
) -> ScheduleTable:
    """Make a table of one stage per worker from the starts of its ops."""
    order = np.lexsort((start, worker))
    worker, start, phase, microbatch = (a[order] for a in (worker, start, phase, microbatch))
    column = columns(worker, start, np.isin(phase, [PHASES[letter] for letter in slots]))
    shape = int(worker.max(initial=-1)) + 1, int(column.max(initial=-1)) + 1
    cells = empty_cells(shape)
    for field, values in zip(cells, (phase, worker, microbatch, 0), strict=True):
        field[worker, column] = values
    partners, placement = empty_cells(shape), looped(shape[0])
    return ScheduleTable(cells, partners, placement, name, slots, weights=weights)
