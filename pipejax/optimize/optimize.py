"""The best schedule for given times under a memory limit, found better and better."""

import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from pipejax.costs import Costs
from pipejax.evaluate import lower_and_price
from pipejax.optimize.baselines import baseline_tables
from pipejax.optimize.bounds import lower_bound, stage_bounds
from pipejax.optimize.cyclic import Ring, cut, shortest_ring
from pipejax.optimize.greedy import greedy_plan
from pipejax.optimize.model import ScheduleModel
from pipejax.optimize.period import FoldedModel, depth_of, extended, fold
from pipejax.optimize.plan import Plan, gradient_end, objective_of
from pipejax.optimize.problem import WEIGHT_SHARE, Problem, pose
from pipejax.optimize.relaxed import relaxed_bound
from pipejax.optimize.search import search
from pipejax.optimize.solution import Solution
from pipejax.optimize.starts import greedy_starts, is_pipe, pipe_plans
from pipejax.optimize.tables import host_finish, peaks, to_plan, to_table
from pipejax.table import ScheduleTable

LARGE = 1500  # ops from which a period is looked for before the whole is searched
MANY_STARTS = 10_000  # ops times units from which a finer grid is searched faster
FINE = 30  # units in the longest forward and backward, at least, on that grid
FAR = 0.75  # of a plan: a bound below this is worth raising where activations may be offloaded
COUNTS = (1, 2)  # microbatches of a period that are tried
_SHARES = {"greedy": 0.2, "relaxed": 0.2, "period": 0.8}  # of the time that is left then


def optimize(
    table: ScheduleTable,
    costs: Costs,
    *,
    memory_limit: float | Sequence[float],
    sizes: float | Sequence[float] = 1.0,
    weight_share: float = WEIGHT_SHARE,
    offload: bool = False,
    link: str = "delay",
    host_links: Sequence[Sequence[int]] = (),
    objective: str = "makespan",
    time_limit: float = 60.0,
    threads: int | None = None,
) -> Iterator[Solution]:
    """Optimise a schedule under a memory limit; every solution is better than the one before.

    Args:
      table: says where stages are and which pipe a microbatch belongs to; its order is a start
        where it keeps the limit.
      costs: unbatched [s].
      memory_limit: what a worker can hold, or one entry per worker, in the unit of `sizes`.
      sizes: what an activation takes, or one entry per stage; 1 counts activations.
      weight_share: share of it that stays after I for W.
      offload: whether activations may go to the host and back, at the costs of O and L.
      link: "delay" or "queued".
      host_links: groups of workers that share a host link.
      objective: "makespan", or "span": the longest time between a worker's first start and last
        end.
      time_limit: seconds.
      threads: of the solver; one per processor if None.

    Yields:
      Solutions; the last one carries the final bound.

    Raises:
      ValueError: if an argument is not of that form, or no schedule keeps the limit.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> costs = pj.Costs.uniform(table, forward=10.0, input_grad=10.0, weight_grad=10.0)
      >>> *_, best = optimize(table, costs, memory_limit=3)
      >>> best.makespan, best.status
      (310.0, 'optimal')
    """
    problem = pose(
        table, costs, memory_limit=memory_limit, sizes=sizes, weight_share=weight_share,
        offload=offload, link=link, host_links=host_links, objective=objective,
    )  # fmt: skip
    if not time_limit > 0:
        raise ValueError(f"time_limit must be above 0 seconds, got {time_limit!r}")
    run = _Run(problem, costs, link, time_limit, threads or os.cpu_count() or 1)
    return run.solutions(table)


