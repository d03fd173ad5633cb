"""The memory ledger: what each op does to the activation memory of its worker, and when.

Whatever counts memory reads this one table: runs in time, the counts of rows that sweeps price, the
optimizer and the heuristics. It counts parts of activations in whole numbers, and a level is the
sum of count times size, so it is exactly 0 where all is released.
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
WEIGHT_SHARE = 1 / 3  # of an activation, that W needs after I, where no layer says how much

START, END = 0, 1  # of an op
MANY_SIZES = 64  # different ones, from which each worker is gone through by itself

Size = TypeVar("Size", float, NumpyArray)


class LedgerEntry(NamedTuple):
    """One entry of the ledger."""

    moment: int  # `START` or `END` of the op
    part: int  # what is taken or freed
    change: int  # how many more of it the worker holds from then on


def memory_ledger(phases: Iterable[AnyPhase]) -> Mapping[AnyPhase, tuple[LedgerEntry, ...]]:
    """List what phases take and free."""
    return {
        phase: tuple(
            LedgerEntry(moment, part, change)
            for moment, changes in ((START, phase.kind.at_start), (END, phase.kind.at_end))
            for part, change in changes.items()
        )
        for phase in phases
        if phase.kind.at_start or phase.kind.at_end
    }


# weights of a stage that are gathered from their shards: in a unit of their own
GATHERED: Mapping[AnyPhase, tuple[LedgerEntry, ...]] = {
    Phase.UNSHARD: (LedgerEntry(START, WHOLE, 1),),
    Phase.RESHARD: (LedgerEntry(END, WHOLE, -1),),
}


# what a backward recomputes by itself, without R
RECOMPUTED: Mapping[AnyPhase, tuple[LedgerEntry, ...]] = {
    phase: (LedgerEntry(START, part, 1), LedgerEntry(END, part, -1))
    for phase, part in zip(BACKWARDS, AT_WORK, strict=True)
}


def held_change(phase: Phase, moment: int, *, whole: Size, for_w: Size) -> Size:
    """Change of what a worker holds from that moment on, where nothing is recomputed."""
    size = {WHOLE: whole, LEFT_BY_F: whole, FOR_W: for_w}
    entries = (entry for entry in memory_ledger([phase]).get(phase, ()) if entry.moment == moment)
    return sum((entry.change * size[entry.part] for entry in entries), start=0 * whole)


def is_in_ledger(content: Content) -> Bool[NumpyArray, " ops"]:
    """Return whether each op of a table takes or frees memory (ops)."""
    return np.isin(content.ops.phase, list(memory_ledger(content.grammar.known)))


def with_items(
    sizes: Num[NumpyArray, "parts stages"], items: Sequence[float]
) -> Num[NumpyArray, "more stages"]:
    """Sizes of activation parts, then of items, which are shares of the whole."""
    # An item of a worker, and of no stage, is a share of an activation of the last stage.
    return np.concatenate([sizes, *(share * sizes[None, WHOLE] for share in items)])


def is_recomputed(content: Content) -> Bool[NumpyArray, "stages microbatches"]:
    """Return whether an op recomputes the activation (stages, microbatches)."""
    again = [content.where[phase] != NOWHERE for phase in content.grammar.recomputing]
    return np.logical_or.reduce(again)


class HeldOps(NamedTuple):
    """Ops that take or free memory."""

    phase: Int[NumpyArray, " ops"]  # phase code
    stage: Int[NumpyArray, " ops"]
    worker: Int[NumpyArray, " ops"]
    recomputed: Bool[NumpyArray, " ops"]  # whether R brings back what F does not leave
    start: Num[NumpyArray, " ops"]  # start, in any unit of time; in row order the slot
    end: Num[NumpyArray, " ops"]

    @classmethod
    def of(cls, content: Content) -> "HeldOps":
        """List the ops of a table, fused pairs included: each lasts one slot."""
        return cls._of(content, content.ops.take(is_in_ledger(content)))

    @classmethod
    def gathering(cls, content: Content) -> "HeldOps":
        """List the ops that gather and drop weights of stages: each lasts one slot."""
        return cls._of(content, content.ops.take(np.isin(content.ops.phase, [*GATHERED])))

    @classmethod
    def _of(cls, content: Content, ops: HeldCells) -> "HeldOps":
        recomputed = is_recomputed(content)[ops.stage, ops.microbatch]
        worker, slot = np.divmod(ops.cell, content.num_slots)
        return cls(ops.phase, ops.stage, worker, recomputed, slot, slot + 1)


class HeldParts(NamedTuple):
    """Changes of what workers hold, by worker, then time."""

    worker: Int[NumpyArray, " changes"]  # ascending
    time: Num[NumpyArray, " changes"]  # ascending for each worker
    part: Int[NumpyArray, " changes"]
    stage: Int[NumpyArray, " changes"]  # stage of the activation: its place among sizes
    change: Int[NumpyArray, " changes"]  # how many more are held
    # no other change of the worker follows at that time: releases come before takes
    settled: Bool[NumpyArray, " changes"]
    items: tuple[float, ...] = ()  # sizes of own items, as shares of a whole activation

    @classmethod
    def of(cls, ops: HeldOps, grammar: Grammar = USUAL, *, at_work: bool = False) -> "HeldParts":
        """Follow ops through the ledger; `at_work` adds what backwards recompute by themselves."""
        ledger = dict(memory_ledger(grammar.known))
        if at_work:
            ledger |= {phase: ledger[phase] + more for phase, more in RECOMPUTED.items()}
        return cls._of(ops, ledger, (*grammar.items.values(),))

    @classmethod
    def gathered(cls, ops: HeldOps) -> "HeldParts":
        """Follow gathered weights through theirs, as the whole of what a stage has."""
        return cls._of(ops, GATHERED, ())

    @classmethod
    def _of(
        cls,
        ops: HeldOps,
        ledger: Mapping[AnyPhase, tuple[LedgerEntry, ...]],
        items: tuple[float, ...],
    ) -> "HeldParts":
        changes: list[tuple[NumpyArray, ...]] = []
        for phase, entries in ledger.items():
            phase_ops = HeldOps(*(field[ops.phase == phase] for field in ops))
            stays = np.where(phase_ops.recomputed, CHECKPOINT, WHOLE)  # what F leaves
            for entry in entries:
                parts = stays if entry.part == LEFT_BY_F else np.full_like(stays, entry.part)
                at = phase_ops.end if entry.moment == END else phase_ops.start
                change = np.full_like(stays, entry.change)
                changes.append((phase_ops.worker, at, parts, phase_ops.stage, change))
        columns = [np.concatenate(column) for column in zip(*changes, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        worker, time, part, stage, change = (column[order] for column in columns)
        goes_on = (worker[1:] == worker[:-1]) & (time[1:] == time[:-1])
        is_last_at_time = np.append(~goes_on, True)[: len(order)]
        return cls(worker, time, part, stage, change, is_last_at_time, items)

    def levels(self, sizes: Num[NumpyArray, "parts stages"]) -> Num[NumpyArray, " levels"]:
        """Return what the worker holds after each settled change, (levels) in the unit of sizes."""
        # Counts are summed, not sizes: they are exact, and 0 again where all was freed.
        size = with_items(sizes, self.items)[self.part, self.stage]
        held = np.zeros(len(size), size.dtype)
        first = np.searchsorted(self.worker, self.worker)  # of the same worker; it begins with 0
        ends = [len(size)]
        if len(np.unique(size)) > MANY_SIZES:  # each is of one worker or of few
            ends = [*np.flatnonzero(np.diff(self.worker)) + 1, len(size)]
        for part in (slice(*pair) for pair in itertools.pairwise([0, *ends])):
            for value in np.unique(size[part]):
                counts = np.cumsum(np.where(size[part] == value, self.change[part], 0))
                held[part] += value * (counts - np.append(0, counts)[first[part] - part.start])
        return held[self.settled]

    def peaks(
        self, sizes: Num[NumpyArray, "parts stages"], num_workers: int
    ) -> Num[NumpyArray, " workers"]:
        """Return the peak of each worker, (workers) in the unit of sizes."""
        peak = np.zeros(num_workers, sizes.dtype)
        np.maximum.at(peak, self.worker[self.settled], self.levels(sizes))
        return peak
