"""The recurrence: finish times of a program, a longest path in the max-plus semiring.

    finish[v] = duration[v] + max over u of (finish[u] + lag[u, v])

Gradients follow one rule, stated here once. At a maximum the first predecessor that attains it
wins, so the derivative of a finish time is an exact path count: 1 for every node and edge on one
critical path, 0 elsewhere, also at ties (a plain maximum would hand out fractions).

| case                       | value          | derivative                                 |
|----------------------------|----------------|--------------------------------------------|
| two predecessors tie       | the common one | 1 to the first, 0 to the second            |
| duration or lag 0          | as any other   | as any other                               |
| no predecessor (padding)   | own duration   | 1 to the own duration; the source gets none|
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.short_repr import short_repr
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import NodeCosts, price

Times = Float[Array, " nodes"]
Preds = Int[Array, "nodes max_preds"]
Lags = Float[Array, "nodes max_preds"]
HostPreds = Int[NumpyArray, "nodes max_preds"]


def finish_times(program: Program, costs: NodeCosts) -> Times:
    """Earliest finish time of every node when each starts as soon as it may.

    Args:
      program: lowered schedule, in topological order.
      costs: duration (nodes) and lag (nodes, max_preds) [s].

    Returns:
      (nodes) finish times [s]; the source and padding finish at 0.

    Differentiation:
      Exact path counts in forward and reverse mode; at a tie the first predecessor wins. A
      `max` over the times themselves hands out fractions where several are largest.

    Cost:
      One scan of `nodes` steps, O(nodes * max_preds). For the gradient of the last end alone
      `makespan` is far cheaper than this function.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
      >>> program = pj.lower(table, step_end=False)
      >>> costs = pj.price(program, pj.Costs.uniform(table, forward=1.0, backward=2.0))
      >>> pj.finish_times(program, costs).tolist()
      [0.0, 1.0, 2.0, 4.0, 6.0]

    References:
      Baccelli, Cohen, Olsder, Quadrat: Synchronization and Linearity (1992).
    """
    return _finish_once_compiled(jnp.asarray(program.preds), *map(jnp.asarray, costs))


def makespan(program: Program, costs: Costs) -> Float[Array, ""]:
    """Return the time from the first start to the last end over all ops.

    A pure function: jit, vmap, grad and jvp work, and neither costs nor programs of one shape
    cause a second compilation.

    Args:
      program: lowered schedule.
      costs: unbatched costs; batch with `jax.vmap`.

    Returns:
      Makespan [s], a scalar.

    Raises:
      ValueError: if a cost that is not traced is negative or not finite, or one has the wrong
        number of entries, or a phase of the program has no cost.

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
    costs.check_values()
    return _makespan(program, costs)


@jax.jit
def _makespan(program: Program, costs: Costs) -> Float[Array, ""]:
    return _longest(jnp.asarray(program.preds), *map(jnp.asarray, price(program, costs)))


@jax.custom_jvp
def _longest(preds: Preds, duration: Times, lag: Lags) -> Float[Array, ""]:
    return _scan(preds, duration, lag)[0].max()


