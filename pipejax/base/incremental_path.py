"""Finish times that are kept up to date while a graph changes: only what is behind is run again.

A change gives nodes another duration, or other nodes to wait for. The nodes are kept in a
topological order; a flag for every place in it says which are to be looked at, and the next one is
found by a search for a byte, at the speed of memory. A node whose finish time comes out as it was
ends the way that led to it. Times are added up as `finish_times` adds them: every bit is the same.

An edge against the order moves few nodes: those before its tail, or those behind its head,
whichever search ends first (Pearce and Kelly: A dynamic topological sort algorithm, 2007).
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.longest_path import (
    CycleError,
    Lags,
    Preds,
    Times,
    finish_times,
)

SOURCE = 0


class Awaited(NamedTuple):
    """Predecessors that a node waits for, with lags."""

    preds: tuple[int, ...]  # nodes; the source alone where there is none
    lags: tuple[float, ...]  # delay from each


class _Before(NamedTuple):
    """State before a change, in the order of the changes."""

    finish: list[tuple[int, float]]
    duration: list[tuple[int, float]]
    waits: list[tuple[int, Awaited]]
    order: list[tuple[int, list[int]]]  # first place, and the nodes from there on


class IncrementalPath:
    """A graph with its finish times."""

    def __init__(self, preds: Preds, duration: Times, lag: Lags | None = None) -> None:
        """Run the graph once; its nodes are in topological order."""
        lags = np.zeros(preds.shape) if lag is None else lag
        # finish time of every node
        self.finish: list[float] = finish_times(preds, duration, lag).tolist()
        self.duration: list[float] = duration.tolist()  # duration of every node
        # what every node waits for
        self.waits = [
            to_waits(zip(*edges, strict=True))
            for edges in zip(preds.tolist(), lags.tolist(), strict=True)
        ]
        self._after: list[list[int]] = [[] for _ in self.finish]
        for node, waits in enumerate(self.waits):
            for before in waits.preds:
                if before != SOURCE:  # it never changes
                    self._after[before].append(node)
        self._ends = {node for node, after in enumerate(self._after) if not after}
        self._order = list(range(len(self.finish)))
        self._place = list(self._order)
        self._changes: list[_Before] = []

    @property
    def makespan(self) -> float:
        """The last end."""
        return max(map(self.finish.__getitem__, self._ends))

    def change(
        self,
        durations: Mapping[int, float] | None = None,
        waits: Mapping[int, Awaited] | None = None,
    ) -> int:
        """Give nodes other durations, or other nodes to wait for."""
        # Returns how many nodes were run again.
        before = _Before([], [], [], [])
        self._changes.append(before)
        for node, time in (durations or {}).items():
            before.duration.append((node, self.duration[node]))
            self.duration[node] = time
        if waits:
            try:
                self._connect(waits, before)
            except CycleError:
                self.undo()
                raise
        return self._run([*(durations or ()), *(waits or ())], before.finish)

    @property
    def order(self) -> Sequence[int]:
        """The nodes in a topological order."""
        return self._order

    @property
    def successors(self) -> Sequence[Sequence[int]]:
        """Return the nodes that wait for each node; waits for the source are not listed."""
        return self._after

    def undo(self) -> None:
        """Take the last change back."""
        before = self._changes.pop()
        for node, time in before.finish:
            self.finish[node] = time
        for node, time in before.duration:
            self.duration[node] = time
        for node, waits in reversed(before.waits):
            self._set_waits(node, waits)
        for first, nodes in reversed(before.order):
            self._put(first, nodes)

    def forget(self) -> None:
        """Keep all changes for good."""
        self._changes.clear()

    def _run(self, first: Iterable[int], changed: list[tuple[int, float]]) -> int:
        """Run nodes again, and all behind them whose finish time changes."""
        finish, duration, waits, after = self.finish, self.duration, self.waits, self._after
        order, place, finish_time = self._order, self._place, self.finish.__getitem__
        flags, count = bytearray(len(order)), 0
        for node in first:
            flags[place[node]] = 1
        at = flags.find(1)
        while at >= 0:
            node = order[at]
            preds, lags = waits[node]
            end = max(map(operator.add, map(finish_time, preds), lags)) + duration[node]
            count += 1
            if end != finish[node]:
                changed.append((node, finish[node]))
                finish[node] = end
                for successor in after[node]:
                    flags[place[successor]] = 1
            at = flags.find(1, at + 1)
        return count

    def _connect(self, waits: Mapping[int, Awaited], before: _Before) -> None:
        """Replace edges: first all go that are to go, then each new one comes by itself."""
        for node, new in waits.items():
            old = self.waits[node]
            before.waits.append((node, old))
            if old.preds != new.preds:
                remaining = to_waits(
                    edge for edge in zip(*old, strict=True) if edge[0] in new.preds
                )
                self._set_waits(node, remaining)
        for node, new in waits.items():
            missing = set(new.preds) - set(self.waits[node].preds)
            for edge in zip(*new, strict=True):
                if edge[0] in missing:
                    if self._place[edge[0]] > self._place[node]:
                        self._put_before(edge[0], node, before.order)
                    self._set_waits(node, to_waits((*zip(*self.waits[node], strict=True), edge)))
            self._set_waits(node, new)

    def _set_waits(self, node: int, waits: Awaited) -> None:
        if waits.preds == self.waits[node].preds:  # other lags alone
            self.waits[node] = waits
            return
        for pred in self.waits[node].preds:
            if pred != SOURCE:
                self._after[pred].remove(node)
                if not self._after[pred]:
                    self._ends.add(pred)
        self.waits[node] = waits
        for pred in waits.preds:
            if pred != SOURCE:
                self._after[pred].append(node)
                self._ends.discard(pred)

    def _put_before(self, first: int, second: int, journal: list[tuple[int, list[int]]]) -> None:
        """Change the order so that one node comes before another that has been before it."""
        place, low, high = self._place, self._place[second], self._place[first]
        back, front, to_back, to_front = {first}, {second}, [first], [second]
        while to_back and to_front:
            for node in self.waits[to_back.pop()].preds:
                if place[node] >= low and node not in back:
                    back.add(node)
                    to_back.append(node)
            for node in self._after[to_front.pop()]:
                if place[node] <= high and node not in front:
                    front.add(node)
                    to_front.append(node)
        if second in back or first in front:
            raise CycleError([first, second])
        nodes = self._order[low : high + 1]
        if to_back:  # all behind the second are known: they come after the first
            moved = [node for node in nodes if node not in front]
            moved += [node for node in nodes if node in front]
        else:
            moved = [node for node in nodes if node in back]
            moved += [node for node in nodes if node not in back]
        journal.append((low, nodes))
        self._put(low, moved)

    def _put(self, first: int, nodes: list[int]) -> None:
        self._order[first : first + len(nodes)] = nodes
        for place, node in enumerate(nodes, first):
            self._place[node] = place


def to_waits(edges: Iterable[tuple[int, float]]) -> Awaited:
    """Make what a node waits for from edges, each a node and a lag; unused ones are left out."""
    used = [edge for edge in edges if edge[0] != SOURCE or edge[1] > 0] or [(SOURCE, 0.0)]
    preds, lags = zip(*used, strict=True)
    return Awaited(preds, lags)
