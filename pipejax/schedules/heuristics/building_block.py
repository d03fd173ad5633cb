"""Building blocks: ops of one microbatch, repeated for the other microbatches at an interval.

Building blocks are the V schedules of Pipeline Parallelism with Controllable Memory
(arXiv:2405.15362). The waiting times of a microbatch decide the memory, and the interval decides
how busy workers are. The list scheduler runs the ops in the block's order, as early as possible.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pipejax.schedules.cells.ops import COMPUTE, SPLIT, Op, Phase
from pipejax.schedules.heuristics.timeline import FOREVER, ROUNDING, Time, Timeline, Work


class Waits(NamedTuple):
    """Waiting times of a microbatch on its way through the stages, without message times."""

    # A leg of the way is a run of stages without a repeated worker, and a turn is the step between
    # two legs. A V with stages 0 1 2 3 on workers 0 1 1 0 has the legs 0 1 and 2 3, and three
    # turns: F of stage 1 to F of 2, F to gradient of stage 3, gradients of stage 2 to stage 1.

    forward: Sequence[float]  # (legs) wait before each F of a leg except the first F
    gradient: Sequence[float]  # (legs) wait before each gradient of a leg except the first one
    turns: Sequence[float]  # (2 legs - 1) wait at each turn, in the order of the way


class BuildingBlock(NamedTuple):
    """Starts of one microbatch's ops in each pipe, and the start of each microbatch."""

    starts: Mapping[Phase, Sequence[Sequence[float]]]  # {phase: (pipes, stages)} after the first F
    offsets: Sequence[float]  # (microbatches) start of the first F of each microbatch

    def start(self, op: Op, pipe: int) -> float:
        """Return the start of an op."""
        phase, stage, microbatch = op
        return self.starts[phase][pipe][stage] + self.offsets[microbatch]


def number_legs(row: Sequence[int]) -> list[int]:
    """Return the leg of each stage, given each stage's worker; a repeated worker begins a leg."""
    leg, legs = 0, []
    leg_workers: set[int] = set()
    for worker in row:
        if worker in leg_workers:  # a new leg begins
            leg += 1
            leg_workers = set()
        legs.append(leg)
        leg_workers.add(worker)
    return legs


def building_block(work: Work, waits: Waits, interval: float) -> BuildingBlock:
    """Place the ops of one microbatch per pipe so that ops of later microbatches fit between."""
    # An op without a long enough gap starts when its input arrives, over other ops.
    period = interval * len(work.placement)  # between microbatches of one pipe
    busy_times: list[list[tuple[float, float]]] = [[] for _ in work.limits]  # start, duration
    starts = {phase: np.zeros_like(work.placement, float) for phase in (*SPLIT, Phase.B)}

    def place(phase: Phase, pipe: int, stage: int, earliest: float) -> float:
        """Place an op in the first gap of its worker's time; return the op's end."""
        duration = float(work.durations[phase][stage])
        other_ops = busy_times[work.placement[pipe][stage]]
        starts[phase][pipe, stage] = start = _first_gap(other_ops, earliest, duration, period)
        other_ops.append((start, duration))
        return start + duration

    for pipe in range(len(work.placement)):
        end = 0.0
        for phase, stage, wait in _microbatch_ops(work, pipe, waits):
            end = place(phase, pipe, stage, end + wait)
    if Phase.W in work.durations:
        for pipe, stage in np.ndindex(starts[Phase.F].shape):
            start = float(starts[Phase.I][pipe, stage])
            place(Phase.W, pipe, stage, start + work.durations[Phase.I][stage])
    times = {phase: rows.tolist() for phase, rows in starts.items()}
    return BuildingBlock(times, [interval * position for position in _start_positions(work)])


