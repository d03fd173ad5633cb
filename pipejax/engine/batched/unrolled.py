"""The recurrence written out op by op: one kernel that keeps all live values in registers.

XLA fuses the whole program into a single pass over the batch, which it also splits over the cores.
That is the fastest form, but its compile time grows with the program; `interpreter.py` takes over
where it would be too long. With the counts of the backward pass the code of an iteration soon
outgrows the cache of instructions, and then is no faster than the interpreter.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float
from pipejax.base.compiled import compiled
from pipejax.base.machine import cpu_options
from pipejax.engine.batched.binary_program import NO_OPERAND, START, BinaryOps
from pipejax.engine.batched.cost_rows import ZERO_ROW, CostRows, Leaves
from pipejax.engine.batched.interpreter_loops import LOOPS

MAX_OPS = 700  # about a second of compilation
MAX_OPS_WITH_COUNTS = 192  # the same; and at 512 the interpreter is as fast

Code = list[list[int]]  # of each op: its operands, and the rows of lag and own cost
Values = Float[Array, " batch"]


def unrolled(ops: BinaryOps, rows: CostRows) -> Callable[[Leaves], Values]:
    """Compile a program into a kernel: from leaves of one batch to (batch) makespans [s]."""
    return jax.jit(functools.partial(_makespans, ops, rows), compiler_options=cpu_options(**LOOPS))


def unrolled_with_counts(
    ops: BinaryOps, rows: CostRows
) -> Callable[[Leaves], tuple[Values, Float[Array, "columns batch"]]]:
    """The same with how often each column of the costs stands on the critical path.

    The costs are first laid out column by column: whether LLVM makes vectors of a kernel that reads
    them in strides, and writes as many rows, is a matter of luck.
    """
    run = jax.jit(functools.partial(_with_counts, ops, rows), compiler_options=cpu_options(**LOOPS))

    def solve(leaves: Leaves) -> tuple[Values, Float[Array, "columns batch"]]:
        pieces = rows.pieces({name: np.asarray(leaf) for name, leaf in leaves.items()})
        moved = iter(_transposed(tuple(piece for piece in pieces if piece.shape[1] > 1)))
        columns = (piece.T if piece.shape[1] == 1 else next(moved) for piece in pieces)
        return run(tuple(columns))

    return solve


@compiled
def _transposed(pieces: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(piece.T for piece in pieces)


def _makespans(ops: BinaryOps, rows: CostRows, leaves: Leaves) -> Values:
    makespan, _ = _forward(_code(ops, rows), rows.list(leaves))
    return jnp.broadcast_to(makespan, (max(map(len, leaves.values())),))


def _with_counts(
    ops: BinaryOps, rows: CostRows, columns: tuple[Array, ...]
) -> tuple[Values, Float[Array, "columns batch"]]:
    code, size = _code(ops, rows), max(piece.shape[1] for piece in columns)
    sums = rows.sums([column for piece in columns for column in piece])
    cost = [jnp.broadcast_to(row, (size,)) for row in sums]

    def solve(cost: list[Array]) -> list[Array]:
        makespan, second_wins = _forward(code, cost)
        return [makespan, *_backward(code, second_wins, rows, makespan.dtype)]

    makespan, *counts = _at_once(solve, cost, 1 + rows.num_columns)
    return makespan, jnp.stack(counts)


def _code(ops: BinaryOps, rows: CostRows) -> Code:
    row = rows.row_of_position
    code: Code = np.stack([ops.first, ops.second, row[ops.lag], row[ops.own]], axis=1).tolist()
    return code


def _forward(code: Code, cost: list[Array]) -> tuple[Array, dict[int, Array]]:
    """Makespan [s], and of each op with two operands whether it waited for the second."""
    values, second_wins = {START: jnp.zeros_like(cost[ZERO_ROW])}, {}
    for op, (first, second, lag, own) in enumerate(code):
        if second == NO_OPERAND:
            value = values[first]
        else:
            value = _plus(values[second], lag, cost)
            if first != NO_OPERAND:
                one, other = jnp.broadcast_arrays(values[first], value)
                # cheaper than a maximum that looks for NaN
                second_wins[op] = other > one
                value = jax.lax.select(second_wins[op], other, one)
        values[op] = _plus(value, own, cost)
    return values[len(code) - 1], second_wins


def _plus(value: Array, row: int, cost: list[Array]) -> Array:
    """Add a cost row; that of zeros adds nothing."""
    return value if row == ZERO_ROW else value + cost[row]


def _backward(
    code: Code, second_wins: dict[int, Array], rows: CostRows, dtype: np.dtype
) -> list[Array]:
    """Count the uses of each column on the critical path, from the last op to the first."""
    counts = [jnp.zeros((), dtype)] * rows.num_columns
    on_path = {len(code) - 1: jnp.array(True)}

    def use(row: int, here: Array) -> None:
        for column in filter(None, rows.terms[row].tolist()):  # column 0 is no cost
            counts[column] = jax.lax.select(here, counts[column] + 1, counts[column])

    def go_on(operand: int, here: Array) -> None:
        on_path[operand] = on_path[operand] | here if operand in on_path else here

    for op in reversed(range(len(code))):
        if op not in on_path:
            continue
        here, (first, second, lag, own) = on_path.pop(op), code[op]
        use(own, here)
        if second == NO_OPERAND:
            go_on(first, here)
            continue
        over_second = here & second_wins[op] if op in second_wins else here
        use(lag, over_second)
        go_on(second, over_second)
        if op in second_wins:
            go_on(first, here & ~second_wins[op])
    return counts


def _at_once(
    function: Callable[[list[Array]], list[Array]], inputs: list[Array], num_results: int
) -> list[Array]:
    """Apply a function of numbers that has several results to every entry, in one pass.

    On a CPU, XLA makes kernels of one result each and computes what several share once for each of
    them. A reduction may have several. So this is one: over two copies of the inputs, which are
    never stored, by a function that ignores what was reduced so far. It takes as many results as
    inputs, so the fewer ones are filled up.
    """
    width, zero = max(num_results, len(inputs)), jnp.zeros((), inputs[0].dtype)
    filled = inputs + [jnp.zeros_like(inputs[0])] * (width - len(inputs))

    def newest(_: Sequence[Array], entry: Sequence[Array]) -> tuple[Array, ...]:
        found = function(list(entry[: len(inputs)]))
        return (*found, *[zero] * (width - num_results))

    copies = [jnp.broadcast_to(row, (2, *row.shape)) for row in filled]
    return list(jax.lax.reduce(copies, [zero] * width, newest, (0,))[:num_results])
