"""Exchanges beside compute: closed forms against runs step by step."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    workload = pj.Workload(
        pj.load_model("llama3-8b"), minibatch=1, data_parallel=8, zero=3, overlap=1.0
    )
    table = pj.schedules.build("gpipe", num_workers=1, num_microbatches=1)
    times = {
        slow: pj.stage_costs(workload, system.with_number("contention.compute", slow), table)
        for slow in (1.0, 2.0)
    }
    exposed = pj.stage_costs(dataclasses.replace(workload, overlap=0.0), system, table)
    for field in ("forward", "backward"):
        free, slowed, apart = (
            float(getattr(costs, field)[0]) for costs in (times[1.0], times[2.0], exposed)
        )
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


@pytest.mark.parametrize(
    ("dispatcher", "measured"), [("per-node", (24.714, 20.992)), ("all-to-all", (41.25, 31.31))]
)
def test_hiding_the_exchange_of_experts_pays_as_it_was_measured(dispatcher, measured):
    """Qwen3-30B-A3B on 16 H100: Megatron-Bridge, pull requests 5094 and 3862."""
    workload = pj.Workload(
        pj.load_model("qwen3-30b-a3b"),
        minibatch=64,
        data_parallel=16,
        expert_parallel=16,
        zero=1,
        overlap=1.0,
        dispatcher=dispatcher,
        graphs=0.16,
    )
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
