"""Programs as ops of two operands, encoded as arrays of integers for the batched engine.

    value[op] = max(value[first], value[second] + cost[lag]) + cost[own]

A node with more predecessors becomes a chain of such ops, and the last end a chain of maxima. Ops
are rows of integers, so the loops over ops compile once for each bucket of sizes.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray, UInt
from pipejax.engine.batched.cost_rows import ZERO_ROW, CostRows
from pipejax.engine.lowering.program import SOURCE, ZERO, Program

START = -1  # operand that is the source: time 0
NO_OPERAND = -2  # operand that an op lacks: minus infinity
START_SLOT, NEVER_SLOT, SPARE_SLOT = 0, 1, 2  # slots of 0, minus infinity, results of padding
FIRST_SLOT = 3

# the program as data
Unsigned = jax.numpy.uint32  # an index without a sign needs no test for being negative
GROUP = 8  # ops of one iteration; their choices fill a byte
BUCKETS = 8  # sizes grow by this factor from bucket to bucket
LEAST_OPS, LEAST_SLOTS, LEAST_ROWS = 512, 128, 64  # the smallest bucket of each size
MAX_TALLY = 255  # uses that one byte can count
STRETCH = 2048  # ops whose uses are counted together: their part of the path stays in cache

Column = Int[NumpyArray, " ops"]
UIntArray = UInt[Array, "..."] | UInt[NumpyArray, "..."]


@dataclasses.dataclass(frozen=True, eq=False)
class BinaryOps:
    """Binary ops (max-plus ops of at most two operands) in order, with slots for their results."""

    first: Column  # (ops) op of the first operand, `START` or `NO_OPERAND`
    second: Column  # (ops) op of the second operand, `START` or `NO_OPERAND`
    lag: Column  # (ops) cost position of the lag from the second operand
    duration: Column  # (ops) cost position of the op's own duration
    slot: Column  # (ops) buffer slot of the result, never the slot of an operand
    num_slots: int  # slots, constant ones included

    @property
    def num_ops(self) -> int:
        """Return the number of ops."""
        return len(self.duration)

    def operand_slots(self) -> tuple[Column, Column]:
        """Return the buffer slots of every op's first operand (ops) and second operand (ops)."""
        slots = np.append(self.slot, [NEVER_SLOT, START_SLOT])  # at -2 and -1
        return slots[self.first], slots[self.second]


