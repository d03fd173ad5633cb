"""Tabu search over swaps of neighbouring transfers in a queue, with incremental evaluation.

Only a swap of two consecutive transfers on a critical path can make a schedule shorter. It makes no
cycle, because another path between both would be longer than their queue. Heads and tails estimate
its effect; after a swap, only the nodes behind it, forwards and backwards, are run again.

References:
  Taillard: Parallel taboo search techniques for the job shop scheduling problem (1994).
"""

import random
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.longest_path import CycleError, Preds, Times, finish_times, topological_order
from pipejax.search.orders.transfer_graph import Order, TransferGraph, WaitsFor, order_preds

# Finish times of a graph that changes: only nodes behind a change are computed again.
#
# A change gives nodes other predecessors. The nodes have a topological order, with a dirty flag
# for every position in it: a search for the next byte of 1 runs at the speed of memory. A node
# whose finish time does not change marks no successors. The sums are those of `finish_times`, to
# the last bit. Source: Pearce and Kelly: A dynamic topological sort algorithm (2007).

SOURCE = 0
Waits = tuple[int, ...]  # nodes that a node waits for; (SOURCE,) if there are none


class IncrementalPath:
    """A graph with the finish times of its nodes, updated incrementally when edges change."""

    def __init__(self, preds: Preds, duration: Times) -> None:
        """Compute all finish times; nodes are numbered in topological order."""
        self.finish: list[float] = finish_times(preds, duration).tolist()
        self._duration: list[float] = duration.tolist()
        self.waits = [to_waits(row) for row in preds.tolist()]
        self.successors: list[list[int]] = [[] for _ in self.finish]  # of the source none
        for node, waits in enumerate(self.waits):
            for pred in waits:
                if pred != SOURCE:  # it never changes
                    self.successors[pred].append(node)
        self.order = list(range(len(self.finish)))  # the nodes in a topological order
        self._positions = list(self.order)  # position of each node in the order

    @property
    def makespan(self) -> float:
        """Latest finish time."""
        return max(self.finish)

    def change(self, waits: Mapping[int, Waits]) -> None:
        """Replace the predecessors of nodes; if that makes a cycle, raise and change nothing."""
        old_waits = {node: self.waits[node] for node in waits}
        old_order = self.order[:], self._positions[:]
        try:
            self._connect(waits)
        except CycleError:
            for node, preds in reversed(old_waits.items()):
                self._set_waits(node, preds)
            self.order, self._positions = old_order
            raise
        self._recompute(waits)

    def _recompute(self, nodes: Iterable[int]) -> None:
        """Recompute finish times of nodes and, if they change, of their successors."""
        finish, duration, waits = self.finish, self._duration, self.waits
        order, positions, finish_time = self.order, self._positions, self.finish.__getitem__
        is_dirty = bytearray(len(order))  # flags by position in the order
        for node in nodes:
            is_dirty[positions[node]] = 1
        position = is_dirty.find(1)
        while position >= 0:
            node = order[position]
            end = max(map(finish_time, waits[node])) + duration[node]
            if end != finish[node]:
                finish[node] = end
                for successor in self.successors[node]:
                    is_dirty[positions[successor]] = 1
            position = is_dirty.find(1, position + 1)

    def _connect(self, waits: Mapping[int, Waits]) -> None:
        """Replace the predecessors of nodes: remove old edges, then add each new edge."""
        for node, preds in waits.items():
            self._set_waits(node, to_waits(pred for pred in self.waits[node] if pred in preds))
        for node, preds in waits.items():
            for new_pred in [pred for pred in preds if pred not in self.waits[node]]:
                if self._positions[new_pred] > self._positions[node]:
                    self._reorder(new_pred, node)
                self._set_waits(node, to_waits((*self.waits[node], new_pred)))
            self._set_waits(node, preds)  # the same predecessors, in the order of `waits`

    def _set_waits(self, node: int, waits: Waits) -> None:
        """Set the predecessors of a node, and update their successors."""
        if waits == self.waits[node]:
            return
        for pred in self.waits[node]:
            if pred != SOURCE:
                self.successors[pred].remove(node)
        self.waits[node] = waits
        for pred in waits:
            if pred != SOURCE:
                self.successors[pred].append(node)

    def _reorder(self, tail: int, head: int) -> None:
        """Restore the topological order for a new edge from `tail` to `head` (Pearce and Kelly)."""
        # head x tail becomes x tail head if x does not depend on head; a path back makes a cycle
        positions, low, high = self._positions, self._positions[head], self._positions[tail]
        # two searches between both positions: ancestors of the tail, descendants of the head
        ancestors, descendants = {tail}, {head}
        ancestor_stack, descendant_stack = [tail], [head]
        while ancestor_stack and descendant_stack:
            for node in self.waits[ancestor_stack.pop()]:
                if positions[node] >= low and node not in ancestors:
                    ancestors.add(node)
                    ancestor_stack.append(node)
            for node in self.successors[descendant_stack.pop()]:
                if positions[node] <= high and node not in descendants:
                    descendants.add(node)
                    descendant_stack.append(node)
        if head in ancestors or tail in descendants:
            raise CycleError([tail, head])
        nodes = self.order[low : high + 1]
        # move the set whose search ended: descendants to the end, or ancestors to the start
        last_nodes = descendants if ancestor_stack else {*nodes} - ancestors
        nodes.sort(key=lambda node: node in last_nodes)  # stable, False first
        self.order[low : high + 1] = nodes
        for position, node in enumerate(nodes, low):
            positions[node] = position


