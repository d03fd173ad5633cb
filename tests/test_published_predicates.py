"""Circular pipelines as Shardy's MPMD states them: which of two ops of a worker comes first.

openxla/shardy, integrations/python/jax/mpmd/schedule_impl.py (snapshot a0277a8), told again here:
a predicate names pairs of ops, of which the first has to stand before the second in a worker's row.
"""

import itertools

import pytest
from hypothesis import given, strategies as st
from legal_sizes import build

import pipejax as pj


def circular(a, b, p, *, reverse, group=None):
    """Groups of P microbatches on the first stage of a worker, then on its second, and so on."""
    if a.phase != b.phase:
        return a.phase == pj.Phase.F
    key = [(op.microbatch // (group or p), op.stage, op.microbatch) for op in (a, b)]
    if a.phase == pj.Phase.F:
        return key[0] < key[1]
    if reverse:
        return key[0] > key[1]
    back = [(group, -stage, microbatch) for group, stage, microbatch in key]
    return back[0] < back[1]


def check(table, **options):
    for row in table.rows():
        ops = [op for cell in row for op in cell]
        for later, earlier in itertools.combinations(reversed(ops), 2):
            message = circular(later, earlier, table.num_workers, **options)
            assert not message, f"{later} should stand before {earlier}"


REVERSE = {"circular": True, "looped-bfs": False}


@pytest.mark.parametrize("name", REVERSE)
@given(workers=st.integers(1, 7), per_worker=st.integers(1, 4), groups=st.integers(1, 3))
def test_circular_pipelines(name, workers, per_worker, groups):
    """A round is a group of P microbatches; ours, as MaxText's, go round with all of them."""
    per_worker = per_worker if name == "circular" else max(2, per_worker)
    count = workers * groups
    arguments = {"workers": workers, "microbatches": count, "stages_per_worker": per_worker}
    table, reverse = build(name, **arguments), REVERSE[name]
    check(table, reverse=reverse, group=count)
    if groups == 1 or per_worker == 1:
        check(table, reverse=reverse)
        return
    with pytest.raises(AssertionError, match="should stand before"):  # Shardy's rounds are smaller
        check(table, reverse=reverse)
