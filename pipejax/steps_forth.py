"""The way forth: values of all ops of a program, and which operand each waited for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.binary_ops import NEVER_SLOT
from pipejax.one_function import Unsigned, count_up, one_function, put_row, take_row
from pipejax.shapes import Array
from pipejax.step_program import GROUP, StepProgram

Carry = tuple[Array, Array]


def values_and_choices(
    program: StepProgram, tiles: Array, heat: Array | None, *, keep: bool
) -> tuple[Array, Array]:
    """Run a program over tiles of configurations, one after the other.

    Args:
      program: the program as data.
      tiles: (tiles, columns, lanes) costs [s].
      heat: temperature of smooth maxima, exact ones if None [s].
      keep: whether to keep the choices.

    Returns:
      (tiles, lanes) makespans [s], and the choices if kept: of exact maxima (groups, tiles,
      lanes) bytes, whose bits say which of `GROUP` ops waited for their second operand; of smooth
      ones (ops, tiles, lanes) weights of the second operand.

    Example:
      >>> import pipejax as pj
      >>> from pipejax.binary_ops import binary_ops
      >>> from pipejax.cost_rows import cost_rows
      >>> from pipejax.step_program import cost_columns, step_program
      >>> program = pj.lower(pj.schedules.build("gpipe", num_workers=2, num_microbatches=2))
      >>> rows = cost_rows(program, pj.Costs())
      >>> F, B = (1 + cost_columns(rows).index((name, 0)) for name in ("forward", "backward"))
      >>> tiles = np.zeros((1, 64, 2))
      >>> tiles[:, F], tiles[:, B] = [1, 2], 2
      >>> steps = step_program(binary_ops(program), rows)
      >>> values_and_choices(steps, jnp.asarray(tiles), None, keep=False)[0].tolist()
      [[9.0, 12.0]]
    """
    exact = heat is None
    rows = len(program.code) // GROUP if exact else len(program.code)
    shape = (rows if keep else 1, tiles.shape[0], tiles.shape[2])

    def loops(program: StepProgram, tiles: Array, heat: Array) -> Carry:
        choices = jnp.zeros(shape, jnp.uint8 if exact else tiles.dtype)
        values = jnp.zeros((tiles.shape[0], tiles.shape[2]), tiles.dtype)

        def tile(t: Array, carry: Carry) -> Carry:
            values, choices = carry
            cost = _cost(program, tiles, t)
            end, choices = _run(program, cost, choices, t, None if exact else heat, keep)
            return put_row(values, end, t), choices

        return count_up(0, len(tiles), tile, (values, choices))

    heat = jnp.asarray(0 if heat is None else heat, tiles.dtype)
    return one_function(loops)(jax.tree.map(jnp.asarray, program), tiles, heat)


def _cost(program: StepProgram, tiles: Array, t: Array) -> Array:
    """Costs of a tile: (rows, lanes)."""
    size = (1, 1, tiles.shape[2])

    def column(index: Array) -> Array:
        return jax.lax.dynamic_slice(tiles, (t, index, Unsigned(0)), size)[0]

    def step(r: Array, cost: Array) -> Array:
        return put_row(cost, column(program.terms[r, 0]) + column(program.terms[r, 1]), r)

    empty = jnp.zeros((len(program.terms), tiles.shape[2]), tiles.dtype)
    return count_up(0, program.num_rows, step, empty)


def _run(
    program: StepProgram, cost: Array, choices: Array, t: Array, heat: Array | None,
    keep: bool,
) -> Carry:  # fmt: skip
    """Makespans of a tile (1, lanes), and the choices with its own entered."""
    lanes = cost.shape[1]
    kept = jnp.zeros((GROUP + 1, lanes), bool if heat is None else cost.dtype)

    def group(g: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, choices, kept = carry
        for u in range(GROUP):
            k = g * Unsigned(GROUP) + Unsigned(u)
            first, second, slot, lag, own = (program.code[k, c] for c in range(5))
            one = take_row(state, first)
            other = take_row(state, second) + take_row(cost, lag)
            value, weight = _maximum(one, other, heat)
            if keep:
                # the last row stays zero; where it is added to an index, XLA writes the value
                # after the choice has read the state, which it would copy otherwise
                kept = put_row(kept, weight, Unsigned(u))
                slot = slot + kept[GROUP, 0].astype(Unsigned)
            state = put_row(state, value + take_row(cost, own), slot)
        return state, _enter(choices, kept, g, t) if keep else choices, kept

    slot = jax.lax.broadcasted_iota(np.int32, (program.num_slots, lanes), 0)
    start = jnp.where(slot == NEVER_SLOT, -jnp.inf, 0).astype(cost.dtype)
    state, choices, _ = count_up(0, program.num_groups, group, (start, choices, kept))
    return take_row(state, program.last), choices


def _enter(choices: Array, kept: Array, g: Array, t: Array) -> Array:
    """Enter the choices of a group: exact ones as the bits of a byte."""
    if kept.dtype == bool:
        bits = [kept[u].astype(jnp.uint8) << u for u in range(GROUP)]
        packed = functools.reduce(jax.lax.bitwise_or, bits)[None, None]
        return jax.lax.dynamic_update_slice(choices, packed, (g, t, Unsigned(0)))
    place = (g * Unsigned(GROUP), t, Unsigned(0))
    return jax.lax.dynamic_update_slice(choices, kept[:GROUP, None], place)


def _maximum(one: Array, other: Array, heat: Array | None) -> tuple[Array, Array]:
    """Maximum of two operands, and the weight of the second; at a tie the first one wins."""
    if heat is None:
        second_wins = other > one
        return jax.lax.select(second_wins, other, one), second_wins
    gap = other - one
    smooth = jnp.maximum(one, other) + heat * jnp.log1p(jnp.exp(-jnp.abs(gap) / heat))
    return smooth, jax.nn.sigmoid(gap / heat)
