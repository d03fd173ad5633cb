"""Bands of predictions, and how many rows that were left out lie in them."""

import numpy as np
import pytest

from pipejax.search.calibration.hold_outs import band, band_coverage


def grouped(groups, rows, seed):
    """Residuals whose groups are wrong together."""
    random = np.random.default_rng(seed)
    return [random.normal(0.1 * random.normal(), 0.02, rows) for _ in range(groups)]


def test_a_band_is_of_measured_over_predicted():
    residual = np.log(np.linspace(0.8, 1.25, 1001))  # predicted over measured
    _, low, high = band(residual, 90, 10**6)
    assert low == pytest.approx(1 / np.quantile(np.exp(residual), 0.95))
    assert high == pytest.approx(1 / np.quantile(np.exp(residual), 0.05))


def test_few_groups_need_a_wider_band():
    residual = np.concatenate(grouped(12, 20, 0))
    widths = [np.log(high / low) for _, low, high in (band(residual, 80, k) for k in (4, 12, 500))]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == pytest.approx(np.ptp(residual))


@pytest.mark.parametrize("percent", [80, 90])
def test_a_group_that_was_left_out_is_covered_as_often_as_said(percent):
    result = []
    for seed in range(40):
        groups = grouped(20, 15, seed)
        left_out = np.repeat(np.eye(20, dtype=bool), 15, axis=1)
        residual = np.tile(np.concatenate(groups), (20, 1))
        result.append(band_coverage(groups, residual, left_out)[percent])
    assert np.mean(result) == pytest.approx(percent, abs=3)


def test_one_fold_is_judged_by_the_rows_that_were_fitted():
    residual = np.array([[0.01, -0.01, 0.02, -0.02, 0.0, 0.5]])
    left_out = np.arange(6)[None] == 5
    assert band_coverage([residual[0, 5:]], residual, left_out) == {80: 0.0, 90: 0.0}
