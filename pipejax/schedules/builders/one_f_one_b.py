"""GPipe, 1F1B and their interleaved and sliced forms, whose ops follow a fixed pattern."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Index, Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.schedules.builders.published import published
from pipejax.schedules.cells.cells import looped
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.cells.ops import UNIT_SLOTS, AnyPhase, Phase, Slots
from pipejax.schedules.table.slot_simulation import table_from_ops
from pipejax.schedules.table.table import ScheduleTable

Column = Int[NumpyArray, " ops"]
Ops = Int[NumpyArray, "ops 3"]  # phase, stage, microbatch


def phase_ops(phase: AnyPhase, stage: Index | Column, microbatches: Column | range) -> Ops:
    """Return one op per microbatch, as rows of phase, stage and microbatch."""
    # `stage` is one stage for all, or an array with the stage of each op.
    ops = np.empty((len(microbatches), 3), np.int32)
    ops[:, 0], ops[:, 1], ops[:, 2] = phase, stage, np.asarray(microbatches)
    return ops


def alternate_ops(forwards: Ops, backwards: Ops, warmup: int) -> Int[NumpyArray, "all_ops 3"]:
    """Return `warmup` forwards, then forwards and backwards in turn, then all other backwards."""
    # with warmup 1: F0 | F1 B0 | F2 B1 | B2
    warmup = min(warmup, len(forwards))
    num_pairs = len(forwards) - warmup
    steady = np.stack([forwards[warmup:], backwards[:num_pairs]], axis=1).reshape(-1, 3)
    return np.concatenate([forwards[:warmup], steady, backwards[num_pairs:]])


def row_of_1f1b(stage: int, microbatches: range, warmup: int) -> Ops:
    """Return a stage's ops in 1F1B after `warmup` forwards, as rows of phase, stage, microbatch."""
    forwards, backwards = (phase_ops(p, stage, microbatches) for p in (Phase.F, Phase.B))
    return alternate_ops(forwards, backwards, warmup)


