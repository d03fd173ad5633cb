"""Finish times of a graph that changes: only nodes behind a change are computed again.

A change gives nodes other predecessors. The nodes have a topological order, with a dirty flag for
every position in it: a search for the next byte of 1 runs at the speed of memory. A node whose
finish time does not change marks no successors. The sums are those of `finish_times`, to the last
bit.

An edge against the order moves few nodes: those before its tail, or those behind its head,
whichever search ends first (Pearce and Kelly: A dynamic topological sort algorithm, 2007).
"""

from collections.abc import Iterable, Mapping, Sequence

from pipejax.base.longest_path import CycleError, Preds, Times, finish_times

SOURCE = 0
Waits = tuple[int, ...]  # nodes that a node waits for; the source alone where there is none
Orders = list[tuple[int, list[int]]]  # of moves in the order: a position, and the nodes from there


class IncrementalPath:
    """A graph with its finish times."""

    def __init__(self, preds: Preds, duration: Times) -> None:
        """Run the graph once; its nodes are in topological order."""
        # by node: finish time, duration, predecessors
        self.finish: list[float] = finish_times(preds, duration).tolist()
        self._duration: list[float] = duration.tolist()
        self.waits = [to_waits(row) for row in preds.tolist()]
        self._successors: list[list[int]] = [[] for _ in self.finish]
        for node, waits in enumerate(self.waits):
            for before in waits:
                if before != SOURCE:  # it never changes
                    self._successors[before].append(node)
        self._ends = {node for node, after in enumerate(self._successors) if not after}
        self._order = list(range(len(self.finish)))
        self._positions = list(self._order)

    @property
    def makespan(self) -> float:
        """Latest finish time."""
        return max(map(self.finish.__getitem__, self._ends))

    @property
    def order(self) -> Sequence[int]:
        """The nodes in a topological order."""
        return self._order

    @property
    def successors(self) -> Sequence[Sequence[int]]:
        """Return the nodes that wait for each node; waits for the source are not listed."""
        return self._successors

    def change(self, waits: Mapping[int, Waits]) -> None:
        """Replace the predecessors of nodes; a CycleError leaves all as it was."""
        old_waits = {node: self.waits[node] for node in waits}
        old_orders: Orders = []
        try:
            self._connect(waits, old_orders)
        except CycleError:
            for node, old in reversed(old_waits.items()):
                self._set_waits(node, old)
            for start, nodes in reversed(old_orders):
                self._set_order(start, nodes)
            raise
        self._recompute(waits)

    def _recompute(self, nodes: Iterable[int]) -> None:
        """Recompute finish times of nodes and, if they change, of their successors."""
        finish, duration, waits = self.finish, self._duration, self.waits
        order, positions, finish_time = self._order, self._positions, self.finish.__getitem__
        is_dirty = bytearray(len(order))  # flags by position in the order
        for node in nodes:
            is_dirty[positions[node]] = 1
        position = is_dirty.find(1)
        while position >= 0:
            node = order[position]
            end = max(map(finish_time, waits[node])) + duration[node]
            if end != finish[node]:
                finish[node] = end
                for successor in self._successors[node]:
                    is_dirty[positions[successor]] = 1
            position = is_dirty.find(1, position + 1)

    def _connect(self, waits: Mapping[int, Waits], old_orders: Orders) -> None:
        """Replace the predecessors of nodes: remove old edges, then add new ones one by one."""
        for node, new in waits.items():
            self._set_waits(node, to_waits(pred for pred in self.waits[node] if pred in new))
        for node, new in waits.items():
            for pred in [pred for pred in new if pred not in self.waits[node]]:
                if self._positions[pred] > self._positions[node]:
                    self._reorder(pred, node, old_orders)
                self._set_waits(node, to_waits((*self.waits[node], pred)))
            self._set_waits(node, new)

    def _set_waits(self, node: int, waits: Waits) -> None:
        if waits == self.waits[node]:
            return
        for pred in self.waits[node]:
            if pred != SOURCE:
                self._successors[pred].remove(node)
                if not self._successors[pred]:
                    self._ends.add(pred)
        self.waits[node] = waits
        for pred in waits:
            if pred != SOURCE:
                self._successors[pred].append(node)
                self._ends.discard(pred)

    def _reorder(self, tail: int, head: int, old_orders: Orders) -> None:
        """Reorder nodes so that `tail` comes before `head`; now it comes after it."""
        positions, low, high = self._positions, self._positions[head], self._positions[tail]
        # two searches between both positions: ancestors of the tail, descendants of the head
        ancestors, descendants = {tail}, {head}
        ancestor_stack, descendant_stack = [tail], [head]
        while ancestor_stack and descendant_stack:
            for node in self.waits[ancestor_stack.pop()]:
                if positions[node] >= low and node not in ancestors:
                    ancestors.add(node)
                    ancestor_stack.append(node)
            for node in self._successors[descendant_stack.pop()]:
                if positions[node] <= high and node not in descendants:
                    descendants.add(node)
                    descendant_stack.append(node)
        if head in ancestors or tail in descendants:
            raise CycleError([tail, head])
        nodes = self._order[low : high + 1]
        # move the set whose search ended: descendants to the end, or ancestors to the start
        is_late = descendants.__contains__ if ancestor_stack else lambda node: node not in ancestors
        old_orders.append((low, nodes))
        self._set_order(low, sorted(nodes, key=is_late))  # a stable sort: False before True

    def _set_order(self, start: int, nodes: list[int]) -> None:
        """Write nodes into the order from position `start` on."""
        self._order[start : start + len(nodes)] = nodes
        for position, node in enumerate(nodes, start):
            self._positions[node] = position


def to_waits(nodes: Iterable[int]) -> Waits:
    """Drop the source from nodes to wait for, unless there is no other."""
    return tuple(node for node in nodes if node != SOURCE) or (SOURCE,)
