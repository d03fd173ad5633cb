"""Integer program over holdings: the best split by all known paths and the memory limits.

A variable for each stage and holding says that the stage has it. Everything is linear in these:
numbers of layers, order of their kinds, lengths of paths, memory of workers. The makespan is at
least the length of every path, so the program gives a lower bound, relaxed or not. Its solution is
run next, which adds paths (Kelley).

SciPy's solver (HiGHS) cannot be interrupted. It runs here for a second at most, and longer in a
process that can be killed.
"""

import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import op_counts
from pipejax.base import longest_path
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.progress import if_interrupted
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.engine.lowering.program import LINK_COSTS, SOURCE, HostRun, Program
from pipejax.schedules.cells.ops import TIMED
from pipejax.schedules.table.held_activations import HeldCounts
from pipejax.search.partition.holdings import HoldingPrices, Shares, Splits, dense_layers

Counts = Int[NumpyArray, " costs"]


class Cut(NamedTuple):
    """Path of a run: a lower bound on the step time of any split."""

    seconds: Float[NumpyArray, "holdings stages"]  # seconds of what it counts on each stage
    fixed: float  # of its messages [s]


class PathCuts:
    """Cuts from the runs of one program."""

    def __init__(self, program: Program, prices: HoldingPrices) -> None:
        self.program, self.prices = program, prices
        preds = np.asarray(program.preds)
        head, column = np.nonzero(preds != SOURCE)
        order = np.argsort(preds[head, column], kind="stable")
        self.head, self.column = head[order], column[order]
        tail = preds[self.head, self.column]
        self.first = np.searchsorted(tail, np.arange(len(preds) + 1))  # of each node's edges
        worker = np.asarray(program.worker)
        self.worker_nodes = [np.flatnonzero(worker == k) for k in range(program.num_workers)]
        self.seen: set[bytes] = set()
        self.cuts: list[Cut] = []

    def new_cuts(self, run: HostRun, vector: Float[NumpyArray, " costs"]) -> list[Cut]:
        """Return cuts of the critical path and of the longest path through each worker, if new."""
        new_cuts = []
        for counts in self._paths(run):
            if (key := counts.tobytes()) not in self.seen:
                self.seen.add(key)
                new_cuts.append(self.price_path(counts, vector))
        self.cuts += new_cuts
        return new_cuts

    def lower_bounds(
        self, points: Int[NumpyArray, "points stages"], begin: int = 0
    ) -> Float[NumpyArray, " points"]:
        """Return the longest known path from number `begin` on under each split (points) [s]."""
        longest = np.zeros(len(points))
        stages = np.arange(points.shape[1])
        for cut in self.cuts[begin:]:
            np.maximum(longest, cut.fixed + cut.seconds[points, stages].sum(axis=1), out=longest)
        return longest

    def _paths(self, run: HostRun) -> Iterator[Counts]:
        """Count (costs) how often the paths have each cost."""
        tails = longest_path.tails(run.preds, run.duration, run.lag)
        through = run.finish + tails
        for nodes in (np.arange(1, len(through)), *self.worker_nodes):
            if len(nodes):
                longest = int(nodes[through[nodes].argmax()])
                ends = self._before(run, longest), self._costs_after(run, tails, longest)
                yield self._counted([*ends[0], *ends[1]])
        index = np.asarray(self.program.duration_index)
        for nodes in self.worker_nodes:  # a worker's ops run one after the other
            if len(nodes):
                first, last = int(nodes[0]), int(nodes[-1])
                ends = self._before(run, first), self._costs_after(run, tails, last)
                yield self._counted([*ends[0], *index[nodes[1:]].tolist(), *ends[1]])

    def _counted(self, spent: list[int]) -> Counts:
        counts: Counts = np.bincount(spent, minlength=self.program.layout.size)
        return counts

    def _before(self, run: HostRun, node: int) -> list[int]:
        """List positions in the cost vector along the longest path to the end of a node."""
        program, positions = self.program, []
        while node != SOURCE:
            column = int((run.finish[run.preds[node]] + run.lag[node]).argmax())
            positions += [int(program.duration_index[node]), int(program.lag_index[node, column])]
            node = int(run.preds[node, column])
        return positions

    def _costs_after(
        self, run: HostRun, tails: Float[NumpyArray, " nodes"], node: int
    ) -> list[int]:
        """List the costs on the longest path from the end of a node."""
        program, spent = self.program, []
        while tails[node] > 0:
            edges = slice(self.first[node], self.first[node + 1])
            heads, columns = self.head[edges], self.column[edges]
            after = run.lag[heads, columns] + run.duration[heads] + tails[heads]
            best = int(after.argmax())
            node = int(heads[best])
            edge = node, columns[best]
            spent += [int(program.duration_index[node]), int(program.lag_index[edge])]
        return spent

    def price_path(self, counts: Counts, vector: Float[NumpyArray, " costs"]) -> Cut:
        """Return the seconds that each holding adds to a path per stage, and those of messages."""
        # A path costs the sum of counts times costs. A holding is a content of a stage, as a layer
        # or the head: its ops on the path count as often as the path passes the stage's ops.
        layout, prices = self.program.layout, self.prices
        weights = counts.astype(float)
        pairs = weights[layout.first_pair : layout.first_link, None]
        np.add.at(weights, self.program.pair_index, pairs * self._shares_of_pairs(vector))
        ops = weights[1 : layout.first_pair].reshape(len(TIMED), *layout.op_shape)
        seconds = np.zeros((len(prices.holdings), layout.num_stages))
        for phase, times in zip(TIMED, ops, strict=True):
            if times.any():
                seconds += in_sum(prices.seconds[PHASE_FIELDS[phase.name]], times)
        shape = (len(LINK_COSTS), *layout.link_shape)
        # counts of latencies, of transmit times, and of messages, which take both
        latency, transmit, message = weights[layout.first_link :].reshape(shape).sum(axis=-1)
        fixed = float(((latency + message) * prices.latency).sum())
        sent = ((transmit + message) * prices.transmit).sum(axis=(0, 1))  # (boundaries)
        # MTP layers on a stage make all messages after it longer: of boundaries that take [1 2 3],
        # they lengthen [6 5 3 0] seconds if they are on stage 0, 1, 2 or 3
        lengthened = prices.mtp_layers * np.append(np.cumsum(sent[::-1])[::-1], 0.0)
        seconds += prices.counts("mtp")[:, None] * lengthened
        return Cut(seconds, fixed + float(sent.sum()))

    def _shares_of_pairs(self, vector: Float[NumpyArray, " costs"]) -> Float[NumpyArray, "pairs 2"]:
        """Return for each op of a fused pair its share of the pair's time, as a lower bound."""
        # a pair takes max(F, B) + k min(F, B); with k <= 1 this is max(F + k B, B + k F), so the
        # one that holds in the run is a lower bound elsewhere; with k > 1 F + B is one
        factor = self.prices.pair_factor
        times = vector[self.program.pair_index]
        if factor is None or float(factor) >= 1:
            return np.ones(times.shape)
        is_longer = times >= times[:, ::-1]
        is_longer[:, 1] = ~is_longer[:, 0]  # at a tie the forward
        return np.where(is_longer, 1.0, float(factor))


