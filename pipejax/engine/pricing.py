"""Pricing: look up the seconds of a program's nodes and edges in costs by stage and boundary.

After lowering, all microbatches of a stage read one position of the cost vector. If costs differ
by microbatch, each position becomes one for each microbatch (`by_microbatch`): only the positions
of nodes and edges change.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import is_array, jnp, leaves, mapped
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.costs.precision import float_type, is_traced
from pipejax.engine.lowering.link_models import check_eager, without_eager_limit
from pipejax.engine.lowering.lower import cost_sizes, lower_unchecked
from pipejax.engine.lowering.program import (
    NO_WORKER,
    SOURCE,
    ZERO,
    CostLayout,
    MessageTable,
    Program,
)
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

Positions = Int[NumpyArray, "..."]
Vector = Float[Array, " costs"] | Float[NumpyArray, " costs"]


@short_repr
class NodeCosts(NamedTuple):
    """Seconds of every node and edge of a program."""

    duration: Float[Array, " nodes"] | Float[NumpyArray, " nodes"]  # time that each node takes [s]
    lag: Float[Array, "nodes max_preds"] | Float[NumpyArray, "nodes max_preds"]  # [s]


def price(program: Program, costs: Costs) -> NodeCosts:
    """Return the duration [s] of every node and the lag [s] of every edge of a program."""
    program = program_for(program, costs)
    vector = cost_vector(program, costs)
    return NodeCosts(vector[program.duration_index], vector[program.lag_index])


def lower_and_price(
    table: ScheduleTable, costs: Costs, link: str | Links
) -> tuple[Program, Float[NumpyArray, " costs"]]:
    """Lower a table, with all-reduce and update if they take time; flatten its costs to float64."""
    if is_traced(costs):
        raise TypeError(
            "costs must be numbers that are known, got traced values of jax.grad, jit or vmap: "
            "pj.makespan(pj.lower(table), costs) takes those"
        )
    costs.check_shapes(*cost_sizes(table))
    end_costs = [cost for cost in (costs.all_reduce, costs.update) if cost is not None]
    has_step_end = any(np.any(np.asarray(cost) > 0) for cost in end_costs)
    program = lower_unchecked(table, Links.resolve(link), has_step_end, costs)
    check_known(program, costs)
    program = with_columns_for(program, costs)
    float64_costs = mapped(lambda leaf: np.asarray(leaf, np.float64), costs)
    return program, np.asarray(flat_costs(program, float64_costs))


def program_for(program: Program, costs: Costs, *, batch_axes: int = 0) -> Program:
    """Return a program for these costs: without an eager limit, and per microbatch if needed."""
    # The costs must have the program's set of eager messages: then the limit is dropped. If costs
    # differ by microbatch, each microbatch gets its own cost positions. The costs have `batch_axes`
    # leading batch axes.
    if program.links.eager_below:
        if is_traced(program):
            raise ValueError("a program of links with eager_below cannot be traced: close over it")
        check_eager(program, costs.transmit, batch_axes)
        program = without_eager_limit(program)
    return with_columns_for(program, costs, batch_axes=batch_axes)


def with_columns_for(program: Program, costs: Costs, *, batch_axes: int = 0) -> Program:
    """Expand a program to separate costs for each microbatch, if costs differ by microbatch."""
    if program.layout.per_microbatch or not costs.per_microbatch(batch_axes):
        return program
    if is_traced(program):
        raise ValueError(
            "costs per microbatch need a program that is not traced: close over it, as in "
            "jax.jit(lambda costs: pj.makespan(program, costs))"
        )
    return by_microbatch(program)


def cost_vector(program: Program, costs: Costs) -> Vector:
    """Flatten costs to a vector (costs) [s], in the order of `CostLayout`.

    Without JAX arrays among the costs, this runs in NumPy and compiles nothing.
    """
    layout = program.layout
    # times of fused pairs may be given by kind of pair, not by stage: the check leaves them out
    stage_costs = unchecked_costs({**vars(costs), "pair": None}) if layout.has_pair_times else costs
    stage_costs.check_shapes(*layout.sizes)
    check_known(program, costs)
    return flat_costs(program, costs)


def flat_costs(program: Program, costs: Costs) -> Vector:
    """Flatten costs as `cost_vector` does, without its checks of shapes and phases."""
    layout, times = program.layout, leaves(costs)
    xp: Any = jnp if any(map(is_array, times)) else np
    dtype = np.result_type(float, *times) if xp is np else float_type(*times)

    def flatten(cost: Any, shape: tuple[int, ...]) -> Any:
        """Broadcast a cost to a shape (None to 0), with a microbatch axis if needed; flatten it."""
        array = xp.asarray(0.0 if cost is None else cost, dtype)
        if array.ndim < len(shape):
            array = array[..., None]
        return xp.broadcast_to(array, shape).ravel()

    ops = [flatten(costs.time(phase), layout.phase_shape(phase)) for phase in layout.timed]
    op_times = xp.concatenate([xp.zeros(1, dtype), *ops])
    pair_op_times = op_times[program.pair_index]  # (pairs, 2) of forward and backward
    pair_times = pair_op_times.sum(axis=1)
    if costs.pair is not None:
        shape = (layout.num_pairs, 1) if layout.has_pair_times else layout.op_shape
        pair_times = flatten(costs.pair, shape)[program.pair_stage]
    elif costs.pair_factor is not None:
        factor = flatten(costs.pair_factor, layout.op_shape)[program.pair_stage]
        pair_times = overlapped(pair_op_times[:, 0], pair_op_times[:, 1], factor, xp)
    latency = flatten(costs.latency, layout.link_shape)
    transmit = flatten(costs.transmit, layout.link_shape)
    return xp.concatenate([op_times, pair_times, latency, transmit, latency + transmit])


def overlapped(forward: Any, backward: Any, factor: Any, xp: Any) -> Any:
    """Return times of fused pairs [s]: longer op's time plus `factor` times shorter op's time."""
    # At a tie the forward counts as the longer op, so its derivative is 1.
    is_forward_longer = forward >= backward
    return xp.where(is_forward_longer, forward + factor * backward, backward + factor * forward)


def check_known(program: Program, costs: Costs) -> None:
    """Check that a program's phases have costs; fused pairs may have a cost of their own."""
    costs.check_known(program.layout.phases)
    if costs.pair is None:
        costs.check_known(program.layout.paired_phases)


