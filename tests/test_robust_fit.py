"""The solver of calibrations, on data whose truth is known; SciPy's is the independent twin."""

import numpy as np
import pytest
from scipy.optimize import least_squares

from pipejax.search.calibration.robust_fit import (
    BEND,
    HUBER,
    NOISE,
    NOISE_ROWS,
    robust_fit,
    uncertainty,
)

ROWS, SPREAD = 60, 0.5
TRUTH = np.array([0.8, -0.6, 0.3])
X = np.geomspace(1.0, 300.0, ROWS)


def seconds(points):
    """Latency, rate and overhead, as of a message: (batch, rows) and its parts."""
    scale = np.exp(SPREAD * np.atleast_2d(points))
    columns = np.tile(5.0 * scale[:, :1], ROWS), scale[:, 1:2] * X, 20.0 * scale[:, 2:3] * X**-0.5
    return np.stack(columns)


def make_model(measured, unseen=0):
    """Residuals of log seconds, with as many parameters more that no row sees."""

    def model(points):
        parts = seconds(points[:, :3])
        total = parts.sum(axis=0)
        jacobian = np.moveaxis(SPREAD * parts / total, 0, -1)
        blank = np.zeros((*total.shape, unseen))
        return np.log(total / measured), np.concatenate([jacobian, blank], axis=-1)

    return model


def data(noise=0.02, outliers=(), seed=0):
    errors = noise * np.random.default_rng(seed).standard_normal(ROWS)
    errors[list(outliers)] += 1.0
    return seconds(TRUTH).sum(axis=0)[0] * np.exp(errors)


def by_scipy(model, weights, noise):
    """The same minimum at a given noise; the prior's residuals are not bounded."""

    def rho(squares):
        rows = squares[:ROWS]
        root = np.sqrt(1 + rows)
        bent = [2 * (root - 1), 1 / root, -0.5 / root**3]
        return np.hstack([bent, [squares[ROWS:], np.ones(3), np.zeros(3)]])

    def residuals(point):
        rows = np.sqrt(weights) * model(point[None])[0][0] / (BEND * noise)
        return np.concatenate([rows, point / (BEND * np.sqrt(HUBER.factor))])

    return least_squares(residuals, np.zeros(3), loss=rho, xtol=1e-12, ftol=1e-12, gtol=1e-12).x


def test_parameters_are_found_and_scipy_agrees():
    measured = data(outliers=(3, 40))
    model, weights = make_model(measured), np.ones((2, ROWS))
    weights[1, ::3] = 0.0
    result = robust_fit(model, np.zeros((2, 3)), weights, losses=(HUBER,))
    assert result.converged.all()
    assert result.steps.max() < 40
    for fit in range(2):
        twin = by_scipy(model, weights[fit], result.noise[fit])
        np.testing.assert_allclose(result.point[fit], twin, atol=2e-5)
    assert (np.abs(result.point - TRUTH) < 3 * uncertainty(result)[0]).all()
    assert 0.015 < result.noise[0] < 0.04


def test_outliers_are_bounded():
    clean = robust_fit(make_model(data()), np.zeros((1, 3)), np.ones((1, ROWS)))
    dirty = robust_fit(make_model(data(outliers=(0, 30, 59))), np.zeros((1, 3)), np.ones((1, ROWS)))
    assert np.abs(dirty.point - clean.point).max() < 0.02
    assert set(np.argsort(-np.abs(dirty.residual[0]))[:3]) == {0, 30, 59}


def test_a_fold_ignores_what_it_leaves_out():
    weights = np.ones((1, ROWS))
    weights[0, 20:] = 0.0
    wrong = data()
    wrong[20:] *= 7.0
    first, second = (
        robust_fit(make_model(measured), np.zeros((1, 3)), weights) for measured in (data(), wrong)
    )
    np.testing.assert_allclose(first.point, second.point, atol=1e-9)
    assert np.abs(second.residual[0, 20:]).min() > 1.0


def test_starts_agree():
    starts = np.random.default_rng(1).standard_normal((6, 3))
    result = robust_fit(make_model(data()), starts, np.ones((6, ROWS)))
    assert np.ptp(result.point, axis=0).max() < 1e-5
    assert np.ptp(result.noise) < 1e-6


def test_what_no_row_sees_stays_at_its_prior_and_is_flagged():
    result = robust_fit(make_model(data(), unseen=1), np.full((1, 4), 0.7), np.ones((1, ROWS)))
    error, is_identified = uncertainty(result)
    assert is_identified.tolist() == [[True, True, True, False]]
    assert result.point[0, 3] == pytest.approx(0.0, abs=1e-9)
    assert error[0, 3] == pytest.approx(1.0)


def test_standard_errors_are_those_of_repeated_measurements():
    fits = [
        robust_fit(make_model(data(seed=seed)), np.zeros((1, 3)), np.ones((1, ROWS)))
        for seed in range(100)
    ]
    spread = np.std([fit.point[0] for fit in fits], axis=0)
    message = np.mean([uncertainty(fit)[0][0] for fit in fits], axis=0)
    np.testing.assert_allclose(message / spread, 1.0, atol=0.25)


def test_few_rows_do_not_make_the_noise_vanish():
    weights = np.zeros((1, ROWS))
    weights[0, [0, 30, 59]] = 1.0
    result = robust_fit(make_model(data()), np.zeros((1, 3)), weights)
    assert result.noise[0] > NOISE * np.sqrt(NOISE_ROWS / (NOISE_ROWS + 3))
    assert np.abs(result.residual[0]).max() < 0.15


def test_no_step_leaves_what_can_be_evaluated():
    """A parameter that rows say little of at the start moves by a few spreads at a time."""

    def model(points):
        assert np.abs(points).max() < 60, "a step to where times overflow"
        rise = np.exp(np.clip(5.0 * (points - 8.0), -700, 700))  # nothing is seen of it below 7
        time = 1.0 + rise
        return np.log(np.tile(time, ROWS) / 200.0), np.repeat((5.0 * rise / time)[:, None], ROWS, 1)

    result = robust_fit(model, np.full((1, 1), 7.2), np.full((1, ROWS), 1.0))
    assert np.log(199.0) / 5.0 + 8.0 == pytest.approx(result.point[0, 0], rel=0.02)
