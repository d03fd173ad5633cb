"""Run that is changed step by step: each change runs only the nodes behind it again.

For an editor, or for a search that tries one small change after the other: another time of one op,
other costs, two ops of a row swapped. Every change can be undone.
"""

from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.analysis.runs.timeline import Bar, bars
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, number
from pipejax.base.display import ResultDict, with_short_repr
from pipejax.base.incremental_path import Awaited, IncrementalPath, LongestAround, to_waits
from pipejax.base.longest_path import CycleError
from pipejax.base.trees import mapped
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.link_models import check_eager
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, ZERO, Program
from pipejax.engine.pricing import by_microbatch, cost_vector, ends_step
from pipejax.schedules.cells.ops import WORKER, Op, ScheduleError
from pipejax.schedules.table.table import ScheduleTable, row_order

ROUNDING = 1e-12  # relative: what is closer may be equal
Edge = tuple[int, int]  # node, and position of the lag in the cost vector


class _Change(NamedTuple):
    edges: dict[int, list[Edge]]
    rows: tuple[int, int] | None  # queue, and place of the first of two that were swapped
    vector: Float[NumpyArray, " costs"]


@with_short_repr("makespan")
class IncrementalRun:
    """A run that is kept up to date while it is changed.

    Finish times are those of a full evaluation, bit by bit.

    Args:
      evaluation: where it starts.

    Cost:
      A change costs about a microsecond for each op whose time it moves, and for those that wait
      for such an op: see `python -m benchmarks.incremental`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.analysis.IncrementalRun(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)))
      >>> run.makespan, run.set_duration("1B0", 4.0), run.swap("0F2", "0B1"), run.undo()
      (15.0, 17.0, 20.0, 17.0)
    """

    def __init__(self, evaluation: Evaluation) -> None:
        check_types(evaluation=(evaluation, Evaluation))
        self._start = evaluation.table
        self._program = program = by_microbatch(evaluation.program)
        self._ends_step = ends_step(evaluation.costs)
        shares = max(len({*stages}) for stages in _stages(evaluation.table)) > 1
        self._hangs_on_rows = (
            evaluation.links.carries
            or evaluation.table.offloads
            or evaluation.table.updates_within
            or bool(evaluation.table.grammar.collectives or evaluation.table.grammar.lane_sharding)
            or (self._ends_step and shares)
        )
        self._vector = self._price(evaluation.costs)
        lags = np.asarray(program.lag_index)
        self._path = IncrementalPath(
            np.asarray(program.preds), self._vector[program.duration_index], self._vector[lags]
        )
        self._edges: list[list[Edge]] = [
            [edge for edge in zip(*row, strict=True) if edge[0] != SOURCE]
            for row in zip(np.asarray(program.preds).tolist(), lags.tolist(), strict=True)
        ]
        extra_nodes = program.beside_cells
        self._reductions = {*extra_nodes[program.worker[extra_nodes] == NO_WORKER].tolist()}
        self._node = {_name(bar): bar.node for bar in bars(evaluation)}
        self._ops = {bar.node: bar.ops for bar in bars(evaluation)}
        self._queues = _queues(evaluation.table, program)
        self._place = {
            node: (number, k)
            for number, queue in enumerate(self._queues)
            for k, node in enumerate(queue)
        }
        node_by_cell = program.node_of_cell.ravel()
        self._in_cells = set(node_by_cell.tolist()) - {SOURCE}
        needs = evaluation.table.dependencies
        ends = (node_by_cell[cells].tolist() for cells in (needs.producer, needs.consumer))
        self._needs = set(zip(*ends, strict=True))
        self._readers = _readers(np.asarray(program.duration_index), lags)
        self._changes: list[_Change] = []
        self._around: LongestAround | None = None

    @property
    def makespan(self) -> float:
        """The last end [s]."""
        return self._path.makespan

    @property
    def finish(self) -> dict[str, float]:
        """Return the end of each op [s], by its text."""
        return ResultDict((name, self._path.finish[node]) for name, node in self._node.items())

    @property
    def table(self) -> ScheduleTable:
        """The schedule as it is now; where ops are swapped, without idle and SEND or RECV cells."""
        if all(queue == sorted(queue) for queue in self._queues):  # nodes are numbered along them
            return self._start
        coming = [map(self._ops.__getitem__, queue) for queue in self._queues]
        return self._start.with_rows(
            [
                [next(coming[self._place[node][0]]) for node in row if node in self._in_cells]
                for row in self._program.node_of_cell.tolist()
            ]
        )

    def set_duration(self, op: str | Op, seconds: float) -> float:
        """Give one op another time.

        Args:
          op: the op, as "0F1", or the text of a fused pair.
          seconds: what it takes [s].

        Returns:
          The makespan [s].

        Raises:
          ValueError: if there is no such op, or the time is negative or not finite.
        """
        node = self._find_node(op)
        self._keep({}, None, self._vector)
        self._path.change({node: number(seconds, "seconds")})
        return self.makespan

    def makespan_if(self, op: str | Op, seconds: float) -> float:
        """Return the makespan if one op took another time; nothing changes.

        The longest path through the op and the longest of all others: both are known for every op
        after the first question, so those that follow take a few microseconds each.

        Args:
          op: the op, as for `set_duration`.
          seconds: what it would take [s].

        Returns:
          The makespan [s], added up in another order than a run adds it: equal up to rounding,
          and exactly where sums of the costs are exact.

        Raises:
          ValueError: as `set_duration`.
        """
        node, around = self._find_node(op), self._paths_around()
        through = around.start[node] + number(seconds, "seconds") + around.tail[node]
        return max(around.without[node], through)

    def set_costs(self, costs: Costs) -> float:
        """Change the costs; only nodes with another time are run again.

        Times of single ops that were set stay where the costs of these ops stay.

        Args:
          costs: unbatched costs [s].

        Returns:
          The makespan [s].

        Raises:
          ValueError: as `evaluate`, or if all-reduce and update cost nothing in these costs and
            something in those before, or the other way: they are part of one run alone.
        """
        check_types(costs=(costs, Costs))
        costs.check_values()
        if ends_step(costs) != self._ends_step:
            text = "all_reduce and update must cost nothing, or something, as in the evaluation"
            raise ValueError(f"{text} that the run began with")
        vector = self._price(costs)
        before, self._vector = self._vector, vector
        self._keep({}, None, before)
        moved = np.flatnonzero(vector != before).tolist()
        lasting = {node for position in moved for node in self._readers[0].get(position, ())}
        waiting = {node for position in moved for node in self._readers[1].get(position, ())}
        index = self._program.duration_index
        self._path.change(
            {node: float(vector[index[node]]) for node in lasting},
            {node: self._waits(node) for node in waiting},
        )
        return self.makespan

    def swap(self, first: str | Op, second: str | Op) -> float:
        """Swap two ops that follow each other in a worker's row, or on a lane beside it.

        Args:
          first: an op.
          second: the op behind it.

        Returns:
          The makespan [s].

        Raises:
          ValueError: if the ops do not follow each other; or the order of something else hangs on
            theirs: of messages on any link but delay, of all-reduces that share a worker, of
            offloads, of updates in cells, of what all workers do together.
          ScheduleError: if one waits for the other; nothing is changed then.
        """
        early, late, queue, slot = self._neighbours(first, second)
        edges = self._swapped(early, late, *self._row_neighbours(queue, slot))
        previous = {node: self._edges[node] for node in edges}
        try:
            if (early, late) in self._needs:
                raise CycleError([early, late])
            self._replace(edges)
            self._path.change(waits={node: self._waits(node) for node in edges})
        except CycleError:
            self._replace(previous)
            raise ScheduleError(f"{second} cannot come before {first}: it waits for it") from None
        self._keep(previous, (queue, slot), self._vector)
        self._swap_in_queue(queue, slot)
        return self.makespan

    def makespan_if_swapped(self, first: str | Op, second: str | Op) -> float:
        """Return the makespan if two ops of a row were swapped; nothing changes.

        From the longest paths around both, where these decide it: a few microseconds. Where they
        do not, because all longest paths lead through one of the ops and the swap shortens them, or
        the second op waits for a message at the time, the ops are swapped and swapped back.

        Args:
          first: an op.
          second: the op behind it.

        Returns:
          The makespan [s], equal up to rounding, and exactly where sums of the costs are exact.

        Raises:
          ValueError: as `swap`.
          ScheduleError: as `swap`.
        """
        makespan = self._makespan_from_paths(*self._neighbours(first, second))
        if makespan is None:
            around, makespan = self._around, self.swap(first, second)
            self.undo()
            self._around = around
        return makespan

    def undo(self) -> float:
        """Take the last change back that was not taken back yet.

        Returns:
          The makespan [s].

        Raises:
          ValueError: if there is none.
        """
        if not self._changes:
            raise ValueError("there is no change to undo")
        change, self._around = self._changes.pop(), None
        self._replace(change.edges)
        self._vector = change.vector
        if change.rows is not None:
            self._swap_in_queue(*change.rows)
        self._path.undo()
        return self.makespan

    def _paths_around(self) -> LongestAround:
        if self._around is None:
            self._around = self._path.longest_around()
        return self._around

    def _neighbours(self, first: str | Op, second: str | Op) -> tuple[int, int, int, int]:
        """Check two ops to swap; return their nodes, queue, and the place of the first."""
        early, late = self._find_node(first), self._find_node(second)
        if self._hangs_on_rows:
            raise ValueError(
                "link must be delay to swap ops, without offloads, updates in cells, several "
                "all-reduces on a worker or ops of all workers: their order would change too"
            )
        number, slot = self._place.get(early, (0, -1))
        queue = self._queues[number]
        if not {early, late} <= self._in_cells or queue[slot + 1 : slot + 2] != [late]:
            raise ValueError(f"{first} and {second} do not follow each other in a row")
        return early, late, number, slot

    def _row_neighbours(self, queue: int, slot: int) -> tuple[int, list[int]]:
        """Return the nodes before and behind two neighbours in a queue, if there are any."""
        row = self._queues[queue]
        return row[slot - 1] if slot else SOURCE, row[slot + 2 : slot + 3]

    def _makespan_from_paths(self, early: int, late: int, queue: int, slot: int) -> float | None:
        """Return the makespan after a swap from the paths around both nodes, or None."""
        # The swap changes only paths through one of the nodes. The longest other path avoids
        # one node, if it is longer than all paths through the other node.
        around, finish, duration = self._paths_around(), self._path.finish, self._path.duration
        before, followers = self._row_neighbours(queue, slot)
        others = [edge for edge in self._edges[late] if edge[0] != early]
        moves_reduction = not self._reductions.isdisjoint(self._path.successors[late])
        is_bound = moves_reduction or (early, late) in self._needs
        # ops that wait for the first op start after it; the second op must wait for none of them
        if is_bound or any(around.start[node] >= finish[early] for node, _ in others):
            return None

        def arrival(node: int, latest: float) -> float:
            edges = self._edges[node]
            waits = (finish[u] + self._vector[at] for u, at in edges if u not in (before, early))
            return float(max([latest, *waits]))

        def tail(node: int, least: float) -> float:
            rest = (v for v in self._path.successors[node] if v not in (late, *followers))
            after = (self._lag(node, v) + duration[v] + around.tail[v] for v in rest)
            return max([least, *after])

        end_late = arrival(late, finish[before]) + duration[late]
        end_early = arrival(early, end_late) + duration[early]
        tail_early = tail(early, max([0.0, *(duration[v] + around.tail[v] for v in followers)]))
        tail_late = tail(late, duration[early] + tail_early)
        through = max(end_early + tail_early, end_late + tail_late)
        if through >= self.makespan:
            return through
        for node, rest in ((early, late), (late, early)):
            least = around.start[rest] + duration[rest] + around.tail[rest]
            if around.without[node] > least * (1 + ROUNDING):
                return max(through, around.without[node])
        return None

    def _lag(self, node: int, consumer: int) -> float:
        """Lag [s] of the edge between two nodes, the largest where there are several."""
        return max(float(self._vector[at]) for u, at in self._edges[consumer] if u == node)

    def _keep(
        self,
        edges: dict[int, list[Edge]],
        rows: tuple[int, int] | None,
        vector: Float[NumpyArray, " costs"],
    ) -> None:
        self._changes.append(_Change(edges, rows, vector))
        self._around = None

    def _price(self, costs: Costs) -> Float[NumpyArray, " costs"]:
        exact = mapped(lambda leaf: np.asarray(leaf, np.float64), costs)
        if self._program.links.eager_below:
            check_eager(self._program, exact.transmit)
        return np.asarray(cost_vector(self._program, exact))

    def _find_node(self, op: str | Op) -> int:
        if str(op) not in self._node:
            raise ValueError(f"the run has no op {str(op)!r}")
        return self._node[str(op)]

    def _waits(self, node: int) -> Awaited:
        return to_waits((before, float(self._vector[at])) for before, at in self._edges[node])

    def _replace(self, edges: dict[int, list[Edge]]) -> None:
        for node, new in edges.items():
            self._edges[node] = new

    def _swap_in_queue(self, queue: int, slot: int) -> None:
        row = self._queues[queue]
        row[slot], row[slot + 1] = row[slot + 1], row[slot]
        self._place |= {row[slot]: (queue, slot), row[slot + 1]: (queue, slot + 1)}

    def _swapped(
        self, early: int, late: int, before: int, followers: list[int]
    ) -> dict[int, list[Edge]]:
        """Return the edges of the nodes that wait for other nodes after a swap."""
        edges = {
            early: [edge for edge in self._edges[early] if edge != (before, ZERO)] + [(late, ZERO)],
            late: [edge for edge in self._edges[late] if edge != (early, ZERO)],
        }
        if before != SOURCE:
            edges[late] = [*edges[late], (before, ZERO)]
        for node in followers:  # next in the row
            edges[node] = [(early, ZERO) if e == (late, ZERO) else e for e in self._edges[node]]
        # an all-reduce waits for the last gradient of its stage in the row
        ends = self._start.grammar.ends_backward
        stages = {op.stage for op in self._ops[early] if op.phase in ends}
        for node in self._reductions:
            if self._program.stage[node] in stages and (late, ZERO) in self._edges[node]:
                edges[node] = [(early, ZERO) if e == (late, ZERO) else e for e in self._edges[node]]
        return edges


