"""Schedules as Shardy's MPMD pipelines state them: which of two ops of a worker comes first.

openxla/shardy, integrations/python/jax/mpmd/schedule_impl.py (snapshot a0277a8), told again here:
a predicate names pairs of ops, of which the first has to stand before the second in a worker's row.
Its Ba and Bw are I and W; a whole backward counts as Ba. P is the number of workers.
"""

import itertools

import pytest
from hypothesis import given, strategies as st

import pipejax as pj

F, B, I, W = (pj.Phase[letter] for letter in "FBIW")  # noqa: E741
GRADIENT = (B, I)  # what has an input gradient


def gpipe(a, b, p):
    return (a.phase != F, a.microbatch) < (b.phase != F, b.microbatch)


def one_f_one_b(a, b, p):
    if a.phase == b.phase:
        return a.microbatch < b.microbatch
    if b.phase == F:
        return a.microbatch == b.microbatch - p + a.stage
    return a.microbatch == b.microbatch + p - a.stage - 1


def circular(a, b, p, *, reverse, group=None):
    """Groups of P microbatches on the first stage of a worker, then on its second, and so on."""
    if a.phase != b.phase:
        return a.phase == F
    key = [(op.microbatch // (group or p), op.stage, op.microbatch) for op in (a, b)]
    if a.phase == F:
        return key[0] < key[1]
    if reverse:
        return key[0] > key[1]
    back = [(group, -stage, microbatch) for group, stage, microbatch in key]
    return back[0] < back[1]


def zb_h1(a, b, p):
    later = b.microbatch - a.microbatch
    if a.phase == I and b.phase == F and later == p - a.stage:
        return True
    if a.phase == F and b.phase == I:
        return later == a.stage + 1 - p
    if b.phase == F:
        return (a.phase == W or (a.phase == I and a.stage == 0)) and later == p
    if a.phase == I and b.phase == W:
        return later == -a.stage
    return a.phase == W and b.phase == I and later == a.stage + 1


def zb_h2(a, b, p):
    ahead, behind = (2 * (p - stage) - 1 for stage in (a.stage, p - a.stage - 1))
    later = b.microbatch - a.microbatch
    if a.phase == F and b.phase != F and a.microbatch < ahead:
        return True
    if a.phase == I and b.phase == F and b.microbatch >= ahead:
        return later == ahead
    if a.phase == F and b.phase == I:
        return later == 1 - ahead
    if a.phase == I and b.phase == W:
        return later == 1 - behind
    return a.phase == W and b.phase == I and later == behind


def check(predicate, table, **options):
    for row in table.rows():
        ops = [op for cell in row for op in cell]
        for later, earlier in itertools.combinations(reversed(ops), 2):
            said = predicate(later, earlier, table.num_workers, **options)
            assert not said, f"{later} should stand before {earlier}"


def build(name, workers, microbatches, **options):
    return pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches, **options)


PREDICATES = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2}
sizes = st.integers(1, 7)


@pytest.mark.parametrize("name", PREDICATES)
@given(workers=sizes, microbatches=st.integers(1, 18))
def test_what_is_said_to_come_first_does(name, workers, microbatches):
    check(PREDICATES[name], build(name, workers, microbatches))


REVERSE = {"circular": True, "looped-bfs": False}


@pytest.mark.parametrize("name", REVERSE)
@given(workers=sizes, per_worker=st.integers(1, 4), groups=st.integers(1, 3))
def test_circular_pipelines(name, workers, per_worker, groups):
    """A round is a group of P microbatches; ours, as MaxText's, go round with all of them."""
    per_worker = per_worker if name == "circular" else max(2, per_worker)
    count = workers * groups
    given = {"workers": workers, "microbatches": count, "stages_per_worker": per_worker}
    table, reverse = build(name, **given), REVERSE[name]
    check(circular, table, reverse=reverse, group=count)
    if groups == 1 or per_worker == 1:
        check(circular, table, reverse=reverse)
        return
    with pytest.raises(AssertionError, match="should stand before"):  # Shardy's rounds are smaller
        check(circular, table, reverse=reverse)


@pytest.mark.parametrize("name", PREDICATES)
def test_an_op_that_comes_too_early_is_seen(name):
    """Each predicate orders what may change its place: forwards of later microbatches."""
    table = build(name, 4, 8)
    last = max(op for cell in next(table.rows()) for op in cell if op.phase == F)
    rows = [[cell for cell in row if cell] for row in table.rows()]
    rows[0].remove((last,))
    rows[0].insert(0, (last,))
    with pytest.raises(AssertionError, match="should stand before"):
        check(PREDICATES[name], table.with_rows(rows))
