"""Longest paths in graphs without cycles, in NumPy: finish times, critical path, slack.

    finish[v] = duration[v] + max over u of (finish[u] + lag[u, v])

Results equal those of the recurrence under JAX (engine/recurrence.py) to the last bit, because
both add in the same order and choose the first of equal values. A graph is a table of predecessors
(nodes, max_preds), with nodes in topological order. Node 0 is the source; unused entries are 0.
"""

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray, Shaped

FEW_RUNS = 8  # for so few runs of a graph, Python's numbers are faster than NumPy's arrays
WIDE = 24  # for so many independent nodes, NumPy is faster than a loop over the nodes

Preds = Int[NumpyArray, "nodes max_preds"]
# floats or whole numbers; whole numbers beyond 64 bits have the dtype object
Lags = Shaped[NumpyArray, "nodes max_preds"]
Times = Shaped[NumpyArray, " nodes"]
EdgeEnds = Int[NumpyArray, " edges"]


def lay_out_edges(
    num_nodes: int, head: Int[NumpyArray, " edges"]
) -> tuple[Int[NumpyArray, " edges"], Int[NumpyArray, " edges"], tuple[int, int]]:
    """Place edges in a table of predecessors, with a row for each node."""
    # Returns the indices of the edges sorted by head (the node that an edge leads to), the column
    # of each sorted edge in the table, and the shape of the table.
    edge_order = np.argsort(head, kind="stable")
    counts = np.bincount(head, minlength=num_nodes)
    offsets = np.cumsum(counts) - counts  # number of edges into all heads before
    # head 2 0 2 -> sorted heads 0 2 2, offsets 0 1 1, columns 0-0 1-1 2-1 = 0 0 1
    column = np.arange(len(head)) - offsets[head[edge_order]]
    return edge_order, column, (num_nodes, max(1, int(counts.max(initial=0))))


def finish_times(preds: Preds, duration: Times, lag: Lags | None = None) -> Times:
    """Return the earliest finish time (nodes), in the unit of duration and lag."""
    finish: list[Any] = [0] * len(duration)
    finish_time = finish.__getitem__
    # a loop over Python's numbers takes 0.5 us per node, a single call of NumPy 2 us
    pred_rows = zip(*preds.T.tolist(), strict=True)
    if lag is None:
        for node, (row, seconds) in enumerate(zip(pred_rows, duration.tolist(), strict=True)):
            finish[node] = max(map(finish_time, row)) + seconds
    else:
        lag_rows = zip(*lag.T.tolist(), strict=True)
        rows = zip(pred_rows, lag_rows, duration.tolist(), strict=True)
        for node, (row, lags, seconds) in enumerate(rows):
            finish[node] = max(map(operator.add, map(finish_time, row), lags)) + seconds
    # whole numbers keep their type, however large
    return np.array(finish, duration.dtype if duration.dtype.kind in "iO" else float)


def start_times(preds: Preds, finish: Times, lag: Lags | None = None) -> Times:
    """Return start times (nodes), the latest arrivals; finish - duration would be inexact."""
    arrival = finish[preds]
    return (arrival if lag is None else arrival + lag).max(axis=1)


def run_edges(
    tail: Int[NumpyArray, " edges"],
    head: Int[NumpyArray, " edges"],
    duration: Times,
    order: Int[NumpyArray, " nodes"] | None = None,
    width: int = 1,
) -> tuple[Times, Times]:
    """Return start and finish times (nodes) of a graph given by edges, with nodes in any order."""
    # `order` is a topological order, computed if missing; `width` is as in `topological_order`.
    if _has_wide_waves(len(duration), tail, width):
        return _run_waves(tail, head, duration)
    if order is None:
        order = topological_order(len(duration), tail, head)
    # renumber nodes in topological order, after the source 0: order 2 0 1 -> new_ids 2 3 1
    new_ids = np.empty_like(order)
    new_ids[order] = np.arange(1, len(order) + 1)
    edge_order, column, shape = lay_out_edges(len(order) + 1, new_ids[head])
    preds = np.zeros(shape, np.int64)
    preds[new_ids[head][edge_order], column] = new_ids[tail][edge_order]
    finish = finish_times(preds, np.append(0.0, duration[order]))
    return start_times(preds, finish)[new_ids], finish[new_ids]


def _run_waves(tail: EdgeEnds, head: EdgeEnds, duration: Times) -> tuple[Times, Times]:
    """Return start and finish times (nodes); compute the independent nodes of a wave at once."""
    start = np.zeros(len(duration) + 1)  # the last entry collects the padding of `_waves`
    finish = np.zeros(len(duration))
    for wave, successors in _waves(len(duration), tail, head):
        ends = start.take(wave) + duration.take(wave)
        finish[wave] = ends
        # a successor starts at the latest end of its predecessors
        np.maximum.at(start, successors.ravel(), ends.repeat(successors.shape[1]))
    return start[:-1], finish


