"""How far predictions are from what was measured."""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.display import short_repr


@short_repr
class PredictionErrors(NamedTuple):
    """Errors of predictions, predicted / measured - 1, summed up in percent.

    Attributes:
      rows: how many were measured.
      mape: mean of the absolute errors [%].
      median: of the absolute errors [%].
      p90: what 90 % of the absolute errors are within [%].
      bias: mean of the errors: above 0 where predictions are too slow or too large [%].
      largest: the largest absolute error [%].
    """

    rows: int
    mape: float
    median: float
    p90: float
    bias: float
    largest: float


def relative_errors(
    predicted: Float[NumpyArray, " rows"], measured: Float[NumpyArray, " rows"]
) -> Float[NumpyArray, " rows"]:
    """Return predicted / measured - 1, NaN where nothing was measured."""
    return np.asarray(predicted, float) / np.asarray(measured, float) - 1


def prediction_errors(
    predicted: Float[NumpyArray, " rows"], measured: Float[NumpyArray, " rows"]
) -> PredictionErrors:
    """Sum up the errors of the rows that were measured; what was not is NaN and left out.

    Raises:
      ValueError: if nothing was measured, or a prediction is missing.
    """
    errors = 100 * relative_errors(predicted, measured)[np.isfinite(measured)]
    if not errors.size:
        raise ValueError("nothing was measured: there are no errors to sum up")
    if not np.isfinite(errors).all():
        raise ValueError(f"{np.sum(~np.isfinite(errors))} of {errors.size} rows have no prediction")
    sizes = np.abs(errors)
    return PredictionErrors(
        rows=errors.size,
        mape=float(sizes.mean()),
        median=float(np.median(sizes)),
        p90=float(np.quantile(sizes, 0.9)),
        bias=float(errors.mean()),
        largest=float(sizes.max()),
    )
