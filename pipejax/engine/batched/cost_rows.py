"""Batched costs as a matrix: one row for every distinct cost that a program reads.

In a batch of costs every leaf has a leading axis of N configurations; a scalar holds for all. A row
is the sum of at most two costs. The time of an overlapping fused pair, max(F, B) + k min(F, B), is
no such sum: a JAX function computes it before for each kind of pair (`program_with_pair_times`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.base.checks import whole_number, wrong
from pipejax.costs.costs import (
    MESSAGE_FIELDS,
    PHASE_FIELDS,
    Costs,
    differs_by_microbatch,
    unchecked_costs,
)
from pipejax.costs.precision import accept_type, float_type, is_traced
from pipejax.engine.lowering.program import CostLayout, Program, Sizes
from pipejax.engine.pricing import cost_vector, overlapped
from pipejax.schedules.cells.ops import INPUT_GRADS, Phase

ZERO_ROW = 0
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # ((field, shape of its leaf), ..)
Leaves = dict[str, Any]  # {field of `Costs`: array (N or 1, then the axes as in `Costs`)}
SECOND_IN_A_SUM = ("backward", "input_grad", "weight_grad", "transmit")
OP_AXES = ("stages", "microbatches")
MESSAGE_AXES = ("directions", "pipes", "boundaries", "microbatches")
ONE_CONFIGURATION = "put an axis in front, x[None], and give batch_size=1, or use makespan"
HIGH = 1 << 26  # base of digits that number entries; its square is still exact in float64


@dataclasses.dataclass(frozen=True, eq=False)
class CostRows:
    """Cost rows of a program: the row for each cost position, and the two terms of each row."""

    row_of_position: Int[NumpyArray, " costs"]  # row of each position, in the order of `CostLayout`
    terms: Int[NumpyArray, "rows 2"]  # columns that add up; column 0 and row 0 are zero
    fields: tuple[tuple[str, int], ...]  # (field that is read, number of its entries)

    @property
    def num_columns(self) -> int:
        """Return the number of columns of the cost matrix: zeros, then one for each entry."""
        return 1 + sum(entries for _, entries in self.fields)

    def pieces(self, leaves: Leaves) -> tuple[Any, ...]:
        """Return a matrix [s] of shape (N or 1, entries) for each cost field that is read."""
        return tuple(leaves[name].reshape(len(leaves[name]), -1) for name, _ in self.fields)

    def sums(self, entries: Sequence[Float[Array, "..."]]) -> list[Float[Array, "..."]]:
        """Return each cost row as the sum of its two columns; `entries` lack column 0 (zeros)."""
        zero = jnp.zeros((1,) * entries[0].ndim, entries[0].dtype)
        columns, sums = [zero, *entries], []
        for first, second in self.terms.tolist():
            if first and second:
                sums.append(columns[first] + columns[second])
            else:  # column 0 is zero
                sums.append(columns[max(first, second)])
        return sums


def batch_leaves(
    costs: Costs, layout: CostLayout, batch_size: int | None = None
) -> tuple[Leaves, int]:
    """Return ({field: array (N or 1, ..)}, N): the costs as arrays, and the batch size."""
    fields = {name: leaf for name, leaf in vars(costs).items() if leaf is not None}
    shapes = tuple((name, np.shape(leaf)) for name, leaf in fields.items())
    if batch_size is not None:
        batch_size = whole_number(batch_size, "batch_size")
    sizes = layout.sizes
    try:
        size = _batch_size(shapes, batch_size)
        _check_trailing(shapes, sizes)
    except ValueError:
        if batch_size is None:
            _check_batched(costs, sizes)
        raise
    if batch_size is None:
        _check_one_reading(shapes, size, sizes)
    dtype = float_type(*fields.values())
    leaves: Leaves = {}
    for name, leaf in fields.items():
        if isinstance(leaf, np.ndarray) and leaf.ndim and leaf.strides[0] == 0:
            leaf = leaf[:1]  # one value, broadcast to N
        if not isinstance(leaf, jax.Array):
            leaf = np.atleast_1d(np.asarray(leaf, dtype))
        elif leaf.dtype != dtype or leaf.weak_type or not leaf.ndim:  # other leaves fit
            with accept_type(dtype):
                leaf = jnp.atleast_1d(jnp.asarray(leaf, dtype))
        leaves[name] = leaf
    return leaves, size


@functools.lru_cache(maxsize=256)
def _check_trailing(shapes: Shapes, sizes: Sizes) -> None:
    """Check the axes after the batch axis of each cost array; equal shapes are checked once."""
    unchecked_costs({name: np.zeros(shape[1:]) for name, shape in shapes}).check_shapes(*sizes)


def _check_batched(costs: Costs, sizes: Sizes) -> None:
    """Raise an error about a missing batch axis if the costs fit one configuration without it."""
    try:
        costs.check_shapes(*sizes)
    except ValueError:
        return
    arrays = {name: leaf for name, leaf in vars(costs).items() if np.ndim(leaf)}
    name, leaf = max(arrays.items(), key=lambda item: np.ndim(item[1]))
    raise wrong(
        name,
        f"has shape {leaf.shape}: these costs of one configuration have no batch axis, the first "
        f"axis of every array: {ONE_CONFIGURATION}",
        leaf.shape,
    ) from None


@functools.lru_cache(maxsize=256)
def _check_one_reading(leaf_shapes: Shapes, size: int, sizes: Sizes) -> None:
    """Raise an error if the batch axis could as well be the stages of a single configuration."""
    # With a batch axis of length 1 both readings are equal, unless an axis may be microbatches.
    leaves = {name: np.broadcast_to(0.0, shape) for name, shape in leaf_shapes if shape}
    ambiguous_names = [
        name
        for name, leaf in leaves.items()
        if len(leaf) > 1 or (differs_by_microbatch(name, leaf) and leaf.size > 1)
    ]
    try:
        unchecked_costs(leaves).check_shapes(*sizes)
    except ValueError:
        return
    if not ambiguous_names:
        return
    name = ambiguous_names[0]
    shape = leaves[name].shape
    axes = MESSAGE_AXES if name in MESSAGE_FIELDS else OP_AXES
    leaf_axes = axes if differs_by_microbatch(name, leaves[name]) else axes[:-1][-len(shape) :]
    entries = " x ".join(f"{n} {axis}" for n, axis in zip(shape, leaf_axes, strict=True))
    raise wrong(
        name,
        f"has shape {shape}: a batch, or one entry for each of {entries}? Give batch_size={size} "
        f"for a batch. For one configuration {ONE_CONFIGURATION}",
        shape,
    )


@functools.lru_cache(maxsize=256)
def _batch_size(leaf_shapes: Shapes, batch_size: int | None) -> int:
    """Return the length of the batch axis, the first axis of every cost that is not a scalar."""
    lengths = {name: shape[0] for name, shape in leaf_shapes if shape}
    # an axis of length 0 makes an empty batch
    size = batch_size or max(lengths.values(), default=1) * all(lengths.values())
    for name, length in lengths.items():
        if length not in (1, size):
            other = "others have" if batch_size is None else "batch_size is"
            raise ValueError(
                f"{name} has a batch axis of {length}, {other} {size}: every leaf needs the "
                "same batch axis first, or is a scalar"
            )
    return size


def cost_rows(program: Program, costs: Costs) -> CostRows:
    """Return the cost rows that a program reads; a row is the sum of two cost matrix columns."""
    # A position of the cost vector is at most the sum of two entries: a forward and a backward that
    # make a fused pair, or latency and transmit time. To find them, the cost vector is computed
    # from the numbers of entries, second terms of a sum in the high digits.
    # Two stages: entries 1 and 2 are forwards, 3 and 4 backwards, priced as 3 HIGH and 4 HIGH. The
    # position of a fused pair of 0F and 1B is then priced 1 + 4 HIGH: its row is the sum of entries
    # 1 and 4. A position without entries is priced 0: the row of zeros.
    shapes = {name: np.shape(leaf)[1:] for name, leaf in vars(costs).items() if leaf is not None}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    # number of the field of each entry, from 1 on; entry 0, of field 0, is no cost
    entry_fields = np.repeat(range(1 + len(sizes)), [1, *sizes.values()])
    numbers = {}
    for k, (name, shape) in enumerate(shapes.items(), 1):
        entries = np.flatnonzero(entry_fields == k).reshape(shape)
        numbers[name] = entries * HIGH if name in SECOND_IN_A_SUM else entries
    vector = np.asarray(cost_vector(program, unchecked_costs(numbers))).astype(np.int64)
    used = np.unique(np.append(program.duration_index, np.ravel(program.lag_index)))  # positions
    entry_pairs = np.stack([vector[used] % HIGH, vector[used] // HIGH], axis=1)
    rows, row = np.unique(entry_pairs, axis=0, return_inverse=True)  # the row of zeros is first
    row_of_position = np.zeros(len(vector), np.int32)
    row_of_position[used] = row.ravel()
    is_read = np.isin(range(1 + len(sizes)), entry_fields[rows])  # (fields)
    # the cost matrix has a column for each entry of each field that is read
    column = np.cumsum(is_read[entry_fields]) - 1
    fields = tuple(itertools.compress(sizes.items(), is_read[1:]))
    return CostRows(row_of_position, column[rows], fields)


@cached_method
def program_with_pair_times(program: Program) -> Program:
    """Return the program with one cost position for each distinct fused pair of F and B or I."""
    layout = dataclasses.replace(program.layout, has_pair_times=True)
    kinds = np.arange(layout.num_pairs, dtype=np.int32)
    return dataclasses.replace(program, pair_stage=kinds, layout=layout)


def with_pair_times(program: Program, leaves: Leaves) -> Leaves:
    """Replace the cost `pair_factor` by the times of fused pairs, `pair` (N or 1, pairs) [s]."""
    times = {name: leaf for name, leaf in leaves.items() if name != "pair_factor"}
    return times | {"pair": _pair_times(program, leaves)}


def counts_of_ops(program: Program, leaves: Leaves, counts: Leaves) -> Leaves:
    """Replace the counts of fused pairs by counts for their ops' costs and the pair factor."""
    # A pair that is n times on the path counts n d(pair)/d(cost) times for each of its costs: the
    # reverse pass of `_pair_times` on the counts of pairs, added to the counts of single ops.
    op_counts = dict(counts)
    pair_counts = op_counts.pop("pair", None)
    if pair_counts is None:  # the program reads no pair
        return op_counts
    has_tracer = is_traced(leaves) or is_traced(counts)
    with nullcontext() if has_tracer else jax.core.eval_context(), accept_type(pair_counts.dtype):
        batch = {
            name: jnp.broadcast_to(leaves[name], (len(pair_counts), *leaves[name].shape[1:]))
            for name in ("forward", "backward", "input_grad", "pair_factor")
            if name in leaves
        }
        _, pull_back = jax.vjp(lambda costs: _pair_times(program, costs), batch)
        (counts_in_pairs,) = pull_back(jnp.asarray(pair_counts))
    xp: Any = jnp if has_tracer else np
    for name, count in counts_in_pairs.items():
        op_counts[name] = op_counts.get(name, 0) + xp.asarray(count)
    return op_counts


