"""The list scheduler: a worker that is free takes the most urgent op that it may start.

Gradients come before forwards, since other workers wait for them, and forwards before weight
gradients, which fill the gaps; within a kind the earlier microbatch comes first, then the later
stage. What else a published heuristic decides is a rule: how far forwards run ahead, whether a
weight gradient leaves a gap alone, what goes to the host and when it returns; or an order is given.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pipejax.schedules.cells.ops import SPLIT, Op, Phase
from pipejax.schedules.heuristics.building_block import Order, RowOrder
from pipejax.schedules.heuristics.timeline import FOREVER, ROUNDING, Time, Timeline, Work

NO_LIMIT = 10**9
GRADIENT, FORWARD, WEIGHT = range(3)
Waiting = tuple[Time, int, Op]  # how urgent: microbatch or place in an order, then -stage; op
F, I, W = SPLIT  # noqa: E741
KIND = {Phase.B: GRADIENT, I: GRADIENT, F: FORWARD, W: WEIGHT}


class Rules(NamedTuple):
    """Choices of a list scheduler."""

    # (pipes, stages) forwards that a stage may be ahead of its gradients
    depth: Sequence[Sequence[int]] = ()
    # phases that a weight gradient must not delay, unless it makes room for a forward
    patience: tuple[Phase, ...] = ()
    # an activation returns from the host when fewer gradients than this come before its own
    due: int = 0
    by_next: bool = False  # count gradients of the next stage: nothing returns too early
    host_links: Sequence[Sequence[int]] = ()  # groups of workers that share a host link
    order: Order | None = None  # of ops, instead of all these rules


class Goal(NamedTuple):
    """Limit of a run: one that is too long is given up."""

    shorter_than: Time = FOREVER  # a makespan, or a span of each worker
    by_span: bool = False  # which of the two


NO_GOAL = Goal()


def list_schedule(work: Work, rules: Rules, goal: Goal = NO_GOAL) -> Timeline | None:
    """Run the workers; None where memory keeps an op from ever starting, or it takes too long."""
    run = _ListScheduler(work, rules, goal).run()
    computed = sum(phase in KIND for phase, *_ in run.log)
    return run if computed == work.total else None


class _ListScheduler:
    """One run, event by event: ends of ops, and inputs that arrive."""

    def __init__(self, work: Work, rules: Rules, goal: Goal) -> None:
        self.work, self.rules, self.goal = work, rules, goal
        self.timeline = Timeline(work)
        workers = range(len(work.limits))
        # what can start, by worker and kind: of one kind the least entry is the most urgent
        self.ready: list[list[list[Waiting]]] = [[[] for _ in range(3)] for _ in workers]
        self.entering = [
            deque(
                Op(F, 0, m)
                for m, microbatch_pipe in enumerate(work.pipe_of)
                if microbatch_pipe == pipe
            )
            for pipe in range(len(work.placement))
        ]
        self.coming: list[list[Time]] = [[] for _ in workers]  # of what a W must not delay
        self.microbatch_pipes, self.depth = work.pipe_of, rules.depth
        self.done = self.timeline.done[F], self.timeline.done[work.gradient]
        self.running: list[Op | None] = [None for _ in workers]
        self.events: list[tuple[Time, int, Op, bool]] = []
        self.number = itertools.count()
        groups = {worker: tuple(group) for group in rules.host_links for worker in group}
        self.sharing = [groups.get(worker, (worker,)) for worker in workers]
        self.link_busy = [False for _ in workers]
        self.away: list[list[int]] = [[] for _ in workers]  # on the host, or on the way
        self.went: list[set[int]] = [set() for _ in workers]  # once: never again
        self.trip: list[Time] = []
        if Phase.O in work.lasts:
            self.trip = _round_trips(work)
            self.period = max(map(sum, zip(*(work.lasts[p] for p in SPLIT), strict=True)))
        durations = [duration for times in work.lasts.values() for duration in times]
        # sums of floats are rounded: times closer than this are one moment
        is_whole = all(isinstance(duration, int) for duration in durations)
        shortest = min((duration for duration in durations if duration), default=0)
        self.same = 0 if is_whole else ROUNDING * shortest
        order = rules.order
        self.order = None if order is None else RowOrder(work, order, self.timeline, self.same)
        self.remaining: list[Time] = [0 for _ in workers]  # work that has not begun
        for pipe in work.pipe_of:
            for stage, worker in enumerate(work.placement[pipe]):
                self.remaining[worker] += sum(work.lasts[p][stage] for p in KIND if p in work.lasts)
        self.is_late = False
        self.latest = [FOREVER if goal.by_span else goal.shorter_than for _ in workers]

    def run(self) -> Timeline:
        if self.order is not None and not self.order.fits:
            return self.timeline
        for microbatches in self.entering:
            if microbatches:
                self.push(0, microbatches.popleft(), False)
        while self.events and not self.is_late:
            now = self.events[0][0]
            woken: set[int] = set()
            while self.events and self.events[0][0] <= now + self.same:
                *_, op, ends = heapq.heappop(self.events)
                if ends:
                    woken.update(self.finish(op))
                else:
                    woken.add(self.arrive(op))
            for worker in sorted(woken):
                chosen = self.choose(worker, now) if self.running[worker] is None else None
                if chosen is not None:
                    self.begin(chosen, worker, now)
                    if self.rules.by_next and chosen.phase is I and worker:
                        woken.add(worker - 1)  # what this gradient calls back
            if Phase.O in self.work.lasts:
                for worker in sorted(woken):
                    self.use_host_link(worker, now)
        return self.timeline

    def push(self, moment: Time, op: Op, ends: bool) -> None:
        heapq.heappush(self.events, (moment, next(self.number), op, ends))

    def arrive(self, op: Op) -> int:
        """Queue an op at its worker, which is returned."""
        phase, stage, microbatch = op
        worker = self.timeline.worker(op)
        urgency = microbatch if self.order is None else self.order.urgency(op)
        heapq.heappush(self.ready[worker][KIND[phase]], (urgency, -stage, op))
        return worker

    def begin(self, op: Op, worker: int, now: Time) -> None:
        waiting = self.ready[worker][KIND[op.phase]]
        if waiting[0][2] == op:
            heapq.heappop(waiting)
        else:  # what is more urgent may not start yet
            waiting.remove(next(entry for entry in waiting if entry[2] == op))
            heapq.heapify(waiting)
        self.running[worker] = op
        if self.order is not None:
            self.order.begin(op, worker)
        if op.phase is F and op.stage == 0:
            entering = self.entering[self.work.pipe_of[op.microbatch]]
            if entering:
                self.arrive(entering.popleft())
        for next_op, arrival in self.timeline.start(op, now):
            self.push(arrival, next_op, False)
            if next_op[0] in self.rules.patience:
                heapq.heappush(self.coming[self.timeline.worker(next_op)], arrival)
        end = self.timeline.clock[worker]
        self.push(end, op, True)
        self.remaining[worker] -= end - now
        if self.goal.by_span and self.latest[worker] == FOREVER:
            self.latest[worker] = now + self.goal.shorter_than
        if end + self.remaining[worker] >= self.latest[worker]:
            self.is_late = True

    def finish(self, op: Op) -> Sequence[int]:
        """End an op, and return the workers that this may unblock."""
        worker = self.timeline.end(op)
        if op.phase in KIND:
            self.running[worker] = None
            return (worker,)
        if op.phase is Phase.L:
            self.away[worker].remove(op.microbatch)
        for sharer in self.sharing[worker]:
            self.link_busy[sharer] = False
        return self.sharing[worker]

    def choose(self, worker: int, now: Time) -> Op | None:
        gradients, forwards, weights = self.ready[worker]
        if self.order is not None:
            ready = (entry[2] for entry in itertools.chain(gradients, forwards))
            return self.order.choose(worker, now, ready, weights[0][2] if weights else None)
        if gradients and gradients[0][0] not in self.away[worker]:
            return gradients[0][2]
        weight, forward = weights[0][2] if weights else None, self.next_forward(worker)
        if forward is not None and self.fits(forward, worker):
            return forward
        if weight is None or forward is not None or not self.rules.patience:
            return weight
        coming = self.coming[worker]
        while coming and coming[0] <= now + self.same:
            heapq.heappop(coming)
        end = now + self.work.lasts[W][weight.stage]
        return weight if not coming or end <= coming[0] + self.same else None

    def next_forward(self, worker: int) -> Op | None:
        """Return the forward that a worker takes if there is memory."""
        waiting = self.ready[worker][FORWARD]
        if not waiting or self.may_enter(waiting[0][2]):
            return waiting[0][2] if waiting else None
        entering = (entry for entry in waiting if self.may_enter(entry[2]))
        return min(entering, default=(0, 0, None))[2]

    def may_enter(self, op: Op) -> bool:
        """Return whether a forward is not too far ahead of the gradients of its stage."""
        _, stage, microbatch = op
        pipe = self.microbatch_pipes[microbatch]
        forwards, gradients = self.done
        ahead = forwards[pipe][stage] - gradients[pipe][stage]
        return ahead < self.depth[pipe][stage]

    def fits(self, forward: Op, worker: int) -> bool:
        """Return whether memory suffices for a forward and for the activations that return soon."""
        size = self.work.sizes[forward.stage]
        away = self.away[worker]
        soon = sum(self.is_due(worker, microbatch) for microbatch in away) if away else 0
        return self.timeline.held[worker] + (1 + soon) * size <= self.work.limits[worker]

    def is_due(self, worker: int, microbatch: int) -> bool:
        """Return whether few gradients remain before the one that needs an activation."""
        gradients = self.timeline.done[I][0]
        by_next_stage = self.rules.by_next and worker + 1 < len(gradients)
        return microbatch - gradients[worker + by_next_stage] < self.rules.due

    def use_host_link(self, worker: int, now: Time) -> None:
        """Start a transfer to or from the host if one is needed and the link is free."""
        # Only pipes with one stage on each worker offload: stage w is on worker w.
        if not self.link_busy[worker]:
            op = self.returning(worker) or self.leaving(worker)
            if op is not None:
                self.transfer(op, now)

    def returning(self, worker: int) -> Op | None:
        """Return the load of what the next gradients need, if it is due and there is room."""
        oldest = min(self.away[worker], default=None)
        if oldest is None or not self.is_due(worker, oldest):
            return None
        level = self.timeline.held[worker] + self.work.sizes[worker]
        return Op(Phase.L, worker, oldest) if level <= self.work.limits[worker] else None

    def leaving(self, worker: int) -> Op | None:
        """Return the offload of the youngest activation, if its room is needed."""
        # Either the next gradient needs room, since its activation is away: then it goes at any
        # price. Or a forward asks for room that no weight gradient makes: then it goes if it pays.
        is_stuck = self.timeline.done[I][0][worker] in self.away[worker]
        forward, weights = self.next_forward(worker), self.ready[worker][WEIGHT]
        asks = forward is not None and not weights and not self.fits(forward, worker)
        youngest = self.youngest(worker) if is_stuck or asks else None
        if youngest is None or not (is_stuck or self.pays(worker, youngest)):
            return None
        return Op(Phase.O, worker, youngest)

    def youngest(self, worker: int) -> int | None:
        """Return the activation whose gradient comes last, of those that may go."""
        running = self.running[worker]
        ended = self.timeline.done[F][0][worker]
        ended -= running is not None and running.phase is F
        for microbatch in range(ended - 1, -1, -1):
            if self.is_due(worker, microbatch):
                return None
            if microbatch not in self.went[worker]:
                return microbatch
        return None

    def pays(self, worker: int, microbatch: int) -> bool:
        """Return whether an activation can go and return before its gradient."""
        durations = self.work.lasts
        done = self.timeline.done[I][0][worker]
        away = (microbatch - done) * self.period + (self.trip[worker] if not done else 0)
        return away >= durations[Phase.O][worker] + durations[Phase.L][worker]

    def transfer(self, op: Op, now: Time) -> None:
        if op.phase is Phase.O:
            self.went[op.stage].add(op.microbatch)
            self.away[op.stage].append(op.microbatch)
        for sharer in self.sharing[op.stage]:
            self.link_busy[sharer] = True
        self.timeline.start(op, now)
        self.push(now + self.work.lasts[op.phase][op.stage], op, True)


def _round_trips(work: Work) -> list[Time]:
    """Time (stages) from the end of a forward to its gradient, if nothing is in the way."""
    trips: list[Time] = [0]
    for stage in reversed(range(1, len(work.placement[0]))):
        ops = work.lasts[F][stage] + work.lasts[I][stage]
        messages = sum(
            kind[way][0][stage - 1] for kind in (work.lag, work.transmit) for way in (0, 1)
        )
        trips.append(trips[-1] + ops + messages)
    return trips[::-1]
