"""The work of a schedule's stages, and the seconds that a system takes for it.

`StageWork` depends on model, layout and schedule, never on the speed of a machine; `work_costs`
turns it into seconds. Both are pytrees of arrays: one compilation serves all models of one kind,
all layouts and systems, and every number may be batched or differentiated. `stage_work` is for one
schedule; `work_of_stages` counts the same from numbers alone, which may be padded and traced.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pipejax.base.array_types import Array, Float
from pipejax.base.checks import check_types
from pipejax.costs.activations import boundary_bytes
from pipejax.costs.collectives import collective_time
from pipejax.costs.costs import Costs
from pipejax.costs.kernel_time import device_time, host_time, phase_time, update_time
from pipejax.costs.layer_collectives import (
    Collective,
    embedding_collectives,
    head_collectives,
    layer_collectives,
    whole_layer_collectives,
)
from pipejax.costs.layer_ops import (
    LayerOp,
    embedding_ops,
    head_ops,
    layer_ops,
    whole_head,
    whole_layer,
)
from pipejax.costs.layout import Group, Layout
from pipejax.costs.model import Model
from pipejax.costs.overlap import exposed_buckets, exposed_ring
from pipejax.costs.precision import in_float64
from pipejax.costs.system import Link, Number, System
from pipejax.costs.workload import (
    Parameters,
    PerStage,
    StageLayers,
    Stages,
    Workload,
    assign_layers,
    layer_weights,
    layers_by_kind,
    stage_parameters,
    stages_of,
)
from pipejax.schedules.table.table import ScheduleTable

PHASES = ("forward", "input_grad", "weight_grad")
PerKind = tuple[PerStage, ...]


class PartWork(NamedTuple):
    """Work of one layer, of the embedding or of the head, on one accelerator.

    Attributes:
      ops: its kernels.
      collectives: exchanges beside and between them.
      whole: all kernels as one op, for systems that price layers, not kernels.
      whole_collectives: exchanges that go with it.
      weights: parameters of one accelerator, which replicas may split.
    """

    ops: tuple[LayerOp, ...]
    collectives: tuple[Collective, ...]
    whole: tuple[LayerOp, ...]
    whole_collectives: tuple[Collective, ...]
    weights: Parameters


class StageWork(NamedTuple):
    """What one accelerator of every stage computes, moves and sends for one microbatch.

    Attributes:
      layout: degrees of parallelism.
      stages: where they lie.
      layers: (stages) layers of each kind.
      recomputed: (stages) those of each kind whose forward is run again within I.
      kinds: work of one layer, by kind.
      embedding: work of the embedding.
      head: work of the output head and its loss.
      heads: (stages) output heads: one on the last stage, and one for each further token.
      message_bytes: bytes of one message.
      parameters: of one accelerator, before replicas split them.
      gradient_bytes: bytes per parameter in the gradient exchange.
      element_bytes: bytes per weight.
      update_bytes: bytes per parameter that the optimizer reads and writes.
      tied_parameters: of an embedding that first and last stage both hold.
      overlap: 1 where gradients travel beside compute, else 0.
    """

    layout: Layout
    stages: Stages
    layers: PerKind
    recomputed: PerKind
    kinds: tuple[PartWork, ...]
    embedding: PartWork
    head: PartWork
    heads: PerStage
    message_bytes: Number
    parameters: Parameters
    gradient_bytes: Number
    element_bytes: Number
    update_bytes: Number
    tied_parameters: Number
    overlap: Number


def stage_work(
    workload: Workload,
    table: ScheduleTable,
    *,
    assigned: StageLayers | None = None,
    microbatch_size: Number | None = None,
) -> StageWork:
    """Count what every op and message of a schedule computes, moves and sends."""
    found = assign_layers(workload, table) if assigned is None else assigned
    return work_of_stages(
        workload.model,
        workload.layout(table, microbatch_size),
        stages_of(table, found),
        recompute=workload.recompute_in_layer,
        overlap=float(workload.overlap),
    )


def work_of_stages(
    model: Model,
    layout: Layout,
    stages: Stages,
    *,
    recompute: str = "none",
    overlap: Number = 0.0,
) -> StageWork:
    """Count the work of stages from numbers alone, all of which may be traced.

    Full recomputation is the layers' forward once more, in I or, where the table has R cells for
    the stage, in R; `recompute` is what a layer itself recomputes, "none" or "selective".
    """
    parameters = stage_parameters(model, layout, stages)
    element = model.element_bytes
    tied = model.head_parameters / layout.tensor if model.tied_embeddings else 0.0
    return StageWork(
        layout=layout,
        stages=stages,
        layers=layers_by_kind(model, stages.layers, stages.last),
        recomputed=layers_by_kind(model, stages.recomputed, 0 * stages.last),
        kinds=tuple(
            PartWork(
                layer_ops(model, layout, kind, recompute),
                layer_collectives(model, layout, kind),
                whole_layer(model, layout, kind, recompute),
                whole_layer_collectives(model, layout),
                weights,
            )
            for kind, weights in layer_weights(model, layout).items()
        ),
        embedding=PartWork(
            embedding_ops(model, layout),
            embedding_collectives(model, layout),
            (),
            (),
            Parameters(0.0, 0.0),
        ),
        head=PartWork(
            head_ops(model, layout),
            head_collectives(model, layout),
            whole_head(model, layout),
            (),
            Parameters(model.head_parameters / layout.tensor, 0.0),
        ),
        heads=stages.last * (1 + model.mtp_layers) * (model.vocabulary > 0),
        message_bytes=boundary_bytes(model, layout) * layout.shared_by / layout.message_shared_by,
        parameters=parameters,
        gradient_bytes=model.accumulated_bytes,
        element_bytes=element,
        update_bytes=2 * element + 2 * model.optimizer_bytes,
        tied_parameters=tied,
        overlap=overlap,
    )


class _Seconds(NamedTuple):
    """What a phase takes on accelerator and host, each alone [s]."""

    device: Number
    host: Number

    def __add__(self, other: "_Seconds") -> "_Seconds":  # type: ignore[override]  # not a sequence
        return _Seconds(self.device + other.device, self.host + other.host)

    def __mul__(self, factor: Number) -> "_Seconds":  # type: ignore[override]  # not a sequence
        return _Seconds(self.device * factor, self.host * factor)


def work_costs(work: StageWork, system: System) -> Costs:
    """Turn work into seconds: kernels, collectives and host for ops, Hockney's model for messages.

    On every stage the host starts kernels while the accelerator runs them: a phase lasts as long
    as the slower of both, joined smoothly.
    """
    forward, input_grad, weight_grad = (_phase(work, system, phase) for phase in PHASES)
    again = _layers(work, system, "forward", work.recomputed)
    input_grad += again

    def lasts(seconds: _Seconds) -> Number:
        return phase_time(system, *seconds)

    near = _message_link(work, system)
    return Costs(
        forward=lasts(forward),
        backward=lasts(input_grad + weight_grad),
        input_grad=lasts(input_grad),
        weight_grad=lasts(weight_grad),
        recompute=lasts(_layers(work, system, "forward", work.layers)),
        all_reduce=_gradient_exchange(work, system, lasts(input_grad + weight_grad)),
        update=_update(work, system, lasts(forward)),
        latency=_both_ways(near.latency),
        transmit=_both_ways(work.message_bytes / near.rate),
    )


def _phase(work: StageWork, system: System, phase: str) -> _Seconds:
    """Seconds (stages) of one microbatch's F, I or W, without what full recomputation adds."""
    edges = [
        _part(work, system, part, phase) * where
        for part, where in ((work.embedding, work.stages.first), (work.head, work.heads))
    ]
    passes = 0.0 if phase == "weight_grad" else 1.0  # I and W are one pass of the host
    once = _Seconds(0.0, host_time(system, microbatches=passes))
    return sum(edges, _layers(work, system, phase, work.layers) + once)


