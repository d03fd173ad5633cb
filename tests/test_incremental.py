"""Graphs that are changed step by step: after every change as a whole run, bit by bit."""

import numpy as np
from hypothesis import given, settings, strategies as st
from test_longest_paths import graphs

from pipejax.base.longest_path import CycleError, topological_order
from pipejax.search.orders.transfer_swaps import IncrementalPath, to_waits

SEEDS = st.integers(0, 2**32 - 1)


def run_anew(path, duration):
    """Finish times of a graph as it is now, its nodes sorted again."""
    edges = [(u, v) for v, waits in enumerate(path.waits) for u in waits if v]
    tail, head = (np.array(column) for column in zip(*edges, strict=True))
    order = topological_order(len(path.waits), tail, head)
    finish = dict.fromkeys(order, 0.0)
    for node in order:
        finish[node] = max((finish[u] for u, v in edges if v == node), default=0.0) + duration[node]
    return [finish[node] for node in range(len(order))]


@given(graph=graphs(), seed=SEEDS)
@settings(max_examples=40)
def test_any_changes_of_a_graph(graph, seed):
    preds, duration, *_ = graph
    rng, path = np.random.default_rng(seed), IncrementalPath(preds, duration)
    for _ in range(12):
        state = [list(path.finish), list(path.waits), list(path.order), path.makespan]
        waits = {}
        for node in rng.permutation(np.arange(1, len(preds)))[: rng.integers(1, 3)].tolist():
            others = rng.permutation(len(preds))[: rng.integers(0, 3)].tolist()
            waits[node] = to_waits(v for v in others if v != node)
        try:
            path.change(waits)
        except CycleError:
            assert [path.finish, path.waits, path.order, path.makespan] == state
            continue
        assert path.finish == run_anew(path, duration)
        assert path.makespan == max(path.finish)
