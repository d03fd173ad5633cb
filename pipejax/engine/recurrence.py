"""The recurrence: finish times of a program, a longest path in the max-plus semiring.

    finish[v] = duration[v] + max over u of (finish[u] + lag[u, v])

Gradients follow one rule, stated here once. At a maximum the first predecessor that attains it
wins, so the derivative of a finish time is an exact path count: 1 for every node and edge on one
critical path, 0 elsewhere, also at ties (a plain maximum would give fractions).

| case                       | value          | derivative                                 |
|----------------------------|----------------|--------------------------------------------|
| two predecessors tie       | the common one | 1 to the first, 0 to the second            |
| duration or lag 0          | as any other   | as any other                               |
| no predecessor (padding)   | own duration   | 1 to the own duration; the source gets none|
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.compiled import compiled
from pipejax.base.display import short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.precision import checked_seconds, in_float64
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import NodeCosts, price, program_for

Times = Float[Array, " nodes"]
Found = Times | Float[NumpyArray, " nodes"]  # NumPy's where JAX's default knows no float64
Preds = Int[Array, "nodes max_preds"]
Lags = Float[Array, "nodes max_preds"]
Graph = tuple[Preds, Times, Lags]
Target = float | Float[Array, ""] | Float[NumpyArray, ""]
Row = tuple[Int[Array, ""], Int[Array, " max_preds"], Array, Array]  # of a graph, its number first


@in_float64
def finish_times(program: Program, costs: Costs) -> Found:
    """Earliest finish time of every node when each starts as soon as it may.

    Args:
      program: lowered schedule, in topological order.
      costs: unbatched costs, as for `makespan`.

    Returns:
      (nodes) finish times [s], in float64 as for `makespan`; the source and padding finish at 0.

    Raises:
      ValueError: as `makespan`.

    Differentiation:
      Exact path counts in forward and reverse mode; at a tie the first predecessor wins. A
      `max` over the times themselves gives fractions where several are largest.

    Cost:
      One scan of `nodes` steps, O(nodes * max_preds). For the gradient of the last end alone
      `makespan` is far cheaper than this function.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
      >>> program = pj.lower(table, step_end=False)
      >>> pj.finish_times(program, pj.Costs(forward=1.0, backward=2.0)).tolist()
      [0.0, 1.0, 2.0, 4.0, 6.0]

    References:
      Baccelli, Cohen, Olsder, Quadrat: Synchronization and Linearity (1992).
    """
    check_types(program=(program, Program), costs=(costs, Costs))
    return _scan(*_graph(program, costs))[0]


@in_float64
def makespan(program: Program, costs: Costs) -> Float[Array, ""] | np.float64:
    """Return the time from the first start to the last end over all ops.

    A pure function: jit, vmap, grad and jvp work, and neither costs nor programs of one shape
    cause a second compilation. Costs that are numbers are solved in float64, whatever JAX's
    default; a trace, and so a gradient, is float32 unless `jax_enable_x64` is set.

    Args:
      program: lowered schedule.
      costs: unbatched costs, by stage or by stage and microbatch; batch with `jax.vmap`.

    Returns:
      Makespan [s], a scalar: float64 where the costs are not traced.

    Raises:
      ValueError: if a cost that is not traced is negative or not finite, or one has the wrong
        number of entries, or a phase of the program has no cost, or the times overflow.

    Differentiation:
      The derivative with respect to a cost is the number of times that the cost stands on a
      critical path; the sum of derivative times cost is the makespan (Euler).

    Example:
      >>> import jax, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=32)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=1.0, transfer=0.01)
      >>> counts = jax.grad(pj.makespan, argnums=1)(pj.lower(table), costs)
      >>> int(counts.forward), int(counts.backward), int(counts.transmit)
      (39, 39, 68)
    """
    check_types(program=(program, Program), costs=(costs, Costs))
    costs.check_values()  # in a trace their values are out of sight
    return _makespan(program_for(program, costs), costs)


@compiled
def _makespan(program: Program, costs: Costs) -> Float[Array, ""]:
    return _longest(*_graph(program, costs))


def _graph(program: Program, costs: Costs) -> Graph:
    costs.check_values()
    duration, lag = price(program, costs)
    return jnp.asarray(program.preds), jnp.asarray(duration), jnp.asarray(lag)


@jax.custom_jvp
def _longest(preds: Preds, duration: Times, lag: Lags) -> Float[Array, ""]:
    return _scan(preds, duration, lag)[0].max()


@_longest.defjvp
def _longest_jvp(
    primals: Graph, tangents: tuple[object, Times, Lags]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum the tangents over one critical path, which is cheaper than those of all finish times."""
    preds, *costs = primals
    path = critical_path(preds, NodeCosts(*costs))
    _, duration_dot, lag_dot = tangents
    on_nodes = jnp.sum(jnp.where(path.nodes, duration_dot, 0))
    return path.finish.max(), on_nodes + jnp.sum(jnp.where(path.edges, lag_dot, 0))


@short_repr
class CriticalPath(NamedTuple):
    """One longest path, the one that the gradient of the makespan counts."""

    finish: Times  # (nodes) finish times of all nodes [s]
    nodes: Bool[Array, " nodes"]  # whether a node is on the path; the source always is
    edges: Bool[Array, "nodes max_preds"]  # whether an edge is on the path


