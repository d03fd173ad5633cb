"""The value of a closed form, the largest of its sums (facets), computed by JAX for many values.

If several facets are equally large, the derivative is the counts of the first one. The derivative
of the recurrence is the counts of a single path, too.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.analysis.formula.facets import Facets, facet_sums
from pipejax.base.array_types import Array
from pipejax.base.compiled import compiled
from pipejax.costs.precision import accept_type, float_type, is_traced, to_output_dtype


def largest_sum(facets: Facets, values: Sequence[Any]) -> Any:
    """Return the largest facet: the maximum over facets of the sum of counts times values."""
    dtype = float_type(*values)
    if is_traced(*values):
        return _largest(facets, tuple(jnp.asarray(value, dtype) for value in values))
    with jax.core.eval_context(), accept_type(dtype):
        # no copy of an array that has the type
        arrays = (x if isinstance(x, jax.Array) else np.asarray(x) for x in values)
        largest = _compiled(facets, tuple(array.astype(dtype, copy=False) for array in arrays))
        return to_output_dtype(jax.block_until_ready(largest))  # so the arrays can be freed


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _largest(facets: Facets, values: tuple[Array, ...]) -> Array:
    shape = jnp.broadcast_shapes(*(value.shape for value in values))
    largest = functools.reduce(jnp.maximum, facet_sums(facets, values))
    return jnp.broadcast_to(jnp.asarray(largest, values[0].dtype), shape)  # a facet of zeros is 0


@_largest.defjvp
def _largest_jvp(
    facets: Facets, primals: tuple[tuple[Array, ...]], tangents: tuple[tuple[Array, ...]]
) -> tuple[Array, Array]:
    """Return the largest sum, and the tangent of the first facet that reaches this sum."""
    largest, *other_sums = facet_sums(facets, primals[0])
    tangent, *other_tangents = facet_sums(facets, tangents[0])
    for other_sum, other_tangent in zip(other_sums, other_tangents, strict=True):
        tangent = jnp.where(other_sum > largest, other_tangent, tangent)
        largest = jnp.maximum(largest, other_sum)
    value = _largest(facets, primals[0])  # not `largest`: second derivatives follow this rule too
    return value, jnp.broadcast_to(jnp.asarray(tangent, value.dtype), value.shape)


_compiled = functools.partial(compiled, static_argnums=0)(_largest)
