"""Times [s] that a system takes for the work of a schedule's stages.

`work_costs` maps a pytree of arrays to a pytree of arrays: one compilation serves all models of one
kind, all layouts and systems, and every number may be batched or differentiated. Kernels and
exchanges of one kind are priced as one array, which keeps the compilation short.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pipejax.base.array_types import Float
from pipejax.base.checks import check_types
from pipejax.base.compiled import compiled
from pipejax.base.jax_on_demand import mapped
from pipejax.costs import array_functions as xp
from pipejax.costs.array_functions import Computed, stacked, stacked_trees
from pipejax.costs.costs import Costs, with_leaves
from pipejax.costs.layers.collectives import Collective
from pipejax.costs.layers.kernels import (
    LayerOp,
    check_host,
    device_time,
    host_time,
    phase_time,
    update_time,
)
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload import (
    PerStage,
    PricingShape,
    StageLayers,
    Workload,
    assign_layers,
)
from pipejax.costs.precision import in_float64, is_traced
from pipejax.costs.scaling import GROWING, check_workers, scaled_costs
from pipejax.costs.stage.exchanges import (
    Exchanges,
    attention_alone,
    hidden_buckets,
    hidden_ring,
    layer_part_kinds,
    price_exchanges,
    with_kinds,
)
from pipejax.costs.stage.microbatches import Lengths, by_length
from pipejax.costs.stage.slices import by_slice, check_whole, sliced_model
from pipejax.costs.stage.stage_work import PerKind, StageWork, stage_work
from pipejax.costs.system.parts import Contention, Flag
from pipejax.costs.system.system import Number, Numbers, System
from pipejax.schedules.table.table import ScheduleTable

PHASES = ("forward", "input_grad", "weight_grad")
FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(len(PHASES))
ByPhase = Float[Computed, " phases"]
ByPart = Float[Computed, "ways parts phases"]
OneWay = Float[Computed, "parts phases"]


# parts of an op's seconds: kernels, exposed exchanges in layers and of split weights, and the host
PARTS = ("compute", "tensor", "context", "expert", "weights", "host")
COMPUTE, EXPERT, HOST = (PARTS.index(part) for part in ("compute", "expert", "host"))
_IS_HOST = (np.arange(len(PARTS)) == HOST)[:, None]  # (parts, stages)
_IS_WEIGHTS = (np.arange(len(PARTS)) == PARTS.index("weights"))[:, None]
Seconds = Float[Computed, "parts stages"]
Pieces = tuple[tuple[LayerOp, ...], tuple[Collective, ...]]
APART, ONE_PASS = range(2)  # ways: I and W apart, or as one pass, which hides more exchanges


def work_costs(work: StageWork, system: System) -> Costs:
    """Compute the times of ops (kernels, collectives, host) and of messages (latency + transmit).

    The host starts kernels while the accelerator runs them: a phase takes a smooth maximum of both.
    """
    exchanges = _exchanges(work, system)
    ops = op_seconds(work, system, exchanges)
    seconds = xp.stack(list(ops.values()), axis=1)  # (parts, ops, stages)
    durations = dict(zip(ops, _phase_seconds(system, seconds), strict=True))
    ends = work.stages.senders, work.stages.receivers
    is_near = work.layout.is_near(*ends, system.gpus_per_node)  # (pipes, boundaries)
    links = system.peer_link, system.network
    link = mapped(lambda near, far: xp.where(is_near, near, far), *links)
    host_link = system.host_link
    offload = None
    if work.offload_bytes is not None and has_host_link(system):
        offload = host_link.latency + work.offload_bytes / host_link.rate
    return Costs(
        **durations,
        all_reduce=_gradient_exchange(work, system, exchanges, durations["backward"]),
        update=_update(work, system, exchanges, durations["forward"]),
        **_in_cells(work, exchanges),
        offload=offload,
        latency=_both_ways(link.latency),
        transmit=_both_ways(work.message_bytes / link.rate),
    )


ByField = dict[str, Float[Computed, "*parts stages"]]


def _attention(work: StageWork, system: System, seconds: ByField) -> ByField:
    """Return attention's share of each op's compute time, by cost field (stages)."""
    attention = op_seconds(attention_alone(work), system)
    compute = {field: parts[COMPUTE] for field, parts in seconds.items()}
    return {  # 0 / 1 for stages that compute nothing
        field: attention[field][COMPUTE] / xp.where(total == 0, 1.0, total)
        for field, total in compute.items()
    }


def _with_kinds(
    costs: Costs, work: StageWork, workload: Workload, system: System, table: ScheduleTable
) -> Costs:
    """Add costs for the table's custom kinds of ops that run a part of layers."""
    kinds = layer_part_kinds(table, workload, system)
    if not kinds:
        return costs
    seconds = op_seconds(work, system)
    exchanges = {field: parts[EXPERT] for field, parts in seconds.items()}
    return with_kinds(costs, kinds, _attention(work, system, seconds), exchanges)