def in_sum(
    seconds: Float[NumpyArray, "holdings stages *microbatches"],
    times: Float[NumpyArray, "stages columns"],
) -> Float[NumpyArray, "holdings stages"]:
    """Return seconds times how many `times` each stage runs an op, summed over its microbatches."""
    if seconds.ndim == times.ndim:
        return seconds * times.sum(axis=-1)
    total: Float[NumpyArray, "holdings stages"] = (seconds * times).sum(axis=-1)
    return total


def busy_of_stages(
    program: Program, pair_factor: float
) -> Callable[[Costs], Float[NumpyArray, " stages"]]:
    """Return a function from costs to the work of each stage, which bounds the step time [s].

    A fused pair counts as the part of both its ops that it surely takes.
    """
    layout = program.layout
    counts = op_counts(program).astype(float)
    pairs = counts[:, layout.first_pair : layout.first_link] * (1 + min(pair_factor, 1.0)) / 2
    # max(F, B) + k min(F, B) is at least (1 + k) / 2 (F + B): half of this weight for each op
    for pair, times in zip(program.pair_index, pairs.T, strict=True):
        for position in pair.tolist():
            counts[:, position] += times
    phase_counts = counts[:, 1 : layout.first_pair].reshape(
        len(counts), len(TIMED), *layout.op_shape
    )

    def busy(costs: Costs) -> Float[NumpyArray, " stages"]:
        """Return the largest work of a pipe's microbatches on each stage [s]."""
        total = np.zeros((len(counts), layout.num_stages))
        for place, phase in enumerate(TIMED):
            seconds = getattr(costs, PHASE_FIELDS[phase.name])
            if seconds is not None:
                per_op = np.broadcast_to(seconds, layout.op_shape[: max(np.ndim(seconds), 1)])
                times = phase_counts[:, place]
                total += (times * (per_op if per_op.ndim == 2 else per_op[:, None])).sum(axis=-1)
        return total.max(axis=0)

    return busy


