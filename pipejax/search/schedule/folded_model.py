"""Many microbatches: warm-up, a period that repeats, and cool-down, optimised together.

The model has few microbatches. Those in its middle are tied: each starts everything a period T
after the one q before it. Where a group before the tied ones has left a worker before a group
behind them arrives, the middle can be cut and n more periods put in, and nothing meets that did
not meet before. So what is minimised is the end of the small schedule plus n T, and T is found
with the rest.
"""

from typing import NamedTuple

import numpy as np

from pipejax.search.schedule.cp_model import ScheduleModel
from pipejax.search.schedule.plan import Plan, gradient_end
from pipejax.search.schedule.problem import Problem


class Fold(NamedTuple):
    """How many microbatches represent all of them.

    Attributes:
      warm: microbatches before the tied ones.
      tied: microbatches that repeat a period later.
      length: q, microbatches of a period.
      cool: microbatches after the tied ones and their repetition.
      repeats: n, periods that are left out.
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
    """Choose how many microbatches to keep."""
    pipe_of = problem.pipe_of
    if not np.array_equal(pipe_of[length:], pipe_of[:-length]):
        return None
    fixed = depth + (depth + length) + length + depth  # warm, tied, repetition of tied, cool
    left = problem.num_microbatches - fixed
    if left < length:
        return None
    repeats = left // length
    return Fold(depth, depth + length, length, depth + left - repeats * length, repeats)


def depth_of(problem: Problem, plan: Plan) -> int:
    """Count the microbatches that are on a worker at once, at most, over all pipes."""
    # at the start of every F: forwards begun by then less gradients ended by then
    end = gradient_end(problem, plan)
    most = 0
    for stage in range(problem.num_stages):
        for pipe in range(len(problem.placement)):
            mine = problem.pipe_of == pipe
            start = plan.forward[stage, mine]
            begun = np.searchsorted(np.sort(start), start, side="right")
            gone = np.searchsorted(np.sort(end[stage, mine]), start, side="right")
            most = max(most, int((begun - gone).max(initial=0)))
    return most * len(problem.placement)


class FoldedModel(ScheduleModel):
    """The model of the small problem, tied; its objective is that of the whole one.

    Attributes:
      period: T.
    """

    def __init__(self, small: Problem, folded: Fold, horizon: int) -> None:
        """Tie the middle and weigh the period."""
        super().__init__(small, horizon, in_order=True)
        self.folded = folded
        # As many are tied as are on a worker at once, and one group more: at the cut, all that a
        # worker has in hand repeats already.
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
        """Let the last group before the cut leave a worker before the next group arrives."""
        # Between the two the n periods are put in. What is put in repeats tied groups, so it meets
        # on a worker what those met, some periods earlier. Only what lies before all tied groups
        # and what lies behind them could meet anew or change sides: this keeps them apart.
        problem = self.problem
        sharing = {w: group for group in problem.host_links for w in group}
        stages = range(problem.num_stages)
        for one in range(before + 1 - self.folded.length, before + 1):
            for other in range(behind, min(behind + self.folded.length, problem.num_microbatches)):
                for stage in stages:
                    here = self._worker(stage, one)
                    near = sharing.get(here, (here,))
                    for next_stage in stages:
                        if self._worker(next_stage, other) in near:
                            start = self.start["F"][next_stage, other]
                            self.model.add(start >= self._gradient_end[stage, one])


def extended(problem: Problem, folded: Fold, plan: Plan) -> Plan:
    """Reinsert the periods that were left out."""
    cut = folded.warm + folded.tied
    period = int(plan.forward[0, cut] - plan.forward[0, cut - folded.length])
    place = np.arange(problem.num_microbatches)
    put_in = folded.repeats * folded.length
    # a microbatch in the part that was put in repeats the last period before the cut
    inside = (place >= cut) & (place < cut + put_in)
    ahead = np.where(inside, (place - cut) // folded.length + 1, 0)
    ahead = np.where(place >= cut + put_in, folded.repeats, ahead)
    source = place - ahead * folded.length

    taken = Plan.of({p: at[:, source] for p, at in plan.starts.items()}, plan.whole[:, source])
    return taken.moved(lambda starts: starts + ahead * period)
