"""Bytes that a microbatch leaves behind on each accelerator, and sends between stages.

The activations of a layer are those of Korthikanti et al. (arXiv:2205.05198, Table 2), written so
that grouped queries, latent attention, gated MLPs, experts and flash attention fit in. b is the
microbatch size in sequences, s the sequence length, h the hidden size, a the number of heads, t the
tensor-parallel degree; context parallelism divides all of it by c, for it divides the tokens.
"""

from pipejax.costs.flop import tokens_of
from pipejax.costs.layout import Layout
from pipejax.costs.model import Model, check_recompute
from pipejax.costs.system import Number

WHOLE = Layout()


def tokens_on_one(model: Model, layout: Layout) -> Number:
    """Tokens of a microbatch on one accelerator, a float."""
    return tokens_of(model, layout.microbatch_size) / layout.context


def layer_activation_bytes(
    model: Model, layout: Layout = WHOLE, recompute: str = "none", kind: str = "dense"
) -> Number:
    """Bytes that one microbatch leaves on one layer until its backward.

    sbh(10 + 24/t + 5as/(ht)) in a GPT; under sequence parallelism the 10 is divided by t too;
    with selective recomputation the last term is gone; with full recomputation only the input
    stays, 2sbh.

    References:
      Korthikanti et al. (arXiv:2205.05198), Table 2.
    """
    recompute = check_recompute(recompute)
    tokens = tokens_on_one(model, layout)
    if recompute == "full":
        return model.element_bytes * tokens * model.hidden / layout.shared_by
    e, masks = model.element_bytes, (2 if model.dropout else 0)
    keeps_scores = recompute == "none" and not model.flash_attention
    per_score = (2 * e + 1 if model.dropout else e) if keeps_scores else 0
    scores = per_score * model.heads * tokens * model.sequence
    needed = layer_weight_grad_bytes(model, layout, kind)
    return needed + masks * tokens * model.hidden / layout.shared_by + scores / layout.tensor


def layer_weight_grad_bytes(model: Model, layout: Layout = WHOLE, kind: str = "dense") -> Number:
    """Bytes that W of one layer needs after I: both inputs of its weight GEMMs, 32sbh in a GPT.

    These are the layer's inputs of the four products (queries, keys and values; projection; both
    of the MLP), 14sbh, and the gradients of their outputs, 18sbh, which I leaves where norms,
    attention and activation function had theirs: only scores and dropout masks are gone after I.

    References:
      Zero Bubble Pipeline Parallelism (arXiv:2401.10241), Table 1: M_W.
    """
    # whole: inputs of the first product of attention and MLP, gradients of the second one's output
    whole, parts = 4 * model.hidden, _in_attention(model)
    mlp_parts = 3 if model.gated_mlp else 2
    if kind == "moe" and model.moe is not None:
        moe = model.moe
        parts += mlp_parts * moe.shared_experts * moe.expert_hidden
        # each token once more for every expert that it meets, as it comes in and as it goes out
        whole += moe.slots * (2 * model.hidden + mlp_parts * moe.expert_hidden)
    else:
        parts += mlp_parts * model.ffn_hidden
    tokens = tokens_on_one(model, layout)
    return model.element_bytes * tokens * (whole / layout.shared_by + parts / layout.tensor)


def _in_attention(model: Model) -> Number:
    """Units per token that are split by heads: queries, keys, values, the projection's input."""
    units = model.query_hidden + model.kv_hidden + model.value_hidden + model.output_hidden
    return units


def edge_activation_bytes(model: Model, layout: Layout = WHOLE) -> tuple[Number, Number]:
    """Bytes that one microbatch leaves on the first stage's embedding and last stage's head.

    References:
      Korthikanti et al. (arXiv:2205.05198), section 4.3.
    """
    tokens = tokens_on_one(model, layout) * (model.vocabulary > 0)
    mask = tokens * model.hidden / layout.shared_by if model.dropout else 0.0
    inputs = tokens * 2 * model.element_bytes * model.hidden / layout.shared_by
    return mask, inputs + tokens * 4 * model.vocabulary / layout.tensor


def boundary_bytes(model: Model, layout: Layout = WHOLE) -> Number:
    """Bytes that cross a stage boundary: bsh elements, by t under sequence parallelism."""
    volume = tokens_on_one(model, layout) * model.hidden * model.element_bytes
    return volume / layout.shared_by
