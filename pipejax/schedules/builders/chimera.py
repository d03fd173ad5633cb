"""Chimera and Hanayo: each worker has an early and a late stage, which fill each other's gaps.

Chimera runs two pipes in opposite directions. Every worker holds two stages, one of the down pipe
and one of the up pipe; every stage has two copies, whose gradients are added at the end of the
step. The published schedule is drawn with F = B = 1 slot; other slot durations give another order.
With 2f pipes the bubble equals that of P / f workers, and every stage has 2f copies (Table 3).

Hanayo has one pipe that goes down and up the workers in waves (arXiv:2308.15762), without a second
copy of the weights. For more microbatches than P the pipe admits one when one leaves, as 1F1B does.
"""

from collections.abc import Sequence

import numpy as np

from pipejax.base.array_types import Bool, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.schedules.builders.one_f_one_b import Ops, check_even, phase_ops
from pipejax.schedules.builders.published import EVEN, PLANNED, published
from pipejax.schedules.cells.cells import Placement, bidirectional, zigzag
from pipejax.schedules.cells.ops import EQUAL_SLOTS, UNIT_SLOTS, Phase, Slots
from pipejax.schedules.heuristics.list_scheduling import NO_LIMIT, Rules, list_schedule
from pipejax.schedules.heuristics.timeline import Work
from pipejax.schedules.table.slot_simulation import table_from_ops
from pipejax.schedules.table.table import ScheduleTable

DOWN, UP = 0, 1  # legs of a V


@published(
    "chimera", "Li and Hoefler, Chimera (arXiv:2107.06925)", bytes_per_op=PLANNED, legal=EVEN
)
def chimera(
    num_workers: int,
    num_microbatches: int,
    *,
    pipes: int = 2,
    in_flight: int | None = None,
    slots: Slots = EQUAL_SLOTS,
) -> ScheduleTable:
    """Two pipes in opposite directions; fewer idle slots, and two copies of every stage.

    Options:
      num_workers: P, even; each worker holds stage w of one pipe and P - 1 - w of the other.
      num_microbatches: M, even; microbatches alternate between the pipes.
      pipes: 2f pipes, f down and f up, each with a copy of every stage; even, divides P and M.
      in_flight: microbatches that each pipe keeps active at most; P if None, 1F1B's own limit.
        With B = 2F some more fill the gaps between units of P microbatches.

    Example:
      >>> print(chimera(2, 2))
                   0    1    2    3
        worker 0  0F0  1F1  1B1  0B0
        worker 1  0F1  1F0  1B0  0B1
    """
    shares = (1.0,) * num_workers
    return _chimera_table("chimera", num_workers, num_microbatches, shares, slots, in_flight, pipes)


