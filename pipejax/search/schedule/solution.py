"""Solutions of the optimiser."""

import dataclasses
from collections.abc import Mapping

from pipejax.base.display import short_repr_of
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import gap


@short_repr_of("status makespan lower_bound gap bound_by source seconds offloaded table baseline")
@dataclasses.dataclass(frozen=True)
class Solution:
    """The best schedule so far, and how far from the best it can be. Times are seconds.

    Attributes:
      table: the schedule.
      makespan: as `evaluate` gives it with the costs; the longest span where that is asked for.
      lower_bound: no schedule that keeps the limits is shorter.
      bound_by: what the bound rests on: "worker", "stage", "memory chain" or "memory area", which
        `verify` derives again, or the word of the "solver".
      status: "optimal" where the two meet within the rounding, otherwise "feasible".
      rounding: by how much whole units may keep the two apart.
      source: what made the schedule.
      seconds: time since the start.
      baseline: makespan of other schedules under the same limits, by name; None for those that
        do not keep them.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> best = Solution(table, 8.0, 6.0, "stage", "feasible", 0.0, "1f1b", 0.1, {})
      >>> best.gap
      0.25
    """

    table: ScheduleTable
    makespan: float
    lower_bound: float
    bound_by: str
    status: str
    rounding: float
    source: str
    seconds: float
    baseline: Mapping[str, float | None]

    @property
    def offloaded(self) -> int:
        """Activations that go to the host and back."""
        return int((self.table.phase == Phase.O).sum())

    @property
    def gap(self) -> float:
        """Share of the makespan that an unknown schedule could save, at most."""
        return gap(self.makespan, self.lower_bound)
