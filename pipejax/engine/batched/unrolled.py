"""The recurrence written out op by op: one kernel that keeps all live values in registers.

The unrolled form is the fastest, but compiles longer for larger programs. Without a backward pass,
every value carries the counts of costs on its longest path. Several counts are packed into one
integer (a word), in which each count is a digit with its own base.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray, UInt
from pipejax.base.compiled import cpu_options
from pipejax.costs.precision import accept_type
from pipejax.engine.batched.binary_program import NO_OPERAND, START, BinaryOps
from pipejax.engine.batched.cost_rows import ZERO_ROW, CostRows, Leaves
from pipejax.engine.batched.interpreter import num_threads, side_by_side
from pipejax.engine.batched.interpreter_loops import LOOPS

MAX_OPS = 1600  # about a second of compilation
MAX_VALUES_AND_WORDS = 3200  # of all ops, with counts: about two seconds of compilation

Code = list[list[int]]  # for each op: its two operands, and the cost rows of lag and duration
Values = Float[Array, " batch"]
Counts = Float[NumpyArray, "columns batch"]

KernelWithCounts = Callable[[Leaves], tuple[Values, Counts]]

# XLA's newer emitters cut a large function into calls, which do not vectorise and compile long
SINGLE_FUNCTION = LOOPS | {"xla_cpu_use_fusion_emitters": False}


class Digits(NamedTuple):
    """Layout of counts in words: each digit counts how often a path uses a cost row."""

    # Words are added like counts. A digit may overflow on the way, but counts of a whole path fit.

    one_use: UInt[NumpyArray, "rows words"]  # words that one use of a cost row adds
    places: dict[int, tuple[int, int, int]]  # {row: (word, value of 1, base) of its digit}
    least: Int[NumpyArray, " rows"]  # uses that every path has; digits count further uses
    # {row without a digit: (constant, factors)}: its uses are constant + factors @ uses of all rows
    sums: dict[int, tuple[int, Int[NumpyArray, " rows"]]]


def unrolled(ops: BinaryOps, rows: CostRows) -> Callable[[Leaves], Values]:
    """Compile a program into a kernel that computes makespans (batch) [s] from a batch of costs."""
    kernel = functools.partial(_makespans, ops, rows)
    return jax.jit(kernel, compiler_options=cpu_options(**SINGLE_FUNCTION))


def unrolled_with_counts(
    ops: BinaryOps, rows: CostRows, dtype: np.dtype
) -> KernelWithCounts | None:
    """Compile a kernel for makespans and cost counts; None if compilation would take too long."""
    # The kernel returns makespans (batch), and counts (columns, batch) of cost columns on the
    # critical path. Words have the bits of a cost, or 64 bits if there would be too many words.
    for bits in sorted({8 * dtype.itemsize, 64}):
        digits = lay_out_digits(ops, rows, bits)
        if ops.num_ops * (1 + digits.one_use.shape[1]) <= MAX_VALUES_AND_WORDS:
            break
    else:
        return None
    kernel = functools.partial(_with_counts, ops, rows, digits)
    solve = jax.jit(kernel, compiler_options=cpu_options(**SINGLE_FUNCTION))

    def run_in_threads(leaves: Leaves) -> tuple[Values, Counts]:
        """Return makespans (batch) [s] and counts (columns, batch), computed in threads."""
        pieces = rows.pieces({name: np.asarray(leaf) for name, leaf in leaves.items()})
        size = max(map(len, pieces))
        # no cost has column 0: nothing writes or reads its counts
        values, counts = np.empty(size, dtype), np.empty((rows.num_columns, size), dtype)

        def store_part(low: int, results: list[NumpyArray]) -> None:
            """Write the results of the part that begins at configuration `low`."""
            makespans, *columns = results
            values[low : low + len(makespans)] = makespans
            for column, uses in enumerate(columns, 1):
                counts[column, low : low + len(uses)] = uses

        with accept_type(np.float64):  # for words of 64 bits
            side_by_side(solve, pieces, num_threads(ops.num_ops // 4, size), store_part)
        return jnp.asarray(values), counts

    return run_in_threads


def _makespans(ops: BinaryOps, rows: CostRows, leaves: Leaves) -> Values:
    entries = [column for piece in rows.pieces(leaves) for column in piece.T]
    makespan, _ = _run_forward(_op_code(ops, rows), rows.sums(entries))
    return jnp.broadcast_to(makespan, (max(map(len, leaves.values())),))


def _with_counts(
    ops: BinaryOps, rows: CostRows, digits: Digits, pieces: tuple[Array, ...]
) -> list[Array]:
    """Return makespans (batch) [s], then counts (batch) of each cost column from 1."""
    # A count says how often the critical path uses the column. `pieces` hold costs (batch or 1,
    # columns). A cost row is the sum of a pair of columns, and `digits` pack its uses in words.
    code, size, dtype = _op_code(ops, rows), max(map(len, pieces)), pieces[0].dtype

    def configuration_results(entries: list[Array]) -> list[Array]:
        """Return makespan and counts by cost column, given one configuration's costs."""
        makespan, second_is_later = _run_forward(code, rows.sums(entries))
        uses = _unpack_uses(_pack_uses(code, second_is_later, digits), digits, dtype)
        column_counts = [jnp.zeros((), dtype)] * rows.num_columns
        for row, pair in enumerate(rows.terms.tolist()):
            for column in filter(None, pair):  # column 0 is no cost
                column_counts[column] += uses[row]
        return [makespan, *column_counts[1:]]

    entries = [jnp.broadcast_to(column, (size,)) for piece in pieces for column in piece.T]
    return _in_one_pass(configuration_results, entries)


