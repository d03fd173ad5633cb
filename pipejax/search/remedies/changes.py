"""Changes that may shorten a step: functions from a candidate to changed candidates."""

import bisect
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from pipejax.analysis.runs.evaluate import activation_memory, evaluate
from pipejax.analysis.step.faults import ComputeTimes, message_times, slowest_place
from pipejax.analysis.step.step_report import WAITS, without_rules
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.costs.edits import Edit, Microbatches, RecomputeCells, ScaledTimes, ShardingCells
from pipejax.costs.model.launchers import COMBINED, LAUNCHERS
from pipejax.costs.model.stack import load_stack
from pipejax.costs.model.workload import Workload, assign_layers, model_parts, with_stage_layers
from pipejax.costs.scaling import GROUPS
from pipejax.costs.sources import HALF_OF_B
from pipejax.costs.topology import places_on
from pipejax.schedules.cells.ops import Phase, ScheduleError
from pipejax.schedules.naming import find
from pipejax.schedules.registry import REGISTRY
from pipejax.schedules.table.links import POSTINGS
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.orders.permutations import MicrobatchSearch
from pipejax.search.orders.places import PlacementSearch
from pipejax.search.orders.transfers import messages
from pipejax.search.partition.partition import layers as split_layers
from pipejax.search.remedies.candidates import (
    Candidate,
    Memory,
    TableSearch,
    change_launchers,
    restage_layers,
)
from pipejax.search.schedule.optimize import optimize
from pipejax.search.schedule.problem import LINKS_OF_SEARCH

Stages = Float[NumpyArray, " stages"]
EDGE_COSTS = "all layers cost the same; a longer first or last stage is due to embedding or head"
MIN_EDGE = 0.02  # share of a stage from which extra time is embedding or head, and no noise
MIN_GAIN = 1e-3  # share of the step; smaller savings are not reported
COMPILED = "compiled kernels"
MAX_STAGES = 16  # largest number of stages on a worker, as in `plan`
MAX_UNKNOWN_STAGES = 4  # this number if the layers of measured stages are unknown
SEARCH_STEPS = 10  # iterations of each search of an order or of places
SOLVER_SECONDS = 8.0
# builders that try many orders for the times of the run
SLOWLY_PLANNED = ("v-half", "v-min", "zb-v", "ada-offload")
MAX_OPS_PLANNED = 128  # largest number of microbatches x workers for which slow builders are tried
MAX_OPS = 1 << 14  # largest number of stages x microbatches of a table that is tried


# edits that give another schedule the cells of these phases
CELL_EDITS: Mapping[Phase, type[Edit]] = {
    Phase.R: RecomputeCells,
    Phase.UNSHARD: ShardingCells,
    Phase.REDUCE_GRAD: ShardingCells,
}


def can_change_schedule(run: Candidate) -> bool:
    """Return whether another schedule can have the ops of the table."""
    edits = (edit for phase, edit in CELL_EDITS.items() if phase in run.table.used_phases)
    has_workload = run.scenario.source.workload is not None  # a model prices work without cells
    return run.table.grammar.is_usual and (has_workload or all(map(run.scenario.find_edit, edits)))


