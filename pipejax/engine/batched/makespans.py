"""Batches of costs: makespans of thousands to millions of configurations, and their gradients.

Two forms of the recurrence do the work: `unrolled.py` for the values of large batches of small
programs, `interpreter.py` for everything else. Both follow the first-predecessor rule of
`recurrence.py`, so a batch gives what `makespan` gives one by one.
"""

import dataclasses
import functools
import weakref
from collections.abc import Iterator

import jax
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import are_positive
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.engine.batched.binary_program import BinaryOps, binary_ops
from pipejax.engine.batched.cost_rows import CostRows, Leaves, batch_leaves, cost_rows
from pipejax.engine.batched.interpreted_program import (
    BackwardProgram,
    ForwardProgram,
    backward_program,
    cost_columns,
    forward_program,
    num_columns,
)
from pipejax.engine.batched.interpreter import Counts, Pieces, interpreted_makespans, lanes
from pipejax.engine.batched.sharding import Spread, spread_of, spread_out
from pipejax.engine.batched.unrolled import MAX_OPS, unrolled_makespans
from pipejax.engine.lowering.program import Program

MAX_BYTES = 1 << 30  # of costs and results that are on the device at once
WORTH_UNROLLING = 10**6  # ops times configurations from which a compilation of its own pays
WORTH_COMPILING = 10**6  # numbers in a batch that are not copied for the sake of a compilation

Shapes = tuple[tuple[int, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a program and the shapes of its costs determine."""

    ops: BinaryOps
    rows: CostRows
    forward: ForwardProgram

    @functools.cached_property
    def backward(self) -> BackwardProgram:
        """What the backward pass needs: only gradients pay for it."""
        return backward_program(self.ops, self.rows)


_plans: weakref.WeakKeyDictionary[Program, dict[Shapes, _Plan]] = weakref.WeakKeyDictionary()


def makespans(
    program: Program,
    costs: Costs,
    *,
    temperature: float | None = None,
    unroll: bool | None = None,
    max_bytes: int = MAX_BYTES,
) -> Float[Array, " batch"]:
    """Makespans of a batch of costs.

    Args:
      program: lowered schedule.
      costs: every leaf a scalar, or with a leading batch axis N: f[N], f[N, stages], ...
      temperature: smooth maxima T log(sum exp(x / T)) instead of exact ones; tends to them from
        above as T goes to 0 [s].
      unroll: whether to compile the program into one kernel of its own (exact maxima only); by
        the work if None.
      max_bytes: costs and results on the device at once; a larger batch goes through in parts.

    Returns:
      (batch) makespans [s].

    Raises:
      ValueError: if batch axes differ, a leaf has the wrong number of entries, a cost is
        negative or not finite, or the temperature is not above 0.

    Cost:
      State of a configuration is one number per live op. The interpreter compiles once per
      bucket of sizes, the unrolled one once per program.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> delays = np.array([0.0, 0.1, 1.0])
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=delays)
      >>> [f"{time:.1f}" for time in makespans(pj.lower(table), costs)]
      ['33.0', '34.6', '49.0']
    """
    plan, leaves, size = _prepare(program, costs, temperature)
    unroll = _unrolls(unroll, plan, size, temperature)
    parts = []
    for cut, count, over in _cuts(plan, leaves, size, max_bytes, 0):
        if unroll:
            length = max(map(len, cut.values()))
            values = unrolled_makespans(cut, ops=plan.ops, rows=plan.rows, size=length)
        else:
            pieces = _pieces(plan.rows, cut, count, over)
            values, _ = interpreted_makespans(
                plan.forward, pieces, temperature=temperature, over=over
            )
        parts.append(values[:count])
    return parts[0] if len(parts) == 1 else jax.numpy.concatenate(parts)


def makespans_and_grad(
    program: Program, costs: Costs, *, temperature: float | None = None, max_bytes: int = MAX_BYTES
) -> tuple[Float[Array, " batch"], Costs]:
    """Makespans of a batch, and the derivative with respect to every cost.

    One choice per op is kept, not the finish times; the counts follow it back from the end.

    Args:
      program: lowered schedule.
      costs: as for `makespans`.
      temperature: as for `makespans`; the derivative is then that of the smooth makespan.
      max_bytes: costs and results on the device at once; a larger batch goes through in parts.

    Returns:
      (batch) makespans [s], and how often each cost stands on the critical path: a batch axis
      first on every leaf, then one entry per stage or link where the cost has them.

    Raises:
      ValueError: as `makespans`.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=8)
      >>> costs = pj.Costs.uniform(table, forward=np.ones(2), backward=2.0, transfer=0.5)
      >>> values, counts = makespans_and_grad(pj.lower(table), costs)
      >>> values.tolist(), counts.forward.ravel().tolist(), counts.transmit.ravel().tolist()
      ([36.0, 36.0], [11.0, 11.0], [6.0, 6.0])
    """
    plan, leaves, size = _prepare(program, costs, temperature)
    values, counts = [], []
    for cut, count, over in _cuts(plan, leaves, size, max_bytes, plan.rows.num_rows):
        pieces = _pieces(plan.rows, cut, count, over)
        value, found = interpreted_makespans(
            plan.forward, pieces, backward=plan.backward, temperature=temperature, over=over
        )
        values.append(value[:count])
        counts.append(_on_host(found)[:, :count])
    gradient = _as_costs(
        plan.rows, counts[0] if len(counts) == 1 else np.concatenate(counts, axis=1), leaves
    )
    return values[0] if len(values) == 1 else jax.numpy.concatenate(values), gradient


def _prepare(
    program: Program, costs: Costs, temperature: float | None
) -> tuple[_Plan, Leaves, int]:
    """Check a batch; return the plan of its program, its costs and its size."""
    costs.check_values()
    if temperature is not None and not are_positive([temperature], 1):
        raise ValueError(f"temperature must be a finite number above 0, got {temperature!r}")
    leaves, size = batch_leaves(costs, program.layout)
    return _plan(program, costs), leaves, size


def _plan(program: Program, costs: Costs) -> _Plan:
    """Find the plan of a program, which is made once for costs of one shape."""
    shapes = tuple(None if leaf is None else np.shape(leaf)[1:] for leaf in vars(costs).values())
    plans = _plans.setdefault(program, {})
    if shapes not in plans:
        known = next(iter(plans.values()), None)
        ops = binary_ops(program) if known is None else known.ops
        rows = cost_rows(program, costs)
        plans[shapes] = _Plan(ops, rows, forward_program(ops, rows))
    return plans[shapes]


def _cuts(
    plan: _Plan, leaves: Leaves, size: int, max_bytes: int, results: int
) -> Iterator[tuple[Leaves, int, Spread | None]]:
    """Cut the costs that a program reads into parts of at most `max_bytes`, each with its size.

    A batch that is laid out over several devices stays whole.
    """
    leaves = {name: leaves[name] for name, _ in plan.rows.fields}
    over = spread_of(leaves)
    if over is not None:
        yield leaves, size, over
        return
    itemsize = next(iter(leaves.values())).dtype.itemsize
    columns = sum(int(np.prod(leaf.shape[1:])) for leaf in leaves.values() if len(leaf) > 1)
    part = max(1, max_bytes // (itemsize * (columns + results + 1)))
    for low in range(0, size, part):
        count = min(part, size - low)
        cut = {
            name: leaf[low : low + count] if len(leaf) > count else leaf
            for name, leaf in leaves.items()
        }
        placed, over = spread_out(cut, count, lanes(cut[next(iter(cut))].dtype))
        yield placed, count, over


def _unrolls(unroll: bool | None, plan: _Plan, size: int, temperature: float | None) -> bool:
    """Decide whether a program gets a kernel of its own."""
    if unroll and temperature is not None:
        raise ValueError(f"unroll=True is for exact maxima, got temperature={temperature!r}")
    if unroll is not None:
        return unroll
    work = size * plan.ops.num_ops
    return temperature is None and plan.ops.num_ops <= MAX_OPS and work >= WORTH_UNROLLING


def _on_host(counts: Counts | None) -> Counts:
    """Counts as NumPy's array, where this process has them all."""
    if isinstance(counts, jax.Array) and not counts.is_fully_addressable:
        return counts
    return np.asarray(counts)