@cached_method
def by_microbatch(program: Program) -> Program:
    """Return the program with separate cost positions for each microbatch of an op or message."""
    old, fused = program.layout, np.asarray(program.fused)
    if old.per_microbatch:
        return program
    # Each fused pair gets a position, as it joins two microbatches. `pair_index` has the positions
    # of its F and B; `pair_stage` that of its F among costs (stages, microbatches), row by row.
    new = dataclasses.replace(old, num_pairs=len(fused), per_microbatch=True)

    def translate(position: Positions, microbatch: Positions) -> Positions:
        """Return the positions of microbatches in the new cost vector."""
        return _microbatch_positions(position, microbatch, old, new).astype(np.int32)

    node_microbatch, old_durations = _node_microbatches(program), np.asarray(program.duration_index)
    pair_nodes, backward_microbatch = fused.T
    old_pair = old_durations[pair_nodes] - old.first_pair
    forward_microbatch = node_microbatch[pair_nodes]
    pair_microbatches = np.stack([forward_microbatch, backward_microbatch], axis=1)
    durations = translate(old_durations, node_microbatch)
    durations[pair_nodes] = new.pair_position(np.arange(len(fused)))
    messages, lags = program.messages, np.asarray(program.lag_index)
    edge_microbatch = np.zeros(lags.shape, np.int64)
    with_lag = np.flatnonzero(messages.lag_index != ZERO)  # messages that delay an edge
    edge_microbatch[tuple(message_edges(program, with_lag))] = messages.microbatch[with_lag]
    first_pair_time = np.asarray(program.pair_stage)[old_pair] * new.times_per_place
    message_lags = _microbatch_positions(messages.lag_index, messages.microbatch, old, new)
    return dataclasses.replace(
        program,
        duration_index=durations,
        lag_index=translate(lags, edge_microbatch),
        pair_index=translate(np.asarray(program.pair_index)[old_pair], pair_microbatches),
        pair_stage=first_pair_time + forward_microbatch,
        messages=messages._replace(lag_index=message_lags),
        layout=new,
    )


def _node_microbatches(program: Program) -> Int[NumpyArray, " nodes"]:
    """Return each node's microbatch; a final update gets the smallest of its stage copy."""
    fields = program.microbatch, program.worker, program.stage, program.node_of_cell
    microbatch, worker, stage, node_of_cell = map(np.asarray, fields)
    row, slot = np.nonzero(node_of_cell != SOURCE)  # ops on lanes have a row, but no worker
    node = node_of_cell[row, slot]
    has_copy = (microbatch[node] >= 0) & (stage[node] >= 0)
    row, node = row[has_copy], node[has_copy]
    # (workers, stages) smallest microbatch; M, which is not read, if a worker lacks the stage
    smallest = np.full((program.num_workers, program.layout.num_stages), program.num_microbatches)
    np.minimum.at(smallest, (row, stage[node]), microbatch[node])
    updates = program.beside_cells[worker[program.beside_cells] >= 0]
    node_microbatch = microbatch.copy()
    node_microbatch[updates] = smallest[worker[updates], stage[updates]]
    return node_microbatch


