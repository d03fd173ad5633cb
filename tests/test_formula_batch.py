"""Batches that move few costs: their closed form equals the recurrence."""

import numpy as np
import pytest
from daily import daily

import pipejax as pj
from pipejax.analysis.formula import facets as batch
from pipejax.analysis.formula.facets import makespans_by_form


def lowered(name, **options):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8, **options)
    return table, pj.lower(table)


def make_costs(table, size, dtype, moving):
    """Stages that differ and stay; messages, and F of the last stage, that move where wanted."""
    rng = np.random.default_rng(1)
    forward = np.repeat(rng.uniform(1, 2, (1, table.num_stages)), size, axis=0)
    if moving > 2:
        forward[:, -1] *= rng.uniform(1, 3, size)
    if moving > 3:
        forward[:, :2] *= rng.uniform(1, 3, (size, 2))
    message = rng.uniform(0, 3, (2, size, 1, 1, 1))
    leaves = {
        "forward": forward,
        "backward": np.full((size, 1), 2.1),
        "latency": message[0] if moving > 1 else np.zeros((size, 1, 1, 1)),
        "transmit": message[1],
    }
    return pj.Costs(**{name: leaf.astype(dtype) for name, leaf in leaves.items()})


@pytest.mark.parametrize(
    ("name", "dtype", "moving"),
    daily(
        [
            (*case, moving)
            for case in [("1f1b", np.float64), ("chimera", np.float32)]
            for moving in (1, 2, 3)
        ]
    ),
)
def test_the_form_is_the_recurrence(name, dtype, moving):
    table, program = lowered(name)
    costs = make_costs(table, 500, dtype, moving)
    result, expected = makespans_by_form(program, costs), np.asarray(pj.makespans(program, costs))
    assert result.dtype == expected.dtype == dtype
    np.testing.assert_allclose(result, expected, rtol=50 * np.finfo(dtype).eps)


def test_what_moves_in_many_ways_is_left_to_the_recurrence():
    table, program = lowered("1f1b")
    assert makespans_by_form(program, make_costs(table, 50, float, 4)) is None
    still = pj.Costs(forward=np.ones((50, 1)), backward=2.0)
    assert makespans_by_form(program, still) is None


def test_every_batch_is_checked(monkeypatch):
    table, program = lowered("1f1b")
    monkeypatch.setattr(batch, "largest_sum", lambda facets, values: 1.001 * values[1] + 40)
    with pytest.raises(AssertionError, match="the closed form of 1f1b is off by"):
        makespans_by_form(program, make_costs(table, 50, float, 1))
