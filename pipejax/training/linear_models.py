"""Least squares and logistic regression: objectives of a linear model with known minima.

Least squares, f(w) = |Xw - y|^2 / 2n with y = Xw*, has the minimum 0 at w*. The loss of every
example is 0 at w*, so the noise from random batches vanishes near w*, and a constant step size
reaches any accuracy. Logistic regression with an L2 term is convex too, but has noise at w*.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import are_positive, is_number, resolve_choice, whole_number, wrong
from pipejax.base.compiled import compiled
from pipejax.base.display import short_repr
from pipejax.training.objective import Blocks, DataPartition, Leaf, Linear, LinearBatch

MINIMISERS = ("solved", "normal")


@jax.tree_util.register_dataclass
@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class Quadratic(Linear):
    """Least squares of a linear model.

    Attributes:
      features: (batches, examples, stages, width) X.
      targets: (batches, examples) y.
      minimum: scalar, least value.
      num_stages: S; default: from the shape of the features.
      num_batches: number of batches; default: from the shape of the features.
    """

    def loss(self, activation: Array, batch: LinearBatch) -> Float[Array, ""]:
        """Return half the mean squared residual."""
        return jnp.mean((activation - batch.targets) ** 2) / 2


def random_quadratic(
    num_stages: int, *, dimension: int, num_batches: int = 60, batch_size: int = 10, seed: int
) -> Quadratic:
    """Return a least-squares objective on random examples; X and w* have standard normal entries.

    Training starts at w = 0, where f is about dimension / 2. Random numbers are drawn in the order
    of the published code, so a seed gives the same examples as in that code.

    Args:
      num_stages: S.
      dimension: coordinates of w, a multiple of S; each block has dimension / S coordinates.
      num_batches: number of batches.
      batch_size: examples of a batch.
      seed: random seed of X and w*, which do not depend on the machine.

    Returns:
      The objective.

    Source:
      The random quadratic of the experiments of arXiv 2606.03498.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.random_quadratic(8, dimension=16, seed=0)
      >>> start = objective.init(jax.random.key(0))
      >>> f"{objective.gap(start):.2f}"
      '10.58'
    """
    partition = DataPartition(num_stages, dimension, num_batches, batch_size)
    random = np.random.default_rng(whole_number(seed, "seed", minimum=0))
    x = random.standard_normal((partition.num_examples, dimension))
    return Quadratic(**partition.fields(x, x @ random.standard_normal(dimension), minimum=0.0))


def spectral_quadratic(
    num_stages: int,
    *,
    spectrum: Sequence[float] | Float[NumpyArray, " dimension"],
    num_batches: int = 60,
    batch_size: int = 10,
    seed: int,
) -> Quadratic:
    """Return a least-squares objective whose Hessian X^T X / n has exactly the given eigenvalues.

    X = sqrt(n) Q diag(sqrt(spectrum)) V^T with Q (n, dimension) and V (dimension, dimension)
    uniform among matrices with orthonormal columns; w* is standard normal.

    Args:
      num_stages: S.
      spectrum: (dimension) eigenvalues above 0; their number is a multiple of S.
      num_batches: number of batches.
      batch_size: examples of a batch; all batches together have at least `dimension` examples.
      seed: random seed of Q, V and w*.

    Returns:
      The objective.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.spectral_quadratic(2, spectrum=[1.0, 4.0], seed=0)
      >>> round(pj.training.smoothness(objective), 4)
      4.0
    """
    if not are_positive(spectrum, len(spectrum)):
        raise ValueError(f"spectrum must be finite numbers above 0, got {list(spectrum)}")
    partition = DataPartition(num_stages, len(spectrum), num_batches, batch_size)
    random = np.random.default_rng(whole_number(seed, "seed", minimum=0))
    root = np.sqrt(np.asarray(spectrum, np.float64))
    eigenvectors = _orthonormal(random, partition.dimension, partition.dimension)
    x = _examples(random, partition, root[:, None] * eigenvectors.T)
    return Quadratic(
        **partition.fields(x, x @ random.standard_normal(partition.dimension), minimum=0.0)
    )


def nesterov_quadratic(
    num_stages: int,
    *,
    dimension: int,
    condition_number: float,
    strong_convexity: float = 1.0,
    minimiser: str = "solved",
    num_batches: int = 60,
    batch_size: int = 10,
    seed: int,
) -> Quadratic:
    """Return Nesterov's quadratic, which is hard for first-order methods, as least squares.

    f(w) - f* = (w - w*)^T A (w - w*) / 2 with A = (L - mu)/4 tridiag(-1, 2, -1) + mu I and
    L = condition_number * mu. The eigenvalues are
    mu + (L - mu) sin^2(i pi / (2 (dimension + 1))), i = 1 to dimension. All of them lie between mu
    and L, and the outermost approach mu and L as the dimension grows. The examples are the rows of
    X = sqrt(n) Q R, where R^T R = A and Q (n, dimension) has random orthonormal columns. So
    X^T X / n = A, and the mean gradient of the batches is the gradient of f. With y = Xw*, the
    value is f - f*, so the minimum is 0.

    With condition_number=401, strong_convexity=0.01 and a normal minimiser, A is
    tridiag(-1, 2, -1) + 0.01 I, as in the experiments of arXiv 2606.03498. With seed 0 and 120
    batches of 5 examples, the objective is the published one, up to rounding.

    Args:
      num_stages: S.
      dimension: coordinates of w, a multiple of S.
      condition_number: L / mu, above 1.
      strong_convexity: mu, above 0.
      minimiser: how w* is chosen, one of `MINIMISERS`. "solved" is the solution of
        A w = (L - mu)/4 e_1, as in the source. "normal" is standard normal; Q then has the
        signs that its QR decomposition computes, so it is not uniform.
      num_batches: number of batches.
      batch_size: examples of a batch; all batches together have at least `dimension` examples.
      seed: random seed of Q and of a normal minimiser.

    Returns:
      The objective.

    Source:
      Nesterov, Introductory Lectures on Convex Optimization (2004), section 2.1.4.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.nesterov_quadratic(
      ...     4, dimension=64, condition_number=100.0, seed=0)
      >>> round(pj.training.smoothness(objective), 2)
      99.94
    """
    numbers = ("condition_number", condition_number, 1), ("strong_convexity", strong_convexity, 0)
    for name, value, bound in numbers:
        if not is_number(value) or value <= bound:
            raise wrong(name, f"must be a finite number above {bound}, got {value!r}")
    is_solved = resolve_choice(minimiser, MINIMISERS, "minimiser") == "solved"
    partition = DataPartition(num_stages, dimension, num_batches, batch_size)
    random = np.random.default_rng(whole_number(seed, "seed", minimum=0))
    quarter = strong_convexity * (condition_number - 1.0) / 4
    sides = np.eye(dimension, k=1) + np.eye(dimension, k=-1)
    hessian = quarter * (2 * np.eye(dimension) - sides) + strong_convexity * np.eye(dimension)
    x = _examples(random, partition, np.linalg.cholesky(hessian).T, uniform=is_solved)
    if is_solved:
        optimum = np.linalg.solve(hessian, quarter * np.eye(dimension)[0])
    else:
        optimum = random.standard_normal(dimension)
    return Quadratic(**partition.fields(x, x @ optimum, minimum=0.0))


def _orthonormal(
    random: np.random.Generator, rows: int, columns: int, *, uniform: bool = True
) -> Float[NumpyArray, "rows columns"]:
    """Return random orthonormal columns; `uniform` fixes the signs of the QR (Mezzadri 2007)."""
    q, r = np.linalg.qr(random.standard_normal((rows, columns)))
    return q * np.sign(np.diag(r)) if uniform else q


def _examples(
    random: np.random.Generator,
    partition: DataPartition,
    root: Float[NumpyArray, "dimension dimension"],
    *,
    uniform: bool = True,
) -> Float[NumpyArray, "examples dimension"]:
    """Return n random examples X (rows) with X^T X / n = root^T root."""
    n, dimension = partition.num_examples, partition.dimension
    if n < dimension:
        raise ValueError(
            f"num_batches * batch_size must be at least the dimension {dimension}, got {n}"
        )
    return np.sqrt(n) * _orthonormal(random, n, dimension, uniform=uniform) @ root


LARGEST_GRADIENT = 1e-8  # norm g at the minimum; the value is then off by about g^2 / (2 l2)


@jax.tree_util.register_dataclass
@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class Logistic(Linear):
    """Mean of log(1 + exp(-y x . w)) over the examples, plus l2 |w|^2 / 2.

    Attributes:
      features: (batches, examples, stages, width) X.
      targets: (batches, examples) labels, 1 or -1.
      minimum: scalar, least value.
      num_stages: S; default: from the shape of the features.
      num_batches: number of batches; default: from the shape of the features.
      l2: scalar, weight of the L2 term.
    """

    l2: Leaf = dataclasses.field(kw_only=True)  # by keyword, because earlier fields have defaults

    def input(self, batch: LinearBatch) -> Float[Array, " row"]:
        """Return zeros, to which stages add: one sum for each example, and one for |w|^2."""
        return jnp.zeros(len(batch.targets) + 1, batch.targets.dtype)

    def stage(
        self, stage: int, block: Float[Array, " width"], activation: Array, batch: LinearBatch
    ) -> Float[Array, " row"]:
        """Add the contribution of a stage's block to the predictions and to |w|^2."""
        part = batch.features[:, stage] @ block
        return activation + jnp.append(part, block @ block)

    def loss(self, activation: Array, batch: LinearBatch) -> Float[Array, ""]:
        """Return the mean loss over the examples, plus the L2 term."""
        margins = batch.targets * activation[:-1]
        return jnp.mean(jax.nn.softplus(-margins)) + self.l2 * activation[-1] / 2

    def lipschitz(self, largest: float) -> float:
        """Return a Lipschitz constant of f's gradient, given the top eigenvalue of X^T X / n."""
        return largest / 4 + float(self.l2)

    def batch_loss(self, blocks: Blocks, batch: LinearBatch) -> Float[Array, ""]:
        """Return the loss of a batch by one matrix product over all blocks."""
        w = blocks.ravel()
        predictions = batch.features.reshape(len(batch.targets), -1) @ w
        return self.loss(jnp.append(predictions, w @ w), batch)


