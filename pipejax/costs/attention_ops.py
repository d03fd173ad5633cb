"""The kernels of attention: projections, positions, products of queries, keys and values."""

from pipejax.costs.activations import tokens_on_one
from pipejax.costs.flop import Phases
from pipejax.costs.kernels import LayerOp, Product, batched, gemm, memory, norm_of
from pipejax.costs.layout import Layout
from pipejax.costs.model import Model


def projections_in(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """Queries, keys and values of a layer's input, and the rotation of queries and keys."""
    if model.mla is not None:
        return (*_latent(model, layout), _rotation(model, layout))
    width = (model.query_hidden + model.kv_hidden + model.value_hidden) / layout.tensor
    qkv = gemm("qkv", model, layout, (model.hidden, width))
    return (qkv,) if model.learned_positions else (qkv, _rotation(model, layout))


def _latent(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """Latent attention: down to one small vector per token, its norm, up to all heads.

    The ways down are not split by heads: each accelerator has them for its part of the tokens.
    """
    mla, h, t = model.mla, model.hidden, layout.tensor
    assert mla is not None
    tokens = tokens_on_one(model, layout)
    part = tokens / layout.shared_by
    unfolded = (model.kv_hidden + model.value_hidden) - model.heads * mla.rope_width
    ops = [
        gemm("kv_down", model, layout, (h, mla.kv_rank + mla.rope_width), tokens=part),
        norm_of("kv_norm", model.element_bytes * part * mla.kv_rank),
        gemm("kv_up", model, layout, (mla.kv_rank, unfolded / t)),
    ]
    if mla.query_rank is None:
        return (gemm("query", model, layout, (h, model.query_hidden / t)), *ops)
    return (
        gemm("query_down", model, layout, (h, mla.query_rank), tokens=part),
        norm_of("query_norm", model.element_bytes * part * mla.query_rank),
        gemm("query_up", model, layout, (mla.query_rank, model.query_hidden / t)),
        *ops,
    )


def _rotation(model: Model, layout: Layout) -> LayerOp:
    """Rotary positions: reads and writes queries and keys."""
    units = tokens_on_one(model, layout) * (model.query_hidden + model.kv_hidden) / layout.tensor
    moved = 2 * model.element_bytes * units
    return memory("rotation", moved, moved, (2.0, 2.0))


def attention(model: Model, layout: Layout, *, fused: bool) -> tuple[LayerOp, ...]:
    """Attention of one accelerator's heads and tokens to all tokens of the sequence."""
    if model.flash_attention:
        return (_flash(model, layout),)
    return _written_out(model, layout, fused=fused)


def _flash(model: Model, layout: Layout) -> LayerOp:
    """One kernel that keeps no scores: I computes the first product again, five in all for two."""
    tokens, t, e = tokens_on_one(model, layout), layout.tensor, model.element_bytes
    queries, values = model.query_hidden / t, model.output_hidden / t
    met = model.attended
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
        Phases(layout.context, 3 * layout.context, 0.0),
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
        batched("scores", model, Product(rows, columns, model.query_hidden / model.heads), heads),
        memory("softmax", 2 * e * passes * pairs, 3 * e * pairs, (1.0 * passes, 1.0)),
        batched("context", model, Product(rows, model.output_hidden / model.heads, columns), heads),
    ]
    if model.dropout:
        moved = (2 * e + 1) * pairs
        ops.insert(2, memory("attention_dropout", moved, moved, (1.0, 1.0)))
    return tuple(ops)
