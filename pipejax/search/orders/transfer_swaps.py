"""Tabu search over swaps of neighbouring transfers in a queue, evaluated by what they change.

Only a swap of two transfers that follow each other on a critical path can make a schedule shorter,
and it makes no cycle: another way between the two would be longer than their queue. What it leads
to is estimated from heads and tails, which are kept up to date, forwards and backwards, behind the
nodes that a swap changes alone.

References:
  Taillard: Parallel taboo search techniques for the job shop scheduling problem (1994).
"""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.incremental_path import SOURCE, Awaited, IncrementalPath
from pipejax.base.longest_path import CycleError, topological_order
from pipejax.search.orders.transfer_graph import Order, TransferGraph, queue_preds

RESTS = (10, 30)  # moves for which two transfers that were swapped keep their new order


class Swap(NamedTuple):
    """Two transfers that change places, by their nodes, and the queues in which they do.

    Attributes:
      first: transfer in front.
      second: the one behind it.
      queues: where the second follows the first at once.
    """

    first: int
    second: int
    queues: tuple[int, ...]


class SwapSearch:
    """Queues of transfers that change by swaps.

    Attributes:
      moves: swaps so far.
    """

    def __init__(self, graph: TransferGraph, order: Order, rng: np.random.Generator) -> None:
        """Begin with an order."""
        self._graph, self._rng = graph, rng
        self.moves = 0
        self.begin(order)

    def begin(self, order: Order) -> None:
        """Go on from another order, with nothing at rest."""
        graph, carrier = self._graph, self._graph.program.messages.carrier
        preds = graph.preds.copy()
        preds[carrier, 1:3] = queue_preds(graph, order[None])[0]
        # nodes are numbered along a topological order from here on, and against it behind
        number = _numbers(preds)
        nodes = np.argsort(number)
        own = graph.preds.copy()
        own[carrier, 1:3] = SOURCE
        self._own_preds, self._own_after = _neighbours(number[own[nodes]])
        self._duration = graph.duration[nodes].tolist()
        self._size = len(nodes)
        self._transfer = {node: k for k, node in enumerate(number[carrier].tolist())}
        queues = graph.queues.T.tolist()
        self._queues_of = {node: (*{*queues[k]},) for node, k in self._transfer.items()}
        self._queues: list[list[int]] = [[] for _ in range(int(graph.queues.max(initial=-1)) + 1)]
        for node in number[carrier[order]].tolist():
            for queue in self._queues_of[node]:
                self._queues[queue].append(node)
        self._place = [{node: k for k, node in enumerate(queue)} for queue in self._queues]
        self._ahead = IncrementalPath(number[preds[nodes]], graph.duration[nodes])
        after = [[self._size - n for n in behind] for behind in self._ahead.behind]
        back = np.zeros((self._size, max(1, *map(len, after))), np.int64)
        for node in range(1, self._size):
            back[self._size - node, : len(after[node])] = after[node]
        self._behind = IncrementalPath(back, np.append(0.0, graph.duration[nodes][:0:-1]))
        self._rests: dict[tuple[int, int], int] = {}
        self.makespan = self._ahead.makespan

    @property
    def order(self) -> Order:
        """The transfers in an order that gives these queues."""
        return np.array([self._transfer[n] for n in self._ahead.order if n in self._transfer], int)

    def step(self, best: float) -> bool:
        """Make the swap with the smallest estimate that does not rest, or would be a new best.

        Returns whether there was one.
        """
        found: list[tuple[bool, float, float, Swap]] = []
        for swap in self._critical_swaps():
            estimate = self._estimate(swap)
            rests = self._rests.get((swap.second, swap.first), 0) > self.moves
            found.append((rests and estimate >= best, estimate, self._rng.random(), swap))
        found.sort(key=lambda each: each[:3])
        return any(self._apply(swap) for *_, swap in found)

    def _head(self, node: int) -> float:
        """When a node ends [s]."""
        return self._ahead.finish[node]

    def _tail(self, node: int) -> float:
        """Longest path from the start of a node to the end [s]; 0 for none."""
        return self._behind.finish[self._size - node] if node != SOURCE else 0.0

    def _around(self, node: int, queue: int) -> tuple[int, int]:
        """The transfers in front of one and behind it in a queue; the source for none."""
        members, place = self._queues[queue], self._place[queue][node]
        before = members[place - 1] if place else SOURCE
        return before, members[place + 1] if place + 1 < len(members) else SOURCE

    def _critical_swaps(self) -> list[Swap]:
        """List neighbours in a queue that follow each other on a critical path, drawn at ties."""
        path, swaps = self._ahead, []
        node = path.finish.index(path.makespan)
        while node != SOURCE:
            preds = path.waits[node].preds
            last = max(path.finish[before] for before in preds)
            waited = [before for before in preds if path.finish[before] == last]
            before = waited[int(self._rng.integers(len(waited)))] if len(waited) > 1 else waited[0]
            if before in self._transfer and node in self._transfer:
                both = {*self._queues_of[before]} & {*self._queues_of[node]}
                queues = tuple(q for q in sorted(both) if self._around(before, q)[1] == node)
                swaps.append(Swap(before, node, queues))
            node = before if last else SOURCE
        return swaps

    def _estimate(self, swap: Swap) -> float:
        """Longest path through one of the two after the swap, if nothing else changed [s]."""
        first, second, queues = swap
        duration = self._duration
        begin = max((self._head(n) for n in self._own_preds[second]), default=0.0)
        late = max((self._head(n) for n in self._own_preds[first]), default=0.0)
        rest = max((self._tail(n) for n in self._own_after[first]), default=0.0)
        left = max((self._tail(n) for n in self._own_after[second]), default=0.0)
        for queue in self._queues_of[second]:
            before, behind = self._around(second, queue)
            if queue in queues:
                begin = max(begin, self._head(self._around(first, queue)[0]))
                rest = max(rest, self._tail(behind))
            else:
                begin = max(begin, self._head(before))
                left = max(left, self._tail(behind))
        for queue in self._queues_of[first]:
            if queue not in queues:
                before, behind = self._around(first, queue)
                late = max(late, self._head(before))
                rest = max(rest, self._tail(behind))
        tail = duration[first] + rest
        return float(max(late + tail, begin + duration[second] + max(tail, left)))

    def _apply(self, swap: Swap) -> bool:
        """Swap two transfers; return whether that made no cycle."""
        first, second, queues = swap
        self._turn(first, second, queues)
        touched = {first, second}
        for queue in queues:
            touched |= {
                n for n in (self._around(second, queue)[0], self._around(first, queue)[1]) if n
            }
        try:
            self._ahead.change(waits={n: self._waits(n) for n in touched})
        except CycleError:
            self._turn(second, first, queues)
            return False
        self._behind.change(waits={self._size - n: self._waits_back(n) for n in touched})
        self._ahead.forget()
        self._behind.forget()
        self.moves += 1
        self._rests[first, second] = self.moves + int(self._rng.integers(*RESTS))
        self.makespan = self._ahead.makespan
        return True

    def _turn(self, first: int, second: int, queues: tuple[int, ...]) -> None:
        for queue in queues:
            place = self._place[queue][first]
            self._queues[queue][place : place + 2] = [second, first]
            self._place[queue][second], self._place[queue][first] = place, place + 1

    def _waits(self, node: int) -> Awaited:
        """What a transfer waits for: its producer, and those in front of it."""
        fronts = (self._around(node, queue)[0] for queue in self._queues_of[node])
        before = {*self._own_preds[node], *fronts} - {SOURCE}
        return _awaited(before)

    def _waits_back(self, node: int) -> Awaited:
        """The same from behind: its consumer, and those behind it."""
        behind = (self._around(node, queue)[1] for queue in self._queues_of[node])
        after = {*self._own_after[node], *behind} - {SOURCE}
        return _awaited({self._size - one for one in after})


def _awaited(nodes: set[int]) -> Awaited:
    found = sorted(nodes) or [SOURCE]
    return Awaited(tuple(found), (0.0,) * len(found))


def _numbers(preds: Int[NumpyArray, "nodes max_preds"]) -> Int[NumpyArray, " nodes"]:
    """Number nodes (nodes) along a topological order; the source keeps its number."""
    head, which = np.nonzero(preds)
    order = np.array(topological_order(len(preds), preds[head, which], head))
    number = np.empty(len(preds), np.int64)
    number[np.append(SOURCE, order[order != SOURCE])] = np.arange(len(preds))
    return number


def _neighbours(
    preds: Int[NumpyArray, "nodes max_preds"],
) -> tuple[list[list[int]], list[list[int]]]:
    """List the nodes before and behind each node, but for the source."""
    before = [[*({*row} - {SOURCE})] for row in preds.tolist()]
    after: list[list[int]] = [[] for _ in before]
    for node, waited in enumerate(before):
        for one in waited:
            after[one].append(node)
    return before, after
