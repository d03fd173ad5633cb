"""Published formulas for transformers: FLOP, activation bytes and message bytes.

FLOP are totals over the accelerators of a worker, as in the zero-bubble paper (arXiv:2401.10241,
Table 1). Activation bytes are per accelerator, as in Korthikanti et al. (arXiv:2205.05198, Table
2). b is the microbatch size in sequences, s the sequence length, h the hidden size, a the number
of heads, t the tensor-parallel degree, c the context-parallel degree.
"""

from collections.abc import Callable, Set
from typing import NamedTuple

from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import Model, recomputed_modules, unfused_kernels
from pipejax.costs.model.workload_fields import check_recompute
from pipejax.costs.precision import as_float
from pipejax.costs.system.system import Number, Numbers


class Phases(NamedTuple):
    """A quantity such as FLOP, bytes or kernel launches, for each of the phases F, I and W."""

    forward: Number = 0.0  # F
    input_grad: Number = 0.0  # I, recomputation within the layer included
    weight_grad: Number = 0.0  # W


def num_tokens(model: Model, microbatch_size: Number) -> Number:
    """Return the number of tokens in a microbatch as a float, because traced integers overflow."""
    return as_float(microbatch_size) * model.sequence


def layer_flop(
    model: Model, microbatch_size: Number, recompute: str = "none", kind: str = "dense"
) -> Phases:
    """Count a layer's FLOP by phase; in a GPT F = bsh(24h + 4s), I = bsh(24h + 8s), W = 24bsh^2."""
    # I and W are the input and weight gradients; I includes recomputation. Attention counts all s^2
    # pairs of tokens, as published formulas do, also those that a kernel skips under a causal mask:
    # twice the pairs that attend. A window of w tokens leaves s w - w^2 / 2 of these.
    # source: Zero Bubble Pipeline Parallelism (arXiv:2401.10241), Table 1.
    recompute = check_recompute(recompute)
    tokens = num_tokens(model, microbatch_size)
    linear = 2 * tokens * model.active_matrices(kind)
    pairs = tokens * model.attended_by(1) * (2 if model.causal else 1)
    scores = 2 * pairs * (model.query_hidden + model.output_hidden)
    # a flash kernel keeps no scores: I multiplies queries and keys once more
    flash_scores = 2 * pairs * model.query_hidden if model.flash_attention else 0.0
    if recompute == "full":
        repeated = linear + scores
    else:
        modules = recomputed_modules(recompute)
        repeated = sum(2 * tokens * _module_matrices(model, kind, module) for module in modules)
        repeated += scores if "core_attn" in modules else 0
    return Phases(linear + scores, linear + 2 * scores + flash_scores + repeated, linear)


def _module_matrices(model: Model, kind: str, module: str) -> Number:
    """Count the weights that multiply each token in one part of a layer, such as "mlp"."""
    moe, mlp_matrices, mla = model.moe, model.mlp_matrices, model.mla
    if module == "half_products":  # every second matrix product
        return model.active_matrices(kind) / 2
    if module == "mla_up_proj" and mla is not None:
        query_width = model.query_hidden if mla.query_rank is None else mla.query_rank
        # widths of the matrices that are no up-projections: to the ranks, and from heads to hidden
        other_widths = query_width + mla.kv_rank + mla.rope_width + model.output_hidden
        return model.attention_matrices - model.hidden * other_widths
    if kind == "moe" and moe is not None:
        shared = mlp_matrices(moe.shared_experts * moe.expert_hidden)
        routed = moe.slots * mlp_matrices(moe.expert_hidden) + moe.experts * model.hidden
        return {"moe": shared + routed, "shared_experts": shared}.get(module, 0.0)
    return mlp_matrices(model.ffn_hidden) if module == "mlp" else 0.0


def head_flop(model: Model, microbatch_size: Number) -> Phases:
    """Count the FLOP of the output head: 2bshV in each of F, I and W."""
    flop = 2 * num_tokens(model, microbatch_size) * model.head_parameters
    return Phases(flop, flop, flop)


