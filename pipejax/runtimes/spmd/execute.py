"""The program of all devices: in each lockstep slot, every device runs an op, then sends.

  for each slot:  op of the slot, and of its partner   -> an activation, an input gradient
                  one ppermute for each distance that activations move, one for gradients

A table is an argument of the program, as arrays of integers, so tables of equal size share a
compilation. Empty and freed entries of buffers are NaN, so an op at a wrong time gives NaN.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pipejax.base.array_types import Array, Bool, Float, NumpyArray
from pipejax.runtimes.spmd.instructions import Instructions, SpmdSizes


class SmallModel(NamedTuple):
    """Size and seed of the small model to train."""

    hidden: int = 16  # width of the layers
    batch_size: int = 2  # examples of a microbatch
    seed: int = 0  # random seed of parameters and data


class StageParameters(NamedTuple):
    """Parameters of one stage, or of several stages along leading axes."""

    into: Float[Array, "*copies hidden hidden"] | Float[NumpyArray, "*copies hidden hidden"]
    bias: Float[Array, "*copies hidden"] | Float[NumpyArray, "*copies hidden"]
    out: Float[Array, "*copies hidden hidden"] | Float[NumpyArray, "*copies hidden hidden"]


class TrainingData(NamedTuple):
    """Inputs of the first stage and targets of the last stage, for all microbatches."""

    input: Float[NumpyArray, "microbatches batch hidden"]
    target: Float[NumpyArray, "microbatches batch hidden"]


def stage_parameters(num_stages: int, model: SmallModel) -> StageParameters:
    """Draw random parameters (stages, ...), with a separate seed for each stage."""
    parts, hidden = [], model.hidden
    for stage in range(num_stages):
        draw = np.random.default_rng([model.seed, stage]).standard_normal
        scale = hidden**-0.5
        parts.append((scale * draw((hidden, hidden)), draw(hidden), scale * draw((hidden, hidden))))
    return StageParameters(*map(np.stack, zip(*parts, strict=True)))


def training_data(num_microbatches: int, model: SmallModel) -> TrainingData:
    """Draw random inputs and targets for one step."""
    shape = 2, num_microbatches, model.batch_size, model.hidden
    return TrainingData(*np.random.default_rng(model.seed).standard_normal(shape))


def run_stage(parameters: StageParameters, activation: Array) -> Array:
    """Return the output of a stage, of shape (batch, hidden)."""
    inner = jnp.tanh(activation @ parameters.into + parameters.bias[None])
    return activation + inner @ parameters.out


def square_loss(output: Array, target: Array) -> Array:
    """Return half the mean square error of the output for a microbatch."""
    return jnp.mean((output - target) ** 2) / 2


@jax.jit
def unpipelined(
    parameters: StageParameters,
    input: Float[Array, "microbatches batch hidden"],
    target: Float[Array, "microbatches batch hidden"],
    is_real_stage: Bool[Array, " stages"],
    weights: Float[Array, " microbatches"],
) -> tuple[Float[Array, ""], StageParameters]:
    """Return loss and gradients of the model, computed stage by stage without a schedule."""
    # Smaller models are padded: a stage that is not real returns its input, and a microbatch that
    # does not exist has weight 0 in the loss.

    def mean_loss(parameters: StageParameters) -> Array:
        def apply_stage(activation: Array, stage: Any) -> tuple[Array, None]:
            layer, is_real = stage
            return jnp.where(is_real, run_stage(layer, activation), activation), None

        def microbatch_loss(activation: Array, target: Array) -> Array:
            output, _ = jax.lax.scan(apply_stage, activation, (parameters, is_real_stage))
            return square_loss(output, target)

        return jnp.sum(weights * jax.vmap(microbatch_loss)(input, target))

    return jax.value_and_grad(mean_loss)(parameters)


WORKERS = "workers"
Index = Any  # a traced integer, or an array of integers


class WorkerState(NamedTuple):
    """Buffers of all workers; inside the program of a device, buffers of one worker."""

    # arrived activations, then activations for backwards
    activations: Float[Array, "*workers kept batch hidden"]
    gradients: Float[Array, "*workers entries batch hidden"]  # gradients of stage outputs
    host: Float[Array, "*workers entries batch hidden"]  # offloaded activations
    weights: StageParameters  # (copies, ...) parameters of each stage copy
    sums: StageParameters  # (copies, ...) sums of weight gradients of each stage copy
    losses: Float[Array, "*workers microbatches"]  # losses, on workers with the last stage


class _InFlight(NamedTuple):
    """State of a worker, and the messages that it sends at the end of the slot."""

    state: WorkerState
    activation: Array
    gradient: Array


def _at(tree: Any, index: Index) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _idle(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    return moving


def _forward(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    """Run F; store its input and, on the last stage, the loss and the gradient of the loss."""
    state = moving.state
    activation = state.activations[step.read]
    output = run_stage(_at(state.weights, step.copy), activation)
    loss, seed = jax.value_and_grad(square_loss)(output, target[step.microbatch])
    activations = state.activations.at[step.free].set(jnp.nan).at[step.write].set(activation)
    state = state._replace(
        activations=activations,
        gradients=state.gradients.at[step.seed].set(seed),
        losses=state.losses.at[step.microbatch].set(loss),
    )
    return moving._replace(state=state, activation=output)


def _backward(
    step: Instructions, moving: _InFlight, target: Array, *, for_input: bool, for_weights: bool
) -> _InFlight:
    """Compute the input gradient (I), the weight gradient (W) or both (B) of a stage."""
    # this runs the forward of the stage again from the stored input
    state = moving.state
    weights, activation = _at(state.weights, step.copy), state.activations[step.read]
    _, pull = jax.vjp(run_stage, weights, activation)
    gradients, gradient = pull(state.gradients[step.entry])
    if for_weights:
        state = state._replace(
            activations=state.activations.at[step.free].set(jnp.nan),
            gradients=state.gradients.at[step.entry].set(jnp.nan),
            sums=jax.tree.map(
                lambda total, part: total.at[step.copy].add(part), state.sums, gradients
            ),
        )
    return moving._replace(state=state, gradient=gradient if for_input else moving.gradient)


def _recompute(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    """Copy the checkpoint to the entry that backwards read; backwards run the stage again."""
    state = moving.state
    activation = state.activations[step.read]
    activations = state.activations.at[step.free].set(jnp.nan).at[step.write].set(activation)
    return moving._replace(state=state._replace(activations=activations))


def _offload(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    state = moving.state
    host = state.host.at[step.entry].set(state.activations[step.read])
    activations = state.activations.at[step.free].set(jnp.nan)
    return moving._replace(state=state._replace(activations=activations, host=host))


def _load(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    state = moving.state
    activations = state.activations.at[step.write].set(state.host[step.entry])
    host = state.host.at[step.entry].set(jnp.nan)
    return moving._replace(state=state._replace(activations=activations, host=host))


BRANCHES: list[Callable[..., _InFlight]] = [  # functions for `CODES`, in the same order
    _idle,
    _forward,
    functools.partial(_backward, for_input=True, for_weights=True),
    functools.partial(_backward, for_input=True, for_weights=False),
    functools.partial(_backward, for_input=False, for_weights=True),
    _recompute,
    _offload,
    _load,
]


def _store_arrivals(
    buffer: Array, value: Array, entries: Index, shifts: tuple[int, ...], workers: int
) -> Array:
    """Send a value to the workers at each distance (shift), and store the values that arrive."""
    # With 4 workers and shift 1, workers 0 1 2 3 send to 1 2 3 0. A receiver that does not need
    # the value stores it in its spare entry.
    for k, shift in enumerate(shifts):
        ring = [(worker, (worker + shift) % workers) for worker in range(workers)]
        arrival = jax.lax.ppermute(value, WORKERS, ring) if shift else value
        buffer = buffer.at[entries[k]].set(arrival)
    return buffer


def _exchange(moving: _InFlight, now: Instructions, sizes: SpmdSizes) -> WorkerState:
    """Send activations and gradients at the end of a slot; return the worker's new state."""
    state, store = moving.state, functools.partial(_store_arrivals, workers=sizes.workers)
    activation = moving.activation, now.activation_to, sizes.activation_shifts
    gradient = moving.gradient, now.gradient_to, sizes.gradient_shifts
    return state._replace(
        activations=store(state.activations, *activation),
        gradients=store(state.gradients, *gradient),
    )


