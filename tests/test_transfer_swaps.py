"""Swaps of transfers in a queue: what they are estimated at, and what they lead to."""

import numpy as np
import pytest
import strategies
from hypothesis import given, settings, strategies as st

import pipejax as pj
from pipejax.schedules.table.links import QUEUES
from pipejax.search.orders.transfer_graph import (
    WaitsFor,
    heads_and_tails,
    order_makespan,
    priority_order,
    transfer_graph,
)
from pipejax.search.orders.transfer_swaps import SwapSearch

TABLE = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)


def begun(table, costs, queues, seed=0):
    graph = transfer_graph(table, costs, pj.Links("rendezvous", queues))
    waits = WaitsFor.from_preds(graph.preds)
    order, _ = priority_order(graph, waits, heads_and_tails(graph).tail, 0.2)
    return graph, order, SwapSearch(graph, order, np.random.default_rng(seed))


def through_node(search, node):
    """The longest path through a node, of what a search keeps up to date."""
    return search._forward.finish[node] + search._backward.finish[-node] - search._duration[node]


def check_times(graph, search):
    """Ends are those of the engine, and those from behind lead to the same makespan."""
    assert search.makespan == order_makespan(graph, search.order)
    through = [through_node(search, node) for node in range(1, len(graph.duration))]
    assert max(through) == pytest.approx(search.makespan, rel=1e-12)


@given(case=strategies.cases(pairs=True, step_end=True), queues=st.sampled_from(QUEUES))
@settings(max_examples=25)
def test_times_are_those_of_the_engine(case, queues):
    graph, order, search = begun(case.table, case.costs, queues)
    assert search.makespan == order_makespan(graph, order)
    for _ in range(8):
        if not search.step(0.0):
            break
        check_times(graph, search)
    assert sorted(search.order.tolist()) == list(range(len(graph.program.messages.producer)))


@pytest.mark.parametrize("queues", QUEUES)
def test_a_search_goes_on_after_random_swaps(queues):
    costs = pj.Costs.uniform(TABLE, forward=1.0, backward=2.1, transfer=1.3)
    graph, order, search = begun(TABLE, costs, queues)
    for _ in range(30):
        search.step(0.0)
        search.shake(10)
        check_times(graph, search)
    assert search.order.tolist() != order.tolist()


def test_nothing_to_swap():
    alone = pj.ScheduleTable.from_rows([["0F0", "0B0"]])
    _, _, search = begun(alone, pj.Costs(forward=1.0, backward=2.0), "worker")
    assert not search.step(0.0)
    search.shake(3)
    assert search.makespan == 3.0