SLACK = 1e-6  # of a bound: what the solver may be off by its tolerances
HERE = 1.0  # seconds that a program is solved in this process
LONGEST = 1e6  # seconds: no limit
_NOTHING_LEFT, _OUT_OF_TIME = 2, 1  # statuses of SciPy

Columns = Float[NumpyArray, " columns"]
Matrix = Float[NumpyArray, "_ _"]


class SplitProgram:
    """Integer program of splits; columns are stages by holdings, then those of `_order`."""

    # Of a relaxation the point is a mixture of splits.

    def __init__(self, splits: Splits, *, unit: float, limit: float) -> None:
        self.prices, model = splits.prices, splits.model
        self.may_hold = splits.may_hold.copy()
        stages = splits.stages
        layers, self.mtp = self.prices.counts("layers"), self.prices.counts("mtp")
        # layers for further tokens lie on the last stage of a worker, as in Megatron
        self.may_hold[self.mtp > 0, : max(stages - splits.workers, 0)] = False
        self.holding, self.stage = np.nonzero(self.may_hold)
        columns = len(self.holding) + stages  # begun: (stages)
        self.unit, self.limit = unit, limit
        self.bound, self.gap = 0.0, 0.0
        self.point: Columns = np.zeros(columns)
        self.is_open, self.is_whole = True, False
        self._constraints: list[
            tuple[Any, Float[NumpyArray, " rows"], Float[NumpyArray, " rows"]]
        ] = []
        on_stage = (self.stage == np.arange(stages)[:, None]) * 1.0
        self._add(on_stage, 1.0, 1.0)
        self._order(on_stage, layers)
        totals = {"layers": model.layers, "dense": dense_layers(model), "mtp": model.mtp_layers > 0}
        for name, total in totals.items():
            self._add(self.prices.counts(name)[None, self.holding] * 1.0, int(total), int(total))
        if splits.held is not None:
            self._limit_memory(splits.held, splits.capacity)

    def _order(self, on_stage: Matrix, layers: Int[NumpyArray, " holdings"]) -> None:
        """Put layers of the first kind before the others, and layers for further tokens last."""
        stages = len(on_stage)
        dense, rest = (self.prices.counts(name)[self.holding] > 0 for name in ("dense", "rest"))
        begun = np.eye(stages)  # whether the second kind has begun by the end of a stage
        before = np.eye(stages, k=-1)
        self._add(on_stage * rest, -np.inf, 0.0, begun=-begun)
        self._add(on_stage * dense, -np.inf, 1.0, begun=before)
        self._add(np.zeros_like(on_stage), -np.inf, 0.0, begun=before - begun)
        has_mtp = self.mtp[self.holding] > 0
        earlier = (self.stage < np.arange(stages)[:, None]) & has_mtp
        self._add(on_stage * (layers[self.holding] > 0) + earlier, -np.inf, 1.0)

    def _add(self, rows: Matrix, low: float, high: float, *, begun: Matrix | None = None) -> None:
        middle = np.zeros((len(rows), self.may_hold.shape[1])) if begun is None else begun
        self.restrict(np.hstack([rows, middle]), low, high)

    def _limit_memory(self, held: HeldCounts, capacity: float) -> None:
        """Keep the memory of every worker below the capacity at each possible peak."""
        prices, columns = self.prices, (self.holding, self.stage)
        for copies, stashed, parts in zip(
            held.copies, held.stashed, held.parts.swapaxes(0, 1), strict=True
        ):
            lasting = (prices.static, copies), (prices.version, stashed)
            static = sum((size[columns] * counts[self.stage] for size, counts in lasting), 0.0)
            moments = [
                counts[self.stage].T * size[columns]
                for counts, size in zip(parts, prices.parts, strict=True)
            ]
            need = static + sum(moments[1:], start=moments[0])  # (moments, columns)
            self._add(need[need.any(axis=1)] / capacity, -np.inf, 1.0)

    def restrict(self, rows: Matrix, low: float, high: float, *, time: float = 0.0) -> None:
        """Keep each row's sum of columns, and of the time in units, between two numbers."""
        from scipy.sparse import csr_array  # at first use: it takes a while

        size = len(rows)
        whole = csr_array(np.hstack([rows, np.full((size, 1), time)]))
        self._constraints.append((whole, np.full(size, low), np.full(size, high)))

    def solve(self, seconds: float = math.inf) -> None:
        """Minimise the time under the cuts within a time limit; the optimum is a lower bound."""
        from scipy.sparse import vstack

        rows, low, high = zip(*self._constraints, strict=True)
        is_time = np.append(np.zeros(len(self.point)), 1.0)
        arguments = {
            "c": is_time,
            "integrality": (1 - is_time) * self.is_whole,
            "bounds": (0 * is_time, np.append(np.ones(len(self.point)), self.limit / self.unit)),
            "constraints": (vstack(rows), np.concatenate(low), np.concatenate(high)),
        }
        solution = solve_mixed(arguments, self.gap, seconds)
        if solution.x is not None:
            self.point = solution.x[:-1]
        proven = solution.mip_dual_bound if self.is_whole else solution.fun
        if solution.status == _NOTHING_LEFT:
            self.bound = self.limit
        elif proven is not None:
            bound = float(proven) * self.unit * (1 - SLACK)
            self.bound = max(self.bound, min(bound, self.limit))
        self.is_open = self.bound < self.limit and solution.x is not None

    def cut_path(self, cut: Cut) -> None:
        """Add the constraint that no split is faster than a path."""
        begun = np.zeros(self.may_hold.shape[1])
        slope = np.append(cut.seconds[self.holding, self.stage], begun)
        self.restrict(slope[None] / self.unit, -np.inf, -cut.fixed / self.unit, time=-1.0)

    @property
    def shares(self) -> Shares:
        """Return the share of each holding in each stage; whole numbers if a split is required."""
        values = self.point[: len(self.holding)]
        solved = np.zeros(self.may_hold.shape)
        solved[self.holding, self.stage] = (
            np.round(values) if self.is_whole else np.clip(values, 0.0, 1.0)
        )
        return solved


