"""The random choices of training runs: they depend on the seed and the number of a gradient only.

Stages, batches and delays of Randomized PipeDream are made from random bits by whole-number
arithmetic, so they are the same in single and in double precision, alone and in a batch, and runs
of one seed with different delays see the same stages and batches. Gradient noise is drawn in single
precision and widened: the same up to rounding. Whatever the step size, a seed has the same choices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax.base.array_types import Array, Float, Int, NumpyArray, UInt
from pipejax.base.checks import is_number, whole_number, wrong
from pipejax.base.display import short_repr

CIPHER = "threefry2x32"
LARGEST_COUNT = 1 << 16  # that 32 bits are scaled to without a carry
Whole = Int[Array, ""] | UInt[Array, ""]
Delays = Int[Array, ""] | Int[Array, "stages samples stages"]


@short_repr
class Draw(NamedTuple):
    """Reads and writes of one update.

    Attributes:
      stage: whose block is updated.
      batch: index of the batch.
      read: (stages) number of the model, counted in updates, that each block is read from.

    Example:
      >>> import pipejax as pj
      >>> first = pj.training.draw(0, 0, num_stages=4, num_batches=60, delays=30)
      >>> first.read.tolist()  # nothing is older than the start
      [0, 0, 0, 0]
    """

    stage: Int[Array, ""]
    batch: Int[Array, ""]
    read: Int[Array, " stages"]


def draw(
    seed: Whole | int,
    update: Whole | int,
    *,
    num_stages: int,
    num_batches: int,
    delays: Delays | Int[NumpyArray, "..."] | int,
) -> Draw:
    """Draw the choices of one update.

    Args:
      seed: of the run; may be traced.
      update: its number k, from 0; may be traced.
      num_stages: S, at most 65534.
      num_batches: number of batches, at most 65536.
      delays: either delta: every block is read from a model drawn from max(0, k - delta) to k,
        each on its own. Or (stages, samples, stages): for the stage that is updated, one sample is
        drawn, the delays of all blocks; a delay d reads model max(0, k - d). All may be traced.

    Returns:
      The choices, each uniform up to one part in 2^32 per value.

    Example:
      >>> import pipejax as pj
      >>> table = np.zeros((2, 3, 2), np.int32)
      >>> table[0], table[1] = 1, [0, 2]
      >>> options = {"num_stages": 2, "num_batches": 5, "delays": table}
      >>> drawn = [pj.training.draw(0, k, **options) for k in range(6)]
      >>> [(int(one.stage), one.read.tolist()) for one in drawn]
      [(1, [0, 0]), (1, [1, 0]), (0, [1, 1]), (1, [3, 1]), (1, [4, 2]), (0, [4, 4])]
    """
    bits = _bits(jnp.uint32(seed), jnp.uint32(update), num_stages + 2)
    stage = below(bits[0], jnp.asarray(num_stages))
    update, delays = jnp.asarray(update, jnp.int32), jnp.asarray(delays, jnp.int32)
    if delays.ndim:
        sample = below(bits[2], jnp.asarray(delays.shape[1]))
        delay = delays[stage, sample]
    else:
        delay = below(bits[2:], jnp.minimum(update, delays) + 1)
    read = jnp.maximum(0, update - delay)
    return Draw(stage, below(bits[1], jnp.asarray(num_batches)), read)


def start_key(seed: Whole | int) -> Array:
    """Return the key of the random numbers for the start of a run."""
    return jax.random.key(jnp.uint32(seed), impl=CIPHER)


def drawn_stage(seed: Whole | int, update: Whole | int, num_stages: int) -> Int[Array, ""]:
    """Draw the stage alone: the first bits of `draw` do not depend on how many follow."""
    first = _bits(jnp.uint32(seed), jnp.uint32(update), 1)[0]
    return below(first, jnp.asarray(num_stages))


def gradient_noise(
    seed: Whole | int, number: Whole | int, shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "..."]:
    """Return standard normal numbers for one gradient, independent of all other draws."""
    with jax.threefry_partitionable(True):
        key = jax.random.fold_in(_key(jnp.uint32(seed), jnp.uint32(number)), 1)
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def checked_noise(noise: float) -> float:
    """Check the standard deviation of gradient noise."""
    if not is_number(noise) or noise < 0:
        raise wrong("noise", f"must be a finite number of at least 0, got {noise!r}")
    return float(noise)


def below(bits: UInt[Array, "*batch"], count: Int[Array, ""]) -> Int[Array, "*batch"]:
    """Scale random bits to whole numbers from 0 to count - 1: the high half of bits * count."""
    many = jnp.broadcast_to(count.astype(jnp.uint32), bits.shape)
    carried = ((bits & 0xFFFF) * many) >> 16
    return (((bits >> 16) * many + carried) >> 16).astype(jnp.int32)


def _bits(seed: UInt[Array, ""], update: UInt[Array, ""], count: int) -> UInt[Array, " count"]:
    with jax.threefry_partitionable(True):
        return jax.random.bits(_key(seed, update), (count,), jnp.uint32)


def _key(seed: UInt[Array, ""], number: UInt[Array, ""]) -> Array:
    """Return a key that is the pair itself."""
    # The seed is inverted because `start_key` is the pair (0, seed).
    return jax.random.wrap_key_data(jnp.stack([~seed, number]), impl=CIPHER)


def checked_delays(delays: NumpyArray, num_stages: int) -> Int[NumpyArray, "stages samples stages"]:
    """Check a table of delays, and give each stage its own samples."""
    table = np.asarray(delays)
    shapes = [(num_stages,), (num_stages, num_stages)]
    fits = table.ndim in (2, 3) and (*table.shape[:-2], table.shape[-1]) in shapes
    if not fits or not 1 <= table.shape[-2] <= LARGEST_COUNT:
        raise ValueError(
            f"delays must have shape (samples, {num_stages}) or ({num_stages}, samples, "
            f"{num_stages}) with 1 to {LARGEST_COUNT} samples, got {table.shape}"
        )
    if table.dtype.kind not in "iu" or table.min() < 0 or table.max() >= LARGEST_COUNT:
        raise ValueError(
            f"delays must be whole numbers from 0 to {LARGEST_COUNT - 1}, got {table.dtype} "
            f"from {table.min()} to {table.max()}"
        )
    return np.broadcast_to(table, (num_stages, *table.shape[-2:])).astype(np.int32)


def checked_delta(delta: int) -> int:
    """Check the largest delay."""
    if whole_number(delta, "delta", minimum=0) >= LARGEST_COUNT:
        raise wrong("delta", f"must be at most {LARGEST_COUNT - 1}, got {delta}")
    return int(delta)