def model_flop(model: Model, sequences: Number, layout: Layout | None = None) -> Number:
    """Count the FLOP of a training step without recomputation, the model FLOP of MFU."""
    # The function counts the products of the layers and of the output head. Attention counts all
    # pairs of tokens, as in `layer_flop`. Each product of the forward has two in the backward, or
    # only one if its weights are frozen. Adapters add products.
    # source: Megatron-LM (arXiv:2104.04473), section 3; PaLM (arXiv:2204.02311), appendix B.
    layout = WHOLE if layout is None else layout
    head = head_flop(model, sequences).forward
    projection = 2 * num_tokens(model, sequences) * 2 * model.hidden**2

    def sum_layers(layer: Callable[[str], Number], projection: Number, head: Number) -> Number:
        """Add up layers and head; MTP layers add a projection and one more product of the head."""
        layers = sum(count * layer(kind) for kind, count in model.layers_by_kind.items())
        mtp_layer = layer(model.last_kind) + projection + head
        return layers + head + model.mtp_layers * mtp_layer

    def adapter_flop(kind: str) -> Number:
        return 2 * num_tokens(model, sequences) * layout.lora_rank * model.active_sides(kind)

    flop = {kind: layer_flop(model, sequences, kind=kind) for kind in model.layers_by_kind}
    forward = sum_layers(lambda kind: flop[kind].forward, projection, head)
    adapters = sum_layers(adapter_flop, 0.0, 0.0)
    if layout.trains_base:
        return 3 * (forward + adapters)
    weight_grad = sum_layers(lambda kind: flop[kind].weight_grad, projection, head)
    return 3 * (forward + adapters) - weight_grad


WHOLE = Layout()
FLOAT32 = 4  # bytes


def accelerator_tokens(model: Model, layout: Layout) -> Number:
    """Return the number of a microbatch's tokens on each accelerator, as a float."""
    return num_tokens(model, layout.microbatch_size) / layout.context


def layer_activation_bytes(
    model: Model, layout: Layout = WHOLE, recompute: str = "none", kind: str = "dense"
) -> Number:
    """Return the activation bytes that a layer keeps for a microbatch from F to its backward."""
    # In a GPT these are sbh(10 + 24/t + 5as/(ht)). Sequence parallelism divides the 10 by t, too.
    # Selective recomputation drops the last term; full recomputation keeps only the input, 2sbh.
    # source: Korthikanti et al. (arXiv:2205.05198), Table 2.
    recompute = check_recompute(recompute)
    tokens = accelerator_tokens(model, layout)
    if recompute == "full":
        return model.element_bytes * tokens * model.hidden / layout.shared_by
    e = model.element_bytes
    modules = recomputed_modules(recompute)
    score_bytes: Number = 0  # bytes per attention score
    if "core_attn" not in modules and not model.flash_attention:
        score_bytes = 2 * e + 1 if model.dropout else e
        if "softmax" in unfused_kernels(model):
            # the softmax keeps its output in float32; dropout then keeps no copy of its input
            score_bytes += 4 - (e if model.dropout else 0)
    scores = score_bytes * model.heads * tokens * model.sequence
    masks = 2 if model.dropout else 0  # dropout masks of the two residuals, one byte per unit
    needed = layer_weight_grad_bytes(model, layout, kind, recompute)
    needed += tokens * _unfused_bytes(model, layout, kind, modules)
    return needed + masks * tokens * model.hidden / layout.shared_by + scores / layout.tensor