def _layers(work: StageWork, system: System, phase: str, layers: PerKind) -> _Seconds:
    """Seconds (stages) of so many layers (stages) of each kind."""
    found = _Seconds(0.0, 0.0)
    for part, count in zip(work.kinds, layers, strict=True):
        own = _Seconds(0.0, host_time(system, layers=1.0))
        found += (_part(work, system, part, phase) + own) * count
    return found


def _part(work: StageWork, system: System, part: PartWork, phase: str) -> _Seconds:
    """Seconds of one layer, of the embedding or of the head.

    Weights that the replicas split (ZeRO 3) are gathered while the part before computes, and
    their gradients are given back so: what is longer counts.
    """
    by_kernel, whole = (
        sum((device_time(system, op, phase) for op in ops), 0.0)
        + sum((_exposed(work, system, part, each, phase) for each in collectives), 0.0)
        for ops, collectives in (
            (part.ops, part.collectives),
            (part.whole, part.whole_collectives),
        )
    )
    device = jnp.where(system.kernels.priced > 0, by_kernel, whole)
    kind = "reduce_scatter" if phase == "weight_grad" else "all_gather"
    gather = sum(
        collective_time(system, kind, weights * work.element_bytes, ranks.on(system.gpus_per_node))
        for weights, ranks in zip(part.weights, work.layout.replica_groups, strict=True)
    )
    sharded = jnp.where(work.layout.zero >= 3, jnp.maximum(device, gather), device)
    launches = sum((getattr(op.launches, phase) for op in part.ops), 0.0)
    collectives = sum((getattr(each.count, phase) for each in part.collectives), 0.0)
    return _Seconds(sharded, host_time(system, launches=launches, collectives=collectives))


