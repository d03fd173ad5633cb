"""Graph of a step of a whole job: pipelines side by side, and the slices around them.

The ops and messages of each replica are its table's program, as the engine lowers it for a link
model. What else a worker runs stands in its row where it ran: collectives end together, as long
after their last member has come as they take.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.longest_path import lay_out_edges, run_in_place, topological_order
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import LINK_COSTS, SOURCE, Program
from pipejax.schedules.cells.ops import MESSAGES as TRANSFERS
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.traces.readers.parts import collective_scope
from pipejax.traces.record import MESSAGES, NONE, OPS, Trace
from pipejax.traces.replaying.pipelines import (
    CellCount,
    CellSlices,
    Pipeline,
    Pipelines,
    cell_slices,
)

Nodes = Int[NumpyArray, " nodes"]
Row = Int[NumpyArray, " _"]  # nodes of a worker's row
Times = Float[NumpyArray, "runs nodes"]


class Rest(NamedTuple):
    """A slice that is no op of a table, at the same place in every step."""

    phase: str  # its name
    occurrence: int  # which of this phase it is on its worker, from 0
    replica: int  # position of its replica
    worker: int
    after: CellCount  # how many cells of the worker's row stand before it
    is_beside: bool  # whether it runs beside ops, and blocks only what follows it among its kind
    group: int  # number of those that end together; -1 of one that ends alone


class StepGraph(NamedTuple):
    """A step, or some pipelines of it, as a graph."""

    preds: Int[NumpyArray, "nodes max_preds"]  # what each node waits for; node 0 is the source
    replica: Nodes  # (nodes) position of the replica, or -1
    op: Nodes  # (nodes) position of an op among those of its pipeline, or -1
    rest: Nodes  # (nodes) position among the slices that are no ops, or -1
    link: Nodes  # (nodes) direction * boundaries + boundary of a message, or -1

    def finish(self, duration: Times) -> Times:
        """Finish times of runs with these durations (runs, nodes) [s]."""
        times = np.array(duration.T, order="C")
        run_in_place(self.preds, times)
        return times.T


class _Edges:
    def __init__(self) -> None:
        self.tail: list[Nodes] = []
        self.head: list[Nodes] = []
        self.labels: dict[str, list[Nodes]] = {
            name: [np.array([NONE])] for name in ("replica", "op", "rest", "link")
        }
        self.size = 1

    def add(self, count: int, **labels: Nodes | int) -> Nodes:
        for name, parts in self.labels.items():
            parts.append(np.broadcast_to(labels.get(name, NONE), count))
        self.size += count
        return np.arange(self.size - count, self.size)

    def join(self, tail: Nodes | int, head: Nodes | int) -> None:
        both = np.broadcast_arrays(np.atleast_1d(tail), np.atleast_1d(head))
        self.tail.append(both[0])
        self.head.append(both[1])

    def graph(self) -> StepGraph:
        tail, head = np.concatenate(self.tail), np.concatenate(self.head)
        order = topological_order(self.size, tail, head)
        number = np.empty_like(order)
        number[order] = np.arange(self.size)
        by_head, column, shape = lay_out_edges(self.size, number[head])
        preds = np.zeros(shape, np.int64)
        preds[number[head][by_head], column] = number[tail][by_head]
        labels = {name: np.concatenate(parts)[order] for name, parts in self.labels.items()}
        return StepGraph(preds, **labels)


def op_of_nodes(program: Program, table: ScheduleTable) -> Nodes:
    """Return the op of each node (nodes): its position in all rows, one after the other."""
    ops = (op for row in table.rows() for cell in row for op in cell if op.phase.name in OPS)
    position = {(int(op.phase), op.stage, op.microbatch): k for k, op in enumerate(ops)}
    fields = (program.phase, program.stage, program.microbatch)
    keys = zip(*(np.asarray(field).tolist() for field in fields), strict=True)
    return np.array([position.get(key, NONE) for key in keys])


def step_graph(
    tables: Sequence[ScheduleTable], links: Links, rests: Sequence[Rest] = ()
) -> StepGraph:
    """The graph of replicas that run these tables, with all that surrounds them."""
    edges = _Edges()
    programs = {id(table): lower(table, link=links, step_end=False) for table in tables}
    rows = [
        _add_pipeline(edges, table, programs[id(table)], replica)
        for replica, table in enumerate(tables)
    ]
    _add_rests(edges, rows, rests)
    return edges.graph()


def _add_pipeline(edges: _Edges, table: ScheduleTable, program: Program, replica: int) -> list[Row]:
    """Add the ops and messages of a replica; return the node of each cell, by row."""
    op = op_of_nodes(program, table)
    is_message = np.isin(program.phase, TRANSFERS)
    link = np.where(is_message, _node_links(program, np.asarray(program.duration_index)), NONE)
    op[is_message] = NONE
    node = np.append(
        SOURCE, edges.add(program.num_nodes - 1, replica=replica, op=op[1:], link=link[1:])
    )
    head, column = np.nonzero((program.preds != SOURCE) | (program.lag_index > 0))
    tail = np.asarray(program.preds)[head, column]
    lag = _node_links(program, np.asarray(program.lag_index)[head, column])
    waits = lag != NONE  # a message that uses no resource is a node between both ends
    edges.join(node[tail[~waits]], node[head[~waits]])
    between = edges.add(int(waits.sum()), replica=replica, link=lag[waits])
    edges.join(node[tail[waits]], between)
    edges.join(between, node[head[waits]])
    return [node[row[row != SOURCE]] for row in np.asarray(program.node_of_cell)]


def _node_links(program: Program, position: Int[NumpyArray, " some"]) -> Int[NumpyArray, " some"]:
    """The link whose message time stands at positions of the cost vector, or -1."""
    layout = program.layout
    _, pipes, boundaries, columns = layout.link_shape
    kind, place = np.divmod(position - layout.first_link, 2 * pipes * boundaries * columns or 1)
    direction, rest = np.divmod(place, pipes * boundaries * columns or 1)
    boundary = rest // columns % (boundaries or 1)
    # of a message no part is latency: what it takes is its transmit time
    timed = (position >= layout.first_link) & (kind != LINK_COSTS.index("latency"))
    return np.where(timed, direction * boundaries + boundary, NONE)


def _add_rests(edges: _Edges, rows: Sequence[Sequence[Row]], rests: Sequence[Rest]) -> None:
    """Put slices that are no ops into the rows of their workers, and let collectives wait."""
    groups = {number: int(edges.add(1)[0]) for number in sorted({r.group for r in rests} - {NONE})}
    last: dict[tuple[int, int, bool], tuple[CellCount, int]] = {}  # by row: place and node before
    for place, rest in enumerate(rests):
        node = int(edges.add(1, replica=rest.replica, rest=place)[0])
        row = rows[rest.replica][rest.worker]
        before = [int(row[rest.after - 1])] if rest.after else []
        lane = (rest.replica, rest.worker, rest.is_beside)
        for other in (lane, (*lane[:2], False)):
            if other in last and last[other][0] <= rest.after:
                before.append(last[other][1])
        gate = groups.get(rest.group, node)  # the last member of a collective opens it for all
        for tail in before or [SOURCE]:
            edges.join(tail, gate)
        if gate != node:
            edges.join(gate, node)
        if not rest.is_beside and rest.after < len(row):
            edges.join(node, int(row[rest.after]))
        last[lane] = rest.after, node


TOUCH = 1e-4  # by which slices of one worker overlap where clocks round [s]


class Rests(NamedTuple):
    """Same slices in several steps."""

    places: tuple[Rest, ...]  # what they are, and where they stand
    slices: Int[NumpyArray, "steps rests"]  # where they are in the trace; -1 where a step has none
    # of collectives from when the last member has come [s]
    seconds: Float[NumpyArray, "steps rests"]


class _Key(NamedTuple):
    """Identity of a slice in every step."""

    replica: int
    worker: int
    phase: str
    occurrence: int


def find_rests(pipelines: Pipelines, steps: Sequence[Sequence[Pipeline]]) -> Rests:
    """Find what steps have beside ops and messages, whose replicas run the same tables."""
    trace = pipelines.trace
    by_row = _by_row(trace)
    slices_by_key: dict[_Key, dict[int, int]] = {}
    placed: dict[_Key, list[tuple[CellCount, bool, float]]] = {}
    for number, replicas in enumerate(steps):
        begin = min(trace.start[pipeline.slices].min() for pipeline in replicas)
        for place, pipeline in enumerate(replicas):
            cells = cell_slices(trace, pipeline.slices)
            row = trace.worker[cells]
            for worker in range(trace.workers):
                row_cells, count = CellSlices(cells[row == worker]), dict[str, int]()
                for at in by_row.get((pipeline.step, pipeline.replica, worker), ()):
                    name = trace.phases[trace.phase[at]]
                    key = _Key(place, worker, name, count.setdefault(name, 0))
                    count[name] += 1
                    slices_by_key.setdefault(key, {})[number] = int(at)
                    where = _place(trace, row_cells, int(at))
                    placed.setdefault(key, []).append((*where, trace.start[at] - begin))
    rests = sorted(_placed(placed), key=lambda pair: pair[1])
    numbers = dict(_groups([key for key, _ in rests], trace.workers))
    slices = np.full((len(steps), len(rests)), NONE)
    for column, (key, _) in enumerate(rests):
        for step, at in slices_by_key[key].items():
            slices[step, column] = at
    places = tuple(
        Rest(key.phase, key.occurrence, key.replica, key.worker, after, is_beside, numbers[key])
        for key, (_, _, after, is_beside, _) in rests
    )
    return Rests(places, slices, _seconds(trace, places, slices))


def _by_row(trace: Trace) -> Mapping[tuple[int, int, int], Int[NumpyArray, " rests"]]:
    """Slices that are no ops and no messages, by step, replica and worker, as they start."""
    other = np.flatnonzero(~trace.is_of((*OPS, *MESSAGES)) & (trace.worker >= 0))
    keys = np.stack([trace.step[other], trace.replica[other], trace.worker[other]])
    other = other[np.lexsort((trace.start[other], *keys[::-1]))]
    keys = np.stack([trace.step[other], trace.replica[other], trace.worker[other]])
    cuts = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
    parts = np.split(other, cuts) if len(other) else []
    return {
        (int(trace.step[p[0]]), int(trace.replica[p[0]]), int(trace.worker[p[0]])): p for p in parts
    }


def _place(trace: Trace, cells: CellSlices, at: int) -> tuple[CellCount, bool]:
    """Count the cells of the row that have ended when a slice starts; does it run beside one."""
    after = int((trace.end[cells] <= trace.start[at] + TOUCH).sum())
    until = int((trace.start[cells] < trace.end[at] - TOUCH).sum())
    return CellCount(after), until > after


def _placed(
    placed: Mapping[_Key, Sequence[tuple[CellCount, bool, float]]],
) -> Iterator[tuple[_Key, tuple[int, int, CellCount, bool, float]]]:
    """Yield the usual place of every slice: replica, worker, after, beside, and time."""
    for key, where in placed.items():
        after, flags, when = zip(*where, strict=True)
        is_beside = 2 * sum(flags) > len(flags)
        usual = CellCount(int(np.median(after)))
        yield key, (key.replica, key.worker, usual, is_beside, float(np.median(when)))


def _groups(keys: Sequence[_Key], workers: int) -> Iterator[tuple[_Key, int]]:
    """Number of the collective that every slice is of; -1 of none, and of one that is alone."""
    members: dict[tuple[object, ...], list[_Key]] = {}
    for key in keys:
        scope = collective_scope(key.phase)
        is_end = key.worker in (0, workers - 1)
        where = {
            "replicas": (key.worker,),
            "ends": (key.replica,) if is_end else None,
            "all": (),
        }.get(scope or "")
        if where is None:
            yield key, NONE
        else:
            members.setdefault((key.phase, key.occurrence, *where), []).append(key)
    for number, group in enumerate(members.values()):
        for key in group:
            yield key, number if len(group) > 1 else NONE


def _seconds(
    trace: Trace, places: Sequence[Rest], slices: Int[NumpyArray, "steps rests"]
) -> Float[NumpyArray, "steps rests"]:
    """Return the duration of every slice (steps, rests) [s]; 0 in a step without it."""
    start = np.append(trace.start, -np.inf)[slices]
    end = np.append(trace.end, -np.inf)[slices]
    group = np.array([rest.group for rest in places], int)
    for number in np.unique(group[group != NONE]):
        is_member = group == number
        start[:, is_member] = start[:, is_member].max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.where(slices == NONE, 0.0, np.maximum(end - start, 0.0))
