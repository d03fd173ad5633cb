"""The recurrence written out op by op: one kernel that keeps all live values in registers.

XLA fuses the whole program into a single pass over the batch, which it also splits over the cores.
That is the fastest form, but its compile time grows with the program; `interpreter.py` takes over
where it would be too long. There is no backward pass here: how often each cost stands on the
longest path so far goes along with every value, all counts as bit fields of a few words.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray, UInt
from pipejax.base.machine import cpu_options
from pipejax.costs.precision import accept_type
from pipejax.engine.batched.binary_program import NO_OPERAND, START, BinaryOps
from pipejax.engine.batched.cost_rows import ZERO_ROW, CostRows, Leaves
from pipejax.engine.batched.interpreter import num_threads, side_by_side
from pipejax.engine.batched.interpreter_loops import LOOPS

MAX_OPS = 700  # about a second of compilation
MAX_WITH_COUNTS = 1600  # values and words of the ops: a second of compilation

Code = list[list[int]]  # of each op: its operands, and the rows of lag and own cost
Values = Float[Array, " batch"]
Counts = Float[NumpyArray, "columns batch"]

KernelWithCounts = Callable[[Leaves], tuple[Values, Counts]]

# XLA's newer emitters cut a large function of several results into calls, which are no vectors
IN_ONE_PIECE = LOOPS | {"xla_cpu_use_fusion_emitters": False}


class BitFields(NamedTuple):
    """The uses of each cost row on a path as bit fields of a few words."""

    # Words add up as the uses do, all fields at once. It does not matter what a field carries over
    # into the next on the way, for those of a whole path fit.

    once: UInt[NumpyArray, "rows words"]  # what one use of a row adds
    places: dict[int, tuple[int, int, int]]  # word, lowest bit and width of each field
    least: Int[NumpyArray, " rows"]  # uses that every path has; fields count those beyond


def unrolled(ops: BinaryOps, rows: CostRows) -> Callable[[Leaves], Values]:
    """Compile a program into a kernel: from leaves of one batch to (batch) makespans [s]."""
    return jax.jit(functools.partial(_makespans, ops, rows), compiler_options=cpu_options(**LOOPS))


def unrolled_with_counts(
    ops: BinaryOps, rows: CostRows, dtype: np.dtype
) -> KernelWithCounts | None:
    """Build the same with counts of each column of the costs on the critical path."""
    # None where it would take long to compile. Words are as wide as costs; where these would be too
    # many, they have 64 bits, which takes a fifth longer and compiles faster.
    candidates = (bit_fields(ops, rows, bits) for bits in sorted({8 * dtype.itemsize, 64}))
    few = (f for f in candidates if ops.num_ops * (1 + f.once.shape[1]) <= MAX_WITH_COUNTS)
    if (fields := next(few, None)) is None:
        return None
    options = cpu_options(**IN_ONE_PIECE)
    kernel = functools.partial(_with_counts, ops, rows, fields)
    solve = jax.jit(kernel, compiler_options=options)

    def run(leaves: Leaves) -> tuple[Values, Counts]:
        pieces = rows.pieces({name: np.asarray(leaf) for name, leaf in leaves.items()})
        size = max(map(len, pieces))
        values, counts = np.empty(size, dtype), np.empty((rows.num_columns, size), dtype)

        def take(low: int, results: list[NumpyArray]) -> None:
            makespans, *columns = results
            values[low : low + len(makespans)] = makespans
            for column, uses in enumerate(columns, 1):
                counts[column, low : low + len(uses)] = uses

        with accept_type(np.float64):  # for words of 64 bits
            side_by_side(solve, pieces, num_threads(ops.num_ops // 4, size), take)
        return jnp.asarray(values), counts

    return run


def _makespans(ops: BinaryOps, rows: CostRows, leaves: Leaves) -> Values:
    makespan, _ = _forward(_code(ops, rows), rows.list(leaves))
    return jnp.broadcast_to(makespan, (max(map(len, leaves.values())),))


def _with_counts(
    ops: BinaryOps, rows: CostRows, fields: BitFields, pieces: tuple[Array, ...]
) -> list[Array]:
    """Makespans (batch) [s], and (batch) uses of each column but the first, that of no cost."""
    code, size, dtype = _code(ops, rows), max(map(len, pieces)), pieces[0].dtype

    def solve(entries: list[Array]) -> list[Array]:
        makespan, second_wins = _forward(code, rows.sums(entries))
        uses = _uses(_words(code, second_wins, fields), fields, dtype)
        column_counts = [jnp.zeros((), dtype)] * rows.num_columns
        for row, pair in enumerate(rows.terms.tolist()):
            for column in filter(None, pair):  # column 0 is no cost
                column_counts[column] += uses[row]
        return [makespan, *column_counts[1:]]

    entries = [jnp.broadcast_to(column, (size,)) for piece in pieces for column in piece.T]
    return _at_once(solve, entries)


def _code(ops: BinaryOps, rows: CostRows) -> Code:
    row = rows.row_of_position
    code: Code = np.stack([ops.first, ops.second, row[ops.lag], row[ops.duration]], axis=1).tolist()
    return code


def _forward(code: Code, cost: list[Array]) -> tuple[Array, dict[int, Array]]:
    """Makespan [s], and of each op with two operands whether it waited for the second."""
    values, second_wins = {START: jnp.zeros_like(cost[ZERO_ROW])}, {}
    for op, (first, second, lag, duration) in enumerate(code):
        if second == NO_OPERAND:
            value = values[first]
        else:
            value = _plus(values[second], lag, cost)
            if first != NO_OPERAND:
                first_value, second_value = jnp.broadcast_arrays(values[first], value)
                # cheaper than a maximum that looks for NaN
                second_wins[op] = second_value > first_value
                value = jax.lax.select(second_wins[op], second_value, first_value)
        values[op] = _plus(value, duration, cost)
    return values[len(code) - 1], second_wins


def _plus(value: Array, row: int, cost: list[Array]) -> Array:
    """Add a cost row; that of zeros adds nothing."""
    return value if row == ZERO_ROW else value + cost[row]


def bit_fields(ops: BinaryOps, rows: CostRows, bits: int) -> BitFields:
    """Fit the uses of every row, as many as any path may have, into words of so many bits."""
    code, num_rows = _code(ops, rows), len(rows.terms)
    unit = np.eye(num_rows, dtype=np.int64)
    unit[ZERO_ROW] = 0
    low, high = {START: unit[ZERO_ROW]}, {START: unit[ZERO_ROW]}
    for op, (first, second, lag, duration) in enumerate(code):
        ways = [(first, ZERO_ROW), (second, lag)]
        for ends, extreme in ((low, np.minimum), (high, np.maximum)):
            extremes = [ends[operand] + unit[row] for operand, row in ways if operand != NO_OPERAND]
            ends[op] = functools.reduce(extreme, extremes) + unit[duration]
    least = low[len(code) - 1]
    places: dict[int, tuple[int, int, int]] = {}
    word = bit = 0
    for row, more in enumerate((high[len(code) - 1] - least).tolist()):
        width = more.bit_length()
        if bit + width > bits:
            word, bit = word + 1, 0
        if width:
            places[row] = (word, bit, width)
        bit += width
    once = np.zeros((num_rows, word + 1), f"u{bits // 8}")
    for row, (word, bit, _) in places.items():
        once[row, word] = 1 << bit
    return BitFields(once, places, least)


def _words(code: Code, second_wins: dict[int, Array], fields: BitFields) -> list[Array]:
    """Add up the words of the critical path."""
    # Those of the path over first operands alone are known. An op's words say how far they are from
    # these, and change only where an op waits for its second operand.
    once, num_words = fields.once, fields.once.shape[1]
    base_words = {START: once[ZERO_ROW]}
    differences = {START: [jnp.zeros((), once.dtype)] * num_words}
    for op, (first, second, lag, duration) in enumerate(code):
        if second == NO_OPERAND:
            base, words = base_words[first], differences[first]
        else:
            base, words = base_words[second] + once[lag], differences[second]
        if op in second_wins:
            gaps, base = base - base_words[first], base_words[first]
            words = [
                jax.lax.select(second_wins[op], jax.lax.add(word, gap) if gap else word, first_word)
                for first_word, word, gap in zip(differences[first], words, gaps, strict=True)
            ]
        base_words[op], differences[op] = base + once[duration], words
    last = len(code) - 1
    least = (fields.least[:, None].astype(once.dtype) * once).sum(axis=0, dtype=once.dtype)
    pairs = zip(differences[last], base_words[last] - least, strict=True)
    return [word + more for word, more in pairs]


def _uses(words: list[Array], fields: BitFields, dtype: np.dtype) -> list[Array]:
    uses = [jnp.array(least, dtype) for least in fields.least.tolist()]
    for row, (word, bit, width) in fields.places.items():
        number = fields.once.dtype.type
        field = (words[word] >> number(bit)) & number((1 << width) - 1)
        uses[row] += field.astype(dtype)
    return uses


def _at_once(function: Callable[[list[Array]], list[Array]], inputs: list[Array]) -> list[Array]:
    """Apply a function of numbers, with one result more than inputs, to every entry in one pass."""

    # On a CPU, XLA makes kernels of one result each and computes what several share once for each
    # of them. A reduction may have several. So this is one: over two copies of the inputs, which
    # are never stored, by a function that ignores what was reduced so far. It takes as many results
    # as inputs, so the last input is there twice.
    def newest(_: Sequence[Array], entry: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(function(list(entry[:-1])))

    copies = [jnp.broadcast_to(row, (2, *row.shape)) for row in (*inputs, inputs[-1])]
    zero = np.zeros((), inputs[0].dtype)[()]
    return list(jax.lax.reduce(copies, [zero] * len(copies), newest, (0,)))
