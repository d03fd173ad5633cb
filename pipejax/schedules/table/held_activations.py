"""Activations in flight over the slots of a table, and their peak."""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.cells.weight_versions import versions_held
from pipejax.schedules.table.table import ScheduleTable

Bytes = Float[NumpyArray, " stages"]


def in_flight(table: ScheduleTable) -> Int[NumpyArray, "workers slots"]:
    """Count the (stage, microbatch) activations that each worker holds during each slot.

    One is taken at F and released at the end of B, or at the end of W where the backward is
    split; in a fused pair both count while it runs.

    Returns (workers, slots) activations held.
    """
    one = np.ones(table.num_stages, int)
    return _held(table, one, one)


def peak_in_flight(table: ScheduleTable) -> Int[NumpyArray, " workers"]:
    """Return the largest number of activations that each worker holds at once.

    Returns (workers) activations.
    """
    return in_flight(table).max(axis=1)


def peak_activation_bytes(
    table: ScheduleTable, bytes_per_stage: Bytes, checkpoint_bytes: Bytes | None = None
) -> Float[NumpyArray, " workers"]:
    """Return the most activation memory that each worker holds at once: (workers) bytes."""
    kept = np.asarray(bytes_per_stage, float)
    checkpoint = kept if checkpoint_bytes is None else np.asarray(checkpoint_bytes, float)
    return _held(table, kept, checkpoint).max(axis=1)


class HeldCounts(NamedTuple):
    """What each worker holds, as counts: its memory is linear in the bytes of the stages.

    Attributes:
      copies: (workers, stages) models whose stage the worker holds: 1, or one of each run.
      stashed: (workers, stages) versions of its weights that it holds besides, at most.
      activations: (workers, moments, stages) activations held at each moment that could be the
        peak for some sizes; rows of zeros fill up.
      checkpoints: (workers, moments, stages) what is held of those only between F and R.
    """

    copies: Int[NumpyArray, "workers stages"]
    stashed: Int[NumpyArray, "workers stages"]
    activations: Int[NumpyArray, "workers moments stages"]
    checkpoints: Int[NumpyArray, "workers moments stages"]


def held_counts(table: ScheduleTable) -> HeldCounts:
    """Count what each worker holds, once for all sizes of stages."""
    stages, none = np.eye(table.num_stages), np.zeros(table.num_stages)
    counts = np.stack(
        [_held(table, one, none) for one in stages] + [_held(table, none, one) for one in stages],
        axis=-1,
    )
    peaks = [_undominated(moments) for moments in counts]
    padded = np.zeros((len(peaks), max(map(len, peaks)), counts.shape[-1]), int)
    for worker, moments in enumerate(peaks):
        padded[worker, : len(moments)] = moments
    activations, checkpoints = np.split(padded, 2, axis=-1)
    return HeldCounts(*_models(table), activations, checkpoints)


def _undominated(counts: Float[NumpyArray, "slots sizes"]) -> Float[NumpyArray, "moments sizes"]:
    """Keep the rows that no other row reaches in every entry: one of them is the peak."""
    ends = np.zeros((1, counts.shape[1]), counts.dtype)
    grows_next = (np.concatenate([counts[1:], ends]) >= counts).all(axis=1)
    rows = np.unique(counts[~grows_next], axis=0)  # few: what only grows is no peak
    if len(rows) == 0:  # the worker holds nothing at all
        return ends
    covers = (rows[:, None] >= rows[None, :]).all(axis=2)
    return rows[covers.sum(axis=0) == 1]


def persistent_bytes(
    table: ScheduleTable, bytes_per_stage: Bytes, version_bytes: Bytes | None = None
) -> Float[NumpyArray, " workers"]:
    """Return the memory that lasts the whole step: every worker's copy of a stage counts.

    Returns (workers) bytes; two pipes that have a stage on one worker share its copy. A table that
    trains several runs holds a copy for each.
    """
    copies, stashed = _models(table)
    total = copies @ np.asarray(bytes_per_stage, float)
    if version_bytes is not None:
        total += stashed @ np.asarray(version_bytes, float)
    return total


def _models(
    table: ScheduleTable,
) -> tuple[Int[NumpyArray, "workers stages"], Int[NumpyArray, "workers stages"]]:
    """Models whose stage a worker holds, and versions of its weights beside the newest of each."""
    versions = versions_held(table.content)
    copies = np.where(versions > 0, table.weights.runs, 0)
    return copies, versions - copies


def _held(table: ScheduleTable, size: NumpyArray, checkpoint: NumpyArray) -> NumpyArray:
    """Sum of the sizes held during each slot: taken in it or before, released after it."""
    size, checkpoint = np.append(size, 0), np.append(checkpoint, 0)  # the last entry: idle cells
    at = table.cells
    recomputes = at.phase == Phase.R
    has_recompute = np.zeros((table.num_stages + 1, table.num_microbatches + 1), bool)
    has_recompute[at.stage[recomputes], at.microbatch[recomputes]] = True
    first = np.where(has_recompute[at.stage, at.microbatch], checkpoint[at.stage], size[at.stage])
    taken = np.where(at.phase == Phase.F, first, 0)
    taken = np.where(recomputes, size[at.stage] - checkpoint[at.stage], taken)
    released = sum(
        np.where(np.isin(cells.phase, [Phase.B, Phase.W]), size[cells.stage], 0)
        for cells in (table.cells, table.partners)
    )
    return np.cumsum(taken, axis=1) - np.cumsum(released, axis=1) + released
