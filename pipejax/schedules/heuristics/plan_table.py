"""Tables whose order follows from slots: by admission alone, or by a search under a limit."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipejax.base.checks import number
from pipejax.schedules.cells.ops import Cell, Op, Phase
from pipejax.schedules.cells.placement import Placement, looped
from pipejax.schedules.heuristics.list_scheduling import NO_LIMIT, Rules, list_schedule
from pipejax.schedules.heuristics.memory_limited_pipe import LimitedPipe
from pipejax.schedules.heuristics.rows_from_starts import TimedOps, rows_from_starts
from pipejax.schedules.heuristics.timeline import Work
from pipejax.schedules.table.slot_durations import check_slots
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable


def admission_table(
    name: str,
    placement: Placement,
    pipe_of: Sequence[int],
    *,
    in_flight_limit: int,
    slots: Mapping[str, float],
    stage_shares: Sequence[float],
) -> ScheduleTable:
    """Order the ops of a placement in slots; a pipe admits so many microbatches, as 1F1B does."""
    check_slots(slots)
    pipes, stages = placement.shape
    lag = np.zeros((2, pipes, stages - 1)).tolist()
    lasts = {phase: [slots[phase.name] * n for n in stage_shares] for phase in (Phase.F, Phase.B)}
    none = [0] * stages
    work = Work(
        placement=placement.tolist(),
        pipe_of=pipe_of,
        lasts=lasts,
        lag=lag,
        transmit=lag,
        sizes=none,
        kept=none,
        limits=[0] * (int(placement.max()) + 1),
    )
    run = list_schedule(work, Rules([[in_flight_limit, *[NO_LIMIT] * (stages - 1)]] * pipes))
    rows: list[list[Cell]] = [[] for _ in work.limits]
    for phase, stage, microbatch, worker, *_ in run.log if run else ():
        rows[worker].append((Op(phase, stage, microbatch),))
    packed = ScheduleTable.from_rows(
        rows,
        placement=placement,
        pipe_of_microbatch=pipe_of,
        name=name,
        slots=slots,
        stage_shares=stage_shares,
    )
    return spread(packed)


def plan_table(
    name: str,
    search: Callable[[LimitedPipe], TimedOps],
    *,
    num_workers: int,
    num_microbatches: int,
    memory_limit: float | None,
    weight_share: float,
    transfer: float,
    slots: Mapping[str, float],
) -> ScheduleTable:
    """Plan a pipe of equal stages for its slots, and draw the rows; no memory limit if None."""
    limit = num_microbatches if memory_limit is None else number(memory_limit, "memory_limit")
    pipe = LimitedPipe.of(
        num_workers,
        num_microbatches,
        forward=slots["F"],
        input_grad=slots["I"],
        weight_grad=slots["W"],
        limits=limit,
        there=number(transfer, "transfer"),
        weight_share=weight_share,
    )
    rows = rows_from_starts(
        search(pipe), sizes=pipe.sizes, limits=pipe.limits, weight_share=weight_share
    )
    placement = looped(num_workers)
    return spread(ScheduleTable.from_rows(rows, placement=placement, name=name, slots=slots))
