"""Objectives of a linear model: the prediction is a sum, each stage adds the part of its block."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import MAX_COUNT, whole_number
from pipejax.base.machine import check_fits
from pipejax.training.objective import Blocks, Leaf, TrainingObjective


class LinearBatch(NamedTuple):
    """Examples that one gradient is taken of.

    Attributes:
      features: (examples, stages, width) x of each example, partitioned over the stages.
      targets: (examples) y of each example.
    """

    features: Leaf
    targets: Leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Linear(TrainingObjective):
    """Base of objectives whose loss depends on x . w only, w being the blocks in a row.

    Attributes:
      features: (batches, examples, stages, width) x of every example.
      targets: (batches, examples) y of every example.
      minimum: scalar, least value.
      num_stages: S.
      num_batches: number of batches.
    """

    features: Leaf
    targets: Leaf
    minimum: Leaf
    num_stages: int = dataclasses.field(metadata={"static": True})
    num_batches: int = dataclasses.field(metadata={"static": True})

    def init(self, key: Array) -> Blocks:
        """Start at w = 0, whatever the key."""
        return jnp.zeros(self.features.shape[-2:], self.features.dtype)

    def batch(self, index: Int[Array, ""] | int) -> LinearBatch:
        """Take consecutive examples."""
        return LinearBatch(self.features[index], self.targets[index])

    def input(self, batch: LinearBatch) -> Float[Array, " examples"]:
        """Start the sum."""
        return jnp.zeros_like(batch.targets)

    def stage(
        self, stage: int, block: Float[Array, " width"], activation: Array, batch: LinearBatch
    ) -> Float[Array, " examples"]:
        """Add the part of one block."""
        return activation + batch.features[:, stage] @ block

    def batch_loss(self, blocks: Blocks, batch: LinearBatch) -> Float[Array, ""]:
        """Predict by one matrix product over all blocks."""
        return self.loss(batch.features.reshape(len(batch.targets), -1) @ blocks.ravel(), batch)

    def lipschitz(self, largest: float) -> float:
        """Bound how fast the gradient of f changes, by the largest eigenvalue of X^T X / n."""
        return largest

    def value(self, blocks: Blocks) -> Float[Array, ""]:
        """Mean over all examples: the loss of all batches as one."""
        features = self.features.reshape(-1, *self.features.shape[-2:])
        return self.batch_loss(blocks, LinearBatch(features, self.targets.ravel()))


@dataclasses.dataclass(frozen=True)
class DataPartition:
    """How examples are divided into batches, and coordinates to stages.

    Attributes:
      num_stages: S.
      dimension: coordinates of w, a multiple of S.
      num_batches: number of batches.
      batch_size: examples of a batch.

    Raises:
      ValueError: if one is no whole number of at least 1, or the dimension no multiple of S.
    """

    num_stages: int
    dimension: int
    num_batches: int
    batch_size: int

    def __post_init__(self) -> None:
        """Refuse what cannot be divided."""
        for field in dataclasses.fields(self):
            whole_number(getattr(self, field.name), field.name, most=MAX_COUNT)
        if self.dimension % self.num_stages:
            raise ValueError(
                f"dimension must be a multiple of num_stages {self.num_stages}, "
                f"got {self.dimension}"
            )

        size = f"{self.num_examples} examples of dimension {self.dimension} need"
        check_fits(8 * self.num_examples * self.dimension, size)

    @property
    def num_examples(self) -> int:
        """Examples of all batches together, n."""
        return self.num_batches * self.batch_size

    @property
    def width(self) -> int:
        """Coordinates of a block."""
        return self.dimension // self.num_stages

    def fields(self, x: NumpyArray, y: NumpyArray, minimum: float) -> Mapping[str, Any]:
        """Return the fields of `Linear` for given examples, in JAX's default precision."""
        examples = (self.num_batches, self.batch_size)
        return {
            "features": jnp.asarray(x.reshape(*examples, self.num_stages, self.width)),
            "targets": jnp.asarray(y.reshape(examples)),
            "minimum": jnp.asarray(minimum),
            "num_stages": self.num_stages,
            "num_batches": self.num_batches,
        }


def gram(objective: Linear) -> Float[NumpyArray, "dimension dimension"]:
    """X^T X / n of all examples, in double precision: (dimension, dimension) matrix."""
    dimension = int(np.prod(objective.features.shape[-2:]))
    x = np.asarray(objective.features, np.float64).reshape(-1, dimension)
    return x.T @ x / len(x)


def smoothness(objective: TrainingObjective) -> float:
    """Lipschitz constant L of the gradient of f.

    Of a quadratic it is the largest eigenvalue of the Hessian X^T X / n, exactly. Of logistic
    regression it is the upper bound lambda_max(X^T X) / 4n + l2: the logistic function is nowhere
    steeper than 1/4.

    Args:
      objective: a quadratic or a logistic regression, not stacked.

    Returns:
      L.

    Raises:
      ValueError: if the objective is of another kind, or stacked.

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
