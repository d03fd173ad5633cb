"""Lowering: the translation of a schedule table to a program, a graph of ops and messages.

Ops become nodes; rows, lanes and host links become chains of nodes. A link model turns every
message between workers into an edge with a lag or into a node. The step ends with an all-reduce of
each stage and an optimizer update of each stage copy; if cells of the table update, an all-reduce
comes before each of them instead.

A worker takes part in one all-reduce at a time. All workers follow one order of all-reduces: by the
end of the last gradient in a run without messages and with unit slots; at ties by stage. So
all-reduces cannot deadlock.
"""

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.base.checks import check_fits, check_types
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.link_models import Which, add_messages, eager_mask, eager_messages
from pipejax.engine.lowering.program import SOURCE, ZERO, CostLayout, MessageTable, Program, Sizes
from pipejax.engine.lowering.program_builder import ProgramBuilder, Reductions
from pipejax.schedules.cells.cells import NOWHERE
from pipejax.schedules.cells.dependencies import BACKWARD, Dependencies, find_versions
from pipejax.schedules.cells.ops import AnyPhase, Phase
from pipejax.schedules.table.communication_cells import RunOrder, run_order
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, op_before, phase_cells

BYTES_PER_CELL = 70  # memory of lowering per cell of the table


def lower(
    table: ScheduleTable,
    *,
    link: str | Links = "delay",
    step_end: bool = True,
    costs: Costs | None = None,
) -> Program:
    """Lower a schedule table to a program: a graph of ops and messages, without costs.

    Args:
      table: the schedule.
      link: name of the link model (docs/link_models.md), or `Links` with more settings of links.
      step_end: whether to add the gradient all-reduce of every stage (beside compute) and the
        optimizer update of every stage copy (on its worker, after the all-reduce). If both cost
        nothing they change no makespan, but all-reduces keep their turn on a shared link. If cells
        of the table update, only an all-reduce before each of them is added.
      costs: only for `Links` with `eager_below`: the unbatched costs whose transmit times tell
        which messages are below this limit. The program is valid for this set of messages only: it
        refuses costs with another set.

    Returns:
      The program; it holds no costs.

    Raises:
      ValueError: if the link model is unknown, a worker of the links does not exist, or costs are
        missing for links with `eager_below`.
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
        table=(table, ScheduleTable), step_end=(step_end, bool), costs=(costs, Costs, type(None))
    )
    links = Links.resolve(link)
    if links.eager_below and costs is not None:
        costs.check_shapes(*cost_sizes(table))
    return lower_unchecked(table, links, step_end, costs)


def cost_sizes(table: ScheduleTable) -> Sizes:
    """Return the axis lengths of a table's costs, as `Costs.check_shapes` takes them."""
    boundaries = len(table.grammar.edges(table.num_stages))
    places = tuple((phase.kind.time, table.num_workers) for phase in table.grammar.worker_phases)
    return table.num_stages, table.num_pipes, table.num_microbatches, boundaries, places


def lower_unchecked(
    table: ScheduleTable, links: Links, step_end: bool, costs: Costs | None
) -> Program:
    """Lower a table as `lower` does, without a check of the costs' shapes."""
    mask = eager_mask(table, links, costs) if links.eager_below else b""
    return _lower_with_mask(table, links, step_end, mask)


@cached_method
def _lower_with_mask(table: ScheduleTable, links: Links, step_end: bool, mask: bytes) -> Program:
    """Lower a table; the mask says which messages are below `Links.eager_below`."""
    order = run_order(table, links)
    size = f"a program of {table.num_workers} workers x {table.num_slots} slots needs"
    check_fits(table.cells.phase.size * BYTES_PER_CELL, size)
    pairs, cell_pairs = _distinct_pairs(table)
    fused = table.is_fused
    layout = CostLayout(
        num_stages=table.num_stages,
        num_pipes=table.num_pipes,
        num_pairs=len(pairs),
        num_microbatches=table.num_microbatches,
        phases=_timed_phases(table, table.phase[~fused]),
        paired_phases=_timed_phases(table, table.phase[fused], table.partners.phase[fused]),
        num_workers=table.num_workers if table.grammar.worker_phases else 0,
        custom_phases=table.grammar.custom_phases,
        graph=tuple(table.grammar.graph),
    )
    builder = ProgramBuilder(table, links, layout)
    _add_rows(builder, order.executed, cell_pairs)
    _add_lanes(builder, order.executed)
    _add_host_ops(builder, order)
    _add_waits(builder)
    if step_end and table.updates_within:
        _add_reductions_before_updates(builder)
    elif step_end:
        _add_step_end(builder)
    messages = _message_table(builder, order.messages, eager_messages(table, order, mask))
    return builder.finish(add_messages(builder, order, messages), pairs)


def _timed_phases(table: ScheduleTable, *codes: Int[NumpyArray, " cells"]) -> tuple[AnyPhase, ...]:
    present = np.unique(np.concatenate(codes)).tolist()
    return tuple(phase for phase in table.grammar.timed_phases if phase in present)


