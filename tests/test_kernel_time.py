"""Time of kernels on the device and on the host."""

import dataclasses

import jax
import numpy as np
import pytest

import pipejax as pj
from pipejax.costs.layers.collectives import collective_time, embedding_collectives
from pipejax.costs.layers.formulas import Phases
from pipejax.costs.layers.kernels import (
    LayerOp,
    Product,
    device_time,
    host_time,
    smooth_max,
    update_time,
)
from pipejax.costs.layers.layer_ops import layer_ops
from pipejax.costs.model.layout import Group, Layout
from pipejax.costs.system.parts import Efficiency, Host, Kernels
from pipejax.costs.system.system import roofline_time

SYSTEM = dataclasses.replace(
    pj.load_system("fast_nw_fast_cp"),
    peak_flops=300e12,
    compute_latency=5e-6,
    compute_efficiency=Efficiency((0.0,), (0.5,)),
    memory_bandwidth=2e12,
    memory_latency=3e-6,
    memory_efficiency=Efficiency((0.0,), (0.8,)),
    kernels=Kernels(1.0, 4.0, attention_efficiency=0.5, misaligned_efficiency=0.25),
    host=Host(launch=50e-6, collective=70e-6, layer=1e-6, microbatch=20e-6, step=1e-3),
    optimizer_efficiency=0.5,
)
ONCE = Phases(1.0, 1.0, 1.0)


def op(kind, flop=3e9, volume=1.6e6, columns=4096.0, inner=64.0):
    return LayerOp(
        kind,
        kind,
        Phases(flop, flop, 0.0),
        Phases(volume, volume, 0.0),
        ONCE,
        Product(1.0, columns, inner),
    )


def seconds(kind, **changes):
    return float(device_time(SYSTEM, op(kind, **changes), "forward"))


def test_a_product_takes_its_flop_its_bytes_and_its_latency():
    assert seconds("gemm") == pytest.approx(3e9 / 150e12 + 1.6e6 / 1.6e12 + 5e-6)
    assert seconds("attention") == pytest.approx(3e9 / 75e12 + 1.6e6 / 1.6e12 + 5e-6)
    assert seconds("memory", flop=0.0) == pytest.approx(1.6e6 / 1.6e12 + 3e-6)


@pytest.mark.parametrize(
    ("columns", "share"), [(50257, 0.25), (50257 / 2, 1.0), (50257 / 4, 0.25), (51200, 1.0)]
)
def test_a_product_with_misaligned_columns_is_slower(columns, share):
    """GPT-2's vocabulary of 50257 is odd; half of it, 25128 whole columns, is a multiple of 8."""
    assert seconds("gemm", volume=0.0, columns=columns) == pytest.approx(
        3e9 / (150e12 * share) + 5e-6
    )


@pytest.mark.parametrize(("inner", "share"), [(150, 0.25), (108, 0.25), (112, 1.0), (128, 1.0)])
def test_products_of_odd_head_widths_are_slower(inner, share):
    """Widths of heads that Megatron-DeepSpeed ran: 14400 / 96, 13824 / 128, 14336 / 128, 128."""
    alone = 3e9 / (150e12 * share)
    assert seconds("gemm", volume=0.0, inner=inner) == pytest.approx(alone + 5e-6)
    assert seconds("attention", volume=0.0, inner=inner) == pytest.approx(alone / 0.5 + 5e-6)


def test_a_product_below_16_bits_reaches_a_share_of_its_own_peak():
    narrow = dataclasses.replace(op("gemm", volume=0.0), precision="fp8")
    peaks = dataclasses.replace(SYSTEM.narrow_peaks, fp8=600e12)
    kernels = dataclasses.replace(SYSTEM.kernels, narrow_efficiency=0.8)
    system = dataclasses.replace(SYSTEM, narrow_peaks=peaks, kernels=kernels)
    wide = float(device_time(system, op("gemm", volume=0.0), "forward"))
    assert wide == pytest.approx(3e9 / 150e12 + 5e-6)
    result = float(device_time(system, narrow, "forward"))
    assert result == pytest.approx(3e9 / (600e12 * 0.5 * 0.8) + 5e-6)


def test_a_layer_as_one_op_is_a_roofline():
    assert seconds("layer") == float(roofline_time(SYSTEM, 3e9, 1.6e6))
    assert float(device_time(SYSTEM, op("layer"), "weight_grad")) == 5e-6


def test_the_host_starts_kernels_and_collectives_beside_the_device():
    counts = {"launches": 10.0, "collectives": 2.0, "layers": 3.0, "microbatches": 1.0}
    assert float(host_time(SYSTEM, **counts)) == pytest.approx((500 + 140 + 3 + 20) * 1e-6)
    both = float(smooth_max(3.0, 2.0, SYSTEM.kernels.sharpness))
    assert both == pytest.approx((3.0**4 + 2.0**4) ** (1 / 4))


def test_the_update_moves_bytes_at_its_own_share():
    assert float(update_time(SYSTEM, 1.6e9)) == pytest.approx(2e-3 + 3e-6)