def _exchanges(work: StageWork, system: System) -> Exchanges:
    pieces = _pieces(work, system.kernels.priced)
    return price_exchanges(work, system, [item for _, exchanges in pieces for item in exchanges])


def op_seconds(
    work: StageWork, system: System, exchanges: Exchanges | None = None
) -> dict[str, Float[Computed, "parts stages"]]:
    """Return op times [s] of a microbatch by cost field, as arrays of shape (parts, stages)."""
    # Parts are those of `PARTS`: compute, exchanges and host. B runs I and W in one pass, in which
    # more exchanges are hidden than in two. `again`: layers whose W recomputes their forward again.
    exchanges = exchanges or _exchanges(work, system)
    layer_seconds = _layer_seconds(work, system, exchanges)
    two_passes, one_pass = ([ways[way] for ways in layer_seconds] for way in (APART, ONE_PASS))
    backward = _input_grad(work, system, one_pass) + _phase(work, system, one_pass, WEIGHT_GRAD)
    weight_grad = _phase(work, system, two_passes, WEIGHT_GRAD)
    if work.again is not None:
        weight_grad = weight_grad + _layers(two_passes, FORWARD, work.again)
    if work.plain_kinds is not None:  # W repeats what I recomputes: I less an I without it
        plain = work._replace(kinds=work.plain_kinds)
        plain_seconds = _layer_seconds(plain, system, _exchanges(plain, system))
        plain_apart = [ways[APART] for ways in plain_seconds]
        again = _layers(two_passes, INPUT_GRAD, work.layers)
        again = again - _layers(plain_apart, INPUT_GRAD, work.layers)
        weight_grad = weight_grad + xp.where(_IS_WEIGHTS, 0.0, again)
    return {
        "forward": _phase(work, system, two_passes, FORWARD),
        "backward": backward,
        "input_grad": _input_grad(work, system, two_passes),
        "weight_grad": weight_grad,
        "recompute": _layers(two_passes, FORWARD, work.layers),
    }


def _phase_seconds(
    system: System, seconds: Float[Computed, "parts *ops stages"]
) -> Float[Computed, "*ops stages"]:
    """Sum parts to op times [s] (ops, stages): the longer of accelerator and host time."""
    return xp.asarray(phase_time(system, seconds[:HOST].sum(axis=0), seconds[HOST]))


def _input_grad(work: StageWork, system: System, layer_seconds: Sequence[OneWay]) -> Seconds:
    """Return the time [s] of I by part and stage, with the forwards that it recomputes."""
    # I gathers split weights once for both.
    recomputation = _layers(layer_seconds, FORWARD, work.recomputed)
    input_grad = _phase(work, system, layer_seconds, INPUT_GRAD)
    return input_grad + xp.where(_IS_WEIGHTS, 0.0, recomputation)


def _phase(work: StageWork, system: System, layer_seconds: Sequence[OneWay], phase: int) -> Seconds:
    """Return the time [s] of F, I or W without recomputed layers, as (parts, stages)."""
    *_, embedding, head = layer_seconds  # before them, a layer of each kind
    passes = 0.0 if phase == WEIGHT_GRAD else 1.0  # I and W are one pass of the host
    host = (1 - work.layout.graphs) * host_time(system, microbatches=passes)
    edges = embedding[:, phase, None] * work.stages.first[None]
    edges = edges + head[:, phase, None] * work.heads[None]
    return _layers(layer_seconds, phase, work.layers) + edges + host * _IS_HOST


