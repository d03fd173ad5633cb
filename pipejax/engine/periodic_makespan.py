"""Schedules with very many microbatches, by the max-plus algebra of one period.

A frontier is the set of nodes before a table column for which later nodes wait, and the latest
finish so far. A period maps the finish times of its frontier to those of the next frontier: a
matrix T in the max-plus semiring, whose product adds along paths and keeps the longest. With n more
periods, the finish times are C T^n A, where A and C are the matrices of the columns before and
after the periods. So a million microbatches take some twenty squarings. The eigenvalue of T, the
largest mean weight of a cycle, is the time of every further period.
"""

import functools
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
from pipejax.engine.steady_state import Piece, steady_state

LAST_END_INDEX = 1  # entry of a frontier that holds the latest finish so far
BIT_BLOCK = 8  # numbers of bits are multiples of this: extra products cost less than a compilation

Matrix = Float[Array, "outputs inputs"]
Vector = Float[Array, " frontier"]
Times = Float[Array, " batch"] | Float[NumpyArray, " batch"]


@in_float64
def extrapolated_makespans(
    program: Program, costs: Costs, *, num_microbatches: int, batch_size: int | None = None
) -> Times:
    """Return makespans of a schedule with more microbatches than its program has.

    Args:
      program: lowered schedule with enough microbatches to show its periods, about four times as
        many as workers.
      costs: as for `makespans`: every leaf a scalar, or with a leading batch axis N.
      num_microbatches: M, at least that of the program; the difference must be a multiple of the
        microbatches of a period.
      batch_size: as for `makespans`.

    Returns:
      (batch) makespans [s], in float64 if the costs are not traced.

    Raises:
      ValueError: if the schedule has no periods, they do not add up to M, the costs are wrong as
        for `makespans`, or the times overflow.

    Cost:
      One product of matrices per bit of M. The number of bits is rounded up to bytes, so that one
      compilation serves a range of M. Matrices have about three rows per worker.

    Differentiation:
      Forward and reverse mode with respect to the costs; if paths tie, each counts in part.

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
    steady = steady_state(program)
    num_steps, remainder = divmod(num_microbatches - program.num_microbatches, steady.microbatches)
    if remainder or num_steps < 0:
        raise ValueError(
            f"num_microbatches={num_microbatches}: a period is for {steady.microbatches} "
            f"microbatches, so allowed are {program.num_microbatches}, "
            f"{program.num_microbatches + steady.microbatches}, and so on"
        )
    pieces = [(period.lead_in, period.piece) for period in steady.periods]
    added_microbatches = num_steps * steady.microbatches
    exponents = [added_microbatches // period.microbatches for period in steady.periods]
    # bits, because exponents may exceed JAX's integers; the lowest first: 6 is 0 1 1 0 0 0 0 0
    num_bits = -(-max(exponents).bit_length() // BIT_BLOCK) * BIT_BLOCK
    bits = [[exponent >> bit & 1 for bit in range(num_bits)] for exponent in exponents]
    arguments = pieces, steady.last_piece, np.array(bits, bool)
    return _map_batch(_periodic_makespan, program, costs, batch_size, *arguments)


@in_float64
def cycle_time(program: Program, costs: Costs, *, batch_size: int | None = None) -> Times:
    """Return the cycle time: the time that every further microbatch adds to the makespan.

    Args:
      program: lowered schedule with enough microbatches to show its periods, about four times as
        many as workers.
      costs: as for `makespans`.
      batch_size: as for `makespans`.

    Returns:
      (batch) cycle times [s per microbatch], in float64 if the costs are not traced.

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
    steady = steady_state(program)
    pieces = [period.piece for period in steady.periods]
    microbatches = np.array([period.microbatches for period in steady.periods])
    return _map_batch(_cycle_time, program, costs, batch_size, pieces, microbatches)


def _map_batch(
    function: Callable[..., Float[Array, ""]],
    program: Program,
    costs: Costs,
    batch_size: int | None,
    *arguments: Any,
) -> Float[Array, " batch"]:
    """Return the value of a function of node costs for each configuration of a batch, (batch)."""
    leaves, size = batch_leaves(costs, program.layout, batch_size)
    if costs.per_microbatch(batch_axes=1):
        raise ValueError(
            "costs differ by microbatch, but an op must cost the same in every period: give one "
            "entry per stage"
        )
    program = program_for(program, costs, batch_axes=1)
    return jnp.broadcast_to(_map_leaves(function, program, leaves, *arguments), (size,))


@functools.partial(compiled, static_argnames="function")
def _map_leaves(
    function: Callable[..., Float[Array, ""]], program: Program, leaves: Leaves, *arguments: Any
) -> Float[Array, " #batch"]:
    """Map a function of node costs over the batch axis; configurations share axes of length 1."""
    shared = {name: leaf[0] for name, leaf in leaves.items() if len(leaf) == 1}
    batched = {name: jnp.asarray(leaf) for name, leaf in leaves.items() if len(leaf) > 1}

    def configuration_value(configuration: Leaves) -> Float[Array, ""]:
        costs = unchecked_costs({**shared, **configuration})
        return function(price(program, costs), *arguments)

    return jax.vmap(configuration_value)(batched) if batched else configuration_value({})[None]