def _unfused_bytes(model: Model, layout: Layout, kind: str, recomputed: Set[str]) -> Number:
    """Return the bytes per token that unfused kernels keep until I, except in `recomputed`."""
    # A gated MLP keeps the output of its activation function beside its product with the gate.
    # Attention keeps its output in two layouts: that of its product and that of the projection. A
    # norm keeps its input in float32 and the normalized input; a fused norm keeps only its input.
    unfused, moe = unfused_kernels(model), model.moe
    element_bytes, tensor = model.element_bytes, layout.tensor
    if "half_products" in recomputed:  # recomputes all but attention and every second product
        return 0.0
    extra: Number = 0.0
    if "norm" in unfused and "layernorm" not in recomputed:
        extra += 2 * FLOAT32 * model.hidden / layout.shared_by
    if "attention" in unfused and "core_attn" not in recomputed:
        extra += element_bytes * model.output_hidden / tensor
    if "activation" not in unfused or not model.gated_mlp:
        return extra
    if kind == "dense" or moe is None:
        return extra if "mlp" in recomputed else extra + element_bytes * model.ffn_hidden / tensor
    if not recomputed & {"moe", "shared_experts"}:
        extra += element_bytes * moe.shared_experts * moe.expert_hidden / tensor
    if not recomputed & {"moe", "moe_act"}:
        extra += element_bytes * moe.slots * moe.expert_hidden / layout.shared_by
    return extra


def key_bytes(model: Model, layout: Layout = WHOLE) -> Number:
    """Return the bytes of a layer's keys and values for a microbatch, on one accelerator."""
    units = (model.kv_hidden + model.value_hidden) / layout.tensor
    return accelerator_tokens(model, layout) * model.element_bytes * units


def cache_bytes(model: Model, layout: Layout = WHOLE) -> Number:
    """Return the bytes of a layer's key-value cache for a microbatch, in inference."""
    # The cache has keys and values of at least one head on each accelerator. Latent attention
    # caches the vector from which keys and values unfold, which tensor parallelism does not split.
    # source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.4.
    if model.mla is not None:
        units: Number = model.mla.kv_rank + model.mla.rope_width
    else:
        # min(t, kv_heads), which stays an exact integer outside of a trace
        parts = model.kv_heads + (layout.tensor - model.kv_heads) * (layout.tensor < model.kv_heads)
        units = (model.kv_hidden + model.value_hidden) / parts
    return accelerator_tokens(model, layout) * model.element_bytes * units


def layer_weight_grad_bytes(
    model: Model, layout: Layout = WHOLE, kind: str = "dense", recompute: str = "none"
) -> Number:
    """Return the bytes that a layer keeps from I to W for a microbatch: 32sbh in a GPT."""
    # In a GPT these are the inputs of the four products (queries, keys and values; projection; two
    # of the MLP), 14sbh, and the gradients of their outputs, 18sbh. I writes these gradients over
    # the activations of norms, attention and activation function: only scores and masks are free
    # after I. Tensor parallelism divides the `split` bytes per token; only sequence parallelism
    # divides the `unsplit` bytes. Inputs of products have the layout's precision, everything else
    # the model's. Recomputed parts keep their inputs. Adapters also need their own activations.
    # Frozen weights without adapters need these bytes for I only.
    # source: Zero Bubble Pipeline Parallelism (arXiv:2401.10241), Table 1: M_W.
    e, h, moe = model.element_bytes, model.hidden, model.moe
    modules = recomputed_modules(recompute)
    # bytes per element of a linear layer's input until W. Frozen weights have no W; an adapter's W
    # takes the model's precision. The gradient of A x, r units wide, is not counted.
    operand = layout.trains_base * operand_bytes(model, layout) + (layout.lora_rank > 0) * e
    if "half_products" in modules:
        return _half_products_bytes(model, layout)
    # inputs of norms, and of the first products of attention and MLP; gradients of the second
    # products' outputs later use the memory of the norms' inputs
    unsplit = 2 * e * h + (0 if "layernorm" in modules else 2 * operand * h)
    # I of a flash kernel reads attention's output. The output is the projection's input, which is
    # kept anyway; the output itself is kept only if the input is narrower or not kept.
    is_wide = layout.precision not in OPERAND_BYTES  # inputs stay in the model's own precision
    shares_output = layout.lora_rank > 0 or (layout.trains_base and is_wide)
    keeps_output = not shares_output and model.flash_attention and "core_attn" not in modules
    flash_output = e * model.output_hidden if keeps_output else 0
    heads = e * (model.query_hidden + model.kv_hidden + model.value_hidden)
    heads = 0 if "mla_up_proj" in modules else heads
    split = operand * model.output_hidden + heads + flash_output
    if model.mla is not None:
        rank = model.mla.kv_rank + (0 if model.mla.query_rank is None else model.mla.query_rank)
        unsplit += (e + operand) * rank + e * model.mla.rope_width
    activation_input = (2 if model.gated_mlp else 1) * e
    if kind == "moe" and moe is not None:
        if not modules & {"moe", "shared_experts"}:
            split += (operand + activation_input) * (moe.shared_experts * moe.expert_hidden)
        activation_output = 0 if "moe_act" in modules else operand
        # accelerators that split an expert hold a part of its width for all their tokens
        n = layout.expert_gather
        width = moe.expert_hidden * n / layout.expert_tensor
        routed = (e + n * operand) * h + (activation_output + activation_input) * width
        unsplit += 0 if "moe" in modules else moe.slots * routed
    else:
        split += 0 if "mlp" in modules else (operand + activation_input) * model.ffn_hidden
    adapters = e * layout.lora_rank * _kept_adapters(model, layout, kind, modules)
    has_mlp_input = kind == "dense" and "mlp" not in modules
    split += _gathered_width(model, layout, modules, 1 + has_mlp_input) * operand
    per_token = unsplit / layout.shared_by + split / layout.tensor + adapters
    return accelerator_tokens(model, layout) * per_token