def run_in_place(preds: Preds, times: Float[NumpyArray, "nodes runs"]) -> None:
    """Replace durations (nodes, runs) by finish times in place, in a graph without lags."""
    # `lay_out_edges` puts predecessors into the first columns and fills the rest with 0
    num_preds = np.maximum((preds != 0).sum(axis=1), 1).tolist()
    for node, row in enumerate(preds[1:], 1):
        if num_preds[node] == 1:
            times[node] += times[row[0]]
        else:
            times[node] += times[row[: num_preds[node]]].max(axis=0)


def longest_paths_of_many(
    preds: Preds,
    duration_index: Int[NumpyArray, " nodes"],
    lag_index: Int[NumpyArray, "nodes max_preds"],
    costs: NumpyArray,
) -> tuple[NumpyArray, NumpyArray]:
    """Return lengths of longest paths (runs), and counts of costs on the paths (costs, runs)."""
    # `costs` has the shape (costs, runs), and zeros in row 0. `duration_index` and `lag_index` are
    # the rows of the durations of nodes and the lags of edges. Whole numbers are added exactly. At
    # a tie, the path takes the first sink and the first predecessor.
    if costs.shape[1] <= FEW_RUNS:
        return _longest_paths_one_by_one(preds, duration_index, lag_index, costs)
    indices = preds, duration_index, lag_index
    preds, duration_index, lag_index = (np.asarray(index, np.int64) for index in indices)
    (num_nodes, width), num_runs = preds.shape, costs.shape[1]
    finish = np.zeros((num_nodes, num_runs), costs.dtype)
    choice = np.zeros(finish.shape, np.min_scalar_type(width))
    edges = zip(preds.tolist(), lag_index.tolist(), duration_index.tolist(), strict=True)
    for node, (row, lags, duration) in enumerate(edges):
        for column, (pred, lag) in enumerate(zip(row, lags, strict=True)):
            arrival = finish[pred] + costs[lag] if lag else finish[pred]
            if column == 0:
                last_arrival = arrival
            elif pred or lag:  # other entries are padding
                np.copyto(choice[node], column, where=arrival > last_arrival, casting="unsafe")
                last_arrival = np.maximum(last_arrival, arrival)
        np.add(last_arrival, costs[duration], out=finish[node])
    sinks = np.setdiff1d(np.arange(num_nodes), preds)
    node = sinks[finish[sinks].argmax(axis=0)]
    runs = np.arange(num_runs)
    length = finish[node, runs]
    positions = [runs]  # indices of costs on the paths into the raveled matrix (costs, runs)
    while node.any():  # all runs go back at once; the source is its own predecessor, at cost 0
        edge = node * width + choice.take(node * num_runs + runs)
        positions += [
            duration_index.take(node) * num_runs + runs,
            lag_index.take(edge) * num_runs + runs,
        ]
        node = preds.take(edge)
    counts = np.bincount(np.concatenate(positions), minlength=costs.size).reshape(costs.shape)
    counts[0] = 0
    return length, counts


def _longest_paths_one_by_one(
    preds: Preds,
    duration_index: Int[NumpyArray, " nodes"],
    lag_index: Int[NumpyArray, "nodes max_preds"],
    costs: NumpyArray,
) -> tuple[NumpyArray, NumpyArray]:
    """Compute the result of `longest_paths_of_many` run by run, which is faster for few runs."""
    lengths, counts = [], np.zeros(costs.shape, np.int64)
    for run, column in enumerate(costs.T):
        duration, lag = column[duration_index], column[lag_index]
        finish = finish_times(preds, duration, lag)
        nodes, edges = critical_path(preds, finish, lag)
        lengths.append(finish[nodes].max())
        np.add.at(counts[:, run], np.append(duration_index[nodes], lag_index[edges]), 1)
    counts[0] = 0  # position 0 is no cost
    return np.array(lengths, costs.dtype), counts


def critical_path(
    preds: Preds, finish: Times, lag: Lags
) -> tuple[Bool[NumpyArray, " nodes"], Bool[NumpyArray, "nodes max_preds"]]:
    """Return masks of nodes and edges on the longest path; at a tie, it ends at the first sink."""
    on_path, edge_on_path = np.zeros(len(finish), bool), np.zeros(preds.shape, bool)
    has_successor = np.zeros(len(finish), bool)
    has_successor[preds] = True
    node = int(np.where(has_successor, -1, finish).argmax())
    while not on_path[0]:  # until the source, whose padding (an edge to itself) is marked too
        column = int((finish[preds[node]] + lag[node]).argmax())
        on_path[node] = edge_on_path[node, column] = True
        node = int(preds[node, column])
    return on_path, edge_on_path


def times_to_end(preds: Preds, duration: Times, lag: Lags | None = None) -> Times:
    """Return the longest time (nodes) from the end of each node to the makespan."""
    to_end: list[Any] = [0.0] * len(duration)
    lags: Any = np.zeros(preds.shape) if lag is None else lag
    # converting columns to lists and joining rows by zip is faster than a list for each row
    pred_rows = zip(*preds[::-1].T.tolist(), strict=True)
    lag_rows = zip(*lags[::-1].T.tolist(), strict=True)
    nodes, durations = reversed(range(len(to_end))), duration[::-1].tolist()
    rows = zip(nodes, durations, pred_rows, lag_rows, strict=True)
    for node, seconds, row, delays in rows:
        start_to_end = to_end[node] + seconds
        for pred, delay in zip(row, delays, strict=True):
            if start_to_end + delay > to_end[pred]:
                to_end[pred] = start_to_end + delay
    return np.array(to_end)


