"""Periods of a schedule: which columns of its table repeat with later microbatches.

A program is cut where a column begins: every node before the cut depends on nodes before it
alone. What crosses a cut is its frontier, the nodes before it that a later one waits for. Where
the columns of a period repeat, with all microbatches shifted by the same number, and so does the
frontier, the period acts on the frontier's finish times like the one before.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np

from pipejax.base.trees import register
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, IntArray, Program
from pipejax.schedules.cells.ops import INPUT_GRADS, NO_MICROBATCH, STEP_END, Phase

NOT_IN_TABLE = -1
ENDS = -1  # stands in a frontier for the last end of all nodes that nobody waits for

Kind = tuple[int, ...]  # what a node is, but for its microbatch
Key = tuple[Kind, int]
Frontier = list[int]  # nodes; the source first and `ENDS` second


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Columns between two cuts, as a map from one frontier to the next."""

    nodes: IntArray  # (nodes) nodes of the program, in order
    preds: IntArray  # (nodes, max_preds) place in the old frontier, or its size + place in `nodes`
    outputs: IntArray  # (frontier) the next frontier, in the same numbers
    sinks: IntArray  # (sinks) nodes that nobody waits for, in the same numbers
    # size of the frontier before the piece
    num_inputs: int = dataclasses.field(metadata={"static": True})


register(Piece)


class Period(NamedTuple):
    """A period and the piece that leads to it."""

    before: Piece  # what comes before, from the period before this one on or from the start
    piece: Piece  # one period; its frontiers before and after have the same meaning
    microbatches: int  # how many microbatches a period is for, of all pipes


class SteadyState(NamedTuple):
    """A program with places where periods can be put in."""

    periods: tuple[Period, ...]  # one for each part that grows
    rest: Piece  # what comes after the last cut
    microbatches: int  # by how many microbatches the program can grow


def steady_state(program: Program) -> SteadyState:
    """Find the periods of a schedule."""
    # Columns are compared by their content up to a shift (`signature`): kinds of nodes, and for
    # each edge how many microbatches and columns back it leads. Equal signatures a fixed length
    # apart are a run; a run in which the frontier repeats too is a period. Its frontiers are
    # matched node by node, so the next period reads its inputs where this one left its outputs.
    # source: Baccelli, Cohen, Olsder, Quadrat: Synchronization and Linearity (1992), chapter 3.
    columns = _Columns(program)
    chosen = sorted(_choose(columns, program.num_microbatches), key=lambda period: period.cut)
    microbatches = math.lcm(*(period.microbatches for period in chosen))
    periods, at = [], 0
    before: Frontier = [SOURCE, ENDS]
    for period in chosen:
        first, second = columns.matched(period)
        periods.append(
            Period(
                columns.piece(at, period.cut, before, first),
                columns.piece(period.cut, period.cut + period.length, first, second),
                period.microbatches,
            )
        )
        at, before = period.cut, first
    rest = columns.piece(at, columns.num_columns, before, [SOURCE, ENDS])
    return SteadyState(tuple(periods), rest, microbatches)


class _FoundPeriod(NamedTuple):
    """Columns cut to cut + length repeat from cut + length on, with later microbatches."""

    # Where microbatches alternate between pipes, each shifts by more than its own number of them.

    cut: int
    length: int
    shift: int
    repeats: int
    microbatches: int = 0  # of all pipes


