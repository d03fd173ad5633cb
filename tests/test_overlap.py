"""Exchanges beside compute: closed forms against runs step by step."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from daily import read_cases, with_cases
from legal_sizes import build

import pipejax as pj
from pipejax.costs.stage.exchanges import hidden_buckets, hidden_ring
from pipejax.costs.system.parts import Contention, Host

SECONDS = (0.0, 0.3, 1.0, 1.7, 4.0)
FREE = Contention()


def end_of_layers(compute, reduce, layers):
    """Links reduce the gradients of each layer behind its compute."""
    computed = links = 0.0
    for _ in range(layers):
        computed += compute
        links = max(links, computed) + reduce
    return links


def end_of_ring(transfer, compute, steps):
    computed = arrived = 0.0
    for _ in range(steps):
        computed = max(computed, arrived) + compute
        arrived += transfer
    return computed


def end_of_two(exchange, compute, slow_exchange, slow_compute):
    """Run an exchange and compute from the same start, from one end of work to the next."""
    now = 0.0
    while exchange > 0 or compute > 0:
        both = exchange > 0 and compute > 0
        rates = (1 / slow_exchange, 1 / slow_compute) if both else (1.0, 1.0)
        ends = [work / rate for work, rate in zip((exchange, compute), rates, strict=True) if work]
        step = min(ends)
        exchange, compute = (
            0.0 if work / rate <= step else work - step * rate
            for work, rate in zip((exchange, compute), rates, strict=True)
        )
        now += step
    return now


def test_buckets_are_their_longest_path():
    cases = [*itertools.product(SECONDS[1:], SECONDS, range(1, 7))]
    compute, reduce, layers = map(np.array, zip(*cases, strict=True))
    ends = np.array([end_of_layers(*case) for case in cases])
    hidden = hidden_buckets(FREE, layers * reduce, layers * compute, layers)
    np.testing.assert_allclose(layers * (compute + reduce) - hidden, ends, atol=1e-12)


def test_ring_exchanges_are_their_longest_path():
    cases = [*itertools.product(SECONDS, SECONDS, range(1, 7))]
    transfer, compute, steps = map(np.array, zip(*cases, strict=True))
    ends = np.array([end_of_ring(*case) for case in cases])
    exchange = (steps - 1) * transfer
    hidden = hidden_ring(FREE, exchange, steps * compute, steps)
    np.testing.assert_allclose(exchange + steps * compute - hidden, ends, atol=1e-12)


@pytest.mark.parametrize(("exchange", "compute"), [*itertools.product(SECONDS, SECONDS)])
@pytest.mark.parametrize("slow_exchange", [1.0, 1.3, 3.0])
@pytest.mark.parametrize("slow_compute", [1.0, 1.189, 2.5])
def test_contention_is_a_run_from_end_to_end(exchange, compute, slow_exchange, slow_compute):
    contention = Contention(compute=slow_compute, exchange=slow_exchange)
    end = exchange + compute - contention.saved(exchange, compute)
    assert end == pytest.approx(end_of_two(exchange, compute, slow_exchange, slow_compute))


def test_overlap_may_cost_more_than_it_saves():
    # both at 0.4 of their rates: 1 s of each takes 2.5 s together, 2 s one after the other
    assert Contention(compute=2.5, exchange=2.5).saved(1.0, 1.0) == pytest.approx(-0.5)
    # the exchange takes 2 s, in which half of the compute of 2 s is done: 3 s for 3 s
    assert Contention(compute=2.0, exchange=2.0).saved(1.0, 2.0) == pytest.approx(0.0)


def test_contention_of_a_system_lengthens_a_step_by_hand():
    """FSDP: a layer's gather of g beside compute of c >= g lasts c + g (1 - 1 / a) per layer."""
    system = dataclasses.replace(pj.load_system("a100"), host=Host())
    model = pj.load_model("llama3-8b")
    workload = pj.Workload(model, minibatch=1, data_parallel=8, zero=3, overlap=1.0)
    table = pj.schedules.build("gpipe", num_workers=1, num_microbatches=1)
    times = {
        slow: pj.stage_costs(workload, system.with_number("contention.compute", slow), table)
        for slow in (1.0, 2.0)
    }
    exposed = pj.stage_costs(dataclasses.replace(workload, overlap=0.0), system, table)
    for field in ("forward", "backward"):
        priced = times[1.0], times[2.0], exposed
        free, slowed, apart = (float(getattr(costs, field)[0]) for costs in priced)
        # all gathers fit beside compute: half of each is added at a slow-down of 2
        assert slowed - free == pytest.approx((apart - free) / 2, rel=1e-9)


