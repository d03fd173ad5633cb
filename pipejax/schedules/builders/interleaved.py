"""Several stages per worker, placed in loops: interleaved 1F1B and looped breadth-first."""

from collections.abc import Mapping

import numpy as np

from pipejax.schedules.builders.one_f_one_b import alternate
from pipejax.schedules.cells.ops import Op, Phase
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable


def _check_stages_per_worker(name: str, stages_per_worker: int) -> None:
    if stages_per_worker < 2:
        raise ValueError(
            f"{name} needs at least 2 stages per worker, got {stages_per_worker}: with one it is "
            f"{'1f1b' if name == 'interleaved-1f1b' else 'gpipe'}"
        )


def interleaved_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    slots: Mapping[str, float] = UNIT_SLOTS,
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
        forwards = [Op(Phase.F, loop * num_workers + r, m) for loop, m in turns]
        backwards = [
            Op(Phase.B, (stages_per_worker - 1 - loop) * num_workers + r, m) for loop, m in turns
        ]
        warmup = 2 * (num_workers - r - 1) + (stages_per_worker - 1) * len(groups[0])
        rows.append(list(alternate(forwards, backwards, warmup)))
    packed = ScheduleTable.from_rows(
        rows, placement=looped(num_workers, stages_per_worker), name="interleaved-1f1b", slots=slots
    )
    return spread(packed)


def looped_bfs(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 2,
    slots: Mapping[str, float] = UNIT_SLOTS,
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
    stages = range(0, num_workers * stages_per_worker, num_workers)
    rows = [
        [(Op(Phase.F, stage + r, m),) for stage in stages for m in range(num_microbatches)]
        + [
            (Op(Phase.B, stage + r, m),)
            for stage in reversed(stages)
            for m in range(num_microbatches)
        ]
        for r in range(num_workers)
    ]
    packed = ScheduleTable.from_rows(
        rows, placement=looped(num_workers, stages_per_worker), name="looped-bfs", slots=slots
    )
    return spread(packed)
