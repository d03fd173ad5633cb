"""Rules of legal schedules. A table runs these checks when it is made, in this order."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipejax.base.array_types import Bool, Index, NumpyArray
from pipejax.base.checks import are_positive
from pipejax.base.display import abbreviated
from pipejax.base.longest_path import CycleError, topological_order
from pipejax.schedules.cells.cells import NEWEST, NOWHERE, Content
from pipejax.schedules.cells.dependencies import (
    FORWARD,
    cell_edges,
    find_dependencies,
    find_producers,
    find_versions,
    last_before,
    rule_consumers,
    waiting_ops,
)
from pipejax.schedules.cells.grammar import USUAL, Grammar, Rule, format_rule
from pipejax.schedules.cells.ops import (
    BACKWARDS,
    INPUT_GRADS,
    MESSAGES,
    NO_STAGE,
    UPDATES,
    WEIGHT_GRADS,
    WORKER,
    AnyPhase,
    Op,
    Phase,
    ScheduleError,
    Slots,
    format_number,
    is_phase,
)


def _cell_error(content: Content, cell: Index, reason: str, *phases: AnyPhase) -> ScheduleError:
    """Return the error about a cell, with {op} and {worker} in the reason filled in."""
    # For a fused pair, {op} is the op with one of the phases; without phases, both ops.
    worker, slot = place = content.place(cell)
    ops = tuple(op for op in content.cell(worker, slot) if not phases or op.phase in phases)
    return ScheduleError(reason.format(op=content.grammar.text(ops), worker=worker), place=place)


def _missing_error(content: Content, op: Op, worker: int, why: str) -> ScheduleError:
    name = content.grammar.text((op,))
    return ScheduleError(f"missing op {name} on worker {worker}: {why}", place=(worker, None))


def _refuse_cells(content: Content, cells: NumpyArray, reason: str, *phases: AnyPhase) -> None:
    """Raise an error that shows the first of the faulty cells; do nothing if there is none."""
    if len(cells):
        raise _cell_error(content, cells[0], reason, *phases)


def _first_true(mask: NumpyArray) -> tuple[int, ...]:
    """Return the indices of the first true entry of a mask; empty if no entry is true."""
    return tuple(np.argwhere(mask)[0].tolist()) if mask.any() else ()


def check_arrays(content: Content) -> None:
    """Check that all arrays are (workers, slots), and hold existing phases and workers."""
    shapes = {array.shape for array in (*content.cells, *content.partners)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ScheduleError(f"all arrays of a table must be (workers, slots), got shapes {shapes}")
    placement, workers = content.placement, content.num_workers
    if placement.ndim != 2 or 0 in placement.shape:
        raise ScheduleError(f"placement must be (pipes, stages), got shape {placement.shape}")
    unknown_codes = content.ops.phase[~np.isin(content.ops.phase, content.grammar.cell_phases)]
    if len(unknown_codes):
        raise ScheduleError(f"{unknown_codes[0]} is not the code of a phase that a cell can hold")
    if fault := _first_true((placement < 0) | (placement >= workers)):
        pipe, stage = fault
        raise ScheduleError(
            f"stage {stage} of pipe {pipe} is placed on worker {placement[pipe, stage]}: "
            f"the table has workers 0 to {workers - 1}"
        )


def check_rows(content: Content) -> None:
    """Check that every worker has an op, and that every fused pair is a forward and a backward."""
    phase, partner = content.cells.phase, content.partners.phase
    if fault := _first_true(~(phase != Phase.IDLE).any(axis=1)):
        (worker,) = fault
        raise ScheduleError(f"worker {worker} has no op: each needs a stage", place=(worker, None))
    is_pair = (phase == Phase.F) & is_phase(partner, INPUT_GRADS)
    reason = "{op} on worker {worker} fuses other ops than a forward and a backward"
    _refuse_cells(content, np.flatnonzero((partner != Phase.IDLE) & ~is_pair), reason)


def check_ranges(content: Content) -> None:
    """Check that stage, microbatch and pipe of ops exist; slices of a microbatch share a pipe."""
    ops, grammar, stages = content.ops, content.grammar, content.num_stages
    has_microbatch = ~is_phase(ops.phase, grammar.sharding_phases)
    has_stage = ~is_phase(ops.phase, grammar.worker_phases)
    reason = "op {op} on worker {worker} has a stage: its kind has none"
    _refuse_cells(content, ops.cell[~has_stage & (ops.stage != NO_STAGE)], reason)
    graph_stages = {stage for edge in grammar.graph for stage in edge}
    if unknown_stages := graph_stages - {*range(stages)}:
        stage = min(unknown_stages)
        raise ScheduleError(f"graph: stage {stage} does not exist: stages are 0 to {stages - 1}")
    count, pipes = content.num_microbatches, content.num_pipes
    for is_checked, values, end, why in (
        (has_stage, ops.stage, stages, "has no place: stages are 0 to"),
        (has_microbatch, ops.microbatch, count, "has no forward: microbatches are 0 to"),
        (has_microbatch, ops.pipe, pipes, "belongs to no pipe: pipes are 0 to"),
    ):
        reason = f"op {{op}} on worker {{worker}} {why} {end - 1}"
        _refuse_cells(content, ops.cell[is_checked & ((values < 0) | (values >= end))], reason)
    if not content.num_microbatches:
        raise ScheduleError("no op of the table computes a microbatch")
    cut_microbatch, num_slices = divmod(content.num_microbatches, grammar.slices)
    if num_slices:
        text = f"microbatch {cut_microbatch} has {num_slices} slices of {grammar.slices}"
        raise ScheduleError(text)
    slice_pipes = content.pipe_of_microbatch.reshape(-1, grammar.slices)
    if fault := _first_true((slice_pipes != slice_pipes[:, :1]).any(axis=1)):
        raise ScheduleError(f"slices of microbatch {fault[0]} are in several pipes")


def check_workers(content: Content) -> None:
    """Check that every op is on the worker of its stage, and every microbatch in one pipe."""
    is_sharding = is_phase(content.ops.phase, content.grammar.sharding_phases)
    is_worker_op = is_phase(content.ops.phase, content.grammar.worker_phases)
    ops, sharding = content.ops.take(~is_sharding & ~is_worker_op), content.ops.take(is_sharding)
    stage_workers = content.placement[ops.pipe, ops.stage]
    if fault := _first_true(stage_workers != ops.cell // content.num_slots):
        (k,) = fault
        reason = (
            f"op {{op}} stands on worker {{worker}}, but stage {ops.stage[k]} of "
            f"pipe {ops.pipe[k]} is placed on worker {stage_workers[k]}"
        )
        raise _cell_error(content, ops.cell[k], reason)
    ops = content.ops.take(~is_sharding)
    if fault := _first_true(content.pipe_of_microbatch[ops.microbatch] != ops.pipe):
        (k,) = fault
        raise _cell_error(content, ops.cell[k], f"microbatch {ops.microbatch[k]} is in two pipes")
    holds_stage = content.placement[:, sharding.stage] == sharding.cell // content.num_slots
    reason = "op {op} stands on worker {worker}, which does not hold that stage"
    _refuse_cells(content, sharding.cell[~holds_stage.any(axis=0)], reason)


def check_once(content: Content) -> None:
    """Check that no op stands twice in the table."""
    grammar = content.grammar
    ops = content.ops.take(~is_phase(content.ops.phase, grammar.sharding_phases))
    # An op's place is its stage, or its worker if it has no stage. Equal keys are equal ops.
    is_worker_op = is_phase(ops.phase, grammar.worker_phases)
    place = np.where(is_worker_op, ops.cell // content.num_slots, ops.stage)
    num_places = max(content.num_stages, content.num_workers)
    sizes = len(grammar.phases), num_places, content.num_microbatches
    key = np.ravel_multi_index((ops.phase, place, ops.microbatch), sizes)
    order = np.lexsort((ops.cell, key))  # equal ops are neighbours, in order of their cells
    if fault := _first_true(np.diff(key[order]) == 0):
        (k,) = fault
        (first, first_slot), (worker, slot) = map(content.place, ops.cell[order[k : k + 2]])
        where = f"on worker {first} in slot {first_slot} and on worker {worker} in slot {slot}"
        if first == worker:
            where = f"on worker {worker}: in slots {first_slot} and {slot}"
        fields = ops.phase, ops.stage, ops.microbatch
        phase, stage, microbatch = (int(field[order[k]]) for field in fields)
        text = grammar.text((Op(grammar.phases[phase], stage, microbatch),))
        raise ScheduleError(f"op {text} stands twice {where}", place=(worker, slot))


def check_complete(content: Content) -> None:
    """Check that every microbatch passes every stage, and that every op has its producers."""
    # With custom kinds and no default forward or backward, only the rules decide.
    grammar = content.grammar
    if not grammar.custom_phases or not {*content.used_phases}.isdisjoint((Phase.F, *BACKWARDS)):
        _check_forwards_and_backwards(content)
    for rule in grammar.rules:
        _check_ends(content, rule)
    for rule in grammar.all_rules:
        _check_needed(content, rule)
    if not grammar.is_usual:
        _check_message_stages(content)


def _check_ends(content: Content, rule: Rule) -> None:
    """Check that stages and microbatches of a rule exist, and that it applies to some op."""
    text = f"rule {format_rule(rule, content.grammar.slices)}"
    stages = content.num_stages, "stage", 1  # count, name, and slices of each
    microbatches = content.num_microbatches, "microbatch", content.grammar.slices
    for index, (count, what, parts) in (
        (rule.consumer_stage, stages),
        (rule.producer_stage, stages),
        (rule.consumer_microbatch, microbatches),
        (rule.producer_microbatch, microbatches),
    ):
        if index is not None and index >= count:
            reason = f"{what} {format_number(index, parts)} does not exist: the last is"
            raise ScheduleError(f"{text}: {reason} {format_number(count - 1, parts)}")
    if not len(rule_consumers(content, rule)[0]):
        raise ScheduleError(f"{text}: the table holds no op that waits by it")


def _check_message_stages(content: Content) -> None:
    """Check that messages lead from stage to stage and, in a graph, along the graph's edges."""
    messages, graph = find_dependencies(content).messages(), content.grammar.graph
    edges = {frozenset(edge) for edge in graph}
    ends = np.stack([messages.from_stage, messages.to_stage])
    for source, target in np.unique(ends, axis=1).T.tolist():
        if source == target or (graph and frozenset((source, target)) not in edges):
            cell = messages.consumer[(ends == [[source], [target]]).all(axis=0)][0]
            way = f"within stage {source}" if source == target else f"from stage {source}"
            path = " along edges of the graph" if graph else ""
            why = f"messages lead from stage to stage{path}"
            reason = f"{{op}} on worker {{worker}} waits for one {way}: {why}"
            raise _cell_error(content, cell, reason)


