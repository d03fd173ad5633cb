"""The period alone: ops of q microbatches on a ring of length T, repeated for ever.

Every op has a place on the ring and a number of turns. On a worker the places do not overlap; an
activation that lives for n turns and a part is held n times and on that part. For a given T all
of it is linear, so the shortest T is found by bisection. Cut off at both ends, the ring is a plan
for any number of microbatches, and where the folded model begins (see `period`).
"""

import itertools
import time
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from pipejax.search.schedule.cp_search import new_solver
from pipejax.search.schedule.plan import Plan
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

    def solve(self, seconds: float, num_threads: int) -> dict[tuple[str, int, int], int] | None:
        solver = new_solver(seconds, num_threads)
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return {key: solver.value(start) for key, start in self.start.items()}


class Ring(NamedTuple):
    """A period.

    Attributes:
      length: T [units].
      starts: of the first q microbatches, by phase letter, stage and number [units].
    """

    length: int
    starts: dict[tuple[str, int, int], int]


def shortest_ring(
    problem: Problem, count: int, longest: int, seconds: float, num_threads: int
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
    until = time.monotonic() + seconds
    while low <= length < high and (left := until - time.monotonic()) > 0:
        ring = _RingModel(coarse, count, length, 3 + way // length + count)
        starts = ring.solve(left / 2, num_threads)  # rings too short are refuted at once
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
