"""Offloads beside a schedule whose compute is fixed: they use what the host link has left.

This is how PipeOffload (arXiv:2503.01328) works: compute keeps its order and its times; an
activation leaves as soon as its forward has ended and the link is free, and returns as late as its
input gradient allows. One whose trip does not fit in between stays where it is, so at the times
that it was planned for nothing waits for the link.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.schedules.cells.memory_ledger import HeldOps, HeldParts
from pipejax.schedules.cells.ops import Op, Phase
from pipejax.schedules.heuristics.list_scheduling import ROUNDING
from pipejax.schedules.heuristics.rows_from_starts import TimedOps
from pipejax.schedules.heuristics.timeline import Time, Timeline, Work


class HostLink:
    """What a host link does when: (start, end) of its transfers, in order."""

    def __init__(self) -> None:
        """Begin with an idle link."""
        self.busy: list[tuple[Time, Time]] = []

    def earliest(self, after: Time, lasts: Time) -> Time:
        """Start of the first gap of this length, not before a moment."""
        place = bisect_left(self.busy, (after, after))
        if place and self.busy[place - 1][1] > after:
            after = self.busy[place - 1][1]
        for start, end in self.busy[place:]:
            if after + lasts <= start:
                break
            after = end
        return after

    def latest(self, before: Time, lasts: Time) -> Time:
        """Start of the last gap of this length that ends by a moment."""
        place = bisect_left(self.busy, (before, before))
        for start, end in reversed(self.busy[:place]):
            if end <= before - lasts:
                break
            before = min(before, start)
        return before - lasts

    def hold(self, start: Time, lasts: Time) -> None:
        """Transfer from a start on."""
        insort(self.busy, (start, start + lasts))


def run_rows(work: Work, rows: Sequence[Sequence[Op]]) -> TimedOps:
    """Run rows of F, I and W, each op as early as it can."""
    timeline, place = Timeline(work), [0 for _ in rows]
    moved = True
    while moved:
        moved = False
        for worker, row in enumerate(rows):
            while place[worker] < len(row) and row[place[worker]] in timeline.arrival:
                op = row[place[worker]]
                timeline.start(op, max(timeline.clock[worker], timeline.arrival[op]))
                timeline.end(op)
                place[worker] += 1
                moved = True
    return TimedOps.of(timeline.log)


def with_offloads(
    ops: TimedOps,
    wanted: Iterable[tuple[int, int]],
    offload: Sequence[float],
    load: Sequence[float],
    host_links: Sequence[Sequence[int]] = (),
) -> TimedOps:
    """Add the offloads and loads that fit, the most wanted (stage, microbatch) first.

    `offload` and `load` are (stages) times; workers of a group of `host_links` share a link.
    """
    rows = zip(*(column.tolist() for column in ops), strict=True)
    at = {(phase, s, m): (worker, start, end) for phase, s, m, worker, start, end in rows}
    first = {worker: group[0] for group in host_links for worker in group}
    links: dict[int, HostLink] = {}
    same = ROUNDING * float(np.max(ops.end, initial=0.0))
    added = []
    for stage, microbatch in wanted:
        worker, _, made = at[Phase.F, stage, microbatch]
        _, needed, _ = at[Phase.I, stage, microbatch]
        link = links.setdefault(first.get(worker, worker), HostLink())
        there, back = offload[stage], load[stage]
        leaves, returns = link.earliest(made, there), link.latest(needed, back)
        if leaves + there <= returns + same:
            link.hold(leaves, there)
            link.hold(returns, back)
            added.append((Phase.O, stage, microbatch, worker, leaves, leaves + there))
            added.append((Phase.L, stage, microbatch, worker, returns, returns + back))
    of_link = TimedOps.of(added)
    return TimedOps(*map(np.concatenate, zip(ops, of_link, strict=True)))


def peaks_of(ops: TimedOps, weight_share: float) -> Float[NumpyArray, " workers"]:
    """Most activations that each worker holds: (workers) activations."""
    stages = int(ops.stage.max(initial=-1)) + 1
    # times that differ by the rounding of sums are one moment
    tick = ROUNDING * float(np.max(ops.end, initial=0.0)) or 1.0
    start, end = (np.round(times / tick) for times in (ops.start, ops.end))
    held = HeldOps(*ops[:2], ops.worker, np.zeros(len(start), bool), start, end)
    sizes = np.outer((1.0, weight_share, 1.0), np.ones(stages))
    return HeldParts.of(held).peaks(sizes, int(ops.worker.max(initial=-1)) + 1)