@functools.partial(jax.jit, static_argnames="sizes")
def execute(
    instructions: Instructions,
    state: WorkerState,
    target: Float[Array, "microbatches batch hidden"],
    sizes: SpmdSizes,
) -> WorkerState:
    """Run a table with one device per worker; return the final state of all workers."""
    # Instructions have the shape (slots, workers, ...). All fields but the last two have entries
    # for both ops of a slot.
    op_fields = Instructions._fields[:-2]

    def on_worker(instructions: Instructions, state: WorkerState, target: Array) -> WorkerState:
        def slot(state: WorkerState, now: Instructions) -> tuple[WorkerState, None]:
            """Run the op or fused pair of a slot, then exchange messages."""
            no_message = jnp.zeros(target.shape[1:], target.dtype)
            moving = _InFlight(state, no_message, no_message)
            for member in range(2):
                fields = {name: getattr(now, name)[member] for name in op_fields}
                step = now._replace(**fields)
                moving = jax.lax.switch(step.code, BRANCHES, step, moving, target)
            return _exchange(moving, now, sizes), None

        worker_steps = jax.tree.map(lambda leaf: leaf[:, 0], instructions)
        state, _ = jax.lax.scan(slot, _at(state, 0), worker_steps)
        return jax.tree.map(lambda leaf: leaf[None], state)

    mesh = Mesh(jax.devices()[: sizes.workers], (WORKERS,))
    by_worker, by_slot = PartitionSpec(WORKERS), PartitionSpec(None, WORKERS)
    program = jax.shard_map(
        on_worker,
        mesh=mesh,
        in_specs=(by_slot, by_worker, PartitionSpec()),
        out_specs=by_worker,
        check_vma=False,
    )
    return program(instructions, state, target)
