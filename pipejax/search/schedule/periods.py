"""Many microbatches: a period alone, and warm-up, period and cool-down optimised together.

The period alone is ops of q microbatches on a ring of length T, repeated for ever. Every op has a
place on the ring and a number of turns. On a worker the places do not overlap; an
activation that lives for n turns and a part is held n times and on that part. For a given T all
of it is linear, so the shortest T is found by bisection. Cut off at both ends, the ring is a plan
for any number of microbatches, and where the folded model begins.

The folded model has few microbatches. Those in its middle are tied: each starts everything a period
T after the one q before it. Where a group before the tied ones has left a worker before a group
behind them arrives, the middle can be cut and n more periods put in, and nothing meets that did
not meet before. So what is minimised is the end of the small schedule plus n T, and T is found
with the rest.
"""

import itertools
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from pipejax.search.schedule.cp_model import ScheduleModel
from pipejax.search.schedule.effort import Budget
from pipejax.search.schedule.plan import Plan, gradient_end
from pipejax.search.schedule.problem import Problem

PARTS = 24  # large units in the longest forward and backward: small rings are solved in seconds


class _RingModel:
    """The model for one length of the ring."""

    def __init__(self, problem: Problem, count: int, length: int, turns: int) -> None:
        self.problem, self.count, self.length, self.turns = problem, count, length, turns
        self.model = cp_model.CpModel()
        self.place: dict[tuple[str, int, int], cp_model.IntVar] = {}
        self.start: dict[tuple[str, int, int], cp_model.IntVar] = {}
        self.lasts = {phase.name: times for phase, times in problem.times.items()}
        stages = range(problem.num_stages)
        for key in itertools.product("FIW", stages, range(count)):
            self._add(*key)
        self.model.add(self.start["F", 0, 0] == 0)
        for number in range(count):
            self._add_waits(number)
        for worker in range(problem.num_workers):
            self._add_worker(worker)

    def _add(self, letter: str, stage: int, number: int) -> None:
        key = letter, stage, number
        self.place[key] = self.model.new_int_var(0, self.length - 1, "")
        self.start[key] = self.model.new_int_var(0, self.turns * self.length, "")
        turn = self.model.new_int_var(0, self.turns, "")
        self.model.add(self.start[key] == self.length * turn + self.place[key])

    def _end(self, letter: str, stage: int, number: int) -> cp_model.LinearExprT:
        return self.start[letter, stage, number] + int(self.lasts[letter][stage])

    def _add_waits(self, number: int) -> None:
        """Let ops wait along the path of a microbatch, and for the one before on every stage."""
        problem, model = self.problem, self.model
        pipe = int(problem.pipe_of[number])
        hop = (problem.lag + problem.transmit)[:, pipe]
        last = problem.num_stages - 1
        mine = [m for m in range(self.count) if int(problem.pipe_of[m]) == pipe]
        following = mine[(mine.index(number) + 1) % len(mine)]
        turn = self.length if following <= number else 0
        for stage in range(problem.num_stages):
            after = stage + 1
            before_gradient = [(("I", stage), ("F", stage), 0)]
            if stage < last:
                before_gradient = [
                    (("F", after), ("F", stage), int(hop[0, stage])),
                    (("I", stage), ("I", after), int(hop[1, stage])),
                ]
            for op, other, lag in (*before_gradient, (("W", stage), ("I", stage), 0)):
                model.add(self.start[*op, number] >= self._end(*other, number) + lag)
            for letter in "FIW":
                start = self.start[letter, stage, following] + turn
                model.add(start >= self._end(letter, stage, number))

    def _add_worker(self, worker: int) -> None:
        """Forbid two ops at one place of the ring, and more memory than the limit."""
        problem, model, length = self.problem, self.model, self.length
        row, held, demands = [], [], []
        always: list[cp_model.LinearExprT] = []
        for stage, number in itertools.product(range(problem.num_stages), range(self.count)):
            if int(problem.placement[int(problem.pipe_of[number]), stage]) != worker:
                continue
            for letter in "FIW":
                place, lasts = self.place[letter, stage, number], int(self.lasts[letter][stage])
                row += [
                    model.new_fixed_size_interval_var(place + turn, lasts, "")
                    for turn in (0, length)
                ]
            size, kept = int(problem.sizes[stage]), int(problem.kept[stage])
            for letter, parts in (("I", size - kept), ("W", kept)):
                if not parts:
                    continue
                turns = model.new_int_var(0, self.turns, "")
                rest = model.new_int_var(0, length - 1, "")
                released = self.start["F", stage, number] + length * turns + rest
                model.add(self._end(letter, stage, number) == released)
                always.append(parts * turns)
                place = self.place["F", stage, number]
                until = model.new_int_var(0, 2 * length, "")
                for turn in (0, -length):
                    held.append(model.new_interval_var(place + turn, rest, until + turn, ""))
                    demands.append(parts)
        model.add_no_overlap(row)
        left = model.new_int_var(0, int(problem.limits[worker]), "")
        model.add(cp_model.LinearExpr.sum([left, *always]) == int(problem.limits[worker]))
        model.add_cumulative(held, demands, left)

    def solve(self, budget: Budget, num_threads: int) -> dict[tuple[str, int, int], int] | None:
        solver = budget.new_solver(num_threads)
        solver.parameters.linearization_level = 1  # a ring is all linear: relaxations find it
        status = budget.solve(solver, self.model, len(self.start))
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return {key: solver.value(start) for key, start in self.start.items()}


