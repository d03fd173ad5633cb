"""State of a simulated run: times, messages, memory, and ops that can start.

Every scheduler of this folder uses this state and only chooses the next op. After a run, start
times become rows that keep a memory limit even if ops take other times.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.schedules.cells.cells import Placement
from pipejax.schedules.cells.ops import HOST, INPUT_GRADS, SPLIT, Cell, Op, Phase, is_phase
from pipejax.schedules.table.held_activations import END, START, WEIGHT_SHARE, held_change
from pipejax.schedules.table.slot_simulation import align_columns

Time = int | float
FOREVER = float("inf")
ROUNDING = 1e-9  # sums of times or sizes closer than this, relatively, are equal
TimedOp = tuple[Phase, int, int, int, Time, Time]  # phase, stage, microbatch, worker, start, end


class Work(NamedTuple):
    """Ops of a pipeline to schedule, with times and sizes in any unit."""

    placement: Sequence[Sequence[int]]  # (pipes, stages) worker of each stage
    microbatch_pipes: Sequence[int]  # (microbatches) pipe of each microbatch
    durations: Mapping[Phase, Sequence[Time]]  # (stages) times of each phase
    lag: Sequence[Sequence[Sequence[Time]]]  # (directions, pipes, boundaries) delay
    transmit: Sequence[Sequence[Sequence[Time]]]  # (directions, pipes, boundaries) time on the link
    sizes: Sequence[Time]  # (stages) memory that an activation takes at the start of F or L
    weight_sizes: Sequence[Time]  # (stages) part of an activation that W frees; I frees the rest
    limits: Sequence[Time]  # (workers) memory for activations

    @classmethod
    def from_placement(
        cls,
        placement: Placement,
        microbatch_pipes: Sequence[int],
        durations: Mapping[Phase, Sequence[Time]],
        transfer: Time = 0,
        **memory: Sequence[Time],
    ) -> "Work":
        """Make work whose messages take one time between workers and occupy no link."""
        # `memory` are the fields sizes, weight_sizes and limits; memory is unlimited without them.
        lag = (np.diff(placement) != 0) * transfer  # (pipes, boundaries)
        none: Sequence[Time] = [0] * placement.shape[1]
        limits: Sequence[Time] = [0] * (int(placement.max()) + 1)
        unlimited = {"sizes": none, "weight_sizes": none, "limits": limits}
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
        """Return the number of ops that compute."""
        phases = sum(phase in self.durations for phase in (*SPLIT, Phase.B))
        return phases * len(self.placement[0]) * len(self.microbatch_pipes)

    @property
    def gradient(self) -> Phase:
        """Return the phase that sends a gradient back: I, or B if backwards are not split."""
        return Phase.I if Phase.I in self.durations else Phase.B


class _Output(NamedTuple):
    """An op that waits for another op, and the message between them."""

    phase: Phase
    stage: int
    link: tuple[int, int]  # workers of the two ops
    transmit: Time  # time on the link; 0 within a worker
    lag: Time  # delay after the transmission


class _Effects(NamedTuple):
    """Effects on time and memory of the ops of one phase, pipe and stage."""

    worker: int
    duration: Time
    allocated: Time  # change of memory at the start
    freed: Time  # change of memory at the end
    outputs: Sequence[_Output]


class Timeline:
    """Log of started ops, with their times, memory levels and arrivals of inputs."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.log: list[TimedOp] = []  # ops with their times, in the order of their starts
        self.clock: list[Time] = [0 for _ in work.limits]  # end of the last op of each worker
        self.held: list[Time] = [0 for _ in work.limits]  # memory of each worker
        # {phase: (pipes, stages) number of started ops}
        self.done = {phase: [[0] * len(row) for row in work.placement] for phase in work.durations}
        microbatches = range(len(work.microbatch_pipes))
        self.arrival: dict[Op, Time] = {Op(Phase.F, 0, m): 0 for m in microbatches}
        self._link_ends: dict[tuple[int, int], Time] = {}  # end of the last message of each link
        self._effects: dict[Phase, list[list[_Effects]]] = {
            phase: [
                [self._op_effects(phase, pipe, stage) for stage in range(len(row))]
                for pipe, row in enumerate(work.placement)
            ]
            for phase in work.durations
        }

    def worker(self, op: Op) -> int:
        """Return the worker of an op."""
        return self.work.placement[self.work.microbatch_pipes[op.microbatch]][op.stage]

    def start(self, op: Op, now: Time) -> list[tuple[Op, Time]]:
        """Start and log an op; return (waiting op, arrival of its input) for each waiting op."""
        phase, stage, microbatch = op
        pipe = self.work.microbatch_pipes[microbatch]
        worker, duration, allocated, _, outputs = self._effects[phase][pipe][stage]
        end = now + duration
        self.log.append((phase, stage, microbatch, worker, now, end))
        self.done[phase][pipe][stage] += 1
        self.held[worker] += allocated
        if phase not in HOST:
            self.clock[worker] = end
        arrivals = []
        for next_phase, next_stage, link, transmit, lag in outputs:
            sent = end
            if transmit:  # a link carries one message at a time
                sent = self._link_ends[link] = max(end, self._link_ends.get(link, 0)) + transmit
            next_op = Op(next_phase, next_stage, microbatch)
            self.arrival[next_op] = sent + lag
            arrivals.append((next_op, sent + lag))
        return arrivals

    def end(self, op: Op) -> int:
        """Free the memory that an op releases at its end; return the op's worker."""
        effects = self._effects[op.phase][self.work.microbatch_pipes[op.microbatch]][op.stage]
        self.held[effects.worker] += effects.freed
        return effects.worker

    def rows(self) -> list[list[Op]]:
        """Return the ops of each worker, in the order in which they were started."""
        rows: list[list[Op]] = [[] for _ in self.work.limits]
        for phase, stage, microbatch, worker, *_ in self.log:
            rows[worker].append(Op(phase, stage, microbatch))
        return rows

    def _op_effects(self, phase: Phase, pipe: int, stage: int) -> _Effects:
        """Return an op's worker, duration, memory changes, and outputs to other ops."""
        work, workers = self.work, self.work.placement[pipe]  # the worker of each stage
        gradient, last = work.gradient, len(workers) - 1
        outputs = []
        after_forward = (Phase.F, Phase.F, stage + 1)
        if stage == last:
            after_forward = (Phase.F, gradient, last)
        # phases of the producer and the consumer, and the stage of the consumer
        for producer, consumer, target in (
            after_forward,
            (gradient, gradient, stage - 1),
            (Phase.I, Phase.W, stage),
        ):
            if producer is phase and target >= 0:
                direction, boundary = int(target < stage), min(stage, target)  # 0: to later stages
                transmit: Time = 0
                lag: Time = 0
                if target != stage:
                    transmit = work.transmit[direction][pipe][boundary]
                    lag = work.lag[direction][pipe][boundary]
                link = workers[stage], workers[target]
                outputs.append(_Output(consumer, target, link, transmit, lag))
        size = {"whole": work.sizes[stage], "for_w": work.weight_sizes[stage]}
        allocated, freed = (held_change(phase, moment, **size) for moment in (START, END))
        return _Effects(workers[stage], work.durations[phase][stage], allocated, freed, outputs)


