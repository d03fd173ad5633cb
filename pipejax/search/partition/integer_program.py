"""Integer program over stage contents: the best split under all known paths and memory limits.

A variable for each pair of stage and holding is 1 if the stage has the holding. Numbers of layers,
the order of their kinds, lengths of paths and memory of workers are linear in these variables. The
makespan is at least the length of every path, so the solution of the program, relaxed or not, is a
lower bound. A run of this solution then adds new paths (Kelley's cutting planes).

SciPy's solver (HiGHS) cannot be interrupted. It runs in this process for a second at most, and
longer in a child process that can be killed.
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

Counts = Int[NumpyArray, " costs"]  # how often a path contains each cost


class Cut(NamedTuple):
    """Path as a lower bound: its length under a split bounds the split's step time from below."""

    seconds: Float[NumpyArray, "holdings stages"]  # time of the path's ops on a stage [s]
    fixed: float  # time of the path's messages [s]


class PathCuts:
    """Cuts, which are lower bounds on the step time, from paths in the runs of one program."""

    def __init__(self, program: Program, prices: HoldingPrices) -> None:
        self.program, self.prices = program, prices
        # An edge goes from its tail, a predecessor, to its head; `column` is its place in `preds`.
        # Edges are sorted by tail: edges first_edge[n] .. first_edge[n + 1] - 1 leave node n.
        preds = np.asarray(program.preds)
        head, column = np.nonzero(preds != SOURCE)
        order = np.argsort(preds[head, column], kind="stable")
        self.head, self.column = head[order], column[order]
        tail = preds[self.head, self.column]
        self.first_edge = np.searchsorted(tail, np.arange(len(preds) + 1))
        worker = np.asarray(program.worker)
        self.worker_nodes = [np.flatnonzero(worker == k) for k in range(program.num_workers)]
        self.seen: set[bytes] = set()
        self.cuts: list[Cut] = []

    def new_cuts(self, run: HostRun, vector: Float[NumpyArray, " costs"]) -> list[Cut]:
        """Return new cuts: lengths of long paths of a run as sums over the stages of any split."""
        new_cuts = []
        for positions in self._paths(run):
            counts = np.bincount(positions, minlength=self.program.layout.size)
            if (key := counts.tobytes()) not in self.seen:
                self.seen.add(key)
                new_cuts.append(self.price_path(counts, vector))
        self.cuts += new_cuts
        return new_cuts

    def lower_bounds(
        self, points: Int[NumpyArray, "points stages"], begin: int = 0
    ) -> Float[NumpyArray, " points"]:
        """Return the longest path [s] of each split, among the cuts from `begin` on."""
        longest = np.zeros(len(points))
        stages = np.arange(points.shape[1])
        for cut in self.cuts[begin:]:
            np.maximum(longest, cut.fixed + cut.seconds[points, stages].sum(axis=1), out=longest)
        return longest

    def _paths(self, run: HostRun) -> Iterator[list[int]]:
        """Yield the critical path and two paths through each worker, as indices of their costs."""
        to_end = longest_path.times_to_end(run.preds, run.duration, run.lag)
        path_length = run.finish + to_end  # length of the longest path through each node
        for nodes in (np.arange(1, len(to_end)), *self.worker_nodes):
            if len(nodes):
                node = int(nodes[path_length[nodes].argmax()])
                yield self._indices_before(run, node) + self._indices_after(run, to_end, node)
        index = np.asarray(self.program.duration_index)
        for nodes in self.worker_nodes:  # a path over all ops of a worker
            if len(nodes):
                to_first_end = self._indices_before(run, int(nodes[0]))
                from_last_end = self._indices_after(run, to_end, int(nodes[-1]))
                yield to_first_end + index[nodes[1:]].tolist() + from_last_end

    def _indices_before(self, run: HostRun, node: int) -> list[int]:
        """List indices in the cost vector along the longest path to the end of a node."""
        program, positions = self.program, []
        while node != SOURCE:
            column = int((run.finish[run.preds[node]] + run.lag[node]).argmax())
            positions += [int(program.duration_index[node]), int(program.lag_index[node, column])]
            node = int(run.preds[node, column])
        return positions

    def _indices_after(
        self, run: HostRun, to_end: Float[NumpyArray, " nodes"], node: int
    ) -> list[int]:
        """List indices in the cost vector along the longest path from the end of a node."""
        program, positions = self.program, []
        while to_end[node] > 0:
            edges = slice(self.first_edge[node], self.first_edge[node + 1])
            heads, columns = self.head[edges], self.column[edges]
            longest = int((run.lag[heads, columns] + run.duration[heads] + to_end[heads]).argmax())
            node, column = int(heads[longest]), int(columns[longest])
            positions += [int(program.duration_index[node]), int(program.lag_index[node, column])]
        return positions

    def price_path(self, counts: Counts, vector: Float[NumpyArray, " costs"]) -> Cut:
        """Return the cut of a path with these counts of costs."""
        # The length of a path is the sum of counts times costs, for any split. Both have the order
        # of the cost vector: 0, ops, fused pairs, links (latency, transmit time, message with
        # both). A fused pair on the path counts as a share of each of its two ops.
        layout, prices = self.program.layout, self.prices
        weights = counts.astype(float)
        pair_weights = weights[layout.first_pair : layout.first_link, None]
        np.add.at(weights, self.program.pair_index, pair_weights * self._pair_shares(vector))
        ops = weights[1 : layout.first_pair].reshape(len(TIMED), *layout.op_shape)
        seconds = np.zeros((len(prices.holdings), layout.num_stages))
        for phase, op_weights in zip(TIMED, ops, strict=True):
            if op_weights.any():
                times = prices.seconds[PHASE_FIELDS[phase.name]]
                if times.ndim == 2:  # (holdings, stages): all microbatches take equal times
                    times = times[..., None]
                seconds += (times * op_weights).sum(axis=-1)
        shape = (len(LINK_COSTS), *layout.link_shape)
        latency, transmit, message = weights[layout.first_link :].reshape(shape).sum(axis=-1)
        fixed = float(((latency + message) * prices.latency).sum())
        sent_seconds = ((transmit + message) * prices.transmit).sum(axis=(0, 1))  # (boundaries)
        # MTP layers on a stage lengthen all messages after it. If boundaries take [1 2 3] s, MTP
        # layers on stage 0, 1, 2 or 3 lengthen messages of 6, 5, 3 or 0 s.
        lengthened = prices.mtp_layers * np.append(np.cumsum(sent_seconds[::-1])[::-1], 0.0)
        seconds += prices.counts("mtp")[:, None] * lengthened
        return Cut(seconds, fixed + float(sent_seconds.sum()))

    def _pair_shares(self, vector: Float[NumpyArray, " costs"]) -> Float[NumpyArray, "pairs 2"]:
        """Return weights (pairs, 2) of the ops of fused pairs: a lower bound on the pair's time."""
        # A pair takes max(F, B) + k min(F, B). If k <= 1, this is max(F + k B, B + k F), so either
        # sum is a lower bound; take the larger sum of this run. If k > 1, F + B is a lower bound.
        factor = self.prices.pair_factor
        times = vector[self.program.pair_index]
        if factor is None or float(factor) >= 1:
            return np.ones(times.shape)
        is_longer = times >= times[:, ::-1]
        is_longer[:, 1] = ~is_longer[:, 0]  # at a tie the forward counts as longer
        return np.where(is_longer, 1.0, float(factor))


