"""Activations that go to the host: beside a fixed schedule, or where memory is short."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor, gcd

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, number, share
from pipejax.schedules.builders.zero_bubble import draw_rows, pipe_of_slots, planned
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE, HeldOps, HeldParts
from pipejax.schedules.cells.ops import SPLIT, UNIT_SLOTS, Op, Phase, Slots
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.heuristics.memory_limited_pipe import Numbers, ada_offload_starts, per_entry
from pipejax.schedules.heuristics.timeline import (
    ROUNDING,
    Time,
    TimedOps,
    Timeline,
    Work,
    rows_from_starts,
)
from pipejax.schedules.table.host_links import known_groups
from pipejax.schedules.table.table import ScheduleTable

# Offloads beside a schedule whose compute is fixed: they use what the host link has left.
#
# This is how PipeOffload (arXiv:2503.01328) works: compute keeps its order and its times; an
# activation leaves as soon as its forward has ended and the link is free, and returns as late as
# its input gradient allows. One whose trip does not fit in between stays where it is, so at the
# times that it was planned for nothing waits for the link.


class HostLink:
    """Transfers of a host link: (start, end), in order."""

    def __init__(self) -> None:
        self.busy: list[tuple[Time, Time]] = []

    def earliest(self, after: Time, duration: Time) -> Time:
        """Start of the first gap of this length, not before a moment."""
        place = bisect_left(self.busy, (after, after))
        if place and self.busy[place - 1][1] > after:
            after = self.busy[place - 1][1]
        for start, end in self.busy[place:]:
            if after + duration <= start:
                break
            after = end
        return after

    def latest(self, before: Time, duration: Time) -> Time:
        """Start of the last gap of this length that ends by a moment."""
        place = bisect_left(self.busy, (before, before))
        for start, end in reversed(self.busy[:place]):
            if end <= before - duration:
                break
            before = min(before, start)
        return before - duration

    def hold(self, start: Time, duration: Time) -> None:
        """Transfer from a start on."""
        insort(self.busy, (start, start + duration))


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
    candidates: Iterable[tuple[int, int]],
    offload: Sequence[float],
    load: Sequence[float],
    host_links: Sequence[Sequence[int]] = (),
) -> TimedOps:
    """Add the offloads and loads that fit, the most wanted (stage, microbatch) first."""
    rows = zip(*(column.tolist() for column in ops), strict=True)
    at = {(phase, s, m): (worker, start, end) for phase, s, m, worker, start, end in rows}
    first = {worker: group[0] for group in host_links for worker in group}
    links: dict[int, HostLink] = {}
    same = ROUNDING * float(np.max(ops.end, initial=0.0))
    added = []
    for stage, microbatch in candidates:
        worker, _, forward_end = at[Phase.F, stage, microbatch]
        _, backward_start, _ = at[Phase.I, stage, microbatch]
        link = links.setdefault(first.get(worker, worker), HostLink())
        there, back = offload[stage], load[stage]
        leaves, returns = link.earliest(forward_end, there), link.latest(backward_start, back)
        if leaves + there <= returns + same:
            link.hold(leaves, there)
            link.hold(returns, back)
            added.append((Phase.O, stage, microbatch, worker, leaves, leaves + there))
            added.append((Phase.L, stage, microbatch, worker, returns, returns + back))
    transfers = TimedOps.of(added)
    return TimedOps(*map(np.concatenate, zip(ops, transfers, strict=True)))


def activation_peaks(ops: TimedOps, weight_share: float) -> Float[NumpyArray, " workers"]:
    """Most activations that each worker holds: (workers) activations."""
    stages = int(ops.stage.max(initial=-1)) + 1
    # times that differ by the rounding of sums are one moment
    tick = ROUNDING * float(np.max(ops.end, initial=0.0)) or 1.0
    start, end = (np.round(times / tick) for times in (ops.start, ops.end))
    held = HeldOps(*ops[:2], ops.worker, np.zeros(len(start), bool), start, end)
    sizes = np.outer((1.0, weight_share, 1.0), np.ones(stages))
    return HeldParts.of(held).peaks(sizes, int(ops.worker.max(initial=-1)) + 1)


def pipe_offload(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 1,
    group_size: int | None = None,
    offload_share: float = 0.5,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    offload: Numbers | None = 1.0,
    load: Numbers | None = None,
    host_links: Sequence[Sequence[int]] = (),
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B with split backwards that keeps activations on the host between forward and backward.

    A worker sends an input gradient back before the weight gradient, which follows at once, and
    runs its stages on groups of microbatches in turn. With groups of P (GIS of the source) it
    holds P V activations, with groups of half of P (GIS-H) about half of that, and idles longer;
    with groups of 1 its stages take turns evenly, so that those that keep theirs for less time add
    least to the peak. An activation leaves as soon as the host link is free and returns just in
    time; one that cannot be back in time stays.

    Options:
      stages_per_worker: V.
      group_size: microbatches of a group, from 1 to P; P if None.
      offload_share: share of a worker's activations that may go, the stages that hold theirs for
        longest first; of a stage in part every so many microbatches. 1/2 is PO-H of the source, 1
        is PO-F.
      weight_share: share of an activation that only W frees; I frees the rest.
      transfer: time of a message, in slots.
      offload: time of O, in slots, one number or one per stage; nothing goes if None.
      load: time of L, in slots, one number or one per stage; that of O if None.
      host_links: groups of workers that share a host link; the others have their own.

    Example:
      >>> tables = [pipe_offload(4, 8, offload_share=share) for share in (0, 0.5, 1)]
      >>> [int((table.phase == Phase.O).sum()) for table in tables]
      [0, 12, 24]
    """
    part = share(offload_share, "offload_share")
    kept_share = share(weight_share, "weight_share")
    group = num_workers if group_size is None else group_size
    if not 1 <= group <= num_workers:
        raise MismatchError(
            f"group_size must be from 1 to {num_workers}, the number of workers, got {group}",
            "group_size",
        )
    host_links = known_groups(host_links, num_workers)
    stages = num_workers * stages_per_worker
    size = num_workers, stages_per_worker, num_microbatches, group
    rows = [_row(worker, *size) for worker in range(num_workers)]
    placement = looped(num_workers, stages_per_worker)
    durations = {phase: [slots[phase.name]] * stages for phase in SPLIT}
    hop = number(transfer, "transfer")
    ops = run_rows(Work.of(placement, [0] * num_microbatches, durations, hop), rows)
    if offload is not None:
        there = per_entry(offload, stages, "offload").tolist()
        back = there if load is None else per_entry(load, stages, "load").tolist()
        candidates = _longest_held(num_workers, num_microbatches, stages_per_worker * part)
        ops = with_offloads(ops, candidates, there, back, host_links)
    cells = rows_from_starts(
        ops,
        sizes=np.ones(stages),
        limits=activation_peaks(ops, kept_share),
        weight_share=kept_share,
        host_links=host_links,
    )
    return draw_rows("pipe-offload", cells, slots, host_links, placement)


