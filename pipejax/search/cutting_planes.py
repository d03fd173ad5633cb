"""Kelley's cutting planes: a bound of the least time, from linear bounds of every time.

A convex time lies above its tangents, a makespan above the length of every path. The least time
that some of these cuts leave, over all that may be chosen, is a linear program, or a mixed integer
one where only whole choices count, and a lower bound of the least time. What it chooses is looked
at next: that makes new cuts, which the next program knows.

Nothing interrupts SciPy's solver (HiGHS) while it works. So it works in this process for a second
at most, and for longer in one of its own, which can be ended at any time.
"""

import math
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.progress import if_interrupted

SLACK = 1e-6  # of a bound: what the solver may be off by its tolerances
HERE = 1.0  # seconds that a program is solved in this process
LONGEST = 1e6  # seconds: no limit
_NOTHING_LEFT, _OUT_OF_TIME = 2, 1  # statuses of SciPy

Columns = Float[NumpyArray, " columns"]
Matrix = Float[NumpyArray, "_ _"]
Planes = TypeVar("Planes", bound="CuttingPlanes")


class CuttingPlanes:
    """What may be chosen, and what is known of the time that it takes."""

    def __init__(self, lower: Columns, upper: Columns, *, unit: float, limit: float) -> None:
        """Take the ends of each column."""
        self._lower, self._upper = np.append(lower, 0.0), upper
        self.unit, self.limit = unit, limit
        self.bound, self.gap = 0.0, 0.0
        self.point = lower
        self.is_open, self.is_whole = True, False
        self._known: list[tuple[Any, Float[NumpyArray, " rows"], Float[NumpyArray, " rows"]]] = []

    def restrict(self, rows: Matrix, low: float, high: float, *, time: float = 0.0) -> None:
        """Keep each row's sum of columns, and of the time in units, between two numbers."""
        from scipy.sparse import csr_array  # at first use: it takes a while

        size = len(rows)
        whole = csr_array(np.hstack([rows, np.full((size, 1), time)]))
        self._known.append((whole, np.full(size, low), np.full(size, high)))

    def cut(self, slope: Columns, fixed: float) -> None:
        """Nothing takes less time than the sum of slope times choice and what is fixed [s]."""
        self.restrict(slope[None] / self.unit, -np.inf, -fixed / self.unit, time=-1.0)

    def solve(self, seconds: float = math.inf) -> None:
        """Choose the least time that the cuts leave, which is a bound of all, in so much time."""
        from scipy.sparse import vstack

        rows, low, high = zip(*self._known, strict=True)
        of_time = np.append(np.zeros(len(self._upper)), 1.0)
        given = {
            "c": of_time,
            "integrality": (1 - of_time) * self.is_whole,
            "bounds": (self._lower, np.append(self._upper, self.limit / self.unit)),
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


def raise_bounds(
    planes: Sequence[Planes],
    look: Callable[[list[Planes]], object],
    *,
    rounds: float = math.inf,
    until: float = math.inf,
) -> None:
    """Solve, and look at what is chosen, until none is open, or rounds or the time are over."""
    # `look` adds cuts to those that it is given, and closes what needs no more. A relaxation is
    # always solved to its end.
    working = list(planes)
    done = 0
    while working:
        for each in working:
            each.solve(until - time.monotonic() if each.is_whole else math.inf)
        done += 1
        working = [each for each in working if each.is_open]
        if not working or done >= rounds:
            break
        look(working)
        working = [each for each in working if each.is_open]
        if time.monotonic() > until:
            break


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
