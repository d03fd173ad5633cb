"""Building blocks: the ops of one microbatch, which all others repeat at an interval.

Pipeline Parallelism with Controllable Memory (arXiv:2405.15362) makes its V schedules of them. How
long a microbatch waits on its way says how many are under way at once, that is how much memory they
take; the interval says how busy the workers are. What is used of a repeated block is its order: the
list scheduler runs it as early as times and memory allow (`RowOrder`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pipejax.schedules.cells.ops import COMPUTE, SPLIT, Op, Phase
from pipejax.schedules.heuristics.timeline import FOREVER, ROUNDING, Time, Timeline, Work


class Waits(NamedTuple):
    """Waiting times of a microbatch on its way, messages aside."""

    # A leg of the way is a run of stages on which no worker comes twice: a V placement has two.

    forward: Sequence[float]  # (legs) before each F of a leg but its first
    gradient: Sequence[float]  # (legs) before each gradient of a leg but its first
    turns: Sequence[float]  # (2 legs - 1) between legs: forth, before the first gradient, back


class BuildingBlock(NamedTuple):
    """The ops of one microbatch of each pipe, and when they come again."""

    starts: Mapping[Phase, Sequence[Sequence[float]]]  # by phase, (pipes, stages) after the first F
    offsets: Sequence[float]  # (microbatches) of the first F of each

    def start(self, op: Op, pipe: int) -> float:
        """Return when an op starts."""
        phase, stage, microbatch = op
        return self.starts[phase][pipe][stage] + self.offsets[microbatch]


def number_legs(row: Sequence[int]) -> list[int]:
    """Number the leg of the way that each stage is on: (stages), from 0."""
    legs: list[int] = []
    seen: set[int] = set()
    for worker in row:
        if worker in seen:
            seen = set()
        legs.append(legs[-1] + (not seen) if legs else 0)
        seen.add(worker)
    return legs


def building_block(work: Work, waits: Waits, interval: float) -> BuildingBlock:
    """Lay the ops of a microbatch along its way, where repetitions leave their workers free."""
    # Where nothing is free for long enough, an op stays where its input arrives: the list scheduler
    # puts in order what overlaps.
    period = interval * len(work.placement)
    busy_times: list[list[tuple[float, float]]] = [[] for _ in work.limits]
    starts = {phase: np.zeros_like(work.placement, float) for phase in (*SPLIT, Phase.B)}

    def put(phase: Phase, pipe: int, stage: int, earliest: float) -> float:
        duration, others = float(work.lasts[phase][stage]), busy_times[work.placement[pipe][stage]]
        starts[phase][pipe, stage] = start = _first_free(others, earliest, duration, period)
        others.append((start, duration))
        return start + duration

    for pipe in range(len(work.placement)):
        now = 0.0
        for phase, stage, wait in _way(work, pipe, waits):
            now = put(phase, pipe, stage, now + wait)
    for pipe, stage in np.ndindex(starts[Phase.F].shape) if Phase.W in work.lasts else ():
        put(Phase.W, pipe, stage, float(starts[Phase.I][pipe, stage]) + work.lasts[Phase.I][stage])
    times = {phase: rows.tolist() for phase, rows in starts.items()}
    return BuildingBlock(times, [interval * turn for turn in _turns(work)])


def _way(work: Work, pipe: int, waits: Waits) -> Iterator[tuple[Phase, int, float]]:
    """Yield phase and stage along the way of a microbatch, and the time from the op before."""
    row, last = work.placement[pipe], len(work.placement[pipe]) - 1
    legs = number_legs(row)

    def hop(stage: int, to: int) -> float:
        where = int(to < stage), min(stage, to)
        message = (kind[where[0]][pipe][where[1]] for kind in (work.lag, work.transmit))
        return float(sum(message)) if row[stage] != row[to] else 0.0

    yield Phase.F, 0, 0.0
    for stage in range(1, last + 1):
        leg = legs[stage]
        turns = leg != legs[stage - 1]
        wait = waits.turns[leg - 1] if turns else waits.forward[leg]
        yield Phase.F, stage, wait + hop(stage - 1, stage)
    yield work.gradient, last, waits.turns[len(waits.turns) // 2]
    for stage in range(last - 1, -1, -1):
        leg = legs[stage]
        turns = leg != legs[stage + 1]
        wait = waits.turns[-1 - leg] if turns else waits.gradient[leg]
        yield work.gradient, stage, wait + hop(stage + 1, stage)


def _first_free(
    busy_times: Sequence[tuple[float, float]], start: float, duration: float, period: float
) -> float:
    """Return the first time from the start on at which no repetition of another op is met."""
    now, same = start, ROUNDING * period
    for _ in range(2 * len(busy_times) + 2):  # each is met twice at most, whatever is rounded
        if now >= start + period:
            break
        for place, length in busy_times:
            since = (now - place) % period  # the last repetition of the other began
            if since < length - same:
                now += length - since
                break
            if since + duration > period + same:
                now += period - since + length
                break
        else:
            return now
    return start


def _turns(work: Work) -> list[float]:
    """Number the microbatches (microbatches) so that those of several pipes take turns."""
    pipes, count = len(work.placement), len(work.pipe_of)
    pipe_counts = np.bincount(work.pipe_of, minlength=pipes).tolist()
    passed, turns = [0] * pipes, []
    for pipe in work.pipe_of:
        turns.append((passed[pipe] + pipe / pipes) * count / pipe_counts[pipe])
        passed[pipe] += 1
    return turns


def least_interval(work: Work, block: BuildingBlock | None = None) -> float:
    """Return how often microbatches may come for the work of all, and for a block's memory."""
    busy, held = (np.zeros(len(work.limits)) for _ in range(2))
    stage_times = np.sum([work.lasts[phase] for phase in COMPUTE if phase in work.lasts], axis=0)
    shares = np.bincount(work.pipe_of, minlength=len(work.placement)) / len(work.pipe_of)
    for pipe, row in enumerate(work.placement):
        np.add.at(busy, row, shares[pipe] * stage_times)
        if block is not None:
            end = np.add(block.starts[work.gradient][pipe], work.lasts[work.gradient])
            stays = end - np.array(block.starts[Phase.F][pipe])
            np.add.at(held, row, shares[pipe] * np.array(work.sizes) * stays)
    return float(max(busy.max(), (held / np.array(work.limits)).max()))