def _periodic_makespan(
    costs: NodeCosts,
    pieces: list[tuple[Piece, Piece]],
    last_piece: Piece,
    exponents: Bool[Array, "periods bits"],
) -> Float[Array, ""]:
    """Return the makespan [s]: per period, times = period matrix^exponent @ lead-in @ times."""
    # Products are of the max-plus algebra; `exponents` are bits, the lowest first. `pieces` has
    # each period's lead-in (the columns before it) and one repetition of the period.
    times = jnp.zeros(2, costs.duration.dtype)  # first frontier: the source and no end yet
    for (lead_in, piece), exponent in zip(pieces, exponents, strict=True):
        times = _max_plus_product(_piece_matrix(lead_in, costs), times)
        times = _max_plus_power(_piece_matrix(piece, costs), exponent, times)
    return _max_plus_product(_piece_matrix(last_piece, costs), times)[LAST_END_INDEX]


def _cycle_time(costs: NodeCosts, pieces: list[Piece], microbatches: Array) -> Float[Array, ""]:
    """Return the time [s] per microbatch, summed over periods: each runs every microbatch."""
    means = [_cycle_mean(_piece_matrix(piece, costs)) for piece in pieces]
    return jnp.sum(jnp.stack(means) / microbatches)


def _piece_matrix(piece: Piece, costs: NodeCosts) -> Matrix:
    """Return a piece's max-plus matrix: longest paths [s] from its inputs to its outputs."""
    # `paths` (inputs and nodes, inputs): the longest path from each input. Inputs start as the
    # max-plus identity, 0 on the diagonal and -inf elsewhere; `fill_row` adds the nodes' rows.
    duration, lag = map(jnp.asarray, costs)
    size = piece.num_inputs
    identity = jnp.where(jnp.eye(size, dtype=bool), 0, -jnp.inf).astype(duration.dtype)
    unknown_rows = jnp.full((len(piece.nodes), size), -jnp.inf, identity.dtype)
    paths = jnp.concatenate([identity, unknown_rows])

    def fill_row(paths: Array, node: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        """Set a node's row: the longest paths [s] from all inputs to its end."""
        row, preds, seconds, lags = node
        return paths.at[row].set((paths[preds] + lags[:, None]).max(axis=0) + seconds), None

    nodes = jnp.asarray(piece.nodes)
    rows = size + jnp.arange(len(piece.nodes))
    preds = jnp.asarray(piece.preds)
    paths, _ = jax.lax.scan(fill_row, paths, (rows, preds, duration[nodes], lag[nodes]))
    # an entry of each frontier is the latest finish so far: sinks of this piece may finish later
    ends = jnp.concatenate([paths[LAST_END_INDEX, None], paths[piece.sinks]]).max(axis=0)
    return paths[piece.outputs].at[LAST_END_INDEX].set(ends)


def _max_plus_product(matrix: Matrix, other: Array) -> Array:
    """Return the max-plus product of a matrix with a second matrix or a vector."""
    if other.ndim == 1:
        return (matrix + other[None, :]).max(axis=1)
    return (matrix[:, :, None] + other[None, :, :]).max(axis=1)


def _max_plus_power(matrix: Matrix, exponent: Bool[Array, " bits"], vector: Vector) -> Vector:
    """Multiply a vector by a max-plus matrix power; `exponent` has its bits, the lowest first."""

    def step(carry: tuple[Matrix, Vector], is_set: Array) -> tuple[tuple[Matrix, Vector], None]:
        """Multiply the vector by matrix^(2^bit) if the bit is set; square the matrix power."""
        power, vector = carry
        vector = jnp.where(is_set, _max_plus_product(power, vector), vector)
        return (_max_plus_product(power, power), vector), None

    (_, vector), _ = jax.lax.scan(step, (matrix, vector), exponent)
    return vector


def _cycle_mean(matrix: Matrix) -> Float[Array, ""]:
    """Return the largest mean weight of a cycle of a max-plus matrix, by Karp's theorem."""
    # Theorem: of n nodes, the largest mean is the max over v of the min over k < n of
    # (D_n(v) - D_k(v)) / (n - k), where D_k(v) is the largest weight of a walk of k edges to v.
    # Walks begin at a virtual node with edges of weight 0 to all nodes, so D_0 is 0 everywhere.
    # Without a walk, D_k(v) is -inf and the quotient +inf, which no minimum takes.
    size = len(matrix)

    def extend(weights: Vector, _: None) -> tuple[Vector, Vector]:
        """Compute D_(k + 1) from D_k, and emit D_k."""
        return _max_plus_product(matrix, weights), weights

    final_weights, weights = jax.lax.scan(extend, jnp.zeros(size, matrix.dtype), length=size)
    num_edges = size - jnp.arange(size, dtype=matrix.dtype)
    is_reached = final_weights > -jnp.inf
    means = (jnp.where(is_reached, final_weights, 0)[None, :] - weights) / num_edges[:, None]
    return jnp.where(is_reached, means.min(axis=0), -jnp.inf).max()
