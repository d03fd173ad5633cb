"""Plans made at once: every free worker takes the most urgent op that it can run.

An input gradient comes before a forward, for others wait for it; a weight gradient fills what is
left. In the patient variant it does so only where it delays nothing whose time is known. This is
the list scheduling behind the heuristics of the zero-bubble papers (arXiv:2401.10241), for any
placement, times by stage and limits by worker.
"""

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.search.schedule.bounds import paths
from pipejax.search.schedule.plan import NEVER, Plan
from pipejax.search.schedule.problem import Problem

Op = tuple[str, int, int]  # phase letter, stage, microbatch


class Variant(NamedTuple):
    """Rules of a run that no reasoning settles: they are tried.

    Attributes:
      patient: whether a weight gradient waits where it would delay an op whose time is known.
      backlog: weight gradients that may be left over before one comes ahead of a forward.
      extra: forwards that a stage may be ahead of its gradients, beyond those that keep it busy
        while a microbatch goes to the last stage and comes back.
      active: microbatches between the first forward and the last input gradient, at most; with
        one, no worker can fill up that holds all stages of a microbatch.
    """

    patient: bool
    backlog: int
    extra: int
    active: int = 10**9


NO_END = 10**9
VARIANTS = tuple(
    Variant(patient, backlog, extra)
    for extra, backlog, patient in itertools.product(
        (NO_END, 0, 1, 2, 3), (NO_END, 0, 1, 2, 4), (False, True)
    )
)
FEW_ACTIVE = tuple(Variant(False, NO_END, NO_END, active) for active in (1, 2, 3, 4, 6, 8, 12, 16))


def greedy_plan(
    problem: Problem, limits: Int[NumpyArray, " workers"], variant: Variant = VARIANTS[0]
) -> Plan | None:
    """Run the workers greedily, with whole memory or not, and nothing offloaded."""
    return _Run(problem, limits.tolist(), variant).plan()


class _Run:
    """One run of the workers."""

    def __init__(self, problem: Problem, limits: list[int], variant: Variant) -> None:
        self.problem, self.limits, self.variant = problem, limits, variant
        self.pipe_of = problem.pipe_of.tolist()
        work = problem.forward + problem.gradient
        trip = paths(problem).trip + problem.forward + problem.input_grad
        self.depth = (-(-trip // work) + variant.extra).tolist()
        self.ahead = np.zeros_like(trip).tolist()
        self.worker = problem.worker.tolist()
        stages, microbatches = problem.num_stages, problem.num_microbatches
        self.start = {letter: np.full((stages, microbatches), NEVER, np.int64) for letter in "FIW"}
        self.lasts = {
            "F": problem.forward.tolist(),
            "I": problem.input_grad.tolist(),
            "W": problem.weight_grad.tolist(),
        }
        self.size, self.kept = problem.sizes.tolist(), problem.kept.tolist()
        workers = problem.num_workers
        self.free, self.held = [0] * workers, [0] * workers
        self.known: list[list[tuple[int, int, int, Op]]] = [[] for _ in range(workers)]
        self.ready: dict[str, list[list[tuple[int, int, Op]]]] = {
            letter: [[] for _ in range(workers)] for letter in "FIW"
        }
        self.link: dict[tuple[int, int], int] = {}
        self.moments: list[tuple[int, int]] = []
        self.count = self.active = 0

    def plan(self) -> Plan | None:
        for microbatch in range(self.problem.num_microbatches):
            self._offer(0, ("F", 0, microbatch))
        done, total = 0, 3 * self.start["F"].size
        while self.moments:
            now, worker = heapq.heappop(self.moments)
            while self.known[worker] and self.known[worker][0][0] <= now:
                *_, op = heapq.heappop(self.known[worker])
                # of ready gradients the one deepest in the pipe comes first, of forwards too
                heapq.heappush(self.ready[op[0]][worker], (op[2], -op[1], op))
            chosen = self._choose(worker, now) if self.free[worker] <= now else None
            if chosen is not None:
                self._run(chosen, worker, now)
                done += 1
        if done < total:
            return None
        nowhere = np.full_like(self.start["F"], NEVER)
        whole = np.zeros(nowhere.shape, bool)
        return Plan(self.start["F"], self.start["I"], self.start["W"], whole, nowhere, nowhere)

    def _offer(self, moment: int, op: Op) -> None:
        worker = self.worker[op[1]][op[2]]
        self.count += 1
        heapq.heappush(self.known[worker], (moment, op[2], self.count, op))
        heapq.heappush(self.moments, (moment, worker))

    def _choose(self, worker: int, now: int) -> Op | None:
        if self.ready["I"][worker]:
            return heapq.heappop(self.ready["I"][worker])[2]
        forwards, weights = self.ready["F"][worker], self.ready["W"][worker]
        left_over = len(weights) > self.variant.backlog
        if forwards and not left_over and self._may_enter(worker, forwards[0][2]):
            return heapq.heappop(forwards)[2]
        if not weights:
            return None
        op = weights[0][2]
        waits_for_room = bool(forwards) or left_over
        soon = self.known[worker][0][0] if self.known[worker] else None
        if (
            self.variant.patient
            and not waits_for_room
            and soon is not None
            and soon < now + self.lasts["W"][op[1]]
        ):
            return None  # the known op comes first; its moment calls this worker again
        return heapq.heappop(weights)[2]

    def _may_enter(self, worker: int, op: Op) -> bool:
        """Whether a forward has room, and is not too far ahead of the gradients of its stage."""
        stage, pipe = op[1], self.pipe_of[op[2]]
        near = self.ahead[pipe][stage] < self.depth[pipe][stage]
        if stage == 0 and self.active >= self.variant.active:
            return False
        return near and self.held[worker] + self.size[stage] <= self.limits[worker]

    def _run(self, op: Op, worker: int, now: int) -> None:
        letter, stage, microbatch = op
        end = now + self.lasts[letter][stage]
        self.start[letter][stage, microbatch] = now
        self.free[worker] = end
        heapq.heappush(self.moments, (end, worker))
        last = self.problem.num_stages - 1
        if letter == "F":
            self.held[worker] += self.size[stage]
            self.ahead[self.pipe_of[microbatch]][stage] += 1
            self.active += stage == 0
            if stage < last:
                self._offer(self._arrival(0, stage, op, end), ("F", stage + 1, microbatch))
            else:
                self._offer(end, ("I", stage, microbatch))
        elif letter == "I":
            self.held[worker] -= self.size[stage] - self.kept[stage]
            self.ahead[self.pipe_of[microbatch]][stage] -= 1
            self._offer(end, ("W", stage, microbatch))
            if stage:
                self._offer(self._arrival(1, stage - 1, op, end), ("I", stage - 1, microbatch))
            else:
                self.active -= 1
                for other in range(self.problem.num_workers):
                    heapq.heappush(self.moments, (end, other))
        else:
            self.held[worker] -= self.kept[stage]

    def _arrival(self, direction: int, boundary: int, op: Op, end: int) -> int:
        """When a message arrives; a link that it occupies carries one at a time."""
        where = direction, int(self.problem.pipe_of[op[2]]), boundary
        lag, transmit = int(self.problem.lag[where]), int(self.problem.transmit[where])
        if not transmit:
            return end + lag
        ends = [self.worker[boundary + k][op[2]] for k in (0, 1)]
        link = (ends[0], ends[1]) if direction == 0 else (ends[1], ends[0])
        self.link[link] = max(end, self.link.get(link, 0)) + transmit
        return self.link[link] + lag