def test_the_smooth_maximum_is_a_norm_without_kinks_or_nans():
    with jax.enable_x64(True):
        assert float(smooth_max(3.0, 4.0, 2.0)) == pytest.approx(5)
        assert float(smooth_max(1.0, 0.0, 4.0)) == 1
        assert float(smooth_max(0.0, 0.0, 4.0)) == 0
        assert float(smooth_max(1.0, 1e-300, 9.0)) == 1
        for options in [(1.0, 0.0, 4.0), (0.0, 0.0, 4.0), (1.0, 2.0, 4.0), (1e-9, 1.0, 40.0)]:
            slopes = np.array(jax.grad(smooth_max, (0, 1, 2))(*options))
            assert np.isfinite(slopes).all()
            # of degree 1 in both times: shares of the device and the host sum to 1
            assert slopes[0] * options[0] + slopes[1] * options[1] == pytest.approx(
                float(smooth_max(*options))
            )


def test_the_host_starts_layers_and_neither_embedding_nor_head():
    """A phase takes the host's time for its layers if the host is slower than all devices."""
    model = pj.load_model("gpt-22b")
    system = dataclasses.replace(pj.load_system("h100"), host=Host(layer=1000.0))
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
    costs = pj.stage_costs(pj.Workload(model, 2, tensor_parallel=8), system, table)
    expected = np.full(2, 1000.0 * model.layers / 2)
    for times in (costs.forward, costs.input_grad, costs.weight_grad):
        np.testing.assert_allclose(times, expected, rtol=1e-4)


@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_the_embedding_exchanges_its_rows_once_each_way(shared):
    """Vocabulary in parallel (Megatron): one sum of rows in F, and none behind it but a gathering."""
    layout = Layout(tensor=8.0, sequence_parallel=shared)
    result = {
        (collective.kind, phase): count
        for collective in embedding_collectives(pj.load_model("gpt-22b"), layout)
        for phase, count in collective.count._asdict().items()
        if count
    }
    exchange = ("reduce_scatter" if shared else "all_reduce", "forward")
    assert result == {exchange: 1.0} | ({("all_gather", "weight_grad"): 1.0} if shared else {})


# exchanges of tensor parallelism that a backward in one pass hides beside its products


H100 = dataclasses.replace(pj.load_system("h100"), kernels=Kernels(priced=1.0), host=Host())
MODEL = pj.load_model("gpt-22b")
TABLE = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
LAYERS = MODEL.layers / 4
LAYOUT = Layout(tensor=8, sequence_parallel=1)


def costs(system, *, overlap):
    workload = pj.Workload(
        MODEL, 4, tensor_parallel=8, sequence_parallel=True, tensor_overlap=overlap
    )
    return pj.stage_costs(workload, system, TABLE)


def products(system, phase):
    ops = layer_ops(MODEL, LAYOUT)
    return sum(float(device_time(system, op, phase)) for op in ops if op.kind == "gemm")


def test_a_backward_in_one_pass_hides_exchanges_that_its_products_do_not_wait_for():
    apart, nearby = (costs(H100, overlap=overlap) for overlap in (False, True))
    volume = 2.0 * MODEL.sequence * MODEL.hidden  # bytes of the whole hidden state, b = 1
    group = Group(8.0, 8.0)
    hidden = (
        2
        * LAYERS
        * sum(  # both of a layer's, in I and in W
            float(collective_time(H100, kind, volume, group))
            for kind in ("reduce_scatter", "all_gather")
        )
    )
    middle = 1  # neither embedding nor head
    difference = np.asarray(apart.backward - nearby.backward)[middle]
    # beside an exchange, products take 1.189 times as long
    assert difference == pytest.approx(hidden / float(H100.contention.compute), rel=1e-9)
    for phase in ("forward", "input_grad", "weight_grad"):  # I alone has no W beside it
        np.testing.assert_array_equal(getattr(apart, phase), getattr(nearby, phase))


def test_what_is_longer_than_the_products_stays_exposed():
    slow = dataclasses.replace(H100, node=dataclasses.replace(H100.node, bandwidth=1e9))
    apart, nearby = (costs(slow, overlap=overlap) for overlap in (False, True))
    difference = np.asarray(apart.backward - nearby.backward)[1]
    both = products(slow, "input_grad") + products(slow, "weight_grad")
    assert difference == pytest.approx(LAYERS * both, rel=1e-9)


def test_gradients_and_tensor_parallelism_have_shares_of_their_own():
    layout = {"tensor_parallel": 8, "sequence_parallel": True, "data_parallel": 8, "zero": 1}
    shares = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]  # of gradients and weights, of products
    none, gradients, products = (
        pj.stage_costs(pj.Workload(MODEL, 4, **layout, overlap=a, tensor_overlap=b), H100, TABLE)
        for a, b in shares
    )
    np.testing.assert_array_equal(none.backward, gradients.backward)
    np.testing.assert_array_equal(none.all_reduce, products.all_reduce)
    assert (np.asarray(products.backward) < none.backward).all()
    assert (np.asarray(gradients.all_reduce) < none.all_reduce).any()
