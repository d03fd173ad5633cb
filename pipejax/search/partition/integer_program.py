"""The split that no path and no memory limit rules out: an integer program over holdings.

One variable for each stage and holding says that the stage has it. Everything is linear in these:
how many layers there are, in what order their kinds stand, how long a path is, what a worker holds.

A makespan lies above the length of every path. The least time that some of these cuts leave is a
linear program, or a mixed integer one where only whole choices count, and a lower bound of the
least time. What it chooses is run next: that makes new cuts, which the next program knows (Kelley).

Nothing interrupts SciPy's solver (HiGHS) while it works. So it works in this process for a second
at most, and for longer in one of its own, which can be ended at any time.
"""

import math
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.progress import if_interrupted
from pipejax.schedules.table.held_activations import HeldCounts
from pipejax.search.partition.cuts import Cut
from pipejax.search.partition.holdings import Shares, Splits, dense_layers

SLACK = 1e-6  # of a bound: what the solver may be off by its tolerances
HERE = 1.0  # seconds that a program is solved in this process
LONGEST = 1e6  # seconds: no limit
_NOTHING_LEFT, _OUT_OF_TIME = 2, 1  # statuses of SciPy

Columns = Float[NumpyArray, " columns"]
Matrix = Float[NumpyArray, "_ _"]


class SplitProgram:
    """Splits of a model into stages; columns are stages by holdings, then what `_order` adds."""

    # Of a relaxation the point is a mixture of splits.

    def __init__(self, splits: Splits, *, unit: float, limit: float) -> None:
        """Write down what a split is, and that it fits."""
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
        self._known: list[tuple[Any, Float[NumpyArray, " rows"], Float[NumpyArray, " rows"]]] = []
        on_stage = (self.stage == np.arange(stages)[:, None]) * 1.0
        self._add(on_stage, 1.0, 1.0)
        self._order(on_stage, layers)
        totals = {"layers": model.layers, "dense": dense_layers(model), "mtp": model.mtp_layers > 0}
        for name, total in totals.items():
            self._add(self.prices.counts(name)[None, self.holding] * 1.0, int(total), int(total))
        if splits.held is not None:
            self._limit_memory(splits.held, splits.capacity)

    def _order(self, on_stage: Matrix, layers: Int[NumpyArray, " holdings"]) -> None:
        """Layers of the first kind stand before the others, those for further tokens behind all."""
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
        """Keep what every worker holds at each moment that may be its peak below the capacity."""
        prices, own = self.prices, (self.holding, self.stage)
        for copies, stashed, parts in zip(
            held.copies, held.stashed, held.parts.swapaxes(0, 1), strict=True
        ):
            lasting = (prices.static, copies), (prices.version, stashed)
            static = sum((size[own] * counts[self.stage] for size, counts in lasting), 0.0)
            moments = [
                counts[self.stage].T * size[own]
                for counts, size in zip(parts, prices.parts, strict=True)
            ]
            need = static + sum(moments[1:], start=moments[0])  # (moments, columns)
            self._add(need[need.any(axis=1)] / capacity, -np.inf, 1.0)

    def restrict(self, rows: Matrix, low: float, high: float, *, time: float = 0.0) -> None:
        """Keep each row's sum of columns, and of the time in units, between two numbers."""
        from scipy.sparse import csr_array  # at first use: it takes a while

        size = len(rows)
        whole = csr_array(np.hstack([rows, np.full((size, 1), time)]))
        self._known.append((whole, np.full(size, low), np.full(size, high)))

    def solve(self, seconds: float = math.inf) -> None:
        """Choose the least time that the cuts leave, which is a bound of all, in so much time."""
        from scipy.sparse import vstack

        rows, low, high = zip(*self._known, strict=True)
        of_time = np.append(np.zeros(len(self.point)), 1.0)
        given = {
            "c": of_time,
            "integrality": (1 - of_time) * self.is_whole,
            "bounds": (0 * of_time, np.append(np.ones(len(self.point)), self.limit / self.unit)),
            "constraints": (vstack(rows), np.concatenate(low), np.concatenate(high)),
        }
        found = solve_mixed(given, self.gap, seconds)
        if found.x is not None:
            self.point = found.x[:-1]
        proven = found.mip_dual_bound if self.is_whole else found.fun
        if found.status == _NOTHING_LEFT:
            self.bound = self.limit
        elif proven is not None:
            bound = float(proven) * self.unit * (1 - SLACK)
            self.bound = max(self.bound, min(bound, self.limit))
        self.is_open = self.bound < self.limit and found.x is not None

    def cut_path(self, cut: Cut) -> None:
        """No split is faster than a path lasts."""
        begun = np.zeros(self.may_hold.shape[1])
        slope = np.append(cut.of_holding[self.holding, self.stage], begun)
        self.restrict(slope[None] / self.unit, -np.inf, -cut.fixed / self.unit, time=-1.0)

    @property
    def shares(self) -> Shares:
        """The share of each holding in each stage that the solver chose: of a split 0 or 1."""
        taken = self.point[: len(self.holding)]
        found = np.zeros(self.may_hold.shape)
        found[self.holding, self.stage] = (
            np.round(taken) if self.is_whole else np.clip(taken, 0.0, 1.0)
        )
        return found


def solve_mixed(given: Mapping[str, Any], gap: float, seconds: float) -> Any:
    """Solve a mixed integer program, within so much time and so close to the best."""
    # `given` are arguments of `scipy.optimize.milp`, bounds and constraints as tuples; returns what
    # it returns.
    from scipy.optimize import milp  # at first use: it takes a while

    given = {**given, "options": {"mip_rel_gap": gap, "time_limit": _within(seconds, HERE)}}
    found = milp(**given)
    if found.status != _OUT_OF_TIME or seconds <= HERE:
        return found
    given["options"]["time_limit"] = _within(seconds, LONGEST)
    return _solved_apart(given)


def _within(seconds: float, most: float) -> float:
    return max(min(seconds, most), 0.01)


# without this package, whose import would take longer than many a program
_PROGRAM = (
    "import pickle, sys; from scipy.optimize import milp; "
    "pickle.dump(milp(**pickle.load(sys.stdin.buffer)), sys.stdout.buffer)"
)


def _solved_apart(given: Mapping[str, Any]) -> Any:
    """Solve in a process of its own, which ends with this call."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process, if_interrupted(process.kill):
        try:
            told, _ = process.communicate(pickle.dumps(given))
        finally:
            process.kill()
    return pickle.loads(told)