def _kept_adapters(model: Model, layout: Layout, kind: str, modules: Set[str]) -> Number:
    """Count a layer's LoRA adapters outside recomputed `modules`; each keeps r numbers for W."""
    attention: Number = 2  # queries, keys and values; projection
    if model.mla is not None:
        num_ups = 1 if model.mla.query_rank is None else 2
        attention = 3 if "mla_up_proj" in modules else 3 + num_ups
    if kind == "moe" and model.moe is not None:
        keeps_shared = "moe" not in modules and "shared_experts" not in modules
        routed = 0 if "moe" in modules else model.moe.slots / layout.shared_by
        return attention + 2 * keeps_shared * (model.moe.shared_experts > 0) + 2 * routed
    return attention if "mlp" in modules else attention + 2


def _half_products_bytes(model: Model, layout: Layout) -> Number:
    """Return a layer's bytes if it keeps the outputs of attention and of every second product."""
    # Half of the products keep their outputs, and both norms keep their inputs. Tensor parallelism
    # divides the `split` units per token.
    mlp_inputs = 2 if model.gated_mlp else 1
    unsplit = 2 * model.hidden + 2 * model.hidden / 2
    qkv = model.query_hidden + model.kv_hidden + model.value_hidden
    split = model.output_hidden + (qkv + mlp_inputs * model.ffn_hidden) / 2
    unit_bytes = accelerator_tokens(model, layout) * model.element_bytes
    adapters = layout.lora_rank * _kept_adapters(model, layout, "dense", frozenset()) / 2
    return unit_bytes * (unsplit / layout.shared_by + split / layout.tensor + adapters)


OPERAND_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}  # scales included


def operand_bytes(model: Model, layout: Layout) -> Number:
    """Return the bytes per element of a matrix product's inputs, scales included."""
    return OPERAND_BYTES.get(layout.precision, model.element_bytes)


def _gathered_width(model: Model, layout: Layout, modules: Set[str], inputs: int) -> Number:
    """Return the width per token, times t, that keeping gathered inputs of products adds."""
    # Under sequence parallelism over t accelerators, a norm's output of width h / t is gathered to
    # width h for the next product. Keeping that adds h - h / t; the caller divides by t.
    if "gather" not in unfused_kernels(model) or "layernorm" in modules:
        return 0.0
    return inputs * model.hidden * (layout.shared_by - 1)


