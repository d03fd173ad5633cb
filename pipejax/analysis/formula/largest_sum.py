"""The value of a closed form: the largest of some sums, under NumPy and under JAX.

At a border the first facet wins, so that the derivative is the counts of one facet, as that of the
recurrence is the counts of one path.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array
from pipejax.costs.precision import float_type, handed_over, is_traced, known

WORTH_COMPILING = 10**6  # multiplications below which NumPy has the answer before XLA has begun

Facets = tuple[tuple[float, ...], ...]


def largest_sum(facets: Facets, values: Sequence[Any]) -> Any:
    """Largest of the facets' sums of counts times values, which are numbers or arrays alike.

    Numbers are added in float64, arrays of float32 in float32, as makespans are.
    """
    dtype = float_type(*values)
    if is_traced(*values):
        return _largest(facets, tuple(jnp.asarray(value, dtype) for value in values))
    shape = np.broadcast_shapes(*(np.shape(value) for value in values))
    if math.prod(shape) * len(facets) < WORTH_COMPILING:
        arrays = [np.asarray(value, dtype) for value in values]
        found = np.broadcast_to(functools.reduce(np.maximum, _sums(facets, arrays)), shape)
        return found.copy() if shape else found.item()
    with jax.core.eval_context(), known(dtype):
        found = _compiled(facets, tuple(_as(dtype, value) for value in values))
        return handed_over(jax.block_until_ready(found))  # nothing reads the arrays any more


def _as(dtype: np.dtype, value: Any) -> Any:
    """A value in a type, without a copy where it has it."""
    return value.astype(dtype) if isinstance(value, jax.Array) else np.asarray(value, dtype)


def _sums(facets: Facets, values: Sequence[Any]) -> list[Any]:
    """Sum up facet by facet, in the order of the parameters; what counts 0 is left out."""
    return [
        sum(count * value for count, value in zip(counts, values, strict=True) if count)
        for counts in facets
    ]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _largest(facets: Facets, values: tuple[Array, ...]) -> Array:
    shape = jnp.broadcast_shapes(*(value.shape for value in values))
    return jnp.broadcast_to(functools.reduce(jnp.maximum, _sums(facets, values)), shape)


@_largest.defjvp
def _largest_jvp(
    facets: Facets, primals: tuple[tuple[Array, ...]], tangents: tuple[tuple[Array, ...]]
) -> tuple[Array, Array]:
    largest, *others = _sums(facets, primals[0])
    moves, *moved = _sums(facets, tangents[0])
    for other, move in zip(others, moved, strict=True):
        moves = jnp.where(other > largest, move, moves)
        largest = jnp.maximum(largest, other)
    value = _largest(facets, primals[0])
    return value, jnp.broadcast_to(jnp.asarray(moves, value.dtype), value.shape)


_compiled = functools.partial(jax.jit, static_argnums=0)(_largest)
