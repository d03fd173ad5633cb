"""Graphs without cycles, on the host: order, finish times, critical path and tails.

    finish[v] = duration[v] + max over u of (finish[u] + lag[u, v])

Nothing is compiled here. It adds in the same order and takes the first of equals, as the recurrence
under JAX does (engine/recurrence.py), so the results are equal bit by bit.

A graph is a table of predecessors: nodes in topological order, node 0 the source, to which unused
entries point. Without lags, all lags are 0.
"""

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray, Shaped

FEW_RUNS = 8  # of one graph, which Python's numbers have sooner than NumPy's
WIDE = 16  # nodes side by side from which NumPy takes a wave of them sooner than Python each

Preds = Int[NumpyArray, "nodes max_preds"]
# floats, or whole numbers that stay what they are: of any size, as objects, too
Lags = Shaped[NumpyArray, "nodes max_preds"]
Times = Shaped[NumpyArray, " nodes"]
EdgeEnds = Int[NumpyArray, " edges"]


def lay_out_edges(
    num_nodes: int, head: Int[NumpyArray, " edges"]
) -> tuple[Int[NumpyArray, " edges"], Int[NumpyArray, " edges"], tuple[int, int]]:
    """Assign every edge a column in a table of predecessors, in the order of the edges."""
    # Returns (edges) the edges ordered by row, (edges) column of each in that order, table shape.
    # column of an edge: its rank among all edges by head, less the edges of all heads before
    by_head = np.argsort(head, kind="stable")
    count = np.bincount(head, minlength=num_nodes)
    column = np.arange(len(head)) - (np.cumsum(count) - count)[head[by_head]]
    return by_head, column, (num_nodes, max(1, int(count.max(initial=0))))


def finish_times(preds: Preds, duration: Times, lag: Lags | None = None) -> Times:
    """Earliest finish time (nodes) of every node, in the unit of duration and lag."""
    finish: list[Any] = [0] * len(duration)
    finish_time = finish.__getitem__
    # column by column to Python's numbers, and its own loop over them: a node costs half a
    # microsecond, one call of NumPy two
    waits = zip(*preds.T.tolist(), strict=True)
    if lag is None:
        for node, (before, seconds) in enumerate(zip(waits, duration.tolist(), strict=True)):
            finish[node] = max(map(finish_time, before)) + seconds
    else:
        lags = zip(*lag.T.tolist(), strict=True)
        edges = zip(waits, lags, duration.tolist(), strict=True)
        for node, (before, between, seconds) in enumerate(edges):
            finish[node] = max(map(operator.add, map(finish_time, before), between)) + seconds
    # whole numbers stay what they are, however large
    return np.array(finish, duration.dtype if duration.dtype.kind in "iO" else float)


def start_times(preds: Preds, finish: Times, lag: Lags | None = None) -> Times:
    """Start time (nodes) of every node: its last arrival, as finish - duration would round."""
    arrival = finish[preds]
    return (arrival if lag is None else arrival + lag).max(axis=1)


def run_edges(
    tail: Int[NumpyArray, " edges"],
    head: Int[NumpyArray, " edges"],
    duration: Times,
    order: Int[NumpyArray, " nodes"] | None = None,
    width: int = 1,
) -> tuple[Times, Times]:
    """Start and finish times (nodes) of a graph given as edges, its nodes numbered in any order."""
    # order is a topological order, where one is known; width as for topological_order.
    if _goes_by_waves(len(duration), tail, width):
        return _run_waves(tail, head, duration)
    if order is None:
        order = topological_order(len(duration), tail, head)
    # renumbered so that edges point forward, with the source in front
    number = np.empty_like(order)
    number[order] = np.arange(1, len(order) + 1)  # 0 is the source
    by_head, column, shape = lay_out_edges(len(order) + 1, number[head])
    preds = np.zeros(shape, np.int64)
    preds[number[head][by_head], column] = number[tail][by_head]
    finish = finish_times(preds, np.append(0.0, duration[order]))
    return start_times(preds, finish)[number], finish[number]


def _run_waves(tail: EdgeEnds, head: EdgeEnds, duration: Times) -> tuple[Times, Times]:
    """Start and finish times (nodes) wave by wave: the same sums and maxima as in `run_edges`."""
    start = np.zeros(len(duration) + 1)  # the last entry is nobody's: see `_waves`
    finish = np.zeros(len(duration))
    for wave, after in _waves(len(duration), tail, head):
        ends = start.take(wave) + duration.take(wave)
        finish[wave] = ends
        np.maximum.at(start, after.ravel(), ends.repeat(after.shape[1]))
    return start[:-1], finish


