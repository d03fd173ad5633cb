"""A batch cut into blocks whose state fits into cache, one after the other in one loop."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.shapes import Array, Int

Result = TypeVar("Result")


def in_blocks(solve: Callable[[Int[Array, ""]], Result], *, size: int, block: int) -> Result:
    """Solve a batch block by block.

    Args:
      solve: takes the start of a block, returns arrays whose last axis is the block.
      size: configurations in the batch.
      block: configurations in a block, at most `size`; the last block does some again where
        blocks do not divide the batch.

    Returns:
      Arrays whose last axis is the batch.

    Example:
      >>> twice = lambda at: 2 * (at + jnp.arange(4))
      >>> in_blocks(twice, size=6, block=4).tolist()
      [0, 2, 4, 6, 8, 10]
    """
    shapes = jax.eval_shape(solve, np.int32(0))
    whole = jax.tree.map(lambda s: jnp.zeros((*s.shape[:-1], size), s.dtype), shapes)

    def step(k: Int[Array, ""], done: Result) -> Result:
        at = jnp.minimum(k * block, size - block)
        return jax.tree.map(
            lambda all_, part: jax.lax.dynamic_update_slice_in_dim(all_, part, at, -1),
            done, solve(at),
        )  # fmt: skip

    return jax.lax.fori_loop(0, -(-size // block), step, whole)