def _row(worker: int, workers: int, loops: int, microbatches: int, group: int) -> list[Op]:
    """F, I and W of a worker in the order of the source's building block."""
    # Every third moment of a worker is one for a forward, the next two are for an input gradient
    # and its weight gradient. A stage of the worker has one of `loops` such turns, and its
    # microbatches come in groups; half of a round trip through the pipe or more lies between two of
    # its stages. The moments give the order alone: a row has no gaps in it.
    groups = ceil(ceil(workers / 2) / group)  # that lie between two stages of a worker
    # turns of stages must not coincide: where `groups` and `loops` have a common divisor, the
    # stages that would meet again are one group later
    met = loops // gcd(loops, groups)
    shift = [group * (groups * loop + loop // met) for loop in range(loops)]
    last = loops - 1
    back = shift[last] + (workers - 1 - worker)  # turns from its first forward to its first I
    timed = []
    for m in range(microbatches):
        turn = m % group + group * loops * (m // group)
        for loop in range(loops):
            stage, mirrored = (k * workers + worker for k in (loop, last - loop))
            timed.append((turn + shift[loop], 0, Op(Phase.F, stage, m)))
            for rank, phase in ((1, Phase.I), (2, Phase.W)):
                timed.append((turn + shift[loop] + back, rank, Op(phase, mirrored, m)))
    return [op for *_, op in sorted(timed)]


def _longest_held(workers: int, microbatches: int, stages: float) -> Iterator[tuple[int, int]]:
    """(stage, microbatch) of so many stages of each worker, its first ones first."""
    for loop in range(ceil(stages)):
        part = min(1.0, stages - loop)
        for m in range(microbatches):
            if floor((m + 1) * part) > floor(m * part):
                yield from ((loop * workers + worker, m) for worker in range(workers))


def ada_offload(
    num_workers: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    offload: Numbers | None = 1.0,
    load: Numbers | None = None,
    host_links: Sequence[Sequence[int]] = (),
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Greedy schedule with split backwards that offloads activations when memory is short.

    Options:
      memory_limit: activations that a worker may hold, at least 1; no limit if None.
      weight_share: share of an activation that only W frees; I frees the rest.
      transfer: time of a message, in slots.
      offload: time of O, in slots, one number or one per stage; nothing is offloaded if None.
      load: time of L, in slots, one number or one per stage; that of O if None.
      host_links: groups of workers that share a host link; the others have their own.

    Example:
      >>> tables = [ada_offload(4, 8, memory_limit=2, offload=t) for t in (None, 0.5)]
      >>> [table.offloads for table in tables]
      [False, True]
    """
    pipe = pipe_of_slots(num_workers, num_microbatches, memory_limit, weight_share, transfer, slots)
    host_links = known_groups(host_links, num_workers)
    ops = ada_offload_starts(pipe, offload=offload, load=load, host_links=host_links)
    return planned("ada-offload", pipe, ops, slots, host_links)
