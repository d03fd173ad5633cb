"""Rows from start times: where offloads are issued, and what has to wait for them.

An offload or a load starts no earlier than the executed op before it in its row has ended, so it
stands right after the last one that ended by its start. A forward takes memory, and only what
is certain to be free then may count, whatever the times turn out to be: gradients before it in
its row, offloads whose end a WAIT_O awaits, and those that the host link finished before a
reload whose backward stands before it. A load follows all earlier offloads on its link.

Take any order of what takes memory. If the level after each, less only what is certain then,
keeps the limit, then no times exceed it: of all that has started at some moment, look at the
last in that order; everything that counted as free for it is free, so what is held is at most
the level after it. The order here is that of the starts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.cells.ops import HOST, Cell, Op, Phase
from pipejax.schedules.heuristics.list_scheduling import ROUNDING
from pipejax.schedules.heuristics.timeline import TimedOp

KNOWN = (Phase.F, Phase.B, Phase.I, Phase.W, *HOST)


class TimedOps(NamedTuple):
    """Ops with the times at which they run.

    Attributes:
      phase: (ops) phase code.
      stage: (ops) stage.
      microbatch: (ops) microbatch.
      worker: (ops) worker of the stage.
      start: (ops) start, in any unit of time.
      end: (ops) end.
    """

    phase: Int[NumpyArray, " ops"]
    stage: Int[NumpyArray, " ops"]
    microbatch: Int[NumpyArray, " ops"]
    worker: Int[NumpyArray, " ops"]
    start: Float[NumpyArray, " ops"]
    end: Float[NumpyArray, " ops"]

    @classmethod
    def of(cls, ops: Sequence[TimedOp]) -> "TimedOps":
        """Make the arrays from one tuple per op."""
        columns = np.array(ops, float).reshape(len(ops), len(cls._fields)).T
        return cls(*columns[:4].astype(np.int64), *columns[4:])


def rows_from_starts(
    ops: TimedOps,
    *,
    sizes: Sequence[float] | Float[NumpyArray, " stages"],
    limits: Sequence[float] | Float[NumpyArray, " workers"],
    weight_share: float | Float[NumpyArray, " stages"] = WEIGHT_SHARE,
    host_links: Sequence[Sequence[int]] = (),
) -> list[list[Cell]]:
    """Put ops with start times into rows that keep a memory limit at all times.

    There is a WAIT_O only where the level that is certain would exceed the limit, for as few of
    the oldest offloads as it takes.
    """
    for code in np.unique(ops.phase).tolist():
        if code not in KNOWN:
            known = ", ".join(phase.name for phase in KNOWN)
            raise ValueError(f"no rows are made from starts of {Phase(code).name}: only of {known}")
    size = np.asarray(sizes, float)
    kept = size * weight_share
    rows = []
    for worker, limit in enumerate(limits):
        mine = TimedOps(*(field[ops.worker == worker] for field in ops))
        row = TimedOps(*(field[_row_order(mine)] for field in mine))
        rows.append(_with_waits(row, size, kept, float(limit)))
    start = {
        Op(Phase(code), stage, microbatch): time
        for code, stage, microbatch, time in zip(
            *(c.tolist() for c in (*ops[:3], ops.start)), strict=True
        )
    }
    for group in host_links:
        _align(rows, start, group)
    return rows


def _align(rows: list[list[Cell]], start: dict[Op, float], group: Sequence[int]) -> None:
    """Insert idle cells until ops on a shared host link stand in the order of their starts."""
    queue = sorted(
        (start[cell[0]], worker, place)
        for worker in group
        for place, cell in enumerate(rows[worker])
        if cell[0].phase in HOST
    )
    aligned: dict[int, list[Cell]] = {worker: [] for worker in group}
    placed = dict.fromkeys(group, 0)
    column = 0
    for _, worker, place in queue:
        row = aligned[worker]
        row += rows[worker][placed[worker] : place]
        row += [()] * (column - len(row))
        row.append(rows[worker][place])
        column, placed[worker] = len(row), place + 1
    for worker in group:
        rows[worker] = aligned[worker] + rows[worker][placed[worker] :]


def _tolerance(ops: TimedOps) -> float:
    return ROUNDING * float(np.max(ops.end, initial=0.0))


def _row_order(ops: TimedOps) -> Int[NumpyArray, " ops"]:
    """Order a worker's ops (ops) by start, offloads and loads behind the last op that ended."""
    on_link = np.isin(ops.phase, HOST)
    executed = np.flatnonzero(~on_link)
    executed = executed[np.lexsort((ops.end[executed], ops.start[executed]))]
    place = np.empty(len(ops.phase), np.int64)
    place[executed] = np.arange(1, len(executed) + 1)
    place[on_link] = np.searchsorted(
        ops.end[executed], ops.start[on_link] + _tolerance(ops), side="right"
    )
    # of two that take no time at one moment the offload comes first: it makes room for the load
    return np.lexsort((ops.phase == Phase.L, ops.end, ops.start, on_link, place))


