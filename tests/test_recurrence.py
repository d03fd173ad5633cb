"""The recurrence against an event loop and networkx, and what leaves it as it is."""

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
import reference
import strategies
from compilations import jax_events
from daily import daily
from hypothesis import given, settings, strategies as st
from jitter_cases import make_costs
from legal_sizes import SLICED, build

import pipejax as pj
from pipejax.analysis.paths.head_of_line_blocking import queue_makespans
from pipejax.base import longest_path
from pipejax.engine.pricing import NodeCosts, cost_vector, price
from pipejax.engine.recurrence import critical_path
from pipejax.schedules import REGISTRY

LINKS = [("delay", "worker"), ("queued", "worker"), ("blocking", "worker")]
LINKS += [("rendezvous", queues) for queues in ("worker", "pair", "direction")]
NODES, PREDS = 512, 8  # one compiled shape for all drawn programs
RANDOM = st.integers(0, 2**32 - 1)

_path = jax.jit(critical_path)


def lowered(table, costs, link="delay", queues="worker", host_links=()):
    program = pj.lower(table, link=pj.Links(link, queues, host_links))
    program = strategies.padded(program, num_nodes=NODES, max_preds=PREDS)
    return program, price(program, costs)


def makespan(table, costs, link="delay", queues="worker"):
    program, priced = lowered(table, costs, link, queues)
    return float(_path(program.preds, priced).finish.max())


def get_graph(program, priced):
    """The program as a networkx graph without padding; a node's duration is on its incoming edges."""
    graph = nx.DiGraph()
    arrays = [np.asarray(x) for x in (program.preds, priced.lag, priced.duration)]
    last = max(np.nonzero(column)[0].max(initial=0) for column in arrays)  # behind it is padding
    preds, lags, duration = (column.tolist() for column in arrays)
    for v in range(1, int(last) + 1):
        for u, lag in zip(preds[v], lags[v], strict=True):
            weight = lag + duration[v]
            if not graph.has_edge(u, v) or graph[u][v]["weight"] < weight:
                graph.add_edge(u, v, weight=weight)
    return graph


@pytest.mark.parametrize(("link", "queues"), LINKS)
@given(data=st.data())
def test_equals_event_loop_and_networkx(link, queues, data):
    cells = data.draw(st.booleans())
    arguments = {"communication": cells, "by_microbatch": data.draw(st.booleans())}
    case = data.draw(strategies.cases(**arguments, pairs=True, step_end=True))
    groups = data.draw(strategies.host_links(case.table.num_workers))
    more = data.draw(strategies.carried(link, case.table.num_workers))
    links = pj.Links(link, queues, groups, **more)
    pipes = case.table.pipe_of_microbatch.tolist()
    try:
        expected = reference.Run(case.rows, pipes, case.theirs, link, queues, groups, **more)
    except reference.DeadlockError:  # the order of a shared link need not be that of the rows
        with pytest.raises(pj.ScheduleError, match="deadlock"):
            pj.lower(case.table, link=links, costs=case.costs)
        return
    # all-reduces that cost nothing are left out: on a shared link they would wait for their turn
    result = pj.evaluate(case.table, case.costs, link=links)
    program = strategies.padded(result.program, num_nodes=NODES, max_preds=PREDS)
    priced = price(program, case.costs)
    finish = np.asarray(_path(program.preds, priced).finish)
    assert finish.max() == pytest.approx(expected.makespan, rel=1e-12)
    graph = get_graph(program, priced)
    assert nx.dag_longest_path_length(graph) == pytest.approx(finish.max(), rel=1e-12)
    assert result.makespan == pytest.approx(expected.makespan, rel=1e-12)
    np.testing.assert_allclose(result.busy, expected.busy(), rtol=1e-12)
    assert result.peak_in_flight.tolist() == expected.peak_in_flight()
    for cell in np.ndindex(result.start.shape):
        if cell in expected.end:
            assert result.start[cell] == pytest.approx(expected.start[cell])
            assert result.finish[cell] == pytest.approx(expected.end[cell])


@given(case=strategies.cases(pairs=True), link=st.sampled_from(LINKS))
def test_euler(case, link):  # ties included
    program, priced = lowered(case.table, case.costs, *link)
    path = _path(program.preds, priced)
    total = float((path.nodes * priced.duration).sum() + (path.edges * priced.lag).sum())
    assert total == pytest.approx(float(path.finish.max()), rel=1e-12)
    # the path is a path: one edge into every node of it but the source
    assert np.asarray(path.edges)[1:].sum(axis=1).tolist() == np.asarray(path.nodes)[1:].tolist()


@given(case=strategies.cases(), seed=RANDOM, link=st.sampled_from(LINKS[:3]))
def test_relabelling_changes_nothing(case, seed, link):
    # (not under rendezvous without cells, whose order breaks ties by number)
    rng = np.random.default_rng(seed)
    table = case.table
    workers = rng.permutation(table.num_workers)
    microbatches = rng.permutation(table.num_microbatches)
    rows = [[] for _ in case.rows]
    for worker, row in enumerate(table.rows()):
        rows[workers[worker]] = [
            tuple(op._replace(microbatch=int(microbatches[op.microbatch])) for op in cell)
            for cell in row
        ]
    microbatch_pipes = np.empty_like(table.pipe_of_microbatch)
    microbatch_pipes[microbatches] = table.pipe_of_microbatch
    other = pj.ScheduleTable.from_rows(
        rows, placement=workers[table.placement], pipe_of_microbatch=microbatch_pipes
    )
    assert makespan(other, case.costs, *link) == makespan(table, case.costs, *link)


