"""The seconds that a system takes for the work of a schedule's stages.

`work_costs` is a pytree of arrays in, a pytree of arrays out: one compilation serves all models of
one kind, all layouts and systems, and every number may be batched or differentiated. Kernels and
exchanges of one kind are priced as one array, which keeps that compilation short.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float
from pipejax.base.checks import check_types
from pipejax.costs.collectives import collective_time
from pipejax.costs.costs import Costs
from pipejax.costs.kernel_time import device_time, host_time, phase_time, update_time
from pipejax.costs.kernels import LayerOp
from pipejax.costs.layer_collectives import Collective
from pipejax.costs.layout import Group
from pipejax.costs.model import Model
from pipejax.costs.overlap import exposed_buckets, exposed_ring
from pipejax.costs.precision import in_float64, is_traced
from pipejax.costs.stage_work import PerKind, StageWork, stage_work
from pipejax.costs.system import Link, Number, System
from pipejax.costs.workload import PerStage, Workload
from pipejax.schedules.table.table import ScheduleTable

PHASES = ("forward", "input_grad", "weight_grad")
FORWARD, _, WEIGHT_GRAD = range(len(PHASES))
ByPhase = Float[Array, " phases"]
ByPart = Float[Array, "ways parts phases"]


# what the seconds of an op are made of: kernels, what compute does not hide of exchanges within
# layers and of gathered weights, and beside the accelerator its host
PARTS = ("compute", "tensor", "context", "expert", "weights", "host")
HOST = PARTS.index("host")
Seconds = Float[Array, "ways parts stages"]
APART, ONE_PASS = range(2)  # ways: each phase by itself; I and W as one, which hides more exchanges


def work_costs(work: StageWork, system: System) -> Costs:
    """Turn work into seconds: kernels, collectives and host for ops, Hockney's model for messages.

    On every stage the host starts kernels while the accelerator runs them: a phase lasts as long
    as the slower of both, joined smoothly.
    """
    lasts = {name: _lasts(system, each) for name, each in op_seconds(work, system).items()}
    near = _message_link(work, system)
    return Costs(
        **lasts,
        all_reduce=_gradient_exchange(work, system, lasts["backward"]),
        update=_update(work, system, lasts["forward"]),
        offload=_host_transfer(work, system),
        latency=_both_ways(near.latency),
        transmit=_both_ways(work.message_bytes / near.rate),
    )


def op_seconds(work: StageWork, system: System) -> dict[str, Float[Array, "parts stages"]]:
    """Seconds of the ops of one microbatch, by field of `Costs`: (parts, stages) each."""
    parts = _parts(work, system)
    forward, input_grad, weight_grad = (
        _phase(work, system, parts, each) for each in range(len(PHASES))
    )
    input_grad += _layers(parts, FORWARD, work.recomputed)
    return {
        "forward": forward[APART],
        "backward": (input_grad + weight_grad)[ONE_PASS],
        "input_grad": input_grad[APART],
        "weight_grad": weight_grad[APART],
        "recompute": _layers(parts, FORWARD, work.layers)[APART],
    }


def _lasts(system: System, seconds: Float[Array, "parts stages"]) -> Float[Array, " stages"]:
    """Seconds (stages) of an op: the longer of accelerator and host."""
    return jnp.asarray(phase_time(system, seconds[:HOST].sum(axis=0), seconds[HOST]))


def _phase(work: StageWork, system: System, parts: Sequence[ByPart], phase: int) -> Seconds:
    """Seconds of one microbatch's F, I or W, without what full recomputation adds."""
    *_, embedding, head = parts
    passes = 0.0 if phase == WEIGHT_GRAD else 1.0  # I and W are one pass of the host
    once = host_time(system, microbatches=passes)
    edges = embedding[..., phase, None] * work.stages.first[None, None]
    edges += head[..., phase, None] * work.heads[None, None]
    return (_layers(parts, phase, work.layers) + edges).at[:, HOST].add(once)


def _layers(parts: Sequence[ByPart], phase: int, layers: PerKind) -> Seconds:
    """Seconds of so many layers (stages) of each kind."""
    *kinds, _, _ = parts
    each = [
        part[..., phase, None] * count[None, None]
        for part, count in zip(kinds, layers, strict=True)
    ]
    return sum(each[1:], start=each[0])


_SPLIT_FROM = np.array([3.0, 3.0, 2.0])  # level of ZeRO at which a phase exchanges, by phase


