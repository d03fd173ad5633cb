"""Schedules with a grammar of their own, crossed over all doors that take a table."""

import itertools

import pytest

import pipejax as pj
from pipejax.schedules import EXTENDED


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
def test_every_builder_names_its_source_and_is_found(name):
    builder = EXTENDED[name]
    assert any(word in builder.source for word in ("arXiv", "Megatron"))
    assert builder.summary
    assert pj.schedules.named(name.upper()) == name
    assert name in pj.schedules.names()
    with pytest.raises(ValueError, match="num_workers must be a whole number of at least 1"):
        builder.function(0, 4)