def _pieces(rows: CostRows, leaves: Leaves, size: int, over: Spread | None) -> Pieces:
    """Lay the fields that a program reads out for the interpreter.

    A large batch goes as it is, a compilation for every combination of shapes. A small one is
    copied into one matrix of a bucket of sizes; what it holds beyond is never read.
    """
    if over is None and jax.default_backend() == "cpu":  # seen as NumPy's they need no copies
        leaves = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    used = [
        leaves[name].reshape(len(leaves[name]), -1)[:, :entries] for name, entries in rows.fields
    ]
    if over is not None or size * num_columns(rows) >= WORTH_COMPILING:
        return tuple(used)
    dtype = used[0].dtype
    matrix = np.empty((max(size, lanes(dtype)), num_columns(rows) - 1), dtype)
    matrix[size:] = 0
    at = 0
    for leaf in used:
        matrix[:size, at : at + leaf.shape[1]] = leaf
        at += leaf.shape[1]
    return (matrix,)


def _as_costs(rows: CostRows, counts: Counts, leaves: Leaves) -> Costs:
    """Give every cost the counts of its column."""
    columns = {key: 1 + k for k, key in enumerate(cost_columns(rows))}
    gradient: dict[str, Array | NumpyArray] = {}
    dtype = next(iter(leaves.values())).dtype
    for name, leaf in leaves.items():
        shape = (counts.shape[1], *leaf.shape[1:])
        first = columns.get((name, 0))
        if first is None:  # the program does not read it
            gradient[name] = np.broadcast_to(np.zeros((), dtype), shape)
        else:
            entries = int(np.prod(shape[1:]))
            found = counts[first : first + entries].astype(dtype, copy=False)
            gradient[name] = found.T.reshape(shape)
    return unchecked_costs(gradient)
