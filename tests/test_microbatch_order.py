"""Microbatches that differ in length: costs from lengths, and the best order of them."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from legal_sizes import build

import pipejax as pj
from pipejax.costs.stage.microbatches import check_order, in_order
from pipejax.search.orders import permutations as permutation_search

TIMES = pj.Costs(forward=1.0, backward=2.0, transmit=0.125)
ONE = ["--schedule", "1f1b", "--workers", "2", "--microbatches", "4"]
WORKLOAD = {"minibatch": 4, "tensor_parallel": 8}


def draw_samples(count, seed):
    return np.random.default_rng(seed).lognormal(0, 0.8, count)


@functools.cache
def in_every_order(name, link, seed, microbatches=5):
    table = build(name, 4 if name == "chimera" else 2, microbatches)
    costs = pj.costing.scaled_costs(TIMES, table, microbatches=draw_samples(microbatches, seed))
    orders = [np.array(order) for order in itertools.permutations(range(microbatches))]
    times = [pj.evaluate(table, in_order(costs, order), link=link).makespan for order in orders]
    return table, costs, np.array(times)


CASES = [("1f1b", "delay", 0), ("gpipe", "rendezvous", 1), ("zb-h1", "queued", 2)]
CASES += [("chimera", "blocking", 3)]


@pytest.mark.parametrize("tried", ["all", "some"])
@pytest.mark.parametrize("case", CASES)
def test_the_search_equals_all_orders(case, tried, monkeypatch):
    count = 6 if case[0] == "chimera" else 5
    table, costs, times = in_every_order(*case, count)
    if tried == "some":
        monkeypatch.setattr(permutation_search, "EXHAUSTIVE", 0)
    result = pj.search.microbatches(table, costs, link=case[1], iterations=40)
    assert result.value == pytest.approx(times.min(), rel=1e-12)
    assert result.lower_bound <= times.min() * (1 + 1e-12)
    assert sorted(result.best.order.tolist()) == list(range(count))
    assert pj.evaluate(table, result.best.costs, link=case[1]).makespan == result.value
    assert result.baselines["given"] == times[0]
    assert all(result.value <= time * (1 + 1e-12) for time in result.baselines.values())
    lengths = np.asarray(costs.forward)[0]
    for name, order in (("ascending", lengths.argsort()), ("descending", (-lengths).argsort())):
        alone = pj.evaluate(table, in_order(costs, order), link=case[1]).makespan
        assert result.baselines[name] == pytest.approx(alone, rel=1e-12)
    if tried == "all":
        assert (result.stopped, result.gap) == ("optimal", 0.0)


def test_a_seed_gives_one_answer_and_no_time_the_best_baseline():
    table, lengths = build("1f1b", 4, 12), draw_samples(12, 5)
    costs = pj.costing.scaled_costs(TIMES, table, microbatches=lengths)
    first, same = (pj.search.microbatches(table, costs, iterations=5, seed=7) for _ in range(2))
    assert first.best.order.tolist() == same.best.order.tolist()
    fields = ("value", "evaluated", "stopped")
    assert [getattr(first, x) for x in fields] == [same.value, same.evaluated, "iterations"]
    for options, why in (({"time_limit": 0.0}, "time"), ({"iterations": 0}, "iterations")):
        none = pj.search.microbatches(table, costs, seed=7, **options)
        assert none.stopped == why
        assert first.value <= none.value <= min(none.baselines.values())
        assert none.gap == 1 - none.lower_bound / none.value > 0.1


@settings(max_examples=15)
@given(
    kinds=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=6),
    name=st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    data=st.data(),
)
def test_microbatches_of_one_length_may_change_places(kinds, name, data):
    table = build(name, 2, len(kinds))
    costs = pj.costing.scaled_costs(TIMES, table, microbatches=kinds)
    alike = [np.flatnonzero(np.array(kinds) == kind) for kind in sorted({*kinds})]
    order = np.arange(len(kinds))
    for members in alike:
        order[members] = data.draw(st.permutations(members.tolist()))
    first, second = (pj.evaluate(table, c) for c in (costs, in_order(costs, order)))
    np.testing.assert_array_equal(first.finish, second.finish)
    numbers = np.unique(kinds, return_inverse=True)[1]
    orders = list(permutation_search.different_orders(numbers.tolist()))
    assert len(orders) == permutation_search.num_orders(numbers)
    assert len({tuple(np.array(kinds)[permutation]) for permutation in orders}) == len(orders)


def test_a_run_above_the_table_is_one_of_unequal_microbatches():
    table, alike = build("1f1b", 2, 5), pj.Costs(forward=1.0, backward=2.0)
    costs = pj.costing.scaled_costs(alike, table, microbatches=draw_samples(5, 0))
    assert "microbatches are unequal" in pj.compare(table, costs).why


def test_an_order_belongs_to_a_schedule_and_a_number():
    for wrong in ([0, 1, 1], [0, 1], [1, 2, 3]):
        with pytest.raises(ValueError, match="order must name each of 3 microbatches once, 0 to 2"):
            check_order(wrong, 3)
    several = in_order(
        pj.costing.scaled_costs(TIMES, build("1f1b", 2, 5), microbatches=[1.0, 2.0]),
        np.array([[0, 1], [1, 0], [1, 1]]),
    )
    assert several.forward.tolist() == [[[1.0, 2.0]], [[2.0, 1.0]], [[2.0, 2.0]]]
    assert several.transmit[1, 0, 0, 0].tolist() == [0.25, 0.125]


@pytest.mark.usefixtures("unchecked")
def test_costs_that_scale_are_functions_of_their_factors():
    table, scale = build("zb-h1", 4, 8), draw_samples(8, 1)
    program = pj.lower(table)
    stages = np.array([1.0, 2.0, 1.0, 1.0])
    costs = pj.Costs(forward=stages, backward=2 * stages, transmit=np.full(3, 0.25))

    def step(scale):
        return pj.makespan(program, pj.costing.scaled_costs(costs, table, microbatches=scale))

    slopes = jax.grad(step)(scale)
    assert (slopes * scale).sum() == pytest.approx(step(scale))  # Euler: there are no latencies
    assert step(2 * scale) == pytest.approx(2 * step(scale))
    assert step(np.ones(8)) == pj.makespan(program, costs)
    scaled = pj.costing.scaled_costs(
        pj.costing.scaled_costs(costs, table, microbatches=scale), table, microbatches=1 / scale
    )
    np.testing.assert_allclose(scaled.forward, np.tile(stages[:, None], 8))
    costs = pj.Costs(forward=1.0, backward=2.0, latency=0.5, update=3.0, all_reduce=1.0)
    fixed = pj.costing.scaled_costs(costs, table, microbatches=scale)
    assert (fixed.latency, fixed.update, fixed.all_reduce) == (0.5, 3.0, 1.0)


def test_lengths_of_a_model():
    table = build("1f1b", 2, 4)
    system = pj.load_system("h100").with_number("host.launch", 0.0)  # whatever the length
    workload = pj.Workload(pj.load_model("gpt-22b"), **WORKLOAD)
    alike, length = pj.stage_costs(workload, system, table), workload.model.sequence
    same = pj.stage_costs(workload, system, table, lengths=[length] * 4)
    for name in ("forward", "backward", "input_grad", "weight_grad", "transmit"):
        whole = np.asarray(getattr(alike, name))
        np.testing.assert_array_equal(getattr(same, name), np.stack([whole] * 4, axis=-1))
    assert same.update.tolist() == alike.update.tolist()
    result = pj.stage_costs(
        workload, system, table, lengths=[length, 2 * length, [length, length], [2 * length]]
    )
    short, long, packed, alone = np.asarray(result.forward)[0]
    assert long > 2 * short > packed  # attention grows with the square; products are the larger
    assert alone == long
    transmit = np.asarray(result.transmit)[0, 0, 0]
    np.testing.assert_allclose(transmit / transmit[0], [1, 2, 2, 2])


def test_a_window_is_no_longer_than_a_short_sequence():
    table, system = build("1f1b", 2, 4), pj.load_system("h100")
    workload = pj.Workload(pj.load_model("gpt-oss-120b"), minibatch=4)
    result = pj.stage_costs(workload, system, table, lengths=[16, 32, 64, 4096])
    assert (np.diff(np.asarray(result.forward)) > 0).all()
    full = dataclasses.replace(workload.model, sequence=64, window=64)
    alone = pj.stage_costs(dataclasses.replace(workload, model=full), system, table)
    np.testing.assert_array_equal(result.forward[:, 2], alone.forward)


TEXTS = {  # content of a file, and what it says
    "4096\n1024 512 512\n": [4096.0, [1024.0, 512.0, 512.0]],
    "[4096, [1024, 512]]": [4096, [1024, 512]],
    '{"lengths": [1, 2.5], "order": [1, 0]}': [1, 2.5],
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("text", TEXTS)
def test_files_of_lengths(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert pj.files.read_lengths(path) == TEXTS[text]


COSTS = {  # F, messages and B of a file for 2 stages and 3 microbatches
    "ops": {"F": [[1, 2, 3], [4, 5, 6]], "B": [[2, 4, 6], [8, 10, 12]]},
    "stages": {"F": [[1, 2, 3], 4], "I": 1, "W": [2, [1, 2, 3]]},
    "messages": {"F": 1, "B": 2, "message": {"bytes": [[1, 2, 4]], "bandwidth": 4}},
    "ways": {"F": 1, "B": 2, "message": {"latency": 1}, "message_back": {"latency": [[1, 2, 3]]}},
}


@pytest.mark.parametrize("name", COSTS)
def test_files_of_costs_per_microbatch(tmp_path, name):
    table, path = build("1f1b", 2, 3), tmp_path / "costs.json"
    path.write_text(json.dumps({"unit": "milliseconds", **COSTS[name]}))
    costs = pj.read_costs(path, table)
    expected = {
        "ops": {"forward": [[1, 2, 3], [4, 5, 6]], "weight_grad": [[1, 2, 3], [4, 5, 6]]},
        "stages": {"forward": [[1, 2, 3], [4, 4, 4]], "backward": [[3, 3, 3], [2, 3, 4]]},
        "messages": {"transmit": [[[[250, 500, 1000]]]] * 2, "forward": [1, 1]},
        "ways": {"latency": [[[[1, 1, 1]]], [[[1, 2, 3]]]], "transmit": [[[0]], [[0]]]},
    }[name]
    for field, values in expected.items():
        np.testing.assert_allclose(getattr(costs, field), np.array(values) * 1e-3, rtol=1e-12)
    pj.makespan(pj.lower(table), costs)


def test_commands_take_lengths_and_orders(tmp_path, answer, answer_and_text):
    lengths, out = tmp_path / "lengths.txt", tmp_path / "order.json"
    lengths.write_text("2048\n1024 1024\n4096\n512\n")
    times = [*ONE, "--stage-times", "F=1,B=2", "--comm", "0.25"]
    scale = ",".join(str(tokens / 2176) for tokens in (2048, 2048, 4096, 512))  # of their mean
    ways = ["--lengths", lengths], ["--microbatch-scale", scale]
    result = [answer("evaluate", *times, *more)["makespan"] for more in ways]
    assert result[0] == pytest.approx(result[1])
    line = "tune", "microbatches", *times, "--lengths", lengths
    best, text = answer_and_text(*line, "-o", out)
    assert best["stopped"] == "optimal"
    assert "mean of random" in text
    assert best["value"] <= min(best["baselines"].values())
    saved = json.loads(out.read_text())
    assert saved["order"] == best["best"]["order"]
    for again in (
        ["--lengths", lengths, "--microbatch-order", out],
        ["--lengths", out],
        ["--lengths", lengths, "--microbatch-order", ",".join(map(str, best["best"]["order"]))],
    ):
        assert answer("evaluate", *times, *again)["makespan"] == best["value"]


def test_what_a_model_says_of_microbatches_that_differ(tmp_path, answer):
    model = ["--model", "gpt-22b", "--system", "h100", "--minibatch", "4", "--tensor-parallel", "8"]
    scale = ["--microbatch-scale", "1,2,1,1"]
    alike = answer("evaluate", *ONE, *model)["activation_memory"]["peak"]
    uneven = answer("evaluate", *ONE, *model, *scale)
    assert "mfu" not in uneven
    assert uneven["activation_memory"]["peak"] == pytest.approx([3 * alike[0] / 2, 2 * alike[1]])
    file = tmp_path / "lengths.json"
    file.write_text("[2048, 4096, 2048, 2048]")
    longer = answer("evaluate", *ONE, *model, "--lengths", file)
    assert longer["activation_memory"]["peak"][1] > 1.9 * alike[1]
    assert longer["tokens_per_second"] * longer["makespan"] == pytest.approx(5 * 2048)


@pytest.mark.parametrize("rules", ["B@stage1*2", "F@stage0*2,B@stage0*3", "B@microbatch2*4", "B*2"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b"])
def test_times_of_microbatches_in_another_order_can_be_scaled(answer, schedule, rules):
    # microbatches of 1, 3, 1, 2 times the length, in the order 1 0 3 2, are of 3, 1, 2, 1 times
    line = ["evaluate", "-s", schedule, "-P", 4, "-M", 4, "-T", "F=1,B=2", "--scale", rules]
    ordered = answer(*line, "--microbatch-scale", "1,3,1,2", "--microbatch-order", "1,0,3,2")
    assert ordered["makespan"] == answer(*line, "--microbatch-scale", "3,1,2,1")["makespan"]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "looped-bfs"])
def test_a_memory_limit_goes_with_times_by_microbatch(schedule):
    lengths = np.array([1.0, 1.2, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    table = pj.schedules.build(schedule, num_workers=4, num_microbatches=8)
    forward = np.linspace(1.0, 1.1, table.num_stages)[:, None] * lengths
    result = pj.explain(table, pj.Costs(forward=forward, backward=2 * forward), memory_limit=8)
    assert result.remedies
    assert all(remedy.fits for remedy in result.remedies)
