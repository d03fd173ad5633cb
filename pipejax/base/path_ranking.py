"""The longest, the next longest, and so on: paths of a graph in the order of their lengths.

A path leads along edges from the source to one of the nodes where paths may end. The k-th path to
a node is the (j + 1)-th path to one of its predecessors and one edge, where the j-th has been used
already: so paths are found one by one, and only where they differ (Jimenez and Marzal: Computing
the K shortest paths, 1999). Lengths are added up from the source as the recurrence adds them, and
additions of floats are monotone: what comes out is what sorting all paths by that sum would give.

Paths may be of a kind, a number that adds up along the path; then only the longest of every kind
is listed. Two paths to a node that differ in kind still do so behind it, whatever follows.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.longest_path import Lags, Preds, Times, finish_times

SOURCE = 0


class Kinds(NamedTuple):
    """Share of nodes and edges in the kind of a path."""

    nodes: list[int]  # (nodes) whole numbers of any size
    edges: list[list[int]]  # (nodes, max_preds) of the edge from each predecessor


class RankedPath(NamedTuple):
    """One path."""

    length: float  # sum of its durations and lags, in the order in which they stand
    nodes: list[int]  # nodes in order, without the source
    columns: list[int]  # for each of them, which of its predecessors comes before it


class _PathTo(NamedTuple):
    """A path to a node: its last edge, and the rank of the rest among paths to the node before."""

    length: float
    column: int
    rank: int
    kind: int


class PathRanking:
    """Paths of a graph, found as they are asked for; at a tie the first predecessor comes first."""

    def __init__(
        self,
        preds: Preds,
        duration: Times,
        lag: Lags,
        ends: Int[NumpyArray, " some"],
        kinds: Kinds | None = None,
    ) -> None:
        """Find the longest path to every node; `ends` are the nodes where paths may end."""
        self._preds, self._duration, self._lag, self._ends = preds, duration, lag, ends
        self._end = len(preds)  # a node behind all ends
        self._kinds = kinds
        finish = finish_times(preds, duration, lag)
        # unused entries point to the source, but where it is all that a node waits for
        self._is_edge = (preds != SOURCE) | (lag > 0)
        self._is_edge[:, 0] |= ~self._is_edge.any(axis=1)
        arrival = np.where(self._is_edge, finish[preds] + lag, -np.inf)
        self._first = np.append(arrival.argmax(axis=1), finish[ends].argmax())
        self._longest = np.append(finish, finish[ends].max())
        self._kind_of_longest = [] if kinds is None else self._longest_kinds(kinds)
        # of every node that was looked at: paths found, candidates, the one whose follower is due
        self._paths: dict[int, list[_PathTo]] = {}
        self._candidates: dict[int, list[tuple[float, int, int]]] = {}
        self._due: dict[int, tuple[int, int]] = {}
        self._ended = {SOURCE}
        self._seen: dict[int, set[int]] = {}  # kinds of the paths found

    def paths(self) -> Iterator[RankedPath]:
        """Yield the paths, the longest first."""
        rank = 0
        while self._has(self._end, rank):
            yield self._path(rank)
            rank += 1

    def _longest_kinds(self, kinds: Kinds) -> list[int]:
        """Kind of the longest path to every node, and to the end."""
        kinds_to = [0] * len(self._preds)
        for node, column in enumerate(self._first[:-1].tolist()):
            if node != SOURCE:
                before = kinds_to[self._preds[node, column]]
                kinds_to[node] = before + kinds.edges[node][column] + kinds.nodes[node]
        return [*kinds_to, kinds_to[self._ends[self._first[-1]]]]

    def _before(self, node: int, column: int) -> int:
        return int((self._ends if node == self._end else self._preds[node])[column])

    def _columns(self, node: int) -> list[int]:
        is_edge = np.ones(len(self._ends)) if node == self._end else self._is_edge[node]
        return np.flatnonzero(is_edge).tolist()

    def _known_paths(self, node: int) -> list[_PathTo]:
        """Return the known paths to a node; the longest always is."""
        if node not in self._paths:
            kind = 0 if self._kinds is None else self._kind_of_longest[node]
            longest = _PathTo(float(self._longest[node]), int(self._first[node]), 0, kind)
            self._paths[node] = [longest]
        return self._paths[node]

    def _has(self, node: int, rank: int) -> bool:
        """Return whether there is a path of that rank, the one after the last known at most."""
        # What a node lacks is looked for in the node before it, and so on: a chain as long as a
        # path, so it is a list here and no recursion.
        chain = [node] if rank == len(self._known_paths(node)) and node not in self._ended else []
        while chain:
            asked = chain[-1]
            if asked not in self._candidates:
                self._begin(asked)
            candidates, due = self._candidates[asked], self._due.get(asked)
            if due is not None:
                before = self._before(asked, due[0])
                if due[1] + 1 == len(self._known_paths(before)) and before not in self._ended:
                    chain.append(before)
                    continue
                del self._due[asked]
                self._enter(asked, due[0], due[1] + 1)
            elif not candidates:
                self._ended.add(chain.pop())
            elif self._take(asked):
                chain.pop()
        return rank < len(self._known_paths(node))

    def _begin(self, node: int) -> None:
        """Make the longest path by every edge but the best a candidate."""
        first = int(self._first[node])
        self._candidates[node], self._due[node] = [], (first, 0)
        self._seen[node] = {self._known_paths(node)[0].kind}
        for column in self._columns(node):
            if column != first:
                self._enter(node, column, 0)

    def _enter(self, node: int, column: int, rank: int) -> None:
        """Make a path to the node before, and the edge, a candidate, if there is that path."""
        paths = self._known_paths(self._before(node, column))
        if rank < len(paths):
            length = paths[rank].length
            if node != self._end:
                length = length + float(self._lag[node, column]) + float(self._duration[node])
            heapq.heappush(self._candidates[node], (-length, column, rank))

    def _take(self, node: int) -> bool:
        """Take the best candidate; return whether it is a path of a new kind."""
        length, column, rank = heapq.heappop(self._candidates[node])
        self._due[node] = column, rank
        kind = 0
        if self._kinds is not None:
            kind = self._known_paths(self._before(node, column))[rank].kind
            if node != self._end:
                kind += self._kinds.edges[node][column] + self._kinds.nodes[node]
            if kind in self._seen[node]:
                return False
            self._seen[node].add(kind)
        self._paths[node].append(_PathTo(-length, column, rank, kind))
        return True

    def _path(self, rank: int) -> RankedPath:
        at = self._known_paths(self._end)[rank]
        length, nodes, columns = at.length, list[int](), list[int]()
        node = self._before(self._end, at.column)
        while node != SOURCE:
            at = self._known_paths(node)[at.rank]
            nodes.append(node)
            columns.append(at.column)
            node = self._before(node, at.column)
        return RankedPath(length, nodes[::-1], columns[::-1])