def stage_work_function(
    program: Program, pair_factor: float
) -> Callable[[Costs], Float[NumpyArray, " stages"]]:
    """Return a function from costs to (stages) work [s], a lower bound on the step time."""
    layout = program.layout
    counts = op_counts(program).astype(float)
    # a fused pair takes max(F, B) + k min(F, B), which is at least (1 + k) / 2 of both F and B
    pair_weights = counts[:, layout.first_pair : layout.first_link] * (1 + min(pair_factor, 1)) / 2
    for pair, weights in zip(program.pair_index, pair_weights.T, strict=True):
        for position in pair.tolist():
            counts[:, position] += weights
    op_weights = counts[:, 1 : layout.first_pair].reshape(len(counts), len(TIMED), *layout.op_shape)

    def stage_work(costs: Costs) -> Float[NumpyArray, " stages"]:
        total = np.zeros((len(counts), layout.num_stages))  # (workers, stages)
        for k, phase in enumerate(TIMED):
            seconds = getattr(costs, PHASE_FIELDS[phase.name])
            if seconds is not None:
                if np.ndim(seconds) < 2:
                    seconds = np.broadcast_to(seconds, layout.num_stages)[:, None]
                total += (op_weights[:, k] * seconds).sum(axis=-1)  # over microbatches
        return total.max(axis=0)  # on the worker with most work of the stage

    return stage_work


