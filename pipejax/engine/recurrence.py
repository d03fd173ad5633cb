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
NodeTimes = Times | Float[NumpyArray, " nodes"]  # NumPy's if JAX has no float64 enabled
Preds = Int[Array, "nodes max_preds"]
Lags = Float[Array, "nodes max_preds"]
Graph = tuple[Preds, Times, Lags]
Target = float | Float[Array, ""] | Float[NumpyArray, ""]
Row = tuple[Int[Array, ""], Int[Array, " max_preds"], Array, Array]  # node, preds, duration, lags


@in_float64
def finish_times(program: Program, costs: Costs) -> NodeTimes:
    """Return the earliest finish time of every node.

    Args:
      program: lowered schedule, in topological order.
      costs: unbatched costs, as for `makespan`.

    Returns:
      (nodes) finish times [s], in float64 as for `makespan`; the source and padding finish at 0.

    Raises:
      ValueError: as `makespan`.

    Differentiation:
      Exact path counts in forward and reverse mode; at a tie the first predecessor wins. A
      `max` over the times themselves gives fractions if several are largest.

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
    finish, _ = _scan_nodes(*_graph(program, costs))
    return finish


@in_float64
def makespan(program: Program, costs: Costs) -> Float[Array, ""] | np.float64:
    """Return the makespan: the time from the first start to the last end over all ops.

    A pure function: jit, vmap, grad and jvp work, and neither costs nor programs of one shape
    cause a second compilation. Untraced costs are solved in float64, whatever JAX's default. In a
    trace, and so in a gradient, they are float32 unless `jax_enable_x64` is set.

    Args:
      program: lowered schedule.
      costs: unbatched costs, by stage or by stage and microbatch; batch with `jax.vmap`.

    Returns:
      Makespan [s], a scalar, in float64 if the costs are not traced.

    Raises:
      ValueError: if an untraced cost is negative or not finite, a cost has the wrong number of
        entries, a phase of the program has no cost, or the times overflow.

    Differentiation:
      The derivative with respect to a cost is the count of this cost on a critical path. The sum of
      derivative times cost is the makespan (Euler).

    Example:
      >>> import jax, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=32)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=1.0, transfer=0.01)
      >>> counts = jax.grad(pj.makespan, argnums=1)(pj.lower(table), costs)
      >>> int(counts.forward), int(counts.backward), int(counts.transmit)
      (39, 39, 68)
    """
    check_types(program=(program, Program), costs=(costs, Costs))
    costs.check_values()  # the compiled function cannot see the values
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
    finish, _ = _scan_nodes(preds, duration, lag)
    return finish.max()


@_longest.defjvp
def _longest_jvp(
    primals: Graph, tangents: tuple[object, Times, Lags]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum tangents over a critical path, which is cheaper than tangents of all finish times."""
    preds, *costs = primals
    path = critical_path(preds, NodeCosts(*costs))
    _, duration_dot, lag_dot = tangents
    node_sum = jnp.sum(jnp.where(path.nodes, duration_dot, 0))
    return path.finish.max(), node_sum + jnp.sum(jnp.where(path.edges, lag_dot, 0))


@short_repr
class CriticalPath(NamedTuple):
    """Critical path of a program: the longest path, which the gradient of the makespan follows."""

    finish: Times  # (nodes) finish times of all nodes [s]
    nodes: Bool[Array, " nodes"]  # whether a node is on the path; the source always is
    edges: Bool[Array, "nodes max_preds"]  # whether an edge is on the path


