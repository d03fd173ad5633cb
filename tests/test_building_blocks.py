"""Repeated building blocks, against the published V schedules and any placement, time and limit."""

import threading

import numpy as np
import pytest
from daily import read_cases, with_cases
from hypothesis import given, strategies as st
from legal_sizes import build
from test_schedules import check_run, works

import pipejax as pj
from pipejax.schedules.heuristics import building_block as blocks
from pipejax.schedules.heuristics.list_scheduling import Rules, list_schedule
from pipejax.schedules.heuristics.timeline import Work
from pipejax.search.schedule import anytime_search
from pipejax.search.schedule.effort import Budget
from pipejax.search.schedule.initial_plans import block_starts, num_legs
from pipejax.search.schedule.plan import keeps_limits, plan_objective
from pipejax.search.schedule.problem import build_problem

F, I, W = (pj.Phase[letter] for letter in "FIW")  # noqa: E741
ROUNDING = 1e-9
OFFLOADS = ("ada-offload", "pipe-offload")
HEURISTICS = ("1f1b", "zero-bubble", "zb-1p", "zb-h1", "zb-2p", "zb-h2", *OFFLOADS)


@given(samples=works(tightest=1), data=st.data())
def test_an_order_whose_rows_fit_never_gets_stuck(samples, data):
    work, numbers = samples
    legs = num_legs(work)
    waits = blocks.Waits(numbers(0, 9, legs), numbers(0, 9, legs), numbers(0, 9, 2 * legs - 1))
    interval = data.draw(st.sampled_from([0.1, 0.5, 1.0, 1.4, 3.0])) * blocks.least_interval(work)
    delay = data.draw(st.sampled_from([0.0, interval, np.inf]))
    rules = data.draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    order = blocks.Order(blocks.building_block(work, waits, interval), delay, *rules)
    run = list_schedule(work, Rules(order=order))
    assert (run is not None) == blocks.rows_keep_limits(
        work, blocks.block_rows(work, order.block)[0]
    )
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
    waits = blocks.Waits(numbers(0, 9, legs), numbers(0, 9, legs), numbers(0, 9, 2 * legs - 1))
    block = blocks.building_block(work, waits, data.draw(st.sampled_from([1.0, 2.5])) * 99)
    for pipe, row in enumerate(work.placement):
        forward, gradient = (block.starts[phase][pipe] for phase in (F, I))
        legs = blocks.number_legs(row)
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
    block = blocks.building_block(work, blocks.Waits([0, 0], [0, 0], [0, 0, 0]), 6.0)
    run = list_schedule(work, Rules(order=blocks.Order(block, 0.0, False, False, False)))
    assert run is not None
    firsts = [min(start for *_, w, start, _ in run.log if w == at) for at in range(workers)]
    spans = [end - first for end, first in zip(run.clock, firsts, strict=True)]
    assert max(spans) == 6 * microbatches + 4 * workers - 5


