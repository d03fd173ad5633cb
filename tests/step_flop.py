"""FLOP of a whole step by the published formulas, which papers print."""

from pipejax.costs.layers.formulas import head_flop, layer_flop, num_tokens


def step_flop(model, minibatch, recompute="none"):
    """FLOP of a whole step: forward, backward and recomputation."""
    kinds = model.layers_by_kind.items()
    layers = sum(n * sum(layer_flop(model, minibatch, recompute, kind)) for kind, n in kinds)
    head = sum(head_flop(model, minibatch))
    projection = 3 * 2 * num_tokens(model, minibatch) * 2 * model.hidden**2
    further = sum(layer_flop(model, minibatch, recompute, model.last_kind)) + projection + head
    return layers + head + model.mtp_layers * further
