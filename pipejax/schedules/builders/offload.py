"""Schedules that offload activations to the host: beside fixed compute, or if memory is short."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor, gcd

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, number, share
from pipejax.schedules.builders.zero_bubble import draw_rows, planned, slot_pipe
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

# Offloads beside a schedule of fixed compute, as in PipeOffload (arXiv:2503.01328). Compute keeps
# its order and its times. An activation leaves when its forward has ended and the link is free, and
# returns as late as its input gradient allows. If its trip does not fit in between, it stays: at
# the planned times, nothing waits for the link.


class HostLink:
    """Transfers of a host link: (start, end), in order."""

    def __init__(self) -> None:
        self.busy: list[tuple[Time, Time]] = []

    def earliest(self, after: Time, duration: Time) -> Time:
        """Return the start of the first free interval of some duration, not before a time."""
        index = bisect_left(self.busy, (after, after))
        if index and self.busy[index - 1][1] > after:
            after = self.busy[index - 1][1]
        for start, end in self.busy[index:]:
            if after + duration <= start:
                break
            after = end
        return after

    def latest(self, before: Time, duration: Time) -> Time:
        """Return the start of the last free interval of some duration that ends by a time."""
        index = bisect_left(self.busy, (before, before))
        for start, end in reversed(self.busy[:index]):
            if end <= before - duration:
                break
            before = min(before, start)
        return before - duration

    def occupy(self, start: Time, duration: Time) -> None:
        """Add a transfer that starts at a time."""
        insort(self.busy, (start, start + duration))


def run_rows(work: Work, rows: Sequence[Sequence[Op]]) -> TimedOps:
    """Run rows of F, I and W, each op as early as its input and its worker allow."""
    timeline, next_index = Timeline(work), [0 for _ in rows]
    has_progress = True
    while has_progress:
        has_progress = False
        for worker, row in enumerate(rows):
            while next_index[worker] < len(row) and row[next_index[worker]] in timeline.arrival:
                op = row[next_index[worker]]
                timeline.start(op, max(timeline.clock[worker], timeline.arrival[op]))
                timeline.end(op)
                next_index[worker] += 1
                has_progress = True
    return TimedOps.from_tuples(timeline.log)


def with_offloads(
    ops: TimedOps,
    candidates: Iterable[tuple[int, int]],
    offload: Sequence[float],
    load: Sequence[float],
    host_links: Sequence[Sequence[int]] = (),
) -> TimedOps:
    """Add an offload and a load of each candidate (stage, microbatch) that fits on its host link.

    Args:
      ops: planned F, I and W.
      candidates: activations, the first ones preferred.
      offload: (stages) time of O.
      load: (stages) time of L.
      host_links: groups of workers that share a host link.
    """
    rows = zip(*(column.tolist() for column in ops), strict=True)
    times = {(phase, s, m): (worker, start, end) for phase, s, m, worker, start, end in rows}
    first_sharers = {worker: group[0] for group in host_links for worker in group}
    links: dict[int, HostLink] = {}
    tolerance = ROUNDING * float(np.max(ops.end, initial=0.0))
    transfer_rows = []
    for stage, microbatch in candidates:
        worker, _, forward_end = times[Phase.F, stage, microbatch]
        _, backward_start, _ = times[Phase.I, stage, microbatch]
        link = links.setdefault(first_sharers.get(worker, worker), HostLink())
        start_offload = link.earliest(forward_end, offload[stage])
        start_load = link.latest(backward_start, load[stage])
        end_offload, end_load = start_offload + offload[stage], start_load + load[stage]
        if end_offload <= start_load + tolerance:
            link.occupy(start_offload, offload[stage])
            link.occupy(start_load, load[stage])
            transfer_rows += [
                (Phase.O, stage, microbatch, worker, start_offload, end_offload),
                (Phase.L, stage, microbatch, worker, start_load, end_load),
            ]
    transfers = TimedOps.from_tuples(transfer_rows)
    return TimedOps(*map(np.concatenate, zip(ops, transfers, strict=True)))


def activation_peaks(ops: TimedOps, weight_share: float) -> Float[NumpyArray, " workers"]:
    """Return the largest number of activations that each worker holds: (workers)."""
    stages = int(ops.stage.max(initial=-1)) + 1
    # round times, so that sums with different rounding errors are equal
    tick = ROUNDING * float(np.max(ops.end, initial=0.0)) or 1.0
    start, end = (np.round(times / tick) for times in (ops.start, ops.end))
    held = HeldOps(*ops[:2], ops.worker, np.zeros(len(start), bool), start, end)
    sizes = np.outer((1.0, weight_share, 1.0), np.ones(stages))
    return HeldParts.from_ops(held).peaks(sizes, int(ops.worker.max(initial=-1)) + 1)


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
    holds P V activations, with groups of half of P (GIS-H) about half as many, and idles longer.
    With groups of 1 its stages alternate evenly, so that stages with short-lived activations add
    least to the peak. An activation leaves as soon as the host link is free and returns just in
    time; it stays if it cannot be back in time.

    Options:
      stages_per_worker: V.
      group_size: microbatches of a group, from 1 to P; P if None.
      offload_share: share of a worker's activations that may go, the stages that hold theirs for
        longest first; a part of a stage is spread over its microbatches. 1/2 is PO-H of the
        source, 1 is PO-F.
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
    offloaded_share = share(offload_share, "offload_share")
    weight_share = share(weight_share, "weight_share")
    group = num_workers if group_size is None else group_size
    if not 1 <= group <= num_workers:
        raise MismatchError(
            f"group_size must be from 1 to {num_workers}, the number of workers, got {group}",
            "group_size",
        )
    host_links = known_groups(host_links, num_workers)
    stages = num_workers * stages_per_worker
    rows = [
        _row(worker, num_workers, stages_per_worker, num_microbatches, group)
        for worker in range(num_workers)
    ]
    placement = looped(num_workers, stages_per_worker)
    durations = {phase: [slots[phase.name]] * stages for phase in SPLIT}
    message = number(transfer, "transfer")
    work = Work.from_placement(placement, [0] * num_microbatches, durations, message)
    ops = run_rows(work, rows)
    if offload is not None:
        offload_times = per_entry(offload, stages, "offload").tolist()
        load_times = offload_times if load is None else per_entry(load, stages, "load").tolist()
        num_stages = stages_per_worker * offloaded_share
        candidates = _offload_candidates(num_workers, num_microbatches, num_stages)
        ops = with_offloads(ops, candidates, offload_times, load_times, host_links)
    cells = rows_from_starts(
        ops,
        sizes=np.ones(stages),
        limits=activation_peaks(ops, weight_share),
        weight_share=weight_share,
        host_links=host_links,
    )
    return draw_rows("pipe-offload", cells, slots, host_links, placement)


def _row(worker: int, workers: int, loops: int, microbatches: int, group: int) -> list[Op]:
    """Return F, I and W of a worker in the order of the source's building block."""
    # `loops` counts its stages, `group` the microbatches of a group.
    # A turn is a forward, an input gradient and its weight gradient. The `loops` stages of a worker
    # take turns, group by group of microbatches; its next stage comes at least half a round trip
    # through the pipe later. Turns give the order alone: a row has no gaps.
    groups_between = ceil(ceil(workers / 2) / group)  # from one stage of a worker to its next
    # No turn may serve two stages. Every `period` stages their turns would coincide, because
    # `groups_between` and `loops` have a common divisor: shift later stages by one group.
    period = loops // gcd(loops, groups_between)
    shift = [group * (groups_between * loop + loop // period) for loop in range(loops)]
    last = loops - 1
    round_trip = shift[last] + (workers - 1 - worker)  # turns from its first F to its first I
    keys = []  # turn, rank within the turn, op
    for m in range(microbatches):
        first_turn = m % group + group * loops * (m // group)
        for loop in range(loops):
            turn = first_turn + shift[loop]
            stage, mirrored = (k * workers + worker for k in (loop, last - loop))
            keys.append((turn, 0, Op(Phase.F, stage, m)))
            keys.append((turn + round_trip, 1, Op(Phase.I, mirrored, m)))
            keys.append((turn + round_trip, 2, Op(Phase.W, mirrored, m)))
    return [op for *_, op in sorted(keys)]


def _offload_candidates(
    workers: int, microbatches: int, num_stages: float
) -> Iterator[tuple[int, int]]:
    """Yield (stage, microbatch) on the first `num_stages` stages of each worker."""
    # Of 1.5 stages, the second stage yields every other microbatch.
    for loop in range(ceil(num_stages)):
        part = min(1.0, num_stages - loop)
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
    pipe = slot_pipe(num_workers, num_microbatches, memory_limit, weight_share, transfer, slots)
    host_links = known_groups(host_links, num_workers)
    ops = ada_offload_starts(pipe, offload=offload, load=load, host_links=host_links)
    return planned("ada-offload", pipe, ops, slots, host_links)
