"""Parameters of a calibration: numbers of a system, their priors and their errors.

If the rows do not determine a number, it stays near its prior. The fit is over whitened parameters,
which are standard normal under the priors.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import resolve_name, wrong
from pipejax.base.data_files import load_json
from pipejax.costs.system.parts import number_dimension, system_number
from pipejax.costs.system.system import CalibrationRecord, FittedParameter, System
from pipejax.search.calibration.robust_fit import Points, RobustFit, uncertainty


class Prior(NamedTuple):
    """Prior of a number: its logarithm is normal, or its logit if the number is bounded."""

    # median, if the system's file lacks the number or `general` ignores the file; None if only a
    # file can give the number
    centre: float | None = None
    spread: float = 0.3  # standard deviation of the logarithm, or of the logit
    limit: float = math.inf  # upper limit of the number; 1 for a share
    least: float = 0.0  # lower limit of the number; the logarithm is of its distance from there
    # whether the system's number is the median even if `general`: vendors and tests of single
    # collectives know some numbers better than step times do
    is_own: bool = False
    is_fitted: bool = True  # whether the number is fitted by default
    why: str = ""  # source of the median, or why the number is not fitted by default


PRIORS: Mapping[str, Prior] = {
    name: Prior(**record)
    for name, record in load_json(Path(__file__).with_name("priors.json")).items()
}
# numbers that are fitted by default; step times seldom determine the other numbers
FITTED = tuple(name for name, prior in PRIORS.items() if prior.is_fitted)
# sets of numbers to choose from; the set that predicts unseen rows best is fitted
LADDER: tuple[tuple[str, ...], ...] = (
    ("compute.efficiency",),
    ("compute.efficiency", "kernels.attention_efficiency", "kernels.elementwise"),
    FITTED,
)

PerParameter = Float[NumpyArray, " parameters"]


class Parameters(NamedTuple):
    """Numbers to fit, and their priors."""

    names: tuple[str, ...]  # names of numbers of the system, or of factors
    centre: PerParameter  # median of the prior, in SI units
    spread: PerParameter  # standard deviation of the logarithm, or of a bounded number's logit
    limit: PerParameter  # upper limit of the number; infinite for an unbounded number
    least: PerParameter  # lower limit of the number; 0 for a bounded number

    def values(self, points: Points) -> Points:
        """Convert whitened parameters to numbers in SI units."""
        # The logarithm of an unbounded number's distance from its lower limit is normal. For a
        # bounded number, the logit of its share of the limit is normal: share / (1 - share) = odds
        # of the median * exp(spread * point).
        factor = np.exp(self.spread * points)
        median_share = np.where(self._is_bounded, self.centre / self._finite_limit, 0.5)
        odds = median_share / (1 - median_share) * factor
        bounded = self._finite_limit * odds / (1 + odds)
        unbounded = self.least + (self.centre - self.least) * factor
        return np.where(self._is_bounded, bounded, unbounded)

    def slopes(self, points: Points) -> Points:
        """Return the derivative of each number by its whitened parameter."""
        values = self.values(points)
        remaining_share = np.where(self._is_bounded, 1 - values / self._finite_limit, 1.0)
        return self.spread * (values - self.least) * remaining_share

    @property
    def _is_bounded(self) -> NumpyArray:
        return np.isfinite(self.limit)

    @property
    def _finite_limit(self) -> PerParameter:
        return np.where(self._is_bounded, self.limit, 1.0)


def parameters_with_priors(
    system: System, names: Sequence[str], *, general: bool = False
) -> Parameters:
    """Return the named numbers with priors, whose medians are the system's values if it has any."""
    # `general` priors ignore the values of the system, except for numbers without another median.
    fitted_names = [resolve_name(name, PRIORS, "fit") for name in names]
    if not fitted_names or len(set(fitted_names)) < len(fitted_names):
        raise wrong("fit", f"must name different numbers of a system, got {','.join(names)!r}")
    priors = [PRIORS[name] for name in fitted_names]
    centres = [
        _centre(float(system_number(system, name)), prior, general)
        for name, prior in zip(fitted_names, priors, strict=True)
    ]
    for name, centre, prior in zip(fitted_names, centres, priors, strict=True):
        if not 0 < centre < prior.limit:
            raise ValueError(
                f"fit: {name} of {system.name} must be above 0 and below {prior.limit:g} to be "
                f"fitted, got {centre:g}"
            )
    columns = (
        np.array([getattr(prior, name) for prior in priors]) for name in Parameters._fields[2:]
    )
    return Parameters(tuple(fitted_names), np.array(centres), *columns)


def _centre(system_value: float, prior: Prior, general: bool) -> float:
    """Return the system's value of a number, or the prior's centre if the system has none."""
    # A share of 1 counts as missing, because it comes from a data sheet, which states no losses.
    is_in_file = system_value > 0 and system_value < prior.limit
    if prior.centre is None or (is_in_file and (prior.is_own or not general)):
        return system_value
    return prior.centre


def with_factors(parameters: Parameters, names: Sequence[str], spread: float) -> Parameters:
    """Append parameters that multiply predicted times, with priors around 1."""
    columns = zip(parameters[1:], (1.0, spread, np.inf, 0.0), strict=True)
    extended = (np.append(column, np.full(len(names), value)) for column, value in columns)
    return Parameters((*parameters.names, *names), *extended)


def fitted_numbers(
    parameters: Parameters, minimum: RobustFit, best: int = 0, num_system_numbers: int | None = None
) -> tuple[FittedParameter, ...]:
    """Return the fitted numbers with standard errors, from the linearised fit at the minimum."""
    # The first `num_system_numbers` parameters belong to a system and have units. The others are
    # factors on layer times. `best` is the index of the best fit in the batch.
    error, is_identified = uncertainty(minimum)
    values = parameters.values(minimum.point)[best]
    slope = parameters.slopes(minimum.point)[best]
    units = [number_dimension(name) for name in parameters.names[:num_system_numbers]]
    units += [""] * (len(values) - len(units))
    errors, identified = (slope * error[best]).tolist(), is_identified[best].tolist()
    rows = zip(parameters.names, values.tolist(), units, errors, identified, strict=True)
    return tuple(FittedParameter(*row) for row in rows)


def calibrated_system(system: System, record: CalibrationRecord) -> System:
    """Return a system with the fitted numbers, and the record of the calibration."""
    for parameter in record.parameters:
        system = system.with_number(parameter.name, parameter.value)
    return dataclasses.replace(system, calibration=record)