# Rows from start times: places of offloads, and waits for their ends.
#
# An offload or a load starts when the op before it in its row has ended. A forward takes memory
# that must certainly be free, whatever the times of ops. Such memory was freed by gradients before
# the forward in its row, by offloads that a WAIT_O awaits, or by offloads that the host link
# finished before a load whose backward comes before the forward.
#
# Theorem: order the ops that take memory by their planned starts. The level after an op is all
# memory taken up to this op, minus the memory that is certainly free. If all levels keep the limit,
# no run exceeds it. Proof: at any time of a run, consider the last started op in this order. All
# memory that counted as free for this op is free, so the worker holds at most the level after it.

PLANNED_PHASES = (Phase.F, Phase.B, Phase.I, Phase.W, *HOST)


class TimedOps(NamedTuple):
    """Ops with the times at which they run."""

    phase: Int[NumpyArray, " ops"]  # phase code
    stage: Int[NumpyArray, " ops"]
    microbatch: Int[NumpyArray, " ops"]
    worker: Int[NumpyArray, " ops"]  # worker of the stage
    start: Float[NumpyArray, " ops"]  # start, in any unit of time
    end: Float[NumpyArray, " ops"]

    @classmethod
    def from_tuples(cls, ops: Sequence[TimedOp]) -> "TimedOps":
        """Convert a list of tuples, one per op, to arrays."""
        columns = np.array(ops, float).reshape(len(ops), len(cls._fields)).T
        return cls(*columns[:4].astype(np.int64), *columns[4:])

    def take(self, which: NumpyArray) -> "TimedOps":
        """Return the ops that a mask or an array of indices selects."""
        return TimedOps(*(field[which] for field in self))

    @property
    def tolerance(self) -> float:
        """Return the largest difference at which two times of a run count as equal."""
        return ROUNDING * float(np.max(self.end, initial=0.0))

    def spans(self, num_workers: int) -> Float[NumpyArray, " workers"]:
        """Return each worker's time from its first start to its last end."""
        first, last = np.full(num_workers, FOREVER), np.zeros(num_workers)
        np.minimum.at(first, self.worker, self.start)
        np.maximum.at(last, self.worker, self.end)
        return last - first


