"""Predictions held against measurements."""

import numpy as np
import pytest

from pipejax.analysis.prediction_errors import prediction_errors


def test_errors_are_summed_up_in_percent():
    measured = np.array([1.0, 2.0, 4.0, np.nan])
    found = prediction_errors(np.array([1.1, 1.8, 4.0, 7.0]), measured)
    assert found.rows == 3
    assert found.mape == pytest.approx((10 + 10 + 0) / 3)
    assert found.bias == pytest.approx((10 - 10 + 0) / 3)
    assert (found.median, found.largest) == pytest.approx((10, 10))


def test_what_is_not_predicted_is_no_error_of_nothing():
    with pytest.raises(ValueError, match="1 of 2 rows have no prediction"):
        prediction_errors(np.array([1.0, np.nan]), np.ones(2))
    with pytest.raises(ValueError, match="nothing was measured"):
        prediction_errors(np.ones(2), np.full(2, np.nan))