def _distinct_pairs(
    table: ScheduleTable,
) -> tuple[Int[NumpyArray, "pairs 3"], Int[NumpyArray, " cells"]]:
    """List the distinct fused pairs (pairs, 3), and each cell's index into them, or -1 (cells)."""
    # columns: stage of the forward, phase and stage of the backward
    fused = np.flatnonzero(table.is_fused.ravel())
    columns = (table.cells.stage, table.partners.phase, table.partners.stage)
    rows = np.stack([column.ravel()[fused] for column in columns], axis=1)
    pairs, pair_ids = np.unique(rows, axis=0, return_inverse=True)
    cell_pairs = np.full(table.cells.phase.size, -1)
    cell_pairs[fused] = pair_ids.ravel()
    return pairs, cell_pairs


def _add_rows(
    builder: ProgramBuilder,
    cells: Int[NumpyArray, " executed"],
    cell_pairs: Int[NumpyArray, " cells"],
) -> None:
    """Add a node for each executed cell, and chain the nodes of each worker's row."""
    table, layout = builder.table, builder.layout
    pair, worker = cell_pairs[cells], cells // table.num_slots
    duration = np.where(pair >= 0, layout.pair_position(pair), builder.durations(cells))
    builder.add_chains(builder.add_cells(cells, duration=duration, worker=worker), worker)


def _add_host_ops(builder: ProgramBuilder, order: RunOrder) -> None:
    """Add offloads and loads in the order of their host links, and edges to ops that need them."""
    dependencies, cells = builder.table.dependencies, order.host
    if not len(cells):
        return
    builder.add_cells(cells, duration=builder.durations(cells))
    nodes = builder.node_of_cell.ravel()
    tail, head = order.host_edges
    builder.add_edges(nodes[tail], nodes[head], ZERO)
    # other dependencies follow from the rows' chains, or are messages, which come later
    waits = dependencies.take(np.isin(dependencies.producer, cells) & ~dependencies.crosses)
    builder.add_edges(nodes[waits.producer], nodes[waits.consumer], ZERO)


def _add_lanes(builder: ProgramBuilder, executed: Int[NumpyArray, " executed"]) -> None:
    """Add the ops that run on other lanes than a worker's row, and chain the ops of each lane."""
    table = builder.table
    if not table.grammar.side_phases:
        return
    cells = phase_cells(table, table.grammar.side_phases)
    nodes = builder.add_cells(cells, duration=builder.durations(cells))
    builder.add_chains(nodes, _cell_queues(table)[cells])
    # the row issues a gather or a reduction (UNSHARD, REDUCE_GRAD) that runs on a lane: it also
    # waits for the op before its cell
    previous_op = op_before(table, executed, cells)
    is_sharding = np.isin(table.phase.ravel()[cells], table.grammar.lane_sharding)
    is_issued = is_sharding & (previous_op != NOWHERE)
    tail = builder.node_of_cell.ravel()[executed[previous_op[is_issued]]]
    builder.add_edges(tail, nodes[is_issued], ZERO)


def _cell_queues(table: ScheduleTable) -> Int[NumpyArray, " cells"]:
    """Return the queue number worker * lanes + lane of each cell (cells); lane 0 is the row."""
    lane = table.grammar.phase_lanes[table.phase.ravel()]
    return np.arange(table.phase.size) // table.num_slots * (lane.max() + 1) + lane


def _add_waits(builder: ProgramBuilder) -> None:
    """Add edges for dependencies across lanes or workers, except those that messages carry."""
    table, grammar, nodes = builder.table, builder.table.grammar, builder.node_of_cell.ravel()
    if grammar.is_usual:
        return
    dependencies, queue = table.dependencies, _cell_queues(table)
    producer, consumer = dependencies.producer, dependencies.consumer
    # chains order a queue, messages come later, and `_add_host_ops` added the waits for host links
    is_host_op = np.isin(table.phase.ravel(), grammar.host_phases)
    is_wait = (queue[producer] != queue[consumer]) & ~dependencies.crosses
    is_wait &= ~is_host_op[producer] & (nodes[producer] != nodes[consumer])
    builder.add_edges(nodes[producer[is_wait]], nodes[consumer[is_wait]], ZERO)


def _message_table(builder: ProgramBuilder, messages: Dependencies, eager: Which) -> MessageTable:
    """Build the message table without carriers and lags, which link models add later."""
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


