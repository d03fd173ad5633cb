"""The recurrence op by op over blocks of the batch, in loops whose program is data.

A block's state stays in cache: it has one row for each live op. A batch of NumPy arrays goes to all
devices of this process. A batch of JAX arrays stays on its devices, each of which solves its part.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipejax.base.array_types import Array, Float, Int, Num, NumpyArray
from pipejax.base.compiled import compiled
from pipejax.base.machine import cpu_options
from pipejax.engine.batched.binary_program import Task, Unsigned
from pipejax.engine.batched.cost_rows import Leaves
from pipejax.engine.batched.interpreter_loops import (
    BITS,
    LOOPS,
    as_single_xla_call,
    counts_on_path,
    values_and_choices,
)
from pipejax.engine.batched.levels import LevelProgram, values_by_level

Counts = Num[Array, "columns batch"] | Num[NumpyArray, "columns batch"]
Pieces = tuple[Float[NumpyArray, "_ _"] | Float[Array, "_ _"], ...]
Solved = TypeVar("Solved")
Taken = TypeVar("Taken")
Result = tuple[Float[Array, " batch"], Counts | None]

# configurations in a row of the state: XLA unrolls shorter loops before it vectorises, and they
# take two to four times as long; longer ones leave the cache
LANES = 128
LANES_UNIT = 32  # of which the lanes are a multiple in a batch that does not fill its rows
MAX_TILES = 16  # rows' worth of configurations in a block
CHOICE_BYTES = 1 << 27  # of choices and paths in a block, for the gradient
ACCELERATOR_BYTES = 1 << 32  # the same on an accelerator
BATCH = "batch"  # name of the axis of devices
MIN_WORK_OF_THREAD = 1 << 21  # ops times configurations from which another thread pays


def interpreted_makespans(
    task: Task | LevelProgram,
    pieces: Pieces,
    *,
    over: NamedSharding | None = None,
    in_trace: bool = False,
) -> Result:
    """Return the makespans of a batch [s], and the counts (columns, batch) of costs on the path."""
    if in_trace:
        return _in_trace(task, pieces)
    if over is not None:
        return _compiled(over, tuple(len(piece) == 1 for piece in pieces))(task, pieces)
    run = functools.partial(_compiled(), task)
    program = task if isinstance(task, LevelProgram) else task.forward
    threads = num_threads(len(program.code), max(map(len, pieces)))
    if threads <= 1:
        return run(pieces)
    parts = side_by_side(run, pieces, threads, lambda _, result: result)
    values, counts = jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=-1), *parts)
    return jnp.asarray(values), counts


def side_by_side(
    run: Callable[[Pieces], Any], pieces: Pieces, threads: int, take: Callable[[int, Any], Taken]
) -> list[Taken]:
    """Run parts of a batch in threads; return `take(first configuration, result)` of each."""
    # On a CPU, loops of one computation do not run in parallel, but two computations do.
    size = max(map(len, pieces))
    part = -(-size // threads)
    exact = bool(jax.config.read("jax_enable_x64"))  # a context of this thread, not of the others

    def work(low: int) -> Taken:
        """Solve the part from a configuration on."""
        first = min(low, size - part)  # all have one size, so the last one overlaps the one before
        cut = tuple(p[first : first + part] if len(p) > 1 else p for p in pieces)
        with jax.enable_x64(exact):
            results = jax.tree.map(lambda array: np.asarray(array)[..., low - first :], run(cut))
            return take(low, results)

    starts = range(0, size, part)
    return list(_pool().map(work, starts) if threads > 1 else map(work, starts))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="pipejax")


def num_threads(num_ops: int, size: int) -> int:
    """Return the number of threads for a batch."""
    if jax.default_backend() != "cpu" or jax.local_device_count() > 1:
        return 1
    parts = min(num_ops * size // MIN_WORK_OF_THREAD, size // LANES)
    return max(1, min(os.cpu_count() or 1, parts))


@functools.lru_cache(maxsize=64)
def _compiled(
    over: NamedSharding | None = None, is_shared: tuple[bool, ...] = ()
) -> Callable[[Task | LevelProgram, Pieces], Result]:
    """Return `_run` compiled with the backend's options; on several devices, each has a part."""
    run = _run
    if over is not None:
        everywhere, cut = PartitionSpec(), over.spec
        run = jax.shard_map(
            _run,
            mesh=over.mesh,
            in_specs=(everywhere, tuple(everywhere if shared else cut for shared in is_shared)),
            out_specs=(cut, PartitionSpec(None, *cut)),
            check_vma=False,
        )
    return compiled(run, compiler_options=cpu_options(**LOOPS))


def _run(task: Task | LevelProgram, pieces: tuple[Array, ...], *, plain: bool = False) -> Result:
    """Return the makespans of a batch [s], solved in blocks, and the counts of costs if asked.

    With `plain`, as on accelerators, loops are no single calls and take one wide tile.
    """
    if isinstance(task, LevelProgram):
        return _run_by_level(task, pieces), None
    plain = plain or jax.default_backend() != "cpu"
    call = (lambda loops: loops) if plain else as_single_xla_call
    size, dtype = max(map(len, pieces)), pieces[0].dtype
    tiles = _block(task, size, dtype, plain)
    block, pieces = _filled(pieces, tiles)
    num_columns = 1 + sum(piece.shape[1] for piece in pieces)
    backward = task.backward
    # counts below 2**16 take half the bytes
    small = task.temperature is None and backward is not None and len(backward.uses) < 1 << 16
    count_dtype = np.dtype(np.uint16) if small else dtype
    forward_pass = functools.partial(values_and_choices, tiles=tiles)
    backward_pass = functools.partial(counts_on_path, num_columns=num_columns, dtype=count_dtype)

    def solve(first: Array) -> tuple[Array, Array | None]:
        """Return makespans and counts of the block from a configuration on."""
        values, choices = call(forward_pass)(task, pieces, first.astype(Unsigned))
        if backward is None:
            return values.reshape(-1), None
        choices = choices.reshape(len(choices), -1)
        return values.reshape(-1), call(backward_pass)(task.forward, backward, choices)

    solutions = _in_blocks(solve, size=max(size, block), block=block)
    result: tuple[Array, Array | None] = jax.tree.map(lambda array: array[..., :size], solutions)
    return result


