"""Schedules with very many microbatches, by the max-plus algebra of one period.

A period maps the finish times of its frontier to those of the next one: a matrix T in the max-plus
semiring, where a product adds along paths and takes the longest. The makespan with n
more periods is rest T^n before, so a million microbatches are some twenty squarings. The largest
mean weight of a cycle of T, its eigenvalue, is the time that every further period takes.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Bool, Float, NumpyArray
from pipejax.base.checks import check_types, whole_number
from pipejax.base.compiled import compiled
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.costs.precision import in_float64
from pipejax.engine.batched.cost_rows import Leaves, batch_leaves
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import NodeCosts, price, program_for
from pipejax.engine.steady_state import Piece, SteadyState, steady_state

ENDS_PLACE = 1  # of a frontier: the last end so far
BITS = 8  # of M at a time: a compilation takes longer than products of matrices to spare

Matrix = Float[Array, "outputs inputs"]
Vector = Float[Array, " frontier"]
Times = Float[Array, " batch"] | Float[NumpyArray, " batch"]

_steady_states: weakref.WeakKeyDictionary[Program, SteadyState] = weakref.WeakKeyDictionary()


@in_float64
def extrapolated_makespans(
    program: Program, costs: Costs, *, num_microbatches: int, batch_size: int | None = None
) -> Times:
    """Makespans of the same schedule with more microbatches than it was lowered with.

    Args:
      program: lowered schedule, of enough microbatches to show its periods, say four times as
        many as workers.
      costs: as for `makespans`: every leaf a scalar, or with a leading batch axis N.
      num_microbatches: M, that of the program or more; where a period is for more than one
        microbatch, more by a multiple of that.
      batch_size: as for `makespans`.

    Returns:
      (batch) makespans [s]: float64 where the costs are not traced.

    Raises:
      ValueError: if the schedule has no periods, they do not add up to M, the costs are wrong as
        for `makespans`, or the times overflow.

    Cost:
      A product of matrices for every bit of M, whose bits are rounded up to bytes: one
      compilation serves a range of M. The size of the matrices is the number of finish times that
      are live between two periods, some three per worker.

    Differentiation:
      Forward and reverse mode with respect to the costs; where paths tie, each counts in part.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=32)
      >>> costs = pj.Costs(forward=1.0, backward=2.0)
      >>> program = pj.lower(table)
      >>> pj.analysis.extrapolated_makespans(program, costs, num_microbatches=10**6).tolist()
      [3000021.0]

    References:
      Baccelli, Cohen, Olsder, Quadrat: Synchronization and Linearity (1992), chapter 3.
    """
    check_types(program=(program, Program), costs=(costs, Costs))
    costs.check_values()
    num_microbatches = whole_number(num_microbatches, "num_microbatches")
    steady = _steady_state(program)
    more, remainder = divmod(num_microbatches - program.num_microbatches, steady.microbatches)
    if remainder or more < 0:
        raise ValueError(
            f"num_microbatches={num_microbatches}: a period is for {steady.microbatches} "
            f"microbatches, so allowed are {program.num_microbatches}, "
            f"{program.num_microbatches + steady.microbatches}, and so on"
        )
    pieces = [(period.before, period.piece) for period in steady.periods]
    times = [more * steady.microbatches // period.microbatches for period in steady.periods]
    # in binary, the lowest bit first: no integer type of JAX holds all numbers
    width = -(-max(times).bit_length() // BITS) * BITS
    bits = np.array([[number >> bit & 1 for bit in range(width)] for number in times], bool)
    return _map_batch(_last_end, program, costs, batch_size, pieces, steady.rest, bits)


@in_float64
def cycle_time(program: Program, costs: Costs, *, batch_size: int | None = None) -> Times:
    """Cycle time: what every further microbatch adds to the makespan.

    Args:
      program: lowered schedule, of enough microbatches to show its periods, say four times as
        many as workers.
      costs: as for `makespans`.
      batch_size: as for `makespans`.

    Returns:
      (batch) cycle times [s per microbatch]: float64 where the costs are not traced.

    Raises:
      ValueError: if the schedule has no periods, or the costs are wrong as for `makespans`.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=16)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=np.array([0.0, 1.5]))
      >>> pj.cycle_time(pj.lower(table), costs).tolist()  # slow messages delay every microbatch
      [3.0, 5.25]

    References:
      Karp: A characterization of the minimum cycle mean in a digraph (1978).
    """
    check_types(program=(program, Program), costs=(costs, Costs))
    costs.check_values()
    steady = _steady_state(program)
    pieces = [period.piece for period in steady.periods]
    microbatches = np.array([period.microbatches for period in steady.periods])
    return _map_batch(_cycle_time, program, costs, batch_size, pieces, microbatches)


def _steady_state(program: Program) -> SteadyState:
    if program not in _steady_states:
        _steady_states[program] = steady_state(program)
    return _steady_states[program]


def _map_batch(
    function: Callable[..., Float[Array, ""]],
    program: Program,
    costs: Costs,
    batch_size: int | None,
    *arguments: Any,
) -> Float[Array, " batch"]:
    """Map a function of node costs, and of what else is given, over a batch of costs."""
    leaves, size = batch_leaves(costs, program.layout, batch_size)
    if costs.per_microbatch(batch_axes=1):
        raise ValueError(
            "costs differ by microbatch: what repeats with every period must cost the same, give "
            "one entry per stage"
        )
    program = program_for(program, costs, batch_axes=1)
    return jnp.broadcast_to(_mapped(function, program, leaves, *arguments), (size,))


@functools.partial(compiled, static_argnames="function")
def _mapped(
    function: Callable[..., Float[Array, ""]], program: Program, leaves: Leaves, *arguments: Any
) -> Float[Array, " batch"]:
    """Map over the batch; a leaf that all share stays as it is."""
    shared = {name: leaf[0] for name, leaf in leaves.items() if len(leaf) == 1}
    batched = {name: jnp.asarray(leaf) for name, leaf in leaves.items() if len(leaf) > 1}

    def solve(row: Leaves) -> Float[Array, ""]:
        return function(price(program, unchecked_costs({**shared, **row})), *arguments)

    return jax.vmap(solve)(batched) if batched else solve({})[None]


def _last_end(
    costs: NodeCosts, pieces: list[tuple[Piece, Piece]], rest: Piece, bits: Bool[Array, "periods _"]
) -> Float[Array, ""]:
    ends = jnp.zeros(2, costs.duration.dtype)  # the source, and no sink so far
    for k, (before, piece) in enumerate(pieces):
        ends = _times(_matrix(before, costs), ends)
        ends = _power(_matrix(piece, costs), bits[k], ends)
    return _times(_matrix(rest, costs), ends)[ENDS_PLACE]


def _cycle_time(costs: NodeCosts, pieces: list[Piece], microbatches: Array) -> Float[Array, ""]:
    means = [_cycle_mean(_matrix(piece, costs)) for piece in pieces]
    return jnp.sum(jnp.stack(means) / microbatches)


def _matrix(piece: Piece, costs: NodeCosts) -> Matrix:
    """Max-plus matrix of a piece: longest paths [s] from the frontier before to the one after."""
    # Row i holds the longest paths to place i, column j those from input j. The inputs start as the
    # max-plus identity, 0 on the diagonal and -inf elsewhere; the recurrence then runs on rows.
    duration, lag = map(jnp.asarray, costs)
    size = piece.num_inputs
    unit = jnp.where(jnp.eye(size, dtype=bool), 0, -jnp.inf).astype(duration.dtype)
    values = jnp.concatenate([unit, jnp.full((len(piece.nodes), size), -jnp.inf, unit.dtype)])

    def step(values: Array, inputs: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        place, before, seconds, lags = inputs
        return values.at[place].set((values[before] + lags[:, None]).max(axis=0) + seconds), None

    nodes = jnp.asarray(piece.nodes)
    places = size + jnp.arange(len(piece.nodes))
    preds = jnp.asarray(piece.preds)
    values, _ = jax.lax.scan(step, values, (places, preds, duration[nodes], lag[nodes]))
    # one place of the frontier is no node but the last end so far, to which the sinks are added
    ends = jnp.concatenate([values[ENDS_PLACE, None], values[piece.sinks]]).max(axis=0)
    return values[piece.outputs].at[ENDS_PLACE].set(ends)


def _times(first: Matrix, second: Array) -> Array:
    """Max-plus product of a matrix and a matrix or vector."""
    if second.ndim == 1:
        return (first + second[None, :]).max(axis=1)
    return (first[:, :, None] + second[None, :, :]).max(axis=1)


def _power(matrix: Matrix, exponent: Bool[Array, " bits"], vector: Vector) -> Vector:
    """Max-plus product of a power of a matrix and a vector, by repeated squaring."""

    def step(carry: tuple[Matrix, Vector], is_set: Array) -> tuple[tuple[Matrix, Vector], None]:
        square, vector = carry
        vector = jnp.where(is_set, _times(square, vector), vector)
        return (_times(square, square), vector), None

    (_, vector), _ = jax.lax.scan(step, (matrix, vector), exponent)
    return vector


def _cycle_mean(matrix: Matrix) -> Float[Array, ""]:
    """Largest mean weight of a cycle: Karp's theorem, from all nodes at once."""
    # max over v of min over k < n of (D_n(v) - D_k(v)) / (n - k), D_k(v) being the largest weight
    # of a walk of k edges that ends at v. Karp lets all walks begin at one node that reaches all
    # others; a virtual one with edges of weight 0 does, so D_0 is 0 everywhere. Where there is no
    # walk, D_k(v) is -inf and the quotient +inf, which no minimum takes.
    size = len(matrix)

    def step(ends: Vector, _: None) -> tuple[Vector, Vector]:
        return _times(matrix, ends), ends

    last, walks = jax.lax.scan(step, jnp.zeros(size, matrix.dtype), length=size)
    edges = size - jnp.arange(size, dtype=matrix.dtype)
    reached = last > -jnp.inf
    slope = (jnp.where(reached, last, 0)[None, :] - walks) / edges[:, None]
    return jnp.where(reached, slope.min(axis=0), -jnp.inf).max()
