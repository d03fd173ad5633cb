"""Memory of a table's workers in row order, in activations in flight or in bytes.

In row order, each op takes one slot; offloads and loads run beside the others and take no time.
`activation_memory` of a run follows offloads and loads in time.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, Num, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.dependencies import versions_held
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import (
    AT_WORK,
    BACKWARDS,
    CHECKPOINT,
    FOR_W,
    LEFT_BY_F,
    PARTS,
    WHOLE,
    AnyPhase,
    Phase,
    is_phase,
)
from pipejax.schedules.table.table import ScheduleTable

# Memory ledger: changes of the activation memory of a worker at the start and end of each op. The
# ledger counts parts of activations in whole numbers; a level is the sum of count times size.

# arguments of `activation_memory`
LEDGER_SIZES = ("sizes", "weight_share", "checkpoints", "at_work")
WEIGHT_SHARE = 1 / 3  # share of an activation that W needs after I, if no layer says it

START, END = 0, 1  # start and end of an op
MAX_PRODUCTS = 1 << 17  # most products of sizes and counts at once, so that they stay in cache
MANY_SIZES = 64  # different sizes, above which levels are summed worker by worker


class LedgerEntry(NamedTuple):
    """An entry of the memory ledger: a change of the memory that a worker holds."""

    moment: int  # `START` or `END` of the op
    part: int  # part of an activation that is taken or freed
    change: int  # change of the number of such parts on the worker


def memory_ledger(phases: Iterable[AnyPhase]) -> Mapping[AnyPhase, tuple[LedgerEntry, ...]]:
    """Return {phase: changes of held activation parts at the start and end of an op}."""
    ledger = {}
    for phase in phases:
        starts = [LedgerEntry(START, *change) for change in phase.kind.at_start.items()]
        ends = [LedgerEntry(END, *change) for change in phase.kind.at_end.items()]
        if starts or ends:
            ledger[phase] = (*starts, *ends)
    return ledger


# weights of a stage that are gathered from their shards, one unit for each stage
GATHERED: Mapping[AnyPhase, tuple[LedgerEntry, ...]] = {
    Phase.UNSHARD: (LedgerEntry(START, WHOLE, 1),),
    Phase.RESHARD: (LedgerEntry(END, WHOLE, -1),),
}


# parts that a backward recomputes without R and holds while it runs
RECOMPUTED: Mapping[AnyPhase, tuple[LedgerEntry, ...]] = {
    phase: (LedgerEntry(START, part, 1), LedgerEntry(END, part, -1))
    for phase, part in zip(BACKWARDS, AT_WORK, strict=True)
}


def held_change(phase: Phase, moment: int, *, whole: float, for_w: float) -> float:
    """Return the memory change of a worker at an op's start or end, without recomputation."""
    # sizes: `whole` of an activation, `for_w` of the share that W needs after I
    size = {WHOLE: whole, LEFT_BY_F: whole, FOR_W: for_w}
    changes = [e.change * size[e.part] for e in _entries(phase) if e.moment == moment]
    return sum(changes, start=0 * whole)


@functools.cache
def _entries(phase: Phase) -> tuple[LedgerEntry, ...]:
    return memory_ledger([phase]).get(phase, ())


def is_in_ledger(content: Content) -> Bool[NumpyArray, " ops"]:
    """Return for each op of a table whether it takes or frees memory."""
    return is_phase(content.ops.phase, list(memory_ledger(content.grammar.op_phases)))


def with_items(
    sizes: Num[NumpyArray, "parts stages"], items: Sequence[float]
) -> Num[NumpyArray, "parts_and_items stages"]:
    """Append sizes of custom items, shares of a whole activation, to sizes of activation parts."""
    # An item of a worker, which has no stage, is a share of an activation of the last stage.
    return np.concatenate([sizes, *(share * sizes[None, WHOLE] for share in items)])


