"""A schedule for any number of microbatches: its tables, programs and what they hold."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from pipejax import schedules
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program
from pipejax.schedules.table.held_activations import HeldCounts, held_counts
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleFamily:
    """The tables of one schedule on so many workers, each made once, when it is asked for.

    Attributes:
      schedule: name of the schedule.
      num_workers: P.
      options: what the schedule takes besides, as for `schedules.build`.
      link: link model, or `Links`.
    """

    schedule: str
    num_workers: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    link: str | Links = "delay"
    _made: dict[Hashable, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def table(self, num_microbatches: int) -> ScheduleTable:
        """Return the table for M microbatches."""
        return self.once(
            ("table", num_microbatches),
            lambda: schedules.build(
                self.schedule,
                num_workers=self.num_workers,
                num_microbatches=num_microbatches,
                **self.options,
            ),
        )

    def program(self, num_microbatches: int) -> Program:
        """Return the program for M microbatches, with all-reduce and update."""
        return self.once(
            ("program", num_microbatches),
            lambda: lower(self.table(num_microbatches), link=self.link, step_end=True),
        )

    def held(self, num_microbatches: int) -> HeldCounts:
        """Return what the workers hold with M microbatches."""
        return self.once(
            ("held", num_microbatches), lambda: held_counts(self.table(num_microbatches))
        )

    def refusal(self, num_microbatches: int) -> str:
        """Say why the schedule does not exist for M microbatches; nothing if it does."""
        try:
            self.table(num_microbatches)
        except ValueError as error:
            return str(error)
        return ""

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what was made under a key, or make it: compiled functions live here too."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
