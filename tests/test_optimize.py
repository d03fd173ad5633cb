"""The optimiser against every order of tiny problems, known optima, and the evaluator."""

from fractions import Fraction

import numpy as np
import optimum
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipejax as pj
from pipejax.optimize import optimize

THIRD = Fraction(1, 3)


def solve(table, costs, **options):
    *_, best = optimize(table, costs, **{"time_limit": 60.0, "threads": 2, **options})
    return best


def pipe(workers, microbatches):
    return pj.schedules.build("1f1b", num_workers=workers, num_microbatches=microbatches)


def equal(table, offload=0.0, transfer=0.0):
    """F = I = W = 10."""
    return pj.Costs.uniform(
        table, forward=10.0, input_grad=10.0, weight_grad=10.0, offload=offload, transfer=transfer
    )


def held(table, run, sizes, share):
    """Most that each worker holds, by a sweep over the events of a run."""
    peaks = []
    for worker in range(table.num_workers):
        events = []
        for slot in range(table.num_slots):
            for op in table.cell(worker, slot):
                start, end = run.start[worker, slot], run.finish[worker, slot]
                size = Fraction(sizes[op.stage])
                freed = {"B": size, "I": size * (1 - share), "W": size * share, "O": size}
                if op.phase.name in "FL":
                    events.append((start, 1, size))
                elif op.phase.name in freed:
                    events.append((end, 0, -freed[op.phase.name]))  # at one moment, before takes
        level = most = Fraction(0)
        for _, _, change in sorted(events):
            level += change
            most = max(most, level)
        peaks.append(most)
    return peaks


def check(best, costs, limits, share=THIRD, sizes=None, **run):
    """A solution is what the evaluator says, within its limits and bounds."""
    evaluation = pj.evaluate(best.table, costs, **run)
    assert evaluation.makespan == best.makespan
    sizes = [1] * best.table.num_stages if sizes is None else sizes
    peaks = held(best.table, evaluation, sizes, share)
    for worker, peak in enumerate(peaks):
        limit = np.broadcast_to(limits, best.table.num_workers)[worker]
        assert peak <= Fraction(float(limit)) * (1 + Fraction(1, 10**9))
    assert best.lower_bound <= best.makespan + best.rounding
    assert all(other is None or other >= best.makespan for other in best.baseline.values())


@pytest.mark.parametrize(
    ("workers", "microbatches", "limit", "offload", "makespan"),
    [
        (4, 8, 2, None, 410.0),
        (4, 8, 2, 10.0, 290.0),
        (4, 8, 1, None, 720.0),  # one microbatch at a time: 8 x (8 x 10 + 10)
        (4, 8, 4, None, 270.0),  # 30 until the last stage starts, 8 x 30 of work
        (4, 8, 1, 10.0, 440.0),
    ],
)
def test_known_optima(workers, microbatches, limit, offload, makespan):
    table = pipe(workers, microbatches)
    costs = equal(table, offload or 0.0)
    best = solve(table, costs, memory_limit=limit, offload=offload is not None)
    assert (best.makespan, best.lower_bound, best.status) == (makespan, makespan, "optimal")
    check(best, costs, limit)


def test_offloading_makes_up_for_half_of_the_memory():
    table = pipe(8, 16)
    costs = equal(table, 10.0)
    best = solve(table, costs, memory_limit=4, offload=True)
    assert (best.makespan, best.status) == (550.0, "optimal")
    check(best, costs, 4)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_order_of_tiny_problems(data):
    workers, microbatches = data.draw(st.sampled_from([(2, 2), (3, 2), (2, 3), (1, 3)]))
    whole = st.integers(1, 6)
    times = {letter: data.draw(st.lists(whole, min_size=workers, max_size=workers))
             for letter in "FIW"}  # fmt: skip
    message = data.draw(st.integers(0, 4))
    limits = data.draw(
        st.lists(st.sampled_from([1.0, 4 / 3, 5 / 3, 2.0, 3.0]), min_size=workers, max_size=workers)
    )
    table = pipe(workers, microbatches)
    costs = pj.Costs.per_stage(
        table, forward=times["F"], input_grad=times["I"], weight_grad=times["W"],
        transmit=float(message),
    )  # fmt: skip
    expected = optimum.shortest(
        workers, microbatches, times, message, [Fraction(limit).limit_denominator(3) for limit in limits],
        THIRD,
    )  # fmt: skip
    best = solve(table, costs, memory_limit=limits)
    assert (best.makespan, best.status) == (expected, "optimal")
    check(best, costs, limits)
