"""Vocabulary parallelism (arXiv:2411.05288): what the paper states, and an event loop of the tests.

The authors' table (README of sail-sg/VocabularyParallelism) says of 1F1B, Vocab-1 and Vocab-2: the
same bubble, and p, p + 2 and p + 1 microbatches of activations.
"""

import math

import numpy as np
import pytest
from reference import assert_runs

import pipejax as pj

EXAMPLE = {"F": 1.0, "B": 2.0, "S": 0.5, "T": 0.5, "X": 0.2, "Y": 0.2, "Z": 0.2}
NET = ("X", "Y", "Z")
MORE = {1: 2, 2: 1}  # microbatches that a variant holds more: its reductions


def built(base, workers, microbatches, **options):
    arguments = {"num_workers": workers, "num_microbatches": microbatches}
    return pj.schedules.build(f"vocabulary-{base}", **arguments, **options)


def make_costs(table, times, hop=0.0):
    added = {kind.time: times[letters] for letters, kind in table.grammar.kinds.items()}
    fields = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
    usual = {fields[letters]: t for letters, t in times.items() if letters in fields}
    return pj.Costs(**usual, transmit=hop, others=added)


def to_waits(stages, variant, gradient):
    """Return the waits of ops in either variant, as figure 8 of the paper draws them."""
    within = {"S": "X", "Y": "S", "T": "Y", "Z": "T"}
    last = {1: "Z", 2: "Y"}[variant]

    def waits(letters, stage, m):
        if letters in within:
            return [((within[letters], stage, m), False)]
        if letters == "X":
            return [(("F", stages - 1, m), False)]
        if letters == "F":
            return [(("F", stage - 1, m), True)] if stage else []
        if letters == "W":
            return [(("I", stage, m), False)]
        before = [(("F", stage, m), False)]
        if stage < stages - 1:
            return [*before, ((gradient, stage + 1, m), True)]
        home = {"B": stages - 1, "I": 0}[gradient]  # V-Half ends on worker 0
        return [*before, ((last, f"worker {home}", m), False)]

    return waits


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("base", ["1f1b", "v-half"])
def test_runs_as_the_event_loop(base, variant):
    rng = np.random.default_rng(variant)
    gradient = "B" if base == "1f1b" else "I"
    for workers, microbatches in ((1, 2), (2, 1), (3, 4), (4, 7)):
        for overlap in (False, True):
            table = built(base, workers, microbatches, variant=variant, overlap=overlap)
            letters = "FBSTXYZ" if gradient == "B" else "FIWSTXYZ"
            used = {letter: rng.integers(1, 20) / 8 for letter in letters}
            waits = to_waits(table.num_stages, variant, gradient)
            assert_runs(table, make_costs(table, used, 0.25), waits)


def test_the_example_takes_15_8_seconds():
    """P = 2, M = 3, passes of 0.5, exchanges of 0.2, a hop of 0.1; the authors' order takes less."""
    result = []
    for overlap in (False, True):
        table = built("1f1b", 2, 3, overlap=overlap)
        result.append(pj.evaluate(table, make_costs(table, EXAMPLE, 0.1)).makespan)
    assert result == pytest.approx([15.8, 15.1])


SIZES = [(2, 8), (4, 6), (4, 16), (8, 32)]
FREE = EXAMPLE | dict.fromkeys(NET, 0.0)  # exchanges that take no time


@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
def test_the_bubble_is_that_of_1f1b(workers, microbatches):
    """(P - 1) (F + B), where a worker has F, B, S and T of each microbatch to do."""
    ideal = (workers - 1) * 3.0 + microbatches * 4.0
    result = {}
    for variant in MORE:
        for overlap in (False, True):
            table = built("1f1b", workers, microbatches, variant=variant, overlap=overlap)
            run = pj.evaluate(table, make_costs(table, FREE))
            assert run.busy.tolist() == [4.0 * microbatches] * workers
            result[variant, overlap] = run.makespan - ideal
    assert result[2, False] == 0.0
    assert max(map(abs, result.values())) <= 1.0  # S and T of one microbatch


@pytest.mark.parametrize("variant", MORE)
@pytest.mark.parametrize("base", ["1f1b", "v-half"])
def test_the_order_of_the_authors_hides_exchanges(base, variant):
    """A further microbatch takes what a worker does of it, whatever exchanges take beside."""
    work = {"F": 1.0, "B": 2.0} if base == "1f1b" else dict.fromkeys("FIW", 0.5)
    times = {**EXAMPLE, **work}
    cycles = []
    for overlap in (False, True):
        spans = []
        for count in (16, 24):
            table = built(base, 4, count, variant=variant, overlap=overlap)
            spans.append(pj.evaluate(table, make_costs(table, times)).makespan)
        cycles.append((spans[1] - spans[0]) / 8)
    # right behind its forward an S of the second variant waits for the broadcast
    assert cycles == pytest.approx([4.0 + 0.2 * (variant == 2), 4.0])


@pytest.mark.parametrize("variant", MORE)
@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
def test_a_microbatch_lives_so_many_intervals(workers, microbatches, variant):
    """An interval is what a worker does of a microbatch; each reduction lets it live one longer."""
    table = built("1f1b", workers, microbatches, variant=variant)
    result = pj.evaluate(table, make_costs(table, FREE))
    held = [workers - r + MORE[variant] for r in range(workers)]
    assert result.peak_in_flight.tolist() == [min(count, microbatches) for count in held]
    if microbatches < 4 * workers:
        return
    middle = microbatches // 2
    at = [table.where[p][:, middle : middle + 2] for p in (pj.Phase.F, pj.Phase.B)]
    start, end = result.start.ravel()[at[0]], result.finish.ravel()[at[1]]
    assert np.diff(end).ravel().tolist() == [4.0] * workers
    lives = (end - start)[:, 0] / 4.0
    assert [math.ceil(count) for count in lives] == held


@pytest.mark.parametrize("variant", MORE)
@pytest.mark.parametrize("workers", [2, 4])
def test_v_half_holds_as_many_more_and_runs_without_gaps(workers, variant):
    """A further microbatch takes what a worker does of it; more activations are of two stages."""
    times = {**dict.fromkeys("FIW", 0.5), **{k: v for k, v in FREE.items() if k not in "FB"}}
    spans = []
    for microbatches in (4 * workers, 6 * workers):
        table = built("v-half", workers, microbatches, variant=variant)
        plain = pj.schedules.build("v-half", num_workers=workers, num_microbatches=microbatches)
        result, bare = (
            pj.evaluate(table, make_costs(table, times)),
            pj.schedules.peak_in_flight(plain),
        )
        assert result.peak_in_flight.max() == bare.max() + 2 * MORE[variant]
        spans.append(result.makespan)
    assert spans[1] - spans[0] == 4.0 * 2 * workers


def test_other_variants_there_are_none():
    with pytest.raises(ValueError, match="variant must be one of 1, 2, got 3"):
        built("1f1b", 2, 2, variant=3)
    with pytest.raises(ValueError, match="overlap must be true or false, got 1"):
        built("1f1b", 2, 2, overlap=1)
