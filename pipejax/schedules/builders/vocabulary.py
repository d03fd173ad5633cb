"""Vocabulary parallelism: every worker computes a part of the output layer.

The output of the last stage is broadcast (X). Every worker computes its part of the logits (S), a
reduction combines them (Y), and a second pass (T) computes gradients. In variant 2, S also computes
the gradient of the input, Y sums it, and T computes the gradient of the weights alone. In variant
1, T computes both gradients, and a second reduction (Z) precedes the backward of the last stage.

Each reduction delays the first backward of a microbatch by one interval. So any schedule that
repeats a block can be extended: backwards come one interval later for each reduction, and S and T
run when they are due. The passes of the input layer are left out: they are short, and only the
first forward waits for them.
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
    "X": OpKind("broadcast", "x", NETWORK, WORKER, is_collective=True, look=("#C186B2",)),
    "S": OpKind("vocabulary", "s", scope=WORKER, look=("#F9F08F",)),
    "Y": OpKind("reduce", "y", NETWORK, WORKER, is_collective=True, look=("#87647E",)),
    "T": OpKind("vocabulary back", "t", scope=WORKER, look=("#AC9C38",)),
}
_SECOND_REDUCTION = {
    "Z": OpKind("reduce gradient", "z", NETWORK, WORKER, is_collective=True, look=("#5A4153",))
}
_RULES = ("X <- F@last", "S <- X", "Y <- S", "T <- Y")


# by kind of pass: times at which it is due on a worker, and its rank among ops due at one time
Passes = Mapping[AnyPhase, tuple[Float[NumpyArray, " microbatches"], int]]


def _variant(
    kinds: Mapping[str, OpKind], rules: tuple[str, ...], producer: str
) -> tuple[Mapping[Phase, Grammar], int]:
    """Return grammars by the phase of input gradients, and the reductions before a backward."""
    # The backward of the last stage waits for the kind `producer`.
    grammars = {
        phase: Grammar(kinds=kinds, rules=(*_RULES, *rules, f"{phase.name}@last <- {producer}"))
        for phase in INPUT_GRADS
    }
    return grammars, 1 + len(rules)


VARIANTS = {
    1: _variant({**_KINDS, **_SECOND_REDUCTION}, ("Z <- T",), "Z"),
    2: _variant(_KINDS, (), "Y"),
}


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
      variant: 1 has two reductions before a backward and holds two more microbatches, 2 has one.
      overlap: whether passes follow a backward of the last stage, T beside the next S, as in the
        authors' schedules, so that compute hides exchanges; otherwise S follows its forward, and T
        of variant 2 follows the backward of its worker.
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
    """Add vocabulary passes and exchanges to a table, and delay its backwards for them."""
    # `gradient` is the phase of input gradients, B or I.
    grammars, reductions = VARIANTS[resolve_choice(variant, tuple(VARIANTS), "variant")]
    grammar, (start, finish) = grammars[gradient], slot_times(table)
    interval = durations(table)[0].sum() / table.num_microbatches
    delay = reductions * interval
    due, cell_ends = start + delay * (table.phase != Phase.F), finish.ravel()
    last_gradients = table.where[gradient][-1]  # (microbatches) cells of the last stage
    pass_due = cell_ends[table.where[Phase.F][-1]]
    if overlap:  # the passes follow the next backward of the last stage
        pass_due = pass_due + (cell_ends[last_gradients] - start.ravel()[last_gradients])
    rows = []
    for w in range(table.num_workers):
        # at one time exchanges and passes stand before ops; T before S, because it frees memory
        passes = {"X": (pass_due, 0), "S": (pass_due, 2), "Y": (pass_due, 4)}
        passes |= {"T": (pass_due + interval, 1), "Z": (pass_due + interval, 3)}
        if reductions == 1:
            del passes["Z"]
            if not overlap:
                backward_cells = table.backward_end_cells[table.placement[0] == w]
                passes["T"] = (cell_ends[backward_cells].max(axis=0) + delay, 4)
        phase_passes = {grammar.by_letters[letter]: item for letter, item in passes.items()}
        rows.append(_merge_passes(table, w, due[w], phase_passes))
    return spread_rows(name, rows, table.slots, table.placement, grammar=grammar)


def _merge_passes(
    table: ScheduleTable, worker: int, due: Float[NumpyArray, " slots"], passes: Passes
) -> Ops:
    """Order the ops of a worker and its passes by the time at which each is due: (ops, 3)."""
    slots = np.flatnonzero(table.phase[worker])
    ops = [np.stack([field[worker, slots] for field in table.cells[:3]], axis=1)]
    sort_keys = [np.stack([due[slots], np.full(len(slots), len(Phase))])]
    for phase, (pass_due, rank) in passes.items():
        ops.append(phase_ops(phase, NO_STAGE, range(len(pass_due))))
        sort_keys.append(np.stack([pass_due, np.full(len(pass_due), rank)]))
    time, rank = np.concatenate(sort_keys, axis=1)
    return np.concatenate(ops)[np.lexsort((rank, time))]
