"""Times [s] that a system takes for the work of a schedule's stages.

`work_costs` maps a pytree of arrays to a pytree of arrays: one compilation serves all models of one
kind, all layouts and systems, and every number may be batched or differentiated. Kernels and
exchanges of one kind are priced as one array, which keeps the compilation short.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
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
    smooth_max,
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


# parts of an op's time: kernels ("compute"); exchanges that compute does not hide, by kind of
# parallelism; and the host's time to start kernels and exchanges
PARTS = ("compute", "tensor", "context", "expert", "weights", "host")
COMPUTE, EXPERT, HOST = (PARTS.index(part) for part in ("compute", "expert", "host"))
_IS_HOST = (np.arange(len(PARTS)) == HOST)[:, None]  # (parts, stages)
_IS_WEIGHTS = (np.arange(len(PARTS)) == PARTS.index("weights"))[:, None]
Seconds = Float[Computed, "parts stages"]
Pieces = tuple[tuple[LayerOp, ...], tuple[Collective, ...]]
APART, ONE_PASS = range(2)  # ways to run I and W: apart, or in one pass, which hides more exchanges


def work_costs(work: StageWork, system: System) -> Costs:
    """Compute the times of ops (kernels, collectives, host) and of messages [s]."""
    exchanges = _exchanges(work, system)
    unshard, reduce_grad = _cell_exchanges(work, exchanges)
    ops = op_seconds(work, system, exchanges)
    seconds = xp.stack(list(ops.values()), axis=1)  # (parts, ops, stages)
    durations = dict(zip(ops, _phase_seconds(system, seconds), strict=True))
    ends = work.stages.senders, work.stages.receivers
    is_near = work.layout.is_near(*ends, system.gpus_per_node)  # (pipes, boundaries)
    # bandwidth, latency and efficiency of each boundary's link (pipes, boundaries)
    link = mapped(lambda near, far: xp.where(is_near, near, far), system.peer_link, system.network)
    host_link = system.host_link
    offload = None
    if work.offload_bytes is not None and has_host_link(system):
        offload = host_link.latency + work.offload_bytes / host_link.rate
    return Costs(
        **durations,
        all_reduce=_gradient_exchange(work, system, exchanges, durations["backward"]),
        update=_update(work, system, exchanges, durations["forward"]),
        unshard=unshard,
        reduce_grad=reduce_grad,
        offload=offload,
        latency=_both_ways(link.latency),
        transmit=_both_ways(work.message_bytes / link.rate),
    )


ByField = dict[str, Float[Computed, "*parts stages"]]


def _attention(work: StageWork, system: System, seconds: ByField) -> dict[str, PerStage]:
    """Return {cost field: share of attention in the compute time of the op (stages)}."""
    attention = op_seconds(attention_alone(work), system)
    shares = {}
    for field, parts in seconds.items():
        total = parts[COMPUTE]
        # a stage that computes nothing gets 0 / 1
        shares[field] = attention[field][COMPUTE] / xp.where(total == 0, 1.0, total)
    return shares


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
    """Return {cost field: times of an op of a microbatch (parts, stages) [s]}."""
    # The parts are those of `PARTS`. B runs I and W in one pass, in which compute hides more
    # exchanges. If I and W are two passes, each repeats the recomputation that it needs.
    exchanges = exchanges or _exchanges(work, system)
    layer_seconds = _layer_seconds(work, system, exchanges)
    two_passes = [seconds[APART] for seconds in layer_seconds]
    one_pass = [seconds[ONE_PASS] for seconds in layer_seconds]
    backward = _input_grad(work, system, one_pass) + _time(work, system, one_pass, WEIGHT_GRAD)
    weight_grad = _time(work, system, two_passes, WEIGHT_GRAD)
    if work.layers_w_recomputes is not None:  # W recomputes the forward of whole layers
        weight_grad = weight_grad + _layer_time(two_passes, FORWARD, work.layers_w_recomputes)
    if work.plain_kinds is not None:  # W recomputes parts of layers, as I does
        plain = work._replace(kinds=work.plain_kinds)
        plain_seconds = _layer_seconds(plain, system, _exchanges(plain, system))
        plain_two_passes = [seconds[APART] for seconds in plain_seconds]
        # recomputation: the time of I, less its time without recomputation
        input_grad = _layer_time(two_passes, INPUT_GRAD, work.layers)
        recomputation = input_grad - _layer_time(plain_two_passes, INPUT_GRAD, work.layers)
        weight_grad = weight_grad + xp.where(_IS_WEIGHTS, 0.0, recomputation)
    return {
        "forward": _time(work, system, two_passes, FORWARD),
        "backward": backward,
        "input_grad": _input_grad(work, system, two_passes),
        "weight_grad": weight_grad,
        "recompute": _layer_time(two_passes, FORWARD, work.layers),
    }


def _phase_seconds(
    system: System, seconds: Float[Computed, "parts *ops stages"]
) -> Float[Computed, "*ops stages"]:
    """Return op times [s] (ops, stages): the longer of the accelerator's and the host's time."""
    on_device, on_host = seconds[:HOST].sum(axis=0), seconds[HOST]
    return xp.asarray(smooth_max(on_device, on_host, system.kernels.sharpness))


def _input_grad(work: StageWork, system: System, layer_seconds: Sequence[OneWay]) -> Seconds:
    """Return the time [s] of I (parts, stages), with the forwards that I recomputes."""
    # I gathers split weights once for its own products and for the recomputed forwards.
    recomputation = _layer_time(layer_seconds, FORWARD, work.recomputed)
    input_grad = _time(work, system, layer_seconds, INPUT_GRAD)
    return input_grad + xp.where(_IS_WEIGHTS, 0.0, recomputation)


def _time(work: StageWork, system: System, layer_seconds: Sequence[OneWay], phase: int) -> Seconds:
    """Return the time [s] of F, I or W by part of `PARTS`, without recomputation."""
    # times of a layer of each kind, of embedding and of head, each (parts, phases)
    *_, embedding, head = layer_seconds
    passes = 0.0 if phase == WEIGHT_GRAD else 1.0  # I and W are one pass of the host
    host = (1 - work.layout.graphs) * host_time(system, microbatches=passes)
    first = embedding[:, phase, None] * work.stages.first[None]  # 0 on all other stages
    edges = first + head[:, phase, None] * work.heads[None]
    return _layer_time(layer_seconds, phase, work.layers) + edges + host * _IS_HOST


def _layer_time(layer_seconds: Sequence[OneWay], phase: int, layers: PerKind) -> Seconds:
    """Return the time [s] of all layers of a stage in one phase, as (parts, stages)."""
    # `layer_seconds` has the times of a layer of each kind, then of embedding and head. `layers`
    # has the number of layers of each kind on every stage.
    *kinds, _, _ = layer_seconds  # without embedding and head
    counts = zip(kinds, layers, strict=True)
    terms = [seconds[:, phase, None] * count[None] for seconds, count in counts]
    return sum(terms[1:], start=terms[0])


_SPLIT_FROM = np.array([3.0, 3.0, 2.0])  # (phases) ZeRO level from which a phase exchanges


def _layer_seconds(work: StageWork, system: System, exchanges: Exchanges) -> list[ByPart]:
    """Return the times [s] of a layer of each kind, of the embedding and of the head."""
    # The share `overlap` of the exchanges of split weights (ZeRO 3) and gradients (ZeRO 2) runs
    # beside the compute of another layer, as far as the exchanges fit there.
    layer_seconds = []
    devices = _devices(work, system, exchanges.within_layers)
    # exchanges in UNSHARD and REDUCE_GRAD cells are not in the ops
    share_in_ops = 1.0 if work.in_cells is None else 1 - work.in_cells
    parts = zip(work.parts, devices, exchanges.split_weights, strict=True)
    for index, (part, device, split) in enumerate(parts):
        hidden = system.contention.saved(split[None], device.sum(axis=1))  # (ways, phases)
        exposed = split[None] - work.layout.overlap * hidden
        weights = _if_split(work, share_in_ops * exposed)
        host = (1 - work.layout.graphs) * host_time(
            system,
            launches=sum((stacked(op.launches) for op in part.ops), np.zeros(len(PHASES))),
            collectives=sum((stacked(exchange.count) for exchange in part.collectives), 0.0),
            layers=1.0 if index < len(work.kinds) else 0.0,  # 0 for embedding and head
        )
        last_parts = xp.stack([weights, xp.broadcast_to(host, weights.shape)], axis=1)
        layer_seconds.append(xp.concatenate([device, last_parts], axis=1))
    return layer_seconds


def _if_split(work: StageWork, seconds: Any) -> Any:
    """Set seconds (.., phases) to 0 for phases in which the ZeRO level exchanges no weights."""
    return xp.where(work.layout.zero >= _SPLIT_FROM, seconds, 0.0)


def _cell_exchanges(
    work: StageWork, exchanges: Exchanges
) -> tuple[PerStage | float, PerStage | float]:
    """Return the times [s] of UNSHARD and REDUCE_GRAD cells (stages); 0 without such cells."""
    if work.in_cells is None:
        return 0.0, 0.0
    counts = *work.layers, work.stages.first, work.heads  # layers, embeddings, heads (stages)
    terms = [
        _if_split(work, work.in_cells * seconds)[:, None] * count
        for seconds, count in zip(exchanges.split_weights, counts, strict=True)
    ]
    unshard, _, reduce_grad = sum(terms[1:], start=terms[0])  # exchanges of F, I and W
    return unshard, reduce_grad


def _pieces(work: StageWork, priced: Flag) -> list[Pieces]:
    """List the ops and collectives of each layer kind, embedding and head."""
    # Ops are kernels if the system prices kernels, else one op per layer. For a batch of systems of
    # both sorts, the list has first the parts with kernels, then the parts as one op.
    kernels = [(part.ops, part.collectives) for part in work.parts]
    whole = [(part.whole, part.whole_collectives) for part in work.parts]
    if isinstance(priced, bool):
        return kernels if priced else whole
    return [*kernels, *whole]


def _devices(work: StageWork, system: System, exchanges: Sequence[ByPhase]) -> list[ByPart]:
    """Return each part's times on the accelerator, see `_device_seconds`."""
    priced = system.kernels.priced
    pieces = _pieces(work, priced)
    kernels = iter(_kernels(system, [op for ops, _ in pieces for op in ops]))
    waits = iter(exchanges)
    devices = []
    for ops, collectives in pieces:
        timed_ops = [(op, next(kernels)) for op in ops]
        timed_exchanges = [(exchange, next(waits)) for exchange in collectives]
        devices.append(_device_seconds(work, system.contention, timed_ops, timed_exchanges))
    if isinstance(priced, bool):
        return devices
    num_parts = len(work.parts)
    pairs = zip(devices[:num_parts], devices[num_parts:], strict=True)
    return [xp.where(priced > 0, by_kernel, as_one_op) for by_kernel, as_one_op in pairs]