def _add_reductions_before_updates(builder: ProgramBuilder) -> None:
    """Add an all-reduce before each update cell, after the last gradient of the update."""
    table = builder.table
    update, update_index = np.unique(find_versions(table).update_cell, return_inverse=True)
    # cell of the last gradient before each update: the largest of its microbatches' cells
    last_gradient = np.full(len(update), NOWHERE)
    np.maximum.at(last_gradient, update_index.ravel(), table.backward_end_cells.ravel())
    stage, nodes = table.stage.ravel()[update], builder.node_of_cell.ravel()
    reductions = builder.add_nodes(
        duration=builder.layout.op_position(Phase.A, stage),
        phase=np.full_like(stage, Phase.A),
        stage=stage,
        microbatch=table.microbatch.ravel()[update],
    )
    builder.add_edges(nodes[last_gradient], reductions, ZERO)
    builder.add_edges(reductions, nodes[update], ZERO)
    order = np.argsort(last_gradient)  # cells go by worker and slot
    builder.add_chains(reductions[order], last_gradient[order] // table.num_slots)


def _add_step_end(builder: ProgramBuilder) -> None:
    """Add each stage's all-reduce, and each stage copy's update, at the end of the step."""
    # An all-reduce waits for the last gradient of its stage on every worker.
    table, layout = builder.table, builder.layout
    nodes = builder.node_of_cell.ravel()
    last_slot = np.full((table.num_workers, table.num_stages), -1)  # slot of the last gradient
    for cells in (table.cells, table.partners):
        worker, slot = np.nonzero(np.isin(cells.phase, table.grammar.backward_ends))
        np.maximum.at(last_slot, (worker, cells.stage[worker, slot]), slot)
    copies = np.argwhere(last_slot >= 0)  # (copies, 2) worker and stage: pipes share a copy
    if not len(copies):
        return  # no op ends a backward
    copies = copies[np.lexsort((last_slot[last_slot >= 0], copies[:, 0]))]
    worker, stage = copies.T
    # an all-reduce per stage, in order of stages; (copies) index of the all-reduce of each copy
    stages, copy_reduction = np.unique(stage, return_inverse=True)
    phases, durations = np.full_like(stages, Phase.A), layout.op_position(Phase.A, stages)
    reductions = builder.add_nodes(duration=durations, phase=phases, stage=stages)
    last_gradient = worker * table.num_slots + last_slot[worker, stage]
    builder.add_edges(nodes[last_gradient], reductions[copy_reduction], ZERO)
    # a gradient is complete at the end of its REDUCE_GRAD, if that runs on a lane
    lane_cells, lane_copies = _reductions_on_lanes(table, worker, stage)
    lane_reductions = copy_reduction[lane_copies]
    builder.add_edges(nodes[lane_cells], reductions[lane_reductions], ZERO)
    lane_gradients = lane_cells, lane_reductions
    _chain_reductions(builder, reductions, copy_reduction, last_gradient, lane_gradients)
    row_end = builder.row_ends()
    updates = builder.add_nodes(
        duration=layout.op_position(Phase.U, stage),
        phase=np.full_like(stage, Phase.U),
        stage=stage,
        worker=worker,
    )
    # updates of a worker form a chain after its row; np.roll gives the previous update
    is_first = np.append(True, worker[1:] != worker[:-1])
    pred = np.where(is_first, row_end[worker], np.roll(updates, 1))
    builder.add_edges(pred, updates, ZERO)
    builder.add_edges(reductions[copy_reduction], updates, ZERO)


def _reductions_on_lanes(
    table: ScheduleTable, worker: Int[NumpyArray, " copies"], stage: Int[NumpyArray, " copies"]
) -> tuple[Int[NumpyArray, " cells"], Int[NumpyArray, " cells"]]:
    """List the REDUCE_GRAD cells on lanes, and the index of each cell's stage copy."""
    copy_index = np.full((table.num_workers, table.num_stages), NOWHERE)
    copy_index[worker, stage] = np.arange(len(worker))
    on_lanes = [phase for phase in table.grammar.lane_sharding if phase == Phase.REDUCE_GRAD]
    ops = table.ops.take(np.isin(table.ops.phase, on_lanes))
    copy = copy_index[ops.cell // table.num_slots, ops.stage]
    return ops.cell[copy != NOWHERE], copy[copy != NOWHERE]


def _chain_reductions(
    builder: ProgramBuilder,
    reductions: Int[NumpyArray, " reductions"],
    copy_reduction: Int[NumpyArray, " copies"],
    last_gradient: Int[NumpyArray, " copies"],
    lane_gradients: tuple[Int[NumpyArray, " cells"], Int[NumpyArray, " cells"]],
) -> None:
    """Chain each worker's all-reduces by their last gradients, so that one runs at a time."""
    # `reductions` are nodes. For each copy (a stage on a worker), `copy_reduction` is the index of
    # its all-reduce, and `last_gradient` the cell of its last gradient. `lane_gradients` is
    # (REDUCE_GRAD cells on lanes, index of the all-reduce of each).
    worker = last_gradient // builder.table.num_slots
    have_one_copy = len(np.unique(worker)) == len(worker)
    if have_one_copy and not builder.links.shared_links:
        return  # no worker takes part in two all-reduces
    lane_cells, lane_reductions = lane_gradients
    end = np.zeros(len(reductions))  # of the last gradient of each all-reduce [unit slots]
    np.maximum.at(end, copy_reduction, builder.unit_ends[last_gradient])
    np.maximum.at(end, lane_reductions, builder.unit_ends[lane_cells])
    builder.reductions = Reductions(reductions, end, copy_reduction, worker)
    order = np.lexsort((copy_reduction, end[copy_reduction]))
    builder.add_chains(reductions[copy_reduction[order]], worker[order])
