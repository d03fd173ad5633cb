"""Heads and tails of transfers: a bound by the queues, and greedy orders."""

import heapq
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.longest_path import finish_times, start_times, tails
from pipejax.engine.lowering.program import SOURCE
from pipejax.search.transfers.graph import TransferGraph


class HeadsTails(NamedTuple):
    """Heads and tails of the transfers, if messages used no resource.

    Attributes:
      head: (transfers) earliest time at which its producer can have ended [s].
      tail: (transfers) least time from its end to the end of the schedule [s].
      makespan: makespan if messages used no resource [s].
    """

    head: Float[NumpyArray, " transfers"]
    tail: Float[NumpyArray, " transfers"]
    makespan: float


def heads_and_tails(graph: TransferGraph) -> HeadsTails:
    """Find the head and the tail of every transfer."""
    finish = finish_times(graph.preds, graph.duration)
    carrier = graph.program.messages.carrier
    head = start_times(graph.preds, finish)[carrier]
    return HeadsTails(head, tails(graph.preds, graph.duration)[carrier], float(finish.max()))


def queue_bound(graph: TransferGraph, times: HeadsTails) -> float:
    """Bound the makespan from below by the busiest queue.

    Each queue is a one-machine problem: its transfers one at a time, none before its head, and
    after each at least its tail. Where transfers may be interrupted its optimum is found exactly by
    always serving the longest tail (Jackson's rule), and no order can do better.

    References:
      Carlier: The one-machine sequencing problem (1982).
    """
    length = graph.duration[graph.program.messages.carrier]
    bound = times.makespan
    for queue in range(int(graph.queues.max(initial=-1)) + 1):
        members = np.flatnonzero((graph.queues == queue).any(axis=0))
        members = members[np.argsort(times.head[members], kind="stable")]
        arriving = list(
            zip(*(x[members].tolist() for x in (times.head, times.tail, length)), strict=True)
        )
        bound = max(bound, _one_queue(arriving))
    return bound


def _one_queue(arriving: list[tuple[float, float, float]]) -> float:
    """Bound of one queue [s], longest tail first; (head, tail, length) are sorted by head."""
    waiting: list[tuple[float, float]] = []  # minus the tail, what is left of the length
    now = end = 0.0
    for k, (head, tail, length) in enumerate(arriving):
        now = max(now, head)
        heapq.heappush(waiting, (-tail, length))
        until = arriving[k + 1][0] if k + 1 < len(arriving) else np.inf
        while waiting and now < until:
            longest, left = heapq.heappop(waiting)
            served = min(left, until - now)
            now += served
            if served < left:
                heapq.heappush(waiting, (longest, left - served))
            else:
                end = max(end, now - longest)
    return end


def priority_order(
    graph: TransferGraph, times: HeadsTails, urgency: float
) -> Int[NumpyArray, " transfers"]:
    """Order the transfers by running the schedule, by earliest start and tail.

    Of the transfers whose producers have ended, the one with the smallest earliest start minus
    urgency times tail is next; at a tie, the one with the longest tail.

    Returns (transfers) a legal order.
    """
    preds, duration = graph.preds.tolist(), graph.duration.tolist()
    transfer_of = {node: k for k, node in enumerate(graph.program.messages.carrier.tolist())}
    missing = (graph.preds != SOURCE).sum(axis=1).tolist()
    followers: list[list[int]] = [[] for _ in preds]
    for node, before in zip(*np.nonzero(graph.preds), strict=True):
        followers[preds[node][before]].append(int(node))
    finish = [0.0] * len(preds)
    free = [0.0] * (int(graph.queues.max(initial=-1)) + 1)
    tail = times.tail.tolist()
    one, other = graph.queues.tolist()
    ready: dict[int, float] = {}  # transfers whose producers have ended, and when

    def run(able: list[int]) -> None:
        """Run ops whose inputs are all ready, and those that this unblocks."""
        while able:
            node = able.pop()
            begin = max(finish[before] for before in preds[node])
            if node in transfer_of:
                ready[transfer_of[node]] = begin
                continue
            finish[node] = begin + duration[node]
            able += released(node)

    def released(node: int) -> list[int]:
        for after in followers[node]:
            missing[after] -= 1
        return [after for after in followers[node] if missing[after] == 0]

    def start(transfer: int) -> float:
        return max(ready[transfer], free[one[transfer]], free[other[transfer]])

    run([node for node in range(1, len(preds)) if missing[node] == 0])
    order: list[int] = []
    while ready:
        chosen = min(ready, key=lambda k: (start(k) - urgency * tail[k], -tail[k], k))
        node = int(graph.program.messages.carrier[chosen])
        finish[node] = free[one[chosen]] = free[other[chosen]] = start(chosen) + duration[node]
        del ready[chosen]
        order.append(chosen)
        run(released(node))
    return np.array(order, int)
