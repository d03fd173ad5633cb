"""The search: CP-SAT in a thread of its own, its plans and bounds as they come.

A bound comes from one stage alone too: the others never keep it waiting, but messages and memory
do.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from pipejax.base.progress import news_of
from pipejax.search.schedule.bounds import paths
from pipejax.search.schedule.cp_model import ScheduleModel
from pipejax.search.schedule.plan import Plan
from pipejax.search.schedule.problem import HOST_TIMES, OP_TIMES, STEP_END_TIMES, Problem


class SolverState(NamedTuple):
    """News of a search.

    Attributes:
      plan: a better plan, or None where only the bound is new.
      bound: units that no plan of the model can go below.
      closed: whether the search has ended with a proof that nothing better exists.
    """

    plan: Plan | None
    bound: int
    closed: bool


class _Listener(cp_model.CpSolverSolutionCallback):
    def __init__(self, model: ScheduleModel, tell: Callable[[SolverState], None]) -> None:
        super().__init__()
        self._model, self._tell = model, tell

    def on_solution_callback(self) -> None:
        self._tell(
            SolverState(self._model.plan(self), whole_bound(self.best_objective_bound), False)
        )


def whole_bound(bound: float) -> int:
    """Round a bound up to whole units, since plans have whole lengths."""
    return -int(-(bound - 1e-6) // 1)


def new_solver(seconds: float, num_threads: int) -> cp_model.CpSolver:
    """Return a solver with our settings.

    Probing and the search for symmetries cost more than they bring here: the order of
    microbatches is fixed already (docs/optimize.md).
    """
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    solver.parameters.num_workers = num_threads
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.catch_sigint_signal = False  # the caller's to handle
    return solver


def search(model: ScheduleModel, seconds: float, num_threads: int) -> Iterator[SolverState]:
    """Solve a model; stop when the iterator is closed."""
    solver = new_solver(seconds, num_threads)

    def solve(tell: Callable[[SolverState], None]) -> None:
        solver.best_bound_callback = lambda bound: tell(
            SolverState(None, whole_bound(bound), False)
        )
        status = solver.solve(model.model, _Listener(model, tell))
        over = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        known = status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN)
        bound = whole_bound(solver.best_objective_bound) if known else 0
        tell(SolverState(None, bound, over))

    return news_of([solve], solver.stop_search)


def alone(problem: Problem, pipe: int, stage: int) -> Problem:
    """Keep one stage; what is before and after it becomes two stages that take no time."""
    way = paths(problem)
    count = int((problem.pipe_of == pipe).sum())

    def only(values: np.ndarray) -> np.ndarray:
        return np.array([0, int(values[stage]), 0])

    before, between, after = (int(way_of[pipe, stage]) for way_of in way)
    if problem.objective == "span":  # of the stage's own worker: what is around it does not count
        before = after = 0
    names = (*OP_TIMES, *HOST_TIMES, *STEP_END_TIMES, "sizes", "kept")
    given = {name: getattr(problem, name) for name in names}
    kept: dict[str, Any] = {k: None if v is None else only(v) for k, v in given.items()}
    lag = np.array([[[before, between]], [[after, 0]]])
    return dataclasses.replace(
        problem,
        placement=np.arange(3)[None],
        pipe_of=np.zeros(count, np.int64),
        **kept,
        lag=lag,
        transmit=np.zeros_like(lag),
        host_links=(),
        limits=np.array([1, int(problem.limits[problem.placement[pipe, stage]]), 1]),
    )


def relaxed_bound(
    problem: Problem, stage: int, horizon: int, seconds: float, num_threads: int
) -> int:
    """Bound the objective by what one stage alone needs."""
    bound = 0
    for found in search(ScheduleModel(alone(problem, 0, stage), horizon), seconds, num_threads):
        bound = max(bound, found.bound)
    return bound
