"""The kernels of a layer: their sums are the published formulas, whatever the split."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from daily import with_cases
from step_flop import step_flop

import pipejax as pj
from pipejax.costs.layers import formulas
from pipejax.costs.layers.collectives import (
    collective_time,
    embedding_collectives,
    layer_collectives,
)
from pipejax.costs.layers.kernels import (
    LayerOp,
    Product,
    device_time,
    host_time,
    smooth_max,
    update_time,
)
from pipejax.costs.layers.layer_ops import head_ops, layer_ops, whole_layer
from pipejax.costs.model.layout import Group, Layout
from pipejax.costs.system.parts import Efficiency, Host, Kernels
from pipejax.costs.system.system import roofline_time

SPLIT = Layout(tensor=4, context=2, expert=4, sequence_parallel=1, microbatch_size=3)
KINDS = [(name, "dense") for name in ("gpt3-175b", "llama3-70b", "deepseek-v3")]
KINDS += [(name, "moe") for name in ("deepseek-v3", "gpt-oss-120b")]
H100 = dataclasses.replace(pj.load_system("h100"), kernels=Kernels(priced=1.0), host=Host())
MODEL = pj.load_model("gpt-22b")
TABLE = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
LAYERS = MODEL.layers / 4
LAYOUT = Layout(tensor=8, sequence_parallel=1)


def get_sum(ops, what):
    """Sum of a quantity over ops: "flop", "volume" or "launches"."""
    return formulas.Phases(*map(sum, zip(*(getattr(op, what) for op in ops), strict=True)))


def products(ops):
    return [op for op in ops if op.kind != "memory"]


def evaluate_form(ops, name):
    (op,) = (op for op in ops if op.name == name)
    return op


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("layout", [Layout(microbatch_size=3), SPLIT])
def test_flop_of_the_products_are_the_formula(name, kind, recompute, layout):
    model = dataclasses.replace(pj.load_model(name), causal=False, window=None)
    result = get_sum(products(layer_ops(model, layout, kind, recompute)), "flop")
    shares = layout.tensor * layout.context
    printed = formulas.layer_flop(model, 3, recompute, kind)
    assert [shares * phase for phase in result] == pytest.approx(list(printed), rel=1e-12)
    head = get_sum(products(head_ops(model, layout)), "flop")
    assert [shares * phase for phase in head] == pytest.approx(list(formulas.head_flop(model, 3)))


def test_only_a_flash_kernel_skips_what_a_causal_mask_hides():
    for name, share in (("llama3-70b", 0.5), ("gpt3-175b", 1.0)):
        model = pj.load_model(name)
        models = model, dataclasses.replace(model, causal=False)
        attention = [[op for op in layer_ops(m, SPLIT) if op.kind == "attention"] for m in models]
        masked, whole = (get_sum(ops, "flop") for ops in attention)
        assert list(masked) == pytest.approx([share * phase for phase in whole])


def test_a_window_leaves_a_few_pairs_of_tokens():
    model = pj.load_model("gpt-oss-120b")  # every second layer attends to 128 tokens
    pairs = [sum(min(i, 128) for i in range(4097)), sum(range(4097))]
    scores = 2 * 64 * 64 * 2 * sum(pairs) / 2
    result = evaluate_form(layer_ops(model, Layout(), "moe"), "attention").flop.forward
    assert result == pytest.approx(scores, rel=1e-3)


def test_bytes_of_a_product():
    model = dataclasses.replace(pj.load_model("llama3-70b"), gradient_bytes=4)
    op = evaluate_form(layer_ops(model, Layout(tensor=8)), "qkv")
    m, k, n = 8192, 8192, (64 + 2 * 8) * 128 / 8
    assert op.shape == (m, n, k)
    moved = 2 * (m * k + m * n)
    assert op.volume == (moved + 2 * n * k, moved + 2 * n * k, moved + 2 * 4 * n * k)


def test_scores_go_through_memory_unless_attention_is_flash():
    gpt = pj.load_model("gpt3-175b")
    flash = dataclasses.replace(gpt, flash_attention=True)
    scores = 96 * 2048**2  # of one sequence
    softmax = evaluate_form(layer_ops(gpt, Layout()), "softmax")
    assert softmax.volume == (4 * scores, 6 * scores, 0)
    attention = evaluate_form(layer_ops(flash, Layout()), "attention")
    assert attention.volume.forward == 2 * 4 * 2048 * gpt.hidden
    again = evaluate_form(layer_ops(gpt, Layout(), recompute="selective"), "softmax")
    assert again.volume.input_grad == 10 * scores


def test_experts_share_the_tokens_that_are_routed_to_them():
    model = pj.load_model("deepseek-v3")
    into = evaluate_form(layer_ops(model, SPLIT, "moe"), "expert_in")
    routed = 3 * 4096 / 2 / 4 * 8  # of this accelerator's part of three sequences, top 8
    assert into.batch == 256 / 4
    assert into.shape == (routed / 64, 2 * 2048, 7168)
    (exchange,) = (c for c in layer_collectives(model, SPLIT, "moe") if c.group == "expert")
    assert exchange.volume.forward == 2 * routed * 7168
    assert exchange.count == (2, 2, 0)
    padded = dataclasses.replace(model.moe, capacity_factor=1.25)
    wider = dataclasses.replace(model, moe=padded)
    more = evaluate_form(layer_ops(wider, SPLIT, "moe"), "expert_in")
    assert more.flop.forward == 1.25 * into.flop.forward


def test_a_model_without_shared_experts_launches_none():
    for name, launched in (("deepseek-v3", 1), ("mixtral-8x7b", 0)):
        ops = layer_ops(pj.load_model(name), Layout(), "moe")
        shared = [op for op in ops if op.name.startswith("shared")]
        assert get_sum(shared, "launches") == (3 * launched, 3 * launched, 2 * launched)


def test_latent_attention_gathers_only_what_it_unfolds_from():
    model, layout = pj.load_model("deepseek-v3"), Layout(tensor=8, sequence_parallel=1)
    sizes = {c.volume.forward for c in layer_collectives(model, layout) if c.kind == "all_gather"}
    assert sizes == {2 * 4096 * (1536 + 512 + 64), 2 * 4096 * 7168}
    attention = evaluate_form(layer_ops(model, layout), "attention")
    assert attention.flop.forward == 2 * 4096 * 2048 * 128 / 8 * (192 + 128)


def test_narrow_products_move_fewer_bytes_and_are_cast_first():
    model = pj.load_model("llama3-70b")
    wide, narrow = (layer_ops(model, Layout(precision=p)) for p in ("bf16", "fp8"))
    m, k, n = 8192, 8192, 10240
    for ops, factor in ((wide, 2), (narrow, 1)):
        op = evaluate_form(ops, "qkv")
        assert op.volume.forward == factor * (m * k + k * n) + 2 * m * n
        assert op.volume.input_grad == factor * (m * n + k * n) + 2 * m * k
        assert op.volume.weight_grad == factor * (m * n + m * k) + 2 * 2 * k * n
    assert evaluate_form(narrow, "qkv").precision == "fp8"
    assert evaluate_form(narrow, "attention") == evaluate_form(wide, "attention")
    h, kv, f = 8192, 1024, 28672
    cast = evaluate_form(narrow, "quantization")  # two bytes read, two times one written
    assert cast.volume == (4 * m * (h + f), 4 * m * (h + 2 * kv + h + 2 * f + h), 0)
    assert cast.launches == (2, 4, 0)
    assert {op.name for op in narrow} - {op.name for op in wide} == {"quantization"}
    assert {op.precision for op in head_ops(model, Layout(precision="fp8"))} == {"bf16"}


def test_further_prediction_is_a_layer_a_projection_and_a_head():
    model = pj.load_model("deepseek-v3-mtp")
    extra = step_flop(model, 1) - step_flop(dataclasses.replace(model, mtp_layers=0), 1)
    parts = sum(formulas.layer_flop(model, 1, kind="moe")) + sum(formulas.head_flop(model, 1))
    projection = 3 * 2 * 4096 * 2 * 7168**2
    assert extra == pytest.approx(parts + projection)
    assert projection < 0.003 * step_flop(model, 1)


@pytest.mark.parametrize("shared", [0, 1])
def test_tensor_parallelism_sends_the_same_bytes_with_and_without_sequence_parallelism(shared):
    gpt, layout = pj.load_model("gpt3-175b"), Layout(tensor=8, sequence_parallel=shared)
    whole = formulas.boundary_bytes(gpt, Layout())
    # a ring's all-reduce is a reduce-scatter and an all-gather
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    moved = np.zeros(3)
    for collective in layer_collectives(gpt, layout):
        if collective.group == "tensor":
            volumes = np.multiply(collective.volume, collective.count)
            moved += passes[collective.kind] * volumes / whole
    assert moved.tolist() == [4, 4, 2 * shared]  # W gathers its inputs once more


def test_the_ring_carries_keys_and_values_of_the_whole_sequence():
    model = pj.load_model("llama3-405b")
    (ring,) = (c for c in layer_collectives(model, SPLIT) if c.group == "context")
    keys = 2 * 3 * 8192 * 2 * 8 * 128 / 4  # bytes of both, of three sequences, over t
    assert ring.volume == (keys, 2 * keys, 0)


def test_a_whole_layer_is_the_old_roofline():
    model = pj.load_model("gpt-22b")
    (op,) = whole_layer(model, Layout(tensor=8, microbatch_size=4))
    assert op.flop == tuple(number / 8 for number in formulas.layer_flop(model, 4))
    units = 4 * 2048 * 6144
    held = units * (10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8))
    whole = 6 * 6144  # norms, and biases of what is summed
    moved = 2 * (whole + (model.layer_parameters - whole) / 8) + held
    assert op.volume == pytest.approx((moved, moved + 4 * units, moved))


def test_layouts_are_priced_as_one_batch():
    model = pj.load_model("gpt-22b")
    degrees = jnp.array([1.0, 2.0, 8.0])

    def flop(tensor, shared):
        ops = layer_ops(model, Layout(tensor=tensor, sequence_parallel=shared))
        return get_sum(ops, "volume")

    result = jax.jit(jax.vmap(flop))(degrees, jnp.array([0.0, 1.0, 1.0]))
    for i, (tensor, shared) in enumerate(((1, 0), (2, 1), (8, 1))):
        assert [p[i] for p in result] == pytest.approx(list(flop(tensor, shared)))


# activation memory of a microbatch, beyond the published table of a GPT
def test_context_parallelism_divides_all_of_it():
    for name, kind in (("gpt3-175b", "dense"), ("deepseek-v3", "moe")):
        model = pj.load_model(name)
        layouts = Layout(context=1), Layout(context=4)
        whole, part = (formulas.layer_activation_bytes(model, x, kind=kind) for x in layouts)
        assert part == whole / 4


def test_each_token_is_kept_once_more_for_every_expert_that_it_meets():
    model = pj.load_model("mixtral-8x7b")
    tokens, h, f = model.sequence, model.hidden, 14336
    dense, moe = (formulas.layer_activation_bytes(model, kind=kind) for kind in ("dense", "moe"))
    assert moe - dense == 2 * tokens * (2 * (2 * h + 3 * f) - 3 * f)


def test_latent_attention_keeps_what_heads_unfold_from():
    model = pj.load_model("deepseek-v3")
    heads = 128 * (192 + 192 + 128 + 128)
    vectors = 2 * (1536 + 512) + 64
    mlp = 3 * 18432
    assert formulas.layer_weight_grad_bytes(model) == 2 * 4096 * (4 * 7168 + heads + vectors + mlp)


def test_narrow_inputs_of_products_are_kept_in_their_bytes():
    model = pj.load_model("llama3-70b")
    h, kv, f = 8192, 1024, 28672
    held = formulas.layer_activation_bytes(model, Layout(precision="fp8"))
    # inputs of four products in one byte; norms' inputs, heads, flash's output, both halves in two
    assert held == 8192 * ((2 * h + h + f) + 2 * (2 * h + h + 2 * kv + h + 2 * f))


def test_a_fused_loss_keeps_logits_instead_of_a_softmax():
    model = pj.load_model("llama3-70b")
    fused = dataclasses.replace(model, fused_loss=True)
    (_, apart), (_, less) = map(formulas.edge_activation_bytes, (model, fused))
    assert apart - less == 2 * model.sequence * model.vocabulary


def test_the_head_keeps_the_gradient_of_its_logits_in_the_model_s_bytes():
    model = pj.load_model("gpt-22b")
    layout = Layout(tensor=8, sequence_parallel=1, microbatch_size=4)
    assert formulas.head_weight_grad_bytes(model, layout) == 2 * 4 * 2048 * (6144 + 51200) / 8


def test_gradients_that_are_accumulated_in_a_wider_type_have_a_buffer_each():
    model = pj.load_model("llama3-70b")
    stage = {"dense": 1, "moe": 0, "head": 0}
    assert formulas.buffer_bytes(model, Layout(), **stage) == 0
    wide = dataclasses.replace(model, gradient_bytes=4)
    tokens, h, f = 8192, 8192, 28672
    matrices = 2 * h * h + 2 * h * 1024 + 3 * h * f
    more = matrices + tokens * (3 * f + 2 * h)
    assert formulas.buffer_bytes(wide, Layout(), **stage) == 2 * more
    head = formulas.buffer_bytes(wide, Layout(tensor=2), dense=1, moe=0, head=1)
    assert head == matrices + 2 * tokens * 2 * h + 128256 * h


def test_all_experts_share_one_buffer_for_their_gradients():
    model = dataclasses.replace(pj.load_model("mixtral-8x7b"), gradient_bytes=4)
    h, f, tokens = 4096, 14336, 32768
    matrices = 2 * h * h + 2 * h * 1024 + 3 * h * f
    routed = tokens * 2 * (3 * f + 2 * h)
    result = formulas.buffer_bytes(model, Layout(expert=4), dense=0, moe=1, head=0)
    assert result == 2 * (matrices + routed + tokens * 2 * h)


# time of kernels on the device and on the host
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
ONCE = formulas.Phases(1.0, 1.0, 1.0)


def op(kind, flop=3e9, volume=1.6e6, columns=4096.0, inner=64.0):
    flops, bytes_moved = formulas.Phases(flop, flop, 0.0), formulas.Phases(volume, volume, 0.0)
    return LayerOp(kind, kind, flops, bytes_moved, ONCE, Product(1.0, columns, inner))


def seconds(kind, **changes):
    return float(device_time(SYSTEM, op(kind, **changes), "forward"))


def test_a_product_takes_its_flop_its_bytes_and_its_latency():
    assert seconds("gemm") == pytest.approx(3e9 / 150e12 + 1.6e6 / 1.6e12 + 5e-6)
    assert seconds("attention") == pytest.approx(3e9 / 75e12 + 1.6e6 / 1.6e12 + 5e-6)
    assert seconds("memory", flop=0.0) == pytest.approx(1.6e6 / 1.6e12 + 3e-6)
    # a layer as one op is a roofline
    assert seconds("layer") == float(roofline_time(SYSTEM, 3e9, 1.6e6))
    assert float(device_time(SYSTEM, op("layer"), "weight_grad")) == 5e-6


@with_cases("columns share", (50257, 0.25), (50257 / 2, 1.0), (50257 / 4, 0.25), (51200, 1.0))
def test_a_product_with_misaligned_columns_is_slower(columns, share):
    """GPT-2's vocabulary of 50257 is odd; half of it, 25128 whole columns, is a multiple of 8."""
    expected = 3e9 / (150e12 * share) + 5e-6
    assert seconds("gemm", volume=0.0, columns=columns) == pytest.approx(expected)


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
            both = slopes[0] * options[0] + slopes[1] * options[1]
            assert both == pytest.approx(float(smooth_max(*options)))


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
    collectives = embedding_collectives(pj.load_model("gpt-22b"), layout)
    counts = [(collective.kind, collective.count._asdict()) for collective in collectives]
    result = {(kind, phase): n for kind, count in counts for phase, n in count.items() if n}
    exchange = ("reduce_scatter" if shared else "all_reduce", "forward")
    assert result == {exchange: 1.0} | ({("all_gather", "weight_grad"): 1.0} if shared else {})


