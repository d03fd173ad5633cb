"""Kernels of a transformer layer: the FLOP, bytes and launches of each on an accelerator.

The list of ops is fixed at tracing; the numbers in it may be traced and batched. b is the
microbatch size, s the sequence length, t and c the degrees of tensor and context parallelism.
Attention in batched products also computes the pairs of tokens that a causal mask hides, as
published formulas do. A flash kernel skips these pairs, and pairs outside a sliding window.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

from pipejax.costs.layers import formulas
from pipejax.costs.layers.kernels import (
    NONE,
    LayerOp,
    Product,
    batched,
    gemm,
    memory,
    norm,
    with_forward_again,
)
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import Model, recomputed_modules
from pipejax.costs.model.workload import layer_weights
from pipejax.costs.model.workload_fields import PRECISIONS, WIDE
from pipejax.costs.precision import as_float
from pipejax.costs.system.system import Number


def layer_ops(
    model: Model, layout: Layout, kind: str = "dense", recompute: str = "none"
) -> tuple[LayerOp, ...]:
    """List the ops of a layer in the order of its forward, then the ops of its adapters."""
    ops = _base_ops(model, layout, kind)
    return (*_recompute(model, ops, recompute), *adapter_ops(model, layout, kind, recompute))


def _base_ops(model: Model, layout: Layout, kind: str) -> tuple[LayerOp, ...]:
    """List a layer's ops in the order of its forward, without adapters or recomputation."""
    mlp = _experts if kind == "moe" and model.moe is not None else _mlp
    hidden = formulas.boundary_bytes(model, layout)
    ops = (
        norm("attention_norm", hidden),
        *projections_in(model, layout),
        *attention(model, layout),
        gemm("projection", model, layout, (model.output_hidden / layout.tensor, model.hidden)),
        _residual("attention_residual", model, layout),
        norm("mlp_norm", hidden),
        *mlp(model, layout),
        _residual("mlp_residual", model, layout),
    )
    return _with_casts(model, layout, ops)


def _recompute(model: Model, ops: Iterable[LayerOp], recompute: str) -> tuple[LayerOp, ...]:
    """Return the ops, where each recomputed op repeats its F within I."""
    op_shares = recomputed_shares(ops, recomputed_modules(recompute))
    return tuple(with_forward_again(op, share) if share else op for op, share in op_shares)


# names of the ops of each part of a layer
MODULE_OPS: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("attention", "scores", "softmax", "attention_dropout", "context"),
    "layernorm": ("attention_norm", "mlp_norm"),
    "mla_up_proj": ("query_norm", "query_up", "kv_norm", "kv_up", "rotation"),
    "mlp": ("mlp_in", "mlp_activation", "mlp_out"),
    "moe": (
        *("router", "routing", "dispatch", "expert_in", "expert_activation", "expert_out"),
        *("combine", "shared_in", "shared_activation", "shared_out"),
    ),
    "moe_act": ("expert_activation",),
    "shared_experts": ("shared_in", "shared_activation", "shared_out"),
}


def recomputed_shares(
    ops: Iterable[LayerOp], modules: Collection[str]
) -> Iterator[tuple[LayerOp, float]]:
    """Yield each op with the share of its F that recomputation repeats within I."""
    # `modules` names the recomputed parts of a layer; "half_products" recomputes half of the
    # products, and all other ops except attention.
    names = {name for module in modules for name in MODULE_OPS.get(module, ())}
    kind_shares = {"gemm": 0.5, "memory": 1.0} if "half_products" in modules else {}
    for op in ops:
        share = 1.0 if op.name in names else kind_shares.get(op.kind, 0.0)
        yield op, share


# {linear layer: (a, b)}: tensor parallelism divides the output of an adapter's factor A by t^a,
# and that of B by t^b. A's output is split if the layer's input is whole, B's if it is split. A's
# sums are then reduced, B's parts gathered (`layer_collectives`).
ADAPTED: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("qkv", "query", "query_up", "kv_up", "mlp_in", "shared_in"), (1, 0)),
    **dict.fromkeys(("projection", "mlp_out", "shared_out"), (0, 1)),
    **dict.fromkeys(("query_down", "kv_down", "expert_in", "expert_out"), (0, 0)),
}


