"""Batched costs as rows: one row of the batch for every different cost that a program reads.

A batch of costs has a leading axis of N configurations on every leaf; a scalar is the same for
all. Uniform costs make a handful of rows, costs per stage one for each phase and stage.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import whole_number
from pipejax.costs.costs import MESSAGE_FIELDS, Costs, unchecked_costs
from pipejax.engine.lowering.cost_layout import CostLayout
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import check_known, cost_vector

ZERO_ROW = 0
Leaves = dict[str, Any]  # field of `Costs`: N or 1 first, then as in `Costs`
Source = tuple[tuple[str, int], ...]  # leaf entries that add up to a row
SECOND_IN_A_SUM = ("backward", "input_grad", "weight_grad", "transmit")
HIGH = 1 << 26  # above all numbers of entries; its square is still exact in float64


@dataclasses.dataclass(frozen=True, eq=False)
class CostRows:
    """Which row each position of the cost vector reads.

    Attributes:
      row_of_position: (costs) row of each position, in the order of `CostLayout`.
      sources: (rows) leaf entries that add up to each row; none for the row of zeros.
      fields: fields that are read, and the entries of each.
    """

    row_of_position: Int[NumpyArray, " costs"]
    sources: tuple[Source, ...]
    fields: tuple[tuple[str, int], ...]

    @property
    def num_rows(self) -> int:
        """Number of rows, that of zeros included."""
        return len(self.sources)

    def only_read(self, leaves: Leaves) -> Leaves:
        """Return the fields that are read."""
        return {name: leaves[name] for name, _ in self.fields}

    def pieces(self, leaves: Leaves) -> tuple[Any, ...]:
        """Return the fields that are read as matrices: (N or 1, entries) [s] each."""
        return tuple(leaves[name].reshape(len(leaves[name]), -1) for name, _ in self.fields)

    def list(self, leaves: Leaves) -> list[Float[Array, " batch"]]:
        """Return the rows one by one, of size 1 where the whole batch shares one.

        Returns (rows) of (N or 1) costs [s].
        """
        dtype = next(iter(leaves.values())).dtype
        rows = []
        for source in self.sources:
            parts = [
                leaves[name].reshape(len(leaves[name]), -1)[:, entry] for name, entry in source
            ]
            rows.append(sum(parts[1:], parts[0]) if parts else jnp.zeros(1, dtype))
        return rows


def batch_leaves(
    costs: Costs, layout: CostLayout, batch_size: int | None = None
) -> tuple[Leaves, int]:
    """Read a batch of costs: its leaves, N or 1 first, and N."""
    given = {name: leaf for name, leaf in vars(costs).items() if leaf is not None}
    shapes = {name: np.shape(leaf) for name, leaf in given.items()}
    size = _batch_size({name: shape for name, shape in shapes.items() if shape}, layout, batch_size)
    trailing: Costs = jax.tree.map(lambda leaf: np.zeros(np.shape(leaf)[1:]), costs)
    trailing.check_shapes(layout.num_stages, layout.num_pipes)
    dtype = jnp.result_type(float, *(_plain(leaf) for leaf in given.values()))
    leaves: Leaves = {}
    for name, leaf in given.items():
        if isinstance(leaf, np.ndarray) and leaf.ndim and leaf.strides[0] == 0:
            leaf = leaf[:1]  # one value seen N times: keep one
        if not isinstance(leaf, jax.Array):
            leaf = np.atleast_1d(np.asarray(leaf, dtype))
        elif leaf.dtype != dtype or leaf.weak_type or not leaf.ndim:  # else spare JAX an operation
            leaf = jnp.atleast_1d(jnp.asarray(leaf, dtype))
        leaves[name] = leaf
    return leaves, size


def _batch_size(
    shapes: dict[str, tuple[int, ...]], layout: CostLayout, batch_size: int | None
) -> int:
    """Find the length of the batch axis, which is the first of every leaf that is no scalar."""
    if batch_size is None:
        size = max((shape[0] for shape in shapes.values()), default=1)
        one = {name: layout.num_stages - (name in MESSAGE_FIELDS) for name in shapes}
        if size > 1 and all(shape == (size,) == (one[name],) for name, shape in shapes.items()):
            name = next(iter(shapes))
            what = "boundaries" if name in MESSAGE_FIELDS else "stages"
            raise ValueError(
                f"{name} has shape {shapes[name]}: a batch, or one entry for each of {size} "
                f"{what}? Give batch_size={size} for a batch, or use makespan for one "
                "configuration"
            )
    else:
        size = whole_number(batch_size, "batch_size")
    for name, shape in shapes.items():
        if shape[0] not in (1, size):
            other = "others have" if batch_size is None else "batch_size is"
            raise ValueError(
                f"{name} has a batch axis of {shape[0]}, {other} {size}: every leaf needs the "
                "same batch axis first, or is a scalar"
            )
    return size


def _plain(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else float(leaf)


def cost_rows(program: Program, costs: Costs) -> CostRows:
    """Find the rows that a program reads.

    A position of the cost vector is at most the sum of two entries: a forward and a backward that
    make a fused pair, or latency and transmit time. So pricing itself says which: each entry is
    priced at its own number, those that stand second in a sum in the high digits.
    """
    check_known(program, costs)
    entries: list[tuple[str, int]] = []
    numbers: dict[str, NumpyArray] = {}
    for name, leaf in vars(costs).items():
        if leaf is not None:
            shape = np.shape(leaf)[1:]
            number = 1 + len(entries) + np.arange(math.prod(shape)).reshape(shape)
            numbers[name] = number * (HIGH if name in SECOND_IN_A_SUM else 1)
            entries += [(name, entry) for entry in range(number.size)]
    priced = np.asarray(cost_vector(program, unchecked_costs(numbers))).astype(np.int64)
    used = np.unique(np.append(program.duration_index, np.ravel(program.lag_index)))
    row_of_position = np.zeros(len(priced), np.int32)
    rows: dict[Source, int] = {(): ZERO_ROW}
    for position, number in zip(used.tolist(), priced[used].tolist(), strict=True):
        digits = (number % HIGH, number // HIGH)
        source = tuple(entries[digit - 1] for digit in digits if digit)
        row_of_position[position] = rows.setdefault(source, len(rows))
    names = sorted({name for source in rows for name, _ in source})
    return CostRows(
        row_of_position, tuple(rows), tuple((name, numbers[name].size) for name in names)
    )