def binary_ops(program: Program) -> BinaryOps:
    """Split nodes into max-plus ops of two operands; at a tie the first predecessor still wins."""
    # A node with predecessors p0, p1, p2 and lags l0, l1, l2 becomes, in this order,
    #     lag op = max(nothing, p0 + l0)         only where l0 is not 0: a first operand has no lag
    #     head   = max(lag op or p0, p1 + l1)
    #     next   = max(head, p2 + l2)            + own duration, as the last op of the chain
    #     end op = max(last end so far, next)    only if no node waits for it
    # A single predecessor is one op: max(p0, nothing) + own, or max(nothing, p0 + l0) + own. So a
    # node takes has_lag_op + max(num_preds - 1, 1) + has_end_op ops, and a running sum of that is
    # the index of each node's first op. Predecessors keep their order and an op's second operand
    # wins only if it is larger: the winner of the chain is the first predecessor that attains the
    # maximum, and the last end the first of the largest ends. That is the tie rule of `recurrence`.
    preds, lags = np.asarray(program.preds)[1:], np.asarray(program.lag_index)[1:]
    is_edge = (preds != SOURCE) | (lags != ZERO)  # else padding
    num_preds = np.maximum(is_edge.sum(axis=1), 1)
    # each node's predecessors before the padding, in their order
    order = np.argsort(~is_edge, axis=1, kind="stable")
    preds, lags = (np.take_along_axis(x, order, axis=1) for x in (preds, lags))
    # the first of several predecessors needs an op for its lag, a single predecessor does not
    is_single = (num_preds == 1) & (lags[:, 0] != ZERO)
    has_lag_op = (num_preds > 1) & (lags[:, 0] != ZERO)
    # everything below is per node, without the source
    has_successor = np.zeros(program.num_nodes, bool)
    has_successor[preds[np.arange(preds.shape[1]) < num_preds[:, None]]] = True
    is_sink = ~has_successor[1:]
    has_end_op = is_sink & (np.cumsum(is_sink) > 1)  # all sinks but the first
    chain_length = np.maximum(num_preds - 1, 1)
    num_ops = has_lag_op + chain_length + has_end_op
    first_op = np.cumsum(num_ops) - num_ops
    # op that ends each node; the source, node 0, has none and stands for the constant 0
    last_op = np.append(START, first_op + has_lag_op + chain_length - 1)
    size = int(num_ops.sum())
    first, second = np.full(size, NO_OPERAND), np.full(size, NO_OPERAND)
    lag, duration = np.zeros((2, size), np.int64)
    head = first_op + has_lag_op  # first op that is a maximum of predecessors
    head_operand = np.where(has_lag_op, first_op, last_op[preds[:, 0]])
    first[head] = np.where(is_single, NO_OPERAND, head_operand)
    second[head[is_single]], lag[head[is_single]] = head_operand[is_single], lags[is_single, 0]
    lag_op = first_op[has_lag_op]
    second[lag_op], lag[lag_op] = last_op[preds[has_lag_op, 0]], lags[has_lag_op, 0]
    # predecessor c is the second operand of op head + c - 1, whose first operand is the op before
    for column in range(1, preds.shape[1]):
        has_pred = num_preds > column
        op = head[has_pred] + column - 1
        second[op], lag[op] = last_op[preds[has_pred, column]], lags[has_pred, column]
        if column > 1:
            first[op] = op - 1
    duration[last_op[1:]] = np.asarray(program.duration_index)[1:]
    # the end op of a sink comes right after its last op, which is the second operand. The first
    # operand is the last end so far: the last op of the first sink, later the previous end op.
    end_op = last_op[1:][has_end_op] + 1
    first[end_op] = np.append(last_op[1:][is_sink][:1], end_op[:-1])[: len(end_op)]
    second[end_op] = end_op - 1
    slot, num_slots = slots_of_ops(first, second, np.arange(size))
    return BinaryOps(first, second, lag, duration, slot, num_slots)


def slots_of_ops(
    first: Column, second: Column, moment: Column, num_buffers: int = 1
) -> tuple[Column, int]:
    """Return (slot of each op, number of slots) in buffers; ops that are live share no slot."""
    # Ops of a moment are simultaneous, and write to buffer `moment % num_buffers`.
    # a slot is free after the moment of its last reader; without a reader, at the next write
    last_reader = moment + num_buffers - 1
    for operand in (first, second):
        readers = np.flatnonzero(operand >= 0)
        np.maximum.at(last_reader, operand[readers], moment[readers])
    slot, num_slots = np.empty_like(moment), 0
    for buffer in range(num_buffers):
        ops = np.flatnonzero(moment % num_buffers == buffer)
        slot[ops], count = _assign_slots(moment[ops], last_reader[ops])
        num_slots = max(num_slots, count)
    return slot + FIRST_SLOT, num_slots + FIRST_SLOT


