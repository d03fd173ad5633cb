"""PipeDream, LocalSGD and the naive pipeline, whose tables contain the weight updates.

A stage of PipeDream keeps the weights of every microbatch in flight until its backward (weight
stashing), so forward and backward use the same weights. The first stage admits a microbatch when
one leaves; the order is 1F1B without an end. While the pipe fills, stage s holds S - s
microbatches at most, or runs ahead of its first backward as far as it can: `ADMISSIONS`.

In LocalSGD, several runs share the pipe, so that no weights are stale. Microbatch i belongs to run
i mod R. Within a round of H local steps, the next forward of a run on a stage waits for its
previous backward there. After R * H microbatches the pipe runs empty and the models of all runs
are averaged (arXiv:2606.03498 compares PipeDream with this form).
"""

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.checks import MismatchError, resolve_choice, whole_number
from pipejax.schedules.builders.one_f_one_b import Ops, alternating_ops
from pipejax.schedules.builders.published import DRAWN, published
from pipejax.schedules.cells.cells import NEWEST, WeightRule, empty_cells, looped
from pipejax.schedules.cells.ops import EQUAL_SLOTS, Phase, Slots
from pipejax.schedules.table.slot_simulation import columns, spread, spread_rows
from pipejax.schedules.table.table import ScheduleTable

Starts = Int[NumpyArray, "workers microbatches"]
ADMISSIONS = ("each-stage", "first-stage")


@published("naive", "Ilin and Richtarik (arXiv:2606.03498); GPipe's figure 2b", bytes_per_op=DRAWN)
def naive(num_workers: int, num_microbatches: int, *, slots: Slots = EQUAL_SLOTS) -> ScheduleTable:
    """No pipelining: a microbatch enters when the previous microbatch has updated all stages.

    One worker computes at a time: the makespan is M P (F + B), the bubble ratio (P - 1) / P, and
    a message on every boundary there and back adds 2 M (P - 1) of them. No weights are stale.

    Example:
      >>> print(naive(2, 2))
                   0    1    2    3    4    5    6    7    8    9   10   11
        worker 0  0F0   .    .    .   0B0  0U0  0F1   .    .    .   0B1  0U1
        worker 1   .   1F0  1B0  1U0   .    .    .   1F1  1B1  1U1   .    .
    """
    stage, microbatch = np.indices((num_workers, num_microbatches))
    # a microbatch takes 2 P slots of F and B, down the stages and back; `draw` adds those of U
    forward = 2 * num_workers * microbatch + stage
    backward = forward + 2 * (num_workers - stage) - 1
    has_update = np.ones(num_microbatches, bool)
    return _table_with_updates("naive", forward, backward, has_update, slots, NEWEST)


@published("pipedream", "Harlap et al., PipeDream (arXiv:1806.03377)", bytes_per_op=DRAWN)
def pipedream(
    num_workers: int,
    num_microbatches: int,
    *,
    admission: str = "each-stage",
    slots: Slots = EQUAL_SLOTS,
) -> ScheduleTable:
    """1F1B without flush: each backward updates its stage; stage s keeps S - s weight versions.

    Options:
      admission: what limits the microbatches in flight. "each-stage": stage s holds S - s at most.
        "first-stage" (the timelines of arXiv:2606.03498): the first stage holds at most S. Later
        stages then hold up to min(S, 2 (S - s) - 1) while the pipe fills: 4, 4, 3, 1 for S = 4,
        with 4, 3, 3, 1 weight versions. Delays of the steady state and the makespan in equal
        slots are the same.

    Example:
      >>> print(pipedream(2, 3))
                   0    1    2    3    4    5    6    7    8    9   10   11   12   13
        worker 0  0F0  0F1   .    .   0B0  0U0  0F2   .   0B1  0U1   .    .   0B2  0U2
        worker 1   .   1F0  1B0  1U0  1F1   .   1B1  1U1  1F2   .   1B2  1U2   .    .
    """
    has_update = np.ones(num_microbatches, bool)
    forward, backward = _starts_without_flush(num_workers, num_microbatches)
    if resolve_choice(admission, ADMISSIONS, "admission") == "first-stage":
        forward = _starts_run_ahead(forward)
    return _table_with_updates("pipedream", forward, backward, has_update, slots, NEWEST)


@published(
    "pipedream-2bw", "Narayanan et al., PipeDream-2BW (arXiv:2006.09503)", bytes_per_op=DRAWN
)
def pipedream_2bw(
    num_workers: int,
    num_microbatches: int,
    *,
    accumulation: int | None = None,
    slots: Slots = EQUAL_SLOTS,
) -> ScheduleTable:
    """PipeDream with double-buffered weights; each update applies gradients of m microbatches.

    The microbatches of group g read the weights after the update of group g - 2, on all stages
    alike, so that two versions are enough.

    Options:
      num_microbatches: M, over the whole run; the last group may be smaller than the others.
      accumulation: m, microbatches of an update, at least P; P if None.

    Example:
      >>> print(pipedream_2bw(2, 4))
                   0    1    2    3    4    5    6    7    8    9   10   11   12   13
        worker 0  0F0  0F1   .   0B0  0F2   .   0B1  0U1  0F3  0B2   .    .   0B3  0U3
        worker 1   .   1F0  1B0  1F1  1B1  1U1  1F2   .   1B2  1F3  1B3  1U3   .    .
    """
    accumulation = num_workers if accumulation is None else accumulation
    if whole_number(accumulation, "accumulation") < num_workers:
        raise MismatchError(
            f"accumulation must be at least the number of workers, {num_workers}, got "
            f"{accumulation}: two weight versions suffice for no longer pipe",
            "accumulation",
        )
    microbatch = np.arange(num_microbatches)
    has_update = (microbatch % accumulation == accumulation - 1) | (microbatch == microbatch[-1:])
    starts = _starts_without_flush(num_workers, num_microbatches)
    return _table_with_updates("pipedream-2bw", *starts, has_update, slots, WeightRule(lag=1))


