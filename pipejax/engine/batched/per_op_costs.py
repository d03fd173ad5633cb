"""A program in which every op and every message has a cost of its own.

Where durations vary from op to op, a cost per phase and stage is not enough. Here the batched
engine reads a column for each op and each message, sorted by phase, stage and microbatch, so that
schedules of the same ops have the same columns.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.engine.batched.binary_program import (
    Task,
    backward_program,
    binary_ops,
    forward_program,
)
from pipejax.engine.batched.cost_rows import CostRows
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, ZERO, Program
from pipejax.engine.pricing import NodeCosts, message_edges
from pipejax.schedules.cells.ops import Phase

LEAST_COLUMNS = 64

Nodes = Int[NumpyArray, " some"]


class PerOpCosts(NamedTuple):
    """A program for the batched engine, and the positions of its columns."""

    # Columns come in pieces of one width each: one of ops, and one for each time that a message
    # takes (one, or transmit time and latency apart), which the messages' link model decides.

    task: Task  # the program as data; its costs are the columns of all pieces in order
    duration_index: Int[NumpyArray, " nodes"]  # column of each node's time, from 1 on; 0 is none
    lag_index: Int[NumpyArray, "nodes max_preds"]  # column of each delay, from 1 on
    ops: Nodes  # (ops) node of each column of the first piece
    messages: Nodes  # (messages) number of the message of each column of the other pieces
    op_seconds: Float[NumpyArray, " width"]  # what each op takes [s]; 0 beyond the ops
    op_worker: Int[NumpyArray, " width"]  # worker of each op, or `NO_WORKER`
    message_seconds: tuple[Float[NumpyArray, " width"], ...]  # (width) pieces [s]


def per_op_costs(program: Program, costs: NodeCosts) -> PerOpCosts:
    """Assign every op and every message of a program its own column."""
    sent = program.messages
    duration, delay = map(np.asarray, costs)
    is_op = (program.phase != Phase.IDLE) & (program.sender == NO_WORKER)
    ops = np.lexsort((program.worker, program.microbatch, program.stage, program.phase))
    ops = ops[is_op[ops]]
    messages = np.lexsort((sent.microbatch, sent.stage, sent.phase))
    width, message_width = _width(len(ops)), _width(len(messages))
    own = np.zeros(program.num_nodes, np.int64)
    own[ops] = 1 + np.arange(len(ops))
    lag = np.zeros(program.preds.shape, np.int64)
    pieces: list[Float[NumpyArray, " width"]] = []
    column = 1 + width + np.arange(len(messages))
    carrier = np.asarray(sent.carrier)[messages]
    is_node, is_late = carrier != SOURCE, np.asarray(sent.lag_index)[messages] != ZERO
    if np.any(is_node):
        own[carrier[is_node]] = column[is_node]
        pieces.append(_filled(duration[carrier], message_width))
        column = column + message_width
    if np.any(is_late):  # it delays an edge
        edge = message_edges(program, messages[is_late])
        lag[*edge] = column[is_late]
        late = np.zeros(len(messages))
        late[is_late] = delay[*edge]
        pieces.append(_filled(late, message_width))
    numbered = dataclasses.replace(program, duration_index=own, lag_index=lag)
    binary, rows = binary_ops(numbered), _rows(own, lag, width + len(pieces) * message_width)
    return PerOpCosts(
        task=Task(forward_program(binary, rows), backward_program(binary, rows)),
        duration_index=own,
        lag_index=lag,
        ops=ops,
        messages=messages,
        op_seconds=_filled(duration[ops], width),
        op_worker=_filled(np.asarray(program.worker)[ops], width, NO_WORKER),
        message_seconds=tuple(pieces),
    )


def _width(count: int) -> int:
    return max(LEAST_COLUMNS, 1 << max(0, count - 1).bit_length())


def _filled(values: NumpyArray, width: int, rest: int = 0) -> NumpyArray:
    return np.pad(values, (0, width - len(values)), constant_values=rest)


def _rows(own: NumpyArray, lag: NumpyArray, num_columns: int) -> CostRows:
    """One row for every column that is read."""
    used = np.union1d(ZERO, np.append(own, lag))
    row_of_position = np.zeros(1 + num_columns, np.int32)
    row_of_position[used] = np.arange(len(used))
    return CostRows(row_of_position, np.outer(used, [1, 0]), (("own", num_columns),))
