"""Large-neighbourhood search: solve a small part of a plan again and again.

A neighbourhood is a set of free ops. All other ops keep their order on workers and host links, but
not their times. So later ops can move up. Free offloads and loads may be dropped or added.

If memory is tight, the complete model is too large for the solver. A step of the search frees the
ops of one neighbourhood, and asks the solver for any plan with an earlier end. A step mostly takes
a fraction of a second. A bandit chooses the kind of the next neighbourhood by its gains so far.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping

import numpy as np
from ortools.sat.python import cp_model

from pipejax.base.array_types import Bool, NumpyArray
from pipejax.base.progress import merge_progress
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.cp_model import ScheduleModel
from pipejax.search.schedule.effort import Budget
from pipejax.search.schedule.plan import (
    NEVER,
    Plan,
    gradient_end,
    input_grad_end,
    keeps_limits,
    plan_objective,
    search_horizon,
    to_plan,
    to_table,
)
from pipejax.search.schedule.problem import Problem

Ops = Bool[NumpyArray, "stages microbatches"]
Free = Mapping[str, Ops]  # {phase letter: whether each op is free}
Op = tuple[str, tuple[int, int]]  # phase letter; stage and microbatch
Tell = Callable[[ScheduleTable], None]

FIRST_SHARE = 0.3  # largest share of the plan in the first neighbourhoods
FIRST_PAIRS = 100  # largest number of pairs (stage, microbatch) in the first neighbourhoods
MIN_SHARE = 0.05  # smallest share of the plan in a neighbourhood
GROWTH = 1.1  # the share grows by this factor if the solver ended, and shrinks at a timeout
# limits of a step in the solver's deterministic time; the larger limit counts
STEP = 0.05  # limit that takes about half a second
STEP_SHARE = 0.05  # share of the time of all steps since the last gain
PARTS = (12, 48, 10**6)  # units in the longest forward and backward, on grids that take turns
STUCK = 0.4  # deterministic time without a gain after which the next grid is tried
# limits of the effort without a gain, after which the search ends; the larger limit counts
PATIENCE = 6.0
PATIENCE_SHARE = 1.0  # share of the effort until the last gain
GAINS = (0.0, 0.01, 0.04)  # choices of the share by which a step must shorten the plan


def _free_microbatches(
    problem: Problem, plan: Plan, share: float, rng: np.random.Generator
) -> dict[str, Ops]:
    """Mark the ops that may change their order: those of a random range of microbatches."""
    count = max(2, round(share * problem.num_microbatches))
    # the window may extend past both ends, so that all microbatches are chosen equally often
    first = rng.integers(1 - count // 2, problem.num_microbatches - count // 2)
    microbatch = np.arange(problem.num_microbatches)
    is_inside = (microbatch >= first) & (microbatch < first + count)
    return dict.fromkeys("FIWOL", np.broadcast_to(is_inside, plan.forward.shape))


def _free_workers(
    problem: Problem, plan: Plan, share: float, rng: np.random.Generator
) -> dict[str, Ops]:
    """Mark the ops that may change their order: those of a random range of workers."""
    count = max(1, round(share * problem.num_workers))
    first = rng.integers(0, problem.num_workers - count + 1)
    is_inside = (problem.worker >= first) & (problem.worker < first + count)
    return dict.fromkeys("FIWOL", is_inside)


def _free_time(
    problem: Problem, plan: Plan, share: float, rng: np.random.Generator
) -> dict[str, Ops]:
    """Mark the ops that may change their order: those that start in a random time window."""
    end = int(gradient_end(problem, plan).max())
    window = share * end
    first = rng.uniform(-window / 3, end - 2 * window / 3)  # a third may lie outside the step
    last = first + window
    free = {letter: (start >= first) & (start <= last) for letter, start in plan.starts.items()}
    # an O or L is free with any of these ops of its stage and microbatch
    return free | dict.fromkeys("OL", free["F"] | free["I"] | free["O"] | free["L"])


# functions that draw the free ops of a neighbourhood, whose size is a share of the plan
KINDS: Mapping[str, Callable[[Problem, Plan, float, np.random.Generator], Free]] = {
    "microbatches": _free_microbatches,
    "workers": _free_workers,
    "time": _free_time,
}


def fixed_order(problem: Problem, plan: Plan, free: Free) -> Iterator[tuple[Op, Op]]:
    """Yield pairs of consecutive ops on a worker or a host link, among ops that are not free."""
    ends = {"I": input_grad_end(problem, plan), "W": gradient_end(problem, plan)}
    for letter in "FOL":
        ends[letter] = plan.starts[letter] + problem.times[Phase[letter]][:, None]
    worker_by_op, first_of_link = problem.worker, np.arange(problem.num_workers)
    for workers in problem.host_links:
        first_of_link[list(workers)] = min(workers)
    # {(True, first worker of a host link) or (False, worker): [(start, end, op)]}, O and L by link
    rows: dict[tuple[bool, int], list[tuple[int, int, Op]]] = {}
    for letter, start in plan.starts.items():
        # ops without duration delay no other op, so they need no order
        is_fixed = ~free[letter] & (start != NEVER) & (ends[letter] > start)
        for stage, microbatch in np.argwhere(is_fixed).tolist():
            key, worker = (stage, microbatch), int(worker_by_op[stage, microbatch])
            row = (True, int(first_of_link[worker])) if letter in "OL" else (False, worker)
            op = int(start[key]), int(ends[letter][key]), (letter, key)
            rows.setdefault(row, []).append(op)
    for ops in rows.values():
        for (*_, first), (*_, second) in itertools.pairwise(sorted(ops)):
            yield first, second


class Arm:
    """Kind of neighbourhood and share of ops that it frees, with the gains of its steps."""

    def __init__(self, kind: str, share: float) -> None:
        self.kind, self.share, self.spent, self.gains = kind, share, 0.0, 0

    @property
    def weight(self) -> float:
        """Return the gains per time so far; an arm that was never tried has a high weight."""
        return (self.gains + 1) / (self.spent + 2 * STEP)

    def learn(self, spent: float, *, is_solved: bool, ended: bool) -> None:
        """Update the arm after a step: count a gain if solved, and adapt the share."""
        self.spent += spent
        self.gains += is_solved
        share = self.share * GROWTH if ended else self.share / GROWTH
        self.share = min(1.0, max(MIN_SHARE, share))


class NeighbourhoodSearch:
    """Neighbourhood search of one thread on one time grid."""

    def __init__(self, problem: Problem, plan: Plan, seed: int) -> None:
        # the model has no objective: the first better plan ends a step
        horizon = search_horizon(problem, plan)
        self.problem, self.plan, self.objective = problem, plan, plan_objective(problem, plan)
        self._rng = np.random.default_rng(seed)
        self._base = ScheduleModel(problem, horizon)
        self._base.model.clear_objective()  # type: ignore[no-untyped-call]  # it has no types
        share = min(FIRST_SHARE, FIRST_PAIRS / plan.forward.size)
        self._arms = [Arm(kind, share) for kind in KINDS]
        self._solver: cp_model.CpSolver | None = None
        self.time_without_gain = 0.0  # deterministic time since the last gain

    def step(self, budget: Budget, num_parallel: int = 1) -> bool:
        """Free the ops of a random neighbourhood and solve; return whether the plan improved."""
        # `num_parallel` searches make steps at the same time.
        weights = np.array([arm.weight for arm in self._arms])
        arm = self._arms[self._rng.choice(len(weights), p=weights / weights.sum())]
        model = self._model(KINDS[arm.kind](self.problem, self.plan, arm.share, self._rng))
        time_limit = max(STEP, STEP_SHARE * self.time_without_gain)  # grows without a gain
        solver = self._solver = budget.new_solver(1, time_limit)
        solver.parameters.random_seed = int(self._rng.integers(2**31))
        solver.parameters.cp_model_presolve = False  # takes ten times as long as most steps
        status = budget.solve(solver, model, self._base.num_ops, num_parallel=num_parallel)
        is_solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        spent = solver.response_proto.deterministic_time
        self.time_without_gain += spent
        arm.learn(spent, is_solved=is_solved, ended=is_solved or status == cp_model.INFEASIBLE)
        return is_solved and self.take(self._base.plan(solver))

    def take(self, plan: Plan) -> bool:
        """Adopt a plan if it is better than the present plan; return whether it is better."""
        objective = plan_objective(self.problem, plan)
        if objective >= self.objective:
            return False
        self.plan, self.objective, self.time_without_gain = plan, objective, 0.0
        return True

    def stop(self) -> None:
        """Stop the running step."""
        if self._solver is not None:
            self._solver.stop_search()

    def _model(self, free: Free) -> cp_model.CpModel:
        """Copy the model, fix the order of ops that are not free, and require a better plan."""
        base, model = self._base, self._base.model.clone()
        order = fixed_order(self.problem, self.plan, free)
        for (letter, key), (next_letter, next_key) in order:
            model.add(base.start[next_letter][next_key] >= base.end(letter, key))
        for key, is_out in base.is_offloaded.items():
            if not free["O"][key]:
                model.add(is_out == bool(self.plan.offload[key] != NEVER))
        for key, is_whole in base.is_unsplit.items():
            if not free["I"][key]:
                model.add(is_whole == bool(self.plan.whole[key]))
        gain = max(1, int(float(self._rng.choice(GAINS)) * self.objective))
        model.add(base.objective <= self.objective - gain)
        base.hint(self.plan, model)
        return model


class Best:
    """The best table of all threads, guarded by a lock."""

    def __init__(self, problem: Problem, table: ScheduleTable, budget: Budget) -> None:
        # `effort_at_gain` is the effort spent until the last gain
        self._lock, self._budget, self.effort_at_gain = threading.Lock(), budget, budget.spent
        self._problem, self.table = problem, table
        self.objective = plan_objective(problem, to_plan(problem, table))

    def offer(self, table: ScheduleTable) -> bool:
        """Keep a table if it is better than the best so far; return whether it is better."""
        objective = plan_objective(self._problem, to_plan(self._problem, table))
        with self._lock:
            if objective >= self.objective:
                return False
            self.table, self.objective = table, objective
            self.effort_at_gain = self._budget.spent
            return True


def search_grids(problem: Problem) -> list[Problem]:
    """Return the problem on ever finer time grids; the last grid is that of the problem."""
    # On a coarse grid the solver improves fast; a fine grid then removes the rounding.
    grids = {grid.unit: grid for grid in map(problem.coarser, PARTS)}
    return [grids[unit] for unit in sorted(grids, reverse=True)]


def search_neighbourhoods(
    problem: Problem, start: ScheduleTable, budget: Budget, num_threads: int
) -> Generator[ScheduleTable, None, None]:
    """Improve a table by neighbourhood searches in threads; yield each better table."""
    # Each thread begins on another grid, and changes to the next grid when it gets stuck. All
    # threads continue from the best table. The search ends early if gains fail to appear.
    best, is_stopped, effort_before = Best(problem, start, budget), threading.Event(), budget.spent
    grids, running = search_grids(problem), dict[int, NeighbourhoodSearch]()

    def is_over() -> bool:
        patience = max(PATIENCE, PATIENCE_SHARE * (best.effort_at_gain - effort_before))
        is_stale = budget.spent > best.effort_at_gain + patience
        return is_stopped.is_set() or budget.is_over or is_stale

    def visit(search: NeighbourhoodSearch, limit: float, tell: Tell) -> None:
        """Search on one grid until it gets stuck; report gains, adopt better tables of others."""
        grid, adopted = search.problem, best.table
        while search.time_without_gain < limit and not is_over():
            if search.step(budget, num_threads) and keeps_limits(grid, search.plan):
                table = to_table(grid, search.plan, "optimized neighbourhoods")
                search.take(to_plan(grid, table))  # ops start as early as the rows allow
                if best.offer(table):
                    tell(table)
            if best.table is not adopted:  # another thread found a better table
                adopted = best.table
                search.take(to_plan(grid, adopted))

    def run(thread: int, tell: Tell) -> None:
        """Search on one grid after another until the search is over."""
        for visits in itertools.count(thread):
            if is_over():
                return
            round_number, number = divmod(visits, len(grids))
            seed = visits * num_threads + thread
            plan = to_plan(grids[number], best.table)
            search = running[thread] = NeighbourhoodSearch(grids[number], plan, seed)
            limit = STUCK * (1 + round_number) if len(grids) > 1 else np.inf
            visit(search, limit, tell)

    def stop() -> None:
        is_stopped.set()
        for search in [*running.values()]:
            search.stop()

    return merge_progress([functools.partial(run, k) for k in range(num_threads)], stop)
