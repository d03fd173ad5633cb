"""A schedule for any number of microbatches: its tables, programs and what they hold."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

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

    @functools.cached_property
    def few_microbatches(self) -> tuple[int, ...]:
        """The fewest microbatches, and multiples of P up to a period: what a relaxation takes."""
        few = [count for count in (1, 2) if not self.refusal(count)][:1]
        many = [times * self.num_workers for times in (1, 2, 4)]
        if self.refusal(many[-1]):
            raise ValueError(self.refusal(many[-1]))
        return tuple(sorted({*few, *many}))

    def table(self, num_microbatches: int) -> ScheduleTable:
        """Return the table for M microbatches."""
        return self._once(
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
        return self._once(
            ("program", num_microbatches),
            lambda: lower(self.table(num_microbatches), link=self.link, step_end=True),
        )

    def held(self, num_microbatches: int) -> HeldCounts:
        """Return what the workers hold with M microbatches; moments are filled up with zeros.

        So few shapes are compiled for, however many M are evaluated.
        """

        def make() -> HeldCounts:
            held = held_counts(self.table(num_microbatches))
            moments = held.parts.shape[-1]
            fill = 2 ** math.ceil(math.log2(moments)) - moments
            return held._replace(parts=np.pad(held.parts, [*[(0, 0)] * 3, (0, fill)]))

        return self._once(("held", num_microbatches), make)

    def refusal(self, num_microbatches: int) -> str:
        """Say why the schedule does not exist for M microbatches; nothing if it does."""
        try:
            self.table(num_microbatches)
        except ValueError as error:
            return str(error)
        return ""

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what was made under a key, or make it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
