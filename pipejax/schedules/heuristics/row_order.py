"""The order of a repeated building block as a rule of the list scheduler.

A worker runs forwards and gradients in the order of the block. While it waits for the next one it
fills the time with weight gradients, and with later ops that leave room for all that come before
them in the order: so the order never gets stuck, however far a worker runs ahead of it. What is
longer than the wait makes the next op late; that pays where the worker would else be the one that
is idle longest in its span, which decides how often steps come.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pipejax.schedules.cells.ops import Op, Phase
from pipejax.schedules.heuristics.building_block import BuildingBlock
from pipejax.schedules.heuristics.timeline import FOREVER, Time, Timeline, Work


class Order(NamedTuple):
    """An order of ops, and how closely workers follow it.

    Attributes:
      block: repeated, the order.
      delay: time after its place in the order at which a weight gradient comes before others.
      is_delayed_at_end: whether the last weight gradients wait until nothing else is left.
      runs_ahead: whether a worker that waits takes later forwards and gradients.
      prefers_weights: whether it takes weight gradients first.
      late: phases of ops that may make the next one late, where waiting for that would make the
        worker the one that has been idle longest.
      spare: (workers) how long each may be idle anyway, of which another run says that it does
        no harm; empty if none.
    """

    block: BuildingBlock
    delay: float
    is_delayed_at_end: bool
    runs_ahead: bool
    prefers_weights: bool
    late: tuple[Phase, ...] = ()
    spare: Sequence[Time] = ()


class RowOrder:
    """The rows of all workers, and how far they are."""

    def __init__(self, work: Work, order: Order, timeline: Timeline, same: Time) -> None:
        """Lay out the rows; times closer than `same` are one moment."""
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
        """Whether the rows keep the limits where every weight gradient follows its I."""
        return _keep_limits(self.rows, self.work)

    def urgency(self, op: Op) -> float:
        """Return the place of an op in the order: the least is the most urgent."""
        return self.order.block.start(op, self.work.pipe_of[op.microbatch])

    def begin(self, op: Op, worker: int) -> None:
        """Take note of an op that starts."""
        self.busy[worker] += self._lasts(op)
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
        """Whether no other worker has been idle for as long as this one if it waits."""
        if not self.order.late or wait == FOREVER:
            return False
        spare = self.order.spare[worker] if self.order.spare else 0
        return wait > max(spare, *self.idle) - self.idle[worker] + self.same

    def _ends_in(self, op: Op, wait: Time, late: tuple[Phase, ...]) -> bool:
        return op.phase in late or self._lasts(op) <= wait + self.same

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
        """Whether an op fits, and so do all those before it in the order when it has run."""
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

    def _lasts(self, op: Op) -> Time:
        return self.work.lasts[op.phase][op.stage]


def keeps_limits(work: Work, block: BuildingBlock) -> bool:
    """Whether a block can run in its order: its rows keep the limits if W follows every I."""
    return _keep_limits(_rows(work, block)[0], work)


def _keep_limits(rows: list[list[Op]], work: Work) -> bool:
    levels = (accumulate(_takes(work, op) for op in row) for row in rows)
    return all(max(own, default=0) <= most for own, most in zip(levels, work.limits, strict=True))


def _takes(work: Work, op: Op) -> Time:
    return work.sizes[op.stage] * (1 if op.phase is Phase.F else -1)


def _rows(work: Work, block: BuildingBlock) -> tuple[list[list[Op]], list[list[float]]]:
    """Order the forwards and gradients of every worker as the repeated block has them.

    What starts at one time is put in order of the microbatch and of its way, so that no op comes
    before one that it waits for, over all workers. Returns the rows, and when their ops start.
    """
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