# The order of a repeated building block as a rule of the list scheduler.
#
# A worker runs forwards and gradients in the order of the block. While it waits for the next one it
# fills the time with weight gradients, and with later ops that leave room for all that come before
# them in the order: so the order never gets stuck, however far a worker runs ahead of it. What is
# longer than the wait makes the next op late; that pays where the worker would else be the one that
# is idle longest in its span, which decides how often steps come.


class Order(NamedTuple):
    """An order of ops, and how closely workers follow it."""

    block: BuildingBlock  # repeated, the order
    delay: float  # time after its place in the order at which a weight gradient comes before others
    is_delayed_at_end: bool  # whether the last weight gradients wait until nothing else is left
    runs_ahead: bool  # whether a worker that waits takes later forwards and gradients
    prefers_weights: bool  # whether it takes weight gradients first
    # phases that may make the next op late, so that no worker idles longest
    late: tuple[Phase, ...] = ()
    spare: Sequence[Time] = ()  # (workers) harmless idle time of each; empty if unknown


class RowOrder:
    """The rows of all workers, and how far they are."""

    def __init__(self, work: Work, order: Order, timeline: Timeline, same: Time) -> None:
        self.work, self.order, self.timeline, self.same = work, order, timeline, same
        self.rows, self.urgencies = _rows(work, order.block)
        self.place = {op: k for row in self.rows for k, op in enumerate(row)}
        self.at = [0 for _ in self.rows]
        # of a worker: what is held when all weight gradients that can run have run
        self.level: list[Time] = [0 for _ in self.rows]
        self.forwards = [sum(op.phase is Phase.F for op in row) for row in self.rows]
        self.begun: set[Op] = set()
        # of a worker: when its first op began, what it has run, and how long it has been idle
        self.first: list[Time | None] = [None for _ in self.rows]
        self.busy: list[Time] = [0 for _ in self.rows]
        self.idle: list[Time] = [0 for _ in self.rows]

    @property
    def fits(self) -> bool:
        """Return whether the rows keep the limits if every weight gradient follows its I."""
        return _keep_limits(self.rows, self.work)

    def urgency(self, op: Op) -> float:
        """Return the place of an op in the order: the least is the most urgent."""
        return self.order.block.start(op, self.work.pipe_of[op.microbatch])

    def begin(self, op: Op, worker: int) -> None:
        """Take note of an op that starts."""
        self.busy[worker] += self._duration(op)
        if op.phase is not Phase.W:
            self.begun.add(op)
            self.level[worker] += _takes(self.work, op)
            self.forwards[worker] -= op.phase is Phase.F

    def choose(self, worker: int, now: Time, ready: Iterator[Op], weight: Op | None) -> Op | None:
        """Return what a free worker starts, of ready ops and its most urgent weight gradient."""
        row, at = self.rows[worker], self.at[worker]
        while at < len(row) and row[at] in self.begun:
            at += 1
        self.at[worker] = at
        self._count_idle(worker, now)
        if at == len(row):
            return weight
        after = row[at]
        if weight is not None and self._is_due(weight, worker):
            return weight
        wait = self.timeline.arrival.get(after, FOREVER) - now
        if wait <= self.same:
            if after not in ready:  # ops of no length: it arrives in this moment, but later
                return None
            return after if self._fits(after, worker) else weight
        late = self.order.late if self._would_be_longest(worker, wait) else ()
        fills = weight is not None and self._ends_in(weight, wait, late)
        if fills and self.order.prefers_weights:
            return weight
        ahead = self._ahead(worker, ready, wait, late) if self.order.runs_ahead else None
        return weight if ahead is None and fills else ahead

    def _is_due(self, weight: Op, worker: int) -> bool:
        if self.order.is_delayed_at_end and not self.forwards[worker]:
            return False
        return self.urgency(weight) + self.order.delay < self.urgencies[worker][self.at[worker]]

    def _count_idle(self, worker: int, now: Time) -> None:
        first = self.first[worker]
        if first is not None:
            self.idle[worker] = now - first - self.busy[worker]
        elif self.busy[worker]:
            self.first[worker] = now - self.busy[worker]  # it never waits before it is asked

    def _would_be_longest(self, worker: int, wait: Time) -> bool:
        """Return whether no other worker has idled as long as this one if it waits."""
        if not self.order.late or wait == FOREVER:
            return False
        spare = self.order.spare[worker] if self.order.spare else 0
        return wait > max(spare, *self.idle) - self.idle[worker] + self.same

    def _ends_in(self, op: Op, wait: Time, late: tuple[Phase, ...]) -> bool:
        return op.phase in late or self._duration(op) <= wait + self.same

    def _ahead(
        self, worker: int, ready: Iterator[Op], wait: Time, late: tuple[Phase, ...]
    ) -> Op | None:
        """Return the first op in the order that ends before the next one arrives, if it may run."""
        firsts: dict[tuple[Phase, int], Op] = {}
        for op in ready:
            first = firsts.setdefault(op[:2], op)
            if op.microbatch < first.microbatch:
                firsts[op[:2]] = op
        for op in sorted(firsts.values(), key=self.place.__getitem__):
            if self._ends_in(op, wait, late) and self._leaves_room(op, worker):
                return op
        return None

    def _leaves_room(self, op: Op, worker: int) -> bool:
        """Return whether an op fits, and after it all ops that precede it in the order."""
        if op.phase is not Phase.F:
            return True
        if not self._fits(op, worker):
            return False
        level, limit = self.level[worker] + _takes(self.work, op), self.work.limits[worker]
        for k in range(self.at[worker], self.place[op]):
            other = self.rows[worker][k]
            if other not in self.begun:
                level += _takes(self.work, other)
                if level > limit:
                    return False
        return True

    def _fits(self, op: Op, worker: int) -> bool:
        takes = self.work.sizes[op.stage] if op.phase is Phase.F else 0
        return self.timeline.held[worker] + takes <= self.work.limits[worker]

    def _duration(self, op: Op) -> Time:
        return self.work.lasts[op.phase][op.stage]