def _check_needed(content: Content, rule: Rule) -> None:
    """Check that ops have the producers that a rule needs, and producers their consumers."""
    used, op_cells = {*content.used_phases}, content.op_cells
    needs_producer = rule.is_needed and rule.consumer in used
    needs_producer &= not (content.grammar.forward_only and rule.consumer in UPDATES)
    needs_consumer = rule.is_answered and not used.isdisjoint(rule.producers)
    if not needs_producer and not needs_consumer:
        return
    producers = np.maximum.reduce([op_cells[phase] for phase in rule.producers])
    if needs_producer and (producers == NOWHERE).any():  # otherwise no producer can be missing
        for waiting in waiting_ops(content, rule):
            is_missing = waiting.has_target & (find_producers(content, rule, waiting) == NOWHERE)
            if fault := _first_true(is_missing):
                (k,) = fault
                stage, microbatch = waiting.producer_stage[k], waiting.microbatch[k]
                op, worker = _op_and_worker(content, rule.producers[0], stage, microbatch)
                why = f"{content.text(waiting.consumer[k])} waits for it"
                raise _missing_error(content, op, worker, why)
    if not needs_consumer:
        return
    if place := _first_true((producers != NOWHERE) & (op_cells[rule.consumer] == NOWHERE)):
        why = f"{content.text(producers[place])} needs it"
        raise _missing_error(content, *_op_and_worker(content, rule.consumer, *place), why)


