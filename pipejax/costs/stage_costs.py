"""FLOP and bytes of a workload under a schedule, and the seconds that a system takes for them.

`StageWork` depends on model, parallelism and table, never on the speed of a machine; `work_costs`
turns it into seconds. Both are pytrees of arrays: one compilation serves all models, microbatch
sizes and systems with as many stages, and every number may be batched or differentiated.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.costs.activations import (
    boundary_bytes,
    edge_activation_bytes,
    layer_activation_bytes,
)
from pipejax.costs.costs import Costs
from pipejax.costs.flop import Phases, head_flop, layer_flop
from pipejax.costs.layout import Layout
from pipejax.costs.model import Model
from pipejax.costs.precision import in_float64
from pipejax.costs.system import Link, Number, System, all_reduce_time, roofline_time
from pipejax.costs.workload import PerStage, StageLayers, Workload, assign_layers, stage_parameters
from pipejax.schedules.table.table import ScheduleTable

Flags = Bool[Array, "..."] | Bool[NumpyArray, "..."]


class StageWork(NamedTuple):
    """What one accelerator of every stage computes, moves and sends for one microbatch.

    Attributes:
      layers: (stages) layers.
      recomputed: (stages) layers whose forward is run again within I.
      has_head: (stages) 1 on the stage that holds the output head, 0 elsewhere.
      flop: of one layer.
      volume: bytes that F, I and W of one layer read and write.
      head_flop: of the output head.
      head_volume: bytes that each phase of it reads and writes.
      exchange_bytes: bytes of one all-reduce of tensor parallelism; two of them per layer.
      exchange_participants: accelerators that take part.
      exchange_near: whether they are in one node.
      message_bytes: bytes of one message.
      message_near: (pipes, boundaries) whether it stays in a node.
      gradient_bytes: (stages) gradients to reduce.
      gradient_participants: (stages) copies of the stage, in all pipes and replicas.
      gradient_near: (stages) whether they are in one node.
      update_bytes: (stages) bytes that the optimizer reads and writes.
    """

    layers: PerStage
    recomputed: PerStage
    has_head: PerStage
    flop: Phases
    volume: Phases
    head_flop: Phases
    head_volume: Number
    exchange_bytes: Number
    exchange_participants: Number
    exchange_near: bool | Flags
    message_bytes: Number
    message_near: Flags
    gradient_bytes: PerStage
    gradient_participants: PerStage
    gradient_near: Flags
    update_bytes: PerStage


def stage_work(
    workload: Workload,
    table: ScheduleTable,
    *,
    gpus_per_node: int,
    assigned: StageLayers | None = None,
    microbatch_size: Number | None = None,
) -> StageWork:
    """Count what every op and message of a schedule computes, moves and sends.

    A layer reads its weights and writes, or reads, its activations. Tensor parallelism adds two
    all-reduces of bsh elements per layer to F and to I, inside a node if the worker fits into
    one. Full recomputation is the layers' forward once more, in I or, where the table has R cells
    for the stage, in R.
    """
    model = workload.model
    layout = workload.layout(table, microbatch_size)
    size = layout.microbatch_size
    split = workload.tensor_parallel
    layers, recomputed = assign_layers(workload, table) if assigned is None else assigned
    flop, in_head = layer_flop(model, size, workload.recompute_in_layer), head_flop(model, size)
    boundary = boundary_bytes(model, layout)
    kept = layer_activation_bytes(model, layout)
    _, head_kept = edge_activation_bytes(model, layout)
    moved = model.element_bytes * model.layer_parameters / split + kept
    parameters = stage_parameters(model, layers) / split
    placement = table.placement

    def is_near(one: NumpyArray, other: NumpyArray) -> Flags:
        per_node = max(1, gpus_per_node // split)
        return one // per_node == other // per_node

    holders = np.array([len(np.unique(workers)) for workers in placement.T])
    near = is_near(placement.min(axis=0), placement.max(axis=0))
    return StageWork(
        layers=layers,
        recomputed=recomputed,
        has_head=np.eye(table.num_stages)[-1] * (model.vocabulary > 0),
        flop=Phases(*(each / split for each in flop)),
        volume=Phases(moved, moved + 2 * boundary, moved),
        head_flop=Phases(*(each / split for each in in_head)),
        head_volume=model.element_bytes * model.head_parameters / split + head_kept,
        exchange_bytes=boundary_bytes(model, Layout(microbatch_size=size)),
        exchange_participants=float(split),
        exchange_near=split <= gpus_per_node,
        message_bytes=boundary,
        message_near=is_near(placement[:, :-1], placement[:, 1:]),
        gradient_bytes=model.element_bytes * parameters,
        gradient_participants=holders * float(workload.data_parallel),
        gradient_near=near & (workload.data_parallel == 1),
        update_bytes=(2 * model.element_bytes + 2 * model.optimizer_bytes) * parameters,
    )


NEAR = ("exchange_near", "message_near", "gradient_near")  # all that depends on a system's nodes
_axes: Any = [0 if name in NEAR else None for name in StageWork._fields]
OF_SYSTEMS = StageWork(*_axes)


def work_on_systems(
    workload: Workload, table: ScheduleTable, gpus_per_node: Int[NumpyArray, " batch"]
) -> StageWork:
    """Count the work of a schedule on each system of a batch; vmap over it by `OF_SYSTEMS`."""
    kinds, kind = np.unique(gpus_per_node, return_inverse=True)
    works = [stage_work(workload, table, gpus_per_node=int(gpus)) for gpus in kinds]
    one: StageWork = jax.tree.map(np.asarray, works[0])
    near: dict[str, Any] = {
        name: np.stack([getattr(work, name) for work in works])[kind] for name in NEAR
    }
    return one._replace(**near)


def work_costs(work: StageWork, system: System) -> Costs:
    """Turn work into seconds: rooflines for ops, Hockney's model for messages.

    A layer is one roofline op per phase. The update is Adam's, which reads gradient and state and
    writes state and parameter: bound by memory.
    """
    inside, near = (_nearer(system, flags) for flags in (work.exchange_near, work.message_near))
    exchange = 2 * all_reduce_time(inside, work.exchange_bytes, work.exchange_participants)

    def ops(flop: Number, volume: Number, in_head: Number) -> tuple[Number, Number]:
        head = work.has_head * roofline_time(system, in_head, work.head_volume)
        return roofline_time(system, flop, volume), head

    (layer, head), (layer_i, head_i), (layer_w, head_w) = map(
        ops, work.flop, work.volume, work.head_flop
    )
    again = layer + exchange
    input_grad = work.layers * (layer_i + exchange) + head_i + work.recomputed * again
    weight_grad = work.layers * layer_w + head_w
    return Costs(
        forward=work.layers * again + head,
        backward=input_grad + weight_grad,
        input_grad=input_grad,
        weight_grad=weight_grad,
        recompute=work.layers * again,
        all_reduce=all_reduce_time(
            _nearer(system, work.gradient_near), work.gradient_bytes, work.gradient_participants
        ),
        update=roofline_time(system, 0.0, work.update_bytes),
        latency=_both_ways(near.latency),
        transmit=_both_ways(work.message_bytes / near.rate),
    )


def _both_ways(value: Number) -> Float[Array, "2 pipes boundaries"]:
    """Give messages the same time in both directions: (2, pipes, boundaries)."""
    return jnp.broadcast_to(value, (2, *jnp.shape(value)))


def _nearer(system: System, is_near: bool | Flags) -> Link:
    """Return the link inside a node where both ends are near, else that of the network."""
    link: Link = jax.tree.map(
        lambda near, far: jnp.where(is_near, near, far), system.node, system.network
    )
    return link


def stage_costs(workload: Workload, system: System, table: ScheduleTable) -> Costs:
    """Price every op and message of a schedule.

    Args:
      workload: model, minibatch and parallelism.
      system: the machine.
      table: the schedule.

    Returns:
      Costs with one entry per stage and, for messages, per direction, pipe and boundary, in
      float64 where no number of model and system is traced.

    Raises:
      ValueError: if the microbatches do not divide the minibatch, or layers are too few.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> workload = pj.Workload(pj.load_model("tabular-128l"), minibatch=8)
      >>> costs = pj.stage_costs(workload, pj.load_system("mid_nw_mid_cp"), table)
      >>> print(f"{float(costs.forward[0]):.4f} s")
      0.0616 s
    """
    check_types(
        workload=(workload, Workload), system=(system, System), table=(table, ScheduleTable)
    )
    return _stage_costs(workload.model, system, workload, table)


@in_float64
def _stage_costs(model: Model, system: System, workload: Workload, table: ScheduleTable) -> Costs:
    """Price with the model beside its workload, into which JAX does not look: it may be traced."""
    workload = dataclasses.replace(workload, model=model)
    return work_costs(stage_work(workload, table, gpus_per_node=system.gpus_per_node), system)
