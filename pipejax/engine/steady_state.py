"""Periods of a schedule: table columns whose ops repeat with later microbatches.

A program is cut where a column begins. The frontier of a cut is the set of nodes before it for
which later nodes wait. Suppose that the columns of a period repeat, with all microbatches shifted
by the same number, and that the frontier repeats too. Then each repetition maps the finish times of
its frontier to those of the next frontier by the same function.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np

from pipejax.base.cached_method import cached_method
from pipejax.base.jax_on_demand import register
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, IntArray, Program
from pipejax.schedules.cells.ops import INPUT_GRADS, NO_MICROBATCH, STEP_END, Phase

NOT_IN_TABLE = -1
ENDS = -1  # entry of a frontier: the latest finish so far, of all nodes without successors

Kind = tuple[int, ...]  # phase, stage, pipe, worker, sender and receiver of a node
Key = tuple[Kind, int]  # kind and microbatch
Frontier = list[int]  # nodes; the source first and `ENDS` second


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Table columns between two cuts: a map from finish times at one cut to those at the next."""

    # An index i < num_inputs is entry i of the frontier before; num_inputs + k is `nodes[k]`.

    nodes: IntArray  # (nodes) nodes of the program, in order
    preds: IntArray  # (nodes, max_preds) indices of predecessors
    outputs: IntArray  # (frontier) indices of the next frontier
    sinks: IntArray  # (sinks) indices of nodes without successors
    num_inputs: int = dataclasses.field(metadata={"static": True})  # size of the frontier before


register(Piece)


class Period(NamedTuple):
    """Columns that repeat (a period), and the columns between the previous period and this one."""

    lead_in: Piece  # columns from the period before this one, or from the start
    piece: Piece  # one period; its frontiers before and after have the same order
    microbatches: int  # microbatches of one period, in all pipes


class SteadyState(NamedTuple):
    """A program cut into periods, each of which can be repeated for more microbatches."""

    periods: tuple[Period, ...]
    last_piece: Piece  # columns after the last cut
    microbatches: int  # the number of microbatches grows by multiples of this


@cached_method
def steady_state(program: Program) -> SteadyState:
    """Find the repeating columns of a program, and cut it into these periods."""
    # Columns with equal signatures at a fixed distance are a period if the frontier (nodes before a
    # column that later nodes wait for) repeats too. Frontiers are matched node by node, so the next
    # period reads its inputs from the outputs of this one.
    columns = _Columns(program)
    spans = sorted(_select_spans(columns, program.num_microbatches), key=lambda span: span.cut)
    microbatches = math.lcm(*(span.microbatches for span in spans))
    periods, last_cut = [], 0
    last_frontier: Frontier = [SOURCE, ENDS]
    for span in spans:
        start, end = columns.matched_frontiers(span)
        periods.append(
            Period(
                columns.piece(last_cut, span.cut, last_frontier, start),
                columns.piece(span.cut, span.cut + span.length, start, end),
                span.microbatches,
            )
        )
        # the period runs in place of all repetitions, so the next piece begins at its first column
        last_cut, last_frontier = span.cut, start
    last_piece = columns.piece(last_cut, columns.num_columns, last_frontier, [SOURCE, ENDS])
    return SteadyState(tuple(periods), last_piece, microbatches)


class _PeriodSpan(NamedTuple):
    """A range of columns that repeats directly afterwards, with later microbatches."""

    cut: int  # first column
    length: int  # number of columns
    shift: int  # increase of microbatches from one repetition to the next
    repeats: int
    microbatches: int = 0  # microbatches of one period, in all pipes


