"""The arrays of a table fit together, and what they name exists."""

import numpy as np

from pipejax.schedules.cells.cells import Content
from pipejax.schedules.cells.ops import CELL_PHASES, SHARDING, Phase, format_cell
from pipejax.schedules.cells.schedule_error import ScheduleError


def check_arrays(content: Content) -> None:
    """The arrays fit together and hold phases and workers that exist."""
    shapes = {array.shape for array in (*content.cells, *content.partners)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ScheduleError(f"the arrays of a table have one shape (workers, slots), got {shapes}")
    if content.placement.ndim != 2 or 0 in content.placement.shape:
        raise ScheduleError(
            f"placement has shape (pipes, stages), got {content.placement.shape}: "
            "no stage is placed"
        )
    for cells in (content.cells, content.partners):
        wrong = ~np.isin(cells.phase, [Phase.IDLE, *CELL_PHASES])
        for worker, slot in np.argwhere(wrong):
            raise ScheduleError(
                f"{cells.phase[worker, slot]} is not the code of a phase that a cell can hold"
            )
    outside = (content.placement < 0) | (content.placement >= content.num_workers)
    for pipe, stage in np.argwhere(outside):
        raise ScheduleError(
            f"stage {stage} of pipe {pipe} is placed on worker {content.placement[pipe, stage]}: "
            f"the table has workers 0 to {content.num_workers - 1}"
        )


def check_rows(content: Content) -> None:
    """Every worker has an op; only a forward and a backward are fused."""
    for worker in range(content.num_workers):
        if not np.isin(content.cells.phase[worker], CELL_PHASES).any():
            raise ScheduleError(
                f"worker {worker} has no op: every worker runs a stage", place=(worker, None)
            )
    for worker, slot in np.argwhere(content.partners.phase != Phase.IDLE):
        forward = content.cells.phase[worker, slot]
        backward = content.partners.phase[worker, slot]
        if forward != Phase.F or backward not in (Phase.B, Phase.I):
            cell = format_cell(content.cell(worker, slot))
            raise ScheduleError(
                f"{cell} on worker {worker} fuses other ops than a forward and a backward",
                place=(worker, slot),
            )


def check_ranges(content: Content) -> None:
    """Stages, microbatches and pipes exist."""
    for cells in (content.cells, content.partners):
        held = cells.phase != Phase.IDLE
        numbered = held & ~np.isin(cells.phase, SHARDING)
        for wrong, what in (
            (
                held & ((cells.stage < 0) | (cells.stage >= content.num_stages)),
                f"has no place: stages are 0 to {content.num_stages - 1}",
            ),
            (
                numbered
                & ((cells.microbatch < 0) | (cells.microbatch >= content.num_microbatches)),
                f"has no forward: microbatches are 0 to {content.num_microbatches - 1}",
            ),
            (
                numbered & ((cells.pipe < 0) | (cells.pipe >= content.num_pipes)),
                f"belongs to no pipe: pipes are 0 to {content.num_pipes - 1}",
            ),
        ):
            for worker, slot in np.argwhere(wrong):
                op = format_cell(content.cell(worker, slot))
                raise ScheduleError(f"op {op} on worker {worker} {what}", place=(worker, slot))
