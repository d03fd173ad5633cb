"""Lowering: from a table to a program.

Ops become nodes, rows become chains of nodes, host links chains beside them, and a link model
turns every message between workers into an edge with a lag or into a node of its own. At the end
come the all-reduce of each stage and the optimizer update of each stage copy; where cells of the
table update, an all-reduce comes before each of them instead.

A worker takes part in one all-reduce at a time. All workers follow one order: that in which the
last gradient of each all-reduce ends in the message-free run with unit slots, ties by stage. So
all-reduces cannot wait for each other in a circle, and since updates alone wait for them, nor can
they with rows: what they wait for in a row stands before the update that waits for them.
"""

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.base.checks import check_types
from pipejax.base.machine import check_fits
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.link_models import (
    Which,
    add_messages,
    eager_messages,
    smaller_messages,
)
from pipejax.engine.lowering.program import SOURCE, ZERO, CostLayout, MessageTable, Program, Sizes
from pipejax.engine.lowering.program_builder import ProgramBuilder, Reductions
from pipejax.schedules.cells.cells import NOWHERE
from pipejax.schedules.cells.dependencies import BACKWARD, Dependencies, find_versions
from pipejax.schedules.cells.ops import AnyPhase, Phase
from pipejax.schedules.table.communication_cells import RunOrder, run_order
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, op_before, row_order

BYTES_PER_CELL = 70  # of a table, and of the arrays that its program is made in


def lower(
    table: ScheduleTable,
    *,
    link: str | Links = "delay",
    step_end: bool = True,
    costs: Costs | None = None,
) -> Program:
    """Lower a table to a program.

    Args:
      table: the schedule.
      link: link model: "delay", "queued", "blocking" or "rendezvous" (docs/semantics.md), or
        `Links` with all that is to be said about them.
      step_end: whether to add the gradient all-reduce of every stage (beside compute) and the
        optimizer update of every stage copy (on its worker, after the all-reduce). Where both
        cost nothing they change no makespan, but for all-reduces between pipes on a shared link,
        which keep their turn there (`evaluate` leaves them out); without them their costs play no
        part. Where cells of the table update, only an all-reduce before each of them is added.
      costs: only for `Links` with `eager_below`: the unbatched costs whose transmit times say
        which messages lie below it. The program is that of these messages: costs that say
        otherwise are refused wherever it is run.

    Returns:
      The program; it holds no costs.

    Raises:
      ValueError: if the link model is unknown, or a worker of the links does not exist, or links
        with `eager_below` have no costs beside them.
      ScheduleError: if the transfers cannot all happen (a deadlock under rendezvous), or the
        order of columns on a shared host link is a deadlock.

    Cost:
      Linear in the ops of the table. The table keeps its latest programs: a second call with the
      same links returns the same program.

    Example:
      >>> import pipejax as pj
      >>> program = pj.lower(pj.schedules.build("1f1b", num_workers=2, num_microbatches=2))
      >>> program.num_nodes, program.max_preds  # 8 ops, A and U of 2 stages, and the source
      (13, 2)
    """
    check_types(
        table=(table, ScheduleTable),
        step_end=(step_end, bool),
        costs=(costs, Costs, type(None)),
    )
    links = Links.resolve(link)
    if links.eager_below and costs is not None:
        costs.check_shapes(*cost_sizes(table))
    return lowered(table, links, step_end, costs)


def cost_sizes(table: ScheduleTable) -> Sizes:
    """Return the lengths of the axes of costs of a table, for `Costs.check_shapes`."""
    boundaries = len(table.grammar.edges(table.num_stages))
    places = tuple((phase.kind.time, table.num_workers) for phase in table.grammar.worker_phases)
    return table.num_stages, table.num_pipes, table.num_microbatches, boundaries, places


def lowered(table: ScheduleTable, links: Links, step_end: bool, costs: Costs | None) -> Program:
    """Lower a table as `lower` does, for costs whose shapes were checked."""
    return _lowered(table, links, step_end, smaller_messages(table, links, costs))


@cached_method
def _lowered(table: ScheduleTable, links: Links, step_end: bool, smaller: bytes) -> Program:
    """Lower a table; a program is remembered by what is smaller than `Links.eager_below`."""
    order = run_order(table, links)
    size = f"a program of {table.num_workers} workers x {table.num_slots} slots needs"
    check_fits(table.cells.phase.size * BYTES_PER_CELL, size)
    pairs, pair_of_cell = _distinct_pairs(table)
    fused = table.is_fused
    layout = CostLayout(
        table.num_stages,
        table.num_pipes,
        len(pairs),
        table.num_microbatches,
        phases=_timed(table, table.phase[~fused]),
        paired_phases=_timed(table, table.phase[fused], table.partners.phase[fused]),
        num_workers=table.num_workers if table.grammar.worker_phases else 0,
        own=table.grammar.custom_phases,
        graph=tuple(table.grammar.graph),
    )
    builder = ProgramBuilder(table, links, layout)
    _add_rows(builder, order.executed, pair_of_cell)
    _add_lanes(builder, order.executed)
    _add_host_ops(builder, order)
    _add_waits(builder)
    if step_end:
        (add_reductions_within if table.updates_within else add_step_end)(builder)
    sent = _messages(builder, order.messages, eager_messages(table, order, smaller))
    return builder.finish(add_messages(builder, order, sent), pairs)


