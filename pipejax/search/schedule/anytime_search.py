"""Anytime search: quick schedules first, then better schedules, with a lower bound throughout."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np

from pipejax.analysis.runs.evaluate import spans
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.program import run_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import Found
from pipejax.search.schedule import initial_plans
from pipejax.search.schedule.bounds import lower_bound, stage_bounds
from pipejax.search.schedule.cp_model import ScheduleModel, relaxed_bound, search
from pipejax.search.schedule.effort import BASELINE, Budget
from pipejax.search.schedule.neighbourhoods import search_neighbourhoods
from pipejax.search.schedule.plan import (
    Optimum,
    Plan,
    keeps_limits,
    plan_objective,
    search_horizon,
    table_keeps_limits,
    to_plan,
    to_table,
)
from pipejax.search.schedule.problem import Problem
from pipejax.search.schedule.store import SolvedProblems

MAX_PARTS_OPS = 1500  # largest number of ops for which neighbourhoods of a plan are searched
MAX_PARTS_OPS_OFFLOAD = 3000  # this number for problems with offloads
HUGE = 20_000  # number of ops from which the solver's model takes too much memory
MANY_STARTS = 10_000  # number of ops times units from which the solver is faster on a finer grid
FINE = 30  # smallest number of units in the longest forward and backward on the finer grid
MIN_BRIEF = 3.0  # least effort (or seconds, without a limit of effort) of the brief search
REPORT_INTERVAL = 0.5  # least time between reports of a new bound [s]
# share of the remaining effort that each step may take
_SHARES = {
    "greedy": 0.2,
    "blocks": 0.2,
    "many blocks": 0.6,  # if the complete problem is not searched
    "brief": 0.05,  # but at least MIN_BRIEF
    "brief at most": 0.15,  # upper limit of the brief search
    "first": 0.5,
    "neighbourhoods": 0.8,
    "few neighbourhoods": 0.4,  # without offloads, as the complete search makes progress, too
    "relaxed": 0.2,
}


class AnytimeSearch:
    """State of one search for a schedule, and the steps that improve its schedule and bound."""

    def __init__(
        self,
        problem: Problem,
        start_table: ScheduleTable,
        costs: Costs,
        links: Links,
        budget: Budget,
        num_threads: int,
        store: SolvedProblems | None,
        on_best: Callable[[Found[Optimum]], object],
    ) -> None:
        self.problem, self.start_table, self.costs, self.links = problem, start_table, costs, links
        self.num_threads, self.store, self.on_best = num_threads, store, on_best
        self.start_time = self.last_report = self.last_save = time.monotonic()
        self.budget = budget
        self.bound, self.bound_by = lower_bound(problem)
        self.plan: Plan | None = None
        self.value = 0
        self.found_after = 0.0  # time at which the best schedule was found [s]
        self.best: Found[Optimum] | None = None
        self.evaluated = 0  # number of plans and tables that were compared with the best
        self.baselines: dict[str, float | None] = {}
        self.is_answered = False
        # F, I and W of each stage and microbatch
        num_ops, has_offloads = 3 * problem.worker.size, problem.offload is not None
        max_ops = MAX_PARTS_OPS_OFFLOAD if has_offloads else MAX_PARTS_OPS
        self._searches_parts = num_ops <= max_ops  # by `search_neighbourhoods`
        self._searches_parts_with_offloads = self._searches_parts and has_offloads
        self._is_huge = num_ops >= HUGE

    @property
    def is_closed(self) -> bool:
        """Return whether the search is over: an optimal plan is known."""
        return self.is_answered or (self.plan is not None and self.value <= self.bound)

    def run(self) -> Found[Optimum]:
        """Run the steps until a plan is optimal or the budget ends, and all required steps."""
        try:
            for step in self._steps():
                is_over = self.is_closed or self.budget.is_over
                is_required = self.plan is None or step == self._baselines
                if is_required or not is_over:
                    step()
            assert self.best is not None  # if any plan fits, one microbatch at a time fits
            result = self._solution(self.best.best.table, self.best.value, self.best.best.source)
            self.on_best(result)
            return result
        finally:  # also after an error or an interrupt
            self._save()

    def _steps(self) -> Sequence[Callable[[], None]]:
        # the bound by single stages holds for problems without offloads only
        starts = self._use_store, self._first, self._baselines, self._blocks, self._greedy
        bound = (self._bound_by_stages,) if self.problem.offload is None else ()
        return *starts, *bound, self._brief_search, self._neighbourhoods, self._search

    def _use_store(self) -> None:
        """Start from the stored solution, which may be optimal."""
        stored = None if self.store is None else self.store.get(self.problem)
        if stored is not None:
            self._raise_bound(stored.proven_bound)
            self._accept_table("store", stored.table)
            self.is_answered = self.best is not None and self.best.best.status == "optimal"

    def _save(self) -> None:
        if self.store is not None and self.best is not None:
            seconds, best = time.monotonic() - self.last_save, self.best.best
            self.store.put(
                self.problem, best.table, self.bound, seconds=seconds, source=best.source
            )
            self.last_save += seconds

    def _first(self) -> None:
        """Try a greedy plan. If it breaks the limits, plan one microbatch at a time."""
        plan = initial_plans.greedy_plan(self.problem, self.problem.limits)
        if plan is not None:
            self._offer("greedy", plan)
        if self.plan is None:
            self._offer("one by one", initial_plans.one_by_one(self.problem))

    def _baselines(self) -> None:
        """Measure published schedules as baselines, and offer them as plans."""
        for name, table in initial_plans.baseline_tables(self.problem, self.start_table):
            self.budget.spend(BASELINE * 3 * self.problem.worker.size)
            self.baselines.setdefault(name, None)
            fits = table_keeps_limits(self.problem, table)
            if fits:
                value, old_value = self._measure(table), self.baselines[name]
                self.baselines[name] = value if old_value is None else min(old_value, value)
            self._offer(name, to_plan(self.problem, table))
            if fits and not (table.offloads or table.is_fused.any()):
                self._accept_table(name, table)  # may beat its plan, whose times are whole units
            if self.budget.is_late:
                return

    def _greedy(self) -> None:
        for plan in initial_plans.greedy_starts(self.problem, self._share("greedy"), self.value):
            self._offer("greedy", plan)

    def _blocks(self) -> None:
        # blocks never offload
        if self._searches_parts_with_offloads and initial_plans.is_pipe(self.problem):
            return
        share = "many blocks" if self._is_huge else "blocks"
        for plan in initial_plans.block_starts(self.problem, self._share(share), self.bound):
            self._offer("building block", plan)

    def _bound_by_stages(self) -> None:
        """Raise the bound by searches of single stages, first the stage of the highest bound."""
        if not initial_plans.is_pipe(self.problem):
            return
        budget = self._share("relaxed")
        for stage in np.argsort(-stage_bounds(self.problem), kind="stable").tolist():
            if self.is_closed or budget.is_over:
                return
            arguments = stage, self._horizon, budget, self.num_threads
            self._raise_bound(relaxed_bound(self.problem, *arguments))

    def _neighbourhoods(self) -> None:
        """Search the neighbourhoods of the best plan within a share of the budget."""
        if not self._searches_parts or self.best is None:
            return
        share = "neighbourhoods" if self._searches_parts_with_offloads else "few neighbourhoods"
        limits = self._share(share), self.num_threads
        with closing(search_neighbourhoods(self.problem, self.best.best.table, *limits)) as tables:
            for table in tables:
                self._accept_table("neighbourhoods", table)
                if self.is_closed:
                    return

    def _share(self, name: str) -> Budget:
        """Return the part of the remaining budget that a step may take."""
        return self.budget.part(self.budget.remaining * _SHARES[name])

    def _brief_search(self) -> None:
        """Search the complete problem before neighbourhoods, if these are searched."""
        if self._searches_parts_with_offloads:
            remaining = self.budget.remaining
            min_limit = min(MIN_BRIEF, remaining * _SHARES["brief at most"])
            self._search_for(self.budget.part(max(min_limit, remaining * _SHARES["brief"])))
        elif self._searches_parts:  # without offloads the solver often ends with a proof
            self._search_for(self._share("first"))

    def _search(self) -> None:
        if not self._is_huge:
            self._search_for(self.budget)

    def _search_for(self, budget: Budget) -> None:
        """Run the solver on the complete problem within a budget; accept its plans and bounds."""
        horizon = self._horizon
        longest = int((self.problem.forward + self.problem.gradient).max())
        # the solver's time grid is finer if it has many possible starts
        num_starts = 3 * self.problem.worker.size * horizon
        factor = 1 if num_starts < MANY_STARTS or not longest else math.ceil(FINE / longest)
        problem = self.problem.finer(factor)  # in units of 1 / factor of the unit
        model = ScheduleModel(problem, factor * horizon)
        if self.plan is not None:
            model.hint(self.plan.with_starts(lambda starts: factor * starts))
        with closing(search(model, budget, self.num_threads)) as states:
            for plan, bound in states:
                self._raise_bound(math.ceil(bound / factor))
                is_due = time.monotonic() > self.last_report + REPORT_INTERVAL
                if plan is not None:
                    self._offer("search", plan, problem)
                elif is_due and self.best is not None:
                    best = self.best
                    self._report_best(best.best.table, best.value, best.best.source)

    @property
    def _horizon(self) -> int:
        """Return a time [units] that is not before the end of any better plan."""
        assert self.plan is not None
        return search_horizon(self.problem, self.plan)

    def _offer(self, source: str, plan: Plan, problem: Problem | None = None) -> None:
        """Accept a plan if it beats the best plan, also if `problem` has another time grid."""
        problem = problem or self.problem
        seconds = plan_objective(problem, plan) * problem.unit
        max_seconds = self.value * self.problem.unit * (1 - 1e-9)
        is_no_better = self.plan is not None and seconds >= max_seconds
        # in the solver's model, ops without duration hold no memory, so limits are checked again
        if is_no_better or not keeps_limits(problem, plan):
            self.evaluated += 1  # `_accept_table` counts all other plans
            return
        self._accept_table(source, to_table(problem, plan, f"optimized {source}"))

    def _accept_table(self, source: str, table: ScheduleTable) -> None:
        """Keep a table that respects the limits, if it is the best plan or the best table."""
        # The best plan has the least objective in whole units, the best table in exact seconds.
        self.evaluated += 1
        start = self.start_table
        table = dataclasses.replace(table, slots=start.slots, stage_shares=start.stage_shares)
        plan = to_plan(self.problem, table)  # every op starts as early as the rows allow
        value = plan_objective(self.problem, plan)
        if self.plan is None or value < self.value:
            self.plan, self.value = plan, value
            self._raise_bound(self.bound)  # checks that the new plan is not below the bound
        makespan = self._measure(table)
        if self.best is None or makespan < self.best.value:
            self.found_after = time.monotonic() - self.start_time
            self._report_best(table, makespan, source)

    def _report_best(self, table: ScheduleTable, makespan: float, source: str) -> None:
        self.best = self._solution(table, makespan, source)
        self.last_report = time.monotonic()
        self.on_best(self.best)  # before it is stored, when an interrupt may come
        self._save()

    def _raise_bound(self, bound: int) -> None:
        """Accept a higher bound; a bound above the value of an existing plan is an error."""
        if bound > self.bound:
            self.bound, self.bound_by = bound, "solver"
        if self.plan is not None and self.bound > self.value:
            above = f"bound {self.bound} by {self.bound_by} is above a plan of {self.value}"
            raise AssertionError(f"{above}: please report it")

    def _solution(self, table: ScheduleTable, makespan: float, source: str) -> Found[Optimum]:
        """Return a table as a result; the status is "optimal" if it reaches the bound."""
        rounding = self._rounding(makespan)
        bound = min(self.bound * self.problem.unit, makespan)
        if self.problem.exact and makespan - bound <= rounding:
            bound = makespan  # equal up to the rounding of floats
        best = Optimum(
            table=table,
            status="optimal" if makespan - bound <= rounding else "feasible",
            bound_by=self.bound_by,
            rounding=0.0 if self.problem.exact else rounding,
            source=source,
            seconds=time.monotonic() - self.start_time,
            effort=self.budget.spent,
            found_after=self.found_after,
        )
        baselines = dict(self.baselines)
        return Found(best, makespan, bound, baselines, self.evaluated, "interrupted")

    def _rounding(self, makespan: float) -> float:
        """Return the largest rounding error of a path [s]: a unit for each op and message."""
        if self.problem.exact:
            return 1e-9 * makespan
        max_worker_ops = 3 * max(np.bincount(self.problem.worker.ravel()))
        return float(max_worker_ops + 4 * self.problem.num_stages) * self.problem.unit

    def _measure(self, table: ScheduleTable) -> float:
        """Return the objective (makespan or longest span) of a table at the exact costs [s]."""
        program, vector = lower_and_price(table, self.costs, self.links)
        run = run_on_host(program, vector)
        if self.problem.objective == "makespan":
            return float(run.finish.max())
        return float(spans(program, run.duration, run.finish).max())