def edge_activation_bytes(model: Model, layout: Layout = WHOLE) -> tuple[Number, Number]:
    """Return the activation bytes of a microbatch: (in the embedding, in the head)."""
    # The head keeps the input and output of its norm, and the softmax of the logits in float32;
    # with a fused loss, the logits instead. Frozen weights need neither the norm's output nor the
    # mask.
    # source: Korthikanti et al. (arXiv:2205.05198), section 4.3.
    tokens = accelerator_tokens(model, layout) * (model.vocabulary > 0)
    trained = layout.trains_base
    mask = trained * tokens * model.hidden / layout.shared_by if model.dropout else 0.0
    inputs = tokens * (1 + trained) * model.element_bytes * model.hidden / layout.shared_by
    gathered = trained * model.element_bytes * _gathered_width(model, layout, set(), 1)
    inputs = inputs + tokens * gathered / layout.tensor
    if "norm" in unfused_kernels(model):
        inputs = inputs + tokens * FLOAT32 * model.hidden / layout.shared_by
    per_logit = model.element_bytes if model.fused_loss else 4
    return mask, inputs + tokens * per_logit * model.vocabulary / layout.tensor


def head_weight_grad_bytes(model: Model, layout: Layout = WHOLE) -> Number:
    """Return the bytes that the head keeps from I to W: its input and the logits' gradient."""
    # The loss returns the gradient in `element_bytes`, although it may compute in a wider type.
    units = model.hidden / layout.shared_by + model.vocabulary / layout.tensor
    tokens = layout.trains_base * accelerator_tokens(model, layout)
    return tokens * (model.vocabulary > 0) * model.element_bytes * units


def boundary_bytes(model: Model, layout: Layout = WHOLE) -> Number:
    """Return a message's bytes: bsh elements, divided by t if sequence parallelism is on."""
    volume = accelerator_tokens(model, layout) * model.hidden * model.element_bytes
    return volume / layout.shared_by


def buffer_bytes(
    model: Model, layout: Layout, *, dense: Numbers, moe: Numbers, head: Numbers
) -> Numbers:
    """Return bytes of a worker's gradient buffers, for weights and the widest activations."""
    # `dense`, `moe` and `head` are 1 if the worker has dense layers, layers with experts, the
    # head. Buffers exist if gradients are accumulated in a wider type, as in Megatron-core; the
    # formulas of the literature omit them. Products write weight gradients in `element_bytes` into
    # one buffer for each shape of matrix, which all layers share, as in TransformerEngine. The
    # head has its own buffer; adapters' buffers are negligible. The gradients of the widest
    # activations are added.
    e, t, h = model.element_bytes, layout.tensor, model.hidden
    tokens, mlp_parts = accelerator_tokens(model, layout), (3 if model.gated_mlp else 2)
    weights = model.attention_matrices / t + dense * model.mlp_matrices(model.ffn_hidden) / t
    width = dense * mlp_parts * model.ffn_hidden / t
    if model.moe is not None:
        expert, shared = model.moe.expert_hidden, model.moe.shared_experts * model.moe.expert_hidden
        etp, gather = layout.expert_tensor, layout.expert_gather
        experts = model.mlp_matrices(expert) / etp + model.mlp_matrices(shared) / t
        weights = weights + moe * experts  # not in place: an operand may be a `Many`
        routed = model.moe.slots * gather * (mlp_parts * expert / etp + 2 * h) / layout.shared_by
        width = _larger(width, moe * routed)
    layer_bytes = tokens * (width + 2 * h)
    trained = layout.trains_base
    head_bytes = head * (tokens * 2 * h + trained * model.head_parameters / t)
    # in addition to the softmax of the loss: the logits in float32, the gradient of the softmax
    copies = len({"logits", "loss"} & unfused_kernels(model))
    logit_bytes = head * copies * tokens * FLOAT32 * model.vocabulary / t
    is_wider = model.accumulated_bytes > e
    activations = _larger(is_wider * e * layer_bytes, is_wider * e * head_bytes + logit_bytes)
    return is_wider * e * trained * weights + activations


def _larger(first: Numbers, second: Numbers) -> Numbers:
    """Return the larger of two numbers; integers stay exact outside of JAX."""
    return first + (second - first) * (second > first)
