"""Loops of the interpreter: a forward pass over ops for makespans, a backward pass for counts.

A tile is a row of configurations. The state of a tile is a matrix, one row for each buffer slot of
the program; an op reads two rows, adds rows of costs and writes one row. The program is data
(`code`), so one compilation serves all programs of a bucket of sizes.

By default XLA runs every instruction of a loop body as a task of a microsecond. An attribute
(`as_single_xla_call`) makes the loop one function, which may hold elementwise operations on slices
only. XLA updates a carried buffer in place only if nothing reads the old one after the write. So
every write is one row, and an artificial dependence orders reads and writes (`_run`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from pipejax.base.array_types import Array, NumpyArray
from pipejax.base.compiled import Options
from pipejax.engine.batched.binary_program import (
    GROUP,
    NEVER_SLOT,
    STRETCH,
    BackwardProgram,
    ForwardProgram,
    Task,
    UIntArray,
    Unsigned,
)

LOOPS: Options = {
    # XLA prefers vectors of 256 bits; where the CPU has 512, the loops take two thirds of the time
    "xla_cpu_prefer_vector_width": 512,
    # at LLVM's highest level they compile twice as long, and run twice as long in float64
    "xla_backend_optimization_level": 2,
}
SINGLE_CALL = {"xla_cpu_small_call": "true", "inlineable": "false"}
NO_ATTRIBUTES = dict.fromkeys(SINGLE_CALL)
BITS = 8  # bits of a byte, each of which is the choice or path of one configuration

Number = Array | NumpyArray | int  # a row, or a bound of a loop
Carry = tuple[Array, Array, Array, Array, Array]  # values, choices, columns, cost, state


def as_single_xla_call(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap loops so that XLA compiles them into a single function on a CPU."""

    def without_attribute(*arrays: Any) -> Any:
        """Run the loops without the XLA attribute, which only the outer call must have."""
        with set_xla_metadata(**NO_ATTRIBUTES):
            return loops(*arrays)

    @functools.wraps(loops)
    def call(*arrays: Any) -> Any:
        with set_xla_metadata(**SINGLE_CALL):
            return jax.jit(without_attribute)(*arrays)

    return call


def take_row(array: Array, index: Number) -> Array:
    """Return the row at an index of an array, with its first axis kept: (1, ...)."""
    return jax.lax.dynamic_index_in_dim(array, index)


def put_row(array: Array, row: Array, index: Number) -> Array:
    """Return an array with the row at an index replaced."""
    return jax.lax.dynamic_update_slice_in_dim(array, row, index, 0)


def for_loop(first: Number, end: Number, body: Callable[[Array, Any], Any], start: Any) -> Any:
    """Run body(k, carry) for k = first, ..., end - 1; return the last carry."""

    def call_body(k: Array, carry: Any) -> Any:
        return body(k.astype(Unsigned), carry)

    return jax.lax.fori_loop(Unsigned(first), Unsigned(end), call_body, start)


def values_and_choices(
    task: Task, pieces: tuple[Array, ...], first: Array, *, tiles: tuple[int, int]
) -> tuple[Array, Array]:
    """Return makespans (tiles, lanes) [s], and each op's choice between its two operands."""
    # The choices of the ops are kept if the task has a backward pass.
    program, keeps_choices = task.forward, task.backward is not None
    is_exact, dtype = task.temperature is None, pieces[0].dtype
    rows = len(program.code) // GROUP if is_exact else len(program.code)

    def run_tile(t: Array, carry: Carry) -> Carry:
        """Run all ops for the configurations of tile t; write makespans and choices."""
        values, choices, columns, cost, state = carry
        columns = cost_columns(columns, pieces, first + t * Unsigned(tiles[1]))
        cost = cost_sums(cost, program.terms, program.num_rows, columns)
        state, choices = _run(task, cost, state, choices, t)
        return put_row(values, take_row(state, program.last), t), choices, columns, cost, state

    values, *buffers = empty_buffers(program, pieces, tiles)
    choices_shape = (rows if keeps_choices else 1, *tiles)
    choices = jnp.zeros(choices_shape, jnp.uint8 if is_exact else dtype)
    values, choices, *_ = for_loop(0, tiles[0], run_tile, (values, choices, *buffers))
    return values, choices