def random_logistic(
    num_stages: int,
    *,
    dimension: int,
    num_batches: int = 60,
    batch_size: int = 10,
    l2: float = 1e-4,
    signal: float | None = None,
    seed: int,
) -> Logistic:
    """Return logistic regression on random examples, with normal X and random labels.

    An example has label 1 with probability sigmoid(x . w*), else -1. Random numbers are drawn in
    the order of the published code, so a seed gives the same examples. Training starts at w = 0,
    where f is log 2. The minimum is computed in double precision. An objective in single precision
    rounds this minimum, so gaps do not fall below about 1e-7.

    Args:
      num_stages: S.
      dimension: coordinates of w, a multiple of S.
      num_batches: number of batches.
      batch_size: examples of a batch.
      l2: weight of the L2 term, above 0.
      signal: standard deviation of x . w*, above 0; w* is normal with a norm near `signal`. None
        means sqrt(dimension), as for a standard normal w*; labels are then hardly random.
      seed: random seed of X, w* and labels, which do not depend on the machine.

    Returns:
      The objective.

    Raises:
      RuntimeError: if the minimum is not found.

    Source:
      The logistic regression of the experiments of arXiv 2606.03498.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.random_logistic(4, dimension=8, seed=0)
      >>> f"{objective.minimum:.3f}"
      '0.365'
    """
    partition = DataPartition(num_stages, dimension, num_batches, batch_size)
    for name, value in (("l2", l2), ("signal", 1.0 if signal is None else signal)):
        if not is_number(value) or value <= 0:
            raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    random = np.random.default_rng(whole_number(seed, "seed", minimum=0))
    x = random.standard_normal((partition.num_examples, dimension))
    optimum = random.standard_normal(dimension)
    if signal is not None:
        optimum *= signal / np.sqrt(dimension)
    probability = 1 / (1 + np.exp(-(x @ optimum)))
    y = 2.0 * random.binomial(1, probability) - 1.0
    with jax.enable_x64(True):
        minimum = _find_minimum(
            Logistic(**partition.fields(x, y, minimum=0.0), l2=jnp.asarray(float(l2)))
        )
    return Logistic(**partition.fields(x, y, minimum=minimum), l2=jnp.asarray(float(l2)))