def _layers(layer_seconds: Sequence[OneWay], phase: int, layers: PerKind) -> Seconds:
    """Sum a phase's time [s] over `layers`, which counts layers by kind: (parts, stages)."""
    *kinds, _, _ = layer_seconds  # without embedding and head
    counts = zip(kinds, layers, strict=True)
    terms = [seconds[:, phase, None] * count[None] for seconds, count in counts]
    return sum(terms[1:], start=terms[0])


_SPLIT_FROM = np.array([3.0, 3.0, 2.0])  # level of ZeRO at which a phase exchanges, by phase


def _layer_seconds(work: StageWork, system: System, exchanges: Exchanges) -> list[ByPart]:
    """Return the times [s] of a layer of each kind, of the embedding and of the head."""
    # Split weights (ZeRO 3) are gathered, and split gradients (ZeRO 2) are reduced, beside the
    # compute of another layer: the workload's share of the exchange that fits is hidden.
    layer_seconds = []
    layer_flags = [1.0] * len(work.kinds) + [0.0, 0.0]  # embedding and head are no layers
    devices = _devices(work, system, exchanges.within_layers)
    split = exchanges.split_weights
    for part, device, gather, is_layer in zip(work.parts, devices, split, layer_flags, strict=True):
        hidden = system.contention.saved(gather[None], device.sum(axis=1))  # (ways, phases)
        exposed = gather[None] - work.layout.overlap * hidden
        host = (1 - work.layout.graphs) * host_time(
            system,
            launches=sum((stacked(op.launches) for op in part.ops), np.zeros(len(PHASES))),
            collectives=sum((stacked(exchange.count) for exchange in part.collectives), 0.0),
            layers=is_layer,
        )
        share_in_ops = 1.0 if work.in_cells is None else 1 - work.in_cells
        weights = _if_split(work, share_in_ops * exposed)
        last_parts = xp.stack([weights, xp.broadcast_to(host, weights.shape)], axis=1)
        layer_seconds.append(xp.concatenate([device, last_parts], axis=1))
    return layer_seconds


def _if_split(work: StageWork, seconds: Any) -> Any:
    """Set seconds (.., phases) to 0 for phases in which the ZeRO level exchanges no weights."""
    return xp.where(work.layout.zero >= _SPLIT_FROM, seconds, 0.0)


def _in_cells(work: StageWork, exchanges: Exchanges) -> dict[str, PerStage]:
    """Return the times [s] of UNSHARD and REDUCE_GRAD cells, by cost field (stages)."""
    if work.in_cells is None:
        return {}
    counts = *work.layers, work.stages.first, work.heads
    terms = [
        _if_split(work, work.in_cells * seconds)[:, None] * count
        for seconds, count in zip(exchanges.split_weights, counts, strict=True)
    ]
    forward, _, weight_grad = sum(terms[1:], start=terms[0])
    return {"unshard": forward, "reduce_grad": weight_grad}


def _pieces(work: StageWork, priced: Flag) -> list[Pieces]:
    """List each part's ops and collectives: kernels, or one op; both for a batch of systems."""
    kernels = [(part.ops, part.collectives) for part in work.parts]
    whole = [(part.whole, part.whole_collectives) for part in work.parts]
    if isinstance(priced, bool):
        return kernels if priced else whole
    return [*kernels, *whole]


def _devices(work: StageWork, system: System, exchanges: Sequence[ByPhase]) -> list[ByPart]:
    """Return each part's times on the accelerator: compute, and exposed exchanges by group."""
    # For a batch of systems the parts come twice, with kernels and as one op: each selects one.
    priced = system.kernels.priced
    pieces = _pieces(work, priced)
    kernels = iter(_kernels(system, [op for ops, _ in pieces for op in ops]))
    waits = iter(exchanges)
    devices = [_device_seconds(work, system.contention, *piece, kernels, waits) for piece in pieces]
    if isinstance(priced, bool):
        return devices
    num_parts = len(work.parts)
    pairs = zip(devices[:num_parts], devices[num_parts:], strict=True)
    return [xp.where(priced > 0, by_kernel, as_one_op) for by_kernel, as_one_op in pairs]


