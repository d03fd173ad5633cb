"""A program as binary ops, for the batched engine: two predecessors each, in reused buffer slots.

    value[op] = max(value[first] + cost[first_lag], value[second] + cost[second_lag]) + cost[own]

A node with more predecessors becomes a chain of such ops, the last end a chain of maxima. An op's
slot is free after its last reader, so the state of a configuration is as large as the live ops.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from pipejax.cost_rows import CostRows
from pipejax.program import SOURCE, Program
from pipejax.shapes import Int, NumpyArray

NOTHING = -1  # operand that is the source; an op without a second one has a lower number

Column = Int[NumpyArray, " ops"]


@dataclasses.dataclass(frozen=True, eq=False)
class BinaryOps:
    """Ops in order; operands and results are buffer slots, slot 0 is the source at time 0.

    Attributes:
      first: (ops) op of the first operand, -1 for the source.
      second: (ops) op of the second operand, -1 for the source, or -2 where there is none.
      first_lag: (ops) cost position of the lag from the first operand.
      second_lag: (ops) cost position of the lag from the second.
      own: (ops) cost position of the op's own duration.
      slot: (ops) buffer slot of the result.
      num_slots: slots, that of the source included.
    """

    first: Column
    second: Column
    first_lag: Column
    second_lag: Column
    own: Column
    slot: Column
    num_slots: int

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return len(self.own)

    def operand_slots(self) -> tuple[Column, Column]:
        """Slots that each op reads; an op without a second operand reads the source there."""
        slots = np.append(self.slot, [0, 0])  # at -1 and -2
        return slots[self.first], slots[self.second]


def binary_ops(program: Program) -> BinaryOps:
    """Turn a program into binary ops; at a tie the first predecessor still wins.

    Args:
      program: lowered schedule.

    Returns:
      The ops; the last one is the makespan.

    Cost:
      Linear in the nodes.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=32)
      >>> ops = binary_ops(pj.lower(table, step_end=False))
      >>> ops.num_ops, ops.num_slots < 30
      (512, True)
    """
    preds, lags = np.asarray(program.preds), np.asarray(program.lag_index)
    nodes = np.arange(1, program.num_nodes)
    real = (preds[1:] != SOURCE) | (lags[1:] != 0)
    count = np.maximum(real.sum(axis=1), 1)
    # each node's real predecessors first, in their order
    order = np.argsort(~real, axis=1, kind="stable")
    preds, lags = (np.take_along_axis(x[1:], order, axis=1) for x in (preds, lags))
    is_sink = np.ones(program.num_nodes, bool)
    is_sink[preds[np.arange(preds.shape[1]) < count[:, None]]] = False
    is_sink[SOURCE] = False
    sinks = is_sink[1:]
    sinks_before = np.cumsum(sinks) - sinks  # a maximum of ends follows every sink but the first
    follows = sinks & (sinks_before > 0)
    chain = np.maximum(count - 1, 1)
    first_op = np.cumsum(chain + follows) - (chain + follows)
    last_op = np.append(-1, first_op + chain - 1)  # op that ends each node; the source is -1
    size = int((chain + follows).sum())
    first, second = np.full(size, NOTHING), np.full(size, NOTHING - 1)
    first_lag, second_lag, own = np.zeros((3, size), np.int64)
    first[first_op], first_lag[first_op] = last_op[preds[:, 0]], lags[:, 0]
    for column in range(1, preds.shape[1]):
        has = count > column
        at = first_op[has] + column - 1
        second[at], second_lag[at] = last_op[preds[has, column]], lags[has, column]
        if column > 1:
            first[at] = at - 1
    own[last_op[1:]] = np.asarray(program.duration_index)[nodes]
    ends = last_op[1:][follows] + 1
    first[ends] = np.append(last_op[1:][sinks][:1], ends[:-1])[: len(ends)]
    second[ends] = ends - 1
    slot, num_slots = _allocate(first, second)
    return BinaryOps(first, second, first_lag, second_lag, own, slot, num_slots)


def _allocate(first: Column, second: Column) -> tuple[Column, int]:
    """Give every op a slot that is free, and free it after the last reader."""
    size = len(first)
    last_reader = np.arange(size)
    for operand in (first, second):
        readers = np.flatnonzero(operand >= 0)
        np.maximum.at(last_reader, operand[readers], readers)
    order = np.argsort(last_reader, kind="stable")
    dying = np.split(order, np.searchsorted(last_reader[order], np.arange(1, size))) if size else []
    slot, free, used = [0] * size, [], 1  # slot 0 is the source
    for op, done in enumerate(dying):
        ended = [slot[other] for other in done.tolist() if other != op]
        free += ended  # operands are read before the result is written
        if free:
            slot[op] = free.pop()
        else:
            slot[op], used = used, used + 1
        if last_reader[op] == op and op < size - 1:
            free.append(slot[op])  # nobody reads it
    return np.array(slot, np.int32), used


class RowOp(NamedTuple):
    """One op with the cost rows that it reads; an operand of -1 is the source.

    Attributes:
      number: place of the op.
      first: op of the first operand.
      second: op of the second operand, None where there is none.
      first_lag: row of the lag from the first operand.
      second_lag: row of the lag from the second.
      own: row of the op's own duration.
    """

    number: int
    first: int
    second: int | None
    first_lag: int
    second_lag: int
    own: int


def row_ops(ops: BinaryOps, rows: CostRows) -> list[RowOp]:
    """List the ops of a program one by one, for kernels that are written out.

    Args:
      ops: the program.
      rows: cost rows that it reads.

    Returns:
      (ops) in order.

    Example:
      >>> import pipejax as pj
      >>> from pipejax.cost_rows import cost_rows
      >>> table = pj.schedules.build("gpipe", num_workers=1, num_microbatches=1)
      >>> program = pj.lower(table, step_end=False)
      >>> listed = row_ops(binary_ops(program), cost_rows(program, pj.Costs()))
      >>> [(op.number, op.first, op.second) for op in listed]
      [(0, -1, None), (1, 0, None)]
    """
    row = rows.row_of_position
    columns = zip(
        ops.first.tolist(), ops.second.tolist(), row[ops.first_lag].tolist(),
        row[ops.second_lag].tolist(), row[ops.own].tolist(), strict=True,
    )  # fmt: skip
    return [
        RowOp(number, first, None if second < NOTHING else second, *lags_and_own)
        for number, (first, second, *lags_and_own) in enumerate(columns)
    ]