@compiled
def critical_path(
    preds: Preds | Int[NumpyArray, "nodes max_preds"], costs: NodeCosts
) -> CriticalPath:
    """Walk back to the source from the node that ends last, the first sink at a tie.

    Costs of 0 at the end of the path count too: that is the derivative from above.

    Example:
      >>> import numpy as np
      >>> costs = NodeCosts(np.array([0.0, 1.0, 3.0, 1.0]), np.zeros((4, 2)))
      >>> critical_path(np.array([[0, 0], [0, 0], [0, 0], [1, 2]]), costs).nodes.tolist()
      [True, False, True, True]
    """
    finish, choice = _scan(preds, costs.duration, costs.lag)
    node = jnp.arange(len(preds), dtype=preds.dtype)
    awaited = jnp.zeros(finish.shape, bool).at[preds].set(True)

    # nodes are in topological order, so one pass from the last to the first meets the whole path
    def step(
        current: Int[Array, ""], edge: tuple[Int[Array, ""], Int[Array, ""]]
    ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        v, before = edge
        return jnp.where(v == current, before, current), v == current

    last = jnp.argmax(jnp.where(awaited, -1, finish)).astype(preds.dtype)
    _, nodes = jax.lax.scan(step, last, (node, preds[node, choice]), reverse=True)
    chosen = jax.nn.one_hot(choice, preds.shape[1], dtype=bool)
    return CriticalPath(finish, nodes, nodes[:, None] & chosen)


@in_float64
def slack(program: Program, costs: Costs, *, target: Target | None = None) -> Found:
    """Compute how much longer each node could take within the makespan, or a target.

    Args:
      program: lowered schedule, in topological order.
      costs: unbatched costs, as for `makespan`.
      target: when the step must end [s]; its makespan if None.

    Returns:
      (nodes) slack [s], in float64 as for `makespan`; without a target 0 on every critical path,
      up to rounding; below 0 where the target is missed on a path through the node.

    Raises:
      ValueError: as `makespan`, or if the target is negative or not finite.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> program = pj.lower(table, step_end=False)
      >>> late = pj.analysis.slack(program, pj.Costs(forward=1.0, backward=2.0))
      >>> [f"{s}{pj.Phase(p).name}{m}: {x:g} s" for s, p, m, x in zip(
      ...     program.stage, program.phase, program.microbatch, late) if x > 0 and p]
      ['0F1: 2 s', '0B0: 1 s']

    References:
      Kelley and Walker: Critical-Path Planning and Scheduling (1959).
    """
    check_types(program=(program, Program), costs=(costs, Costs))
    until = None if target is None else checked_seconds("target", target)
    finish, tail = finish_and_tails(*_graph(program, costs))
    return node_slack(finish, tail, until)


@compiled
def finish_and_tails(preds: Preds, duration: Times, lag: Lags) -> tuple[Times, Times]:
    """Finish times (nodes), and longest times (nodes) from there to the makespan [s]."""

    def step(tail: Times, row: Row) -> tuple[Times, None]:
        v, before, seconds, lags = row
        return tail.at[before].max(tail[v] + seconds + lags), None

    rows = (jnp.arange(len(preds)), preds, duration, lag)
    tail, _ = jax.lax.scan(step, jnp.zeros_like(duration), rows, reverse=True)
    return _scan(preds, duration, lag)[0], tail


def node_slack(finish: Times, tail: Times, target: Target | None) -> Times:
    """Slack (nodes) [s] against a target, or the makespan."""
    until = finish.max() if target is None else jnp.asarray(target)
    return until - finish - tail


@in_float64
def total_negative_slack(
    program: Program, costs: Costs, target: Target
) -> Float[Array, ""] | np.float64:
    """Sum up by how much workers end too late, as static timing analysis sums over end points.

        TNS = sum over workers of min(0, target - last end of the worker)

    An objective beside the makespan: it tells many late workers from one, and a step that is in
    time costs nothing. A pure function: jit, vmap, grad and jvp work.

    Args:
      program: lowered schedule.
      costs: unbatched costs; batch with `jax.vmap`.
      target: when every worker must have ended, its update included [s].

    Returns:
      Total negative slack [s], a scalar of at most 0: float64 where the costs are not traced.

    Raises:
      ValueError: as `makespan`, or if the target is negative or not finite.

    Differentiation:
      By a cost, minus how often it stands on the longest paths to the late workers' ends; a
      worker that ends at the target is not late.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> program, costs = pj.lower(table), pj.Costs(forward=1.0, backward=2.0)
      >>> float(pj.makespan(program, costs))
      33.0
      >>> float(pj.analysis.total_negative_slack(program, costs, 30.0))
      -4.0
    """
    check_types(program=(program, Program), costs=(costs, Costs))
    seconds = checked_seconds("target", target)
    finish, _ = _scan(*_graph(program, costs))
    return negative_slack_sum(finish[jnp.asarray(program.last_node)], seconds)


def negative_slack_sum(ends: Float[Array, " workers"], target: Target) -> Float[Array, ""]:
    """Total negative slack [s] of the workers' last ends; one that ends in time has none."""
    spare = jnp.asarray(target - ends)
    return jnp.where(spare < 0, spare, 0).sum()


@compiled
def _scan(preds: Preds, duration: Times, lag: Lags) -> tuple[Times, Int[Array, " nodes"]]:
    """Finish times (nodes) [s], and the column of the winning predecessor: the first at a tie."""

    # Derivatives follow the choices: a choice has none of its own, and what it picks is linear.
    def step(finish: Times, row: Row) -> tuple[Times, Int[Array, ""]]:
        v, before, seconds, lags = row
        arrival = finish[before] + lags
        choice = jnp.argmax(arrival)
        return finish.at[v].set(arrival[choice] + seconds), choice

    rows = (jnp.arange(len(preds)), preds, duration, lag)
    return jax.lax.scan(step, jnp.zeros_like(duration), rows)
