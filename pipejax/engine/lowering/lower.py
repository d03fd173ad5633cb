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
from pipejax.engine.lowering.link_models import LINK_MODELS
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
      >>> import pipejax as pj
      >>> program = pj.lower(pj.schedules.build("1f1b", num_workers=2, num_microbatches=2))
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
    builder = ProgramBuilder(table, links, layout)
    _add_rows(builder, pair_of_cell)
    if table.offloads:
        _add_host_ops(builder)
    if step_end:
        (_add_reductions if table.updates_within else _add_step_end)(builder)
    found = table.dependencies.messages()
    # in the order in which their producers stand in their rows
    found = found.take(np.lexsort((found.direction, found.producer)))
    messages = LINK_MODELS[links.model](builder, found, _messages(builder, found))
    return builder.finish(messages, pairs)


def _timed(*codes: Int[NumpyArray, " cells"]) -> tuple[Phase, ...]:
    """List the phases among these codes that have a duration."""
    found = np.unique(np.concatenate(codes))
    return tuple(Phase(code) for code in found[np.isin(found, TIMED)].tolist())


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


def _add_rows(builder: ProgramBuilder, pair_of_cell: Int[NumpyArray, " cells"]) -> None:
    """Add a node per op, chained by row."""
    table, layout = builder.table, builder.layout
    cells = row_order(table, EXECUTED)
    pair, worker = pair_of_cell[cells], cells // table.num_slots
    alone = layout.op(table.phase.ravel()[cells], table.stage.ravel()[cells])
    duration = np.where(pair >= 0, layout.pair(pair), alone)
    builder.add_chains(builder.add_cells(cells, duration=duration, worker=worker), worker)


def _add_host_ops(builder: ProgramBuilder) -> None:
    """Add a node per offload and load, beside compute."""
    table, found = builder.table, builder.table.dependencies
    cells = row_order(table, HOST)
    duration = builder.layout.op(table.phase.ravel()[cells], table.stage.ravel()[cells])
    builder.add_cells(cells, duration=duration)
    nodes = builder.node_of_cell.ravel()
    tail, head = host_edges(table, builder.links)
    builder.add_edges(nodes[tail], nodes[head], ZERO)
    waits = np.isin(found.producer, cells)  # what stands in the row itself need not be said
    builder.add_edges(nodes[found.producer[waits]], nodes[found.consumer[waits]], ZERO)


def _messages(builder: ProgramBuilder, found: Dependencies) -> MessageTable:
    """Describe the messages, before a link model says what carries them."""
    producer = builder.node_of_cell.ravel()[found.producer]
    return MessageTable(
        producer=producer,
        carrier=np.full_like(producer, SOURCE),
        consumer=builder.node_of_cell.ravel()[found.consumer],
        lag_index=np.full_like(producer, ZERO),
        phase=np.where(found.direction == BACKWARD, Phase.SEND_B, Phase.SEND_F),
        stage=found.from_stage,
        microbatch=found.microbatch,
        sender=found.producer // builder.table.num_slots,
        receiver=found.consumer // builder.table.num_slots,
    )


def _add_reductions(builder: ProgramBuilder) -> None:
    """Add an A before every U cell, for the replicas of its copy; other pipes do not take part."""
    table = builder.table
    update_cell = find_versions(table).update_cell
    where = table.where
    update, which = np.unique(update_cell, return_inverse=True)
    last = np.full(len(update), NOWHERE)  # gradient before each update
    np.maximum.at(last, which.ravel(), np.maximum(where[Phase.B], where[Phase.W]).ravel())
    stage, nodes = table.stage.ravel()[update], builder.node_of_cell.ravel()
    reductions = builder.add_nodes(
        duration=builder.layout.op(Phase.A, stage),
        phase=np.full_like(stage, Phase.A),
        stage=stage,
        microbatch=table.microbatch.ravel()[update],
    )
    builder.add_edges(nodes[last], reductions, ZERO)
    builder.add_edges(reductions, nodes[update], ZERO)


def _add_step_end(builder: ProgramBuilder) -> None:
    """Add A, which waits for the last gradient of a stage on every worker, and U after it."""
    table, layout = builder.table, builder.layout
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
    last = builder.node_of_cell[worker, place[worker, stage]]
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