def _op_and_worker(content: Content, phase: Any, place: Index, microbatch: Index) -> tuple[Op, int]:
    """Return an op and its worker; `place` is its stage, or its worker if it has no stage."""
    # `phase` is a `Phase`, or a `CustomPhase` of the table
    if phase.kind.scope == WORKER:
        return Op(phase, NO_STAGE, int(microbatch)), int(place)
    worker = content.placement[content.pipe_of_microbatch[microbatch], place]
    return Op(phase, int(place), int(microbatch)), int(worker)


def _check_forwards_and_backwards(content: Content) -> None:
    """Check that every microbatch has a forward and some backward on every stage, not two."""
    # `_check_needed` checks that both halves of a split backward are there.
    stages, microbatches = content.num_stages, content.num_microbatches
    forwards = content.ops.take(content.ops.phase == Phase.F)
    # a wrong table may claim huge numbers: count before `content.op_cells` allocates such arrays
    if stages * microbatches > len(forwards.cell):
        present = set(zip(forwards.stage.tolist(), forwards.microbatch.tolist(), strict=True))
        places = ((s, m) for m in range(microbatches) for s in range(stages))
        missing = next(place for place in places if place not in present)
        op, worker = _op_and_worker(content, Phase.F, *missing)
        raise _missing_error(content, op, worker, "there is no forward")
    if content.grammar.forward_only:
        is_backward = is_phase(content.ops.phase, (*BACKWARDS, *UPDATES))
        reason = "op {op} on worker {worker}: the table is forward_only"
        _refuse_cells(content, content.ops.cell[is_backward], reason)
        return
    whole, grad, weight = (content.op_cells[phase] != NOWHERE for phase in BACKWARDS)
    if place := _first_true(~(whole | grad | weight)):
        op, worker = _op_and_worker(content, Phase.B, *place)
        raise _missing_error(content, op, worker, "there is no backward")
    reason = "does the backward twice: it is also split into I and W"
    both_ways = content.op_cells[Phase.B][whole & (grad | weight)]
    _refuse_cells(content, both_ways, f"op {{op}} on worker {{worker}} {reason}", Phase.B)


