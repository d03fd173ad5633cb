"""Changes that may shorten a step: functions from a setup to titles and changed setups."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from pipejax.analysis.runs.activation_memory import activation_memory
from pipejax.analysis.runs.evaluate import evaluate
from pipejax.analysis.step.faults import ENOUGH, slowest_place
from pipejax.analysis.step.step_parts import SHARDING, without_rules
from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.costs.model.workload import Workload
from pipejax.costs.scaling import GROUPS
from pipejax.costs.topology import places_on
from pipejax.schedules.cells.ops import COMPUTING, MICROBATCH, WORKER, Phase, ScheduleError
from pipejax.schedules.naming import find
from pipejax.schedules.registry import REGISTRY
from pipejax.schedules.table.links import POSTINGS
from pipejax.search.orders.microbatches import MicrobatchSearch
from pipejax.search.orders.places import PlacementSearch
from pipejax.search.orders.transfers import messages
from pipejax.search.partition.partition import layers as split_layers
from pipejax.search.remedies.setup import Schedule, Setup
from pipejax.search.schedule.optimize import optimize
from pipejax.search.schedule.problem import LINKS_OF_SEARCH

MIN_GAIN = 1e-3  # of the step: smaller savings are not reported
VARIANTS: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "interleaved-1f1b": ({"stages_per_worker": 2}, {"stages_per_worker": 4}),
    "interleaved-zb": ({"stages_per_worker": 2}, {"stages_per_worker": 4}),
    "looped-bfs": ({"stages_per_worker": 2},),
    "circular": ({"stages_per_worker": 2},),
    "hanayo": ({"waves": 1}, {"waves": 2}),
}
SEARCH_STEPS = 10  # of each search of an order or of places
SOLVER_SECONDS = 8.0
# builders that try many orders for the times of the run
SLOWLY_PLANNED = ("v-half", "v-min", "zb-v", "ada-offload")
MAX_OPS_PLANNED = 128  # microbatches times workers up to which slow builders are tried
MAX_OPS = 1 << 14  # stages times microbatches of tables that are tried


def schedules(setup: Setup, names: Collection[str] | None = None) -> Iterator[tuple[str, Setup]]:
    """Yield all other synchronous schedules with the same workers and microbatches."""
    # Default names: the registry, without schedules that would take long to plan.
    if not setup.table.grammar.is_usual:
        return  # no other schedule has the same ops
    ops = setup.table.num_workers * setup.table.num_microbatches
    if names is None:
        names = [name for name in REGISTRY if ops <= MAX_OPS_PLANNED or name not in SLOWLY_PLANNED]
    has_host = setup.costs.offload is not None
    for name in names:
        takes = find(name).options
        if "slices" in takes or ("offload" in takes and not has_host):
            continue  # ops of slices take other times
        for options in VARIANTS.get(name, ({},)):
            schedule = Schedule(name, options)
            if setup.schedule is not None and schedule[:2] == setup.schedule[:2]:
                continue
            try:
                rebuilt = setup.rebuilt(schedule, setup.table.num_microbatches)
                rebuilt.run  # noqa: B018 - evaluated here for its errors
            except ValueError:  # it does not exist for these numbers, or deadlocks over these links
                continue
            if not rebuilt.table.updates_within:
                option_text = "".join(f", {k.replace('_', ' ')} {v}" for k, v in options.items())
                yield f"schedule {name}{option_text}", _with_assumptions(setup, rebuilt)


def _with_assumptions(old: Setup, new: Setup) -> Setup:
    """Add the assumptions of a change of schedule to the new setup."""
    assumes = list(new.assumes)
    is_measured = new.source.workload is None
    if is_measured and new.table.num_stages != old.table.num_stages:
        assumes.append("a stage's time lies evenly in its layers and goes with them")
    if new.table.num_pipes > old.table.num_pipes:
        assumes.append("weights twice on every worker, and a runtime with two pipes")
    if is_measured and _has_split_backwards(new) and not _has_split_backwards(old):
        assumes.append("I and W as given, or half of B each")
    return dataclasses.replace(new, assumes=tuple(dict.fromkeys(assumes)))


def _has_split_backwards(setup: Setup) -> bool:
    return bool(np.isin(setup.table.phase, (Phase.I, Phase.W)).any())


def microbatches(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups with more, smaller microbatches of the minibatch, or fewer, larger ones."""
    count = setup.table.num_microbatches
    if setup.schedule is None or setup.costs.per_microbatch():
        return
    has_few = 2 * count < ENOUGH * setup.table.num_workers
    for factor in (2, 0.5, *([4] if has_few else [])):
        new_count = int(count * factor)
        if new_count / factor != count or new_count * setup.table.num_stages > MAX_OPS:
            continue
        if setup.source.workload is not None and setup.source.workload.minibatch % new_count:
            continue
        try:
            resized = _resize_microbatches(setup, setup.schedule, new_count)
            resized.run  # noqa: B018 - evaluated here for its errors
        except ValueError:
            continue
        yield f"{new_count} microbatches of {1 / factor:g} times the size", resized


