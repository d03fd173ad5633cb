"""A pipe with times and memory limits, and the heuristics that plan it.

One offloads activations where memory is short, the other fills waiting time with weight gradients.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, as_floats, share, whole_number
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.cells.ops import SPLIT, Op, Phase
from pipejax.schedules.heuristics.list_scheduling import Rules, list_schedule
from pipejax.schedules.heuristics.timeline import ROUNDING, Time, TimedOps, Timeline, Work

Numbers = float | Sequence[float] | Float[NumpyArray, "..."]


class LimitedPipe(NamedTuple):
    """One stage per worker: times of its ops and messages, sizes and limits of its activations."""

    num_microbatches: int  # M
    forward: Float[NumpyArray, " stages"]  # time of F, in any unit
    input_grad: Float[NumpyArray, " stages"]  # time of I
    weight_grad: Float[NumpyArray, " stages"]  # time of W
    there: Float[NumpyArray, " boundaries"]  # time of a message from a stage to the next one
    back: Float[NumpyArray, " boundaries"]  # time of a message from the next stage back
    sizes: Float[NumpyArray, " stages"]  # memory that an activation takes at F
    limits: Float[NumpyArray, " stages"]  # memory for activations on the worker of each stage
    weight_share: float  # share of an activation that only W frees; I frees the rest

    @classmethod
    def of(
        cls,
        num_stages: int,
        num_microbatches: int,
        *,
        weight_share: float = WEIGHT_SHARE,
        **numbers: Numbers,
    ) -> "LimitedPipe":
        """Check the numbers; a single one stands for every stage or boundary."""
        # Messages take no time, or back as long as there, and activations have size 1, where
        # nothing else is given.
        stages, there = whole_number(num_stages, "num_workers"), numbers.get("there", 0.0)
        numbers = {"there": there, "back": there, "sizes": 1.0, **numbers}
        entries = dict.fromkeys(numbers, stages) | {"there": stages - 1, "back": stages - 1}
        pipe = cls(
            num_microbatches=whole_number(num_microbatches, "num_microbatches"),
            weight_share=share(weight_share, "weight_share"),
            **{name: per_entry(value, entries[name], name) for name, value in numbers.items()},
        )
        for worker, (limit, size) in enumerate(zip(pipe.limits, pipe.sizes, strict=True)):
            if limit * (1 + ROUNDING) < size:
                raise MismatchError(
                    f"the memory limit of worker {worker} is {limit:g}: one activation of its "
                    f"stage takes {size:g}",
                    "memory_limit",
                )
        return pipe

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    def work(self) -> Work:
        """Return the work for a scheduler; limits leave room for the rounding of sums."""
        times = self.forward, self.input_grad, self.weight_grad
        lag = [[self.there.tolist()], [self.back.tolist()]]
        return Work(
            placement=[list(range(self.num_stages))],
            pipe_of=[0] * self.num_microbatches,
            lasts=dict(zip(SPLIT, np.stack(times).tolist(), strict=True)),
            lag=lag,
            transmit=np.zeros_like(lag).tolist(),
            sizes=self.sizes.tolist(),
            kept=(self.sizes * self.weight_share).tolist(),
            limits=(self.limits * (1 + ROUNDING)).tolist(),
        )


def per_entry(value: Numbers, count: int, name: str) -> Float[NumpyArray, " entries"]:
    """Read one number for all, or a sequence: (entries) numbers."""
    array = as_floats(value, name)
    if array.ndim == 0:
        array = np.full(count, float(array))
    if array.shape != (count,) or not np.all(np.isfinite(array)) or (array < 0).any():
        raise ValueError(f"{name} must be {count} finite numbers of at least 0, got {value!r}")
    return array


# Greedy schedules that offload activations when a memory limit asks for it.
#
# A forward that only memory keeps from starting makes its worker run a weight gradient, or, if
# there is none, sends the youngest activation to the host: the one whose backward comes last. It
# returns when few backwards are left before its own, and room for its return is kept. This is the
# greedy start of OptPipe (AdaOffload, arXiv:2510.05186); how far forwards run ahead and how early
# activations return is varied, and the best schedule is kept. Under little memory an activation
# must not return before the gradient that it waits for is on its way, and where a later stage has
# room for few, those before it must not run ahead of it.

AHEAD = (0.0, 0.5, 1.0)  # forwards in flight beyond those of 1F1B, for each later stage
# gradients before its own, at which an activation returns: of its stage, or of the next one
DUE = ((1, False), (2, False), (0, True), (1, True))
LATEST = (0, True)
CAPS = (2, 3)  # forwards in flight on any stage, where one later on has room for few
PATIENCE: tuple[tuple[Phase, ...], ...] = ((Phase.I,), ())  # whether gaps before gradients stay


def ada_offload_starts(
    pipe: LimitedPipe,
    *,
    offload: Numbers | None = None,
    load: Numbers | None = None,
    host_links: Sequence[Sequence[int]] = (),
) -> TimedOps:
    """Plan a pipe greedily under its memory limits, with offloads only where memory is short."""
    work, after = pipe.work(), range(pipe.num_stages)[::-1]
    depths = [[1 + n + int(ahead * n) for n in after] for ahead in AHEAD]
    rules = [
        Rules([depth], patience=patience, due=due, by_next=by_next, host_links=host_links)
        for depth, (due, by_next), patience in itertools.product(depths, DUE, PATIENCE)
    ]
    # on a slow link nothing may be better than a little; then no activation returns, either way
    runs = [list_schedule(work, rule) for rule in rules if (rule.due, rule.by_next) == DUE[0]]
    if offload is not None:
        there = per_entry(offload, pipe.num_stages, "offload").tolist()
        back = there if load is None else per_entry(load, pipe.num_stages, "load").tolist()
        timed = work._replace(lasts={**work.lasts, Phase.O: there, Phase.L: back})
        due, by_next = LATEST
        rules += [
            Rules([[min(cap, 1 + n) for n in after]], p, due, by_next, host_links)
            for cap, p in itertools.product(CAPS, PATIENCE)
        ]
        runs += [list_schedule(timed, rule) for rule in rules]
    ops = (TimedOps.of(run.log) for run in runs if run is not None)
    return min(ops, key=lambda plan: float(plan.end.max()))


# Memory-limited zero-bubble schedules by heuristic, after Qi et al. (arXiv:2401.10241, 3.1).
#
# Every round adds one forward to each stage, from the first to the last, and one input gradient,
# from the last to the first; before the first gradient, a stage takes as many forwards as time and
# memory allow. A weight gradient runs where an op would otherwise wait long enough for its input,
# or where memory is short; the others run at the end. Choices that no rule decides well for all
# times are varied, and the best schedule is kept. Rounds need the memory of 1F1B to flow: where a
# limit is lower, a greedy schedule is tried too.

F, I, W = Phase.F, Phase.I, Phase.W  # noqa: E741


class RoundRules(NamedTuple):
    """Choices that are tried both ways."""

    # the forwards before the first gradient end before its input arrives
    waits_before_gradient: bool
    # a stage may leave its forward to a later round, to be ready for the next gradient
    prefers_gradients: bool
    # a weight gradient may delay the next op of a stage that idles less than another
    fills_every_gap: bool


ALL_RULES = tuple(RoundRules(*bits) for bits in itertools.product((True, False), repeat=3))


def zero_bubble_starts(pipe: LimitedPipe, *, by_span: bool = True) -> TimedOps:
    """Plan a pipe with the backward split, under its memory limits."""
    plans = [_Rounds(pipe, rules).run() for rules in ALL_RULES]
    if (pipe.limits < pipe.num_stages * pipe.sizes).any():
        plans.append(ada_offload_starts(pipe))

    def lengths(ops: TimedOps) -> tuple[float, ...]:
        both = float(ops.spans(int(ops.worker.max()) + 1).max()), float(ops.end.max())
        return both if by_span else both[::-1]  # the one to minimise first

    return min(plans, key=lengths)


class _Rounds:
    """Chooses the next op of each stage; the timeline keeps times and memory."""

    def __init__(self, pipe: LimitedPipe, rules: RoundRules) -> None:
        self.rules, self.total, self.stages = rules, pipe.num_microbatches, range(pipe.num_stages)
        work = pipe.work()
        self.timeline = Timeline(work)
        self.clock, self.held, self.limit = self.timeline.clock, self.timeline.held, work.limits
        self.done = {phase: rows[0] for phase, rows in self.timeline.done.items()}
        self.durations, self.sizes, self.weight_sizes = work.lasts, work.sizes, work.kept
        self.back = work.lag[1][0]
        self.idle: list[Time] = [0 for _ in self.stages]  # since the first op
        self.same = ROUNDING * float(
            pipe.num_microbatches * sum(map(np.sum, (pipe.forward, pipe.input_grad, pipe.there)))
        )

    def put(self, phase: Phase, stage: int) -> None:
        """Run the stage's next op of a phase behind what it has done, once its input is there."""
        op = Op(phase, stage, self.done[phase][stage])
        start = max(self.clock[stage], self.timeline.arrival[op])
        if self.done[F][stage]:
            self.idle[stage] += start - self.clock[stage]
        self.timeline.start(op, start)
        self.timeline.end(op)  # the stage is asked again when it has ended

    def pending(self, stage: int) -> int:
        return self.done[I][stage] - self.done[W][stage]

    def weights_for_room(self, stage: int) -> int | None:
        """Number of weight gradients to run before another forward fits; None if none suffice."""
        over = self.held[stage] + self.sizes[stage] - self.limit[stage]
        for count in range(self.pending(stage) + 1):
            if over - count * self.weight_sizes[stage] <= 0:
                return count
        return None

    def fill(self, stage: int, phase: Phase) -> None:
        """Run weight gradients while the next op of a phase waits for its input."""
        arrival = self.timeline.arrival[Op(phase, stage, self.done[phase][stage])]
        duration = self.durations[W][stage]
        while self.pending(stage) and self.clock[stage] + duration <= arrival + self.same:
            self.put(W, stage)
        gap = arrival - self.clock[stage]
        if self.pending(stage) and gap > self.same:
            may_idle = gap <= max(self.idle) - self.idle[stage] + self.same
            if self.rules.fills_every_gap or not may_idle:
                self.put(W, stage)

    def warm_up(self) -> None:
        """First microbatch: forwards until the first gradient arrives, then that gradient."""
        for stage in self.stages:
            self.put(F, stage)
        extra = self.forwards_before_gradient()
        for stage, count in enumerate(extra):
            for _ in range(count):
                self.put(F, stage)
        for stage in reversed(self.stages):
            self.put(I, stage)

    def forwards_before_gradient(self) -> list[int]:
        extra = [0 for _ in self.stages]
        last = len(self.stages) - 1
        gradient = self.clock[last] + self.durations[I][last]
        for stage in reversed(self.stages[:-1]):
            arrival, clock = gradient + self.back[stage], self.clock[stage]
            duration, takes = self.durations[F][stage], self.sizes[stage]
            held = self.held[stage]
            late = duration if self.rules.waits_before_gradient else self.same
            while (
                extra[stage] + 1 < self.total
                and held + takes <= self.limit[stage]
                and clock + late <= arrival + (self.same if late == duration else 0.0)
            ):
                extra[stage], clock, held = extra[stage] + 1, clock + duration, held + takes
            gradient = max(clock, arrival) + self.durations[I][stage]
        for stage in self.stages[1:]:  # a stage is not ahead of the one before it
            while extra[stage] > extra[stage - 1] or (
                0 < extra[stage] == extra[stage - 1] and extra[stage] + 1 < self.total
            ):
                extra[stage] -= 1
        return extra

    def is_late(self, stage: int) -> bool:
        """Return whether a forward would make the stage late for the gradient of the next one."""
        if stage + 1 == len(self.stages) or self.done[F][stage] < self.done[F][stage + 1] + 2:
            return False
        after = stage + 1
        gradient = (
            self.clock[after]
            + self.durations[F][after]
            + self.durations[I][after]
            + self.back[stage]
        )
        if self.clock[stage] >= gradient:
            return True
        weights = self.weights_for_room(stage) or 0
        ready = self.clock[stage] + self.durations[F][stage] + weights * self.durations[W][stage]
        return ready > gradient + self.same and (
            gradient - self.clock[stage] <= max(self.idle) - self.idle[stage]
        )

    def forwards(self, microbatch: int) -> None:
        """Add one forward to every stage that takes one before this gradient."""
        takes = [
            self.done[F][stage] < self.total
            and not (self.rules.prefers_gradients and self.is_late(stage))
            for stage in self.stages
        ]
        for stage in reversed(self.stages[:-1]):
            takes[stage] = takes[stage] and takes[stage + 1]
        for stage in self.stages:
            is_needed = self.done[F][stage] == microbatch
            has_input = stage == 0 or self.done[F][stage] < self.done[F][stage - 1]
            weights = self.weights_for_room(stage)
            if not is_needed and not (takes[stage] and has_input and weights is not None):
                continue
            for _ in range(weights or 0):
                self.put(W, stage)
            self.fill(stage, F)
            self.put(F, stage)

    def run(self) -> TimedOps:
        self.warm_up()
        for microbatch in range(1, self.total):
            self.forwards(microbatch)
            for stage in reversed(self.stages):
                self.fill(stage, I)
                while stage == 0 and self.done[F][0] == self.total and self.pending(0):
                    self.put(W, 0)
                self.put(I, stage)
        for stage in self.stages:
            while self.done[W][stage] < self.total:
                self.put(W, stage)
        return TimedOps.of(self.timeline.log)