def _device_seconds(
    work: StageWork,
    contention: Contention,
    ops: Iterable[tuple[LayerOp, ByPhase]],
    exchanges: Iterable[tuple[Collective, ByPhase]],
) -> ByPart:
    """Return times [s] of compute and of exchanges that compute does not hide, in three axes."""
    # The axes are (ways, parts, phases). The ways are I and W apart, and I and W in one pass, in
    # which products of W hide exchanges of I and the reverse. The parts are those of `PARTS` before
    # "weights". Ops and exchanges come with their seconds (phases), as if nothing hid them.
    layout = work.layout
    compute, *groups = PARTS[: PARTS.index("weights")]
    zeros = attention = products = dispatch = np.zeros(len(PHASES))
    seconds_apart = dict.fromkeys((compute, *groups), zeros)
    hidden = dict.fromkeys((compute, *groups), zeros)  # in one pass, if all overlap is used
    for op, seconds in ops:
        seconds_apart[compute] = seconds_apart[compute] + seconds
        if op.kind == "attention":
            attention = attention + seconds
        elif op.kind == "gemm":
            products = products + seconds
    for exchange, wait in exchanges:
        # exchanges of accelerators that split an expert count for the group of experts
        group = exchange.group.removesuffix("_tensor")
        if exchange.overlaps_with == "attention":
            wait = wait - hidden_ring(contention, wait, attention, layout.context)
        elif exchange.overlaps_with == "layer":  # hidden by a layer of another microbatch
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
    """Return each op's times (phases) [s]; ops of a kind are computed as one array."""
    indices_by_kind: dict[tuple[str, str], list[int]] = {}
    for index, op in enumerate(ops):
        indices_by_kind.setdefault((op.kind, op.precision), []).append(index)
    by_index: dict[int, ByPhase] = {}
    for indices in indices_by_kind.values():
        batch = stacked_trees([dataclasses.replace(ops[index], name="") for index in indices])
        phase_times = [device_time(system, batch, phase) for phase in PHASES]
        seconds = xp.stack(phase_times, axis=-1)  # (ops, phases)
        by_index |= {index: seconds[row] for row, index in enumerate(indices)}
    return [by_index[index] for index in range(len(ops))]


