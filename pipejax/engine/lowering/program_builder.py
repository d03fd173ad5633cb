"""Builder of programs: nodes and edges are added in any order and sorted at the end."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.longest_path import CycleError, lay_out_edges, topological_order
from pipejax.engine.lowering.program import (
    NO_WORKER,
    SOURCE,
    ZERO,
    CostLayout,
    MessageTable,
    Program,
)
from pipejax.schedules.cells.ops import WAIT_SEND, Op, Phase, ScheduleError, matching_receive
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.slot_simulation import slot_times
from pipejax.schedules.table.table import ScheduleTable

_FIELDS = ("duration", "phase", "stage", "microbatch", "pipe", "worker", "sender", "receiver")
_GATE_FIELDS = ("microbatch", "pipe")  # fields of a gate, which tell it from others
_DEFAULTS = {"duration": ZERO, "phase": int(Phase.IDLE)}  # every other field defaults to -1


class Reductions(NamedTuple):
    """All-reduces over gradients that several workers of a table hold, and their participants."""

    node: Int[NumpyArray, " reductions"]  # by stage
    end: Float[NumpyArray, " reductions"]  # end of the last gradient [unit slots]
    # copies are stages on workers: (copies) index of the all-reduce that sums a copy's gradients
    copy_reduction: Int[NumpyArray, " copies"]
    copy_worker: Int[NumpyArray, " copies"]  # worker that holds the copy


class ProgramBuilder:
    """Builder of a program: nodes and edges added so far; node 0 is the source."""

    def __init__(self, table: ScheduleTable, links: Links, layout: CostLayout) -> None:
        self.table, self.links, self.layout = table, links, layout
        self.node_of_cell = np.full(table.cells.phase.shape, SOURCE)
        self.reductions = Reductions(*np.zeros((4, 0), int))  # none yet
        self._nodes: list[dict[str, NumpyArray]] = []
        self._num_nodes = 0
        self._gates: dict[int, int] = {}  # {node of a collective: its gate}
        self._edges: list[NumpyArray] = []  # (3, edges) tails, heads and lags
        self.add_nodes(duration=np.array([ZERO]))  # the source

    @functools.cached_property
    def unit_ends(self) -> Float[NumpyArray, " cells"]:
        """End of each cell in a run where ops take their slots and messages take no time."""
        slots = self.table.grammar.unit_slots
        _, ends = slot_times(self.table, slots, is_scaled=False, link=self.links)
        return ends.ravel()

    def add_nodes(self, *, duration: NumpyArray, **fields: NumpyArray) -> Int[NumpyArray, " new"]:
        """Add one node per duration (given as cost positions); return the node numbers (new)."""
        size = len(duration)
        columns = {name: np.full(size, _DEFAULTS.get(name, -1)) for name in _FIELDS}
        columns |= {"duration": duration, **fields}
        self._nodes.append({name: np.asarray(columns[name], np.int32) for name in _FIELDS})
        self._num_nodes += size
        return np.arange(self._num_nodes - size, self._num_nodes)

    def add_cells(
        self, cells: Int[NumpyArray, " added"], *, duration: NumpyArray, **fields: NumpyArray
    ) -> Int[NumpyArray, " added"]:
        """Add a node for each selected cell of the table; return the node numbers (added)."""
        phase, stage, microbatch, pipe = (column.ravel()[cells] for column in self.table.cells)
        columns = {"duration": duration, "phase": phase, "stage": stage, **fields}
        columns |= {"microbatch": microbatch, "pipe": pipe}
        nodes = self.add_nodes(**columns)
        self.node_of_cell.reshape(-1)[cells] = nodes
        if self.table.grammar.collective_phases:
            is_collective = np.isin(phase, self.table.grammar.collective_phases)
            self._add_gates(nodes[is_collective], cells[is_collective])
        return nodes

    def _add_gates(
        self, nodes: Int[NumpyArray, " collective"], cells: Int[NumpyArray, " collective"]
    ) -> None:
        """Let a collective op's nodes wait for a gate, a node without duration."""
        # `add_edges` lets the gate wait for the predecessors of all nodes of the op.
        assert self.table.first_cells is not None
        op_cells = self.table.first_cells[cells]  # the first cell of an op stands for the op
        gate_cells, op_index = np.unique(op_cells, return_inverse=True)
        fields = {
            name: getattr(self.table.cells, name).ravel()[gate_cells] for name in _GATE_FIELDS
        }
        gates = self.add_nodes(duration=np.full(len(gate_cells), ZERO), **fields)
        self.add_edges(gates[op_index], nodes, ZERO)
        self._gates |= dict(zip(nodes.tolist(), gates[op_index].tolist(), strict=True))

    def durations(self, cells: Int[NumpyArray, " cells"]) -> Int[NumpyArray, " cells"]:
        """Return the cost position of each cell's duration (cells); of a fused pair, of its F."""
        table = self.table
        phase, stage_or_worker = table.phase.ravel()[cells], table.stage.ravel()[cells]
        if table.grammar.worker_phases:
            is_worker_op = np.isin(phase, table.grammar.worker_phases)
            stage_or_worker = np.where(is_worker_op, cells // table.num_slots, stage_or_worker)
        return self.layout.op_position(phase, stage_or_worker)

    def _column(self, name: str) -> Int[NumpyArray, " nodes"]:
        return np.concatenate([columns[name] for columns in self._nodes])

    def add_edges(
        self,
        tail: Int[NumpyArray, " new"],
        head: Int[NumpyArray, " new"],
        lag: int | Int[NumpyArray, " new"],
    ) -> None:
        """Add edges from tail to head nodes; of edges that tie, a critical path takes the first."""
        # An edge to a node of a collective op leads to its gate, for which all its nodes wait.
        if self._gates:
            head = np.array([self._gates.get(node, node) for node in head.tolist()], int)
        edges = [tail, head, np.broadcast_to(lag, np.shape(tail))]
        self._edges.append(np.stack(edges, dtype=np.int32, casting="same_kind"))

    def add_chains(self, nodes: Int[NumpyArray, " nodes"], key: Int[NumpyArray, " nodes"]) -> None:
        """Add an edge between successive nodes with the same key; nodes keep their order."""
        order = np.argsort(key, kind="stable")
        nodes, key = nodes[order], key[order]
        has_next = key[1:] == key[:-1]
        self.add_edges(nodes[:-1][has_next], nodes[1:][has_next], ZERO)

    def next_in_row(self, nodes: Int[NumpyArray, " nodes"]) -> Int[NumpyArray, " nodes"]:
        """Return the op after each node in its worker's row (nodes), or -1 after the last one."""
        worker = self._column("worker")
        is_op = np.isin(self._column("phase"), self.table.grammar.row_ops)
        ops = np.flatnonzero((worker != NO_WORKER) & is_op)
        ops = ops[np.argsort(worker[ops], kind="stable")]  # row by row
        next_op = np.full(self._num_nodes, -1)
        is_same_row = worker[ops[1:]] == worker[ops[:-1]]
        next_op[ops[:-1][is_same_row]] = ops[1:][is_same_row]
        return next_op[nodes]

    def row_ends(self) -> Int[NumpyArray, " workers"]:
        """Return each worker's last added node (workers)."""
        ends = np.full(self.table.num_workers, SOURCE)
        worker = self._column("worker")
        has_worker = worker != NO_WORKER
        ends[worker[has_worker]] = np.flatnonzero(has_worker)  # NumPy keeps the last of several
        return ends

    def finish(self, messages: MessageTable, pairs: Int[NumpyArray, "pairs 3"]) -> Program:
        """Sort nodes topologically and build the program; `pairs` are its distinct fused pairs."""
        tail, head, lag = self._distinct_edges()
        try:
            order = topological_order(self._num_nodes, tail, head, self.table.num_workers)
        except CycleError as error:
            raise self._deadlock(error.cycle) from None
        new_ids = np.empty_like(order)
        new_ids[order] = np.arange(self._num_nodes)
        edge_order, column, shape = lay_out_edges(self._num_nodes, new_ids[head])
        preds, lags = np.full(shape, SOURCE, np.int32), np.full(shape, ZERO, np.int32)
        row = new_ids[head][edge_order]
        preds[row, column], lags[row, column] = new_ids[tail][edge_order], lag[edge_order]
        nodes = {name: self._column(name)[order] for name in _FIELDS}
        no_ops = (*self.table.grammar.sharding_phases, *WAIT_SEND)
        is_op = (nodes["worker"] != NO_WORKER) & ~np.isin(nodes["phase"], no_ops)
        ops = np.flatnonzero(is_op)
        op_workers = nodes["worker"][ops]
        # NumPy keeps the last of several assignments to a worker; with reversed arrays, the first
        first_node, last_node = np.zeros((2, self.table.num_workers), np.int32)
        last_node[op_workers] = ops
        first_node[op_workers[::-1]] = ops[::-1]
        is_fused = self.table.is_fused
        fused_nodes = new_ids[self.node_of_cell[is_fused]]
        backward_microbatches = self.table.partners.microbatch[is_fused]
        position = self.layout.op_position
        forward, backward = position(Phase.F, pairs[:, 0]), position(*pairs.T[1:])
        return Program(
            preds=preds,
            lag_index=lags,
            duration_index=nodes.pop("duration"),
            pair_index=np.stack([forward, backward], axis=1).astype(np.int32),
            pair_stage=pairs[:, 0].astype(np.int32),
            fused=np.stack([fused_nodes, backward_microbatches], axis=1).astype(np.int32),
            **nodes,
            node_of_cell=new_ids[self.node_of_cell].astype(np.int32),
            messages=messages._replace(
                producer=new_ids[messages.producer],
                carrier=new_ids[messages.carrier],
                consumer=new_ids[messages.consumer],
            ),
            first_node=first_node,
            last_node=last_node,
            layout=self.layout,
            num_microbatches=self.table.num_microbatches,
            name=self.table.name,
            links=self.links,
        )

    def _distinct_edges(self) -> Int[NumpyArray, "3 edges"]:
        """Remove all edges from the builder; return tails, heads and lags, (3, distinct edges)."""
        # Fused pairs may send each other an activation and a gradient: two edges, different lags.
        edges = np.concatenate(self._edges, axis=1)
        self._edges.clear()
        tail, head, lag = edges
        ends = tail * np.int64(self._num_nodes) + head
        order = np.lexsort((lag, ends))
        is_duplicate = (np.diff(ends[order]) == 0) & (np.diff(lag[order]) == 0)
        return np.delete(edges, order[1:][is_duplicate], axis=1) if is_duplicate.any() else edges

    def _deadlock(self, cycle: list[int]) -> ScheduleError:
        """Build the error about a deadlock; it names the ops of the cycle and marks a cell."""
        fields = ("phase", "stage", "microbatch", "pipe", "worker", "sender", "receiver")
        nodes = np.stack([self._column(name)[cycle] for name in fields], axis=1).tolist()
        nodes = [node for node in nodes if node[0] != Phase.IDLE]  # gates have no name
        names = [self._node_name(node) for node in nodes]
        links = self.links
        scope = f" with one queue per {links.queues}" if links.is_rendezvous else ""
        scope += " and posting by program" if links.posting == "program" else ""
        if links.shared_links:
            scope += f"{' and' if scope else ' with'} shared links"
        # an all-reduce has no cell to mark; the op that it waits for has one
        phase, stage, microbatch, pipe, worker, sender, _ = next(
            node for node in nodes if self.table.grammar.phases[node[0]].kind.in_cells
        )
        row = max(worker, sender, 0)  # a message has no worker, an op no sender
        if phase in self.table.grammar.host_phases:
            row = int(self.table.placement[pipe, stage])
        cells = self.table.cells
        is_op = (cells.phase == phase) & (cells.stage == stage) & (cells.microbatch == microbatch)
        _, slots = np.nonzero(is_op)
        return self.table.error(
            f"deadlock under {links.text}{scope}: nothing in this cycle can start: "
            + " -> ".join([*names, names[0]]),
            row,
            int(slots[0]) if len(slots) else None,
        )

    def _node_name(self, fields: Sequence[int]) -> str:
        """Name a node by its op and its worker, host link or transfer."""
        code, stage, microbatch, pipe, worker, sender, receiver = fields
        phase = self.table.grammar.phases[code]
        op = self.table.grammar.text((Op(phase, stage, microbatch),))
        if code in self.table.grammar.host_phases:  # its cell is in the row of its stage's worker
            return f"{op} (host link of worker {self.table.placement[pipe, stage]})"
        if not phase.kind.in_cells:
            return f"{op} ({phase.kind.name})"
        if sender == NO_WORKER:
            lane = f"lane {phase.kind.lane}" if worker == NO_WORKER else f"worker {worker}"
            return f"{op} ({lane})"
        if self.table.grammar.has_usual_messages:
            op = f"{op}/{matching_receive(Op(phase, stage, microbatch))}"
        return f"{op} (worker {sender} to {receiver})"
