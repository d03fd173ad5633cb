"""Batches of costs: makespans of thousands to millions of configurations, and their gradients.

Three forms of the recurrence do the work: `unrolled.py` for large batches of small programs,
`interpreter.py` for the values of large batches of long ones, and `interpreter_loops.py` for
everything else. All follow the first-predecessor rule of `recurrence.py`, as `makespan` does.

For JAX's transformations the makespans are one function with a derivative rule, `_values`:
d makespan = sum of counts times d cost. `_solve` returns the counts. `_solve` runs numbers in
threads, in parts and on devices, and tracers with the interpreter's loops in the caller's trace.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import are_positive, check_types, whole_number
from pipejax.base.compiled import compiled
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.costs.precision import accept_type, check_finite, is_traced, to_output_dtype
from pipejax.engine.batched import binary_program, interpreter
from pipejax.engine.batched.cost_rows import (
    CostRows,
    Leaves,
    batch_leaves,
    cost_rows,
    counts_of_ops,
    program_with_pair_times,
    with_pair_times,
)
from pipejax.engine.batched.unrolled import (
    MAX_OPS,
    KernelWithCounts,
    unrolled,
    unrolled_with_counts,
)
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import check_known, program_for

MAX_BYTES = 1 << 30  # bytes of costs and results that are on the device at once
MIN_UNROLLED_WORK = 10**6  # ops times configurations from which a kernel for one program pays
QUICK_OPS, QUICK_OPS_WITH_COUNTS = 500, 160  # ops that compile quickly, for values and with counts
MIN_LEVELS_WORK = 10**7  # ops times configurations from which loops by level pay, without counts
MIN_UNCOPIED_NUMBERS = 10**6  # numbers of a batch from which it compiles for its own shapes

Shapes = tuple[tuple[int, ...] | None, ...]
Values = Float[Array, " batch"]
Makespans = Values | Float[NumpyArray, " batch"]  # NumPy's if JAX has no float64 by default


class _Plan:
    """Encoded and compiled forms of a program, for costs of fixed shapes; built when needed."""

    def __init__(self, ops: binary_program.BinaryOps, rows: CostRows) -> None:
        self.ops, self.rows = ops, rows

    @functools.cached_property
    def values(self) -> binary_program.Task:
        """Return the program with which the interpreter computes makespans, on any device."""
        forward = _on_device(binary_program.forward_program(self.ops, self.rows))
        return binary_program.Task(forward, None)

    @functools.cached_property
    def levels(self) -> interpreter.LevelProgram | None:
        """Return the program sorted by level, for makespans on a CPU; None if not faster."""
        return _on_device(interpreter.level_program(self.ops, self.rows))

    @functools.cached_property
    def counts(self) -> binary_program.Task:
        """Return the programs with which the interpreter computes makespans and gradients."""
        backward = _on_device(binary_program.backward_program(self.ops, self.rows))
        return self.values._replace(backward=backward)

    @functools.cached_property
    def unrolled(self) -> Callable[[Leaves], Values]:
        """Return a kernel for makespans that is compiled for this program alone."""
        return unrolled(self.ops, self.rows)

    @functools.cached_property
    def unrolled_with_counts(self) -> dict[np.dtype, KernelWithCounts | None]:
        """Return kernels for makespans and cost counts by float type; None if slow to compile."""
        dtypes = (np.dtype(np.float32), np.dtype(np.float64))
        return {dtype: unrolled_with_counts(self.ops, self.rows, dtype) for dtype in dtypes}


def _on_device(program: Any) -> Any:
    """Convert a program to JAX arrays; NumPy arrays would be copied at every call."""
    with jax.core.eval_context():
        return jax.tree.map(jnp.asarray, program)


# a plan refers to no program, so that unused programs are freed, and their plans with them
_plans: weakref.WeakKeyDictionary[Program, dict[Shapes, _Plan]] = weakref.WeakKeyDictionary()


class _Problem(NamedTuple):
    """A program, and the options for computing its makespans: all inputs except the costs."""

    plan: _Plan
    temperature: float | None
    unroll: bool | None
    max_bytes: int
    # program with which times of fused pairs are computed from `pair_factor`, if costs have one
    pair_program: Program | None = None

    def task(self, with_counts: bool) -> binary_program.Task:
        """Return the interpreter's task, with a backward pass if counts are needed."""
        task = self.plan.counts if with_counts else self.plan.values
        return task._replace(temperature=self.temperature)

    def read_leaves(self, leaves: Leaves) -> Leaves:
        """Return the costs that the program reads, with times of fused pairs for `pair_factor`."""
        if self.pair_program is not None:
            leaves = with_pair_times(self.pair_program, leaves)
        return {name: leaves[name] for name, _ in self.plan.rows.fields}