def schedules(run: Candidate, names: Collection[str] | None = None) -> Iterator[Candidate]:
    """Yield all other synchronous schedules with the same workers and microbatches."""
    # By default, all schedules of the registry are tried, without those that take long to plan.
    table, scenario = run.table, run.scenario
    if not can_change_schedule(run):
        return
    is_small = table.num_workers * table.num_microbatches <= MAX_OPS_PLANNED
    if names is None:
        names = [name for name in REGISTRY if is_small or name not in SLOWLY_PLANNED]
        workload = scenario.source.workload
        if workload is not None and workload.has_experts and workload.expert_parallel > 1:
            names.append(COMBINED)
    has_host = scenario.table_costs().offload is not None
    size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
    for name in names:
        option_names = find(name).options
        if "slices" in option_names or ("offload" in option_names and not has_host):
            continue  # the measured op times are not those of slices
        for options in _stage_options(run, name):
            if (name, options) == (scenario.schedule, scenario.options):
                continue
            option_text = "".join(f", {k.replace('_', ' ')} {v}" for k, v in options.items())
            try:
                other = run.rebuilt(
                    f"schedule {name}{option_text}", schedule=name, options=options, **size
                )
                if other.table.updates_within:
                    continue
                rules = _edge_rules(run, other)
                assumptions = [EDGE_COSTS] if rules else []
                rules += _link_rules(run, other)
                if rules:
                    other = other.scaled(other.what, rules, *assumptions)
                other.run  # noqa: B018 - evaluated here for its errors
            except ValueError:  # no such schedule for these numbers, or a deadlock on these links
                continue
            yield other.changed(other.what, other.scenario, *_assumptions(run, other))