@pytest.mark.parametrize("workers", [3, 4, 5, 6])
def test_a_worker_runs_ahead_only_where_the_rest_still_finds_room(workers):
    work = v_shape(workers, 3 * workers, 2 * ((workers + 4) // 3))
    block = blocks.building_block(work, blocks.Waits([0, 0], [0, 0], [0, 0, 0]), 6.0)
    run = list_schedule(work, Rules(order=blocks.Order(block, 12.0, True, True, False)))
    assert run is not None
    check_run(work, run)


@with_cases(
    "workers microbatches limit published", *read_cases("test_published_v_schedules_are_reached")
)
def test_published_v_schedules_are_reached(workers, microbatches, limit, published):
    table = build("hanayo", workers, microbatches)
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
    table = build("hanayo", 3, 40)
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
    table = build("hanayo", 3, 6)
    costs = pj.Costs.uniform(table, forward=2.0, input_grad=3.0, weight_grad=1.0)
    result = pj.optimize(table, costs, memory_limit=5.0, time_limit=0.5, num_threads=1)
    assert result.best.status == "feasible"


# searches that end by what they have done: one answer on any machine, never below a start
def get_told(table, costs, **options):
    """Return the effort and rows at each value of a search, and its end."""
    message, news = [], {}
    last = pj.optimize(table, costs, **options, on_best=message.append)
    for single in message:
        news.setdefault(single.value, (single.best.effort, [*map(list, single.best.table.rows())]))
    return news, (last.lower_bound, last.evaluated, last.stopped, last.best.effort)


def pipe_with_link(microbatches):
    table = build("1f1b", 3, microbatches)
    times = {"forward": [3.0, 4.0, 3.5], "input_grad": [3.0, 3.5, 4.0], "weight_grad": 2.0}
    costs = pj.Costs(**times, offload=6.0, load=5.0)
    return table, costs


@pytest.mark.parametrize("name", ["1f1b", "hanayo"])  # with offloads; of two stages per worker
def test_the_same_effort_finds_the_same_beside_a_busy_machine(name):
    table, costs = pipe_with_link(6)
    options = {"memory_limit": 2.5, "offload": True, "effort": 0.4}
    if name == "hanayo":
        table = build(name, 3, 8)
        costs = pj.Costs.uniform(table, forward=3.0, input_grad=4.0, weight_grad=2.0, transfer=0.5)
        options |= {"memory_limit": 4.0, "offload": False}
    alone, over = get_told(table, costs, **options), threading.Event()

    def compute():
        while not over.is_set():
            np.sort(np.arange(10**6) % 97)  # this holds no lock of the interpreter

    others = [threading.Thread(target=compute) for _ in range(2)]
    for other in others:
        other.start()
    try:
        nearby = get_told(table, costs, **options)
    finally:
        over.set()
        for other in others:
            other.join()
    assert len(alone[0]) > 1
    assert nearby == alone


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", range(8))
def test_no_answer_is_worse_than_a_schedule_of_the_literature(seed):
    """However little is to be done, and however times, limits and links differ by stage."""
    rng = np.random.default_rng(seed)
    size = {"num_workers": int(rng.integers(2, 6)), "num_microbatches": int(rng.integers(4, 10))}
    table = pj.schedules.build("gpipe", **size)  # the worst of starts
    shape = size["num_workers"] if rng.random() < 0.5 else None  # by stage
    times = {letter: rng.uniform(1.0, 3.0, shape) for letter in ("F", "I", "W")}
    transfer, has_link = float(rng.uniform(0.0, 0.5)), bool(rng.random() < 0.6)
    away = rng.choice([0.5, 1.0, 3.0]) * times["F"] if has_link else 0.0
    names = {"forward": "F", "input_grad": "I", "weight_grad": "W"}
    ops = {name: times[letter] for name, letter in names.items()}
    costs = pj.Costs(**ops, transmit=transfer, offload=away, load=away)
    limit, share = size["num_workers"] * float(rng.choice([0.5, 1.0, 1.5])), 0.29
    arguments = {"memory_limit": limit, "weight_share": share}
    result = pj.optimize(table, costs, **arguments, offload=has_link, effort=1e-6)
    specific = {"transfer": transfer, "slots": {k: float(np.mean(t)) for k, t in times.items()}}
    specific |= {**arguments, "offload": away if has_link else None}
    fitting = 0
    for name in HEURISTICS:
        takes = {*pj.schedules.find(name).options, "slots"}
        options = {k: value for k, value in specific.items() if k in takes}
        for part in (0.5, 1.0) if name == "pipe-offload" and has_link else (None,):
            options |= {} if part is None else {"offload_share": part}
            if name == "pipe-offload" and not has_link:
                options["offload_share"] = 0.0
            run = pj.evaluate(pj.schedules.build(name, **size, **options), costs)
            held = pj.analysis.activation_memory(run, weight_share=share)
            if held.peak.max() <= limit * (1 + ROUNDING):
                fitting += 1
                assert result.value <= run.makespan * (1 + ROUNDING), (name, part)
    assert fitting or limit < size["num_workers"]


def test_what_ended_a_search_is_said():
    table, costs = pipe_with_link(12)
    result = pj.optimize(table, costs, memory_limit=1.5, offload=True, effort=0.3)
    assert result.stopped == "effort"
    assert result.best.effort == pytest.approx(0.3, abs=0.2)
    capped = pj.optimize(table, costs, memory_limit=1.5, offload=True, effort=1e6, time_limit=0.5)
    assert capped.stopped == "time"
