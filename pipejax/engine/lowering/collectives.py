"""Collectives: the all-reduces of gradients, and the updates that wait for them.

A worker takes part in one all-reduce at a time. All workers follow one order: that in which the
last gradient of each all-reduce ends in the message-free run with unit slots, ties by stage. So
collectives cannot wait for each other in a circle, and since updates alone wait for them, nor can
they with rows: what they wait for in a row stands before the update that waits for them.
"""

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.engine.lowering.cost_layout import ZERO
from pipejax.engine.lowering.program_builder import ProgramBuilder, Reductions
from pipejax.schedules.cells.cells import NOWHERE
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.cells.weight_versions import find_versions


def add_reductions_within(builder: ProgramBuilder) -> None:
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
    in_row = np.argsort(last)  # of one worker alone, so its row is the order of their ends
    builder.add_chains(reductions[in_row], last[in_row] // table.num_slots)


def add_step_end(builder: ProgramBuilder) -> None:
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
    last = worker * table.num_slots + place[worker, stage]
    builder.add_edges(builder.node_of_cell.ravel()[last], reductions[stage], ZERO)
    _take_part(builder, reductions, stage, last)
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


def _take_part(
    builder: ProgramBuilder,
    reductions: Int[NumpyArray, " reductions"],
    of_copy: Int[NumpyArray, " copies"],
    last: Int[NumpyArray, " copies"],
) -> None:
    """Let each worker take part in one all-reduce at a time; reductions go by stage.

    A copy takes part in the all-reduce `of_copy`; `last` is the cell of its last gradient.
    """
    worker = last // builder.table.num_slots
    alone = len(np.unique(worker)) == len(worker)
    if alone and not builder.links.shared_links:
        return  # nothing to order: the run that orders is saved
    end = np.zeros(len(reductions))
    np.maximum.at(end, of_copy, builder.unit_ends[last])
    builder.reductions = Reductions(reductions, end, of_copy, worker)
    order = np.lexsort((of_copy, end[of_copy]))
    builder.add_chains(reductions[of_copy[order]], worker[order])
