"""GPipe, 1F1B and their interleaved forms: the order of the ops is a fixed pattern."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pipejax.base.checks import MismatchError
from pipejax.schedules.cells.ops import Cell, Op, Phase
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.table.slot_durations import UNIT_SLOTS, Slots
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable


def ops_of(phase: Phase, stage: int, microbatches: Iterable[int]) -> list[Op]:
    """Return the ops of a phase on a stage."""
    return [Op(phase, stage, m) for m in microbatches]


def alternate(forwards: Sequence[Op], backwards: Sequence[Op], warmup: int) -> Iterator[Cell]:
    """Yield `warmup` forwards, then forward and backward in turn, then the rest.

    Args:
      forwards: forwards of a worker in order.
      backwards: as many backwards in order.
      warmup: forwards before the first turn, at most all of them.

    Yields:
      Cells of the worker's row.

    Example:
      >>> forwards, backwards = [[Op(p, 0, m) for m in range(3)] for p in (Phase.F, Phase.B)]
      >>> " ".join(str(op) for (op,) in alternate(forwards, backwards, 1))
      '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    warmup = min(warmup, len(forwards))
    for op in forwards[:warmup]:
        yield (op,)
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield (forward,)
        yield (backward,)
    for op in backwards[len(forwards) - warmup :]:
        yield (op,)


def gpipe(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """All forwards, then all backwards; holds every microbatch.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      slots: slot durations of F and B.

    Returns:
      The table.

    Raises:
      ValueError: if a count is no whole number of at least 1, or a slot duration is not above 0.

    Example:
      >>> print(gpipe(2, 2, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5
        worker 0  0F0  0F1   .    .   0B0  0B1
        worker 1   .   1F0  1F1  1B0  1B1   .
    """
    return _breadth_first("gpipe", num_workers, num_microbatches, 1, slots)


def one_f_one_b(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """One forward, one backward in turn; worker r holds at most P - r microbatches.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      slots: slot durations of F and B.

    Returns:
      The table.

    Raises:
      ValueError: if a count is no whole number of at least 1, or a slot duration is not above 0.

    Example:
      >>> print(one_f_one_b(2, 2, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5
        worker 0  0F0  0F1   .   0B0   .   0B1
        worker 1   .   1F0  1B0  1F1  1B1   .
    """
    return _one_f_one_b("1f1b", 1, num_workers, num_microbatches, slots)


def eager_1f1b(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """1F1B with a warm-up twice as long, so that messages overlap with compute.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      slots: slot durations of F and B.

    Returns:
      The table.

    Raises:
      ValueError: if a count is no whole number of at least 1, or a slot duration is not above 0.

    Example:
      >>> from pipejax.schedules.table.held_activations import peak_in_flight
      >>> peak_in_flight(eager_1f1b(4, 8)).tolist()
      [7, 5, 3, 1]
    """
    return _one_f_one_b("eager-1f1b", 2, num_workers, num_microbatches, slots)


def _one_f_one_b(
    name: str, per_hop: int, workers: int, microbatches: int, slots: Slots
) -> ScheduleTable:
    """One stage per worker; worker r warms up with `per_hop` forwards per worker after it."""
    rows = []
    for r in range(workers):
        forwards, backwards = (ops_of(p, r, range(microbatches)) for p in (Phase.F, Phase.B))
        rows.append(list(alternate(forwards, backwards, per_hop * (workers - r - 1))))
    return spread_rows(name, rows, slots)


def interleaved_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B over V stages per worker, microbatches in groups of P; idle time falls to a V-th.

    A worker runs its first stage on a group of P microbatches, then its second on the same
    group, and so on; backwards in the same groups, last stage first. Where P does not divide M
    the groups are larger and as equal as can be, for one smaller than P could deadlock; with
    M < P there is one group.

    Args:
      num_workers: P.
      num_microbatches: M.
      stages_per_worker: V, at least 2.
      slots: slot durations of F and B.

    Returns:
      The table, with P * V stages.

    Raises:
      ValueError: if V is below 2.

    Example:
      >>> from pipejax.schedules.table.held_activations import peak_in_flight
      >>> peak_in_flight(interleaved_1f1b(4, 8)).tolist()
      [11, 9, 7, 5]
    """
    _check_stages_per_worker("interleaved-1f1b", stages_per_worker)
    groups = np.array_split(np.arange(num_microbatches), max(1, num_microbatches // num_workers))
    turns = [(loop, int(m)) for group in groups for loop in range(stages_per_worker) for m in group]
    rows = []
    for r in range(num_workers):
        last = (stages_per_worker - 1) * num_workers + r
        forwards = [Op(Phase.F, loop * num_workers + r, m) for loop, m in turns]
        backwards = [Op(Phase.B, last - loop * num_workers, m) for loop, m in turns]
        warmup = 2 * (num_workers - r - 1) + (stages_per_worker - 1) * len(groups[0])
        rows.append(list(alternate(forwards, backwards, warmup)))
    return spread_rows("interleaved-1f1b", rows, slots, looped(num_workers, stages_per_worker))


def looped_bfs(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """Breadth first: each stage of a worker on all microbatches before the next stage.

    Args:
      num_workers: P.
      num_microbatches: M.
      stages_per_worker: V, at least 2.
      slots: slot durations of F and B.

    Returns:
      The table, with P * V stages.

    Raises:
      ValueError: if V is below 2.

    Example:
      >>> from pipejax.schedules.table.held_activations import peak_in_flight
      >>> peak_in_flight(looped_bfs(4, 8)).tolist()
      [16, 16, 16, 16]
    """
    _check_stages_per_worker("looped-bfs", stages_per_worker)
    return _breadth_first("looped-bfs", num_workers, num_microbatches, stages_per_worker, slots)


def _breadth_first(
    name: str, workers: int, microbatches: int, stages_per_worker: int, slots: Slots
) -> ScheduleTable:
    """All forwards stage by stage, then all backwards."""
    stages = range(0, workers * stages_per_worker, max(workers, 1))
    turns = [(Phase.F, s) for s in stages] + [(Phase.B, s) for s in reversed(stages)]
    rows = [
        [(op,) for p, stage in turns for op in ops_of(p, stage + r, range(microbatches))]
        for r in range(workers)
    ]
    return spread_rows(name, rows, slots, looped(workers, stages_per_worker))


def _check_stages_per_worker(name: str, stages_per_worker: int) -> None:
    if stages_per_worker < 2:
        raise MismatchError(
            f"{name} needs at least 2 stages per worker, got {stages_per_worker}: with one it is "
            f"{'1f1b' if name == 'interleaved-1f1b' else 'gpipe'}"
        )
