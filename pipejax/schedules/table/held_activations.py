"""Holdings of the workers of a table in row order: activations in flight, or bytes.

On one worker ops run one after the other, so what it holds does not depend on their durations, as
long as none is 0: row order is a run in which each op takes one slot. Only offloads and loads run
beside them. Here these take no time, as where they have no cost; `activation_memory` of a run
follows them in time.
"""

from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.schedules.cells.dependencies import versions_held
from pipejax.schedules.cells.memory_ledger import HeldOps, HeldParts, is_in_ledger
from pipejax.schedules.cells.ops import PARTS, WHOLE
from pipejax.schedules.table.table import ScheduleTable

Bytes = Float[NumpyArray, " stages"]


def in_flight(
    table: ScheduleTable, sizes: Bytes | None = None
) -> Int[NumpyArray, "workers slots"] | Float[NumpyArray, "workers slots"]:
    """Count the (stage, microbatch) activations that each worker holds during each slot."""
    ops = HeldOps.of(table)
    on_host = np.isin(ops.phase, table.grammar.host)
    held = HeldParts.of(HeldOps(*(field[~on_host] for field in ops)), table.grammar)
    change = held.change if sizes is None else held.change * sizes[held.stage]
    if held.items:
        change = change * np.array([*np.ones(len(PARTS)), *held.items])[held.part]
    changes = np.zeros((table.num_workers, table.num_slots + 1), change.dtype)
    np.add.at(changes, (held.worker, held.time), change)
    return np.cumsum(changes, axis=1)[:, :-1]


def peak_in_flight(table: ScheduleTable) -> Int[NumpyArray, " workers"]:
    """Return the largest number of activations that each worker holds at once.

    Returns (workers) activations.
    """
    return in_flight(table).max(axis=1, initial=0)  # nothing before the first op


def held_in_rows(
    table: ScheduleTable, *, by_microbatch: bool = False, at_work: bool = False
) -> HeldParts:
    """Apply the memory ledger to the rows, in slots.

    Where microbatches differ, number m of stage s has the place s M + m among sizes. `at_work` adds
    what backwards recompute by themselves.
    """
    ops = HeldOps.of(table)
    if by_microbatch:
        microbatch = np.maximum(table.ops.microbatch[is_in_ledger(table)], 0)
        ops = ops._replace(stage=ops.stage * table.num_microbatches + microbatch)
    on_host = np.isin(ops.phase, table.grammar.host)
    if not on_host.any():
        return HeldParts.of(ops, table.grammar, at_work=at_work)
    # they start and end as the next op that takes time starts
    takes_time = np.isin(table.phase, table.grammar.busy)
    slot = np.where(takes_time, np.arange(table.num_slots), table.num_slots)
    coming = np.minimum.accumulate(slot[:, ::-1], axis=1)[:, ::-1][ops.worker, ops.start]
    start, end = (np.where(on_host, coming, moment) for moment in (ops.start, ops.end))
    return HeldParts.of(ops._replace(start=start, end=end), table.grammar, at_work=at_work)


def gathered_peak(
    table: ScheduleTable, sizes: Bytes | None = None
) -> Float[NumpyArray, " workers"]:
    """Return the most that gathered weights take on each worker at once, in row order.

    A run never holds more. What no cell gathers is not counted.

    Args:
      table: the schedule.
      sizes: what the weights of a stage take, by stage; 1 if None.

    Returns:
      (workers) what they take, in the unit of sizes.

    Raises:
      MismatchError: if there is not one size for each stage.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=2)
      >>> table = pj.schedules.insert_sharding(table, residency=1)
      >>> pj.schedules.gathered_peak(table).tolist()
      [1.0, 1.0]
    """
    size = np.ones(table.num_stages) if sizes is None else np.asarray(sizes, float)
    if size.shape != (table.num_stages,):
        raise MismatchError(
            f"sizes must have one entry for each of {table.num_stages} stages, got {sizes!r}",
            "sizes",
        )
    return HeldParts.gathered(HeldOps.gathering(table)).peaks(size[None], table.num_workers)


def static_bytes(
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
    """Copies of each stage, and weight versions beside the newest: (workers, stages) each."""
    versions = versions_held(table)
    copies = np.where(versions > 0, table.weights.runs, 0)
    return copies, versions - copies


class HeldCounts(NamedTuple):
    """Counts of what each worker holds: its memory is linear in the bytes of the stages."""

    copies: Int[NumpyArray, "workers stages"]  # 1, or one of each run
    stashed: Int[NumpyArray, "workers stages"]  # further versions of its weights, at most
    # by `PARTS`, then items, at each moment that is the peak for some sizes; zeros fill up
    parts: Int[NumpyArray, "parts workers stages moments"]
    items: tuple[float, ...] = ()  # sizes of items, as shares of a whole activation

    def static_bytes(self, static: Any, version: Any) -> Any:
        """Return what lasts the whole step: (..., workers) bytes, by (..., stages)."""
        return static @ self.copies.T + version @ self.stashed.T

    def activation_bytes(self, sizes: tuple[Any, ...]) -> Any:
        """Return activations at their peak: (..., workers) bytes, by (..., stages) of each part."""
        # Only operators are used, so that arrays may be traced.
        sizes = (*sizes, *(share * sizes[WHOLE] for share in self.items))
        held = [size @ counts for size, counts in zip(sizes, self.parts, strict=True)]
        return sum(held[1:], start=held[0]).max(axis=-1).T


def held_counts(table: ScheduleTable) -> HeldCounts:
    """Count what each worker holds, for any sizes of stages."""
    held, stages = held_in_rows(table, at_work=True), table.num_stages
    count = len(PARTS) + len(held.items)
    column = held.part * stages + held.stage % stages
    moments = []
    for worker in range(table.num_workers):
        on_worker = held.worker == worker
        worker_columns, place = np.unique(
            column[on_worker], return_inverse=True
        )  # few of all columns
        changes = np.zeros((len(place), len(worker_columns)), int)
        changes[np.arange(len(place)), place] = held.change[on_worker]
        peaks = _undominated(np.cumsum(changes, axis=0)[held.settled[on_worker]])
        moments.append(np.zeros((len(peaks), count * stages), int))
        moments[-1][:, worker_columns] = peaks
    parts = np.zeros((table.num_workers, count * stages, max(map(len, moments))), int)
    for worker, counts in enumerate(moments):
        parts[worker, :, : len(counts)] = counts.T
    by_part = parts.reshape(table.num_workers, count, stages, -1)
    return HeldCounts(*_models(table), by_part.swapaxes(0, 1), held.items)


def _undominated(counts: Int[NumpyArray, "times sizes"]) -> Int[NumpyArray, "moments sizes"]:
    """Keep the rows that no other row reaches in every entry: one of them is the peak."""
    # The peak of sizes >= 0 is the largest counts @ sizes, and a row that another one reaches in
    # every entry is never the only largest. Most rows are covered by the next in time; the few that
    # are left are compared pairwise, and kept where only they cover themselves.
    ends = np.zeros((1, counts.shape[1]), counts.dtype)
    grows_next = (np.concatenate([counts[1:], ends]) >= counts).all(axis=1)
    rows = np.unique(counts[~grows_next], axis=0)  # few: what only grows is no peak
    if len(rows) == 0:  # the worker holds nothing at all
        return ends
    covers = (rows[:, None] >= rows[None, :]).all(axis=2)
    return rows[covers.sum(axis=0) == 1]