def _run_by_level(program: LevelProgram, pieces: tuple[Array, ...]) -> Array:
    """Return the makespans of a batch [s], solved in blocks of (tiles, lanes)."""
    size, max_lanes = max(map(len, pieces)), program.row_bytes // pieces[0].dtype.itemsize
    blocks = -(-size // (MAX_TILES * max_lanes))
    tiles = -(-size // (blocks * max_lanes))
    lanes = -(-size // (blocks * tiles * LANES_UNIT)) * LANES_UNIT
    block, pieces = _filled(pieces, (tiles, lanes))
    loops = as_single_xla_call(functools.partial(values_by_level, tiles=(tiles, lanes)))

    def solve(first: Array) -> Array:
        return loops(program, pieces, first.astype(Unsigned)).reshape(-1)

    return _in_blocks(solve, size=max(size, block), block=block)[:size]


def _filled(pieces: tuple[Array, ...], tiles: tuple[int, int]) -> tuple[int, tuple[Array, ...]]:
    """Return the size of a block, and the costs with their last configuration repeated up to it."""
    size, block = max(map(len, pieces)), tiles[0] * tiles[1]
    if block > size:
        rows = np.minimum(np.arange(block), size - 1)
        pieces = tuple(p[rows] if len(p) == size else p for p in pieces)
    return block, pieces


# Compiler options are for the outermost jit alone, which is the caller's. Nor do loops that are
# one function each fit into every computation: where they do not, XLA aborts the process.
_in_trace = compiled(functools.partial(_run, plain=True))


def _in_blocks(solve: Callable[[Array], Solved], *, size: int, block: int) -> Solved:
    """Solve a batch block by block in one loop; the state of a block fits in the cache."""
    # 5,000 configurations in blocks of 14 tiles with 128 lanes, 1,792 at once: they are 0 to 1,791,
    # 1,792 to 3,583 and 3,208 to 4,999. All have one size, so the last one solves some again.
    shapes = jax.eval_shape(solve, jax.ShapeDtypeStruct((), np.int32))
    empty = jax.tree.map(lambda s: jnp.zeros((*s.shape[:-1], size), s.dtype), shapes)

    def step(k: Int[Array, ""], solutions: Solved) -> Solved:
        """Write the solution of block k."""
        start = jnp.minimum(k * block, size - block)  # the last block overlaps the one before
        return jax.tree.map(
            lambda array, part: jax.lax.dynamic_update_slice_in_dim(array, part, start, -1),
            solutions,
            solve(start),
        )

    return jax.lax.fori_loop(0, -(-size // block), step, empty)


def _block(task: Task, size: int, dtype: np.dtype, plain: bool) -> tuple[int, int]:
    """Return the number of tiles of a block, and of configurations of a tile."""
    # As many as fit beside the choices and paths of all ops, in blocks of one size. Plain loops
    # take one wide tile: accelerators run its lanes in threads as CPUs do in vectors.
    bits = 3 if task.temperature is None else 3 * 8 * dtype.itemsize  # of an op, a configuration
    room = (ACCELERATOR_BYTES if plain else CHOICE_BYTES) * 8 // (bits * len(task.forward.code))
    if plain:
        max_lanes = size if task.backward is None else min(size, room)
        return 1, max(LANES, max_lanes // BITS * BITS)
    tiles = MAX_TILES if task.backward is None else max(1, min(MAX_TILES, room // LANES))
    blocks = -(-size // (tiles * LANES))
    return -(-size // (blocks * LANES)), LANES


def batch_sharding(leaves: Leaves) -> NamedSharding | None:
    """Return the sharding of a batch of JAX arrays over several devices, None if there is none."""
    shardings: dict[NamedSharding, str] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
            continue
        layout = leaf.sharding
        cut = tuple(layout.spec) if isinstance(layout, NamedSharding) else ()
        first, *others = (*cut, None)
        if not isinstance(layout, NamedSharding) or first is None or set(others) != {None}:
            raise ValueError(
                f"{name} lies on several devices as {layout}: a batch is cut along its "
                "first axis and no other"
            )
        shardings[NamedSharding(layout.mesh, PartitionSpec(first))] = name
    if len(shardings) > 1:
        names = " and ".join(shardings.values())
        raise ValueError(f"{names} are laid out over devices in two ways")
    return next(iter(shardings), None)


def spread_out(leaves: Leaves, size: int, least: int) -> tuple[Leaves, NamedSharding | None]:
    """Send a batch of at least `least` for each device to all of them, in parts of one size."""
    devices = jax.local_devices()
    if len(devices) == 1 or size < least * len(devices):
        return leaves, None
    sharding = NamedSharding(Mesh(np.array(devices), BATCH), PartitionSpec(BATCH))
    rows = np.arange(size + -size % len(devices))  # clipped: the last row repeats
    placed = {
        name: jax.device_put(np.take(leaf, rows, axis=0, mode="clip"), sharding)
        for name, leaf in leaves.items()
        if len(leaf) > 1
    }
    return {**leaves, **placed}, sharding
