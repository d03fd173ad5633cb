"""Kernels of layers: FLOP and bytes of each kind of kernel, and their times.

A matrix product takes FLOP / rate + bytes / bandwidth + latency. The terms are added, because the
share of the peak rate grows smoothly with the sizes of a product: m n k / (m n + n k + m k). Other
kernels take bytes / bandwidth + latency. A phase takes the maximum of the device's time and the
host's time for its launches; a norm makes this maximum smooth.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from pipejax.base.checks import wrong
from pipejax.base.jax_on_demand import register
from pipejax.costs import array_functions as xp
from pipejax.costs.layers.formulas import OPERAND_BYTES, Phases, accelerator_tokens, operand_bytes
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload_fields import PRECISIONS
from pipejax.costs.precision import as_float, is_traced
from pipejax.costs.system.parts import system_number
from pipejax.costs.system.system import Number, Numbers, System, roofline_time

NONE = Phases()


class Product(NamedTuple):
    """Sizes m, n, k of a matrix product (m, k) x (k, n) on one accelerator."""

    m: Number  # rows, mostly tokens
    n: Number  # columns
    k: Number  # units summed over


NO_PRODUCT = Product(0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class LayerOp:
    """A kernel, or several kernels priced together, on one accelerator for one microbatch."""

    # "gemm", "attention", "memory", or "layer" for a whole layer as one op
    kind: str = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})
    flop: Phases
    volume: Phases  # bytes read and written
    launches: Phases  # kernels started
    shape: Product = NO_PRODUCT  # sizes of the product in F; zeros for memory ops
    batch: Number = 1.0  # number of such products at once: heads, experts
    precision: str = dataclasses.field(default=PRECISIONS[0], metadata={"static": True})


register(LayerOp)


def gemm(
    name: str,
    model: Model,
    layout: Layout,
    shape: tuple[Number, Number],
    *,
    tokens: Number | None = None,
    batch: Number = 1.0,
) -> LayerOp:
    """Return an op that multiplies tokens by weight matrices of `shape` (k, n)."""
    # There are `batch` such products at once, each of `tokens` rows; by default one product of all
    # tokens. Factors have the layout's precision, results the model's. Frozen weights have no W.
    k, n = shape
    m = accelerator_tokens(model, layout) if tokens is None else tokens
    element, factor = model.element_bytes, operand_bytes(model, layout)
    flop, weights = 2 * batch * m * n * k, batch * n * k
    trained = layout.trains_base
    return LayerOp(
        "gemm",
        name,
        flop=Phases(flop, flop, trained * flop),
        volume=Phases(
            batch * m * (factor * k + element * n) + factor * weights,
            batch * m * (factor * n + element * k) + factor * weights,
            # W reads and writes the accumulated gradient, to which it adds
            trained * (batch * m * factor * (n + k) + 2 * model.accumulated_bytes * weights),
        ),
        launches=Phases(batch, batch, trained * batch),
        shape=Product(m, n, k),
        batch=batch,
        precision=layout.precision,
    )


def batched(name: str, model: Model, layout: Layout, shape: Product, heads: Number) -> LayerOp:
    """Return the op of one matrix product per attention head; I has two per head, W none."""
    # The factors have the precision of the layout, the result has that of the model.
    m, n, k = shape
    flop = 2 * heads * m * n * k
    moved = heads * (operand_bytes(model, layout) * (m * k + n * k) + model.element_bytes * m * n)
    return LayerOp(
        "attention",
        name,
        flop=Phases(flop, 2 * flop, 0.0),
        volume=Phases(moved, 2 * moved, 0.0),
        launches=Phases(forward=1.0, input_grad=2.0),
        shape=shape,
        batch=heads,
        precision=layout.precision,
    )


def memory(
    name: str, forward: Number, backward: Number, kernels: tuple[Number, Number] = (1.0, 1.0)
) -> LayerOp:
    """Return an op that only reads and writes memory, from its bytes and kernels in F and I."""
    return LayerOp("memory", name, NONE, Phases(forward, backward), Phases(*kernels))


def norm(name: str, volume: Number) -> LayerOp:
    """Return the op of a norm: F moves 2 * `volume` bytes, I 3 * `volume`."""
    return memory(name, 2 * volume, 3 * volume, kernels=(1.0, 2.0))


def with_forward_again(op: LayerOp, share: float = 1.0) -> LayerOp:
    """Return the op whose I repeats a share of its F."""
    amounts = {name: getattr(op, name) for name in ("flop", "volume", "launches")}
    changes = {
        name: phases._replace(input_grad=phases.input_grad + share * phases.forward)
        for name, phases in amounts.items()
    }
    return dataclasses.replace(op, **changes)


ALIGNED = 8  # elements: tensor cores read rows of 16 bytes at full rate


def device_time(system: System, op: LayerOp, phase: str) -> Number:
    """Return the time [s] of a layer op on the accelerator in a phase, such as "forward"."""
    flop, volume, launches = (
        as_float(getattr(amounts, phase)) for amounts in (op.flop, op.volume, op.launches)
    )
    if op.kind == "layer":
        return launches * roofline_time(system, flop, volume, op.precision)
    bandwidth = system.memory_bandwidth * system.memory_efficiency.at(volume)
    if op.kind == "memory":
        moved = volume * system.kernels.elementwise
        return moved / bandwidth + launches * system.memory_latency
    rate = system.peak(op.precision) * system.compute_efficiency.at(flop)
    kernels = system.kernels
    share = kernels.attention_efficiency if op.kind == "attention" else 1.0
    # rounded, so that the time of a slightly wider model does not jump
    n, k = (xp.round(as_float(size)) for size in op.shape[1:])
    share = share * xp.where((n % ALIGNED) + (k % ALIGNED) == 0, 1.0, kernels.misaligned_efficiency)
    if op.precision in OPERAND_BYTES:  # below 16 bits
        share = share * kernels.narrow_efficiency
    return flop / (rate * share) + volume / bandwidth + launches * system.compute_latency


def host_time(
    system: System,
    *,
    launches: Numbers = 0.0,
    collectives: Number = 0.0,
    layers: Number = 0.0,
    microbatches: Number = 0.0,
) -> Numbers:
    """Return the host's time [s] to start given numbers of kernels, collectives and layers."""
    host = system.host
    start_seconds = launches * host.launch + collectives * host.collective
    return start_seconds + layers * host.layer + microbatches * host.microbatch


