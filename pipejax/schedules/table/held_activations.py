"""Memory of the workers of a table in row order: activations in flight, or bytes.

Ops of a worker run one after another, so its memory does not depend on their durations if none is
0: row order is a run in which each op takes one slot. Offloads and loads run beside them; here they
take no time. `activation_memory` of a run follows them in time.
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
    """Return the activations that each worker holds in each slot: (workers, slots)."""
    # The result counts activations, or sums `sizes` of the activations of each stage.
    ops = HeldOps.from_content(table)
    on_host = np.isin(ops.phase, table.grammar.host)
    held = HeldParts.from_ops(HeldOps(*(field[~on_host] for field in ops)), table.grammar)
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
    """Apply the memory ledger to the rows of a table, with slots as times.

    With `by_microbatch`, stage s and microbatch m have the index s M + m among sizes. `at_work`
    adds the parts that backwards recompute without R.
    """
    ops = HeldOps.from_content(table)
    if by_microbatch:
        microbatch = np.maximum(table.ops.microbatch[is_in_ledger(table)], 0)
        ops = ops._replace(stage=ops.stage * table.num_microbatches + microbatch)
    on_host = np.isin(ops.phase, table.grammar.host)
    if not on_host.any():
        return HeldParts.from_ops(ops, table.grammar, at_work=at_work)
    # an offload or load starts and ends when the next op that takes time starts:
    #   row F O . B: the next such op of each slot is in slots 0 3 3 3
    takes_time = np.isin(table.phase, table.grammar.busy)
    slot = np.where(takes_time, np.arange(table.num_slots), table.num_slots)
    next_slot = np.minimum.accumulate(slot[:, ::-1], axis=1)[:, ::-1][ops.worker, ops.start]
    start, end = (np.where(on_host, next_slot, time) for time in (ops.start, ops.end))
    return HeldParts.from_ops(ops._replace(start=start, end=end), table.grammar, at_work=at_work)


def gathered_peak(
    table: ScheduleTable, sizes: Bytes | None = None
) -> Float[NumpyArray, " workers"]:
    """Return the largest memory of gathered weights on each worker, in row order.

    A run never holds more. Weights that no cell gathers are not counted.

    Args:
      table: the schedule.
      sizes: size of the weights of each stage; 1 if None.

    Returns:
      (workers) memory, in the unit of sizes.

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
    return HeldParts.from_gathers(HeldOps.gathers_from_content(table)).peaks(
        size[None], table.num_workers
    )


def static_bytes(
    table: ScheduleTable, bytes_per_stage: Bytes, version_bytes: Bytes | None = None
) -> Float[NumpyArray, " workers"]:
    """Return the memory of the copies of stages on each worker, for the whole step.

    Returns (workers) bytes; two pipes that have a stage on one worker share its copy. A table that
    trains several runs holds a copy for each. `version_bytes` are those of a stashed version.
    """
    copies, stashed = _copies_and_versions(table)
    total = copies @ np.asarray(bytes_per_stage, float)
    if version_bytes is not None:
        total += stashed @ np.asarray(version_bytes, float)
    return total


def _copies_and_versions(
    table: ScheduleTable,
) -> tuple[Int[NumpyArray, "workers stages"], Int[NumpyArray, "workers stages"]]:
    """Return the copies of each stage, and weight versions beside the newest: (workers, stages)."""
    versions = versions_held(table)
    copies = np.where(versions > 0, table.weights.runs, 0)
    return copies, versions - copies


class HeldCounts(NamedTuple):
    """Counts of the parts that each worker holds: its memory is linear in the bytes of stages."""

    copies: Int[NumpyArray, "workers stages"]  # 1, or one of each run
    stashed: Int[NumpyArray, "workers stages"]  # further versions of its weights, at most
    # by `PARTS`, then items, at each time that is the peak for some sizes; padded with zeros
    parts: Int[NumpyArray, "parts workers stages times"]
    items: tuple[float, ...] = ()  # sizes of items, as shares of a whole activation

    def static_bytes(self, static: Any, version: Any) -> Any:
        """Return the memory of the whole step, (..., workers) bytes.

        `static` and `version` are bytes (..., stages) of a copy and of a stashed version.
        """
        return static @ self.copies.T + version @ self.stashed.T

    def activation_bytes(self, sizes: tuple[Any, ...]) -> Any:
        """Return the peak of activation memory, (..., workers) bytes, for sizes of each part."""
        # The sizes are (..., stages) bytes and may be traced.
        sizes = (*sizes, *(share * sizes[WHOLE] for share in self.items))
        held = [size @ counts for size, counts in zip(sizes, self.parts, strict=True)]
        return sum(held[1:], start=held[0]).max(axis=-1).T


def held_counts(table: ScheduleTable) -> HeldCounts:
    """Count the parts that each worker holds at possible peaks, for any sizes of stages."""
    held, stages = held_in_rows(table, at_work=True), table.num_stages
    num_parts = len(PARTS) + len(held.items)
    column = held.part * stages + held.stage % stages  # one column for each part and stage
    worker_peaks = []  # of each worker (times, columns)
    for worker in range(table.num_workers):
        on_worker = held.worker == worker
        # the worker has few of all columns: count in these alone
        worker_columns, indices = np.unique(column[on_worker], return_inverse=True)
        changes = np.zeros((len(indices), len(worker_columns)), int)
        changes[np.arange(len(indices)), indices] = held.change[on_worker]
        counts = np.cumsum(changes, axis=0)[held.is_last_at_time[on_worker]]
        candidates = _undominated(counts)
        peaks = np.zeros((len(candidates), num_parts * stages), int)
        peaks[:, worker_columns] = candidates
        worker_peaks.append(peaks)
    parts = np.zeros((table.num_workers, num_parts * stages, max(map(len, worker_peaks))), int)
    for worker, peaks in enumerate(worker_peaks):
        parts[worker, :, : len(peaks)] = peaks.T
    by_part = parts.reshape(table.num_workers, num_parts, stages, -1).swapaxes(0, 1)
    return HeldCounts(*_copies_and_versions(table), by_part, held.items)


def _undominated(counts: Int[NumpyArray, "times columns"]) -> Int[NumpyArray, "peaks columns"]:
    """Return the rows that no other row reaches in every entry; one of them is the peak."""
    # The peak of sizes >= 0 is the largest counts @ sizes; a row that another row reaches in every
    # entry is never the only largest. The next row in time dominates most rows; the others are
    # compared pairwise.
    zeros = np.zeros((1, counts.shape[1]), counts.dtype)
    is_dominated = (np.concatenate([counts[1:], zeros]) >= counts).all(axis=1)
    rows = np.unique(counts[~is_dominated], axis=0)
    if len(rows) == 0:  # the worker holds nothing at all
        return zeros
    dominates = (rows[:, None] >= rows[None, :]).all(axis=2)
    return rows[dominates.sum(axis=0) == 1]  # only by themselves