class _Columns:
    def __init__(self, program: Program) -> None:
        self.preds = np.asarray(program.preds).tolist()
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
        self.backward = _backwards_of_pairs(program)
        self.column = self._column_of_nodes(program)
        self.num_columns = 1 + max(self.column)
        self.nodes: list[list[int]] = [[] for _ in range(self.num_columns)]
        for node in range(1, program.num_nodes):
            self.nodes[self.column[node]].append(node)
        self.last_reader = [NOT_IN_TABLE] * program.num_nodes  # column, of every node
        for node in range(1, program.num_nodes):
            for before in self.preds[node]:
                self.last_reader[before] = max(self.last_reader[before], self.column[node])

    def _phases(self, program: Program) -> IntArray:
        """Phase (nodes) of each node; of a gate that opens ops the negative of theirs."""
        phase = np.array(program.phase)
        for node, before in enumerate(self.preds):
            gates = [v for v in before if v != SOURCE and phase[v] <= Phase.IDLE]
            phase[gates] = -phase[node]
        return phase

    @staticmethod
    def _rows(program: Program) -> IntArray:
        """Worker (nodes) in whose row a node has its cell, or whose compute it occupies."""
        worker, cells = np.array(program.worker), np.asarray(program.node_of_cell)
        row, slot = np.nonzero(cells != SOURCE)
        worker[cells[row, slot]] = row
        return worker

    def _column_of_nodes(self, program: Program) -> list[int]:
        """First column (nodes) in which a node and all its predecessors have been placed."""
        cells = np.asarray(program.node_of_cell)
        column = np.full(program.num_nodes, NOT_IN_TABLE)
        worker, slot = np.nonzero(cells != SOURCE)
        # NumPy keeps the last of several assignments: in reverse, the first cell of a node counts
        column[cells[worker, slot][::-1]] = slot[::-1]
        columns: list[int] = column.tolist()
        columns[SOURCE] = 0
        for node in range(1, program.num_nodes):
            columns[node] = max(columns[node], *(columns[before] for before in self.preds[node]))
        return columns

    def signature(self, column: int) -> Hashable:
        """Content and edges of a column, up to a shift of its microbatches."""
        return tuple(sorted(self._links(node) for node in self.nodes[column]))

    def _links(self, node: int) -> tuple[object, ...]:
        edges = [
            (
                self.kind[before],
                self.microbatch[before] - self.microbatch[node],
                self.column[node] - self.column[before],
                lag,
            )
            if before != SOURCE
            else ((), lag)
            for before, lag in zip(self.preds[node], self.lags[node], strict=True)
        ]
        pair_backward = self.backward.get(node)
        shift = None if pair_backward is None else pair_backward[1] - self.microbatch[node]
        return self.kind[node], self.durations[node], shift, tuple(edges)

    def work(self, node: int) -> list[Kind]:
        """Return the kinds of work of a node: B counts as I and W, a fused pair also as F."""
        kind = self.kind[node]
        kinds = [kind] if kind[0] != Phase.B else []
        (phase, *rest), _ = self.backward.get(node, (kind, 0))
        if phase in INPUT_GRADS:
            kinds += [(Phase.I, *rest), *[(Phase.W, *rest)] * (phase == Phase.B)]
        return list(dict.fromkeys(kinds))

    def keys(self, column: int) -> list[Key]:
        return sorted((self.kind[node], self.microbatch[node]) for node in self.nodes[column])

    def frontier(self, cut: int) -> Frontier:
        """Nodes before a cut that a node after it waits for."""
        crossing = (
            node
            for node in range(1, len(self.column))
            if self.column[node] < cut <= self.last_reader[node]
        )
        return [SOURCE, ENDS, *crossing]

    def matched(self, period: _FoundPeriod) -> tuple[Frontier, Frontier]:
        """Frontiers before and after a period, in the same order; empty if they differ."""
        before, after = (self.frontier(cut) for cut in (period.cut, period.cut + period.length))
        place = {self._key(node): node for node in after}
        ordered = []
        # what has no microbatch of its own (source, last end) is its own successor
        for node in before:
            kind, microbatch = self._key(node)
            later = place.get((kind, microbatch + period.shift), place.get((kind, microbatch)))
            if later is None:
                return [], []
            ordered.append(later)
        return (before, ordered) if sorted(ordered) == sorted(after) else ([], [])

    def _key(self, node: int) -> Key:
        return (self.kind[node], self.microbatch[node]) if node > SOURCE else ((node,), 0)

    def piece(self, first: int, end: int, inputs: Frontier, outputs: Frontier) -> Piece:
        """Columns first to end, as a map from one frontier to another."""
        nodes = sorted(node for column in range(first, end) for node in self.nodes[column])
        place = {node: k for k, node in enumerate([*inputs, *nodes])}
        sinks = [place[node] for node in nodes if self.last_reader[node] == NOT_IN_TABLE]
        preds = [[place[before] for before in self.preds[node]] for node in nodes]
        width = len(self.preds[SOURCE])
        return Piece(
            np.array(nodes, int),
            np.array(preds, int).reshape(-1, width),
            np.array([place[node] for node in outputs], int),
            np.array(sinks, int),
            len(inputs),
        )