def has_host_link(system: System) -> bool:
    """Return whether the host link's bandwidth is above 0, or traced and so unknown."""
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
    """Return the time [s] of A (stages): gradient exchanges that the backward does not hide."""
    # With ZeRO 1, a replica needs only its part of the summed gradients. With ZeRO 2, every
    # backward exchanges its gradients, so A exchanges none. The first and the last stage also sum
    # the gradients of an embedding that both hold.
    zero, stages = work.layout.zero, work.stages
    total = xp.where(zero >= 1, exchanges.gradient_parts, exchanges.gradients)
    layers = xp.maximum(sum(work.layers), 1.0)
    hidden = hidden_buckets(system.contention, total, backward, layers)
    exposed = total - work.layout.overlap * hidden
    ends = stages.first + stages.last - 2 * stages.first * stages.last  # 0 on a stage that is both
    return xp.where(zero >= 2, 0.0, exposed) + ends * exchanges.tied


def _update(work: StageWork, system: System, exchanges: Exchanges, forward: Number) -> PerStage:
    """Return the time [s] of each stage's update U (stages): optimizer, then weight gathers."""
    # If the host has a share of the optimizer, gradients go to the host and weights come back.
    # Gathers overlap with the first forward, layer by layer.
    layout, zero = work.layout, work.layout.zero
    # ZeRO 1: an accelerator updates its part of the parameters, dense ones and those of experts
    dense_parts = xp.where(zero >= 1, layout.replicas * work.stages.copies, 1.0)
    expert_parts = xp.where(zero >= 1, layout.expert_replicas * work.stages.copies, 1.0)
    updated: Any = work.parameters.dense / dense_parts + work.parameters.experts / expert_parts
    layers = xp.maximum(sum(work.layers), 1.0)
    hidden = hidden_buckets(system.contention, exchanges.weights, forward, layers)
    gather_time = exchanges.weights - layout.overlap * hidden
    gather_time = xp.where((zero >= 1) & (zero < 3), gather_time, 0.0)
    host_share = layout.optimizer_offload
    update = update_time(
        system,
        (1 - host_share) * updated * work.update_bytes,
        host_share * updated * work.update_bytes,
        exchanged=host_share * updated * (work.gradient_bytes + work.element_bytes),
    )
    return update + gather_time + work.stages.ends_step * system.host.step


