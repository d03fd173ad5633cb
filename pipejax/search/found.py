"""Result of a search: the best candidate, with a lower bound on the values of all candidates."""

import dataclasses
from collections.abc import Mapping
from typing import Generic, TypeVar

from pipejax.base.display import with_short_repr

Best = TypeVar("Best")
TIME_LIMIT = 60.0  # default [s]
GAP = 0.001  # that ends a local search, far below the error of any measured time


def gap(value: float, lower_bound: float) -> float:
    """Return the share of a value that candidates not yet evaluated could save at most."""
    return 1 - lower_bound / value if value > lower_bound else 0.0


@with_short_repr("value gap lower_bound baselines evaluated stopped best")
@dataclasses.dataclass(frozen=True)
class Found(Generic[Best]):
    """Best candidate of a search, with a lower bound on the values of all candidates.

    Attributes:
      best: the best candidate.
      value: its makespan or step time [s].
      lower_bound: bound on the values of all candidates [s]; 0 without a proof.
      baselines: values of simple candidates by name [s]; None for one that cannot run.
      evaluated: number of evaluated candidates.
      stopped: reason for the end: "optimal" (the bound is reached), "gap" (the possible saving is
        below the requested gap), "iterations", "time", "effort", "interrupted", or "tolerance" (it
        is below that of a solver).
    """

    best: Best
    value: float
    lower_bound: float
    baselines: Mapping[str, float | None]
    evaluated: int
    stopped: str

    @property
    def gap(self) -> float:
        """Return the share of the value that candidates not yet evaluated could save at most."""
        return gap(self.value, self.lower_bound)
