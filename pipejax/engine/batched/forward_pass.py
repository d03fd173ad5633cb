"""The forward pass: values of all ops of a program, and which operand each waited for.

A tile is a row of configurations. Its state is a matrix, one row for each buffer slot of the
program; an op reads two rows, adds rows of costs and writes one row. The program is data: the rows
an op reads stands in `code`, so one compilation serves all programs of a bucket of sizes.

How the loops are written decides how fast they are. XLA updates a carried buffer in place only if
nothing reads the old buffer after the write; where it cannot tell, it copies all of it, every time.
So a tile's buffers are carried from tile to tile instead of made anew, every write is one row, and
where reads and writes of one buffer meet, a made-up dependence puts them in order (see `_run`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array
from pipejax.engine.batched.binary_program import NEVER_SLOT
from pipejax.engine.batched.interpreted_program import GROUP, ForwardProgram, Task
from pipejax.engine.batched.single_xla_call import Unsigned, count_up, put_row, take_row

Carry = tuple[Array, Array, Array, Array, Array]  # values, choices, columns, cost, state


def values_and_choices(
    task: Task, pieces: tuple[Array, ...], first: Array, *, tiles: tuple[int, int]
) -> tuple[Array, Array]:
    """Run a program over tiles of lanes, from the first configuration on.

    Returns (tiles, lanes) makespans [s], and the choices for a backward pass: for exact maxima
    (groups, tiles, lanes) bytes, whose bits tell which of `GROUP` ops waited for their second
    operand; for smooth ones (ops, tiles, lanes) weights of the second operand.
    """
    program, keep, exact = task.forward, task.backward is not None, task.temperature is None
    dtype, (_, lanes) = pieces[0].dtype, tiles
    rows = len(program.code) // GROUP if exact else len(program.code)
    num_columns = 1 + sum(piece.shape[1] for piece in pieces)

    def tile(t: Array, carry: Carry) -> Carry:
        values, choices, columns, cost, state = carry
        columns = _columns(columns, pieces, first + t * Unsigned(lanes))
        cost = _cost(cost, program, columns)
        state, choices = _run(task, cost, state, choices, t)
        return put_row(values, take_row(state, program.last), t), choices, columns, cost, state

    # what a tile needs is made once, and written over by the next one
    slot = jax.lax.broadcasted_iota(np.int32, (program.num_slots, lanes), 0)
    empty = functools.partial(jnp.zeros, dtype=dtype)
    start = (
        empty(tiles),
        jnp.zeros((rows if keep else 1, *tiles), jnp.uint8 if exact else dtype),
        empty((num_columns, lanes)),
        empty((len(program.terms), lanes)),
        jnp.where(slot == NEVER_SLOT, -jnp.inf, 0).astype(dtype),
    )
    values, choices, *_ = count_up(0, tiles[0], tile, start)
    return values, choices


def _columns(columns: Array, pieces: tuple[Array, ...], first: Array) -> Array:
    """Fill in the cost columns of a tile: (columns, lanes) [s], the first of zeros."""
    lanes, before = columns.shape[1], 1
    for piece in pieces:

        def entry(e: Array, columns: Array, piece: Array = piece, before: int = before) -> Array:
            if len(piece) > 1:
                column = jax.lax.dynamic_slice(piece, (first, e), (lanes, 1)).reshape(1, lanes)
            else:
                column = jax.lax.dynamic_slice(piece, (Unsigned(0), e), (1, 1))
                column = jnp.broadcast_to(column, (1, lanes))
            return put_row(columns, column, e + Unsigned(before))

        columns = count_up(0, piece.shape[1], entry, columns)
        before += piece.shape[1]
    return columns


def _cost(cost: Array, program: ForwardProgram, columns: Array) -> Array:
    """Fill in the cost rows of a tile, each a sum of two columns: (rows, lanes) [s]."""

    def step(r: Array, cost: Array) -> Array:
        one, other = (take_row(columns, program.terms[r, k]) for k in range(2))
        return put_row(cost, one + other, r)

    return count_up(0, program.num_rows, step, cost)


def _run(task: Task, cost: Array, state: Array, choices: Array, t: Array) -> tuple[Array, Array]:
    """Run a tile: (slots, lanes) values [s], and the choices with those of the tile.

    No op writes the slot of its own operand (`binary_program` sees to that), so an op's reads and
    its write never mean the same row. An iteration runs a group of ops, as many as a byte has bits.
    """
    program, keep, temperature = task.forward, task.backward is not None, task.temperature
    kept = jnp.zeros((GROUP + 1, cost.shape[1]), bool if temperature is None else cost.dtype)

    def group(g: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, choices, kept = carry
        for u in range(GROUP):
            k = g * Unsigned(GROUP) + Unsigned(u)
            first, second, slot, lag, own = (program.code[k, c] for c in range(5))
            one = take_row(state, first)
            other = take_row(state, second) + take_row(cost, lag)
            value, weight = _maximum(one, other, temperature)
            if keep:
                # The last row of `kept` stays zero. Added to the index of the write it makes the
                # write wait for `kept`, thus for the choice, which has read the state by then:
                # otherwise XLA might write first, and copy the state for the choice to read.
                kept = put_row(kept, weight, Unsigned(u))
                slot = slot + kept[GROUP, 0].astype(Unsigned)
            state = put_row(state, value + take_row(cost, own), slot)
        return state, _enter(choices, kept, g, t) if keep else choices, kept

    state, choices, _ = count_up(0, program.num_groups, group, (state, choices, kept))
    return state, choices


def _enter(choices: Array, kept: Array, g: Array, t: Array) -> Array:
    """Store the choices of a group: exact ones as the bits of a byte."""
    if kept.dtype == bool:
        bits = [kept[u].astype(jnp.uint8) << u for u in range(GROUP)]
        entered, first = functools.reduce(jax.lax.bitwise_or, bits)[None], g
    else:
        entered, first = kept[:GROUP], g * Unsigned(GROUP)
    return jax.lax.dynamic_update_slice(choices, entered[:, None], (first, t, Unsigned(0)))


def _maximum(one: Array, other: Array, temperature: Array | float | None) -> tuple[Array, Array]:
    """Maximum (1, lanes) [s] of two operands, and the weight of the second.

    The second wins only if it is larger. Operands come in the order of a node's predecessors, so
    over a chain of such maxima the first predecessor that attains the maximum wins, as in
    `recurrence`.
    """
    if temperature is None:
        second_wins = other > one
        return jax.lax.select(second_wins, other, one), second_wins
    gap = other - one
    smooth = jnp.maximum(one, other) + temperature * jnp.log1p(jnp.exp(-jnp.abs(gap) / temperature))
    return smooth, jax.nn.sigmoid(gap / temperature)