def check_order(content: Content) -> None:
    """Check that the rows can be executed: no op waits for a later op of its row, or in a cycle."""
    edges, slots = find_dependencies(content), content.num_slots  # between cells
    tail_worker, tail_slot = np.divmod(edges.producer, slots)
    head_worker, head_slot = np.divmod(edges.consumer, slots)
    phase_lanes, phase = content.grammar.phase_lanes, content.cells.phase.ravel()
    is_same_row = tail_worker == head_worker
    if phase_lanes.any():
        is_same_row &= phase_lanes[phase[edges.producer]] == phase_lanes[phase[edges.consumer]]
    if fault := _first_true(is_same_row & (tail_slot >= head_slot)):
        (k,) = fault
        is_pair = tail_slot[k] == head_slot[k]
        order = "is the same fused pair" if is_pair else "stands after it in the row"
        producer = content.text(edges.producer[k])
        reason = f"deadlock: {{op}} on worker {{worker}} waits for {producer}, which {order}"
        raise _cell_error(content, edges.consumer[k], reason)
    tail, head = edges.producer, edges.consumer
    if content.first_cells is None and np.all(tail_slot <= head_slot):
        # ops can run column by column, so a cycle can only be within a column
        within_column = tail_slot == head_slot
        tail, head = tail[within_column], head[within_column]
    else:
        tail, head = cell_edges(content)
    cells, ends = np.unique([tail, head], return_inverse=True)
    tail, head = ends.reshape(2, -1)  # numbered among the cells with edges
    try:
        topological_order(len(cells), tail, head, content.num_workers)
    except CycleError as error:
        cycle = cells[error.cycle].tolist()
        reason = f"deadlock: no op of this cycle can start: {content.text_of_cycle(cycle)}"
        raise ScheduleError(reason, place=content.place(cycle[0])) from None