def _device_seconds(
    work: StageWork,
    contention: Contention,
    ops: Iterable[LayerOp],
    exchanges: Iterable[Collective],
    kernels: Iterator[ByPhase],
    waits: Iterator[ByPhase],
) -> ByPart:
    """Return times of compute and of exposed exchanges by group: (ways, parts, phases) [s]."""
    # The two ways are I and W apart, and I and W in one pass, where exchanges of I overlap with
    # products of W and the reverse. Exchanges of tokens with experts may overlap with a layer of
    # another microbatch. `kernels` and `waits` yield the seconds of each op and of each exchange.
    layout = work.layout
    compute, *groups = PARTS[: PARTS.index("weights")]
    zeros = attention = products = dispatch = np.zeros(len(PHASES))
    seconds_apart = dict.fromkeys((compute, *groups), zeros)
    hidden = dict.fromkeys((compute, *groups), zeros)  # in one pass, if all overlap is used
    for op in ops:
        seconds = next(kernels)
        seconds_apart[compute] = seconds_apart[compute] + seconds
        if op.kind == "attention":
            attention = attention + seconds
        elif op.kind == "gemm":
            products = products + seconds
    for exchange in exchanges:
        # exchanges of accelerators that split an expert count for the group of experts
        wait, group = next(waits), exchange.group.removesuffix("_tensor")
        if exchange.overlaps_with == "attention":
            wait = wait - hidden_ring(contention, wait, attention, layout.context)
        elif exchange.overlaps_with == "layer":
            dispatch = dispatch + wait
        elif exchange.overlaps_with:
            other_products = products[PHASES.index(exchange.overlaps_with)]
            hidden[group] = hidden[group] + contention.saved(wait, other_products)
        seconds_apart[group] = seconds_apart[group] + wait
    hidden_dispatch = layout.expert_overlap * contention.saved(dispatch, seconds_apart[compute])
    seconds_apart["expert"] = seconds_apart["expert"] - hidden_dispatch
    seconds = xp.stack(list(seconds_apart.values()))
    return xp.stack([seconds, seconds - layout.tensor_overlap * xp.stack(list(hidden.values()))])


def _kernels(system: System, ops: Sequence[LayerOp]) -> list[ByPhase]:
    """Return each op's times (phases) [s]; ops of a kind are priced as one array."""
    kinds = [(op.kind, op.precision) for op in ops]
    by_index: dict[int, ByPhase] = {}
    for kind in dict.fromkeys(kinds):
        members = [index for index, other in enumerate(kinds) if other == kind]
        stacked = stacked_trees([dataclasses.replace(ops[index], name="") for index in members])
        columns = [device_time(system, stacked, phase) for phase in PHASES]
        seconds = xp.stack(columns, axis=-1)  # (ops, phases)
        by_index |= {index: seconds[row] for row, index in enumerate(members)}
    return [by_index[index] for index in range(len(ops))]


def has_host_link(system: System) -> bool:
    """Return whether the host link's bandwidth is above 0; a traced bandwidth counts as such."""
    bandwidth = system.host_link.bandwidth
    return is_traced(bandwidth) or bool(np.all(np.asarray(bandwidth) > 0))


def check_machine(workload: Workload, system: System) -> None:
    """Refuse a workload if the system lacks a number it needs, such as a peak in FP8."""
    for precision in workload.precisions:
        system.peak(precision)
    check_host(system, workload.optimizer_offload)


def _gradient_exchange(
    work: StageWork, system: System, exchanges: Exchanges, backward: Number
) -> PerStage:
    """Return the exposed time [s] of each stage's gradient exchange, A (stages)."""
    # Replicas that split the optimizer state (ZeRO 1) need only their part of the sum. Gradients
    # travel layer by layer beside compute; the rest after the backward is exposed. If replicas
    # split gradients (ZeRO 2), every backward reduces its own. First and last stage also add the
    # gradients of an embedding that both hold.
    zero, stages = work.layout.zero, work.stages
    total = xp.where(zero >= 1, exchanges.gradient_parts, exchanges.gradients)
    layers = xp.maximum(sum(work.layers), 1.0)
    hidden = hidden_buckets(system.contention, total, backward, layers)
    exposed = total - work.layout.overlap * hidden
    ends = stages.first + stages.last - 2 * stages.first * stages.last  # 0 on a stage that is both
    return xp.where(zero >= 2, 0.0, exposed) + ends * exchanges.tied


