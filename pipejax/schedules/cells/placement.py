"""Placement of stages: one row per pipe, one worker per stage.

A unidirectional schedule has one pipe. A bidirectional one (Chimera, DualPipe) has two opposite
pipes, or several such couples, each shifted round the workers. A microbatch belongs to one pipe.
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
    # each couple of 2f pipes begins P / f workers after the couple before it
    return couples(np.arange(num_workers, dtype=np.int32), num_workers, pipes)


def couples(first: Int[NumpyArray, " stages"], num_workers: int, pipes: int) -> Placement:
    """Return the placement of pipes: the first, its mirror image, then both shifted round."""
    couple = np.stack([first, num_workers - 1 - first])
    shifts = np.arange(0, num_workers, num_workers // (pipes // 2))[: pipes // 2]
    placement = (couple + shifts[:, None, None]) % num_workers  # (couples, 2, stages)
    return placement.reshape(-1, len(first)).astype(np.int32)


def infer(
    rows: Sequence[Sequence[Cell]], compute: Sequence[AnyPhase] = COMPUTE
) -> tuple[Placement, PipeOfMicrobatch]:
    """Infer the placement, and the pipe of each microbatch, from the rows of a table."""
    # Either every stage is on one worker, or two pipes mirror each other (worker w against worker
    # P-1-w), or there are f such couples of pipes, which begin P/f workers apart.
    first_ops: dict[tuple[int, int], tuple[Op, int, int]] = {}  # op, worker, slot
    for worker, row in enumerate(rows):
        for slot, op in ((t, op) for t, cell in enumerate(row) for op in cell):
            if op.phase not in compute:
                continue  # messages and sharding follow the ops that they serve
            key = op.stage, op.microbatch
            first, first_worker, _ = first_ops.setdefault(key, (op, worker, slot))
            if first_worker != worker:
                raise ScheduleError(
                    f"op {op} is on worker {worker}, but {first} is on worker {first_worker}: "
                    "a microbatch meets a stage on one worker",
                    place=(worker, slot),
                )
    if not first_ops:
        raise ScheduleError("the table holds no op", place=(0, None))
    num_stages = 1 + max(stage for stage, _ in first_ops)
    num_microbatches = 1 + max(microbatch for _, microbatch in first_ops)
    if num_stages * num_microbatches > len(first_ops):
        raise _missing_error(first_ops, num_stages, num_microbatches)
    stage_workers = np.empty((num_microbatches, num_stages), np.int32)
    for (stage, microbatch), (_, worker, _) in first_ops.items():
        stage_workers[microbatch, stage] = worker
    # pipes are numbered in the order of their first microbatches:
    #   rows b a b of stage_workers are pipes 0 1 0; unique sorts them as a b, with indices 1 0
    unique_rows, first_microbatches, row_indices = np.unique(
        stage_workers, axis=0, return_index=True, return_inverse=True
    )
    order = np.argsort(first_microbatches)
    pipes = unique_rows[order]
    microbatch_pipes = np.argsort(order)[row_indices.ravel()].astype(np.int32)
    if len(pipes) == 1:
        return pipes, microbatch_pipes
    # an odd number of pipes, or one that does not divide the workers, is an error below
    count = len(pipes) if len(rows) % len(pipes) == len(pipes) % 2 == 0 else 2
    legal_pipes = couples(pipes[0], len(rows), count).tolist()
    for pipe in pipes.tolist():
        if pipe not in legal_pipes:
            microbatch = int(np.flatnonzero((stage_workers == pipe).all(axis=1))[0])
            stage = int(np.nonzero(stage_workers[microbatch] != pipes[0])[0][0])
            op, worker, slot = first_ops[stage, microbatch]
            raise ScheduleError(
                f"op {op} is on worker {worker}, but stage {stage} of microbatch 0 is on worker "
                f"{pipes[0][stage]}: a stage has one worker, or two in pipes that mirror each "
                "other, or as many as there are such couples of pipes, shifted round the workers",
                place=(worker, slot),
            )
    return pipes, microbatch_pipes


def _missing_error(
    first_ops: Mapping[tuple[int, int], object], stages: int, microbatches: int
) -> ScheduleError:
    """Return an error that names the first (stage, microbatch) without an op."""
    # the counts may be huge: no array of that size
    stage, microbatch = next(
        (s, m) for m in range(microbatches) for s in range(stages) if (s, m) not in first_ops
    )
    return ScheduleError(
        f"missing op {stage}F{microbatch}: the table has stages up to {stages - 1} and "
        f"microbatches up to {microbatches - 1}, but no op of stage {stage} and microbatch "
        f"{microbatch}",
        place=(0, None),
    )
