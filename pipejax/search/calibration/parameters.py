"""Parameters of a calibration: numbers of a system, their priors and their errors.

Numbers stay near their priors where the rows leave them open. The fit is over whitened
parameters, which are standard normal under the priors.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import resolve_name, wrong
from pipejax.costs.system.parts import number_dimension, system_number
from pipejax.costs.system.system import CalibrationRecord, FittedParameter, System
from pipejax.search.calibration.robust_fit import Points, RobustFit, uncertainty


class Prior(NamedTuple):
    """Prior of a number: its logarithm is normal, or its logit if the number is bounded."""

    # median if the system's file lacks the number, or if `general` ignores all files; None if only
    # a file can give the number
    centre: float | None = None
    spread: float = 0.3  # standard deviation of the logarithm, or of the logit
    limit: float = math.inf  # what the number stays below: 1 for a share
    # whether the system's own number is the median even then: vendors and tests of single
    # collectives know some of them better than step times do
    is_own: bool = False


PRIORS: Mapping[str, Prior] = {
    # measured: large products reach 73 to 87 % of the sheet's peak on A100, H100 and B200
    "compute.efficiency": Prior(0.8, 0.7, limit=1.0),
    "compute.latency": Prior(4e-6, 0.2),
    "memory.efficiency": Prior(0.7, 0.7, limit=1.0),
    "memory.latency": Prior(4e-6, 0.2),
    "kernels.attention_efficiency": Prior(0.7, 0.5, limit=1.0),
    "kernels.elementwise": Prior(1.0, 0.4),
    "kernels.narrow_efficiency": Prior(0.85, 0.5, limit=1.0),
    "kernels.misaligned_efficiency": Prior(0.5, 0.7, limit=1.0),
    "kernels.sharpness": Prior(4.0, 0.5),
    "optimizer.efficiency": Prior(0.8, 0.7, limit=1.0),
    # a launch takes 5 us in C, several times as long from a Python program with autograd
    "host.launch": Prior(40e-6, 0.7),
    "host.collective": Prior(50e-6, 1.0),
    "host.layer": Prior(100e-6, 1.0),
    "host.microbatch": Prior(300e-6, 1.0),
    "host.step": Prior(2e-3, 1.0),
    "collectives.latency": Prior(40e-6, 0.7, is_own=True),
    "collectives.simple_latency": Prior(30e-6, 1.0),
    "collectives.low_latency_share": Prior(0.92, 0.5, limit=1.0),
    "collectives.copies": Prior(1.0, 1.0),
    "node.efficiency": Prior(0.8, 0.7, limit=1.0),
    # a hop takes 2 us over NVLink and 10 us over InfiniBand, and hundreds where hosts pass it on
    "node.latency": Prior(None, 2.0),
    "network.efficiency": Prior(0.7, 0.7, limit=1.0),
    "network.latency": Prior(None, 2.0),
}
# numbers fitted only by name, because step times seldom determine them: collectives measure
# links of a node, seconds per kernel stand for those per layer, and not all runs have all kernels
_ASKED_FOR = (
    "kernels.narrow_efficiency",
    "host.layer",
    "collectives.simple_latency",
    "collectives.low_latency_share",
    "collectives.copies",
    "node.efficiency",
)
FITTED = tuple(name for name in PRIORS if name not in _ASKED_FOR)  # where nobody says what to fit
# default sets of fitted numbers: the set that best predicts unseen rows is taken, or none if the
# unfitted machine predicts them better
LADDER: tuple[tuple[str, ...], ...] = (
    ("compute.efficiency",),
    ("compute.efficiency", "kernels.attention_efficiency", "kernels.elementwise"),
    FITTED,
)

PerParameter = Float[NumpyArray, " parameters"]


class Parameters(NamedTuple):
    """Numbers to fit, and their priors."""

    names: tuple[str, ...]  # of the system's numbers, or of factors
    centre: PerParameter  # median of the prior, in SI units
    spread: PerParameter  # of the logarithm, or of the logit of a number with a limit
    limit: PerParameter  # upper limit of the number; infinite without one

    def values(self, points: Points) -> Points:
        """Convert whitened parameters, standard normal under the prior, to numbers in SI units."""
        # the logarithm of an unbounded number is normal, and the logit of a bounded number's share
        # of its limit: share / (1 - share) = odds of the median * exp(spread * point)
        factor = np.exp(self.spread * points)
        median_share = np.where(self._is_bounded, self.centre / self._finite_limit, 0.5)
        odds = median_share / (1 - median_share) * factor
        bounded = self._finite_limit * odds / (1 + odds)
        return np.where(self._is_bounded, bounded, self.centre * factor)

    def slopes(self, points: Points) -> Points:
        """Return the derivative of each number by its whitened parameter."""
        values = self.values(points)
        remaining_share = np.where(self._is_bounded, 1 - values / self._finite_limit, 1.0)
        return self.spread * values * remaining_share

    @property
    def _is_bounded(self) -> NumpyArray:
        return np.isfinite(self.limit)

    @property
    def _finite_limit(self) -> PerParameter:
        return np.where(self._is_bounded, self.limit, 1.0)


def parameters_with_priors(
    system: System, names: Sequence[str], *, general: bool = False
) -> Parameters:
    """Return the named numbers with priors, centred at the system's values where it has them."""
    # `general` priors ignore the system's file, except for numbers that only a file can give.
    fitted_names = [resolve_name(name, PRIORS, "fit") for name in names]
    if not fitted_names or len(set(fitted_names)) < len(fitted_names):
        raise wrong("fit", f"must name a number of a system once, got {','.join(names)!r}")
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
    spreads, limits = ([getattr(prior, name) for prior in priors] for name in ("spread", "limit"))
    return Parameters(tuple(fitted_names), np.array(centres), np.array(spreads), np.array(limits))


