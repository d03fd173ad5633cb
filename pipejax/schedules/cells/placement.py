"""Where stages live: one row per pipe, one worker per stage.

A unidirectional schedule has one pipe. A bidirectional one (Chimera, DualPipe) has two that run
against each other; a microbatch belongs to one of them.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.schedules.cells.ops import COMPUTE, Cell, Op
from pipejax.schedules.cells.schedule_error import ScheduleError

Placement = Int[NumpyArray, "pipes stages"]
PipeOfMicrobatch = Int[NumpyArray, " microbatches"]


def looped(num_workers: int, stages_per_worker: int = 1) -> Placement:
    """Place stage s on worker s mod P, as interleaved schedules do.

    Returns (1, stages) worker of each stage.
    """
    return np.tile(np.arange(num_workers, dtype=np.int32), stages_per_worker)[None]


def zigzag(num_workers: int, waves: int = 1) -> Placement:
    """Place stages down the workers and up again, `waves` times, as Hanayo does.

    Returns (1, stages) worker of each stage.
    """
    down = np.arange(num_workers, dtype=np.int32)
    return np.tile(np.concatenate([down, down[::-1]]), waves)[None]


def bidirectional(num_workers: int) -> Placement:
    """Place one pipe down the workers and one up, as Chimera does.

    Returns (2, stages) worker of each stage in the down pipe and in the up pipe.
    """
    down = np.arange(num_workers, dtype=np.int32)
    return np.stack([down, down[::-1]])


def infer(rows: Sequence[Sequence[Cell]]) -> tuple[Placement, PipeOfMicrobatch]:
    """Read the placement off the rows of a table that does not state it.

    Either every stage is on one worker, or there are two pipes that mirror each other (worker w
    against worker P-1-w) and every microbatch keeps to one of them.

    Returns (pipes, stages) placement and (microbatches) pipe of each microbatch.
    """
    seen: dict[tuple[int, int], tuple[Op, int, int]] = {}  # first op, its worker and slot
    for worker, row in enumerate(rows):
        for slot, op in ((t, op) for t, cell in enumerate(row) for op in cell):
            if op.phase not in COMPUTE:
                continue  # messages and sharding follow the ops that they serve
            first, home, _ = seen.setdefault((op.stage, op.microbatch), (op, worker, slot))
            if home != worker:
                raise ScheduleError(
                    f"op {op} is on worker {worker}, but {first} is on worker {home}: "
                    "a microbatch meets a stage on one worker",
                    place=(worker, slot),
                )
    if not seen:
        raise ScheduleError("the table holds no op", place=(0, None))
    num_stages = 1 + max(stage for stage, _ in seen)
    num_microbatches = 1 + max(microbatch for _, microbatch in seen)
    if num_stages * num_microbatches > len(seen):
        raise _missing(seen, num_stages, num_microbatches)
    worker_of = np.empty((num_microbatches, num_stages), np.int32)
    for (stage, microbatch), (_, worker, _) in seen.items():
        worker_of[microbatch, stage] = worker
    first_pipe = worker_of[0]
    mirrored = len(rows) - 1 - first_pipe
    odd = np.nonzero(np.any(worker_of != first_pipe, axis=1))[0]
    if not len(odd):
        return first_pipe[None], np.zeros(num_microbatches, np.int32)
    for microbatch in odd.tolist():
        if not np.array_equal(worker_of[microbatch], mirrored):
            stage = int(np.nonzero(worker_of[microbatch] != first_pipe)[0][0])
            op, worker, slot = seen[stage, microbatch]
            raise ScheduleError(
                f"op {op} is on worker {worker}, but stage {stage} of microbatch 0 is on worker "
                f"{first_pipe[stage]}: a stage has one worker, or two in pipes that mirror each "
                "other",
                place=(worker, slot),
            )
    pipe_of = np.zeros(num_microbatches, np.int32)
    pipe_of[odd] = 1
    return np.stack([first_pipe, mirrored]), pipe_of


def _missing(
    seen: Mapping[tuple[int, int], object], stages: int, microbatches: int
) -> ScheduleError:
    """Name the first (stage, microbatch) without any op; the counts may be huge."""
    stage, microbatch = next(
        (s, m) for m in range(microbatches) for s in range(stages) if (s, m) not in seen
    )
    return ScheduleError(
        f"missing op {stage}F{microbatch}: the table has stages up to {stages - 1} and "
        f"microbatches up to {microbatches - 1}, but no op of stage {stage} and microbatch "
        f"{microbatch}",
        place=(0, None),
    )