def _find_minimum(objective: Logistic) -> float:
    """Compute the minimum by a trust-region Newton method with the exact Hessian."""
    from scipy.optimize import minimize  # slow to import

    size = math.prod(objective.features.shape[-2:])

    def derivative(order: int) -> Callable[[NumpyArray], NumpyArray]:
        return lambda w: np.asarray(_derivatives(objective, w)[order])

    value, gradient, hessian = map(derivative, range(3))
    solution = minimize(
        value,
        np.zeros(size),
        jac=gradient,
        hess=hessian,
        method="trust-exact",
        options={"gtol": LARGEST_GRADIENT},
    )
    norm = float(np.linalg.norm(gradient(solution.x)))
    if not norm <= LARGEST_GRADIENT:
        raise RuntimeError(
            f"no minimum found: the gradient has norm {norm:g}, not {LARGEST_GRADIENT:g}; "
            f"{solution.message}"
        )
    return float(solution.fun)


@compiled
def _derivatives(objective: Logistic, w: Array) -> tuple[Array, Array, Array]:
    """Return value, gradient (size) and Hessian (size, size) at a flat model (size)."""

    def value(w: Array) -> Array:
        return objective.value(w.reshape(objective.features.shape[-2:]))

    return value(w), jax.grad(value)(w), jax.hessian(value)(w)
