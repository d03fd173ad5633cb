"""Dependencies of a table: edges between its cells, derived from the rules of its grammar.

An edge has one of two meanings: an op waits for another, or a forward reads updated weights.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.schedules.cells.cells import NOWHERE, Content, TableOps
from pipejax.schedules.cells.grammar import Edge, Rule
from pipejax.schedules.cells.ops import WEIGHT_GRADS, AnyPhase, Phase, is_phase

FORWARD, BACKWARD = 0, 1  # direction of a message: activation, input gradient


class Dependencies(NamedTuple):
    """Edges between cells of a table, where a cell is numbered worker * slots + slot."""

    producer: Int[NumpyArray, " edges"]  # cell for which the consumer waits
    consumer: Int[NumpyArray, " edges"]  # cell that waits
    from_stage: Int[NumpyArray, " edges"]  # stage of the producing op
    to_stage: Int[NumpyArray, " edges"]  # stage of the waiting op
    microbatch: Int[NumpyArray, " edges"]  # microbatch of both ops
    pipe: Int[NumpyArray, " edges"]  # pipe of both ops
    direction: Int[NumpyArray, " edges"]  # `FORWARD` or `BACKWARD`
    crosses: Bool[NumpyArray, " edges"]  # whether a message leads to another worker

    def messages(self) -> "Dependencies":
        """Return only the edges between different workers."""
        return self.take(self.crosses)

    def take(self, which: NumpyArray) -> "Dependencies":
        """Return the edges that a mask or an array of indices selects."""
        return Dependencies(*(field[which] for field in self))

    def boundary(self, graph: Sequence[Edge]) -> Int[NumpyArray, " edges"]:
        """Return the stage boundary that each edge crosses: b lies between stages b and b + 1."""
        # In a graph of stages, the boundary is the index of the graph's edge between both stages.
        if not graph:
            return np.minimum(self.from_stage, self.to_stage)
        indices = {frozenset(edge): index for index, edge in enumerate(graph)}
        ends = zip(self.from_stage.tolist(), self.to_stage.tolist(), strict=True)
        return np.array([indices[frozenset(pair)] for pair in ends], int)


@cached_method
def find_dependencies(content: Content) -> Dependencies:
    """Return the edges between a table's ops that follow from the rules of its grammar."""
    used, rules = {*content.used_phases}, content.grammar.all_rules
    active_rules = [r for r in rules if r.consumer in used and not used.isdisjoint(r.producers)]
    # one rule at least, so that there are arrays to concatenate
    parts = [part for rule in active_rules or rules[:1] for part in _rule_edges(content, rule)]
    stage_rules = content.grammar.stage_rules  # (phases that wait, phase of the producer)
    parts += [_stage_edges(content, phases, producer) for phases, producer in stage_rules]
    edges = Dependencies(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    if not content.grammar.rules:
        return edges
    # a custom rule may repeat an edge: keep the first
    indices = np.unique(np.stack(edges), axis=1, return_index=True)[1]
    return edges.take(np.sort(indices))


class Waiting(NamedTuple):
    """Ops that wait by a rule, each with stage and microbatch of one of its producers."""

    # An op of a worker, which has no stage, has its worker in place of a stage.

    consumer: Int[NumpyArray, " ops"]  # cell that waits
    consumer_stage: Int[NumpyArray, " ops"]  # stage of the waiting op
    producer_stage: Int[NumpyArray, " ops"]  # stage of the producer; -1 if there is none
    microbatch: Int[NumpyArray, " ops"]  # microbatch of the producer; -1 if there is none

    @property
    def has_target(self) -> Bool[NumpyArray, " ops"]:
        """Return for each op whether the producer by the rule lies inside the table."""
        return (self.producer_stage != NOWHERE) & (self.microbatch != NOWHERE)


def rule_consumers(content: Content, rule: Rule) -> tuple[NumpyArray, NumpyArray]:
    """Return the stage and the microbatch of each op that waits by a rule."""
    stages, microbatches = np.nonzero(content.op_cells[rule.consumer] != NOWHERE)
    is_consumer = np.ones(len(stages), bool)
    if rule.consumer_stage is not None:
        is_consumer &= stages == rule.consumer_stage % content.num_stages
    if rule.consumer_microbatch is not None:
        is_consumer &= microbatches == rule.consumer_microbatch
    return stages[is_consumer], microbatches[is_consumer]


def waiting_ops(content: Content, rule: Rule) -> Iterator[Waiting]:
    """Yield the ops that wait by a rule, once for each producer stage and microbatch."""
    stages, microbatches = rule_consumers(content, rule)
    consumers = content.op_cells[rule.consumer][stages, microbatches]
    for producer_stages in _producer_stages(content, rule, stages, consumers):
        for producer_microbatches in _producer_microbatches(content, rule, microbatches):
            yield Waiting(consumers, stages, producer_stages, producer_microbatches)


def _producer_stages(
    content: Content, rule: Rule, stages: NumpyArray, consumers: NumpyArray
) -> Iterator[NumpyArray]:
    """Yield the producer's stage of each waiting op, or -1; in a graph once per source stage."""
    # `stages` and `consumers` are stages and cells of the waiting ops.
    num_stages = content.num_stages
    if rule.producers[0] in content.grammar.worker_phases:
        yield consumers // content.num_slots  # workers: the phase has one op per worker, not stage
    elif rule.producer_stage is not None:
        yield np.full_like(stages, rule.producer_stage % num_stages)
    elif rule.stage_offset and content.grammar.graph:
        # yield source number k of every stage: with edges (0, 2), (1, 2) stage 2 has sources 0, 1
        # (producer, consumer) of each edge: the offset +1 reverses the edges
        ends = np.array(content.grammar.graph)[:, :: -rule.stage_offset]
        sources = [ends[ends[:, 1] == stage, 0] for stage in range(num_stages)]
        for k in range(max(map(len, sources))):
            yield np.array([row[k] if k < len(row) else NOWHERE for row in sources])[stages]
    else:
        producer_stages = stages + rule.stage_offset
        is_inside = (producer_stages >= 0) & (producer_stages < num_stages)
        yield np.where(is_inside, producer_stages, NOWHERE)


def _producer_microbatches(
    content: Content, rule: Rule, microbatches: NumpyArray
) -> Iterator[NumpyArray]:
    """Yield the producer's microbatch of each waiting op, or -1; for (all) once per microbatch."""
    if rule.waits_for_all:
        for microbatch in range(content.num_microbatches):
            yield np.full_like(microbatches, microbatch)
    elif rule.producer_microbatch is not None:
        yield np.full_like(microbatches, rule.producer_microbatch)
    elif rule.slice_offset:
        # slice k of microbatch m has the number m K + k: its neighbours are within the same m
        producer_slices = microbatches % content.grammar.slices + rule.slice_offset
        is_inside = (producer_slices >= 0) & (producer_slices < content.grammar.slices)
        yield np.where(is_inside, microbatches + rule.slice_offset, NOWHERE)
    else:
        yield microbatches


def find_producers(content: Content, rule: Rule, waiting: Waiting) -> Int[NumpyArray, " ops"]:
    """Return the cell of each waiting op's producer, or `NOWHERE`."""
    has_target = waiting.has_target
    cells = np.full_like(waiting.consumer, NOWHERE)
    targets = waiting.producer_stage[has_target], waiting.microbatch[has_target]
    for phase in rule.producers:  # the table holds at most one of these phases
        cells[has_target] = np.maximum(cells[has_target], content.op_cells[phase][targets])
    return cells


def _rule_edges(content: Content, rule: Rule) -> Iterator[Dependencies]:
    """Yield the edges to ops that wait by a rule, in parts."""
    for waiting in waiting_ops(content, rule):
        producer = find_producers(content, rule, waiting)
        exists = producer != NOWHERE
        producer, waiting = producer[exists], Waiting(*(field[exists] for field in waiting))
        crosses = producer // content.num_slots != waiting.consumer // content.num_slots
        yield Dependencies(
            producer=producer,
            consumer=waiting.consumer,
            from_stage=waiting.producer_stage,
            to_stage=waiting.consumer_stage,
            microbatch=waiting.microbatch,
            pipe=content.pipe_of_microbatch[waiting.microbatch],
            direction=_directions(waiting, content.grammar.graph),
            crosses=crosses & rule.sends,
        )


def _stage_edges(content: Content, consumers: Sequence[AnyPhase], producer: Phase) -> Dependencies:
    """Return edges to consumers from the last producer of their stage before them in the row."""
    ops, producers = last_before(content, consumers, (producer,))
    exists = producers != NOWHERE
    ops, producers = ops.take(exists), producers[exists]
    places = ops.stage, ops.stage, ops.microbatch, ops.pipe
    direction = np.full_like(producers, FORWARD)
    return Dependencies(producers, ops.cell, *places, direction, np.zeros_like(direction, bool))


def last_before(
    content: Content, consumers: Sequence[AnyPhase], producers: Sequence[AnyPhase]
) -> tuple[TableOps, Int[NumpyArray, " ops"]]:
    """Find the last producer before each consumer, of the same stage in the same row."""
    # Return (ops of the phases `consumers`, cell of each op's producer or `NOWHERE`). A copy is a
    # stage on one worker: with two pipes, a stage has two copies.
    ops = content.ops.take(is_phase(content.ops.phase, [*consumers, *producers]))
    copy = ops.cell // content.num_slots * content.num_stages + ops.stage
    order = np.lexsort((ops.cell, copy))  # copy by copy, in row order
    ops, copy = ops.take(order), copy[order]
    # index of the last producer before each op: of U F U B it is -1 0 0 2, over all copies
    indices = np.where(is_phase(ops.phase, producers), np.arange(len(copy)), NOWHERE)
    last_producer = np.maximum.accumulate(np.append(NOWHERE, indices))[:-1]
    is_same_copy = last_producer >= np.searchsorted(copy, copy)  # index of the copy's first op
    cells = np.where(is_same_copy, ops.cell[last_producer], NOWHERE)
    is_consumer = is_phase(ops.phase, consumers)
    return ops.take(is_consumer), cells[is_consumer]


def _directions(waiting: Waiting, graph: Sequence[Edge]) -> Int[NumpyArray, " edges"]:
    """Return each edge's direction; `FORWARD` is along the graph, or to a later stage."""
    source, target = waiting.producer_stage, waiting.consumer_stage
    directions = np.where(source > target, BACKWARD, FORWARD)
    for first, second in graph:
        directions[(source == first) & (target == second)] = FORWARD
        directions[(source == second) & (target == first)] = BACKWARD
    return directions


def cell_edges(
    content: Content, cells: Int[NumpyArray, " cells"] | None = None
) -> tuple[Int[NumpyArray, " edges"], Int[NumpyArray, " edges"]]:
    """Return (awaited cells, waiting cells): the edges between cells, without messages."""
    # Each of `cells`, by default every cell with an op, waits for its dependencies and for the cell
    # before it in its queue: its row, or its lane beside compute. The row F UNSHARD F UNSHARD with
    # UNSHARD on a lane has the queues F F and UNSHARD UNSHARD, and each F issues the UNSHARD after
    # it. A collective is represented by its first cell.
    edges, grammar = find_dependencies(content), content.grammar
    cells = np.flatnonzero(content.cells.phase) if cells is None else cells  # row by row
    queue, issue_edges = cells // content.num_slots, np.zeros((2, 0), int)
    if not grammar.is_usual:
        # Lane 0 is the row, the last lane the host link. The row issues ops of the host link and
        # sharding on lanes: each waits for the last cell of lane 0 before it.
        phase, num_lanes = content.cells.phase.ravel()[cells], len(grammar.side_lanes) + 2
        is_host_op = is_phase(phase, grammar.host_phases)
        lane = np.where(is_host_op, num_lanes - 1, grammar.phase_lanes[phase])
        is_issued = is_host_op | is_phase(phase, grammar.lane_sharding)
        rows, issued = np.flatnonzero(lane == 0), np.flatnonzero(is_issued)
        previous = rows[np.searchsorted(rows, issued) - 1]  # wraps round for the first cells
        is_same_row = (previous < issued) & (queue[previous] == queue[issued])
        issue_edges = np.stack([cells[previous[is_same_row]], cells[issued[is_same_row]]])
        queue = queue * num_lanes + lane  # each lane of each worker is a queue
        order = np.argsort(queue, kind="stable")
        cells, queue = cells[order], queue[order]
    is_same_queue = queue[1:] == queue[:-1]
    tail = np.concatenate([cells[:-1][is_same_queue], issue_edges[0], edges.producer])
    head = np.concatenate([cells[1:][is_same_queue], issue_edges[1], edges.consumer])
    first_cells = content.first_cells
    return (tail, head) if first_cells is None else (first_cells[tail], first_cells[head])


# Updates are numbered for each copy of a stage and each run; version v of its weights holds the
# updates before number v. Row order alone decides the versions.

NO_VERSION = -1  # version or update of a microbatch that has none


class Versions(NamedTuple):
    """Versions of the weights that each microbatch reads and updates on each stage."""

    newest: Int[NumpyArray, "stages microbatches"]  # newest version when the forward runs
    read: Int[NumpyArray, "stages microbatches"]  # version that forward and backward read
    # update that applies the gradient; the number of updates if none does
    applied: Int[NumpyArray, "stages microbatches"]
    updates: Int[NumpyArray, "stages microbatches"]  # number of updates of its copy and run
    update_cell: Int[NumpyArray, "stages microbatches"]  # cell of that update, or `NOWHERE`


@cached_method
def find_versions(content: Content) -> Versions:
    """Return the versions (numbers of updates) that each microbatch reads and updates, by stage."""
    group, events = _weight_events(content)
    is_update, is_gradient = events.phase == Phase.U, is_phase(events.phase, WEIGHT_GRADS)
    group = np.cumsum(np.diff(group, prepend=-1) != 0) - 1  # 3 3 5 5 5 becomes 0 0 1 1 1
    group_updates = np.bincount(group, weights=is_update).astype(np.int64)
    # Events are sorted by group (a copy of a stage and a run), then by slot. The version at an
    # event is the number of updates before it in its group.
    #     group 0 with F U B U, group 1 with F B: updates before 0 0 1 1 2 2, versions 0 0 1 1 0 0
    updates_before = np.cumsum(is_update) - is_update
    version = updates_before - (np.cumsum(group_updates) - group_updates)[group]

    def as_grid(selected: NumpyArray, values: NumpyArray) -> NumpyArray:
        """Return the values of the selected events as (stages, microbatches)."""
        grid = np.full((content.num_stages, content.num_microbatches), NO_VERSION)
        grid[events.stage[selected], events.microbatch[selected]] = values[selected]
        return grid

    newest = as_grid(events.phase == Phase.F, version)
    applied, updates = as_grid(is_gradient, version), as_grid(is_gradient, group_updates[group])
    cells = np.append(events.cell[is_update], NOWHERE)
    next_update = as_grid(is_gradient, updates_before)  # index among all updates
    update_cell = cells[np.where(applied < updates, next_update, -1)]
    lag = content.weights.lag
    read = newest if lag is None else np.maximum(applied - lag, 0)
    return Versions(newest, read, applied, updates, update_cell)


@cached_method
def versions_held(content: Content) -> Int[NumpyArray, "workers stages"]:
    """Return the largest number of weight versions of a stage on a worker (workers, stages)."""
    # A version is held from the update that makes it until a newer one exists and its last backward
    # has run; an update writes in place if no later backward reads the old version.
    (copy_and_run, events), versions = _weight_events(content), find_versions(content)
    slot = events.cell % content.num_slots
    is_update, is_gradient = events.phase == Phase.U, is_phase(events.phase, WEIGHT_GRADS)
    # One array holds the versions of all groups, group by group: version 0, which exists from the
    # start, then one for each update. `creation` is the slot of the update that makes a version;
    # `end` is the slot of the update that replaces it, or one after its last backward if later.
    #     group 0: U in slots 3 and 7, last backwards in slots 5, 6 and 9:
    #     creation -1 3 7, end 6 7 num_slots
    groups, group = np.unique(copy_and_run, return_inverse=True)
    updates = np.bincount(group, weights=is_update, minlength=len(groups)).astype(np.int64)
    first = np.cumsum(updates + 1) - (updates + 1)  # index of version 0 of each group
    creation = np.full(len(groups) + updates.sum(), -1)
    is_first = np.isin(np.arange(len(creation)), first)
    creation[~is_first] = slot[is_update]
    end = np.append(creation[1:], content.num_slots)
    end[first[1:] - 1] = content.num_slots  # the newest version of a group stays
    stage, microbatch = events.stage[is_gradient], events.microbatch[is_gradient]
    reads = first[group[is_gradient]] + versions.read[stage, microbatch]
    np.maximum.at(end, reads, slot[is_gradient] + 1)
    # Count held versions over time: +1 at a creation, -1 at an end, ends first at equal times. Each
    # copy has its own range of times, and its changes add up to 0: one running sum serves all.
    copy = np.repeat(groups // content.weights.runs, updates + 1)
    times_per_copy = content.num_slots + 2
    time = np.concatenate([end, creation]) + 1 + np.tile(copy, 2) * times_per_copy
    change = np.repeat([-1, 1], len(copy))
    order = np.argsort(time, kind="stable")
    held = np.zeros(content.num_workers * content.num_stages, np.int64)
    np.maximum.at(held, time[order] // times_per_copy, np.cumsum(change[order]))
    held_versions = held.reshape(content.num_workers, content.num_stages)
    if not content.grammar.custom_phases:
        return held_versions
    # custom ops read weights too, of one version
    workers = np.arange(content.num_workers)[:, None, None]
    return np.maximum(held_versions, (content.placement == workers).any(axis=1))


def _weight_events(content: Content) -> tuple[NumpyArray, TableOps]:
    """Return group numbers and ops (forwards, gradients and updates), sorted by group and slot."""
    # a group is a copy of a stage and a run: (worker * stages + stage) * runs + run
    ops = content.ops.take(is_phase(content.ops.phase, (Phase.F, *WEIGHT_GRADS, Phase.U)))
    runs, (worker, slot) = content.weights.runs, np.divmod(ops.cell, content.num_slots)
    group = (worker * content.num_stages + ops.stage) * runs + ops.microbatch % runs
    order = np.argsort(group * content.num_slots + slot, kind="stable")
    return group[order], ops.take(order)
