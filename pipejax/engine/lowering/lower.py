"""Lowering: from a table to a program.

Ops become nodes, rows become chains of nodes, host links chains beside them, and a link model
turns every message between workers into an edge with a lag or into a node of its own. At the end
come the all-reduce of each stage and the optimizer update of each stage copy; where cells of the
table update, an all-reduce comes before each of them instead.
"""

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.remembered import remembered
from pipejax.engine.lowering.cost_layout import ZERO, CostLayout
from pipejax.engine.lowering.link_models import LINK_MODELS, Messages
from pipejax.engine.lowering.program import SOURCE, MessageTable, Program
from pipejax.engine.lowering.program_builder import ProgramBuilder
from pipejax.schedules.cells.cells import NOWHERE
from pipejax.schedules.cells.dependencies import BACKWARD, Dependencies
from pipejax.schedules.cells.ops import EXECUTED, HOST, TIMED, Phase
from pipejax.schedules.cells.weight_versions import find_versions
from pipejax.schedules.table.host_links import check_host_links, host_edges
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, row_order


def lower(table: ScheduleTable, *, link: str | Links = "delay", step_end: bool = True) -> Program:
    """Lower a table to a program.

    Args:
      table: the schedule.
      link: link model: "delay", "queued", "blocking" or "rendezvous" (docs/semantics.md), or
        `Links` with all that is to be said about them.
      step_end: whether to add the gradient all-reduce of every stage (beside compute) and the
        optimizer update of every stage copy (on its worker, after the all-reduce). Where both
        cost nothing they change no makespan; without them their costs play no part. Where cells
        of the table update, only an all-reduce before each of them is added.

    Returns:
      The program; it holds no costs.

    Raises:
      ValueError: if the link model is unknown, or a worker of the links does not exist.
      ScheduleError: if the transfers cannot all happen (a deadlock under rendezvous), or the
        order of columns on a shared host link is a deadlock.

    Cost:
      Linear in the ops of the table. The table keeps its latest programs: a second call with the
      same links returns the same program.

    Example:
      >>> from pipejax import schedules
      >>> program = lower(schedules.build("1f1b", num_workers=2, num_microbatches=2))
      >>> program.num_nodes, program.max_preds  # 8 ops, A and U of 2 stages, and the source
      (13, 2)
    """
    return _lower(table, Links.of(link), step_end)


@remembered
def _lower(table: ScheduleTable, links: Links, step_end: bool) -> Program:
    check_host_links(table, links)
    pairs, pair_of_cell = _distinct_pairs(table)
    fused = table.is_fused
    layout = CostLayout(
        table.num_stages,
        table.num_pipes,
        len(pairs),
        phases=_timed(table.phase[~fused]),
        paired_phases=_timed(table.phase[fused], table.partners.phase[fused]),
    )
    builder = ProgramBuilder(table)
    found = table.dependencies
    node_of_cell = _add_rows(builder, table, layout, pair_of_cell)
    if table.offloads:
        _add_host_ops(builder, table, layout, node_of_cell, found, links)
    if step_end:
        add = _add_reductions if table.updates_within else _add_step_end
        add(builder, table, layout, node_of_cell)
    messages = _messages(table, node_of_cell, found.messages())
    carried = LINK_MODELS[links.model](builder, messages, layout, table, links)
    pair_index = np.stack(
        [layout.op(Phase.F, pairs[:, 0]), layout.op(pairs[:, 1], pairs[:, 2])], axis=1
    )
    return builder.finish(
        node_of_cell=node_of_cell,
        messages=MessageTable(
            producer=messages.producer,
            carrier=carried.node,
            consumer=messages.consumer,
            lag_index=carried.lag,
            phase=messages.phase,
            stage=messages.stage,
            microbatch=messages.microbatch,
            sender=messages.sender,
            receiver=messages.receiver,
        ),
        pair_index=pair_index.astype(np.int32),
        pair_stage=pairs[:, 0].astype(np.int32),
        layout=layout,
        links=links,
    )


def _timed(*codes: Int[NumpyArray, " cells"]) -> tuple[Phase, ...]:
    """List the phases among these codes that have a duration."""
    found = np.unique(np.concatenate(codes))
    return tuple(Phase(code) for code in found[np.isin(found, TIMED)].tolist())


def _distinct_pairs(
    table: ScheduleTable,
) -> tuple[Int[NumpyArray, "pairs 3"], Int[NumpyArray, " cells"]]:
    """List the kinds of fused pairs (stage of F, phase and stage of its backward)."""
    fused = np.flatnonzero(table.is_fused.ravel())
    kinds = np.stack(
        [
            table.cells.stage.ravel()[fused],
            table.partners.phase.ravel()[fused],
            table.partners.stage.ravel()[fused],
        ],
        axis=1,
    )
    pairs, kind = np.unique(kinds, axis=0, return_inverse=True)
    pair_of_cell = np.full(table.cells.phase.size, -1)
    pair_of_cell[fused] = kind.ravel()
    return pairs, pair_of_cell


