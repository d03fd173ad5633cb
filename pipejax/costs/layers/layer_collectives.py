"""What the accelerators that share a layer exchange in each phase."""

import dataclasses

import jax

from pipejax.costs.layers.formulas import Phases, boundary_bytes, tokens_on_one
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import LatentAttention, Model
from pipejax.costs.system.system import Number


@dataclasses.dataclass(frozen=True)
class Collective:
    """Exchanges of one kind among the accelerators of a group.

    Attributes:
      kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "ring" (each passes what
        it holds on to the next until all have met all).
      group: "tensor", "context", "expert" or "data".
      volume: bytes of one of them: of the whole tensor, or for an all-to-all of what one
        accelerator holds before it.
      count: how many there are.
      beside: what they may run beside: "attention" of the same phase; "input_grad" or
        "weight_grad", the products of another phase that do not wait for them; "" for nothing.
    """

    kind: str = dataclasses.field(metadata={"static": True})
    group: str = dataclasses.field(metadata={"static": True})
    volume: Phases
    count: Phases
    beside: str = dataclasses.field(default="", metadata={"static": True})


jax.tree_util.register_dataclass(Collective)


def _same(volume: Number) -> Phases:
    return Phases(volume, volume, volume)


def layer_collectives(
    model: Model, layout: Layout, kind: str = "dense", context: str = "ring"
) -> tuple[Collective, ...]:
    """List the exchanges of a layer.

    Tensor parallelism: an all-reduce behind attention and one behind the MLP in F, and one each
    in I, where Megatron runs it beside the weight gradients of the same product. Under sequence
    parallelism each is an all-gather and a reduce-scatter, and W gathers its inputs once more,
    beside I's products. Both are listed, with counts of 0 where they are not used: whether the
    sequence is split may be traced.

    Context parallelism: keys and values go round a ring beside attention, in I their gradients
    follow them; or all-to-alls trade the split by tokens for one by heads and back ("all_to_all").

    Experts: an all-to-all sends every token to its experts, one brings it back; the same in I.

    References:
      Korthikanti et al. (arXiv:2205.05198), section 4.2.2.
    """
    tokens, e, h = tokens_on_one(model, layout), model.element_bytes, model.hidden
    is_moe = kind == "moe" and model.moe is not None
    # routed experts take the part of the tokens that an accelerator has; shared ones are split
    split_mlps = 1.0 * (model.moe.shared_experts > 0) if is_moe and model.moe else 1.0
    if model.mla is None:
        found = _of_tensor(e * tokens, (h, h), 1 + split_mlps, layout)
    else:
        found = _of_tensor(e * tokens, (_gathered(model.mla, h), h), 1.0, layout)
        found += _of_tensor(e * tokens, (h, h), split_mlps, layout)
    found += _of_context(model, layout, context)
    if is_moe:
        found += _of_experts(model, layout)
    return found


def _gathered(mla: LatentAttention, hidden: Number) -> Number:
    """Units per token that latent attention gathers: what queries, keys and values unfold from."""
    queries = hidden if mla.query_rank is None else mla.query_rank
    return queries + mla.kv_rank + mla.rope_width


def _of_tensor(
    volume: Number, units: tuple[Number, Number], count: Number, layout: Layout
) -> tuple[Collective, ...]:
    """Exchanges round one pair of products: of the first one's input, of the second one's output.

    Args:
      volume: bytes of one unit of every token.
      units: per token, of input and output.
      count: pairs of products.
      layout: how the layer is split.
    """
    shared = layout.sequence_parallel * count
    into, out = (volume * each for each in units)
    whole = count - shared
    return (
        Collective("all_reduce", "tensor", _same(out), Phases(whole, 0.0, 0.0)),
        Collective("all_reduce", "tensor", _same(into), Phases(0.0, whole, 0.0), "weight_grad"),
        Collective("all_gather", "tensor", Phases(into, out, into), Phases(shared, shared, 0.0)),
        Collective("reduce_scatter", "tensor", _same(out), Phases(shared, 0.0, 0.0)),
        Collective(
            "reduce_scatter", "tensor", _same(into), Phases(0.0, shared, 0.0), "weight_grad"
        ),
        Collective("all_gather", "tensor", _same(into), Phases(0.0, 0.0, shared), "input_grad"),
    )


def _of_context(model: Model, layout: Layout, exchange: str) -> tuple[Collective, ...]:
    """Exchanges of those who share a sequence."""
    units = model.element_bytes * tokens_on_one(model, layout) / layout.tensor
    keys = model.kv_hidden + model.value_hidden
    if exchange == "all_to_all":
        # queries, keys and values one way, the output back; in I their gradients
        moved = units * (model.query_hidden + keys + model.output_hidden) / 4
        return (Collective("all_to_all", "context", _same(moved), Phases(4.0, 4.0, 0.0)),)
    ring = layout.context * units * keys
    volume = Phases(ring, 2 * ring, 0.0)
    return (Collective("ring", "context", volume, Phases(1.0, 1.0, 0.0), "attention"),)


def _of_experts(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """Tokens on their way to experts and back."""
    assert model.moe is not None
    routed = tokens_on_one(model, layout) / layout.shared_by * model.moe.slots
    moved = _same(model.element_bytes * routed * model.hidden)
    return (Collective("all_to_all", "expert", moved, Phases(2.0, 2.0, 0.0)),)


def head_collectives(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """List the exchanges of the output head, whose vocabulary is split by t.

    Its input is gathered under sequence parallelism; the maximum, the sum and the token's own
    logit are reduced over the vocabulary in float32; in I the input's gradient is reduced.
    """
    whole = model.element_bytes * tokens_on_one(model, layout) * model.hidden
    shared = layout.sequence_parallel
    scalars = 4 * tokens_on_one(model, layout)
    return (
        Collective("all_gather", "tensor", _same(whole), Phases(shared, 0.0, 0.0)),
        Collective("all_reduce", "tensor", _same(scalars), Phases(3.0, 0.0, 0.0)),
        Collective(
            "all_reduce", "tensor", _same(whole), Phases(0.0, 1 - shared, 0.0), "weight_grad"
        ),
        Collective(
            "reduce_scatter", "tensor", _same(whole), Phases(0.0, shared, 0.0), "weight_grad"
        ),
        Collective("all_gather", "tensor", _same(whole), Phases(0.0, 0.0, shared), "input_grad"),
    )


def embedding_collectives(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """List the exchanges of the embedding, whose vocabulary is split by t."""
    whole = model.element_bytes * tokens_on_one(model, layout) * model.hidden
    shared = layout.sequence_parallel
    return (
        Collective("all_reduce", "tensor", _same(whole), Phases(1 - shared, 0.0, 0.0)),
        Collective("reduce_scatter", "tensor", _same(whole), Phases(shared, 0.0, 0.0)),
        Collective("all_gather", "tensor", _same(whole), Phases(0.0, 0.0, shared)),
    )


def whole_layer_collectives(
    model: Model, layout: Layout, kind: str = "dense", context: str = "ring"
) -> tuple[Collective, ...]:
    """The exchanges that go with a layer priced as one op: two all-reduces in F and in I.

    Those of context and experts are the same as beside kernels.
    """
    volume = boundary_bytes(model, dataclasses.replace(layout, sequence_parallel=0.0))
    found = Collective("all_reduce", "tensor", _same(volume), Phases(2.0, 2.0, 0.0))
    experts = _of_experts(model, layout) if kind == "moe" and model.moe is not None else ()
    return (found, *_of_context(model, layout, context), *experts)
