"""Changes that may make a step shorter: each takes a setup and yields others."""

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

WORTH = 1e-3  # of the step: what saves less is not told
VARIANTS: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "interleaved-1f1b": ({"stages_per_worker": 2}, {"stages_per_worker": 4}),
    "interleaved-zb": ({"stages_per_worker": 2}, {"stages_per_worker": 4}),
    "looped-bfs": ({"stages_per_worker": 2},),
    "circular": ({"stages_per_worker": 2},),
    "hanayo": ({"waves": 1}, {"waves": 2}),
}
STEPS = 10  # of each search of an order or of places
SECONDS = 8.0  # that a solver may take
# these try many orders for the times of the run, each as long as the table
SLOWLY_PLANNED = ("v-half", "v-min", "zb-v", "ada-offload")
FEW_OPS = 128  # microbatches times workers up to which they are planned nonetheless
MOST_OPS = 1 << 14  # stages times microbatches of tables that are tried


def schedules(setup: Setup, names: Collection[str] | None = None) -> Iterator[tuple[str, Setup]]:
    """Yield every other synchronous schedule with as many workers and microbatches."""
    # Without names those of the registry, but that take long to plan only where the table is small.
    if not setup.table.grammar.is_usual:
        return  # no other schedule has the same ops
    ops = setup.table.num_workers * setup.table.num_microbatches
    if names is None:
        names = [name for name in REGISTRY if ops <= FEW_OPS or name not in SLOWLY_PLANNED]
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
                rebuilt.run  # noqa: B018 - whether it runs
            except ValueError:  # it does not exist for these numbers, or deadlocks over these links
                continue
            if not rebuilt.table.updates_within:
                option_text = "".join(f", {k.replace('_', ' ')} {v}" for k, v in options.items())
                yield f"schedule {name}{option_text}", _with_assumptions(setup, rebuilt)


def _with_assumptions(before: Setup, after: Setup) -> Setup:
    assumes = list(after.assumes)
    is_measured = after.source.workload is None
    if is_measured and after.table.num_stages != before.table.num_stages:
        assumes.append("a stage's time lies evenly in its layers and goes with them")
    if after.table.num_pipes > before.table.num_pipes:
        assumes.append("weights twice on every worker, and a runtime with two pipes")
    if is_measured and _splits(after) and not _splits(before):
        assumes.append("I and W as given, or half of B each")
    return dataclasses.replace(after, assumes=tuple(dict.fromkeys(assumes)))


def _splits(setup: Setup) -> bool:
    return bool(np.isin(setup.table.phase, (Phase.I, Phase.W)).any())


