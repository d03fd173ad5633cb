"""The recurrence op by op over blocks of the batch, in loops whose program is data.

A block's state stays in cache: it has one row for each live op, not for each op.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pipejax.base.array_types import Array, Float, Int, Num, NumpyArray
from pipejax.engine.batched.backward_pass import BITS, counts_on_path
from pipejax.engine.batched.forward_pass import values_and_choices
from pipejax.engine.batched.interpreted_program import BackwardProgram, ForwardProgram
from pipejax.engine.batched.sharding import Spread
from pipejax.engine.batched.single_xla_call import Unsigned, as_single_xla_call, wide_vectors

Counts = Num[Array, "columns batch"] | Num[NumpyArray, "columns batch"]
Pieces = tuple[Float[NumpyArray, "_ _"] | Float[Array, "_ _"], ...]
Solved = TypeVar("Solved")
Result = tuple[Float[Array, " batch"], Counts | None]

ROW_BYTES = 512  # of a row of the state: rows of that size are added up fastest
MAX_TILES = 16  # rows' worth of configurations in a block
CHOICE_BYTES = 1 << 27  # of choices and paths in a block, for the gradient
ACCELERATOR_BYTES = 1 << 32  # the same on an accelerator
MIN_WORK = 1 << 21  # ops times configurations from which a thread of its own pays


def lanes(dtype: np.dtype) -> int:
    """Return how many configurations a row of the state holds."""
    return ROW_BYTES // dtype.itemsize


def interpreted_makespans(
    program: ForwardProgram,
    pieces: Pieces,
    *,
    backward: BackwardProgram | None = None,
    temperature: float | None = None,
    over: Spread | None = None,
) -> Result:
    """Makespans of a batch, and how often each cost stands on the critical path.

    Returns (batch) makespans [s], and (columns, batch) counts (floats for smooth maxima) or None.
    """
    size = max(map(len, pieces))
    smoothing = None if temperature is None else np.asarray(temperature, pieces[0].dtype)
    if over is not None:
        is_shared = tuple(len(piece) == 1 for piece in pieces)
        return _compiled_over(over, is_shared)(program, backward, smoothing, pieces)
    threads = _num_threads(program, size, pieces[0].dtype)
    run = functools.partial(_compiled(), program, backward, smoothing)
    if threads <= 1:
        return run(pieces)
    return _side_by_side(run, pieces, size, threads)


def interpreted_in_trace(
    program: ForwardProgram,
    pieces: tuple[Array, ...],
    backward: BackwardProgram | None,
    temperature: float | None,
) -> tuple[Array, Array | None]:
    """Solve as `interpreted_makespans` does, as part of a computation that JAX traces."""
    smoothing = None if temperature is None else jnp.asarray(temperature, pieces[0].dtype)
    return _in_trace(program, backward, smoothing, pieces)


def _side_by_side(
    run: Callable[[Pieces], Result], pieces: Pieces, size: int, threads: int
) -> Result:
    """Run parts of a batch in parallel threads.

    On a CPU, loops of one computation do not run in parallel, but two computations do.
    """
    part = -(-size // threads)
    starts = [min(low, size - part) for low in range(0, size, part)]  # parts of one size
    whole: list[NumpyArray] = []
    exact = bool(jax.config.read("jax_enable_x64"))  # a context of this thread, not of the others

    def work(low: int) -> None:
        cut = tuple(p[low : low + part] if len(p) > 1 else p for p in pieces)
        with jax.enable_x64(exact):
            found = [np.asarray(array) for array in run(cut) if array is not None]
        with lock:
            if not whole:
                dtype = found[0].dtype
                whole.extend(np.empty((*array.shape[:-1], size), dtype) for array in found)
        for array, target in zip(found, whole, strict=True):
            target[..., low : low + part] = array

    lock = threading.Lock()
    list(_pool().map(work, starts))
    values, *counts = whole
    return jnp.asarray(values), counts[0] if counts else None


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="pipejax")


def _num_threads(program: ForwardProgram, size: int, dtype: np.dtype) -> int:
    """Number of threads for a batch, equal for programs and batches that share a compilation."""
    if jax.default_backend() != "cpu" or jax.local_device_count() > 1:
        return 1
    parts = min(len(program.code) * size // MIN_WORK, size // lanes(dtype))
    return max(1, min(os.cpu_count() or 1, parts))


@functools.cache
def _compiled() -> Callable[..., tuple[Array, Array | None]]:
    """Compile, with options that are known only once there is a backend."""
    return jax.jit(_run, compiler_options=wide_vectors())


@functools.lru_cache(maxsize=64)
def _compiled_over(over: Spread, is_shared: tuple[bool, ...]) -> Callable[..., Result]:
    """Compile for several devices, each of which solves its part of the batch."""
    everywhere, cut = PartitionSpec(), PartitionSpec(over.axis)
    pieces = tuple(everywhere if shared else cut for shared in is_shared)
    run = jax.shard_map(
        _run,
        mesh=over.mesh,
        in_specs=(everywhere, everywhere, everywhere, pieces),
        out_specs=(cut, PartitionSpec(None, over.axis)),
        check_vma=False,
    )
    return jax.jit(run, compiler_options=wide_vectors())


def _run(
    program: ForwardProgram,
    backward: BackwardProgram | None,
    temperature: Array | None,
    pieces: tuple[Array, ...],
    *,
    plain: bool = False,
) -> tuple[Array, Array | None]:
    """Solve a batch in blocks; plain loops, which are not single calls, take one wide tile."""
    plain = plain or jax.default_backend() != "cpu"
    call = (lambda loops: loops) if plain else as_single_xla_call
    size, dtype = max(map(len, pieces)), pieces[0].dtype
    tiles = _block(program, size, dtype, backward, temperature, plain)
    block = tiles[0] * tiles[1]
    if block > size:  # repeat the last configuration
        place = np.minimum(np.arange(block), size - 1)
        pieces = tuple(p[place] if len(p) == size else p for p in pieces)
    # counts below 2**16 take half the bytes
    small = temperature is None and backward is not None and len(backward.uses) < 1 << 16
    forward_pass = functools.partial(values_and_choices, tiles=tiles, keep=backward is not None)
    backward_pass = functools.partial(
        counts_on_path,
        num_columns=1 + sum(piece.shape[1] for piece in pieces),
        dtype=np.dtype(np.uint16) if small else dtype,
    )

    def solve(first: Array) -> tuple[Array, Array | None]:
        values, choices = call(forward_pass)(program, pieces, first.astype(Unsigned), temperature)
        if backward is None:
            return values.reshape(-1), None
        choices = choices.reshape(len(choices), -1)
        return values.reshape(-1), call(backward_pass)(program, backward, choices)

    found = _in_blocks(solve, size=max(size, block), block=block)
    cut: tuple[Array, Array | None] = jax.tree.map(lambda array: array[..., :size], found)
    return cut


# Compiler options are for the outermost jit alone, which is the caller's. Nor do loops that are
# one function each fit into every computation: where they do not, XLA aborts the process.
_in_trace = jax.jit(functools.partial(_run, plain=True))


def _in_blocks(solve: Callable[[Array], Solved], *, size: int, block: int) -> Solved:
    """Solve a batch block by block in one loop; the state of a block fits in the cache."""
    shapes = jax.eval_shape(solve, jax.ShapeDtypeStruct((), np.int32))
    whole = jax.tree.map(lambda s: jnp.zeros((*s.shape[:-1], size), s.dtype), shapes)

    def step(k: Int[Array, ""], done: Solved) -> Solved:
        at = jnp.minimum(k * block, size - block)  # the last block overlaps the one before
        return jax.tree.map(
            lambda all_, part: jax.lax.dynamic_update_slice_in_dim(all_, part, at, -1),
            done,
            solve(at),
        )

    return jax.lax.fori_loop(0, -(-size // block), step, whole)


def _block(
    program: ForwardProgram,
    size: int,
    dtype: np.dtype,
    backward: BackwardProgram | None,
    temperature: Array | None,
    plain: bool,
) -> tuple[int, int]:
    """Tiles of a block, and configurations of a tile.

    As many as fit beside the choices and paths of all ops, in blocks of one size. Plain loops take
    one wide tile: accelerators run its lanes in threads as CPUs do in vectors.
    """
    bits = 3 if temperature is None else 2 * 8 * dtype.itemsize  # of an op and a configuration
    width = lanes(dtype)
    if plain:
        room = ACCELERATOR_BYTES * 8 // (bits * len(program.code))
        return 1, max(width, min(size, size if backward is None else room) // BITS * BITS)
    most = MAX_TILES
    if backward is not None:
        most = max(1, min(most, CHOICE_BYTES * 8 // (bits * len(program.code) * width)))
    blocks = -(-size // (most * width))
    return -(-size // (blocks * width)), width
