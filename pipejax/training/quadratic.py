"""Least squares, f(w) = |Xw - y|^2 / 2n, with y = Xw*: the minimum is 0 and reached at w*.

Every example vanishes there, so the noise of the batches fades on the way, and a constant step
size reaches any accuracy.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import are_positive, is_number, one_of, whole_number
from pipejax.base.display import short_repr
from pipejax.training.linear import DataPartition, Linear, LinearBatch

MINIMISERS = ("solved", "normal")


@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class Quadratic(Linear):
    """Least squares of a linear model.

    Attributes:
      features: (batches, examples, stages, width) X.
      targets: (batches, examples) y.
      minimum: scalar, least value.
      num_stages: S.
      num_batches: number of batches.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.spectral_quadratic(2, spectrum=[1.0, 4.0], seed=0)
      >>> objective.num_stages, objective.num_batches, objective.features.shape
      (2, 60, (60, 10, 2, 1))
    """

    def loss(self, activation: Array, batch: LinearBatch) -> Float[Array, ""]:
        """Half the mean squared residual."""
        return jnp.mean((activation - batch.targets) ** 2) / 2


def random_quadratic(
    num_stages: int, *, dimension: int, num_batches: int = 60, batch_size: int = 10, seed: int
) -> Quadratic:
    """Least squares of random examples: the entries of X and w* are standard normal.

    Training starts at w = 0, where f is about dimension / 2. Random numbers are taken as in the
    code of the source, so that seeds give the same examples as there.

    Args:
      num_stages: S.
      dimension: coordinates of w, a multiple of S; block s holds the s-th dimension / S of them.
      num_batches: number of batches.
      batch_size: examples of a batch.
      seed: of X and w*, which do not depend on the machine.

    Returns:
      The objective.

    Raises:
      ValueError: if a count is no whole number in range, or S does not divide the dimension.

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
    random = np.random.default_rng(whole_number(seed, "seed", least=0))
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
    """Least squares whose Hessian X^T X / n has exactly the given eigenvalues.

    X = sqrt(n) Q diag(sqrt(spectrum)) V^T with Q (n, dimension) and V (dimension, dimension)
    uniform among matrices with orthonormal columns; w* is standard normal.

    Args:
      num_stages: S.
      spectrum: (dimension) eigenvalues above 0, a multiple of S of them.
      num_batches: number of batches.
      batch_size: examples of a batch; all together as many as eigenvalues at least.
      seed: of Q, V and w*.

    Returns:
      The objective.

    Raises:
      ValueError: if a count is no whole number in range, S does not divide the dimension, an
        eigenvalue is not above 0, or there are fewer examples than eigenvalues.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.spectral_quadratic(2, spectrum=[1.0, 4.0], seed=0)
      >>> round(pj.training.smoothness(objective), 4)
      4.0
    """
    if not are_positive(spectrum, len(spectrum)):
        raise ValueError(f"spectrum must be finite numbers above 0, got {list(spectrum)}")
    partition = DataPartition(num_stages, len(spectrum), num_batches, batch_size)
    random = np.random.default_rng(whole_number(seed, "seed", least=0))
    root = np.sqrt(np.asarray(spectrum, np.float64))
    turn = _orthonormal(random, partition.dimension, partition.dimension)
    x = _examples(random, partition, root[:, None] * turn.T)
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
    """The quadratic that is hard for every first-order method, as least squares over examples.

    f(w) - f* = (w - w*)^T A (w - w*) / 2 with A = (L - mu)/4 tridiag(-1, 2, -1) + mu I and
    L = condition_number * mu. The eigenvalues are
    mu + (L - mu) sin^2(i pi / (2 (dimension + 1))), i = 1 to dimension: all inside (mu, L), whose
    ends they approach as the dimension grows. The examples are the rows of X = sqrt(n) Q R with
    R^T R = A and Q (n, dimension) with random orthonormal columns, so X^T X / n = A: the mean of
    the gradients of the batches is the gradient of f. With y = Xw* the value is f - f*: the
    minimum is 0.

    With condition_number=401, strong_convexity=0.01 and a normal minimiser, A is
    tridiag(-1, 2, -1) + 0.01 I: the objective that the experiments of arXiv 2606.03498 were run on,
    and at seed 0 with 120 batches of 5 the very one, up to rounding.

    Args:
      num_stages: S.
      dimension: coordinates of w, a multiple of S.
      condition_number: L / mu, above 1.
      strong_convexity: mu, above 0.
      minimiser: w*, one of `MINIMISERS`: "solved" is the solution of A w = (L - mu)/4 e_1, as in
        the source, "normal" is standard normal, and Q has the signs that its QR decomposition
        comes with.
      num_batches: number of batches.
      batch_size: examples of a batch; all together as many as coordinates at least.
      seed: of Q and a normal minimiser.

    Returns:
      The objective.

    Raises:
      ValueError: if a count is no whole number in range, S does not divide the dimension, the
        condition number is not above 1, mu not above 0, there is no such minimiser, or there are
        fewer examples than coordinates.

    Source:
      Nesterov, Introductory Lectures on Convex Optimization (2004), section 2.1.4.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.nesterov_quadratic(
      ...     4, dimension=64, condition_number=100.0, seed=0)
      >>> round(pj.training.smoothness(objective), 2)
      99.94
    """
    if not is_number(condition_number) or condition_number <= 1:
        raise ValueError(
            f"condition_number must be a finite number above 1, got {condition_number!r}"
        )
    if not is_number(strong_convexity) or strong_convexity <= 0:
        raise ValueError(
            f"strong_convexity must be a finite number above 0, got {strong_convexity!r}"
        )
    is_solved = one_of(minimiser, MINIMISERS, "minimiser") == "solved"
    partition = DataPartition(num_stages, dimension, num_batches, batch_size)
    random = np.random.default_rng(whole_number(seed, "seed", least=0))
    quarter = strong_convexity * (condition_number - 1.0) / 4
    beside = np.eye(dimension, k=1) + np.eye(dimension, k=-1)
    hessian = quarter * (2 * np.eye(dimension) - beside) + strong_convexity * np.eye(dimension)
    x = _examples(random, partition, np.linalg.cholesky(hessian).T, uniform=is_solved)
    if is_solved:
        optimum = np.linalg.solve(hessian, quarter * np.eye(dimension)[0])
    else:
        optimum = random.standard_normal(dimension)
    return Quadratic(**partition.fields(x, x @ optimum, minimum=0.0))


def _orthonormal(
    random: np.random.Generator, rows: int, columns: int, *, uniform: bool = True
) -> Float[NumpyArray, "rows columns"]:
    """Orthonormal columns, uniform among all (Mezzadri 2007: the signs make the QR unique)."""
    q, r = np.linalg.qr(random.standard_normal((rows, columns)))
    return q * np.sign(np.diag(r)) if uniform else q


def _examples(
    random: np.random.Generator,
    partition: DataPartition,
    root: Float[NumpyArray, "dimension dimension"],
    *,
    uniform: bool = True,
) -> Float[NumpyArray, "examples dimension"]:
    """Rows X with X^T X / n = root^T root."""
    n, dimension = partition.num_examples, partition.dimension
    if n < dimension:
        raise ValueError(
            f"num_batches * batch_size must be at least the dimension {dimension}, got {n}"
        )
    return np.sqrt(n) * _orthonormal(random, n, dimension, uniform=uniform) @ root


jax.tree_util.register_dataclass(Quadratic)