def check_gathered(content: Content) -> None:
    """Check that weights are gathered when ops need them, with gathers and drops alternating."""
    # a stage on a worker (a copy) that no cell gathers or drops has its weights all the time
    if Phase.UNSHARD not in content.grammar.lane_sharding:
        return
    changes = Phase.UNSHARD, Phase.RESHARD
    ops, last_change = last_before(content, (*content.grammar.compute_phases, *changes), changes)
    phases = np.append(content.cells.phase.ravel(), Phase.RESHARD)  # the last serves `NOWHERE`
    is_gathered = phases[last_change] == Phase.UNSHARD
    copy = ops.cell // content.num_slots * content.num_stages + ops.stage  # a stage on a worker
    is_sharded = np.isin(copy, copy[is_phase(ops.phase, changes)])
    # weights must be absent before a gather, and there before any other op
    must_be_gathered = ops.phase != Phase.UNSHARD
    if fault := _first_true(is_sharded & (is_gathered != must_be_gathered)):
        (k,) = fault
        stage, phase = int(ops.stage[k]), int(ops.phase[k])
        why = {
            int(Phase.UNSHARD): "gathers weights that are there already",
            int(Phase.RESHARD): "drops weights that are not there",
        }.get(phase, f"needs weights, and no {stage}UNSHARD before it has gathered them")
        raise _cell_error(content, ops.cell[k], f"{{op}} on worker {{worker}} {why}")


def check_updates(content: Content) -> None:
    """Check that updates U apply each gradient once, and forwards read versions that exist then."""
    # With several runs, no run may begin a round before all runs have ended the previous round.
    rule, op_cells = content.weights, content.op_cells
    if not len(content.updates):
        if rule != NEWEST:
            raise ScheduleError(f"the weight rule {rule} needs U cells: no cell updates weights")
        return
    # `op_cells[phase]` and the fields of `versions` are (stages, microbatches)
    versions, forward, updates = find_versions(content), op_cells[Phase.F], op_cells[Phase.U]
    if fault := _first_true(versions.update_cell == NOWHERE):
        stage, microbatch = fault
        run = f", run {microbatch % rule.runs}," if rule.runs > 1 else ""
        reason = f"the gradient of {{op}} is never applied: no U of stage {stage}{run}"
        cell = content.backward_end_cells[stage, microbatch]
        raise _cell_error(content, cell, f"{reason} stands after it", *WEIGHT_GRADS)
    reason = "op {op} does not apply the gradient that it is named after"
    repeated = updates[(updates != NOWHERE) & (updates != versions.update_cell)]
    _refuse_cells(content, repeated, f"{reason}: an update before it has done so", Phase.U)
    if fault := _first_true(versions.read > versions.newest):
        stage, microbatch = fault
        reason = (
            f"op {{op}} reads weights with {versions.read[stage, microbatch]} updates, but only "
            f"{versions.newest[stage, microbatch]} stand before it (lag={rule.lag})"
        )
        raise _cell_error(content, forward[stage, microbatch], reason, Phase.F)
    if rule.runs > 1:
        reason = (
            "op {op} begins a round before all runs have ended the one before it: a round is "
            f"{rule.runs} runs of {rule.local_steps} updates, then an average"
        )
        _refuse_cells(content, forward[_has_later_update(content)], reason, Phase.F)