def makespans(
    program: Program,
    costs: Costs,
    *,
    batch_size: int | None = None,
    temperature: float | None = None,
    unroll: bool | None = None,
    max_bytes: int = MAX_BYTES,
) -> Makespans:
    """Return the makespan of every configuration in a batch of costs.

    A JAX function of the costs: jit, vmap, grad, jvp and jacfwd work and compose. If jit traces the
    costs, the loops become part of the caller's computation, on one thread.

    Untraced costs are solved in float32 if all their arrays are float32, else in float64. Python's
    numbers alone are float64. The error of float32 is at most 6e-8 of the makespan for each op and
    message on the critical path. A sixth of that is common: 3e-4 at 10,000 microbatches
    (`python -m benchmarks.precision`). Costs that jit, grad or vmap traces have JAX's types:
    float32, unless `jax_enable_x64` is set. The arrays of the costs may be changed after the call.

    Args:
      program: lowered schedule.
      costs: every leaf a scalar, or with a leading batch axis N: (N,), (N, stages), (N, stages,
        microbatches), ...
      batch_size: N; needed if all leaves are scalars or may be the costs of one configuration.
      temperature: T of smooth maxima T log(sum exp(x / T)) [s], which tend to exact maxima from
        above as T goes to 0; None for exact maxima.
      unroll: whether to compile a kernel for this program alone (for exact maxima of costs that are
        not traced); None to decide by the work.
      max_bytes: costs and results on the device at once; a larger batch goes through in parts.

    Returns:
      (batch) makespans [s]; a NumPy array if they are float64 and JAX has no float64 by default.

    Raises:
      ValueError: if batch axes differ, the costs could as well be one configuration and no
        batch_size is given, a leaf has the wrong number of entries, a cost is negative or not
        finite, the times overflow, the temperature is not above 0, max_bytes is below 1, or the
        program is traced.

    Differentiation:
      The derivative with respect to a cost is its count on the critical path, as for `makespan`,
      also at ties. Second derivatives are 0; for smooth makespans they are refused.

    Cost:
      State of a configuration is one number per live op. The interpreter compiles once per
      bucket of sizes, the unrolled form once per program.

    Example:
      >>> import jax, numpy as np, pipejax as pj
      >>> program = pj.lower(pj.schedules.build("1f1b", num_workers=4, num_microbatches=8))
      >>> def step_times(delays):
      ...     return pj.makespans(program, pj.Costs(forward=1.0, backward=2.0, transmit=delays))
      >>> delays = np.array([0.0, 0.125, 1.0, 2.0])
      >>> step_times(delays).tolist()
      [33.0, 35.0, 49.0, 65.0]
      >>> jax.grad(lambda delays: step_times(delays).sum())(delays).tolist()
      [6.0, 16.0, 16.0, 16.0]
    """
    check_types(program=(program, Program), costs=(costs, Costs))
    problem, leaves, size = _prepare(program, costs, batch_size, temperature, unroll, max_bytes)
    solved_leaves = problem.read_leaves(leaves)
    if is_traced(solved_leaves):
        return _broadcast(_values(problem, solved_leaves), size)
    values, _ = _solve(problem, solved_leaves)
    check_finite(values, costs)
    return _broadcast(values, size)


