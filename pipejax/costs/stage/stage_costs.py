"""The seconds that a system takes for the work of a schedule's stages.

`work_costs` is a pytree of arrays in, a pytree of arrays out: one compilation serves all models of
one kind, all layouts and systems, and every number may be batched or differentiated. Kernels and
exchanges of one kind are priced as one array, which keeps that compilation short.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pipejax.base.array_types import Float
from pipejax.base.checks import check_types
from pipejax.base.compiled import compiled
from pipejax.base.trees import mapped
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
    exposed_buckets,
    exposed_ring,
    kinds_of_layers,
    price_exchanges,
    with_kinds,
)
from pipejax.costs.stage.microbatches import Lengths, by_length
from pipejax.costs.stage.slices import by_slice, check_whole, sliced_model
from pipejax.costs.stage.stage_work import PerKind, StageWork, stage_work
from pipejax.costs.system.parts import Flag
from pipejax.costs.system.system import Link, Number, Numbers, System
from pipejax.schedules.table.table import ScheduleTable

PHASES = ("forward", "input_grad", "weight_grad")
FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(len(PHASES))
ByPhase = Float[Computed, " phases"]
ByPart = Float[Computed, "ways parts phases"]
OneWay = Float[Computed, "parts phases"]


# what the seconds of an op are made of: kernels, what compute does not hide of exchanges within
# layers and of gathered weights, and beside the accelerator its host
PARTS = ("compute", "tensor", "context", "expert", "weights", "host")
COMPUTE, EXPERT, HOST = (PARTS.index(part) for part in ("compute", "expert", "host"))
_IS_HOST = (np.arange(len(PARTS)) == HOST)[:, None]  # (parts, stages)
_IS_WEIGHTS = (np.arange(len(PARTS)) == PARTS.index("weights"))[:, None]
Seconds = Float[Computed, "parts stages"]
Pieces = tuple[tuple[LayerOp, ...], tuple[Collective, ...]]
APART, ONE_PASS = range(2)  # ways: each phase by itself; I and W as one, which hides more exchanges


def work_costs(work: StageWork, system: System) -> Costs:
    """Turn work into seconds: kernels, collectives and host for ops, Hockney's model for messages.

    On every stage the host starts kernels while the accelerator runs them: a phase lasts as long
    as the slower of both, joined smoothly.
    """
    exchanges = _exchanges(work, system)
    ops = _op_seconds(work, system, exchanges)
    seconds = xp.stack(list(ops.values()), axis=1)  # (parts, ops, stages)
    durations = dict(zip(ops, _phase_seconds(system, seconds), strict=True))
    near = _message_link(work, system)
    return Costs(
        **durations,
        all_reduce=_gradient_exchange(work, exchanges, durations["backward"]),
        update=_update(work, system, exchanges, durations["forward"]),
        **_in_cells(work, exchanges),
        offload=_host_transfer(work, system),
        latency=_both_ways(near.latency),
        transmit=_both_ways(work.message_bytes / near.rate),
    )


def op_seconds(work: StageWork, system: System) -> dict[str, Float[Computed, "parts stages"]]:
    """Seconds of the ops of one microbatch, by field of `Costs`: (parts, stages) each."""
    return _op_seconds(work, system, _exchanges(work, system))


ByField = dict[str, Float[Computed, "*parts stages"]]


def _attention(work: StageWork, system: System, seconds: ByField) -> ByField:
    """Share (stages) of attention in the compute of each op."""
    alone = op_seconds(attention_alone(work), system)
    whole = {field: parts[COMPUTE] for field, parts in seconds.items()}
    return {field: alone[field][COMPUTE] / (all_ + (all_ == 0)) for field, all_ in whole.items()}


def _with_kinds(
    costs: Costs, work: StageWork, workload: Workload, system: System, table: ScheduleTable
) -> Costs:
    """Add the costs of a table's own kinds that are parts of layers."""
    kinds = kinds_of_layers(table, workload, system)
    if not kinds:
        return costs
    seconds = op_seconds(work, system)
    exchanges = {field: parts[EXPERT] for field, parts in seconds.items()}
    return with_kinds(costs, kinds, _attention(work, system, seconds), exchanges)


def _exchanges(work: StageWork, system: System) -> Exchanges:
    pieces = _pieces(work, system.kernels.priced)
    return price_exchanges(work, system, [item for _, exchanges in pieces for item in exchanges])