def _timed(table: ScheduleTable, *codes: Int[NumpyArray, " cells"]) -> tuple[AnyPhase, ...]:
    """List the phases among these codes that have a duration."""
    used = np.unique(np.concatenate(codes)).tolist()
    return tuple(phase for phase in table.grammar.timed if phase in used)


def _distinct_pairs(
    table: ScheduleTable,
) -> tuple[Int[NumpyArray, "pairs 3"], Int[NumpyArray, " cells"]]:
    """List the kinds of fused pairs (stage of F, phase and stage of its backward)."""
    fused = np.flatnonzero(table.is_fused.ravel())
    columns = (table.cells.stage, table.partners.phase, table.partners.stage)
    kinds = np.stack([column.ravel()[fused] for column in columns], axis=1)
    pairs, kind = np.unique(kinds, axis=0, return_inverse=True)
    pair_of_cell = np.full(table.cells.phase.size, -1)
    pair_of_cell[fused] = kind.ravel()
    return pairs, pair_of_cell


def _add_rows(
    builder: ProgramBuilder,
    cells: Int[NumpyArray, " executed"],
    pair_of_cell: Int[NumpyArray, " cells"],
) -> None:
    table, layout = builder.table, builder.layout
    pair, worker = pair_of_cell[cells], cells // table.num_slots
    duration = np.where(pair >= 0, layout.pair(pair), builder.durations(cells))
    builder.add_chains(builder.add_cells(cells, duration=duration, worker=worker), worker)


def _add_host_ops(builder: ProgramBuilder, order: RunOrder) -> None:
    edges, cells = builder.table.dependencies, order.host
    if not len(cells):
        return
    builder.add_cells(cells, duration=builder.durations(cells))
    nodes = builder.node_of_cell.ravel()
    tail, head = order.host_edges
    builder.add_edges(nodes[tail], nodes[head], ZERO)
    # what stands in the row itself need not be said, and messages come later
    waits = np.isin(edges.producer, cells) & ~edges.crosses
    builder.add_edges(nodes[edges.producer[waits]], nodes[edges.consumer[waits]], ZERO)


def _add_lanes(builder: ProgramBuilder, executed: Int[NumpyArray, " executed"]) -> None:
    table = builder.table
    if not table.grammar.side_phases:
        return
    cells = row_order(table, table.grammar.side_phases)
    nodes = builder.add_cells(cells, duration=builder.durations(cells))
    builder.add_chains(nodes, _queues(table)[cells])
    # usual kinds are issued where they stand, behind the op before them in the row
    before = op_before(table, executed, cells)
    issued = np.isin(table.phase.ravel()[cells], table.grammar.lane_sharding) & (before != NOWHERE)
    tail = builder.node_of_cell.ravel()[executed[before[issued]]]
    builder.add_edges(tail, nodes[issued], ZERO)


def _queues(table: ScheduleTable) -> Int[NumpyArray, " cells"]:
    """Queue of each cell (cells): worker and lane as one number, of which lane 0 is the row."""
    lane = table.grammar.phase_lanes[table.phase.ravel()]
    return np.arange(table.phase.size) // table.num_slots * (lane.max() + 1) + lane


def _add_waits(builder: ProgramBuilder) -> None:
    """Let ops wait across lanes, and across workers where no message leads to them."""
    table, grammar, nodes = builder.table, builder.table.grammar, builder.node_of_cell.ravel()
    if grammar.is_usual:
        return
    edges, queue = table.dependencies, _queues(table)
    # a queue is in order already, messages come later, and host links have said what waits there
    is_host_op = np.isin(table.phase.ravel(), grammar.host)
    waits = (queue[edges.producer] != queue[edges.consumer]) & ~edges.crosses
    waits &= ~is_host_op[edges.producer] & (nodes[edges.producer] != nodes[edges.consumer])
    builder.add_edges(nodes[edges.producer[waits]], nodes[edges.consumer[waits]], ZERO)


def _messages(builder: ProgramBuilder, messages: Dependencies, eager: Which) -> MessageTable:
    producer = builder.node_of_cell.ravel()[messages.producer]
    return MessageTable(
        producer=producer,
        carrier=np.full_like(producer, SOURCE),
        consumer=builder.node_of_cell.ravel()[messages.consumer],
        lag_index=np.full_like(producer, ZERO),
        phase=np.where(messages.direction == BACKWARD, Phase.SEND_B, Phase.SEND_F),
        direction=messages.direction,
        boundary=messages.boundary(builder.layout.graph),
        stage=messages.from_stage,
        microbatch=messages.microbatch,
        sender=messages.producer // builder.table.num_slots,
        receiver=messages.consumer // builder.table.num_slots,
        eager=eager,
    )