def slack(preds: Preds, duration: Times, lag: Lags, target: float | None = None) -> Times:
    """Return the longest delay of each node (nodes) that does not move the end past a target."""
    finish = finish_times(preds, duration, lag)  # default target: the makespan
    until = finish.max() if target is None else target
    return until - finish - times_to_end(preds, duration, lag)


class CycleError(ValueError):
    """A graph has a cycle; in `cycle`, each node stands before the node that waits for it."""

    def __init__(self, cycle: list[int]) -> None:
        super().__init__(f"cycle through nodes {cycle}")
        self.cycle = cycle


def topological_order(
    num_nodes: int, tail: EdgeEnds, head: EdgeEnds, width: int = 1
) -> Int[NumpyArray, " nodes"]:
    """Order nodes topologically (Kahn); `width`, an estimate of wave sizes, affects only speed."""
    if _has_wide_waves(num_nodes, tail, width):
        return np.concatenate([wave for wave, _ in _waves(num_nodes, tail, head)])
    # successors of node n: successors[offsets[n] : offsets[n + 1]]
    edge_order = np.argsort(tail, kind="stable")
    successors = head[edge_order].tolist()
    offsets = np.searchsorted(tail[edge_order], np.arange(num_nodes + 1)).tolist()
    in_degree = np.bincount(head, minlength=num_nodes)
    order: list[int] = np.flatnonzero(in_degree == 0).tolist()
    num_missing = in_degree.tolist()
    for node in order:  # the list grows while it is read, because it is also the queue
        for successor in successors[offsets[node] : offsets[node + 1]]:
            num_missing[successor] -= 1
            if num_missing[successor] == 0:
                order.append(successor)
    order_array, is_blocked = np.array(order, int), np.ones(num_nodes, bool)
    is_blocked[order_array] = False
    _check_complete(is_blocked, tail, head)
    return order_array


def _has_wide_waves(num_nodes: int, tail: EdgeEnds, width: int) -> bool:
    """Return whether computing whole waves of nodes is faster than node by node."""
    most_successors = int(np.bincount(tail).max(initial=0))
    return width >= WIDE and 0 < num_nodes * most_successors <= 4 * len(tail)


def _waves(
    num_nodes: int, tail: EdgeEnds, head: EdgeEnds
) -> Iterator[tuple[Int[NumpyArray, " wave"], Int[NumpyArray, "wave successors"]]]:
    """Yield waves of nodes: a wave has all nodes whose predecessors are in earlier waves."""
    # The waves, one after the other, are a topological order. A wave comes with the successors of
    # its nodes (wave, max_successors), padded with `num_nodes`.
    edge_order, column, shape = lay_out_edges(num_nodes, tail)
    successors = np.full(shape, num_nodes)
    successors[tail[edge_order], column] = head[edge_order]
    # the last entry is for the padding, and so large that it never becomes 0
    num_missing = np.append(np.bincount(head, minlength=num_nodes), successors.size + 1)
    last_position = np.empty_like(num_missing)
    wave = np.flatnonzero(num_missing == 0)
    while len(wave):
        wave_successors = successors.take(wave, axis=0)
        yield wave, wave_successors
        heads = wave_successors.ravel()
        np.subtract.at(num_missing, heads, 1)
        ready = heads[num_missing.take(heads) == 0]
        # keep only the last entry of a node with several predecessors in the wave: 5 7 5 -> 7 5
        positions = np.arange(len(ready))
        last_position[ready] = positions
        wave = ready[last_position.take(ready) == positions]
    _check_complete(num_missing[:-1] > 0, tail, head)


def _check_complete(is_blocked: Bool[NumpyArray, " nodes"], tail: EdgeEnds, head: EdgeEnds) -> None:
    """Raise a CycleError if a node never became ready."""
    if is_blocked.any():
        raise CycleError(_find_cycle(is_blocked, tail, head))


def _find_cycle(
    is_blocked: Bool[NumpyArray, " nodes"], tail: EdgeEnds, head: EdgeEnds
) -> list[int]:
    """Return a cycle, found by a walk backwards through nodes that never became ready."""
    is_edge = is_blocked[tail] & is_blocked[head]
    blocked_pred = dict(zip(head[is_edge].tolist(), tail[is_edge].tolist(), strict=True))
    node = next(iter(blocked_pred))
    positions: dict[int, int] = {}  # of each node on the walk
    while node not in positions:
        positions[node] = len(positions)
        node = blocked_pred[node]
    # the walk since the first visit of this node, reversed: in the direction of the edges
    return list(positions)[positions[node] :][::-1]
