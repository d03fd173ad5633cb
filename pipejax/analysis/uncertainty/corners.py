"""Corners: named sets of costs, each with a run, as in static timing analysis of chips."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.base.jax_on_demand import mapped
from pipejax.base.longest_path import finish_times, slack
from pipejax.costs.costs import Costs
from pipejax.costs.precision import check_finite, checked_seconds
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import cost_vector, program_for


@with_short_repr("names makespan worst_slack binding target total_negative_slack")
@dataclasses.dataclass(frozen=True, eq=False)
class Corners:
    """Runs of a program at several sets of costs. Times are seconds, arrays are NumPy's.

    Attributes:
      names: names of the corners.
      target: time at which the step must end; None if each corner has its makespan as target.
      makespan: (corners) last end over all ops.
      total_negative_slack: (corners) sum over workers of min(0, target - last end); 0 without a
        target.
      slack: (corners, nodes) longest delay of each node that keeps the target.
      worst_slack: (nodes) smallest slack over the corners.
      binding: (nodes) index of the corner with the smallest slack; at a tie, the first corner.
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
    """Run a program at named sets of costs (corners), and find the least slack of every node.

    The slack of a node is the time by which it can be delayed without delaying the end.

    Args:
      program: lowered schedule.
      costs: unbatched costs by name of the corner, as `scaled_costs` returns them.
      target: time at which the step must end [s]. Without a target, the slack of each corner
        refers to its makespan, and a node without slack is critical in some corner.

    Returns:
      Makespans, total negative slack and slack of all corners, in float64. They equal the results
      of `slack` and `total_negative_slack` to the last bit. Nothing is compiled.

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
        program = program_for(program, corner)  # costs by microbatch, if a corner has such costs
    in_float64 = partial(mapped, lambda leaf: np.asarray(leaf, np.float64))
    vectors = np.stack([cost_vector(program, in_float64(corner)) for corner in costs.values()])
    preds = np.asarray(program.preds)
    graphs = [(preds, v[program.duration_index], v[program.lag_index]) for v in vectors]
    finish = np.stack([finish_times(*graph) for graph in graphs])
    check_finite({"makespan": finish.max(axis=1)}, dict(costs))
    total_negative_slack = np.zeros(len(costs))
    if seconds is not None:
        worker_ends = finish[:, program.last_node]  # (corners, workers)
        total_negative_slack = np.minimum(seconds - worker_ends, 0.0).sum(axis=1)
    node_slack = np.stack([slack(*graph, seconds) for graph in graphs])
    return Corners(
        names=tuple(costs),
        target=seconds,
        makespan=finish.max(axis=1),
        total_negative_slack=total_negative_slack,
        slack=node_slack,
        worst_slack=node_slack.min(axis=0),
        binding=node_slack.argmin(axis=0),
    )