def _microbatch_positions(
    position: Positions, microbatch: Positions, old: CostLayout, new: CostLayout
) -> Positions:
    """Move indices of the cost vector to a vector with one entry per microbatch (-1: entry 0)."""
    # Each entry for ops (from 1 on) and messages (from `first_link` on) becomes M entries: with
    # M = 2, op position 1 becomes 1 and 2, position 2 becomes 3 and 4. Fused pairs come later.
    position, column = np.asarray(position).astype(np.int64), np.maximum(microbatch, 0)
    is_link = position >= old.first_link
    old_start, new_start = (np.where(is_link, layout.first_link, 1) for layout in (old, new))
    positions = new_start + (position - old_start) * new.times_per_place + column
    return np.where(position == ZERO, ZERO, positions)


def message_edges(
    program: Program, selected: Int[NumpyArray, " selected"]
) -> Int[NumpyArray, "2 selected"]:
    """Return the edge that each message delays, (2, selected): node, and column in its `preds`."""
    # Head, tail and lag identify an edge (fused pairs may send each other two messages). The tail
    # is the node that carries the message, or the producer if no node does (SOURCE).
    messages = MessageTable(*(np.asarray(field)[selected] for field in program.messages))
    preds, lags = np.asarray(program.preds), np.asarray(program.lag_index)
    tails = np.where(messages.carrier == SOURCE, messages.producer, messages.carrier)
    num_positions = np.int64(program.layout.size)

    def key(head: NumpyArray, tail: NumpyArray, lag: NumpyArray) -> Int[NumpyArray, " edges"]:
        return (head.astype(np.int64) * program.num_nodes + tail) * num_positions + lag

    head, column = np.nonzero(lags != ZERO)
    edge_keys = key(head, preds[head, column], lags[head, column])
    by_key = np.argsort(edge_keys)
    message_keys = key(messages.consumer, tails, messages.lag_index)
    edge = by_key[np.searchsorted(edge_keys, message_keys, sorter=by_key)]
    return np.stack([head[edge], column[edge]])


class PerOpCosts(NamedTuple):
    """A program with a separate cost column for every op and message, and their times [s]."""

    # Columns are sorted by phase, stage and microbatch, so that schedules of the same ops have the
    # same columns: 0 is no cost, then come ops, then each time that a message takes.

    program: Program
    ops: Positions  # (ops) node of each op
    messages: Positions  # (messages) number of each message of the program
    op_seconds: Float[NumpyArray, " ops"]
    op_worker: Int[NumpyArray, " ops"]  # worker of each op, or `NO_WORKER`
    message_seconds: tuple[Float[NumpyArray, " messages"], ...]  # one array for each message time


def per_op_costs(program: Program, costs: NodeCosts) -> PerOpCosts:
    """Give every op and every message of a program a separate cost column."""
    # Under "queued" a message has two columns: its node's transmit time, its edge's latency.
    message_table = program.messages
    duration, delay = map(np.asarray, costs)
    is_op = (program.phase != Phase.IDLE) & (program.sender == NO_WORKER)
    ops = np.lexsort((program.worker, program.microbatch, program.stage, program.phase))
    ops = ops[is_op[ops]]
    messages = np.lexsort((message_table.microbatch, message_table.stage, message_table.phase))
    duration_index = np.zeros(program.num_nodes, np.int64)
    duration_index[ops] = 1 + np.arange(len(ops))
    lag_index = np.zeros(program.preds.shape, np.int64)
    message_seconds: list[Float[NumpyArray, " messages"]] = []
    column = 1 + len(ops) + np.arange(len(messages))
    carrier = np.asarray(message_table.carrier)[messages]
    is_node = carrier != SOURCE  # the message occupies its link
    is_lag = np.asarray(message_table.lag_index)[messages] != ZERO  # the message delays an edge
    if np.any(is_node):
        duration_index[carrier[is_node]] = column[is_node]
        message_seconds.append(duration[carrier])
        column = column + len(messages)
    if np.any(is_lag):
        edge = message_edges(program, messages[is_lag])
        lag_index[*edge] = column[is_lag]
        lag_seconds = np.zeros(len(messages))
        lag_seconds[is_lag] = delay[*edge]
        message_seconds.append(lag_seconds)
    return PerOpCosts(
        program=dataclasses.replace(program, duration_index=duration_index, lag_index=lag_index),
        ops=ops,
        messages=messages,
        op_seconds=duration[ops],
        op_worker=np.asarray(program.worker)[ops],
        message_seconds=tuple(message_seconds),
    )
