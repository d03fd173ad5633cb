"""Integer instructions for devices in lockstep: ops and arriving messages of each slot.

A slot ends with the messages of all devices. So an op is in the first slot after the slots of its
inputs and of the previous op on its worker, and slots are longest paths with one slot per cell.

A buffer of a worker has an entry for each stage copy and microbatch, and a spare last entry. So
instructions need no conditions: an op without a result writes to the spare entry.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.longest_path import run_edges
from pipejax.schedules.cells.cells import NOWHERE, HeldCells
from pipejax.schedules.cells.dependencies import cell_edges
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

# ops of a device; the index is the code. A U takes a slot, but changes no weights at step size 0.
CODES = (Phase.IDLE, Phase.F, Phase.B, Phase.I, Phase.W, Phase.R, Phase.O, Phase.L)
LEFT_OUT = {  # phase -> reason why its cells are not executed
    **dict.fromkeys(COMMUNICATION, "a slot ends with its messages, in no order"),
    **dict.fromkeys(SHARDING, "parameters are not sharded"),
    Phase.WAIT_O: "an offload ends in its slot",
}
_OTHERS = [phase for phase in CELL_PHASES if phase not in {*CODES, Phase.U, *LEFT_OUT}]
LEFT_OUT |= dict.fromkeys(_OTHERS, "no device can do it")


class SpmdSizes(NamedTuple):
    """Sizes for which a program is compiled; it can also run smaller tables."""

    workers: int  # P, number of devices
    slots: int  # number of lockstep slots
    microbatches: int  # M
    entries: int  # entries of a worker's buffers, without the spare entry
    copies: int  # stage copies of a worker
    activation_shifts: tuple[int, ...]  # distances (mod P) of activations; a ppermute for each
    gradient_shifts: tuple[int, ...]  # distances (mod P) of input gradients

    @classmethod
    def joined(cls, sizes: Iterable["SpmdSizes"]) -> "SpmdSizes":
        """Return sizes for tables of all given sizes, which have equal numbers of workers."""
        *sizes_by_field, activations, gradients = zip(*sizes, strict=True)
        shifts = (tuple(sorted({*itertools.chain(*sets)})) for sets in (activations, gradients))
        return cls(*map(max, sizes_by_field), *shifts)


class Instructions(NamedTuple):
    """Instructions by slot, worker and step; a fused pair has two steps, other ops have one."""

    code: Int[NumpyArray, "slots workers steps"]  # index of the op in `CODES`
    read: Int[NumpyArray, "slots workers steps"]  # entry of the activation to read
    write: Int[NumpyArray, "slots workers steps"]  # entry to which an activation is written
    free: Int[NumpyArray, "slots workers steps"]  # entry of the activation to free
    entry: Int[NumpyArray, "slots workers steps"]  # entry of gradients and of host memory
    seed: Int[NumpyArray, "slots workers steps"]  # entry for the gradient of the loss
    microbatch: Int[NumpyArray, "slots workers steps"]  # microbatch of this loss
    copy: Int[NumpyArray, "slots workers steps"]  # index of the stage copy on the worker
    activation_to: Int[NumpyArray, "slots workers shifts"]  # entry for an arriving activation
    gradient_to: Int[NumpyArray, "slots workers shifts"]  # entry for an arriving input gradient


def lockstep_slots(table: ScheduleTable) -> Int[NumpyArray, " cells"]:
    """Return the lockstep slot of each cell: the first after all cells that the cell waits for."""
    start, _ = run_edges(*cell_edges(table), np.ones(table.phase.size))
    return start.astype(np.int32)


def local_stage_index(table: ScheduleTable) -> Int[NumpyArray, "workers stages"]:
    """Return the index of each stage among the stages of a worker, or `NOWHERE`."""
    # two pipes that place a stage on the same worker share the stage copy
    is_held = np.zeros((table.num_workers, table.num_stages), bool)
    is_held[table.placement, np.arange(table.num_stages)[None]] = True
    return np.where(is_held, np.cumsum(is_held, axis=1) - 1, NOWHERE)


def sizes_for(table: ScheduleTable, workers: int) -> SpmdSizes:
    """Return the sizes of a program that runs a table on `workers` devices."""
    num_copies = int(local_stage_index(table).max()) + 1  # largest number on a worker
    hop = np.diff(table.placement, axis=1) if table.num_stages > 1 else np.zeros((1, 0), int)
    return SpmdSizes(
        workers=workers,
        slots=int(lockstep_slots(without(table, tuple(LEFT_OUT))).max()) + 1,
        microbatches=table.num_microbatches,
        entries=num_copies * table.num_microbatches,
        copies=num_copies,
        activation_shifts=tuple(sorted({*(hop % workers).ravel().tolist()})),
        gradient_shifts=tuple(sorted({*(-hop % workers).ravel().tolist()})),
    )


def instruct(table: ScheduleTable, sizes: SpmdSizes) -> Instructions:
    """Write the instructions of a table for a program compiled for given sizes."""
    table = without(table, tuple(LEFT_OUT))
    shape = sizes.slots, sizes.workers
    unused = {  # spare entries, which no op reads; idle devices use no weights
        **dict.fromkeys(("code", "copy"), 0),
        **dict.fromkeys(("read", "write", "free", "activation_to"), 2 * sizes.entries),
        **dict.fromkeys(("entry", "seed", "gradient_to"), sizes.entries),
        "microbatch": sizes.microbatches,
    }
    shifts = {"activation_to": sizes.activation_shifts, "gradient_to": sizes.gradient_shifts}
    blank = {}
    for name in Instructions._fields:
        length = len(shifts[name]) if name in shifts else 2  # a fused pair has two ops in a slot
        blank[name] = np.full((*shape, length), unused[name], np.int32)
    written = Instructions(**blank)
    _write_ops(table, sizes, written)
    _write_messages(table, sizes, written)
    return written


class _PlacedOps(NamedTuple):
    """Ops of a table with their slots, workers and buffer entries."""

    ops: HeldCells
    at: tuple[NumpyArray, NumpyArray, NumpyArray]  # slot, worker, step
    copy: Int[NumpyArray, " ops"]
    entry: Int[NumpyArray, " ops"]

    def take(self, which: NumpyArray) -> "_PlacedOps":
        at = self.at[0][which], self.at[1][which], self.at[2][which]
        return _PlacedOps(self.ops.take(which), at, self.copy[which], self.entry[which])


def _place_ops(table: ScheduleTable) -> _PlacedOps:
    ops = table.ops
    worker = ops.cell // table.num_slots
    step = (np.arange(len(ops.cell)) >= np.count_nonzero(table.phase)).astype(np.int32)
    copy = local_stage_index(table)[worker, ops.stage]
    entry = copy * table.num_microbatches + ops.microbatch
    return _PlacedOps(ops, (lockstep_slots(table)[ops.cell], worker, step), copy, entry)


def _write_ops(table: ScheduleTable, sizes: SpmdSizes, written: Instructions) -> None:
    """Write the buffer entries that each op reads, stores and frees."""
    # The first half of the buffer has arrived activations, the second half inputs of backwards. A
    # recomputed activation stays in the first half until R. O and L move the entry that F leaves.
    placed = _place_ops(table)
    ops = placed.ops
    needs_recompute = is_recomputed(table)[ops.stage, ops.microbatch]
    arrived, backward_entry = placed.entry, placed.entry + sizes.entries
    after_forward = np.where(needs_recompute, arrived, backward_entry)

    def put(
        name: str, phases: Iterable[Phase], values: NumpyArray, mask: NumpyArray | bool = True
    ) -> None:
        """Write values (ops) to a field of the instructions, for ops of these phases in `mask`."""
        is_selected = np.isin(ops.phase, [*phases]) & mask
        getattr(written, name)[placed.take(is_selected).at] = values[is_selected]

    backward = Phase.B, Phase.I, Phase.W
    codes = np.zeros(len(Phase), np.int32)
    codes[list(CODES)] = np.arange(len(CODES))
    put("code", CODES, codes[ops.phase])
    put("entry", CODES, placed.entry)
    put("copy", CODES, placed.copy)
    put("read", (Phase.F, Phase.R), arrived)
    put("read", backward, backward_entry)
    put("read", (Phase.O,), after_forward)
    put("write", (Phase.F,), backward_entry, ~needs_recompute)
    put("write", (Phase.R,), backward_entry)
    put("write", (Phase.L,), after_forward)
    put("free", (Phase.F,), arrived, ~needs_recompute)
    put("free", (Phase.R,), arrived)
    put("free", WEIGHT_GRADS, backward_entry)
    put("free", (Phase.O,), after_forward)
    is_last = ops.stage == table.num_stages - 1
    put("seed", (Phase.F,), placed.entry, is_last)
    put("microbatch", (Phase.F,), ops.microbatch, is_last)


def _write_messages(table: ScheduleTable, sizes: SpmdSizes, written: Instructions) -> None:
    """Write the entries in which receivers store the messages that arrive at the end of a slot."""
    # A worker sends at most one activation and one input gradient per slot, to a worker at one of
    # the distances in `shifts`. Each distance has a column, because it needs a separate ppermute.
    placed = _place_ops(table)
    for phases, hop, field, shifts in (
        ((Phase.F,), 1, written.activation_to, sizes.activation_shifts),
        (INPUT_GRADS, -1, written.gradient_to, sizes.gradient_shifts),
    ):
        has_target = (placed.ops.stage + hop >= 0) & (placed.ops.stage + hop < table.num_stages)
        ops, (slot, worker, _) = placed.take(np.isin(placed.ops.phase, phases) & has_target)[:2]
        stage = ops.stage + hop
        receiver = table.placement[ops.pipe, stage]
        column = np.searchsorted(shifts, (receiver - worker) % sizes.workers)
        copy = local_stage_index(table)[receiver, stage]
        # the buffer of a receiver has an entry for each stage copy and microbatch
        field[slot, receiver, column] = copy * table.num_microbatches + ops.microbatch