def _op_seconds(
    work: StageWork, system: System, exchanges: Exchanges
) -> dict[str, Float[Computed, "parts stages"]]:
    parts = _parts(work, system, exchanges)
    apart, one_pass = ([part[way] for part in parts] for way in (APART, ONE_PASS))
    return {
        "forward": _phase(work, system, apart, FORWARD),
        "backward": _input_grad(work, system, one_pass)
        + _phase(work, system, one_pass, WEIGHT_GRAD),
        "input_grad": _input_grad(work, system, apart),
        "weight_grad": _phase(work, system, apart, WEIGHT_GRAD)
        + (0.0 if work.again is None else _layers(apart, FORWARD, work.again)),
        "recompute": _layers(apart, FORWARD, work.layers),
    }


def _phase_seconds(
    system: System, seconds: Float[Computed, "parts *ops stages"]
) -> Float[Computed, "*ops stages"]:
    """Seconds (stages) of ops: the longer of accelerator and host."""
    return xp.asarray(phase_time(system, seconds[:HOST].sum(axis=0), seconds[HOST]))


def _input_grad(work: StageWork, system: System, parts: Sequence[OneWay]) -> Seconds:
    """Seconds of one microbatch's I: full recomputation runs forwards once more."""
    # It finds the weights there: I gathers them once for both.
    again = _layers(parts, FORWARD, work.recomputed)
    return _phase(work, system, parts, INPUT_GRAD) + xp.where(_IS_WEIGHTS, 0.0, again)


def _phase(work: StageWork, system: System, parts: Sequence[OneWay], phase: int) -> Seconds:
    """Return seconds of one microbatch's F, I or W, without full recomputation."""
    *_, embedding, head = parts
    passes = 0.0 if phase == WEIGHT_GRAD else 1.0  # I and W are one pass of the host
    once = (1 - work.layout.graphs) * host_time(system, microbatches=passes)
    edges = embedding[:, phase, None] * work.stages.first[None]
    edges = edges + head[:, phase, None] * work.heads[None]
    return _layers(parts, phase, work.layers) + edges + once * _IS_HOST


def _layers(parts: Sequence[OneWay], phase: int, layers: PerKind) -> Seconds:
    """Seconds of so many layers (stages) of each kind."""
    *kinds, _, _ = parts
    terms = [part[:, phase, None] * count[None] for part, count in zip(kinds, layers, strict=True)]
    return sum(terms[1:], start=terms[0])


_SPLIT_FROM = np.array([3.0, 3.0, 2.0])  # level of ZeRO at which a phase exchanges, by phase


def _parts(work: StageWork, system: System, exchanges: Exchanges) -> list[ByPart]:
    """Seconds of one layer of each kind, of the embedding and of the head."""
    # Weights that the replicas split (ZeRO 3) are gathered while the part before computes, and
    # gradients that they split (ZeRO 2) are given back so in every W: of what fits beside compute,
    # the workload's share travels there.
    results = []
    is_layer = [1.0] * len(work.kinds) + [0.0, 0.0]
    devices = _devices(work, system, exchanges.within_layers)
    split = exchanges.split_weights
    for part, device, seconds, layers in zip(work.parts, devices, split, is_layer, strict=True):
        fits = xp.minimum(seconds[None], device.sum(axis=1))  # (ways, phases)
        beyond = seconds[None] - work.layout.overlap * fits
        host = (1 - work.layout.graphs) * host_time(
            system,
            launches=sum((stacked(op.launches) for op in part.ops), np.zeros(len(PHASES))),
            collectives=sum((stacked(exchange.count) for exchange in part.collectives), 0.0),
            layers=layers,
        )
        here = 1.0 if work.in_cells is None else 1 - work.in_cells
        sharded = _where_split(work, here * beyond)
        extras = xp.stack([sharded, xp.broadcast_to(host, sharded.shape)], axis=1)
        results.append(xp.concatenate([device, extras], axis=1))
    return results


def _where_split(work: StageWork, seconds: Any) -> Any:
    """Return seconds (.., phases) of exchanges of split weights; 0 where none are split."""
    return xp.where(work.layout.zero >= _SPLIT_FROM, seconds, 0.0)


