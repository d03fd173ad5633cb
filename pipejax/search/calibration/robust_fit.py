"""Robust least squares on logarithms, many fits of the same rows at once.

Parameters are whitened: each is standard normal under its prior. A fit minimises

    sum over rows of weight * rho(residual / noise) + sum of squared parameters / 2

with the pseudo-Huber loss rho, which is quadratic near 0 and linear for outliers. The noise is
estimated along with the parameters. All fits of a batch (folds of a hold-out, starts) take their
Levenberg-Marquardt steps together, so that one call of the model serves them all: that is what
SciPy's solvers, which take one fit at a time, do not offer.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray

BEND = 1.345  # where the loss turns linear, in noises: 95 % efficient for normal errors (Huber)
NOISE = 0.05  # of a model of step times, before any row is seen
NOISE_ROWS = 2.0  # how many rows that guess counts for
STEP = 1e-4  # a fit has converged once no parameter moves by more, in spreads of its prior
MOST_STEPS = 200
DAMPING = 1e-3  # at the start
ROUNDING = 1e-12  # of the objective
LEAST_NOISE = 1e-9  # below it rows are met exactly, and nothing is left to weigh

Residuals = Float[NumpyArray, "batch rows"]
Jacobians = Float[NumpyArray, "batch rows parameters"]
Points = Float[NumpyArray, "batch parameters"]
ResidualModel = Callable[[Points], tuple[Residuals, Jacobians]]


class RobustFit(NamedTuple):
    """Minima of a batch of fits.

    Attributes:
      point: (batch, parameters) whitened.
      residual: (batch, rows) log of predicted over measured, left-out rows included.
      noise: (batch) standard deviation of the residuals, outliers bounded.
      objective: (batch) minimum.
      curvature: (batch, parameters, parameters) information of the rows alone; the prior adds 1.
      steps: (batch) model evaluations until convergence.
      converged: (batch) whether the last step was small enough.
    """

    point: Points
    residual: Residuals
    noise: Float[NumpyArray, " batch"]
    objective: Float[NumpyArray, " batch"]
    curvature: Float[NumpyArray, "batch parameters parameters"]
    steps: NumpyArray
    converged: NumpyArray


class _FitState(NamedTuple):
    """Where the fits stand: every field has the batch axis first."""

    point: Points
    residual: Residuals
    jacobian: Jacobians
    noise: Float[NumpyArray, " batch"]
    damping: Float[NumpyArray, " batch"]
    growth: Float[NumpyArray, " batch"]


def loss(z: NumpyArray) -> NumpyArray:
    """Pseudo-Huber loss, up to a factor: z^2 / 2 near 0, BEND |z| far away."""
    return BEND**2 * (np.sqrt(1 + (z / BEND) ** 2) - 1)


def _slope(z: NumpyArray) -> NumpyArray:
    return z / np.sqrt(1 + (z / BEND) ** 2)


def _bend(z: NumpyArray) -> NumpyArray:
    return (1 + (z / BEND) ** 2) ** -1.5


def _normal_mean(values: NumpyArray) -> float:
    return float((_NORMAL_WEIGHT * values).sum() / _NORMAL_WEIGHT.sum())


_NORMAL, _NORMAL_WEIGHT = np.polynomial.hermite_e.hermegauss(60)
MEAN_SQUARE_SLOPE = _normal_mean(_slope(_NORMAL) ** 2)
# an estimate from bounded errors has variance mean(slope^2) / mean(bend)^2 per row (Huber, 1964):
# with this factor the curvature at the minimum is the inverse of it, so that rows and prior weigh
# what they should, and standard errors come out right
FACTOR = _normal_mean(_bend(_NORMAL)) / MEAN_SQUARE_SLOPE


def robust_fit(
    model: ResidualModel,
    starts: Points,
    weights: Float[NumpyArray, "batch rows"],
    *,
    most_steps: int = MOST_STEPS,
) -> RobustFit:
    """Fit from every start with its own weights of the rows.

    A weight of 0 leaves a row out; its residual is still reported. A step that does not lower the
    objective is tried again with more damping. A fit that has converged is not evaluated again.
    """
    size = len(starts)
    point = np.array(starts, float)
    residual, jacobian = (np.array(each, float) for each in model(point))
    state = _FitState(point, residual, jacobian, *np.full((3, size), [[NOISE], [DAMPING], [2.0]]))
    state = state._replace(noise=_noise(state, weights))
    steps, converged = np.ones(size, int), np.zeros(size, bool)
    for _ in range(most_steps):
        active = np.flatnonzero(~converged)
        if not len(active):
            break
        moved, small = _advanced(
            model, _FitState(*(each[active] for each in state)), weights[active]
        )
        for whole, part in zip(state, moved, strict=True):
            whole[active] = part
        steps[active] += 1
        converged[active] = small
    return RobustFit(
        state.point,
        state.residual,
        state.noise,
        _objective(state.residual, state.point, state.noise, weights),
        _information(state, weights),
        steps,
        converged,
    )


def _advanced(
    model: ResidualModel, state: _FitState, weights: NumpyArray
) -> tuple[_FitState, NumpyArray]:
    """Try one step of each fit; (batch) whether it had converged.

    Damping follows the ratio of what a step gains to what the linear model promises (Nielsen,
    1999): it settles where steps succeed, instead of falling until they fail.
    """
    point, residual, jacobian, noise, damping, growth = state
    z = residual / noise[:, None]
    gradient = np.einsum("brp,br->bp", jacobian, FACTOR * weights * _slope(z))
    gradient = gradient / noise[:, None] + point
    curvature = _information(state, weights) + np.eye(point.shape[1])
    weight = damping[:, None] * np.einsum("bpp->bp", curvature)
    damped = curvature + weight[:, None] * np.eye(point.shape[1])
    step = -np.linalg.solve(damped, gradient[..., None])[..., 0]
    trial = point + step
    new_residual, new_jacobian = model(trial)
    before = _objective(residual, point, noise, weights)
    after = _objective(new_residual, trial, noise, weights)
    better = after <= before + ROUNDING * np.abs(before)  # a minimum is flat
    promised = (step * (weight * step - gradient)).sum(axis=1) / 2
    gain = np.where(better, before - after, 0.0) / np.maximum(promised, ROUNDING * np.abs(before))

    def chosen(new: NumpyArray, old: NumpyArray) -> NumpyArray:
        return np.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    moved = _FitState(
        chosen(trial, point),
        chosen(new_residual, residual),
        chosen(new_jacobian, jacobian),
        noise,
        damping
        * np.where(better, np.maximum(1 / 3, 1 - (2 * np.clip(gain, 0, 1) - 1) ** 3), growth),
        np.where(better, 2.0, 2 * growth),
    )
    noise = np.where(better, _noise(moved, weights), noise)
    settled = np.abs(noise / moved.noise - 1) <= STEP
    small = (np.abs(step).max(axis=1) <= STEP) & settled
    return moved._replace(noise=noise), small


def _objective(
    residual: Residuals, point: Points, noise: NumpyArray, weights: NumpyArray
) -> Float[NumpyArray, " batch"]:
    with np.errstate(over="ignore", invalid="ignore"):
        rows = FACTOR * (weights * loss(residual / noise[:, None])).sum(axis=1)
        value = rows + (point**2).sum(axis=1) / 2
    return np.where(np.isfinite(value), value, np.inf)


def _information(state: _FitState, weights: NumpyArray) -> Float[NumpyArray, "batch params params"]:
    """What the rows say of the parameters: J^T rho'' J / noise^2, of each fit."""
    noise = state.noise[:, None]
    curved = FACTOR * weights * _bend(state.residual / noise) / noise**2
    return np.einsum("brp,br,brq->bpq", state.jacobian, curved, state.jacobian, optimize=True)


def _noise(state: _FitState, weights: NumpyArray) -> Float[NumpyArray, " batch"]:
    """Estimate the noise again from bounded residuals, for as many rows as are free.

    The parameters use up the rows that decide them: the trace of what the rows say, relative to
    rows and prior together. A guess that counts as a few rows keeps small data sets, which the
    parameters may meet exactly, from believing in no noise at all.
    """
    information = _information(state, weights)
    both = information + np.eye(information.shape[-1])
    used = np.einsum("bpp->b", np.linalg.solve(both, information))
    squares = (weights * _slope(state.residual / state.noise[:, None]) ** 2).sum(axis=1)
    squares = squares * state.noise**2 / MEAN_SQUARE_SLOPE + NOISE_ROWS * NOISE**2
    free = np.maximum(weights.sum(axis=1) - used, 0) + NOISE_ROWS
    return np.maximum(np.sqrt(squares / free), LEAST_NOISE)


class Uncertainty(NamedTuple):
    """How well each parameter is known, in spreads of its prior.

    Attributes:
      error: (batch, parameters) standard error by rows and prior together.
      error_of_rows: by the rows alone; infinite where they leave a parameter open.
      identified: whether the rows say more of a parameter than its prior.
    """

    error: Points
    error_of_rows: Points
    identified: NumpyArray


def uncertainty(fit: RobustFit) -> Uncertainty:
    """Standard errors at the minimum (Laplace), and which parameters the rows decide.

    The prior of a whitened parameter has variance 1. Rows that know a parameter better than its
    prior, with all others free, more than halve that variance.
    """
    size = fit.point.shape[1]
    error = np.sqrt(np.einsum("bpp->bp", np.linalg.inv(fit.curvature + np.eye(size))))
    alone = np.full_like(fit.point, np.inf)
    for one, information in enumerate(fit.curvature):
        values, vectors = np.linalg.eigh(information)
        known = values > 1e-10 * values.max(initial=0)
        # a direction that no row sees leaves every parameter open that has a part in it
        is_open = (vectors[:, ~known] ** 2).sum(axis=1) > 1e-8
        variance = (vectors[:, known] ** 2 / values[known]).sum(axis=1)
        alone[one] = np.where(is_open, np.inf, np.sqrt(variance))
    return Uncertainty(error, alone, error**2 < 0.5)