def _microbatch_ops(work: Work, pipe: int, waits: Waits) -> Iterator[tuple[Phase, int, float]]:
    """Yield phase, stage and time since the previous op's end, for each op of a microbatch."""
    # Stages 0 1 2 3 on workers 0 1 1 0 have the legs 0 1 and 2 3 (`Waits`), and the turns F1 to F2,
    # F3 to I3, I2 to I1. F enters leg k by turn k - 1, I by turn -1 - k: leg 0 by the last turn.
    row, last = work.placement[pipe], len(work.placement[pipe]) - 1
    legs = number_legs(row)

    def message_time(source: int, target: int) -> float:
        """Return the time of a message between two stages; 0 on the same worker."""
        direction, boundary = int(target < source), min(source, target)
        times = (kind[direction][pipe][boundary] for kind in (work.lag, work.transmit))
        return float(sum(times)) if row[source] != row[target] else 0.0

    yield Phase.F, 0, 0.0
    for stage in range(1, last + 1):
        leg = legs[stage]
        is_turn = leg != legs[stage - 1]
        wait = waits.turns[leg - 1] if is_turn else waits.forward[leg]
        yield Phase.F, stage, wait + message_time(stage - 1, stage)
    yield work.gradient, last, waits.turns[len(waits.turns) // 2]
    for stage in range(last - 1, -1, -1):
        leg = legs[stage]
        is_turn = leg != legs[stage + 1]
        wait = waits.turns[-1 - leg] if is_turn else waits.gradient[leg]
        yield work.gradient, stage, wait + message_time(stage + 1, stage)


def _first_gap(
    busy_times: Sequence[tuple[float, float]], earliest: float, duration: float, period: float
) -> float:
    """Return the first start at which an op overlaps no other op, if all repeat periodically."""
    # `busy_times` are starts and durations of these ops. Returns `earliest` if there is no gap.
    start, tolerance = earliest, ROUNDING * period
    for _ in range(2 * len(busy_times) + 2):  # each op can push the start twice at most
        if start >= earliest + period:
            break
        for other_start, other_duration in busy_times:
            since = (start - other_start) % period  # time since the last start of the other op
            if since < other_duration - tolerance:  # it still runs
                start += other_duration - since
                break
            if since + duration > period + tolerance:  # it would start before this op ends
                start += period - since + other_duration
                break
        else:
            return start
    return earliest


def _start_positions(work: Work) -> list[float]:
    """Return the start of each microbatch, in intervals after the first one; pipes alternate."""
    # microbatches of pipes 0 0 1 1 start at 0 2 1 3
    pipes, count = len(work.placement), len(work.microbatch_pipes)
    pipe_counts = np.bincount(work.microbatch_pipes, minlength=pipes).tolist()
    num_passed, positions = [0] * pipes, []
    for pipe in work.microbatch_pipes:
        positions.append((num_passed[pipe] + pipe / pipes) * count / pipe_counts[pipe])
        num_passed[pipe] += 1
    return positions


def least_interval(work: Work, block: BuildingBlock | None = None) -> float:
    """Return a lower bound on the interval between microbatches: the busiest worker's work."""
    # with a block, memory also limits the interval: activation size times lifetime, over the limit
    busy, held = (np.zeros(len(work.limits)) for _ in range(2))
    times = [work.durations[phase] for phase in COMPUTE if phase in work.durations]
    stage_times = np.sum(times, axis=0)
    pipe_sizes = np.bincount(work.microbatch_pipes, minlength=len(work.placement))
    shares = pipe_sizes / len(work.microbatch_pipes)
    for pipe, row in enumerate(work.placement):
        np.add.at(busy, row, shares[pipe] * stage_times)
        if block is not None:
            end = np.add(block.starts[work.gradient][pipe], work.durations[work.gradient])
            lifetime = end - np.array(block.starts[Phase.F][pipe])
            np.add.at(held, row, shares[pipe] * np.array(work.sizes) * lifetime)
    return float(max(busy.max(), (held / np.array(work.limits)).max()))


# The order of a repeated building block as a rule of the list scheduler.
#
# While a worker waits for its next op, it runs weight gradients, and later ops if they leave memory
# for all earlier ops of the order. So the order never gets stuck. An op that is longer than the
# wait makes the next op late. That pays if the worker would otherwise idle longest in its span,
# which decides the time between steps.


class Order(NamedTuple):
    """Order of ops, and rules by which workers may deviate from it."""

    block: BuildingBlock  # block whose repetition is the order
    delay: float  # time after its start in the block from which a weight gradient goes first
    has_weights_last: bool  # whether the last weight gradients wait until nothing else is left
    runs_ahead: bool  # whether a worker that waits takes later forwards and gradients
    prefers_weights: bool  # whether a worker that waits takes weight gradients first
    # phases that may end after the next op could start, on the worker that would idle longest
    overrun_phases: tuple[Phase, ...] = ()
    spare: Sequence[Time] = ()  # (workers) harmless idle time of each; empty if unknown


class RowOrder:
    """Rows of all workers in the order of a building block, and their progress in a run."""

    def __init__(self, work: Work, order: Order, timeline: Timeline, tolerance: Time) -> None:
        self.work, self.order, self.timeline, self.tolerance = work, order, timeline, tolerance
        self.rows, self.urgencies = block_rows(work, order.block)
        self.position = {op: k for row in self.rows for k, op in enumerate(row)}  # within its row
        self.started: set[Op] = set()
        # the lists have an entry for each worker
        self.next_position = [0 for _ in self.rows]  # position of the first op that has not started
        self.level: list[Time] = [0 for _ in self.rows]  # memory after all W that can run
        self.remaining_forwards = [sum(op.phase is Phase.F for op in row) for row in self.rows]
        # start of the first op, busy time and idle time since then
        self.first_start: list[Time | None] = [None for _ in self.rows]
        self.busy: list[Time] = [0 for _ in self.rows]
        self.idle: list[Time] = [0 for _ in self.rows]

    def urgency(self, op: Op) -> float:
        """Return the start of an op in the block; earlier ops are more urgent."""
        return self.order.block.start(op, self.work.microbatch_pipes[op.microbatch])

    def begin(self, op: Op, worker: int) -> None:
        """Record that an op starts on a worker."""
        self.busy[worker] += self._duration(op)
        if op.phase is not Phase.W:
            self.started.add(op)
            self.level[worker] += _memory_change(self.work, op)
            if op.phase is Phase.F:
                self.remaining_forwards[worker] -= 1

    def choose(self, worker: int, now: Time, ready: Iterator[Op], weight: Op | None) -> Op | None:
        """Return the op that a free worker starts: its row's next op, or an op to fill the wait."""
        # Return None to wait. `ready` are forwards and gradients whose inputs are there, `weight`
        # is the most urgent W.
        row, position = self.rows[worker], self.next_position[worker]
        while position < len(row) and row[position] in self.started:
            position += 1
        self.next_position[worker] = position
        self._update_idle(worker, now)
        if position == len(row):
            return weight
        next_op = row[position]
        if weight is not None and self._is_due(weight, worker):
            return weight
        wait = self.timeline.arrival.get(next_op, FOREVER) - now
        if wait <= self.tolerance:
            if next_op not in ready:  # ops without duration: it arrives later at this time
                return None
            return next_op if self._has_memory(next_op, worker) else weight
        # the next op is not there yet: fill the wait with a weight gradient or a later op
        overrun_phases: tuple[Phase, ...] = ()
        if self._would_idle_longest(worker, wait):
            overrun_phases = self.order.overrun_phases
        fills_wait = weight is not None and self._fits_wait(weight, wait, overrun_phases)
        if fills_wait and self.order.prefers_weights:
            return weight
        if self.order.runs_ahead:
            later_op = self._later_op(worker, ready, wait, overrun_phases)
            if later_op is not None:
                return later_op
        return weight if fills_wait else None

    def _is_due(self, weight: Op, worker: int) -> bool:
        """Return whether a weight gradient goes before the next op of the order."""
        if self.order.has_weights_last and not self.remaining_forwards[worker]:
            return False
        next_urgency = self.urgencies[worker][self.next_position[worker]]
        return self.urgency(weight) + self.order.delay < next_urgency

    def _update_idle(self, worker: int, now: Time) -> None:
        start = self.first_start[worker]
        if start is not None:
            self.idle[worker] = now - start - self.busy[worker]
        elif self.busy[worker]:  # no time has passed since the end of its first op
            self.first_start[worker] = now - self.busy[worker]

    def _would_idle_longest(self, worker: int, wait: Time) -> bool:
        """Return whether waiting would make a worker idle longer than every other worker."""
        if not self.order.overrun_phases or wait == FOREVER:
            return False
        spare = self.order.spare[worker] if self.order.spare else 0
        return wait > max(spare, *self.idle) - self.idle[worker] + self.tolerance

    def _fits_wait(self, op: Op, wait: Time, overrun_phases: tuple[Phase, ...]) -> bool:
        """Return whether an op ends within `wait`, or has a phase that may end later."""
        return op.phase in overrun_phases or self._duration(op) <= wait + self.tolerance

    def _later_op(
        self, worker: int, ready: Iterator[Op], wait: Time, overrun_phases: tuple[Phase, ...]
    ) -> Op | None:
        """Return the first ready op of the order that fits the wait and memory, or None."""
        # `wait` is the time until the worker's next op can start; of ready ops of a phase and stage
        # only that of the earliest microbatch counts
        candidates: dict[tuple[Phase, int], Op] = {}
        for op in ready:
            candidate = candidates.get((op.phase, op.stage))
            if candidate is None or op.microbatch < candidate.microbatch:
                candidates[op.phase, op.stage] = op
        for op in sorted(candidates.values(), key=self.position.__getitem__):
            if self._fits_wait(op, wait, overrun_phases) and self._leaves_memory(op, worker):
                return op
        return None

    def _leaves_memory(self, op: Op, worker: int) -> bool:
        """Return whether memory suffices for an op and then for all ops planned before it."""
        if op.phase is not Phase.F:
            return True
        if not self._has_memory(op, worker):
            return False
        level, limit = self.level[worker] + _memory_change(self.work, op), self.work.limits[worker]
        for earlier_op in self.rows[worker][self.next_position[worker] : self.position[op]]:
            if earlier_op not in self.started:
                level += _memory_change(self.work, earlier_op)
                if level > limit:
                    return False
        return True

    def _has_memory(self, op: Op, worker: int) -> bool:
        """Return whether memory suffices for an op now."""
        size = self.work.sizes[op.stage] if op.phase is Phase.F else 0
        return self.timeline.held[worker] + size <= self.work.limits[worker]

    def _duration(self, op: Op) -> Time:
        return self.work.durations[op.phase][op.stage]


def rows_keep_limits(work: Work, rows: Sequence[Sequence[Op]]) -> bool:
    """Return whether rows of F and gradients keep the memory limits; W follows its I at once."""
    for row, limit in zip(rows, work.limits, strict=True):
        levels = accumulate(_memory_change(work, op) for op in row)
        if max(levels, default=0) > limit:
            return False
    return True


def _memory_change(work: Work, op: Op) -> Time:
    """Return a forward's activation size, or the negative size for a gradient, which frees it."""
    return work.sizes[op.stage] * (1 if op.phase is Phase.F else -1)


def block_rows(work: Work, block: BuildingBlock) -> tuple[list[list[Op]], list[list[float]]]:
    """Return each worker's forwards and gradients in order of start, and these starts."""
    # Ops with equal starts are sorted by microbatch, then by their way through the pipe (F0 F1 I1
    # I0), so that no op comes before an op that it waits for.
    phases, pipe = (Phase.F, work.gradient), np.array(work.microbatch_pipes)
    block_starts = np.array([block.starts[phase] for phase in phases], float)
    start = block_starts[:, pipe] + np.array(block.offsets)[:, None]  # (2, microbatches, stages)
    phase_index, microbatch, stage = np.indices(start.shape)
    step = np.where(phase_index, -stage, stage)  # gradients go from the last stage to the first
    order = np.lexsort((step.ravel(), phase_index.ravel(), microbatch.ravel(), start.ravel()))
    worker = np.broadcast_to(np.array(work.placement)[pipe], start.shape)
    rows: list[list[Op]] = [[] for _ in work.limits]  # a limit for each worker
    row_starts: list[list[float]] = [[] for _ in work.limits]
    fields = (field.ravel()[order] for field in (phase_index, stage, microbatch, worker, start))
    for k, s, m, w, t in zip(*(field.tolist() for field in fields), strict=True):
        rows[w].append(Op(phases[k], s, m))
        row_starts[w].append(t)
    return rows, row_starts