def test_slopes_are_finite_differences():
    at = jnp.array([5.0, 7.0, 4.0])
    for function in (hidden_buckets, hidden_ring):
        for contention in (FREE, Contention(1.2, 1.1)):
            point = at.at[0].set(9.0)

            def hidden(x, function=function, contention=contention):
                return function(contention, *x)

            slopes = jax.grad(hidden)(point)
            for k, slope in enumerate(slopes):
                step = 1e-5 * jnp.eye(3)[k]
                rise = hidden(point + step) - hidden(point - step)
                assert float(slope) == pytest.approx(float(rise) / 2e-5, abs=1e-7)


@with_cases("dispatcher measured", ("per-node", (24.714, 20.992)), ("all-to-all", (41.25, 31.31)))
def test_hiding_the_exchange_of_experts_pays_as_it_was_measured(dispatcher, measured):
    """Qwen3-30B-A3B on 16 H100: Megatron-Bridge, pull requests 5094 and 3862."""
    degrees = {"minibatch": 64, "data_parallel": 16, "expert_parallel": 16, "zero": 1}
    options = {"overlap": 1.0, "dispatcher": dispatcher, "graphs": 0.16}
    workload = pj.Workload(pj.load_model("qwen3-30b-a3b"), **degrees, **options)
    table = pj.schedules.build("1f1b", num_workers=1, num_microbatches=64)
    system = pj.load_stack("megatron-core-2024").on(pj.load_system("h100"))
    alone, hidden, ceiling = (
        pj.evaluate(
            table,
            pj.stage_costs(dataclasses.replace(workload, expert_overlap=share), system, table),
        ).step_time
        for share in (0.0, 0.366, 1.0)
    )
    assert ceiling < hidden < alone
    assert (hidden < alone) == (measured[1] < measured[0])


# The overlap factor of fused pairs: one run, batches, derivatives, files, sweeps, commands

FACTORS = [0.0, 0.3, 1.0, 1.5]


