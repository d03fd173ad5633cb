"""A program as data, for loops that serve every program of the same bucket of sizes.

Compilation time does not depend on the number of ops, and a comparison of many schedules compiles
a handful of times.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray, UInt
from pipejax.engine.batched.binary_program import NEVER_SLOT, SPARE_SLOT, START_SLOT, BinaryOps
from pipejax.engine.batched.cost_rows import ZERO_ROW, CostRows
from pipejax.engine.batched.single_xla_call import Unsigned

GROUP = 8  # ops of one iteration; their choices fill a byte
BUCKETS = 8  # sizes grow by this factor from bucket to bucket
LEAST_OPS, LEAST_SLOTS, LEAST_ROWS = 512, 128, 64
ALWAYS, CHOICE, NOT_CHOICE = 0, 1, 2
MAX_RUN = 255  # uses that one byte can count
STRETCH = 2048  # ops whose uses are counted together: their part of the path stays in cache

Column = Int[NumpyArray, " some"]
UIntArray = UInt[Array, "..."] | UInt[NumpyArray, "..."]


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardProgram:
    """A program as data, padded to a bucket of sizes.

    Attributes:
      code: (ops, 5) slots of first, second and result, rows of lag and own cost.
      num_groups: groups of `GROUP` ops, padding of the last included.
      last: slot of the makespan.
      terms: (rows, 2) columns of the cost matrix that add up to each row; column 0 is zero.
      num_rows: rows of costs without padding.
      num_slots: rows of the state.
    """

    code: UIntArray
    num_groups: UIntArray
    last: UIntArray
    terms: UIntArray
    num_rows: UIntArray
    num_slots: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardProgram:
    """The same program for counting costs on the critical path, from the last op to the first.

    Attributes:
      edges: (edges, 3) op that reads, op that is read, and whether the choice or its opposite
        says that the path goes there.
      num_edges: edges without padding.
      num_ops: ops without padding.
      uses: (uses, 2) op that uses a cost, and whether the choice says that it counts; by row
        within a stretch of ops.
      runs: (runs, 3) row of costs, and its first use and the one after its last in `uses`.
      num_runs: runs without padding.
    """

    edges: UIntArray
    num_edges: UIntArray
    num_ops: UIntArray
    uses: UIntArray
    runs: UIntArray
    num_runs: UIntArray


jax.tree_util.register_dataclass(ForwardProgram)
jax.tree_util.register_dataclass(BackwardProgram)


class Task(NamedTuple):
    """What the loops solve for every configuration.

    Attributes:
      forward: the program as data.
      backward: the same for the backward pass; without it only the makespans are wanted.
      temperature: of smooth maxima [s]; exact ones if None.
    """

    forward: ForwardProgram
    backward: BackwardProgram | None
    temperature: Float[Array, ""] | float | None = None


def bucket(size: int, least: int) -> int:
    """Round a size up to its bucket."""
    while least < size:
        least *= BUCKETS
    return least


def width(rows: CostRows) -> int:
    """Bucket of the costs of a program: of its rows and of the columns of its matrix, as one."""
    return bucket(max(len(rows.terms), rows.num_columns), LEAST_ROWS)


def forward_program(ops: BinaryOps, rows: CostRows) -> ForwardProgram:
    """Encode a program as data."""
    row = rows.row_of_position
    columns = (*ops.operand_slots(), ops.slot, row[ops.lag], row[ops.own])
    code = np.zeros((bucket(ops.num_ops, LEAST_OPS), len(columns)), Unsigned)
    # padding writes max(0, -inf) to a slot that no op reads
    code[:] = (START_SLOT, NEVER_SLOT, SPARE_SLOT, ZERO_ROW, ZERO_ROW)
    code[: ops.num_ops] = np.stack(columns, axis=1)
    return ForwardProgram(
        code=code,
        num_groups=np.array(-(-ops.num_ops // GROUP), Unsigned),
        last=np.array(ops.slot[-1], Unsigned),
        terms=_padded(rows.terms, width(rows)),
        num_rows=np.array(len(rows.terms), Unsigned),
        num_slots=bucket(ops.num_slots, LEAST_SLOTS),
    )


def backward_program(ops: BinaryOps, rows: CostRows) -> BackwardProgram:
    """Encode the edges and the uses of costs as data.

    Edges stand from the last op to the first, those of one op side by side: when they are
    reached, all readers of the op have handed the path on to it. The edge to the second operand
    holds where the choice is set, that to the first where it is not; edges to the source and to
    nothing lead nowhere and are left out. A node's own cost counts whenever its op is on the path,
    a lag only where the path goes on over it. Uses are sorted by row within stretches of ops, so
    that a stretch's part of the path stays in cache, and cut into runs that a byte can count.
    """
    number = np.arange(ops.num_ops)[::-1]
    edges = np.stack(
        [
            np.stack([number, operand[number], np.full(ops.num_ops, says)], axis=1)
            for operand, says in ((ops.first, NOT_CHOICE), (ops.second, CHOICE))
        ],
        axis=1,
    ).reshape(-1, 3)
    edges = edges[edges[:, 1] >= 0]
    # every op twice: with its own cost, then with its lag
    row = rows.row_of_position
    used = np.concatenate([row[ops.own], row[ops.lag]])
    uses = np.stack(
        [np.tile(np.arange(ops.num_ops), 2), np.repeat([ALWAYS, CHOICE], ops.num_ops)], axis=1
    )
    order = np.lexsort((used, uses[:, 0] // STRETCH))
    order = order[used[order] != ZERO_ROW]
    runs = _runs(used[order])
    most = 2 * bucket(ops.num_ops, LEAST_OPS)  # two operands and two costs of each op
    return BackwardProgram(
        edges=_padded(edges, most),
        num_edges=np.array(len(edges), Unsigned),
        num_ops=np.array(ops.num_ops, Unsigned),
        uses=_padded(uses[order], most),
        runs=_padded(runs, bucket(len(runs), most // 2)),
        num_runs=np.array(len(runs), Unsigned),
    )


def _runs(row: Column) -> Int[NumpyArray, "runs 3"]:
    """Cut uses into runs of one row each, none longer than `MAX_RUN`.

    A stretch of n equal rows makes ceil(n / MAX_RUN) runs: its start is repeated that often, and
    run k of them begins k * MAX_RUN behind the first.
    """
    first = np.flatnonzero(np.diff(row, prepend=-1))
    last = np.append(first[1:], len(row))
    pieces = -(-(last - first) // MAX_RUN)
    start = np.repeat(first, pieces)
    place = np.arange(len(start)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = start + MAX_RUN * place
    stop = np.minimum(start + MAX_RUN, np.repeat(last, pieces))
    return np.stack([row[start], start, stop], axis=1)


def _padded(table: Int[NumpyArray, "rows columns"], size: int) -> UInt[NumpyArray, "padded _"]:
    padded = np.zeros((size, table.shape[1]), Unsigned)
    padded[: len(table)] = table
    return padded