def finish_times_of_many(
    preds: Int[NumpyArray, "graphs nodes max_preds"], duration: Float[NumpyArray, "graphs nodes"]
) -> Float[NumpyArray, "graphs nodes"]:
    """Finish times (graphs, nodes) of graphs of one size, without lags: node by node of all."""
    count, nodes, _ = preds.shape
    finish = np.zeros((nodes, count))
    flat = finish.reshape(-1)
    # one row of positions in it for each node: by predecessor, then by graph
    waits = np.ascontiguousarray(preds.transpose(1, 2, 0)) * count + np.arange(count)
    for end, before, seconds in zip(finish, waits, np.ascontiguousarray(duration.T), strict=True):
        np.maximum.reduce(flat.take(before), axis=0, out=end)
        end += seconds
    return finish.T


def run_in_place(preds: Preds, times: Float[NumpyArray, "nodes runs"]) -> None:
    """Turn durations (nodes, runs) of one graph into finish times, without lags."""
    # In every row the predecessors come first, as lay_out_edges puts them; the rest is the source,
    # which is done at 0.
    count = np.maximum((preds != 0).sum(axis=1), 1).tolist()
    for node, before in enumerate(preds[1:], 1):
        several = count[node]
        if several == 1:
            times[node] += times[before[0]]
        else:
            times[node] += times[before[:several]].max(axis=0)


def longest_paths_of_many(
    preds: Preds,
    duration_index: Int[NumpyArray, " nodes"],
    lag_index: Int[NumpyArray, "nodes max_preds"],
    costs: NumpyArray,
) -> tuple[NumpyArray, NumpyArray]:
    """Longest paths of one graph under many costs (costs, runs), of which entry 0 is 0."""
    # Durations and lags are positions in the costs, which keep their type: whole numbers, be they
    # NumPy's or Python's, are added exactly.
    # Returns (runs) lengths, and (costs, runs) how often each cost is on the path: the first of the
    # sinks and of the predecessors that attain a maximum, as everywhere.
    if costs.shape[1] <= FEW_RUNS:
        return _longest_paths_one_by_one(preds, duration_index, lag_index, costs)
    (num_nodes, width), runs = preds.shape, np.arange(costs.shape[1])
    finish = np.zeros((num_nodes, len(runs)), costs.dtype)
    choice = np.zeros(finish.shape, np.min_scalar_type(width))
    is_used = (preds > 0) | (lag_index > 0)  # what waits for the source alone never comes later
    for node, (before, lags) in enumerate(zip(preds.tolist(), lag_index.tolist(), strict=True)):
        arrival = finish[before[0]] + costs[lags[0]]
        for column in np.flatnonzero(is_used[node, 1:]) + 1:
            other = finish[before[column]] + costs[lags[column]]
            choice[node][other > arrival] = column
            arrival = np.maximum(arrival, other)
        finish[node] = arrival + costs[duration_index[node]]
    sinks = np.setdiff1d(np.arange(num_nodes), preds)
    node = sinks[finish[sinks].argmax(axis=0)]
    length, counts = finish[node, runs], np.zeros(costs.shape, np.int64)
    while node.any():  # all runs walk back at once; the source waits for itself at no cost
        column = choice[node, runs]
        counts[duration_index[node], runs] += 1
        counts[lag_index[node, column], runs] += 1
        node = preds[node, column]
    counts[0] = 0
    return length, counts


def _longest_paths_one_by_one(
    preds: Preds,
    duration_index: Int[NumpyArray, " nodes"],
    lag_index: Int[NumpyArray, "nodes max_preds"],
    costs: NumpyArray,
) -> tuple[NumpyArray, NumpyArray]:
    """`longest_paths_of_many` by single runs, which few costs have sooner."""
    lengths, counts = [], np.zeros(costs.shape, np.int64)
    for run, column in enumerate(costs.T):
        duration, lag = column[duration_index], column[lag_index]
        finish = finish_times(preds, duration, lag)
        nodes, edges = critical_path(preds, finish, lag)
        lengths.append(finish[nodes].max())
        np.add.at(counts[:, run], np.append(duration_index[nodes], lag_index[edges]), 1)
    counts[0] = 0
    return np.array(lengths, costs.dtype), counts


def critical_path(
    preds: Preds, finish: Times, lag: Lags
) -> tuple[Bool[NumpyArray, " nodes"], Bool[NumpyArray, "nodes max_preds"]]:
    """Walk back to the source from the node that ends last, the first sink at a tie.

    Returns (nodes) and (nodes, max_preds) whether a node or an edge is on the path.
    """
    nodes, edges, awaited = (np.zeros(n, bool) for n in (len(finish), preds.shape, len(finish)))
    awaited[preds] = True
    node = int(np.where(awaited, -1, finish).argmax())
    while not nodes[0]:
        first = int((finish[preds[node]] + lag[node]).argmax())
        nodes[node] = edges[node, first] = True
        node = int(preds[node, first])
    return nodes, edges


