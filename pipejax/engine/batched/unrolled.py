"""The recurrence written out op by op: one kernel that keeps all live values in registers.

XLA fuses the whole program into a single pass over the batch, which it also splits over the cores.
That is the fastest form, but its compile time grows with the program; `interpreter.py` takes over
where it would be too long.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float
from pipejax.base.compiler import cpu_options
from pipejax.engine.batched.binary_program import NO_OPERAND, START, BinaryOps
from pipejax.engine.batched.cost_rows import ZERO_ROW, CostRows, Leaves
from pipejax.engine.batched.single_xla_call import LOOPS

MAX_OPS = 700  # about a second of compilation


def unrolled(ops: BinaryOps, rows: CostRows) -> Callable[[Leaves], Float[Array, " batch"]]:
    """Compile a program into a kernel: from leaves of one batch to (batch) makespans [s]."""
    return jax.jit(functools.partial(_unrolled, ops, rows), compiler_options=cpu_options(**LOOPS))


def _unrolled(ops: BinaryOps, rows: CostRows, leaves: Leaves) -> Float[Array, " batch"]:
    cost = rows.list(leaves)
    values = {START: jnp.zeros(1, cost[ZERO_ROW].dtype)}
    row = rows.row_of_position
    code = np.stack([ops.first, ops.second, row[ops.lag], row[ops.own]], axis=1).tolist()
    for op, (first, second, lag, own) in enumerate(code):
        operands = []
        if first != NO_OPERAND:
            operands.append(values[first])
        if second != NO_OPERAND:
            operands.append(_plus(values[second], lag, cost))
        values[op] = _plus(functools.reduce(_first_of, operands), own, cost)
    return jnp.broadcast_to(values[ops.num_ops - 1], (max(map(len, leaves.values())),))


def _plus(value: Array, row: int, cost: list[Array]) -> Array:
    """Add a cost row; that of zeros adds nothing."""
    return value if row == ZERO_ROW else value + cost[row]


def _first_of(one: Array, other: Array) -> Array:
    """Maximum; a comparison and a choice are cheaper than a maximum that looks for NaN."""
    one, other = jnp.broadcast_arrays(one, other)
    return jax.lax.select(other > one, other, one)