# exchanges of tensor parallelism that a backward in one pass hides beside its product_seconds
def costs(system, *, overlap):
    fields = {"tensor_parallel": 8, "sequence_parallel": True, "tensor_overlap": overlap}
    workload = pj.Workload(MODEL, 4, **fields)
    return pj.stage_costs(workload, system, TABLE)


def product_seconds(system, phase):
    ops = layer_ops(MODEL, LAYOUT)
    return sum(float(device_time(system, op, phase)) for op in ops if op.kind == "gemm")


def test_a_backward_in_one_pass_hides_exchanges_that_its_products_do_not_wait_for():
    apart, nearby = (costs(H100, overlap=overlap) for overlap in (False, True))
    volume = 2.0 * MODEL.sequence * MODEL.hidden  # bytes of the whole hidden state, b = 1
    group = Group(8.0, 8.0)
    kinds = ("reduce_scatter", "all_gather")
    exchanges = sum(float(collective_time(H100, kind, volume, group)) for kind in kinds)
    hidden = 2 * LAYERS * exchanges  # both of a layer's, in I and in W
    middle = 1  # neither embedding nor head
    difference = np.asarray(apart.backward - nearby.backward)[middle]
    # beside an exchange, product_seconds take 1.189 times as long
    assert difference == pytest.approx(hidden / float(H100.contention.compute), rel=1e-9)
    for phase in ("forward", "input_grad", "weight_grad"):  # I alone has no W beside it
        np.testing.assert_array_equal(getattr(apart, phase), getattr(nearby, phase))


def test_what_is_longer_than_the_products_stays_exposed():
    slow = dataclasses.replace(H100, node=dataclasses.replace(H100.node, bandwidth=1e9))
    apart, nearby = (costs(slow, overlap=overlap) for overlap in (False, True))
    difference = np.asarray(apart.backward - nearby.backward)[1]
    both = product_seconds(slow, "input_grad") + product_seconds(slow, "weight_grad")
    assert difference == pytest.approx(LAYERS * both, rel=1e-9)


def test_gradients_and_tensor_parallelism_have_shares_of_their_own():
    layout = {"tensor_parallel": 8, "sequence_parallel": True, "data_parallel": 8, "zero": 1}
    shares = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]  # of gradients and weights, of product_seconds
    workloads = [pj.Workload(MODEL, 4, **layout, overlap=a, tensor_overlap=b) for a, b in shares]
    none, gradients, product_seconds = (pj.stage_costs(w, H100, TABLE) for w in workloads)
    np.testing.assert_array_equal(none.backward, gradients.backward)
    np.testing.assert_array_equal(none.all_reduce, product_seconds.all_reduce)
    assert (np.asarray(product_seconds.backward) < none.backward).all()
    assert (np.asarray(gradients.all_reduce) < none.all_reduce).any()
