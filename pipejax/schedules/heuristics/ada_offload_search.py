"""Greedy schedules that offload activations when a memory limit asks for it.

A worker that is free takes an input gradient before a forward before a weight gradient, of what
can start. A forward that only memory keeps from starting makes the worker run a weight gradient,
or, if there is none, sends the youngest activation to the host: the one whose backward comes
last. It returns when few backwards are left before its own, and room for its return is kept.
This is the greedy start of OptPipe (AdaOffload, arXiv:2510.05186); how far forwards run ahead and
how early activations return is varied, and the best schedule is kept.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.heuristics.memory_limited_pipe import (
    ROUNDING,
    LimitedPipe,
    Numbers,
    per_entry,
)
from pipejax.schedules.heuristics.rows_from_starts import TimedOps

AHEAD = (0.0, 0.5, 1.0)  # forwards ahead of 1F1B's, per later stage


class Rules(NamedTuple):
    """Choices that are tried in all combinations.

    Attributes:
      ahead: forwards in flight beyond those of 1F1B, for each stage after this one.
      due: an activation returns when fewer backwards than this come before its own.
      patient: whether a weight gradient leaves a gap alone that it would not fit into.
    """

    ahead: float
    due: int
    patient: bool


def ada_offload_starts(
    pipe: LimitedPipe,
    *,
    offload: Numbers | None = None,
    load: Numbers | None = None,
    host_links: Sequence[Sequence[int]] = (),
) -> TimedOps:
    """Plan a pipe greedily under its memory limits, with offloads where they ask for it."""
    times = None
    if offload is not None:
        there = per_entry(offload, pipe.num_stages, "offload")
        back = there if load is None else per_entry(load, pipe.num_stages, "load")
        times = (there.tolist(), back.tolist())
    rules = [Rules(*v) for v in itertools.product(AHEAD, (1, 2), (True, False))]
    # on a slow link nothing may be better than a little; then no activation returns, either way
    runs = [_Run(pipe, None, host_links, r).run() for r in rules if r.due == 1]
    if times is not None:
        runs += [_Run(pipe, times, host_links, r).run() for r in rules]
    return min((TimedOps.of(run.log) for run in runs), key=lambda ops: float(ops.end.max()))


class _Stage:
    """What a worker has done and holds; counts of ops started, ended, or with their input there."""

    def __init__(self, pipe: LimitedPipe, stage: int, rules: Rules) -> None:
        after = pipe.num_stages - 1 - stage
        self.size = float(pipe.sizes[stage])
        self.limit = float(pipe.limits[stage]) * (1 + ROUNDING)
        self.most = 1 + after + int(rules.ahead * after)  # in flight
        self.due = rules.due
        self.busy = False
        self.held = 0.0
        self.ready = {Phase.F: pipe.num_microbatches if stage == 0 else 0, Phase.I: 0}
        self.arrivals: list[float] = []  # of gradients on their way
        self.begun = {Phase.F: 0, Phase.I: 0, Phase.W: 0}
        self.ended = {Phase.F: 0, Phase.I: 0, Phase.W: 0}
        self.went: set[int] = set()  # offloaded once: never again
        self.away: list[int] = []  # on the host, or on the way there or back

    @property
    def next_gradient(self) -> int:
        return self.begun[Phase.I]

    @property
    def can_return(self) -> bool:
        return self.held + self.size <= self.limit

    @property
    def wants_forward(self) -> bool:
        """Whether a forward could start if there is memory."""
        begun = self.begun[Phase.F]
        return begun < self.ready[Phase.F] and begun - self.next_gradient < self.most

    @property
    def fits_forward(self) -> bool:
        """Whether there is memory for a forward and for what returns soon."""
        soon = sum(m - self.next_gradient < self.due for m in self.away)
        return self.held + (1 + soon) * self.size <= self.limit

    @property
    def has_weights(self) -> bool:
        return self.begun[Phase.W] < self.ended[Phase.I]

    def youngest(self) -> int | None:
        """Youngest activation that can be offloaded."""
        for m in range(self.ended[Phase.F] - 1, self.next_gradient + self.due - 1, -1):
            if m not in self.went:
                return m
        return None


class _Run:
    """The greedy schedule, event by event."""

    def __init__(
        self,
        pipe: LimitedPipe,
        host_times: tuple[list[float], list[float]] | None,
        host_links: Sequence[Sequence[int]],
        rules: Rules,
    ) -> None:
        self.pipe, self.rules = pipe, rules
        self.stages = [_Stage(pipe, s, rules) for s in range(pipe.num_stages)]
        self.lasts = {
            Phase.F: pipe.forward.tolist(),
            Phase.I: pipe.input_grad.tolist(),
            Phase.W: pipe.weight_grad.tolist(),
        }
        if host_times is not None:
            self.lasts |= {Phase.O: host_times[0], Phase.L: host_times[1]}
        self.hop = {Phase.F: [*pipe.there.tolist(), 0.0], Phase.I: [0.0, *pipe.back.tolist()]}
        self.period = float(np.max(pipe.forward + pipe.input_grad + pipe.weight_grad))
        self.log: list[tuple[Phase, int, int, int, float, float]] = []
        self.events: list[tuple[float, int, Phase, int, int, bool]] = []
        self.same = ROUNDING * pipe.num_microbatches * self.period
        groups = {worker: tuple(group) for group in host_links for worker in group}
        self.sharing = [groups.get(s, (s,)) for s in range(pipe.num_stages)]
        self.link_busy = [False for _ in self.stages]

    def run(self) -> "_Run":
        for stage in range(len(self.stages)):
            self.choose(stage, 0.0)
        while self.events:
            now = self.events[0][0]
            woken: set[int] = set()
            while self.events and self.events[0][0] <= now + self.same:
                _, _, phase, stage, microbatch, arrives = heapq.heappop(self.events)
                if arrives:
                    self.arrive(phase, stage)
                else:
                    self.finish(phase, stage, microbatch)
                woken.update(self.sharing[stage])
            for stage in sorted(woken):
                self.choose(stage, now)
            for stage in sorted(woken):
                self.use_link(stage, now)
        return self

    def push(self, time: float, phase: Phase, stage: int, microbatch: int, arrives: bool) -> None:
        heapq.heappush(self.events, (time, len(self.log), phase, stage, microbatch, arrives))

    def begin(self, phase: Phase, stage: int, microbatch: int, now: float) -> None:
        end = now + self.lasts[phase][stage]
        self.log.append((phase, stage, microbatch, stage, now, end))
        self.push(end, phase, stage, microbatch, False)
        after = stage + 1 if phase is Phase.F else stage - 1
        if phase in self.hop and 0 <= after < len(self.stages):
            arrival = end + self.hop[phase][stage]
            self.push(arrival, phase, after, microbatch, True)
            if phase is Phase.I:
                self.stages[after].arrivals.append(arrival)

    def arrive(self, phase: Phase, stage: int) -> None:
        at = self.stages[stage]
        at.ready[phase] += 1
        if phase is Phase.I:
            at.arrivals.pop(0)

    def finish(self, phase: Phase, stage: int, microbatch: int) -> None:
        at = self.stages[stage]
        if phase in at.ended:
            at.busy = False
            at.ended[phase] += 1
            if phase is Phase.F and stage == len(self.stages) - 1:
                at.ready[Phase.I] += 1
        else:
            for sharer in self.sharing[stage]:
                self.link_busy[sharer] = False
        share = self.pipe.weight_share
        at.held -= at.size * {Phase.I: 1 - share, Phase.W: share, Phase.O: 1.0}.get(phase, 0.0)
        if phase is Phase.L:
            at.away.remove(microbatch)

    def choose(self, stage: int, now: float) -> None:
        """Start what a free worker does next."""
        at = self.stages[stage]
        if at.busy:
            return
        if at.next_gradient < at.ready[Phase.I] and at.next_gradient not in at.away:
            phase = Phase.I
        elif at.wants_forward and at.fits_forward:
            phase = Phase.F
            at.held += at.size
        elif at.has_weights and self.may_fill(stage, now):
            phase = Phase.W
        else:
            return
        at.busy = True
        at.begun[phase] += 1
        self.begin(phase, stage, at.begun[phase] - 1, now)

    def may_fill(self, stage: int, now: float) -> bool:
        """Whether a weight gradient may start: memory needs it, or no gradient would wait."""
        at = self.stages[stage]
        if not self.rules.patient or at.wants_forward or not at.arrivals:
            return True
        return now + self.lasts[Phase.W][stage] <= at.arrivals[0] + self.same

    def use_link(self, stage: int, now: float) -> None:
        """Start a transfer to or from the host, if one is asked for and the link is free."""
        at = self.stages[stage]
        if Phase.O not in self.lasts or self.link_busy[stage]:
            return
        on_host = min((m for m in at.away), default=None)
        due = on_host is not None and on_host - at.next_gradient < at.due
        if on_host is not None and due and at.can_return:
            at.held += at.size
            self.transfer(Phase.L, stage, on_host, now)
            return
        is_stuck = on_host == at.next_gradient
        if is_stuck or (at.wants_forward and not at.fits_forward and not at.has_weights):
            youngest = at.youngest()
            if youngest is not None and (is_stuck or self.pays(stage, youngest)):
                at.went.add(youngest)
                at.away.append(youngest)
                self.transfer(Phase.O, stage, youngest, now)

    def pays(self, stage: int, microbatch: int) -> bool:
        """Whether an activation can go and return before its backward."""
        backwards = microbatch - self.stages[stage].next_gradient
        there_and_back = self.lasts[Phase.O][stage] + self.lasts[Phase.L][stage]
        return backwards * self.period >= there_and_back

    def transfer(self, phase: Phase, stage: int, microbatch: int, now: float) -> None:
        for sharer in self.sharing[stage]:
            self.link_busy[sharer] = True
        self.begin(phase, stage, microbatch, now)
