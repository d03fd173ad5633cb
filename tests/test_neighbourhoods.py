"""The large-neighbourhood search: what it keeps, what it frees, and what it finds."""

import dataclasses
import itertools

import numpy as np
import pytest
from ortools.sat.python import cp_model

import pipejax as pj
from pipejax.search.schedule.cp_model import ScheduleModel
from pipejax.search.schedule.effort import Budget
from pipejax.search.schedule.initial_plans import one_by_one
from pipejax.search.schedule.neighbourhoods import (
    KINDS,
    NeighbourhoodSearch,
    fixed_order,
    search_grids,
    search_neighbourhoods,
)
from pipejax.search.schedule.plan import (
    NEVER,
    keeps_limits,
    plan_objective,
    timed_ops,
    to_plan,
    to_table,
)
from pipejax.search.schedule.problem import build_problem


def make_problem(workers=3, microbatches=4, seconds=10.0, limits=1.0):
    """F = I = W and offloads of 10 s; the first two workers share a host link."""
    table = pj.schedules.build("1f1b", num_workers=workers, num_microbatches=microbatches)
    costs = pj.Costs.uniform(
        table, forward=seconds, input_grad=seconds, weight_grad=seconds, offload=10.0
    )
    links = pj.Links(host_links=((0, 1),))
    return build_problem(table, costs, memory_limit=limits, offload=True, link=links)


@pytest.fixture(scope="module")
def steps():
    """A search that began with one microbatch after the other, and its ends step by step."""
    problem = make_problem()
    search = NeighbourhoodSearch(problem, one_by_one(problem), seed=0)
    ends = [search.objective]
    for _ in range(15):
        if search.step(Budget.start()):
            assert keeps_limits(problem, search.plan)
        ends.append(search.objective)
    return search, ends


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_free_keeps_its_order(kind, steps):
    search, _ = steps
    problem = search.problem
    plan, rng = search.plan, np.random.default_rng(1)
    free = KINDS[kind](problem, plan, 0.4, rng)
    pairs = list(fixed_order(problem, plan, free))
    assert not any(free[letter][place] for pair in pairs for letter, place in pair)
    for (letter, place), (other, next_place) in pairs:
        durations = problem.times[pj.Phase[letter]][place[0]]
        assert plan.starts[letter][place] + durations <= plan.starts[other][next_place]
    nothing = {letter: np.zeros_like(free["F"]) for letter in free}
    chains = list(fixed_order(problem, plan, nothing))  # one on each worker and link
    link = [pair for pair in chains if pair[0][0] in "OL"]
    out = (plan.offload != NEVER).sum(axis=1)
    assert len(link) == 2 * out.sum() - (out[:2].any() + out[2:].any())
    assert len(chains) - len(link) == 3 * 3 * 4 - 3


@pytest.mark.parametrize(("limits", "single_time"), [(1.0, 3 * 30), (0.5, 3 * (30 + 20))])
def test_one_microbatch_after_the_other_takes_the_sum_of_all_times(limits, single_time):
    problem = make_problem()
    problem = dataclasses.replace(problem, limits=(problem.limits * limits).astype(int))
    plan = one_by_one(problem)
    assert plan.forward.min() == 0
    assert plan_objective(problem, plan) * problem.unit == 4 * single_time


def test_ranks_of_a_plan_say_what_ends_before_what_starts(steps):
    search, _ = steps
    for plan in (search.plan, one_by_one(search.problem)):
        ops = timed_ops(search.problem, plan)
        start = [
            plan.starts["I" if pj.Phase(code).name == "B" else pj.Phase(code).name][place]
            for code, *place in zip(
                ops.phase.tolist(), ops.stage.tolist(), ops.microbatch.tolist(), strict=True
            )
            for place in [tuple(place)]
        ]
        end = np.array(start) + [
            search.problem.times[pj.Phase(code)][stage]
            for code, stage in zip(ops.phase.tolist(), ops.stage.tolist(), strict=True)
        ]
        ends_before = end[:, None] <= np.array(start)
        assert np.array_equal(ops.end[:, None] <= ops.start, ends_before)


def test_gradients_overtake_an_activation_that_is_away():
    # F0 O0, F1 I1 W1, L0 I0 W0: in the memory of one activation
    problem = make_problem(workers=2, microbatches=2)
    base, solver = ScheduleModel(problem, 30), cp_model.CpSolver()
    base.model.add(base.start["I"][0, 1] < base.start["I"][0, 0])
    assert solver.solve(base.model) == cp_model.OPTIMAL
    plan = base.plan(solver)
    assert keeps_limits(problem, to_plan(problem, to_table(problem, plan, "overtaken")))


def test_no_step_makes_a_plan_worse(steps):
    search, ends = steps
    assert ends[-1] == plan_objective(search.problem, search.plan)
    assert all(later <= earlier for earlier, later in itertools.pairwise(ends))
    assert ends[-1] < ends[0]


def test_threads_share_what_they_find():
    # halves of a second: the grid is fine enough to be coarser
    problem = make_problem(seconds=10.5)
    assert [grid.unit for grid in search_grids(problem)] == [5 * problem.unit, problem.unit]
    start = to_table(problem, one_by_one(problem), "start")
    ends = [plan_objective(problem, to_plan(problem, start))]
    for table in search_neighbourhoods(problem, start, Budget.start(0.5), 2):
        plan = to_plan(problem, table)
        assert keeps_limits(problem, plan)
        ends.append(plan_objective(problem, plan))
    assert len(ends) > 2
    assert ends == sorted(set(ends), reverse=True)


def test_a_coarser_grid_promises_nothing_too_short():
    problem = make_problem(seconds=10.5)
    coarse = problem.coarser(4)
    plan = one_by_one(coarse)
    real = plan_objective(problem, to_plan(problem, to_table(coarse, plan, "coarse")))
    assert real * problem.unit <= plan_objective(coarse, plan) * coarse.unit
    assert problem.coarser(10**9).unit == problem.unit
