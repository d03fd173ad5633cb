"""Seq1F1B, TeraPipe, SlimPipe and chunked prefill: microbatches pass in slices of their sequences.

A slice of a microbatch attends to all earlier slices, so forwards go from the first slice to the
last, backwards from the last to the first. A slice is the K-th part of a microbatch: idle time at
both ends of a step and memory of the warm-up shrink with it.
"""

import numpy as np

from pipejax.base.checks import MismatchError
from pipejax.schedules.builders.one_f_one_b import (
    Ops,
    Turns,
    alternate,
    check_stages_per_worker,
    phase_ops,
)
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.cells.ops import UNIT_SLOTS, Phase, Slots
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable


def seq_1f1b(
    num_workers: int, num_microbatches: int, *, slices: int = 2, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """1F1B of slices: worker r holds at most P - r - 1 + K slices, as 1F1B (P - r) K.

    The first backward is that of the last slice of a microbatch, so a worker warms up with K - 1
    forwards more than one of 1F1B.

    Options:
      slices: K, slices of a microbatch.
    """
    grammar, rows = Grammar(slices=slices), []
    turns = Turns.from_sizes(num_workers, slices, 1)
    for r in range(num_workers):
        forwards, backwards = _slice_ops(turns, r, num_microbatches, slices)
        rows.append(alternate(forwards, backwards, num_workers - r - 2 + slices))
    return spread_rows("seq-1f1b", rows, slots, grammar=grammar)


def terapipe(
    num_workers: int, num_microbatches: int, *, slices: int = 2, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """GPipe of slices: all forwards, then all backwards; holds every microbatch.

    Options:
      slices: K, slices of a microbatch.
    """
    turns = Turns.from_sizes(num_workers, slices, 1)
    rows = [
        np.concatenate(_slice_ops(turns, r, num_microbatches, slices)) for r in range(num_workers)
    ]
    return spread_rows("terapipe", rows, slots, grammar=Grammar(slices=slices))


def slimpipe(
    num_workers: int,
    num_microbatches: int,
    *,
    slices: int | None = None,
    stages_per_worker: int = 2,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Interleaved 1F1B of slices: a worker holds a P-th of one microbatch, and a rest.

    Slices of a microbatch pass V stages of each worker in groups of P, and go back in the reverse
    order. So its first backward follows the forwards of all its slices on all stages, and worker r
    holds K V + 2 (P - r - 1) slices of a stage: with M_a bytes of a microbatch on all stages,
    M_a / P (1 + 2 (P - 1) / (K V)) on the first worker, for any number of microbatches.

    Workers that exchange queries, keys and values share the work of attention. Then all slices
    take the same time, which is also the default of a table's times.

    Options:
      slices: K, slices of a microbatch, a multiple of P; P if None.
      stages_per_worker: V, at least 2.
    """
    slices = num_workers if slices is None else slices
    check_stages_per_worker("slimpipe", stages_per_worker, "seq-1f1b")
    if slices % num_workers:
        raise MismatchError(
            f"slices must be a multiple of the workers ({num_workers}), got {slices}: they pass "
            "in groups of one for each worker",
            "slices",
        )
    rows = []
    turns = Turns.from_sizes(num_workers, slices, stages_per_worker)
    for r in range(num_workers):
        forwards, backwards = _slice_ops(turns, r, num_microbatches, slices)
        warmup = slices * stages_per_worker - 1 + 2 * (num_workers - r - 1)
        rows.append(alternate(forwards, backwards, warmup))
    placement = looped(num_workers, stages_per_worker)
    return spread_rows("slimpipe", rows, slots, placement, grammar=Grammar(slices=slices))


def chunked_prefill(
    num_workers: int, num_microbatches: int, *, slices: int = 4, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """Prompts in chunks, one behind the other, forwards alone: prefill of an inference server.

    Chunks are slices, of any sizes: `pj.costing.chunk_costs` times them, `pj.search.chunks` cuts a
    prompt so that its first token comes soonest.

    Options:
      num_microbatches: M, prompts.
      slices: K, chunks of a prompt.
      slots: slot duration of F of a chunk.
    """
    chunks = range(num_microbatches * slices)
    rows = [phase_ops(Phase.F, r, chunks) for r in range(num_workers)]
    grammar = Grammar(slices=slices, forward_only=True)
    return spread_rows("chunked-prefill", rows, slots, grammar=grammar)


def _slice_ops(turns: Turns, worker: int, num_microbatches: int, slices: int) -> list[Ops]:
    """Return forwards and backwards of a worker's slices, microbatch by microbatch."""
    # `turns` are the turns of the slices of one microbatch; backwards take them in reverse.
    first_slices = slices * np.arange(num_microbatches)
    ops = []
    for phase, step in ((Phase.F, 1), (Phase.B, -1)):
        stage = np.tile(turns.loop[::step], num_microbatches) * turns.num_workers + worker
        slice_index = np.add.outer(first_slices, turns.microbatch[::step]).ravel()
        ops.append(phase_ops(phase, stage, slice_index))
    return ops
