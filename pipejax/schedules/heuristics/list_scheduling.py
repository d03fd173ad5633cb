"""List scheduler: a free worker takes the most urgent op that is allowed to start.

Gradients come before forwards, since other workers wait for them, and forwards before weight
gradients, which fill the gaps; within a kind the earlier microbatch comes first, then the later
stage. `Rules` are the choices of published heuristics.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pipejax.schedules.cells.ops import SPLIT, Op, Phase
from pipejax.schedules.heuristics.building_block import Order, RowOrder, rows_keep_limits
from pipejax.schedules.heuristics.timeline import FOREVER, ROUNDING, Time, Timeline, Work

NO_LIMIT = 10**9
GRADIENT, FORWARD, WEIGHT = range(3)
F, I, W = SPLIT  # noqa: E741
KIND = {Phase.B: GRADIENT, I: GRADIENT, F: FORWARD, W: WEIGHT}


class ReadyOp(NamedTuple):
    """Entry of a heap of ops that can start; the smallest entry is the most urgent op."""

    urgency: Time  # microbatch, or start in an order; a smaller number is more urgent
    negative_stage: int  # later stages first
    op: Op


class Rules(NamedTuple):
    """Choices of a list scheduler."""

    depth: Sequence[Sequence[int]] = ()  # (pipes, stages) most forwards ahead of gradients
    # phases that a weight gradient must not delay, unless it makes room for a forward
    undelayed: tuple[Phase, ...] = ()
    due: int = 0  # an activation returns from the host when fewer gradients precede its own
    by_next: bool = False  # whether `due` counts gradients of the next stage: a later return
    host_links: Sequence[Sequence[int]] = ()  # groups of workers that share a host link
    order: Order | None = None  # order of ops, which replaces all these rules


def list_schedule(
    work: Work, rules: Rules, shorter_than: Time = FOREVER, *, by_span: bool = False
) -> Timeline | None:
    """Schedule all ops by rules; return None if memory blocks an op or the run gets too long."""
    # The makespan (or with `by_span` the span of each worker) must be below `shorter_than`.
    run = _ListScheduler(work, rules, shorter_than, by_span).run()
    computed = sum(phase in KIND for phase, *_ in run.log)
    return run if computed == work.total else None


class _ListScheduler:
    """One run of the list scheduler over events, which are ends of ops and arrivals of inputs."""

    def __init__(self, work: Work, rules: Rules, shorter_than: Time, by_span: bool) -> None:
        self.work, self.rules = work, rules
        self.shorter_than, self.by_span = shorter_than, by_span
        self.timeline = Timeline(work)
        workers = range(len(work.limits))
        # for each worker and kind, a heap of the ops that can start
        self.ready: list[list[list[ReadyOp]]] = [[[] for _ in range(3)] for _ in workers]
        # forwards of stage 0 by pipe: each becomes ready when the forward before it starts
        self.entering = [deque[Op]() for _ in work.placement]
        for m, pipe in enumerate(work.microbatch_pipes):
            self.entering[pipe].append(Op(F, 0, m))
        # heaps of the arrivals of ops that a W must not delay, by worker
        self.undelayed_arrivals: list[list[Time]] = [[] for _ in workers]
        self.running: list[Op | None] = [None for _ in workers]
        # heap of (time, serial number, op, whether it ends: otherwise its input arrives)
        self.events: list[tuple[Time, int, Op, bool]] = []
        self.serial_numbers = itertools.count()
        groups = {worker: tuple(group) for group in rules.host_links for worker in group}
        self.link_workers = [groups.get(worker, (worker,)) for worker in workers]
        self.link_busy = [False for _ in workers]
        # for each worker, microbatches whose activation is on the host or on its way, or ever was
        # there
        self.offloaded: list[list[int]] = [[] for _ in workers]
        self.ever_offloaded: list[set[int]] = [set() for _ in workers]
        self.round_trips: list[Time] = []
        if Phase.O in work.durations:
            self.round_trips = _round_trips(work)
            self.period = max(map(sum, zip(*(work.durations[p] for p in SPLIT), strict=True)))
        durations = [duration for times in work.durations.values() for duration in times]
        # sums of floats are rounded: times closer than this are equal
        is_whole = all(isinstance(duration, int) for duration in durations)
        shortest = min((duration for duration in durations if duration), default=0)
        self.tolerance = 0 if is_whole else ROUNDING * shortest
        order = rules.order
        self.order = None if order is None else RowOrder(work, order, self.timeline, self.tolerance)
        self.remaining: list[Time] = [0 for _ in workers]  # time of ops that have not started
        for pipe in work.microbatch_pipes:
            for stage, worker in enumerate(work.placement[pipe]):
                times = (work.durations[p][stage] for p in KIND if p in work.durations)
                self.remaining[worker] += sum(times)
        self.is_too_long = False
        self.deadlines = [FOREVER if by_span else shorter_than for _ in workers]

    def run(self) -> Timeline:
        """Process all events; return the timeline, which lacks ops if the run stopped early."""
        if self.order is not None and not rows_keep_limits(self.work, self.order.rows):
            return self.timeline
        for first_forwards in self.entering:
            if first_forwards:
                self.push(0, first_forwards.popleft(), is_end=False)
        while self.events and not self.is_too_long:
            now = self.events[0][0]
            active_workers: set[int] = set()
            while self.events and self.events[0][0] <= now + self.tolerance:
                *_, op, is_end = heapq.heappop(self.events)
                if is_end:
                    active_workers.update(self.finish(op))
                else:
                    active_workers.add(self.arrive(op))
            for worker in sorted(active_workers):
                next_op = self.choose(worker, now) if self.running[worker] is None else None
                if next_op is not None:
                    self.begin(next_op, worker, now)
                    if self.rules.by_next and next_op.phase is I and worker:
                        active_workers.add(worker - 1)  # it may be due to load now
            if Phase.O in self.work.durations:
                # only pipes with one stage on each worker offload: stage w is on worker w
                for worker in sorted(active_workers):
                    if not self.link_busy[worker]:
                        transfer = self.due_load(worker) or self.needed_offload(worker)
                        if transfer is not None:
                            self.start_transfer(transfer, now)
        return self.timeline

    def push(self, time: Time, op: Op, *, is_end: bool) -> None:
        """Add an event: the end of an op (`is_end`), or the arrival of its input."""
        heapq.heappush(self.events, (time, next(self.serial_numbers), op, is_end))

    def arrive(self, op: Op) -> int:
        """Add an op to the ready ops of its worker; return the worker."""
        phase, stage, microbatch = op
        worker = self.timeline.worker(op)
        urgency = microbatch if self.order is None else self.order.urgency(op)
        heapq.heappush(self.ready[worker][KIND[phase]], ReadyOp(urgency, -stage, op))
        return worker

    def begin(self, op: Op, worker: int, now: Time) -> None:
        """Start a ready op on its worker, and add the events that result from it."""
        ready = self.ready[worker][KIND[op.phase]]
        if ready[0].op == op:
            heapq.heappop(ready)
        else:  # a more urgent op may not start yet
            ready.remove(next(entry for entry in ready if entry.op == op))
            heapq.heapify(ready)
        self.running[worker] = op
        if self.order is not None:
            self.order.begin(op, worker)
        if op.phase is F and op.stage == 0:
            entering = self.entering[self.work.microbatch_pipes[op.microbatch]]
            if entering:
                self.arrive(entering.popleft())
        for next_op, arrival in self.timeline.start(op, now):
            self.push(arrival, next_op, is_end=False)
            if next_op.phase in self.rules.undelayed:
                heapq.heappush(self.undelayed_arrivals[self.timeline.worker(next_op)], arrival)
        end = self.timeline.clock[worker]
        self.push(end, op, is_end=True)
        self.remaining[worker] -= end - now
        if self.by_span and self.deadlines[worker] == FOREVER:  # its first op
            self.deadlines[worker] = now + self.shorter_than
        if end + self.remaining[worker] >= self.deadlines[worker]:
            self.is_too_long = True

    def finish(self, op: Op) -> Sequence[int]:
        """End an op, also a transfer; return the workers that may now be able to continue."""
        worker = self.timeline.end(op)
        if op.phase in KIND:
            self.running[worker] = None
            return (worker,)
        if op.phase is Phase.L:
            self.offloaded[worker].remove(op.microbatch)
        for link_worker in self.link_workers[worker]:
            self.link_busy[link_worker] = False
        return self.link_workers[worker]

    def choose(self, worker: int, now: Time) -> Op | None:
        """Return the op that a free worker starts, or None to wait."""
        gradients, forwards, weights = self.ready[worker]
        weight = weights[0].op if weights else None
        if self.order is not None:
            ready = (entry.op for entry in itertools.chain(gradients, forwards))
            return self.order.choose(worker, now, ready, weight)
        # a gradient cannot start while its activation is on the host
        if gradients and gradients[0].op.microbatch not in self.offloaded[worker]:
            return gradients[0].op
        forward = self.next_forward(worker)
        if forward is not None and self.has_memory(forward, worker):
            return forward
        lacks_memory = forward is not None
        if weight is None or lacks_memory or not self.rules.undelayed:
            return weight  # the end of W may make room for the forward
        arrivals = self.undelayed_arrivals[worker]
        while arrivals and arrivals[0] <= now + self.tolerance:
            heapq.heappop(arrivals)
        end = now + self.work.durations[W][weight.stage]
        delays_arrival = bool(arrivals) and end > arrivals[0] + self.tolerance
        return None if delays_arrival else weight

    def next_forward(self, worker: int) -> Op | None:
        """Return the most urgent ready forward that its stage admits, or None; ignore memory."""
        admitted = [entry for entry in self.ready[worker][FORWARD] if self.may_enter(entry.op)]
        return min(admitted).op if admitted else None

    def may_enter(self, op: Op) -> bool:
        """Return whether a forward is not too far ahead of the gradients of its stage."""
        _, stage, microbatch = op
        pipe, done = self.work.microbatch_pipes[microbatch], self.timeline.done
        in_flight = done[F][pipe][stage] - done[self.work.gradient][pipe][stage]
        return in_flight < self.rules.depth[pipe][stage]

    def has_memory(self, forward: Op, worker: int) -> bool:
        """Return whether memory suffices for a forward and for activations due to return."""
        size = self.work.sizes[forward.stage]
        num_due = sum(self.is_due(worker, microbatch) for microbatch in self.offloaded[worker])
        return self.timeline.held[worker] + (1 + num_due) * size <= self.work.limits[worker]

    def is_due(self, worker: int, microbatch: int) -> bool:
        """Return whether under `due` gradients precede the gradient of an offloaded activation."""
        gradients = self.timeline.done[I][0]  # (stages) numbers of gradients, in microbatch order
        stage = min(worker + 1, len(gradients) - 1) if self.rules.by_next else worker
        return microbatch - gradients[stage] < self.rules.due

    def due_load(self, worker: int) -> Op | None:
        """Return the load of the oldest offloaded activation, if due and memory suffices."""
        oldest = min(self.offloaded[worker], default=None)
        if oldest is None or not self.is_due(worker, oldest):
            return None
        level = self.timeline.held[worker] + self.work.sizes[worker]
        return Op(Phase.L, worker, oldest) if level <= self.work.limits[worker] else None

    def needed_offload(self, worker: int) -> Op | None:
        """Return the offload of the youngest activation, if its memory is needed."""
        # A worker whose next gradient waits for an offloaded activation is stuck, and offloads
        # in any case. For a forward a worker offloads only if the activation can return in time.
        next_gradient = self.timeline.done[I][0][worker]  # gradients run in microbatch order
        is_stuck = next_gradient in self.offloaded[worker]
        forward, weights = self.next_forward(worker), self.ready[worker][WEIGHT]
        needs_memory = forward is not None and not weights and not self.has_memory(forward, worker)
        youngest = self.youngest_activation(worker) if is_stuck or needs_memory else None
        if youngest is None or not (is_stuck or self.returns_in_time(worker, youngest)):
            return None
        return Op(Phase.O, worker, youngest)

    def youngest_activation(self, worker: int) -> int | None:
        """Return the latest microbatch whose activation may be offloaded, or None."""
        # Gradients come in order of microbatches: if one is due soon, so are all earlier ones.
        running = self.running[worker]
        num_ended = self.timeline.done[F][0][worker]
        if running is not None and running.phase is F:
            num_ended -= 1
        for microbatch in range(num_ended - 1, -1, -1):
            if self.is_due(worker, microbatch):
                return None
            if microbatch not in self.ever_offloaded[worker]:
                return microbatch
        return None

    def returns_in_time(self, worker: int, microbatch: int) -> bool:
        """Return whether an activation can be offloaded and loaded before its gradient."""
        # one period for each earlier gradient; before the first also the way to the end and back
        durations, num_gradients = self.work.durations, self.timeline.done[I][0][worker]
        round_trip = 0 if num_gradients else self.round_trips[worker]
        time_left = (microbatch - num_gradients) * self.period + round_trip
        return time_left >= durations[Phase.O][worker] + durations[Phase.L][worker]

    def start_transfer(self, op: Op, now: Time) -> None:
        """Start an offload or a load on the host link of its worker."""
        if op.phase is Phase.O:
            self.ever_offloaded[op.stage].add(op.microbatch)
            self.offloaded[op.stage].append(op.microbatch)
        for link_worker in self.link_workers[op.stage]:
            self.link_busy[link_worker] = True
        self.timeline.start(op, now)
        self.push(now + self.work.durations[op.phase][op.stage], op, is_end=True)


def _round_trips(work: Work) -> list[Time]:
    """Return for each stage the least time from the end of F to the start of its gradient."""
    round_trips: list[Time] = [0]  # last stage first
    for stage in reversed(range(1, len(work.placement[0]))):
        ops = work.durations[F][stage] + work.durations[I][stage]
        times = (*work.lag, *work.transmit)  # [direction][pipe][boundary]
        messages = sum(pipes[0][stage - 1] for pipes in times)
        round_trips.append(round_trips[-1] + ops + messages)
    return round_trips[::-1]
