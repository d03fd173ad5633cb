"""Repeated building blocks, against the published V schedules and any placement, time and limit."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from test_schedules import check_run, works

import pipejax as pj
from pipejax.schedules.heuristics.building_block import (
    Order,
    Waits,
    block_rows,
    building_block,
    least_interval,
    number_legs,
    rows_keep_limits,
)
from pipejax.schedules.heuristics.list_scheduling import Rules, list_schedule
from pipejax.schedules.heuristics.timeline import Work
from pipejax.search.schedule import anytime_search
from pipejax.search.schedule.effort import Budget
from pipejax.search.schedule.initial_plans import block_starts, num_legs
from pipejax.search.schedule.plan import keeps_limits, plan_objective
from pipejax.search.schedule.problem import build_problem

F, I, W = (pj.Phase[letter] for letter in "FIW")  # noqa: E741


@given(samples=works(tightest=1), data=st.data())
def test_an_order_whose_rows_fit_never_gets_stuck(samples, data):
    work, numbers = samples
    legs = num_legs(work)
    waits = Waits(numbers(0, 9, legs), numbers(0, 9, legs), numbers(0, 9, 2 * legs - 1))
    interval = data.draw(st.sampled_from([0.1, 0.5, 1.0, 1.4, 3.0])) * least_interval(work)
    delay = data.draw(st.sampled_from([0.0, interval, np.inf]))
    rules = data.draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    order = Order(building_block(work, waits, interval), delay, *rules)
    run = list_schedule(work, Rules(order=order))
    assert (run is not None) == rows_keep_limits(work, block_rows(work, order.block)[0])
    if run is not None:
        check_run(work, run)
        end = max(run.clock)
        assert list_schedule(work, Rules(order=order), end) is None
        again = list_schedule(work, Rules(order=order), end + 1)
        assert again is not None
        assert again.log == run.log


@given(samples=works(tightest=1), data=st.data())
def test_ops_of_a_block_begin_where_their_input_has_arrived(samples, data):
    work, numbers = samples
    legs = num_legs(work)
    waits = Waits(numbers(0, 9, legs), numbers(0, 9, legs), numbers(0, 9, 2 * legs - 1))
    block = building_block(work, waits, data.draw(st.sampled_from([1.0, 2.5])) * 99)
    for pipe, row in enumerate(work.placement):
        forward, gradient = (block.starts[phase][pipe] for phase in (F, I))
        legs = number_legs(row)
        for stage in range(len(row) - 1):
            takes = [
                work.lag[way][pipe][stage] + work.transmit[way][pipe][stage]
                if row[stage] != row[stage + 1]
                else 0
                for way in (0, 1)
            ]
            same, leg = legs[stage] == legs[stage + 1], legs[stage]
            there = waits.forward[leg] if same else waits.turns[leg]
            back = waits.gradient[leg] if same else waits.turns[-1 - leg]
            arrives = forward[stage] + work.durations[F][stage] + takes[0]
            assert forward[stage + 1] >= arrives + there
            arrives = gradient[stage + 1] + work.durations[I][stage + 1] + takes[1]
            assert gradient[stage] >= arrives + back


def v_shape(workers, microbatches, limit):
    """F = I = W = 1 on a V placement, an activation held until W."""
    row = [*range(workers), *range(workers)[::-1]]
    ones, none = [1] * len(row), [[[0] * (len(row) - 1)]] * 2
    durations = dict.fromkeys((F, I, W), ones)
    return Work([row], [0] * microbatches, durations, none, none, ones, ones, [limit] * workers)


@pytest.mark.parametrize("workers", [4, 5, 7, 8])
def test_a_block_without_waits_is_v_min(workers):
    # published: (P + 4) // 3 microbatches at once, and a bubble of 4 P - 5 (P no multiple of 3)
    microbatches, limit = 2 * workers, 2 * ((workers + 4) // 3)
    work = v_shape(workers, microbatches, limit)
    block = building_block(work, Waits([0, 0], [0, 0], [0, 0, 0]), 6.0)
    run = list_schedule(work, Rules(order=Order(block, 0.0, False, False, False)))
    assert run is not None
    firsts = [min(start for *_, w, start, _ in run.log if w == at) for at in range(workers)]
    spans = [end - first for end, first in zip(run.clock, firsts, strict=True)]
    assert max(spans) == 6 * microbatches + 4 * workers - 5


@pytest.mark.parametrize("workers", [3, 4, 5, 6])
def test_a_worker_runs_ahead_only_where_the_rest_still_finds_room(workers):
    work = v_shape(workers, 3 * workers, 2 * ((workers + 4) // 3))
    block = building_block(work, Waits([0, 0], [0, 0], [0, 0, 0]), 6.0)
    run = list_schedule(work, Rules(order=Order(block, 12.0, True, True, False)))
    assert run is not None
    check_run(work, run)


def test_a_leg_ends_where_a_worker_comes_again():
    assert number_legs([0, 1, 2, 2, 1, 0]) == [0, 0, 0, 1, 1, 1]
    assert number_legs([0, 1, 0, 1]) == [0, 0, 1, 1]
    assert number_legs([0, 0, 1]) == [0, 1, 1]
    assert number_legs([3, 2, 1, 0]) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("workers", "microbatches", "limit", "published"),
    [(4, 8, 4, 59), (6, 12, 8, 83), (8, 16, 16, 96)],  # V-Min, V-Half and ZB-V
)
def test_published_v_schedules_are_reached(workers, microbatches, limit, published):
    table = pj.schedules.build("hanayo", num_workers=workers, num_microbatches=microbatches)
    costs = pj.Costs.uniform(table, forward=1.0, input_grad=1.0, weight_grad=1.0)
    options = {"memory_limit": limit, "weight_share": 1.0, "objective": "span"}
    problem = build_problem(table, costs, **options)
    values = []
    for plan in block_starts(problem, Budget.start(20.0), published):
        assert keeps_limits(problem, plan)
        values.append(plan_objective(problem, plan))
    assert values == sorted(values, reverse=True)
    assert values[-1] <= published


def test_of_many_microbatches_a_few_are_run_first():
    table = pj.schedules.build("hanayo", num_workers=3, num_microbatches=40)
    costs = pj.Costs.uniform(table, forward=2.0, input_grad=3.0, weight_grad=1.0, transfer=0.5)
    problem = build_problem(table, costs, memory_limit=6.0, objective="span")
    *_, last = block_starts(problem, Budget.start(20.0), round(500 / problem.unit))
    assert last.forward.shape == (6, 40)
    assert keeps_limits(problem, last)
    assert plan_objective(problem, last) * problem.unit <= 500


def test_no_model_is_made_of_a_huge_problem(monkeypatch):
    monkeypatch.setattr(anytime_search, "HUGE", 60)
    monkeypatch.setattr(anytime_search.AnytimeSearch, "_search_for", None)  # what would build it
    monkeypatch.setattr(anytime_search, "MAX_PARTS_OPS", 60)
    table = pj.schedules.build("hanayo", num_workers=3, num_microbatches=6)
    costs = pj.Costs.uniform(table, forward=2.0, input_grad=3.0, weight_grad=1.0)
    result = pj.optimize(table, costs, memory_limit=5.0, time_limit=0.5, num_threads=1)
    assert result.best.status == "feasible"
