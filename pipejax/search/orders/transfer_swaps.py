"""Tabu search over swaps of neighbouring transfers in a queue.

Only a swap of two consecutive transfers on a critical path can make a schedule shorter. It makes no
cycle, because another path between both would be longer than their queue. Heads and tails estimate
its effect; after a swap, all nodes are run again, forwards and backwards.

References:
  Taillard: Parallel taboo search techniques for the job shop scheduling problem (1994).
"""

import random
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np

from pipejax.engine.lowering.program import SOURCE
from pipejax.search.orders.transfer_graph import Order, TransferGraph, WaitsFor

REST = (10, 30)  # range of moves for which two swapped transfers keep their new order


class Swap(NamedTuple):
    """Swap of two transfers, by their nodes, in all queues where the second follows the first."""

    first: int
    second: int
    queues: tuple[int, ...]


class SwapSearch:
    """State of the search: queues of transfers, and the longest paths to and from all nodes.

    A queue is two maps, `_front` and `_next`, from a transfer to the previous and the next one, or
    the source at the ends.
    """

    def __init__(self, graph: TransferGraph, order: Order, rng: np.random.Generator) -> None:
        carrier, queues = graph.program.messages.carrier.tolist(), graph.queues.T.tolist()
        # Python's generator takes a twentieth of NumPy's time for single numbers
        self._random = random.Random(int(rng.integers(2**63)))
        self.moves = 0
        self._dependencies = WaitsFor.from_preds(graph.preds)
        self._duration: list[float] = graph.duration.tolist()
        self._transfer = {node: k for k, node in enumerate(carrier)}
        self._node_queues = {node: (*{*queues[k]},) for node, k in self._transfer.items()}
        self._front: list[dict[int, int]] = [
            {} for _ in range(int(graph.queues.max(initial=-1)) + 1)
        ]
        self._next: list[dict[int, int]] = [{} for _ in self._front]
        self._line_up([carrier[k] for k in order.tolist()])
        self._waits, self._successors = [*self._dependencies.before], [*self._dependencies.after]
        self._rests: dict[tuple[int, int], int] = {}
        self._run(self._transfer)

    @property
    def makespan(self) -> float:
        """Return the end of the last node [s]."""
        return max(self._head)

    @property
    def order(self) -> Order:
        """Return the transfers in an order that gives the present queues."""
        return np.array([self._transfer[n] for n in self._nodes if n in self._transfer], int)

    def _line_up(self, order: list[int]) -> None:
        """Set the queues by an order of the transfers' nodes."""
        last = [SOURCE] * len(self._front)
        for node in order:
            for queue in self._node_queues[node]:
                self._front[queue][node], self._next[queue][last[queue]] = last[queue], node
                last[queue] = node
        for next_in_queue, node in zip(self._next, last, strict=True):
            next_in_queue[node] = SOURCE

    def _run(self, changed: Iterable[int]) -> bool:
        """Run all nodes after changes of the queues of some; return whether there is no cycle."""
        for node in changed:
            queues, graph = self._node_queues[node], self._dependencies
            fronts = {self._front[queue][node] for queue in queues}
            nexts = {self._next[queue][node] for queue in queues}
            self._waits[node] = sorted({*graph.before[node], *fronts} - {SOURCE})
            self._successors[node] = sorted({*graph.after[node], *nexts} - {SOURCE})
        # heads are ends: the longest paths to nodes, with their own durations; tails are those from
        # nodes on; a node is listed as soon as all that it waits for are
        missing, ready = [len(waits) for waits in self._waits], [0.0] * len(self._duration)
        nodes = [node for node, count in enumerate(missing) if not count and node != SOURCE]
        for node in nodes:
            end = ready[node] = ready[node] + self._duration[node]
            for successor in self._successors[node]:
                if end > ready[successor]:
                    ready[successor] = end
                missing[successor] -= 1
                if not missing[successor]:
                    nodes.append(successor)
        if len(nodes) < len(ready) - 1:
            return False
        self._nodes, self._head, self._tail = nodes, ready, [0.0] * len(ready)
        path = self._tail.__getitem__
        for node in reversed(nodes):
            longest = max(map(path, self._successors[node]), default=0.0)
            self._tail[node] = longest + self._duration[node]
        return True

    def _longest(self, paths: list[float], *nodes: Iterable[int]) -> float:
        """Return the longest of the paths of some nodes; 0 without any [s]."""
        return max(map(paths.__getitem__, chain((SOURCE,), *nodes)))

    def step(self, best: float) -> bool:
        """Make the best swap that does not rest or beats the best; return whether one exists."""
        candidates: list[tuple[bool, float, float, Swap]] = []
        for swap in self._critical_swaps():
            estimate = self._estimate(swap)
            rests = self._rests.get((swap.second, swap.first), 0) > self.moves
            candidates.append((rests and estimate >= best, estimate, self._random.random(), swap))
        candidates.sort(key=lambda candidate: candidate[:3])
        return any(self._apply(swap) for *_, swap in candidates)

    def shake(self, count: int) -> None:
        """Make some random swaps of queue neighbours."""
        transfers = list(self._transfer)
        for _ in range(count if transfers else 0):
            node = self._random.choice(transfers)
            after = self._next[self._random.choice(self._node_queues[node])][node]
            if after != SOURCE:
                self._apply(self._swap(node, after))

    def _swap(self, first: int, second: int) -> Swap:
        """Return the swap of two transfers, with the queues in which they are neighbours."""
        both = self._node_queues[second]
        queues = (
            q for q in self._node_queues[first] if q in both and self._next[q][first] == second
        )
        return Swap(first, second, tuple(queues))

    def _critical_swaps(self) -> list[Swap]:
        """List queue neighbours on a critical path, chosen at random at ties."""
        swaps: list[Swap] = []
        node = self._head.index(self.makespan)
        while waits := self._waits[node]:
            last = self._longest(self._head, waits)
            before = self._random.choice([pred for pred in waits if self._head[pred] == last])
            if before in self._transfer and node in self._transfer:
                swaps.append(self._swap(before, node))
            node = before
        return swaps

    def _estimate(self, swap: Swap) -> float:
        """Return the longest path through a swapped transfer after the swap [s]."""
        # The path enters the second (`second_head`), then the first (`first_head`), and leaves them
        # by `second_tail` or `first_tail`.
        first, second, both = swap
        front, after, graph, longest = self._front, self._next, self._dependencies, self._longest
        first_alone, second_alone = (
            [queue for queue in self._node_queues[node] if queue not in both] for node in swap[:2]
        )
        second_head = longest(
            self._head,
            graph.before[second],
            (front[queue][first] for queue in both),
            (front[queue][second] for queue in second_alone),
        )
        first_head = longest(
            self._head, graph.before[first], (front[queue][first] for queue in first_alone)
        )
        first_tail = self._duration[first] + longest(
            self._tail,
            graph.after[first],
            (after[queue][second] for queue in both),
            (after[queue][first] for queue in first_alone),
        )
        second_tail = longest(
            self._tail, graph.after[second], (after[queue][second] for queue in second_alone)
        )
        through_both = second_head + self._duration[second] + max(first_tail, second_tail)
        return max(first_head + first_tail, through_both)

    def _apply(self, swap: Swap) -> bool:
        """Swap two transfers; return whether that made no cycle."""
        first, second, queues = swap
        changed = {first, second}
        for queue in queues:
            changed |= {self._front[queue][first], self._next[queue][second]} - {SOURCE}
            self._swap_neighbours(first, second, queue)
        if not self._run(changed):
            for queue in queues:
                self._swap_neighbours(second, first, queue)
            self._run(changed)
            return False
        self.moves += 1
        self._rests[first, second] = self.moves + self._random.randrange(*REST)
        return True

    def _swap_neighbours(self, first: int, second: int, queue: int) -> None:
        """Swap two neighbours in a queue: the second, behind the first, moves before it."""
        front, next_node = self._front[queue], self._next[queue]
        before, after = front[first], next_node[second]
        next_node[before], next_node[second], next_node[first] = second, first, after
        front[second], front[first], front[after] = before, second, first
