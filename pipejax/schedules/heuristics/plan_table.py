"""Schedules that a search plans for given times: uniform pipes in, tables out."""

from collections.abc import Callable, Mapping

from pipejax.base.checks import number
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.heuristics.memory_limited_pipe import LimitedPipe
from pipejax.schedules.heuristics.rows_from_starts import TimedOps, rows_from_starts
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable


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
