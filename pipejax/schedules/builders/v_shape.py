"""V schedules: two stages per worker, down the workers and up again, in a given part of the memory.

A building block says when the ops of one microbatch start; all others repeat it at the interval of
six ops that a worker has of each. How long an activation stays in the block is the memory that the
schedule takes, so slower blocks have fewer gaps and take more (arXiv:2405.15362). Offsets of the
published blocks are in ops of one length (F = I = W). Repeated, a block leaves the workers idle
while the pipe fills and empties: the list scheduler runs it again from its order, squeezed, and
reordered where the limit leaves room. Where ops do not last as long, or messages take time, the
order that follows from equal ops is one of several that are tried.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, number, share
from pipejax.base.longest_path import run_edges
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.cells.ops import SPLIT, UNIT_SLOTS, Phase, Slots
from pipejax.schedules.cells.placement import zigzag
from pipejax.schedules.heuristics.building_block import (
    BuildingBlock,
    Order,
    Waits,
    building_block,
    keeps_limits,
    least_interval,
)
from pipejax.schedules.heuristics.list_scheduling import Rules, list_schedule
from pipejax.schedules.heuristics.timeline import FOREVER, ROUNDING, TimedOps, Timeline, Work
from pipejax.schedules.table.host_links import waiting_cells
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.slot_simulation import durations, spread_rows
from pipejax.schedules.table.table import ScheduleTable

# Runs in the order of a building block that make the longest span of a worker short.
#
# A block fits ops of one length. With other times, and messages, gaps are left that no op fills
# exactly: a worker that has been idle for less than another one may wait, the others rather make an
# op late. Who may wait is known after a run, so each order is run again with what it says, as in
# the heuristic of Qi et al. (arXiv:2401.10241, 3.1), for as long as spans get shorter.

AGAIN = 3  # runs of an order, at most
FEW = 3  # microbatches per worker that tell what many take
KEPT = 4  # best orders of few microbatches, of which all are run
# until a weight gradient is due, what may be late, and whether weight gradients fill gaps first
WAYS: tuple[tuple[float, tuple[Phase, ...], bool], ...] = (
    (0.0, (Phase.W,), False),
    (FOREVER, (Phase.W,), False),
    (FOREVER, SPLIT, False),
    (FOREVER, SPLIT, True),
)


def shortest_run(work: Work, blocks: Sequence[BuildingBlock]) -> Timeline | None:
    """Return the run with the shortest span of all orders; None if none keeps the limits."""
    orders = [
        Order(block, delay, True, runs_ahead=True, prefers_weights=first, late=late)
        for block, (delay, late, first) in itertools.product(blocks, WAYS)
    ]
    few = FEW * len(work.limits)
    if len(work.pipe_of) > few + few // 2:
        small = work._replace(pipe_of=work.pipe_of[:few])
        spans = [min((span for _, span in _evened(small, o)), default=FOREVER) for o in orders]
        orders = [orders[k] for k in np.argsort(spans, kind="stable")[:KEPT]]
    best, shortest = None, FOREVER
    least = least_interval(work) * len(work.pipe_of)
    for run, span in itertools.chain.from_iterable(_evened(work, order) for order in orders):
        if span < shortest:
            best, shortest = run, span
        if span <= least:
            break
    return best


def _evened(work: Work, order: Order) -> Iterator[tuple[Timeline, float]]:
    """Yield runs of an order, and their longest spans, for as long as these get shorter."""
    block, shortest = order.block, FOREVER
    order = order._replace(block=block._replace(offsets=block.offsets[: len(work.pipe_of)]))
    for _ in range(AGAIN):
        run = list_schedule(work, Rules(order=order))
        if run is None:
            return
        idle, span = _idle_in_spans(run)
        yield run, span
        if span >= shortest:
            return
        shortest, order = span, order._replace(spare=(idle.max() - idle).tolist())


def _idle_in_spans(run: Timeline) -> tuple[Float[NumpyArray, " workers"], float]:
    """Idle time (workers) between the first op of a worker and its last, and the longest span."""
    ops = TimedOps.of(run.log)
    busy, span = np.zeros(len(run.clock)), ops.spans(len(run.clock))
    np.add.at(busy, ops.worker, ops.end - ops.start)
    return span - busy, float(span.max())


INTERVAL = 6  # F, I and W of two stages
ZB_V = Waits(forward=[3, 1], gradient=[1, 3], turns=[2, 0, 2])
DENSE_ZB_V = ZB_V._replace(turns=[0, 0, 0])  # the same way, F and I of both stages in a row


def v_half(
    num_workers: int, num_microbatches: int, *, transfer: float = 0.0, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """V schedule in half the memory of 1F1B: at F = I = W about half of its bubble.

    Forwards go down at every second op, up at every op, gradients as well: a worker holds
    P // 2 + 1 microbatches. For other times several orders are tried in this memory, that of
    F = I = W among them, and the one with the shortest span of a worker is taken.

    Options:
      num_workers: P; each holds stages w and 2 P - 1 - w.
      transfer: time of a message, in slots.

    Example:
      >>> print(v_half(2, 2))
                   0    1    2    3    4    5    6    7    8    9   10   11   12
        worker 0  0F0  0F1   .   3F0  3I0  3F1  3I1  0I0  3W0  0I1  0W0  3W1  0W1
        worker 1   .   1F0  2F0  1F1  2F1  2I0  1I0  2I1  1I1  1W0  2W0  1W1  2W1
    """
    limits = [2 * (num_workers // 2 + 1)] * num_workers
    return _planned("v-half", num_microbatches, _half(num_workers), limits, slots, transfer)


def v_min(
    num_workers: int, num_microbatches: int, *, transfer: float = 0.0, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """V schedule in a third of the memory of 1F1B: at F = I = W about two thirds of its bubble.

    A microbatch goes its way without a wait: a worker holds (P + 4) // 3 microbatches. Other times
    are planned for as in `v_half`.

    Options:
      num_workers: P; each holds stages w and 2 P - 1 - w.
      transfer: time of a message, in slots.

    Example:
      >>> print(v_min(2, 2))
                   0    1    2    3    4    5    6    7    8    9   10   11   12   13   14
        worker 0  0F0   .    .   3F0  3I0  0F1  3W0  0I0  0W0  3F1  3I1  3W1   .   0I1  0W1
        worker 1   .   1F0  2F0   .    .   2I0  1I0  1F1  2F1  1W0  2W0  2I1  1I1  1W1  2W1
    """
    limits = [2 * ((num_workers + 4) // 3)] * num_workers
    return _planned("v-min", num_microbatches, _min(num_workers), limits, slots, transfer)


def zb_v(
    num_workers: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """V schedule in the memory of 1F1B: at F = I = W no bubble within a worker's span.

    Where F, I and W last as long and messages take no time this is the published building block,
    of which a worker holds P microbatches. For other times, or another limit, building blocks are
    run in many ways, and the run with the shortest span of a worker is taken.

    Options:
      num_workers: P; each holds stages w and 2 P - 1 - w.
      memory_limit: activations of one stage that a worker may hold, at least 2; 2 P if None.
      weight_share: share of an activation that W frees; I frees the rest.
      transfer: time of a message, in slots.
    """
    numbers = number(transfer, "transfer"), share(weight_share, "weight_share")
    whole = 2.0 * num_workers
    limit = whole if memory_limit is None else number(memory_limit, "memory_limit")
    if limit * (1 + ROUNDING) < 2:
        raise MismatchError(
            f"the memory limit of a worker is {limit:g}: a microbatch on its two stages takes 2",
            "memory_limit",
        )
    if limit == whole and _is_published(slots, transfer):
        return _repeated("zb-v", num_microbatches, ZB_V, [limit] * num_workers, slots)
    unit = _work(num_microbatches, [limit] * num_workers)
    run = shortest_run(_timed(unit, slots, *numbers), _blocks(unit))
    assert run is not None  # of the blocks at least one keeps the limit
    return spread_rows("zb-v", run.rows(), slots, zigzag(num_workers))


def _blocks(work: Work) -> list[BuildingBlock]:
    """Lay published blocks; where they exceed the limit, at a longer interval than that of ops."""
    workers = len(work.limits)
    if min(work.limits) >= 2 * workers:
        return [building_block(work, waits, INTERVAL) for waits in (ZB_V, DENSE_ZB_V)]
    blocks = []
    for waits in (ZB_V, _half(workers), _min(workers)):
        laid = (building_block(work, waits, interval) for interval in itertools.count(INTERVAL))
        blocks.append(next(block for block in laid if keeps_limits(work, block)))
    return blocks


def _timed(work: Work, slots: Slots, transfer: float, weight_share: float) -> Work:
    """Let ops last as long as their slots, and messages between workers as long as one takes."""
    stages = len(work.sizes)
    times = {phase: [slots[phase.name]] * stages for phase in SPLIT}
    return Work.of(
        np.array(work.placement),
        work.pipe_of,
        times,
        transfer,
        sizes=work.sizes,
        kept=[weight_share] * stages,
        limits=[limit * (1 + ROUNDING) for limit in work.limits],
    )


def _half(workers: int) -> Waits:
    gap = 0 if workers % 2 else 3  # without it, ops of even P would meet
    return Waits(forward=[1, 0], gradient=[0, 1], turns=[1, gap, 0])


def _min(workers: int) -> Waits:
    gap = 0 if workers % 3 else 2  # without it, ops of P = 3, 6, 9, .. would meet
    return Waits(forward=[0, 0], gradient=[0, 0], turns=[0, gap, 0])


def _planned(
    name: str,
    microbatches: int,
    waits: Waits,
    limits: Sequence[float],
    slots: Slots,
    transfer: float,
) -> ScheduleTable:
    """Take the order of equal ops, or what has the shortest span of a worker at other times."""
    # Weight gradients of the published order come half an interval behind their place in the block.
    # At other times it is often better that each fills the first gap, and in tight memory that ops
    # are laid anew: of the three orders none is the best everywhere.
    transfer = number(transfer, "transfer")
    published = _repeated(name, microbatches, waits, limits, slots)
    if _is_published(slots, transfer):
        return published
    tables = [published, _repeated(name, microbatches, waits, limits, slots, delay=0)]
    unit = _work(microbatches, limits)
    run = shortest_run(_timed(unit, slots, transfer, weight_share=1.0), _blocks(unit))
    if run is not None:
        tables.append(spread_rows(name, run.rows(), slots, zigzag(len(limits))))
    return min(tables, key=lambda table: _span(table, transfer))


def _is_published(slots: Slots, transfer: float) -> bool:
    """Return whether all ops last equally long, and messages take no time."""
    return not transfer and len({slots[phase.name] for phase in SPLIT}) == 1


def _span(table: ScheduleTable, transfer: float) -> float:
    """Longest span of a worker of a table whose messages take time [slots]."""
    # A message between two workers is a node of its own behind all cells.
    tail, head = waiting_cells(table, Links())
    duration = durations(table).ravel()
    sent = np.flatnonzero(tail // table.num_slots != head // table.num_slots)
    message = duration.size + np.arange(len(sent))
    tails, heads = np.append(tail, message), np.append(head, head[sent])
    heads[sent] = message
    start, finish = run_edges(tails, heads, np.append(duration, np.full(len(sent), transfer)))
    held = table.phase.ravel() != Phase.IDLE
    ops = np.flatnonzero(held)
    worker = ops // table.num_slots
    first, last = np.full(table.num_workers, np.inf), np.zeros(table.num_workers)
    np.minimum.at(first, worker, start[ops])
    np.maximum.at(last, worker, finish[ops])
    return float((last - first).max())


def _repeated(
    name: str,
    microbatches: int,
    waits: Waits,
    limits: Sequence[float],
    slots: Slots,
    delay: float = INTERVAL / 2,
) -> ScheduleTable:
    """Repeat a block of ops that take one slot each."""
    workers = len(limits)
    work = _work(microbatches, limits)
    block = building_block(work, waits, INTERVAL)
    runs_ahead = any(any(part) for part in waits)  # of V-Min without a gap it makes ops meet later
    order = Order(block, delay, True, runs_ahead, prefers_weights=False)
    run = list_schedule(work, Rules(order=order))
    assert run is not None  # in its own limit a block can run
    return spread_rows(name, run.rows(), slots, zigzag(workers))


def _work(microbatches: int, limits: Sequence[float]) -> Work:
    """All ops on a V placement, each of one slot, without messages; W frees an activation."""
    placement = zigzag(len(limits))
    ones = [1] * placement.shape[1]
    times = dict.fromkeys(SPLIT, ones)
    return Work.of(placement, [0] * microbatches, times, sizes=ones, kept=ones, limits=limits)
