"""Interpreter of binary ops: loops over an encoded program, for one block of a batch at a time.

A block's state stays in cache: it has one row for each live op. A batch of NumPy arrays goes to all
devices of this process. A batch of JAX arrays stays on its devices, each of which solves its part.
"""

import dataclasses
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
from pipejax.base.compiled import compiled, cpu_options
from pipejax.engine.batched.binary_program import (
    LEAST_OPS,
    LEAST_SLOTS,
    NEVER_SLOT,
    NO_OPERAND,
    SPARE_SLOT,
    START,
    START_SLOT,
    BinaryOps,
    Task,
    UIntArray,
    Unsigned,
    bucket_size,
    pad_rows,
    padded_width,
    slots_of_ops,
)
from pipejax.engine.batched.cost_rows import ZERO_ROW, CostRows, Leaves
from pipejax.engine.batched.interpreter_loops import (
    BITS,
    LOOPS,
    Number,
    as_single_xla_call,
    cost_columns,
    cost_sums,
    counts_on_path,
    empty_buffers,
    for_loop,
    put_row,
    take_row,
    values_and_choices,
)
from pipejax.engine.lowering.program import ZERO

# The interpreter's values level by level, between two buffers: no operand is copied.
#
# XLA copies the operands of an op if its result is a row of the same buffer, which takes longer
# than the op. So an op of an even level reads rows of one buffer and writes a row of the other, and
# an op of an odd level does the reverse. The level of an op is the length of the longest chain of
# ops before it. Along most edges of a pipeline's program the level rises by one. If it rises by an
# even number, an additional op first copies the value to the other buffer. Ops that only add a
# cost are left to their readers before, because weight gradients would need many copies.
#
# Levels are padded to whole strides, the ops of one iteration.

STRIDE = 4  # ops of one iteration
# bytes of a row of configurations. Long rows decode an op once for more configurations, but with
# more than MAX_LONG_ROWS rows of costs they leave the cache.
ROW_BYTES, LONG_ROW_BYTES, MAX_LONG_ROWS = 512, 1024, 16
MAX_OPS_RATIO = 1.25  # most ops, with copies and padding, per original op

Ops = Int[NumpyArray, " ops"]
Carry = tuple[Array, Array, Array, Array, Array]  # values, columns, cost, even and odd buffer


@dataclasses.dataclass(frozen=True, eq=False)
class LevelProgram:
    """Binary ops sorted by level, encoded as arrays that are padded to a common size."""

    # (ops, 5 or 6) slots of first, second and result, rows of lag and own cost, and of the lag of
    # the first operand if any has one
    code: UIntArray
    ends: UIntArray  # (levels + 1) stride of `code` after each level; 0 first
    num_pairs: UIntArray  # pairs of an even and an odd level, without padding
    last: UIntArray  # slot of the makespan, in the buffer of even levels
    terms: UIntArray  # (rows, 2) columns of the cost matrix that add up; column 0 is zero
    num_rows: UIntArray  # rows of costs without padding
    num_slots: int = dataclasses.field(metadata={"static": True})  # rows of each buffer
    row_bytes: int = dataclasses.field(metadata={"static": True})  # most bytes of a row


jax.tree_util.register_dataclass(LevelProgram)


