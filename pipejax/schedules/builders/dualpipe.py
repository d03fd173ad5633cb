"""DualPipe and DualPipeV: forwards and backwards of opposite directions run as fused pairs.

DualPipe runs two pipes against each other, as Chimera does; DualPipeV cuts it in half: one pipe
goes down the workers and up again, so that no stage needs a second copy. A worker follows one row
in both: what is the other pipe to DualPipe is the way up to DualPipeV. On worker r of the half
with H workers, 0 is the direction whose early stage it holds, 1 the one whose late stage it holds:

```
  1  F0                            2(H-r-1) times    warm-up
  2  F0 F1                         r+1
  3  I1 W F1                       H-r-1             backwards split: W fills the gap before F1
  4  (F0 B1) (F1 B0)               N-2H+r+1          steady: fused pairs alone
  5  B1 (F1 B0)                    H-r-1
  6  B1 B0                         r+1               the later half of these are split: I1, I0
  7  W I0                          H-r-1
  8  W                             r+1
```

N are the microbatches of a direction. The first pair of the last worker is not fused, which makes
the bubble smaller; a W is that of the earliest I whose W has not run yet.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.schedules.cells.cells import EMPTY
from pipejax.schedules.cells.ops import UNIT_SLOTS, Phase, Slots
from pipejax.schedules.cells.placement import Placement, bidirectional, zigzag
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable

Part = tuple[Phase, int]  # phase and direction
Rows = list[Int[NumpyArray, "cells 2 3"]]
Pipes = list[int]  # of each microbatch
F, B, I, W = Phase.F, Phase.B, Phase.I, Phase.W  # noqa: E741
ANY_DIRECTION = -1  # of a W, which is of the earliest I that waits for it
NO_OP = EMPTY[:3]


def dualpipe(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """Two pipes against each other, whose forwards and backwards run as fused pairs.

    Every worker holds two stages and at most P + 1 activations. Microbatches alternate between
    the pipes.

    Options:
      slots: slot durations of F, B, I and W; a fused pair takes F + B.

    Example:
      >>> table = dualpipe(4, 8)
      >>> [str(op) for op in next(table.rows())[7]]
      ['0F6', '3B3']
    """
    rows, placement, pipe_of = two_pipes("dualpipe", num_workers, num_microbatches)
    return spread_rows("dualpipe", rows, slots, placement, pipe_of_microbatch=pipe_of)


def two_pipes(name: str, num_workers: int, num_microbatches: int) -> tuple[Rows, Placement, Pipes]:
    """Cells of DualPipe by worker, where its stages are, and the pipe of each microbatch."""
    if num_workers % 2:
        raise MismatchError(
            f"{name} needs an even number of workers (2, 4, 6, ...), got {num_workers}: "
            "the two pipes meet in the middle"
        )
    _check_microbatches(name, num_workers, num_microbatches, 2)
    rows = []
    for worker in range(num_workers):
        # direction 0 of the upper half is the up pipe
        pipes = (0, 1) if worker < num_workers // 2 else (1, 0)
        own = [range(pipe, num_microbatches, 2) for pipe in pipes]
        rows.append(_row(num_workers // 2, min(worker, num_workers - 1 - worker), own))
    return rows, bidirectional(num_workers), [m % 2 for m in range(num_microbatches)]


def dualpipe_v(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """DualPipe cut in half: one pipe down the workers and up again, one copy of every stage.

    Every worker holds two stages and at most 2P + 1 activations.

    Options:
      slots: slot durations of F, B, I and W; a fused pair takes F + B.

    Example:
      >>> from pipejax.schedules.table.held_activations import peak_in_flight
      >>> peak_in_flight(dualpipe_v(4, 8)).tolist()
      [9, 9, 9, 9]
    """
    rows = one_pipe("dualpipe-v", num_workers, num_microbatches)
    return spread_rows("dualpipe-v", rows, slots, zigzag(num_workers))


def one_pipe(name: str, num_workers: int, num_microbatches: int) -> Rows:
    """Cells of DualPipeV by worker."""
    _check_microbatches(name, num_workers, num_microbatches, 1)
    own = [range(num_microbatches)] * 2
    return [_row(num_workers, worker, own) for worker in range(num_workers)]


def _check_microbatches(name: str, workers: int, microbatches: int, step: int) -> None:
    if microbatches % step or microbatches < 2 * workers:
        kind = "an even number of microbatches" if step == 2 else "microbatches"
        raise MismatchError(
            f"{name} needs {kind}, at least twice the workers ({2 * workers}), got {microbatches}: "
            "fewer leave no forward to fuse with a backward"
        )


def _row(half: int, worker: int, microbatches: Sequence[range]) -> Int[NumpyArray, "cells 2 3"]:
    """Cells of a worker: phase, stage and microbatch of an op, and of its partner or of none."""
    # Stage `worker` belongs to direction 0 and its mirror image to 1, each with its microbatches.
    stages = worker, 2 * half - 1 - worker
    coming = {(phase, way): iter(own) for phase in (F, B) for way, own in enumerate(microbatches)}
    waiting: deque[tuple[int, int]] = deque()

    def op(phase: Phase, way: int) -> tuple[int, int, int]:
        if phase is W:
            return (W, *waiting.popleft())
        place = stages[way], next(coming[F if phase is F else B, way])
        if phase is I:
            waiting.append(place)
        return (phase, *place)

    cells = [
        [op(*part) for part in parts] + [NO_OP] * (2 - len(parts))
        for parts in _steps(half, worker, len(microbatches[0]))
    ]
    return np.array(cells, np.int32)


def _steps(half: int, worker: int, microbatches: int) -> Iterator[tuple[Part, ...]]:
    """Yield the parts of each cell of a worker: one, or two that are fused."""
    before = half - worker - 1
    weight = (W, ANY_DIRECTION)
    yield from [((F, 0),)] * (2 * before)
    yield from [((F, 0),), ((F, 1),)] * (worker + 1)
    yield from [((I, 1),), (weight,), ((F, 1),)] * before
    for k in range(microbatches - 2 * half + worker + 1):
        yield from [((F, 0),), ((B, 1),)] if k == before == 0 else [((F, 0), (B, 1))]
        yield (F, 1), (B, 0)
    yield from [((B, 1),), ((F, 1), (B, 0))] * before
    ends = 2 * (worker + 1)
    for k in range(ends):  # whole, then split from the middle on
        yield ((B if k < worker + 1 else I, 1 - k % 2),)
    yield from [(weight,), ((I, 0),)] * before
    yield from [(weight,)] * (worker + 1)
