"""Swaps of transfers in a queue: what they are estimated at, and what they lead to."""

import numpy as np
import pytest
import strategies
from hypothesis import given, settings, strategies as st

import pipejax as pj
from pipejax.schedules.table.links import QUEUES
from pipejax.search.orders.transfer_graph import (
    WaitsFor,
    finish_of_orders,
    heads_and_tails,
    priority_order,
    transfer_graph,
)
from pipejax.search.orders.transfer_swaps import SwapSearch
from pipejax.search.orders.transfers import TransferSearch, apply_moves, random_moves

TABLE = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)


def begun(table, costs, queues, seed=0):
    graph = transfer_graph(table, costs, pj.Links("rendezvous", queues))
    waits = WaitsFor.from_preds(graph.preds)
    order, _ = priority_order(graph, waits, heads_and_tails(graph).tail, 0.2)
    return graph, order, SwapSearch(graph, order, np.random.default_rng(seed))


def through_node(search, node):
    """The longest path through a node, of what a search keeps up to date."""
    return search._ahead.finish[node] + search._backward.finish[-node] - search._duration[node]


def check_times(graph, search):
    """Ends are those of the engine, and those from behind lead to the same makespan."""
    (finish,) = finish_of_orders(graph, search.order[None])
    assert (search.finish == finish).all()
    assert search.makespan == finish.max()
    through = [through_node(search, node) for node in range(1, len(finish))]
    assert max(through) == pytest.approx(search.makespan, rel=1e-12)


@given(case=strategies.cases(pairs=True, step_end=True), queues=st.sampled_from(QUEUES))
@settings(max_examples=25)
def test_times_are_those_of_the_engine(case, queues):
    graph, order, search = begun(case.table, case.costs, queues)
    assert search.makespan == finish_of_orders(graph, order[None]).max()
    for _ in range(8):
        if not search.step(0.0):
            break
        check_times(graph, search)
    assert sorted(search.order.tolist()) == list(range(graph.num_transfers))


@pytest.mark.parametrize("queues", QUEUES)
def test_a_search_goes_on_from_another_order(queues):
    costs = pj.Costs.uniform(TABLE, forward=1.0, backward=2.1, transfer=1.3)
    graph, order, search = begun(TABLE, costs, queues)
    rng = np.random.default_rng(0)
    for _ in range(30):
        search.step(0.0)
        for _ in range(10):
            (order,) = apply_moves(order, random_moves(graph, order, 1, rng))
        search.begin(order)
        assert search.makespan == finish_of_orders(graph, order[None]).max()
        check_times(graph, search)


def test_swaps_find_more_in_fewer_orders():
    costs = pj.Costs.uniform(TABLE, forward=1.0, backward=2.0, transfer=1.5)
    result = {}
    for swaps in (0, 64):
        search = TransferSearch(TABLE, costs, pj.Links("rendezvous"), 0, swaps=swaps)
        search.run(6, None)
        result[swaps] = search.value, search.evaluated
    assert result[64][0] < result[0][0]


def test_nothing_to_swap():
    alone = pj.ScheduleTable.from_rows([["0F0", "0B0"]])
    _, _, search = begun(alone, pj.Costs(forward=1.0, backward=2.0), "worker")
    assert not search.step(0.0)
    assert search.makespan == 3.0