def _starts_without_flush(workers: int, microbatches: int) -> tuple[Starts, Starts]:
    """Return the starts of F and B in endless 1F1B, both (workers, microbatches) [slots]."""
    stage, microbatch = np.indices((workers, microbatches))
    is_warmup = microbatch < workers - stage
    forward = np.where(is_warmup, stage + microbatch, stage + 2 * microbatch)
    return forward, 2 * workers - 1 - stage + 2 * microbatch


def _starts_run_ahead(forward: Starts) -> Starts:
    """Return the starts of forwards that run ahead while the pipe fills (workers, microbatches)."""
    # `forward` are those of 1F1B without an end; only the first S microbatches start earlier.
    # Microbatch m arrives on stage s in slot s + m. It runs at once if it arrives before the first
    # backward of the stage, whose slot is fixed; later ones alternate with backwards. Stage 2 of 4
    # has 3 slots before its first backward: microbatches 0 to 3 start in slots 2 3 4 6.
    workers = len(forward)
    stage, microbatch = np.indices((workers, forward.shape[1]))
    slots_before = 2 * (workers - stage) - 1  # from the first forward to the first backward
    alternating = slots_before + 2 * (microbatch - slots_before) + 1
    early = stage + np.where(microbatch < slots_before, microbatch, alternating)
    return np.where(microbatch < workers, early, forward)


def _table_with_updates(
    name: str,
    forward: Starts,
    backward: Starts,
    has_update: Bool[NumpyArray, " microbatches"],
    slots: Slots,
    weights: WeightRule,
) -> ScheduleTable:
    """Build a table from starts of F and B in equal slots, with updates U after some backwards."""
    phase_index, worker, microbatch = np.indices((3, *forward.shape))  # of F, B and U
    is_op = (phase_index < 2) | has_update
    start = np.stack([forward, backward, backward + 1])
    phase = np.array([Phase.F, Phase.B, Phase.U])[phase_index]
    order = np.lexsort((start[is_op], worker[is_op]))  # row by row, in order of starts
    fields = (phase, worker, microbatch, start)
    phase, worker, microbatch, start = (field[is_op][order] for field in fields)
    column = columns(worker, start, phase != Phase.U)
    cells, partners = (empty_cells((len(forward), int(column.max()) + 1)) for _ in range(2))
    for field, values in zip(cells, (phase, worker, microbatch, 0), strict=True):
        field[worker, column] = values
    placement = looped(len(forward))
    table = ScheduleTable(cells, partners, placement, name, slots, weights=weights)
    has_equal_slots = table.slots["F"] == table.slots["B"] == 1
    return table if has_equal_slots else spread(table)


@published("local-sgd", "Ilin and Richtarik (arXiv:2606.03498)")
def local_sgd(
    num_workers: int,
    num_microbatches: int,
    *,
    runs: int | None = None,
    local_steps: int = 1,
    slots: Slots = EQUAL_SLOTS,
) -> ScheduleTable:
    """R runs take turns; after H local steps each, the pipe empties and models are averaged.

    Options:
      num_microbatches: M, over all rounds; the last round may be smaller than the others.
      runs: R; P if None, which fills the pipe.
      local_steps: H.

    Example:
      >>> print(local_sgd(2, 3))
                   0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
        worker 0  0F0  0F1   .    .   0B0  0U0   .    .   0B1  0U1  0F2   .    .    .   0B2  0U2
        worker 1   .   1F0  1B0  1U0  1F1   .   1B1  1U1   .    .    .   1F2  1B2  1U2   .    .
    """
    num_runs = num_workers if runs is None else whole_number(runs, "runs")
    rule = WeightRule(runs=num_runs, local_steps=local_steps)
    microbatches, size = range(num_microbatches), rule.round_size
    rounds = [microbatches[first : first + size] for first in microbatches[::size]]
    rows = []
    for stage in range(num_workers):
        round_rows = [_round_row(stage, members, num_workers, num_runs) for members in rounds]
        rows.append(np.concatenate(round_rows))
    return spread_rows("local-sgd", rows, slots, weights=rule)


def _round_row(stage: int, microbatches: range, workers: int, runs: int) -> Ops:
    """Return a stage's ops in one round, in 1F1B order with at most `runs` forwards in flight."""
    row = alternating_ops(stage, microbatches, min(workers - stage, runs) - 1)
    # double every B, then replace the second by a U: F0 B0 F1 B1, F0 B0 B0 F1 B1 B1, F0 B0 U0 ..
    row = np.repeat(row, 1 + (row[:, 0] == Phase.B), axis=0)
    row[1:][(row[1:] == row[:-1]).all(axis=1), 0] = Phase.U
    return row
