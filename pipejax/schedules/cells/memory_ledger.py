"""Memory ledger: changes of the activation memory of a worker at the start and end of each op.

Runs in time, sweeps, the optimizer and the heuristics all read this table. It counts parts of
activations in whole numbers; a level is the sum of count times size, so it is exactly 0 when all
is freed.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from pipejax.base.array_types import Bool, Int, Num, NumpyArray
from pipejax.schedules.cells.cells import NOWHERE, Content, HeldCells
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import (
    AT_WORK,
    BACKWARDS,
    CHECKPOINT,
    FOR_W,
    LEFT_BY_F,
    WHOLE,
    AnyPhase,
    Phase,
)

# arguments of `activation_memory`
LEDGER_SIZES = ("sizes", "weight_share", "checkpoints", "at_work")
WEIGHT_SHARE = 1 / 3  # share of an activation that W needs after I, if no layer says it

START, END = 0, 1  # of an op
MANY_SIZES = 64  # different sizes, above which levels are summed worker by worker

Size = TypeVar("Size", float, NumpyArray)


class LedgerEntry(NamedTuple):
    """One entry of the ledger."""

    moment: int  # `START` or `END` of the op
    part: int  # part of an activation that is taken or freed
    change: int  # change of its count on the worker


def memory_ledger(phases: Iterable[AnyPhase]) -> Mapping[AnyPhase, tuple[LedgerEntry, ...]]:
    """Return the entries of each phase that takes or frees a part of an activation."""
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


def held_change(phase: Phase, moment: int, *, whole: Size, for_w: Size) -> Size:
    """Return the change of a worker's memory at the start or end of an op without recomputation."""
    # `whole` is the size of an activation, `for_w` of the share that W needs after I.
    size = {WHOLE: whole, LEFT_BY_F: whole, FOR_W: for_w}
    entries = (entry for entry in memory_ledger([phase]).get(phase, ()) if entry.moment == moment)
    return sum((entry.change * size[entry.part] for entry in entries), start=0 * whole)


def is_in_ledger(content: Content) -> Bool[NumpyArray, " ops"]:
    """Return whether each op of a table takes or frees memory: (ops)."""
    return np.isin(content.ops.phase, list(memory_ledger(content.grammar.op_phases)))


def with_items(
    sizes: Num[NumpyArray, "parts stages"], items: Sequence[float]
) -> Num[NumpyArray, "parts_and_items stages"]:
    """Append the sizes of items, given as shares of a whole activation, to sizes of parts."""
    # An item of a worker, which has no stage, is a share of an activation of the last stage.
    return np.concatenate([sizes, *(share * sizes[None, WHOLE] for share in items)])


def is_recomputed(content: Content) -> Bool[NumpyArray, "stages microbatches"]:
    """Return whether an op recomputes each activation: (stages, microbatches)."""
    phases = content.grammar.recomputing
    return np.logical_or.reduce([content.where[phase] != NOWHERE for phase in phases])


class HeldOps(NamedTuple):
    """Ops that take or free memory."""

    phase: Int[NumpyArray, " ops"]  # phase code
    stage: Int[NumpyArray, " ops"]
    worker: Int[NumpyArray, " ops"]
    recomputed: Bool[NumpyArray, " ops"]  # whether R recomputes the activation
    start: Num[NumpyArray, " ops"]  # start, in any unit of time; in row order the slot
    end: Num[NumpyArray, " ops"]

    @classmethod
    def from_content(cls, content: Content) -> "HeldOps":
        """List the ops of a table, fused pairs included, with a duration of one slot each."""
        return cls._from_cells(content, content.ops.take(is_in_ledger(content)))

    @classmethod
    def gathers_from_content(cls, content: Content) -> "HeldOps":
        """List the UNSHARD and RESHARD ops of a table, with a duration of one slot each."""
        return cls._from_cells(content, content.ops.take(np.isin(content.ops.phase, [*GATHERED])))

    @classmethod
    def _from_cells(cls, content: Content, ops: HeldCells) -> "HeldOps":
        recomputed = is_recomputed(content)[ops.stage, ops.microbatch]
        worker, slot = np.divmod(ops.cell, content.num_slots)
        return cls(ops.phase, ops.stage, worker, recomputed, slot, slot + 1)


