"""A model on a system under a schedule: seconds per op and message, bytes per worker.

Layers are dealt out to stages by the table's stage shares, in whole layers. Times are traceable:
the fields of the system may be arrays in a `jax.vmap` or the argument of a gradient.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pipejax.costs import Costs
from pipejax.hardware import Number, System, all_reduce_time, roofline_time
from pipejax.memory import peak_activation_bytes, persistent_bytes
from pipejax.ops import Phase
from pipejax.shapes import Bool, Float, Int, NumpyArray
from pipejax.table import ScheduleTable
from pipejax.transformer import (
    Model,
    boundary_bytes,
    edge_activation_bytes,
    head_flop,
    layer_activation_bytes,
    layer_flop,
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained, and how one worker is made up.

    Attributes:
      model: the transformer.
      minibatch: sequences per step and pipeline.
      tensor_parallel: accelerators that make up one worker.
      sequence_parallel: whether they split norms, dropout and messages too.
      data_parallel: replicas of the whole pipeline, each with its own minibatch.
      recompute: "none", "selective" or "full".

    Raises:
      ValueError: if a number is below 1.
    """

    model: Model
    minibatch: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    data_parallel: int = 1
    recompute: str = "none"

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("minibatch", "tensor_parallel", "data_parallel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")

    def microbatch_size(self, table: ScheduleTable) -> int:
        """Sequences of one microbatch.

        Raises:
          ValueError: if the microbatches do not divide the minibatch.
        """
        size, rest = divmod(self.minibatch, table.num_microbatches)
        if rest:
            legal = [m for m in range(1, self.minibatch + 1) if self.minibatch % m == 0]
            raise ValueError(
                f"{table.num_microbatches} microbatches do not divide a minibatch of "
                f"{self.minibatch}: legal are {', '.join(map(str, legal))}"
            )
        return size


def stage_layers(model: Model, table: ScheduleTable) -> Int[NumpyArray, " stages"]:
    """Deal the layers out to stages in proportion to their shares, in whole layers.

    Each stage gets its share rounded down; layers left over go to the largest remainders, at a
    tie to the stages in the middle, for the first and the last also hold embedding and head.

    Args:
      model: the transformer.
      table: the schedule, with its stage shares.

    Returns:
      (stages) layers.

    Raises:
      ValueError: if a stage would get none.

    Example:
      >>> from pipejax import schedules
      >>> from pipejax.transformer import load_model
      >>> table = schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> stage_layers(load_model("llama3-405b"), table).tolist()
      [31, 32, 32, 31]
    """
    shares = np.asarray(table.stage_shares)
    exact = shares / shares.sum() * model.layers
    layers = np.floor(exact + 1e-9).astype(int)
    edge = np.abs(np.arange(table.num_stages) - (table.num_stages - 1) / 2)
    order = np.lexsort((edge, -np.round(exact - layers, 9)))
    layers[order[: model.layers - layers.sum()]] += 1
    if layers.min() < 1:
        raise ValueError(
            f"{model.name} has {model.layers} layers, too few for {table.num_stages} stages"
        )
    return layers


def stage_costs(workload: Workload, system: System, table: ScheduleTable) -> Costs:
    """Price every op and message of a schedule.

    A layer is one roofline op per phase; it reads its weights and writes, or reads, its
    activations. Tensor parallelism adds two all-reduces of bsh elements per layer to F and to I
    (four to I where the whole forward is recomputed), inside a node if the worker fits into one.

    Args:
      workload: model, minibatch and parallelism.
      system: the machine.
      table: the schedule.

    Returns:
      Costs with one entry per stage and, for messages, per direction, pipe and boundary.

    Raises:
      ValueError: if the microbatches do not divide the minibatch, or layers are too few.

    Example:
      >>> from pipejax import schedules
      >>> from pipejax.hardware import load_system
      >>> from pipejax.transformer import load_model
      >>> table = schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> workload = Workload(load_model("tabular-128l"), minibatch=8)
      >>> costs = stage_costs(workload, load_system("mid_nw_mid_cp"), table)
      >>> print(f"{float(costs.forward[0]):.4f} s")
      0.0616 s
    """
    model, size = workload.model, workload.microbatch_size(table)
    split = workload.tensor_parallel
    layers = stage_layers(model, table)
    first = np.arange(table.num_stages) == 0
    last = np.arange(table.num_stages) == table.num_stages - 1
    # where the table itself recomputes (R cells), the backward does not do it again
    in_backward = "none" if np.any(table.phase == Phase.R) else workload.recompute
    flop = layer_flop(model, size, in_backward)
    weights = model.element_bytes * model.layer_parameters / split
    kept = layer_activation_bytes(
        model, size, tensor_parallel=split, sequence_parallel=workload.sequence_parallel
    )
    message = boundary_bytes(model, size)
    head = head_flop(model, size)
    _, head_kept = edge_activation_bytes(model, size, tensor_parallel=split)
    head_weights = model.element_bytes * model.head_parameters / split

    def time(layer: Number, edge: Number, bytes_per_layer: Number, edge_bytes: Number) -> Number:
        body = roofline_time(system, layer / split, bytes_per_layer)
        tail = roofline_time(system, edge / split, edge_bytes) if model.vocabulary else 0.0
        return layers * body + last * tail

    inside = system.node if split <= system.gpus_per_node else system.network
    exchange = layers * 2 * all_reduce_time(inside, message, split) if split > 1 else 0.0
    exchange_back = exchange * (2 if in_backward == "full" else 1)  # the forward's once more
    forward = time(flop.forward, head.forward, weights + kept, head_weights + head_kept)
    input_grad = time(
        flop.input_grad, head.input_grad, weights + kept + 2 * message, head_weights + head_kept
    )
    weight_grad = time(flop.weight_grad, head.weight_grad, weights + kept, head_weights + head_kept)
    parameters = (
        layers * model.layer_parameters
        + first * model.embedding_parameters
        + last * model.head_parameters
    ) / split
    latency, transmit = _message_times(workload, system, table, size)
    return Costs(
        forward=forward + exchange,
        backward=input_grad + exchange_back + weight_grad,
        input_grad=input_grad + exchange_back,
        weight_grad=weight_grad,
        recompute=forward + exchange,
        all_reduce=_reduction_times(workload, system, table, model.element_bytes * parameters),
        update=_update_times(model, system, parameters),
        latency=latency,
        transmit=transmit,
    )