def level_program(ops: BinaryOps, rows: CostRows) -> LevelProgram | None:
    """Encode ops by level; return None if copies and padding would add too many ops."""
    num_ops = ops.num_ops
    ops, first_lag = _without_sums(ops)
    op_level = _op_levels(ops)
    first, second, lag, duration, levels = _with_copies(ops, op_level)
    first_lag = np.append(first_lag, np.full(len(first) - len(first_lag), ZERO))
    size = np.bincount(levels)  # ops of each level
    size = np.append(size, np.zeros(len(size) % 2, int))  # levels go in pairs
    ends = np.append(0, np.cumsum(-(-size // STRIDE)))
    if ends[-1] * STRIDE > max(MAX_OPS_RATIO * num_ops, LEAST_OPS):
        return None
    order = np.argsort(levels, kind="stable")
    slot, num_slots = slots_of_ops(first, second, levels, num_buffers=2)
    # Levels of 5 and 2 ops take 2 strides and 1: they begin at rows 0 and 8 of the code, and the
    # ranks in their level are 0 1 2 3 4 0 1, so the rows are 0 1 2 3 4 8 9.
    rank = np.arange(len(order)) - np.repeat(np.cumsum(size) - size, size)
    code_row = np.repeat(ends[:-1] * STRIDE, size) + rank
    slots = np.append(slot, [NEVER_SLOT, START_SLOT])  # slots of operands -2 and -1
    row = rows.row_of_position
    columns = [slots[first], slots[second], slot, row[lag], row[duration]]
    # padding writes max(0, -inf) to a slot that no op reads
    padding = [START_SLOT, NEVER_SLOT, SPARE_SLOT, ZERO_ROW, ZERO_ROW]
    if (first_lag != ZERO).any():
        columns.append(row[first_lag])
        padding.append(ZERO_ROW)
    code = np.empty((bucket_size(int(ends[-1]) * STRIDE, LEAST_OPS), len(columns)), Unsigned)
    code[:] = padding
    code[code_row] = np.stack(columns, axis=1)[order]
    return LevelProgram(
        code=code,
        # no level is empty but the last
        ends=pad_rows(ends[:, None], len(code) // STRIDE + 2)[:, 0],
        num_pairs=np.array(len(size) // 2, Unsigned),
        # a makespan on an odd level is copied to an even one, by the last op of all
        last=np.array(slot[-1 if op_level[-1] % 2 else len(op_level) - 1], Unsigned),
        terms=pad_rows(rows.terms, padded_width(rows)),
        num_rows=np.array(len(rows.terms), Unsigned),
        num_slots=bucket_size(num_slots, LEAST_SLOTS),
        row_bytes=LONG_ROW_BYTES if len(rows.terms) <= MAX_LONG_ROWS else ROW_BYTES,
    )


def _without_sums(ops: BinaryOps) -> tuple[BinaryOps, Ops]:
    """Drop each op y = x + cost of one operand, if all its readers can add that cost."""
    # Return the other ops, and the cost position of the lag of their first operands.
    # A weight gradient W after B is such an op: max(B + W, second + lag) needs no value of W. An
    # op stays if a reader has a lag for it already, is dropped itself, or if it is the makespan.
    first, second, lag = ops.first.copy(), ops.second.copy(), ops.lag.copy()
    first_lag = np.full(ops.num_ops, ZERO)
    is_needed = (second != NO_OPERAND) | (np.arange(ops.num_ops) == ops.num_ops - 1)
    is_needed[second[(second >= 0) & (lag != ZERO)]] = True
    if is_needed.all():
        return ops, first_lag
    for op in range(ops.num_ops - 1, -1, -1):
        if not is_needed[op] and ops.first[op] >= 0:
            is_needed[ops.first[op]] = True  # its reader is dropped
    for operand, lags in ((first, first_lag), (second, lag)):
        readers = np.flatnonzero(is_needed & (operand >= 0))
        readers = readers[~is_needed[operand[readers]]]
        lags[readers] = ops.duration[operand[readers]]
        operand[readers] = ops.first[operand[readers]]
    # operands NO_OPERAND and START are -2 and -1: as indices they select these last two entries
    number = np.append(np.cumsum(is_needed) - 1, [NO_OPERAND, START])
    needed_ops = BinaryOps(
        first=number[first][is_needed],
        second=number[second][is_needed],
        lag=lag[is_needed],
        duration=ops.duration[is_needed],
        slot=ops.slot[is_needed],
        num_slots=ops.num_slots,
    )
    return needed_ops, first_lag[is_needed]


def _op_levels(ops: BinaryOps) -> Ops:
    """Return the level of each op (ops): the length of the longest chain of ops before it."""
    # the constants, operands -1 and -2, index the last two entries; they are before level 0
    level = [0] * ops.num_ops + [-1, -1]
    for op, (first, second) in enumerate(zip(ops.first.tolist(), ops.second.tolist(), strict=True)):
        level[op] = max(level[first], level[second]) + 1
    return np.array(level[:-2], np.int64)


def _with_copies(ops: BinaryOps, level: Ops) -> tuple[Int[NumpyArray, " all_ops"], ...]:
    """Add an op that copies a value, for each value that is read an even number of levels later."""
    # Return (first, second, lag, duration, level) of all ops: two operands, two cost positions.
    # A copy is an op one level after its value, in the other buffer, where these readers read it.
    # The makespan, the value of the last op, is copied too if it is on an odd level.
    first, second = operands = ops.first.copy(), ops.second.copy()
    is_even = [(operand >= 0) & ((level - level[operand]) % 2 == 0) for operand in operands]
    is_copied = np.zeros(ops.num_ops, bool)
    for operand, reads_copy in zip(operands, is_even, strict=True):
        is_copied[operand[reads_copy]] = True
    is_copied[-1] = level[-1] % 2 == 1
    copied = np.flatnonzero(is_copied)  # no op reads the last op, so its copy is the last one
    # among 10 ops, ops 3 and 7 are copied as ops 10 and 11: operand 7 becomes 10 + 1
    for operand, reads_copy in zip(operands, is_even, strict=True):
        operand[reads_copy] = ops.num_ops + np.searchsorted(copied, operand[reads_copy])
    no_cost = np.full(len(copied), ZERO)
    return (
        np.append(first, copied),
        np.append(second, np.full(len(copied), NO_OPERAND)),
        np.append(ops.lag, no_cost),
        np.append(ops.duration, no_cost),
        np.append(level, level[copied] + 1),
    )


def values_by_level(
    program: LevelProgram, pieces: tuple[Array, ...], first: Array, *, tiles: tuple[int, int]
) -> Array:
    """Return the makespans [s] of a block (tiles, lanes) that starts at configuration `first`."""
    # Two buffers hold the values of even and of odd levels: ops read one and write the other.
    # A tile is tiles[1] configurations; `pieces` are the costs, as in `cost_columns`.

    def run_tile(t: Array, carry: Carry) -> Carry:
        """Compute the makespans of tile t, row t of `values`; even and odd levels have a buffer."""
        values, columns, cost, even, odd = carry
        columns = cost_columns(columns, pieces, first + t * Unsigned(tiles[1]))
        cost = cost_sums(cost, program.terms, program.num_rows, columns)
        run_levels = functools.partial(_run_two_levels, program, cost)
        even, odd = for_loop(0, program.num_pairs, run_levels, (even, odd))
        return put_row(values, take_row(even, program.last), t), columns, cost, even, odd

    *arrays, slots = empty_buffers(program, pieces, tiles)
    return for_loop(0, tiles[0], run_tile, (*arrays, slots, slots))[0]


def _run_two_levels(
    program: LevelProgram, cost: Array, pair: Array, buffers: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Run the ops of level 2 * `pair`, then of the next level; levels alternate two buffers."""
    even, odd = buffers
    level = pair * Unsigned(2)
    # strides of a level lie between the end of the previous level and its own end
    start, middle, end = (program.ends[level + Unsigned(k)] for k in range(3))
    even = _run_level(program, cost, (start, middle), odd, even)
    odd = _run_level(program, cost, (middle, end), even, odd)
    return even, odd


def _run_level(
    program: LevelProgram, cost: Array, strides: tuple[Number, Number], read: Array, written: Array
) -> Array:
    """Run the ops of a level; they read buffer `read` and write `written`, (slots, lanes) [s]."""

    def run_stride(k: Array, written: Array) -> Array:
        """Run stride k, the `STRIDE` ops from op k * STRIDE on."""
        for u in range(STRIDE):
            op = k * Unsigned(STRIDE) + Unsigned(u)
            columns = (program.code[op, c] for c in range(program.code.shape[1]))
            first, second, slot, lag, duration, *first_lag = columns
            first_value = take_row(read, first)
            if first_lag:
                first_value += take_row(cost, first_lag[0])
            second_value = take_row(read, second) + take_row(cost, lag)
            second_wins = second_value > first_value  # at a tie the first operand wins
            value = jax.lax.select(second_wins, second_value, first_value)
            written = put_row(written, value + take_row(cost, duration), slot)
        return written

    return for_loop(*strides, run_stride, written)


Counts = Num[Array, "columns batch"] | Num[NumpyArray, "columns batch"]
Pieces = tuple[Float[NumpyArray, "_ _"] | Float[Array, "_ _"], ...]
Solution = TypeVar("Solution")
PartResult = TypeVar("PartResult")
Result = tuple[Float[Array, " batch"], Counts | None]

# configurations in a row of the state: with fewer, XLA unrolls loops before it vectorises, which
# takes two to four times as long; with more, the state leaves the cache
LANES = 128
LANES_UNIT = 32  # divides the number of lanes in a batch that does not fill its rows
MAX_TILES = 16  # most rows of configurations in a block
CHOICE_BYTES = 1 << 27  # bytes of choices and paths in a block, for the gradient
ACCELERATOR_BYTES = 1 << 32  # the same limit on an accelerator
BATCH_AXIS = "batch"  # name of the axis of devices
MIN_WORK_OF_THREAD = 1 << 21  # ops times configurations from which another thread pays


def interpreted_makespans(
    task: Task | LevelProgram,
    pieces: Pieces,
    *,
    over: NamedSharding | None = None,
    in_trace: bool = False,
) -> Result:
    """Return makespans (batch) [s], and counts (columns, batch) of costs on the path or None."""
    if in_trace:
        return _in_trace(task, pieces)
    if over is not None:
        return _compile(over, tuple(len(piece) == 1 for piece in pieces))(task, pieces)
    run = functools.partial(_compile(), task)
    program = task if isinstance(task, LevelProgram) else task.forward
    threads = num_threads(len(program.code), max(map(len, pieces)))
    if threads <= 1:
        return run(pieces)
    parts = side_by_side(run, pieces, threads, lambda _, result: result)
    values, counts = jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=-1), *parts)
    return jnp.asarray(values), counts


def side_by_side(
    run: Callable[[Pieces], Any],
    pieces: Pieces,
    threads: int,
    finish_part: Callable[[int, Any], PartResult],
) -> list[PartResult]:
    """Run parts of a batch in threads; return `finish_part(index of first row, result)` of each."""
    # on a CPU, loops of one computation do not run in parallel, but two computations do
    size = max(map(len, pieces))
    part_size = -(-size // threads)
    has_float64 = bool(jax.config.read("jax_enable_x64"))  # the setting of this thread

    def solve_part(low: int) -> PartResult:
        """Solve the part of the batch that starts at configuration `low`."""
        # all parts have one size, so the last part overlaps the previous one, and drops the overlap
        first = min(low, size - part_size)
        part = tuple(p[first : first + part_size] if len(p) > 1 else p for p in pieces)
        with jax.enable_x64(has_float64):
            results = jax.tree.map(lambda array: np.asarray(array)[..., low - first :], run(part))
            return finish_part(low, results)

    starts = range(0, size, part_size)
    return list(_pool().map(solve_part, starts) if threads > 1 else map(solve_part, starts))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="pipejax")


def num_threads(num_ops: int, size: int) -> int:
    """Return the number of threads to use for a batch of `size` configurations."""
    if jax.default_backend() != "cpu" or jax.local_device_count() > 1:
        return 1
    parts = min(num_ops * size // MIN_WORK_OF_THREAD, size // LANES)
    return max(1, min(os.cpu_count() or 1, parts))


@functools.lru_cache(maxsize=64)
def _compile(
    sharding: NamedSharding | None = None, is_shared: tuple[bool, ...] = ()
) -> Callable[[Task | LevelProgram, Pieces], Result]:
    """Compile `_run` with the backend's options; with a sharding, each device solves a part."""
    run = _run
    if sharding is not None:
        replicated, split = PartitionSpec(), sharding.spec
        run = jax.shard_map(
            _run,
            mesh=sharding.mesh,
            in_specs=(replicated, tuple(replicated if shared else split for shared in is_shared)),
            out_specs=(split, PartitionSpec(None, *split)),
            check_vma=False,
        )
    return compiled(run, compiler_options=cpu_options(**LOOPS))


def _run(task: Task | LevelProgram, pieces: tuple[Array, ...], *, plain: bool = False) -> Result:
    """Return makespans (batch) [s], and counts of costs if the task has a backward pass."""
    # With `plain`, as on accelerators, loops are no single calls and take one wide tile.
    if isinstance(task, LevelProgram):
        return _run_by_level(task, pieces), None
    plain = plain or jax.default_backend() != "cpu"
    call = (lambda loops: loops) if plain else as_single_xla_call
    size, dtype = max(map(len, pieces)), pieces[0].dtype
    tiles = _block_shape(task, size, dtype, plain)
    block, pieces = _pad(pieces, tiles)
    num_columns = 1 + sum(piece.shape[1] for piece in pieces)
    backward = task.backward
    # counts below 2**16 take half the bytes
    is_small = task.temperature is None and backward is not None and len(backward.uses) < 1 << 16
    count_dtype = np.dtype(np.uint16) if is_small else dtype
    forward_pass = functools.partial(values_and_choices, tiles=tiles)
    backward_pass = functools.partial(counts_on_path, num_columns=num_columns, dtype=count_dtype)

    def solve_block(first: Array) -> tuple[Array, Array | None]:
        """Return makespans and counts of the block that starts at configuration `first`."""
        values, choices = call(forward_pass)(task, pieces, first.astype(Unsigned))
        if backward is None:
            return values.reshape(-1), None
        choices = choices.reshape(len(choices), -1)
        return values.reshape(-1), call(backward_pass)(task.forward, backward, choices)

    solutions = _in_blocks(solve_block, size=max(size, block), block=block)
    result: tuple[Array, Array | None] = jax.tree.map(lambda array: array[..., :size], solutions)
    return result


def _run_by_level(program: LevelProgram, pieces: tuple[Array, ...]) -> Array:
    """Return makespans (batch) [s], computed level by level in blocks of (tiles, lanes)."""
    size, max_lanes = max(map(len, pieces)), program.row_bytes // pieces[0].dtype.itemsize
    blocks = -(-size // (MAX_TILES * max_lanes))
    tiles = -(-size // (blocks * max_lanes))
    lanes = -(-size // (blocks * tiles * LANES_UNIT)) * LANES_UNIT
    block, pieces = _pad(pieces, (tiles, lanes))
    loops = as_single_xla_call(functools.partial(values_by_level, tiles=(tiles, lanes)))

    def solve_block(first: Array) -> Array:
        return loops(program, pieces, first.astype(Unsigned)).reshape(-1)

    return _in_blocks(solve_block, size=max(size, block), block=block)[:size]


def _pad(pieces: tuple[Array, ...], tiles: tuple[int, int]) -> tuple[int, tuple[Array, ...]]:
    """Return the block size, and the costs, padded to it by repeating the last configuration."""
    size, block = max(map(len, pieces)), tiles[0] * tiles[1]
    if block > size:
        rows = np.minimum(np.arange(block), size - 1)
        pieces = tuple(p[rows] if len(p) == size else p for p in pieces)
    return block, pieces


# Only the outermost jit may have compiler options, and that is the caller's. Loops that are one
# XLA call do not fit into every computation either: XLA would abort the process.
_in_trace = compiled(functools.partial(_run, plain=True))


def _in_blocks(solve: Callable[[Array], Solution], *, size: int, block: int) -> Solution:
    """Solve a batch block by block in one loop; the state of a block fits in the cache."""
    # 5,000 configurations in blocks of 14 tiles with 128 lanes, 1,792 at once: they are 0 to 1,791,
    # 1,792 to 3,583 and 3,208 to 4,999. Blocks have one size, so the last one repeats some.
    if size == block:
        return solve(jnp.zeros((), np.int32))
    shapes = jax.eval_shape(solve, jax.ShapeDtypeStruct((), np.int32))
    empty = jax.tree.map(lambda s: jnp.zeros((*s.shape[:-1], size), s.dtype), shapes)

    def write_block(k: Int[Array, ""], solutions: Solution) -> Solution:
        """Solve block k, and write its makespans and counts into the batch's arrays."""
        start = jnp.minimum(k * block, size - block)  # the last block overlaps the one before
        return jax.tree.map(
            lambda array, part: jax.lax.dynamic_update_slice_in_dim(array, part, start, -1),
            solutions,
            solve(start),
        )

    return jax.lax.fori_loop(0, -(-size // block), write_block, empty)


def _block_shape(task: Task, size: int, dtype: np.dtype, plain: bool) -> tuple[int, int]:
    """Return the number of tiles in a block, and the number of configurations in a tile."""
    # memory for choices and paths of all ops limits the configurations; accelerators use one tile
    bits = 3 if task.temperature is None else 3 * 8 * dtype.itemsize  # per op and configuration
    max_bits = (ACCELERATOR_BYTES if plain else CHOICE_BYTES) * 8
    max_configurations = max_bits // (bits * len(task.forward.code))
    if plain:
        max_lanes = size if task.backward is None else min(size, max_configurations)
        return 1, max(LANES, max_lanes // BITS * BITS)
    max_tiles = max(1, min(MAX_TILES, max_configurations // LANES))
    tiles = MAX_TILES if task.backward is None else max_tiles
    blocks = -(-size // (tiles * LANES))
    return -(-size // (blocks * LANES)), LANES


def batch_sharding(leaves: Leaves) -> NamedSharding | None:
    """Return the sharding of JAX arrays along the batch axis; None if all are on one device."""
    shardings: dict[NamedSharding, str] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
            continue
        layout = leaf.sharding
        spec = tuple(layout.spec) if isinstance(layout, NamedSharding) else ()
        first, *others = (*spec, None)  # name of the mesh axis that cuts each axis
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


def send_to_devices(leaves: Leaves, size: int, least: int) -> tuple[Leaves, NamedSharding | None]:
    """Shard a batch over all devices if each gets at least `least` configurations."""
    devices = jax.local_devices()
    if len(devices) == 1 or size < least * len(devices):
        return leaves, None
    sharding = NamedSharding(Mesh(np.array(devices), BATCH_AXIS), PartitionSpec(BATCH_AXIS))
    # pad to a multiple of the devices: with "clip", rows beyond the batch repeat the last one
    rows = np.arange(size + -size % len(devices))
    placed = {
        name: jax.device_put(np.take(leaf, rows, axis=0, mode="clip"), sharding)
        for name, leaf in leaves.items()
        if len(leaf) > 1
    }
    return {**leaves, **placed}, sharding
