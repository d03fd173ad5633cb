"""The period alone: ops of q microbatches on a ring of length T, for ever.

Every op has a place on the ring and a number of turns. On a worker the places do not overlap; an
activation that lives for n turns and a part is held n times and on that part. For a given T all
of it is linear, so the shortest T is found by bisection. Cut off at both ends, the ring is a plan
for any number of microbatches, and where the folded model begins (see `period`).
"""

import itertools

import numpy as np
from ortools.sat.python import cp_model

from pipejax.optimize.plan import NEVER, Plan
from pipejax.optimize.problem import Problem
from pipejax.optimize.search import new_solver

PRECISION = 400  # steps in the shortest period, at most


class _Ring:
    """The model for one length of the ring."""

    def __init__(self, problem: Problem, count: int, length: int, turns: int) -> None:
        self.problem, self.count, self.length, self.turns = problem, count, length, turns
        self.model = cp_model.CpModel()
        self.place: dict[tuple[str, int, int], cp_model.IntVar] = {}
        self.start: dict[tuple[str, int, int], cp_model.IntVar] = {}
        self.lasts = {"F": problem.forward, "I": problem.input_grad, "W": problem.weight_grad}
        for letter, stage, number in itertools.product("FIW", range(problem.num_stages),
                                                       range(count)):  # fmt: skip
            self._add(letter, stage, number)
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
        """Along the way of a microbatch, and behind the one before it on every stage."""
        problem, model = self.problem, self.model
        pipe = int(problem.pipe_of[number])
        hop = (problem.lag + problem.transmit)[:, pipe]
        last = problem.num_stages - 1
        for stage in range(problem.num_stages):
            if stage < last:
                model.add(self.start["F", stage + 1, number]
                          >= self._end("F", stage, number) + int(hop[0, stage]))  # fmt: skip
                model.add(self.start["I", stage, number]
                          >= self._end("I", stage + 1, number) + int(hop[1, stage]))  # fmt: skip
            else:
                model.add(self.start["I", stage, number] >= self._end("F", stage, number))
            model.add(self.start["W", stage, number] >= self._end("I", stage, number))
            mine = [m for m in range(self.count) if int(problem.pipe_of[m]) == pipe]
            following = mine[(mine.index(number) + 1) % len(mine)]
            turn = self.length * (following <= number)
            for letter in "FIW":
                model.add(self.start[letter, stage, following] + turn
                          >= self._end(letter, stage, number))  # fmt: skip

    def _add_worker(self, worker: int) -> None:
        """No two ops at one place of the ring; what is held keeps the limit."""
        problem, model, length = self.problem, self.model, self.length
        row, held, demands = [], [], []
        always: list[cp_model.LinearExprT] = []
        for stage, number in itertools.product(range(problem.num_stages), range(self.count)):
            if int(problem.placement[int(problem.pipe_of[number]), stage]) != worker:
                continue
            for letter in "FIW":
                place, lasts = self.place[letter, stage, number], int(self.lasts[letter][stage])
                row += [model.new_fixed_size_interval_var(place + turn, lasts, "")
                        for turn in (0, length)]  # fmt: skip
            size, kept = int(problem.sizes[stage]), int(problem.kept[stage])
            for letter, parts in (("I", size - kept), ("W", kept)):
                if not parts:
                    continue
                turns = model.new_int_var(0, self.turns, "")
                rest = model.new_int_var(0, length - 1, "")
                model.add(self._end(letter, stage, number) - self.start["F", stage, number]
                          == length * turns + rest)  # fmt: skip
                always.append(parts * turns)
                place = self.place["F", stage, number]
                until = model.new_int_var(0, 2 * length, "")
                for turn in (0, -length):
                    held.append(model.new_interval_var(place + turn, rest, until + turn, ""))
                    demands.append(parts)
        model.add_no_overlap(row)
        left = model.new_int_var(0, int(problem.limits[worker]), "")
        model.add(left + sum(always) == int(problem.limits[worker]))
        model.add_cumulative(held, demands, left)

    def solve(self, seconds: float, threads: int) -> dict[tuple[str, int, int], int] | None:
        solver = new_solver(seconds, threads)
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return {key: solver.value(start) for key, start in self.start.items()}


def cyclic_starts(
    problem: Problem, count: int, longest: int, seconds: float, threads: int
) -> tuple[int, dict[tuple[str, int, int], int]] | None:
    """Find the shortest period of so many microbatches that keeps the limits for ever.

    Args:
      problem: the problem; nothing is offloaded here.
      count: q, microbatches of a period.
      longest: units of a period that is known, or would be of no use.
      seconds: time to spend, at most.
      threads: of the solver.

    Returns:
      T and the starts of the first q microbatches, by phase letter, stage and number; None where
      none was found.
    """
    work = problem.forward + problem.input_grad + problem.weight_grad
    loads = [int(sum(work[s] for s in range(problem.num_stages) for m in range(count)
                     if int(problem.placement[int(problem.pipe_of[m]), s]) == worker))
             for worker in range(problem.num_workers)]  # fmt: skip
    low, high = max(loads), longest
    step = max(1, low // PRECISION)
    way = int(work.sum()) + 2 * int((problem.lag + problem.transmit).max(initial=0)) \
        * problem.num_stages  # fmt: skip
    best: tuple[int, dict[tuple[str, int, int], int]] | None = None
    trials = max(1, int(np.ceil(np.log2(max(2, (high - low) / step)))) + 1)
    length = low  # the shortest that the work allows is often there
    while low <= high - step or best is None:
        turns = 3 + way // length + count
        found = _Ring(problem, count, length, turns).solve(seconds / trials, threads)
        if found is not None:
            best, high = (length, found), length
        else:
            low = length + step
        if low > high or length >= longest:
            break
        length = min((low + high) // 2, longest)
    return best


def cut(problem: Problem, period: int, starts: dict[tuple[str, int, int], int]) -> Plan:
    """Make a plan of a ring: as many microbatches as the problem has.

    Args:
      problem: the problem.
      period: T.
      starts: of the first microbatches.

    Returns:
      The plan.
    """
    count = 1 + max(number for _, _, number in starts)
    shape = problem.num_stages, problem.num_microbatches
    at = {letter: np.zeros(shape, np.int64) for letter in "FIW"}
    for (letter, stage, number), start in starts.items():
        places = np.arange(number, shape[1], count)
        at[letter][stage, places] = start + period * (places // count)
    nowhere = np.full(shape, NEVER, np.int64)
    return Plan(at["F"], at["I"], at["W"], np.zeros(shape, bool), nowhere, nowhere)