def _op_code(ops: BinaryOps, rows: CostRows) -> Code:
    """List for each op: first operand, second operand, cost row of lag, cost row of duration."""
    row = rows.row_of_position
    code: Code = np.stack([ops.first, ops.second, row[ops.lag], row[ops.duration]], axis=1).tolist()
    return code


def _run_forward(code: Code, cost: list[Array]) -> tuple[Array, dict[int, Array]]:
    """Return the makespan () [s], and {op of two operands: whether the second was later ()}."""
    values, second_is_later = {START: jnp.zeros_like(cost[ZERO_ROW])}, {}
    for op, (first, second, lag, duration) in enumerate(code):
        if second == NO_OPERAND:
            value = values[first]
        else:
            value = _add_cost(values[second], lag, cost)
            if first != NO_OPERAND:
                first_value, second_value = jnp.broadcast_arrays(values[first], value)
                # cheaper than a maximum that looks for NaN
                second_is_later[op] = second_value > first_value
                value = jax.lax.select(second_is_later[op], second_value, first_value)
        values[op] = _add_cost(value, duration, cost)
    return values[len(code) - 1], second_is_later


def _add_cost(value: Array, row: int, cost: list[Array]) -> Array:
    """Add a cost row to a value, unless it is the row of zeros."""
    return value if row == ZERO_ROW else value + cost[row]


def lay_out_digits(ops: BinaryOps, rows: CostRows, bits: int) -> Digits:
    """Lay out digits, in words of `bits` bits, that can count any path's uses of cost rows."""
    # If paths have 2 to 4 uses of row 1 and 0 to 1 of row 2, row 1 has a digit of base 3 for the 0
    # to 2 uses beyond 2, and row 2 one of base 2: a use of row 1 adds 1, one of row 2 adds 3.
    code, num_rows = _op_code(ops, rows), len(rows.terms)
    unit = np.eye(num_rows, dtype=np.int64)
    unit[ZERO_ROW] = 0
    low, high = {START: unit[ZERO_ROW]}, {START: unit[ZERO_ROW]}  # least and most uses up to an op
    # `path`: uses up to an op along first operands; a gap: their change if an op takes its second
    path, gaps = {START: unit[ZERO_ROW]}, [unit[ZERO_ROW]]
    for op, (first, second, lag, duration) in enumerate(code):
        over_second = path.get(second, unit[ZERO_ROW]) + unit[lag]
        if first != NO_OPERAND and second != NO_OPERAND:
            gaps.append(over_second - path[first])
        path[op] = (over_second if first == NO_OPERAND else path[first]) + unit[duration]
        for uses, extreme in ((low, np.minimum), (high, np.maximum)):
            if second == NO_OPERAND:
                operand_uses = uses[first]
            else:
                operand_uses = uses[second] + unit[lag]
                if first != NO_OPERAND:
                    operand_uses = extreme(uses[first], operand_uses)
            uses[op] = operand_uses + unit[duration]
    least = low[len(code) - 1]  # of paths to the last op, whose end is the makespan
    excesses, sums = high[len(code) - 1] - least, _row_sums(np.array(gaps), path[len(code) - 1])
    places: dict[int, tuple[int, int, int]] = {}  # {row: (word, value of a use, base)}
    word, value = 0, 1
    for row, excess in enumerate(excesses.tolist()):
        base = 1 if row in sums else excess + 1
        if value * base > 1 << bits:
            word, value = word + 1, 1
        if base > 1:
            places[row] = (word, value, base)
        value *= base
    one_use = np.zeros((num_rows, word + 1), f"u{bits // 8}")
    for row, (word, value, _) in places.items():
        one_use[row, word] = value
    return Digits(one_use, places, least, sums)


