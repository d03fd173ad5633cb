"""The longest paths of a run, with counts of the costs on each path.

The paths after the longest one show which costs become critical next.
"""

import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.analysis.runs.timeline import bars
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types, whole_number
from pipejax.base.display import ResultList, with_short_repr
from pipejax.base.longest_path import Lags, Preds, Times, finish_times
from pipejax.engine.lowering.program import LINK_COSTS, SOURCE, Program
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import Cell, Phase

# Paths of a graph in the order of their lengths, the longest first.
#
# A path leads along edges from the source to one of the end nodes. The rank of a path to a node is
# its number in this order, from 0. Every path to a node extends a path to one of its predecessors.
# If it extends the path of rank j, an earlier path to the node extends the path of rank j - 1 over
# the same edge. So paths can be computed one by one (Jimenez and Marzal: Computing the K shortest
# paths, 1999). Lengths are added up from the source, as the recurrence adds them. Additions of
# floats are monotone, so the order is the same as if all paths were sorted by this sum.
#
# Paths may have a kind: an integer that adds up along the path. Then only the longest path of every
# kind is listed. Two paths to a node that differ in kind differ in every common extension.


class Kinds(NamedTuple):
    """Numbers that nodes and edges add to the kind of a path, which encodes its cost counts."""

    nodes: list[int]  # (nodes) integers of any size
    edges: list[list[int]]  # (nodes, max_preds) number of the edge from each predecessor


class RankedPath(NamedTuple):
    """One of the longest paths from the source to an end node."""

    length: float  # sum of durations and lags, in the order of the path
    nodes: list[int]  # nodes in order, without the source
    columns: list[int]  # index in `preds[node]` of each node's predecessor on the path


class _PathTo(NamedTuple):
    """A path to a node, stored as its last edge and the rank of the path to the predecessor."""

    length: float
    column: int  # index in `preds[node]` of the predecessor on the path
    rank: int  # rank of the path to the predecessor
    kind: int


class PathRanking:
    """Paths of a graph, the longest first, computed on demand; ties keep predecessor order."""

    def __init__(
        self,
        preds: Preds,
        duration: Times,
        lag: Lags,
        ends: Int[NumpyArray, " ends"],
        kinds: Kinds | None = None,
    ) -> None:
        """Find the longest path to every node; `ends` are the nodes where paths may end."""
        self._preds, self._duration, self._lag, self._ends = preds, duration, lag, ends
        self._sink = len(preds)  # a virtual node whose predecessors are the ends
        self._kinds = kinds
        finish = finish_times(preds, duration, lag)
        # Entries of `preds` that are the source are padding. A node without other predecessors has
        # an edge from the source, at column 0.
        self._is_edge = (preds != SOURCE) | (lag > 0)
        self._is_edge[:, 0] |= ~self._is_edge.any(axis=1)
        arrival = np.where(self._is_edge, finish[preds] + lag, -np.inf)
        # (nodes + 1) last column and length of the longest path to each node, and to the sink
        self._best_column = np.append(arrival.argmax(axis=1), finish[ends].argmax())
        self._max_length = np.append(finish, finish[ends].max())
        self._best_kind = [] if kinds is None else self._best_kinds(kinds)
        # {visited node: its known paths}, and {visited node: heap of candidates for the next path,
        # as (-length, column, rank)}
        self._paths: dict[int, list[_PathTo]] = {}
        self._candidates: dict[int, list[tuple[float, int, int]]] = {}
        # {node: (column, rank) of its last known path}: the next rank there becomes a candidate
        self._last_edge: dict[int, tuple[int, int]] = {}
        self._exhausted = {SOURCE}  # nodes without another path
        self._path_kinds: dict[int, set[int]] = {}  # {node: kinds of its known paths}

    def paths(self) -> Iterator[RankedPath]:
        """Yield the paths in order of length, the longest first."""
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
        """Return the paths to a node that are already computed, the longest first."""
        if node not in self._paths:
            kind = 0 if self._kinds is None else self._best_kind[node]
            longest = _PathTo(float(self._max_length[node]), int(self._best_column[node]), 0, kind)
            self._paths[node] = [longest]
        return self._paths[node]

    def _has_path(self, node: int, rank: int) -> bool:
        """Return whether a node has a path of this rank (0 is the longest), and compute it."""
        if rank < len(self._known_paths(node)) or node in self._exhausted:
            return rank < len(self._known_paths(node))
        # A node has a candidate for each edge into it: the next path over that edge. The longest
        # candidate is the next path to the node. The next candidate of its edge needs the next path
        # to the predecessor, which may need the next path to its predecessor, and so on. A
        # recursion would be as deep as the graph, so a stack replaces it.
        stack = [node]
        while stack:
            current = stack[-1]
            if current not in self._candidates:
                self._push_best_paths(current)
            if current in self._last_edge:
                column, pred_rank = self._last_edge[current]
                pred = self._pred(current, column)
                if pred_rank + 1 == len(self._known_paths(pred)) and pred not in self._exhausted:
                    stack.append(pred)  # first the predecessor's next path
                    continue
                del self._last_edge[current]
                self._push(current, column, pred_rank + 1)
            elif not self._candidates[current]:
                self._exhausted.add(stack.pop())
            elif self._pop(current):
                stack.pop()
        return rank < len(self._known_paths(node))

    def _push_best_paths(self, node: int) -> None:
        """Make the longest path over each edge into the node a candidate, except the very best."""
        best_column = int(self._best_column[node])
        self._candidates[node], self._last_edge[node] = [], (best_column, 0)
        self._path_kinds[node] = {self._known_paths(node)[0].kind}
        is_edge = np.ones(len(self._ends)) if node == self._sink else self._is_edge[node]
        for column in np.flatnonzero(is_edge).tolist():
            if column != best_column:
                self._push(node, column, 0)

    def _push(self, node: int, column: int, rank: int) -> None:
        """Add the predecessor's path of this rank, extended by the edge, as a candidate."""
        pred_paths = self._known_paths(self._pred(node, column))
        if rank < len(pred_paths):
            length = pred_paths[rank].length
            if node != self._sink:
                length = length + float(self._lag[node, column]) + float(self._duration[node])
            heapq.heappush(self._candidates[node], (-length, column, rank))

    def _pop(self, node: int) -> bool:
        """Move the longest candidate to the known paths; return False if they have its kind."""
        # A candidate is the predecessor's path of this rank (0 is the longest) plus the edge from
        # it. Its kind encodes how often each cost occurs on the path: the sum over nodes and edges.
        negative_length, column, rank = heapq.heappop(self._candidates[node])
        self._last_edge[node], kind = (column, rank), 0
        if self._kinds is not None:
            kind = self._known_paths(self._pred(node, column))[rank].kind
            if node != self._sink:
                kind += self._kinds.edges[node][column] + self._kinds.nodes[node]
            if kind in self._path_kinds[node]:
                return False
            self._path_kinds[node].add(kind)
        self._paths[node].append(_PathTo(-negative_length, column, rank, kind))
        return True

    def _path(self, rank: int) -> RankedPath:
        """Return a path to the sink: its nodes, and their columns in `preds`, in order."""
        path = self._known_paths(self._sink)[rank]
        length, nodes, columns = path.length, list[int](), list[int]()
        node = self._pred(self._sink, path.column)
        while node != SOURCE:
            path = self._known_paths(node)[path.rank]
            nodes.append(node)
            columns.append(path.column)
            node = self._pred(node, path.column)
        return RankedPath(length, nodes[::-1], columns[::-1])