def smooth_max(first: Number, second: Number, sharpness: Number) -> Number:
    """Return the smooth maximum (first^q + second^q)^(1/q) of two times, with sharpness q."""
    # If one of the times is 0, the result is exactly the other time.
    large, small = xp.maximum(first, second), xp.minimum(first, second)
    is_smooth = small > 0
    # the inner `where` keeps logarithms of 0 out of the gradient
    ratio = xp.where(is_smooth, small, 1.0) / xp.where(is_smooth, large, 1.0)
    norm = xp.exp(xp.log1p(ratio**sharpness) / sharpness)
    return xp.where(is_smooth, large * norm, large)


def update_time(
    system: System, volume: Numbers, on_host: Numbers = 0.0, exchanged: Numbers = 0.0
) -> Numbers:
    """Return the time [s] of the optimizer's update, on the accelerator and on the host."""
    # `volume` (accelerator) and `on_host` are bytes of optimizer memory to read and write.
    # `exchanged` are bytes of gradients sent to the host before, and of weights sent back after
    # it, as in Megatron's hybrid optimizer without `--overlap-cpu-optimizer-d2h-h2d`.
    # source: Ren et al., ZeRO-Offload (arXiv:2101.06840), section 4; Megatron Core,
    # optimizer/cpu_offloading/hybrid_optimizer.py.
    check_host(system, on_host)
    on_device = roofline_time(system, 0.0, as_float(volume) / system.optimizer_efficiency)
    # a rate of 0 means unknown, and is unused without offloading: 1 keeps NaN out of the gradient
    link_rate, memory_rate = system.host_link.rate, system.host.memory_bandwidth
    link_rate = xp.where(link_rate > 0, link_rate, 1.0)
    memory_rate = xp.where(memory_rate > 0, memory_rate, 1.0)
    transfers = 2 * system.host_link.latency * (on_host > 0) + exchanged / link_rate
    return xp.maximum(on_device, on_host / memory_rate) + transfers


def check_host(system: System, offloaded: Numbers) -> None:
    """Refuse to offload the optimizer if the system lacks the rates of its host."""
    if is_traced(offloaded) or not np.any(np.asarray(offloaded) > 0):
        return
    for name in ("host_link.bandwidth", "host.memory_bandwidth"):
        rate = system_number(system, name)
        if not is_traced(rate) and not np.all(np.asarray(rate) > 0):
            raise wrong(
                "optimizer_offload",
                f"must be 0 on {system.name or 'a system'}, whose file does not say "
                f"{name.replace('.', ': ')}",
            )
