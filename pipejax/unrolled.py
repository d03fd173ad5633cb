"""The recurrence written out op by op: one kernel that keeps all live values in registers.

XLA fuses the whole program into a single pass over the batch, which it also splits over the
cores. That is the fastest form there is, and the one whose compile time grows with the program;
`stepped.py` takes over where it would be too long.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pipejax.binary_ops import BinaryOps
from pipejax.cost_rows import ZERO_ROW, CostRows, Leaves
from pipejax.kernel_options import kernel_options
from pipejax.shapes import Array, Float

MAX_OPS = 700  # about a second of compilation


def unrolled_makespans(
    leaves: Leaves, *, ops: BinaryOps, rows: CostRows, size: int
) -> Float[Array, " batch"]:
    """Makespans of a batch.

    Args:
      leaves: (size or 1, entries) costs [s].
      ops: the program; a new one is a new compilation.
      rows: cost rows that it reads.
      size: configurations in the batch.

    Returns:
      (batch) makespans [s].

    Example:
      >>> import numpy as np, pipejax as pj
      >>> from pipejax.binary_ops import binary_ops
      >>> from pipejax.cost_rows import batch_leaves, cost_rows
      >>> program = pj.lower(pj.schedules.build("gpipe", num_workers=2, num_microbatches=2))
      >>> costs = pj.Costs(forward=np.array([1.0, 2.0]), backward=2.0)
      >>> leaves, size = batch_leaves(costs, program.layout)
      >>> ops, rows = binary_ops(program), cost_rows(program, costs)
      >>> unrolled_makespans(leaves, ops=ops, rows=rows, size=size).tolist()
      [9.0, 12.0]
    """
    result: Float[Array, " batch"] = _compiled()(leaves, ops=ops, rows=rows, size=size)
    return result


@functools.cache
def _compiled() -> Callable[..., Any]:
    """The function under jit; options are known only once there is a backend."""
    static = ("ops", "rows", "size")
    return jax.jit(_unrolled, static_argnames=static, compiler_options=kernel_options())


def _unrolled(
    leaves: Leaves, *, ops: BinaryOps, rows: CostRows, size: int
) -> Float[Array, " batch"]:
    cost = rows.list(leaves)
    row = rows.row_of_position
    columns = zip(
        ops.first.tolist(), ops.second.tolist(), row[ops.first_lag].tolist(),
        row[ops.second_lag].tolist(), row[ops.own].tolist(), strict=True,
    )  # fmt: skip
    values: list[Array] = []
    source = jnp.zeros(1, cost[ZERO_ROW].dtype)

    def arrival(op: int, lag: int) -> Array:
        value = values[op] if op >= 0 else source
        return value if lag == ZERO_ROW else value + cost[lag]

    for first, second, first_lag, second_lag, own in columns:
        value = arrival(first, first_lag)
        if second >= -1:
            value = _first_of(value, arrival(second, second_lag))
        values.append(value if own == ZERO_ROW else value + cost[own])
    return jnp.broadcast_to(values[-1], (size,))


def _first_of(one: Array, other: Array) -> Array:
    """Maximum; a comparison and a choice are cheaper than a maximum that looks for NaN."""
    one, other = jnp.broadcast_arrays(one, other)
    return jax.lax.select(other > one, other, one)