def _has_later_update(content: Content) -> Bool[NumpyArray, "stages microbatches"]:
    """Return for each forward whether its stage's update for an earlier round stands after it."""
    # A round is `round_size` microbatches: with 2 runs of 3 updates, 0 to 5, then 6 to 11.
    forward, update = content.op_cells[Phase.F], content.op_cells[Phase.U]
    rounds = np.arange(content.num_microbatches) // content.weights.round_size
    # last_update[worker, stage, r]: cell of the last update in rounds before r; r + 1 has round r
    last_update = np.full((content.num_workers, content.num_stages, rounds[-1] + 2), NOWHERE)
    stage, microbatch = np.nonzero(update != NOWHERE)
    cell = update[stage, microbatch]
    np.maximum.at(last_update, (cell // content.num_slots, stage, rounds[microbatch] + 1), cell)
    last_update = np.maximum.accumulate(last_update, axis=2)
    worker = forward // content.num_slots
    return forward < last_update[worker, np.arange(content.num_stages)[:, None], rounds]


def check_communication(content: Content) -> None:
    """Check that each message has a SEND after its producer, and a RECV before its use."""
    # tables without any SEND and RECV cells are legal
    is_message = is_phase(content.ops.phase, MESSAGES)
    if not is_message.any():
        return
    if not content.grammar.has_usual_messages:
        reason = "{op} on worker {worker}: tables with custom kinds, rules or slices hold no"
        _refuse_cells(content, content.ops.cell[is_message], f"{reason} SEND and RECV cells")
    is_expected = np.zeros(content.cells.phase.size, bool)
    for producer, consumer, source, target, microbatch, _, direction, _ in zip(
        *(field.tolist() for field in find_dependencies(content).messages()), strict=True
    ):
        phases = MESSAGES[:2] if direction == FORWARD else MESSAGES[2:]
        send, receive = Op(phases[0], source, microbatch), Op(phases[1], target, microbatch)
        is_expected[_message_cell(content, send, producer, is_send=True)] = True
        is_expected[_message_cell(content, receive, consumer, is_send=False)] = True
    cells = content.ops.cell[is_message]
    reason = "op {op} on worker {worker} belongs to no message between workers"
    _refuse_cells(content, cells[~is_expected[cells]], reason)


def _message_cell(content: Content, op: Op, partner: int, *, is_send: bool) -> int:
    """Return the cell of a SEND after `partner`, or of a RECV before it; raise if there is none."""
    # `partner` is the cell of the op that produces the message, or of the one that consumes it.
    cell = int(content.op_cells[op.phase][op.stage, op.microbatch])
    is_before = cell % content.num_slots < partner % content.num_slots
    if cell != NOWHERE and is_before != is_send:
        return cell
    name = content.text(partner)
    if cell == NOWHERE:
        why = f"{name} {'sends' if is_send else 'waits for'} a message"
        raise _cell_error(content, partner, f"missing op {op} on worker {{worker}}: {why}")
    side = f"before {name}, which makes" if is_send else f"after {name}, which waits for"
    reason = f"deadlock: {{op}} on worker {{worker}} stands {side} its message"
    raise _cell_error(content, cell, reason)


def check(content: Content) -> None:
    """Check all rules of legal schedules; raise a `ScheduleError` for the first violation."""
    check_arrays(content)
    check_rows(content)
    check_ranges(content)
    check_workers(content)
    check_once(content)
    check_complete(content)
    check_order(content)
    check_gathered(content)
    check_updates(content)
    check_communication(content)


def check_shares(shares: Sequence[float], num_stages: int) -> None:
    """Check that every stage has a positive share of the layers."""
    if not are_positive(shares, num_stages):
        raise ScheduleError(
            f"stage_shares needs {num_stages} positive numbers, got {abbreviated(shares)}",
            argument="stage_shares",
        )


def check_slots(slots: Slots, grammar: Grammar = USUAL) -> None:
    """Check that slot durations are positive and belong to phases that have one."""
    if not isinstance(slots, Mapping):
        raise ScheduleError(
            f"slots must be durations by phase letter, as {{'F': 1}}, got {slots!r}",
            argument="slots",
        )
    for letter, duration in slots.items():
        if letter not in grammar.unit_slots:
            allowed = ", ".join(grammar.unit_slots)
            raise ScheduleError(f"slots: unknown phase {letter!r}: known are {allowed}")
        if not are_positive([duration], 1):
            raise ScheduleError(f"slots: {letter} must be finite and above 0, got {duration!r}")