def _in_cells(work: StageWork, exchanges: Exchanges) -> dict[str, PerStage]:
    """Seconds (stages) of UNSHARD and REDUCE_GRAD: whole stages, layer by layer."""
    if work.in_cells is None:
        return {}
    counts = *work.layers, work.stages.first, work.heads
    terms = [
        _where_split(work, work.in_cells * part)[:, None] * count
        for part, count in zip(exchanges.split_weights, counts, strict=True)
    ]
    gather, _, reduce = sum(terms[1:], start=terms[0])
    return {"unshard": gather, "reduce_grad": reduce}


def _pieces(work: StageWork, priced: Flag) -> list[Pieces]:
    """Ops and exchanges of parts: as kernels, as one op, or both where systems differ in that."""
    kernels = [(part.ops, part.collectives) for part in work.parts]
    whole = [(part.whole, part.whole_collectives) for part in work.parts]
    if isinstance(priced, bool):
        return kernels if priced else whole
    return [*kernels, *whole]


def _devices(work: StageWork, system: System, exchanges: Sequence[ByPhase]) -> list[ByPart]:
    """Seconds of every part on the device, beside what its exchanges add by group."""
    priced = system.kernels.priced
    pieces = _pieces(work, priced)
    kernels = iter(_kernels(system, [op for ops, _ in pieces for op in ops]))
    waits = iter(exchanges)
    devices = [_device(work, *piece, kernels, waits) for piece in pieces]
    if isinstance(priced, bool):
        return devices
    parts = len(work.parts)
    pairs = zip(devices[:parts], devices[parts:], strict=True)
    return [xp.where(priced > 0, by_kernel, whole) for by_kernel, whole in pairs]


def _device(
    work: StageWork,
    ops: Iterable[LayerOp],
    exchanges: Iterable[Collective],
    kernels: Iterator[ByPhase],
    waits: Iterator[ByPhase],
) -> ByPart:
    """Return seconds of ops and, by group, of exchanges that compute does not hide."""
    # In one pass, I's exchanges run beside the products of W, and those of W beside I's, where the
    # workload lets exchanges travel beside compute. Tokens on their way to experts may travel
    # beside all of a layer, of another microbatch: in both ways.
    layout = work.layout
    compute, *groups = PARTS[: PARTS.index("weights")]
    none = attention = products = shown = np.zeros(len(PHASES))
    apart, hidden = dict.fromkeys((compute, *groups), none), dict.fromkeys((compute, *groups), none)
    for op in ops:
        seconds = next(kernels)
        apart[compute] = apart[compute] + seconds
        if op.kind == "attention":
            attention = attention + seconds
        elif op.kind == "gemm":
            products = products + seconds
    for exchange in exchanges:
        # groups that split an expert belong to the part of experts
        wait, group = next(waits), exchange.group.removesuffix("_tensor")
        if exchange.overlaps_with == "attention":
            wait = xp.asarray(exposed_ring(wait, attention, layout.context))
        elif exchange.overlaps_with == "layer":
            shown = shown + wait
        elif exchange.overlaps_with:
            overlap = xp.minimum(wait, products[PHASES.index(exchange.overlaps_with)])
            hidden[group] = hidden[group] + overlap
        apart[group] = apart[group] + wait
    apart["expert"] = apart["expert"] - layout.expert_overlap * xp.minimum(shown, apart[compute])
    whole = xp.stack(list(apart.values()))
    return xp.stack([whole, whole - layout.tensor_overlap * xp.stack(list(hidden.values()))])


def _kernels(system: System, ops: Sequence[LayerOp]) -> list[ByPhase]:
    """Seconds (phases) of each op: those of one kind and precision as one array."""
    kinds = [(op.kind, op.precision) for op in ops]
    by_index: dict[int, ByPhase] = {}
    for kind in dict.fromkeys(kinds):
        members = [index for index, other in enumerate(kinds) if other == kind]
        alike = stacked_trees([dataclasses.replace(ops[index], name="") for index in members])
        columns = [device_time(system, alike, phase) for phase in PHASES]
        seconds = xp.stack(columns, axis=-1)  # (ops, phases)
        by_index |= {index: seconds[row] for row, index in enumerate(members)}
    return [by_index[index] for index in range(len(ops))]


def _host_transfer(work: StageWork, system: System) -> Numbers | None:
    """Seconds (stages) of O, and so of L; None where the system's host link is unknown."""
    if work.offload_bytes is None or not has_host_link(system):
        return None
    return system.host_link.latency + work.offload_bytes / system.host_link.rate


