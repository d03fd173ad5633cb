"""Zero-bubble schedules, and schedules that offload activations to the host."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor, gcd

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, number, share
from pipejax.schedules.builders.one_f_one_b import Ops, Turns, check_stages_per_worker, phase_ops
from pipejax.schedules.builders.published import PLANNED, ZERO_BUBBLE, published
from pipejax.schedules.cells.cells import looped
from pipejax.schedules.cells.ops import SPLIT, UNIT_SLOTS, Op, Phase, Slots
from pipejax.schedules.heuristics.memory_limited_pipe import (
    LimitedPipe,
    Numbers,
    ada_offload_starts,
    as_vector,
    zero_bubble_starts,
)
from pipejax.schedules.heuristics.timeline import Time, TimedOps, Work, rows_from_starts, run_rows
from pipejax.schedules.table.held_activations import WEIGHT_SHARE, MemoryChanges, MemoryOps
from pipejax.schedules.table.slot_simulation import check_host_groups, table_from_ops
from pipejax.schedules.table.table import ScheduleTable

# Zero-bubble schedules: backwards are split, and weight gradients fill idle time.
#
# In ZB-H1 and ZB-H2 the order is fixed, whatever the times of ops. On later
# workers, W lags more microbatches behind I, and fills the time in which earlier workers still run
# I. The other schedules are planned for given times, under a memory limit.


@published("zb-h1", ZERO_BUBBLE)
def zb_h1(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """1F1B with split backwards in the same memory; at F = I = W, a third of 1F1B's bubble."""
    # Worker r holds P - r whole activations, and of r more activations the share for W.
    warmup = [num_workers - r for r in range(num_workers)]
    return _zero_bubble_table("zb-h1", warmup, range(num_workers), num_microbatches, slots)