def _pair_times(program: Program, leaves: Leaves) -> Any:
    """Return the times [s] of all distinct fused pairs, an array (N or 1, pairs)."""
    layout = program.layout
    xp: Any = jnp if any(isinstance(leaf, jax.Array) for leaf in leaves.values()) else np
    forward, backward = np.asarray(program.pair_index).T
    phase, _ = layout.op_at(backward)

    def entries(field: str, stage: Any, microbatch: Any) -> Any:
        """Return a field's costs (N or 1, pairs) at the stage and microbatch of each pair."""
        leaf = leaves[field]  # N or 1, then stages or 1, then microbatches
        if leaf.ndim == 1:
            return leaf[:, None]
        stage = stage if leaf.shape[1] > 1 else np.zeros_like(stage)
        return leaf[:, stage] if leaf.ndim == 2 else leaf[:, stage, microbatch]

    def op_times(kind: Phase, position: Any) -> Any:
        """Return the times (N or 1, pairs) of a kind of op at positions in the cost vector."""
        (_, stage), microbatch = layout.op_at(position), (position - 1) % layout.times_per_place
        return entries(PHASE_FIELDS[kind.name], stage, microbatch)

    with accept_type(leaves["pair_factor"].dtype):
        kinds = [op_times(kind, backward) for kind in INPUT_GRADS if (phase == kind).any()]
        backward_times = kinds[0] if len(kinds) == 1 else xp.where(phase == Phase.B, *kinds)
        forward_op = np.divmod(np.asarray(program.pair_stage), layout.times_per_place)
        factor = entries("pair_factor", *forward_op)
        return overlapped(op_times(Phase.F, forward), backward_times, factor, xp)
