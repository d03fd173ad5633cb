"""The kernels of a transformer layer: FLOP, bytes and launches of each on one accelerator.

A layer is a list of ops: products (`gemm`), attention (`attention`: batched products, or one flash
kernel), and what only moves bytes (`memory`: norms, softmax, activation functions, residuals). The
list depends on shapes that are fixed at tracing (gated or not, flash or not); all numbers may be
traced and batched. b is the microbatch size, s the sequence length, t and c the degrees of tensor
and context parallelism.

Which FLOP count: the products of a layer count as in the published formulas (`flop.py`), and so
does attention that is written out in batched products, which computes the pairs of tokens that a
causal mask hides. A flash kernel skips them: under a causal mask its FLOP are half of those.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from pipejax.costs.activations import (
    boundary_bytes,
    edge_activation_bytes,
    layer_activation_bytes,
    tokens_on_one,
)
from pipejax.costs.flop import Phases, head_flop, layer_flop
from pipejax.costs.layout import Layout
from pipejax.costs.model import Model, check_recompute
from pipejax.costs.system import Number

NONE = Phases(0.0, 0.0, 0.0)


class Product(NamedTuple):
    """Sizes of a matrix product (m, k) x (k, n) on one accelerator.

    Attributes:
      m: rows, tokens mostly.
      n: columns.
      k: units summed over.
    """

    m: Number
    n: Number
    k: Number


NO_PRODUCT = Product(0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class LayerOp:
    """One kernel, or group of fused ones, on one accelerator for one microbatch.

    Attributes:
      kind: "gemm", "attention", "memory", or "layer" for all of a layer in one.
      name: of the op.
      flop: [FLOP].
      volume: bytes read and written.
      launches: kernels started.
      shape: of the product of F; of memory ops zeros.
      batch: how many such products run at once: heads, experts.
      precision: of products, by name.
    """

    kind: str = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})
    flop: Phases
    volume: Phases
    launches: Phases
    shape: Product = NO_PRODUCT
    batch: Number = 1.0
    precision: str = dataclasses.field(default="bf16", metadata={"static": True})


jax.tree_util.register_dataclass(LayerOp)


def layer_ops(
    model: Model,
    layout: Layout,
    kind: str = "dense",
    recompute: str = "none",
    *,
    fused: bool = True,
) -> tuple[LayerOp, ...]:
    """List the ops of a layer, in the order of F.

    Args:
      model: the transformer.
      layout: how it is split.
      kind: of the layer, "dense" or "moe".
      recompute: "selective" runs attention that is written out once more in I.
      fused: whether scale, mask and softmax are one kernel, and so are bias with activation
        function, and bias, dropout and residual.
    """
    check_recompute(recompute)
    attention = _attention(model, layout, fused=fused)
    if recompute == "selective" and not model.flash_attention:
        attention = tuple(map(_with_forward_again, attention))
    return (
        _norm("attention_norm", model, layout),
        *_projections_in(model, layout),
        *attention,
        gemm("projection", model, layout, model.output_hidden / layout.tensor, model.hidden),
        _residual("attention_residual", model, layout, fused=fused),
        _norm("mlp_norm", model, layout),
        *_mlp(model, layout, model.ffn_hidden / layout.tensor, fused=fused),
        _residual("mlp_residual", model, layout, fused=fused),
    )


def gemm(
    name: str, model: Model, layout: Layout, k: Number, n: Number, tokens: Number | None = None
) -> LayerOp:
    """A product of tokens with a weight matrix (k, n): once in each phase.

    W adds to the accumulated gradient: it reads and writes that.
    """
    m = tokens_on_one(model, layout) if tokens is None else tokens
    e, gradient = model.element_bytes, model.accumulated_bytes
    flop, moved = 2 * m * n * k, e * m * (n + k)
    return LayerOp(
        "gemm",
        name,
        Phases(flop, flop, flop),
        Phases(moved + e * n * k, moved + e * n * k, moved + 2 * gradient * n * k),
        Phases(1.0, 1.0, 1.0),
        Product(m, n, k),
    )


def _memory(name: str, forward: Number, backward: Number, kernels: tuple[float, float]) -> LayerOp:
    """An op that moves bytes in F and I."""
    return LayerOp(
        "memory", name, NONE, Phases(forward, backward, 0.0), Phases(kernels[0], kernels[1], 0.0)
    )


def _norm(name: str, model: Model, layout: Layout) -> LayerOp:
    """A norm: reads and writes a hidden state; its I reads two and writes one."""
    one = boundary_bytes(model, layout)
    return _memory(name, 2 * one, 3 * one, (1.0, 2.0))


def _residual(name: str, model: Model, layout: Layout, *, fused: bool) -> LayerOp:
    """Bias, dropout and the residual's sum: one kernel, or one each."""
    one = boundary_bytes(model, layout)
    mask = one / model.element_bytes if model.dropout else 0.0
    # I adds the norm's gradient to the residual's: two read, one written; dropout: one each
    again = 3 * one + ((2 * one + mask) if model.dropout else 0.0)
    apart = 0 if fused else (1 if model.biases else 0) + (1 if model.dropout else 0)
    kernels = (1.0 + apart, 2.0 if model.dropout else 1.0)
    return _memory(name, (3 + 2 * apart) * one + mask, again, kernels)


