"""Finish times of a graph that changes: only nodes behind a change are computed again.

A change gives nodes another duration, or other predecessors. The nodes have a topological order,
with a dirty flag for every position in it: a search for the next byte of 1 runs at the speed of
memory. A node whose finish time does not change marks no successors. The sums are those of
`finish_times`, to the last bit.

An edge against the order moves few nodes: those before its tail, or those behind its head,
whichever search ends first (Pearce and Kelly: A dynamic topological sort algorithm, 2007).
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.longest_path import CycleError, Lags, Preds, Times, finish_times

SOURCE = 0


class Awaited(NamedTuple):
    """Predecessors that a node waits for, with lags."""

    preds: tuple[int, ...]  # nodes; the source alone where there is none
    lags: tuple[float, ...]  # delay from each


class _Journal(NamedTuple):
    """State before a change, in the order of the changes."""

    finish: list[tuple[int, float]]
    duration: list[tuple[int, float]]
    waits: list[tuple[int, Awaited]]
    order: list[tuple[int, list[int]]]  # a position, and the nodes from there on


class IncrementalPath:
    """A graph with its finish times."""

    def __init__(self, preds: Preds, duration: Times, lag: Lags | None = None) -> None:
        """Run the graph once; its nodes are in topological order."""
        lags = np.zeros(preds.shape) if lag is None else lag
        # by node: finish time, duration, predecessors with their lags
        self.finish: list[float] = finish_times(preds, duration, lag).tolist()
        self.duration: list[float] = duration.tolist()
        self.waits = [
            to_waits(zip(*edges, strict=True))
            for edges in zip(preds.tolist(), lags.tolist(), strict=True)
        ]
        self._successors: list[list[int]] = [[] for _ in self.finish]
        for node, waits in enumerate(self.waits):
            for before in waits.preds:
                if before != SOURCE:  # it never changes
                    self._successors[before].append(node)
        self._ends = {node for node, after in enumerate(self._successors) if not after}
        self._order = list(range(len(self.finish)))
        self._positions = list(self._order)
        self._changes: list[_Journal] = []

    @property
    def makespan(self) -> float:
        """Latest finish time."""
        return max(map(self.finish.__getitem__, self._ends))

    def change(
        self,
        durations: Mapping[int, float] | None = None,
        waits: Mapping[int, Awaited] | None = None,
    ) -> int:
        """Replace durations and predecessors of nodes; return how many nodes were recomputed."""
        journal = _Journal([], [], [], [])
        self._changes.append(journal)
        for node, time in (durations or {}).items():
            journal.duration.append((node, self.duration[node]))
            self.duration[node] = time
        if waits:
            try:
                self._connect(waits, journal)
            except CycleError:
                self.undo()
                raise
        return self._recompute([*(durations or ()), *(waits or ())], journal.finish)

    @property
    def order(self) -> Sequence[int]:
        """The nodes in a topological order."""
        return self._order

    @property
    def successors(self) -> Sequence[Sequence[int]]:
        """Return the nodes that wait for each node; waits for the source are not listed."""
        return self._successors

    def undo(self) -> None:
        """Undo the last change."""
        journal = self._changes.pop()
        for node, time in journal.finish:
            self.finish[node] = time
        for node, time in journal.duration:
            self.duration[node] = time
        for node, waits in reversed(journal.waits):
            self._set_waits(node, waits)
        for start, nodes in reversed(journal.order):
            self._set_order(start, nodes)

    def forget(self) -> None:
        """Keep all changes for good."""
        self._changes.clear()

    def _recompute(self, nodes: Iterable[int], journal: list[tuple[int, float]]) -> int:
        """Recompute finish times of nodes and, if they change, of their successors.

        Append each node with its former finish time to the journal; return how many were computed.
        """
        finish, duration, waits = self.finish, self.duration, self.waits
        order, positions, finish_time = self._order, self._positions, self.finish.__getitem__
        is_dirty, count = bytearray(len(order)), 0  # flags by position in the order
        for node in nodes:
            is_dirty[positions[node]] = 1
        position = is_dirty.find(1)
        while position >= 0:
            node = order[position]
            preds, lags = waits[node]
            end = max(map(operator.add, map(finish_time, preds), lags)) + duration[node]
            count += 1
            if end != finish[node]:
                journal.append((node, finish[node]))
                finish[node] = end
                for successor in self._successors[node]:
                    is_dirty[positions[successor]] = 1
            position = is_dirty.find(1, position + 1)
        return count

    def _connect(self, waits: Mapping[int, Awaited], journal: _Journal) -> None:
        """Replace the predecessors of nodes: remove old edges, then add new ones one by one."""
        for node, new in waits.items():
            old = self.waits[node]
            journal.waits.append((node, old))
            if old.preds != new.preds:
                remaining = to_waits(
                    edge for edge in zip(*old, strict=True) if edge[0] in new.preds
                )
                self._set_waits(node, remaining)
        for node, new in waits.items():
            missing = set(new.preds) - set(self.waits[node].preds)
            for edge in zip(*new, strict=True):
                if edge[0] in missing:
                    if self._positions[edge[0]] > self._positions[node]:
                        self._reorder(edge[0], node, journal.order)
                    self._set_waits(node, to_waits((*zip(*self.waits[node], strict=True), edge)))
            self._set_waits(node, new)

    def _set_waits(self, node: int, waits: Awaited) -> None:
        if waits.preds == self.waits[node].preds:  # other lags alone
            self.waits[node] = waits
            return
        for pred in self.waits[node].preds:
            if pred != SOURCE:
                self._successors[pred].remove(node)
                if not self._successors[pred]:
                    self._ends.add(pred)
        self.waits[node] = waits
        for pred in waits.preds:
            if pred != SOURCE:
                self._successors[pred].append(node)
                self._ends.discard(pred)

    def _reorder(self, tail: int, head: int, journal: list[tuple[int, list[int]]]) -> None:
        """Reorder nodes so that `tail` comes before `head`; now it comes after it."""
        positions, low, high = self._positions, self._positions[head], self._positions[tail]
        # two searches between both positions: ancestors of the tail, descendants of the head
        ancestors, descendants = {tail}, {head}
        ancestor_stack, descendant_stack = [tail], [head]
        while ancestor_stack and descendant_stack:
            for node in self.waits[ancestor_stack.pop()].preds:
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
        journal.append((low, nodes))
        self._set_order(low, sorted(nodes, key=is_late))  # a stable sort: False before True

    def _set_order(self, start: int, nodes: list[int]) -> None:
        """Write nodes into the order from position `start` on."""
        self._order[start : start + len(nodes)] = nodes
        for position, node in enumerate(nodes, start):
            self._positions[node] = position


def to_waits(edges: Iterable[tuple[int, float]]) -> Awaited:
    """Collect edges into a node, each a predecessor and a lag; drop unused ones."""
    used = [edge for edge in edges if edge[0] != SOURCE or edge[1] > 0] or [(SOURCE, 0.0)]
    preds, lags = zip(*used, strict=True)
    return Awaited(preds, lags)
