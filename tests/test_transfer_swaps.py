"""Swaps of transfers in a queue: what they are estimated at, and what they lead to."""

import numpy as np
import pytest
import strategies
from hypothesis import given, settings, strategies as st

import pipejax as pj
from pipejax.schedules.table.links import QUEUES
from pipejax.search.orders.transfer_graph import (
    finish_of_orders,
    heads_and_tails,
    priority_order,
    transfer_graph,
)
from pipejax.search.orders.transfer_swaps import SwapSearch
from pipejax.search.orders.transfers import TransferSearch

TABLE = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)


def begun(table, costs, queues, seed=0):
    graph = transfer_graph(table, costs, pj.Links("rendezvous", queues))
    order = priority_order(graph, heads_and_tails(graph), 0.2)
    return graph, order, SwapSearch(graph, order, np.random.default_rng(seed))


@given(case=strategies.cases(pairs=True, step_end=True), queues=st.sampled_from(QUEUES))
@settings(max_examples=25)
def test_times_are_those_of_the_engine(case, queues):
    graph, order, search = begun(case.table, case.costs, queues)
    assert search.makespan == finish_of_orders(graph, order[None]).max()
    for _ in range(8):
        if not search.step(0.0):
            break
        (finish,) = finish_of_orders(graph, search.order[None])
        assert search.makespan == finish.max()
    assert sorted(search.order.tolist()) == list(range(graph.num_transfers))


@pytest.mark.parametrize("queues", QUEUES)
def test_an_estimate_is_the_longest_path_through_both(queues, monkeypatch):
    costs = pj.Costs.uniform(TABLE, forward=1.0, backward=2.1, transfer=3.3)
    _, _, search = begun(TABLE, costs, queues)
    expected, apply = [], SwapSearch._apply

    def noted(search, swap):
        expected.append((swap, search._estimate(swap)))
        return apply(search, swap)

    monkeypatch.setattr(SwapSearch, "_apply", noted)
    for _ in range(60):
        if not search.step(0.0):
            break
        swap, estimate = expected[-1]
        through = [
            search._head(node) + search._tail(node) - search._duration[node] for node in swap[:2]
        ]
        assert estimate == pytest.approx(max(through), rel=1e-12)
        assert estimate <= search.makespan * (1 + 1e-12)
    assert search.moves >= 10


def test_swaps_find_more_in_fewer_orders():
    costs = pj.Costs.uniform(TABLE, forward=1.0, backward=2.0, transfer=1.5)
    found = {}
    for swaps in (0, 64):
        search = TransferSearch(TABLE, costs, pj.Links("rendezvous"), 0, swaps=swaps)
        search.run(6, None)
        found[swaps] = search.value, search.evaluated
    assert found[64][0] < found[0][0]


def test_nothing_to_swap():
    alone = pj.ScheduleTable.from_rows([["0F0", "0B0"]])
    _, _, search = begun(alone, pj.Costs(forward=1.0, backward=2.0), "worker")
    assert not search.step(0.0)
    assert search.makespan == 3.0
