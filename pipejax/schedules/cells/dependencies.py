"""Dependencies: the rules as data, and the edges that they make in a table.

Two kinds of them: an op waits for another one, and a forward reads the weights of an update.
"""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.remembered import remembered
from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.ops import INPUT_GRADS, WEIGHT_GRADS, Phase

FORWARD, BACKWARD = 0, 1  # direction of a message: activation, input gradient


class Rule(NamedTuple):
    """An op waits for an op of the same microbatch, `stage_offset` stages away.

    The producers are alternatives, of which a table holds at most one.

    Attributes:
      consumer: phase of the op that waits.
      producers: phases of the op that it waits for.
      stage_offset: stage of the producer minus stage of the consumer.
    """

    consumer: Phase
    producers: tuple[Phase, ...]
    stage_offset: int


RULES = (
    Rule(Phase.F, (Phase.F,), -1),
    Rule(Phase.R, (Phase.F,), 0),
    Rule(Phase.B, (Phase.F,), 0),
    Rule(Phase.I, (Phase.F,), 0),
    Rule(Phase.B, (Phase.R,), 0),
    Rule(Phase.I, (Phase.R,), 0),
    Rule(Phase.B, INPUT_GRADS, 1),
    Rule(Phase.I, INPUT_GRADS, 1),
    Rule(Phase.W, (Phase.I,), 0),
    Rule(Phase.U, WEIGHT_GRADS, 0),
    Rule(Phase.O, (Phase.F,), 0),
    Rule(Phase.L, (Phase.O,), 0),
    Rule(Phase.WAIT_O, (Phase.O,), 0),
    Rule(Phase.WAIT_SEND_F, (Phase.SEND_F,), 0),
    Rule(Phase.WAIT_SEND_B, (Phase.SEND_B,), 0),
    Rule(Phase.R, (Phase.L,), 0),
    Rule(Phase.B, (Phase.L,), 0),
    Rule(Phase.I, (Phase.L,), 0),
)


class Dependencies(NamedTuple):
    """Edges between cells of a table; a cell is worker * slots + slot.

    Attributes:
      producer: (edges) cell that must end first.
      consumer: (edges) cell that waits.
      from_stage: (edges) stage of the producing op.
      to_stage: (edges) stage of the waiting op.
      microbatch: (edges) microbatch of both.
      pipe: (edges) pipe of both.
      direction: (edges) `FORWARD` or `BACKWARD`.
      crosses: (edges) whether the two cells are on different workers.
    """

    producer: Int[NumpyArray, " edges"]
    consumer: Int[NumpyArray, " edges"]
    from_stage: Int[NumpyArray, " edges"]
    to_stage: Int[NumpyArray, " edges"]
    microbatch: Int[NumpyArray, " edges"]
    pipe: Int[NumpyArray, " edges"]
    direction: Int[NumpyArray, " edges"]
    crosses: Bool[NumpyArray, " edges"]

    def messages(self) -> "Dependencies":
        """Return only the edges between different workers."""
        return self.take(self.crosses)

    def take(self, which: NumpyArray) -> "Dependencies":
        """Return some of the edges, chosen by a mask or by their numbers."""
        return Dependencies(*(field[which] for field in self))

    @property
    def boundary(self) -> Int[NumpyArray, " edges"]:
        """Stage boundary that an edge crosses: b lies between stages b and b + 1."""
        return np.minimum(self.from_stage, self.to_stage)


@remembered
def find_dependencies(content: Content) -> Dependencies:
    """Apply the rules to every op of a schedule."""
    where, pipe_of, num_stages = content.where, content.pipe_of_microbatch, content.num_stages
    found = []
    for consumer, phases, offset in RULES:
        producers = np.full_like(where[consumer], NOWHERE)
        inside = slice(max(0, -offset), num_stages - max(0, offset))
        source = slice(max(0, offset), num_stages - max(0, -offset))
        for phase in phases:
            producers[inside] = np.maximum(producers[inside], where[phase][source])
        place = stage, microbatch = np.nonzero(
            (where[consumer] != NOWHERE) & (producers != NOWHERE)
        )
        pipe, direction = pipe_of[microbatch], BACKWARD if offset > 0 else FORWARD
        crosses = content.placement[pipe, stage + offset] != content.placement[pipe, stage]
        ends = producers[place], where[consumer][place], stage + offset, stage
        found.append((*ends, microbatch, pipe, np.full_like(stage, direction), crosses))
    return Dependencies(*(np.concatenate(column) for column in zip(*found, strict=True)))


def order_of_cells(
    content: Content, cells: Int[NumpyArray, " some"] | None = None
) -> tuple[Int[NumpyArray, " edges"], Int[NumpyArray, " edges"]]:
    """Return what cells wait for where messages take no time: edges (edges) from and to cells.

    Each of the given cells, or of all that hold an op, waits for the one before it in its row.
    """
    edges = find_dependencies(content)
    held = np.flatnonzero(content.cells.phase) if cells is None else cells  # row by row
    same_row = held[1:] // content.num_slots == held[:-1] // content.num_slots
    return (
        np.concatenate([held[:-1][same_row], edges.producer]),
        np.concatenate([held[1:][same_row], edges.consumer]),
    )


# Which updates of a stage every microbatch sees, and which update applies its gradient.
#
# Updates of a stage are numbered for each copy of the stage and each run; version v of its weights
# holds the updates before number v. Row order alone decides them: a stage's forwards, gradients and
# updates all stand in the row of one worker.

NO_VERSION = -1  # version or update of a microbatch that has none