class HeldParts(NamedTuple):
    """Changes of the parts that workers hold, by worker, then time."""

    worker: Int[NumpyArray, " changes"]  # ascending
    time: Num[NumpyArray, " changes"]  # ascending for each worker
    part: Int[NumpyArray, " changes"]
    stage: Int[NumpyArray, " changes"]  # stage of the activation: its index among sizes
    change: Int[NumpyArray, " changes"]  # change of the count of that part
    # no other change of the worker follows at that time: ops free before others take
    is_last_at_time: Bool[NumpyArray, " changes"]
    items: tuple[float, ...] = ()  # sizes of custom items, as shares of a whole activation

    @classmethod
    def from_ops(
        cls, ops: HeldOps, grammar: Grammar = USUAL, *, at_work: bool = False
    ) -> "HeldParts":
        """Apply the memory ledger to ops; `at_work` adds parts that backwards recompute alone."""
        ledger = dict(memory_ledger(grammar.op_phases))
        if at_work:
            ledger |= {phase: ledger[phase] + entries for phase, entries in RECOMPUTED.items()}
        return cls._from_ledger(ops, ledger, (*grammar.items.values(),))

    @classmethod
    def from_gathers(cls, ops: HeldOps) -> "HeldParts":
        """Count gathered weights of stages, by UNSHARD and RESHARD ops."""
        return cls._from_ledger(ops, GATHERED, ())

    @classmethod
    def _from_ledger(
        cls,
        ops: HeldOps,
        ledger: Mapping[AnyPhase, tuple[LedgerEntry, ...]],
        items: tuple[float, ...],
    ) -> "HeldParts":
        """Return the changes that the ledger's entries make at the starts and ends of ops."""
        changes: list[tuple[NumpyArray, ...]] = []
        for phase, entries in ledger.items():
            phase_ops = HeldOps(*(field[ops.phase == phase] for field in ops))
            left_by_f = np.where(phase_ops.recomputed, CHECKPOINT, WHOLE)
            for entry in entries:
                is_left = entry.part == LEFT_BY_F
                parts = left_by_f if is_left else np.full_like(left_by_f, entry.part)
                time = phase_ops.end if entry.moment == END else phase_ops.start
                change = np.full_like(parts, entry.change)
                changes.append((phase_ops.worker, time, parts, phase_ops.stage, change))
        columns = [np.concatenate(column) for column in zip(*changes, strict=True)]
        # the sort is stable: at one time of a worker, entries keep the order of the ledger
        order = np.lexsort((columns[1], columns[0]))
        worker, time, part, stage, change = (column[order] for column in columns)
        is_followed = (worker[1:] == worker[:-1]) & (time[1:] == time[:-1])
        is_last_at_time = np.append(~is_followed, True)[: len(order)]
        return cls(worker, time, part, stage, change, is_last_at_time, items)

    def levels(self, sizes: Num[NumpyArray, "parts stages"]) -> Num[NumpyArray, " levels"]:
        """Return the memory of the worker after the last change at each time."""
        # Returns (levels) in the unit of `sizes`, which are sizes of the parts of activations.
        # Sum counts of each size, not sizes: counts are exact, so the level is 0 when all is freed.
        #   worker 0 0 1 1, change 1 -1 1 1: counts 1 0 1 2, less those of earlier workers
        size = with_items(sizes, self.items)[self.part, self.stage]
        levels = np.zeros(len(size), size.dtype)
        first_change = np.searchsorted(self.worker, self.worker)  # of the same worker
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
        """Return the largest memory of each worker: (workers), in the unit of `sizes`."""
        peak = np.zeros(num_workers, sizes.dtype)
        np.maximum.at(peak, self.worker[self.is_last_at_time], self.levels(sizes))
        return peak