def _add_rows(
    builder: ProgramBuilder, table: ScheduleTable, layout: CostLayout, pair_of_cell: NumpyArray
) -> Int[NumpyArray, "workers slots"]:
    """Add a node per op, chained by row; return the node of each cell."""
    cells = row_order(table, EXECUTED)
    phase, stage, microbatch, pipe = (array.ravel()[cells] for array in table.cells)
    pair = pair_of_cell[cells]
    duration = np.where(pair >= 0, layout.pair(pair), layout.op(phase, stage))
    worker = cells // table.num_slots
    nodes = builder.add_nodes(
        duration=duration, phase=phase, stage=stage, microbatch=microbatch, pipe=pipe, worker=worker
    )
    same_row = worker[1:] == worker[:-1]
    builder.add_edges(nodes[:-1][same_row], nodes[1:][same_row], ZERO)
    node_of_cell = np.full(table.cells.phase.size, SOURCE)
    node_of_cell[cells] = nodes
    return node_of_cell.reshape(table.cells.phase.shape)


def _add_host_ops(
    builder: ProgramBuilder,
    table: ScheduleTable,
    layout: CostLayout,
    node_of_cell: NumpyArray,
    found: Dependencies,
    links: Links,
) -> None:
    """Add a node per offload and load, beside compute, and enter it in the nodes of the cells."""
    cells = row_order(table, HOST)
    phase, stage, microbatch, pipe = (array.ravel()[cells] for array in table.cells)
    nodes = node_of_cell.reshape(-1)
    nodes[cells] = builder.add_nodes(
        duration=layout.op(phase, stage), phase=phase, stage=stage, microbatch=microbatch, pipe=pipe
    )
    tail, head = host_edges(table, links)
    builder.add_edges(nodes[tail], nodes[head], ZERO)
    waits = np.isin(found.producer, cells)  # what stands in the row itself need not be said
    builder.add_edges(nodes[found.producer[waits]], nodes[found.consumer[waits]], ZERO)


def _messages(table: ScheduleTable, node_of_cell: NumpyArray, found: Dependencies) -> Messages:
    """Collect the messages, in the order in which their producers stand in their rows."""
    found = found.take(np.lexsort((found.direction, found.producer)))
    return Messages(
        producer=node_of_cell.ravel()[found.producer],
        consumer=node_of_cell.ravel()[found.consumer],
        producer_cell=found.producer,
        sender=found.producer // table.num_slots,
        receiver=found.consumer // table.num_slots,
        stage=found.from_stage,
        to_stage=found.to_stage,
        microbatch=found.microbatch,
        pipe=found.pipe,
        direction=found.direction,
        boundary=found.boundary,
        phase=np.where(found.direction == BACKWARD, Phase.SEND_B, Phase.SEND_F),
    )


def _add_reductions(
    builder: ProgramBuilder, table: ScheduleTable, layout: CostLayout, node_of_cell: NumpyArray
) -> None:
    """Add an A before every U cell, for the replicas of its copy; other pipes do not take part."""
    update_cell = find_versions(table.content).update_cell
    where = table.content.where
    update, which = np.unique(update_cell, return_inverse=True)
    last = np.full(len(update), NOWHERE)  # gradient before each update
    np.maximum.at(last, which.ravel(), np.maximum(where[Phase.B], where[Phase.W]).ravel())
    stage, nodes = table.stage.ravel()[update], node_of_cell.ravel()
    reductions = builder.add_nodes(
        duration=layout.op(Phase.A, stage),
        phase=np.full_like(stage, Phase.A),
        stage=stage,
        microbatch=table.microbatch.ravel()[update],
    )
    builder.add_edges(nodes[last], reductions, ZERO)
    builder.add_edges(reductions, nodes[update], ZERO)


def _add_step_end(
    builder: ProgramBuilder, table: ScheduleTable, layout: CostLayout, node_of_cell: NumpyArray
) -> None:
    """Add A, which waits for the last gradient of a stage on every worker, and U after it."""
    place = np.full((table.num_workers, table.num_stages), -1)  # slot of the last gradient
    for cells in (table.cells, table.partners):
        worker, slot = np.nonzero(np.isin(cells.phase, [Phase.B, Phase.W]))
        np.maximum.at(place, (worker, cells.stage[worker, slot]), slot)
    copies = np.argwhere(place >= 0)  # by worker and stage: pipes share a worker's copy
    copies = copies[np.lexsort((place[place >= 0], copies[:, 0]))]
    stages = np.arange(table.num_stages)
    reductions = builder.add_nodes(
        duration=layout.op(Phase.A, stages), phase=np.full_like(stages, Phase.A), stage=stages
    )
    worker, stage = copies.T
    last = node_of_cell[worker, place[worker, stage]]
    builder.add_edges(last, reductions[stage], ZERO)
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
    builder.add_edges(reductions[stage], updates, ZERO)
