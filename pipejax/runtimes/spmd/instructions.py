"""Integer instructions for devices in lockstep: ops and arriving messages of each slot.

A slot ends with messages to all, so an op stands in the first slot after those of its inputs and of
the previous op on its worker: a longest path with one slot per cell.

Every buffer of a worker has an entry for each stage copy and microbatch, and a last one for unused
values. So instructions need no conditions: an op without a result writes to the last entry.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.longest_path import run_edges
from pipejax.schedules.cells.cells import NOWHERE, HeldCells
from pipejax.schedules.cells.dependencies import cell_edges, find_versions
from pipejax.schedules.cells.ops import (
    CELL_PHASES,
    COMMUNICATION,
    INPUT_GRADS,
    SHARDING,
    WEIGHT_GRADS,
    Phase,
)
from pipejax.schedules.table.held_activations import is_recomputed
from pipejax.schedules.table.table import ScheduleTable, without

# what a device can do, by number; MEAN averages the weights of all runs after the last update of
# a round
CODES = (Phase.IDLE, Phase.F, Phase.B, Phase.I, Phase.W, Phase.R, Phase.O, Phase.L, Phase.U)
MEAN = len(CODES)
LEFT_OUT = {  # phases of cells that are not executed, and why
    **dict.fromkeys(COMMUNICATION, "a slot ends with its messages, in no order"),
    **dict.fromkeys(SHARDING, "parameters are not sharded"),
    Phase.WAIT_O: "an offload ends in its slot",
}
_OTHERS = [phase for phase in CELL_PHASES if phase not in {*CODES, *LEFT_OUT}]
LEFT_OUT |= dict.fromkeys(_OTHERS, "no device can do it")


class SpmdSizes(NamedTuple):
    """Sizes for which a program is compiled; it can also run smaller tables."""

    workers: int  # P, devices
    slots: int  # lockstep slots
    microbatches: int  # M
    places: int  # entries of a worker's buffers, without the last
    weights: int  # versions of weights that a worker holds over the whole table
    totals: int  # sums of gradients that a worker holds
    runs: int  # R, models that are trained side by side
    activation_shifts: tuple[int, ...]  # distances modulo P, one ppermute each
    gradient_shifts: tuple[int, ...]  # the same of input gradients

    @classmethod
    def joined(cls, sizes: Iterable["SpmdSizes"]) -> "SpmdSizes":
        """Return sizes that fit all given sizes, which must have the same number of workers."""
        *sizes_by_field, activations, gradients = zip(*sizes, strict=True)
        shifts = (tuple(sorted({*itertools.chain(*sets)})) for sets in (activations, gradients))
        return cls(*map(max, sizes_by_field), *shifts)


class Instructions(NamedTuple):
    """Instructions by slot, worker and step; a fused pair has two steps, other ops have one."""

    code: Int[NumpyArray, "slots workers steps"]  # which of `CODES`, or `MEAN`
    read: Int[NumpyArray, "slots workers steps"]  # activation that is read
    write: Int[NumpyArray, "slots workers steps"]  # where it is kept
    free: Int[NumpyArray, "slots workers steps"]  # activation that is dropped
    # of stage and microbatch in the other buffers
    place: Int[NumpyArray, "slots workers steps"]
    seed: Int[NumpyArray, "slots workers steps"]  # of the gradient of the loss
    microbatch: Int[NumpyArray, "slots workers steps"]  # whose loss that is
    weight: Int[NumpyArray, "slots workers steps"]  # version of the weights that is read
    newest: Int[NumpyArray, "slots workers steps"]  # version that an update makes
    # sum of the gradients that the next update applies
    total: Int[NumpyArray, "slots workers steps"]
    collected: Int[NumpyArray, "slots workers steps"]  # gradients in it; of a mean, runs
    sum: Int[NumpyArray, "slots workers steps"]  # sum of all gradients of that copy of the stage
    activation_to: Int[NumpyArray, "slots workers shifts"]  # where an activation that arrives goes
    # place of an arriving input gradient
    gradient_to: Int[NumpyArray, "slots workers shifts"]


def without_skipped_cells(table: ScheduleTable) -> ScheduleTable:
    """Remove the cells of a table that this runtime does not execute."""
    return without(table, tuple(LEFT_OUT))


def lockstep_slots(table: ScheduleTable) -> Int[NumpyArray, " cells"]:
    """Return the lockstep slot of each cell: the first one after all cells it waits for."""
    start, _ = run_edges(*cell_edges(table), np.ones(table.phase.size))
    return start.astype(np.int32)


class StageCopies(NamedTuple):
    """Index of each stage copy on its worker, and place of its weight versions."""

    # Two pipes may place a stage on one worker: they share the copy.

    number: Int[NumpyArray, "workers stages"]  # number of the copy on its worker, or `NOWHERE`
    version: Int[NumpyArray, "workers stages"]  # first of all runs side by side, version by version
    versions: Int[NumpyArray, "workers stages"]  # versions of each run

    @classmethod
    def from_table(cls, table: ScheduleTable) -> "StageCopies":
        """Number the stage copies of each worker, in the order of stages."""
        is_held = np.zeros((table.num_workers, table.num_stages), bool)
        is_held[table.placement, np.arange(table.num_stages)[None]] = True
        versions = np.ones(is_held.shape, np.int64)
        worker = table.placement[table.pipe_of_microbatch].T  # (stages, microbatches)
        stage = np.arange(table.num_stages)[:, None]
        np.maximum.at(versions, (worker, stage), 1 + find_versions(table).updates)
        versions[~is_held] = 0
        # A worker that holds stages 0 and 2 of 4, with 3 and 2 versions:
        #   is_held 1 0 1 0 -> number 0 - 1 -;  versions 3 0 2 0 -> first 0 3 3 5
        # (times the models that are trained side by side)
        number = np.where(is_held, np.cumsum(is_held, axis=1) - 1, NOWHERE)
        first = (np.cumsum(versions, axis=1) - versions) * table.weights.runs
        return cls(number, first, versions)


def sizes_for(table: ScheduleTable, workers: int) -> SpmdSizes:
    """Return the sizes of a program for a table on `workers` devices, at least its workers."""
    copies, runs = StageCopies.from_table(table), table.weights.runs
    num_copies = int(copies.number.max()) + 1  # of a worker, at most
    hop = np.diff(table.placement, axis=1) if table.num_stages > 1 else np.zeros((1, 0), int)
    return SpmdSizes(
        workers=workers,
        slots=int(lockstep_slots(without_skipped_cells(table)).max()) + 1,
        microbatches=table.num_microbatches,
        places=num_copies * table.num_microbatches,
        weights=int(copies.versions.sum(axis=1).max()) * runs,
        totals=num_copies * runs,
        runs=runs,
        activation_shifts=tuple(sorted({*(hop % workers).ravel().tolist()})),
        gradient_shifts=tuple(sorted({*(-hop % workers).ravel().tolist()})),
    )


def instruct(table: ScheduleTable, sizes: SpmdSizes) -> Instructions:
    """Write the instructions of a table for a program compiled for given sizes."""
    table = without_skipped_cells(table)
    shape = sizes.slots, sizes.workers
    unused = {  # spare entries, which nothing reads
        "code": 0,
        **dict.fromkeys(("read", "write", "free", "activation_to"), 2 * sizes.places),
        **dict.fromkeys(("place", "seed", "gradient_to"), sizes.places),
        **dict.fromkeys(("weight", "newest"), sizes.weights),
        **dict.fromkeys(("total", "sum"), sizes.totals),
        "microbatch": sizes.microbatches,
        "collected": 1,
    }
    lanes = {
        "activation_to": len(sizes.activation_shifts),
        "gradient_to": len(sizes.gradient_shifts),
    }
    blank = {
        name: np.full((*shape, lanes.get(name, 2)), unused[name], np.int32)
        for name in Instructions._fields
    }
    written = Instructions(**blank)
    _write_ops(table, sizes, written)
    _write_updates(table, written)
    _write_messages(table, sizes, written)
    return written


class _PlacedOps(NamedTuple):
    """Ops of a table with their slots, workers and buffer entries."""

    ops: HeldCells
    at: tuple[NumpyArray, NumpyArray, NumpyArray]  # slot, worker, step
    copy: Int[NumpyArray, " ops"]
    place: Int[NumpyArray, " ops"]

    def take(self, which: NumpyArray) -> "_PlacedOps":
        at = self.at[0][which], self.at[1][which], self.at[2][which]
        return _PlacedOps(self.ops.take(which), at, self.copy[which], self.place[which])


def _place_ops(table: ScheduleTable) -> _PlacedOps:
    ops = table.ops
    worker = ops.cell // table.num_slots
    step = (np.arange(len(ops.cell)) >= np.count_nonzero(table.phase)).astype(np.int32)
    copy = StageCopies.from_table(table).number[worker, ops.stage]
    place = copy * table.num_microbatches + ops.microbatch
    return _PlacedOps(ops, (lockstep_slots(table)[ops.cell], worker, step), copy, place)


def _write_ops(table: ScheduleTable, sizes: SpmdSizes, written: Instructions) -> None:
    """Write the buffer entries that each op reads, stores and frees, and its weight version."""
    # The buffer holds arrived activations, then the inputs of later backwards. A recomputed
    # activation stays at its arrival until R; O and L move the output of F.
    placed, versions, runs = _place_ops(table), find_versions(table), table.weights.runs
    ops, copies = placed.ops, StageCopies.from_table(table)
    needs_recompute = is_recomputed(table)[ops.stage, ops.microbatch]
    arrived, backward_place = placed.place, placed.place + sizes.places
    after_forward = np.where(needs_recompute, arrived, backward_place)
    run = ops.microbatch % runs
    read_weight = copies.version[placed.at[1], ops.stage]
    read_weight = read_weight + versions.read[ops.stage, ops.microbatch] * runs + run

    def put(
        name: str, phases: Iterable[Phase], values: NumpyArray, mask: NumpyArray | bool = True
    ) -> None:
        """Write values to a field of the instructions, for masked ops of the given phases."""
        is_selected = np.isin(ops.phase, [*phases]) & mask
        getattr(written, name)[placed.take(is_selected).at] = values[is_selected]

    backward = Phase.B, Phase.I, Phase.W
    codes = np.zeros(len(Phase), np.int32)
    codes[list(CODES)] = np.arange(len(CODES))
    put("code", CODES, codes[ops.phase])
    put("place", CODES, placed.place)
    put("weight", (Phase.F, *backward), read_weight)
    put("read", (Phase.F, Phase.R), arrived)
    put("read", backward, backward_place)
    put("read", (Phase.O,), after_forward)
    put("write", (Phase.F,), backward_place, ~needs_recompute)
    put("write", (Phase.R,), backward_place)
    put("write", (Phase.L,), after_forward)
    put("free", (Phase.F,), arrived, ~needs_recompute)
    put("free", (Phase.R,), arrived)
    put("free", WEIGHT_GRADS, backward_place)
    put("free", (Phase.O,), after_forward)
    is_last = ops.stage == table.num_stages - 1
    put("seed", (Phase.F,), placed.place, is_last)
    put("microbatch", (Phase.F,), ops.microbatch, is_last)
    put("total", (*WEIGHT_GRADS, Phase.U), placed.copy * runs + run)
    put("sum", WEIGHT_GRADS, placed.copy)


def _write_updates(table: ScheduleTable, written: Instructions) -> None:
    """Write which versions each update reads and makes, and how many gradients it applies."""
    if not table.updates_within:
        return
    placed, runs = _place_ops(table), table.weights.runs
    updates = placed.take(placed.ops.phase == Phase.U)
    ops, worker = updates.ops, updates.at[1]
    applied = find_versions(table).applied  # number of the update, (stages, microbatches)
    number, run = applied[ops.stage, ops.microbatch], ops.microbatch % runs
    # an update applies the gradients with its number, of its run, on its worker
    on_worker = table.placement[table.pipe_of_microbatch].T  # (stages, microbatches)
    microbatch_run = np.arange(table.num_microbatches) % runs
    applies = (applied[ops.stage] == number[:, None]) & (on_worker[ops.stage] == worker[:, None])
    applies &= microbatch_run == run[:, None]
    # version v of run r stands at first + v * runs + r
    first = StageCopies.from_table(table).version[worker, ops.stage]
    written.weight[updates.at] = first + number * runs + run
    written.newest[updates.at] = first + (number + 1) * runs + run
    written.collected[updates.at] = applies.sum(axis=1)
    if runs > 1:
        _write_means(table, updates, number, written)


def _write_means(
    table: ScheduleTable,
    updates: _PlacedOps,
    number: Int[NumpyArray, " updates"],
    written: Instructions,
) -> None:
    """Write the averaging of models after each round of LocalSGD, except the last round."""
    # all runs have the same newest version then, so their models are contiguous
    rule, ops, (slot, worker, _) = table.weights, updates.ops, updates.at
    rounds = ops.microbatch // rule.round_size
    kinds = np.stack([worker, ops.stage, rounds])  # of a copy of a stage in a round
    for kind in np.unique(kinds[:, rounds < rounds.max()], axis=1).T:
        members = np.flatnonzero((kinds == kind[:, None]).all(axis=0))
        newest = np.full(rule.runs, NOWHERE)
        np.maximum.at(newest, ops.microbatch[members] % rule.runs, number[members])
        if len(np.unique(newest)) > 1:
            raise ValueError(
                f"{table.name} averages runs that do not have equal numbers of updates"
            )
        last = members[np.argmax(slot[members])]
        at = slot[last], worker[last], 1
        first = StageCopies.from_table(table).version[worker[last], ops.stage[last]]
        written.code[at] = MEAN
        written.weight[at] = first + (newest[0] + 1) * rule.runs
        written.collected[at] = rule.runs


def _write_messages(table: ScheduleTable, sizes: SpmdSizes, written: Instructions) -> None:
    """Write where each receiver stores the messages that arrive at the end of a slot."""
    # A worker sends at most one activation and one input gradient per slot, to a worker at one of
    # the distances in `shifts`; each distance has a lane, because it is a ppermute of its own.
    placed = _place_ops(table)
    for phases, hop, field, shifts in (
        ((Phase.F,), 1, written.activation_to, sizes.activation_shifts),
        (INPUT_GRADS, -1, written.gradient_to, sizes.gradient_shifts),
    ):
        has_target = (placed.ops.stage + hop >= 0) & (placed.ops.stage + hop < table.num_stages)
        ops, (slot, worker, _) = placed.take(np.isin(placed.ops.phase, phases) & has_target)[:2]
        stage = ops.stage + hop
        receiver = table.placement[ops.pipe, stage]
        lane = np.searchsorted(shifts, (receiver - worker) % sizes.workers)
        copy = StageCopies.from_table(table).number[receiver, stage]
        # a receiver's buffer has a place for each microbatch, once for each copy of a stage
        field[slot, receiver, lane] = copy * table.num_microbatches + ops.microbatch
