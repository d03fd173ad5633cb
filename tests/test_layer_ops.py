"""The kernels of a layer: their sums are the published formulas, whatever the split."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from step_flop import step_flop

import pipejax as pj
from pipejax.costs.layers.collectives import layer_collectives
from pipejax.costs.layers.formulas import (
    Phases,
    boundary_bytes,
    buffer_bytes,
    edge_activation_bytes,
    head_flop,
    head_weight_grad_bytes,
    layer_activation_bytes,
    layer_flop,
    layer_weight_grad_bytes,
)
from pipejax.costs.layers.layer_ops import head_ops, layer_ops, whole_layer
from pipejax.costs.model.layout import Layout

SPLIT = Layout(tensor=4, context=2, expert=4, sequence_parallel=1, microbatch_size=3)
KINDS = [
    ("gpt3-175b", "dense"),
    ("llama3-70b", "dense"),
    ("deepseek-v3", "dense"),
    ("deepseek-v3", "moe"),
    ("gpt-oss-120b", "moe"),
]


def get_sum(ops, what):
    """Sum of a quantity over ops: "flop", "volume" or "launches"."""
    return Phases(*map(sum, zip(*(getattr(op, what) for op in ops), strict=True)))


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
    printed = layer_flop(model, 3, recompute, kind)
    assert [shares * phase for phase in result] == pytest.approx(list(printed), rel=1e-12)
    head = get_sum(products(head_ops(model, layout)), "flop")
    assert [shares * phase for phase in head] == pytest.approx(list(head_flop(model, 3)))


def test_only_a_flash_kernel_skips_what_a_causal_mask_hides():
    for name, share in (("llama3-70b", 0.5), ("gpt3-175b", 1.0)):
        model = pj.load_model(name)
        masked, whole = (
            get_sum([op for op in layer_ops(m, SPLIT) if op.kind == "attention"], "flop")
            for m in (model, dataclasses.replace(model, causal=False))
        )
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
    assert (
        evaluate_form(layer_ops(wider, SPLIT, "moe"), "expert_in").flop.forward
        == 1.25 * into.flop.forward
    )


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
    parts = sum(layer_flop(model, 1, kind="moe")) + sum(head_flop(model, 1))
    projection = 3 * 2 * 4096 * 2 * 7168**2
    assert extra == pytest.approx(parts + projection)
    assert projection < 0.003 * step_flop(model, 1)


@pytest.mark.parametrize("shared", [0, 1])
def test_tensor_parallelism_sends_the_same_bytes_with_and_without_sequence_parallelism(shared):
    gpt, layout = pj.load_model("gpt3-175b"), Layout(tensor=8, sequence_parallel=shared)
    whole = boundary_bytes(gpt, Layout())
    # a ring's all-reduce is a reduce-scatter and an all-gather
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    moved = [0.0, 0.0, 0.0]
    for collective in layer_collectives(gpt, layout):
        if collective.group == "tensor":
            for i, (volume, count) in enumerate(
                zip(collective.volume, collective.count, strict=True)
            ):
                moved[i] += passes[collective.kind] * volume * count / whole
    assert moved == [4, 4, 2 * shared]  # W gathers its inputs once more


def test_the_ring_carries_keys_and_values_of_the_whole_sequence():
    model = pj.load_model("llama3-405b")
    (ring,) = (c for c in layer_collectives(model, SPLIT) if c.group == "context")
    keys = 2 * 3 * 8192 * 2 * 8 * 128 / 4  # bytes of both, of three sequences, over t
    assert ring.volume == (keys, 2 * keys, 0)


def test_a_whole_layer_is_the_old_roofline():
    model = pj.load_model("gpt-22b")
    (op,) = whole_layer(model, Layout(tensor=8, microbatch_size=4))
    assert op.flop == tuple(number / 8 for number in layer_flop(model, 4))
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
        whole, part = (layer_activation_bytes(model, Layout(context=c), kind=kind) for c in (1, 4))
        assert part == whole / 4


def test_each_token_is_kept_once_more_for_every_expert_that_it_meets():
    model = pj.load_model("mixtral-8x7b")
    tokens, h, f = model.sequence, model.hidden, 14336
    dense, moe = (layer_activation_bytes(model, kind=kind) for kind in ("dense", "moe"))
    assert moe - dense == 2 * tokens * (2 * (2 * h + 3 * f) - 3 * f)


def test_latent_attention_keeps_what_heads_unfold_from():
    model = pj.load_model("deepseek-v3")
    heads = 128 * (192 + 192 + 128 + 128)
    vectors = 2 * (1536 + 512) + 64
    mlp = 3 * 18432
    assert layer_weight_grad_bytes(model) == 2 * 4096 * (4 * 7168 + heads + vectors + mlp)


def test_narrow_inputs_of_products_are_kept_in_their_bytes():
    model = pj.load_model("llama3-70b")
    h, kv, f = 8192, 1024, 28672
    held = layer_activation_bytes(model, Layout(precision="fp8"))
    # inputs of four products in one byte; norms' inputs, heads, flash's output, both halves in two
    assert held == 8192 * ((2 * h + h + f) + 2 * (2 * h + h + 2 * kv + h + 2 * f))


def test_a_fused_loss_keeps_logits_instead_of_a_softmax():
    model = pj.load_model("llama3-70b")
    fused = dataclasses.replace(model, fused_loss=True)
    (_, apart), (_, less) = map(edge_activation_bytes, (model, fused))
    assert apart - less == 2 * model.sequence * model.vocabulary


def test_the_head_keeps_the_gradient_of_its_logits_in_the_model_s_bytes():
    model = pj.load_model("gpt-22b")
    layout = Layout(tensor=8, sequence_parallel=1, microbatch_size=4)
    assert head_weight_grad_bytes(model, layout) == 2 * 4 * 2048 * (6144 + 51200) / 8


def test_gradients_that_are_accumulated_in_a_wider_type_have_a_buffer_each():
    model = pj.load_model("llama3-70b")
    stage = {"dense": 1, "moe": 0, "head": 0}
    assert buffer_bytes(model, Layout(), **stage) == 0
    wide = dataclasses.replace(model, gradient_bytes=4)
    tokens, h, f = 8192, 8192, 28672
    matrices = 2 * h * h + 2 * h * 1024 + 3 * h * f
    assert buffer_bytes(wide, Layout(), **stage) == 2 * (matrices + tokens * (3 * f + 2 * h))
    head = buffer_bytes(wide, Layout(tensor=2), dense=1, moe=0, head=1)
    assert head == matrices + 2 * tokens * 2 * h + 128256 * h


def test_all_experts_share_one_buffer_for_their_gradients():
    model = dataclasses.replace(pj.load_model("mixtral-8x7b"), gradient_bytes=4)
    h, f, tokens = 4096, 14336, 32768
    matrices = 2 * h * h + 2 * h * 1024 + 3 * h * f
    routed = tokens * 2 * (3 * f + 2 * h)
    result = buffer_bytes(model, Layout(expert=4), dense=0, moe=1, head=0)
    assert result == 2 * (matrices + routed + tokens * 2 * h)
