"""The solver of integer programs: SciPy's HiGHS, which nothing interrupts while it works.

So it works in this process for a second at most, and for longer in one of its own, which can be
ended at any time.
"""

import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pipejax.base.progress import if_interrupted

HERE = 1.0  # seconds that a program is solved in this process
LONGEST = 1e6  # seconds: no limit


def solve_mixed(given: Mapping[str, Any], gap: float, seconds: float) -> Any:
    """Solve a mixed integer program, within so much time and so close to the best.

    `given` are arguments of `scipy.optimize.milp`, bounds and constraints as tuples; returns what
    it returns.
    """
    found = _solved(given, gap, min(seconds, HERE))
    if found.status != _OUT_OF_TIME or seconds <= HERE:
        return found
    return _solved_apart(given, gap, min(seconds, LONGEST))


_OUT_OF_TIME = 1  # status of SciPy
_PROGRAM = (
    "import pickle, sys; from pipejax.search.partition.solver import _solved; "
    "pickle.dump(_solved(*pickle.load(sys.stdin.buffer)), sys.stdout.buffer)"
)


def _solved(given: Mapping[str, Any], gap: float, seconds: float) -> Any:
    from scipy.optimize import milp  # at first use: it takes a while

    options = {"mip_rel_gap": gap, "time_limit": max(seconds, 0.01)}
    return milp(**given, options=options)


def _solved_apart(given: Mapping[str, Any], gap: float, seconds: float) -> Any:
    """Solve in a process of its own, which ends with this call."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process, if_interrupted(process.kill):
        try:
            told, _ = process.communicate(pickle.dumps((dict(given), gap, seconds)))
        finally:
            process.kill()
    return pickle.loads(told)
