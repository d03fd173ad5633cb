"""What the accelerators that share a layer exchange in each phase."""

import dataclasses

import jax

from pipejax.costs.activations import boundary_bytes, tokens_on_one
from pipejax.costs.flop import Phases
from pipejax.costs.layout import Layout
from pipejax.costs.model import Model
from pipejax.costs.system import Number


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


def layer_collectives(model: Model, layout: Layout, kind: str = "dense") -> tuple[Collective, ...]:
    """List the exchanges of a layer.

    Tensor parallelism: an all-reduce behind attention and one behind the MLP in F, and one each
    in I, where Megatron runs it beside the weight gradients of the same product. Under sequence
    parallelism each is an all-gather and a reduce-scatter, and W gathers its inputs once more,
    beside I's products. Both are listed, with counts of 0 where they are not used: whether the
    sequence is split may be traced.

    Context parallelism: keys and values go round a ring beside attention, in I their gradients
    follow them.

    References:
      Korthikanti et al. (arXiv:2205.05198), section 4.2.2.
    """
    whole = model.element_bytes * tokens_on_one(model, layout) * model.hidden
    shared = layout.sequence_parallel
    keys = (model.kv_hidden + model.value_hidden) / layout.tensor
    ring = model.element_bytes * layout.context * tokens_on_one(model, layout) * keys
    volume = _same(whole)
    return (
        Collective("all_reduce", "tensor", volume, Phases(2 - 2 * shared, 0.0, 0.0)),
        Collective("all_reduce", "tensor", volume, Phases(0.0, 2 - 2 * shared, 0.0), "weight_grad"),
        Collective("all_gather", "tensor", volume, Phases(2 * shared, 2 * shared, 0.0)),
        Collective("reduce_scatter", "tensor", volume, Phases(2 * shared, 0.0, 0.0)),
        Collective("reduce_scatter", "tensor", volume, Phases(0.0, 2 * shared, 0.0), "weight_grad"),
        Collective("all_gather", "tensor", volume, Phases(0.0, 0.0, 2 * shared), "input_grad"),
        Collective(
            "ring", "context", Phases(ring, 2 * ring, 0.0), Phases(1.0, 1.0, 0.0), "attention"
        ),
    )


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


def whole_layer_collectives(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """The exchanges that go with a layer priced as one op: two all-reduces in F and in I."""
    volume = boundary_bytes(model, dataclasses.replace(layout, sequence_parallel=0.0))
    return (Collective("all_reduce", "tensor", _same(volume), Phases(2.0, 2.0, 0.0)),)
