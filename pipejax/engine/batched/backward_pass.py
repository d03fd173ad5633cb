"""The backward pass: which ops are on the critical path, and how often each cost stands on it.

For exact maxima a path is a bit per configuration, eight to a byte; for smooth ones the path is
spread, and a weight takes the place of the bit. The steps are those of reverse mode:

1. the last op is on the path;
2. from the last op to the first, "on the path" goes along the edges that the choices say;
3. a cost counts for every op on the path that uses it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array
from pipejax.engine.batched.interpreted_program import ALWAYS, CHOICE, GROUP, BackwardProgram
from pipejax.engine.batched.single_xla_call import Number, Unsigned, count_up, put_row, take_row

BITS = 8


def counts_on_path(
    terms: Array,
    backward: BackwardProgram,
    choices: Array,
    *,
    num_columns: int,
    dtype: np.dtype[Any],
) -> Array:
    """Count the costs on the critical path of each configuration.

    Returns (columns, configurations) counts; for smooth maxima, fractional ones.
    """
    exact = choices.dtype == jnp.uint8
    weights = _bit_rows(choices, backward.num_ops) if exact else choices
    path = _path(backward, weights)
    return _counts(terms, backward, weights, path, num_columns, dtype)


def _bit_rows(choices: Array, num_ops: Number) -> Array:
    """Transpose bytes: from eight ops of a configuration to eight configurations of an op.

    Bit i of byte j belongs to configuration i * bytes + j: the eighths of a row are put on top of
    each other, which needs no shuffle across lanes. `_counts` unpacks them the same way.
    """
    width = choices.shape[1] // BITS

    def step(k: Array, rows: Array) -> Array:
        row = take_row(choices, k // Unsigned(GROUP))
        mask = (Unsigned(1) << (k % Unsigned(GROUP))).astype(jnp.uint8)
        bits = jnp.zeros((1, width), jnp.uint8)
        for i in range(BITS):
            is_set = row[:, i * width : (i + 1) * width] & mask != 0
            bits |= jax.lax.select(is_set, jnp.full_like(bits, 1 << i), jnp.zeros_like(bits))
        return put_row(rows, bits, k)

    empty = jnp.zeros((len(choices) * GROUP, width), jnp.uint8)
    return count_up(0, num_ops, step, empty)


def _share(path: Array, weight: Array, says: Array) -> Array:
    """Part (lanes) of a path that follows a choice, its opposite, or both."""
    if path.dtype == jnp.uint8:
        # weight ^ 0 is the choice, weight ^ 255 its opposite, and "always" sets all bits
        always = jnp.where(says == ALWAYS, 255, 0).astype(jnp.uint8)
        opposite = jnp.where(says == CHOICE, 0, 255).astype(jnp.uint8)
        return path & ((weight ^ opposite) | always)
    # weight, 1 - weight or 1, as a straight line
    slope = jnp.where(says == ALWAYS, 0, jnp.where(says == CHOICE, 1, -1)).astype(path.dtype)
    start = jnp.where(says == CHOICE, 0, 1).astype(path.dtype)
    return path * (start + slope * weight)


def _path(backward: BackwardProgram, weights: Array) -> Array:
    """Propagate "is on the critical path" from the last op back along the edges: (ops, lanes).

    An op's readers all come after it, so its own bit is complete when its edges are reached. With
    exact maxima at most one reader sets the bit, since a configuration has one path: adding is the
    same as setting.
    """
    on = weights.dtype.type(255 if weights.dtype == jnp.uint8 else 1)

    def step(e: Array, path: Array) -> Array:
        reader, read, says = (backward.edges[e, c] for c in range(3))
        share = _share(take_row(path, reader), take_row(weights, reader), says)
        return put_row(path, take_row(path, read) + share, read)

    op = jax.lax.broadcasted_iota(Unsigned, weights.shape, 0)
    start = jnp.where(op == backward.num_ops - Unsigned(1), on, on * 0)
    return count_up(0, backward.num_edges, step, start)


def _counts(
    terms: Array,
    backward: BackwardProgram,
    weights: Array,
    path: Array,
    num_columns: int,
    dtype: np.dtype[Any],
) -> Array:
    """Add up the uses of each column, by rows: (columns, configurations); 0 is no cost.

    Bits are counted in bytes, a run of uses of one row at a time, and no run is longer than a byte
    can count; runs are added up in the wider type of the result.
    """
    is_bits = weights.dtype == jnp.uint8
    # row i of the parts takes bit i of every byte, that is configurations i * width to (i + 1) *
    # width - 1 (see `_bit_rows`), so the parts in a row are in the order of the batch
    parts = (BITS if is_bits else 1, weights.shape[1])
    bit = jnp.uint8(1) << jax.lax.broadcasted_iota(jnp.uint8, parts, 0)

    def run(r: Array, counts: Array) -> Array:
        row, first, end = (backward.runs[r, c] for c in range(3))

        def use(k: Array, total: Array) -> Array:
            op, says = backward.uses[k, 0], backward.uses[k, 1]
            share = _share(take_row(path, op), take_row(weights, op), says)
            return total + (jnp.minimum(share & bit, 1) if is_bits else share)

        total = count_up(first, end, use, jnp.zeros(parts, weights.dtype))
        new = total.astype(dtype).reshape(1, -1)

        def term(k: Array, counts: Array) -> Array:
            column = terms[row, k]
            return put_row(counts, take_row(counts, column) + new, column)

        return count_up(0, 2, term, counts)

    empty = jnp.zeros((num_columns, parts[0] * parts[1]), dtype)
    return count_up(0, backward.num_runs, run, empty)