class _Columns:
    """Nodes of a program by table column, with the data to compare columns."""

    def __init__(self, program: Program) -> None:
        self.preds = np.asarray(program.preds).tolist()  # (nodes, max_preds), as `lags`
        self.lags = np.asarray(program.lag_index).tolist()
        self.durations = np.asarray(program.duration_index).tolist()
        self.microbatch = np.asarray(program.microbatch).tolist()
        fields = (
            self._phases(program),
            program.stage,
            program.pipe,
            self._rows(program),
            program.sender,
            program.receiver,
        )
        self.kind: list[Kind] = list(zip(*(np.asarray(f).tolist() for f in fields), strict=True))
        self.backward = _backwards_of_pairs(program)  # {node of a fused pair: its backward}
        self.column = self._column_of_nodes(program)
        self.num_columns = 1 + max(self.column)
        self.nodes: list[list[int]] = [[] for _ in range(self.num_columns)]
        for node in range(1, program.num_nodes):
            self.nodes[self.column[node]].append(node)
        self.last_reader = [NOT_IN_TABLE] * program.num_nodes  # last successor's column, by node
        for node in range(1, program.num_nodes):
            for pred in self.preds[node]:
                self.last_reader[pred] = max(self.last_reader[pred], self.column[node])

    def _phases(self, program: Program) -> IntArray:
        """Return each node's phase code (nodes); a gate has minus the code of its collective."""
        phase = np.array(program.phase)
        for node, preds in enumerate(self.preds):
            gates = [pred for pred in preds if pred != SOURCE and phase[pred] <= Phase.IDLE]
            phase[gates] = -phase[node]
        return phase

    @staticmethod
    def _rows(program: Program) -> IntArray:
        """Return the worker of each node (nodes): of its row, or of the compute that it uses."""
        worker, cells = np.array(program.worker), np.asarray(program.node_of_cell)
        row, slot = np.nonzero(cells != SOURCE)
        worker[cells[row, slot]] = row
        return worker

    def _column_of_nodes(self, program: Program) -> list[int]:
        """Return each node's column: its cell's column, or a predecessor's if this is later."""
        cells = np.asarray(program.node_of_cell)
        column = np.full(program.num_nodes, NOT_IN_TABLE)
        worker, slot = np.nonzero(cells != SOURCE)
        # NumPy keeps the last of several assignments; with reversed arrays, the first cell of a
        # node
        column[cells[worker, slot][::-1]] = slot[::-1]
        columns: list[int] = column.tolist()
        columns[SOURCE] = 0
        for node in range(1, program.num_nodes):
            columns[node] = max(columns[node], *(columns[pred] for pred in self.preds[node]))
        return columns

    def signature(self, column: int) -> Hashable:
        """Return a tuple that describes a column's nodes and edges, equal if the column repeats."""
        return tuple(sorted(self._node_signature(node) for node in self.nodes[column]))

    def _node_signature(self, node: int) -> tuple[object, ...]:
        """Return a tuple that describes a node and its edges; repetitions have equal tuples."""
        edges: list[tuple[object, ...]] = []
        for pred, lag in zip(self.preds[node], self.lags[node], strict=True):
            if pred == SOURCE:
                edges.append(((), lag))
            else:
                microbatch_shift = self.microbatch[pred] - self.microbatch[node]
                column_shift = self.column[node] - self.column[pred]
                edges.append((self.kind[pred], microbatch_shift, column_shift, lag))
        _, backward_microbatch = self.backward.get(node, (None, None))
        shift = None if backward_microbatch is None else backward_microbatch - self.microbatch[node]
        return self.kind[node], self.durations[node], shift, tuple(edges)

    def work(self, node: int) -> list[Kind]:
        """List the kinds of work of a node: a full backward counts as its parts I and W."""
        # A kind is a tuple (phase, stage, ..). A fused pair of F and B has the kinds F, I and W.
        kind = self.kind[node]
        kinds = [] if kind[0] == Phase.B else [kind]
        backward = self.backward[node][0] if node in self.backward else kind
        phase, *place = backward
        if phase in INPUT_GRADS:
            kinds.append((Phase.I, *place))
        if phase == Phase.B:
            kinds.append((Phase.W, *place))
        return list(dict.fromkeys(kinds))

    def keys(self, column: int) -> list[Key]:
        """List kind and microbatch of each node in a column, sorted."""
        return sorted((self.kind[node], self.microbatch[node]) for node in self.nodes[column])

    def frontier(self, cut: int) -> Frontier:
        """List the nodes before a cut for which some node after the cut waits."""
        crossing = (
            node
            for node in range(1, len(self.column))
            if self.column[node] < cut <= self.last_reader[node]
        )
        return [SOURCE, ENDS, *crossing]

    def matched_frontiers(self, span: _PeriodSpan) -> tuple[Frontier, Frontier]:
        """Return (frontier before a period, frontier after it) in matching order, or ([], [])."""
        start, end = self.frontier(span.cut), self.frontier(span.cut + span.length)
        end_nodes = {self._key(node): node for node in end}
        matches = []
        for node in start:
            kind, microbatch = self._key(node)
            # a node matches its copy in a later microbatch, or (source, last end) itself
            copy, unshifted = (kind, microbatch + span.shift), (kind, microbatch)
            match = end_nodes.get(copy, end_nodes.get(unshifted))
            if match is None:
                return [], []
            matches.append(match)
        return (start, matches) if sorted(matches) == sorted(end) else ([], [])

    def _key(self, node: int) -> Key:
        return (self.kind[node], self.microbatch[node]) if node > SOURCE else ((node,), 0)

    def piece(self, start: int, end: int, inputs: Frontier, outputs: Frontier) -> Piece:
        """Build the sub-graph of columns `start` to `end`; nodes without a reader are sinks."""
        nodes = sorted(itertools.chain.from_iterable(self.nodes[start:end]))
        index = {node: k for k, node in enumerate([*inputs, *nodes])}
        sinks = [index[node] for node in nodes if self.last_reader[node] == NOT_IN_TABLE]
        preds = [[index[pred] for pred in self.preds[node]] for node in nodes]
        max_preds = len(self.preds[SOURCE])  # rows of `preds` have one length, padded with SOURCE
        return Piece(
            nodes=np.array(nodes, int),
            preds=np.array(preds, int).reshape(-1, max_preds),
            outputs=np.array([index[node] for node in outputs], int),
            sinks=np.array(sinks, int),
            num_inputs=len(inputs),
        )