def _both_ways(value: Numbers) -> Float[Computed, "2 pipes boundaries"]:
    """Repeat message times (pipes, boundaries) for both directions: (2, pipes, boundaries)."""
    return xp.broadcast_to(value, (2, *np.shape(value)))


def stage_costs(
    workload: Workload, system: System, table: ScheduleTable, *, lengths: Lengths | None = None
) -> Costs:
    """Compute the times of every op and message of a schedule for a workload on a system.

    With `lengths`, a microbatch of n tokens is priced as b sequences of n / b tokens, where b is
    the workload's microbatch size. Packed sequences s are priced as sequences of sum(s^2) / sum(s)
    tokens, which attend to as many others. Slices are priced likewise. So products grow with the
    tokens, and attention with the squares of the lengths. Latencies, A, U and sharding do not
    depend on lengths. With slices, A and U overlap with the first slice.

    Args:
      workload: model, minibatch and parallelism.
      system: the machine.
      table: the schedule.
      lengths: tokens of each microbatch, or the lengths of its sequences; all equal if None.

    Returns:
      Costs with one entry per stage; message times have one per direction, pipe and boundary. With
      lengths or slices, there is a further axis of microbatches. Costs are float64 unless JAX
      traces a number of model or system.

    Raises:
      ValueError: if the microbatches do not divide the minibatch, or layers are too few; if a
        length is not above 0, there are not as many lengths as microbatches, or microbatches are in
        slices; if a model in slices is not causal.

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
    no_stragglers = dataclasses.replace(workload, stragglers=())  # slow workers come at the end

    def compute_costs(model: Model, microbatch_size: float) -> dict[str, Any]:
        """Return the costs that depend on a microbatch's length, by field."""
        costs = vars(costs_of_microbatch(model, system, no_stragglers, table, microbatch_size))
        fields = (*GROWING, *layer_part_kinds(table, workload, system))
        return {name: np.asarray(costs[name]) for name in fields if costs[name] is not None}

    if lengths is None:
        first = sliced_model(workload.model, 0, slices)
        varying = by_slice(workload, table, compute_costs)
    else:
        first = workload.model
        varying = by_length(workload, table, lengths, compute_costs)
    size = workload.microbatch_size(table)
    costs = with_leaves(costs_of_microbatch(first, system, no_stragglers, table, size), varying)
    return scaled_costs(costs, table, workers=dict(workload.stragglers))