def _name(bar: Bar) -> str:
    """Name an op; add the worker if the op belongs to no stage."""
    is_worker_op = bar.ops[0].phase.kind.scope == WORKER
    return f"{bar.label} (worker {bar.worker})" if is_worker_op else bar.label


def _queues(table: ScheduleTable, program: Program) -> list[list[int]]:
    """List the nodes of each row in order, then those of each lane beside it."""
    cells = row_order(table, table.grammar.side_phases)
    worker, node_by_cell = cells // table.num_slots, program.node_of_cell.ravel()
    lane = table.grammar.phase_lanes[table.phase.ravel()[cells]]
    queues = [np.flatnonzero(program.worker == w).tolist() for w in range(program.num_workers)]
    for pair in sorted({*zip(worker.tolist(), lane.tolist(), strict=True)}):
        queues.append(node_by_cell[cells[(worker == pair[0]) & (lane == pair[1])]].tolist())
    return queues


def _stages(table: ScheduleTable) -> list[list[int]]:
    return [
        np.argwhere(table.placement == worker)[:, 1].tolist() for worker in range(table.num_workers)
    ]


def _readers(*indices: NumpyArray) -> tuple[dict[int, list[int]], ...]:
    """List, for each array of positions, the nodes that read a position."""
    nodes_by_position: tuple[dict[int, list[int]], ...] = tuple({} for _ in indices)
    for readers, index in zip(nodes_by_position, indices, strict=True):
        for node, positions in enumerate(index.reshape(len(index), -1).tolist()):
            for position in positions:
                if position != ZERO:
                    readers.setdefault(position, []).append(node)
    return nodes_by_position
