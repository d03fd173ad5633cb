"""When transfers are needed: a bound that the queues set, and greedy orders by need."""

import heapq
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.search.transfers.graph import TransferGraph


class Need(NamedTuple):
    """What the schedule leaves a transfer, if messages used no resource.

    Attributes:
      head: (transfers) earliest time at which its producer can have ended [s].
      tail: (transfers) least time from its end to the end of the schedule [s].
      makespan: makespan if messages used no resource [s].
    """

    head: Float[NumpyArray, " transfers"]
    tail: Float[NumpyArray, " transfers"]
    makespan: float


def needs(graph: TransferGraph) -> Need:
    """Find the head and the tail of every transfer."""
    preds, duration = graph.preds.tolist(), graph.duration.tolist()
    ready, tail = [0.0] * len(preds), [0.0] * len(preds)  # before and after each node itself
    finish = list(duration)
    for node, before in enumerate(preds):  # in topological order
        ready[node] = max(finish[u] for u in before) if node else 0.0
        finish[node] = ready[node] + duration[node]
    for node in range(len(preds) - 1, 0, -1):
        for u in preds[node]:
            tail[u] = max(tail[u], tail[node] + duration[node])
    carrier = graph.program.messages.carrier
    return Need(np.array(ready)[carrier], np.array(tail)[carrier], max(finish))


def queue_bound(graph: TransferGraph, need: Need) -> float:
    """Bound the makespan from below by the busiest queue.

    Each queue for itself: its transfers one at a time, none before its head, and after each at
    least its tail. The best that one queue can do where a transfer may be interrupted is found
    exactly, by always serving the longest tail (Jackson's rule); orders cannot do better.

    References:
      Carlier: The one-machine sequencing problem (1982).
    """
    length = graph.duration[graph.program.messages.carrier]
    bound = need.makespan
    for queue in range(int(graph.queues.max(initial=-1)) + 1):
        members = np.flatnonzero((graph.queues == queue).any(axis=0))
        members = members[np.argsort(need.head[members], kind="stable")]
        arriving = list(
            zip(*(x[members].tolist() for x in (need.head, need.tail, length)), strict=True)
        )
        bound = max(bound, _one_queue(arriving))
    return bound


def _one_queue(arriving: list[tuple[float, float, float]]) -> float:
    """Serve the longest tail first; (head, tail, length) come sorted by head."""
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


def order_by_need(
    graph: TransferGraph, need: Need, urgency: float
) -> Int[NumpyArray, " transfers"]:
    """Order the transfers by running the schedule: next comes what can start first, or matters.

    Of the transfers whose producers have ended, the one with the smallest earliest start minus
    urgency times tail is next; at a tie, the one with the longest tail.

    Returns (transfers) a legal order.
    """
    program, messages = graph.program, graph.program.messages
    rows: list[list[int]] = [[] for _ in range(program.num_workers)]
    for node in np.flatnonzero(program.worker != NO_WORKER).tolist():
        rows[program.worker[node]].append(node)
    missing = np.bincount(messages.consumer, minlength=program.num_nodes).tolist()
    sends: dict[int, list[int]] = {}
    for transfer, producer in enumerate(messages.producer.tolist()):
        sends.setdefault(producer, []).append(transfer)
    arrival = [0.0] * program.num_nodes
    clock, next_op = [0.0] * len(rows), [0] * len(rows)
    free = [0.0] * (int(graph.queues.max(initial=-1)) + 1)
    tail, duration = need.tail.tolist(), graph.duration.tolist()
    one, other = graph.queues.tolist()
    ready: dict[int, float] = {}  # transfers whose producers have ended, and when

    def run_row(worker: int) -> None:
        row = rows[worker]
        while next_op[worker] < len(row) and not missing[row[next_op[worker]]]:
            node = row[next_op[worker]]
            clock[worker] = max(clock[worker], arrival[node]) + duration[node]
            next_op[worker] += 1
            ready.update((transfer, clock[worker]) for transfer in sends.get(node, []))

    def start(transfer: int) -> float:
        return max(ready[transfer], free[one[transfer]], free[other[transfer]])

    for worker in range(len(rows)):
        run_row(worker)
    order: list[int] = []
    while ready:
        chosen = min(ready, key=lambda k: (start(k) - urgency * tail[k], -tail[k], k))
        end = start(chosen) + duration[messages.carrier[chosen]]
        del ready[chosen]
        free[one[chosen]] = free[other[chosen]] = end
        consumer = messages.consumer[chosen]
        arrival[consumer] = max(arrival[consumer], end)
        missing[consumer] -= 1
        order.append(chosen)
        run_row(int(messages.receiver[chosen]))
    return np.array(order, int)
