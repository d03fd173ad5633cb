"""The longest paths of a run: against enumeration of all, on random graphs and tables."""

import itertools
from collections import Counter

import networkx as nx
import numpy as np
import pytest
import reference
import strategies
from hypothesis import given, settings, strategies as st

import pipejax as pj
from pipejax.analysis.paths.longest_paths import Kinds, PathRanking
from pipejax.analysis.runs.timeline import bars
from pipejax.base import longest_path
from pipejax.schedules.table.links import LINKS

SMALL = ["--schedule", "chimera", "--workers", 4, "--microbatches", 4]
TIMES = ["--stage-times", "F=1,B=2", "--comm", 0.1]


@st.composite
def graphs(draw):
    """Draw a small graph: predecessors, durations, lags, and what nodes and edges are."""
    nodes, width = draw(st.integers(2, 9)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    preds = np.array([rng.integers(0, max(1, node), width) for node in range(nodes)])
    values = rng.choice(draw(st.sampled_from([[0.1, 0.3, 0.7], [0, 1.0, 2.0]])), (2, nodes, width))
    duration, lag = values[0, :, 0], values[1]
    duration[0] = lag[0] = 0.0
    lag[preds == 0] = 0.0
    kinds = rng.integers(0, 2, (nodes, width + 1)) * rng.choice([1, 10**30], (nodes, width + 1))
    return preds, duration, lag, Kinds(kinds[:, 0].tolist(), kinds[:, 1:].tolist())


def every_path(preds, duration, lag, kinds):
    """Yield length, edges and kind of all paths, from the source to what nothing waits for."""
    ends = set(range(1, len(preds))) - set(preds.ravel().tolist())

    def paths_to(node):
        if node == 0:
            yield 0.0, (), 0
            return
        columns = [c for c, before in enumerate(preds[node].tolist()) if before] or [0]
        for column in columns:
            for length, edges, kind in paths_to(int(preds[node, column])):
                kind += kinds.edges[node][column] + kinds.nodes[node]
                length = length + lag[node, column] + duration[node]
                yield float(length), (*edges, (node, column)), kind

    for node in sorted(ends):
        yield from paths_to(node)


@given(graph=graphs())
def test_ranks_all_paths_of_a_graph(graph):
    *nodes_and_edges, kinds = graph
    paths = list(every_path(*graph))
    ends = np.unique([edges[-1][0] for _, edges, _ in paths])
    result = list(PathRanking(*nodes_and_edges, ends).paths())
    # the very sums, bit by bit, in order; and no path twice
    assert [path.length for path in result] == sorted((p[0] for p in paths), reverse=True)
    listed = [tuple(zip(path.nodes, path.columns, strict=True)) for path in result]
    assert sorted(listed) == sorted(edges for _, edges, _ in paths)
    longest = {}
    for length, _, kind in paths:
        longest[kind] = max(length, longest.get(kind, 0.0))
    lengths_of_kinds = [path.length for path in PathRanking(*nodes_and_edges, ends, kinds).paths()]
    assert lengths_of_kinds == sorted(longest.values(), reverse=True)


@given(graph=graphs())
def test_tails_are_what_is_left_behind_each_node(graph):
    preds, duration, lag, _ = graph
    network = nx.MultiDiGraph()
    network.add_nodes_from(range(len(preds)))
    for node in range(1, len(preds)):
        for before, wait in zip(preds[node].tolist(), lag[node].tolist(), strict=True):
            network.add_edge(before, node, weight=wait + duration[node])
    expected = [0.0] * len(preds)
    for node in reversed([*nx.topological_sort(network)]):
        remaining = [w + expected[v] for _, v, w in network.out_edges(node, data="weight")]
        expected[node] = max(remaining, default=0.0)
    tails = longest_path.times_to_end(preds, duration, lag)
    np.testing.assert_allclose(tails, expected, rtol=1e-12)


@given(
    case=strategies.cases(pairs=True, step_end=True),
    link=st.sampled_from(LINKS),
    distinct=st.booleans(),
)
@settings(max_examples=30)
def test_counts_are_what_is_on_the_path(case, link, distinct):
    run = pj.evaluate(case.table, case.costs, link=link)
    result = pj.analysis.longest_paths(run, 12, distinct_counts=distinct)
    assert result[0].length == run.makespan
    assert result[0].nodes == tuple(np.flatnonzero(run.critical)[1:])  # the one of the gradient
    assert len({(p.nodes, p.messages, *p.counts.values()) for p in result}) == len(result)
    if distinct:
        assert len({tuple(path.counts.values()) for path in result}) == len(result)
    for path in result:
        # and the messages that are no nodes
        spent = sum(float(run.node_duration[node]) for node in path.nodes)
        assert spent <= path.length + 1e-9
        letters = Counter(
            letter
            for op in path.ops
            for letter, _, _ in reference.split(op)
            if case.costs.pair is None or not op.endswith("OVERLAP_F_B")
        )
        assert {name: path.counts[name] for name in letters if name in path.counts} == {
            name: count for name, count in letters.items() if name in path.counts
        }
        sent = Counter("c_" + message.strip("0123456789")[-1] for message in path.messages)
        if link in ("delay", "rendezvous"):
            assert {n: c for n, c in path.counts.items() if n[0] == "c" and c} == sent


def test_counts_times_costs_are_the_length(data):
    table = pj.read_table(data / "DualPipeV_4_8.csv")
    prices = {"F": 1.0, "I": 1.25, "W": 0.75, "c": 0.125, "latency": 0.0625}
    costs = pj.Costs(forward=1.0, input_grad=1.25, weight_grad=0.75, latency=0.0625, transmit=0.125)
    prices["B"] = 2.0
    for link, message in (("delay", 0.1875), ("queued", 0.125), ("rendezvous", 0.1875)):
        run = pj.evaluate(table, costs, link=link)
        for path in pj.analysis.longest_paths(run, 30, distinct_counts=True):
            prices_by_name = {**prices, "c": message}
            total = sum(n * prices_by_name[name.split("_")[0]] for name, n in path.counts.items())
            assert total == path.length, (link, path)
            assert ("latency_F" in path.counts) == (link == "queued")
    with_pairs = pj.Costs(forward=1.0, input_grad=1.25, weight_grad=0.75, pair=2.5)
    for path in pj.analysis.longest_paths(pj.evaluate(table, with_pairs), 30, distinct_counts=True):
        prices_by_name = {**prices, "c": 0.0, "pair": 2.5}
        total = sum(n * prices_by_name[name.split("_")[0]] for name, n in path.counts.items())
        assert total == path.length
        assert path.counts["pair"] > 0


def test_on_the_command_line(answer, call):
    result = answer("evaluate", *SMALL, *TIMES, "--paths", 5)
    paths = result["paths"]
    assert [set(path) for path in paths] == [{"length", "behind", "counts", "ops", "messages"}] * 5
    assert paths[0]["length"] == result["makespan"]
    assert paths[0]["counts"] == {"F": 4, "B": 6, "c_F": 3, "c_B": 4}
    lengths = [path["length"] for path in paths]
    assert lengths == sorted(lengths, reverse=True)
    distinct = answer("evaluate", *SMALL, *TIMES, "--paths", 5, "--distinct-counts")["paths"]
    counts = [tuple(path["counts"].values()) for path in distinct]
    assert len(set(counts)) == 5
    code, out, _ = call("evaluate", *SMALL, *TIMES, "--paths", 3)
    assert code == 0
    assert "0F0 1F0 2F0 3F0 .. " in out


def test_a_long_schedule_takes_no_recursion():
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=3000)
    result = pj.analysis.longest_paths(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)), 3)
    assert [path.shorter_by for path in result] == [0.0] * 3
    assert len(set(map(tuple, itertools.chain([path.nodes] for path in result)))) == 3