SLACK = 1e-6  # relative tolerance of the solver
IN_PROCESS = 1.0  # time limit of the solver in this process [s]
NO_LIMIT = 1e6  # time limit that stands for no limit [s]
_TIME_LIMIT, _INFEASIBLE = 1, 2  # SciPy's codes of a status

Columns = Float[NumpyArray, " columns"]
Matrix = Float[NumpyArray, "_ _"]


class SplitProgram:
    """Integer program of splits, or its relaxation, whose solution is a mixture of splits."""

    # Variables, the columns of matrices: for each allowed pair k, whether stage[k] has holding[k];
    # for each stage, whether MoE layers have begun by its end; last, the step time.

    def __init__(self, splits: Splits, *, unit: float, limit: float) -> None:
        """Add the constraints of a legal split; `solve` minimises the step time under them."""
        self.prices, model = splits.prices, splits.model
        self.may_hold = splits.may_hold.copy()
        stages = splits.stages
        layers, self.mtp = self.prices.counts("layers"), self.prices.counts("mtp")
        # MTP layers lie on the last stage of a worker, as in Megatron
        self.may_hold[self.mtp > 0, : max(stages - splits.workers, 0)] = False
        self.holding, self.stage = np.nonzero(self.may_hold)
        self.unit, self.limit = unit, limit  # unit and upper limit of the step time [s]
        self.bound, self.gap = 0.0, 0.0
        self.point: Columns = np.zeros(len(self.holding) + stages)
        # whether a split may still be faster than `limit`; whether the variables are integers
        self.is_open, self.is_whole = True, False
        self._constraints: list[tuple[Any, NumpyArray, NumpyArray]] = []  # matrix, low, high
        on_stage = (self.stage == np.arange(stages)[:, None]) * 1.0  # (stages, variables)
        self._add(on_stage, 1.0, 1.0)  # each stage has exactly one holding
        self._require_layer_order(on_stage, layers)
        totals = {"layers": model.layers, "dense": dense_layers(model), "mtp": model.mtp_layers > 0}
        for name, total in totals.items():  # the stages together have all layers of each kind
            self._add(self.prices.counts(name)[None, self.holding] * 1.0, int(total), int(total))
        if splits.held is not None:
            self._limit_memory(splits.held, splits.capacity)

    def _require_layer_order(self, on_stage: Matrix, layers: Int[NumpyArray, " holdings"]) -> None:
        """Require dense layers before MoE layers, and MTP layers last."""
        # The variable `begun` of a stage is 1 if MoE layers have begun: 0 0 1 1. It never falls.
        stages = len(on_stage)
        counts = self.prices.counts
        has_dense, has_moe = (counts(kind)[self.holding] > 0 for kind in ("dense", "moe"))
        # coefficients of `begun` of the stage, and of `begun` of the stage before it
        begun, begun_before = np.eye(stages), np.eye(stages, k=-1)
        self._add(on_stage * has_moe, -np.inf, 0.0, begun=-begun)  # has_moe <= begun
        self._add(on_stage * has_dense, -np.inf, 1.0, begun=begun_before)  # not both
        self._add(np.zeros_like(on_stage), -np.inf, 0.0, begun=begun_before - begun)
        is_earlier_mtp = (self.stage < np.arange(stages)[:, None]) & (self.mtp[self.holding] > 0)
        self._add(on_stage * (layers[self.holding] > 0) + is_earlier_mtp, -np.inf, 1.0)

    def _add(self, rows: Matrix, low: float, high: float, *, begun: Matrix | None = None) -> None:
        """Add constraints low <= rows @ holding variables + begun @ `begun` variables <= high."""
        if begun is None:
            begun = np.zeros((len(rows), self.may_hold.shape[1]))
        self.restrict(np.hstack([rows, begun]), low, high)

    def _limit_memory(self, held: HeldCounts, capacity: float) -> None:
        """Require that each worker's memory stays within its capacity [B]."""
        prices, variable = self.prices, (self.holding, self.stage)
        # for each worker: (stages) copies and stashed versions of weights, (parts, stages, moments)
        # activations that it holds at the moments of possible peaks
        groups = held.copies, held.stashed, held.parts.swapaxes(0, 1)
        for copies, stashed, parts in zip(*groups, strict=True):
            need = (  # (moments, variables)
                prices.static[variable] * copies[self.stage]
                + prices.version[variable] * stashed[self.stage]
                + sum(
                    counts[self.stage].T * size[variable]
                    for counts, size in zip(parts, prices.parts, strict=True)
                )
            )
            self._add(need[need.any(axis=1)] / capacity, -np.inf, 1.0)

    def restrict(self, rows: Matrix, low: float, high: float, *, time: float = 0.0) -> None:
        """Add constraints low <= rows @ variables + time * (step time) <= high."""
        from scipy.sparse import csr_array  # imported at first use, because it is slow

        size = len(rows)
        matrix = csr_array(np.hstack([rows, np.full((size, 1), time)]))
        self._constraints.append((matrix, np.full(size, low), np.full(size, high)))

    def solve(self, seconds: float = math.inf) -> None:
        """Minimise the step time under all cuts; store the solution and the lower bound."""
        from scipy.sparse import vstack

        rows, low, high = zip(*self._constraints, strict=True)
        size = len(self.point)  # the last variable is the step time in units
        arguments = {
            "c": np.append(np.zeros(size), 1.0),
            "integrality": np.append(np.full(size, float(self.is_whole)), 0.0),
            "bounds": (np.zeros(size + 1), np.append(np.ones(size), self.limit / self.unit)),
            "constraints": (vstack(rows), np.concatenate(low), np.concatenate(high)),
        }
        solution = solve_mixed(arguments, self.gap, seconds)
        if solution.x is not None:
            self.point = solution.x[:-1]
        proven = solution.mip_dual_bound if self.is_whole else solution.fun
        if solution.status == _INFEASIBLE:
            self.bound = self.limit  # no split is faster
        elif proven is not None:
            bound = float(proven) * self.unit * (1 - SLACK)  # the solver's error is less
            self.bound = max(self.bound, min(bound, self.limit))
        self.is_open = self.bound < self.limit and solution.x is not None

    def cut_path(self, cut: Cut) -> None:
        """Add the constraint that the step time is at least the length of this path."""
        begun = np.zeros(self.may_hold.shape[1])
        slope = np.append(cut.seconds[self.holding, self.stage], begun)
        self.restrict(slope[None] / self.unit, -np.inf, -cut.fixed / self.unit, time=-1.0)

    @property
    def shares(self) -> Shares:
        """Return the shares of holdings in stages, 0 or 1; in a relaxed program, from 0 to 1."""
        values = self.point[: len(self.holding)]
        shares = np.zeros(self.may_hold.shape)
        rounded = np.round(values) if self.is_whole else np.clip(values, 0.0, 1.0)
        shares[self.holding, self.stage] = rounded
        return shares


