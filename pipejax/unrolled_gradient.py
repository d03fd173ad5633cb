"""Value and gradient of a program written out op by op, in stretches of one kernel each.

A stretch keeps one bit per choice and the values that later stretches read. The way back hands
"is on the critical path" from each op to the operand that won, and adds to the count of each
cost; several counts share one integer, so that a stretch has few results.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.binary_ops import BinaryOps, RowOp, row_ops
from pipejax.blocks import in_blocks
from pipejax.cost_rows import ZERO_ROW, CostRows, Leaves
from pipejax.kernel_options import compiled
from pipejax.shapes import Array, Float
from pipejax.unrolled import plus_row

STRETCH = 128  # ops; kernels with more results than some twenty are not fused into one
BITS = 31  # of an integer that are used
BLOCK = 1 << 14  # configurations at a time: what passes between stretches stays in cache

Values = dict[int, Array]


class _Place(NamedTuple):
    """Where the count of a row stands: word, first bit, bits."""

    word: int
    shift: int
    bits: int


def unrolled_gradient(
    leaves: Leaves, *, ops: BinaryOps, rows: CostRows, size: int
) -> tuple[Float[Array, " batch"], Float[Array, "batch rows"]]:
    """Makespans of a batch, and how often each cost row stands on the critical path.

    Args:
      leaves: (size or 1, entries) costs [s].
      ops: the program; a new one is a new compilation.
      rows: cost rows that it reads.
      size: configurations in the batch.

    Returns:
      (batch) makespans [s], and (batch, rows) counts.

    Example:
      >>> import pipejax as pj
      >>> from pipejax.binary_ops import binary_ops
      >>> from pipejax.cost_rows import batch_leaves, cost_rows
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> program = pj.lower(table, step_end=False)
      >>> costs = pj.Costs(forward=np.array([1.0, 2.0]), backward=2.0)
      >>> leaves, size = batch_leaves(costs, program.layout)
      >>> ops, rows = binary_ops(program), cost_rows(program, costs)
      >>> values, counts = unrolled_gradient(leaves, ops=ops, rows=rows, size=size)
      >>> values.tolist(), counts[0].tolist()  # zeros, F, B, messages
      ([9.0, 12.0], [0.0, 3.0, 3.0, 2.0])
    """
    value, counts = compiled(_unrolled)(leaves, ops=ops, rows=rows, size=size)
    return value, counts


def _unrolled(
    leaves: Leaves, *, ops: BinaryOps, rows: CostRows, size: int
) -> tuple[Float[Array, " batch"], Float[Array, "batch rows"]]:
    listed = row_ops(ops, rows)
    stretches = [listed[k : k + STRETCH] for k in range(0, len(listed), STRETCH)]
    places = _places(stretches, rows.num_rows)
    words = 1 + max(place.word for place in places)
    dtype = leaves[next(iter(leaves))].dtype
    block = min(BLOCK, size)

    def solve(at: Array) -> tuple[Array, Array]:
        cut = {
            name: jax.lax.dynamic_slice_in_dim(leaf, at, block) if len(leaf) > 1 else leaf
            for name, leaf in leaves.items()
        }
        cost = [jnp.broadcast_to(row, (block,)) for row in rows.list(cut)]
        return _solve(stretches, places, words, cost)

    value, packed = in_blocks(solve, size=size, block=block)
    word, shift, bits = np.array(places).T
    counts = (packed[:, word] >> shift[None, :]) & ((1 << bits) - 1)[None, :]
    return value, counts.astype(dtype).at[:, ZERO_ROW].set(0)


def _solve(
    stretches: Sequence[Sequence[RowOp]], places: Sequence[_Place], words: int, cost: list[Array]
) -> tuple[Array, Array]:
    """Makespans and packed counts of one block."""
    last_reader = {-1: len(stretches)}
    for k, stretch in enumerate(stretches):
        for op in stretch:
            last_reader |= {operand: k for operand in (op.first, op.second) if operand is not None}
    end = stretches[-1][-1].number
    last_reader[end] = len(stretches)
    values: Values = {-1: jnp.zeros_like(cost[ZERO_ROW])}
    choices = []
    for k, stretch in enumerate(stretches):
        kept = {op for op, reader in last_reader.items() if reader > k}
        values, chosen = _forward(stretch, values, kept, cost)
        choices.append(chosen)
    none = jnp.zeros(cost[ZERO_ROW].shape, jnp.int32)
    adjoint, counts = {end: none - 1}, [none] * words
    for stretch, chosen in zip(reversed(stretches), reversed(choices), strict=True):
        adjoint, counts = _backward(stretch, adjoint, chosen, counts, places)
    return values[end], jnp.stack(counts, axis=1)


def _forward(
    stretch: Sequence[RowOp], values: Values, kept: set[int], cost: list[Array]
) -> tuple[Values, list[Array]]:
    """Values of a stretch that are read later, and its choices as bits."""
    values = dict(values)
    none = jnp.zeros(cost[ZERO_ROW].shape, jnp.int32)
    words: list[Array] = []
    bit = 0
    for op in stretch:
        value = plus_row(values[op.first], op.first_lag, cost)
        if op.second is not None:
            other = plus_row(values[op.second], op.second_lag, cost)
            second_wins = other > value
            value = jax.lax.select(second_wins, other, value)
            if bit % BITS == 0:
                words.append(none)
            words[-1] |= jax.lax.select(second_wins, none + (1 << bit % BITS), none)
            bit += 1
        values[op.number] = plus_row(value, op.own, cost)
    new = [op.number for op in stretch if op.number in kept]
    results = _in_one_kernel([*(values[op] for op in new), *words])
    values = {op: value for op, value in values.items() if op in kept}
    return values | dict(zip(new, results, strict=False)), results[len(new) :]


def _backward(
    stretch: Sequence[RowOp],
    adjoint: Values,
    choices: list[Array],
    counts: list[Array],
    places: Sequence[_Place],
) -> tuple[Values, list[Array]]:
    """Hand the critical path back through a stretch; masks are integers of all bits or none."""
    adjoint, counts = dict(adjoint), list(counts)
    none = jnp.zeros_like(counts[0])
    bit = sum(op.second is not None for op in stretch)
    touched: dict[int, None] = {}

    def count(row: int, mask: Array) -> None:
        if row != ZERO_ROW:
            counts[places[row].word] += mask & (1 << places[row].shift)

    def hand(op: int, mask: Array) -> None:
        if op >= 0:
            adjoint[op] = adjoint[op] | mask if op in adjoint else mask
            touched[op] = None

    for op in reversed(stretch):
        bit -= op.second is not None
        mask = adjoint.pop(op.number, None)
        touched.pop(op.number, None)
        if mask is None:
            continue
        count(op.own, mask)
        if op.second is not None:
            second_wins = (choices[bit // BITS] & (1 << bit % BITS)) != 0
            to_second = jax.lax.select(second_wins, mask, none)
            mask = jax.lax.select(second_wins, none, mask)
            hand(op.second, to_second)
            count(op.second_lag, to_second)
        hand(op.first, mask)
        count(op.first_lag, mask)
    results = _in_one_kernel([*(adjoint[op] for op in touched), *counts])
    adjoint |= dict(zip(touched, results, strict=False))
    return adjoint, results[len(touched) :]


def _in_one_kernel(results: list[Array]) -> list[Array]:
    """Return the results unchanged.

    XLA compiles for CPUs one kernel per result, each of which computes again what they share;
    but a reduction of several arrays together is one kernel. So this is a maximum over two
    equal copies of each.
    """
    if jax.default_backend() != "cpu":
        return results
    copies = tuple(jnp.broadcast_to(r[:, None], (r.shape[0], 2)) for r in results)
    least = tuple(
        jnp.array(-jnp.inf if np.issubdtype(r.dtype, np.floating) else np.iinfo(r.dtype).min,
                  r.dtype) for r in results
    )  # fmt: skip
    merged = jax.lax.reduce(
        copies, least, lambda a, b: tuple(jnp.maximum(x, y) for x, y in zip(a, b, strict=True)),
        (1,),
    )  # fmt: skip
    return list(merged)


def _places(stretches: Sequence[Sequence[RowOp]], num_rows: int) -> list[_Place]:
    """Give every count bits enough for all uses of its row."""
    uses = np.zeros(num_rows, int)
    for stretch in stretches:
        for op in stretch:
            np.add.at(uses, [op.own, op.first_lag, op.second_lag], 1)
    uses[ZERO_ROW] = 0
    places, word, used = [], 0, 0
    for bits in (int(n).bit_length() for n in uses):
        if used + bits > BITS:
            word, used = word + 1, 0
        places.append(_Place(word, used, bits))
        used += bits
    return places
