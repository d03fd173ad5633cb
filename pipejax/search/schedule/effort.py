"""Effort: a deterministic measure of the work of a search.

The work that a search does in a second depends on the load of the machine. Effort does not: it is a
weighted sum of the solver's deterministic time, the ops in its models, and the ops of plans by list
scheduling. It is about the time [s] on one idle core (docs/optimize.md).
"""

import dataclasses
import math
import threading
import time

from ortools.sat.python import cp_model

# effort, in seconds of an idle core
SOLVER = 3.0  # per unit of the solver's deterministic time
LOAD = 2e-4  # per op of a model that the solver loads
GREEDY_SECONDS_PER_OP = 8e-6  # per op of a plan by list scheduling
BASELINE = 8e-5  # per op of a published schedule that is built and run


class Meter:
    """Counter of effort."""

    def __init__(self) -> None:
        self.done = self.under_way = 0.0
        self.lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits on effort and time of a search, or of a part of it."""

    meter: Meter  # effort of all parts together
    end: float  # effort on the meter at which this part is over
    deadline: float  # time at which this part is over in any case, by `time.monotonic` [s]

    @classmethod
    def start(cls, effort: float | None = None, seconds: float | None = None) -> "Budget":
        """Start a budget with limits on effort and on seconds; None means no limit."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        return cls(Meter(), math.inf if effort is None else effort, deadline)

    @property
    def spent(self) -> float:
        """Return the effort that all parts of the budget have spent so far."""
        return self.meter.done + self.meter.under_way

    @property
    def remaining(self) -> float:
        """Return the effort that remains; seconds if effort has no limit."""
        return self.end - self.spent if self.end < math.inf else self.deadline - time.monotonic()

    @property
    def is_late(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    @property
    def is_over(self) -> bool:
        """Return whether no effort or no time remains."""
        return self.remaining <= 0 or self.is_late

    def part(self, limit: float) -> "Budget":
        """Return a part of this budget; `limit` is in the unit of `remaining`."""
        if self.end < math.inf:
            return dataclasses.replace(self, end=min(self.end, self.spent + limit))
        return dataclasses.replace(self, deadline=min(self.deadline, time.monotonic() + limit))

    def spend(self, effort: float) -> None:
        """Add effort."""
        with self.meter.lock:
            self.meter.done += effort

    def new_solver(self, num_threads: int, limit: float = math.inf) -> cp_model.CpSolver:
        """Return a solver within the budget and a limit of deterministic time."""
        # Probing, symmetries and linear relaxations cost more than they save: the model fixes the
        # order of microbatches already (docs/optimize.md). Deterministic time hardly counts linear
        # relaxations.
        solver = cp_model.CpSolver()
        if self.deadline < math.inf:
            solver.parameters.max_time_in_seconds = max(self.deadline - time.monotonic(), 0.01)
        allowed = max(self.end - self.spent, 0.01) / SOLVER  # for each thread
        if min(limit, allowed) < math.inf:
            solver.parameters.max_deterministic_time = min(limit, allowed)
        solver.parameters.num_workers = num_threads
        solver.parameters.linearization_level = 0
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.symmetry_level = 0
        solver.parameters.catch_sigint_signal = False  # the caller handles interrupts
        return solver

    def solve(
        self,
        solver: cp_model.CpSolver,
        model: cp_model.CpModel,
        num_ops: int,
        *,
        num_parallel: int = 1,
        listener: cp_model.CpSolverSolutionCallback | None = None,
    ) -> cp_model.CpSolverStatus:
        """Solve a model of `num_ops` ops, and count the effort; `num_parallel` solvers share it."""
        self.spend(LOAD * num_ops / num_parallel)
        status = solver.solve(model, listener)
        self.meter.under_way = 0.0
        solver_time = solver.response_proto.deterministic_time
        self.spend(SOLVER * solver_time / (num_parallel * solver.parameters.num_workers))
        return status