def stage_bytes(
    workload: Workload, table: ScheduleTable
) -> tuple[Float[NumpyArray, " stages"], Float[NumpyArray, " stages"]]:
    """Memory of one copy of each stage, per accelerator.

    Args:
      workload: model, minibatch and parallelism.
      table: the schedule.

    Returns:
      (stages) persistent bytes: parameters, gradients and optimizer state; and (stages) bytes of
      activations that one microbatch leaves there.

    Raises:
      ValueError: if the microbatches do not divide the minibatch, or layers are too few.
    """
    model, size = workload.model, workload.microbatch_size(table)
    layers = stage_layers(model, table).astype(float)
    parameters = layers * model.layer_parameters
    activations = layers * layer_activation_bytes(
        model,
        size,
        tensor_parallel=workload.tensor_parallel,
        sequence_parallel=workload.sequence_parallel,
        recompute=workload.recompute,
    )
    mask, head = edge_activation_bytes(model, size, tensor_parallel=workload.tensor_parallel)
    parameters[0] += model.embedding_parameters
    parameters[-1] += model.head_parameters
    activations[0] += mask
    activations[-1] += head
    per_parameter = 2 * model.element_bytes + model.optimizer_bytes
    return per_parameter * parameters / workload.tensor_parallel, activations


def memory_bytes(workload: Workload, table: ScheduleTable) -> Float[NumpyArray, " workers"]:
    """Memory that each worker needs per accelerator: persistent, and activations at their peak.

    Args:
      workload: model, minibatch and parallelism.
      table: the schedule.

    Returns:
      (workers) bytes.

    Raises:
      ValueError: if the microbatches do not divide the minibatch, or layers are too few.

    Example:
      >>> from pipejax import schedules
      >>> from pipejax.transformer import load_model
      >>> table = schedules.build("1f1b", num_workers=8, num_microbatches=8)
      >>> workload = Workload(load_model("gpt3-175b"), minibatch=8, tensor_parallel=8)
      >>> print(f"{memory_bytes(workload, table)[0] / 1e9:.1f} GB")
      100.4 GB
    """
    persistent, activations = stage_bytes(workload, table)
    return persistent_bytes(table, persistent) + peak_activation_bytes(table, activations)


def _same_node(
    workload: Workload, system: System, one: NumpyArray, other: NumpyArray
) -> Bool[NumpyArray, "..."]:
    """Whether two workers live in one node, filled worker by worker."""
    per_node = max(1, system.gpus_per_node // workload.tensor_parallel)
    return np.asarray(one) // per_node == np.asarray(other) // per_node


def _message_times(
    workload: Workload, system: System, table: ScheduleTable, size: int
) -> tuple[Number, Number]:
    volume = boundary_bytes(
        workload.model,
        size,
        tensor_parallel=workload.tensor_parallel,
        sequence_parallel=workload.sequence_parallel,
    )
    near = _same_node(workload, system, table.placement[:, :-1], table.placement[:, 1:])
    near = np.broadcast_to(near, (2, *near.shape))
    latency = jnp.where(near, system.node.latency, system.network.latency)
    bandwidth = jnp.where(near, system.node.bandwidth, system.network.bandwidth)
    return latency, volume / bandwidth


def _reduction_times(
    workload: Workload,
    system: System,
    table: ScheduleTable,
    gradient_bytes: Float[NumpyArray, " stages"],
) -> Number:
    """All-reduce of each stage over its copies in all pipes and replicas."""
    participants = table.num_pipes * workload.data_parallel
    if participants == 1:
        return 0.0
    near = _same_node(workload, system, table.placement[0], table.placement[-1])
    near = near & (workload.data_parallel == 1)
    node, network = (
        all_reduce_time(link, gradient_bytes, participants)
        for link in (system.node, system.network)
    )
    return jnp.where(near, node, network)


def _update_times(model: Model, system: System, parameters: Float[NumpyArray, " stages"]) -> Number:
    """Adam reads gradient and state and writes state and parameter: bound by memory."""
    touched = 2 * model.element_bytes + 2 * model.optimizer_bytes
    return roofline_time(system, 0.0, touched * parameters)
