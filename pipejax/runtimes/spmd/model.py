"""The small model that is trained: stages of one shape, and the same without a pipeline."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Bool, Float, NumpyArray


class SmallModel(NamedTuple):
    """What is trained.

    Attributes:
      hidden: width of the layers.
      batch_size: examples of a microbatch.
      seed: of parameters and data.
      step_size: what an update within the table multiplies the mean gradient with; at 0 all
        versions of the weights are those that the step began with.
    """

    hidden: int = 16
    batch_size: int = 2
    seed: int = 0
    step_size: float = 0.0


class StageParameters(NamedTuple):
    """Parameters of one stage, or of several along leading axes.

    Attributes:
      into: (hidden, hidden) weights into the layer.
      bias: (hidden) its bias.
      out: (hidden, hidden) weights out of it.
    """

    into: Float[Array, "*copies hidden hidden"] | Float[NumpyArray, "*copies hidden hidden"]
    bias: Float[Array, "*copies hidden"] | Float[NumpyArray, "*copies hidden"]
    out: Float[Array, "*copies hidden hidden"] | Float[NumpyArray, "*copies hidden hidden"]


class TrainingData(NamedTuple):
    """What goes into the first stage, and what should come out of the last.

    Attributes:
      input: (microbatches, batch, hidden).
      target: (microbatches, batch, hidden).
    """

    input: Float[NumpyArray, "microbatches batch hidden"]
    target: Float[NumpyArray, "microbatches batch hidden"]


def stage_parameters(num_stages: int, hidden: int, seed: int) -> StageParameters:
    """Draw the parameters of stages (stages, ...), each from a seed of its own."""
    each = []
    for stage in range(num_stages):
        draw = np.random.default_rng([seed, stage]).standard_normal
        scale = hidden**-0.5
        each.append((scale * draw((hidden, hidden)), draw(hidden), scale * draw((hidden, hidden))))
    return StageParameters(*map(np.stack, zip(*each, strict=True)))


def training_data(num_microbatches: int, batch_size: int, hidden: int, seed: int) -> TrainingData:
    """Draw the data of one step."""
    shape = 2, num_microbatches, batch_size, hidden
    return TrainingData(*np.random.default_rng(seed).standard_normal(shape))


def run_stage(parameters: StageParameters, activation: Array) -> Array:
    """Return what a stage passes on: (batch, hidden)."""
    inner = jnp.tanh(activation @ parameters.into + parameters.bias[None])
    return activation + inner @ parameters.out


def loss_of(output: Array, target: Array) -> Array:
    """Return the loss of a microbatch."""
    return jnp.mean((output - target) ** 2) / 2


@functools.partial(jax.jit)
def unpipelined(
    parameters: StageParameters,
    input: Float[Array, "microbatches batch hidden"],
    target: Float[Array, "microbatches batch hidden"],
    stage_is_there: Bool[Array, " stages"],
    share: Float[Array, " microbatches"],
) -> tuple[Float[Array, ""], StageParameters]:
    """Return loss and gradients of the model, stage after stage, without any schedule.

    Stages that are not there pass on what they get, and microbatches without a share count nothing,
    so one compilation serves models of all sizes up to this one.
    """

    def mean_loss(parameters: StageParameters) -> Array:
        def through(activation: Array, stage: tuple[StageParameters, Array]) -> tuple[Array, None]:
            own, is_there = stage
            return jnp.where(is_there, run_stage(own, activation), activation), None

        def one(activation: Array, wanted: Array) -> Array:
            output, _ = jax.lax.scan(through, activation, (parameters, stage_is_there))
            return loss_of(output, wanted)

        return jnp.sum(share * jax.vmap(one)(input, target))

    return jax.value_and_grad(mean_loss)(parameters)