def makespans_and_grad(
    program: Program,
    costs: Costs,
    *,
    batch_size: int | None = None,
    temperature: float | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[Makespans, Costs]:
    """Return the makespans of a batch, and their derivatives with respect to every cost.

    Args:
      program: lowered schedule.
      costs: as for `makespans`.
      batch_size: as for `makespans`.
      temperature: as for `makespans`; the derivative is then that of the smooth makespan.
      max_bytes: costs and results on the device at once; a larger batch goes through in parts.

    Returns:
      (batch) makespans [s], and the count of each cost on the critical path: `Costs` whose leaves
      have a batch axis, then the axes of the cost.

    Raises:
      ValueError: as `makespans`.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=8)
      >>> costs = pj.Costs(forward=np.ones(2), backward=2.0, transmit=0.5)
      >>> values, counts = pj.makespans_and_grad(pj.lower(table), costs)
      >>> values.tolist(), counts.forward.tolist(), counts.transmit.tolist()
      ([36.0, 36.0], [11.0, 11.0], [6.0, 6.0])
    """
    check_types(program=(program, Program), costs=(costs, Costs))
    problem, leaves, size = _prepare(program, costs, batch_size, temperature, None, max_bytes)
    solved_leaves = problem.read_leaves(leaves)
    values, counts = _solve(problem, solved_leaves, with_counts=True)
    if not is_traced(solved_leaves):
        check_finite(values if temperature is None else (values, counts), costs)
    if problem.pair_program is not None:
        counts = counts_of_ops(problem.pair_program, leaves, counts)
    gradient = {}
    for name, leaf in leaves.items():  # the program may read no cost of a field
        count = counts[name] if name in counts else np.zeros((1,) * leaf.ndim, leaf.dtype)
        gradient[name] = _broadcast(count, size, *leaf.shape[1:])
    return _broadcast(values, size), unchecked_costs(gradient)


def _broadcast(result: Any, size: int, *trailing: int) -> Any:
    """Broadcast a result of shape (size or 1, trailing..) to (size, trailing..)."""
    if is_traced(result):
        return jnp.broadcast_to(result, (size, *trailing))
    if result.shape != (size, *trailing):
        xp: Any = jnp if isinstance(result, jax.Array) else np
        with jax.core.eval_context(), accept_type(result.dtype):
            result = xp.broadcast_to(result, (size, *trailing))
    return to_output_dtype(result)


def _prepare(
    program: Program,
    costs: Costs,
    batch_size: int | None,
    temperature: float | None,
    unroll: bool | None,
    max_bytes: int,
) -> tuple[_Problem, Leaves, int]:
    """Check a batch; return (problem, {field: costs}, number of configurations)."""
    if temperature is not None and not are_positive([temperature], 1):
        raise ValueError(f"temperature must be a finite number above 0, got {temperature!r}")
    if unroll is not None:
        check_types(unroll=(unroll, bool))
    whole_number(max_bytes, "max_bytes")
    if unroll and temperature is not None:
        raise ValueError(f"unroll=True is for exact maxima, got temperature={temperature!r}")
    if is_traced(program):
        raise ValueError(
            "the program is traced: close over it, as in jax.jit(lambda costs: "
            "pj.makespans(program, costs)), or make it a static argument"
        )
    leaves, size = batch_leaves(costs, program.layout, batch_size)
    # Costs per microbatch, or a factor of fused pairs, need another form of the program. The plan
    # is for costs of exactly these shapes.
    program = program_for(program, costs, batch_axes=1)
    pair_program = program if "pair_factor" in leaves and program.layout.num_pairs else None
    try:
        if pair_program is not None:
            check_known(program, costs)
            costs = unchecked_costs(with_pair_times(program, leaves))
            program = program_with_pair_times(program)
        plan = _shape_plan(program, costs)
    except ValueError:
        costs.check_values()  # a cost that is wrong is named before one that is missing
        raise
    costs.check_values(name for name, _ in plan.rows.fields)
    return _Problem(plan, temperature, unroll, max_bytes, pair_program), leaves, size


def _shape_plan(program: Program, costs: Costs) -> _Plan:
    """Return a program's plan (its encoded and compiled forms) for the shapes of these costs."""
    shapes = tuple(None if leaf is None else np.shape(leaf)[1:] for leaf in vars(costs).values())
    plans = _plans.setdefault(program, {})
    if shapes not in plans:
        # the ops of a program are the same for all shapes of costs
        other_plan = next(iter(plans.values()), None)
        ops = binary_program.binary_ops(program) if other_plan is None else other_plan.ops
        plans[shapes] = _Plan(ops, cost_rows(program, costs))
    return plans[shapes]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values(problem: _Problem, leaves: Leaves) -> Values:
    """Return makespans (batch) [s], as a function that JAX differentiates."""
    values, _ = _solve(problem, leaves)
    return values


@_values.defjvp
def _values_jvp(
    problem: _Problem, primals: tuple[Leaves], tangents: tuple[Leaves]
) -> tuple[Values, Values]:
    """Return makespans (batch), and their tangents: count times tangent, summed over costs."""
    # Counts of exact maxima are constant almost everywhere, so they get no derivatives. An outer
    # level of differentiation then sees their costs as plain numbers, which the fast loops solve.
    # That level differentiates the value, by this rule.
    (leaves,), (leaf_tangents,) = primals, tangents
    fixed = leaves if problem.temperature is None else _without_curvature(leaves)
    values, counts = _solve(problem, jax.lax.stop_gradient(fixed), with_counts=True)
    if is_traced(leaves):
        values = _values(problem, leaves)
    return values, _path_sum(counts, {name: leaf_tangents[name] for name in counts})


@compiled
def _path_sum(counts: Leaves, tangents: Leaves) -> Values:
    """Return the sum over costs of count times tangent (batch); compiled to avoid dispatch time."""
    products = [count * tangents[name] for name, count in counts.items()]
    return sum(product.sum(axis=tuple(range(1, product.ndim))) for product in products)


@jax.custom_jvp
def _without_curvature(leaves: Leaves) -> Leaves:
    """Return the costs unchanged, but refuse second derivatives, which would not be 0."""
    return leaves


@_without_curvature.defjvp
def _refuse(primals: tuple[Leaves], tangents: tuple[Leaves]) -> tuple[Leaves, Leaves]:
    raise NotImplementedError(
        "makespans(..., temperature=T) has first derivatives only; without a temperature the "
        "second ones are 0"
    )


def _solve(
    problem: _Problem, leaves: Leaves, *, with_counts: bool = False
) -> tuple[Values, Leaves]:
    """Return makespans (batch) [s], and on request how often each cost is on the critical path."""
    dtype = next(iter(leaves.values())).dtype
    if not all(map(len, leaves.values())):  # an empty batch
        with accept_type(dtype):
            counts = {n: jnp.zeros((0, *leaf.shape[1:]), dtype) for n, leaf in leaves.items()}
            return jnp.zeros(0, dtype), counts if with_counts else {}
    if is_traced(leaves):
        return _solve_in_trace(problem, leaves, with_counts)
    with jax.core.eval_context(), accept_type(dtype):  # numbers stay numbers in any trace
        return _solve_in_parts(problem, leaves, with_counts)


def _solve_in_trace(problem: _Problem, leaves: Leaves, with_counts: bool) -> tuple[Values, Leaves]:
    """Solve a batch of traced costs in the caller's computation; vmap adds to the batch axis."""
    rows = problem.plan.rows

    @jax.custom_batching.custom_vmap
    def solve_batch(leaves: Leaves) -> tuple[Values, Leaves]:
        """Return makespans (batch), and counts on the critical path for each cost array."""
        task = problem.task(with_counts)
        values, counts = interpreter.interpreted_makespans(task, rows.pieces(leaves), in_trace=True)
        return values, _counts_by_field(rows, counts, leaves)

    @solve_batch.def_vmap
    def solve_larger(
        axis_size: int, in_batched: list[dict[str, bool]], leaves: Leaves
    ) -> tuple[tuple[Array, Leaves], tuple[bool, dict[str, bool]]]:
        """Merge the axis that vmap adds into the batch axis, and solve the larger batch."""
        # Return the solution, and that all its leaves have the axis from vmap. Each leaf becomes an
        # array (vmap or 1, batch or 1, ..).
        (has_vmap,) = in_batched  # by leaf: whether it has the axis from vmap
        expanded = {n: leaf if has_vmap[n] else leaf[None] for n, leaf in leaves.items()}
        size = max(leaf.shape[1] for leaf in expanded.values())
        flattened = {}
        for name, leaf in expanded.items():
            trailing = leaf.shape[2:]
            if leaf.shape[1] > 1 or has_vmap[name]:  # else a value that all share
                leaf = jnp.broadcast_to(leaf, (axis_size, size, *trailing))
            flattened[name] = leaf.reshape(-1, *trailing)
        solution = _solve(problem, flattened, with_counts=with_counts)
        result: tuple[Array, Leaves] = jax.tree.map(
            lambda leaf: jnp.asarray(leaf).reshape(axis_size, size, *leaf.shape[1:]), solution
        )
        return result, jax.tree.map(lambda _: True, result)

    return solve_batch(leaves)


def _solve_in_parts(problem: _Problem, leaves: Leaves, with_counts: bool) -> tuple[Values, Leaves]:
    """Solve a batch of untraced costs in parts: by a kernel, level by level, or op by op."""
    plan, size = problem.plan, max(map(len, leaves.values()))
    dtype = next(iter(leaves.values())).dtype
    unroll = _uses_kernel(problem, size, dtype, with_counts)
    has_levels = jax.default_backend() == "cpu" and not with_counts and problem.temperature is None
    by_level = has_levels and size * plan.ops.num_ops >= MIN_LEVELS_WORK
    solutions: list[tuple[Values, interpreter.Counts | None]] = []
    num_results = 1 + (len(plan.rows.terms) if with_counts else 0)
    for part, count, sharding in _parts_in_memory(leaves, size, problem.max_bytes, num_results):
        counts: interpreter.Counts | None = None
        if unroll and not with_counts:
            values = plan.unrolled(part)
        elif unroll and sharding is None and (kernel := plan.unrolled_with_counts[dtype]):
            values, counts = kernel(part)
        else:
            pieces = _cost_matrices(plan.rows, part, count, sharding)
            levels = plan.levels if by_level else None
            task = problem.task(with_counts) if levels is None else levels
            values, counts = interpreter.interpreted_makespans(task, pieces, over=sharding)
        if counts is not None:
            # counts go to the host, if this process holds all of them
            is_remote = isinstance(counts, jax.Array) and not counts.is_fully_addressable
            counts = (counts if is_remote else np.asarray(counts))[:, :count]
        if len(values) > count:  # JAX would compile a slice for each size
            is_remote = not values.is_fully_addressable
            values = values[:count] if is_remote else jnp.asarray(np.asarray(values)[:count])
        solutions.append((values, counts))
    values, counts = solutions[0] if len(solutions) == 1 else jax.tree.map(_join, *solutions)
    return values, _counts_by_field(plan.rows, counts, leaves)


def _join(*arrays: Any) -> Any:
    xp: Any = jnp if isinstance(arrays[0], jax.Array) else np
    return xp.concatenate(arrays, axis=-1)


def _parts_in_memory(
    leaves: Leaves, size: int, max_bytes: int, num_results: int
) -> Iterator[tuple[Leaves, int, NamedSharding | None]]:
    """Yield parts of a batch whose costs and results take at most `max_bytes` on the device."""
    # each part with its size and sharding; `num_results` counts the results of a configuration
    sharding = interpreter.batch_sharding(leaves)
    if sharding is not None:
        yield leaves, size, sharding
        return
    dtype = next(iter(leaves.values())).dtype
    entries = sum(int(np.prod(leaf.shape[1:])) for leaf in leaves.values() if len(leaf) > 1)
    part_size = max(1, max_bytes // (dtype.itemsize * (entries + num_results)))
    for low in range(0, size, part_size):
        count = min(part_size, size - low)
        part = {
            name: leaf[low : low + count] if len(leaf) > count else leaf
            for name, leaf in leaves.items()
        }
        placed, sharding = interpreter.send_to_devices(part, count, interpreter.LANES)
        yield placed, count, sharding


def _uses_kernel(problem: _Problem, size: int, dtype: np.dtype, with_counts: bool) -> bool:
    """Return whether to use a kernel compiled for this program: if requested, or fastest."""
    # `unroll=True` of `makespans` is for values: for counts only the work decides
    if with_counts and (problem.unroll is False or jax.default_backend() != "cpu"):
        return False
    if problem.unroll is not None and not with_counts:
        return problem.unroll
    num_ops = problem.plan.ops.num_ops
    # costs that differ by microbatch are read once each: a kernel would reuse none in registers
    reuses_costs = 2 * problem.plan.rows.num_columns <= num_ops
    quick_ops = QUICK_OPS_WITH_COUNTS if with_counts else QUICK_OPS
    min_work = MIN_UNROLLED_WORK * max(1, num_ops / quick_ops) ** 2
    pays = reuses_costs and num_ops <= MAX_OPS and size * num_ops >= min_work
    if problem.temperature is not None or not pays:
        return False
    return not with_counts or problem.plan.unrolled_with_counts[dtype] is not None


def _cost_matrices(
    rows: CostRows, leaves: Leaves, size: int, over: NamedSharding | None
) -> interpreter.Pieces:
    """Return each cost field that the program reads as a matrix (batch or 1, entries)."""
    # a large batch compiles for its shapes, a small one is copied into a matrix of a padded size
    if over is None and jax.default_backend() == "cpu":  # NumPy arrays need no copies
        leaves = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    # the column of zeros is no cost
    pieces, num_columns = rows.pieces(leaves), binary_program.padded_width(rows) - 1
    if over is not None or size * (num_columns + 1) >= MIN_UNCOPIED_NUMBERS:
        return pieces
    matrix = np.empty((max(size, interpreter.LANES), num_columns), pieces[0].dtype)
    matrix[size:] = 0
    costs = np.concatenate([np.broadcast_to(p, (size, p.shape[1])) for p in pieces], axis=1)
    matrix[:size, : costs.shape[1]] = costs
    return (matrix,)


def _counts_by_field(rows: CostRows, counts: interpreter.Counts | None, leaves: Leaves) -> Leaves:
    """Split counts (columns, batch) by cost field: (batch, ..), with the field's axes last."""
    leaf_counts: Leaves = {}
    if counts is None:
        return leaf_counts
    low = 1  # column 0 is no cost
    for name, entries in rows.fields:
        leaf = leaves[name]
        columns = counts[low : low + entries].T.astype(leaf.dtype, copy=False)
        leaf_counts[name] = columns.reshape(len(columns), *leaf.shape[1:])
        low += entries
    return leaf_counts