def _levels(row: TimedOps, taken: Float[NumpyArray, " ops"]) -> Float[NumpyArray, " ops"]:
    """Memory (ops) taken by all ops that start no later; at a tie, a load comes last."""
    start = row.start + _tolerance(row) * (row.phase == Phase.L)
    order = np.argsort(start, kind="stable")
    levels = np.empty_like(taken)
    levels[order] = np.cumsum(taken[order])
    return levels


def _with_waits(
    row: TimedOps,
    sizes: Float[NumpyArray, " stages"],
    kept: Float[NumpyArray, " stages"],
    limit: float,
) -> list[Cell]:
    """Cells of a row, with a WAIT_O wherever only an offload makes room."""
    size, rest = sizes[row.stage], kept[row.stage]
    frees = np.select([row.phase == Phase.I, row.phase == Phase.W], [size - rest, rest], size)
    level = _levels(row, np.where(np.isin(row.phase, (Phase.F, Phase.L)), size, 0.0))
    most = limit * (1 + ROUNDING)
    free = 0.0  # by the gradients so far
    offloads: list[Op] = []
    offloaded, ends = [0.0], [0.0]  # by the first k offloads, until when
    certain = 0  # offloads that have surely ended
    before_load: dict[tuple[int, int], int] = {}
    cells: list[Cell] = []
    columns = (*row[:3], size, frees, level, row.start + _tolerance(row), row.end)
    for code, stage, microbatch, takes, gives, held, start, end in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        op = Op(Phase(code), stage, microbatch)
        if op.phase is Phase.F:
            # the theorem of the module: take as free only what is certain before this F, and wait
            # for the fewest oldest offloads with which the level keeps the limit
            enough = (
                k
                for k in range(certain, len(offloaded))
                if held - free - offloaded[k] <= most and ends[k] <= start
            )
            needed = next(enough, None)
            _check_room(needed is not None, op, limit)
            if needed is not None and needed > certain:
                certain = needed
                cells.append((offloads[certain - 1]._replace(phase=Phase.WAIT_O),))
        elif op.phase is Phase.O:
            offloads.append(op)
            offloaded.append(offloaded[-1] + takes)
            ends.append(end)
        elif op.phase is Phase.L:
            _check_room(held - free - offloaded[-1] <= most, op, limit)
            before_load[stage, microbatch] = len(offloads)
        else:
            free += gives
            if op.phase in (Phase.B, Phase.I):
                # it waited for its load, and the load for all offloads before it on the link
                certain = max(certain, before_load.get((stage, microbatch), 0))
        cells.append((op,))
    return cells


def _check_room(fits: bool, op: Op, limit: float) -> None:
    if not fits:
        raise ValueError(f"{op} finds no room: activations exceed the limit of {limit:g}")
