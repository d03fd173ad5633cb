"""Driver of all local searches: deadline, interruption, progress and seed in one loop.

A subclass provides the start, the neighbours of a candidate, their values, and a lower bound.
"""

import abc
import time
from collections.abc import Mapping
from typing import Generic

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.progress import OnProgress, to_nobody
from pipejax.search.found import Best, Found, gap as gap_of


class LocalSearch(abc.ABC, Generic[Best]):
    """State of a search; the constructor of a subclass sets the start."""

    value: float  # of the best candidate so far [s]
    lower_bound: float  # on the value of every candidate [s]
    baselines: Mapping[str, float | None]  # values of simple candidates by name [s]
    precision = 1e-12

    def __init__(self, seed: int) -> None:
        self._begun = time.monotonic()
        self.rng = np.random.default_rng(seed)
        self.evaluated = 0
        self.stale = 0  # steps since the last improvement

    @abc.abstractmethod
    def step(self, iteration: int) -> None:
        """Evaluate neighbours of the present candidate, and continue from one of them."""

    @abc.abstractmethod
    def best_so_far(self) -> tuple[Best, float]:
        """Return the best candidate, and its value as `evaluate` computes it [s]."""

    def choose(self, values: Float[NumpyArray, " candidates"]) -> int:
        """Choose the least value; ties at random."""
        return int(np.lexsort((self.rng.random(len(values)), values))[0])

    def run(
        self,
        iterations: int,
        time_limit: float | None = None,
        tell: OnProgress = to_nobody,
        gap: float = 0.0,
    ) -> Found[Best]:
        """Search until one limit is reached: iterations, seconds since the start, or the gap."""
        deadline = np.inf if time_limit is None else self._begun + time_limit
        try:
            for iteration in range(1, iterations + 1):
                if self._is_optimal() or self._gap <= gap:
                    break
                if time.monotonic() >= deadline:
                    return self.result("time")
                self.step(iteration)
                tell(iteration, iterations, f"best {self.value:.6g} s")
        except KeyboardInterrupt:
            return self.result("interrupted")
        if self._is_optimal():
            return self.result("optimal")
        return self.result("gap" if self._gap <= gap else "iterations")

    def result(self, stopped: str) -> Found[Best]:
        """Return the result of the search so far."""
        best, value = self.best_so_far()
        return Found(best, value, self.lower_bound, self.baselines, self.evaluated, stopped)

    @property
    def _gap(self) -> float:
        return gap_of(self.value, self.lower_bound)

    def _is_optimal(self) -> bool:
        return self.value <= self.lower_bound * (1 + self.precision)
