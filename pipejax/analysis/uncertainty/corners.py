"""Corners: runs at several named sets of costs, as in static timing analysis of chips."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.compiled import compiled
from pipejax.base.display import with_short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.precision import check_finite, checked_seconds
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import cost_vector, program_for
from pipejax.engine.recurrence import (
    Lags,
    Preds,
    Target,
    Times,
    finish_and_tails,
    negative_slack_sum,
    node_slack,
)


@with_short_repr("names makespan worst_slack binding target total_negative_slack")
@dataclasses.dataclass(frozen=True)
class Corners:
    """Runs of a program at several sets of costs. Times are seconds, arrays are NumPy's.

    Attributes:
      names: of the corners.
      target: time at which the step must end; None for the makespan of each corner.
      makespan: (corners) last end over all ops.
      total_negative_slack: (corners) sum over workers of min(0, target - last end); 0 without a
        target.
      slack: (corners, nodes) longest delay of each node that keeps the target.
      worst_slack: (nodes) smallest slack over the corners.
      binding: (nodes) index of the corner with the smallest slack, the first at a tie.
    """

    names: tuple[str, ...]
    target: float | None
    makespan: Float[NumpyArray, " corners"]
    total_negative_slack: Float[NumpyArray, " corners"]
    slack: Float[NumpyArray, "corners nodes"]
    worst_slack: Float[NumpyArray, " nodes"]
    binding: Int[NumpyArray, " nodes"]


def corners(
    program: Program, costs: Mapping[str, Costs], *, target: float | None = None
) -> Corners:
    """Run a program at several named sets of costs, and find the worst slack of every node.

    Args:
      program: lowered schedule.
      costs: unbatched costs by the name of their corner, as `scaled_costs` returns them.
      target: time at which the step must end [s]. Without one, slack is against each corner's own
        makespan: a node without slack is critical in some corner.

    Returns:
      Makespans, total negative slack and slack of all corners, in float64 from one compiled call;
      equal to `slack` and `total_negative_slack` of each to the last bit.

    Raises:
      ValueError: if there is no corner, or as `slack`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> costs = pj.Costs(forward=1.0, backward=2.0)
      >>> hot = pj.costing.scaled_costs(costs, table, "compute@worker1*2")
      >>> found = pj.analysis.corners(pj.lower(table), {"nominal": costs, "hot": hot}, target=20.0)
      >>> found.makespan.tolist(), [found.names[k] for k in set(found.binding.tolist())]
      ([9.0, 15.0], ['hot'])

    References:
      Sapatnekar: Timing (2004), on corners and slack.
    """
    check_types(program=(program, Program), costs=(costs, Mapping))
    check_types(**{f"costs of corner {name}": (corner, Costs) for name, corner in costs.items()})
    if not costs:
        raise ValueError("costs must hold at least one corner, got none")
    seconds = None if target is None else float(checked_seconds("target", target))
    for corner in costs.values():
        corner.check_values()
        program = program_for(program, corner)  # per microbatch if one corner needs it
    in_numpy = partial(jax.tree.map, lambda leaf: np.asarray(leaf, np.float64))
    vectors = np.stack([cost_vector(program, in_numpy(corner)) for corner in costs.values()])
    with jax.enable_x64(True):
        duration, lag = vectors[:, program.duration_index], vectors[:, program.lag_index]
        results = _run(program.preds, program.last_node, seconds, duration, lag)
    makespan, total_negative_slack, slack = map(np.asarray, results)
    check_finite({"makespan": makespan}, dict(costs))
    return Corners(
        names=tuple(costs),
        target=seconds,
        makespan=makespan,
        total_negative_slack=total_negative_slack,
        slack=slack,
        worst_slack=slack.min(axis=0),
        binding=slack.argmin(axis=0),
    )


@compiled
def _run(
    preds: Preds,
    ends: Int[Array, " workers"],
    target: Target | None,
    duration: Float[Array, "corners nodes"],
    lag: Float[Array, "corners nodes max_preds"],
) -> tuple[Float[Array, " corners"], Float[Array, " corners"], Float[Array, "corners nodes"]]:
    """Return all corners' makespans, total negative slack and slack (corners, nodes)."""

    def run_corner(duration: Times, lag: Lags) -> tuple[Float[Array, ""], Float[Array, ""], Times]:
        """Return makespan, total negative slack and slack (nodes) of one corner."""
        finish, tail = finish_and_tails(preds, duration, lag)
        slack_sum = jnp.zeros(()) if target is None else negative_slack_sum(finish[ends], target)
        return finish.max(), slack_sum, node_slack(finish, tail, target)

    return jax.vmap(run_corner)(duration, lag)