class Versions(NamedTuple):
    """Versions of the weights by stage and microbatch.

    Attributes:
      newest: (stages, microbatches) version that is newest when the forward runs.
      read: (stages, microbatches) version that the forward reads, and the backward with it.
      applied: (stages, microbatches) number of the update that applies the gradient, or as many
        as there are where none does.
      updates: (stages, microbatches) updates of the copy and run that the microbatch belongs to.
      update_cell: (stages, microbatches) cell of that update, worker * slots + slot, or `NOWHERE`.
    """

    newest: Int[NumpyArray, "stages microbatches"]
    read: Int[NumpyArray, "stages microbatches"]
    applied: Int[NumpyArray, "stages microbatches"]
    updates: Int[NumpyArray, "stages microbatches"]
    update_cell: Int[NumpyArray, "stages microbatches"]


@remembered
def find_versions(content: Content) -> Versions:
    """Number the updates of every stage, and find which of them each microbatch sees."""
    events = _events(content)
    is_update = events.phase == Phase.U
    group = np.cumsum(np.append(True, events.group[1:] != events.group[:-1])) - 1
    size = np.bincount(group, weights=is_update).astype(np.int64)
    # Events stand group by group (a copy of a stage and a run), in row order. So the updates before
    # an event in its own group are those before it in all, less the updates of earlier groups.
    before = np.cumsum(is_update) - is_update  # in all groups
    seen = before - (np.cumsum(size) - size)[group]

    def by_microbatch(which: NumpyArray, values: NumpyArray) -> NumpyArray:
        """Lay values of some events out by stage and microbatch."""
        laid = np.full((content.num_stages, content.num_microbatches), NO_VERSION)
        laid[events.stage[which], events.microbatch[which]] = values[which]
        return laid

    newest = by_microbatch(events.phase == Phase.F, seen)
    gradient = np.isin(events.phase, WEIGHT_GRADS)
    applied, updates = by_microbatch(gradient, seen), by_microbatch(gradient, size[group])
    cells = np.append(events.cell[is_update], NOWHERE)
    nth = by_microbatch(gradient, before)  # in all groups: the update that comes next
    update_cell = cells[np.where(applied < updates, nth, -1)]
    behind = content.weights.behind
    read = newest if behind is None else np.maximum(applied - behind, 0)
    return Versions(newest, read, applied, updates, update_cell)


@remembered
def versions_held(content: Content) -> Int[NumpyArray, "workers stages"]:
    """Count the versions of the weights that each copy of a stage holds at once, at most.

    A version is held from the update that makes it until the last backward that reads it has run
    and a newer one is there; an update writes in place where nothing reads the old one any more.

    Returns (workers, stages) versions, over all runs; 0 where the worker does not hold the stage.
    """
    events, versions = _events(content), find_versions(content)
    slot = events.cell % content.num_slots
    is_update, is_gradient = events.phase == Phase.U, np.isin(events.phase, WEIGHT_GRADS)
    # All versions of all groups stand in one array, a group's versions side by side: version 0,
    # which is there from the start, then one for each of its updates. `made` is the slot of the
    # update that makes a version, `unread` the slot behind which nothing needs it any more: the
    # later of the update that replaces it and the last backward that reads it.
    groups, group = np.unique(events.group, return_inverse=True)
    updates = np.bincount(group, weights=is_update, minlength=len(groups)).astype(np.int64)
    first = np.cumsum(updates + 1) - (updates + 1)  # version 0 of each group, among all versions
    made = np.full(len(groups) + updates.sum(), -1)
    is_first = np.isin(np.arange(len(made)), first)
    made[~is_first] = slot[is_update]
    unread = np.append(made[1:], content.num_slots)
    unread[first[1:] - 1] = content.num_slots  # the newest of a group stays
    stage, microbatch = events.stage[is_gradient], events.microbatch[is_gradient]
    reads = first[group[is_gradient]] + versions.read[stage, microbatch]
    np.maximum.at(unread, reads, slot[is_gradient] + 1)
    # Counting what is held is then a sweep over moments: +1 when a version is made, -1 when it
    # goes. All copies are swept at once, for each has a range of moments of its own, and every
    # copy's changes add up to 0, so one running sum serves all.
    copy = np.repeat(groups // content.weights.runs, updates + 1)
    # at one moment the versions that go are counted before those that come
    moments = content.num_slots + 2
    moment = np.concatenate([copy * moments + unread + 1, copy * moments + made + 1])
    change = np.repeat([-1, 1], len(copy))
    order = np.argsort(moment, kind="stable")
    held = np.zeros(content.num_workers * content.num_stages, np.int64)
    np.maximum.at(held, moment[order] // moments, np.cumsum(change[order]))
    return held.reshape(content.num_workers, content.num_stages)


class _WeightEvents(NamedTuple):
    """Forwards, gradients and updates, by copy of a stage and run, in row order."""

    group: NumpyArray
    phase: NumpyArray
    stage: NumpyArray
    microbatch: NumpyArray
    cell: NumpyArray


def _events(content: Content) -> _WeightEvents:
    ops = content.ops.take(np.isin(content.ops.phase, (Phase.F, *WEIGHT_GRADS, Phase.U)))
    runs, (worker, slot) = content.weights.runs, np.divmod(ops.cell, content.num_slots)
    group = (worker * content.num_stages + ops.stage) * runs + ops.microbatch % runs
    columns = np.stack([group, ops.phase, ops.stage, ops.microbatch, ops.cell])
    return _WeightEvents(*columns[:, np.argsort(group * content.num_slots + slot, kind="stable")])