def draw_samples(table, size, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((2, size, table.num_stages))


@pytest.mark.parametrize("factor", FACTORS)
def test_a_pair_takes_the_longer_op_and_part_of_the_shorter(factor):
    table = pj.ScheduleTable.from_rows([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    for forward, backward in ((1.0, 2.0), (2.0, 1.0), (1.5, 1.5)):
        costs = pj.Costs(forward=forward, backward=backward, pair_factor=factor)
        pair = max(forward, backward) + factor * min(forward, backward)
        assert pj.evaluate(table, costs).makespan == forward + pair + backward


@pytest.mark.slow
def test_batches_are_their_single_runs():
    for name, factor in (("dualpipe", 0.3), ("dualpipe-v", 0.0)):
        table = build(name)
        program, times = pj.lower(table), draw_samples(table, 5)
        costs = pj.Costs(forward=times[0], backward=times[1], pair_factor=factor)
        pairs = zip(*times, strict=True)
        alone = [pj.Costs(forward=f, backward=b, pair_factor=factor) for f, b in pairs]
        expected = [pj.evaluate(table, single).makespan for single in alone]
        np.testing.assert_allclose(pj.makespans(program, costs), expected, rtol=1e-13)
        values, counts = pj.makespans_and_grad(program, costs)
        np.testing.assert_allclose(values, expected, rtol=1e-13)
        for k, single in enumerate(alone):
            result = jax.grad(pj.makespan, argnums=1)(program, jax.tree.map(jnp.asarray, single))
            for x in ("forward", "backward", "input_grad", "weight_grad", "pair_factor"):
                np.testing.assert_allclose(getattr(counts, x)[k], getattr(result, x), rtol=1e-12)


def test_the_factor_has_a_derivative():
    table = build("dualpipe")
    program, (forward, backward) = pj.lower(table), draw_samples(table, 3)

    def total(factor):
        costs = pj.Costs(forward=forward, backward=backward, pair_factor=factor)
        return pj.makespans(program, costs).sum()

    step = 1e-6
    slope = jax.grad(total)(jnp.full(3, 0.4)).sum()
    difference = (total(np.full(3, 0.4 + step)) - total(np.full(3, 0.4 - step))) / (2 * step)
    assert float(slope) == pytest.approx(float(difference), rel=1e-6)


def test_a_file_gives_it_without_a_unit(tmp_path):
    path, table = tmp_path / "costs.json", build("dualpipe")
    path.write_text('{"unit": "milliseconds", "F": 1, "B": 2, "pair_factor": 0.5}')
    costs = pj.read_costs(path, table)
    assert np.ravel(costs.pair_factor).tolist() == [0.5] * 4
    assert pj.Costs.per_worker(table, forward=1.0, backward=2.0, pair_factor=0.5).pair_factor == 0.5


def test_the_option(answer):
    options = "evaluate", "-s", "dualpipe", "-P", 8, "-M", 20, "--stage-times", "F=1,B=2"
    assert answer(*options)["makespan"] == 66.0
    assert answer(*options, "--pair-factor", 0)["makespan"] == 52.0


ONE, SPLIT = "0F0,(0F1;0B0)OVERLAP_F_B,0B1", "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1"
TWO = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1"
PAIR_TIMES = read_cases("PAIR_TIMES of test_overlap")


@pytest.mark.parametrize("case", PAIR_TIMES)
def test_the_time_of_a_pair_among_the_times(case, answer, tmp_path):
    row, options, seconds = PAIR_TIMES[case]
    path = tmp_path / "pairs.csv"
    path.write_text(row + "\n")
    assert answer("evaluate", "--table", path, *options.split())["makespan"] == seconds


@with_cases("schedule times factor", *read_cases("test_a_pair_is_what_its_factor_says"))
def test_a_pair_is_what_its_factor_says(schedule, times, factor, answer):
    """Max(F, B) + k min(F, B): 2 + 0.5 x 1 = 2.5, and 2 + 0 x 2 = 2."""
    pair = 2.5 if factor else 2
    options = "evaluate", "-s", schedule, "-P", 4, "-M", 10, "--stage-times"
    by_factor = answer(*options, times, "--pair-factor", factor)["makespan"]
    assert answer(*options, f"{times},pair={pair}")["makespan"] == by_factor


def test_compare_takes_the_time_of_a_pair_where_any_schedule_has_one(answer):
    """Under 1F1B it has no effect: (M + P - 1) (F + B) = 13 x 3 s."""
    options = "compare", "--schedules", "1f1b,dualpipe", "--workers", 4, "--microbatches", 10
    rows = answer(*options, "--worker-times", "F=1,B=2,pair=2.5")["rows"]
    assert {row["schedule"]: row["makespan"] for row in rows}["1f1b"] == 39


@pytest.mark.slow
def test_sweeps_take_it(tmp_path):
    grid = {"schedules": "dualpipe", "models": "gpt-22b", "systems": "h100", "workers": 4}
    grid |= {"minibatch": 8, "microbatch_size": 1, "tensor_parallel": 8}
    grid |= {"pair_factor": [0.25, 1.0], "outputs": ["bubble_ratio"]}
    swept = pj.run_sweep(grid, tmp_path / "out.zarr").load()
    system, model = pj.load_system("h100"), pj.load_model("gpt-22b")
    for k, factor in enumerate((0.25, 1.0)):
        workload = pj.Workload(model, 8, tensor_parallel=8, pair_factor=factor)
        run = pj.evaluate(build("dualpipe"), pj.stage_costs(workload, system, build("dualpipe")))
        assert np.ravel(swept["step_time"])[k] == pytest.approx(run.makespan, rel=1e-5)
        busy = run.busy.mean() / run.makespan
        assert np.ravel(swept["bubble_ratio"])[k] == pytest.approx(1 - busy, rel=1e-4)
