"""Fitted numbers as whitened parameters: standard normal under their priors."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import known_as
from pipejax.costs.priors import PRIORS, Prior
from pipejax.costs.system import System
from pipejax.costs.system_numbers import number_of

PerParameter = Float[NumpyArray, " parameters"]
Points = Float[NumpyArray, "batch parameters"]


class Parameters(NamedTuple):
    """What is fitted, and what is known of it.

    Attributes:
      names: (parameters) of the system's numbers, or of factors.
      centre: (parameters) median of the prior, in SI units.
      spread: (parameters) of the logarithm, or of the logit of a number with a limit.
      limit: (parameters) infinite where there is none.
    """

    names: tuple[str, ...]
    centre: PerParameter
    spread: PerParameter
    limit: PerParameter

    def values(self, points: Points) -> Points:
        """Turn whitened points into numbers, in SI units."""
        moved = self._odds * np.exp(self.spread * points)
        return np.where(self._bounded, self._finite * moved / (1 + moved), self.centre * moved)

    def slopes(self, points: Points) -> Points:
        """Derivative of each number by its whitened parameter."""
        values = self.values(points)
        return self.spread * values * np.where(self._bounded, 1 - values / self._finite, 1.0)

    @property
    def _bounded(self) -> NumpyArray:
        return np.isfinite(self.limit)

    @property
    def _finite(self) -> PerParameter:
        return np.where(self._bounded, self.limit, 1.0)

    @property
    def _odds(self) -> PerParameter:
        share = np.where(self._bounded, self.centre / self._finite, 0.5)
        return np.where(self._bounded, share / (1 - share), 1.0)


def parameters_of(system: System, names: Sequence[str]) -> Parameters:
    """Look up what is known of named numbers; what a prior leaves open, the system says.

    Raises:
      ValueError: if a number has no prior, or the system's own lies outside of it.
    """
    known = [known_as(name, PRIORS, "fit") for name in names]
    if not known or len(set(known)) < len(known):
        raise ValueError(f"fit must name different numbers of a system, got {','.join(names)!r}")
    priors = [PRIORS[name] for name in known]
    centres = [
        _centre(float(number_of(system, name)), prior)
        for name, prior in zip(known, priors, strict=True)
    ]
    for name, centre, prior in zip(known, centres, priors, strict=True):
        if not 0 < centre < prior.limit:
            raise ValueError(
                f"fit: {name} of {system.name} must be above 0 and below {prior.limit:g} to be "
                f"fitted, got {centre:g}"
            )
    spreads, limits = ([getattr(prior, name) for prior in priors] for name in ("spread", "limit"))
    return Parameters(tuple(known), np.array(centres), np.array(spreads), np.array(limits))


def _centre(own: float, prior: Prior) -> float:
    """Median of a number that a system has of its own, 0 where it says nothing."""
    if prior.centre is None or (prior.is_own and own > 0):
        return own
    return prior.centre


def factors(names: Sequence[str], spread: float) -> Parameters:
    """Free factors of what the model says, around 1."""
    size = len(names)
    return Parameters(tuple(names), np.ones(size), np.full(size, spread), np.full(size, np.inf))


def joined(*parts: Parameters) -> Parameters:
    """Put several sets of parameters behind each other."""
    names = tuple(name for part in parts for name in part.names)
    columns = (np.concatenate([part[k] for part in parts]) for k in (1, 2, 3))
    return Parameters(names, *columns)
