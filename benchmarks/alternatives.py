"""The same recurrence as people write it instead: plain Python, NumPy and blocked Numba.

All take one program as lists or arrays of binary ops (pipejax.engine.batched.binary_program) and a
cost matrix (rows, batch), and return the batch's makespans. They do nothing but the recurrence.
"""

from typing import NamedTuple

import numpy as np

from pipejax.engine.batched.binary_program import NO_OPERAND, START, START_SLOT

try:
    import numba
except ModuleNotFoundError:
    numba = None


class Recurrence(NamedTuple):
    """A program for all alternatives: columns of slots and cost rows, op by op."""

    code: np.ndarray  # (ops, 6): slot, first, second, lag row of the second, own row, kind
    num_slots: int


NO_SECOND, PLAIN, LAGGED = 0, 1, 2


def recurrence(ops, rows):
    """Lay a program out; a lone operand with a lag is a maximum with the source, time 0."""
    row = rows.row_of_position
    first = np.where(ops.first == NO_OPERAND, START, ops.first)
    single = ops.second == NO_OPERAND
    second = np.where(single, START, ops.second)
    lag = np.where(single, 0, row[ops.lag])
    kind = np.where(single, NO_SECOND, np.where(lag == 0, PLAIN, LAGGED))
    slots = np.append(ops.slot, START_SLOT)  # the source, at -1
    code = np.stack([ops.slot, slots[first], slots[second], lag, row[ops.duration], kind], axis=1)
    return Recurrence(code.astype(np.int64), ops.num_slots)


def python_loop(program, costs):
    """One configuration after the other, one op after the other, on lists."""
    code = program.code.tolist()
    result = []
    for column in costs.T.tolist():
        state = [0.0] * program.num_slots
        for slot, first, second, lag, duration, kind in code:
            value = state[first]
            if kind:
                other = state[second] + column[lag]
                if other > value:
                    value = other
            state[slot] = value + column[duration]
        result.append(state[code[-1][0]])
    return np.array(result)


def numpy_batch(program, costs, block=4096):
    """One op after the other, on blocks of the batch that stay in cache."""
    out = np.empty(costs.shape[1], costs.dtype)
    code = program.code.tolist()
    for low in range(0, costs.shape[1], block):
        cost = np.ascontiguousarray(costs[:, low : low + block])
        state = np.zeros((program.num_slots, cost.shape[1]), costs.dtype)
        other = np.empty(cost.shape[1], costs.dtype)
        for slot, first, second, lag, duration, kind in code:
            value = state[first]
            if kind == LAGGED:
                np.add(state[second], cost[lag], out=other)
                value = np.maximum(value, other, out=other)
            elif kind == PLAIN:
                value = np.maximum(value, state[second], out=other)
            np.add(value, cost[duration], out=state[slot])
        out[low : low + block] = state[code[-1][0]]
    return out


if numba is not None:

    @numba.njit(fastmath=True, inline="never", boundscheck=False)
    def _block(code, state, cost, width):
        for k in range(code.shape[0]):
            kind = code[k, 5]
            slot, first, second = state[code[k, 0]], state[code[k, 1]], state[code[k, 2]]
            lag, duration = cost[code[k, 3]], cost[code[k, 4]]
            if kind == 0:
                for j in range(width):
                    slot[j] = first[j] + duration[j]
            elif kind == 1:
                for j in range(width):
                    slot[j] = max(first[j], second[j]) + duration[j]
            else:
                for j in range(width):
                    slot[j] = max(first[j], second[j] + lag[j]) + duration[j]

    @numba.njit(parallel=True, fastmath=True, boundscheck=False)
    def _blocks(code, num_slots, costs, out, width):
        size = costs.shape[1]
        for b in numba.prange((size + width - 1) // width):
            low = b * width
            filled = min(size, low + width) - low
            state = np.zeros((num_slots, width), costs.dtype)
            cost = np.zeros((costs.shape[0], width), costs.dtype)
            for k in range(costs.shape[0]):
                for j in range(filled):
                    cost[k, j] = costs[k, low + j]
            _block(code, state, cost, width)
            for j in range(filled):
                out[low + j] = state[code[code.shape[0] - 1, 0], j]

    @numba.njit(parallel=True, fastmath=True, boundscheck=False)
    def triad(target, first, second):
        """STREAM's triad: one product and one sum of two arrays, on all cores."""
        for k in numba.prange(len(target)):
            target[k] = first[k] + 3.0 * second[k]


def numba_blocked(program, costs, block):
    """Blocks of the batch over all cores, an inner loop that LLVM vectorizes."""
    out = np.empty(costs.shape[1], costs.dtype)
    _blocks(program.code, program.num_slots, costs, out, block)
    return out