def is_recomputed(content: Content) -> Bool[NumpyArray, "stages microbatches"]:
    """Return whether the table recomputes each activation, as (stages, microbatches)."""
    phases = content.grammar.recomputing_phases
    return np.logical_or.reduce([content.op_cells[phase] != NOWHERE for phase in phases])


class MemoryOps(NamedTuple):
    """Ops that take or free memory."""

    phase: Int[NumpyArray, " ops"]  # phase code
    stage: Int[NumpyArray, " ops"]
    worker: Int[NumpyArray, " ops"]
    recomputed: Bool[NumpyArray, " ops"]  # whether R recomputes the activation
    start: Num[NumpyArray, " ops"]  # start, in any unit of time; in row order the slot
    end: Num[NumpyArray, " ops"]

    @classmethod
    def from_content(cls, table: Content, phases: Iterable[AnyPhase] | None = None) -> "MemoryOps":
        """List a table's ops of these phases, by default of all phases that hold activations."""
        # Each op, also of a fused pair, has a duration of one slot.
        is_held = is_in_ledger(table) if phases is None else is_phase(table.ops.phase, phases)
        ops = table.ops.take(is_held)
        recomputed = is_recomputed(table)[ops.stage, ops.microbatch]
        worker, slot = np.divmod(ops.cell, table.num_slots)
        return cls(ops.phase, ops.stage, worker, recomputed, slot, slot + 1)


class MemoryChanges(NamedTuple):
    """Changes of the activation parts that workers hold, sorted by worker, then by time."""

    worker: Int[NumpyArray, " changes"]  # ascending
    time: Num[NumpyArray, " changes"]  # ascending for each worker
    part: Int[NumpyArray, " changes"]
    stage: Int[NumpyArray, " changes"]  # stage of the activation: its index among sizes
    change: Int[NumpyArray, " changes"]  # change of the number of such parts
    # no other change of the worker follows at that time: ops free before others take
    is_last_at_time: Bool[NumpyArray, " changes"]
    items: tuple[float, ...] = ()  # sizes of custom items, as shares of a whole activation

    @classmethod
    def from_ops(
        cls, ops: MemoryOps, grammar: Grammar = USUAL, *, at_work: bool = False
    ) -> "MemoryChanges":
        """Return the changes of held activations; `at_work` adds parts that only backwards hold."""
        ledger = dict(memory_ledger(grammar.op_phases))
        if at_work:
            ledger |= {phase: ledger[phase] + entries for phase, entries in RECOMPUTED.items()}
        return cls.from_ledger(ops, ledger, (*grammar.items.values(),))

    @classmethod
    def from_ledger(
        cls,
        ops: MemoryOps,
        ledger: Mapping[AnyPhase, tuple[LedgerEntry, ...]],
        items: tuple[float, ...] = (),
    ) -> "MemoryChanges":
        """Return the changes that the ledger's entries make at the starts and ends of ops."""
        changes: list[tuple[NumpyArray, ...]] = []
        used = {*np.unique(ops.phase).tolist()}
        used_entries = {phase: entries for phase, entries in ledger.items() if phase in used}
        for phase, entries in (used_entries or ledger).items():  # never empty, for `concatenate`
            phase_ops = MemoryOps(*(column[ops.phase == phase] for column in ops))
            left_by_f = np.where(phase_ops.recomputed, CHECKPOINT, WHOLE)
            for entry in entries:
                is_left = entry.part == LEFT_BY_F
                parts = left_by_f if is_left else np.full_like(left_by_f, entry.part)
                time = phase_ops.end if entry.moment == END else phase_ops.start
                change = np.full_like(parts, entry.change)
                changes.append((phase_ops.worker, time, parts, phase_ops.stage, change))
        fields = [np.concatenate(field) for field in zip(*changes, strict=True)]
        worker, time, *_ = fields
        # the sort is stable: at one time of a worker, entries keep the order of the ledger
        order = np.lexsort((time, worker))
        worker, time, part, stage, change = (field[order] for field in fields)
        is_followed = (worker[1:] == worker[:-1]) & (time[1:] == time[:-1])
        is_last_at_time = np.append(~is_followed, True)[: len(order)]
        return cls(worker, time, part, stage, change, is_last_at_time, items)

    def levels(self, sizes: Num[NumpyArray, "parts stages"]) -> Num[NumpyArray, " levels"]:
        """Return workers' memory after the last change at each time, in the unit of `sizes`."""
        # Sum counts of each size, not sizes: counts are exact, so the level is 0 when all is freed.
        #   worker 0 0 1 1, change 1 -1 1 1: counts 1 0 1 2, minus counts of earlier workers
        size = with_items(sizes, self.items)[self.part, self.stage]
        levels = np.zeros(len(size), size.dtype)
        first_change = np.searchsorted(self.worker, self.worker)  # first change of the same worker
        ends = [len(size)]
        if len(np.unique(size)) > MANY_SIZES:  # worker by worker: each has few sizes
            ends = [*np.flatnonzero(np.diff(self.worker)) + 1, len(size)]
        for block in (slice(*pair) for pair in itertools.pairwise([0, *ends])):
            for value in np.unique(size[block]):
                counts = np.cumsum(np.where(size[block] == value, self.change[block], 0))
                earlier = np.append(0, counts)[first_change[block] - block.start]
                levels[block] += value * (counts - earlier)
        return levels[self.is_last_at_time]

    def peaks(
        self, sizes: Num[NumpyArray, "parts stages"], num_workers: int
    ) -> Num[NumpyArray, " workers"]:
        """Return the largest memory of each worker, in the unit of `sizes`."""
        peak = np.zeros(num_workers, sizes.dtype)
        np.maximum.at(peak, self.worker[self.is_last_at_time], self.levels(sizes))
        return peak