@_longest.defjvp
def _longest_jvp(
    primals: tuple[Preds, Times, Lags], tangents: tuple[object, Times, Lags]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum the tangents over one critical path: cheaper than the tangents of all finish times."""
    path = _forward_and_backward(*primals)
    _, duration_dot, lag_dot = tangents
    on_nodes = jnp.sum(jnp.where(path.nodes, duration_dot, 0))
    return path.finish.max(), on_nodes + jnp.sum(jnp.where(path.edges, lag_dot, 0))


@short_repr
class CriticalPath(NamedTuple):
    """One longest path, the one that the gradient of the makespan counts.

    Attributes:
      finish: (nodes) finish times of all nodes [s].
      nodes: (nodes) whether a node is on the path; the source always is.
      edges: (nodes, max_preds) whether an edge is on the path.

    Example:
      >>> import numpy as np
      >>> costs = NodeCosts(np.array([0.0, 1.0, 3.0, 1.0]), np.zeros((4, 2)))
      >>> critical_path(np.array([[0, 0], [0, 0], [0, 0], [1, 2]]), costs).nodes.tolist()
      [True, False, True, True]
    """

    finish: Times
    nodes: Bool[Array, " nodes"]
    edges: Bool[Array, "nodes max_preds"]


def critical_path(preds: Preds | HostPreds, costs: NodeCosts) -> CriticalPath:
    """Find finish times and a critical path in one forward and one backward pass.

    Args:
      preds: (nodes, max_preds) predecessors, as in `Program`.
      costs: duration (nodes) and lag (nodes, max_preds) [s].

    Returns:
      Finish times, and the nodes and edges of the path.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
      >>> program = pj.lower(table, step_end=False)
      >>> costs = pj.price(program, pj.Costs.uniform(table, forward=1.0, backward=2.0))
      >>> pj.critical_path(program.preds, costs).nodes.tolist()
      [True, True, True, True, True]
    """
    return _forward_and_backward(jnp.asarray(preds), *map(jnp.asarray, costs))


@jax.jit
def _forward_and_backward(preds: Preds, duration: Times, lag: Lags) -> CriticalPath:
    """Walk back to the source from the node that ends last, the first of those nobody waits for.

    A path that ends in a node with costs of 0 counts them too: that is the derivative from above.
    """
    finish, choice = _scan(preds, duration, lag)
    node = jnp.arange(preds.shape[0], dtype=preds.dtype)
    awaited = jnp.zeros(finish.shape, bool).at[preds].set(True)

    # nodes are in topological order, so one pass from the last to the first meets the whole path
    def step(
        current: Int[Array, ""], inputs: tuple[Int[Array, ""], Int[Array, ""]]
    ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        v, before = inputs
        return jnp.where(v == current, before, current), v == current

    last = jnp.argmax(jnp.where(awaited, -1, finish)).astype(preds.dtype)
    _, nodes = jax.lax.scan(step, last, (node, preds[node, choice]), reverse=True)
    column = jnp.arange(preds.shape[1], dtype=choice.dtype)
    return CriticalPath(finish, nodes, nodes[:, None] & (column[None, :] == choice[:, None]))


def slack(program: Program, costs: NodeCosts) -> Times:
    """How much longer each node could take before the makespan grows.

    Args:
      program: lowered schedule, in topological order.
      costs: duration (nodes) and lag (nodes, max_preds) [s].

    Returns:
      (nodes) slack [s]; 0 on every critical path, up to rounding.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> program = pj.lower(table, step_end=False)
      >>> costs = pj.price(program, pj.Costs(forward=1.0, backward=2.0))
      >>> late = pj.slack(program, costs)
      >>> [f"{s}{pj.Phase(p).name}{m}: {x:g} s" for s, p, m, x in zip(
      ...     program.stage, program.phase, program.microbatch, late) if x > 0 and p]
      ['0F1: 2 s', '0B0: 1 s']

    References:
      Kelley and Walker: Critical-Path Planning and Scheduling (1959).
    """
    return _slack(jnp.asarray(program.preds), *map(jnp.asarray, costs))


@jax.jit
def _slack(preds: Preds, duration: Times, lag: Lags) -> Times:
    finish, _ = _scan(preds, duration, lag)

    def step(
        tail: Times, inputs: tuple[Int[Array, ""], Int[Array, " max_preds"], Array, Array]
    ) -> tuple[Times, None]:
        v, before, own, lags = inputs
        return tail.at[before].max(tail[v] + own + lags), None

    node = jnp.arange(preds.shape[0])
    start = jnp.zeros_like(duration)
    tail, _ = jax.lax.scan(step, start, (node, preds, duration, lag), reverse=True)
    return finish.max() - finish - tail


@jax.custom_jvp
def _finish(preds: Preds, duration: Times, lag: Lags) -> Times:
    return _scan(preds, duration, lag)[0]


@_finish.defjvp
def _finish_jvp(
    primals: tuple[Preds, Times, Lags], tangents: tuple[object, Times, Lags]
) -> tuple[Times, Times]:
    """Follow the winning predecessors with the tangents: linear, so reverse mode transposes it."""
    preds, duration, lag = primals
    finish, choice = _scan(preds, duration, lag)
    _, duration_dot, lag_dot = tangents
    node = jnp.arange(preds.shape[0])
    winner, winner_dot = preds[node, choice], lag_dot[node, choice]

    def step(
        finish_dot: Times, inputs: tuple[Int[Array, ""], Int[Array, ""], Array, Array]
    ) -> tuple[Times, None]:
        v, u, own_dot, edge_dot = inputs
        return finish_dot.at[v].set(finish_dot[u] + edge_dot + own_dot), None

    start = jnp.zeros_like(duration_dot)
    finish_dot, _ = jax.lax.scan(step, start, (node, winner, duration_dot, winner_dot))
    return finish, finish_dot


_finish_once_compiled = jax.jit(_finish)  # the loop alone would be compiled in every call


def _scan(preds: Preds, duration: Times, lag: Lags) -> tuple[Times, Int[Array, " nodes"]]:
    """Finish times, and the predecessor that each node waited for: argmax takes the first."""

    def step(
        finish: Times, inputs: tuple[Int[Array, ""], Int[Array, " max_preds"], Array, Array]
    ) -> tuple[Times, Int[Array, ""]]:
        v, before, own, lags = inputs
        arrival = finish[before] + lags
        choice = jnp.argmax(arrival)
        return finish.at[v].set(arrival[choice] + own), choice

    start = jnp.zeros_like(duration)
    node = jnp.arange(preds.shape[0])
    return jax.lax.scan(step, start, (node, preds, duration, lag))