def has_host_link(system: System) -> bool:
    """Return whether the host link has a bandwidth; a traced one must have it."""
    bandwidth = system.host_link.bandwidth
    return is_traced(bandwidth) or bool(np.all(np.asarray(bandwidth) > 0))


def check_machine(workload: Workload, system: System) -> None:
    """Refuse a workload that needs a number that the system lacks: a peak, a host's rate."""
    for precision in workload.precisions:
        system.peak(precision)
    check_host(system, workload.optimizer_offload)


def _message_link(work: StageWork, system: System) -> Link:
    """The link (pipes, boundaries) of a message: inside a node, or between nodes."""
    stages = work.stages
    is_near = work.layout.is_near(stages.senders, stages.receivers, system.gpus_per_node)
    link: Link = mapped(
        lambda near, far: xp.where(is_near, near, far), system.peer_link, system.network
    )
    return link


def _gradient_exchange(work: StageWork, exchanges: Exchanges, backward: Number) -> PerStage:
    """Seconds (stages) of A after the last backward."""
    # Replicas that split the optimizer state need only their part of the sum. Beside compute,
    # gradients travel layer by layer: what is left after the backward is exposed. Where the
    # replicas split them (ZeRO 2), every backward has reduced its own. First and last stage also
    # add the gradients of an embedding that both hold.
    zero, stages = work.layout.zero, work.stages
    total = xp.where(zero >= 1, exchanges.gradient_parts, exchanges.gradients)
    exposed = exposed_buckets(total, backward, xp.maximum(sum(work.layers), 1.0))
    after = total - work.layout.overlap * (total - exposed)
    ends = stages.first + stages.last - 2 * stages.first * stages.last  # none with one stage
    return xp.where(zero >= 2, 0.0, after) + ends * exchanges.tied


def _update(work: StageWork, system: System, exchanges: Exchanges, forward: Number) -> PerStage:
    """Return seconds (stages) of U: the optimizer's share, then the gathers of the replicas."""
    # Of an update that the host has a share of, gradients go there and weights come back.
    # Beside compute the gathers hide behind the first forward, layer by layer.
    layout, zero = work.layout, work.layout.zero
    sharing = layout.replicas, layout.expert_replicas
    held = sum(
        (
            parameters / xp.where(zero >= 1, by * work.stages.copies, 1.0)
            for parameters, by in zip(work.parameters, sharing, strict=True)
        ),
        0.0,
    )
    gather = exchanges.weights
    exposed = exposed_buckets(gather, forward, xp.maximum(sum(work.layers), 1.0))
    after = gather - layout.overlap * (gather - exposed)
    gathered = xp.where((zero >= 1) & (zero < 3), after, 0.0)
    share = layout.optimizer_offload
    here, there = (part * held * work.update_bytes for part in (1 - share, share))
    exchanged = share * held * (work.gradient_bytes + work.element_bytes)
    return update_time(system, here, there, exchanged) + gathered


def _both_ways(value: Numbers) -> Float[Computed, "2 pipes boundaries"]:
    """Give messages the same time in both directions: (2, pipes, boundaries)."""
    return xp.broadcast_to(value, (2, *np.shape(value)))


def stage_costs(
    workload: Workload, system: System, table: ScheduleTable, *, lengths: Lengths | None = None
) -> Costs:
    """Price every op and message of a schedule.

    Where microbatches have lengths of their own, one of n tokens is priced as b sequences of n / b
    tokens, b as without lengths. What is packed is priced as sequences of the length at which
    tokens attend to as many others as they do there: sum(s^2) / sum(s), and slices likewise. So
    products grow with the tokens and attention with the squares of the sequences, kernels keep
    their efficiencies, and messages their bytes per token. Latencies, A, U and sharding do not
    depend on lengths; of microbatches in slices A and U hide behind those of first slices.

    Args:
      workload: model, minibatch and parallelism.
      system: the machine.
      table: the schedule.
      lengths: of each microbatch its tokens, or the lengths of its sequences; all alike if None.

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
      1.0 1.67 1.45 1.0
    """
    check_types(
        workload=(workload, Workload), system=(system, System), table=(table, ScheduleTable)
    )
    slices = table.grammar.slices
    if lengths is None and slices == 1:
        return costs_of_microbatch(workload.model, system, workload, table)
    if lengths is not None:
        check_whole(table, "lengths")
    alike = dataclasses.replace(workload, stragglers=())  # who is slow has an axis of its own

    def price(model: Model, size: float) -> dict[str, Any]:
        priced = vars(costs_of_microbatch(model, system, alike, table, size))
        grow = (*GROWING, *kinds_of_layers(table, workload, system))
        return {name: np.asarray(priced[name]) for name in grow if priced[name] is not None}

    if lengths is None:
        first, varying = sliced_model(workload.model, 0, slices), by_slice(workload, table, price)
    else:
        first, varying = workload.model, by_length(workload, table, lengths, price)
    size = workload.microbatch_size(table)
    whole = costs_of_microbatch(first, system, alike, table, size)
    costs = with_leaves(whole, varying)
    return scaled_costs(costs, table, workers=dict(workload.stragglers))


