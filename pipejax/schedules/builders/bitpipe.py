"""BitPipe: two V-shaped pipes against each other, each as two stages of every worker.

Every worker holds a copy of four stages: two of the pipe that goes down the workers and up again,
two of its mirror image. So microbatches start on both ends at once, as in Chimera, each of them in
stages half as long, and in the middle of a V a message stays on its worker (arXiv:2410.19367).
"""

import numpy as np

from pipejax.base.array_types import Bool, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.schedules.builders.one_f_one_b import Ops, ops_of
from pipejax.schedules.cells.ops import UNIT_SLOTS, Phase, Slots
from pipejax.schedules.cells.placement import zigzag
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable

DOWN, UP = 0, 1  # legs of a V


def bitpipe(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """Two V-shaped pipes against each other: at M = P idle for (P - 2) max(F, B) of a stage.

    Units of P microbatches, half of them in each pipe, follow each other as in the picture of the
    authors' wuhouming/BitPipe. Their runtime refuses other M; here the last unit has gaps then.

    Options:
      num_workers: P, even; worker w holds stages w and 2 P - 1 - w of one pipe, P - 1 - w and
        P + w of the other.
      num_microbatches: M; microbatches alternate between the pipes.

    Example:
      >>> print(bitpipe(2, 2, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5    6    7
        worker 0  0F0  1F1  2F1  3F0  3B0  2B1  1B1  0B0
        worker 1  0F1  1F0  2F0  3F1  3B1  2B0  1B0  0B1
    """
    if num_workers % 2:
        raise MismatchError(
            f"bitpipe needs an even number of workers (2, 4, 6, ...), got {num_workers}: "
            "each half of them starts the microbatches of one pipe"
        )
    units = -(-num_microbatches // num_workers)
    rows = []
    for worker in range(num_workers):
        visits = _visits(num_workers, worker)
        forwards, backwards = (
            _ops(phase, visits ^ [0, leg, 0], num_workers, worker, units)
            for phase, leg in ((Phase.F, DOWN), (Phase.B, UP))
        )
        row = np.empty((2 * len(forwards), 3), np.int32)
        is_forward = _turns(num_workers, worker, units)
        row[is_forward], row[~is_forward] = forwards, backwards
        rows.append(row[row[:, 2] < num_microbatches])
    placement = np.concatenate([zigzag(num_workers), num_workers - 1 - zigzag(num_workers)])
    pipe_of = [m % 2 for m in range(num_microbatches)]
    return spread_rows("bitpipe", rows, slots, placement, pipe_of_microbatch=pipe_of)


def _visits(workers: int, worker: int) -> NumpyArray:
    """Pipe, leg and place in its pipe (visits, 3) of a unit's forwards on a worker, in order."""
    # The pipe that starts nearer to the worker comes first, until the other one's microbatches
    # arrive; then they alternate. Backwards meet the legs the other way round.
    half = workers // 2
    near = worker // half
    far, alone = 1 - near, (half - worker if near == 0 else worker - half + 1)
    rest = half - alone
    found = [(near, DOWN, k) for k in range(alone)]
    for k in range(rest):
        found += [(far, DOWN, k), (near, DOWN, alone + k)]
    for k in range(alone):
        found += [(far, DOWN, rest + k), (far, UP, k)]
    for k in range(rest):
        found += [(near, UP, k), (far, UP, alone + k)]
    return np.array([*found, *((near, UP, rest + k) for k in range(alone))], np.int32)


def _ops(phase: Phase, visits: NumpyArray, workers: int, worker: int, units: int) -> Ops:
    """All ops of a phase on a worker: the visits of one unit after those of the other."""
    pipe, leg, place = visits.T
    down = np.where(pipe == 0, worker, workers - 1 - worker)
    stage = np.where(leg == DOWN, down, 2 * workers - 1 - down)
    microbatch = np.add.outer(workers * np.arange(units), 2 * place + pipe).ravel()
    return ops_of(phase, np.tile(stage, units), microbatch)


def _turns(workers: int, worker: int, units: int) -> Bool[NumpyArray, " row"]:
    """Return for each op of a row if it is a forward."""
    # A unit warms up, alternates and runs empty; the next one warms up before its last backwards.
    warmup = workers + workers // 2 + min(worker, workers - 1 - worker)
    left = 2 * workers - warmup
    between = "B" * (warmup - left + 1) + "F" + "FB" * (left - 1) + "F" * (warmup - left)
    row = "F" * warmup + ("FB" * left + between) * (units - 1) + "FB" * left + "B" * warmup
    return np.array(list(row)) == "F"
