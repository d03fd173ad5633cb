"""Plans from repeated building blocks: how long microbatches wait, and how often they come.

A few numbers say what a block looks like and how closely its order is followed. They are drawn at
random, or some of them anew in one of the best draws so far. A run that cannot be better is given
up before its end, and of many microbatches a few are run first: so most draws cost little.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.schedules.cells.ops import SPLIT
from pipejax.schedules.heuristics.building_block import (
    Order,
    Waits,
    building_block,
    least_interval,
    legs_of,
)
from pipejax.schedules.heuristics.list_scheduling import Goal, Rules, list_schedule
from pipejax.schedules.heuristics.timeline import FOREVER, TimedOps, Work
from pipejax.search.schedule.effort import LIST, Budget
from pipejax.search.schedule.initial_plans import Start, plan_of, work_of
from pipejax.search.schedule.plan import Plan, objective_of
from pipejax.search.schedule.problem import Problem

LONGEST = (1, 2, 4, 8)  # waits that are drawn, at most [half ops]
STRETCHES = (
    1.0,
    1.0,
    1.0,
    1.0,
    1.05,
    1.1,
    1.2,
    1.4,
    1.7,
)  # of the interval that memory and work allow
DELAYS = (0.0, 0.5, 1.0, 2.0, 4.0, FOREVER)  # intervals until a weight gradient is due
USUALLY = (True, True, True, False)  # the last weight gradients wait; workers run ahead
ELITE = 4  # best draws of which others are made
MADE_OF_ELITE = 0.7  # share of the draws
ANEW = (0.1, 0.3)  # share of the numbers that are drawn anew in them
RESTART = 80  # draws that bring nothing after which the best ones are put aside
STALE = 200  # draws that bring nothing after which it ends, if that is most of all draws
FEW = (3, 2)  # microbatches per worker that tell what many take: with less, more is drawn


class BlockDraw(NamedTuple):
    """What says how a plan is made."""

    waits: tuple[int, ...]  # of forwards, of gradients, and between legs [half ops]
    stretch: float  # of the interval
    delay: float  # of weight gradients [intervals]
    is_delayed_at_end: bool  # as in `Order`
    runs_ahead: bool  # as in `Order`
    prefers_weights: bool  # as in `Order`


def block_starts(problem: Problem, budget: Budget, enough: int) -> Iterator[Start]:
    """Yield successively better plans, until one is short enough."""
    best = FOREVER
    counts = sorted({_few(problem, each) for each in FEW}, reverse=True)
    for number, count in enumerate(counts):
        share = budget.part(budget.left / (len(counts) - number))
        for start in _starts_by_few(problem, count, share, enough, best):
            best = objective_of(problem, start.plan)
            yield start


def _starts_by_few(
    problem: Problem, few: int, budget: Budget, enough: int, best: float
) -> Iterator[Start]:
    """Yield plans that are better than the best; few microbatches say which draws are run whole."""
    begun, on_whole = budget.spent, 0.0
    small = problem if few == problem.num_microbatches else problem.with_microbatches(few)
    search = BlockSearch(small, problem.num_microbatches - few)
    while best > enough and not search.is_stale and not budget.is_over:
        drawn = search.draw()
        plan = search.run(drawn)
        budget.spend(LIST * 3 * small.worker.size)
        if plan is None:
            continue
        if small is not problem:
            if 2 * on_whole > budget.spent - begun:
                continue
            plan = run_draw(problem, drawn, best)
            effort = LIST * 3 * problem.worker.size
            budget.spend(effort)
            on_whole += effort
        if plan is not None and (value := objective_of(problem, plan)) < best:
            best = value
            yield Start("building block", plan)


def _few(problem: Problem, each: int) -> int:
    """Return how many microbatches stand for all, which they do where there are many."""
    few = each * problem.num_workers
    return few if problem.num_microbatches > few + few // 2 else problem.num_microbatches


def run_draw(problem: Problem, drawn: BlockDraw, shorter_than: float) -> Plan | None:
    """Run the workers in the order that a draw stands for."""
    work = work_of(problem, problem.limits)
    step, legs = float(np.mean([work.lasts[phase] for phase in SPLIT])) / 2, num_legs(work)
    waits = [step * number for number in drawn.waits]
    given = Waits(waits[:legs], waits[legs : 2 * legs], waits[2 * legs :])
    block = building_block(work, given, least_interval(work))
    interval = drawn.stretch * least_interval(work, block)
    block = building_block(work, given, interval)
    order = Order(block, drawn.delay * interval, *drawn[3:])
    goal = Goal(shorter_than, problem.objective == "span")
    run = list_schedule(work, Rules(order=order), goal)
    return None if run is None else plan_of(problem, TimedOps.of(run.log))


def num_legs(work: Work) -> int:
    """Count the legs of the longest way."""
    return 1 + max(legs_of(row)[-1] for row in work.placement)


class BlockSearch:
    """Draws and the best of them."""

    def __init__(self, problem: Problem, left_out: int) -> None:
        """Prepare a problem that stands for one with more microbatches."""
        self.problem, self.left_out, self.random = problem, left_out, random.Random(0)
        work = work_of(problem, problem.limits)
        self.legs, self.busiest = num_legs(work), least_interval(work)
        self.best = self.best_of_all = FOREVER  # since the last restart, and ever
        self.elite: list[BlockDraw] = []
        self.moved = 0  # draws up to the last that was better since the restart
        self.drawn = self.fruitful = 0  # draws, and those up to the last that was better

    @property
    def is_stale(self) -> bool:
        """Whether there is little hope in further draws."""
        return self.drawn > STALE + 3 * self.fruitful

    def draw(self) -> BlockDraw:
        """Draw all numbers, or some of a draw that was good."""
        if self.drawn > self.moved + RESTART:  # one bad start must not decide
            self.best, self.elite, self.moved = FOREVER, [], self.drawn
        choose = self.random.choice
        longest = choose(LONGEST)
        new = BlockDraw(
            tuple(self.random.randint(0, longest) for _ in range(4 * self.legs - 1)),
            choose(STRETCHES),
            choose(DELAYS),
            is_delayed_at_end=choose(USUALLY),
            runs_ahead=choose(USUALLY),
            prefers_weights=choose((True, False)),
        )
        if not self.elite or self.random.random() > MADE_OF_ELITE:
            return new
        old, share = choose(self.elite), choose(ANEW)
        return BlockDraw(
            self._mixed(old.waits, new.waits, share), *self._mixed(old[1:], new[1:], share)
        )

    def _mixed(self, old: Sequence[Any], new: Sequence[Any], share: float) -> tuple[Any, ...]:
        pairs = zip(old, new, strict=True)
        return tuple(b if self.random.random() < share else a for a, b in pairs)

    def run(self, drawn: BlockDraw) -> Plan | None:
        """Run a draw; None where it is worse than the best one."""
        self.drawn += 1
        least = self.left_out * self.busiest
        plan = run_draw(self.problem, drawn, self.best - least + 1)
        if plan is None:
            return None
        value = objective_of(self.problem, plan) + self.left_out * max(self.busiest, _cycle(plan))
        if value > self.best:
            return None
        self.elite = [*self.elite[1 - ELITE :], drawn]
        if value < self.best:
            self.best, self.moved = value, self.drawn
        if value < self.best_of_all:
            self.best_of_all, self.fruitful = value, self.drawn
        return plan


def _cycle(plan: Plan) -> float:
    """Return how often microbatches come in the second half."""
    first = np.sort(plan.forward[0])
    half = len(first) // 2
    return float(first[-1] - first[half]) / max(len(first) - 1 - half, 1)