@published(
    "chimera-asymmetric", "Barley et al. (arXiv:2605.24006)", bytes_per_op=PLANNED, legal=EVEN
)
def chimera_asymmetric(
    num_workers: int,
    num_microbatches: int,
    *,
    stage_shares: Sequence[float] | None = None,
    in_flight: int | None = None,
    slots: Slots = EQUAL_SLOTS,
) -> ScheduleTable:
    """Chimera with unequal layer shares: by default 1:2 between the two stages of a worker.

    The early stages, which hold most microbatches, get the smaller share, so every worker has
    one small and one large stage and the same work.

    Options:
      stage_shares: (P) share of the layers on each stage, in any unit; 1 for the first half of
        the stages and 2 for the second if None.
      in_flight: as for `chimera`.
      slots: slot durations of F and B on a stage of mean size.

    Example:
      >>> chimera_asymmetric(4, 4).stage_shares
      (0.666..., 0.666..., 1.333..., 1.333...)
    """
    if stage_shares is None:
        stage_shares = [1.0] * (num_workers // 2) + [2.0] * (num_workers // 2)
    mean = sum(stage_shares) / num_workers
    shares = tuple(share / mean for share in stage_shares)
    name = "chimera-asymmetric"
    return _chimera_table(name, num_workers, num_microbatches, shares, slots, in_flight)


def _chimera_table(
    name: str,
    workers: int,
    microbatches: int,
    shares: Sequence[float],
    slots: Slots,
    in_flight: int | None,
    pipes: int = 2,
) -> ScheduleTable:
    """Build Chimera from layer shares of the stages and a limit of microbatches in each pipe."""
    check_even(name, workers, "workers", "the two pipes meet in the middle")
    check_even(name, microbatches, "microbatches", "half go down, half go up")
    if pipes % 2 or workers % pipes or microbatches % pipes:
        raise MismatchError(
            f"pipes must be even and divide the workers ({workers}) and the microbatches "
            f"({microbatches}), got {pipes}",
            "pipes",
        )
    max_in_flight = workers if in_flight is None else in_flight
    microbatch_pipes = [m % pipes for m in range(microbatches)]
    placement = bidirectional(workers, pipes)
    return _greedy_table(name, placement, microbatch_pipes, max_in_flight, shares, slots)


@published("hanayo", "Liu et al., Hanayo (arXiv:2308.15762)", bytes_per_op=PLANNED)
def hanayo(
    num_workers: int, num_microbatches: int, *, waves: int = 1, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """Stages in waves down and up the workers; more waves idle less and send more messages.

    Options:
      waves: times down and up; 2 * waves stages per worker.

    Example:
      >>> print(hanayo(2, 2, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5    6    7    8    9
        worker 0  0F0  0F1   .   3F0  3B0  3F1  3B1  0B0   .   0B1
        worker 1   .   1F0  2F0  1F1  2F1  2B0  1B0  2B1  1B1   .
    """
    placement, microbatch_pipes = zigzag(num_workers, waves), [0] * num_microbatches
    shares = [1.0] * placement.shape[1]
    return _greedy_table("hanayo", placement, microbatch_pipes, 2 * num_workers, shares, slots)


def _greedy_table(
    name: str,
    placement: Placement,
    microbatch_pipes: Sequence[int],
    in_flight: int,
    shares: Sequence[float],
    slots: Slots,
) -> ScheduleTable:
    """Build a table by list scheduling, with at most `in_flight` microbatches in each pipe."""
    pipes, stages = placement.shape
    durations = {phase: [slots[phase.name] * n for n in shares] for phase in (Phase.F, Phase.B)}
    work = Work.from_placement(placement, microbatch_pipes, durations)
    stage_limits = [in_flight, *[NO_LIMIT] * (stages - 1)]  # the first stage admits microbatches
    run = list_schedule(work, Rules([stage_limits] * pipes))
    assert run is not None  # memory has no limit
    return table_from_ops(
        name, run.rows(), slots, placement, pipe_of_microbatch=microbatch_pipes, stage_shares=shares
    )


# BitPipe: two V-shaped pipes in opposite directions, each with two stages on every worker.
#
# Every worker holds four stages: two of the pipe that goes down the workers and up again, and two
# of the mirrored pipe. Microbatches start at both ends at once, as in Chimera (arXiv:2410.19367).


@published(
    "bitpipe", "Wu et al., BitPipe (arXiv:2410.19367)", stages_per_worker=2, legal="P even, any M"
)
def bitpipe(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """Two V-shaped pipes in opposite directions; at M = P idle for (P - 2) max(F, B) of a stage.

    Units of P microbatches, half of them in each pipe, follow each other as in the picture of the
    authors' wuhouming/BitPipe. Their runtime refuses other M; in this table, the last unit then has
    gaps.

    Options:
      num_workers: P, even; worker w holds stages w and 2 P - 1 - w of one pipe, P - 1 - w and
        P + w of the other.
      num_microbatches: M; microbatches alternate between the pipes.
    """
    why = "each half of them starts the microbatches of one pipe"
    check_even("bitpipe", num_workers, "workers", why)
    units = -(-num_microbatches // num_workers)  # rounded up
    rows = []
    for worker in range(num_workers):
        visits = _unit_visits(num_workers, worker)  # rows (pipe, leg: 0 down, 1 up, index)
        forwards = _visit_ops(Phase.F, visits, num_workers, worker, units)
        # backwards pass the legs of a V in reverse: swap 0 and 1
        backwards = _visit_ops(Phase.B, visits ^ [0, 1, 0], num_workers, worker, units)
        row = np.empty((2 * len(forwards), 3), np.int32)
        is_forward = _is_forward(num_workers, worker, units)
        row[is_forward], row[~is_forward] = forwards, backwards
        rows.append(row[row[:, 2] < num_microbatches])
    placement = np.concatenate([zigzag(num_workers), num_workers - 1 - zigzag(num_workers)])
    microbatch_pipes = [m % 2 for m in range(num_microbatches)]
    return table_from_ops("bitpipe", rows, slots, placement, pipe_of_microbatch=microbatch_pipes)


def _unit_visits(workers: int, worker: int) -> NumpyArray:
    """Return a worker's forwards of one unit in order, as rows (pipe, leg, index in pipe)."""
    # A unit is P microbatches, half of them in each pipe. A leg is `DOWN` or `UP` the workers. The
    # near pipe comes first, until microbatches of the far pipe arrive; then they alternate. The
    # first of four workers: (0, DOWN, 0) (0, DOWN, 1) (1, DOWN, 0) (1, UP, 0) (1, DOWN, 1) ..
    half = workers // 2
    near = worker // half
    far = 1 - near
    num_alone = half - worker if near == 0 else worker - half + 1  # before the far pipe arrives
    num_shared = half - num_alone
    visits = [(near, DOWN, k) for k in range(num_alone)]
    for k in range(num_shared):
        visits += [(far, DOWN, k), (near, DOWN, num_alone + k)]
    for k in range(num_alone):
        visits += [(far, DOWN, num_shared + k), (far, UP, k)]
    for k in range(num_shared):
        visits += [(near, UP, k), (far, UP, num_alone + k)]
    visits += [(near, UP, num_shared + k) for k in range(num_alone)]
    return np.array(visits, np.int32)


def _visit_ops(phase: Phase, visits: NumpyArray, workers: int, worker: int, units: int) -> Ops:
    """Return a worker's ops of a phase, as rows of phase, stage and microbatch, unit after unit."""
    pipe, leg, index = visits.T
    down_stage = np.where(pipe == 0, worker, workers - 1 - worker)
    stage = np.where(leg == DOWN, down_stage, 2 * workers - 1 - down_stage)
    # unit u has microbatches u P to u P + P - 1, and those of the two pipes alternate
    microbatch = np.add.outer(workers * np.arange(units), 2 * index + pipe).ravel()
    return phase_ops(phase, np.tile(stage, units), microbatch)


def _is_forward(workers: int, worker: int, units: int) -> Bool[NumpyArray, " ops"]:
    """Return for each op in a worker's row of BitPipe whether it is a forward."""
    # A unit (P microbatches) warms up, alternates and cools down. The next unit warms up before the
    # last backwards of this one: `cool_down_and_warmup` replaces both. Two units of two workers run
    # FFF FB BBBFFF FB BBB.
    warmup = workers + workers // 2 + min(worker, workers - 1 - worker)
    steady = 2 * workers - warmup  # pairs of forward and backward
    cool_down_and_warmup = "B" * (warmup - steady + 1) + "F"
    cool_down_and_warmup += "FB" * (steady - 1) + "F" * (warmup - steady)
    row = "F" * warmup + ("FB" * steady + cool_down_and_warmup) * (units - 1)
    row += "FB" * steady + "B" * warmup
    return np.array(list(row)) == "F"
