"""Graphs that are changed step by step: after every change as a whole run, bit by bit."""

import numpy as np
from hypothesis import given, settings, strategies as st
from test_longest_paths import graphs

from pipejax.base.incremental_path import IncrementalPath, to_waits
from pipejax.base.longest_path import CycleError, topological_order

SEEDS = st.integers(0, 2**32 - 1)


def run_anew(path):
    """Finish times of a graph as it is now, its nodes sorted again."""
    edges = [(u, v, lag) for v, w in enumerate(path.waits) for u, lag in zip(*w, strict=True) if v]
    tail, head = (np.array(column) for column in [*zip(*edges, strict=True)][:2])
    order = topological_order(len(path.waits), tail, head)
    finish = dict.fromkeys(order, 0.0)
    for node in order:
        arrivals = [finish[u] + lag for u, v, lag in edges if v == node]
        finish[node] = max(arrivals, default=0.0) + path.duration[node]
    return [finish[node] for node in range(len(order))]


@given(graph=graphs(), seed=SEEDS)
@settings(max_examples=40)
def test_any_changes_of_a_graph_and_back(graph, seed):
    preds, duration, lag, _ = graph
    rng, path = np.random.default_rng(seed), IncrementalPath(preds, duration, lag)
    seen = []
    for _ in range(12):
        state = [list(path.finish), list(path.duration), list(path.waits), path.makespan]
        nodes = rng.permutation(np.arange(1, len(preds)))[: rng.integers(1, 3)].tolist()
        if rng.random() < 0.5:
            path.change({node: float(rng.choice([0.1, 0.7, 2.0])) for node in nodes})
        else:
            waits = {}
            for node in nodes:
                others = rng.permutation(len(preds))[: rng.integers(0, 3)].tolist()
                waits[node] = to_waits((v, float(rng.random())) for v in others if v != node)
            try:
                path.change(waits=waits)
            except CycleError:
                assert [path.finish, path.duration, path.waits, path.makespan] == state
                continue
        seen.append(state)
        assert path.finish == run_anew(path)
        assert path.makespan == max(path.finish)
        if rng.random() < 0.2:
            path.undo()
            assert [path.finish, path.duration, path.waits, path.makespan] == seen.pop()
    while seen:
        path.undo()
        assert [path.finish, path.duration, path.waits, path.makespan] == seen.pop()
