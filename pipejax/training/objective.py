"""Training objectives: losses computed stage by stage, with one block of parameters per stage.

A block is the flat vector of the parameters of a stage. Stages may have different numbers of
parameters, so blocks are padded with zeros to the same width, and a model is an array (stages,
width). Training schemes use only blocks, batches and gradients of blocks.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.checks import MAX_COUNT, check_fits, whole_number, wrong

Tree = Any  # a pytree of arrays
Leaf = Any  # an array, or the placeholder of an array while JAX flattens an objective
Blocks = Float[Array, "stages width"]


class TrainingObjective(abc.ABC):
    """Base class of objectives: the mean loss of all batches, as a function of all blocks.

    Subclasses are frozen dataclasses and pytrees. Arrays are leaves, so `jax.vmap` can map over
    the stacked objectives of several seeds. Counts are static.

    Attributes:
      num_stages: S.
      num_batches: number of batches.
      minimum: least value f*; 0 if it is unknown.

    Example:
      >>> import jax.numpy as jnp, pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, num_batches=3, seed=0)
      >>> blocks = objective.init(jax.random.key(0))
      >>> blocks.shape, bool(objective.gap(blocks) > 0)
      ((4, 2), True)
      >>> objectives = [pj.training.random_quadratic(4, dimension=8, seed=k) for k in range(3)]
      >>> stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *objectives)
      >>> jax.vmap(lambda objective: objective.gap(blocks))(stacked).shape
      (3,)
    """

    num_stages: int
    num_batches: int
    minimum: Leaf

    @abc.abstractmethod
    def init(self, key: Array) -> Blocks:
        """Return the initial blocks (stages, width); `key` is for random initial blocks."""

    @abc.abstractmethod
    def batch(self, index: Int[Array, ""] | int) -> Tree:
        """Return the batch with an index, as a pytree; the index may be traced."""

    @abc.abstractmethod
    def input(self, batch: Tree) -> Array:
        """Return the input activation of stage 0."""

    @abc.abstractmethod
    def stage(
        self, stage: int, block: Float[Array, " width"], activation: Array, batch: Tree
    ) -> Array:
        """Return the output activation of a stage."""

    @abc.abstractmethod
    def loss(self, activation: Array, batch: Tree) -> Float[Array, ""]:
        """Return the loss of a batch, given the last stage's output."""

    @abc.abstractmethod
    def value(self, blocks: Blocks) -> Float[Array, ""]:
        """Return the value of the objective f."""

    def batch_loss(self, blocks: Blocks, batch: Tree) -> Float[Array, ""]:
        """Compute the loss of a batch stage by stage; subclasses may compute it faster."""
        activation = self.input(batch)
        for stage in range(self.num_stages):
            activation = self.stage(stage, blocks[stage], activation, batch)
        return self.loss(activation, batch)

    def gap(self, blocks: Blocks) -> Float[Array, ""]:
        """Return the gap f - f* between the value and the minimum."""
        return self.value(blocks) - self.minimum

    def held(self) -> Bool[NumpyArray, "stages width"] | bool:
        """Return a mask of the coordinates of blocks that are parameters, not padding."""
        return True


def batch_gradient(objective: TrainingObjective, blocks: Blocks, batch: Tree) -> Blocks:
    """Return the gradient of the loss of a batch with respect to all blocks.

    Args:
      objective: objective to differentiate.
      blocks: (stages, width) parameters.
      batch: a batch from `objective.batch`.

    Returns:
      (stages, width) gradient; 0 at padding.

    Example:
      >>> import jax.numpy as jnp, pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> pj.training.batch_gradient(objective, jnp.zeros((4, 2)), objective.batch(0)).shape
      (4, 2)
    """
    return jax.grad(objective.batch_loss)(blocks, batch)


# Objectives of a linear model: a prediction is a sum, to which each stage adds a part.


OF_FEATURES: Any = None  # default of a count that follows from the shape of the features


class LinearBatch(NamedTuple):
    """Batch of examples for one gradient."""

    features: Leaf  # (examples, stages, width) x of each example, partitioned over the stages
    targets: Leaf  # (examples) y of each example


