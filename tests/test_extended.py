"""Schedules with a grammar of their own, crossed over all doors that take a table."""

import itertools
import json

import numpy as np
import pytest

import pipejax as pj
from pipejax.schedules import EXTENDED
from pipejax.schedules.table.table_files import from_json, to_json

LINKS = [pj.Links("delay"), pj.Links("rendezvous", queues="pair")]


def small(name):
    return pj.schedules.build(name, num_workers=4, num_microbatches=8)


def costs_of(table, seed=0):
    """Times of all kinds that a table has, each another multiple of an eighth."""
    rng = np.random.default_rng(seed)
    own = {kind.time: rng.integers(1, 16) / 8 for kind in table.grammar.kinds.values()}
    usual = {field: rng.integers(8, 16) / 8 for field in ("forward", "input_grad", "weight_grad")}
    return pj.Costs(**usual, transmit=0.125, others=own)


@pytest.mark.parametrize("name", EXTENDED)
def test_what_is_said_to_be_legal_can_be_built_and_nothing_else(name):
    legal = {
        "any P and M": lambda p, m: True,
        "P at least 3, any M": lambda p, m: p >= 3,
        "P and M even, M at least 2P": lambda p, m: p % 2 == m % 2 == 0 and m >= 2 * p,
        "any P, M at least 2P": lambda p, m: m >= 2 * p,
    }[EXTENDED[name].legal]
    for p, m in itertools.product(range(1, 5), (1, 3, 4, 8)):
        try:
            table = pj.schedules.build(name, num_workers=p, num_microbatches=m)
        except ValueError:
            assert not legal(p, m), (p, m)
        else:
            assert legal(p, m), (p, m)
            assert (table.num_workers, table.num_microbatches, table.name) == (p, m, name)


@pytest.mark.parametrize("name", EXTENDED)
def test_a_file_holds_all_of_it(name):
    table = small(name)
    again = from_json(json.loads(to_json(table)))
    assert str(again) == str(table)
    assert (again.grammar, again.stage_shares) == (table.grammar, table.stage_shares)
    assert (again.pipe_of_microbatch == table.pipe_of_microbatch).all()


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.model)
@pytest.mark.parametrize("name", EXTENDED)
def test_a_certificate_of_a_run_is_true(name, link):
    table = small(name)
    run = pj.evaluate(table, costs_of(table), link=link)
    assert run.makespan >= run.busy.max()
    assert pj.verify(pj.certificate(run)).makespan == run.makespan


@pytest.mark.parametrize("name", EXTENDED)
def test_every_builder_names_its_source_and_is_found(name):
    builder = EXTENDED[name]
    assert any(word in builder.source for word in ("arXiv", "Megatron"))
    assert builder.summary
    assert pj.schedules.named(name.upper()) == name
    assert name in pj.schedules.names()
    with pytest.raises(ValueError, match="num_workers must be a whole number of at least 1"):
        builder.function(0, 4)
