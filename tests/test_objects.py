"""Public objects: a brief repr, and equal after pickle and deepcopy."""

import copy
import pickle

import jax
import numpy as np
import pytest

import pipejax as pj


def objects():
    table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=8)
    costs = pj.Costs.uniform(table, forward=1.0, input_grad=1.0, weight_grad=1.0, transfer=0.5)
    run = pj.evaluate(table, costs, link="rendezvous")
    yield from (
        table,
        costs,
        run,
        run.program,
        pj.analysis.activation_memory(run),
        pj.links.transfer_waits(run),
    )
    yield pj.staleness(pj.schedules.build("pipedream", num_workers=4, num_microbatches=40))
    yield from (pj.load_model("gpt3-175b"), pj.load_system("h100"))
    yield pj.Workload(pj.load_model("gpt3-175b"), minibatch=8)
    yield pj.jitter(
        table, costs, pj.analysis.Jitter(op=pj.analysis.Distribution("lognormal", 0.1)), samples=64
    )


@pytest.fixture(scope="module")
def held():
    return list(objects())


def same(a, b):
    leaves = zip(jax.tree.leaves(get_vars(a)), jax.tree.leaves(get_vars(b)), strict=True)
    for first, second in leaves:
        if isinstance(first, np.ndarray | jax.Array | float | int | str):
            np.testing.assert_array_equal(first, second)


def get_vars(record):
    fields = record._asdict() if hasattr(record, "_asdict") else vars(record)
    return {name: value for name, value in fields.items() if name[0] != "_"}  # less what is derived


def test_pickle_and_deepcopy(held):
    for thing in held:
        for other in (pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing)):
            assert type(other) is type(thing)
            assert repr(other) == repr(thing)
            same(thing, other)


def test_records_with_arrays_are_compared_and_hashed(held):
    for thing in held:
        if not isinstance(thing, tuple):  # tuples compare their arrays
            assert thing == copy.copy(thing) or type(thing) is not pj.Costs
            assert {thing, thing} == {thing}


def test_costs_are_equal_if_all_their_times_are():
    costs = pj.Costs(forward=np.ones(4), backward=2.0, others={"X": 3.0})
    same_costs = pj.Costs(others={"X": 3}, backward=np.float32(2), forward=[1, 1, 1, 1])
    assert costs == same_costs
    assert len({costs, same_costs, copy.deepcopy(costs)}) == 1
    for other in ({"X": 4.0}, {"Y": 3.0}, {}):
        assert costs != pj.Costs(forward=np.ones(4), backward=2.0, others=other)
    assert costs != pj.Costs(forward=1.0, backward=2.0, others={"X": 3.0})
