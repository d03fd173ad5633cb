"""Vocabulary parallelism: every worker has a part of the output layer, and passes of its own.

What the last stage makes of a microbatch is broadcast (X); every worker computes its part of the
logits (S); they are put together (Y); a second pass (T) makes gradients. In the second variant S
has made the gradient of the input already, Y sums it up, and T makes that of the weights alone; in
the first T makes both, and a second reduction (Z) comes before the backward of the last stage.

For each reduction a microbatch stays an interval longer between its last forward and its first
backward. So it can be put into any schedule that repeats a block: backwards come so many intervals
later, and S and T where they fall due. The passes of the input layer, which take little and which
nothing but the first forward waits for, are left out.
"""

from collections.abc import Mapping

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import resolve_choice
from pipejax.schedules.builders.one_f_one_b import Ops, one_f_one_b, phase_ops
from pipejax.schedules.builders.v_shape import v_half
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.cells.ops import (
    INPUT_GRADS,
    NETWORK,
    NO_STAGE,
    UNIT_SLOTS,
    WORKER,
    AnyPhase,
    OpKind,
    Phase,
    Slots,
)
from pipejax.schedules.table.slot_simulation import durations, slot_times, spread_rows
from pipejax.schedules.table.table import ScheduleTable

_KINDS = {
    "X": OpKind("broadcast", "x", NETWORK, WORKER, together=True, look=("#C186B2",)),
    "S": OpKind("vocabulary", "s", of=WORKER, look=("#F9F08F",)),
    "Y": OpKind("reduce", "y", NETWORK, WORKER, together=True, look=("#87647E",)),
    "T": OpKind("vocabulary back", "t", of=WORKER, look=("#AC9C38",)),
}
_AGAIN = {"Z": OpKind("reduce gradient", "z", NETWORK, WORKER, together=True, look=("#5A4153",))}
_RULES = ("X <- F@last", "S <- X", "Y <- S", "T <- Y")


# of each kind: when it is due on a worker, by microbatch, and its place at one moment
Passes = Mapping[AnyPhase, tuple[Float[NumpyArray, " microbatches"], int]]


def _variant(
    kinds: Mapping[str, OpKind], rules: tuple[str, ...], last: str
) -> tuple[Mapping[Phase, Grammar], int]:
    """Grammars by the phase of input gradients, and reductions before a backward."""
    grammars = {
        phase: Grammar(kinds=kinds, rules=(*_RULES, *rules, f"{phase.name}@last <- {last}"))
        for phase in INPUT_GRADS
    }
    return grammars, 1 + len(rules)


VARIANTS = {1: _variant({**_KINDS, **_AGAIN}, ("Z <- T",), "Z"), 2: _variant(_KINDS, (), "Y")}


def vocabulary_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    variant: int = 2,
    overlap: bool = False,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B over a vocabulary that all workers share; worker r holds P - r and 1 or 2 more.

    Options:
      variant: 1 has two reductions before a backward and holds two microbatches more, 2 has one.
      overlap: whether passes stand behind a backward of the last stage, T beside the next S, as in
        the authors' schedules, so that compute hides exchanges; else S stands right behind its
        forward, and T of the second variant behind the backward of its worker.
      slots: slot durations of F and B, for which the order is made.
    """
    table = one_f_one_b(num_workers, num_microbatches, slots=slots)
    return _with_vocabulary("vocabulary-1f1b", table, Phase.B, variant, overlap)


def vocabulary_v_half(
    num_workers: int,
    num_microbatches: int,
    *,
    variant: int = 2,
    overlap: bool = False,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """V-Half over a vocabulary that all workers share; every worker holds 1 or 2 more.

    Options:
      variant: as of `vocabulary-1f1b`.
      overlap: as of `vocabulary-1f1b`.
      slots: slot durations of F, I and W, for which the order is made.
    """
    table = v_half(num_workers, num_microbatches, slots=slots)
    return _with_vocabulary("vocabulary-v-half", table, Phase.I, variant, overlap)


def _with_vocabulary(
    name: str, table: ScheduleTable, gradient: Phase, variant: int, overlap: bool
) -> ScheduleTable:
    """Let backwards come later, and put passes and exchanges between the ops of every worker."""
    grammars, reductions = VARIANTS[resolve_choice(variant, tuple(VARIANTS), "variant")]
    grammar, (start, finish) = grammars[gradient], slot_times(table)
    interval = durations(table)[0].sum() / table.num_microbatches
    later = reductions * interval
    due, ended = start + later * (table.phase != Phase.F), finish.ravel()
    forward_end, backward_end = (ended[table.where[phase][-1]] for phase in (Phase.F, gradient))
    if overlap:  # as there, where the last stage goes back at once
        forward_end = forward_end + (backward_end - start.ravel()[table.where[gradient][-1]])
    rows = []
    for w in range(table.num_workers):
        # at one moment exchanges and passes stand before ops, T before S where it makes room
        passes = {"X": (forward_end, 0), "S": (forward_end, 2), "Y": (forward_end, 4)}
        passes |= {"T": (forward_end + interval, 1), "Z": (forward_end + interval, 3)}
        if reductions == 1:
            last_backward = ended[table.last_of_backward[table.placement[0] == w]].max(axis=0)
            passes |= {} if overlap else {"T": (last_backward + later, 4)}
            del passes["Z"]
        codes = {grammar.by_letters[x]: place for x, place in passes.items()}
        rows.append(_merged(table, w, due[w], codes))
    return spread_rows(name, rows, table.slots, table.placement, grammar=grammar)


def _merged(
    table: ScheduleTable, worker: int, due: Float[NumpyArray, " slots"], passes: Passes
) -> Ops:
    """Order the ops of a worker and its passes by the time at which each is due."""
    slots = np.flatnonzero(table.phase[worker])
    ops = [np.stack([field[worker, slots] for field in table.cells[:3]], axis=1)]
    moments = [np.stack([due[slots], np.full(len(slots), len(Phase))])]
    for code, (at, rank) in passes.items():
        ops.append(phase_ops(code, NO_STAGE, range(len(at))))
        moments.append(np.stack([at, np.full(len(at), rank)]))
    time, rank = np.concatenate(moments, axis=1)
    return np.concatenate(ops)[np.lexsort((rank, time))]
