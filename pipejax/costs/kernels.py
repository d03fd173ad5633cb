"""The record of a kernel, and the kinds of kernels that layers are made of."""

import dataclasses
from typing import NamedTuple

import jax

from pipejax.costs.activations import boundary_bytes, operand_bytes, tokens_on_one
from pipejax.costs.flop import Phases
from pipejax.costs.layout import PRECISIONS, Layout
from pipejax.costs.model import Model
from pipejax.costs.system import Number

NONE = Phases(0.0, 0.0, 0.0)


class Product(NamedTuple):
    """Sizes of a matrix product (m, k) x (k, n) on one accelerator.

    Attributes:
      m: rows, tokens mostly.
      n: columns.
      k: units summed over.
    """

    m: Number
    n: Number
    k: Number


NO_PRODUCT = Product(0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class LayerOp:
    """One kernel, or group of fused ones, on one accelerator for one microbatch.

    Attributes:
      kind: "gemm", "attention", "memory", or "layer" for all of a layer in one.
      name: of the op.
      flop: [FLOP].
      volume: bytes read and written.
      launches: kernels started.
      shape: of the product of F; of memory ops zeros.
      batch: how many such products run at once: heads, experts.
      precision: of the product, one of `PRECISIONS`.
    """

    kind: str = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})
    flop: Phases
    volume: Phases
    launches: Phases
    shape: Product = NO_PRODUCT
    batch: Number = 1.0
    precision: str = dataclasses.field(default=PRECISIONS[0], metadata={"static": True})


jax.tree_util.register_dataclass(LayerOp)


def gemm(
    name: str,
    model: Model,
    layout: Layout,
    shape: tuple[Number, Number],
    *,
    tokens: Number | None = None,
    batch: Number = 1.0,
) -> LayerOp:
    """A product of tokens with a weight matrix of `shape` (k, n), or several: once in each phase.

    Its factors have the bytes of the layout's precision, its results those of the model; W adds to
    the accumulated gradient: it reads and writes that.

    Args:
      name: of the op.
      model: the transformer.
      layout: how it is split.
      shape: rows and columns of the weights on one accelerator.
      tokens: rows of each product, all tokens of the accelerator if None.
      batch: products of different weights.
    """
    k, n = shape
    m = tokens_on_one(model, layout) if tokens is None else tokens
    each, factor = model.element_bytes, operand_bytes(model, layout)
    flop, weights = 2 * batch * m * n * k, batch * n * k
    return LayerOp(
        "gemm",
        name,
        Phases(flop, flop, flop),
        Phases(
            batch * m * (factor * k + each * n) + factor * weights,
            batch * m * (factor * n + each * k) + factor * weights,
            batch * m * factor * (n + k) + 2 * model.accumulated_bytes * weights,
        ),
        Phases(batch, batch, batch),
        Product(m, n, k),
        batch,
        layout.precision,
    )


def batched(name: str, model: Model, shape: Product, heads: Number) -> LayerOp:
    """A product per head; I has two of its kind, one per factor, and W none."""
    m, n, k = shape
    flop = 2 * heads * m * n * k
    moved = model.element_bytes * heads * (m * k + n * k + m * n)
    return LayerOp(
        "attention",
        name,
        Phases(flop, 2 * flop, 0.0),
        Phases(moved, 2 * moved, 0.0),
        Phases(1.0, 2.0, 0.0),
        shape,
        heads,
    )


def memory(
    name: str, forward: Number, backward: Number, kernels: tuple[Number, Number] = (1.0, 1.0)
) -> LayerOp:
    """An op that moves bytes in F and I."""
    return LayerOp("memory", name, NONE, Phases(forward, backward, 0.0), Phases(*kernels, 0.0))


def norm(name: str, model: Model, layout: Layout) -> LayerOp:
    """A norm of the hidden state."""
    return norm_of(name, boundary_bytes(model, layout))


def norm_of(name: str, volume: Number) -> LayerOp:
    """A norm reads and writes its units [B]; its I reads two and writes one."""
    return memory(name, 2 * volume, 3 * volume, (1.0, 2.0))


def with_forward_again(op: LayerOp) -> LayerOp:
    """An op whose F is run once more within I."""
    parts = {name: getattr(op, name) for name in ("flop", "volume", "launches")}
    again = {
        name: part._replace(input_grad=part.input_grad + part.forward)
        for name, part in parts.items()
    }
    return dataclasses.replace(op, **again)
