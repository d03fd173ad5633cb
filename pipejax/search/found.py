"""Result of a search: the best candidate, with a lower bound on the values of all candidates."""

import dataclasses
from collections.abc import Mapping
from typing import Generic, TypeVar

from pipejax.base.display import with_short_repr

Best = TypeVar("Best")
TIME_LIMIT = 60.0  # default time limit of a search [s]
GAP = 0.001  # gap at which a local search ends, far below the error of any measured time


def gap(value: float, lower_bound: float) -> float:
    """Return the largest share of a value that an unevaluated candidate could save."""
    return 1 - lower_bound / value if value > lower_bound else 0.0


@with_short_repr("value gap lower_bound baselines evaluated stopped best")
@dataclasses.dataclass(frozen=True)
class Found(Generic[Best]):
    """Best candidate of a search, with a lower bound on the values of all candidates.

    Attributes:
      best: the best candidate.
      value: makespan or step time of the best candidate [s].
      lower_bound: lower bound on the values of all candidates [s]; 0 without a proof.
      baselines: {name of a simple candidate: value [s]}; None for a candidate that cannot run.
      evaluated: number of evaluated candidates.
      stopped: reason for the end: "optimal" (the value reaches the bound), "gap" (the possible
        saving is below the requested gap), "tolerance" (the possible saving is below a solver's
        tolerance), "iterations", "time", "effort" or "interrupted".
    """

    best: Best
    value: float
    lower_bound: float
    baselines: Mapping[str, float | None]
    evaluated: int
    stopped: str

    @property
    def gap(self) -> float:
        """Return the largest share of the value that an unevaluated candidate could save."""
        return gap(self.value, self.lower_bound)
