"""GPipe, 1F1B and their interleaved forms: the order of the ops is a fixed pattern."""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Index, Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.schedules.cells.ops import UNIT_SLOTS, AnyPhase, Phase, Slots
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable

Column = Int[NumpyArray, " ops"]
Ops = Int[NumpyArray, "ops 3"]  # phase, stage, microbatch


def phase_ops(phase: AnyPhase, stage: Index | Column, microbatches: Column | range) -> Ops:
    """Return the ops of a phase on a stage, or on one stage each."""
    microbatch = np.asarray(microbatches)
    ops = np.empty((len(microbatch), 3), np.int32)
    ops[:, 0], ops[:, 1], ops[:, 2] = phase, stage, microbatch
    return ops


def alternate(forwards: Ops, backwards: Ops, warmup: int) -> NumpyArray:
    """Put `warmup` forwards first, then forward and backward in turn, then the rest."""
    warmup = min(warmup, len(forwards))
    turns = len(forwards) - warmup
    in_turn = np.stack([forwards[warmup:], backwards[:turns]], axis=1).reshape(-1, 3)
    return np.concatenate([forwards[:warmup], in_turn, backwards[turns:]])


def gpipe(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """All forwards, then all backwards; holds every microbatch."""
    return _breadth_first("gpipe", num_workers, num_microbatches, 1, slots)


def one_f_one_b(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """One forward, one backward in turn; worker r holds at most P - r microbatches."""
    return _one_f_one_b("1f1b", 1, num_workers, num_microbatches, slots)


def eager_1f1b(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """1F1B with a warm-up twice as long, so that messages overlap with compute."""
    return _one_f_one_b("eager-1f1b", 2, num_workers, num_microbatches, slots)


def _one_f_one_b(
    name: str, per_hop: int, workers: int, microbatches: int, slots: Slots
) -> ScheduleTable:
    """One stage per worker; worker r warms up with `per_hop` forwards per worker after it."""
    rows = []
    for r in range(workers):
        forwards, backwards = (phase_ops(p, r, range(microbatches)) for p in (Phase.F, Phase.B))
        rows.append(alternate(forwards, backwards, per_hop * (workers - r - 1)))
    return spread_rows(name, rows, slots)


class Turns(NamedTuple):
    """Turns in which a worker of an interleaved schedule runs its stages and microbatches."""

    loop: Column  # (turns) of its stages, from the first of forwards or the last of backwards
    microbatch: Column  # (turns) microbatch
    num_workers: int  # P
    turns_before_last: int  # turns of a group of microbatches before that of the last stage

    @classmethod
    def of(
        cls,
        num_workers: int,
        num_microbatches: int,
        stages_per_worker: int,
        group_size: int | None = None,
    ) -> "Turns":
        """Let groups of so many microbatches pass, the last may be smaller."""
        # Without a size they have P, or are larger and as equal as can be.
        microbatches, stages = np.arange(num_microbatches), range(stages_per_worker)
        if group_size is None:
            groups = np.array_split(microbatches, max(1, num_microbatches // num_workers))
        else:
            groups = np.split(microbatches, range(group_size, num_microbatches, group_size))
        loop = np.concatenate([np.repeat(stages, len(group)) for group in groups])
        turn = np.concatenate([np.tile(group, stages_per_worker) for group in groups])
        return cls(loop, turn, num_workers, (stages_per_worker - 1) * len(groups[0]))

    def forwards(self, worker: int) -> Ops:
        """Return the forwards of a worker in order."""
        return phase_ops(Phase.F, self.loop * self.num_workers + worker, self.microbatch)

    def backwards(self, phase: Phase, worker: int) -> Ops:
        """Return the backwards of a worker in order."""
        loop = int(self.loop.max()) - self.loop
        return phase_ops(phase, loop * self.num_workers + worker, self.microbatch)


def interleaved_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    group_size: int | None = None,
    extra_warmup: int = 0,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B over V stages per worker, microbatches in groups of P; idle time falls to a V-th.

    A worker runs its first stage on a group of P microbatches, then its second on the same
    group, and so on; backwards in the same groups, last stage first. Where P does not divide M
    the groups are larger and as equal as can be, for one smaller than P could deadlock; with
    M < P there is one group.

    Megatron-LM says how large groups are (`microbatch_group_size_per_vp_stage`): larger ones leave
    a hop more time, and hold more. What is left over is a last, smaller group of at least P. Where
    it overlaps the exchanges of experts with compute, every worker warms up with a forward more.

    Options:
      stages_per_worker: V, at least 2.
      group_size: microbatches of a group, from P to M.
      extra_warmup: forwards beyond the usual ones before the first backward.
    """
    check_stages_per_worker("interleaved-1f1b", stages_per_worker, "1f1b")
    if group_size is not None:
        check_groups(num_workers, num_microbatches, group_size)
    turns = Turns.of(num_workers, num_microbatches, stages_per_worker, group_size)
    rows = []
    for r in range(num_workers):
        forwards, backwards = turns.forwards(r), turns.backwards(Phase.B, r)
        warmup = 2 * (num_workers - r - 1) + turns.turns_before_last + extra_warmup
        rows.append(alternate(forwards, backwards, warmup))
    return spread_rows("interleaved-1f1b", rows, slots, looped(num_workers, stages_per_worker))


def check_even(name: str, count: int, what: str, why: str) -> None:
    """Refuse an odd number of workers or microbatches."""
    if count % 2:
        raise MismatchError(
            f"{name} needs an even number of {what} (2, 4, 6, ...), got {count}: {why}"
        )


def check_groups(num_workers: int, num_microbatches: int, group_size: int) -> None:
    """Refuse groups of fewer microbatches than workers: one could wait for the next."""
    last = num_microbatches % group_size
    if not num_workers <= group_size <= num_microbatches or 0 < last < num_workers:
        raise MismatchError(
            f"group_size must lie between the workers ({num_workers}) and the microbatches "
            f"({num_microbatches}) and leave no group smaller than the workers, got {group_size}",
            "group_size",
        )


def looped_bfs(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    last_first: bool = False,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Breadth first: each stage of a worker on all microbatches before the next stage.

    PyTorch's `ScheduleLoopedBFS` runs the backwards of a stage from the last microbatch to the
    first: `last_first`. Where ops and messages are equal the step lasts as long and holds as much.

    Options:
      stages_per_worker: V, at least 2.
      last_first: whether backwards begin with the last microbatch, as PyTorch's do.
    """
    check_stages_per_worker("looped-bfs", stages_per_worker, "gpipe")
    size = num_workers, num_microbatches, stages_per_worker
    return _breadth_first("looped-bfs", *size, slots, reverse=last_first)


def circular(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """MaxText's pipeline: all microbatches go round the workers again and again, then all back.

    The backward is the forward in reverse, the last microbatch first, as automatic differentiation
    of a loop makes it. With MaxText's delayed forwarding a message travels beside the next op, so
    a hop takes two ops: that is this table with messages as long as an op, which double the
    bubble and need M at least 2P. Without it an op waits until the messages of the one before have
    been sent, as under the link model `blocking`.

    Options:
      stages_per_worker: V, how often a microbatch goes round ("repeats").

    Example:
      >>> print(circular(2, 2, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5    6    7    8    9
        worker 0  0F0  0F1  2F0  2F1   .    .   2B1  2B0  0B1  0B0
        worker 1   .   1F0  1F1  3F0  3F1  3B1  3B0  1B1  1B0   .
    """
    if num_microbatches % num_workers:
        raise MismatchError(
            f"circular needs a multiple of the workers ({num_workers}) as microbatches, got "
            f"{num_microbatches}: each worker begins a microbatch in turn"
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
    """All forwards stage by stage, then all backwards, in reverse the last microbatch first."""
    stages = range(0, workers * stages_per_worker, max(workers, 1))
    there = range(microbatches)
    back = there[::-1] if reverse else there
    turns = [(Phase.F, s, there) for s in stages] + [(Phase.B, s, back) for s in reversed(stages)]
    rows = [
        np.concatenate([phase_ops(phase, stage + r, order) for phase, stage, order in turns])
        for r in range(workers)
    ]
    return spread_rows(name, rows, slots, looped(workers, stages_per_worker))


def check_stages_per_worker(name: str, stages_per_worker: int, with_one: str) -> None:
    """Refuse an interleaved schedule that is another one."""
    if stages_per_worker < 2:
        raise MismatchError(
            f"{name} needs at least 2 stages per worker, got {stages_per_worker}: with one it is "
            f"{with_one}",
            "stages_per_worker",
        )
