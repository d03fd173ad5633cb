"""Robust least squares on logarithms of times, for many fits of the same rows at once.

Parameters are whitened: each is standard normal under its prior. A fit minimises

    sum over rows of weight * rho(residual / noise) + sum of squared parameters / 2

with a loss rho that is quadratic near 0 and bounds the influence of an outlier. The first loss is
pseudo-Huber: it has one minimum, which every start reaches. The second loss is Student's: the
influence of a far row falls to 0, so many far rows on one side do not bias the fit (an MM-estimate,
Yohai 1987). The noise is estimated along with the parameters. The fits of a batch (folds of a
hold-out, or starts) take their Levenberg-Marquardt steps together, with one call of the model.
SciPy's solvers take one fit at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray

BEND = 1.345  # residual / noise at which Huber's loss becomes linear; 95 % efficient
FREEDOM = 3.0  # degrees of freedom of Student's loss
NOISE = 0.05  # prior guess of the noise of a model of step times
NOISE_ROWS = 2.0  # weight of this guess, in rows
STEP = 1e-4  # largest move of a parameter in a converged fit, in spreads of its prior
MAX_STEP = 4.0  # largest step of a parameter, in spreads of its prior
MAX_NUM_STEPS = 200
DAMPING = 1e-3  # first damping
ROUNDING = 1e-12  # relative rounding of the objective
MIN_NOISE = 1e-9  # keeps the noise above 0 if rows are fitted exactly
# near a minimum, the noise is iterated up to so many times, until it changes relatively by less
NEAR, NOISE_STEPS, NOISE_STEP = 0.1, 30, 1e-6

Residuals = Float[NumpyArray, "batch rows"]
Jacobians = Float[NumpyArray, "batch rows parameters"]
Points = Float[NumpyArray, "batch parameters"]
ResidualModel = Callable[[Points], tuple[Residuals, Jacobians]]


def row_weights(variance: Float[NumpyArray, " rows"], noise: float) -> Float[NumpyArray, " rows"]:
    """Return the weight of each row: below 1/2 if its repetitions spread more than `noise`."""
    return noise**2 / (noise**2 + variance)


class RobustFit(NamedTuple):
    """Results of a batch of fits: minima, residuals, noise and curvatures."""

    point: Points  # whitened parameters at the minimum
    residual: Residuals  # log(predicted / measured), also of left-out rows
    noise: Float[NumpyArray, " batch"]  # standard deviation of the residuals, outliers bounded
    objective: Float[NumpyArray, " batch"]  # minimum of the objective
    # information of the rows alone; the prior adds the identity
    curvature: Float[NumpyArray, "batch parameters parameters"]
    steps: NumpyArray  # model evaluations until convergence
    converged: NumpyArray  # whether the last step was small enough


class _FitState(NamedTuple):
    """State of all fits; every field has the batch axis first."""

    point: Points
    residual: Residuals
    jacobian: Jacobians
    noise: Float[NumpyArray, " batch"]
    damping: Float[NumpyArray, " batch"]
    growth: Float[NumpyArray, " batch"]  # factor on the damping after the next rejected step


class Loss(NamedTuple):
    """Loss function rho of z = residual / noise; near 0 it is z^2 / 2."""

    value: Callable[[NumpyArray], NumpyArray]  # rho
    slope: Callable[[NumpyArray], NumpyArray]  # derivative of rho
    second: Callable[[NumpyArray], NumpyArray]  # second derivative of rho
    # curvature for steps, positive everywhere: `second`, or slope / z if `second` can be negative
    bend: Callable[[NumpyArray], NumpyArray]
    mean_square_slope: float  # mean of slope^2 for normal errors
    # factor on the loss, with which the curvature at the minimum is the inverse of the estimate's
    # variance per row, mean(slope^2) / mean(rho'')^2 (Huber, 1964). The prior and the standard
    # errors need this factor.
    factor: float


def _normal_mean(values: NumpyArray) -> float:
    return float((_NORMAL_WEIGHT * values).sum() / _NORMAL_WEIGHT.sum())


_NORMAL, _NORMAL_WEIGHT = np.polynomial.hermite_e.hermegauss(60)


def _loss(
    value: Callable[[NumpyArray], NumpyArray],
    slope: Callable[[NumpyArray], NumpyArray],
    second: Callable[[NumpyArray], NumpyArray],
    bend: Callable[[NumpyArray], NumpyArray] | None = None,
) -> Loss:
    """Build a loss from rho, rho', rho'', and the curvature for steps (`bend`; default: rho'')."""
    mean_square = _normal_mean(slope(_NORMAL) ** 2)
    # integration by parts: for normal z, mean(rho''(z)) = mean(z rho'(z))
    curvature = _normal_mean(_NORMAL * slope(_NORMAL))
    return Loss(value, slope, second, bend or second, mean_square, curvature / mean_square)


