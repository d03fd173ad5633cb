"""The recurrence op by op over a block of the batch: a scan whose program is data.

A compilation serves every program of the same bucket of sizes, so it takes the same time for any
number of ops, and a comparison of many schedules compiles a handful of times. A block's state
stays in cache: one row of the batch for every live op, never one for every op.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.binary_ops import BinaryOps
from pipejax.blocks import in_blocks
from pipejax.cost_rows import CostRows
from pipejax.shapes import Array, Float, Int, NumpyArray

CACHE_BYTES = 1 << 19  # of state and costs per block; half of a usual second-level cache
CHOICE_BYTES = 1 << 26  # of choices kept per block for the gradient
MIN_PART = 1 << 12  # configurations from which a thread of its own pays
BUCKETS = 8  # sizes of ops, slots, rows and columns grow by this factor from bucket to bucket
LEAST_OPS, LEAST_SLOTS, LEAST_ROWS = 512, 16, 64


class StepProgram(NamedTuple):
    """A program as data, padded to a bucket of sizes.

    Attributes:
      code: (ops, 7) slot, first slot, its lag, second slot, its lag, own cost, has second.
      length: number of ops, without padding.
      terms: (rows, 2) columns of the cost matrix that add up to each row; column 0 is zero.
      num_slots: rows of the state.
    """

    code: Int[NumpyArray, "ops 7"]
    length: Int[NumpyArray, ""]
    terms: Int[NumpyArray, "rows 2"]
    num_slots: int


def bucket(size: int, least: int) -> int:
    """Round a size up to its bucket.

    Args:
      size: what is needed.
      least: smallest bucket.

    Returns:
      least times a power of `BUCKETS`.

    Example:
      >>> bucket(17, 16), bucket(16, 16)
      (128, 16)
    """
    while least < size:
        least *= BUCKETS
    return least


def cost_columns(rows: CostRows) -> list[tuple[str, int]]:
    """List the entries of the fields that a program reads: columns 1, 2, ... of its matrix.

    Args:
      rows: cost rows of the program.

    Returns:
      Field and entry of each column.

    Example:
      >>> import pipejax as pj
      >>> from pipejax.cost_rows import cost_rows
      >>> program = pj.lower(pj.schedules.build("gpipe", num_workers=1, num_microbatches=2))
      >>> cost_columns(cost_rows(program, pj.Costs()))[:2]
      [('all_reduce', 0), ('backward', 0)]
    """
    return [(name, entry) for name, entries in rows.fields for entry in range(entries)]


def step_program(ops: BinaryOps, rows: CostRows) -> StepProgram:
    """Lay a program out as data.

    Args:
      ops: the program.
      rows: cost rows that it reads.

    Returns:
      The program in its bucket.

    Example:
      >>> import pipejax as pj
      >>> from pipejax.binary_ops import binary_ops
      >>> from pipejax.cost_rows import cost_rows
      >>> program = pj.lower(pj.schedules.build("gpipe", num_workers=2, num_microbatches=2))
      >>> steps = step_program(binary_ops(program), cost_rows(program, pj.Costs()))
      >>> steps.code.shape, int(steps.length), steps.num_slots
      ((512, 7), 13, 16)
    """
    row = rows.row_of_position
    first, second = ops.operand_slots()
    has_second = ops.second >= -1
    # an op without a second operand reads the first one twice
    second = np.where(has_second, second, first)
    second_lag = np.where(has_second, ops.second_lag, ops.first_lag)
    columns = (ops.slot, first, row[ops.first_lag], second, row[second_lag], row[ops.own],
               has_second)  # fmt: skip
    code = np.zeros((bucket(ops.num_ops, LEAST_OPS), len(columns)), np.int32)
    code[: ops.num_ops] = np.stack(columns, axis=1)
    number = {key: k + 1 for k, key in enumerate(cost_columns(rows))}
    terms = np.zeros((bucket(rows.num_rows, LEAST_ROWS), 2), np.int32)
    for place, source in enumerate(rows.sources):
        terms[place, : len(source)] = [number[key] for key in source]
    return StepProgram(
        code, np.array(ops.num_ops, np.int32), terms, bucket(ops.num_slots, LEAST_SLOTS)
    )


def stepped_makespans(
    program: StepProgram,
    matrix: Float[NumpyArray, "batch columns"] | Float[Array, "batch columns"],
    *,
    temperature: float | None = None,
    gradient: bool = False,
) -> tuple[Float[Array, " batch"], Float[Array, "batch rows"] | None]:
    """Makespans of a batch, and how often each cost row stands on the critical path.

    Args:
      program: the program as data.
      matrix: (batch, columns) costs [s]; column 0 is zero.
      temperature: smooth maxima, T log(exp(x / T) + exp(y / T)); exact ones if None [s].
      gradient: whether to count.

    Returns:
      (batch) makespans [s], and (batch, rows) counts or None.

    Example:
      >>> import pipejax as pj
      >>> from pipejax.binary_ops import binary_ops
      >>> from pipejax.cost_rows import cost_rows
      >>> program = pj.lower(pj.schedules.build("gpipe", num_workers=2, num_microbatches=2))
      >>> rows = cost_rows(program, pj.Costs())
      >>> steps = step_program(binary_ops(program), rows)
      >>> F, B = (1 + cost_columns(rows).index((name, 0)) for name in ("forward", "backward"))
      >>> matrix = np.zeros((2, 64))
      >>> matrix[:, F], matrix[:, B] = [1, 2], 2
      >>> stepped_makespans(steps, matrix)[0].tolist()
      [9.0, 12.0]
    """
    heat = np.asarray(1.0 if temperature is None else temperature, matrix.dtype)
    threads = min(os.cpu_count() or 1, len(matrix) // MIN_PART) if _is_one_cpu() else 1
    run = functools.partial(
        _run, program.code, program.length, program.terms, heat,
        num_slots=program.num_slots, smooth=temperature is not None, gradient=gradient,
    )  # fmt: skip
    if threads <= 1:
        return run(matrix)
    # loops of one computation do not run side by side on a CPU, two computations do
    size = -(-len(matrix) // threads)
    parts = [matrix[min(low, len(matrix) - size) :][:size] for low in range(0, len(matrix), size)]
    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(lambda part: _wait(run(part)), parts))
    twice = len(parts) * size - len(matrix)  # of the last part, which reaches back
    done[-1] = jax.tree.map(lambda array: array[twice:], done[-1])
    joined: tuple[Array, Array | None] = jax.tree.map(lambda *p: jnp.concatenate(p), *done)
    return joined


def _wait(results: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
    return jax.tree.map(lambda array: array.block_until_ready(), results)


def _is_one_cpu() -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() == 1


def _block_size(code: Array, terms: Array, num_slots: int, itemsize: int, gradient: bool) -> int:
    block = max(64, CACHE_BYTES // (itemsize * (1 + gradient) * (num_slots + len(terms))))
    if gradient:
        block = max(16, min(block, CHOICE_BYTES // (itemsize * len(code))))
    return 1 << (block.bit_length() - 1)


@functools.partial(jax.jit, static_argnames=("num_slots", "smooth", "gradient"))
def _run(
    code: Array, length: Array, terms: Array, heat: Array, matrix: Array,
    *, num_slots: int, smooth: bool, gradient: bool,
) -> tuple[Array, Array | None]:  # fmt: skip
    block = _block_size(code, terms, num_slots, matrix.dtype.itemsize, gradient)
    size = len(matrix)
    block = min(block, size) if jax.default_backend() == "cpu" else size

    def solve(at: Array) -> tuple[Array, Array | None]:
        cut = jax.lax.dynamic_slice_in_dim(matrix, at, block).T
        cost = cut[terms].sum(axis=1)
        return _block(code, length, num_slots, heat if smooth else None, gradient, cost)

    return in_blocks(solve, size=size, block=block)


def _block(
    code: Array, length: Array, num_slots: int, heat: Array | None, gradient: bool, cost: Array
) -> tuple[Array, Array | None]:
    """Makespans of one block and, if asked for, (block, rows) counts."""
    shape = (num_slots, cost.shape[1])

    def row(array: Array, index: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(array, index, keepdims=True)

    def put(array: Array, value: Array, index: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(array, value, index, 0)

    def add(array: Array, value: Array, index: Array) -> Array:
        return put(array, row(array, index) + value, index)

    def forward(k: Array, carry: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        values, weights = carry
        slot, first, first_lag, second, second_lag, own, has_second = code[k]
        one = row(values, first) + row(cost, first_lag)
        other = row(values, second) + row(cost, second_lag)
        value, weight = _maximum(one, other, has_second, heat)
        values = put(values, value + row(cost, own), slot)
        if weights is not None:
            weights = put(weights, weight.astype(weights.dtype), k)
        return values, weights

    kept = cost.dtype if heat is not None else jnp.bool_
    weights = jnp.zeros((code.shape[0], shape[1]), kept) if gradient else None
    values, weights = jax.lax.fori_loop(0, length, forward, (jnp.zeros(shape, cost.dtype), weights))
    end = code[length - 1, 0]
    if weights is None:
        return values[end], None
    taken = weights

    def backward(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        adjoint, counts = carry
        k = length - 1 - j
        slot, first, first_lag, second, second_lag, own, _ = code[k]
        share = row(adjoint, slot)
        to_second = share * row(taken, k).astype(share.dtype)
        to_first = share - to_second
        adjoint = put(adjoint, jnp.zeros_like(share), slot)
        adjoint = add(add(adjoint, to_first, first), to_second, second)
        counts = add(add(add(counts, share, own), to_first, first_lag), to_second, second_lag)
        return adjoint, counts

    adjoint = jnp.zeros(shape, cost.dtype).at[end].set(1)
    _, counts = jax.lax.fori_loop(0, length, backward, (adjoint, jnp.zeros_like(cost)))
    return values[end], counts.T


def _maximum(
    one: Array, other: Array, has_second: Array, heat: Array | None
) -> tuple[Array, Array]:
    """Maximum of two operands, and the weight of the second; at a tie the first one wins."""
    if heat is None:
        second_wins = other > one
        return jnp.where(second_wins, other, one), second_wins
    gap = (other - one) / heat
    smooth = one + heat * jax.nn.softplus(gap)
    both = has_second > 0
    return jnp.where(both, smooth, one), jnp.where(both, jax.nn.sigmoid(gap), 0)
