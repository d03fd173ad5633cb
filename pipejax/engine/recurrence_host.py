"""The recurrence on the host, for single runs: nothing is compiled, and it imports no JAX.

The twin of `recurrence`, equal to it to the last bit; base/longest_path.py does the work.
"""

from typing import NamedTuple

import numpy as np

from pipejax.base import longest_path
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.engine.lowering.program import Program

Times = Float[NumpyArray, " nodes"]


class HostRun(NamedTuple):
    """One run of a program [s]."""

    preds: Int[NumpyArray, "nodes max_preds"]
    duration: Times
    lag: Float[NumpyArray, "nodes max_preds"]  # delay from each predecessor
    start: Times
    finish: Times


def run_on_host(program: Program, vector: Float[NumpyArray, " costs"]) -> HostRun:
    """Run a program at one cost vector."""
    preds = np.asarray(program.preds)
    duration, lag = vector[program.duration_index], vector[program.lag_index]
    finish = longest_path.finish_times(preds, duration, lag)
    start = longest_path.start_times(preds, finish, lag)
    return HostRun(preds, duration, lag, start, finish)


def makespan_on_host(program: Program, vector: Float[NumpyArray, " costs"]) -> float:
    """Return the makespan of a program at one cost vector [s]."""
    return float(run_on_host(program, vector).finish.max())


def run_many_on_host(program: Program, costs: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
    """Return longest paths of a program at many cost vectors (costs, runs), added exactly.

    Returns lengths (runs) and how often each cost is on the path (costs, runs).
    """
    preds, duration, lag = map(
        np.asarray, (program.preds, program.duration_index, program.lag_index)
    )
    return longest_path.longest_paths_of_many(preds, duration, lag, costs)