HUBER = _loss(
    lambda z: BEND**2 * (np.sqrt(1 + (z / BEND) ** 2) - 1),
    lambda z: z / np.sqrt(1 + (z / BEND) ** 2),
    lambda z: (1 + (z / BEND) ** 2) ** -1.5,
)
STUDENT = _loss(
    lambda z: FREEDOM / 2 * np.log1p(z**2 / FREEDOM),
    lambda z: z / (1 + z**2 / FREEDOM),
    lambda z: (1 - z**2 / FREEDOM) / (1 + z**2 / FREEDOM) ** 2,
    lambda z: 1 / (1 + z**2 / FREEDOM),
)


def robust_fit(
    model: ResidualModel,
    starts: Points,
    weights: Float[NumpyArray, "batch rows"],
    *,
    losses: tuple[Loss, ...] = (HUBER, STUDENT),
) -> RobustFit:
    """Fit the model from each start point by Levenberg-Marquardt, with row weights per start."""
    # A row of weight 0 has a residual, but no influence. Each loss starts at the previous minimum.
    size = len(starts)
    point = np.array(starts, float)
    residual, jacobian = (np.array(array, float) for array in model(point))
    noise, damping, growth = np.full((3, size), [[NOISE], [DAMPING], [2.0]])
    state = _FitState(point, residual, jacobian, noise, damping, growth)
    steps, converged = np.ones(size, int), np.zeros(size, bool)
    for loss in losses:
        state = state._replace(noise=_noise(state, weights, loss), damping=np.full(size, DAMPING))
        converged = np.zeros(size, bool)
        for _ in range(MAX_NUM_STEPS):
            active = np.flatnonzero(~converged)
            if not len(active):
                break
            active_state = _FitState(*(field[active] for field in state))
            new_state, has_converged = _step(model, active_state, weights[active], loss)
            for field, new_field in zip(state, new_state, strict=True):
                field[active] = new_field
            steps[active] += 1
            converged[active] = has_converged
    return RobustFit(
        point=state.point,
        residual=state.residual,
        noise=state.noise,
        objective=_objective(state.residual, state.point, state.noise, weights, losses[-1]),
        curvature=_information(state, weights, losses[-1], losses[-1].second),
        steps=steps,
        converged=converged,
    )


