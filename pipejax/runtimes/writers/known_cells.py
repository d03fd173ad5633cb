"""Cells that a runtime has no word for: left out when a table is written for it, with a warning."""

import warnings

from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable, without
from pipejax.schedules.table.table_files import LossWarning


def with_known_cells(
    table: ScheduleTable, unknown: tuple[Phase, ...], runtime: str
) -> ScheduleTable:
    """Leave out cells of phases that a runtime does not have; the table itself if it has none."""
    count = {phase: int((table.phase == phase).sum()) for phase in unknown}
    found = ", ".join(f"{count[phase]} {phase.name}" for phase in unknown if count[phase])
    if not found:
        return table
    later = ": it updates after the whole table" * table.updates_within
    warnings.warn(
        f"{found} cells are left out, {runtime} has none{later}; --format json keeps them",
        LossWarning,
        stacklevel=2,
    )
    return spread(without(table, unknown))