class _Run:
    """One optimisation: what is known so far, and the steps that find more."""

    def __init__(
        self, problem: Problem, costs: Costs, link: str, time_limit: float, threads: int
    ) -> None:
        self.problem, self.costs, self.link, self.threads = problem, costs, link, threads
        self.begun = time.monotonic()
        self.until = self.begun + time_limit
        self.bound = lower_bound(problem)
        self.plan: Plan | None = None
        self.value = 0
        self.best: Solution | None = None
        self.baseline: dict[str, float | None] = {}

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    @property
    def is_closed(self) -> bool:
        """Whether the plan is as good as the bound."""
        return self.plan is not None and self.value <= self.bound

    def solutions(self, table: ScheduleTable) -> Iterator[Solution]:
        for step in (self._first, lambda: self._baselines(table), self._greedy, self._relaxed,
                     self._period, self._search):  # fmt: skip
            if (not self.is_closed and self.left > 0) or self.plan is None:
                yield from step()
        if self.best is None:
            raise ValueError(
                f"no schedule within memory_limit was found in {self.until - self.begun:g} "
                "seconds: give more time_limit or memory_limit"
            )
        final = self._solution(self.best.table, self.best.makespan, self.best.source)
        if final != self.best:
            yield final

    def _first(self) -> Iterator[Solution]:
        plan = greedy_plan(self.problem, self.problem.limits)
        if plan is not None:
            yield from self._offer("greedy", plan)

    def _baselines(self, table: ScheduleTable) -> Iterator[Solution]:
        for name, other in baseline_tables(self.problem, table):
            plan = to_plan(self.problem, other)
            keeps = bool((peaks(self.problem, plan) <= self.problem.limits).all())
            self.baseline[name] = self._measure(other) if keeps else None
            if keeps:
                yield from self._offer(name, plan)

    def _greedy(self) -> Iterator[Solution]:
        if is_pipe(self.problem):
            for start in pipe_plans(self.problem):
                yield from self._offer(*start)
        for start in greedy_starts(self.problem, self.left * _SHARES["greedy"]):
            yield from self._offer(*start)

    def _relaxed(self) -> Iterator[Solution]:
        """Bounds from one stage alone, the one with the best simple bound first."""
        is_far = self.plan is not None and self.bound < FAR * self.value
        if not is_pipe(self.problem) or (self.problem.offload is not None and not is_far):
            return
        simple = stage_bounds(self.problem)
        until = time.monotonic() + self.left * _SHARES["relaxed"]
        for stage in np.argsort(-simple, kind="stable").tolist():
            seconds = until - time.monotonic()
            if self.is_closed or seconds <= 0:
                return
            self._raise_bound(
                relaxed_bound(self.problem, stage, self._horizon, seconds, self.threads)
            )
        yield from ()

    def _period(self) -> Iterator[Solution]:
        """A ring of few microbatches, then warm-up, period and cool-down together."""
        if 3 * self.problem.worker.size < LARGE or self.plan is None:
            return
        until = time.monotonic() + self.left * _SHARES["period"]
        for number, count in enumerate(COUNTS):
            seconds = (until - time.monotonic()) / (len(COUNTS) - number)
            if self.is_closed or seconds <= 0:
                return
            longest = count * self.value // self.problem.num_microbatches
            if (self.problem.pipe_of[count:] != self.problem.pipe_of[:-count]).any():
                continue
            ring = shortest_ring(self.problem, count, longest, seconds, self.threads)
            if ring is not None:
                plan = cut(self.problem, ring)
                yield from self._offer(f"period of {count}", plan)
                yield from self._fold(ring, count, plan, until - time.monotonic())

    def _fold(self, ring: Ring, count: int, plan: Plan, seconds: float) -> Iterator[Solution]:
        folded = fold(self.problem, count, depth_of(self.problem, plan) + 1)
        if folded is None:
            return
        small = self.problem.with_microbatches(folded.microbatches)
        start = cut(small, ring)
        model = FoldedModel(small, folded, int(gradient_end(small, start).max()))
        model.hint(start)
        for found in search(model, seconds, self.threads):
            if found.plan is not None:
                whole = extended(self.problem, folded, found.plan)
                yield from self._offer(f"period of {count}", whole)

    def _search(self) -> Iterator[Solution]:
        parts = self._parts
        problem = self.problem.finer(parts)
        model = ScheduleModel(problem, parts * self._horizon)
        if self.plan is not None:
            model.hint(self.plan.finer(parts))
        for found in search(model, self.left, self.threads):
            self._raise_bound(-(-found.bound // parts))
            if found.plan is not None:
                yield from self._offer("search", found.plan, problem)

    @property
    def _parts(self) -> int:
        """How much finer the grid of a search is."""
        largest = int((self.problem.forward + self.problem.gradient).max())
        starts = 3 * self.problem.worker.size * self._horizon
        return 1 if starts < MANY_STARTS or not largest else -(-FINE // largest)

    @property
    def _horizon(self) -> int:
        """Units in which the problem can be done; a short span may need more of them."""
        if self.plan is not None:
            end = int(gradient_end(self.problem, self.plan).max() + self.problem.step_end.max())
            return self.value if self.problem.objective == "makespan" else 2 * end
        work = self.problem.forward + self.problem.input_grad + self.problem.weight_grad
        hops = int(self.problem.lag.max(initial=0) + self.problem.transmit.max(initial=0))
        each = int(work.sum()) + 2 * self.problem.num_stages * hops
        return self.problem.num_microbatches * each + int(self.problem.step_end.max())

    def _offer(self, source: str, plan: Plan, problem: Problem | None = None) -> Iterator[Solution]:
        """Take a plan if it is better; it may be one of the problem on another grid."""
        problem = problem or self.problem
        value = objective_of(problem, plan) * problem.unit
        if self.plan is not None and value >= self.value * self.problem.unit * (1 - 1e-9):
            return
        table = to_table(problem, plan, f"optimized {source}")
        plan = to_plan(self.problem, table)  # as early as its rows allow
        value = objective_of(self.problem, plan)
        self.plan, self.value = plan, value
        makespan = self._measure(table)
        if self.best is None or makespan < self.best.makespan:
            self.best = self._solution(table, makespan, source)
            yield self.best

    def _raise_bound(self, bound: int) -> None:
        """Take a bound if it is better; one above a plan that exists is an error of ours.

        Raises:
          AssertionError: if it is.
        """
        if self.plan is not None and bound > self.value:
            raise AssertionError(f"bound {bound} is above a plan of {self.value}: please report it")
        self.bound = max(self.bound, bound)

    def _solution(self, table: ScheduleTable, makespan: float, source: str) -> Solution:
        rounding = self._rounding(makespan)
        bound = self.bound * self.problem.unit
        return Solution(
            table=table,
            makespan=makespan,
            lower_bound=bound,
            status="optimal" if makespan - bound <= rounding else "feasible",
            rounding=0.0 if self.problem.exact else rounding,
            offloaded=0 if self.plan is None else self.plan.offloaded,
            source=source,
            seconds=time.monotonic() - self.begun,
            baseline=dict(self.baseline),
        )

    def _rounding(self, makespan: float) -> float:
        """Units that a path can lose: one per op and message on it."""
        if self.problem.exact:
            return 1e-9 * makespan
        per_worker = 3 * max(np.bincount(self.problem.worker.ravel()))
        return float(per_worker + 4 * self.problem.num_stages) * self.problem.unit

    def _measure(self, table: ScheduleTable) -> float:
        """The objective at the real costs [s]."""
        program, vector = lower_and_price(
            table, self.costs, link=self.link, queues="worker",
            host_links=self.problem.host_links,
        )  # fmt: skip
        finish = host_finish(program, vector)
        if self.problem.objective == "makespan":
            return float(finish.max())
        start = finish - vector[program.duration_index]
        return float((finish[program.last_node] - start[program.first_node]).max())