def _stage_options(run: Candidate, name: str) -> list[dict[str, int]]:
    """List options of a schedule, such as {"waves": 2}, for all numbers of stages per worker."""
    builder, workload, workers = find(name), run.scenario.source.workload, run.table.num_workers
    if builder.planned or not {"stages_per_worker", "waves"} & {*builder.options}:
        return [{}]
    limit = MAX_STAGES if workers > 1 else 0  # on one worker, more stages change nothing
    if workload is not None:
        units = workload.embedding_units + workload.loss_units
        limit = min(limit, (int(workload.model.layers) + units) // workers)
    elif not run.layers and limit:
        limit = max(MAX_UNKNOWN_STAGES, run.table.stages_per_worker)
    layers, sizes = run.layers, range(2, limit + 1)
    counts = [n for n in sizes if not layers or restage_layers(layers, workers * n)]
    if "waves" in builder.options:
        return [{"waves": n // 2} for n in counts if n % 2 == 0]
    return [{"stages_per_worker": n} for n in counts]


def _edge_rules(old: Candidate, new: Candidate) -> list[str]:
    """Return scaling rules that keep embedding and head whole if measured stages are divided."""
    # If stages of 6 6 6 9 s become two parts each, even parts take 3 3 3 3 3 3 4.5 4.5 s.
    # The rules make them 3 3 3 3 3 3 3 6 s, because the head cannot be divided.
    num_measured, num_stages = old.table.num_stages, new.table.num_stages
    is_divided = num_stages > num_measured and num_stages % num_measured == 0
    if new.scenario.source.workload is not None or not is_divided:
        return []
    source = new.scenario.source
    costs, slowness = vars(source.levels(new.table)[0]), _slowness(new.table, source.slow_workers)
    layers, rules = np.array(old.layers or [1] * num_measured), []  # (measured stages)
    for phase in sorted(new.table.used_phases):
        field = PHASE_FIELDS.get(phase.name, "")
        if field not in GROUPS["compute"] or np.shape(costs[field])[:1] != (num_stages,):
            continue
        even_parts = np.asarray(costs[field], float).reshape(num_stages, -1).mean(axis=1)
        even_parts = (even_parts / slowness).reshape(num_measured, -1)  # (measured stages, parts)
        measured = even_parts.sum(axis=1)
        # the lower median: with two stages, the faster one, as the slower one may have a head
        layers_only = np.quantile(measured / layers, 0.5, method="lower") * layers
        new_parts = even_parts.copy()
        for edge in 0, -1:  # the first stage and its first part, the last stage and its last part
            edge_seconds = measured[edge] - layers_only[edge]  # time of embedding or head
            if edge_seconds > MIN_EDGE * measured[edge]:
                new_parts[edge] = layers_only[edge] / even_parts.shape[1]
                new_parts[edge, edge] += edge_seconds
        factors = np.ones_like(even_parts)
        factors = np.divide(new_parts, even_parts, out=factors, where=even_parts > 0).ravel()
        rules += [
            f"{phase.name}@stage{stage}*{factor:.12g}"
            for stage, factor in enumerate(factors.tolist())
            if factor != 1
        ]
    return rules


def _slowness(table: ScheduleTable, factors: Mapping[int, float]) -> Stages:
    """Return the factor of each stage's worker; of several workers of a stage, the mean."""
    by_worker = np.array([factors.get(worker, 1.0) for worker in range(table.num_workers)])
    slowness: Stages = by_worker[table.placement].mean(axis=0)
    return slowness


def _link_rules(old: Candidate, new: Candidate) -> list[str]:
    """Return scaling rules that keep a slow measured link between the same two workers."""
    # Measured messages belong to stage boundaries. With 8 stages on 4 workers, messages between
    # workers 0 and 1 are at boundaries 0 and 4 of a loop, but at boundaries 0 and 6 of a V.
    slow = next((fault.link for fault in old.faults if fault.kind == "link"), None)
    is_modelled = old.scenario.source.workload is not None or old.scenario.placed is not None
    if slow is None or is_modelled or new.table.num_pipes > 1:
        return []
    old_times = message_times(old.table, old.table_costs)
    seconds = {pair: max(times.values()) for pair, times in old_times.items()}
    usual = max((time for pair, time in seconds.items() if pair != slow), default=0.0)
    return [
        f"message@boundary{boundary}*{seconds.get(pair, usual) / time:.12g}"
        for pair, times in message_times(new.table, new.table_costs).items()
        for boundary, time in times.items()
        if time > 0 and not math.isclose(seconds.get(pair, usual), time)
    ]


def _assumptions(old: Candidate, new: Candidate) -> Iterator[str]:
    """Yield the assumptions behind a change of schedule, as texts."""
    is_measured = new.scenario.source.workload is None
    has_other_stages = new.table.num_stages != old.table.num_stages
    if is_measured and has_other_stages and EDGE_COSTS not in new.assumes:
        yield "all layers of a stage cost the same, also when moved"
    if new.table.num_pipes > old.table.num_pipes:
        yield "a second copy of the weights, and a runtime that runs pipes in both directions"
    source = old.scenario.source
    if source.halves_backward(new.table) and not source.halves_backward(old.table):
        yield HALF_OF_B


def microbatches(
    run: Candidate, memory: Memory | None = None, launcher: str | None = None
) -> Iterator[Candidate]:
    """Yield candidates that divide the minibatch into more or into fewer microbatches."""
    # The run must have a model, which knows times at other microbatch sizes. Sizes that do not fit
    # in memory are also tried with the recomputations that fit.
    scenario, table, workload = run.scenario, run.table, run.scenario.source.workload
    is_named = isinstance(scenario.schedule, str) and find(scenario.schedule).sizes is None
    # a schedule that is planned for a memory limit would change with the size
    is_planned_for_limit = "memory_limit" in scenario.options
    if workload is None or not is_named or is_planned_for_limit or run.table_costs.per_microbatch():
        return
    count = scenario.size["num_microbatches"]
    for factor in (2, 4, 8, 16, 0.5):
        new_count = int(count * factor)
        if new_count / factor != count or new_count * table.num_stages > MAX_OPS:
            continue
        if workload.minibatch % new_count:
            continue
        share = f"1/{factor} of" if factor > 1 else "2 times"
        what = f"{share} the microbatch size ({new_count} microbatches)"
        try:
            options = scenario.options  # so a planned schedule is planned for the new times
            resized = run.rebuilt(what, num_microbatches=new_count, options=options)
            resized.run  # noqa: B018 - evaluated here for its errors
        except ValueError:
            continue
        yield resized
        if memory is None or memory.fits(resized):
            continue
        for level in recomputations(resized, memory, launcher):
            title = f"{what} with recomputation {level}"
            other = _with_fields(resized, workload, title, {"recompute": level})
            if other is not None and memory.fits(other):
                yield other


def repairs(run: Candidate) -> Iterator[Candidate]:
    """Yield candidates in which a slow stage, worker or link is as fast as the others."""
    for fault in run.faults:
        if fault.rules and fault.kind == "link" and fault.link is not None:
            pair = f"workers {fault.link[0]} and {fault.link[1]}"
            what = f"messages between {pair} as fast as the others"
            yield run.scaled(what, [fault.rules], "a repair of this link")
    workload = run.scenario.source.workload
    # without edits and stragglers, stages of a model differ in their layers alone
    is_slowed = workload is None or bool(run.scenario.edits) or bool(workload.stragglers)
    slow = slowest_place(run.run) if is_slowed else None
    if slow is not None:
        place = f"worker {slow.worker}"
        if "worker" not in slow.rules:
            place = f"stage {slow.stage} ({place})"
        assumption = f"a faster machine for {place}, or less work on it"
        yield run.scaled(f"{place} as fast as the others", [slow.rules], assumption)


def balance(run: Candidate) -> Iterator[Candidate]:
    """Yield candidates with moved layers, or with even stages if the layers are unknown."""
    times, workload = ComputeTimes.from_run(run.run), run.scenario.source.workload
    layers: Any = run.layers if workload is None else assign_layers(workload, run.table).layers
    if len(layers):
        yield from _move_layers(run, times.stages, np.asarray(layers).astype(int))
        return
    # rules such as compute@stage0*1.5,compute@stage1*0.5; empty if the times are equal already
    kinds = ("stages", times.even_stage_rules), ("workers", times.even_worker_rules)
    for places, rules in kinds:
        if rules:
            title = f"layers over stages: all {places} take equally long"
            yield run.scaled(title, [rules], "work can be moved between stages in any amount")


def _move_layers(
    run: Candidate, measured: Stages, old_layers: Int[NumpyArray, " stages"]
) -> Iterator[Candidate]:
    """Yield candidates; each moves one more layer from the busiest to the least busy worker."""
    # A layer's time is the median over stages, times the factor of a slow worker. The rest of a
    # stage, such as the head, does not move.
    has_layers, slowness = old_layers > 0, _slowness(run.table, run.scenario.slow_workers)
    median_seconds = np.median((measured / slowness)[has_layers] / old_layers[has_layers])
    layer_seconds = median_seconds * slowness  # (stages)
    layers, workers = old_layers.copy(), np.arange(run.table.num_workers)
    # (workers, stages) share of the pipes in which the worker holds the stage
    pipe_share = (run.table.placement == workers[:, None, None]).mean(axis=1)
    last_sum_of_squares = np.inf
    while True:
        seconds = measured + layer_seconds * (layers - old_layers)
        load = pipe_share @ seconds
        sum_of_squares = float(load @ load)  # smaller if the load is more even
        if sum_of_squares >= last_sum_of_squares * (1 - 1e-12):  # both workers hold the stage
            return
        last_sum_of_squares = sum_of_squares
        busiest, idlest = int(load.argmax()), int(load.argmin())
        sources = np.flatnonzero((pipe_share[busiest] > 0) & (layers > 1))
        targets = np.flatnonzero(pipe_share[idlest])
        target = targets[seconds[targets].argmin()]
        if load[idlest] + layer_seconds[target] >= load[busiest] or not len(sources):
            return
        layers[sources[seconds[sources].argmax()]] -= 1
        layers[target] += 1
        counts = tuple(layers.tolist())
        title = f"layers over stages: {','.join(map(str, counts))}"
        workload = run.scenario.source.workload
        if workload is not None:
            moved = with_stage_layers(workload, counts)
            yield run.changed(title, run.scenario.with_workload(moved))
            continue
        factors = 1 + layer_seconds * (layers - old_layers) / measured
        rules = [
            f"compute@stage{stage}*{factor:.12g}"
            for stage, factor in enumerate(factors.tolist())
            if factor != 1
        ]
        assumption = "every layer takes the median time of now; activations move with layers"
        yield dataclasses.replace(run.scaled(title, rules, assumption), layers=counts)


FASTER: Mapping[str, tuple[str, tuple[str, ...]]] = {  # {part of a step: (title, cost fields)}
    "messages": ("links twice as fast", ("message",)),
    "exchange": ("exchange of gradients twice as fast", ("A",)),
    "sharding": ("gathers and reductions twice as fast", WAITS["sharding"]),
    "offloads": ("host links twice as fast", ("O", "L")),
    "update": ("update twice as fast", ("U",)),
}


def hardware(run: Candidate) -> Iterator[Candidate]:
    """Yield candidates with links or exchanges twice as fast, if the step waits for them."""
    parts = {**run.parts, "messages": run.parts["messages"] + run.parts["blocking"]}
    for part, (what, fields) in FASTER.items():
        if parts[part] > MIN_GAIN * run.step_time:
            costs = vars(run.table_costs)
            rules = [
                f"{field}*0.5"
                for field in fields
                if field in GROUPS or np.any(np.asarray(costs[PHASE_FIELDS.get(field, field)]) > 0)
            ]
            title = run.part_texts.get(part, {}).get("faster", what)
            yield run.scaled(title, rules, "faster hardware or smaller messages")


def places(run: Candidate) -> Iterator[Candidate]:
    """Yield a candidate with other places of the workers, if the step waits for messages."""
    scenario, table = run.scenario, run.table
    waits = sum(run.parts[part] for part in ("messages", "blocking", "exchange"))
    # scaling rules of stages or workers hold for the present places only
    is_scaled = scenario.find_edit(ScaledTimes) is not None
    if scenario.placed is None or is_scaled or waits <= MIN_GAIN * run.step_time:
        return
    nodes = scenario.place_nodes(table)
    if nodes.max() in (0, len(nodes) - 1):  # one node, or one for each worker
        return
    placed = scenario.placed(table)
    current_places = places_on(table, scenario.source.worker_places)
    try:
        result = PlacementSearch(placed, current_places, scenario.links, seed=0).run(SEARCH_STEPS)
    except ValueError:  # links under which places are not searched
        return
    best_places = tuple(result.best.places.tolist())
    moved = scenario.replace(costs=scenario.source.with_places(best_places))
    yield run.changed("places of workers", moved, "workers can be put on other nodes")


def microbatch_orders(run: Candidate) -> Iterator[Candidate]:
    """Yield another order of unequal microbatches."""
    scenario, table = run.scenario, run.table
    # in another pipe, a microbatch would run on other workers, at unknown costs
    has_known_costs = table.num_pipes == 1 and table.grammar.is_usual  # no custom ops
    # a rule as forward@microbatch1*2 scales the second microbatch of any order, not its data
    scaled = scenario.find_edit(ScaledTimes)
    is_scaled = scaled is not None and "@microbatch" in scaled.rules
    if is_scaled or not has_known_costs or not run.table_costs.per_microbatch():
        return
    search = MicrobatchSearch(table, run.table_costs, scenario.links, seed=0)
    order = search.run(SEARCH_STEPS).best.order.tolist()
    edit = (scenario.find_edit(Microbatches) or Microbatches()).reordered(order)
    assumption = "the order of the data is free"
    yield run.changed("order of microbatches", scenario.with_edit(edit), assumption)


def orders(run: Candidate) -> Iterator[Candidate]:
    """Yield a better order of sends and receives, if these block each other."""
    scenario, links = run.scenario, run.scenario.links
    if not links.is_rendezvous or run.parts["blocking"] <= MIN_GAIN * run.step_time:
        return
    # the search requires early posting; a run with another posting takes its best order
    early = dataclasses.replace(links, posting=POSTINGS[0])
    try:
        best = messages(
            run.table, run.table_costs, link=early, iterations=SEARCH_STEPS, time_limit=None
        ).best
    except (ValueError, ScheduleError):  # links whose orders are not searched
        return
    search = TableSearch("messages", scenario)
    ordered = run.with_table("order of messages", best.table, search)
    if links == early:
        ordered = ordered.changed(ordered.what, ordered.scenario.replace(link=best.links))
    yield ordered


def in_flight(run: Candidate) -> Iterator[Candidate]:
    """Yield candidates with more requests in flight, for tables whose rules form a ring."""
    # With one more request, each rule of the ring waits for one microbatch earlier: 0F4 <- 3F0 in
    # place of 0F3 <- 3F0 means 4 requests in flight in place of 3.
    table, table_without_ring = run.table, without_rules(run.table)
    if not table.grammar.forward_only or table_without_ring is None or table.grammar.slices > 1:
        return
    other_rules = table_without_ring.grammar.rules
    links = run.scenario.links
    shortest = evaluate(table_without_ring, run.table_costs, link=links).makespan
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
        what = f"{current + extra} requests in flight in place of {current}"
        search = TableSearch("ring", run.scenario)
        changed = run.with_table(what, new_table, search, assumption)
        yield changed
        if changed.step_time <= shortest:
            return


def settings(
    run: Candidate, memory: Memory | None = None, launcher: str | None = None
) -> Iterator[Candidate]:
    """Yield candidates with other recomputation, sequence parallelism, overlap or kernels."""
    # Less recomputation that does not fit in memory is also tried with settings that save memory.
    workload = run.scenario.source.workload
    if workload is None:
        return
    yield from _compiled(run, workload)
    levels = recomputations(run, memory, launcher)
    recompute = [(f"recomputation {level}", {"recompute": level}) for level in levels]
    for what, fields in (*recompute, *_other_settings(workload, run.table.num_workers)):
        other = _with_fields(run, workload, what, fields)
        if other is None:
            continue
        yield other
        if memory is None or "recompute" not in fields or memory.fits(other):
            continue
        for title, more_fields in _memory_savings(workload):
            smaller = _with_fields(run, workload, f"{what} with {title}", {**fields, **more_fields})
            if smaller is not None and memory.fits(smaller):
                yield smaller
                break


def recomputations(
    run: Candidate, memory: Memory | None = None, launcher: str | None = None
) -> Iterator[str]:
    """Yield other recomputations: none, full, parts of a layer, and the fewest layers that fit."""
    workload: Any = run.scenario.source.workload
    if workload.recompute == "none" and memory is not None and memory.fits(run):
        return  # any recomputation takes time, and saves memory that is not needed
    # flash attention keeps no scores, so "selective" frees next to nothing
    has_scores = not workload.model.flash_attention
    main_levels = ("none", *(["selective"] if has_scores else []), "full")
    yield from (level for level in main_levels if level != workload.recompute)
    layers = int(max(assign_layers(workload, run.table).layers))
    parts = [part for part in model_parts(workload.model) if part != "core_attn"]

    def with_level(level: str) -> Candidate:
        recomputing = dataclasses.replace(workload, recompute=level)
        return run.changed("", run.scenario.with_workload(recomputing))

    blocks = [f"block:{count}" for count in range(1, layers)]
    if memory is not None:  # needs fall with the number of recomputed layers
        first = bisect.bisect_left(blocks, True, key=lambda level: memory.fits(with_level(level)))
        parts += blocks[first : first + 1]
    for level in parts:
        names = change_launchers(run, with_level(level))
        if launcher in names or (names and launcher is None):
            yield level


def _compiled(run: Candidate, workload: Workload) -> Iterator[Candidate]:
    """Yield the candidate with compiled kernels, if an option of a launcher compiles them."""
    source: Any = run.scenario.source
    for launcher in LAUNCHERS.values():
        if not launcher.stack or launcher.stack != source.stack:
            continue
        eager, compiled = load_stack(launcher.stack), load_stack(launcher.compiled)
        if workload.model.unfused == eager.unfused:  # kernels of the stack, not of the model
            model = dataclasses.replace(workload.model, unfused=compiled.unfused)
            workload = dataclasses.replace(workload, model=model)
        fields = {"workload": workload, "system": compiled.on(source.system)}
        costs = dataclasses.replace(source, stack=compiled.name, **fields)
        files = {**run.scenario.files, "stack": compiled.name}
        yield run.changed(COMPILED, run.scenario.replace(costs=costs, files=files))


def _with_fields(
    run: Candidate, workload: Workload, what: str, fields: Mapping[str, Any]
) -> Candidate | None:
    """Return the candidate with changed fields of the workload; None if it cannot run."""
    try:
        scenario = run.scenario.with_workload(dataclasses.replace(workload, **fields))
        other = run.changed(what, scenario)
        other.run  # noqa: B018 - evaluated here for its errors
    except (ValueError, MismatchError):
        return None
    return other


def _memory_savings(workload: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (title, changed fields) of settings that save memory, the cheapest first."""
    has_replicas = workload.data_parallel * workload.context_parallel > 1
    can_split_sequence = workload.tensor_parallel > 1 and not workload.sequence_parallel
    for zero in range(workload.zero, 4 if has_replicas else workload.zero + 1):
        titles = [] if zero == workload.zero else [f"ZeRO {zero}"]
        if titles:
            yield titles[0], {"zero": zero}
        if can_split_sequence:
            title = " and ".join([*titles, "sequence parallelism"])
            yield title, {"zero": zero, "sequence_parallel": True}


def _other_settings(workload: Workload, num_workers: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (title, changed fields of the workload) for each alternative setting."""
    if workload.data_parallel * workload.context_parallel > 1:
        for zero in range(workload.zero + 1, 4):
            yield f"ZeRO {zero}", {"zero": zero}
    if workload.tensor_parallel > 1 and not workload.sequence_parallel:
        yield "sequence parallelism", {"sequence_parallel": True}
    if workload.data_parallel > 1 and workload.overlap < 1:
        yield "gradients and weights beside compute", {"overlap": 1.0}
    if workload.tensor_parallel > 1 and workload.tensor_overlap < 1:
        yield "tensor parallelism beside compute of backwards", {"tensor_overlap": 1.0}
    if workload.has_experts and workload.expert_tensor > 1:
        for spread in (workload.expert_parallel, workload.expert_parallel * workload.expert_tensor):
            fields = {"expert_parallel": spread, "expert_tensor_parallel": 1}
            yield f"whole experts on {spread} accelerators", fields
    # in a pipeline, the schedule combined-1f1b overlaps experts
    is_spread = workload.has_experts and workload.expert_parallel > 1 and num_workers == 1
    if is_spread and workload.expert_overlap < 1:
        yield "experts beside compute of another microbatch", {"expert_overlap": 1.0}


def optimised(run: Candidate) -> Iterator[Candidate]:
    """Yield the fastest schedule of these stages within the memory peak of the run."""
    links = run.scenario.links
    if links.model not in LINKS_OF_SEARCH:
        return
    peak = activation_memory(run.run).peak
    limit = np.maximum(peak, 1.0)
    try:
        optimum = optimize(
            run.table, run.table_costs, memory_limit=limit, link=links, time_limit=SOLVER_SECONDS
        )
    except (ValueError, ModuleNotFoundError):  # an unsupported problem, or no solver
        return
    search = TableSearch("optimize", run.scenario, tuple(peak.tolist()))
    yield run.with_table("order of ops, in the memory of now", optimum.best.table, search)


def layouts(run: Candidate) -> Iterator[Candidate]:
    """Yield the fastest split of the model's layers over the stages."""
    workload, system = run.scenario.model_workload, run.scenario.system
    if workload is None or system is None or workload.pipeline_layout:
        return
    links = run.scenario.links
    try:
        best = split_layers(run.table, workload, system, link=links, time_limit=SOLVER_SECONDS).best
    except ValueError:
        return
    what = f"layers over stages: {best.layout}"
    yield run.changed(what, run.scenario.with_workload(best.workload))