Bytes = Float[NumpyArray, " stages"]


def in_flight(table: ScheduleTable, sizes: Bytes | None = None) -> Num[NumpyArray, "workers slots"]:
    """Return the number, or size, of activations that each worker holds in each slot."""
    ops = MemoryOps.from_content(table)
    on_host = is_phase(ops.phase, table.grammar.host_phases)
    held = MemoryChanges.from_ops(MemoryOps(*(field[~on_host] for field in ops)), table.grammar)
    change = held.change if sizes is None else held.change * sizes[held.stage]
    if held.items:  # an item counts as its share of a whole activation
        change = change * np.array([*np.ones(len(PARTS)), *held.items])[held.part]
    changes = np.zeros((table.num_workers, table.num_slots + 1), change.dtype)
    np.add.at(changes, (held.worker, held.time), change)
    return np.cumsum(changes, axis=1)[:, :-1]


def peak_in_flight(table: ScheduleTable) -> Num[NumpyArray, " workers"]:
    """Return the largest number of activations that each worker holds at the same time."""
    return in_flight(table).max(axis=1, initial=0)  # nothing before the first op


def held_in_rows(
    table: ScheduleTable, *, by_microbatch: bool = False, at_work: bool = False
) -> MemoryChanges:
    """Return the changes of held activations along the rows of a table; times are slots.

    With `by_microbatch`, stage s and microbatch m have the index s M + m among sizes. `at_work`
    adds the parts that backwards recompute without R.
    """
    ops = MemoryOps.from_content(table)
    if by_microbatch:
        microbatch = np.maximum(table.ops.microbatch[is_in_ledger(table)], 0)
        ops = ops._replace(stage=ops.stage * table.num_microbatches + microbatch)
    on_host = is_phase(ops.phase, table.grammar.host_phases)
    if not on_host.any():
        return MemoryChanges.from_ops(ops, table.grammar, at_work=at_work)
    # an offload or load starts and ends when the next op that takes time starts:
    #   row F O . B: the next such op of each slot is in slots 0 3 3 3
    takes_time = is_phase(table.phase, table.grammar.busy_phases)
    slot = np.where(takes_time, np.arange(table.num_slots), table.num_slots)
    next_slot = np.minimum.accumulate(slot[:, ::-1], axis=1)[:, ::-1][ops.worker, ops.start]
    start, end = (np.where(on_host, next_slot, time) for time in (ops.start, ops.end))
    ops = ops._replace(start=start, end=end)
    return MemoryChanges.from_ops(ops, table.grammar, at_work=at_work)