@pytest.mark.parametrize("dtype", [np.int64, object])
def test_many_runs_are_single_runs(dtype, monkeypatch):
    """Paths are the same, ties included, and whole numbers of any size are added exactly."""
    rng = np.random.default_rng(0)
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=6)
    for link in ("delay", "queued", "rendezvous"):
        program = pj.lower(table, link=link)
        # few values: ties, and lengths that differ by less than a float of their size can tell
        high, low = rng.integers(0, 2, (2, program.layout.size, 40)).astype(dtype)
        costs = high * (2**54 if dtype is np.int64 else 2**70) + low
        costs[0] = 0
        index = program.preds, program.duration_index, program.lag_index
        result = []
        for few in (0, 100):
            monkeypatch.setattr(longest_path, "FEW_RUNS", few)
            result.append(longest_path.longest_paths_of_many(*map(np.asarray, index), costs))
        for first, second in zip(*result, strict=True):
            assert first.tolist() == second.tolist()
        lengths, counts = result[0]
        assert (counts * costs).sum(axis=0).tolist() == lengths.tolist()


def test_an_update_that_takes_no_time_is_an_op_of_its_path():
    """Pictures leave it out; a path counts it, and a run that is changed knows it."""
    table = pj.schedules.build("gpipe", num_workers=1, num_microbatches=1)
    run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, all_reduce=1.0, update=0.0))
    (path,) = pj.analysis.longest_paths(run, 1)
    assert path.counts["U"] == sum(op.endswith("U") or "U" in op for op in path.ops)
    assert {bar.ops[0].phase.name for bar in bars(run)} == set("FBAU")
    assert {bar.ops[0].phase.name for bar in bars(run, untimed=False)} == set("FBA")