@dataclasses.dataclass(frozen=True, eq=False)
class Linear(TrainingObjective):
    """Base class of objectives whose loss depends only on x . w; w is all blocks in a row."""

    features: Leaf  # (batches, examples, stages, width) x of every example
    targets: Leaf  # (batches, examples) y of every example
    minimum: Leaf  # scalar, least value
    num_stages: int = dataclasses.field(default=OF_FEATURES, metadata={"static": True})
    num_batches: int = dataclasses.field(default=OF_FEATURES, metadata={"static": True})

    def __post_init__(self) -> None:
        for name, axis in (("num_stages", -2), ("num_batches", -4)):
            if getattr(self, name) is OF_FEATURES:
                object.__setattr__(self, name, self.features.shape[axis])

    def init(self, key: Array) -> Blocks:
        """Return zeros: the start is w = 0 for every key."""
        return jnp.zeros(self.features.shape[-2:], self.features.dtype)

    def batch(self, index: Int[Array, ""] | int) -> LinearBatch:
        """Return the batch with an index; its examples are consecutive."""
        return LinearBatch(self.features[index], self.targets[index])

    def input(self, batch: LinearBatch) -> Float[Array, " examples"]:
        """Return zeros, to which each stage adds a part of each prediction."""
        return jnp.zeros_like(batch.targets)

    def stage(
        self, stage: int, block: Float[Array, " width"], activation: Array, batch: LinearBatch
    ) -> Float[Array, " examples"]:
        """Add the contribution of a stage's block to the predictions."""
        return activation + batch.features[:, stage] @ block

    def batch_loss(self, blocks: Blocks, batch: LinearBatch) -> Float[Array, ""]:
        """Return the loss of a batch by one matrix product over all blocks."""
        return self.loss(batch.features.reshape(len(batch.targets), -1) @ blocks.ravel(), batch)

    def lipschitz(self, largest: float) -> float:
        """Return a Lipschitz constant of f's gradient, given the top eigenvalue of X^T X / n."""
        return largest

    def value(self, blocks: Blocks) -> Float[Array, ""]:
        """Return the mean loss over all examples, computed as one batch."""
        features = self.features.reshape(-1, *self.features.shape[-2:])
        return self.batch_loss(blocks, LinearBatch(features, self.targets.ravel()))


@dataclasses.dataclass(frozen=True)
class DataPartition:
    """Division of examples into batches, and of coordinates into stages."""

    num_stages: int  # S
    dimension: int  # coordinates of w, a multiple of S
    num_batches: int  # number of batches
    batch_size: int  # examples of a batch

    def __post_init__(self) -> None:
        """Check that stages divide the dimension, and that the examples fit into memory."""
        for field in dataclasses.fields(self):
            whole_number(getattr(self, field.name), field.name, maximum=MAX_COUNT)
        if self.dimension % self.num_stages:
            raise wrong(
                "dimension",
                f"must be a multiple of num_stages {self.num_stages}, got {self.dimension}",
            )
        size = f"{self.num_examples} examples of dimension {self.dimension} need"
        check_fits(8 * self.num_examples * self.dimension, size)

    @property
    def num_examples(self) -> int:
        """Number n of examples in all batches."""
        return self.num_batches * self.batch_size

    def fields(self, x: NumpyArray, y: NumpyArray, minimum: float) -> Mapping[str, Any]:
        """Return arguments of `Linear` for examples (x, y), in the default precision of JAX."""
        examples = (self.num_batches, self.batch_size)
        return {
            "features": jnp.asarray(x.reshape(*examples, self.num_stages, -1)),
            "targets": jnp.asarray(y.reshape(examples)),
            "minimum": jnp.asarray(minimum),
        }


def gram(objective: Linear) -> Float[NumpyArray, "dimension dimension"]:
    """Return X^T X / n over all examples in float64, of shape (dimension, dimension)."""
    dimension = int(np.prod(objective.features.shape[-2:]))
    x = np.asarray(objective.features, np.float64).reshape(-1, dimension)
    return x.T @ x / len(x)


def smoothness(objective: TrainingObjective) -> float:
    """Return the Lipschitz constant L of the gradient of f.

    For a quadratic, L is the largest eigenvalue of the Hessian X^T X / n. For logistic regression,
    the result is the upper bound lambda_max(X^T X) / 4n + l2, because the slope of the logistic
    function is at most 1/4.

    Args:
      objective: a quadratic or a logistic regression, not stacked.

    Returns:
      L.

    Raises:
      ValueError: if the objective is neither a quadratic nor a logistic regression, or is stacked.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.spectral_quadratic(2, spectrum=[1.0, 3.0], seed=0)
      >>> round(pj.training.smoothness(objective), 4)
      3.0
    """
    if not isinstance(objective, Linear) or np.ndim(objective.minimum):
        raise ValueError(
            "objective must be one Quadratic or Logistic, "
            f"got {type(objective).__name__} of minimum {objective.minimum}"
        )
    return objective.lipschitz(float(np.linalg.eigvalsh(gram(objective))[-1]))