def _update(work: StageWork, system: System, exchanges: Exchanges, forward: Number) -> PerStage:
    """Return the time [s] of each stage's update U (stages): optimizer, then weight gathers."""
    # If the host has a share of the optimizer, gradients go there and weights come back. Gathers
    # overlap with the first forward, layer by layer.
    layout, zero = work.layout, work.layout.zero
    replicas = layout.replicas, layout.expert_replicas
    updated: Any = 0.0  # parameters that one accelerator updates
    for parameters, count in zip(work.parameters, replicas, strict=True):
        updated = updated + parameters / xp.where(zero >= 1, count * work.stages.copies, 1.0)
    layers = xp.maximum(sum(work.layers), 1.0)
    hidden = hidden_buckets(system.contention, exchanges.weights, forward, layers)
    gather_time = exchanges.weights - layout.overlap * hidden
    gather_time = xp.where((zero >= 1) & (zero < 3), gather_time, 0.0)
    host_share = layout.optimizer_offload
    device_bytes, host_bytes = (
        share * updated * work.update_bytes for share in (1 - host_share, host_share)
    )
    exchanged_bytes = host_share * updated * (work.gradient_bytes + work.element_bytes)
    update = update_time(system, device_bytes, host_bytes, exchanged_bytes)
    return update + gather_time + work.stages.ends_step * system.host.step


def _both_ways(value: Numbers) -> Float[Computed, "2 pipes boundaries"]:
    """Repeat message times (pipes, boundaries) for both directions: (2, pipes, boundaries)."""
    return xp.broadcast_to(value, (2, *np.shape(value)))


def stage_costs(
    workload: Workload, system: System, table: ScheduleTable, *, lengths: Lengths | None = None
) -> Costs:
    """Compute the times of every op and message of a schedule for a workload on a system.

    With `lengths`, a microbatch of n tokens is priced as b sequences of n / b tokens, b as without
    lengths. Packed sequences, and slices, are priced as sequences of the length sum(s^2) / sum(s),
    at which tokens attend to as many others. So products grow with the tokens, attention with the
    squares of the sequences; kernels keep their efficiencies, messages their bytes per token.
    Latencies, A, U and sharding do not depend on lengths; with slices, A and U overlap with first
    slices.

    Args:
      workload: model, minibatch and parallelism.
      system: the machine.
      table: the schedule.
      lengths: tokens of each microbatch, or the lengths of its sequences; all equal if None.

    Returns:
      Costs with one entry per stage and, for messages, per direction, pipe and boundary, in
      float64 where no number of model and system is traced; with lengths, or microbatches in
      slices, an axis of microbatches more.

    Raises:
      ValueError: if the microbatches do not divide the minibatch, or layers are too few; if a
        length is not above 0, or there are not as many as microbatches, or these are in slices; if
        a model in slices is not causal.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> workload = pj.Workload(pj.load_model("tabular-128l"), minibatch=8)
      >>> costs = pj.stage_costs(workload, pj.load_system("mid_nw_mid_cp"), table)
      >>> print(f"{float(costs.forward[0]):.4f} s")
      0.0616 s
      >>> workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=8, tensor_parallel=8)
      >>> h100, lengths = pj.load_system("h100"), [2048, 4096, [2048, 2048], *5 * [2048]]
      >>> costs = pj.stage_costs(workload, h100, table, lengths=lengths)
      >>> print(*(costs.forward[0] / costs.forward[0, 0]).round(2)[:4].tolist())
      1.0 1.68 1.46 1.0
    """
    check_types(
        workload=(workload, Workload), system=(system, System), table=(table, ScheduleTable)
    )
    slices = table.grammar.slices
    if lengths is None and slices == 1:
        return costs_of_microbatch(workload.model, system, workload, table)
    if lengths is not None:
        check_whole(table, "lengths")
    no_stragglers = dataclasses.replace(workload, stragglers=())  # they are applied at the end

    def price(model: Model, size: float) -> dict[str, Any]:
        """Return those costs of a microbatch that depend on its length, by field."""
        costs = vars(costs_of_microbatch(model, system, no_stragglers, table, size))
        fields = (*GROWING, *layer_part_kinds(table, workload, system))
        return {name: np.asarray(costs[name]) for name in fields if costs[name] is not None}

    if lengths is None:
        first, varying = sliced_model(workload.model, 0, slices), by_slice(workload, table, price)
    else:
        first, varying = workload.model, by_length(workload, table, lengths, price)
    size = workload.microbatch_size(table)
    costs = with_leaves(costs_of_microbatch(first, system, no_stragglers, table, size), varying)
    return scaled_costs(costs, table, workers=dict(workload.stragglers))