def _assign_slots(first_use: Column, last_use: Column) -> tuple[Column, int]:
    """Assign slots of one buffer to ops; return each op's slot (ops) and the number of slots."""
    # The arguments are moments; at equal moments, ops take slots before others put theirs back. The
    # slot freed last is used first, because it is still in cache: free slots are a stack. Putting a
    # slot there and taking it match like brackets, at one height of the stack; an op takes a new
    # slot if the stack is empty:
    #     event   a takes  b takes  b put  a put  c takes  d takes  e takes
    #     height     -        -       1      2       2        1        -
    #     slot      new      new                  that of a     b      new
    size = len(first_use)
    takes, puts = np.argsort(first_use, kind="stable"), np.argsort(last_use, kind="stable")
    # index of each event: earlier events of its kind plus earlier events of the other kind
    put_at = np.arange(size) + np.searchsorted(first_use[takes], last_use[puts], "right")
    take_at = np.arange(size) + np.searchsorted(last_use[puts], first_use[takes])
    op, step = np.empty(2 * size, np.int32), np.empty(2 * size, np.int8)
    op[put_at], op[take_at], step[put_at], step[take_at] = puts, takes, 1, -1
    # depth as if the stack could be below empty: every new low is an op that finds it empty. The
    # events above have depths -1 -2 -1 0 -1 -2 -3 and lows -1 -2 -2 -2 -2 -2 -3.
    depth = np.cumsum(step, dtype=np.int32)
    low = np.minimum(np.minimum.accumulate(depth), 0)
    is_new = np.diff(low, prepend=0) < 0
    height = np.where(is_new, 0, depth - low + (step < 0))
    # sorted by height, each take comes right after its put; heights of 16 bits sort by radix
    order = np.argsort(height.astype(np.min_scalar_type(height.max(initial=0))), kind="stable")
    reuses = np.flatnonzero((step[order] < 0) & ~is_new[order])
    previous = np.arange(size, dtype=np.int32)  # op that had the slot before
    previous[op[order[reuses]]] = op[order[reuses - 1]]
    # each round doubles how far back `previous` points, until it points to the slot's first op
    while not np.array_equal(earlier := previous[previous], previous):
        previous = earlier
    slots = np.zeros(size, np.int64)
    slots[op[is_new]] = np.arange(is_new.sum())
    return slots[previous], int(is_new.sum())


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardProgram:
    """Forward pass over binary ops, encoded as arrays that are padded to a common size."""

    code: UIntArray  # (ops, 5) slots of first, second and result, rows of lag and own cost
    num_groups: UIntArray  # groups of `GROUP` ops, padding of the last included
    last: UIntArray  # slot of the makespan
    terms: UIntArray  # (rows, 2) columns of the cost matrix that add up; column 0 is zero
    num_rows: UIntArray  # rows of costs without padding
    num_slots: int = dataclasses.field(metadata={"static": True})  # rows of the state


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardProgram:
    """Ops that use each cost, encoded as arrays, to count the uses on the critical path."""

    # a stretch of `STRETCH` ops has two rows per op: is the op, is its second operand on the path

    uses: UIntArray  # (uses) row of a stretch that tells where the use is on the path
    tallies: UIntArray  # (tallies, 3) row of costs, its first use, one after its last use
    starts: UIntArray  # (stretches + 1) first tally of each stretch, and the end of the last
    num_ops: UIntArray  # ops without padding


jax.tree_util.register_dataclass(ForwardProgram)
jax.tree_util.register_dataclass(BackwardProgram)


class Task(NamedTuple):
    """Problem that the interpreter's loops solve for every configuration of a batch."""

    forward: ForwardProgram  # the program as data
    backward: BackwardProgram | None  # None: only makespans
    temperature: Float[Array, ""] | float | None = None  # of smooth maxima [s]; None: exact maxima


def bucket_size(size: int, least: int) -> int:
    """Round a size up to `least` times a power of `BUCKETS`, so that few sizes are compiled."""
    while least < size:
        least *= BUCKETS
    return least


def padded_width(rows: CostRows) -> int:
    """Return the padded number of a program's cost rows, or of its cost columns if larger."""
    return bucket_size(max(len(rows.terms), rows.num_columns), LEAST_ROWS)