def _centre(system_value: float, prior: Prior, general: bool) -> float:
    """Return the system's value of a number, or the prior's centre if the system has none."""
    # A share of 1 comes from a data sheet, which states no losses, so it counts as missing.
    is_in_file = system_value > 0 and system_value < prior.limit
    if prior.centre is None or (is_in_file and (prior.is_own or not general)):
        return system_value
    return prior.centre


def with_factors(parameters: Parameters, names: Sequence[str], spread: float) -> Parameters:
    """Append free factors with priors around 1, which multiply predicted times."""
    columns = zip(parameters[1:], (1.0, spread, np.inf), strict=True)
    extended = (np.append(column, np.full(len(names), value)) for column, value in columns)
    return Parameters((*parameters.names, *names), *extended)


def fitted_numbers(
    parameters: Parameters, minimum: RobustFit, best: int = 0, num_system_numbers: int | None = None
) -> tuple[FittedParameter, ...]:
    """Return the fitted numbers with standard errors, from the linearised fit at its minimum."""
    # The first `num_system_numbers` parameters belong to a system and have units; the others are
    # factors on layer times. `best` is the row of the best start in the batch of fits.
    error, is_identified = uncertainty(minimum)
    values = parameters.values(minimum.point)[best]
    slope = parameters.slopes(minimum.point)[best]
    units = [number_dimension(name) for name in parameters.names[:num_system_numbers]]
    units += [""] * (len(values) - len(units))
    columns = (
        parameters.names,
        values.tolist(),
        units,
        (slope * error[best]).tolist(),
        is_identified[best].tolist(),
    )
    return tuple(FittedParameter(*row) for row in zip(*columns, strict=True))


def calibrated_system(system: System, record: CalibrationRecord) -> System:
    """Return a system with the fitted numbers, and the record of the calibration."""
    for parameter in record.parameters:
        system = system.with_number(parameter.name, parameter.value)
    return dataclasses.replace(system, calibration=record)