def adapter_ops(
    model: Model, layout: Layout, kind: str = "dense", recompute: str = "none"
) -> tuple[LayerOp, ...]:
    """List the ops of LoRA adapters, if any: two narrow products and a sum per linear layer."""
    # Adapter ops have the name of their linear layer, and are recomputed with it. The router has no
    # adapter.
    # source: LoRA (arXiv:2106.09685), 4.1; ParallelLinearAdapter in Megatron-Bridge's peft/utils.py
    if not layout.lora_rank:
        return ()
    linear_ops = [op for op in _base_ops(model, layout, kind) if op.name in ADAPTED]
    ops = [product for op in linear_ops for product in _adapter(op, model, layout)]
    return _recompute(model, ops, recompute)


def _adapter(op: LayerOp, model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """List the ops of a linear layer's LoRA adapter, in the model's own precision."""
    adapter_layout = _all_trained(dataclasses.replace(layout, precision=PRECISIONS[0]))
    m, n, k = op.shape  # tokens, outputs, inputs
    split_a, split_b = (layout.tensor**power for power in ADAPTED[op.name])  # t, or 1 if whole
    shape_a, shape_b = (k, layout.lora_rank / split_a), (layout.lora_rank, n / split_b)
    # F adds the adapter's outputs to the layer's, I its input gradients: 2 tensors read, 1 written
    token_bytes, launches = 3 * model.element_bytes * op.batch * m, 1.0 * (op.batch > 0)
    return (
        gemm(op.name, model, adapter_layout, shape_a, tokens=m, batch=op.batch),
        gemm(op.name, model, adapter_layout, shape_b, tokens=m, batch=op.batch),
        memory(op.name, token_bytes * n, token_bytes * k, kernels=(launches, launches)),
    )


def _all_trained(layout: Layout) -> Layout:
    """Return the layout with all weights trained: no frozen weights and no LoRA."""
    return dataclasses.replace(layout, frozen=False, lora_rank=0)


# products after a norm, which itself writes its output in the precision of the product
AFTER_NORM = (
    *("qkv", "query", "query_down", "query_up", "kv_down", "kv_up"),
    *("mlp_in", "shared_in", "logits"),
)


def _with_casts(model: Model, layout: Layout, ops: tuple[LayerOp, ...]) -> tuple[LayerOp, ...]:
    """Return the ops, with a further op for all casts if the precision is below 16 bits."""
    # A cast reads a tensor once, and writes it by row, and by column for W. F casts the inputs of
    # products, I the gradients of their outputs.
    if layout.precision in WIDE:
        return ops
    copies = 1 + layout.trains_base
    bytes_per_element = model.element_bytes + copies * formulas.operand_bytes(model, layout)
    forward: Number = 0.0
    backward: Number = 0.0
    products = [op for op in ops if op.kind == "gemm" and op.precision == layout.precision]
    cast_inputs = [op for op in products if op.name not in AFTER_NORM]
    for op in cast_inputs:
        forward += bytes_per_element * op.batch * op.shape.m * op.shape.k
    for op in products:
        backward += bytes_per_element * op.batch * op.shape.m * op.shape.n
    kernels = (float(len(cast_inputs)), float(len(products)))
    return (*ops, memory("quantization", forward, backward, kernels))


def _residual(name: str, model: Model, layout: Layout) -> LayerOp:
    """Return the op that adds bias and residual, and applies dropout."""
    boundary = formulas.boundary_bytes(model, layout)
    mask = boundary / model.element_bytes if model.dropout else 0.0
    # I adds the gradients of norm and residual: 2 reads, 1 write; dropout: 1 read, 1 write
    backward = 3 * boundary + ((2 * boundary + mask) if model.dropout else 0.0)
    kernels = (1.0, 2.0 if model.dropout else 1.0)
    return memory(name, 3 * boundary + mask, backward, kernels)


def _mlp(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    tokens, width = formulas.accelerator_tokens(model, layout), model.ffn_hidden / layout.tensor
    return _two_products("mlp", model, layout, (tokens, width), batch=1.0)


def _two_products(
    name: str, model: Model, layout: Layout, size: tuple[Number, Number], batch: Number
) -> tuple[LayerOp, ...]:
    """List the ops of `batch` MLPs of size (tokens, width): product, activation, product."""
    tokens, width = size
    shape_in = model.hidden, (2 if model.gated_mlp else 1) * width  # a gate doubles the width
    shape_out = width, model.hidden
    return (
        gemm(f"{name}_in", model, layout, shape_in, tokens=tokens, batch=batch),
        _activation(f"{name}_activation", model, batch * tokens * width, 1.0 * (batch > 0)),
        gemm(f"{name}_out", model, layout, shape_out, tokens=tokens, batch=batch),
    )


def _experts(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """List ops of an expert layer: router, sorting of tokens, routed and shared experts."""
    # Each accelerator routes its part of the tokens and holds E/e experts; all experts get equally
    # many tokens. Tensor parallelism splits shared experts, expert-tensor parallelism the width of
    # routed ones; accelerators that split an expert gather their tokens. Tokens are sorted before
    # the exchange, after it by local expert, and in both places again on the way back.
    moe = model.moe
    assert moe is not None
    e = model.element_bytes
    plain = dataclasses.replace(layout, precision=PRECISIONS[0])
    tokens = formulas.accelerator_tokens(model, layout) / layout.shared_by
    routed, local_experts = tokens * moe.slots, moe.experts / layout.expert
    scores = 4 * tokens * moe.experts  # in float32
    # read the hidden state, write it sorted; read and write once more, by expert
    gathered = routed * layout.expert_gather
    sorting = e * model.hidden * (tokens + routed + 2 * gathered)
    expert_size = gathered / local_experts, moe.expert_hidden / layout.expert_tensor
    shared_width = moe.shared_experts * moe.expert_hidden / layout.tensor
    shared_size = formulas.accelerator_tokens(model, layout), shared_width
    has_shared = 1.0 * (moe.shared_experts > 0)
    return (
        gemm("router", model, plain, (model.hidden, moe.experts), tokens=tokens),
        memory("routing", 4 * scores, 4 * scores, kernels=(8.0, 8.0)),
        memory("dispatch", sorting, sorting, kernels=(3.0, 3.0)),
        *_two_products("expert", model, layout, expert_size, local_experts),
        memory("combine", sorting, sorting, kernels=(3.0, 3.0)),
        *_two_products("shared", model, layout, shared_size, has_shared),
    )


def _activation(name: str, model: Model, units: Number, kernels: Number) -> LayerOp:
    """Return the op of an MLP's activation function: GELU, or a gated function."""
    forward, backward = (3, 5) if model.gated_mlp else (2, 3)  # reads and writes of a unit
    unit_bytes = model.element_bytes * units
    return memory(name, forward * unit_bytes, backward * unit_bytes, (kernels, kernels))


def head_ops(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """List the ops of the head: final norm, logits and cross entropy."""
    head_layout = dataclasses.replace(layout, precision=layout.head_precision)
    logits = formulas.accelerator_tokens(model, layout) * model.vocabulary / layout.tensor
    e = model.element_bytes
    # bytes per logit in F and in I, and number of kernels in both
    if model.fused_loss:  # reads the logits twice and overwrites them by their gradient
        f_bytes, i_bytes, kernels = 2 * e, e, (2.0, 1.0)
    else:  # F writes them in float32, finds the maximum, subtracts it, takes exp and sum; I scales
        f_bytes, i_bytes, kernels = e + 6 * 4, 2 * 4 + e, (7.0, 3.0)
    ops = (
        norm("final_norm", formulas.boundary_bytes(model, layout)),
        gemm("logits", model, head_layout, (model.hidden, model.vocabulary / layout.tensor)),
        memory("cross_entropy", f_bytes * logits, i_bytes * logits, kernels),
    )
    return _with_casts(model, head_layout, ops)


def embedding_ops(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """List the ops of the embedding: token look-up, learned positions and dropout."""
    units, trained = formulas.accelerator_tokens(model, layout) * model.hidden, layout.trains_base
    e, gradient = model.element_bytes, model.accumulated_bytes
    # W adds rows to the gradient, if the weights are not frozen
    look_up = LayerOp(
        "memory",
        "embedding",
        flop=NONE,
        volume=formulas.Phases(2 * e * units, 0.0, trained * (e + 2 * gradient) * units),
        launches=formulas.Phases(1.0, 0.0, 1.0 * trained),
    )
    boundary = formulas.boundary_bytes(model, layout)
    ops = [look_up]  # without I, because tokens have no gradient
    if model.learned_positions:
        ops.append(memory("positions", 3 * boundary, 0.0, kernels=(1.0, 0.0)))
    if model.dropout:
        volume = 2 * boundary + boundary / e
        kernels = (1.0, 1.0 * trained)
        ops.append(memory("embedding_dropout", volume, trained * volume, kernels))
    return tuple(ops)


def whole_layer(
    model: Model, layout: Layout, kind: str = "dense", recompute: str = "none"
) -> tuple[LayerOp, ...]:
    """Return a layer as a single op that reads its weights and activations in each phase."""
    # FLOP follow the formula, even if a kernel skips masked pairs. I also reads and writes the
    # gradient of the layer's output. Frozen weights have no W; adapters are further ops.
    t, size = layout.tensor, layout.microbatch_size
    activations = formulas.layer_activation_bytes(model, _all_trained(layout), kind=kind)
    boundary, has_w = formulas.boundary_bytes(model, layout), 1.0 * layout.trains_base
    weights: Number = as_float(sum(layer_weights(model, _all_trained(layout))[kind]))
    moved = model.element_bytes * weights + activations
    flop = formulas.layer_flop(model, size, recompute, kind)
    return (
        LayerOp(
            "layer",
            "layer",
            flop=formulas.Phases(*(phase / (t * layout.context) for phase in flop)),
            volume=formulas.Phases(moved, moved + 2 * boundary, moved),
            launches=formulas.Phases(forward=1.0, input_grad=1.0, weight_grad=has_w),
        ),
        *adapter_ops(model, layout, kind, recompute),
    )


def whole_head(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """Return the output head as a single op."""
    t = layout.tensor
    _, activations = formulas.edge_activation_bytes(model, _all_trained(layout))
    flop = formulas.head_flop(model, layout.microbatch_size)
    accelerator_flop = formulas.Phases(*(phase_flop / (t * layout.context) for phase_flop in flop))
    volume = model.element_bytes * model.head_parameters / t + activations
    launches = formulas.Phases(1.0, 1.0, 1.0 * layout.trains_base)
    volumes = formulas.Phases(volume, volume, volume)
    return (LayerOp("layer", "head", accelerator_flop, volumes, launches),)


# attention: projections, positions, products of queries, keys and values


def projections_in(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """List the products that compute queries, keys and values, and their rotary positions."""
    if model.mla is not None:
        return (*_latent_ops(model, layout), _rotation(model, layout))
    width = (model.query_hidden + model.kv_hidden + model.value_hidden) / layout.tensor
    qkv = gemm("qkv", model, layout, (model.hidden, width))
    return (qkv,) if model.learned_positions else (qkv, _rotation(model, layout))


def _latent_ops(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """List latent attention's products to and from a small vector per token, with its norm."""
    # Down projections are not split: each accelerator runs all of them, for its part of the tokens.
    mla, h, t = model.mla, model.hidden, layout.tensor
    assert mla is not None
    local_tokens = formulas.accelerator_tokens(model, layout) / layout.shared_by
    unfolded = (model.kv_hidden + model.value_hidden) - model.heads * mla.rope_width
    ops = [
        gemm("kv_down", model, layout, (h, mla.kv_rank + mla.rope_width), tokens=local_tokens),
        norm("kv_norm", model.element_bytes * local_tokens * mla.kv_rank),
        gemm("kv_up", model, layout, (mla.kv_rank, unfolded / t)),
    ]
    if mla.query_rank is None:
        return (gemm("query", model, layout, (h, model.query_hidden / t)), *ops)
    return (
        gemm("query_down", model, layout, (h, mla.query_rank), tokens=local_tokens),
        norm("query_norm", model.element_bytes * local_tokens * mla.query_rank),
        gemm("query_up", model, layout, (mla.query_rank, model.query_hidden / t)),
        *ops,
    )


def _rotation(model: Model, layout: Layout) -> LayerOp:
    """Return the op that applies rotary positions: it reads and writes queries and keys."""
    units_per_token = model.query_hidden + model.kv_hidden
    units = formulas.accelerator_tokens(model, layout) * units_per_token / layout.tensor
    moved = 2 * model.element_bytes * units
    return memory("rotation", moved, moved, kernels=(2.0, 2.0))


def attention(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """List the ops of attention: one flash kernel, or batched products with a softmax."""
    # 8 bits hold for all products of attention, in I too (Transformer Engine's `fp8_dpa`). No cast
    # is counted, because the op that writes queries and keys can write them in that precision
    # (FlashAttention-3, arXiv:2407.08608, section 3.3).
    attention_layout = dataclasses.replace(layout, precision=layout.attention_precision)
    if model.flash_attention:
        return (_flash(model, attention_layout),)
    return _batched_products(model, attention_layout)


def _flash(model: Model, layout: Layout) -> LayerOp:
    """Return the op of a flash attention kernel, which computes the scores again in I."""
    # Factors of products (queries, keys, values, the output's gradient) have the bytes of the
    # layout's precision; the output and the other gradients have those of the model.
    tokens, t, e = formulas.accelerator_tokens(model, layout), layout.tensor, model.element_bytes
    factor = formulas.operand_bytes(model, layout)
    queries, values = model.query_hidden / t, model.output_hidden / t
    # with consecutive tokens under a causal mask, tokens of the last accelerator attend to
    # (2 - 1 / c) times the mean number of tokens
    attended = model.attended_by(1 + layout.contiguous_context * (1 - 1 / layout.context))
    scores, context = 2 * tokens * attended * queries, 2 * tokens * attended * values
    # each accelerator reads the keys and values of all accelerators of the context once
    keys = layout.context * (model.kv_hidden + model.value_hidden) / t
    heads = layout.microbatch_size * model.heads / t
    return LayerOp(
        "attention",
        "attention",
        flop=formulas.Phases(scores + context, 3 * scores + 2 * context, 0.0),
        volume=formulas.Phases(
            tokens * (factor * queries + e * values + factor * keys),
            (factor + e) * tokens * (queries + values + keys),
            0.0,
        ),
        launches=formulas.Phases(layout.context, 3 * layout.context, 0.0),
        batch=heads,
        precision=layout.precision,
    )


def _batched_products(model: Model, layout: Layout) -> tuple[LayerOp, ...]:
    """List attention as two batched products, with the softmax of scores between them."""
    t, e = layout.tensor, model.element_bytes
    rows, columns = model.sequence / layout.context, model.sequence
    heads = layout.microbatch_size * model.heads / t
    num_scores = heads * rows * columns
    queries, values = model.query_hidden / model.heads, model.output_hidden / model.heads
    ops = [
        batched("scores", model, layout, Product(rows, columns, queries), heads),
        memory("softmax", 2 * e * num_scores, 3 * e * num_scores),
        batched("context", model, layout, Product(rows, values, columns), heads),
    ]
    if model.dropout:
        moved = (2 * e + 1) * num_scores
        ops.insert(2, memory("attention_dropout", moved, moved))
    return tuple(ops)
