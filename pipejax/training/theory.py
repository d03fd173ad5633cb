"""Published convergence bound of Randomized PipeDream, with a term for outdated weights.

Let f have an L-Lipschitz gradient, let second moments of block gradients be at most G^2, and let
blocks be read from the last delta models. Then K updates of step size gamma satisfy

  mean over k < K of E|grad f(w_k)|^2
      <= 2 S (f_0 - f*) / (gamma K)  +  gamma S L G^2  +  gamma^2 L^2 delta^2 G^2.

Source: arXiv 2606.03498, the convergence theorem of RPD.
"""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import whole_number
from pipejax.base.display import short_repr

NEWTON_STEPS = 12  # the root is at most a quarter below the first guess; a step squares the error
_OF_TERMS = ("stages", "updates", "smoothness", "gradient_bound", "delta", "gap")
Values = Float[NumpyArray, "*shape"]
Real = float | NumpyArray


@short_repr
class ConvergenceBound(NamedTuple):
    """Terms of the bound on the mean squared gradient norm, as arrays of equal shape.

    Attributes:
      start: 2 S (f_0 - f*) / (gamma K), from the initial gap.
      noise: gamma S L G^2, from batches and single-block updates.
      delay: gamma^2 L^2 delta^2 G^2, from outdated blocks.
      total: sum of the three terms.
    """

    start: Values
    noise: Values
    delay: Values
    total: Values


def convergence_bound(
    stages: Real,
    updates: Real,
    step_size: Real,
    smoothness: Real,
    gradient_bound: Real,
    delta: Real,
    gap: Real,
) -> ConvergenceBound:
    """Bound the mean squared gradient norm of a run from above; all arguments broadcast.

    Args:
      stages: S.
      updates: K, block updates.
      step_size: gamma.
      smoothness: L.
      gradient_bound: G, the root of the largest second moment of a block gradient.
      delta: largest delay [updates].
      gap: f_0 - f* at the start.

    Returns:
      The three terms and their sum.

    Source:
      arXiv 2606.03498, the convergence theorem of Randomized PipeDream.

    Example:
      >>> import pipejax as pj
      >>> bound = pj.training.convergence_bound(
      ...     stages=8, updates=3200, step_size=0.01, smoothness=1.0, gradient_bound=1.0,
      ...     delta=np.array([0, 60]), gap=4.0)
      >>> [term.round(3).tolist() for term in bound[:3]]
      [[2.0, 2.0], [0.08, 0.08], [0.0, 0.36]]
    """
    _check(step_size=step_size)
    start, noise, delay = _terms(stages, updates, smoothness, gradient_bound, delta, gap)
    gamma = np.asarray(step_size, np.float64)
    start, noise, delay = np.broadcast_arrays(start / gamma, noise * gamma, delay * gamma**2)
    return ConvergenceBound(start, noise, delay, np.asarray(start + noise + delay))


def best_step_size(
    stages: Real, updates: Real, smoothness: Real, gradient_bound: Real, delta: Real, gap: Real
) -> Values:
    """Return the step size with the least convergence bound; all arguments broadcast.

    The bound a / gamma + b gamma + c gamma^2 is least at the positive root of
    2 c gamma^3 + b gamma^2 = a. Newton's method finds this root from above.

    Args:
      stages: S.
      updates: K, block updates.
      smoothness: L.
      gradient_bound: G, the root of the largest second moment of a block gradient.
      delta: largest delay [updates].
      gap: f_0 - f* at the start.

    Returns:
      gamma.

    Example:
      >>> import pipejax as pj
      >>> given = dict(stages=8, updates=3200, smoothness=1.0, gradient_bound=1.0, gap=4.0)
      >>> pj.training.best_step_size(delta=np.array([0, 60]), **given).round(4).tolist()
      [0.05, 0.0137]
    """
    a, b, c = _terms(stages, updates, smoothness, gradient_bound, delta, gap)
    # first guess, above the root: the smaller of the roots for c = 0 and for b = 0
    without_delay, without_noise = np.sqrt(a / b), np.cbrt(a / np.where(c > 0, 2 * c, 1.0))
    gamma = np.where(c > 0, np.minimum(without_delay, without_noise), without_delay)
    for _ in range(NEWTON_STEPS):
        excess = 2 * c * gamma**3 + b * gamma**2 - a
        gamma = gamma - excess / (6 * c * gamma**2 + 2 * b * gamma)
    return np.asarray(gamma)


def pipedream_delay(stages: int) -> int:
    """Return the largest delay of PipeDream's 1F1B in steady state, floor(S^2 - S/2).

    Args:
      stages: S.

    Returns:
      Number of updates, counted over all stages, between reading the weights of a stage and the
      update with the gradient computed from them.

    Source:
      arXiv 2606.03498, S^2 - S/2 + O(1). Tables of the schedule give the floor at S = 2 to 32.

    Example:
      >>> import pipejax as pj
      >>> [pj.training.pipedream_delay(stages) for stages in (2, 4, 8, 16, 32)]
      [3, 14, 60, 248, 1008]
    """
    stages = whole_number(stages, "stages")
    return stages * stages - (stages + 1) // 2


def delay_term_law(stages: int, updates: Real, *, smoothness: Real, gap: Real) -> Values:
    """Return the delay term of PipeDream's bound for large S and K: Theta(S^4 / K).

    The step size is the best step size without delays, gamma = sqrt(2 (f_0 - f*) / (K L)) / G,
    for every S. With delta = `pipedream_delay`, the term is 2 L (f_0 - f*) delta^2 / K.

    Args:
      stages: S.
      updates: K, block updates.
      smoothness: L.
      gap: f_0 - f* at the start.

    Returns:
      gamma^2 L^2 delta^2 G^2.

    Example:
      >>> import pipejax as pj
      >>> term = [pj.training.delay_term_law(stages, 1e6, smoothness=1.0, gap=1.0).item()
      ...         for stages in (16, 32)]
      >>> round(term[1] / term[0], 1)  # 2^4 in the limit
      16.5
    """
    _check(updates=updates, smoothness=smoothness, gap=gap)
    return np.asarray(2.0 * smoothness * gap * pipedream_delay(stages) ** 2 / np.asarray(updates))


def _terms(*numbers: Real) -> tuple[Values, Values, Values]:
    """Return the factors (a, b, c) of 1 / gamma, gamma and gamma^2 in the convergence bound."""
    _check(**dict(zip(_OF_TERMS, numbers, strict=True)))
    s, k, lipschitz, g, d, f = (np.asarray(value, np.float64) for value in numbers)
    a, b, c = np.broadcast_arrays(2 * s * f / k, s * lipschitz * g**2, (lipschitz * d * g) ** 2)
    return a, b, c


def _check(**values: Real) -> None:
    """Check that all values are finite and above 0; delta may be 0."""
    for name, value in values.items():
        numbers = np.asarray(value, np.float64)
        is_allowed, allowed = numbers > 0, "above 0"
        if name == "delta":
            is_allowed, allowed = numbers >= 0, "at least 0"
        if not (is_allowed & np.isfinite(numbers)).all():
            raise ValueError(f"{name} must be finite and {allowed}, got {value!r}")