def empty_buffers(
    program: Any, pieces: tuple[Array, ...], tiles: tuple[int, int]
) -> tuple[Array, Array, Array, Array]:
    """Allocate buffers for all tiles: makespans (tiles, lanes), cost columns, cost rows, slots."""
    dtype, lanes = pieces[0].dtype, tiles[1]
    num_columns = 1 + sum(piece.shape[1] for piece in pieces)
    slot = jax.lax.broadcasted_iota(np.int32, (program.num_slots, lanes), 0)
    slots = jnp.where(slot == NEVER_SLOT, -jnp.inf, 0).astype(dtype)
    shapes = tiles, (num_columns, lanes), (len(program.terms), lanes)
    values, columns, cost = (jnp.zeros(shape, dtype) for shape in shapes)
    return values, columns, cost, slots


def cost_columns(columns: Array, pieces: tuple[Array, ...], first: Array) -> Array:
    """Copy the costs [s] of a tile's configurations to (columns, lanes); column 0 stays zero."""
    # Pieces have shape (configurations or 1, entries); each entry becomes a row of `columns`.
    lanes, row = columns.shape[1], 1

    def copy_entry(piece: Array, row: int, e: Array, columns: Array) -> Array:
        """Copy entry e of a piece (a cost of each configuration in the tile) to row `row + e`."""
        if len(piece) == 1:  # the same for all configurations
            column = jax.lax.dynamic_slice(piece, (Unsigned(0), e), (1, 1))
            column = jnp.broadcast_to(column, (1, lanes))
        else:
            column = jax.lax.dynamic_slice(piece, (first, e), (lanes, 1)).reshape(1, lanes)
        return put_row(columns, column, e + Unsigned(row))

    for piece in pieces:
        copy = functools.partial(copy_entry, piece, row)
        columns = for_loop(0, piece.shape[1], copy, columns)
        row += piece.shape[1]
    return columns


def cost_sums(cost: Array, terms: UIntArray, num_rows: Number, columns: Array) -> Array:
    """Return a tile's cost rows (rows, lanes) [s]; each row is the sum of two cost columns."""

    def sum_columns(r: Array, cost: Array) -> Array:
        first_term, second_term = (take_row(columns, terms[r, k]) for k in range(2))
        return put_row(cost, first_term + second_term, r)

    return for_loop(0, num_rows, sum_columns, cost)