def tails(preds: Preds, duration: Times, lag: Lags | None = None) -> Times:
    """Longest time (nodes) from the end of each node to the makespan."""
    tail, back = [0.0] * len(duration), slice(None, None, -1)
    lags = np.zeros(preds.shape) if lag is None else lag
    edges = zip(
        range(len(tail))[back],
        duration[back].tolist(),
        zip(*preds[back].T.tolist(), strict=True),
        zip(*lags[back].T.tolist(), strict=True),
        strict=True,
    )
    for node, seconds, waits, between in edges:
        after = tail[node] + seconds
        for before, delay in zip(waits, between, strict=True):
            if after + delay > tail[before]:
                tail[before] = after + delay
    return np.array(tail)


def slack(preds: Preds, duration: Times, lag: Lags, target: float | None = None) -> Times:
    """Return how much longer each node could take before makespan or target is exceeded (nodes)."""
    finish = finish_times(preds, duration, lag)
    until = finish.max() if target is None else target
    return until - finish - tails(preds, duration, lag)


class CycleError(ValueError):
    """The graph has no topological order; `cycle` lists nodes, each before the one it blocks."""

    def __init__(self, cycle: list[int]) -> None:
        super().__init__(f"cycle through nodes {cycle}")
        self.cycle = cycle


def topological_order(
    num_nodes: int, tail: EdgeEnds, head: EdgeEnds, width: int = 1
) -> Int[NumpyArray, " nodes"]:
    """Order the nodes so that every edge points forward (Kahn's algorithm, first in first out)."""
    # width says about how many nodes stand side by side; it decides about nothing but the time.
    if _goes_by_waves(num_nodes, tail, width):
        return np.concatenate([wave for wave, _ in _waves(num_nodes, tail, head)])
    by_tail = np.argsort(tail, kind="stable")
    successors = head[by_tail].tolist()
    first = np.searchsorted(tail[by_tail], np.arange(num_nodes + 1)).tolist()
    waiting_for = np.bincount(head, minlength=num_nodes)
    order: list[int] = np.flatnonzero(waiting_for == 0).tolist()
    others = (waiting_for - 1).tolist()  # than the predecessor that comes last
    for node in order:  # grows while it is read: the queue and the answer are one list
        for successor in successors[first[node] : first[node + 1]]:
            if others[successor]:
                others[successor] -= 1
            else:
                order.append(successor)
    ordered, blocked = np.array(order, int), np.ones(num_nodes, bool)
    blocked[ordered] = False
    _check_complete(blocked, tail, head)
    return ordered


def _goes_by_waves(num_nodes: int, tail: EdgeEnds, width: int) -> bool:
    """Return whether waves are wide, and a table of successors would be well filled."""
    return width >= WIDE and num_nodes * int(np.bincount(tail).max(initial=0)) <= 4 * len(tail)


def _waves(
    num_nodes: int, tail: EdgeEnds, head: EdgeEnds
) -> Iterator[tuple[Int[NumpyArray, " wave"], Int[NumpyArray, "wave successors"]]]:
    """Yield what waits for nothing, then what waits for that alone, and so on."""
    # One behind the other they are the topological order. With each wave come its successors,
    # filled up with num_nodes, which never can start.
    by_tail, column, shape = lay_out_edges(num_nodes, tail)
    successors = np.full(shape, num_nodes)
    successors[tail[by_tail], column] = head[by_tail]
    waiting_for = np.append(np.bincount(head, minlength=num_nodes), successors.size + 1)
    latest = np.empty_like(waiting_for)
    wave = np.flatnonzero(waiting_for == 0)
    while len(wave):
        after = successors.take(wave, axis=0)
        yield wave, after
        after = after.ravel()
        np.subtract.at(waiting_for, after, 1)
        ready = after[waiting_for.take(after) == 0]
        # a node with several predecessors in the wave comes in when the last of them has
        place = np.arange(len(ready))
        latest[ready] = place
        wave = ready[latest.take(ready) == place]
    _check_complete(waiting_for[:-1] > 0, tail, head)


def _check_complete(blocked: Bool[NumpyArray, " nodes"], tail: EdgeEnds, head: EdgeEnds) -> None:
    """Refuse a graph of which some nodes never could start, with a cycle among them."""
    if blocked.any():
        raise CycleError(_find_cycle(blocked, tail, head))


def _find_cycle(blocked: Bool[NumpyArray, " nodes"], tail: EdgeEnds, head: EdgeEnds) -> list[int]:
    """Walk backwards through nodes that never became ready until one repeats."""
    both = blocked[tail] & blocked[head]
    blocked_by = dict(zip(head[both].tolist(), tail[both].tolist(), strict=True))
    node = next(iter(blocked_by))
    walked: dict[int, int] = {}
    while node not in walked:
        walked[node] = len(walked)
        node = blocked_by[node]
    return list(walked)[walked[node] :][::-1]
