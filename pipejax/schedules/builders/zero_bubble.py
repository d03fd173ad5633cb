"""Zero-bubble schedules: backwards are split, and weight gradients fill idle time.

In ZB-H1 and ZB-H2 a worker follows a fixed pattern, whatever its ops cost: forwards of the
warm-up, then input gradient, weight gradient and forward in turn. Weight gradients lag behind
input gradients by a fixed number of microbatches, which grows with the worker: the last weight
gradients of later workers fill the time in which earlier workers end their input gradients. The
other schedules are planned for given times, under a memory limit.
"""

from collections.abc import Sequence

import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import number
from pipejax.schedules.builders.one_f_one_b import Ops, Turns, check_stages_per_worker, phase_ops
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.cells.ops import SPLIT, UNIT_SLOTS, Cell, Phase, Slots
from pipejax.schedules.cells.placement import Placement, looped
from pipejax.schedules.heuristics.memory_limited_pipe import LimitedPipe, zero_bubble_starts
from pipejax.schedules.heuristics.timeline import TimedOps, rows_from_starts
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable


def zb_h1(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """1F1B with split backwards in the memory of 1F1B; its bubble is a third of it at F = I = W."""
    # Worker r holds P - r whole activations and, of r more, what their weight gradients need.
    delays = range(num_workers)
    return _table("zb-h1", [num_workers - r for r in delays], delays, num_microbatches, slots)


def zb_h2(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """ZB-H1 with a warm-up twice as long: no bubble within a worker's span at F = I = W."""
    # Worker r holds 2 (P - r) - 1 whole activations and, of 2 r more, what their weight gradients
    # need. Steps have to overlap for its span to count: no worker may wait for all others before it
    # updates its weights.
    warmup = [2 * (num_workers - r) - 1 for r in range(num_workers)]
    delays = range(0, 2 * num_workers, 2)
    return _table("zb-h2", warmup, delays, num_microbatches, slots)


def _table(
    name: str, warmup: list[int], delays: range, microbatches: int, slots: Slots
) -> ScheduleTable:
    """Build a table of one stage per worker from each worker's warm-up and delay of W."""
    # `warmup` counts forwards, `delays` microbatches from I to W.
    rows = []
    for r, count in enumerate(warmup):
        forwards, grads, weights = (phase_ops(phase, r, range(microbatches)) for phase in SPLIT)
        rows.append(_split_row(forwards, grads, weights, count, delays[r]))
    return spread_rows(name, rows, slots)


def _split_row(forwards: Ops, grads: Ops, weights: Ops, warmup: int, delay: int) -> NumpyArray:
    """Order the ops of a worker: turn k is I number k, W number k - delay, F number k + warmup."""
    # Forwards before turn 0 are the warm-up; weight gradients after the last turn end the row.
    # With warmup 1 and delay 1: F0 | I0 F1 | I1 W0 F2 | I2 W1 | W2.
    k = np.arange(len(forwards))
    turns = np.concatenate([k, k + delay, k - warmup])
    ops = np.concatenate([grads, weights, forwards])
    return ops[np.lexsort((np.repeat(range(3), len(k)), turns))]


def interleaved_zb(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """ZB-H1 over V stages per worker, microbatches in groups of P as interleaved 1F1B has them.

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
        warmup = num_workers - r + turns.turns_before_last
        rows.append(_split_row(turns.forwards(r), grads, weights, warmup, r))
    return spread_rows("interleaved-zb", rows, slots, looped(num_workers, stages_per_worker))


def zero_bubble(
    num_workers: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Split backwards by a heuristic that fills waiting time under a memory limit.

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
    return planned("zero-bubble", pipe, zero_bubble_starts(pipe), slots)


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
    return planned("zb-1p", pipe, zero_bubble_starts(pipe), slots)


def zb_2p(
    num_workers: int,
    num_microbatches: int,
    *,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Zero-bubble heuristic in twice the memory of 1F1B; made for steps that overlap.

    Options:
      weight_share: share of an activation that W frees; I frees the rest.
      transfer: time of a message, in slots.
    """
    pipe = slot_pipe(num_workers, num_microbatches, 2 * num_workers, weight_share, transfer, slots)
    return planned("zb-2p", pipe, zero_bubble_starts(pipe), slots)


def slot_pipe(
    num_workers: int,
    num_microbatches: int,
    memory_limit: float | None,
    weight_share: float,
    transfer: float,
    slots: Slots,
) -> LimitedPipe:
    """Return a pipe of equal stages with slot durations as times; no memory limit if None."""
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


def planned(
    name: str,
    pipe: LimitedPipe,
    ops: TimedOps,
    slots: Slots,
    host_links: Sequence[Sequence[int]] = (),
) -> ScheduleTable:
    """Build the table of planned ops, with waits for offloads that keep the pipe's limits."""
    rows = rows_from_starts(
        ops,
        sizes=pipe.sizes,
        limits=pipe.limits,
        weight_share=pipe.weight_share,
        host_links=host_links,
    )
    return draw_rows(name, rows, slots, host_links)


def draw_rows(
    name: str,
    rows: Sequence[Sequence[Cell]],
    slots: Slots,
    host_links: Sequence[Sequence[int]] = (),
    placement: Placement | None = None,
) -> ScheduleTable:
    """Build a table from rows of cells, drawn with their idle slots."""
    # With shared host links the columns stay as they are, since they give the order of offloads.
    if not host_links:
        return spread_rows(name, [[op for (op,) in row] for row in rows], slots, placement)
    placement = looped(len(rows)) if placement is None else placement
    return ScheduleTable.from_rows(rows, placement=placement, name=name, slots=slots)