@published("zb-h2", ZERO_BUBBLE)
def zb_h2(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """ZB-H1 with a warm-up twice as long: no bubble within a worker's span at F = I = W."""
    # Worker r holds 2 (P - r) - 1 whole activations, and of 2 r more activations the share for W.
    # Its span counts only if steps overlap: no worker may wait for all others before its update.
    warmup = [2 * (num_workers - r) - 1 for r in range(num_workers)]
    delays = range(0, 2 * num_workers, 2)
    return _zero_bubble_table("zb-h2", warmup, delays, num_microbatches, slots)


def _zero_bubble_table(
    name: str, warmup: list[int], delays: range, microbatches: int, slots: Slots
) -> ScheduleTable:
    """Build a table from each worker's warm-up forwards and its delay of W [microbatches]."""
    rows = []
    for r, count in enumerate(warmup):
        forwards, grads, weights = (phase_ops(phase, r, range(microbatches)) for phase in SPLIT)
        rows.append(_split_row(forwards, grads, weights, count, delays[r]))
    return table_from_ops(name, rows, slots)


def _split_row(
    forwards: Ops, grads: Ops, weights: Ops, warmup: int, delay: int
) -> Int[NumpyArray, "all_ops 3"]:
    """Order a worker's ops: turn k has I of microbatch k, W of k - delay, F of k + warmup."""
    # With warmup 1 and delay 1: F0 | I0 F1 | I1 W0 F2 | I2 W1 | W2, where bars separate turns.
    k = np.arange(len(forwards))
    turns = np.concatenate([k, k + delay, k - warmup])
    ops = np.concatenate([grads, weights, forwards])
    return ops[np.lexsort((np.repeat(range(3), len(k)), turns))]


@published("interleaved-zb", f"PyTorch, after {ZERO_BUBBLE}")
def interleaved_zb(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """ZB-H1 over V stages per worker, microbatches in groups of P as in interleaved 1F1B.

    This is PyTorch's `ScheduleInterleavedZeroBubble`, which exists if all groups have one size.
    Otherwise sizes are nearly equal, as in `interleaved-1f1b`.

    Options:
      stages_per_worker: V, at least 2.
    """
    check_stages_per_worker("interleaved-zb", stages_per_worker, "zb-h1")
    turns = Turns.from_sizes(num_workers, num_microbatches, stages_per_worker)
    rows = []
    for r in range(num_workers):
        grads, weights = (turns.backwards(phase, r) for phase in (Phase.I, Phase.W))
        warmup = num_workers - r + turns.turns_before_last_stage
        rows.append(_split_row(turns.forwards(r), grads, weights, warmup, r))
    return table_from_ops("interleaved-zb", rows, slots, looped(num_workers, stages_per_worker))


@published("zero-bubble", ZERO_BUBBLE, planned=True, bytes_per_op=PLANNED)
def zero_bubble(
    num_workers: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Heuristic with split backwards, which fills waiting time under a memory limit.

    Options:
      memory_limit: activations that a worker may hold, at least 1; no limit if None.
      weight_share: share of an activation that W frees; I frees the rest.
      transfer: time of a message, in slots.

    Example:
      >>> print(zero_bubble(2, 3, memory_limit=2))
                   0    1    2    3    4    5    6    7    8    9
        worker 0  0F0  0F1   .   0I0  0W0  0F2  0I1  0W1  0I2  0W2
        worker 1   .   1F0  1I0  1F1  1I1  1W0  1F2  1I2  1W1  1W2
    """
    pipe = slot_pipe(num_workers, num_microbatches, memory_limit, weight_share, transfer, slots)
    ops = zero_bubble_starts(pipe)
    return _planned_table("zero-bubble", ops, pipe.limits, weight_share, slots)


@published("zb-1p", ZERO_BUBBLE, planned=True, bytes_per_op=PLANNED)
def zb_1p(
    num_workers: int,
    num_microbatches: int,
    *,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Zero-bubble heuristic in the memory of 1F1B: P activations on every worker.

    Options:
      weight_share: share of an activation that W frees; I frees the rest.
      transfer: time of a message, in slots.
    """
    pipe = slot_pipe(num_workers, num_microbatches, num_workers, weight_share, transfer, slots)
    return _planned_table("zb-1p", zero_bubble_starts(pipe), pipe.limits, weight_share, slots)


@published("zb-2p", ZERO_BUBBLE, planned=True, bytes_per_op=PLANNED)
def zb_2p(
    num_workers: int,
    num_microbatches: int,
    *,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Zero-bubble heuristic in twice the memory of 1F1B, for runs whose next step starts early.

    Options:
      weight_share: share of an activation that W frees; I frees the rest.
      transfer: time of a message, in slots.
    """
    pipe = slot_pipe(num_workers, num_microbatches, 2 * num_workers, weight_share, transfer, slots)
    return _planned_table("zb-2p", zero_bubble_starts(pipe), pipe.limits, weight_share, slots)


def slot_pipe(
    num_workers: int,
    num_microbatches: int,
    memory_limit: float | None,
    weight_share: float,
    transfer: float,
    slots: Slots,
) -> LimitedPipe:
    """Return a pipe of equal stages with slot durations as times; a limit of None is no limit."""
    limit = num_microbatches if memory_limit is None else number(memory_limit, "memory_limit")
    return LimitedPipe.from_numbers(
        num_workers,
        num_microbatches,
        forward=slots["F"],
        input_grad=slots["I"],
        weight_grad=slots["W"],
        limits=limit,
        there=number(transfer, "transfer"),
        weight_share=weight_share,
    )


def _planned_table(
    name: str,
    ops: TimedOps,
    limits: Float[NumpyArray, " workers"],
    weight_share: float,
    slots: Slots,
    host_links: Sequence[Sequence[int]] = (),
    stages_per_worker: int = 1,
) -> ScheduleTable:
    """Build the table of ops with start times, which keeps memory limits at any op times."""
    placement = looped(len(limits), stages_per_worker)
    sizes = np.ones(placement.size)
    rows = rows_from_starts(
        ops, sizes=sizes, limits=limits, weight_share=weight_share, host_links=host_links
    )
    # the columns of a table are the order of offloads on shared host links: keep these columns
    if host_links:
        return ScheduleTable.from_rows(rows, placement=placement, name=name, slots=slots)
    return table_from_ops(name, [[op for (op,) in row] for row in rows], slots, placement)


# Offloads beside a schedule of fixed compute, as in PipeOffload (arXiv:2503.01328): at the planned
# times, nothing waits for the host link.


Interval = tuple[Time, Time]  # start and end


def _first_free(busy: Sequence[Interval], after: Time, duration: Time) -> Interval:
    """Return the first free interval of a duration, not before `after`; `busy` is sorted."""
    index, start = bisect_left(busy, (after, after)), after
    if index:
        start = max(after, busy[index - 1][1])
    for busy_start, busy_end in busy[index:]:
        if start + duration <= busy_start:
            break
        start = busy_end
    return start, start + duration


def _last_free(busy: Sequence[Interval], before: Time, duration: Time) -> Interval:
    """Return the last free interval of a duration that ends by `before`; `busy` is sorted."""
    end = before
    for busy_start, busy_end in reversed(busy[: bisect_left(busy, (before, before))]):
        if busy_end <= end - duration:
            break
        end = min(end, busy_start)
    start = end - duration
    return start, start + duration


def _with_offloads(
    ops: TimedOps,
    candidates: Iterable[tuple[int, int]],
    offload: Sequence[float],
    load: Sequence[float],
    host_links: Sequence[Sequence[int]] = (),
) -> TimedOps:
    """Add an offload and a load of each candidate (stage, microbatch) if its host link has time."""
    # The first candidates are preferred; `offload` and `load` are times by stage.
    rows = zip(*(column.tolist() for column in ops), strict=True)
    times = {(phase, s, m): (worker, start, end) for phase, s, m, worker, start, end in rows}
    first_sharers = {worker: group[0] for group in host_links for worker in group}
    busy_intervals: dict[int, list[Interval]] = {}  # by the first worker that shares the link
    tolerance, transfer_rows = ops.tolerance, []
    for stage, microbatch in candidates:
        worker, _, forward_end = times[Phase.F, stage, microbatch]
        _, backward_start, _ = times[Phase.I, stage, microbatch]
        busy = busy_intervals.setdefault(first_sharers.get(worker, worker), [])
        offload_time = _first_free(busy, forward_end, offload[stage])
        load_time = _last_free(busy, backward_start, load[stage])
        if offload_time[1] <= load_time[0] + tolerance:
            for phase, interval in ((Phase.O, offload_time), (Phase.L, load_time)):
                insort(busy, interval)
                transfer_rows.append((phase, stage, microbatch, worker, *interval))
    transfers = TimedOps.from_tuples(transfer_rows)
    return TimedOps(*map(np.concatenate, zip(ops, transfers, strict=True)))


def _activation_peaks(ops: TimedOps, weight_share: float) -> Float[NumpyArray, " workers"]:
    """Return the largest number of activations that each worker holds at once."""
    stages = int(ops.stage.max(initial=-1)) + 1
    tick = ops.tolerance or 1.0  # sums with different rounding errors become equal
    start, end = (np.round(times / tick) for times in (ops.start, ops.end))
    is_recomputed = np.zeros(len(start), bool)
    held = MemoryOps(ops.phase, ops.stage, ops.worker, is_recomputed, start, end)
    # sizes of an activation's parts: the whole, the share for W, and the checkpoint (unused)
    sizes = np.outer((1.0, weight_share, 1.0), np.ones(stages))
    return MemoryChanges.from_ops(held).peaks(sizes, int(ops.worker.max(initial=-1)) + 1)


@published(
    "pipe-offload", "Wan et al., PipeOffload (arXiv:2503.01328)", planned=True, bytes_per_op=PLANNED
)
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
    host_links = check_host_groups(host_links, num_workers)
    stages = num_workers * stages_per_worker
    rows = [
        _pipe_offload_row(worker, num_workers, stages_per_worker, num_microbatches, group)
        for worker in range(num_workers)
    ]
    placement = looped(num_workers, stages_per_worker)
    durations = {phase: [slots[phase.name]] * stages for phase in SPLIT}
    message = number(transfer, "transfer")
    work = Work.from_placement(placement, [0] * num_microbatches, durations, message)
    ops = run_rows(work, rows)
    if offload is not None:
        offload_times = as_vector(offload, stages, "offload").tolist()
        load_times = offload_times if load is None else as_vector(load, stages, "load").tolist()
        offloaded_stages = stages_per_worker * offloaded_share  # on each worker; may be 1.5
        candidates = _offload_candidates(num_workers, num_microbatches, offloaded_stages)
        ops = _with_offloads(ops, candidates, offload_times, load_times, host_links)
    limits = _activation_peaks(ops, weight_share)
    return _planned_table(
        "pipe-offload", ops, limits, weight_share, slots, host_links, stages_per_worker
    )


def _pipe_offload_row(
    worker: int, workers: int, loops: int, microbatches: int, group: int
) -> list[Op]:
    """Return a worker's F, I and W in the order of the published building block."""
    # A turn is a forward, an input gradient and its weight gradient. The `loops` stages of a worker
    # take turns on groups of `group` microbatches; its next stage comes at least half a round trip
    # through the pipe later. Turns give the order alone: a row has no gaps.
    groups_between = ceil(ceil(workers / 2) / group)  # from one stage of a worker to its next
    # No turn may serve two stages. Stages that are `period` apart would share turns, because
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
    """Yield (stage, microbatch) of candidates on the first `num_stages` stages of each worker."""
    # Of 1.5 stages, the second stage yields every other microbatch.
    for loop in range(ceil(num_stages)):
        part = min(1.0, num_stages - loop)
        for m in range(microbatches):
            if floor((m + 1) * part) > floor(m * part):
                yield from ((loop * workers + worker, m) for worker in range(workers))


@published(
    "ada-offload", "Li et al., OptPipe (arXiv:2510.05186)", planned=True, bytes_per_op=PLANNED
)
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
    host_links = check_host_groups(host_links, num_workers)
    ops = ada_offload_starts(pipe, offload=offload, load=load, host_links=host_links)
    return _planned_table("ada-offload", ops, pipe.limits, weight_share, slots, host_links)