def to_waits(nodes: Iterable[int]) -> Waits:
    """Drop the source from the nodes to wait for, unless it is the only node."""
    return tuple(node for node in nodes if node != SOURCE) or (SOURCE,)


TABU_MOVES = (10, 30)  # range of moves for which two swapped transfers keep their new order


class Swap(NamedTuple):
    """Swap of two transfers, by their nodes, in all queues where the second follows the first."""

    first: int
    second: int
    queues: tuple[int, ...]


class SwapSearch:
    """State of the search: queues of transfers, and incremental runs in both directions.

    Nodes are numbered in topological order. In the backward run, node n of N has number N - n. A
    queue is two maps, `_previous` and `_next`, from a transfer to the previous and the next one,
    or the source at the ends.
    """

    def __init__(self, graph: TransferGraph, order: Order, rng: np.random.Generator) -> None:
        carrier, queues = graph.program.messages.carrier, graph.queues.T.tolist()
        # Python's generator takes a twentieth of NumPy's time for single numbers
        self._random = random.Random(int(rng.integers(2**63)))
        self.moves = 0
        preds = order_preds(graph, order)
        number = _topological_numbers(preds)  # of each node of the program
        nodes = np.argsort(number)  # the nodes of the program in topological order
        self._dependencies = WaitsFor.from_preds(number[graph.preds[nodes]])
        self._duration = graph.duration[nodes].tolist()
        self._size = len(nodes)
        self._carrier = number[carrier]
        self._transfer = {node: k for k, node in enumerate(self._carrier.tolist())}
        self._node_queues = {node: (*{*queues[k]},) for node, k in self._transfer.items()}
        self._previous: list[dict[int, int]] = [{} for _ in range(graph.num_queues)]
        self._next: list[dict[int, int]] = [{} for _ in range(graph.num_queues)]
        self._set_queues(order)
        self._forward = IncrementalPath(number[preds[nodes]], graph.duration[nodes])
        successors = self._forward.successors
        backward_preds = np.zeros((self._size, max(1, *map(len, successors))), np.int64)
        for node in range(1, self._size):
            row = [self._size - successor for successor in successors[node]]
            backward_preds[self._size - node, : len(row)] = row
        # durations of the nodes N - 1 .. 1, behind that of the source
        backward_duration = np.append(0.0, graph.duration[nodes][:0:-1])
        self._backward = IncrementalPath(backward_preds, backward_duration)
        # move after which the swapped nodes (first, second) may be swapped back
        self._tabu_end: dict[tuple[int, int], int] = {}

    @property
    def makespan(self) -> float:
        """Return the end of the last node [s]."""
        return self._forward.makespan

    @property
    def order(self) -> Order:
        """Return an order of all transfers that agrees with the order in every queue."""
        nodes = [node for node in self._forward.order if node in self._transfer]
        return np.array([self._transfer[node] for node in nodes], int)

    def _set_queues(self, order: Order) -> None:
        """Set the order of every queue from an order of all transfers."""
        last_node = [SOURCE] * len(self._previous)  # of each queue so far
        for node in self._carrier[order].tolist():
            for queue in self._node_queues[node]:
                self._previous[queue][node] = last_node[queue]
                self._next[queue][last_node[queue]] = node
                last_node[queue] = node
        for queue, node in enumerate(last_node):
            self._next[queue][node] = SOURCE

    def step(self, best: float) -> bool:
        """Make the best swap that makes no cycle; return whether such a swap exists."""
        # A swap that is tabu comes last, unless it beats the makespan `best`; ties at random.
        candidates: list[tuple[bool, float, float, Swap]] = []
        for swap in self._critical_swaps():
            estimate = self._estimate(swap)
            is_tabu = self._tabu_end.get((swap.second, swap.first), 0) > self.moves
            is_last = is_tabu and estimate >= best
            candidates.append((is_last, estimate, self._random.random(), swap))
        candidates.sort(key=lambda candidate: candidate[:3])
        return any(self._apply(swap) for *_, swap in candidates)

    def shake(self, count: int) -> None:
        """Make some random swaps of queue neighbours."""
        transfers = list(self._transfer)
        for _ in range(count if transfers else 0):
            node = self._random.choice(transfers)
            queue = self._random.choice(self._node_queues[node])
            next_node = self._next[queue][node]
            if next_node != SOURCE:
                self._apply(self._swap(node, next_node))

    def _swap(self, first: int, second: int) -> Swap:
        """Return the swap of two transfers, with the queues where the second follows the first."""
        queues = (q for q in self._node_queues[first] if self._next[q][first] == second)
        return Swap(first, second, tuple(queues))

    def _critical_swaps(self) -> list[Swap]:
        """List swaps of queue neighbours on a critical path, chosen at random among several."""
        finish, waits = self._forward.finish, self._forward.waits
        node_queues = self._node_queues
        swaps, draw = [], self._random.random
        node = finish.index(self._forward.makespan)
        while node != SOURCE:
            preds = waits[node]
            pred = preds[0]
            if len(preds) > 1:
                last_end = max(map(finish.__getitem__, preds))
                last_preds = [pred for pred in preds if finish[pred] == last_end]
                pred = last_preds[0]
                if len(last_preds) > 1:
                    pred = last_preds[int(draw() * len(last_preds))]
            if pred in node_queues and node in node_queues:
                swaps.append(self._swap(pred, node))
            node = pred if finish[pred] else SOURCE
        return swaps

    def _estimate(self, swap: Swap) -> float:
        """Estimate the longest path through either of two transfers after their swap [s]."""
        # After the swap, a path enters the second transfer (`second_head`) and leaves it directly
        # (`second_tail`) or through the first; or it enters the first (`first_head`) and leaves it
        # (`first_tail`). Comparisons in place of max() halve the time.
        first, second, queues = swap
        duration, previous, next_node = self._duration, self._previous, self._next
        # tail[-node] is the longest path from the start of a node on, 0 for the source
        head, tail = self._forward.finish, self._backward.finish
        (first_producer,), (second_producer,) = (self._dependencies.preds[k] for k in swap[:2])
        first_head, second_head = head[first_producer], head[second_producer]
        first_tail = second_tail = 0.0
        for node in self._dependencies.successors[first]:
            if tail[-node] > first_tail:
                first_tail = tail[-node]
        for node in self._dependencies.successors[second]:
            if tail[-node] > second_tail:
                second_tail = tail[-node]
        for queue in self._node_queues[second]:
            next_tail = tail[-next_node[queue][second]]
            if queue in queues:
                previous_head = head[previous[queue][first]]
                if next_tail > first_tail:
                    first_tail = next_tail
            else:
                previous_head = head[previous[queue][second]]
                if next_tail > second_tail:
                    second_tail = next_tail
            if previous_head > second_head:
                second_head = previous_head
        for queue in self._node_queues[first]:
            if queue not in queues:
                previous_head = head[previous[queue][first]]
                next_tail = tail[-next_node[queue][first]]
                if previous_head > first_head:
                    first_head = previous_head
                if next_tail > first_tail:
                    first_tail = next_tail
        first_tail += duration[first]
        through_both = second_head + duration[second] + max(first_tail, second_tail)
        return max(first_head + first_tail, through_both)

    def _apply(self, swap: Swap) -> bool:
        """Swap two transfers unless that makes a cycle; return whether they were swapped."""
        first, second, queues = swap
        changed = {first, second}
        for queue in queues:
            changed |= {self._previous[queue][first], self._next[queue][second]} - {SOURCE}
            self._swap_neighbours(first, second, queue)
        try:
            self._forward.change({n: self._waits(n) for n in changed})
            self._backward.change({self._size - n: self._waits_back(n) for n in changed})
        except CycleError:
            for queue in queues:
                self._swap_neighbours(second, first, queue)
            return False
        self.moves += 1
        self._tabu_end[first, second] = self.moves + self._random.randrange(*TABU_MOVES)
        return True

    def _swap_neighbours(self, first: int, second: int, queue: int) -> None:
        """Swap two neighbours in a queue: a, first, second, b becomes a, second, first, b."""
        previous, next_node = self._previous[queue], self._next[queue]
        a, b = previous[first], next_node[second]
        next_node[a], next_node[second], next_node[first] = second, first, b
        previous[second], previous[first], previous[b] = a, second, first

    def _waits(self, node: int) -> Waits:
        """Return a transfer's predecessors: its producer, and its predecessors in queues."""
        previous_nodes = (self._previous[queue][node] for queue in self._node_queues[node])
        return to_waits(sorted({*self._dependencies.preds[node], *previous_nodes}))

    def _waits_back(self, node: int) -> Waits:
        """Return a transfer's consumer and its successors in queues, in backward numbers."""
        next_nodes = (self._next[queue][node] for queue in self._node_queues[node])
        successors = {*self._dependencies.successors[node], *next_nodes} - {SOURCE}
        return to_waits(sorted(self._size - successor for successor in successors))


def _topological_numbers(preds: Int[NumpyArray, "nodes max_preds"]) -> Int[NumpyArray, " nodes"]:
    """Return each node's number in topological order; the source keeps 0."""
    heads, columns = np.nonzero(preds)
    order = topological_order(len(preds), preds[heads, columns], heads)
    number = np.empty(len(preds), np.int64)
    number[np.append(SOURCE, order[order != SOURCE])] = np.arange(len(preds))
    return number
