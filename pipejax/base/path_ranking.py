"""Paths of a graph in the order of their lengths, the longest first.

A path leads along edges from the source to one of the end nodes. The k-th path to a node extends
the (j + 1)-th path to one of its predecessors, where an earlier path to the node extends the j-th:
so paths are computed one by one (Jimenez and Marzal: Computing the K shortest paths, 1999).
Lengths are added up from the source as the recurrence adds them. Additions of floats are monotone,
so the order is the same as if all paths were sorted by that sum.

Paths may have a kind, a number that adds up along the path; then only the longest path of every
kind is listed. Two paths to a node that differ in kind differ in every common extension.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.longest_path import Lags, Preds, Times, finish_times

SOURCE = 0


class Kinds(NamedTuple):
    """Terms that nodes and edges add to the kind of a path."""

    nodes: list[int]  # (nodes) whole numbers of any size
    edges: list[list[int]]  # (nodes, max_preds) of the edge from each predecessor


class RankedPath(NamedTuple):
    """Path from the source to an end node."""

    length: float  # sum of durations and lags, in the order of the path
    nodes: list[int]  # nodes in order, without the source
    columns: list[int]  # column of each node's predecessor on the path


class _PathTo(NamedTuple):
    """A path to a node: its last edge, and the rank of the rest among paths to the node before."""

    length: float
    column: int
    rank: int
    kind: int


class PathRanking:
    """Paths of a graph, computed on demand; at a tie the first predecessor comes first."""

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
        self._sink = len(preds)  # a virtual node whose predecessors are the ends
        self._kinds = kinds
        finish = finish_times(preds, duration, lag)
        # padding points to the source, and so does the only edge of a node that waits for nothing
        self._is_edge = (preds != SOURCE) | (lag > 0)
        self._is_edge[:, 0] |= ~self._is_edge.any(axis=1)
        arrival = np.where(self._is_edge, finish[preds] + lag, -np.inf)
        # by node, and for the sink: the longest path's last column and length
        self._best_column = np.append(arrival.argmax(axis=1), finish[ends].argmax())
        self._max_length = np.append(finish, finish[ends].max())
        self._best_kind = [] if kinds is None else self._best_kinds(kinds)
        # by node that was visited: its known paths, a heap of candidates (-length, column, rank),
        # and the (column, rank) of the known path whose next rank is no candidate yet
        self._paths: dict[int, list[_PathTo]] = {}
        self._candidates: dict[int, list[tuple[float, int, int]]] = {}
        self._due: dict[int, tuple[int, int]] = {}
        self._exhausted = {SOURCE}  # nodes without another path
        self._seen: dict[int, set[int]] = {}  # kinds of the known paths

    def paths(self) -> Iterator[RankedPath]:
        """Yield the paths, the longest first."""
        rank = 0
        while self._has_path(self._sink, rank):
            yield self._path(rank)
            rank += 1

    def _best_kinds(self, kinds: Kinds) -> list[int]:
        """Return the kind of the longest path to every node, and to the sink."""
        path_kinds = [0] * len(self._preds)
        for node, column in enumerate(self._best_column[:-1].tolist()):
            if node != SOURCE:
                pred_kind = path_kinds[self._preds[node, column]]
                path_kinds[node] = pred_kind + kinds.edges[node][column] + kinds.nodes[node]
        return [*path_kinds, path_kinds[self._ends[self._best_column[-1]]]]

    def _pred(self, node: int, column: int) -> int:
        return int((self._ends if node == self._sink else self._preds[node])[column])

    def _known_paths(self, node: int) -> list[_PathTo]:
        """Return the known paths to a node, by rank; the longest is always known."""
        if node not in self._paths:
            kind = 0 if self._kinds is None else self._best_kind[node]
            longest = _PathTo(float(self._max_length[node]), int(self._best_column[node]), 0, kind)
            self._paths[node] = [longest]
        return self._paths[node]

    def _has_path(self, node: int, rank: int) -> bool:
        """Return whether a node has a path of this rank; compute the next unknown one if asked."""
        if rank < len(self._known_paths(node)) or node in self._exhausted:
            return rank < len(self._known_paths(node))
        # the next path to a node may need the next one to its predecessor, and so on to the
        # source: a stack instead of a recursion, which would be as deep as the graph
        stack = [node]
        while stack:
            current = stack[-1]
            if current not in self._candidates:
                self._push_best_paths(current)
            if current in self._due:
                column, pred_rank = self._due[current]
                pred = self._pred(current, column)
                if pred_rank + 1 == len(self._known_paths(pred)) and pred not in self._exhausted:
                    stack.append(pred)
                    continue
                del self._due[current]
                self._push(current, column, pred_rank + 1)
            elif not self._candidates[current]:
                self._exhausted.add(stack.pop())
            elif self._pop(current):
                stack.pop()
        return rank < len(self._known_paths(node))

    def _push_best_paths(self, node: int) -> None:
        """Make the longest path over each edge into the node a candidate, except the best one."""
        best_column = int(self._best_column[node])
        self._candidates[node], self._due[node] = [], (best_column, 0)
        self._seen[node] = {self._known_paths(node)[0].kind}
        is_edge = np.ones(len(self._ends)) if node == self._sink else self._is_edge[node]
        for column in np.flatnonzero(is_edge).tolist():
            if column != best_column:
                self._push(node, column, 0)

    def _push(self, node: int, column: int, rank: int) -> None:
        """Make the predecessor's path of this rank plus the edge a candidate, if it exists."""
        pred_paths = self._known_paths(self._pred(node, column))
        if rank < len(pred_paths):
            length = pred_paths[rank].length
            if node != self._sink:
                length = length + float(self._lag[node, column]) + float(self._duration[node])
            heapq.heappush(self._candidates[node], (-length, column, rank))

    def _pop(self, node: int) -> bool:
        """Move the longest candidate to the known paths; return False if its kind is known.

        A candidate is the predecessor's path of a rank, over the edge in a column.
        """
        negative_length, column, rank = heapq.heappop(self._candidates[node])
        self._due[node] = column, rank  # whose next rank is to become a candidate
        kind = 0
        if self._kinds is not None:
            kind = self._known_paths(self._pred(node, column))[rank].kind
            if node != self._sink:
                kind += self._kinds.edges[node][column] + self._kinds.nodes[node]
            if kind in self._seen[node]:
                return False
            self._seen[node].add(kind)
        self._paths[node].append(_PathTo(-negative_length, column, rank, kind))
        return True

    def _path(self, rank: int) -> RankedPath:
        """Follow the path of this rank from the sink back to the source."""
        path = self._known_paths(self._sink)[rank]
        length, nodes, columns = path.length, list[int](), list[int]()
        node = self._pred(self._sink, path.column)
        while node != SOURCE:
            path = self._known_paths(node)[path.rank]
            nodes.append(node)
            columns.append(path.column)
            node = self._pred(node, path.column)
        return RankedPath(length, nodes[::-1], columns[::-1])
