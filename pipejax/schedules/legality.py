"""Rules of legal schedules. A table runs these checks when it is made, in this order.

The arrays of a table fit together, and what they name exists; every op is there once, on the
worker of its stage; the rows can be executed; every gradient is applied, every version of the
weights that is read is there; messages stand between their producer and their use.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Index, NumpyArray
from pipejax.base.checks import are_positive
from pipejax.base.display import abbreviated
from pipejax.base.longest_path import CycleError, topological_order
from pipejax.schedules.cells.cells import NEWEST, NOWHERE, Content
from pipejax.schedules.cells.dependencies import (
    FORWARD,
    consumers_by,
    find_dependencies,
    find_producers,
    find_versions,
    last_before,
    order_of_cells,
    waiting_by,
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
)


def _wrong(content: Content, cell: Index, reason: str, *only: AnyPhase) -> ScheduleError:
    """Return the error of one cell; {op} and {worker} in the reason stand for its own."""
    # Of a fused pair the op that has one of the phases is named, or both.
    worker, slot = place = content.place(cell)
    ops = tuple(op for op in content.cell(worker, slot) if not only or op.phase in only)
    return ScheduleError(reason.format(op=content.grammar.text(ops), worker=worker), place=place)


def _missing(content: Content, op: Op, worker: int, why: str) -> ScheduleError:
    name = content.grammar.text((op,))
    return ScheduleError(f"missing op {name} on worker {worker}: {why}", place=(worker, None))


def check_arrays(content: Content) -> None:
    """The arrays fit together and hold phases and workers that exist."""
    shapes = {array.shape for array in (*content.cells, *content.partners)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ScheduleError(f"the arrays of a table have one shape (workers, slots), got {shapes}")
    placement, workers = content.placement, content.num_workers
    if placement.ndim != 2 or 0 in placement.shape:
        raise ScheduleError(
            f"placement has shape (pipes, stages), got {placement.shape}: no stage is placed"
        )
    for code in content.ops.phase[~np.isin(content.ops.phase, content.grammar.in_cells)]:
        raise ScheduleError(f"{code} is not the code of a phase that a cell can hold")
    for pipe, stage in np.argwhere((placement < 0) | (placement >= workers)):
        raise ScheduleError(
            f"stage {stage} of pipe {pipe} is placed on worker {placement[pipe, stage]}: "
            f"the table has workers 0 to {workers - 1}"
        )


def check_rows(content: Content) -> None:
    """Every worker has an op; only a forward and a backward are fused."""
    phase, partner = content.cells.phase, content.partners.phase
    for worker in np.flatnonzero(~(phase != Phase.IDLE).any(axis=1)):
        raise ScheduleError(
            f"worker {worker} has no op: every worker runs a stage", place=(worker, None)
        )
    is_pair = (phase == Phase.F) & np.isin(partner, INPUT_GRADS)
    for cell in np.flatnonzero((partner != Phase.IDLE) & ~is_pair):
        reason = "{op} on worker {worker} fuses other ops than a forward and a backward"
        raise _wrong(content, cell, reason)


def check_ranges(content: Content) -> None:
    """Stages, microbatches and pipes exist; a microbatch has all its slices, in one pipe."""
    ops, grammar = content.ops, content.grammar
    numbered = ~np.isin(ops.phase, grammar.sharding)
    staged = ~np.isin(ops.phase, grammar.worker_phases)
    for cell in ops.cell[~staged & (ops.stage != NO_STAGE)]:
        raise _wrong(content, cell, "op {op} on worker {worker} has a stage: its kind has none")
    for end in {*sum(grammar.graph, ())} - {*range(content.num_stages)}:
        raise ScheduleError(f"graph: stage {end} is none: stages are 0 to {content.num_stages - 1}")
    for held, values, count, what in (
        (staged, ops.stage, content.num_stages, "has no place: stages"),
        (numbered, ops.microbatch, content.num_microbatches, "has no forward: microbatches"),
        (numbered, ops.pipe, content.num_pipes, "belongs to no pipe: pipes"),
    ):
        for cell in ops.cell[held & ((values < 0) | (values >= count))]:
            where = f"op {{op}} on worker {{worker}} {what} are 0 to {count - 1}"
            raise _wrong(content, cell, where)
    if not content.num_microbatches:
        raise ScheduleError("no op of the table computes a microbatch")
    last, part = divmod(content.num_microbatches, grammar.slices)
    if part:
        raise ScheduleError(f"microbatch {last} has {part} slices of {grammar.slices}")
    slice_pipes = content.pipe_of_microbatch.reshape(-1, grammar.slices)
    for microbatch in np.flatnonzero((slice_pipes != slice_pipes[:, :1]).any(axis=1)):
        raise ScheduleError(f"slices of microbatch {microbatch} are in several pipes")


def check_workers(content: Content) -> None:
    """Every op stands on the worker of its stage, every microbatch keeps to one pipe."""
    sharded = np.isin(content.ops.phase, content.grammar.sharding)
    is_worker_op = np.isin(content.ops.phase, content.grammar.worker_phases)
    ops, sharding = content.ops.take(~sharded & ~is_worker_op), content.ops.take(sharded)
    should = content.placement[ops.pipe, ops.stage]
    for k in np.flatnonzero(should != ops.cell // content.num_slots):
        where = (
            f"op {{op}} stands on worker {{worker}}, but stage {ops.stage[k]} of "
            f"pipe {ops.pipe[k]} is placed on worker {should[k]}"
        )
        raise _wrong(content, ops.cell[k], where)
    ops = content.ops.take(~sharded)
    for k in np.flatnonzero(content.pipe_of_microbatch[ops.microbatch] != ops.pipe):
        raise _wrong(content, ops.cell[k], f"microbatch {ops.microbatch[k]} is in two pipes")
    holds = content.placement[:, sharding.stage] == sharding.cell // content.num_slots
    for cell in sharding.cell[~holds.any(axis=0)]:
        reason = "op {op} stands on worker {worker}, which does not hold that stage"
        raise _wrong(content, cell, reason)


def check_once(content: Content) -> None:
    """No op stands twice."""
    grammar = content.grammar
    ops = content.ops.take(~np.isin(content.ops.phase, grammar.sharding))
    # an op is told by its stage, or by its worker where it is of none
    is_worker_op = np.isin(ops.phase, grammar.worker_phases)
    place = np.where(is_worker_op, ops.cell // content.num_slots, ops.stage)
    places = max(content.num_stages, content.num_workers)
    sizes = len(grammar.phases), places, content.num_microbatches
    key = np.ravel_multi_index((ops.phase, place, ops.microbatch), sizes)
    order = np.lexsort((ops.cell, key))
    for k in np.flatnonzero(np.diff(key[order]) == 0):
        (first, before), (worker, slot) = map(content.place, ops.cell[order[k : k + 2]])
        where = (
            f"on worker {worker}: in slots {before} and {slot}"
            if first == worker
            else f"on worker {first} in slot {before} and on worker {worker} in slot {slot}"
        )
        op = Op(*(field[order[k]] for field in (ops.phase, ops.stage, ops.microbatch)))
        text = grammar.text((op._replace(phase=grammar.phases[op.phase]),))
        raise ScheduleError(f"op {text} stands twice {where}", place=(worker, slot))


def check_complete(content: Content) -> None:
    """Every microbatch meets every stage, and every op has what it waits for."""
    # A table whose forwards or backwards are of kinds of its own says itself what is complete.
    grammar = content.grammar
    if not grammar.own or not {*content.used_phases}.isdisjoint((Phase.F, *BACKWARDS)):
        _check_passes(content)
    for rule in grammar.rules:
        _check_ends(content, rule)
    for rule in grammar.all_rules:
        _check_needed(content, rule)
    if not grammar.is_usual:
        _check_ways(content)


def _check_ends(content: Content, rule: Rule) -> None:
    """Check that the places in a rule exist, and that some op waits by it."""
    slices = content.grammar.slices
    text = f"rule {format_rule(rule, slices)}"
    for numbers, count, what, parts in (
        ((rule.consumer_stage, rule.producer_stage), content.num_stages, "stage", 1),
        (
            (rule.consumer_microbatch, rule.producer_microbatch),
            content.num_microbatches,
            "microbatch",
            slices,
        ),
    ):
        for number in numbers:
            if number is not None and number >= count:
                reason = f"{what} {format_number(number, parts)} is none: the last one is"
                raise ScheduleError(f"{text}: {reason} {format_number(count - 1, parts)}")
    if not len(consumers_by(content, rule)[0]):
        raise ScheduleError(f"{text}: the table holds no op that waits by it")


def _check_ways(content: Content) -> None:
    """Messages lead from stage to stage, along edges of the graph if there is one."""
    sent, graph = find_dependencies(content).messages(), content.grammar.graph
    edges = {frozenset(edge) for edge in graph}
    ends = np.stack([sent.from_stage, sent.to_stage])
    for source, target in np.unique(ends, axis=1).T.tolist():
        if source == target or (graph and frozenset((source, target)) not in edges):
            cell = sent.consumer[(ends == [[source], [target]]).all(axis=0)][0]
            way = f"within stage {source}" if source == target else f"from stage {source}"
            why = "messages lead from stage to stage" + " along edges of the graph" * bool(graph)
            raise _wrong(content, cell, f"{{op}} on worker {{worker}} waits for one {way}: {why}")


def _check_needed(content: Content, rule: Rule) -> None:
    """Check that every op has its producers, and every producer its consumers, by a rule."""
    used, where = {*content.used_phases}, content.where
    waits = rule.is_needed and rule.consumer in used
    waits &= not (content.grammar.forward_only and rule.consumer in UPDATES)
    answers = rule.is_answered and not used.isdisjoint(rule.producers)
    if not waits and not answers:
        return
    producer = np.maximum.reduce([where[phase] for phase in rule.producers])
    if waits and (producer == NOWHERE).any():  # else whatever waits finds one
        for waiting in waiting_by(content, rule):
            inside = (waiting.place != NOWHERE) & (waiting.microbatch != NOWHERE)
            lacking = inside & (find_producers(content, rule, waiting) == NOWHERE)
            for k in np.flatnonzero(lacking):
                at = _op_at(content, rule.producers[0], waiting.place[k], waiting.microbatch[k])
                raise _missing(content, *at, f"{content.text(waiting.consumer[k])} waits for it")
    if answers:
        for place in np.argwhere((producer != NOWHERE) & (where[rule.consumer] == NOWHERE)):
            why = f"{content.text(producer[tuple(place)])} needs it"
            raise _missing(content, *_op_at(content, rule.consumer, *place), why)


def _op_at(content: Content, phase: Phase, place: Index, microbatch: Index) -> tuple[Op, int]:
    if phase.kind.of == WORKER:
        return Op(phase, NO_STAGE, int(microbatch)), int(place)
    worker = content.placement[content.pipe_of_microbatch[microbatch], place]
    return Op(phase, int(place), int(microbatch)), int(worker)


def _check_passes(content: Content) -> None:
    """Every microbatch meets every stage: a forward, and a whole or a split backward."""
    stages, microbatches = content.num_stages, content.num_microbatches
    forwards = content.ops.take(content.ops.phase == Phase.F)
    if stages * microbatches > len(forwards.cell):  # before anything of that size is allocated
        present = set(zip(forwards.stage.tolist(), forwards.microbatch.tolist(), strict=True))
        places = ((s, m) for m in range(microbatches) for s in range(stages))
        first = next(place for place in places if place not in present)
        raise _missing(content, *_op_at(content, Phase.F, *first), "there is no forward")
    if content.grammar.forward_only:
        backwards = np.isin(content.ops.phase, (*BACKWARDS, *UPDATES))
        for cell in content.ops.cell[backwards]:
            raise _wrong(content, cell, "op {op} on worker {worker}: the table is forward_only")
        return
    whole, grad, weight = (content.where[phase] != NOWHERE for phase in BACKWARDS)
    for at in np.argwhere(~(whole | grad | weight)):
        raise _missing(content, *_op_at(content, Phase.B, *at), "there is no backward")
    for cell in content.where[Phase.B][whole & (grad | weight)]:
        twice = "does the backward twice: it is also split into I and W"
        raise _wrong(content, cell, f"op {{op}} on worker {{worker}} {twice}", Phase.B)


def check_order(content: Content) -> None:
    """The rows can be executed: no op waits for a later one of its row, and no cycle."""
    edges, slots = find_dependencies(content), content.num_slots
    tail_worker, tail_slot = np.divmod(edges.producer, slots)
    head_worker, head_slot = np.divmod(edges.consumer, slots)
    lane, phase = content.grammar.lane_of, content.cells.phase.ravel()
    same = tail_worker == head_worker
    if lane.any():
        same &= lane[phase[edges.producer]] == lane[phase[edges.consumer]]
    for k in np.flatnonzero(same & (tail_slot >= head_slot)):
        is_pair = tail_slot[k] == head_slot[k]
        late = "is the same fused pair" if is_pair else "stands after it in the row"
        then = content.text(edges.producer[k])
        reason = f"deadlock: {{op}} on worker {{worker}} waits for {then}, which {late}"
        raise _wrong(content, edges.consumer[k], reason)
    if np.all(tail_slot < head_slot) and content.op_of_cell is None:
        return  # the columns are an order
    try:
        topological_order(content.cells.phase.size, *order_of_cells(content), content.num_workers)
    except CycleError as error:
        reason = f"deadlock: no op of this cycle can start: {content.text_of_cycle(error.cycle)}"
        raise ScheduleError(reason, place=content.place(error.cycle[0])) from None


def check_gathered(content: Content) -> None:
    """Check that weights are gathered when ops need them, and gathered and dropped in turn."""
    # A copy of a stage that no cell gathers or drops has its weights all the time.
    if Phase.UNSHARD not in content.grammar.moved:
        return
    turns = Phase.UNSHARD, Phase.RESHARD
    ops, before = last_before(content, (*content.grammar.compute, *turns), turns)
    is_there = np.append(content.cells.phase.ravel(), Phase.RESHARD)[before] == Phase.UNSHARD
    copy = ops.cell // content.num_slots * content.num_stages + ops.stage
    is_sharded = np.isin(copy, copy[np.isin(ops.phase, turns)])
    gathers = ops.phase == Phase.UNSHARD
    for k in np.flatnonzero(is_sharded & (is_there == gathers)):
        stage, phase = int(ops.stage[k]), int(ops.phase[k])
        why = {
            int(Phase.UNSHARD): "gathers weights that are there already",
            int(Phase.RESHARD): "drops weights that are not there",
        }.get(phase, f"needs weights, and no {stage}UNSHARD before it has gathered them")
        raise _wrong(content, ops.cell[k], f"{{op}} on worker {{worker}} {why}")


def check_updates(content: Content) -> None:
    """U cells apply every gradient once, and forwards read versions that exist."""
    rule, where = content.weights, content.where
    if not len(content.updates):
        if rule != NEWEST:
            raise ScheduleError(
                f"the table has a weight rule, {rule}, but no U cell updates weights"
            )
        return
    versions, forward, updates = find_versions(content), where[Phase.F], where[Phase.U]
    gradient = content.last_of_backward
    for stage, microbatch in np.argwhere(versions.update_cell == NOWHERE):
        run = f", run {microbatch % rule.runs}," if rule.runs > 1 else ""
        reason = f"the gradient of {{op}} is never applied: no U of stage {stage}{run}"
        cell = gradient[stage, microbatch]
        raise _wrong(content, cell, f"{reason} stands after it", *WEIGHT_GRADS)
    for cell in updates[(updates != NOWHERE) & (updates != versions.update_cell)]:
        reason = "op {op} does not apply the gradient that it is named after"
        raise _wrong(content, cell, f"{reason}: an update before it has done so", Phase.U)
    for place in zip(*np.nonzero(versions.read > versions.newest), strict=True):
        reason = (
            f"op {{op}} reads weights with {versions.read[place]} updates, but only "
            f"{versions.newest[place]} stand before it (behind={rule.behind})"
        )
        raise _wrong(content, forward[place], reason, Phase.F)
    for cell in forward[_reads_early(content, versions.newest)]:
        reason = (
            "op {op} begins a round before all runs have ended the one before it: a round is "
            f"{rule.runs} runs of {rule.local_steps} updates, then an average"
        )
        raise _wrong(content, cell, reason, Phase.F)


def _reads_early(content: Content, newest: NumpyArray) -> Bool[NumpyArray, "stages microbatches"]:
    """Return where a forward of a round stands before an update of the rounds before it."""
    if content.weights.runs == 1:
        return np.zeros_like(newest, bool)
    where = content.where
    rounds = np.arange(content.num_microbatches) // content.weights.round_size
    # the last update of a copy of a stage in all rounds before one; a copy is a worker's
    last = np.full((content.num_workers, content.num_stages, rounds[-1] + 2), NOWHERE)
    stage, microbatch = np.nonzero(where[Phase.U] != NOWHERE)
    cell = where[Phase.U][stage, microbatch]
    np.maximum.at(last, (cell // content.num_slots, stage, rounds[microbatch] + 1), cell)
    last = np.maximum.accumulate(last, axis=2)
    worker = where[Phase.F] // content.num_slots
    return where[Phase.F] < last[worker, np.arange(content.num_stages)[:, None], rounds]


def check_communication(content: Content) -> None:
    """Each message between workers has one SEND after its producer, one RECV before its use."""
    is_message = np.isin(content.ops.phase, MESSAGES)
    if not is_message.any():
        return
    if not content.grammar.has_usual_messages:
        cell = content.ops.cell[is_message][0]
        reason = "{op} on worker {worker}: tables with kinds, rules or slices of their own hold no"
        raise _wrong(content, cell, f"{reason} SEND and RECV cells")
    expected = np.zeros(content.cells.phase.size, bool)
    for producer, consumer, source, target, microbatch, _, direction, _ in zip(
        *(field.tolist() for field in find_dependencies(content).messages()), strict=True
    ):
        send, receive = MESSAGES[:2] if direction == FORWARD else MESSAGES[2:]
        expected[_transfer(content, Op(send, source, microbatch), producer, after=True)] = True
        expected[_transfer(content, Op(receive, target, microbatch), consumer, after=False)] = True
    cells = content.ops.cell[is_message]
    for cell in cells[~expected[cells]]:
        reason = "op {op} on worker {worker} belongs to no message between workers"
        raise _wrong(content, cell, reason)


def _transfer(content: Content, op: Op, partner: int, *, after: bool) -> int:
    """Find a SEND, after the op that makes its message, or a RECV, before the op that uses it."""
    cell = int(content.where[op.phase][op.stage, op.microbatch])
    is_before = cell % content.num_slots < partner % content.num_slots
    if cell != NOWHERE and is_before != after:
        return cell
    name = content.text(partner)
    if cell == NOWHERE:
        why = f"{name} {'sends' if after else 'waits for'} a message"
        raise _wrong(content, partner, f"missing op {op} on worker {{worker}}: {why}")
    side = f"before {name}, which makes" if after else f"after {name}, which waits for"
    raise _wrong(content, cell, f"deadlock: {{op}} on worker {{worker}} stands {side} its message")


RULES: tuple[Callable[[Content], None], ...] = (
    check_arrays,
    check_rows,
    check_ranges,
    check_workers,
    check_once,
    check_complete,
    check_order,
    check_gathered,
    check_updates,
    check_communication,
)


def check(content: Content) -> None:
    """Check a schedule completely."""
    for rule in RULES:
        rule(content)


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
            raise ScheduleError(
                f"slots: {letter} must be a finite number above 0, got {duration!r}"
            )