@settings(max_examples=15)
@given(case=strategies.cases(), seed=RANDOM, link=st.sampled_from(LINKS))
def test_vmap_jit_and_float32(case, seed, link):
    program, priced = lowered(case.table, case.costs, *link)
    rng = np.random.default_rng(seed)
    many = NodeCosts(*(c[None] * rng.random((3, *[1] * c.ndim)) for c in priced))
    ends = jax.vmap(lambda c: _path(program.preds, c).finish.max())(many)
    for k in range(3):
        entry = NodeCosts(*(c[k] for c in many))
        alone = _path(program.preds, entry).finish.max()
        assert float(ends[k]) == float(alone)
        single = NodeCosts(*(jnp.asarray(c, jnp.float32) for c in entry))
        assert float(_path(program.preds, single).finish.max()) == pytest.approx(
            float(alone), rel=1e-5, abs=1e-5
        )


@settings(max_examples=40)
@given(seed=RANDOM, size=st.integers(2, 40))
def test_random_graphs_equal_networkx(seed, size):  # graphs that are no schedules
    rng = np.random.default_rng(seed)
    preds = np.zeros((NODES, PREDS), np.int32)
    lag, duration = np.zeros((NODES, PREDS)), np.zeros(NODES)
    for v in range(1, size):
        preds[v] = rng.integers(0, v, PREDS)
        lag[v], duration[v] = rng.integers(0, 9, PREDS), rng.integers(0, 9)
    finish = _path(preds, NodeCosts(duration, lag)).finish
    graph = nx.DiGraph()
    for v in range(1, size):
        for u, delay in zip(preds[v], lag[v], strict=True):
            weight = max(delay + duration[v], graph.get_edge_data(u, v, {"weight": 0})["weight"])
            graph.add_edge(int(u), v, weight=weight)
    assert float(finish.max()) == nx.dag_longest_path_length(graph)


def test_cost_vector_is_the_same_in_numpy_and_jax():
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
    costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=0.1, latency=0.2)
    program = pj.lower(table)
    host = cost_vector(program, costs)
    device = cost_vector(program, jax.tree.map(jnp.asarray, costs))
    assert isinstance(host, np.ndarray)
    assert np.array_equal(host, device)


# The recurrence has a twin on the host: nothing is compiled, and every bit is the same

EQUAL = pj.Costs(forward=1, backward=2, input_grad=1, weight_grad=1, transmit=0.5, offload=1)


@pytest.mark.parametrize(("ties", "name"), daily(itertools.product([False, True], REGISTRY)))
def test_the_twins_agree_to_the_last_bit(name, ties):
    table = build(name, microbatches=2 if name in SLICED else 8)
    costs = EQUAL if ties else make_costs(table)
    for link, queues in LINKS:
        run = pj.evaluate(table, costs, link=pj.Links(link, queues))
        program, n = run.program, run.program.num_nodes
        padded = strategies.padded(program, num_nodes=512, max_preds=8)  # one compilation for all
        priced = price(padded, costs)
        theirs = critical_path(padded.preds, priced)
        assert np.array_equal(run.node_finish, theirs.finish[:n])
        assert np.array_equal(run.critical, theirs.nodes[:n])
        duration, lag = (np.asarray(part)[:n] for part in priced)
        lag, preds = lag[:, : program.max_preds], program.preds
        finish = longest_path.finish_times(preds, duration, lag)
        nodes, edges = longest_path.critical_path(preds, finish, lag)
        assert np.array_equal(finish, theirs.finish[:n])
        assert np.array_equal(nodes, theirs.nodes[:n])
        assert np.array_equal(edges, theirs.edges[:n, : program.max_preds])
        spare = longest_path.slack(preds, duration, lag)
        assert np.array_equal(spare, pj.analysis.slack(padded, costs)[:n])


def test_single_runs_compile_nothing():
    table = build("chimera", microbatches=16)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.3, all_reduce=0.1)

    def call():
        for link, queues in LINKS:
            run = pj.evaluate(table, costs, link=pj.Links(link, queues))
        pj.staleness(table, costs)
        pj.compare(table, costs)
        pj.links.transfer_waits(run)
        queue_makespans(table, costs)
        pj.search.messages(build("chimera"), costs, iterations=3)

    assert jax_events(call) == []
    program = pj.lower(table)
    assert jax_events(lambda: pj.analysis.slack(program, costs)) != []  # they are counted


def test_what_is_found_out_about_a_table_is_kept_with_it():
    table = build()
    program = pj.lower(table)
    assert pj.lower(table, link="delay") is program
    assert pj.lower(table, link=pj.Links("delay")) is program
    assert pj.lower(table, step_end=False) is not program
    assert pj.evaluate(table, EQUAL).program is pj.evaluate(table, EQUAL).program
    assert table.dependencies is table.dependencies
    assert pj.lower(build()) is not program
    reference = weakref.ref(program)
    del program
    assert reference() is not None
    del table
    gc.collect()
    assert reference() is None