def _row_sums(
    gaps: Int[NumpyArray, "gaps rows"], path: Int[NumpyArray, " rows"]
) -> dict[int, tuple[int, Int[NumpyArray, " rows"]]]:
    """Return {row: (constant, factors)} of rows whose uses follow from the uses of other rows."""
    # On every path, the uses of such a row are constant + factors @ uses. Uses of two paths differ
    # by a sum of gaps (see `lay_out_digits`). So a relation that holds for all gaps and for one
    # `path` holds for all paths: a path from stage 0 to stage 3 and back has as many messages there
    # as back.
    sums: dict[int, tuple[int, Int[NumpyArray, " rows"]]] = {}
    products, others = gaps.T @ gaps, list[int]()
    for row in np.flatnonzero(gaps.any(axis=0)).tolist():
        factors, *_ = np.linalg.lstsq(products[np.ix_(others, others)], products[others, row])
        whole = np.zeros(len(path), np.int64)
        whole[others] = np.round(factors)
        if np.array_equal(gaps @ whole, gaps[:, row]):
            sums[row] = int(path[row] - whole @ path), whole
        else:
            others.append(row)
    return sums


def _pack_uses(code: Code, second_is_later: dict[int, Array], digits: Digits) -> list[Array]:
    """Return words whose digits count how often the critical path uses each cost row."""
    # The words of the path over first operands alone (`base_words`) are known numbers. Each op
    # carries the difference from `base_words`, which changes only if it waits for its second
    # operand.
    one_use, num_words = digits.one_use, digits.one_use.shape[1]
    base_words = {START: one_use[ZERO_ROW]}
    differences = {START: [jnp.zeros((), one_use.dtype)] * num_words}
    for op, (first, second, lag, duration) in enumerate(code):
        if second == NO_OPERAND:
            base, words = base_words[first], differences[first]
        else:
            base, words = base_words[second] + one_use[lag], differences[second]
        if op in second_is_later:
            gaps, base = base - base_words[first], base_words[first]
            second_words = [
                jax.lax.add(word, gap) if gap else word
                for word, gap in zip(words, gaps, strict=True)
            ]
            select = functools.partial(jax.lax.select, second_is_later[op])
            words = list(map(select, second_words, differences[first]))
        base_words[op], differences[op] = base + one_use[duration], words
    last = len(code) - 1
    least = (digits.least[:, None].astype(one_use.dtype) * one_use).sum(axis=0, dtype=one_use.dtype)
    extra_words = base_words[last] - least
    return [word + extra for word, extra in zip(differences[last], extra_words, strict=True)]


def _unpack_uses(words: list[Array], digits: Digits, dtype: np.dtype) -> list[Array]:
    """Decode the digits of words to the number of uses of each cost row."""
    uses = [jnp.array(least, dtype) for least in digits.least.tolist()]
    number = digits.one_use.dtype.type
    for row, (word, value, base) in digits.places.items():
        digit = jax.lax.rem(jax.lax.div(words[word], number(value)), number(base))
        uses[row] += digit.astype(dtype)
    for row, (constant, factors) in digits.sums.items():
        terms = [uses[other] * int(factors[other]) for other in np.flatnonzero(factors).tolist()]
        uses[row] = sum(terms, start=jnp.array(constant, dtype))
    return uses


def _in_one_pass(
    function: Callable[[list[Array]], list[Array]], inputs: list[Array]
) -> list[Array]:
    """Apply a function of n numbers with n + 1 results to arrays (batch), in one fused loop."""

    # On a CPU, XLA compiles a kernel for each result and repeats shared computations in each, but
    # not for a reduction. So this is a reduction over two copies of the inputs, which are never
    # stored. It needs as many results as inputs, so the last input is passed twice.
    def reduce_entry(_: Sequence[Array], entry: Sequence[Array]) -> tuple[Array, ...]:
        """Return the function's results for an entry, and ignore the value reduced so far."""
        return tuple(function(list(entry[:-1])))

    copies = [jnp.broadcast_to(row, (2, *row.shape)) for row in (*inputs, inputs[-1])]
    zero = np.zeros((), inputs[0].dtype)[()]
    return list(jax.lax.reduce(copies, [zero] * len(copies), reduce_entry, (0,)))
