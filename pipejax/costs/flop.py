"""FLOP of a transformer by the published formulas, on all accelerators of a worker together.

b is the microbatch size in sequences, s the sequence length, h the hidden size. FLOP of F, I and W
per layer are those of the zero-bubble paper (arXiv:2401.10241, Table 1), written so that grouped
queries, heads of their own width, latent attention, gated MLPs and experts fit in.
"""

from typing import NamedTuple

from pipejax.costs.model import Model, check_recompute
from pipejax.costs.precision import as_float
from pipejax.costs.system import Number


class Phases(NamedTuple):
    """A quantity of each phase: FLOP, bytes, launches.

    Attributes:
      forward: F.
      input_grad: I, recomputation within the layer included.
      weight_grad: W.
    """

    forward: Number
    input_grad: Number
    weight_grad: Number


def tokens_of(model: Model, microbatch_size: Number) -> Number:
    """Tokens of a microbatch, a float: what is counted by it is beyond the integers of a trace."""
    return as_float(microbatch_size) * model.sequence


def layer_flop(
    model: Model, microbatch_size: Number, recompute: str = "none", kind: str = "dense"
) -> Phases:
    """FLOP of one layer: F = bsh(24h + 4s), I = bsh(24h + 8s), W = 24bsh^2 in a GPT.

    Attention counts all s^2 pairs of tokens, as published formulas do, whether or not a kernel
    skips those that a causal mask hides.

    References:
      Zero Bubble Pipeline Parallelism (arXiv:2401.10241), Table 1.
    """
    recompute = check_recompute(recompute)
    tokens = tokens_of(model, microbatch_size)
    linear = 2 * tokens * model.active_matrices(kind)
    scores = 2 * tokens * model.sequence * (model.query_hidden + model.output_hidden)
    # a flash kernel keeps no scores: I multiplies queries and keys once more
    in_attention = (
        2 * tokens * model.sequence * model.query_hidden if model.flash_attention else 0.0
    )
    selective = in_attention if model.flash_attention else scores
    again = {"none": in_attention, "selective": selective, "full": in_attention + linear + scores}[
        recompute
    ]
    return Phases(linear + scores, linear + 2 * scores + again, linear)


def head_flop(model: Model, microbatch_size: Number) -> Phases:
    """FLOP of the output head: 2bshV in each phase."""
    each = 2 * tokens_of(model, microbatch_size) * model.head_parameters
    return Phases(each, each, each)


def step_flop(model: Model, minibatch: Number, recompute: str = "none") -> Number:
    """FLOP of a whole step: forward, backward and recomputation."""
    layers = sum(
        count * sum(layer_flop(model, minibatch, recompute, kind))
        for kind, count in model.layers_by_kind.items()
    )
    head = sum(head_flop(model, minibatch))
    projection = 3 * 2 * tokens_of(model, minibatch) * 2 * model.hidden**2
    further = sum(layer_flop(model, minibatch, recompute, model.last_kind)) + projection + head
    return layers + head + model.mtp_layers * further


def model_flop(model: Model, sequences: Number) -> Number:
    """FLOP that a step needs on so many sequences, whatever is computed twice: the M of MFU.

    Products of the layers and of the output head, forward and backward; attention counts all pairs
    of tokens, as `layer_flop` does. The backward has two products for each of the forward.

    References:
      Megatron-LM (arXiv:2104.04473), section 3; PaLM (arXiv:2204.02311), appendix B.
    """
    head = head_flop(model, sequences).forward
    layers = sum(
        count * layer_flop(model, sequences, kind=kind).forward
        for kind, count in model.layers_by_kind.items()
    )
    projection = 2 * tokens_of(model, sequences) * 2 * model.hidden**2
    further = layer_flop(model, sequences, kind=model.last_kind).forward + projection + head
    return 3 * (layers + head + model.mtp_layers * further)
