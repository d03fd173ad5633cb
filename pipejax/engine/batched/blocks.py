"""A batch cut into blocks whose state fits into cache, one after the other in one loop."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Int

Result = TypeVar("Result")


def in_blocks(solve: Callable[[Int[Array, ""]], Result], *, size: int, block: int) -> Result:
    """Solve a batch block by block."""
    shapes = jax.eval_shape(solve, np.int32(0))
    whole = jax.tree.map(lambda s: jnp.zeros((*s.shape[:-1], size), s.dtype), shapes)

    def step(k: Int[Array, ""], done: Result) -> Result:
        at = jnp.minimum(k * block, size - block)
        return jax.tree.map(
            lambda all_, part: jax.lax.dynamic_update_slice_in_dim(all_, part, at, -1),
            done,
            solve(at),
        )

    return jax.lax.fori_loop(0, -(-size // block), step, whole)
