"""Runs in the order of a building block that make the longest span of a worker short.

A block fits ops of one length. With other times, and messages, gaps are left that no op fills
exactly: a worker that has been idle for less than another one may wait, the others rather make an
op late. Who may wait is known after a run, so each order is run again with what it says, as in the
heuristic of Qi et al. (arXiv:2401.10241, 3.1), for as long as spans get shorter.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.schedules.cells.ops import SPLIT, Phase
from pipejax.schedules.heuristics.building_block import BuildingBlock, least_interval
from pipejax.schedules.heuristics.list_scheduling import Rules, list_schedule
from pipejax.schedules.heuristics.row_order import Order
from pipejax.schedules.heuristics.rows_from_starts import TimedOps
from pipejax.schedules.heuristics.timeline import FOREVER, Timeline, Work

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
    first, busy = np.full(len(run.clock), FOREVER), np.zeros(len(run.clock))
    np.minimum.at(first, ops.worker, ops.start)
    np.add.at(busy, ops.worker, ops.end - ops.start)
    span = np.array(run.clock, float) - first
    return span - busy, float(span.max())
