"""The error for schedules that cannot run."""

from pipejax.base.array_types import Index
from pipejax.base.checks import MismatchError
from pipejax.base.display import short_repr_of


@short_repr_of("reason worker slot")
class ScheduleError(MismatchError):
    """A schedule that cannot run.

    The check that fails names the place; the table, which knows all cells, adds the grid.

    Attributes:
      reason: one line that names the op.
      grid: the table as text with the place marked, empty where there is no place to show.
      worker: row of the fault, or None.
      slot: column of the fault, or None where it is the whole row.
    """

    def __init__(
        self, reason: str, grid: str = "", place: tuple[Index, Index | None] | None = None
    ) -> None:
        """Join the reason and the grid to the message; a place is a worker and a slot."""
        super().__init__(f"{reason}\n{grid}" if grid else reason)
        self.reason, self.grid = reason, grid
        self.worker, self.slot = (None if p is None else int(p) for p in place or (None, None))
