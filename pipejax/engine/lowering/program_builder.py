"""A program under construction: nodes and edges are added in any order and sorted at the end."""

import functools
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
_OF_GATES = ("microbatch", "pipe")  # what tells one from another of the same ops
_EMPTY = {"duration": ZERO, "phase": int(Phase.IDLE)}  # every other field is -1 where unused


class Reductions(NamedTuple):
    """All-reduces between workers of a table."""

    node: Int[NumpyArray, " reductions"]  # node; they go by stage
    end: Float[NumpyArray, " reductions"]  # of the last gradient [unit slots]
    reduction: Int[NumpyArray, " copies"]  # all-reduce in which a copy of a stage takes part
    worker: Int[NumpyArray, " copies"]  # worker that holds the copy


class ProgramBuilder:
    """Collects nodes and edges; node 0 is the source."""

    def __init__(self, table: ScheduleTable, links: Links, layout: CostLayout) -> None:
        self.table, self.links, self.layout = table, links, layout
        self.node_of_cell = np.full(table.cells.phase.shape, SOURCE)
        self.reductions = Reductions(*np.zeros((4, 0), int))
        self._nodes: list[dict[str, NumpyArray]] = []
        self._num_nodes = 0
        self._gates: dict[int, int] = {}
        self._edges: list[NumpyArray] = []
        self.add_nodes(duration=np.array([ZERO]))

    @functools.cached_property
    def unit_ends(self) -> Float[NumpyArray, " cells"]:
        """End of each cell (cells) in the message-free run with unit slots."""
        return slot_times(self.table, self.table.grammar.unit_slots, shares=False, link=self.links)[
            1
        ].ravel()

    def add_nodes(self, *, duration: NumpyArray, **fields: NumpyArray) -> Int[NumpyArray, " new"]:
        """Add nodes: (new) their numbers."""
        columns = {"duration": duration, **fields}
        size = len(duration)
        self._nodes.append(
            {
                name: np.asarray(columns.get(name, np.full(size, _EMPTY.get(name, -1))), np.int32)
                for name in _FIELDS
            }
        )
        self._num_nodes += size
        return np.arange(self._num_nodes - size, self._num_nodes)

    def add_cells(
        self, cells: Int[NumpyArray, " some"], *, duration: NumpyArray, **fields: NumpyArray
    ) -> Int[NumpyArray, " some"]:
        """Add a node for each of some cells of the table: (some) their numbers."""
        phase, stage, microbatch, pipe = (column.ravel()[cells] for column in self.table.cells)
        columns = {"duration": duration, "phase": phase, "stage": stage, **fields}
        columns |= {"microbatch": microbatch, "pipe": pipe}
        nodes = self.add_nodes(**columns)
        self.node_of_cell.reshape(-1)[cells] = nodes
        if self.table.grammar.collectives:
            together = np.isin(phase, self.table.grammar.collectives)
            self._open_together(nodes[together], cells[together])
        return nodes

    def _open_together(
        self, nodes: Int[NumpyArray, " some"], cells: Int[NumpyArray, " some"]
    ) -> None:
        """Let the cells of one op on all workers start when all workers have reached it."""
        # A gate of no duration waits for the predecessors of all these nodes, and they wait for it.
        assert self.table.first_cells is not None
        _, first, group = np.unique(
            self.table.first_cells[cells], return_index=True, return_inverse=True
        )
        fields = {name: getattr(self.table.cells, name).ravel()[cells[first]] for name in _OF_GATES}
        gates = self.add_nodes(duration=np.full(len(first), ZERO), **fields)
        self.add_edges(gates[group], nodes, ZERO)
        self._gates |= dict(zip(nodes.tolist(), gates[group].tolist(), strict=True))

    def durations(self, cells: Int[NumpyArray, " some"]) -> Int[NumpyArray, " some"]:
        """Position of the duration of the first op of each of some cells of the table (some)."""
        table = self.table
        phase, place = table.phase.ravel()[cells], table.stage.ravel()[cells]
        if table.grammar.worker_phases:
            is_worker_op = np.isin(phase, table.grammar.worker_phases)
            place = np.where(is_worker_op, cells // table.num_slots, place)
        return self.layout.op(phase, place)

    def _column(self, name: str) -> Int[NumpyArray, " nodes"]:
        return np.concatenate([columns[name] for columns in self._nodes])

    def add_edges(
        self,
        tail: Int[NumpyArray, " new"],
        head: Int[NumpyArray, " new"],
        lag: int | Int[NumpyArray, " new"],
    ) -> None:
        """Add edges; at a tie the one that was added first wins."""
        if self._gates:
            head = np.array([self._gates.get(node, node) for node in head.tolist()], int)
        edges = [tail, head, np.broadcast_to(lag, np.shape(tail))]
        self._edges.append(np.stack(edges, dtype=np.int32, casting="same_kind"))

    def add_chains(self, nodes: Int[NumpyArray, " some"], key: Int[NumpyArray, " some"]) -> None:
        """Chain nodes that share a key, in the order given."""
        order = np.argsort(key, kind="stable")
        same = key[order][1:] == key[order][:-1]
        self.add_edges(nodes[order][:-1][same], nodes[order][1:][same], ZERO)

    def next_in_row(self, nodes: Int[NumpyArray, " some"]) -> Int[NumpyArray, " some"]:
        """Return the op after each op in its worker's row, or -1 after the last."""
        # Sharding cells and waits are no ops. Returns (some) nodes.
        worker = self._column("worker")
        is_op = np.isin(self._column("phase"), self.table.grammar.row_ops)
        on_worker = np.flatnonzero((worker != NO_WORKER) & is_op)
        on_worker = on_worker[np.argsort(worker[on_worker], kind="stable")]
        following = np.full(self._num_nodes, -1)
        same = worker[on_worker[1:]] == worker[on_worker[:-1]]
        following[on_worker[:-1][same]] = on_worker[1:][same]
        return following[nodes]

    def row_ends(self) -> Int[NumpyArray, " workers"]:
        """Return the last node that was added on each worker."""
        ends = np.full(self.table.num_workers, SOURCE)
        worker = self._column("worker")
        ends[worker[worker != NO_WORKER]] = np.flatnonzero(worker != NO_WORKER)
        return ends

    def finish(self, messages: MessageTable, pairs: Int[NumpyArray, "pairs 3"]) -> Program:
        """Sort the nodes topologically and lay the edges out as a table of predecessors."""
        tail, head, lag = self._distinct_edges()
        try:
            order = topological_order(self._num_nodes, tail, head, self.table.num_workers)
        except CycleError as error:
            raise self._deadlock(error.cycle) from None
        number = np.empty_like(order)
        number[order] = np.arange(self._num_nodes)
        by_head, column, shape = lay_out_edges(self._num_nodes, number[head])
        preds, lags = np.full(shape, SOURCE, np.int32), np.full(shape, ZERO, np.int32)
        heads = number[head][by_head]
        preds[heads, column], lags[heads, column] = number[tail][by_head], lag[by_head]
        nodes = {name: self._column(name)[order] for name in _FIELDS}
        no_ops = (*self.table.grammar.sharding, *WAIT_SEND)
        is_op = (nodes["worker"] != NO_WORKER) & ~np.isin(nodes["phase"], no_ops)
        on_worker = np.flatnonzero(is_op)
        first_node, last_node = np.zeros((2, self.table.num_workers), np.int32)
        last_node[nodes["worker"][on_worker]] = on_worker
        first_node[nodes["worker"][on_worker[::-1]]] = on_worker[::-1]
        forward, backward = self.layout.op(Phase.F, pairs[:, 0]), self.layout.op(*pairs.T[1:])
        return Program(
            preds=preds,
            lag_index=lags,
            duration_index=nodes.pop("duration"),
            pair_index=np.stack([forward, backward], axis=1).astype(np.int32),
            pair_stage=pairs[:, 0].astype(np.int32),
            fused=self._fused(number).astype(np.int32),
            **nodes,
            node_of_cell=number[self.node_of_cell].astype(np.int32),
            messages=messages._replace(
                producer=number[messages.producer],
                carrier=number[messages.carrier],
                consumer=number[messages.consumer],
            ),
            first_node=first_node,
            last_node=last_node,
            layout=self.layout,
            num_microbatches=self.table.num_microbatches,
            name=self.table.name,
            links=self.links,
        )

    def _distinct_edges(self) -> Int[NumpyArray, "3 edges"]:
        """Tails, heads and lags of all edges, each once; the builder keeps none."""
        # Two lags between the same nodes are two edges: fused pairs may send each other an
        # activation and a gradient.
        edges = np.concatenate(self._edges, axis=1)
        self._edges.clear()
        ends = edges[0] * np.int64(self._num_nodes) + edges[1]
        order = np.lexsort((edges[2], ends))
        repeats = np.diff(ends[order]) == 0
        repeats &= np.diff(edges[2, order]) == 0
        return np.delete(edges, order[1:][repeats], axis=1) if repeats.any() else edges

    def _fused(self, number: Int[NumpyArray, " nodes"]) -> Int[NumpyArray, "fused 2"]:
        """Node of each fused pair, by its number in the program, and its backward's microbatch."""
        cells = np.flatnonzero(self.table.is_fused.ravel())
        backward = self.table.partners.microbatch.ravel()[cells]
        return np.stack([number[self.node_of_cell.ravel()[cells]], backward], axis=1)

    def _deadlock(self, cycle: list[int]) -> ScheduleError:
        """Name the cycle, op by op and transfer by transfer."""
        fields = ("phase", "stage", "microbatch", "pipe", "worker", "sender", "receiver")
        nodes = np.stack([self._column(name)[cycle] for name in fields], axis=1).tolist()
        nodes = [node for node in nodes if node[0] != Phase.IDLE]  # gates have no name
        names: list[str] = []
        for phase, stage, microbatch, pipe, worker, sender, receiver in nodes:
            kind = self.table.grammar.phases[phase]
            op = self.table.grammar.text((Op(kind, stage, microbatch),))
            if phase in self.table.grammar.host:  # it stands in the row of its stage's worker
                names.append(f"{op} (host link of worker {self.table.placement[pipe, stage]})")
            elif not kind.kind.in_cells:
                names.append(f"{op} ({kind.kind.name})")
            elif sender == NO_WORKER:
                lane = f"lane {kind.kind.lane}" if worker == NO_WORKER else f"worker {worker}"
                names.append(f"{op} ({lane})")
            elif self.table.grammar.has_usual_messages:
                receive = matching_receive(Op(kind, stage, microbatch))
                names.append(f"{op}/{receive} (worker {sender} to {receiver})")
            else:
                names.append(f"{op} (worker {sender} to {receiver})")
        links = self.links
        scope = f" with one queue per {links.queues}" if links.is_rendezvous else ""
        scope += " and posting by program" if links.posting == "program" else ""
        if links.shared_links:
            scope += f"{' and' if scope else ' with'} shared links"
        # an all-reduce has no row to mark; the op that it waits for has one
        phase, stage, microbatch, pipe, worker, sender, _ = next(
            node for node in nodes if self.table.grammar.phases[node[0]].kind.in_cells
        )
        cells = self.table.cells
        same = (cells.phase == phase) & (cells.stage == stage) & (cells.microbatch == microbatch)
        return self.table.error(
            f"deadlock under {links.text}{scope}: nothing in this cycle can start: "
            + " -> ".join([*names, names[0]]),
            int(self.table.placement[pipe, stage])
            if phase in self.table.grammar.host
            else max(worker, sender, 0),
            int(np.argwhere(same)[0][1]) if same.any() else None,
        )