def _projections_in(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """Queries, keys and values of a layer's input, and the rotation of queries and keys."""
    width = (model.query_hidden + model.kv_hidden + model.value_hidden) / layout.tensor
    qkv = gemm("qkv", model, layout, model.hidden, width)
    return (qkv,) if model.learned_positions else (qkv, _rotation(model, layout))


def _rotation(model: Model, layout: Layout) -> LayerOp:
    """Rotary positions: reads and writes queries and keys."""
    units = tokens_on_one(model, layout) * (model.query_hidden + model.kv_hidden) / layout.tensor
    return _memory(
        "rotation", 2 * model.element_bytes * units, 2 * model.element_bytes * units, (2.0, 2.0)
    )


def _attention(model: Model, layout: Layout, *, fused: bool) -> tuple[LayerOp, ...]:
    """Attention of one accelerator's heads and tokens to all tokens of the sequence."""
    return (
        (_flash(model, layout),)
        if model.flash_attention
        else _written_out(model, layout, fused=fused)
    )


def _flash(model: Model, layout: Layout) -> LayerOp:
    """One kernel that keeps no scores: I computes the first product again, five in all for two."""
    tokens, t, e = tokens_on_one(model, layout), layout.tensor, model.element_bytes
    queries, values = model.query_hidden / t, model.output_hidden / t
    met = model.sequence / 2 if model.causal else model.sequence
    scores, context = 2 * tokens * met * queries, 2 * tokens * met * values
    # keys and values of the other accelerators of the context come by in turn, each read once
    keys = layout.context * (model.kv_hidden + model.value_hidden) / t
    heads = layout.microbatch_size * model.heads / t
    return LayerOp(
        "attention",
        "attention",
        Phases(scores + context, 3 * scores + 2 * context, 0.0),
        Phases(
            e * tokens * (queries + values + keys),
            e * tokens * (2 * queries + 2 * values + 2 * keys),
            0.0,
        ),
        Phases(1.0, 3.0, 0.0),
        Product(model.sequence / layout.context, met, model.query_hidden / model.heads),
        heads,
    )


def _written_out(model: Model, layout: Layout, *, fused: bool) -> tuple[LayerOp, ...]:
    """Batched products with the softmax between them, whose scores go through memory."""
    t, e = layout.tensor, model.element_bytes
    rows, columns = model.sequence / layout.context, model.sequence
    heads = layout.microbatch_size * model.heads / t
    pairs = heads * rows * columns  # scores
    # softmax in one kernel reads and writes them once; apart: scale, mask and softmax
    passes = 1 if fused else 3
    ops = [
        _batched("scores", model, Product(rows, columns, model.query_hidden / model.heads), heads),
        _memory("softmax", 2 * e * passes * pairs, 3 * e * pairs, (1.0 * passes, 1.0)),
        _batched(
            "context", model, Product(rows, model.output_hidden / model.heads, columns), heads
        ),
    ]
    if model.dropout:
        moved = (2 * e + 1) * pairs
        ops.insert(2, _memory("attention_dropout", moved, moved, (1.0, 1.0)))
    return tuple(ops)


def _batched(name: str, model: Model, shape: Product, heads: Number) -> LayerOp:
    """A product per head; I has two of its kind, one per factor, and W none."""
    m, n, k = shape
    flop = 2 * heads * m * n * k
    moved = model.element_bytes * heads * (m * k + n * k + m * n)
    return LayerOp(
        "attention",
        name,
        Phases(flop, 2 * flop, 0.0),
        Phases(moved, 2 * moved, 0.0),
        Phases(1.0, 2.0, 0.0),
        shape,
        heads,
    )


def _with_forward_again(op: LayerOp) -> LayerOp:
    """An op whose F is run once more within I."""
    return dataclasses.replace(
        op,
        **{
            name: part._replace(input_grad=part.input_grad + part.forward)
            for name in ("flop", "volume", "launches")
            for part in (getattr(op, name),)
        },
    )


def _mlp(model: Model, layout: Layout, width: Number, *, fused: bool) -> tuple[LayerOp, ...]:
    """Both products of an MLP, its activation function between them."""
    halves = 2 if model.gated_mlp else 1
    tokens = tokens_on_one(model, layout)
    return (
        gemm("mlp_in", model, layout, model.hidden, halves * width),
        _activation("activation", model, tokens * width, fused=fused),
        gemm("mlp_out", model, layout, width, model.hidden),
    )


def _activation(name: str, model: Model, units: Number, *, fused: bool) -> LayerOp:
    """GELU reads and writes its units, I reads two and writes one; gated: one more factor each."""
    forward, backward = (3, 5) if model.gated_mlp else (2, 3)
    apart = 1 if model.biases and not fused else 0
    e = model.element_bytes
    return _memory(
        name, e * (forward + 2 * apart) * units, e * backward * units, (1.0 + apart, 1.0)
    )


def head_ops(model: Model, layout: Layout, *, fused: bool = False) -> tuple[LayerOp, ...]:
    """Final norm, logits and cross entropy, in float32 unless it is fused."""
    logits = tokens_on_one(model, layout) * model.vocabulary / layout.tensor
    e = model.element_bytes
    # fused: the logits are read twice and their gradient written in their place; apart: float32 is
    # written, read for the maximum, shifted, raised and summed, and I scales what is left
    forward, backward = (2 * e, e) if fused else (e + 6 * 4, 2 * 4 + e)
    kernels = (2.0, 1.0) if fused else (7.0, 3.0)
    return (
        _norm("final_norm", model, layout),
        gemm("logits", model, layout, model.hidden, model.vocabulary / layout.tensor),
        _memory("cross_entropy", forward * logits, backward * logits, kernels),
    )


def embedding_ops(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """Look-up of tokens, positions and dropout; W adds rows to the gradient."""
    units = tokens_on_one(model, layout) * model.hidden
    e, gradient = model.element_bytes, model.accumulated_bytes
    looked_up = LayerOp(
        "memory",
        "embedding",
        NONE,
        Phases(2 * e * units, 0.0, (e + 2 * gradient) * units),
        Phases(1.0, 0.0, 1.0),
    )
    one = boundary_bytes(model, layout)
    more = []
    if model.learned_positions:
        more.append(_memory("positions", 3 * one, 0.0, (1.0, 0.0)))
    if model.dropout:
        moved = 2 * one + one / e
        more.append(_memory("embedding_dropout", moved, moved, (1.0, 1.0)))
    return (looked_up, *more)


def whole_layer(
    model: Model, layout: Layout, kind: str = "dense", recompute: str = "none"
) -> tuple[LayerOp, ...]:
    """A layer as one op per phase, whose bytes are its weights and what it leaves in memory.

    FLOP are the formula's, whether or not a kernel skips masked pairs.
    """
    t, size = layout.tensor, layout.microbatch_size
    kept, boundary = layer_activation_bytes(model, layout, kind=kind), boundary_bytes(model, layout)
    moved = model.element_bytes * model.layer_parameters / t + kept
    flop = layer_flop(model, size, recompute, kind)
    return (
        LayerOp(
            "layer",
            "layer",
            Phases(*(each / (t * layout.context) for each in flop)),
            Phases(moved, moved + 2 * boundary, moved),
            Phases(1.0, 1.0, 1.0),
        ),
    )


def whole_head(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """The head as one op per phase."""
    t = layout.tensor
    _, kept = edge_activation_bytes(model, layout)
    flop = head_flop(model, layout.microbatch_size)
    volume = model.element_bytes * model.head_parameters / t + kept
    each = Phases(*(each / (t * layout.context) for each in flop))
    return (LayerOp("layer", "head", each, Phases(volume, volume, volume), Phases(1.0, 1.0, 1.0)),)


def sum_of(ops: Sequence[LayerOp], what: str) -> Phases:
    """Sum of a quantity over ops: "flop", "volume" or "launches"."""
    parts = [getattr(op, what) for op in ops]
    return Phases(*(sum(column) for column in zip(*parts, strict=True)))
