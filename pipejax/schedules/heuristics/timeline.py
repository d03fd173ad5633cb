"""The state of a run on the workers of a pipe: times, messages, memory, and what can run next.

Every scheduler of this folder stands on it and only chooses which op runs next. Times are whole
numbers or floats, and stay what they are: sums of whole numbers are exact. When a run has ended,
its start times become rows that keep a memory limit whatever the times turn out to be.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.schedules.cells.memory_ledger import END, START, WEIGHT_SHARE, held_change
from pipejax.schedules.cells.ops import HOST, INPUT_GRADS, SPLIT, Cell, Op, Phase
from pipejax.schedules.cells.placement import Placement
from pipejax.schedules.table.host_links import aligned

Time = int | float
FOREVER = float("inf")
ROUNDING = 1e-9  # sums of times or sizes closer than this, relatively, are equal
TimedOp = tuple[Phase, int, int, int, Time, Time]  # phase, stage, microbatch, worker, start, end


class Work(NamedTuple):
    """Ops to run. Times and sizes are in any unit."""

    placement: Sequence[Sequence[int]]  # (pipes, stages) worker of each stage
    pipe_of: Sequence[int]  # (microbatches) pipe of each microbatch
    lasts: Mapping[Phase, Sequence[Time]]  # (stages) times of each phase
    lag: Sequence[Sequence[Sequence[Time]]]  # (directions, pipes, boundaries) delay
    transmit: Sequence[Sequence[Sequence[Time]]]  # (directions, pipes, boundaries) of the link
    sizes: Sequence[Time]  # (stages) memory that an activation takes at the start of F or L
    kept: Sequence[Time]  # (stages) what of it is left after I and goes with W
    limits: Sequence[Time]  # (workers) memory for activations

    @classmethod
    def of(
        cls,
        placement: Placement,
        microbatch_pipes: Sequence[int],
        durations: Mapping[Phase, Sequence[Time]],
        transfer: Time = 0,
        **memory: Sequence[Time],
    ) -> "Work":
        """Let all messages between workers take one time, which occupies no link."""
        lag = (np.diff(placement) != 0) * transfer  # (pipes, boundaries)
        none: Sequence[Time] = [0] * placement.shape[1]
        limits: Sequence[Time] = [0] * (int(placement.max()) + 1)
        unlimited = {"sizes": none, "kept": none, "limits": limits}
        return cls(
            placement.tolist(),
            microbatch_pipes,
            durations,
            lag=[lag.tolist()] * 2,
            transmit=np.zeros((2, *lag.shape), int).tolist(),
            **{**unlimited, **memory},
        )

    @property
    def total(self) -> int:
        """Number of ops that compute."""
        phases = sum(phase in self.lasts for phase in (*SPLIT, Phase.B))
        return phases * len(self.placement[0]) * len(self.pipe_of)

    @property
    def gradient(self) -> Phase:
        """The phase whose end sends a gradient back: I, or B where backwards are not split."""
        return Phase.I if Phase.I in self.lasts else Phase.B


class _Step(NamedTuple):
    """All that an op of one phase, pipe and stage does, found out before the run."""

    # Of what it makes: phase, stage, link of two workers, how long that is occupied, and the lag.

    worker: int
    lasts: Time
    takes: Time
    frees: Time
    makes: Sequence[tuple[Phase, int, tuple[int, int], Time, Time]]


class Timeline:
    """The ops that have been started, in that order."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.log: list[TimedOp] = []  # ops with their times
        self.clock: list[Time] = [0 for _ in work.limits]
        self.held: list[Time] = [0 for _ in work.limits]
        self.done = {phase: [[0 for _ in row] for row in work.placement] for phase in work.lasts}
        self.arrival: dict[Op, Time] = {Op(Phase.F, 0, m): 0 for m in range(len(work.pipe_of))}
        self._links: dict[tuple[int, int], Time] = {}
        self._steps = {
            phase: [[self._step(phase, p, s) for s in range(len(row))] for p, row in pipes]
            for pipes in [list(enumerate(work.placement))]
            for phase in work.lasts
        }

    def worker(self, op: Op) -> int:
        """Return where an op runs."""
        return self.work.placement[self.work.pipe_of[op[2]]][op[1]]

    def start(self, op: Op, now: Time) -> list[tuple[Op, Time]]:
        """Start an op: return the ops whose inputs it makes, and when these arrive."""
        phase, stage, microbatch = op
        pipe = self.work.pipe_of[microbatch]
        worker, duration, takes, _, makes = self._steps[phase][pipe][stage]
        end = now + duration
        self.log.append((phase, stage, microbatch, worker, now, end))
        self.done[phase][pipe][stage] += 1
        self.held[worker] += takes
        if phase not in HOST:
            self.clock[worker] = end
        outputs = []
        for phase_made, stage_made, link, transmit, lag in makes:
            there = end
            if transmit:  # a link carries one message at a time
                there = self._links[link] = max(end, self._links.get(link, 0)) + transmit
            op_made = Op(phase_made, stage_made, microbatch)
            arrival = self.arrival[op_made] = there + lag
            outputs.append((op_made, arrival))
        return outputs

    def end(self, op: Op) -> int:
        """Free what an op releases at its end; return its worker."""
        step = self._steps[op[0]][self.work.pipe_of[op[2]]][op[1]]
        self.held[step.worker] += step.frees
        return step.worker

    def rows(self) -> list[list[Op]]:
        """Return the ops of each worker, in the order in which they were started."""
        rows: list[list[Op]] = [[] for _ in self.work.limits]
        for phase, stage, microbatch, worker, *_ in self.log:
            rows[worker].append(Op(phase, stage, microbatch))
        return rows

    def _step(self, phase: Phase, pipe: int, stage: int) -> _Step:
        """Return the effects of an op, by the rules of `cells.dependencies`."""
        work, row = self.work, self.work.placement[pipe]
        gradient, last = work.gradient, len(row) - 1
        makes: list[tuple[Phase, int, tuple[int, int], Time, Time]] = []
        for producer, output, target in (
            (Phase.F, gradient if stage == last else Phase.F, min(stage + 1, last)),
            (gradient, gradient, stage - 1),
            (Phase.I, Phase.W, stage),
        ):
            if producer is phase and target >= 0:
                way, boundary = int(target < stage), min(stage, target)
                times = (kind[way][pipe][boundary] for kind in (work.transmit, work.lag))
                link = row[stage], row[target]
                makes.append((output, target, link, *(times if target != stage else (0, 0))))
        size = {"whole": work.sizes[stage], "for_w": work.kept[stage]}
        takes, frees = (held_change(phase, moment, **size) for moment in (START, END))
        return _Step(row[stage], work.lasts[phase][stage], takes, frees, makes)