def microbatches(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups with more, smaller microbatches of the minibatch, or fewer, larger ones."""
    count = setup.table.num_microbatches
    if setup.schedule is None or setup.costs.per_microbatch():
        return
    is_short = 2 * count < ENOUGH * setup.table.num_workers
    for times in (2, 0.5, *([4] if is_short else [])):
        many = int(count * times)
        if many / times != count or many * setup.table.num_stages > MOST_OPS:
            continue
        if setup.source.workload is not None and setup.source.workload.minibatch % many:
            continue
        try:
            resized = _resized(setup, setup.schedule, many)
            resized.run  # noqa: B018 - whether it runs
        except ValueError:
            continue
        yield f"{many} microbatches of {1 / times:g} times the size", resized


def _resized(setup: Setup, schedule: Schedule, count: int) -> Setup:
    size = setup.table.num_microbatches / count
    if setup.source.workload is not None:  # the model knows what a microbatch of that size takes
        return setup.rebuilt(schedule, count)
    fields = ["compute", "transmit", *(["O", "L"] if setup.table.offloads else [])]
    on_lanes = (
        phase for phase in setup.table.grammar.custom_phases if phase.kind.lane != COMPUTING
    )
    fields += [phase.name for phase in on_lanes if phase.kind.scope in (MICROBATCH, WORKER)]
    scaled = setup.scaled(
        *(f"{field}*{size!r}" for field in fields),
        assumes=("microbatches can be divided, and ops take as long as they are large",),
    )
    return dataclasses.replace(scaled.rebuilt(schedule, count), size=setup.size * size)


def repairs(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """A stage, a worker or a link that is like the others."""
    for fault in setup.faults:
        if fault.rules and fault.kind == "link" and fault.link is not None:
            what = f"messages between workers {fault.link[0]} and {fault.link[1]} like the others"
            yield what, setup.scaled(fault.rules, assumes=("the link can be mended",))
    slow = slowest_place(setup.run)
    if slow is not None:
        where = f"worker {slow.worker}" if "worker" in slow.rules else f"stage {slow.stage}"
        mended = f"what makes {where} slow can be mended, or its work moved away"
        yield f"{where} like the others", setup.scaled(slow.rules, assumes=(mended,))


def balance(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups with layers moved between stages, if these are known; else even stages."""
    if setup.layers:
        yield from _layers_moved(setup)
        return
    times = setup.times
    for what, rules in (("stages", times.even), ("workers", times.even_workers)):
        if rules:
            yield (
                f"layers over stages: all {what} take the mean",
                setup.scaled(rules, assumes=("work can be moved in any amount",)),
            )


def _layers_moved(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Layer by layer from the fullest worker to the one that computes least."""
    measured, before = setup.times.stages, np.array(setup.layers)
    # what a stage takes beyond its layers is its embedding, its head or its slow worker: it stays
    layer = float(np.median(measured / before))
    layers, workers = before.copy(), np.arange(setup.table.num_workers)
    # (workers, stages): share of the microbatches, by pipes that hold the stage there
    held = (setup.table.placement == workers[:, None, None]).mean(axis=1)
    while True:
        seconds = measured + layer * (layers - before)
        load = held @ seconds
        fullest, emptiest = int(load.argmax()), int(load.argmin())
        giving = np.flatnonzero((held[fullest] > 0) & (layers > 1))
        taking = np.flatnonzero(held[emptiest])
        if load[emptiest] + layer >= load[fullest] or not len(giving):
            return
        layers[giving[seconds[giving].argmax()]] -= 1
        layers[taking[seconds[taking].argmin()]] += 1
        yield _with_layers(setup, layers, layer)


def _with_layers(
    setup: Setup, layers: Int[NumpyArray, " stages"], layer: float
) -> tuple[str, Setup]:
    """So many layers on each stage, where a layer takes so long [s]."""
    measured, before = setup.times.stages, np.array(setup.layers)
    factors = 1 + layer * (layers - before) / measured
    rules = [
        f"compute@stage{stage}*{factor!r}"
        for stage, factor in enumerate(factors.tolist())
        if factor != 1
    ]
    assumed = "a layer takes as long anywhere, its median now; activations go with layers"
    changed = dataclasses.replace(setup.scaled(*rules, assumes=(assumed,)), layers=tuple(layers))
    return f"layers over stages: {','.join(map(str, layers))}", changed


FASTER: Mapping[str, tuple[str, tuple[str, ...]]] = {  # what is twice as fast, by part of a step
    "messages": ("links twice as fast", ("message",)),
    "exchange": ("exchange of gradients twice as fast", ("A",)),
    "sharding": ("gathers and reductions twice as fast", SHARDING),
    "offloads": ("host links twice as fast", ("O", "L")),
    "update": ("update twice as fast", ("U",)),
}


def hardware(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Links and exchanges that are twice as fast, where the step waits for them."""
    parts = {**setup.parts, "messages": setup.parts["messages"] + setup.parts["blocking"]}
    for part, (what, fields) in FASTER.items():
        if parts[part] > WORTH * setup.step_time:
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
    # costs that were scaled by stage or worker are not known for other places
    if setup.source.placed is None or setup.rules or waits <= WORTH * setup.step_time:
        return
    placed = setup.source.placed(setup.table)
    if placed.nodes.max() in (0, len(placed.nodes) - 1):  # one node, or one for each worker
        return
    current_places = places_on(setup.table, setup.source.places)
    try:
        result = PlacementSearch(placed, current_places, setup.links, seed=0).run(STEPS)
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
    # a microbatch that changes the pipe meets each stage on another worker: not in its costs
    is_known = setup.table.num_pipes == 1 and setup.table.grammar.is_usual
    if setup.order or not is_known or not setup.costs.per_microbatch():
        return
    result = MicrobatchSearch(setup.table, setup.costs, setup.links, seed=0).run(STEPS)
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
    if not setup.links.is_rendezvous or setup.parts["blocking"] <= WORTH * setup.step_time:
        return
    # of early posts orders are searched; where the run posts as its rows go, it takes the best one
    links = dataclasses.replace(setup.links, posting=POSTINGS[0])
    try:
        result = messages(setup.table, setup.costs, link=links, iterations=STEPS, time_limit=None)
    except (ValueError, ScheduleError):  # links whose orders are not searched
        return
    yield (
        "order of messages",
        dataclasses.replace(
            setup,
            table=result.best.table,
            links=result.best.links if setup.links == links else setup.links,
            schedule=None,
            options={**setup.options, "order": str(STEPS)},
        ),
    )


def in_flight(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield setups of a ring with more requests in flight."""
    # The rules then reach so much further back: 0F4 <- 3F0 in place of 0F3 <- 3F0.
    table, bare = setup.table, without_rules(setup.table)
    if not table.grammar.forward_only or bare is None or table.grammar.slices > 1:
        return
    others, least = bare.grammar.rules, evaluate(bare, setup.costs, link=setup.links).makespan
    waits = [rule for rule in table.grammar.rules if rule not in others]
    # microbatches that they wait for, and how far these lie back; 0 of a rule that names none
    before = [rule.producer_microbatch or 0 for rule in waits]
    now = min((r.consumer_microbatch or 0) - b for r, b in zip(waits, before, strict=True))
    room = "there are more requests, and room for their keys and values"
    for more in range(1, table.num_microbatches if now > 0 else 0):
        ends = ((rule, b - more) for rule, b in zip(waits, before, strict=True) if b >= more)
        rules = (*others, *(rule._replace(producer_microbatch=end) for rule, end in ends))
        try:
            grammar = dataclasses.replace(table.grammar, rules=rules)
            other = dataclasses.replace(table, grammar=grammar)
        except ScheduleError:  # of rows in another order these rules go round in a circle
            return
        options, assumes = {**setup.options, "rules": ""}, (*setup.assumes, room)
        changed = dataclasses.replace(setup, table=other, options=options, assumes=assumes)
        yield f"{now + more} requests in flight in place of {now}", changed
        if changed.step_time <= least:
            return


def settings(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield other settings of a modelled workload: recomputation, sequence parallelism, ends."""
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
            other.run  # noqa: B018 - whether it runs
        except (ValueError, MismatchError):
            continue
        yield title, other


def _other_settings(workload: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
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
    """Yield the fastest schedule of these stages in the memory of the present run."""
    if setup.links.model not in LINKS_OF_SEARCH:
        return
    peak = activation_memory(setup.run).peak
    try:
        optimum = optimize(
            setup.table,
            setup.costs,
            memory_limit=np.maximum(peak, 1.0),
            link=setup.links,
            time_limit=SECONDS,
        )
    except (ValueError, ModuleNotFoundError):  # no problem that it knows, or no solver
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
        result = split_layers(setup.table, workload, system, link=setup.links, time_limit=SECONDS)
    except ValueError:
        return
    layout = str(result.best.layout)
    source = setup.source.with_workload(result.best.workload)
    ends = dict.fromkeys(("embedding_units", "loss_units"))
    options = {**setup.options, **ends, "pipeline_layout": layout}
    what = f"layers over stages: {layout}"
    yield what, dataclasses.replace(setup, source=source, options=options)