def forward_program(ops: BinaryOps, rows: CostRows) -> ForwardProgram:
    """Encode ops of two operands, and the cost rows that they read, as padded arrays."""
    row = rows.row_of_position
    columns = (*ops.operand_slots(), ops.slot, row[ops.lag], row[ops.duration])
    code = np.empty((bucket_size(ops.num_ops, LEAST_OPS), len(columns)), Unsigned)
    for field, column in zip(code.T, columns, strict=True):
        field[: ops.num_ops] = column
    # padding writes max(0, -inf) to a slot that no op reads
    code[ops.num_ops :] = (START_SLOT, NEVER_SLOT, SPARE_SLOT, ZERO_ROW, ZERO_ROW)
    return ForwardProgram(
        code=code,
        num_groups=np.array(-(-ops.num_ops // GROUP), Unsigned),
        last=np.array(ops.slot[-1], Unsigned),
        terms=pad_rows(-np.sort(-rows.terms), padded_width(rows)),  # the column of zeros last
        num_rows=np.array(len(rows.terms), Unsigned),
        num_slots=bucket_size(ops.num_slots, LEAST_SLOTS),
    )


def backward_program(ops: BinaryOps, rows: CostRows) -> BackwardProgram:
    """Encode the uses of cost rows as padded arrays, to count the uses on critical paths."""
    # A node's own cost counts if its op is on the path, a lag if the path continues over it. Uses
    # are sorted by cost row within each stretch, and cut into tallies, which a byte can count.
    row = rows.row_of_position
    cost_row = np.concatenate([row[ops.duration], row[ops.lag]])  # two uses per op
    stretch, op = np.divmod(np.tile(np.arange(ops.num_ops), 2), STRETCH)
    order = np.lexsort((cost_row, stretch))
    order = order[cost_row[order] != ZERO_ROW]
    uses = 2 * op + np.repeat([0, 1], ops.num_ops)  # op k of a stretch has rows 2 k and 2 k + 1
    # row + rows * stretch, so that no tally crosses from a stretch to the next
    tallies = _tallies(cost_row[order] + len(rows.terms) * stretch[order])
    tally_stretch, tallies[:, 0] = np.divmod(tallies[:, 0], len(rows.terms))
    padded_ops = bucket_size(ops.num_ops, LEAST_OPS)
    stretches = -(-padded_ops // STRETCH)
    starts = np.searchsorted(tally_stretch, np.arange(stretches + 1))
    return BackwardProgram(
        uses=pad_rows(uses[order, None], 2 * padded_ops)[:, 0],  # two costs of each op
        tallies=pad_rows(tallies, bucket_size(len(tallies), padded_ops)),
        starts=starts.astype(Unsigned),
        num_ops=np.array(ops.num_ops, Unsigned),
    )


def _tallies(row: Int[NumpyArray, " uses"]) -> Int[NumpyArray, "tallies 3"]:
    """Cut uses into tallies of one cost row, at most `MAX_TALLY` long: (cost row, start, stop)."""
    # With MAX_TALLY 2, rows 5 5 5 8 are equal from 0 to 3 and 3 to 4, in 2 and 1 tallies: starts
    # 0 0 3 plus 2 times the number among equal rows, 0 1 0, are 0 2 3, and stops 2 3 4.
    first = np.flatnonzero(np.diff(row, prepend=-1))
    end = np.append(first[1:], len(row))
    num_tallies = -(-(end - first) // MAX_TALLY)
    start = np.repeat(first, num_tallies)
    number = np.arange(len(start)) - np.repeat(np.cumsum(num_tallies) - num_tallies, num_tallies)
    start = start + MAX_TALLY * number
    stop = np.minimum(start + MAX_TALLY, np.repeat(end, num_tallies))
    return np.stack([row[start], start, stop], axis=1)


def pad_rows(table: Int[NumpyArray, "rows columns"], size: int) -> UInt[NumpyArray, "size columns"]:
    """Append rows of zeros to a table until it has `size` rows."""
    filled = np.zeros((size, table.shape[1]), Unsigned)
    filled[: len(table)] = table
    return filled