# Rows from start times: where offloads are issued, and what has to wait for them.
#
# An offload or a load starts no earlier than the executed op before it in its row has ended, so it
# stands right after the last one that ended by its start. A forward takes memory, and only what
# is certain to be free then may count, whatever the times turn out to be: gradients before it in
# its row, offloads whose end a WAIT_O awaits, and those that the host link finished before a
# reload whose backward stands before it. A load follows all earlier offloads on its link.
#
# Take any order of what takes memory. If the level after each, less only what is certain then,
# keeps the limit, then no times exceed it: of all that has started at some moment, look at the
# last in that order; everything that counted as free for it is free, so what is held is at most
# the level after it. The order here is that of the starts.

KNOWN = (Phase.F, Phase.B, Phase.I, Phase.W, *HOST)


class TimedOps(NamedTuple):
    """Ops with the times at which they run."""

    phase: Int[NumpyArray, " ops"]  # phase code
    stage: Int[NumpyArray, " ops"]
    microbatch: Int[NumpyArray, " ops"]
    worker: Int[NumpyArray, " ops"]  # worker of the stage
    start: Float[NumpyArray, " ops"]  # start, in any unit of time
    end: Float[NumpyArray, " ops"]

    @classmethod
    def of(cls, ops: Sequence[TimedOp]) -> "TimedOps":
        """Make the arrays from one tuple per op."""
        columns = np.array(ops, float).reshape(len(ops), len(cls._fields)).T
        return cls(*columns[:4].astype(np.int64), *columns[4:])

    def spans(self, num_workers: int) -> Float[NumpyArray, " workers"]:
        """Time (workers) from the first start of each worker to its last end."""
        first, last = np.full(num_workers, FOREVER), np.zeros(num_workers)
        np.minimum.at(first, self.worker, self.start)
        np.maximum.at(last, self.worker, self.end)
        return last - first