@published("gpipe", "Huang et al., GPipe (arXiv:1811.06965)")
def gpipe(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """All forwards, then all backwards; each worker holds all microbatches."""
    return _breadth_first("gpipe", num_workers, num_microbatches, 1, slots)


@published("1f1b", "Narayanan et al., PipeDream-Flush (arXiv:2006.09503)")
def one_f_one_b(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """One forward and one backward in turn; worker r holds at most P-r microbatches."""
    return _one_f_one_b("1f1b", 1, num_workers, num_microbatches, slots)


@published("eager-1f1b", "Zhuang et al. (arXiv:2211.05322)")
def eager_1f1b(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """1F1B with a warm-up twice as long, so that messages overlap with compute."""
    return _one_f_one_b("eager-1f1b", 2, num_workers, num_microbatches, slots)


def _one_f_one_b(
    name: str, warmup_per_hop: int, workers: int, microbatches: int, slots: Slots
) -> ScheduleTable:
    """Build 1F1B where a worker warms up with `warmup_per_hop` forwards per worker after it."""
    rows = [
        row_of_1f1b(r, range(microbatches), warmup_per_hop * (workers - r - 1))
        for r in range(workers)
    ]
    return table_from_ops(name, rows, slots)


class Turns(NamedTuple):
    """Turns of a worker in an interleaved schedule: turn k is forward, or backward, number k."""

    # With two workers, four microbatches and two stages per worker, the forwards of a worker have
    # the loops 0 0 1 1 0 0 1 1 and the microbatches 0 1 0 1 2 3 2 3; backwards count loops down.

    loop: Column  # (turns) index among the worker's stages
    microbatch: Column  # (turns) microbatch
    num_workers: int  # P
    turns_before_last_stage: int  # turns of a group before its first one on the last stage

    @classmethod
    def from_sizes(
        cls,
        num_workers: int,
        num_microbatches: int,
        stages_per_worker: int,
        group_size: int | None = None,
    ) -> "Turns":
        """Make turns: each group of microbatches passes all stages before the next group."""
        # The last group may be smaller. If `group_size` is None, groups have P microbatches, or are
        # larger and of nearly equal sizes.
        microbatches, stages = np.arange(num_microbatches), range(stages_per_worker)
        if group_size is None:
            groups = np.array_split(microbatches, max(1, num_microbatches // num_workers))
        else:
            groups = np.split(microbatches, range(group_size, num_microbatches, group_size))
        loop = np.concatenate([np.repeat(stages, len(group)) for group in groups])
        microbatch = np.concatenate([np.tile(group, stages_per_worker) for group in groups])
        return cls(loop, microbatch, num_workers, (stages_per_worker - 1) * len(groups[0]))

    def forwards(self, worker: int) -> Ops:
        """Return a worker's forwards in order, as rows of phase, stage and microbatch."""
        return phase_ops(Phase.F, self.loop * self.num_workers + worker, self.microbatch)

    def backwards(self, phase: Phase, worker: int) -> Ops:
        """Return a worker's backwards, last stage first, as rows of phase, stage, microbatch."""
        loop = int(self.loop.max()) - self.loop
        return phase_ops(phase, loop * self.num_workers + worker, self.microbatch)


@published("interleaved-1f1b", "Narayanan et al. (arXiv:2104.04473)")
def interleaved_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    group_size: int | None = None,
    extra_warmup: int = 0,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B over V stages per worker, microbatches in groups of P; idle time is divided by V.

    A worker runs its first stage on a group of P microbatches, then its second on the same group,
    and so on; backwards follow in the same groups, last stage first. If P does not divide M, the
    groups are larger and of nearly equal sizes, because a group smaller than P could deadlock;
    with M < P there is one group.

    Megatron-LM sets the size of groups (`microbatch_group_size_per_vp_stage`): larger groups leave
    more time for a hop, and hold more. Megatron's last group may be smaller, but not smaller than
    P. If it overlaps the exchanges of experts with compute, every worker warms up with one more
    forward.

    Options:
      stages_per_worker: V, at least 2.
      group_size: microbatches of a group, from P to M.
      extra_warmup: forwards beyond the usual ones before the first backward.
    """
    check_stages_per_worker("interleaved-1f1b", stages_per_worker, "1f1b")
    if group_size is not None:
        check_groups(num_workers, num_microbatches, group_size)
    turns = Turns.from_sizes(num_workers, num_microbatches, stages_per_worker, group_size)
    rows = []
    for r in range(num_workers):
        forwards, backwards = turns.forwards(r), turns.backwards(Phase.B, r)
        warmup = 2 * (num_workers - r - 1) + turns.turns_before_last_stage + extra_warmup
        rows.append(alternate_ops(forwards, backwards, warmup))
    return table_from_ops("interleaved-1f1b", rows, slots, looped(num_workers, stages_per_worker))


def check_even(name: str, count: int, what: str, why: str) -> None:
    """Refuse an odd `count` of workers or microbatches for a schedule, with the reason `why`."""
    if count % 2:
        raise MismatchError(
            f"{name} needs an even number of {what} (2, 4, 6, ...), got {count}: {why}"
        )


def check_groups(num_workers: int, num_microbatches: int, group_size: int) -> None:
    """Refuse groups of fewer microbatches than workers, which could deadlock."""
    last_size = num_microbatches % group_size
    if not num_workers <= group_size <= num_microbatches or 0 < last_size < num_workers:
        raise MismatchError(
            f"group_size must lie between the workers ({num_workers}) and the microbatches "
            f"({num_microbatches}) and leave no group smaller than the workers, got {group_size}",
            "group_size",
        )


@published("looped-bfs", "Lamy-Poirier (arXiv:2211.05953)")
def looped_bfs(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    last_first: bool = False,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Breadth first: a worker runs each stage on all microbatches before its next stage.

    PyTorch's `ScheduleLoopedBFS` runs the backwards of a stage from the last microbatch to the
    first: `last_first`. With equal ops and messages, time and memory are the same.

    Options:
      stages_per_worker: V, at least 2.
      last_first: whether backwards begin with the last microbatch, as PyTorch's do.
    """
    check_stages_per_worker("looped-bfs", stages_per_worker, "gpipe")
    return _breadth_first(
        "looped-bfs", num_workers, num_microbatches, stages_per_worker, slots, reverse=last_first
    )


@published(
    "circular",
    "MaxText's circular pipeline (AI-Hypercomputer/maxtext), a GPipe (arXiv:1811.06965)",
    legal="any P, M a multiple of P",
)
def circular(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """MaxText's pipeline: all microbatches circle the workers V times, then all backwards.

    The backward is the forward in reverse, the last microbatch first, as automatic differentiation
    of a loop makes it. With MaxText's delayed forwarding a message travels beside the next op:
    model it by messages that last one op; the bubble is then twice as long, and M must be at least
    2P. Without it, an op waits until the messages of the previous op have been sent, as under the
    link model `blocking`.

    Options:
      stages_per_worker: V, number of rounds of a microbatch ("repeats").

    Example:
      >>> print(circular(2, 2, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5    6    7    8    9
        worker 0  0F0  0F1  2F0  2F1   .    .   2B1  2B0  0B1  0B0
        worker 1   .   1F0  1F1  3F0  3F1  3B1  3B0  1B1  1B0   .
    """
    if num_microbatches % num_workers:
        raise MismatchError(
            f"circular needs a multiple of the number of workers ({num_workers}) as number of "
            f"microbatches, got {num_microbatches}: each worker begins a microbatch in turn"
        )
    return _breadth_first(
        "circular", num_workers, num_microbatches, stages_per_worker, slots, reverse=True
    )


def _breadth_first(
    name: str,
    workers: int,
    microbatches: int,
    stages_per_worker: int,
    slots: Slots,
    *,
    reverse: bool = False,
) -> ScheduleTable:
    """Build a table of all forwards, stage after stage, and then all backwards."""
    first_stages = range(0, workers * stages_per_worker, workers)  # stages of worker 0
    backward_order = range(microbatches)[::-1] if reverse else range(microbatches)
    rows = []
    for r in range(workers):
        ops = [phase_ops(Phase.F, stage + r, range(microbatches)) for stage in first_stages]
        ops += [phase_ops(Phase.B, stage + r, backward_order) for stage in first_stages[::-1]]
        rows.append(np.concatenate(ops))
    return table_from_ops(name, rows, slots, looped(workers, stages_per_worker))


def check_stages_per_worker(name: str, stages_per_worker: int, with_one: str) -> None:
    """Refuse one stage per worker for an interleaved schedule; that is the schedule `with_one`."""
    if stages_per_worker < 2:
        raise MismatchError(
            f"{name} needs at least 2 stages per worker, got {stages_per_worker}: with one it is "
            f"{with_one}",
            "stages_per_worker",
        )


# Seq1F1B, TeraPipe, SlimPipe and chunked prefill: microbatches pass in slices of their sequences.
#
# A slice is the K-th part of a microbatch and attends to all earlier slices, so forwards go from
# the first slice to the last, backwards from the last to the first.


@published("seq-1f1b", "Sun et al., Seq1F1B (arXiv:2406.03488)")
def seq_1f1b(
    num_workers: int, num_microbatches: int, *, slices: int = 2, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """1F1B of slices: worker r holds at most P-r-1+K slices, where 1F1B holds (P-r)K.

    The first backward is that of the last slice of a microbatch, so a worker warms up with K - 1
    forwards more than one of 1F1B.

    Options:
      slices: K, slices of a microbatch.
    """
    warmups = [num_workers - r - 2 + slices for r in range(num_workers)]
    return _sliced_table("seq-1f1b", warmups, num_microbatches, slices, 1, slots)


@published("terapipe", "Li et al., TeraPipe (arXiv:2102.07988)")
def terapipe(
    num_workers: int, num_microbatches: int, *, slices: int = 2, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """GPipe of slices: all forwards, then all backwards; each worker holds all microbatches.

    Options:
      slices: K, slices of a microbatch.
    """
    warmups = [num_microbatches * slices] * num_workers  # all forwards
    return _sliced_table("terapipe", warmups, num_microbatches, slices, 1, slots)


@published("slimpipe", "Li et al., SlimPipe (arXiv:2504.14519)", stages_per_worker=2)
def slimpipe(
    num_workers: int,
    num_microbatches: int,
    *,
    slices: int | None = None,
    stages_per_worker: int = 2,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Interleaved 1F1B of slices; worker r holds 1/P of a microbatch and 2(P-r-1) slices.

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
    least_warmup = slices * stages_per_worker - 1  # warm-up of the last worker
    warmups = [least_warmup + 2 * (num_workers - r - 1) for r in range(num_workers)]
    return _sliced_table("slimpipe", warmups, num_microbatches, slices, stages_per_worker, slots)


@published("chunked-prefill", "Qin et al., Mooncake (arXiv:2407.00079); sgl-project/sglang")
def chunked_prefill(
    num_workers: int, num_microbatches: int, *, slices: int = 4, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """Prefill of an inference server: prompts run in chunks, one after the other, forwards only.

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
    return table_from_ops("chunked-prefill", rows, slots, grammar=grammar)


def _sliced_table(
    name: str,
    warmups: Sequence[int],
    num_microbatches: int,
    slices: int,
    stages_per_worker: int,
    slots: Slots,
) -> ScheduleTable:
    """Build 1F1B of slices, given the number of warm-up forwards of each worker."""
    # The slices of a microbatch are ordered as the microbatches of a step in interleaved 1F1B, and
    # backwards run in reverse. Slice k of microbatch m has the number m K + k.
    workers = len(warmups)
    turns = Turns.from_sizes(workers, slices, stages_per_worker)
    first_slices = slices * np.arange(num_microbatches)
    rows = []
    for r, warmup in enumerate(warmups):
        forwards, backwards = (
            phase_ops(
                phase,
                np.tile(turns.loop[::step], num_microbatches) * workers + r,  # stages
                np.add.outer(first_slices, turns.microbatch[::step]).ravel(),  # slices
            )
            for phase, step in ((Phase.F, 1), (Phase.B, -1))
        )
        rows.append(alternate_ops(forwards, backwards, warmup))
    placement = looped(workers, stages_per_worker)
    return table_from_ops(name, rows, slots, placement, grammar=Grammar(slices=slices))
