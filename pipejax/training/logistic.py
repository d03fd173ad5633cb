"""Logistic regression with an L2 term: convex, with noise that stays at the minimum."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import is_number, whole_number
from pipejax.base.display import short_repr
from pipejax.training.linear import DataPartition, Linear, LinearBatch
from pipejax.training.objective import Blocks, Leaf

LARGEST_GRADIENT = 1e-8  # norm at the minimum; the value is then off by about its square / 2 l2


@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class Logistic(Linear):
    """Mean of log(1 + exp(-y x . w)) over the examples, plus l2 |w|^2 / 2.

    Attributes:
      features: (batches, examples, stages, width) X.
      targets: (batches, examples) labels, 1 or -1.
      minimum: scalar, least value.
      num_stages: S.
      num_batches: number of batches.
      l2: scalar, weight of the L2 term.

    Example:
      >>> import pipejax as pj
      >>> pj.training.random_logistic(4, dimension=8, seed=0).features.shape
      (60, 10, 4, 2)
    """

    l2: Leaf

    def input(self, batch: LinearBatch) -> Float[Array, " row"]:
        """Start the sums: the prediction of each example, and |w|^2 after them."""
        return jnp.zeros(len(batch.targets) + 1, batch.targets.dtype)

    def stage(
        self, stage: int, block: Float[Array, " width"], activation: Array, batch: LinearBatch
    ) -> Float[Array, " row"]:
        """Add the part of one block to the predictions and to |w|^2."""
        part = batch.features[:, stage] @ block
        return activation + jnp.append(part, block @ block)

    def loss(self, activation: Array, batch: LinearBatch) -> Float[Array, ""]:
        """Mean over the examples, and the L2 term."""
        margins = batch.targets * activation[:-1]
        return jnp.mean(jax.nn.softplus(-margins)) + self.l2 * activation[-1] / 2

    def lipschitz(self, largest: float) -> float:
        """The logistic function is nowhere steeper than 1/4."""
        return largest / 4 + float(self.l2)

    def batch_loss(self, blocks: Blocks, batch: LinearBatch) -> Float[Array, ""]:
        """Predict by one matrix product over all blocks."""
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
    """Logistic regression on random examples: standard normal X, labels drawn from the model.

    An example has label 1 with probability sigmoid(x . w*), else -1. Random numbers are taken as in
    the code of the source, so that seeds give the same examples as there. Training
    starts at w = 0, where f is log 2. The minimum is found in double precision; an objective in
    single precision rounds it, and its gaps end at about 1e-7.

    Args:
      num_stages: S.
      dimension: coordinates of w, a multiple of S.
      num_batches: number of batches.
      batch_size: examples of a batch.
      l2: weight of the L2 term, above 0.
      signal: standard deviation of x . w*, above 0: w* is normal with |w*| near it. None is
        sqrt(dimension), for a standard normal w*: then labels can hardly be wrong.
      seed: of X, w* and labels, which do not depend on the machine.

    Returns:
      The objective.

    Raises:
      ValueError: if a count is no whole number in range, S does not divide the dimension, or l2 or
        signal is no finite number above 0.
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
    for name, given in (("l2", l2), ("signal", 1.0 if signal is None else signal)):
        if not is_number(given) or given <= 0:
            raise ValueError(f"{name} must be a finite number above 0, got {given!r}")
    random = np.random.default_rng(whole_number(seed, "seed", least=0))
    x = random.standard_normal((partition.num_examples, dimension))
    optimum = random.standard_normal(dimension)
    if signal is not None:
        optimum *= signal / np.sqrt(dimension)
    chance = 1 / (1 + np.exp(-(x @ optimum)))
    y = 2.0 * random.binomial(1, chance) - 1.0
    with jax.enable_x64(True):
        minimum = _least(Logistic(**partition.fields(x, y, minimum=0.0), l2=jnp.asarray(float(l2))))
    return Logistic(**partition.fields(x, y, minimum=minimum), l2=jnp.asarray(float(l2)))


def _least(objective: Logistic) -> float:
    """Least value, by a trust-region Newton method with the exact Hessian."""
    from scipy.optimize import minimize  # at first use: the import takes a while

    start = np.asarray(objective.init(jax.random.key(0)))

    def with_row(
        function: Callable[[Logistic, Array], Array],
    ) -> Callable[[NumpyArray], NumpyArray]:
        return lambda w: np.asarray(function(objective, jnp.asarray(w.reshape(start.shape))))

    found = minimize(
        with_row(_value),
        start.ravel(),
        jac=with_row(_gradient),
        hess=with_row(_hessian),
        method="trust-exact",
        options={"gtol": LARGEST_GRADIENT},
    )
    norm = float(np.linalg.norm(with_row(_gradient)(found.x)))
    if not norm <= LARGEST_GRADIENT:
        raise RuntimeError(
            f"no minimum found: the gradient has norm {norm:g}, not {LARGEST_GRADIENT:g}; "
            f"{found.message}"
        )
    return float(found.fun)


@jax.jit
def _value(objective: Logistic, blocks: Blocks) -> Float[Array, ""]:
    return objective.value(blocks)


@jax.jit
def _gradient(objective: Logistic, blocks: Blocks) -> Float[Array, " dimension"]:
    return jax.grad(objective.value)(blocks).ravel()


@jax.jit
def _hessian(objective: Logistic, blocks: Blocks) -> Float[Array, "dimension dimension"]:
    x = objective.features.reshape(-1, blocks.size)
    margins = objective.targets.ravel() * (x @ blocks.ravel())
    curvature = jax.nn.sigmoid(margins) * jax.nn.sigmoid(-margins) / len(x)
    return (x.T * curvature[None, :]) @ x + objective.l2 * jnp.eye(blocks.size)


jax.tree_util.register_dataclass(Logistic)
