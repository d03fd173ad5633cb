"""A model on a system under a schedule: seconds per op and message, bytes per worker.

Layers are dealt out to stages by the table's stage shares, in whole layers. Times are traceable:
the fields of the system may be arrays in a `jax.vmap` or the argument of a gradient.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pipejax.checks import whole_number
from pipejax.costs import Costs
from pipejax.hardware import Number, System, all_reduce_time, roofline_time
from pipejax.memory import peak_activation_bytes, persistent_bytes
from pipejax.ops import Phase
from pipejax.shapes import Bool, Float, Int, NumpyArray
from pipejax.table import ScheduleTable
from pipejax.transformer import (
    Model,
    boundary_bytes,
    check_recompute,
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
      ValueError: if a number is below 1, or recompute is unknown.

    Example:
      >>> from pipejax.transformer import load_model
      >>> Workload(load_model("gpt-22b"), minibatch=0)
      Traceback (most recent call last):
      ...
      ValueError: minibatch must be a whole number of at least 1, got 0
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
            object.__setattr__(self, name, whole_number(getattr(self, name), name))
        check_recompute(self.recompute)

    @property
    def recompute_in_layer(self) -> str:
        """What is recomputed besides whole layers: "none" or "selective"."""
        return "selective" if self.recompute == "selective" else "none"

    def microbatch_size(self, table: ScheduleTable) -> int:
        """Sequences of one microbatch.

        Args:
          table: the schedule, with its number of microbatches.

        Returns:
          b, minibatch / M [sequences].

        Raises:
          ValueError: if the microbatches do not divide the minibatch.

        Example:
          >>> from pipejax import load_model, schedules
          >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=4)
          >>> Workload(load_model("gpt-22b"), minibatch=8).microbatch_size(table)
          2
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
    activations. Tensor parallelism adds two all-reduces of bsh elements per layer to F and to I,
    inside a node if the worker fits into one. Full recomputation is the layers' forward once
    more, in I or, where the table has R cells for the stage, in R.

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
    split, shared = workload.tensor_parallel, workload.sequence_parallel
    layers = stage_layers(model, table)
    last = np.arange(table.num_stages) == table.num_stages - 1
    flop = layer_flop(model, size, workload.recompute_in_layer)
    weights = model.element_bytes * model.layer_parameters / split
    kept = layer_activation_bytes(model, size, tensor_parallel=split, sequence_parallel=shared)
    boundary = boundary_bytes(model, size, tensor_parallel=split, sequence_parallel=shared)
    inside = system.node if split <= system.gpus_per_node else system.network
    exchange = 2 * all_reduce_time(inside, boundary_bytes(model, size), split) if split > 1 else 0.0

    def body(layer: Number, volume: Number) -> Number:
        return layers * roofline_time(system, layer / split, volume)

    _, head_kept = edge_activation_bytes(
        model, size, tensor_parallel=split, sequence_parallel=shared
    )
    head_volume = model.element_bytes * model.head_parameters / split + head_kept
    head = [
        last * roofline_time(system, each / split, head_volume) if model.vocabulary else 0.0
        for each in head_flop(model, size)
    ]
    again = body(flop.forward, weights + kept) + layers * exchange
    forward = again + head[0]
    input_grad = body(flop.input_grad, weights + kept + 2 * boundary) + layers * exchange + head[1]
    weight_grad = body(flop.weight_grad, weights + kept) + head[2]
    if workload.recompute == "full":
        input_grad += np.where(_recomputed_stages(table), 0.0, 1.0) * again
    parameters = _stage_parameters(model, table) / split
    latency, transmit = _message_times(workload, system, table, boundary)
    return Costs(
        forward=forward,
        backward=input_grad + weight_grad,
        input_grad=input_grad,
        weight_grad=weight_grad,
        recompute=again,
        all_reduce=_reduction_times(workload, system, table, model.element_bytes * parameters),
        update=_update_times(model, system, parameters),
        latency=latency,
        transmit=transmit,
    )


def _stage_parameters(model: Model, table: ScheduleTable) -> Float[NumpyArray, " stages"]:
    """Parameters of one copy of each stage; a tied head is a second copy on another stage."""
    parameters = stage_layers(model, table) * float(model.layer_parameters)
    parameters[0] += model.embedding_parameters
    if table.num_stages > 1 or not model.tied_embeddings:
        parameters[-1] += model.head_parameters
    return parameters


