"""Answers of a search: the best candidate found, with a bound on all others."""

import dataclasses
from collections.abc import Mapping
from typing import Generic, TypeVar

from pipejax.base.display import with_short_repr

Best = TypeVar("Best")
TIME_LIMIT = 60.0  # seconds, unless something else is said
GAP = 0.001  # that ends a local search: far below what is known of any time


def gap(value: float, lower_bound: float) -> float:
    """Return the largest share of a value that an unknown candidate could save.

    Example:
      >>> gap(10.0, 7.5)
      0.25
    """
    return 1 - lower_bound / value if value > lower_bound else 0.0


@with_short_repr("value gap lower_bound baselines evaluated stopped best")
@dataclasses.dataclass(frozen=True)
class Found(Generic[Best]):
    """The best that a search found, and how far from the best of all it may be.

    Attributes:
      best: what was found, with what it is made of.
      value: its makespan or step time [s].
      lower_bound: nothing that was searched is shorter [s]; 0 where nothing is proven.
      baselines: the same value [s] of what one would take without a search, by name; None where
        that cannot run.
      evaluated: how many candidates were evaluated.
      stopped: why the search ended: "optimal" (the bound is reached), "gap" (what is left is below
        the gap that was asked for), "iterations", "time", "effort", "interrupted", or "tolerance"
        (what is left is below that of a solver).
    """

    best: Best
    value: float
    lower_bound: float
    baselines: Mapping[str, float | None]
    evaluated: int
    stopped: str

    @property
    def gap(self) -> float:
        """The largest share of the value that an unknown candidate could save."""
        return gap(self.value, self.lower_bound)