def stage_parts(workload: Workload, system: System, table: ScheduleTable) -> dict[str, Costs]:
    """Split `stage_costs` into parts; return {part, such as "compute": costs}."""
    return _stage_parts(workload.model, system, workload, table)


@in_float64
def _stage_parts(
    model: Model, system: System, workload: Workload, table: ScheduleTable
) -> dict[str, Costs]:
    """Return costs by part, for a model without traced numbers."""

    def compute_parts(model: Model, microbatch_size: float) -> dict[str, Any]:
        """Return op times [s] by cost field, (parts, stages), which sum to the whole times."""
        # The last part is the extra time for which the accelerator waits for the host.
        sized = dataclasses.replace(workload, model=model)
        seconds = op_seconds(stage_work(sized, table, microbatch_size=microbatch_size), system)
        for name, parts in seconds.items():
            on_device = parts[:HOST]
            delay = _phase_seconds(system, parts) - on_device.sum(axis=0)
            seconds[name] = xp.concatenate([on_device, delay[None]])
        return seconds

    workload = dataclasses.replace(workload, model=model)
    kinds, attention = layer_part_kinds(table, workload, system), {}
    if kinds:
        check_whole(table, "a breakdown of parts of layers")
        work = stage_work(workload, table)
        attention = _attention(work, system, op_seconds(work, system))
    if table.grammar.slices == 1:
        seconds = compute_parts(model, workload.microbatch_size(table))
    else:
        seconds = by_slice(workload, table, compute_parts)
    others = dict.fromkeys(("all_reduce", "update", "offload", "load"), 0.0)
    costs_by_part = {}
    for row, part in enumerate(PARTS):
        times = {name: parts[row] for name, parts in seconds.items()}
        is_exchange = 1.0 if row == EXPERT else 0.0  # time of exchanges with experts
        exchanges = {name: is_exchange * time for name, time in times.items()}
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
    """Compute the costs of equal microbatches; numbers of model and system may be traced."""
    # `model` and `microbatch_size` [sequences] replace those of the workload.
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
    """Compute the costs of a microbatch from its shape and from numbers, which may be traced."""
    work = stage_work(
        dataclasses.replace(shape.workload, model=model),
        shape.table,
        assigned=assigned,
        microbatch_size=microbatch_size,
        offloads=offloads,
    )
    costs = _with_kinds(work_costs(work, system), work, shape.workload, system, shape.table)
    return with_factors(costs, shape.workload, shape.table)
