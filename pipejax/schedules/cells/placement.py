"""Placement of stages: one row per pipe, one worker per stage.

A unidirectional schedule has one pipe. A bidirectional one (Chimera, DualPipe) has two that run
against each other, or several such couples, each shifted round the workers; a microbatch belongs to
one pipe.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.schedules.cells.ops import COMPUTE, AnyPhase, Cell, Op, ScheduleError

Placement = Int[NumpyArray, "pipes stages"]
PipeOfMicrobatch = Int[NumpyArray, " microbatches"]


def looped(num_workers: int, stages_per_worker: int = 1) -> Placement:
    """Place stage s on worker s mod P, as interleaved schedules do."""
    return np.tile(np.arange(num_workers, dtype=np.int32), stages_per_worker)[None]


def zigzag(num_workers: int, waves: int = 1) -> Placement:
    """Place stages down the workers and up again, `waves` times, as Hanayo does."""
    down = np.arange(num_workers, dtype=np.int32)
    return np.tile(np.concatenate([down, down[::-1]]), waves)[None]


def bidirectional(num_workers: int, pipes: int = 2) -> Placement:
    """Place pipes down the workers and up, in turn, as Chimera does."""
    # Of 2f pipes each couple begins P / f workers after the one before.
    return couples(np.arange(num_workers, dtype=np.int32), num_workers, pipes)


def couples(first: Int[NumpyArray, " stages"], num_workers: int, pipes: int) -> Placement:
    """Place the other pipes beside the first: its mirror image, then both shifted round."""
    both = np.stack([first, num_workers - 1 - first])
    shifts = np.arange(0, num_workers, num_workers // (pipes // 2))[: pipes // 2]
    return ((both + shifts[:, None, None]) % num_workers).reshape(-1, len(first)).astype(np.int32)


def infer(
    rows: Sequence[Sequence[Cell]], compute: Sequence[AnyPhase] = COMPUTE
) -> tuple[Placement, PipeOfMicrobatch]:
    """Read the placement off the rows of a table that does not state it."""
    # Either every stage is on one worker, or there are two pipes that mirror each other (worker w
    # against worker P-1-w), or 2f pipes, f such couples that begin P/f workers apart, and every
    # microbatch keeps to one of them.
    seen: dict[tuple[int, int], tuple[Op, int, int]] = {}  # first op, its worker and slot
    for worker, row in enumerate(rows):
        for slot, op in ((t, op) for t, cell in enumerate(row) for op in cell):
            if op.phase not in compute:
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
    stage_workers = np.empty((num_microbatches, num_stages), np.int32)
    for (stage, microbatch), (_, worker, _) in seen.items():
        stage_workers[microbatch, stage] = worker
    kinds, at, numbers = np.unique(stage_workers, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(at)  # pipes are numbered as microbatches meet them
    pipes, microbatch_pipes = kinds[order], np.argsort(order)[numbers.ravel()].astype(np.int32)
    if len(pipes) == 1:
        return pipes, microbatch_pipes
    # of an odd number, or one that does not divide the workers, one is too many for two
    count = len(pipes) if len(rows) % len(pipes) == len(pipes) % 2 == 0 else 2
    legal = couples(pipes[0], len(rows), count).tolist()
    for pipe in pipes.tolist():
        if pipe not in legal:
            microbatch = int(np.flatnonzero((stage_workers == pipe).all(axis=1))[0])
            stage = int(np.nonzero(stage_workers[microbatch] != pipes[0])[0][0])
            op, worker, slot = seen[stage, microbatch]
            raise ScheduleError(
                f"op {op} is on worker {worker}, but stage {stage} of microbatch 0 is on worker "
                f"{pipes[0][stage]}: a stage has one worker, or two in pipes that mirror each "
                "other, or as many as there are such couples of pipes, shifted round the workers",
                place=(worker, slot),
            )
    return pipes, microbatch_pipes


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