def _recomputed_stages(table: ScheduleTable) -> Bool[NumpyArray, " stages"]:
    """Stages whose recomputation the table itself states as R cells."""
    return np.isin(np.arange(table.num_stages), table.stage[table.phase == Phase.R])


class StageBytes(NamedTuple):
    """Memory of one copy of each stage, per accelerator.

    Attributes:
      persistent: (stages) parameters, gradients and optimizer state [B].
      activations: (stages) what one microbatch leaves there until its backward [B].
      checkpoint: (stages) what it leaves between F and R, where the table recomputes it [B].

    Example:
      >>> from pipejax import load_model, schedules
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=1)
      >>> memory = stage_bytes(Workload(load_model("gpt-22b"), 1, recompute="full"), table)
      >>> memory.persistent.shape, bool(np.all(memory.activations == memory.checkpoint))
      ((2,), True)
    """

    persistent: Float[NumpyArray, " stages"]
    activations: Float[NumpyArray, " stages"]
    checkpoint: Float[NumpyArray, " stages"]


def stage_bytes(workload: Workload, table: ScheduleTable) -> StageBytes:
    """Memory of one copy of each stage, per accelerator.

    Full recomputation leaves the input of every layer, or, on stages that the table recomputes
    in R cells, the same until R and all activations after it.

    Args:
      workload: model, minibatch and parallelism.
      table: the schedule.

    Returns:
      Bytes by stage.

    Raises:
      ValueError: if the microbatches do not divide the minibatch, or layers are too few.

    Example:
      >>> from pipejax import schedules
      >>> from pipejax.transformer import load_model
      >>> table = schedules.build("1f1b", num_workers=8, num_microbatches=8)
      >>> memory = stage_bytes(Workload(load_model("gpt-22b"), minibatch=8), table)
      >>> print(f"{memory.persistent[1] / 1e9:.1f} GB, {memory.activations[1] / 1e9:.1f} GB")
      43.5 GB, 10.6 GB
    """
    model, size = workload.model, workload.microbatch_size(table)
    split, shared = workload.tensor_parallel, workload.sequence_parallel
    layers = stage_layers(model, table).astype(float)

    def per_layer(recompute: str) -> Number:
        return layer_activation_bytes(
            model, size, tensor_parallel=split, sequence_parallel=shared, recompute=recompute
        )

    checkpoint = layers * per_layer("full")
    activations = np.where(
        _recomputed_stages(table),
        layers * per_layer(workload.recompute_in_layer),
        layers * per_layer(workload.recompute),
    )
    mask, head = edge_activation_bytes(model, size, tensor_parallel=split, sequence_parallel=shared)
    for kept in (checkpoint, activations):
        kept[0] += mask
        kept[-1] += head
    per_parameter = 2 * model.element_bytes + model.optimizer_bytes
    return StageBytes(
        per_parameter * _stage_parameters(model, table) / split, activations, checkpoint
    )


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
      100.6 GB
    """
    memory = stage_bytes(workload, table)
    held = peak_activation_bytes(table, memory.activations, memory.checkpoint)
    return persistent_bytes(table, memory.persistent) + held


def _same_node(
    workload: Workload, system: System, one: NumpyArray, other: NumpyArray
) -> Bool[NumpyArray, "..."]:
    """Whether two workers live in one node, filled worker by worker."""
    per_node = max(1, system.gpus_per_node // workload.tensor_parallel)
    return np.asarray(one) // per_node == np.asarray(other) // per_node


def _message_times(
    workload: Workload, system: System, table: ScheduleTable, volume: Number
) -> tuple[Number, Number]:
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
    """All-reduce of each stage over the workers that hold it, in all pipes and replicas."""
    holders = [len(np.unique(workers)) for workers in table.placement.T]
    participants = np.array(holders) * workload.data_parallel
    lowest, highest = table.placement.min(axis=0), table.placement.max(axis=0)
    near = _same_node(workload, system, lowest, highest) & (workload.data_parallel == 1)
    node, network = (
        all_reduce_time(link, gradient_bytes, participants)
        for link in (system.node, system.network)
    )
    return jnp.where(near, node, network)


def _update_times(model: Model, system: System, parameters: Float[NumpyArray, " stages"]) -> Number:
    """Adam reads gradient and state and writes state and parameter: bound by memory."""
    touched = 2 * model.element_bytes + 2 * model.optimizer_bytes
    return roofline_time(system, 0.0, touched * parameters)