def rows_from_starts(
    ops: TimedOps,
    *,
    sizes: Sequence[float] | Float[NumpyArray, " stages"],
    limits: Sequence[float] | Float[NumpyArray, " workers"],
    weight_share: float | Float[NumpyArray, " stages"] = WEIGHT_SHARE,
    host_links: Sequence[Sequence[int]] = (),
) -> list[list[Cell]]:
    """Put ops with start times into rows that keep a memory limit at all times."""
    # There is a WAIT_O only where the level that is certain would exceed the limit, for as few of
    # the oldest offloads as it takes.
    for code in np.unique(ops.phase).tolist():
        if code not in KNOWN:
            names = ", ".join(phase.name for phase in KNOWN)
            raise ValueError(f"no rows are made from starts of {Phase(code).name}: only of {names}")
    size = np.asarray(sizes, float)
    weight_sizes = size * weight_share
    rows = []
    for worker, limit in enumerate(limits):
        worker_ops = TimedOps(*(field[ops.worker == worker] for field in ops))
        row = TimedOps(*(field[_row_order(worker_ops)] for field in worker_ops))
        rows.append(_with_waits(row, size, weight_sizes, float(limit)))
    start = {
        Op(Phase(code), stage, microbatch): time
        for code, stage, microbatch, time in zip(
            *(c.tolist() for c in (*ops[:3], ops.start)), strict=True
        )
    }
    # on a link that workers share, ops stand in the order of their starts
    queues = [
        sorted(
            (start[cell[0]], worker, place)
            for worker in group
            for place, cell in enumerate(rows[worker])
            if cell[0].phase in HOST
        )
        for group in host_links
    ]
    return (
        aligned(rows, [[(worker, place) for _, worker, place in queue] for queue in queues])
        if queues
        else rows
    )


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


def _levels(row: TimedOps, sizes: Float[NumpyArray, " ops"]) -> Float[NumpyArray, " ops"]:
    """Memory (ops) taken by all ops that start no later; at a tie, a load comes last."""
    start = row.start + _tolerance(row) * (row.phase == Phase.L)
    order = np.argsort(start, kind="stable")
    levels = np.empty_like(sizes)
    levels[order] = np.cumsum(sizes[order])
    return levels


def _with_waits(
    row: TimedOps,
    sizes: Float[NumpyArray, " stages"],
    weight_sizes: Float[NumpyArray, " stages"],
    limit: float,
) -> list[Cell]:
    """Cells of a row, with a WAIT_O wherever only an offload makes room."""
    size, rest = sizes[row.stage], weight_sizes[row.stage]
    frees = np.select([row.phase == Phase.I, row.phase == Phase.W], [size - rest, rest], size)
    level = _levels(row, np.where(np.isin(row.phase, (Phase.F, Phase.L)), size, 0.0))
    max_level = limit * (1 + ROUNDING)
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
                if held - free - offloaded[k] <= max_level and ends[k] <= start
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
            _check_room(held - free - offloaded[-1] <= max_level, op, limit)
            before_load[stage, microbatch] = len(offloads)
        else:
            free += gives
            if op.phase in INPUT_GRADS:
                # it waited for its load, and the load for all offloads before it on the link
                certain = max(certain, before_load.get((stage, microbatch), 0))
        cells.append((op,))
    return cells


def _check_room(fits: bool, op: Op, limit: float) -> None:
    if not fits:
        raise ValueError(f"{op} finds no room: activations exceed the limit of {limit:g}")