def stage_parts(workload: Workload, system: System, table: ScheduleTable) -> dict[str, Costs]:
    """Split `stage_costs` into parts such as compute; return the costs by part."""
    return _stage_parts(workload.model, system, workload, table)


@in_float64
def _stage_parts(
    model: Model, system: System, workload: Workload, table: ScheduleTable
) -> dict[str, Costs]:
    """Return costs by part, for a model without traced numbers."""

    def price(model: Model, size: float) -> dict[str, Any]:
        """Return op times [s] of a microbatch by cost field, as arrays (parts, stages)."""
        sized = dataclasses.replace(workload, model=model)
        seconds = op_seconds(stage_work(sized, table, microbatch_size=size), system)
        for name, parts in seconds.items():  # the last part becomes the delay by the host
            delay = _phase_seconds(system, parts) - parts[:HOST].sum(axis=0)
            seconds[name] = xp.concatenate([parts[:HOST], delay[None]])
        return seconds

    workload = dataclasses.replace(workload, model=model)
    kinds, attention = layer_part_kinds(table, workload, system), {}
    if kinds:
        check_whole(table, "a breakdown of parts of layers")
        work = stage_work(workload, table)
        attention = _attention(work, system, op_seconds(work, system))
    if table.grammar.slices == 1:
        seconds = price(model, workload.microbatch_size(table))
    else:
        seconds = by_slice(workload, table, price)
    others = dict.fromkeys(("all_reduce", "update", "offload", "load"), 0.0)
    costs_by_part = {}
    for row, part in enumerate(PARTS):
        times = {name: value[row] for name, value in seconds.items()}
        factor = 1.0 if row == EXPERT else 0.0
        exchanges = {name: factor * value for name, value in times.items()}
        costs = with_kinds(Costs(**times, **others), kinds, attention, exchanges)
        costs_by_part[part] = with_factors(costs, workload, table)
    return costs_by_part


def with_factors(costs: Costs, workload: Workload, table: ScheduleTable) -> Costs:
    """Apply the workload's factors for slow workers and for fused pairs to costs."""
    if workload.pair_factor != 1:
        costs = dataclasses.replace(costs, pair_factor=workload.pair_factor)
    slow = dict(workload.stragglers)
    check_workers(slow, table, "stragglers")
    return scaled_costs(costs, table, workers=slow) if slow else costs


@in_float64
def costs_of_microbatch(
    model: Model,
    system: System,
    workload: Workload,
    table: ScheduleTable,
    microbatch_size: Number | None = None,
) -> Costs:
    """Price a schedule of equal microbatches; numbers of model and system may be traced."""
    workload = dataclasses.replace(workload, model=model)
    check_machine(workload, system)
    offloads = not is_traced(system.host_link.bandwidth) and has_host_link(system)
    if not is_traced(model, system):
        shape = PricingShape(workload, table)
        return costs_of_shape(shape, model, system, None, microbatch_size, offloads=offloads)
    return _in_trace()(
        PricingShape.from_workload(workload, table),
        dataclasses.replace(model, name="", source=""),
        dataclasses.replace(system, name="", source="", calibration=None),
        assign_layers(workload, table),
        workload.microbatch_size(table) if microbatch_size is None else microbatch_size,
        offloads=offloads,
    )


@functools.cache
def _in_trace() -> Callable[..., Costs]:
    """Return `costs_of_shape` compiled by JAX, for traced numbers."""
    return compiled(costs_of_shape, static_argnames=("shape", "offloads"))


def costs_of_shape(
    shape: PricingShape,
    model: Model,
    system: System,
    assigned: StageLayers | None,
    microbatch_size: Number | None,
    *,
    offloads: bool = False,
) -> Costs:
    """Price a microbatch from numbers (all may be traced) and their static pricing shape."""
    work = stage_work(
        dataclasses.replace(shape.workload, model=model),
        shape.table,
        assigned=assigned,
        microbatch_size=microbatch_size,
        offloads=offloads,
    )
    costs = _with_kinds(work_costs(work, system), work, shape.workload, system, shape.table)
    return with_factors(costs, shape.workload, shape.table)
