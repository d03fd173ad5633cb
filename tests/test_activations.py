"""Activation memory of a microbatch, beyond the published table of a GPT."""

import dataclasses

import pipejax as pj
from pipejax.costs.layers.formulas import (
    buffer_bytes,
    edge_activation_bytes,
    head_weight_grad_bytes,
    layer_activation_bytes,
    layer_weight_grad_bytes,
)
from pipejax.costs.model.layout import Layout


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