def keeps_limits(work: Work, block: BuildingBlock) -> bool:
    """Return whether the rows of a block keep the limits if W follows every I."""
    return _keep_limits(_rows(work, block)[0], work)


def _keep_limits(rows: list[list[Op]], work: Work) -> bool:
    levels = (accumulate(_takes(work, op) for op in row) for row in rows)
    return all(
        max(row_levels, default=0) <= limit
        for row_levels, limit in zip(levels, work.limits, strict=True)
    )


def _takes(work: Work, op: Op) -> Time:
    return work.sizes[op.stage] * (1 if op.phase is Phase.F else -1)


def _rows(work: Work, block: BuildingBlock) -> tuple[list[list[Op]], list[list[float]]]:
    """Order the forwards and gradients of every worker as the repeated block has them."""
    # What starts at one time is put in order of the microbatch and of its way, so that no op comes
    # before one that it waits for, over all workers. Returns the rows, and when their ops start.
    phases, pipe = (Phase.F, work.gradient), np.array(work.pipe_of)
    starts = np.array([block.starts[phase] for phase in phases], float)
    urgency = starts[:, pipe] + np.array(block.offsets)[:, None]  # (phases, microbatches, stages)
    which, microbatch, stage = np.indices(urgency.shape)
    on_way = np.where(which, -stage, stage)  # within a phase
    order = np.lexsort((on_way.ravel(), which.ravel(), microbatch.ravel(), urgency.ravel()))
    worker = np.broadcast_to(np.array(work.placement)[pipe], urgency.shape)
    rows: list[list[Op]] = [[] for _ in work.limits]
    urgencies: list[list[float]] = [[] for _ in work.limits]
    columns = (column.ravel()[order] for column in (which, stage, microbatch, worker, urgency))
    for k, s, m, w, u in zip(*(column.tolist() for column in columns), strict=True):
        rows[w].append(Op(phases[k], s, m))
        urgencies[w].append(u)
    return rows, urgencies