def run_rows(work: Work, rows: Sequence[Sequence[Op]]) -> TimedOps:
    """Run rows of F, I and W, with each op as early as its input and its worker allow."""
    timeline, queues = Timeline(work), [deque(row) for row in rows]
    has_progress = True
    while has_progress:
        has_progress = False
        for worker, queue in enumerate(queues):
            while queue and queue[0] in timeline.arrival:
                op = queue.popleft()
                timeline.start(op, max(timeline.clock[worker], timeline.arrival[op]))
                timeline.end(op)
                has_progress = True
    return TimedOps.from_tuples(timeline.log)


def rows_from_starts(
    ops: TimedOps,
    *,
    sizes: Sequence[float] | Float[NumpyArray, " stages"],
    limits: Sequence[float] | Float[NumpyArray, " workers"],
    weight_share: float | Float[NumpyArray, " stages"] = WEIGHT_SHARE,
    host_links: Sequence[Sequence[int]] = (),
) -> list[list[Cell]]:
    """Arrange ops with start times in rows that keep the memory limits for any op times."""
    # If a forward might start before an offload has freed its memory, a WAIT_O is put before it.
    for code in np.unique(ops.phase).tolist():
        if code not in PLANNED_PHASES:
            names = ", ".join(phase.name for phase in PLANNED_PHASES)
            raise ValueError(f"no rows are made from starts of {Phase(code).name}: only of {names}")
    size = np.asarray(sizes, float)
    weight_sizes = size * weight_share
    rows = []
    for worker, limit in enumerate(limits):
        worker_ops = ops.take(ops.worker == worker)
        row = worker_ops.take(_row_order(worker_ops))
        rows.append(_with_waits(row, size, weight_sizes, float(limit)))
    if not host_links:
        return rows
    fields = (field.tolist() for field in (ops.phase, ops.stage, ops.microbatch, ops.start))
    starts = {Op(Phase(code), s, m): start for code, s, m, start in zip(*fields, strict=True)}
    queues = []  # (worker, index in its row) of each op on a shared link, in the order of starts
    for group in host_links:
        entries = [
            (starts[cell[0]], worker, index)
            for worker in group
            for index, cell in enumerate(rows[worker])
            if cell[0].phase in HOST
        ]
        queues.append([(worker, index) for _, worker, index in sorted(entries)])
    return align_columns(rows, queues)