def _backwards_of_pairs(program: Program) -> dict[int, Key]:
    """Return {node of a fused pair: (kind, microbatch) of its backward}."""
    layout = program.layout
    pair_nodes, microbatch = np.asarray(program.fused).T
    pair = np.asarray(program.duration_index)[pair_nodes] - layout.first_pair
    phase, stage = layout.op_at(np.asarray(program.pair_index)[pair, 1])
    microbatch_pipes = np.zeros(program.num_microbatches, int)
    node_microbatches, node_pipes = np.asarray(program.microbatch), np.asarray(program.pipe)
    has_microbatch = node_microbatches != NO_MICROBATCH
    microbatch_pipes[node_microbatches[has_microbatch]] = node_pipes[has_microbatch]
    pipe, worker = microbatch_pipes[microbatch], np.asarray(program.worker)[pair_nodes]
    none = np.full_like(pair_nodes, NO_WORKER)  # no sender and no receiver
    kinds = map(tuple, np.stack([phase, stage, pipe, worker, none, none], axis=1).tolist())
    keys = zip(kinds, microbatch.tolist(), strict=True)
    return dict(zip(pair_nodes.tolist(), keys, strict=True))


def _select_spans(columns: _Columns, num_microbatches: int) -> list[_PeriodSpan]:
    """Select the longest periods that together do every kind of work once per microbatch."""
    # An op that occurs only outside periods need not repeat if other ops do its kind of work.
    # Raise a ValueError if no periods do all kinds.
    kinds: set[Kind] = set()
    for node in itertools.chain.from_iterable(columns.nodes):
        if columns.microbatch[node] != NO_MICROBATCH:
            kinds.update(columns.work(node))
    spans: list[_PeriodSpan] = []
    covered: set[Kind] = set()
    for span in _candidates(columns):
        counts: Counter[Kind] = Counter()
        for node in itertools.chain.from_iterable(columns.nodes[span.cut : span.cut + span.length]):
            counts.update(columns.work(node))
        # every microbatch has its own ops; an update, and its all-reduce, is for several
        op_counts = {kind: count for kind, count in counts.items() if kind[0] not in STEP_END}
        num_pipes = len({pipe for _, _, pipe, *_ in op_counts})
        # a pipe does each kind of work once per microbatch
        microbatches = num_pipes * max(op_counts.values(), default=0)
        # a repetition by chance is short
        is_steady = 2 * span.repeats * microbatches >= num_microbatches
        if is_steady and len(set(op_counts.values())) == 1 and not covered & set(counts):
            spans.append(span._replace(microbatches=microbatches))
            covered |= set(counts)
        if covered == kinds:
            return spans
    phase, stage, *_ = min(kinds - covered)
    raise ValueError(
        f"the {columns.num_columns} columns of the table have no period: {len(kinds - covered)} of "
        f"{len(kinds)} kinds of ops do not repeat regularly, such as phase {phase} of stage "
        f"{stage}; a table with more microbatches, four times as many as workers, may have one"
    )


def _candidates(columns: _Columns) -> Iterator[_PeriodSpan]:
    """Yield candidate periods: first those that repeat over most columns, then the shortest."""
    signatures = [columns.signature(column) for column in range(columns.num_columns)]
    signature_ids = {signature: k for k, signature in enumerate(dict.fromkeys(signatures))}
    ids = np.array([signature_ids[signature] for signature in signatures])
    series = []  # (size, -length, start) of columns in a row that equal the column `length` later
    for length in range(1, columns.num_columns // 2 + 1):
        # a series begins and ends where `repeats` changes; ids a b c b c b d, length 2:
        #   repeats 0 1 1 1 0, and with a 0 at both ends the changes are at 1 and 4
        repeats = np.concatenate([[False], ids[length:] == ids[:-length], [False]])
        bounds = np.flatnonzero(repeats[1:] != repeats[:-1]).reshape(-1, 2)
        for start, end in bounds.tolist():
            if end - start >= length:
                series.append((end - start, -length, start))
    for size, negative_length, start in sorted(series, reverse=True):
        yield from _first_span(columns, start, start + size, -negative_length)


def _first_span(columns: _Columns, start: int, end: int, length: int) -> Iterator[_PeriodSpan]:
    """Yield the first period between `start` and `end` whose frontier repeats too, if any."""
    shifts: set[int] = set()  # microbatch differences of nodes and the same nodes `length` later
    for column in range(start, end):
        pairs = zip(columns.keys(column), columns.keys(column + length), strict=True)
        shifts |= {later - earlier for (_, earlier), (_, later) in pairs}
    if len(shifts) != 1 or min(shifts) < 1:
        return
    for cut in range(start, end - length + 1):
        span = _PeriodSpan(cut, length, min(shifts), repeats=(end - start) // length + 1)
        if any(columns.matched_frontiers(span)):
            yield span
            return