def add_reductions_within(builder: ProgramBuilder) -> None:
    """Add an A before every U cell, for the replicas of its copy; other pipes do not take part."""
    table = builder.table
    update_cell = find_versions(table).update_cell
    update, which = np.unique(update_cell, return_inverse=True)
    last = np.full(len(update), NOWHERE)  # gradient before each update
    np.maximum.at(last, which.ravel(), table.backward_end_cells.ravel())
    stage, nodes = table.stage.ravel()[update], builder.node_of_cell.ravel()
    reductions = builder.add_nodes(
        duration=builder.layout.op(Phase.A, stage),
        phase=np.full_like(stage, Phase.A),
        stage=stage,
        microbatch=table.microbatch.ravel()[update],
    )
    builder.add_edges(nodes[last], reductions, ZERO)
    builder.add_edges(reductions, nodes[update], ZERO)
    in_row = np.argsort(last)  # of one worker alone, so its row is the order of their ends
    builder.add_chains(reductions[in_row], last[in_row] // table.num_slots)


def add_step_end(builder: ProgramBuilder) -> None:
    """Add A, which waits for the last gradient of a stage on every worker, and U after it."""
    table, layout = builder.table, builder.layout
    place = np.full((table.num_workers, table.num_stages), -1)  # slot of the last gradient
    for cells in (table.cells, table.partners):
        worker, slot = np.nonzero(np.isin(cells.phase, table.grammar.backward_ends))
        np.maximum.at(place, (worker, cells.stage[worker, slot]), slot)
    copies = np.argwhere(place >= 0)  # by worker and stage: pipes share a worker's copy
    if not len(copies):
        return  # no op ends a backward
    copies = copies[np.lexsort((place[place >= 0], copies[:, 0]))]
    worker, stage = copies.T
    stages, reduction = np.unique(stage, return_inverse=True)
    reductions = builder.add_nodes(
        duration=layout.op(Phase.A, stages), phase=np.full_like(stages, Phase.A), stage=stages
    )
    last = worker * table.num_slots + place[worker, stage]
    builder.add_edges(builder.node_of_cell.ravel()[last], reductions[reduction], ZERO)
    reduced, reduced_copy = _reduced_beside(table, worker, stage)
    builder.add_edges(
        builder.node_of_cell.ravel()[reduced], reductions[reduction[reduced_copy]], ZERO
    )
    _take_part(builder, reductions, reduction, last, (reduced, reduction[reduced_copy]))
    row_end = builder.row_ends()
    updates = builder.add_nodes(
        duration=layout.op(Phase.U, stage),
        phase=np.full_like(stage, Phase.U),
        stage=stage,
        worker=worker,
    )
    is_first = np.append(True, worker[1:] != worker[:-1])
    before = np.where(is_first, row_end[worker], np.roll(updates, 1))
    builder.add_edges(before, updates, ZERO)
    builder.add_edges(reductions[reduction], updates, ZERO)


def _reduced_beside(
    table: ScheduleTable, worker: Int[NumpyArray, " copies"], stage: Int[NumpyArray, " copies"]
) -> tuple[Int[NumpyArray, " cells"], Int[NumpyArray, " cells"]]:
    """List the cells that reduce gradients of some copies of stages on a lane, and which copies."""
    number = np.full((table.num_workers, table.num_stages), NOWHERE)
    number[worker, stage] = np.arange(len(worker))
    moved = [phase for phase in table.grammar.lane_sharding if phase == Phase.REDUCE_GRAD]
    ops = table.ops.take(np.isin(table.ops.phase, moved))
    copy = number[ops.cell // table.num_slots, ops.stage]
    return ops.cell[copy != NOWHERE], copy[copy != NOWHERE]


def _take_part(
    builder: ProgramBuilder,
    reductions: Int[NumpyArray, " reductions"],
    reduction: Int[NumpyArray, " copies"],
    last: Int[NumpyArray, " copies"],
    reduced: tuple[Int[NumpyArray, " cells"], Int[NumpyArray, " cells"]],
) -> None:
    """Let each worker take part in one all-reduce at a time; reductions go by stage."""
    # A copy of a stage takes part in the all-reduce `reduction`; `last` is the cell of its last
    # gradient. `reduced`: cells that reduce gradients beside compute, and the all-reduce of each.
    worker = last // builder.table.num_slots
    alone = len(np.unique(worker)) == len(worker)
    if alone and not builder.links.shared_links:
        return  # nothing to order: the run that orders is saved
    end = np.zeros(len(reductions))
    np.maximum.at(end, reduction, builder.unit_ends[last])
    np.maximum.at(end, reduced[1], builder.unit_ends[reduced[0]])
    builder.reductions = Reductions(reductions, end, reduction, worker)
    order = np.lexsort((reduction, end[reduction]))
    builder.add_chains(reductions[reduction[order]], worker[order])