def _row_order(ops: TimedOps) -> Int[NumpyArray, " ops"]:
    """Return the order of a worker's ops in its row, as indices into `ops`."""
    # Ops are sorted by start; an offload or load stands after the last op that ended by its start.
    # F from 0 to 2, F from 2 to 4 and O from 3 to 5 are the row F O F.
    is_on_link = is_phase(ops.phase, HOST)
    executed = np.flatnonzero(~is_on_link)
    executed = executed[np.lexsort((ops.end[executed], ops.start[executed]))]
    # position among the executed ops: 1, 2, 3, ..; a transfer has the position of the op before it
    position = np.empty(len(ops.phase), np.int64)
    position[executed] = np.arange(1, len(executed) + 1)
    latest_end = ops.start[is_on_link] + ops.tolerance
    position[is_on_link] = np.searchsorted(ops.end[executed], latest_end, side="right")
    # if two transfers without duration start together, the offload frees memory for the load
    return np.lexsort((ops.phase == Phase.L, ops.end, ops.start, is_on_link, position))


def _memory_levels(row: TimedOps, sizes: Float[NumpyArray, " ops"]) -> Float[NumpyArray, " ops"]:
    """Return for each op the sum of sizes of all ops that start no later (at a tie loads last)."""
    start = np.where(row.phase == Phase.L, row.start + row.tolerance, row.start)
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
    """Return a row's cells, with a WAIT_O before each forward that needs an offload's memory."""
    # `level` is the memory taken by all F and L up to an op's start. The level must keep the limit
    # after subtraction of the memory freed by earlier gradients, by awaited offloads, and by
    # offloads for which an earlier load waited. Each WAIT_O awaits as few offloads as possible.
    size, weight_size = sizes[row.stage], weight_sizes[row.stage]
    is_i, is_w = row.phase == Phase.I, row.phase == Phase.W
    freed = np.select([is_i, is_w], [size - weight_size, weight_size], size)
    level = _memory_levels(row, np.where(is_phase(row.phase, (Phase.F, Phase.L)), size, 0.0))
    max_level = limit * (1 + ROUNDING)
    freed_by_gradients = 0.0  # up to this op
    offloads: list[Op] = []
    freed_by_offloads, offload_ends = [0.0], [0.0]  # entry k: first k offloads
    num_ended = 0  # offloads that have certainly ended
    offloads_before_load: dict[tuple[int, int], int] = {}
    cells: list[Cell] = []
    ops = row.phase, row.stage, row.microbatch
    columns = (*ops, size, freed, level, row.start + row.tolerance, row.end)
    for code, stage, microbatch, op_size, op_freed, op_level, start, end in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        op = Op(Phase(code), stage, microbatch)
        if op.phase is Phase.F:
            # wait for the fewest oldest offloads that keep the limit
            sufficient_counts = (
                k
                for k in range(num_ended, len(freed_by_offloads))
                if op_level - freed_by_gradients - freed_by_offloads[k] <= max_level
                and offload_ends[k] <= start
            )
            num_awaited = next(sufficient_counts, None)
            _check_memory(num_awaited is not None, op, limit)
            if num_awaited is not None and num_awaited > num_ended:
                num_ended = num_awaited
                cells.append((offloads[num_ended - 1]._replace(phase=Phase.WAIT_O),))
        elif op.phase is Phase.O:
            offloads.append(op)
            freed_by_offloads.append(freed_by_offloads[-1] + op_size)
            offload_ends.append(end)
        elif op.phase is Phase.L:
            has_memory = op_level - freed_by_gradients - freed_by_offloads[-1] <= max_level
            _check_memory(has_memory, op, limit)
            offloads_before_load[stage, microbatch] = len(offloads)
        else:
            freed_by_gradients += op_freed
            if op.phase in INPUT_GRADS:
                # this op waited for its load, and the load for all earlier offloads on the link
                num_ended = max(num_ended, offloads_before_load.get((stage, microbatch), 0))
        cells.append((op,))
    return cells


def _check_memory(has_memory: bool, op: Op, limit: float) -> None:
    if not has_memory:
        raise ValueError(f"{op} finds no room: activations exceed the limit of {limit:g}")
