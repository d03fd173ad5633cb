"""How long kernels take on the device, and how long the host takes to start them.

Where a system prices every kernel of a layer (`kernels` in its file):

- a product takes FLOP / rate + bytes / bandwidth + latency. The sum, not the maximum: the share of
  the rate that a product reaches grows smoothly with all of its sides, m n k / (m n + n k + m k).
- all else (norms, softmax, activation functions) takes bytes / bandwidth + latency.
- the host starts kernels and collectives one by one. A device that waits for its host takes as
  long as the host, so a phase takes the maximum of both, which a norm makes smooth.

A system without that section has one roofline op per layer and phase, and a host that is free.
"""

from pipejax.costs import array_functions as xp
from pipejax.costs.activations import OPERAND_BYTES
from pipejax.costs.kernels import LayerOp
from pipejax.costs.precision import as_float
from pipejax.costs.system import System, roofline_time
from pipejax.costs.system_parts import Number

ALIGNED = 8  # elements: tensor cores read rows of 16 bytes at full rate


def device_time(system: System, op: LayerOp, phase: str) -> Number:
    """Time [s] that one op of a layer takes on the device, in one phase of one microbatch."""
    flop, volume, launches = (
        as_float(getattr(each, phase)) for each in (op.flop, op.volume, op.launches)
    )
    if op.kind == "layer":
        return roofline_time(system, flop, volume, op.precision)
    bandwidth = system.memory_bandwidth * system.memory_efficiency.at(volume)
    if op.kind == "memory":
        return volume / bandwidth + launches * system.memory_latency
    rate = system.peak(op.precision) * system.compute_efficiency.at(flop)
    kernels = system.kernels
    if op.kind == "attention":
        share = kernels.attention_efficiency
    else:
        columns = xp.round(as_float(op.shape[1]))  # whole ones: a slightly wider model is no step
        share = xp.where(columns % ALIGNED == 0, 1.0, kernels.misaligned_efficiency)
    if op.precision in OPERAND_BYTES:  # below 16 bits
        share = share * kernels.narrow_efficiency
    return flop / (rate * share) + volume / bandwidth + launches * system.compute_latency


def host_time(
    system: System,
    *,
    launches: Number = 0.0,
    collectives: Number = 0.0,
    layers: Number = 0.0,
    microbatches: Number = 0.0,
) -> Number:
    """Time [s] in which the host starts so many kernels and collectives of so many layers."""
    host = system.host
    started = launches * host.launch + collectives * host.collective
    return started + layers * host.layer + microbatches * host.microbatch


def phase_time(system: System, device: Number, host: Number) -> Number:
    """Time [s] of a phase that accelerator and host work on at once: the longer of both."""
    return smooth_max(device, host, system.kernels.sharpness)


def smooth_max(one: Number, other: Number, sharpness: Number) -> Number:
    """Maximum of two times that nowhere has a kink: their norm (one^q + other^q)^(1/q).

    Where one of them is 0 it is the other, exactly.
    """
    large, small = xp.maximum(one, other), xp.minimum(one, other)
    overlap = small > 0
    # the inner choice keeps logarithms of 0 out of the gradient of the branch not taken
    ratio = xp.where(overlap, small, 1.0) / xp.where(overlap, large, 1.0)
    norm = xp.exp(xp.log1p(ratio**sharpness) / sharpness)
    return xp.where(overlap, large * norm, large)


def update_time(system: System, volume: Number) -> Number:
    """Time [s] of the optimizer's update, which reads and writes so many bytes, and of the step."""
    on_device = roofline_time(system, 0.0, as_float(volume) / system.optimizer_efficiency)
    return on_device + system.host.step
