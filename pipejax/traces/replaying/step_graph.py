"""What waits for what in a step of a whole job: pipelines side by side, and what surrounds them.

The ops and messages of each replica are its table's program, as the engine lowers it for a link
model. What else a worker runs stands in its row where it ran: collectives end together, as long
after their last member has come as they take.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.longest_path import lay_out_edges, run_in_place, topological_order
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import LINK_COSTS, SOURCE, Program
from pipejax.schedules.cells.ops import MESSAGES as TRANSFERS
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.traces.record import NONE, OPS
from pipejax.traces.replaying.pipelines import CellCount

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
    beside: bool  # whether it runs beside ops, and blocks only what follows it among its kind
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
        for name, known in self.labels.items():
            known.append(np.broadcast_to(labels.get(name, NONE), count))
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
        labels = {name: np.concatenate(known)[order] for name, known in self.labels.items()}
        return StepGraph(preds, **labels)


def op_of_nodes(program: Program, table: ScheduleTable) -> Nodes:
    """Which op each node is (nodes): its position among those of all rows, one behind the other."""
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
    link = np.where(is_message, _links_of(program, np.asarray(program.duration_index)), NONE)
    op[is_message] = NONE
    node = np.append(
        SOURCE, edges.add(program.num_nodes - 1, replica=replica, op=op[1:], link=link[1:])
    )
    head, column = np.nonzero((program.preds != SOURCE) | (program.lag_index > 0))
    tail = np.asarray(program.preds)[head, column]
    lag = _links_of(program, np.asarray(program.lag_index)[head, column])
    waits = lag != NONE  # a message that uses no resource is a node between both ends
    edges.join(node[tail[~waits]], node[head[~waits]])
    between = edges.add(int(waits.sum()), replica=replica, link=lag[waits])
    edges.join(node[tail[waits]], between)
    edges.join(between, node[head[waits]])
    return [node[row[row != SOURCE]] for row in np.asarray(program.node_of_cell)]


def _links_of(program: Program, position: Int[NumpyArray, " some"]) -> Int[NumpyArray, " some"]:
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
        lane = (rest.replica, rest.worker, rest.beside)
        for other in (lane, (*lane[:2], False)):
            if other in last and last[other][0] <= rest.after:
                before.append(last[other][1])
        gate = groups.get(rest.group, node)  # the last member of a collective opens it for all
        for each in before or [SOURCE]:
            edges.join(each, gate)
        if gate != node:
            edges.join(gate, node)
        if not rest.beside and rest.after < len(row):
            edges.join(node, int(row[rest.after]))
        last[lane] = rest.after, node
