"""The interpreter's values level by level, between two buffers: no operand is copied.

XLA copies the operands of an op if its result is a row of the same buffer, which takes longer than
the op. Here an op of an even level writes a row of one buffer and reads rows of the other alone,
and an op of an odd level the other way round: its level is the length of the longest chain of ops
before it. Along most edges of a pipeline's program the level rises by one. If it rises by an even
number, an additional op first copies the value to the other buffer.

Levels are padded to whole strides, the ops of one iteration. The program is data here too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Int, NumpyArray
from pipejax.engine.batched.binary_program import (
    LEAST_OPS,
    LEAST_SLOTS,
    NEVER_SLOT,
    NO_OPERAND,
    SPARE_SLOT,
    START_SLOT,
    BinaryOps,
    UIntArray,
    Unsigned,
    allocate,
    bucket,
    padded,
    width,
)
from pipejax.engine.batched.cost_rows import ZERO_ROW, CostRows
from pipejax.engine.batched.interpreter_loops import (
    Number,
    cost_columns,
    cost_sums,
    count_up,
    put_row,
    take_row,
)
from pipejax.engine.lowering.program import ZERO

STRIDE = 4  # ops of one iteration
# of a row of configurations: long rows decode an op once for more of them, but with more than
# MAX_LONG_ROWS rows of costs they leave the cache
ROW_BYTES, LONG_ROW_BYTES, MAX_LONG_ROWS = 512, 1024, 16
MAX_OPS_RATIO = 1.25  # of ops with copies and padding to those of the program, where levels pay

Ops = Int[NumpyArray, " ops"]
Carry = tuple[Array, Array, Array, Array, Array]  # values, columns, cost, even and odd buffer


@dataclasses.dataclass(frozen=True, eq=False)
class LevelProgram:
    """A program as data, level by level, padded to a bucket of sizes."""

    code: UIntArray  # (ops, 5) slots of first, second and result, rows of lag and own cost
    ends: UIntArray  # (levels + 1) stride of `code` behind each level
    num_pairs: UIntArray  # pairs of an even and an odd level, without padding
    last: UIntArray  # slot of the makespan, in the buffer of even levels
    terms: UIntArray  # (rows, 2) columns of the cost matrix that add up; column 0 is zero
    num_rows: UIntArray  # rows of costs without padding
    num_slots: int = dataclasses.field(metadata={"static": True})  # rows of each buffer
    row_bytes: int = dataclasses.field(metadata={"static": True})  # of configurations, at most


jax.tree_util.register_dataclass(LevelProgram)


def level_program(ops: BinaryOps, rows: CostRows) -> LevelProgram | None:
    """Encode a program as data, level by level; None if that needs too many additional ops."""
    level = _levels(ops)
    first, second, lag, duration, levels = _with_copies(ops, level)
    size = np.bincount(levels)
    size = np.append(size, np.zeros(len(size) % 2, int))  # levels go in pairs
    ends = np.append(0, np.cumsum(-(-size // STRIDE)))
    if ends[-1] * STRIDE > max(MAX_OPS_RATIO * ops.num_ops, LEAST_OPS):
        return None
    order = np.argsort(levels, kind="stable")
    slot, num_slots = allocate(first, second, levels, num_buffers=2)
    # Levels of 5 and 2 ops take 2 strides and 1: they begin at rows 0 and 8 of the code, and the
    # ranks in their level are 0 1 2 3 4 0 1, so the rows are 0 1 2 3 4 8 9.
    rank = np.arange(len(order)) - np.repeat(np.cumsum(size) - size, size)
    code_row = np.repeat(ends[:-1] * STRIDE, size) + rank
    slots = np.append(slot, [NEVER_SLOT, START_SLOT])  # of operands -2 and -1
    row = rows.row_of_position
    columns = (slots[first], slots[second], slot, row[lag], row[duration])
    code = np.empty((bucket(ends[-1] * STRIDE, LEAST_OPS), len(columns)), Unsigned)
    # padding writes max(0, -inf) to a slot that no op reads
    code[:] = (START_SLOT, NEVER_SLOT, SPARE_SLOT, ZERO_ROW, ZERO_ROW)
    code[code_row] = np.stack(columns, axis=1)[order]
    return LevelProgram(
        code=code,
        ends=padded(ends[:, None], len(code) // STRIDE + 2)[:, 0],  # no level is empty but the last
        num_pairs=np.array(len(size) // 2, Unsigned),
        last=np.array(slot[-1 if level[-1] % 2 else len(level) - 1], Unsigned),
        terms=padded(rows.terms, width(rows)),
        num_rows=np.array(len(rows.terms), Unsigned),
        num_slots=bucket(num_slots, LEAST_SLOTS),
        row_bytes=LONG_ROW_BYTES if len(rows.terms) <= MAX_LONG_ROWS else ROW_BYTES,
    )


def _levels(ops: BinaryOps) -> Ops:
    """Return the length of the longest chain of ops before each op (ops)."""
    # the constants, operands -1 and -2, index the last two entries; they are before level 0
    level = [0] * ops.num_ops + [-1, -1]
    for op, (first, second) in enumerate(zip(ops.first.tolist(), ops.second.tolist(), strict=True)):
        level[op] = max(level[first], level[second]) + 1
    return np.array(level[:-2], np.int64)


def _with_copies(ops: BinaryOps, level: Ops) -> tuple[Ops, Ops, Ops, Ops, Ops]:
    """Add a copy of each value that is read an even number of levels later.

    Return both operands, the cost positions of lag and duration, and the levels of all ops.
    """
    # A copy is an op one level after its value, in the other buffer, where those readers find it.
    # The makespan, the value of the last op, is copied too if it is on an odd level.
    operands = [ops.first.copy(), ops.second.copy()]
    readers = [
        np.flatnonzero((operand >= 0) & ((level - level[operand]) % 2 == 0)) for operand in operands
    ]
    values = [operand[rows] for operand, rows in zip(operands, readers, strict=True)]
    # no op reads the last op, so its copy is the last one
    copied = np.unique(np.concatenate([*values, [ops.num_ops - 1] * (level[-1] % 2)]))
    copied = copied.astype(np.int64)
    # of 10 ops, 3 and 7 are copied as ops 10 and 11: operand 7 becomes 10 + 1
    for operand, rows, value in zip(operands, readers, values, strict=True):
        operand[rows] = ops.num_ops + np.searchsorted(copied, value)
    free = np.full(len(copied), ZERO)
    return (
        np.append(operands[0], copied),
        np.append(operands[1], np.full(len(copied), NO_OPERAND)),
        np.append(ops.lag, free),
        np.append(ops.duration, free),
        np.append(level, level[copied] + 1),
    )


def values_by_level(
    program: LevelProgram, pieces: tuple[Array, ...], first: Array, *, tiles: tuple[int, int]
) -> Array:
    """Return the makespans of (tiles, lanes) configurations, from the first one on [s]."""
    dtype, lanes = pieces[0].dtype, tiles[1]

    def tile(t: Array, carry: Carry) -> Carry:
        """Solve tile t, and write its makespans."""
        values, columns, cost, even, odd = carry
        columns = cost_columns(columns, pieces, first + t * Unsigned(lanes))
        cost = cost_sums(cost, program.terms, program.num_rows, columns)
        even, odd = count_up(
            0, program.num_pairs, functools.partial(_pair, program, cost), (even, odd)
        )
        return put_row(values, take_row(even, program.last), t), columns, cost, even, odd

    # buffers are allocated once, and each tile overwrites those of the previous one
    slot = jax.lax.broadcasted_iota(np.int32, (program.num_slots, lanes), 0)
    buffer = jnp.where(slot == NEVER_SLOT, -jnp.inf, 0).astype(dtype)
    empty = functools.partial(jnp.zeros, dtype=dtype)
    num_columns = 1 + sum(piece.shape[1] for piece in pieces)
    start = (
        empty(tiles),
        empty((num_columns, lanes)),
        empty((len(program.terms), lanes)),
        buffer,
        buffer,
    )
    return count_up(0, tiles[0], tile, start)[0]


def _pair(
    program: LevelProgram, cost: Array, pair: Array, buffers: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Run an even level and the odd one behind it."""
    even, odd = buffers
    level = pair * Unsigned(2)
    # a level's strides are those from the end of the one before up to its own end
    start, middle, end = (program.ends[level + Unsigned(k)] for k in range(3))
    even = _level(program, cost, (start, middle), odd, even)
    odd = _level(program, cost, (middle, end), even, odd)
    return even, odd


def _level(
    program: LevelProgram, cost: Array, strides: tuple[Number, Number], read: Array, written: Array
) -> Array:
    """Run a level: it reads one buffer (slots, lanes) [s] and returns the other."""

    def stride(k: Array, written: Array) -> Array:
        for u in range(STRIDE):
            op = k * Unsigned(STRIDE) + Unsigned(u)
            first, second, slot, lag, duration = (program.code[op, c] for c in range(5))
            first_value = take_row(read, first)
            second_value = take_row(read, second) + take_row(cost, lag)
            # at a tie the first operand, as everywhere
            second_wins = second_value > first_value
            value = jax.lax.select(second_wins, second_value, first_value)
            written = put_row(written, value + take_row(cost, duration), slot)
        return written

    return count_up(*strides, stride, written)