def _resize_microbatches(setup: Setup, schedule: Schedule, count: int) -> Setup:
    """Divide the same minibatch into `count` microbatches; measured times scale with the size."""
    size = setup.table.num_microbatches / count
    if setup.source.workload is not None:  # a model prices microbatches of any size
        return setup.rebuilt(schedule, count)
    fields = ["compute", "transmit", *(["O", "L"] if setup.table.offloads else [])]
    on_lanes = (phase for phase in setup.table.grammar.own if phase.kind.lane != COMPUTING)
    fields += [phase.name for phase in on_lanes if phase.kind.of in (MICROBATCH, WORKER)]
    scaled = setup.scaled(
        *(f"{field}*{size!r}" for field in fields),
        assumes=("microbatches can be divided, and ops take as long as they are large",),
    )
    return dataclasses.replace(scaled.rebuilt(schedule, count), size=setup.size * size)


def repairs(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups in which a slow stage, worker or link is as fast as the others."""
    for fault in setup.faults:
        if fault.rules and fault.kind == "link" and fault.link is not None:
            what = f"messages between workers {fault.link[0]} and {fault.link[1]} like the others"
            yield what, setup.scaled(fault.rules, assumes=("the link can be mended",))
    slow = slowest_place(setup.run)
    if slow is not None:
        place = f"worker {slow.worker}" if "worker" in slow.rules else f"stage {slow.stage}"
        assumption = f"what makes {place} slow can be mended, or its work moved away"
        yield f"{place} like the others", setup.scaled(slow.rules, assumes=(assumption,))


def balance(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups with layers moved between stages; if layers are unknown, with even stages."""
    if setup.layers:
        yield from _move_layers(setup)
        return
    times = setup.times
    for what, rules in (("stages", times.even), ("workers", times.even_workers)):
        if rules:
            yield (
                f"layers over stages: all {what} take the mean",
                setup.scaled(rules, assumes=("work can be moved in any amount",)),
            )


def _move_layers(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Move one layer after the other from the worker with most compute to that with least."""
    # The time of a layer is the median over stages. Other time of a stage, such as its head, stays.
    measured, old_layers = setup.times.stages, np.array(setup.layers)
    layer_seconds = float(np.median(measured / old_layers))
    layers, workers = old_layers.copy(), np.arange(setup.table.num_workers)
    # (workers, stages): share of the pipes that hold the stage on the worker
    held = (setup.table.placement == workers[:, None, None]).mean(axis=1)
    while True:
        seconds = measured + layer_seconds * (layers - old_layers)
        load = held @ seconds
        busiest, idlest = int(load.argmax()), int(load.argmin())
        sources = np.flatnonzero((held[busiest] > 0) & (layers > 1))
        targets = np.flatnonzero(held[idlest])
        if load[idlest] + layer_seconds >= load[busiest] or not len(sources):
            return
        layers[sources[seconds[sources].argmax()]] -= 1
        layers[targets[seconds[targets].argmin()]] += 1
        yield _with_layers(setup, layers, layer_seconds)


def _with_layers(
    setup: Setup, layers: Int[NumpyArray, " stages"], layer_seconds: float
) -> tuple[str, Setup]:
    """Return title and setup with these layers on each stage, at the time of a layer [s]."""
    measured, old_layers = setup.times.stages, np.array(setup.layers)
    factors = 1 + layer_seconds * (layers - old_layers) / measured
    rules = [
        f"compute@stage{stage}*{factor!r}"
        for stage, factor in enumerate(factors.tolist())
        if factor != 1
    ]
    assumption = "a layer takes as long anywhere, its median now; activations go with layers"
    scaled = setup.scaled(*rules, assumes=(assumption,))
    title = f"layers over stages: {','.join(map(str, layers))}"
    return title, dataclasses.replace(scaled, layers=tuple(layers))


FASTER: Mapping[str, tuple[str, tuple[str, ...]]] = {  # title and cost fields, by part of a step
    "messages": ("links twice as fast", ("message",)),
    "exchange": ("exchange of gradients twice as fast", ("A",)),
    "sharding": ("gathers and reductions twice as fast", SHARDING),
    "offloads": ("host links twice as fast", ("O", "L")),
    "update": ("update twice as fast", ("U",)),
}


def hardware(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups with links or exchanges twice as fast, if the step waits for them."""
    parts = {**setup.parts, "messages": setup.parts["messages"] + setup.parts["blocking"]}
    for part, (what, fields) in FASTER.items():
        if parts[part] > MIN_GAIN * setup.step_time:
            costs = vars(setup.costs)
            rules = [
                f"{field}*0.5"
                for field in fields
                if field in GROUPS or np.any(np.asarray(costs[PHASE_FIELDS.get(field, field)]) > 0)
            ]
            yield what, setup.scaled(*rules, assumes=("faster hardware, or less to send",))


def places(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups with other places of the workers, if the step waits for messages."""
    waits = sum(setup.parts[part] for part in ("messages", "blocking", "exchange"))
    # scaling rules of stages or workers do not apply to other places
    if setup.source.placed is None or setup.rules or waits <= MIN_GAIN * setup.step_time:
        return
    placed = setup.source.placed(setup.table)
    if placed.nodes.max() in (0, len(placed.nodes) - 1):  # one node, or one for each worker
        return
    current_places = places_on(setup.table, setup.source.places)
    try:
        result = PlacementSearch(placed, current_places, setup.links, seed=0).run(SEARCH_STEPS)
    except ValueError:  # links under which places are not searched
        return
    seats = tuple(result.best.places.tolist())
    yield (
        "places of workers",
        dataclasses.replace(
            setup,
            source=setup.source.with_places(seats),
            options={**setup.options, "worker_places": ",".join(map(str, seats))},
            assumes=(*setup.assumes, "workers can be put on other nodes"),
        ),
    )


def microbatch_orders(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield another order of unequal microbatches."""
    # in another pipe, a microbatch would run on other workers, at unknown costs
    has_known_costs = setup.table.num_pipes == 1 and setup.table.grammar.is_usual
    if setup.order or not has_known_costs or not setup.costs.per_microbatch():
        return
    result = MicrobatchSearch(setup.table, setup.costs, setup.links, seed=0).run(SEARCH_STEPS)
    order = tuple(result.best.order.tolist())
    yield (
        "order of microbatches",
        dataclasses.replace(
            setup,
            order=order,
            options={**setup.options, "microbatch_order": ",".join(map(str, order))},
            assumes=(*setup.assumes, "which of the data comes first is free"),
        ),
    )


def orders(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield a better order of sends and receives, if these block each other."""
    if not setup.links.is_rendezvous or setup.parts["blocking"] <= MIN_GAIN * setup.step_time:
        return
    # the search requires early posting; a run with another posting takes its best order
    links = dataclasses.replace(setup.links, posting=POSTINGS[0])
    try:
        result = messages(
            setup.table, setup.costs, link=links, iterations=SEARCH_STEPS, time_limit=None
        )
    except (ValueError, ScheduleError):  # links whose orders are not searched
        return
    yield (
        "order of messages",
        dataclasses.replace(
            setup,
            table=result.best.table,
            links=result.best.links if setup.links == links else setup.links,
            schedule=None,
            options={**setup.options, "order": str(SEARCH_STEPS)},
        ),
    )


def in_flight(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups of a ring with more requests in flight."""
    # With one more request, each rule of the ring names one microbatch earlier: 0F4 <- 3F0 in place
    # of 0F3 <- 3F0 means 4 requests in flight in place of 3.
    table, table_without_ring = setup.table, without_rules(setup.table)
    if not table.grammar.forward_only or table_without_ring is None or table.grammar.slices > 1:
        return
    other_rules = table_without_ring.grammar.rules
    shortest = evaluate(table_without_ring, setup.costs, link=setup.links).makespan
    ring_rules = [rule for rule in table.grammar.rules if rule not in other_rules]
    current = min((r.consumer_microbatch or 0) - (r.producer_microbatch or 0) for r in ring_rules)
    assumption = "there are more requests, and room for their keys and values"
    for extra in range(1, table.num_microbatches if current > 0 else 0):
        moved_rules = [
            rule._replace(producer_microbatch=(rule.producer_microbatch or 0) - extra)
            for rule in ring_rules
            if (rule.producer_microbatch or 0) >= extra
        ]
        try:
            grammar = dataclasses.replace(table.grammar, rules=(*other_rules, *moved_rules))
            new_table = dataclasses.replace(table, grammar=grammar)
        except ScheduleError:  # rules and order of the rows form a cycle
            return
        options, assumes = {**setup.options, "rules": ""}, (*setup.assumes, assumption)
        changed = dataclasses.replace(setup, table=new_table, options=options, assumes=assumes)
        yield f"{current + extra} requests in flight in place of {current}", changed
        if changed.step_time <= shortest:
            return


def settings(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups with another recomputation, sequence parallelism, overlap or head weight."""
    workload = setup.source.workload
    if workload is None:
        return
    for title, changes in _other_settings(workload):
        try:
            source = setup.source.with_workload(dataclasses.replace(workload, **changes))
            options: dict[str, str | None] = {
                name: None if value is False else "" if value is True else str(value)
                for name, value in changes.items()
            }
            other = dataclasses.replace(setup, source=source, options={**setup.options, **options})
            other.run  # noqa: B018 - evaluated here for its errors
        except (ValueError, MismatchError):
            continue
        yield title, other


def _other_settings(workload: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a title and changed fields of the workload for each alternative setting."""
    for recompute in ("none", "selective", "full"):
        if workload.recompute != recompute:
            yield f"recomputation {recompute}", {"recompute": recompute}
    if workload.tensor_parallel > 1 and not workload.sequence_parallel:
        yield "sequence parallelism", {"sequence_parallel": True}
    if workload.data_parallel > 1 and workload.overlap < 1:
        yield "exchanges beside compute", {"overlap": 1.0}
    if not workload.pipeline_layout and not workload.loss_units:
        yield "head counts as a layer", {"embedding_units": 1, "loss_units": 1}


def optimised(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield the fastest schedule of these stages within the memory peak of the run."""
    if setup.links.model not in LINKS_OF_SEARCH:
        return
    peak = activation_memory(setup.run).peak
    try:
        optimum = optimize(
            setup.table,
            setup.costs,
            memory_limit=np.maximum(peak, 1.0),
            link=setup.links,
            time_limit=SOLVER_SECONDS,
        )
    except (ValueError, ModuleNotFoundError):  # an unsupported problem, or no solver
        return
    yield (
        "order of ops, in the memory of now",
        dataclasses.replace(
            setup,
            table=optimum.best.table,
            schedule=None,
            options={**setup.options, "optimise": ",".join(f"{limit:g}" for limit in peak)},
        ),
    )


def layouts(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield the fastest split of the model's layers over the stages."""
    workload, system = setup.source.workload, setup.source.system
    if workload is None or system is None or workload.pipeline_layout:
        return
    try:
        result = split_layers(
            setup.table, workload, system, link=setup.links, time_limit=SOLVER_SECONDS
        )
    except ValueError:
        return
    layout = str(result.best.layout)
    source = setup.source.with_workload(result.best.workload)
    ends = dict.fromkeys(("embedding_units", "loss_units"))
    options = {**setup.options, **ends, "pipeline_layout": layout}
    what = f"layers over stages: {layout}"
    yield what, dataclasses.replace(setup, source=source, options=options)
