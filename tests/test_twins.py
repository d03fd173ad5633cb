"""The recurrence has a twin on the host: nothing is compiled, and every bit is the same."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import strategies
from compilations import jax_events
from daily import daily
from jitter_cases import LINKS, build, make_costs
from legal_sizes import SLICED

import pipejax as pj
from pipejax.analysis.paths.head_of_line_blocking import queue_makespans
from pipejax.base import longest_path
from pipejax.engine.pricing import price
from pipejax.engine.recurrence import critical_path
from pipejax.schedules import REGISTRY

EQUAL = pj.Costs(forward=1, backward=2, input_grad=1, weight_grad=1, transmit=0.5, offload=1)


@pytest.mark.parametrize(("ties", "name"), daily(itertools.product([False, True], REGISTRY)))
def test_the_twins_agree_to_the_last_bit(name, ties):
    table = build(name, m=2 if name in SLICED else 8)
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
    table = build("chimera", m=16)
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