def stage_parts(workload: Workload, system: System, table: ScheduleTable) -> dict[str, Costs]:
    """Break the ops of `stage_costs` down: costs by part, whose sum they are."""
    return _stage_parts(workload.model, system, workload, table)


@in_float64
def _stage_parts(
    model: Model, system: System, workload: Workload, table: ScheduleTable
) -> dict[str, Costs]:

    def price(model: Model, size: float) -> dict[str, Any]:
        sized = dataclasses.replace(workload, model=model)
        priced = op_seconds(stage_work(sized, table, microbatch_size=size), system)
        return {name: _with_host_beyond(system, parts) for name, parts in priced.items()}

    workload = dataclasses.replace(workload, model=model)
    kinds, attention = kinds_of_layers(table, workload, system), {}
    if kinds:
        check_whole(table, "a breakdown of parts of layers")
        work = stage_work(workload, table)
        attention = _attention(work, system, op_seconds(work, system))
    is_whole = table.grammar.slices == 1
    whole = workload.microbatch_size(table)
    seconds = price(model, whole) if is_whole else by_slice(workload, table, price)
    others = dict.fromkeys(("all_reduce", "update", "offload", "load"), 0.0)
    costs_by_part = {}
    for row, part in enumerate(PARTS):
        times = {name: value[row] for name, value in seconds.items()}
        exchanges = {name: value * (row == EXPERT) for name, value in times.items()}
        costs = with_kinds(Costs(**times, **others), kinds, attention, exchanges)
        costs_by_part[part] = with_factors(costs, workload, table)
    return costs_by_part


def with_factors(costs: Costs, workload: Workload, table: ScheduleTable) -> Costs:
    """Costs with the factors of the workload: of slow workers, of fused pairs."""
    if workload.pair_factor != 1:
        costs = dataclasses.replace(costs, pair_factor=workload.pair_factor)
    slow = dict(workload.stragglers)
    check_workers(slow, table, "stragglers")
    return scaled_costs(costs, table, workers=slow) if slow else costs


def _with_host_beyond(system: System, seconds: Float[Computed, "parts stages"]) -> Computed:
    """Return parts (parts, stages) of an op's time; the last is the host's delay."""
    device = seconds[:HOST]
    host = _phase_seconds(system, seconds) - device.sum(axis=0)
    return xp.concatenate([device, host[None]])


@in_float64
def costs_of_microbatch(
    model: Model,
    system: System,
    workload: Workload,
    table: ScheduleTable,
    microbatch_size: Number | None = None,
) -> Costs:
    """Price with the model beside its workload, into which JAX does not look: it may be traced."""
    workload = dataclasses.replace(workload, model=model)
    check_machine(workload, system)
    offloads = not is_traced(system.host_link.bandwidth) and has_host_link(system)
    if not is_traced(model, system):
        work = stage_work(workload, table, microbatch_size=microbatch_size, offloads=offloads)
        costs = _with_kinds(work_costs(work, system), work, workload, system, table)
        return with_factors(costs, workload, table)
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
    """Price as one program: outside of jit, JAX would compile every traced operation by itself."""
    return compiled(costs_of_shape, static_argnames=("shape", "offloads"))


def costs_of_shape(
    shape: PricingShape,
    model: Model,
    system: System,
    assigned: StageLayers,
    microbatch_size: Number,
    *,
    offloads: bool = False,
) -> Costs:
    """Price the numbers that a shape leaves open; all of them may be traced."""
    work = stage_work(
        dataclasses.replace(shape.workload, model=model),
        shape.table,
        assigned=assigned,
        microbatch_size=microbatch_size,
        offloads=offloads,
    )
    costs = _with_kinds(work_costs(work, system), work, shape.workload, system, shape.table)
    return with_factors(costs, shape.workload, shape.table)
