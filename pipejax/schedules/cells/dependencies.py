"""Dependencies: the edges that the rules of its grammar make in a table.

Two kinds of them: an op waits for another one, and a forward reads the weights of an update.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.schedules.cells.cells import NOWHERE, Content, HeldCells
from pipejax.schedules.cells.grammar import Edge, Rule
from pipejax.schedules.cells.ops import WEIGHT_GRADS, AnyPhase, Phase

FORWARD, BACKWARD = 0, 1  # direction of a message: activation, input gradient


class Dependencies(NamedTuple):
    """Edges between cells of a table; a cell is worker * slots + slot."""

    producer: Int[NumpyArray, " edges"]  # cell that must end first
    consumer: Int[NumpyArray, " edges"]  # cell that waits
    from_stage: Int[NumpyArray, " edges"]  # stage of the producing op
    to_stage: Int[NumpyArray, " edges"]  # stage of the waiting op
    microbatch: Int[NumpyArray, " edges"]  # microbatch of both
    pipe: Int[NumpyArray, " edges"]  # pipe of both
    direction: Int[NumpyArray, " edges"]  # `FORWARD` or `BACKWARD`
    crosses: Bool[NumpyArray, " edges"]  # whether a message leads to another worker

    def messages(self) -> "Dependencies":
        """Return only the edges between different workers."""
        return self.take(self.crosses)

    def take(self, which: NumpyArray) -> "Dependencies":
        """Return some of the edges, chosen by a mask or by their numbers."""
        return Dependencies(*(field[which] for field in self))

    def boundary(self, graph: Sequence[Edge]) -> Int[NumpyArray, " edges"]:
        """Stage boundary that an edge crosses: b lies between stages b and b + 1."""
        # In a graph it is the number of the edge between both stages, whichever way it is gone.
        low = np.minimum(self.from_stage, self.to_stage)
        if not graph:
            return low
        number = {frozenset(edge): k for k, edge in enumerate(graph)}
        ends = zip(self.from_stage.tolist(), self.to_stage.tolist(), strict=True)
        return np.array([number[frozenset(pair)] for pair in ends], int)


@cached_method
def find_dependencies(content: Content) -> Dependencies:
    """Apply the rules of its grammar to every op of a schedule."""
    used, rules = {*content.used_phases}, content.grammar.all_rules
    active_rules = [r for r in rules if r.consumer in used and not used.isdisjoint(r.producers)]
    parts = [part for rule in active_rules or rules[:1] for part in _rule_edges(content, rule)]
    parts += [_edges_of_stages(content, *rule) for rule in content.grammar.stage_rules]
    edges = Dependencies(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    if not content.grammar.rules:
        return edges
    first = np.unique(np.stack(edges), axis=1, return_index=True)[1]  # two rules may say the same
    return edges.take(np.sort(first))


class Waiting(NamedTuple):
    """Ops that wait by a rule, and the place and microbatch of what one of them waits for."""

    consumer: Int[NumpyArray, " ops"]  # cell that waits
    to_stage: Int[NumpyArray, " ops"]  # its stage, or worker where it is of none
    place: Int[NumpyArray, " ops"]  # stage, or worker, of the producer; -1 where there is none
    microbatch: Int[NumpyArray, " ops"]  # microbatch of the producer; -1 likewise


def consumers_by(content: Content, rule: Rule) -> tuple[NumpyArray, NumpyArray]:
    """Places and microbatches (ops) of what waits by a rule."""
    place, microbatch = np.nonzero(content.where[rule.consumer] != NOWHERE)
    if rule.consumer_stage is not None:
        only = place == rule.consumer_stage % content.num_stages
        place, microbatch = place[only], microbatch[only]
    if rule.consumer_microbatch is not None:
        only = microbatch == rule.consumer_microbatch
        place, microbatch = place[only], microbatch[only]
    return place, microbatch


def waiting_by(content: Content, rule: Rule) -> Iterator[Waiting]:
    """List what waits by a rule, once for every stage and microbatch that it may wait for."""
    place, microbatch = consumers_by(content, rule)
    consumer = content.where[rule.consumer][place, microbatch]
    for source in _places(content, rule, place, consumer):
        for producer_microbatch in _microbatches(content, rule, microbatch):
            yield Waiting(consumer, place, source, producer_microbatch)


def _places(
    content: Content, rule: Rule, place: NumpyArray, consumer: NumpyArray
) -> Iterator[NumpyArray]:
    """Places (ops) that the producers of some ops may have; -1 where an op has none there."""
    num_stages = content.num_stages
    if rule.producers[0] in content.grammar.worker_phases:
        yield consumer // content.num_slots
    elif rule.producer_stage is not None:
        yield np.full_like(place, rule.producer_stage % num_stages)
    elif rule.stage_offset and content.grammar.graph:
        ends = np.array(content.grammar.graph)[:, :: -rule.stage_offset]  # producer, consumer
        by_stage = [ends[ends[:, 1] == stage, 0] for stage in range(num_stages)]
        for k in range(max(map(len, by_stage))):
            kth = np.array([sources[k] if k < len(sources) else NOWHERE for sources in by_stage])
            yield kth[place]
    else:
        source = place + rule.stage_offset
        yield np.where((source >= 0) & (source < num_stages), source, NOWHERE)


def _microbatches(content: Content, rule: Rule, microbatch: NumpyArray) -> Iterator[NumpyArray]:
    """Microbatches (ops) that the producers of some ops may have; -1 where an op has none."""
    if rule.waits_for_all:
        for number in range(content.num_microbatches):
            yield np.full_like(microbatch, number)
    elif rule.producer_microbatch is not None:
        yield np.full_like(microbatch, rule.producer_microbatch)
    elif rule.slice_offset:
        # slice k of microbatch m has the number m K + k: its neighbours are within the same m
        part = microbatch % content.grammar.slices + rule.slice_offset
        inside = (part >= 0) & (part < content.grammar.slices)
        yield np.where(inside, microbatch + rule.slice_offset, NOWHERE)
    else:
        yield microbatch


def find_producers(content: Content, rule: Rule, waiting: Waiting) -> Int[NumpyArray, " ops"]:
    """Cell (ops) of the producer of each waiting op, or `NOWHERE`."""
    inside = (waiting.place != NOWHERE) & (waiting.microbatch != NOWHERE)
    cells = np.full_like(waiting.consumer, NOWHERE)
    at = waiting.place[inside], waiting.microbatch[inside]
    for phase in rule.producers:
        cells[inside] = np.maximum(cells[inside], content.where[phase][at])
    return cells


def _rule_edges(content: Content, rule: Rule) -> Iterator[tuple[NumpyArray, ...]]:
    """The fields of `Dependencies` for what waits by a rule."""
    for waiting in waiting_by(content, rule):
        producer = find_producers(content, rule, waiting)
        there = producer != NOWHERE
        producer, waiting = producer[there], Waiting(*(field[there] for field in waiting))
        crosses = producer // content.num_slots != waiting.consumer // content.num_slots
        yield (
            producer,
            waiting.consumer,
            waiting.place,
            waiting.to_stage,
            waiting.microbatch,
            content.pipe_of_microbatch[waiting.microbatch],
            _directions(waiting, content.grammar.graph),
            crosses & rule.sends,
        )


def _edges_of_stages(
    content: Content, consumers: Sequence[AnyPhase], producer: Phase
) -> tuple[NumpyArray, ...]:
    """The fields of `Dependencies` for ops that wait for the last op of their stage before them."""
    ops, before = last_before(content, consumers, (producer,))
    there = before != NOWHERE
    ops, before = ops.take(there), before[there]
    stage, none = ops.stage, np.zeros(len(before), int)
    return before, ops.cell, stage, stage, ops.microbatch, ops.pipe, none, none.astype(bool)


def last_before(
    content: Content, consumers: Sequence[AnyPhase], producers: Sequence[AnyPhase]
) -> tuple[HeldCells, Int[NumpyArray, " ops"]]:
    """Find the last op of some phases before each op of others, of its stage and in its row."""
    ops = content.ops.take(np.isin(content.ops.phase, [*consumers, *producers]))
    copy = ops.cell // content.num_slots * content.num_stages + ops.stage
    order = np.lexsort((ops.cell, copy))
    ops, copy = ops.take(order), copy[order]
    last_producer = np.where(np.isin(ops.phase, producers), np.arange(len(copy)), NOWHERE)
    last_producer = np.maximum.accumulate(np.append(NOWHERE, last_producer))[
        :-1
    ]  # the one before, not itself
    before = np.where(
        last_producer >= np.searchsorted(copy, copy), ops.cell[last_producer], NOWHERE
    )
    waits = np.isin(ops.phase, consumers)
    return ops.take(waits), before[waits]


def _directions(waiting: Waiting, graph: Sequence[Edge]) -> Int[NumpyArray, " edges"]:
    """Direction of each edge (edges): `FORWARD` along the graph, or to a stage of higher number."""
    directions = np.where(waiting.place > waiting.to_stage, BACKWARD, FORWARD)
    for source, target in graph:
        for direction, ends in ((FORWARD, (source, target)), (BACKWARD, (target, source))):
            directions[(waiting.place == ends[0]) & (waiting.to_stage == ends[1])] = direction
    return directions


def order_of_cells(
    content: Content, cells: Int[NumpyArray, " some"] | None = None
) -> tuple[Int[NumpyArray, " edges"], Int[NumpyArray, " edges"]]:
    """Return what cells wait for where messages take no time: edges (edges) from and to cells."""
    # Each of the given cells, or of all that hold an op, waits for the one before it in its row, or
    # on its lane beside it. What workers do together stands where its first cell does.
    edges, grammar = find_dependencies(content), content.grammar
    held = np.flatnonzero(content.cells.phase) if cells is None else cells  # row by row
    worker, more = held // content.num_slots, np.zeros((2, 0), int)
    if not grammar.is_usual:
        # rows and lanes beside them are queues, and so are host links, whose ops are issued behind
        # the cell before them in the row, as usual kinds on lanes are: (worker, lane) as one number
        phase, lanes = content.cells.phase.ravel()[held], len(grammar.beside) + 2
        lane = np.where(np.isin(phase, grammar.host), lanes - 1, grammar.lane_of[phase])
        is_issued = (lane == lanes - 1) | np.isin(phase, grammar.moved)
        rows, issued = np.flatnonzero(lane == 0), np.flatnonzero(is_issued)
        before = np.searchsorted(rows, issued) - 1
        follows = (before >= 0) & (worker[rows[before]] == worker[issued])
        more = np.stack([held[rows[before[follows]]], held[issued[follows]]])
        order = np.argsort(worker * lanes + lane, kind="stable")
        held, worker = held[order], (worker * lanes + lane)[order]
    same = worker[1:] == worker[:-1]
    tail = np.concatenate([held[:-1][same], more[0], edges.producer])
    head = np.concatenate([held[1:][same], more[1], edges.consumer])
    merged = content.op_of_cell
    return (tail, head) if merged is None else (merged[tail], merged[head])


# Which updates of a stage every microbatch sees, and which update applies its gradient.
#
# Updates of a stage are numbered for each copy of the stage and each run; version v of its weights
# holds the updates before number v. Row order alone decides them: a stage's forwards, gradients and
# updates all stand in the row of one worker.

NO_VERSION = -1  # version or update of a microbatch that has none


class Versions(NamedTuple):
    """Versions of the weights by stage and microbatch."""

    newest: Int[NumpyArray, "stages microbatches"]  # version that is newest when the forward runs
    read: Int[NumpyArray, "stages microbatches"]  # that the forward and the backward read
    # update that applies the gradient; the number of updates if none does
    applied: Int[NumpyArray, "stages microbatches"]
    updates: Int[NumpyArray, "stages microbatches"]  # of its copy and run
    update_cell: Int[NumpyArray, "stages microbatches"]  # cell of that update, or `NOWHERE`


@cached_method
def find_versions(content: Content) -> Versions:
    """Number the updates of every stage, and find which of them each microbatch sees."""
    group, events = _events(content)
    is_update = events.phase == Phase.U
    group = np.cumsum(np.diff(group, prepend=-1) != 0) - 1
    size = np.bincount(group, weights=is_update).astype(np.int64)
    # Events stand group by group (a copy of a stage and a run), in row order. So the updates before
    # an event in its own group are those before it in all, less the updates of earlier groups.
    before = np.cumsum(is_update) - is_update  # in all groups
    seen = before - (np.cumsum(size) - size)[group]

    def by_microbatch(which: NumpyArray, values: NumpyArray) -> NumpyArray:
        """Lay values of some events out by stage and microbatch."""
        laid = np.full((content.num_stages, content.num_microbatches), NO_VERSION)
        laid[events.stage[which], events.microbatch[which]] = values[which]
        return laid

    newest = by_microbatch(events.phase == Phase.F, seen)
    gradient = np.isin(events.phase, WEIGHT_GRADS)
    applied, updates = by_microbatch(gradient, seen), by_microbatch(gradient, size[group])
    cells = np.append(events.cell[is_update], NOWHERE)
    nth = by_microbatch(gradient, before)  # in all groups: the update that comes next
    update_cell = cells[np.where(applied < updates, nth, -1)]
    delay = content.weights.behind
    read = newest if delay is None else np.maximum(applied - delay, 0)
    return Versions(newest, read, applied, updates, update_cell)


@cached_method
def versions_held(content: Content) -> Int[NumpyArray, "workers stages"]:
    """Count the versions of the weights that each copy of a stage holds at once, at most."""
    # A version is held from the update that makes it until the last backward that reads it has run
    # and a newer one is there; an update writes in place where nothing reads the old one any more.
    (copy_and_run, events), versions = _events(content), find_versions(content)
    slot = events.cell % content.num_slots
    is_update, is_gradient = events.phase == Phase.U, np.isin(events.phase, WEIGHT_GRADS)
    # All versions of all groups stand in one array, a group's versions side by side: version 0,
    # which is there from the start, then one for each of its updates. `creation` is the slot of the
    # update that makes a version, `unread` the slot behind which nothing needs it any more: the
    # later of the update that replaces it and the last backward that reads it.
    groups, group = np.unique(copy_and_run, return_inverse=True)
    updates = np.bincount(group, weights=is_update, minlength=len(groups)).astype(np.int64)
    first = np.cumsum(updates + 1) - (updates + 1)  # version 0 of each group, among all versions
    creation = np.full(len(groups) + updates.sum(), -1)
    is_first = np.isin(np.arange(len(creation)), first)
    creation[~is_first] = slot[is_update]
    unread = np.append(creation[1:], content.num_slots)
    unread[first[1:] - 1] = content.num_slots  # the newest of a group stays
    stage, microbatch = events.stage[is_gradient], events.microbatch[is_gradient]
    reads = first[group[is_gradient]] + versions.read[stage, microbatch]
    np.maximum.at(unread, reads, slot[is_gradient] + 1)
    # Counting what is held is then a sweep over moments: +1 when a version is made, -1 when it
    # goes. All copies are swept at once, for each has a range of moments of its own, and every
    # copy's changes add up to 0, so one running sum serves all.
    copy = np.repeat(groups // content.weights.runs, updates + 1)
    # at one moment the versions that go are counted before those that come
    moments = content.num_slots + 2
    moment = np.concatenate([copy * moments + unread + 1, copy * moments + creation + 1])
    change = np.repeat([-1, 1], len(copy))
    order = np.argsort(moment, kind="stable")
    held = np.zeros(content.num_workers * content.num_stages, np.int64)
    np.maximum.at(held, moment[order] // moments, np.cumsum(change[order]))
    by_copy = held.reshape(content.num_workers, content.num_stages)
    if not content.grammar.own:
        return by_copy
    # ops of a table's own kinds read weights too, of which there is one version
    workers = np.arange(content.num_workers)[:, None, None]
    return np.maximum(by_copy, (content.placement == workers).any(axis=1))


def _events(content: Content) -> tuple[NumpyArray, HeldCells]:
    """Copy of a stage and run of forwards, gradients and updates, and these in row order."""
    ops = content.ops.take(np.isin(content.ops.phase, (Phase.F, *WEIGHT_GRADS, Phase.U)))
    runs, (worker, slot) = content.weights.runs, np.divmod(ops.cell, content.num_slots)
    group = (worker * content.num_stages + ops.stage) * runs + ops.microbatch % runs
    order = np.argsort(group * content.num_slots + slot, kind="stable")
    return group[order], ops.take(order)
