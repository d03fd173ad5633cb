"""The kernels of a layer: their sums are the published formulas, whatever the split."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pipejax as pj
from pipejax.costs.activations import boundary_bytes
from pipejax.costs.flop import head_flop, layer_flop
from pipejax.costs.layer_collectives import layer_collectives
from pipejax.costs.layer_ops import head_ops, layer_ops, sum_of, whole_layer
from pipejax.costs.layout import Layout

SPLIT = Layout(tensor=4, context=2, sequence_parallel=1, microbatch_size=3)


def products(ops):
    return [op for op in ops if op.kind != "memory"]


def of(ops, name):
    (op,) = (op for op in ops if op.name == name)
    return op


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b"])
@pytest.mark.parametrize("layout", [Layout(microbatch_size=3), SPLIT])
def test_flop_of_the_products_are_the_formula(name, recompute, layout):
    model = dataclasses.replace(pj.load_model(name), causal=False)
    found = sum_of(products(layer_ops(model, layout, recompute=recompute)), "flop")
    shares = layout.tensor * layout.context
    printed = layer_flop(model, 3, recompute)
    assert [shares * phase for phase in found] == pytest.approx(list(printed), rel=1e-12)
    head = sum_of(products(head_ops(model, layout)), "flop")
    assert [shares * phase for phase in head] == pytest.approx(list(head_flop(model, 3)))


def test_only_a_flash_kernel_skips_what_a_causal_mask_hides():
    for name, share in (("llama3-70b", 0.5), ("gpt3-175b", 1.0)):
        model = pj.load_model(name)
        masked, whole = (
            sum_of([op for op in layer_ops(m, SPLIT) if op.kind == "attention"], "flop")
            for m in (model, dataclasses.replace(model, causal=False))
        )
        assert list(masked) == pytest.approx([share * phase for phase in whole])


def test_bytes_of_a_product():
    model = dataclasses.replace(pj.load_model("llama3-70b"), gradient_bytes=4)
    op = of(layer_ops(model, Layout(tensor=8)), "qkv")
    m, k, n = 8192, 8192, (64 + 2 * 8) * 128 / 8
    assert op.shape == (m, n, k)
    moved = 2 * (m * k + m * n)
    assert op.volume == (moved + 2 * n * k, moved + 2 * n * k, moved + 2 * 4 * n * k)


def test_scores_go_through_memory_unless_attention_is_flash():
    gpt = pj.load_model("gpt3-175b")
    flash = dataclasses.replace(gpt, flash_attention=True)
    scores = 96 * 2048**2  # of one sequence
    softmax = of(layer_ops(gpt, Layout()), "softmax")
    assert softmax.volume == (4 * scores, 6 * scores, 0)
    attention = of(layer_ops(flash, Layout()), "attention")
    assert attention.volume.forward == 2 * 4 * 2048 * gpt.hidden
    again = of(layer_ops(gpt, Layout(), recompute="selective"), "softmax")
    assert again.volume.input_grad == 10 * scores


def test_fusing_saves_launches_and_bytes():
    gpt = pj.load_model("gpt3-175b")
    fused, apart = (layer_ops(gpt, Layout(), fused=fused) for fused in (True, False))
    for what in ("launches", "volume"):
        assert sum_of(apart, what).forward > 1.1 * sum_of(fused, what).forward
    assert sum_of(apart, "flop") == sum_of(fused, "flop")


@pytest.mark.parametrize("shared", [0, 1])
def test_tensor_parallelism_sends_the_same_bytes_with_and_without_sequence_parallelism(shared):
    gpt, layout = pj.load_model("gpt3-175b"), Layout(tensor=8, sequence_parallel=shared)
    whole = boundary_bytes(gpt, Layout())
    # a ring's all-reduce is a reduce-scatter and an all-gather
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    moved = [0.0, 0.0, 0.0]
    for each in layer_collectives(gpt, layout):
        if each.group == "tensor":
            for i, (volume, count) in enumerate(zip(each.volume, each.count, strict=True)):
                moved[i] += passes[each.kind] * volume * count / whole
    assert moved == [4, 4, 2 * shared]  # W gathers its inputs once more


def test_the_ring_carries_keys_and_values_of_the_whole_sequence():
    model = pj.load_model("llama3-405b")
    (ring,) = (c for c in layer_collectives(model, SPLIT) if c.group == "context")
    keys = 2 * 3 * 8192 * 2 * 8 * 128 / 4  # bytes of both, of three sequences, over t
    assert ring.volume == (keys, 2 * keys, 0)


def test_a_whole_layer_is_the_old_roofline():
    model = pj.load_model("gpt-22b")
    (op,) = whole_layer(model, Layout(tensor=8, microbatch_size=4))
    assert op.flop == tuple(each / 8 for each in layer_flop(model, 4))
    units = 4 * 2048 * 6144
    kept = units * (10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8))
    moved = 2 * model.layer_parameters / 8 + kept
    assert op.volume == pytest.approx((moved, moved + 4 * units, moved))


@pytest.mark.compiles
def test_layouts_are_priced_as_one_batch():
    model = pj.load_model("gpt-22b")
    degrees = jnp.array([1.0, 2.0, 8.0])

    def flop(tensor, shared):
        ops = layer_ops(model, Layout(tensor=tensor, sequence_parallel=shared))
        return sum_of(ops, "volume")

    found = jax.jit(jax.vmap(flop))(degrees, jnp.array([0.0, 1.0, 1.0]))
    for i, (tensor, shared) in enumerate(((1, 0), (2, 1), (8, 1))):
        assert [p[i] for p in found] == pytest.approx(list(flop(tensor, shared)))
