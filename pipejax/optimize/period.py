"""Many microbatches: warm-up, a period that repeats, and cool-down, optimised together.

The model has few microbatches. Those in its middle are tied: each starts everything a period T
after the one q before it. Where a group before the tied ones has left a worker before a group
behind them arrives, the middle can be cut and n more periods put in, and nothing meets that did
not meet before. So what is minimised is the end of the small schedule plus n T, and T is found
with the rest.
"""

from typing import NamedTuple

import numpy as np

from pipejax.optimize.model import ScheduleModel
from pipejax.optimize.plan import NEVER, Plan, gradient_end
from pipejax.optimize.problem import Problem


class Fold(NamedTuple):
    """How many microbatches stand for all.

    Attributes:
      warm: microbatches before the tied ones.
      tied: microbatches that repeat a period later.
      length: q, microbatches of a period.
      cool: microbatches after the tied ones and their repetition.
      repeats: n, periods that are left out.

    Example:
      >>> Fold(warm=4, tied=6, length=2, cool=4, repeats=8).microbatches
      16
    """

    warm: int
    tied: int
    length: int
    cool: int
    repeats: int

    @property
    def microbatches(self) -> int:
        """Microbatches of the small problem."""
        return self.warm + self.tied + self.length + self.cool


def fold(problem: Problem, length: int, depth: int) -> Fold | None:
    """Choose how many microbatches to keep.

    Args:
      problem: the problem.
      length: microbatches of a period.
      depth: microbatches that are on a worker at once, at most.

    Returns:
      The numbers; None where the problem is too small, or its pipes do not repeat with the period.

    Example:
      >>> from pipejax import schedules
      >>> from pipejax.costs import Costs
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=64)
      >>> problem = pose(table, Costs.uniform(table, forward=1.0, backward=2.0), memory_limit=2)
      >>> fold(problem, length=1, depth=2)
      Fold(warm=2, tied=3, length=1, cool=2, repeats=56)
    """
    pipe_of = problem.pipe_of
    if not np.array_equal(pipe_of[length:], pipe_of[:-length]):
        return None
    fixed = depth + (depth + length) + length + depth
    left = problem.num_microbatches - fixed
    if left < length:
        return None
    repeats = left // length
    return Fold(depth, depth + length, length, depth + left - repeats * length, repeats)


def depth_of(problem: Problem, plan: Plan) -> int:
    """Count the microbatches that are on a worker at once, at most.

    Args:
      problem: the problem.
      plan: its starts.

    Returns:
      Microbatches.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> costs = Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
      >>> problem = pose(table, costs, memory_limit=2)
      >>> from pipejax.optimize.greedy import greedy_plan
      >>> depth_of(problem, greedy_plan(problem, problem.limits))
      2
    """
    end = gradient_end(problem, plan)
    most = 0
    for stage in range(problem.num_stages):
        for pipe in range(len(problem.placement)):
            mine = problem.pipe_of == pipe
            begun = np.searchsorted(np.sort(plan.forward[stage, mine]), plan.forward[stage, mine],
                                    side="right")  # fmt: skip
            gone = np.searchsorted(np.sort(end[stage, mine]), plan.forward[stage, mine],
                                   side="right")  # fmt: skip
            most = max(most, int((begun - gone).max(initial=0)))
    return most * len(problem.placement)


class FoldedModel(ScheduleModel):
    """The model of the small problem, tied; its objective is that of the whole one.

    Attributes:
      period: T.
    """

    def __init__(self, small: Problem, folded: Fold, horizon: int) -> None:
        """Tie the middle and weigh the period.

        Args:
          small: the problem with `folded.microbatches`.
          folded: what is tied.
          horizon: units in which the small problem can be done.
        """
        super().__init__(small, horizon)
        self.folded = folded
        self.period = self.model.new_int_var(0, horizon, "period")
        first, last = folded.warm, folded.warm + folded.tied
        for variables in self.start.values():
            for (stage, microbatch), start in variables.items():
                if first <= microbatch < last:
                    later = variables[stage, microbatch + folded.length]
                    self.model.add(later == start + self.period)
        for choice in (self.out, self.whole):
            for (stage, microbatch), one in choice.items():
                if first <= microbatch < last:
                    self.model.add(choice[stage, microbatch + folded.length] == one)
        self._separate(first + folded.length - 1, last + folded.length)
        self.model.minimize(self.objective + folded.repeats * self.period)

    def _separate(self, before: int, behind: int) -> None:
        """What the last group before has to do on a worker ends before the next group comes."""
        problem = self.problem
        sharing = {w: group for group in problem.host_links for w in group}
        stages = range(problem.num_stages)
        for one in range(before + 1 - self.folded.length, before + 1):
            for other in range(behind, min(behind + self.folded.length, self._count)):
                for stage in stages:
                    here = self._worker(stage, one)
                    near = sharing.get(here, (here,))
                    for next_stage in stages:
                        if self._worker(next_stage, other) in near:
                            start = self.start["F"][next_stage, other]
                            self.model.add(start >= self._gradient_end[stage, one])

    @property
    def _count(self) -> int:
        return self.problem.num_microbatches


def extended(problem: Problem, folded: Fold, plan: Plan) -> Plan:
    """Put the periods back in.

    Args:
      problem: the whole problem.
      folded: what was tied.
      plan: a plan of the small problem.

    Returns:
      A plan of the whole problem.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.cyclic import cut, shortest_ring
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=64)
      >>> costs = Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
      >>> problem = pose(table, costs, memory_limit=2)
      >>> folded = fold(problem, length=1, depth=2)
      >>> ring = shortest_ring(problem, 1, 20, 10.0, 1)
      >>> small = cut(problem.with_microbatches(folded.microbatches), ring)
      >>> extended(problem, folded, small).forward[0, -3:].tolist()  # a microbatch in 3 units
      [183, 186, 189]
    """
    cut = folded.warm + folded.tied
    period = int(plan.forward[0, cut] - plan.forward[0, cut - folded.length])
    place = np.arange(problem.num_microbatches)
    put_in = folded.repeats * folded.length
    # a microbatch in the part that was put in repeats the last period before the cut
    inside = (place >= cut) & (place < cut + put_in)
    ahead = np.where(inside, (place - cut) // folded.length + 1, 0)
    ahead = np.where(place >= cut + put_in, folded.repeats, ahead)
    source = place - ahead * folded.length

    def stretch(starts: np.ndarray) -> np.ndarray:
        return np.where(starts[:, source] == NEVER, NEVER, starts[:, source] + ahead * period)

    return Plan(stretch(plan.forward), stretch(plan.input_grad), stretch(plan.weight_grad),
                plan.whole[:, source], stretch(plan.offload), stretch(plan.load))  # fmt: skip
