"""What is trained: a loss that runs through the stages of a pipeline, each with its own block.

A block is the flat vector of a stage's parameters. Stages may differ in what they hold, so blocks
are padded with zeros to one width, and a model is one array (stages, width). Training schemes only
ever see blocks, batches and gradients of blocks.
"""

import abc
from typing import Any

import jax

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray

Tree = Any  # a pytree of arrays
Leaf = Any  # an array; while JAX takes an objective apart, whatever stands for one
Blocks = Float[Array, "stages width"]


class TrainingObjective(abc.ABC):
    """A function of the blocks of all stages, as a mean over batches of examples.

    Subclasses are frozen dataclasses and pytrees: arrays are leaves, so that the objectives of
    several seeds can be stacked and mapped over; counts are static.

    Attributes:
      num_stages: S.
      num_batches: number of batches.
      minimum: least value f*; 0 where it is not known.

    Example:
      >>> import jax.numpy as jnp, pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, num_batches=3, seed=0)
      >>> blocks = objective.init(jax.random.key(0))
      >>> blocks.shape, bool(objective.gap(blocks) > 0)
      ((4, 2), True)
      >>> each = [pj.training.random_quadratic(4, dimension=8, seed=seed) for seed in range(3)]
      >>> stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
      >>> jax.vmap(lambda one: one.gap(blocks))(stacked).shape
      (3,)
    """

    num_stages: int
    num_batches: int
    minimum: Leaf

    @abc.abstractmethod
    def init(self, key: Array) -> Blocks:
        """Return the blocks (stages, width) that training starts from.

        Args:
          key: of the random numbers, for objectives whose start is random.
        """

    @abc.abstractmethod
    def batch(self, index: Int[Array, ""] | int) -> Tree:
        """Return one batch, a pytree.

        Args:
          index: which one, from 0 to num_batches - 1; may be traced.
        """

    @abc.abstractmethod
    def input(self, batch: Tree) -> Array:
        """Return the activation that stage 0 takes.

        Args:
          batch: as from `batch`.
        """

    @abc.abstractmethod
    def stage(
        self, stage: int, block: Float[Array, " width"], activation: Array, batch: Tree
    ) -> Array:
        """Return the activation that a stage passes on.

        Args:
          stage: which one.
          block: (width) its parameters.
          activation: from the stage before, or from `input`.
          batch: as from `batch`.
        """

    @abc.abstractmethod
    def loss(self, activation: Array, batch: Tree) -> Float[Array, ""]:
        """Return the loss of a batch.

        Args:
          activation: output of the last stage.
          batch: as from `batch`.
        """

    @abc.abstractmethod
    def value(self, blocks: Blocks) -> Float[Array, ""]:
        """Return the objective f itself.

        Args:
          blocks: (stages, width) parameters.
        """

    def batch_loss(self, blocks: Blocks, batch: Tree) -> Float[Array, ""]:
        """Return the loss of a batch, stage after stage.

        Objectives that have a shorter way override it.

        Args:
          blocks: (stages, width) parameters.
          batch: as from `batch`.
        """
        return composed_loss(self, blocks, batch)

    def gap(self, blocks: Blocks) -> Float[Array, ""]:
        """Return how far the value is above its minimum, f - f*.

        Args:
          blocks: (stages, width) parameters.
        """
        return self.value(blocks) - self.minimum

    def held(self) -> Bool[NumpyArray, "stages width"] | bool:
        """Return which coordinates of the blocks are parameters and no padding."""
        return True


def composed_loss(objective: TrainingObjective, blocks: Blocks, batch: Tree) -> Float[Array, ""]:
    """Loss of a batch as the pipeline computes it: one stage after the other."""
    activation = objective.input(batch)
    for stage in range(objective.num_stages):
        activation = objective.stage(stage, blocks[stage], activation, batch)
    return objective.loss(activation, batch)


def batch_gradient(objective: TrainingObjective, blocks: Blocks, batch: Tree) -> Blocks:
    """Gradient of the loss of a batch with respect to all blocks.

    Args:
      objective: what is trained.
      blocks: (stages, width) parameters.
      batch: as from `objective.batch`.

    Returns:
      (stages, width) gradient; 0 where blocks are padded.

    Example:
      >>> import jax.numpy as jnp, pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> pj.training.batch_gradient(objective, jnp.zeros((4, 2)), objective.batch(0)).shape
      (4, 2)
    """
    return jax.grad(objective.batch_loss)(blocks, batch)


def block_gradient(
    objective: TrainingObjective, blocks: Blocks, batch: Tree, stage: Int[Array, ""] | int
) -> Float[Array, " width"]:
    """Gradient of the loss of a batch with respect to the block of one stage.

    The stage may be traced, so the gradients of all blocks are computed and one is taken: a run
    over many seeds needs each of them in every step anyway.

    Args:
      objective: what is trained.
      blocks: (stages, width) parameters.
      batch: as from `objective.batch`.
      stage: whose block, from 0 to S - 1; may be traced.

    Returns:
      (width) gradient.

    Example:
      >>> import jax.numpy as jnp, pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> pj.training.block_gradient(objective, jnp.zeros((4, 2)), objective.batch(0), 3).shape
      (2,)
    """
    return batch_gradient(objective, blocks, batch)[stage]