def _parts(work: StageWork, system: System) -> list[ByPart]:
    """Seconds of one layer of each kind, of the embedding and of the head.

    Weights that the replicas split (ZeRO 3) are gathered while the part before computes, and
    gradients that they split (ZeRO 2) are given back so in every W: what is longer counts.
    """
    kernels = iter(_kernels(system, [op for part in work.parts for op in (*part.ops, *part.whole)]))
    exchanges = (
        each for part in work.parts for each in (*part.collectives, *part.whole_collectives)
    )
    waits = iter(_exchanges(work, system, list(exchanges)))
    found = []
    is_layer = [1.0] * len(work.kinds) + [0.0, 0.0]
    for part, gathers, layers in zip(work.parts, _gathers(work, system), is_layer, strict=True):
        by_kernel = _device(work, part.ops, part.collectives, kernels, waits)
        whole = _device(work, part.whole, part.whole_collectives, kernels, waits)
        device = jnp.where(system.kernels.priced > 0, by_kernel, whole)
        beyond = jnp.maximum(gathers[None] - device.sum(axis=1), 0.0)  # (ways, phases)
        host = host_time(
            system,
            launches=sum((_array(op.launches) for op in part.ops), jnp.zeros(len(PHASES))),
            collectives=sum((_array(each.count) for each in part.collectives), 0.0),
            layers=layers,
        )
        sharded = jnp.where(work.layout.zero >= _SPLIT_FROM[None], beyond, 0.0)
        beside = jnp.stack([sharded, jnp.broadcast_to(host, sharded.shape)], axis=1)
        found.append(jnp.concatenate([device, beside], axis=1))
    return found


def _device(
    work: StageWork,
    ops: Iterable[LayerOp],
    exchanges: Iterable[Collective],
    kernels: Iterator[ByPhase],
    waits: Iterator[ByPhase],
) -> ByPart:
    """Seconds of ops and, by group, of what compute does not hide of their exchanges.

    In one pass, I's exchanges run beside the products of W, and those of W beside I's, where the
    workload lets exchanges travel beside compute.
    """
    compute, *groups = PARTS[: PARTS.index("weights")]
    none = attention = products = jnp.zeros(len(PHASES))
    apart, hidden = dict.fromkeys((compute, *groups), none), dict.fromkeys((compute, *groups), none)
    for op in ops:
        seconds = next(kernels)
        apart[compute] = apart[compute] + seconds
        attention = attention + seconds * (op.kind == "attention")
        products = products + seconds * (op.kind == "gemm")
    for exchange in exchanges:
        wait, group = next(waits), exchange.group
        if exchange.beside == "attention":
            wait = jnp.asarray(exposed_ring(wait, attention, work.layout.context))
        elif exchange.beside:
            beside = jnp.minimum(wait, products[PHASES.index(exchange.beside)])
            hidden[group] = hidden[group] + beside
        apart[group] = apart[group] + wait
    whole = jnp.stack(list(apart.values()))
    return jnp.stack([whole, whole - work.overlap * jnp.stack(list(hidden.values()))])


def _kernels(system: System, ops: Sequence[LayerOp]) -> list[ByPhase]:
    """Seconds (phases) of each op: those of one kind and precision as one array."""
    kinds = [(op.kind, op.precision) for op in ops]
    found: dict[int, ByPhase] = {}
    for kind in dict.fromkeys(kinds):
        members = [index for index, each in enumerate(kinds) if each == kind]
        alike = _stacked([dataclasses.replace(ops[index], name="") for index in members])
        columns = [device_time(system, alike, phase) for phase in PHASES]
        seconds = jnp.stack(columns, axis=-1)  # (ops, phases)
        found |= {index: seconds[row] for row, index in enumerate(members)}
    return [found[index] for index in range(len(ops))]


def _exchanges(work: StageWork, system: System, exchanges: Sequence[Collective]) -> list[ByPhase]:
    """Seconds (phases) of each exchange within a layer: those of one kind as one array."""
    groups = {
        "tensor": work.layout.tensor_group,
        "context": work.layout.context_group,
        "expert": work.layout.expert_group,
    }
    sizes = {name: ranks.on(system.gpus_per_node) for name, ranks in groups.items()}
    found: dict[int, ByPhase] = {}
    for kind in dict.fromkeys(each.kind for each in exchanges):
        members = [index for index, each in enumerate(exchanges) if each.kind == kind]
        volume, count = (
            jnp.stack([_array(getattr(exchanges[index], name)) for index in members])
            for name in ("volume", "count")
        )
        group = _stacked([sizes[exchanges[index].group] for index in members])
        columns = Group(*(each[:, None] for each in group))
        seconds = jnp.asarray(collective_time(system, kind, volume, columns, count))
        found |= {index: seconds[row] for row, index in enumerate(members)}
    return [found[index] for index in range(len(exchanges))]


