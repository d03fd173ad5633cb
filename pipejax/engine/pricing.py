"""Pricing: from costs per stage, boundary and microbatch to seconds per node and edge.

Lowering lets all microbatches of a stage read one position of the cost vector. Where costs differ
by microbatch, each position becomes one for each microbatch (`by_microbatch`): nodes and edges are
renumbered and nothing else of the program changes.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import is_array, jnp
from pipejax.base.trees import leaves, mapped
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.costs.precision import float_type, is_traced
from pipejax.engine.lowering.link_models import check_eager, settled
from pipejax.engine.lowering.lower import cost_sizes, lowered
from pipejax.engine.lowering.program import SOURCE, ZERO, CostLayout, MessageTable, Program
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

Positions = Int[NumpyArray, "..."]
Vector = Float[Array, " costs"] | Float[NumpyArray, " costs"]


@short_repr
class NodeCosts(NamedTuple):
    """The costs of one program."""

    duration: Float[Array, " nodes"] | Float[NumpyArray, " nodes"]  # time that each node takes [s]
    lag: Float[Array, "nodes max_preds"] | Float[NumpyArray, "nodes max_preds"]  # [s]


def price(program: Program, costs: Costs) -> NodeCosts:
    """Look up what every node and edge of a program costs."""
    program = program_for(program, costs)
    vector = cost_vector(program, costs)
    return NodeCosts(vector[program.duration_index], vector[program.lag_index])


def ends_step(costs: Costs) -> bool:
    """Return whether the all-reduce or the update after all rows costs anything."""
    at_end = (cost for cost in (costs.all_reduce, costs.update) if cost is not None)
    return any(np.any(np.asarray(cost) > 0) for cost in at_end)


def lower_and_price(
    table: ScheduleTable, costs: Costs, link: str | Links
) -> tuple[Program, Float[NumpyArray, " costs"]]:
    """Lower a table, with all-reduce and update where they cost, and price it in float64."""
    costs.check_shapes(*cost_sizes(table))
    program = lowered(table, Links.resolve(link), ends_step(costs), costs)
    check_known(program, costs)
    program = by_microbatch(program) if costs.per_microbatch() else program
    exact = mapped(lambda leaf: np.asarray(leaf, np.float64), costs)
    return program, np.asarray(checked_vector(program, exact))


def program_for(program: Program, costs: Costs, *, batch_axes: int = 0) -> Program:
    """Return the program as costs need it: `by_microbatch` where they differ by microbatch."""
    # `batch_axes` stand before all other axes of the costs. What is returned is for these costs:
    # its links say nothing of eager messages any more.
    if program.links.eager_below:
        if is_traced(program):
            raise ValueError("a program of links with eager_below cannot be traced: close over it")
        check_eager(program, costs.transmit, batch_axes)
        program = settled(program)
    return with_columns_for(program, costs, batch_axes=batch_axes)


def with_columns_for(program: Program, costs: Costs, *, batch_axes: int = 0) -> Program:
    """Return the program with one column for each microbatch where costs differ by them."""
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
    op_costs = unchecked_costs({**vars(costs), "pair": None}) if layout.pairs_apart else costs
    op_costs.check_shapes(*layout.sizes)
    check_known(program, costs)
    return checked_vector(program, costs)


def checked_vector(program: Program, costs: Costs) -> Vector:
    """Flatten costs as `cost_vector` does, whose shapes and phases were checked."""
    layout, times = program.layout, leaves(costs)
    xp: Any = jnp if any(map(is_array, times)) else np
    dtype = np.result_type(float, *times) if xp is np else float_type(*times)

    def fill(value: Any, shape: tuple[int, ...]) -> Any:
        # what no node reads may be unknown; all but the axis of microbatches may stand alone
        array = xp.asarray(0.0 if value is None else value, dtype)
        return xp.broadcast_to(array if array.ndim == len(shape) else array[..., None], shape)

    ops = [fill(costs.time(phase), layout.shape_of(phase)).ravel() for phase in layout.timed]
    head = xp.concatenate([xp.zeros(1, dtype), *ops])
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
    """Times of fused pairs: the longer op and `factor` of the shorter one [s]."""
    # Where both last as long, the forward is the longer one, and its derivative 1.
    longer = forward >= backward
    return xp.where(longer, forward + factor * backward, backward + factor * forward)


def check_known(program: Program, costs: Costs) -> None:
    """Check that each phase of a program has a cost; for fused pairs, its phases or the pair."""
    costs.check_known(program.layout.phases)
    if costs.pair is None:
        costs.check_known(program.layout.paired_phases)


@cached_method
def by_microbatch(program: Program) -> Program:
    """Give every microbatch costs of its own; a program keeps the result."""
    # Fused pairs are of two microbatches, so each becomes a kind of its own.
    old, fused = program.layout, np.asarray(program.fused)
    if old.per_microbatch:
        return program
    new = dataclasses.replace(old, num_pairs=len(fused), per_microbatch=True)
    node, backward = fused.T
    node_microbatch, old_durations = (
        _microbatch_of_nodes(program),
        np.asarray(program.duration_index),
    )
    kind = old_durations[node] - old.first_pair
    both = np.stack([node_microbatch[node], backward], axis=1)
    duration = _spread(old_durations, node_microbatch, old, new)
    duration[node] = new.pair(np.arange(len(fused)))
    sent, lags = program.messages, np.asarray(program.lag_index)
    edge_microbatch = np.zeros(lags.shape, np.int64)
    late = np.flatnonzero(sent.lag_index != ZERO)
    edge_microbatch[tuple(message_edges(program, late))] = sent.microbatch[late]
    return dataclasses.replace(
        program,
        duration_index=duration.astype(np.int32),
        lag_index=_spread(lags, edge_microbatch, old, new).astype(np.int32),
        pair_index=_spread(np.asarray(program.pair_index)[kind], both, old, new).astype(np.int32),
        pair_stage=np.asarray(program.pair_stage)[kind] * new.columns + node_microbatch[node],
        messages=sent._replace(lag_index=_spread(sent.lag_index, sent.microbatch, old, new)),
        layout=new,
    )


def _microbatch_of_nodes(program: Program) -> Int[NumpyArray, " nodes"]:
    """Microbatch of each node; of an update behind the rows the first that its copy meets."""
    fields = program.microbatch, program.worker, program.stage, program.node_of_cell
    microbatch, worker, stage, node_of_cell = map(np.asarray, fields)
    row, slot = np.nonzero(node_of_cell != SOURCE)  # ops on lanes are of a row, and of no worker
    node = node_of_cell[row, slot]
    has_stage = (microbatch[node] >= 0) & (stage[node] >= 0)
    row, node = row[has_stage], node[has_stage]
    first = np.full((program.num_workers, program.layout.num_stages), program.num_microbatches)
    np.minimum.at(first, (row, stage[node]), microbatch[node])
    updates = program.beside_cells[worker[program.beside_cells] >= 0]
    node_microbatch = microbatch.copy()
    node_microbatch[updates] = first[worker[updates], stage[updates]]
    return node_microbatch


def _spread(
    position: Positions, microbatch: Positions, old: CostLayout, new: CostLayout
) -> Positions:
    """Positions of ops and messages for a microbatch each; what has none reads the first."""
    place, column = np.asarray(position).astype(np.int64), np.maximum(microbatch, 0)
    op, link = place - 1, place - old.first_link
    positions = np.where(
        link >= 0, new.first_link + link * new.columns + column, 1 + op * new.columns + column
    )
    return np.where(place == ZERO, ZERO, positions)


def message_edges(program: Program, which: Int[NumpyArray, " some"]) -> Int[NumpyArray, "2 some"]:
    """Node, and position among its predecessors, of the edge that each of some messages delays."""
    # An edge is told by its ends and its lag, for fused pairs may send each other an activation and
    # a gradient: as one number, (head * nodes + tail) * positions + lag. Numbers of the edges with
    # a lag are sorted, and those of the messages looked up among them.
    sent = MessageTable(*(np.asarray(field)[which] for field in program.messages))
    preds, lags = np.asarray(program.preds), np.asarray(program.lag_index)
    leaves = np.where(sent.carrier == SOURCE, sent.producer, sent.carrier)
    size = np.int64(program.layout.size)

    def key(head: NumpyArray, tail: NumpyArray, lag: NumpyArray) -> Int[NumpyArray, " edges"]:
        return (head.astype(np.int64) * program.num_nodes + tail) * size + lag

    head, place = np.nonzero(lags != ZERO)
    edge_keys = key(head, preds[head, place], lags[head, place])
    order = np.argsort(edge_keys)
    message_keys = key(np.asarray(sent.consumer), leaves, np.asarray(sent.lag_index))
    edge = order[np.searchsorted(edge_keys, message_keys, sorter=order)]
    return np.stack([head[edge], place[edge]])