def solve_mixed(arguments: Mapping[str, Any], gap: float, seconds: float) -> Any:
    """Solve a mixed integer program within a time limit [s], up to a relative gap."""
    # Arguments and result are those of `scipy.optimize.milp`; bounds and constraints are tuples.
    from scipy.optimize import milp  # imported at first use, because it is slow

    options = {"mip_rel_gap": gap, "time_limit": max(min(seconds, IN_PROCESS), 0.01)}
    solution = milp(**arguments, options=options)
    if solution.status != _TIME_LIMIT or seconds <= IN_PROCESS:
        return solution
    options["time_limit"] = min(seconds, NO_LIMIT)
    return _solve_in_process({**arguments, "options": options})


# imports SciPy alone, because this package takes longer to import than many programs to solve
_PROGRAM = (
    "import pickle, sys; from scipy.optimize import milp; "
    "pickle.dump(milp(**pickle.load(sys.stdin.buffer)), sys.stdout.buffer)"
)


def _solve_in_process(arguments: Mapping[str, Any]) -> Any:
    """Solve in a process of its own, which an interrupt can end."""
    command, pipe = [sys.executable, "-c", _PROGRAM], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
    with process, if_interrupted(process.kill):
        try:
            answer, _ = process.communicate(pickle.dumps(arguments))
        finally:
            process.kill()
    return pickle.loads(answer)