def _exposed(
    work: StageWork, system: System, part: PartWork, exchange: Collective, phase: str
) -> Number:
    """Seconds of an exchange within a layer that compute does not hide."""
    groups = {
        "tensor": work.layout.tensor_group,
        "context": work.layout.context_group,
        "expert": work.layout.expert_group,
    }
    group = groups[exchange.group].on(system.gpus_per_node)
    count = getattr(exchange.count, phase)
    volume = getattr(exchange.volume, phase)
    seconds = count * collective_time(system, exchange.kind, volume, group)
    if exchange.beside != "attention":
        return seconds
    beside = [op for op in part.ops if op.kind == "attention"]
    attention = sum((device_time(system, op, phase) for op in beside), 0.0)
    return exposed_ring(seconds, attention, group.size)


def _message_link(work: StageWork, system: System) -> Link:
    """The link (pipes, boundaries) of a message: inside a node, or between nodes."""
    stages = work.stages
    is_near = work.layout.is_near(stages.senders, stages.receivers, system.gpus_per_node)
    link: Link = jax.tree.map(
        lambda near, far: jnp.where(is_near, near, far), system.node, system.network
    )
    return link


def _exchange(work: StageWork, system: System, kind: str, element: Number) -> PerStage:
    """Seconds (stages) in which all holders of the same weights exchange them or their gradients.

    Dense weights and experts have groups of their own; copies of a stage in other pipes are
    members too. `element` is bytes per parameter.
    """
    stages, layout = work.stages, work.layout
    near = layout.is_near(stages.nearest, stages.farthest, system.gpus_per_node)
    copies_inside = jnp.where(near, stages.copies, 1.0)
    total = jnp.zeros_like(stages.copies)
    for parameters, ranks in zip(work.parameters, layout.replica_groups, strict=True):
        size, inside = ranks.on(system.gpus_per_node)
        group = Group(size * stages.copies, inside * copies_inside)
        seconds = collective_time(system, kind, parameters * element, group)
        total = total + jnp.where(parameters > 0, seconds, 0.0)
    return total


def _gradient_exchange(work: StageWork, system: System, backward: Number) -> PerStage:
    """Seconds (stages) of A after the last backward.

    Replicas that split the optimizer state need only their part of the sum. Beside compute,
    gradients travel layer by layer: what is left after the backward is exposed; ZeRO 3 reduces
    them within every backward. First and last stage also add the gradients of an embedding that
    both hold.
    """
    zero = work.layout.zero
    total = jnp.where(
        zero >= 1,
        _exchange(work, system, "reduce_scatter", work.gradient_bytes),
        _exchange(work, system, "all_reduce", work.gradient_bytes),
    )
    exposed = exposed_buckets(total, backward, jnp.maximum(sum(work.layers), 1.0))
    after = jnp.where(work.overlap > 0, exposed, total)
    return jnp.where(zero >= 3, 0.0, after) + _tied_exchange(work, system)


def _tied_exchange(work: StageWork, system: System) -> PerStage:
    """Seconds (stages) in which first and last stage add the gradients of a shared embedding."""
    stages = work.stages
    ends = stages.first + stages.last - 2 * stages.first * stages.last  # none with one stage
    last = jnp.sum(stages.last * stages.nearest)
    near = work.layout.is_near(jnp.sum(stages.first * stages.nearest), last, system.gpus_per_node)
    group = Group(2.0, 1.0 + near)
    volume = work.tied_parameters * work.gradient_bytes
    seconds = collective_time(system, "all_reduce", volume, group)
    return ends * jnp.where(volume > 0, seconds, 0.0)


def _update(work: StageWork, system: System, forward: Number) -> PerStage:
    """Seconds (stages) of U: the optimizer on its share, and what the replicas gather after it.

    Beside compute the gathers hide behind the first forward, layer by layer.
    """
    layout, zero = work.layout, work.layout.zero
    sharing = layout.replicas, layout.expert_replicas
    own = sum(
        (
            parameters / jnp.where(zero >= 1, by * work.stages.copies, 1.0)
            for parameters, by in zip(work.parameters, sharing, strict=True)
        ),
        0.0,
    )
    gather = _exchange(work, system, "all_gather", work.element_bytes)
    exposed = exposed_buckets(gather, forward, jnp.maximum(sum(work.layers), 1.0))
    after = jnp.where(work.overlap > 0, exposed, gather)
    gathered = jnp.where((zero >= 1) & (zero < 3), after, 0.0)
    return update_time(system, own * work.update_bytes) + gathered


def _both_ways(value: Number) -> Float[Array, "2 pipes boundaries"]:
    """Give messages the same time in both directions: (2, pipes, boundaries)."""
    return jnp.broadcast_to(value, (2, *jnp.shape(value)))


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
    return work_costs(stage_work(workload, table), system)
