"""Which updates of a stage every microbatch sees, and which update applies its gradient.

Updates of a stage are numbered for each copy of the stage and each run; version v of its weights
holds the updates before number v. Row order alone decides them: a stage's forwards, gradients and
updates all stand in the row of one worker.
"""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.remembered import remembered
from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.ops import Phase

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
    gradient = np.isin(events.phase, (Phase.B, Phase.W))
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
    is_update, is_gradient = events.phase == Phase.U, np.isin(events.phase, (Phase.B, Phase.W))
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
    ops = content.ops.take(np.isin(content.ops.phase, (Phase.F, Phase.B, Phase.W, Phase.U)))
    runs, (worker, slot) = content.weights.runs, np.divmod(ops.cell, content.num_slots)
    group = (worker * content.num_stages + ops.stage) * runs + ops.microbatch % runs
    columns = np.stack([group, ops.phase, ops.stage, ops.microbatch, ops.cell])
    return _WeightEvents(*columns[:, np.argsort(group * content.num_slots + slot, kind="stable")])
