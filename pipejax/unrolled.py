"""The recurrence written out op by op: one kernel that keeps all live values in registers.

XLA fuses the whole program into a single pass over the batch, which it also splits over the
cores. That is the fastest form there is, and the one whose compile time grows with the program;
`stepped.py` takes over where it would be too long.
"""

import jax
import jax.numpy as jnp

from pipejax.binary_ops import BinaryOps, row_ops
from pipejax.cost_rows import ZERO_ROW, CostRows, Leaves
from pipejax.kernel_options import compiled
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
    result: Float[Array, " batch"] = compiled(_unrolled)(leaves, ops=ops, rows=rows, size=size)
    return result


def _unrolled(
    leaves: Leaves, *, ops: BinaryOps, rows: CostRows, size: int
) -> Float[Array, " batch"]:
    cost = rows.list(leaves)
    values = {-1: jnp.zeros(1, cost[ZERO_ROW].dtype)}
    listed = row_ops(ops, rows)
    for op in listed:
        value = plus_row(values[op.first], op.first_lag, cost)
        if op.second is not None:
            value = _first_of(value, plus_row(values[op.second], op.second_lag, cost))
        values[op.number] = plus_row(value, op.own, cost)
    return jnp.broadcast_to(values[listed[-1].number], (size,))


def plus_row(value: Array, row: int, cost: list[Array]) -> Array:
    """Add a cost row, nothing for that of zeros.

    Args:
      value: (N or 1) times [s].
      row: row to add.
      cost: (rows) of (N or 1) costs [s].

    Returns:
      (N or 1) times [s].

    Example:
      >>> plus_row(jnp.ones(2), 1, [jnp.zeros(1), jnp.arange(2.0)]).tolist()
      [1.0, 2.0]
    """
    return value if row == ZERO_ROW else value + cost[row]


def _first_of(one: Array, other: Array) -> Array:
    """Maximum; a comparison and a choice are cheaper than a maximum that looks for NaN."""
    one, other = jnp.broadcast_arrays(one, other)
    return jax.lax.select(other > one, other, one)