def solve_mixed(arguments: Mapping[str, Any], gap: float, seconds: float) -> Any:
    """Solve a mixed integer program within a time limit [s], up to a relative gap."""
    # Arguments and result are those of `scipy.optimize.milp`, with bounds and constraints as
    # tuples.
    from scipy.optimize import milp  # at first use: it takes a while

    arguments = {**arguments, "options": {"mip_rel_gap": gap, "time_limit": _within(seconds, HERE)}}
    solution = milp(**arguments)
    if solution.status != _OUT_OF_TIME or seconds <= HERE:
        return solution
    arguments["options"]["time_limit"] = _within(seconds, LONGEST)
    return _solve_in_process(arguments)


def _within(seconds: float, limit: float) -> float:
    return max(min(seconds, limit), 0.01)


# without this package, whose import would take longer than many a program
_PROGRAM = (
    "import pickle, sys; from scipy.optimize import milp; "
    "pickle.dump(milp(**pickle.load(sys.stdin.buffer)), sys.stdout.buffer)"
)


def _solve_in_process(arguments: Mapping[str, Any]) -> Any:
    """Solve in a process of its own, which ends with this call."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process, if_interrupted(process.kill):
        try:
            answer, _ = process.communicate(pickle.dumps(arguments))
        finally:
            process.kill()
    return pickle.loads(answer)
