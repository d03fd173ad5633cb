"""Fitted numbers with their standard errors."""

from pipejax.costs.calibration_record import FittedParameter
from pipejax.costs.system_numbers import dimension_of
from pipejax.search.calibration.parameters import Parameters
from pipejax.search.calibration.robust_fit import RobustFit, uncertainty


def fitted_numbers(
    parameters: Parameters, found: RobustFit, best: int = 0, num_numbers: int | None = None
) -> tuple[FittedParameter, ...]:
    """Numbers with their standard errors, which to first order are those of the whitened ones.

    `num_numbers` of the parameters are a system's, with units; those behind are factors.
    """
    known = uncertainty(found)
    values = parameters.values(found.point)[best]
    slope = parameters.slopes(found.point)[best]
    units = [dimension_of(name) for name in parameters.names[:num_numbers]]
    units += [""] * (len(values) - len(units))
    columns = (
        parameters.names,
        values.tolist(),
        units,
        (slope * known.error[best]).tolist(),
        known.identified[best].tolist(),
    )
    return tuple(FittedParameter(*each) for each in zip(*columns, strict=True))
