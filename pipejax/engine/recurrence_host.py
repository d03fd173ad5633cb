"""The recurrence on the host, for single runs: nothing is compiled, and it imports no JAX.

The twin of `recurrence`, equal to it to the last bit; base/longest_path.py does the work.
"""

from typing import NamedTuple

import numpy as np

from pipejax.base import longest_path
from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.engine.lowering.program import Program

Vector = Float[NumpyArray, " costs"]
Times = Float[NumpyArray, " nodes"]


class HostRun(NamedTuple):
    """One run of a program [s].

    Attributes:
      duration: (nodes) time that each node takes.
      lag: (nodes, max_preds) delay from each predecessor.
      start: (nodes) when the last that a node waits for is there.
      finish: (nodes) finish times.
    """

    duration: Times
    lag: Float[NumpyArray, "nodes max_preds"]
    start: Times
    finish: Times


def run_on_host(program: Program, vector: Vector) -> HostRun:
    """Run a program at one cost vector."""
    preds, duration, lag = _given(program, vector)
    finish = longest_path.finish_times(preds, duration, lag)
    return HostRun(duration, lag, longest_path.start_times(preds, finish, lag), finish)


def path_on_host(
    program: Program, run: HostRun
) -> tuple[Bool[NumpyArray, " nodes"], Bool[NumpyArray, "nodes max_preds"]]:
    """Return which nodes and edges are on the critical path that the gradient counts."""
    return longest_path.critical_path(np.asarray(program.preds), run.finish, run.lag)


def slack_on_host(program: Program, vector: Vector) -> Times:
    """Return how much longer each node could take before the makespan grows."""
    return longest_path.slack(*_given(program, vector))


def _given(program: Program, vector: Vector) -> tuple[NumpyArray, NumpyArray, NumpyArray]:
    preds = np.asarray(program.preds)
    return preds, vector[program.duration_index], vector[program.lag_index]
