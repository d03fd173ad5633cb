"""Graph of one step of a job: all pipelines, and slices that are no pipeline ops (non-ops).

Non-ops, such as collectives and the optimizer, stand in the row of their worker where they ran. All
members of a collective begin when the last member is ready.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.longest_path import lay_out_edges, run_in_place, topological_order
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import LINK_COSTS, SOURCE, Program
from pipejax.schedules.cells.ops import MESSAGES as TRANSFERS
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.traces.record import MESSAGES, NONE, OPS, Trace, collective_scope
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


class NonOp(NamedTuple):
    """A non-op slice, such as a collective, in the same place of the row in every step."""

    phase: str  # name of the phase
    occurrence: int  # number among the slices of this phase on the worker, from 0
    replica: int  # index of the replica
    worker: int
    cells_before: CellCount  # number of cells before the slice in the worker's row
    is_beside: bool  # whether the slice runs beside ops, and delays only other such slices
    group: int  # number of the collective; -1 for a slice without other members


class StepGraph(NamedTuple):
    """A step, or some of its pipelines, as a graph; -1 stands for a label that does not apply."""

    preds: Int[NumpyArray, "nodes max_preds"]  # predecessors of each node; node 0 is the source
    replica: Nodes  # index of the replica
    op: Nodes  # index of an op in its pipeline
    non_op: Nodes  # index among the non-ops
    link: Nodes  # direction * boundaries + boundary of a message

    def finish(self, duration: Times) -> Times:
        """Return the finish times (runs, nodes) [s] at these durations (runs, nodes) [s]."""
        times = np.array(duration.T, order="C")
        run_in_place(self.preds, times)
        return times.T


class _GraphBuilder:
    """Nodes with labels, and edges, from which a graph is built; node 0 is the source."""

    def __init__(self) -> None:
        self.tails: list[Nodes] = []
        self.heads: list[Nodes] = []
        self.labels: dict[str, list[Nodes]] = {
            name: [np.array([NONE])] for name in ("replica", "op", "non_op", "link")
        }
        self.size = 1

    def add_nodes(self, count: int, **labels: Nodes | int) -> Nodes:
        """Add nodes with these labels, -1 by default, and return their numbers."""
        for name, values in self.labels.items():
            values.append(np.broadcast_to(labels.get(name, NONE), count))
        self.size += count
        return np.arange(self.size - count, self.size)

    def add_edges(self, tail: Nodes | int, head: Nodes | int) -> None:
        """Add edges from tails to heads; a single tail or head belongs to all edges."""
        tails, heads = np.broadcast_arrays(np.atleast_1d(tail), np.atleast_1d(head))
        self.tails.append(tails)
        self.heads.append(heads)

    def build(self) -> StepGraph:
        """Number the nodes in topological order, and return the graph."""
        tail, head = np.concatenate(self.tails), np.concatenate(self.heads)
        order = topological_order(self.size, tail, head)
        number = np.empty_like(order)
        number[order] = np.arange(self.size)
        tail, head = number[tail], number[head]
        edges, column, shape = lay_out_edges(self.size, head)
        preds = np.zeros(shape, np.int64)
        preds[head[edges], column] = tail[edges]
        labels = {name: np.concatenate(values)[order] for name, values in self.labels.items()}
        return StepGraph(preds, **labels)


def node_ops(program: Program, table: ScheduleTable) -> Nodes:
    """Return the index of each node's op in a table's concatenated rows; -1 for other nodes."""
    ops = (op for row in table.rows() for cell in row for op in cell if op.phase.name in OPS)
    position = {(int(op.phase), op.stage, op.microbatch): k for k, op in enumerate(ops)}
    fields = (program.phase, program.stage, program.microbatch)
    keys = zip(*(np.asarray(field).tolist() for field in fields), strict=True)
    return np.array([position.get(key, NONE) for key in keys])


def step_graph(
    tables: Sequence[ScheduleTable], links: Links, non_ops: Sequence[NonOp] = ()
) -> StepGraph:
    """Return the graph of replicas that run these tables, with non-ops."""
    builder = _GraphBuilder()
    programs = {id(table): lower(table, link=links, step_end=False) for table in tables}
    rows = [
        _add_pipeline(builder, table, programs[id(table)], replica)
        for replica, table in enumerate(tables)
    ]
    _add_non_ops(builder, rows, non_ops)
    return builder.build()


def _add_pipeline(
    builder: _GraphBuilder, table: ScheduleTable, program: Program, replica: int
) -> list[Row]:
    """Add the nodes and edges of a replica's program; return the nodes of each worker's row."""
    op = node_ops(program, table)
    is_message = np.isin(program.phase, TRANSFERS)
    link = np.where(is_message, _cost_links(program, np.asarray(program.duration_index)), NONE)
    op[is_message] = NONE
    new_nodes = builder.add_nodes(program.num_nodes - 1, replica=replica, op=op[1:], link=link[1:])
    node = np.append(SOURCE, new_nodes)  # node of the graph for each node of the program
    head, column = np.nonzero((program.preds != SOURCE) | (program.lag_index > 0))
    tail = np.asarray(program.preds)[head, column]
    # a message that is a lag on an edge becomes a node between both ends of the edge
    lag_link = _cost_links(program, np.asarray(program.lag_index)[head, column])
    has_lag = lag_link != NONE
    builder.add_edges(node[tail[~has_lag]], node[head[~has_lag]])
    messages = builder.add_nodes(int(has_lag.sum()), replica=replica, link=lag_link[has_lag])
    builder.add_edges(node[tail[has_lag]], messages)
    builder.add_edges(messages, node[head[has_lag]])
    return [node[row[row != SOURCE]] for row in np.asarray(program.node_of_cell)]


def _cost_links(program: Program, position: Int[NumpyArray, " some"]) -> Int[NumpyArray, " some"]:
    """Return the link of the transmit time at each index of a cost vector; -1 for other costs."""
    # Link costs are an array (kind, direction, pipe, boundary, column) from `first_link` on. Traces
    # count the whole time of a message as transmit time, so latencies are skipped. Without
    # boundaries the array is empty, and divisors are 1.
    layout = program.layout
    _, pipes, boundaries, columns = layout.link_shape
    size = pipes * boundaries * columns  # size of one direction
    kind, remainder = np.divmod(position - layout.first_link, 2 * size or 1)
    direction, remainder = np.divmod(remainder, size or 1)
    boundary = remainder // columns % (boundaries or 1)
    is_transmit = (position >= layout.first_link) & (kind != LINK_COSTS.index("latency"))
    return np.where(is_transmit, direction * boundaries + boundary, NONE)


def _add_non_ops(
    builder: _GraphBuilder, rows: Sequence[Sequence[Row]], non_ops: Sequence[NonOp]
) -> None:
    """Add nodes for non-ops between the cells of their workers."""
    # `rows` has the nodes of cells by replica and worker; `non_ops` are in order of time. Members
    # of a collective wait for a gate node, which waits for the predecessors of all members.
    groups = sorted({non_op.group for non_op in non_ops} - {NONE})
    gates = {group: int(builder.add_nodes(1)[0]) for group in groups}
    # {(replica, worker, is_beside): (cells before the last slice so far, node of this slice)}
    last: dict[tuple[int, int, bool], tuple[CellCount, int]] = {}
    for position, non_op in enumerate(non_ops):
        node = int(builder.add_nodes(1, replica=non_op.replica, non_op=position)[0])
        row = rows[non_op.replica][non_op.worker]
        preds = [int(row[non_op.cells_before - 1])] if non_op.cells_before else []
        lane = (non_op.replica, non_op.worker, non_op.is_beside)
        for previous_lane in (lane, (non_op.replica, non_op.worker, False)):
            if previous_lane in last and last[previous_lane][0] <= non_op.cells_before:
                preds.append(last[previous_lane][1])
        gate = gates.get(non_op.group, node)
        for pred in preds or [SOURCE]:
            builder.add_edges(pred, gate)
        if gate != node:
            builder.add_edges(gate, node)
        if not non_op.is_beside and non_op.cells_before < len(row):
            builder.add_edges(node, int(row[non_op.cells_before]))
        last[lane] = non_op.cells_before, node


CLOCK_ERROR = 1e-4  # overlap of consecutive slices of a worker by rounding of clocks [s]


def find_non_ops(
    pipelines: Pipelines, steps: Sequence[Sequence[Pipeline]]
) -> tuple[tuple[NonOp, ...], Int[NumpyArray, "steps non_ops"], Float[NumpyArray, "steps non_ops"]]:
    """Match non-ops over steps; return (non_ops) records, (steps, non_ops) slices and times [s]."""
    # `steps` has the pipelines of each step, one for each replica. The number of cells before a
    # non-op is the median over steps. A slice is -1 in a step without this non-op. The time of a
    # collective begins when its last member starts.
    trace = pipelines.trace
    by_key = _non_ops_by_key(trace, steps)
    places, sort_keys = [], []
    for (replica, worker, name, occurrence), uses in by_key.items():
        is_beside = 2 * sum(use.is_beside for use in uses) > len(uses)
        before = CellCount(int(np.median([use.cells_before for use in uses])))
        places.append(NonOp(name, occurrence, replica, worker, before, is_beside, NONE))
        start = float(np.median([use.start for use in uses]))
        sort_keys.append((replica, worker, before, is_beside, start))
    order = sorted(range(len(places)), key=sort_keys.__getitem__)
    numbered = _with_groups([places[k] for k in order], trace.workers)
    slices = np.full((len(steps), len(numbered)), NONE)
    for column, (phase, occurrence, replica, worker, *_) in enumerate(numbered):
        for use in by_key[replica, worker, phase, occurrence]:
            slices[use.step, column] = use.slice
    return numbered, slices, _non_op_seconds(trace, numbered, slices)


class _Use(NamedTuple):
    """A non-op slice in one step."""

    step: int  # index of the step
    slice: int  # index of the slice in the trace
    cells_before: int  # number of cells of the worker that end before the slice starts
    is_beside: bool  # whether the slice overlaps a cell
    start: float  # start after that of the first op of the step [s]


def _non_ops_by_key(
    trace: Trace, steps: Sequence[Sequence[Pipeline]]
) -> dict[tuple[int, int, str, int], list[_Use]]:
    """Return {(replica, worker, phase, occurrence): slices of a non-op in all steps}."""
    slices_by_worker = _other_slices(trace)
    by_key: dict[tuple[int, int, str, int], list[_Use]] = {}
    for number, step_pipelines in enumerate(steps):
        begin = min(trace.start[pipeline.slices].min() for pipeline in step_pipelines)
        for replica, pipeline in enumerate(step_pipelines):
            cells = cell_slices(trace, pipeline.slices)
            for worker in range(trace.workers):
                row = CellSlices(cells[trace.worker[cells] == worker])
                counts = Counter[str]()
                for k in slices_by_worker.get((pipeline.step, pipeline.replica, worker), ()):
                    name = trace.phases[trace.phase[k]]
                    key = replica, worker, name, counts[name]
                    counts[name] += 1
                    ended = int((trace.end[row] <= trace.start[k] + CLOCK_ERROR).sum())
                    begun = int((trace.start[row] < trace.end[k] - CLOCK_ERROR).sum())
                    use = _Use(number, k, ended, begun > ended, trace.start[k] - begin)
                    by_key.setdefault(key, []).append(use)
    return by_key


def _other_slices(trace: Trace) -> Mapping[tuple[int, int, int], Sequence[int]]:
    """Return {(step, replica, worker): slices that are neither op nor message, by start}."""
    other = np.flatnonzero(~trace.has_phase((*OPS, *MESSAGES)) & (trace.worker >= 0))
    by_key: dict[tuple[int, int, int], list[int]] = {}
    for k in other[np.argsort(trace.start[other], kind="stable")].tolist():
        key = int(trace.step[k]), int(trace.replica[k]), int(trace.worker[k])
        by_key.setdefault(key, []).append(k)
    return by_key


def _with_groups(places: Sequence[NonOp], workers: int) -> tuple[NonOp, ...]:
    """Number the collectives of non-ops; a non-op without other members has the number -1."""
    members: dict[tuple[object, ...], list[int]] = {}
    for position, non_op in enumerate(places):
        is_pipeline_end = non_op.worker in (0, workers - 1)
        shared_by_scope = {  # members of a collective share these numbers
            "replicas": (non_op.worker,),
            "ends": (non_op.replica,) if is_pipeline_end else None,
            "all": (),
        }
        shared = shared_by_scope.get(collective_scope(non_op.phase) or "")
        if shared is not None:
            key = non_op.phase, non_op.occurrence, *shared
            members.setdefault(key, []).append(position)
    groups = [group for group in members.values() if len(group) > 1]
    number = {position: k for k, group in enumerate(groups) for position in group}
    return tuple(p._replace(group=number.get(k, NONE)) for k, p in enumerate(places))


def _non_op_seconds(
    trace: Trace, places: Sequence[NonOp], slices: Int[NumpyArray, "steps non_ops"]
) -> Float[NumpyArray, "steps non_ops"]:
    """Return times of non-ops [s], for a collective from its last start on; 0 if missing."""
    start = np.append(trace.start, -np.inf)[slices]
    end = np.append(trace.end, -np.inf)[slices]
    group = np.array([non_op.group for non_op in places], int)
    for number in np.unique(group[group != NONE]):
        is_member = group == number
        start[:, is_member] = start[:, is_member].max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # -inf - -inf, in a step without this non-op
        return np.where(slices == NONE, 0.0, np.maximum(end - start, 0.0))