def _step(
    model: ResidualModel, state: _FitState, weights: NumpyArray, loss: Loss
) -> tuple[_FitState, NumpyArray]:
    """Try a damped step of each fit; return new states, and (fits) whether a fit has converged."""
    # The damping depends on a step's gain over the gain that the linear model predicts (Nielsen,
    # 1999). A step that does not lower the objective is rejected, and the next one is damped more.
    point, residual, jacobian, noise, damping, growth = state
    z = residual / noise[:, None]  # (fits, rows); in `einsum`, b is fits, r rows, p parameters
    gradient = np.einsum("brp,br->bp", jacobian, loss.factor * weights * loss.slope(z))
    gradient = gradient / noise[:, None] + point
    curvature = _information(state, weights, loss, loss.bend) + np.eye(point.shape[1])
    added_diagonal = damping[:, None] * np.einsum("bpp->bp", curvature)
    damped = curvature + added_diagonal[:, None] * np.eye(point.shape[1])
    step = -np.linalg.solve(damped, gradient[..., None])[..., 0]
    # far from the minimum times overflow: limit the length of a step
    largest_move = np.maximum(np.abs(step).max(axis=1, initial=0), STEP)
    step *= np.minimum(1, MAX_STEP / largest_move)[:, None]
    trial = point + step
    new_residual, new_jacobian = model(trial)
    objective = _objective(residual, point, noise, weights, loss)
    new_objective = _objective(new_residual, trial, noise, weights, loss)
    # equal objectives count as better, because a minimum is flat
    is_better = new_objective <= objective + ROUNDING * np.abs(objective)
    predicted_gain = (step * (added_diagonal * step - gradient)).sum(axis=1) / 2
    # if all rows are fitted exactly, the predicted gain is 0
    min_gain = ROUNDING * np.abs(objective) + np.finfo(float).tiny
    gain = np.where(is_better, objective - new_objective, 0.0)
    gain_ratio = gain / np.maximum(predicted_gain, min_gain)
    shrink = np.maximum(1 / 3, 1 - (2 * np.clip(gain_ratio, 0, 1) - 1) ** 3)

    def accept(new: NumpyArray, old: NumpyArray) -> NumpyArray:
        """Return (fits, ...) the new values of fits that became better, else the old values."""
        return np.where(is_better.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    new_state = _FitState(
        point=accept(trial, point),
        residual=accept(new_residual, residual),
        jacobian=accept(new_jacobian, jacobian),
        noise=noise,
        damping=damping * np.where(is_better, shrink, growth),
        growth=np.where(is_better, 2.0, 2 * growth),
    )
    moves = np.abs(step).max(axis=1)
    is_near = (moves <= NEAR) & (damping <= DAMPING)  # and not a small step of a large damping
    new_noise = _converged_noise(new_state, weights, loss, is_near)
    new_noise = np.where(is_better, new_noise, noise)
    converged = (moves <= STEP) & (np.abs(new_noise / noise - 1) <= STEP)
    return new_state._replace(noise=new_noise), converged


def _objective(
    residual: Residuals, point: Points, noise: NumpyArray, weights: NumpyArray, loss: Loss
) -> Float[NumpyArray, " batch"]:
    with np.errstate(over="ignore", invalid="ignore"):
        rows = loss.factor * (weights * loss.value(residual / noise[:, None])).sum(axis=1)
        value = rows + (point**2).sum(axis=1) / 2
    return np.where(np.isfinite(value), value, np.inf)


def _information(
    state: _FitState, weights: NumpyArray, loss: Loss, bend: Callable[[NumpyArray], NumpyArray]
) -> Float[NumpyArray, "batch params params"]:
    """Return the information of the rows on the parameters, J^T rho'' J / noise^2, of each fit."""
    jacobian, noise = state.jacobian, state.noise[:, None]
    row_curvature = loss.factor * weights * bend(state.residual / noise) / noise**2
    return np.einsum("brp,br,brq->bpq", jacobian, row_curvature, jacobian, optimize=True)


def _converged_noise(
    state: _FitState, weights: NumpyArray, loss: Loss, is_near: NumpyArray
) -> Float[NumpyArray, " batch"]:
    """Estimate the noise of each fit, which bounds its residuals and follows from them."""
    # The model is slow and this iteration is not: without it, fits take twice as many steps. Far
    # from a minimum, a noise that explains all residuals would leave the parameters at the prior.
    noise = _noise(state, weights, loss)
    for _ in range(NOISE_STEPS):
        state = state._replace(noise=noise)
        noise = np.where(is_near, _noise(state, weights, loss), noise)
        if np.abs(noise / state.noise - 1).max(initial=0) <= NOISE_STEP:
            break
    return noise


def _noise(state: _FitState, weights: NumpyArray, loss: Loss) -> Float[NumpyArray, " batch"]:
    """Estimate the noise of each fit from bounded residuals and degrees of freedom."""
    # The parameters take trace((J^T J + prior)^-1 J^T J) degrees of freedom. NOISE_ROWS further
    # rows with noise NOISE keep the result above 0 if parameters fit few rows exactly.
    information = _information(state, weights, loss, loss.bend)
    posterior = information + np.eye(information.shape[-1])
    used_rows = np.einsum("bpp->b", np.linalg.solve(posterior, information))
    squares = (weights * loss.slope(state.residual / state.noise[:, None]) ** 2).sum(axis=1)
    squares = squares * state.noise**2 / loss.mean_square_slope + NOISE_ROWS * NOISE**2
    free_rows = np.maximum(weights.sum(axis=1) - used_rows, 0) + NOISE_ROWS
    return np.maximum(np.sqrt(squares / free_rows), MIN_NOISE)


def uncertainty(fit: RobustFit) -> tuple[Points, NumpyArray]:
    """Return standard errors at the minimum (Laplace), and whether rows identify a parameter."""
    # Errors are in spreads of the prior, because a whitened parameter has prior variance 1. Rows
    # identify a parameter if they more than halve this variance, with all other parameters free.
    size = fit.point.shape[1]
    error = np.sqrt(np.einsum("bpp->bp", np.linalg.inv(fit.curvature + np.eye(size))))
    return error, error**2 < 0.5