def _gathers(work: StageWork, system: System) -> list[ByPhase]:
    """Seconds (phases) in which split weights of each part are gathered, and gradients summed."""
    weights = jnp.stack([_array(part.weights) for part in work.parts])  # (parts, groups)
    ranks = [each.on(system.gpus_per_node) for each in work.layout.replica_groups]
    group = Group(*(each[None, :] for each in _stacked(ranks)))
    volume = weights * work.element_bytes
    gather, reduce = (
        jnp.where(volume > 0, collective_time(system, kind, volume, group), 0.0).sum(axis=1)
        for kind in ("all_gather", "reduce_scatter")
    )
    return list(jnp.stack([gather, gather, reduce], axis=-1))


def _array(values: Sequence[Number]) -> Float[Array, " values"]:
    return jnp.stack([jnp.asarray(value, float) for value in values])


def _stacked(trees: Sequence[Any]) -> Any:
    """One tree of arrays (trees) from several of numbers."""
    return jax.tree.map(lambda *leaves: _array(leaves), *trees)


def _host_transfer(work: StageWork, system: System) -> Number | None:
    """Seconds (stages) of O, and so of L; None where the system's host link is unknown."""
    if work.offload_bytes is None or not has_host_link(system):
        return None
    return system.host_link.latency + work.offload_bytes / system.host_link.rate


def has_host_link(system: System) -> bool:
    """Whether the host link is known; one that is traced has to be."""
    bandwidth = system.host_link.bandwidth
    return is_traced(bandwidth) or bool(np.all(np.asarray(bandwidth) > 0))


def _message_link(work: StageWork, system: System) -> Link:
    """The link (pipes, boundaries) of a message: inside a node, or between nodes."""
    stages = work.stages
    is_near = work.layout.is_near(stages.senders, stages.receivers, system.gpus_per_node)
    link: Link = jax.tree.map(
        lambda near, far: jnp.where(is_near, near, far), system.peer_link, system.network
    )
    return link


def _exchange(work: StageWork, system: System, kind: str, element: Number) -> PerStage:
    """Seconds (stages) in which all holders of the same weights exchange them or their gradients.

    Dense weights and experts have groups of their own; copies of a stage in other pipes are
    members too. `element` is bytes per parameter.
    """
    stages, layout = work.stages, work.layout
    near = layout.is_near(stages.nearest, stages.farthest, system.gpus_per_node)
    size, inside = _stacked([ranks.on(system.gpus_per_node) for ranks in layout.replica_groups])
    group = Group(
        size[:, None] * stages.copies[None, :],
        inside[:, None] * jnp.where(near, stages.copies, 1.0)[None, :],
    )
    volume = jnp.stack([part + 0 * stages.copies for part in work.parameters]) * element
    seconds = collective_time(system, kind, volume, group)  # (groups, stages)
    return jnp.where(volume > 0, seconds, 0.0).sum(axis=0)


def _gradient_exchange(work: StageWork, system: System, backward: Number) -> PerStage:
    """Seconds (stages) of A after the last backward.

    Replicas that split the optimizer state need only their part of the sum. Beside compute,
    gradients travel layer by layer: what is left after the backward is exposed. Where the replicas
    split them (ZeRO 2), every backward has reduced its own. First and last stage also add the
    gradients of an embedding that both hold.
    """
    zero = work.layout.zero
    total = jnp.where(
        zero >= 1,
        _exchange(work, system, "reduce_scatter", work.gradient_bytes),
        _exchange(work, system, "all_reduce", work.gradient_bytes),
    )
    exposed = exposed_buckets(total, backward, jnp.maximum(sum(work.layers), 1.0))
    after = jnp.where(work.overlap > 0, exposed, total)
    return jnp.where(zero >= 2, 0.0, after) + _tied_exchange(work, system)


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


def stage_parts(workload: Workload, system: System, table: ScheduleTable) -> dict[str, Costs]:
    """Break the ops of `stage_costs` down: costs by part, whose sum they are."""
    return _stage_parts(workload.model, system, workload, table)


@in_float64
def _stage_parts(
    model: Model, system: System, workload: Workload, table: ScheduleTable
) -> dict[str, Costs]:
    workload = dataclasses.replace(workload, model=model)
    seconds = {
        # of the host only what it adds
        name: each.at[HOST].set(_lasts(system, each) - each[:HOST].sum(axis=0))
        for name, each in op_seconds(stage_work(workload, table), system).items()
    }
    others = dict.fromkeys(("all_reduce", "update", "offload", "load"), 0.0)
    return {
        part: Costs(**{name: each[row] for name, each in seconds.items()}, **others)
        for row, part in enumerate(PARTS)
    }


@in_float64
def _stage_costs(model: Model, system: System, workload: Workload, table: ScheduleTable) -> Costs:
    """Price with the model beside its workload, into which JAX does not look: it may be traced."""
    workload = dataclasses.replace(workload, model=model)
    offloads = not is_traced(system.host_link.bandwidth) and has_host_link(system)
    return work_costs(stage_work(workload, table, offloads=offloads), system)
