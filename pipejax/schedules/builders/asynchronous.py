"""PipeDream, LocalSGD and the naive pipeline, whose tables contain the weight updates.

A stage of PipeDream keeps the weights of every microbatch in flight until its backward (weight
stashing), so forward and backward use the same weights. The first stage admits a microbatch when
one leaves; the order is 1F1B without an end.

In LocalSGD, several runs share the pipe, so that no weights are stale. Microbatch i belongs to run
i mod R. Within a round of H local steps, the next forward of a run on a stage waits for its
previous backward there. After R * H microbatches the pipe runs empty and the models of all runs
are averaged (arXiv:2606.03498 compares PipeDream with this form).
"""

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.checks import MismatchError, resolve_choice
from pipejax.schedules.builders.one_f_one_b import phase_ops
from pipejax.schedules.builders.published import DRAWN, published
from pipejax.schedules.cells.cells import NEWEST, WeightRule
from pipejax.schedules.cells.ops import EQUAL_SLOTS, Phase, Slots
from pipejax.schedules.table.slot_simulation import table_from_ops
from pipejax.schedules.table.table import ScheduleTable

Microbatches = Int[NumpyArray, "workers microbatches"]
ADMISSIONS = ("each-stage", "first-stage")


@published("naive", "Ilin and Richtarik (arXiv:2606.03498); GPipe's figure 2b", bytes_per_op=DRAWN)
def naive(num_workers: int, num_microbatches: int, *, slots: Slots = EQUAL_SLOTS) -> ScheduleTable:
    """No pipelining: a microbatch enters when the previous microbatch has updated all stages.

    One worker computes at a time: the makespan is M P (F + B), the bubble ratio (P - 1) / P.
    Messages add 2 M (P - 1) message times. No weights are stale.

    Example:
      >>> print(naive(2, 2))
                   0    1    2    3    4    5    6    7    8    9   10   11
        worker 0  0F0   .    .    .   0B0  0U0  0F1   .    .    .   0B1  0U1
        worker 1   .   1F0  1B0  1U0   .    .    .   1F1  1B1  1U1   .    .
    """
    last_backward = np.tile(np.arange(num_microbatches) - 1, (num_workers, 1))
    return _table_with_updates("naive", last_backward, slots)


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
    last_backward = _last_backwards(num_workers, num_microbatches)
    if resolve_choice(admission, ADMISSIONS, "admission") == "first-stage":
        # the first P microbatches run ahead, up to the first backward of a stage: stage 2 of 4 runs
        # F0 F1 F2 B0 F3 B1 B2 F4, where "each-stage" has F0 F1 B0 F2 B1 F3 B2 F4
        stage, microbatch = np.indices(last_backward.shape)
        ahead = microbatch - np.minimum(2 * (num_workers - stage) - 1, num_workers)
        last_backward = np.where(microbatch < num_workers, ahead, last_backward)
    return _table_with_updates("pipedream", last_backward, slots)


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

    The microbatches of group g read the weights after the update of group g - 2, on all stages.
    So two versions of the weights are enough.

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
    if accumulation < num_workers:
        raise MismatchError(
            f"accumulation must be at least the number of workers, {num_workers}, got "
            f"{accumulation}: for more workers, two weight versions are too few",
            "accumulation",
        )
    microbatch = np.arange(num_microbatches)
    has_update = (microbatch % accumulation == accumulation - 1) | (microbatch == microbatch[-1:])
    last_backward = _last_backwards(num_workers, num_microbatches)
    weights = WeightRule(lag=1)  # one update, of group g - 1, between the read and the own update
    return _table_with_updates("pipedream-2bw", last_backward, slots, has_update, weights)


def _last_backwards(workers: int, microbatches: int) -> Microbatches:
    """Return the microbatch of the last B before each F in endless 1F1B; below 0 without a B."""
    stage, microbatch = np.indices((workers, microbatches))
    return microbatch - (workers - stage)


def _table_with_updates(
    name: str,
    last_backward: Microbatches,
    slots: Slots,
    has_update: Bool[NumpyArray, " microbatches"] | None = None,
    weights: WeightRule = NEWEST,
) -> ScheduleTable:
    """Build a table of F and B, with an update U after each B (with `has_update`, after some B)."""
    # `last_backward` is the microbatch of the last B before each F; below 0 without a B before it.
    microbatch = np.arange(last_backward.shape[1])
    updated = microbatch if has_update is None else microbatch[has_update]
    rows = []
    for stage, turns_of_forwards in enumerate(last_backward):
        # turn k is B of microbatch k, then its U, then the forwards that follow this backward
        members = ((Phase.B, microbatch), (Phase.U, updated), (Phase.F, microbatch))
        ops = np.concatenate([phase_ops(phase, stage, numbers) for phase, numbers in members])
        turn = np.concatenate([microbatch, updated, turns_of_forwards])
        rows.append(ops[np.argsort(turn, kind="stable")])
    return table_from_ops(name, rows, slots, weights=weights)


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
    num_runs = num_workers if runs is None else runs
    rule = WeightRule(runs=num_runs, local_steps=local_steps)
    stage, microbatch = np.indices((num_workers, num_microbatches))
    # 1F1B with at most R forwards in flight, and no forward before the round before it has ended
    in_flight = np.minimum(num_workers - stage, num_runs)
    round_start = microbatch - microbatch % rule.round_size
    last_backward = np.maximum(microbatch - in_flight, round_start - 1)
    return _table_with_updates("local-sgd", last_backward, slots, weights=rule)