@compiled
def critical_path(
    preds: Preds | Int[NumpyArray, "nodes max_preds"], costs: NodeCosts
) -> CriticalPath:
    """Find the critical path: walk back from the node that ends last, at a tie the first one.

    A node of duration 0 at its end is on the path too, as a longer duration would delay the end.

    Example:
      >>> import numpy as np
      >>> costs = NodeCosts(np.array([0.0, 1.0, 3.0, 1.0]), np.zeros((4, 2)))
      >>> critical_path(np.array([[0, 0], [0, 0], [0, 0], [1, 2]]), costs).nodes.tolist()
      [True, False, True, True]
    """
    finish, columns = _scan_nodes(preds, costs.duration, costs.lag)  # of latest predecessors
    nodes = jnp.arange(len(preds), dtype=preds.dtype)
    has_successor = jnp.zeros(finish.shape, bool).at[preds].set(True)

    # nodes are in topological order: a reverse pass visits the whole path
    def visit_node(
        path_node: Int[Array, ""], edge: tuple[Int[Array, ""], Int[Array, ""]]
    ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        """Return the path's next node, and whether the visited node is on the path."""
        node, latest_pred = edge
        return jnp.where(node == path_node, latest_pred, path_node), node == path_node

    path_end = jnp.argmax(jnp.where(has_successor, -1, finish)).astype(preds.dtype)  # times >= 0
    _, on_path = jax.lax.scan(visit_node, path_end, (nodes, preds[nodes, columns]), reverse=True)
    is_latest = jax.nn.one_hot(columns, preds.shape[1], dtype=bool)
    return CriticalPath(finish, on_path, on_path[:, None] & is_latest)


@in_float64
def slack(program: Program, costs: Costs, *, target: Target | None = None) -> NodeTimes:
    """Return each node's slack: the longest delay that keeps the makespan or a target.

    Args:
      program: lowered schedule, in topological order.
      costs: unbatched costs, as for `makespan`.
      target: time at which the step must end [s]; None for the makespan.

    Returns:
      (nodes) slack [s], in float64 as for `makespan`. Without a target it is 0 on every critical
      path, up to rounding. Slack is below 0 if a path through the node misses the target.

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
    finish, to_end = finish_and_times_to_end(*_graph(program, costs))
    return node_slack(finish, to_end, until)


@compiled
def finish_and_times_to_end(preds: Preds, duration: Times, lag: Lags) -> tuple[Times, Times]:
    """Return each node's finish time [s], and the longest time [s] from there to the last end."""

    def raise_preds(to_end: Times, row: Row) -> tuple[Times, None]:
        """Raise the times to the end of a node's predecessors; nodes come in reverse order."""
        node, node_preds, seconds, lags = row
        return to_end.at[node_preds].max(to_end[node] + seconds + lags), None

    rows = (jnp.arange(len(preds)), preds, duration, lag)
    to_end, _ = jax.lax.scan(raise_preds, jnp.zeros_like(duration), rows, reverse=True)
    finish, _ = _scan_nodes(preds, duration, lag)
    return finish, to_end


def node_slack(finish: Times, to_end: Times, target: Target | None) -> Times:
    """Return the slack [s] of each node against a target; by default the makespan."""
    until = finish.max() if target is None else jnp.asarray(target)
    return until - finish - to_end


@in_float64
def total_negative_slack(
    program: Program, costs: Costs, target: Target
) -> Float[Array, ""] | np.float64:
    """Return minus the total time [s] by which workers end after a target.

        TNS = sum over workers of min(0, target - last end of the worker)

    Unlike the makespan, it tells many late workers from one, and a step in time costs nothing. A
    pure function: jit, vmap, grad and jvp work.

    Args:
      program: lowered schedule.
      costs: unbatched costs; batch with `jax.vmap`.
      target: time by which every worker must have ended, with its update [s].

    Returns:
      Total negative slack [s], a scalar of at most 0, in float64 if the costs are not traced.

    Raises:
      ValueError: as `makespan`, or if the target is negative or not finite.

    Differentiation:
      The derivative with respect to a cost is minus its count on the longest paths to the ends of
      late workers. A worker that ends at the target is not late.

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
    finish, _ = _scan_nodes(*_graph(program, costs))
    slacks = jnp.asarray(seconds - finish[jnp.asarray(program.last_node)])
    return jnp.where(slacks < 0, slacks, 0).sum()


@compiled
def longest_spans_and_grad(
    program: Program, costs: dict[str, Array]
) -> tuple[Float[Array, " batch"], dict[str, Array]]:
    """Return the longest time from a worker's first start to its last end, and its derivatives."""
    # `costs` and derivatives are {field of `Costs`: array with a batch axis first}.

    def longest_span(costs: dict[str, Array]) -> Float[Array, ""]:
        preds, duration, lag = _graph(program, Costs(**costs))
        finish, _ = _scan_nodes(preds, duration, lag)
        first = jnp.asarray(program.first_node)
        spans = finish[jnp.asarray(program.last_node)] - (finish[first] - duration[first])
        return spans[jnp.argmax(spans)]  # a maximum would share its derivative among ties

    values, slopes = jax.vmap(jax.value_and_grad(longest_span))(costs)
    return values, slopes


@compiled
def _scan_nodes(preds: Preds, duration: Times, lag: Lags) -> tuple[Times, Int[Array, " nodes"]]:
    """Return each node's finish time [s], and the column of its latest predecessor in `preds`."""

    # argmax has no derivative, so only the latest arrival has derivatives
    def finish_node(finish: Times, row: Row) -> tuple[Times, Int[Array, ""]]:
        """Compute the finish time of one node; emit the column of its latest predecessor."""
        node, node_preds, seconds, lags = row
        arrivals = finish[node_preds] + lags
        column = jnp.argmax(arrivals)
        return finish.at[node].set(arrivals[column] + seconds), column

    rows = (jnp.arange(len(preds)), preds, duration, lag)
    return jax.lax.scan(finish_node, jnp.zeros_like(duration), rows)