@with_short_repr("length shorter_by counts ops messages")
class LongPath(NamedTuple):
    """One of the longest paths of a run.

    Attributes:
      length: sum of the costs on the path [s].
      shorter_by: difference to the longest path [s].
      counts: {cost: how often it is on the path}. Costs are letters of phases, `c_F` for messages
        with activations and `c_B` for gradients. Links that queue messages count transmissions as
        `c_F` and `c_B`, and latencies as `latency_F` and `latency_B`. Fused pairs count as `pair`
        if they have a time of their own, else as two ops.
      ops: ops and fused pairs on the path, in order.
      messages: SEND of each message on the path, in order.
      nodes: nodes of the program on the path, in order.
    """

    length: float
    shorter_by: float
    counts: Mapping[str, int]
    ops: tuple[str, ...]
    messages: tuple[str, ...]
    nodes: tuple[int, ...]


def longest_paths(
    evaluation: Evaluation, count: int, *, distinct_counts: bool = False
) -> list[LongPath]:
    """Find the longest paths of a run, from its first op to its last.

    Paths differ in at least one op or message. If costs are equal, very many paths are equally
    long. Paths with different counts show which costs become critical next.

    Args:
      evaluation: a run.
      count: largest number of paths.
      distinct_counts: whether to list only the longest of all paths with equal counts.

    Returns:
      Paths, the longest first; the first path is as long as the makespan. Of equally long paths,
      the path over the first predecessor comes first, as in the recurrence.

    Raises:
      ValueError: if count is no whole number of at least 1.

    Cost:
      One run, and work in proportion to the ops on the listed paths. With `distinct_counts` the
      work is larger if many paths have equal counts. Nothing is compiled.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=0.125)
      >>> run = pj.evaluate(table, costs)
      >>> for path in pj.analysis.longest_paths(run, 3, distinct_counts=True):
      ...     print(path.length, *(f"{count} {name}" for name, count in path.counts.items()))
      16.875 4 F 6 B 3 c_F 4 c_B
      16.75 4 F 6 B 3 c_F 3 c_B
      16.75 4 F 6 B 2 c_F 4 c_B
    """
    check_types(evaluation=(evaluation, Evaluation), distinct_counts=(distinct_counts, bool))
    count = whole_number(count, "count")
    program, vector = lower_and_price(evaluation.table, evaluation.costs, evaluation.links)
    names, counts_by_cost = _count_costs(evaluation, program, vector)
    kinds = _kinds(program, counts_by_cost) if distinct_counts else None
    duration, lag = vector[program.duration_index], vector[program.lag_index]
    preds = np.asarray(program.preds)
    is_last = program.phase != Phase.IDLE  # nodes, without padding, for which no other node waits
    is_last[program.preds] = False
    ranking = PathRanking(preds, duration, lag, np.flatnonzero(is_last), kinds)
    labels = {bar.node: bar.label for bar in bars(evaluation)}
    message_texts = _message_texts(program, evaluation.table.grammar.text)
    paths: list[LongPath] = []
    for path in itertools.islice(ranking.paths(), count):
        tails = preds[path.nodes, path.columns]
        lags = program.lag_index[path.nodes, path.columns]
        costs = [*program.duration_index[path.nodes].tolist(), *lags.tolist()]
        counts = counts_by_cost[costs].sum(axis=0).tolist()
        # an edge may be a message, and so may be the node at its head
        keys: list[int | tuple[int, int, int]] = []
        for tail, head, lag_index in zip(tails.tolist(), path.nodes, lags.tolist(), strict=True):
            keys += [(tail, head, lag_index), head]
        paths.append(
            LongPath(
                length=path.length,
                shorter_by=evaluation.makespan - path.length,
                counts=dict(zip(names, counts, strict=True)),
                ops=tuple(labels[node] for node in path.nodes if node in labels),
                messages=tuple(message_texts[key] for key in keys if key in message_texts),
                nodes=tuple(path.nodes),
            )
        )
    return ResultList(paths)