def _backwards_of_pairs(program: Program) -> dict[int, Key]:
    """Kind and microbatch of the backward of each fused pair, by its node."""
    layout = program.layout
    node, microbatch = np.asarray(program.fused).T
    pair = np.asarray(program.duration_index)[node] - layout.first_pair
    phase, stage = layout.op_at(np.asarray(program.pair_index)[pair, 1])
    pipes = np.zeros(program.num_microbatches, int)
    numbered = np.asarray(program.microbatch) != NO_MICROBATCH
    pipes[np.asarray(program.microbatch)[numbered]] = np.asarray(program.pipe)[numbered]
    none = np.full_like(node, NO_WORKER)
    kind = phase, stage, pipes[microbatch], np.asarray(program.worker)[node], none, none
    kinds = map(tuple, np.stack(kind, axis=1).tolist())
    return dict(zip(node.tolist(), zip(kinds, microbatch.tolist(), strict=True), strict=True))


def _choose(columns: _Columns, num_microbatches: int) -> list[_FoundPeriod]:
    """Choose the longest runs of periods that together do all that a microbatch needs, once."""
    # An op that stands elsewhere alone, as a backward that is split at the end of a table of fused
    # pairs, does not have to come again: what it does, others do.
    kinds = {
        kind
        for nodes in columns.nodes
        for node in nodes
        if columns.microbatch[node] != NO_MICROBATCH
        for kind in columns.work(node)
    }
    chosen: list[_FoundPeriod] = []
    covered: set[Kind] = set()
    for period in _candidates(columns):
        held = Counter(
            kind
            for column in range(period.cut, period.cut + period.length)
            for node in columns.nodes[column]
            for kind in columns.work(node)
        )
        # every microbatch has its own ops; updates, and the all-reduces before them, are for some
        op_counts = {kind: times for kind, times in held.items() if kind[0] not in STEP_END}
        count = len({pipe for _, _, pipe, *_ in op_counts}) * max(op_counts.values(), default=0)
        # what comes again by chance is short
        is_steady = 2 * period.repeats * count >= num_microbatches
        if is_steady and len(set(op_counts.values())) == 1 and not covered & set(held):
            chosen.append(period._replace(microbatches=count))
            covered |= set(held)
        if covered == kinds:
            return chosen
    kind = sorted(kinds - covered)[0]
    raise ValueError(
        f"{columns.num_columns} columns of the table hold no period: {len(kinds - covered)} of "
        f"{len(kinds)} kinds of ops never come again in step, among them phase {kind[0]} of stage "
        f"{kind[1]}; if it repeats itself at all, lower it with more microbatches, say four times "
        "as many as workers"
    )


def _candidates(columns: _Columns) -> Iterator[_FoundPeriod]:
    """Runs of periods, the longest first, and of those the one with the shortest period."""
    # `same` compares the sequence of signatures with itself, shifted by a length; where it
    # changes, a run begins or ends
    number: dict[Hashable, int] = {}
    sequence = np.array(
        [number.setdefault(columns.signature(c), len(number)) for c in range(columns.num_columns)]
    )
    runs = []
    for length in range(1, columns.num_columns // 2 + 1):
        same = np.concatenate([[False], sequence[length:] == sequence[:-length], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        runs += [
            (end - first, -length, first) for first, end in edges.tolist() if end - first >= length
        ]
    for size, minus_length, first in sorted(runs, reverse=True):
        yield from _first_cut(columns, first, first + size, -minus_length)


def _first_cut(columns: _Columns, first: int, end: int, length: int) -> Iterator[_FoundPeriod]:
    """Find the first cut in a run at which the frontier repeats too, if there is one."""
    shifts = {
        later[1] - earlier[1]
        for column in range(first, end)
        for earlier, later in zip(columns.keys(column), columns.keys(column + length), strict=True)
    }
    if len(shifts) != 1 or min(shifts) < 1:
        return
    for cut in range(first, end - length + 1):
        period = _FoundPeriod(cut, length, min(shifts), repeats=(end - first) // length + 1)
        if columns.matched(period)[0]:
            yield period
            return