def gathered_peak(
    table: ScheduleTable, sizes: Bytes | None = None
) -> Float[NumpyArray, " workers"]:
    """Return the largest memory of gathered weights on each worker, if rows run in order.

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
    gathers = MemoryOps.from_content(table, GATHERED)
    return MemoryChanges.from_ledger(gathers, GATHERED).peaks(size[None], table.num_workers)


def static_bytes(
    table: ScheduleTable, bytes_per_stage: Bytes, version_bytes: Bytes | None = None
) -> Float[NumpyArray, " workers"]:
    """Return the memory of the copies of stages on each worker, for the whole step, (workers).

    Two pipes that have a stage on one worker share its copy; each training run has its own. A
    further weight version of a stage takes `version_bytes`.
    """
    copies, stashed = _copies_and_versions(table)
    total = copies @ np.asarray(bytes_per_stage, float)
    if version_bytes is not None:
        total += stashed @ np.asarray(version_bytes, float)
    return total


def _copies_and_versions(
    table: ScheduleTable,
) -> tuple[Int[NumpyArray, "workers stages"], Int[NumpyArray, "workers stages"]]:
    """Return numbers of copies and of older weight versions of stages, both (workers, stages)."""
    versions = versions_held(table)
    copies = np.where(versions > 0, table.weights.runs, 0)
    return copies, versions - copies


class HeldCounts(NamedTuple):
    """Counts of activation parts and weights by worker; memory is linear in these counts."""

    copies: Int[NumpyArray, "workers stages"]  # number of copies: 1, or one for each run
    stashed: Int[NumpyArray, "workers stages"]  # most further versions of the stage's weights
    # counts of `PARTS`, then of items, at all times that are the peak for some sizes; zero-padded
    parts: Int[NumpyArray, "parts workers stages times"]
    items: tuple[float, ...] = ()  # sizes of items, as shares of a whole activation

    def static_bytes(self, static: Any, version: Any) -> Any:
        """Return the memory held for the whole step, as (..., workers) bytes."""
        # `static` and `version` are bytes (..., stages) of a copy and of a stashed version.
        copies, stashed = (counts.T.astype(float) for counts in (self.copies, self.stashed))
        return static @ copies + version @ stashed

    def activation_bytes(self, sizes: tuple[Any, ...]) -> Any:
        """Return peak activation memory, (..., workers) bytes, for sizes of each part."""
        # without tracing, multiply only the parts that occur and the few stages of each worker
        sizes = (*sizes, *(share * sizes[WHOLE] for share in self.items))
        counts, batch = self.parts, np.shape(sizes[WHOLE])[:-1]
        if all(isinstance(array, np.ndarray) for array in (counts, *sizes)):
            counts, sizes = _drop_zero_counts(counts, sizes)
            count = max(1, MAX_PRODUCTS // counts[0, :, 0].size)  # configurations at once
            blocks = (slice(k, k + count) for k in range(0, max(1, sizes[0].shape[1]), count))
            peaks = [_peaks([size[:, block] for size in sizes], counts) for block in blocks]
            return np.concatenate(peaks, axis=1).T.reshape(*batch, len(self.copies))
        return _peaks(sizes, counts).T.reshape(*batch, len(self.copies))


def _drop_zero_counts(
    counts: NumpyArray, sizes: Sequence[NumpyArray]
) -> tuple[NumpyArray, tuple[NumpyArray, ...]]:
    """Select the parts that any worker holds and, for each worker, the stages that it holds."""
    # `counts` are (parts, workers, stages, times), `sizes` of each part (..., stages). Returns
    # counts (parts, workers, few, times) and sizes of each part (workers, configurations, few).
    has_part = counts.any(axis=(1, 2, 3)) | (np.arange(len(counts)) == WHOLE)
    counts, sizes = counts[has_part], [*itertools.compress(sizes, has_part)]
    is_held = counts.any(axis=(0, 3))  # (workers, stages)
    # (workers, few) held stages first; workers with fewer get others, whose counts are 0
    stages = np.argsort(~is_held, axis=1, kind="stable")[:, : is_held.sum(axis=1).max()]
    counts = np.take_along_axis(counts, stages[None, :, :, None], axis=2).astype(float)
    shape = (-1, *stages.shape)
    return counts, tuple(size[..., stages].reshape(shape).swapaxes(0, 1) for size in sizes)


def _peaks(sizes: Sequence[Any], counts: Any) -> Any:
    """Return the largest sum over parts of sizes times counts, at any time (..., times)."""
    held = [size @ count for size, count in zip(sizes, counts, strict=True)]
    return sum(held[1:], start=held[0]).max(axis=-1)


def held_counts(table: ScheduleTable) -> HeldCounts:
    """Count activation parts that each worker holds at its possible memory peaks, in row order."""
    # A peak is possible if it is one for some sizes of the parts.
    held, stages = held_in_rows(table, at_work=True), table.num_stages
    num_parts = len(PARTS) + len(held.items)
    column = held.part * stages + held.stage % stages  # one column for each part and stage
    worker_peaks = []  # (columns, counts (columns, times)) of each worker
    ends = np.searchsorted(held.worker, np.arange(table.num_workers + 1))  # changes go by worker
    for on_worker in itertools.starmap(slice, itertools.pairwise(ends)):
        # the worker has few of all columns: count in these alone
        worker_columns, indices = np.unique(column[on_worker], return_inverse=True)
        count_type = np.int16 if len(indices) < np.iinfo(np.int16).max else np.int64  # no overflow
        changes = np.zeros((len(worker_columns), len(indices)), count_type)
        changes[indices, np.arange(len(indices))] = held.change[on_worker]
        counts = np.cumsum(changes, axis=1, dtype=count_type)[:, held.is_last_at_time[on_worker]]
        worker_peaks.append((worker_columns, _find_peak_times(counts).T))
    num_times = max(peaks.shape[1] for _, peaks in worker_peaks)
    parts = np.zeros((table.num_workers, num_parts * stages, num_times), np.int32)
    for worker, (worker_columns, peaks) in enumerate(worker_peaks):
        parts[worker, worker_columns, : peaks.shape[1]] = peaks
    by_part = parts.reshape(table.num_workers, num_parts, stages, -1).swapaxes(0, 1)
    return HeldCounts(*_copies_and_versions(table), by_part, held.items)


def _find_peak_times(counts: Int[NumpyArray, "columns times"]) -> Int[NumpyArray, "peaks columns"]:
    """Return activation counts at all times that no other time dominates; a peak is among them."""
    # A time dominates another if it holds at least as much of everything. Most times are dominated
    # by the next, or the next but one, so these go first. Of the others, no time dominates the one
    # that holds most in all: it is kept, the times that it dominates go, and so on.
    for distance in (1, 2):
        later = np.zeros_like(counts)
        later[:, :-distance] = counts[:, distance:]
        counts = counts[:, ~(later >= counts).all(axis=0)]
    rows = np.ascontiguousarray(counts.T)
    # distinct rows by their bytes; `numpy.unique` sorts whole rows, which takes longer
    rows = rows[[*{row.tobytes(): k for k, row in enumerate(rows)}.values()]]
    if len(rows) == 0:  # the worker holds nothing at all
        return np.zeros((1, len(counts)), counts.dtype)
    times, peaks = np.argsort(-rows.sum(axis=1), kind="stable"), []
    while len(times):
        peaks.append(times[0])
        times = times[(rows[times] > rows[times[0]]).any(axis=1)]
    return rows[np.sort(peaks)]