class Ring(NamedTuple):
    """A period."""

    length: int  # T [units]
    # of the first q microbatches, by phase letter, stage and number [units]
    starts: dict[tuple[str, int, int], int]


def shortest_ring(
    problem: Problem, count: int, longest: int, budget: Budget, num_threads: int
) -> Ring | None:
    """Search the shortest period of `count` microbatches that keeps the limits."""
    coarse = problem.coarser(PARTS)  # its plans are plans of the problem too
    unit = round(coarse.unit / problem.unit)
    work = coarse.forward + coarse.input_grad + coarse.weight_grad
    placed = coarse.worker[:, :count]
    loads = [int((work[:, None] * (placed == w)).sum()) for w in range(coarse.num_workers)]
    hops = int((coarse.lag + coarse.transmit).max(initial=0))
    way = int(work.sum()) + 2 * hops * coarse.num_stages
    low, high = (
        max(*loads, 1),
        longest // unit,
    )  # work of less than a unit has a length all the same
    length, best = low, None  # the shortest that the work allows is often there
    while low <= length < high and not budget.is_over:
        ring = _RingModel(coarse, count, length, 3 + way // length + count)
        # rings too short are refuted at once
        starts = ring.solve(budget.part(budget.left / 2), num_threads)
        if starts is None:
            low = length + 1
        else:
            best, high = Ring(length * unit, {k: unit * v for k, v in starts.items()}), length
        length = (low + high) // 2
    return best


def cut(problem: Problem, ring: Ring) -> Plan:
    """Unroll a ring to as many microbatches as the problem has."""
    count = 1 + max(number for _, _, number in ring.starts)
    shape = problem.num_stages, problem.num_microbatches
    at = {letter: np.zeros(shape, np.int64) for letter in "FIW"}
    for (letter, stage, number), start in ring.starts.items():
        places = np.arange(number, shape[1], count)
        at[letter][stage, places] = start + ring.length * (places // count)
    return Plan.of(at)


class Fold(NamedTuple):
    """How many microbatches represent all of them."""

    warm: int  # microbatches before the tied ones
    tied: int  # microbatches that repeat a period later
    length: int  # q, microbatches of a period
    cool: int  # microbatches after the tied ones and their repetition
    repeats: int  # n, periods that are left out

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
    """The model of the small problem, tied; its objective is that of the whole one."""

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
            for other in range(behind, problem.num_microbatches)[: self.folded.length]:
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