def _run(task: Task, cost: Array, state: Array, choices: Array, t: Array) -> tuple[Array, Array]:
    """Run all ops for tile t; return values by slot (slots, lanes) [s] and updated choices."""
    # No op writes the slot of its own operand (`binary_program.slots_of_ops` ensures this). An
    # iteration runs a group of ops, as many as a byte has bits.
    program, temperature = task.forward, task.temperature
    keeps_choices = task.backward is not None
    weights = jnp.zeros((GROUP + 1, cost.shape[1]), bool if temperature is None else cost.dtype)

    def run_group(g: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Run group g, the `GROUP` ops from op g * GROUP on."""
        state, choices, weights = carry
        for u in range(GROUP):
            op = g * Unsigned(GROUP) + Unsigned(u)
            first, second, slot, lag, duration = (program.code[op, c] for c in range(5))
            first_value = take_row(state, first)
            second_value = take_row(state, second) + take_row(cost, lag)
            value, weight = _maximum(first_value, second_value, temperature)
            if keeps_choices:
                # The last row of `weights` stays zero. Adding it to the slot makes the write wait
                # for `weights`, and so for the choice, which reads the state. Otherwise XLA might
                # write first, and copy the state beforehand so that the choice can read the copy.
                weights = put_row(weights, weight, Unsigned(u))
                slot = slot + weights[GROUP, 0].astype(Unsigned)
            state = put_row(state, value + take_row(cost, duration), slot)
        return state, _put_choices(choices, weights, g, t) if keeps_choices else choices, weights

    state, choices, _ = for_loop(0, program.num_groups, run_group, (state, choices, weights))
    return state, choices


def _put_choices(choices: Array, weights: Array, g: Array, t: Array) -> Array:
    """Write the choices of group g's ops in tile t; exact choices become bits of one byte."""
    if weights.dtype == bool:
        bits = [weights[u].astype(jnp.uint8) << u for u in range(GROUP)]
        rows, corner = functools.reduce(jax.lax.bitwise_or, bits)[None], g
    else:
        rows, corner = weights[:GROUP], g * Unsigned(GROUP)
    return jax.lax.dynamic_update_slice(choices, rows[:, None], (corner, t, Unsigned(0)))


def _maximum(first: Array, second: Array, temperature: Array | float | None) -> tuple[Array, Array]:
    """Return the maximum (1, lanes) [s] of two operands, and the second operand's weight in it."""
    # The second wins only if it is larger. Operands have the order of a node's predecessors, so
    # in a chain of maxima the first predecessor that attains the maximum wins, as in `recurrence`.
    if temperature is None:
        second_wins = second > first
        return jax.lax.select(second_wins, second, first), second_wins
    gap = second - first
    smooth = temperature * jnp.log1p(jnp.exp(-jnp.abs(gap) / temperature))
    return jnp.maximum(first, second) + smooth, jax.nn.sigmoid(gap / temperature)


# The backward pass. For exact maxima the critical path is a bit per configuration, eight to a byte;
# for smooth maxima it is a weight. The last op is on the path. From there back to the first op,
# each op on the path marks the operand of its choice. A cost counts for every marked op that uses
# it.
#
# Example: op 2 = max(op 0, op 1 + lag) waited for op 1 in configurations 1 and 3 of eight.
#
#     choice of op 2      0 0 0 0 1 0 1 0     bit i is configuration i, written from the highest
#     path of op 2        1 1 1 1 1 1 1 1     it is the last op
#     path of op 1        0 0 0 0 1 0 1 0     path & choice;    here the lag counts once
#     path of op 0        1 1 1 1 0 1 0 1     path & ~choice
#
# Ops run in reverse. An op's path is in the slot of its value, from the op's last reader, which now
# comes first, to the op itself. The slots of constant operands (nothing, the source) are not read.


def counts_on_path(
    program: ForwardProgram,
    backward: BackwardProgram,
    choices: Array,
    *,
    num_columns: int,
    dtype: np.dtype[Any],
) -> Array:
    """Count how often each cost (columns) is on the critical path of each configuration."""
    is_bits = choices.dtype == jnp.uint8  # eight configurations to a byte
    width = choices.shape[1] // (BITS if is_bits else 1)
    length = min(STRETCH, len(program.code))
    slot = jax.lax.broadcasted_iota(Unsigned, (program.num_slots, width), 0)
    last = jnp.where(slot == program.last, 255 if is_bits else 1, 0).astype(choices.dtype)
    num_stretches = (backward.num_ops + Unsigned(length - 1)) // Unsigned(length)

    def follow(k: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Follow the critical paths back through a stretch of ops, and count the costs on them."""
        state, on_path, counts = carry
        stretch = num_stretches - Unsigned(1) - k
        first = stretch * Unsigned(length)
        end = jnp.minimum(first + Unsigned(length), backward.num_ops)
        state, on_path = _mark_path(program, choices, state, on_path, first, end)
        return state, on_path, _add_counts(program.terms, backward, on_path, counts, stretch)

    on_path = jnp.zeros((2 * length, width), choices.dtype)
    counts = jnp.zeros((num_columns, choices.shape[1]), dtype)
    _, _, counts = for_loop(0, num_stretches, follow, (last, on_path, counts))
    return counts


def _second_shares(choices: Array, op: Array) -> Array:
    """Return the share (1, width) of a path that takes an op's second operand; bits are packed."""
    # Bytes are transposed, from eight ops of a configuration to eight configurations of an op. Bit
    # i of byte j belongs to configuration i * bytes + j: the eighths of a row are put on top of
    # each other, which needs no shuffle across lanes. `_add_counts` unpacks them the same way.
    if choices.dtype != jnp.uint8:
        return take_row(choices, op)
    width = choices.shape[1] // BITS
    row = take_row(choices, op // Unsigned(GROUP))
    mask = (Unsigned(1) << (op % Unsigned(GROUP))).astype(jnp.uint8)
    bits = jnp.zeros((1, width), jnp.uint8)
    for i in range(BITS):
        is_set = row[:, i * width : (i + 1) * width] & mask != 0
        bits |= jax.lax.select(is_set, jnp.full_like(bits, 1 << i), jnp.zeros_like(bits))
    return bits


def _mark_path(
    program: ForwardProgram, choices: Array, state: Array, on_path: Array, first: Array, end: Array
) -> tuple[Array, Array]:
    """Mark the operands of a stretch's ops as on the critical path where the ops are on it."""
    # `state` (slots, width) has a mark by slot, `on_path` (rows, width) by op and second operand.

    def mark_operands(k: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Mark the operands of the op k + 1 places before the end: ops run from last to first."""
        state, on_path, op_mark = carry
        op = end - Unsigned(1) - k
        first_slot, second_slot, slot = (program.code[op, c] for c in range(3))
        row = Unsigned(2) * (op - first)
        # `op_mark` holds the op's row in row 0, as the state is written to below
        op_mark = put_row(op_mark, take_row(state, slot), Unsigned(0))
        # the path goes on over the second operand with `weight`, else over the first; a byte is the
        # marks of 8 configurations: path 0110 and weight 0011 give first 0100 and second 0010
        op_path, weight = take_row(op_mark, Unsigned(0)), _second_shares(choices, op)
        if op_path.dtype == jnp.uint8:
            first_path, second_path = op_path & ~weight, op_path & weight
        else:
            first_path, second_path = op_path * (1 - weight), op_path * weight
        on_path = put_row(on_path, op_path, row)
        on_path = put_row(on_path, second_path, row + Unsigned(1))
        state = put_row(state, take_row(state, second_slot) + second_path, second_slot)
        state = put_row(state, take_row(state, first_slot) + first_path, first_slot)
        return put_row(state, jnp.zeros_like(op_path), slot), on_path, op_mark

    op_mark = jnp.zeros((2, on_path.shape[1]), on_path.dtype)
    state, on_path, _ = for_loop(0, end - first, mark_operands, (state, on_path, op_mark))
    return state, on_path


def _add_counts(
    terms: UIntArray, backward: BackwardProgram, on_path: Array, counts: Array, stretch: Array
) -> Array:
    """Add a stretch's uses of costs to counts (columns, configurations); column 0 is no cost."""
    # A use is a duration of an op, or the lag of its second operand: a row of `on_path` says for
    # which configurations it is on the path. A tally (cost row, first use, end of uses) counts the
    # uses of a cost row, the sum of two columns (`terms[row]`), no more than fit into a byte.
    is_bits = on_path.dtype == jnp.uint8
    # row i takes bit i of every byte, that is configurations i * width to (i + 1) * width - 1 (see
    # `_second_shares`), so the rows one after the other are in the order of the batch
    shape = (BITS if is_bits else 1, on_path.shape[1])
    bit = jnp.uint8(1) << jax.lax.broadcasted_iota(jnp.uint8, shape, 0)

    def add_tally(t: Array, counts: Array) -> Array:
        """Add to the counts of both columns of tally t how many of its uses are on the path."""
        row, first, end = (backward.tallies[t, c] for c in range(3))

        def add_use(k: Array, total: Array) -> Array:
            """Add 1 to the total of each configuration with use k on its critical path."""
            use_path = take_row(on_path, backward.uses[k])  # as bits: 0 0 8 0 adds 0 0 1 0
            return total + (jnp.minimum(use_path & bit, 1) if is_bits else use_path)

        total = for_loop(first, end, add_use, jnp.zeros(shape, on_path.dtype))
        total_row = total.astype(counts.dtype).reshape(1, -1)

        def add_to_column(k: Array, counts: Array) -> Array:
            column = terms[row, k]
            return put_row(counts, take_row(counts, column) + total_row, column)

        has_second = jnp.minimum(terms[row, 1], 1)  # column 0 is no cost
        return for_loop(0, Unsigned(1) + has_second, add_to_column, counts)

    bounds = backward.starts[stretch], backward.starts[stretch + Unsigned(1)]
    return for_loop(*bounds, add_tally, counts)
