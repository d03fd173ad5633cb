"""Pricing: from costs per stage, boundary and microbatch to seconds per node and edge."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.display import short_repr
from pipejax.costs.costs import PHASE_FIELDS, Costs, unchecked_costs
from pipejax.costs.precision import float_type, is_traced
from pipejax.engine.lowering.by_microbatch import by_microbatch
from pipejax.engine.lowering.eager import check_eager, settled
from pipejax.engine.lowering.program import Program
from pipejax.schedules.cells.ops import TIMED

Vector = Float[Array, " costs"] | Float[NumpyArray, " costs"]


@short_repr
class NodeCosts(NamedTuple):
    """The costs of one program.

    Attributes:
      duration: (nodes) time that each node takes [s].
      lag: (nodes, max_preds) delay from each predecessor [s].
    """

    duration: Float[Array, " nodes"] | Float[NumpyArray, " nodes"]
    lag: Float[Array, "nodes max_preds"] | Float[NumpyArray, "nodes max_preds"]


def price(program: Program, costs: Costs) -> NodeCosts:
    """Look up what every node and edge of a program costs.

    Args:
      program: lowered schedule.
      costs: unbatched costs; batch with `jax.vmap`.

    Returns:
      duration (nodes) and lag (nodes, max_preds) [s].

    Raises:
      ValueError: if a cost has the wrong number of entries, or a phase of the program has none, or
        as `program_for`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=2.0)
      >>> price(pj.lower(table, step_end=False), costs).duration.tolist()
      [0.0, 1.0, 1.0, 2.0, 2.0]
    """
    program = program_for(program, costs)
    vector = cost_vector(program, costs)
    return NodeCosts(vector[program.duration_index], vector[program.lag_index])


def program_for(program: Program, costs: Costs, *, batch_axes: int = 0) -> Program:
    """Return the program as costs need it: `by_microbatch` where they differ by microbatch.

    `batch_axes` stand before all other axes of the costs. What is returned is for these costs: its
    links say nothing of eager messages any more.

    Raises:
      ValueError: as `with_columns_for`, or if other messages than those of the program lie below
        `eager_below`, or that is out of sight.
    """
    if program.links.eager_below:
        if is_traced(program):
            raise ValueError("a program of links with eager_below cannot be traced: close over it")
        check_eager(program, costs.transmit, batch_axes)
        program = settled(program)
    return with_columns_for(program, costs, batch_axes=batch_axes)


def with_columns_for(program: Program, costs: Costs, *, batch_axes: int = 0) -> Program:
    """Return the program with the columns that costs need, one for each microbatch if they differ.

    Raises:
      ValueError: if they do, and the program is traced.
    """
    if program.layout.per_microbatch or not costs.per_microbatch(batch_axes):
        return program
    if is_traced(program):
        raise ValueError(
            "costs per microbatch need a program that is not traced: close over it, as in "
            "jax.jit(lambda costs: pj.makespan(program, costs))"
        )
    return by_microbatch(program)


def cost_vector(program: Program, costs: Costs) -> Vector:
    """Flatten the costs in the order of `CostLayout`: (costs) [s].

    Costs that are plain numbers or NumPy arrays are priced by NumPy, on the host: a single
    evaluation then has nothing to compile here.
    """
    layout = program.layout
    own = unchecked_costs({**vars(costs), "pair": None}) if layout.pairs_apart else costs
    own.check_shapes(layout.num_stages, layout.num_pipes, layout.num_microbatches)
    check_known(program, costs)
    leaves = jax.tree.leaves(costs)
    xp: Any = jnp if any(isinstance(leaf, jax.Array) for leaf in leaves) else np
    dtype = np.result_type(float, *leaves) if xp is np else float_type(*leaves)

    def fill(value: Any, shape: tuple[int, ...]) -> Any:
        # what no node reads may be unknown; all but the axis of microbatches may stand alone
        array = xp.asarray(0.0 if value is None else value, dtype)
        return xp.broadcast_to(array if array.ndim == len(shape) else array[..., None], shape)

    ops = [fill(getattr(costs, PHASE_FIELDS[phase.name]), layout.op_shape) for phase in TIMED]
    head = xp.concatenate([xp.zeros(1, dtype), xp.stack(ops).ravel()])
    both = head[program.pair_index]
    pairs = both.sum(axis=1)
    if costs.pair is not None:
        pairs = fill(costs.pair, layout.pair_shape).ravel()[program.pair_stage]
    elif costs.pair_factor is not None:
        factor = fill(costs.pair_factor, layout.op_shape).ravel()[program.pair_stage]
        pairs = overlapped(both[:, 0], both[:, 1], factor, xp)
    latency, transmit = (
        fill(value, layout.link_shape).ravel() for value in (costs.latency, costs.transmit)
    )
    return xp.concatenate([head, pairs, latency, transmit, latency + transmit])


def overlapped(forward: Any, backward: Any, factor: Any, xp: Any) -> Any:
    """Times of fused pairs: the longer op and `factor` of the shorter one [s].

    Where both last as long, the forward is the longer one, and its derivative 1.
    """
    longer = forward >= backward
    return xp.where(longer, forward + factor * backward, backward + factor * forward)


def check_known(program: Program, costs: Costs) -> None:
    """Check that each phase of a program has a cost; for fused pairs, its phases or the pair."""
    costs.check_known(program.layout.phases)
    if costs.pair is None:
        costs.check_known(program.layout.paired_phases)