def _count_costs(
    evaluation: Evaluation, program: Program, vector: Float[NumpyArray, " costs"]
) -> tuple[list[str], Int[NumpyArray, "costs names"]]:
    """Return names of costs, and how often each entry of the vector counts as each name."""
    # The cost vector has entries "F F B B pair latency latency ..". An F counts (1, 0, ..). A pair
    # without a time of its own counts as its F and its B.
    layout = program.layout
    cost_names = np.array(layout.cost_names, object)
    num_boundaries = math.prod(layout.link_shape) // 2  # entries of one direction; F comes first
    suffixes = np.repeat(["_F", "_B"], num_boundaries).tolist()
    for name in LINK_COSTS:
        cost_names[cost_names == name] = [_MESSAGE[name] + suffix for suffix in suffixes]
    names_by_entry = [[name] for name in cost_names.tolist()]
    if evaluation.costs.pair is None and evaluation.costs.pair_factor is None:
        entries = np.flatnonzero(cost_names == "pair")
        for entry, pair in zip(entries, program.pair_index, strict=True):
            names_by_entry[entry] = cost_names[pair].tolist()
    used = np.union1d(program.duration_index, program.lag_index)
    used = used[(vector[used] > 0) | ~np.isin(cost_names[used], ("latency_F", "latency_B"))]
    used_names = {name for entry in used.tolist() for name in names_by_entry[entry]}
    messages = (f"{name}_{direction}" for name in ("c", "latency") for direction in "FB")
    order = (*(phase.name for phase in layout.timed), "pair", *messages)
    names = [name for name in order if name in used_names]
    counts = [[entry_names.count(name) for name in names] for entry_names in names_by_entry]
    return names, np.array(counts, int).reshape(len(counts), len(names))


# names of message costs; on a link that queues, transmit time and latency are two costs
_MESSAGE = {"latency": "latency", "transmit": "c", "message": "c"}


def _kinds(program: Program, counts_by_cost: Int[NumpyArray, "costs names"]) -> Kinds:
    """Encode the counts of each node and edge as one integer, with a digit per cost name."""
    # With base 1000, 3 F and 2 B are 2003. Integers add up along a path, as no digit overflows.
    base = 4 * program.num_nodes  # a path has under 2 num_nodes nodes and edges, of at most 2 ops
    powers = [base**k for k in range(counts_by_cost.shape[1])]
    numbers = [sum(map(operator.mul, row, powers)) for row in counts_by_cost.tolist()]
    return Kinds(
        [numbers[entry] for entry in program.duration_index.tolist()],
        [[numbers[entry] for entry in row] for row in program.lag_index.tolist()],
    )


def _message_texts(
    program: Program, text: Callable[[Cell], str]
) -> dict[int | tuple[int, int, int], str]:
    """Return {node, or edge (producer, consumer, lag's cost position): text of its message}."""
    messages = program.messages
    columns = (messages.carrier, messages.producer, messages.consumer, messages.lag_index)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    keys = [tuple(edge) if node == SOURCE else node for node, *edge in rows]
    return {key: text(messages.cells(message)[:1]) for message, key in enumerate(keys)}
