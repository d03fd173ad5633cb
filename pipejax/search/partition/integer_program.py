"""The split that no path and no memory limit rules out: an integer program over holdings.

One variable for each stage and holding says that the stage has it. Everything is linear in these:
how many layers there are, in what order their kinds stand, how long a path is, what a worker holds.

Nothing interrupts SciPy's solver (HiGHS) while it works. So it works in this process for a second
at most, and for longer in one of its own, which can be ended at any time.
"""

import math
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.progress import if_interrupted
from pipejax.schedules.table.held_activations import HeldCounts
from pipejax.search.partition.cuts import Cut
from pipejax.search.partition.holdings import dense_layers
from pipejax.search.partition.splits import Splits

SLACK = 1e-6  # of a bound: what the solver may be off by its tolerances
HERE = 1.0  # seconds that a program is solved in this process
LONGEST = 1e6  # seconds: no limit
_OUT_OF_TIME = 1  # status of SciPy
Matrix = Float[NumpyArray, "_ _"]


class Solved(NamedTuple):
    """What the solver says.

    Attributes:
      shares: (holdings, stages) share of each holding in each stage: of a split 0 or 1; None if the
        solver found nothing.
      bound: no split is faster [s]; infinite if there is none.
    """

    shares: Float[NumpyArray, "holdings stages"] | None
    bound: float


class SplitProgram:
    """Splits of a model into stages; columns are stages by holdings, then what `_order` adds."""

    def __init__(self, splits: Splits) -> None:
        """Write down what a split is, and that it fits."""
        self.prices, model = splits.prices, splits.model
        self.may_hold = splits.may_hold.copy()
        stages = splits.stages
        layers, self.mtp = self.prices.counts("layers"), self.prices.counts("mtp")
        # layers for further tokens lie on the last stage of a worker, as in Megatron
        self.may_hold[self.mtp > 0, : max(stages - splits.workers, 0)] = False
        self.holding, self.stage = np.nonzero(self.may_hold)
        self.num_holdings = len(self.holding)
        self.num_columns = self.num_holdings + stages + 1  # begun: (stages); and the step time
        self.rows: list[Any] = []  # sparse
        self.low: list[Float[NumpyArray, " rows"]] = []
        self.high: list[Float[NumpyArray, " rows"]] = []
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

    def _add(
        self, rows: Matrix, low: float, high: float, *, begun: Matrix | None = None, time: float = 0
    ) -> None:
        from scipy.sparse import csr_array  # at first use: it takes a while

        size = len(rows)
        middle = np.zeros((size, self.may_hold.shape[1])) if begun is None else begun
        whole = np.hstack([rows, middle, np.full((size, 1), time)])
        self.rows.append(csr_array(whole))
        self.low.append(np.full(size, low))
        self.high.append(np.full(size, high))

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

    def cut(self, cut: Cut, unit: float) -> None:
        """No split is faster than a path lasts; the step time is in units [s]."""
        seconds = cut.of_holding[self.holding, self.stage][None] / unit
        self._add(seconds, -np.inf, -cut.fixed / unit, time=-1.0)

    def solve(
        self, unit: float, limit: float, seconds: float, *, whole: bool = True, gap: float = 0.0
    ) -> Solved:
        """Find the split of the shortest longest path that undercuts a limit, in so much time.

        A mixture if it need not be `whole`; `gap` is how far from the best it may be.
        """
        from scipy.sparse import vstack

        choices = np.append(np.ones(self.num_columns - 1), 0.0)
        most = np.append(np.ones(self.num_columns - 1), limit / unit)
        given = {
            "c": 1 - choices,
            "integrality": choices * whole,
            "bounds": (np.zeros(self.num_columns), most),
            "constraints": (vstack(self.rows), np.concatenate(self.low), np.concatenate(self.high)),
        }
        found = solve_mixed(given, gap, seconds)
        if found.status == 2:
            return Solved(None, math.inf)
        proven = found.mip_dual_bound if whole else found.fun
        bound = -math.inf if proven is None else float(proven) * unit * (1 - SLACK)
        if found.x is None:
            return Solved(None, bound)
        shares = np.zeros(self.may_hold.shape)
        taken = found.x[: self.num_holdings]
        shares[self.holding, self.stage] = np.round(taken) if whole else np.clip(taken, 0.0, 1.0)
        return Solved(shares, bound)


def solve_mixed(given: Mapping[str, Any], gap: float, seconds: float) -> Any:
    """Solve a mixed integer program, within so much time and so close to the best.

    `given` are arguments of `scipy.optimize.milp`, bounds and constraints as tuples; returns what
    it returns.
    """
    found = _solved(given, gap, min(seconds, HERE))
    if found.status != _OUT_OF_TIME or seconds <= HERE:
        return found
    return _solved_apart(given, gap, min(seconds, LONGEST))


# without this package, whose import would take longer than many a program
_PROGRAM = (
    "import pickle, sys; from scipy.optimize import milp; "
    "pickle.dump(milp(**pickle.load(sys.stdin.buffer)), sys.stdout.buffer)"
)


def _arguments(given: Mapping[str, Any], gap: float, seconds: float) -> dict[str, Any]:
    return {**given, "options": {"mip_rel_gap": gap, "time_limit": max(seconds, 0.01)}}


def _solved(given: Mapping[str, Any], gap: float, seconds: float) -> Any:
    from scipy.optimize import milp  # at first use: it takes a while

    return milp(**_arguments(given, gap, seconds))


def _solved_apart(given: Mapping[str, Any], gap: float, seconds: float) -> Any:
    """Solve in a process of its own, which ends with this call."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process, if_interrupted(process.kill):
        try:
            told, _ = process.communicate(pickle.dumps(_arguments(given, gap, seconds)))
        finally:
            process.kill()
    return pickle.loads(told)
