"""Pipe with op times and memory limits, and two heuristics that plan its schedule.

One heuristic offloads activations if memory is short, the other fills waiting time with W.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Num, NumpyArray
from pipejax.base.checks import MismatchError, as_floats, share, whole_number
from pipejax.schedules.cells.ops import SPLIT, Op, Phase
from pipejax.schedules.heuristics.list_scheduling import Rules, list_schedule
from pipejax.schedules.heuristics.timeline import ROUNDING, Time, TimedOps, Timeline, Work
from pipejax.schedules.table.held_activations import WEIGHT_SHARE

Numbers = float | Sequence[float] | Num[NumpyArray, "..."]


class LimitedPipe(NamedTuple):
    """A pipe of one stage per worker: op and message times, activation sizes and memory limits."""

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
    def from_numbers(
        cls,
        num_stages: int,
        num_microbatches: int,
        *,
        weight_share: float = WEIGHT_SHARE,
        **numbers: Numbers,
    ) -> "LimitedPipe":
        """Make a pipe from checked fields; a single number stands for every stage or boundary."""
        # `numbers` are fields by name: `there` and `back`, the times of messages of activations and
        # of gradients (default: 0, or as `there`), `sizes` of activations (default: 1), and others.
        stages, there = whole_number(num_stages, "num_workers"), numbers.get("there", 0.0)
        numbers = {"there": there, "back": there, "sizes": 1.0, **numbers}
        counts = dict.fromkeys(numbers, stages) | {"there": stages - 1, "back": stages - 1}
        pipe = cls(
            num_microbatches=whole_number(num_microbatches, "num_microbatches"),
            weight_share=share(weight_share, "weight_share"),
            **{name: as_vector(value, counts[name], name) for name, value in numbers.items()},
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
        """Return the scheduler's input, with memory limits widened by rounding errors."""
        times = self.forward, self.input_grad, self.weight_grad
        lag = [[self.there.tolist()], [self.back.tolist()]]
        return Work(
            placement=[list(range(self.num_stages))],
            microbatch_pipes=[0] * self.num_microbatches,
            durations=dict(zip(SPLIT, np.stack(times).tolist(), strict=True)),
            lag=lag,
            transmit=np.zeros_like(lag).tolist(),
            sizes=self.sizes.tolist(),
            weight_sizes=(self.sizes * self.weight_share).tolist(),
            limits=(self.limits * (1 + ROUNDING)).tolist(),
        )


def as_vector(value: Numbers, count: int, name: str) -> Float[NumpyArray, " entries"]:
    """Return `count` checked numbers, given as one number for all entries or as a sequence."""
    array = as_floats(value, name)
    if array.ndim == 0:
        array = np.full(count, float(array))
    if array.shape != (count,) or not np.all(np.isfinite(array)) or (array < 0).any():
        raise ValueError(f"{name} must be {count} finite numbers of at least 0, got {value!r}")
    return array


# Greedy schedules that offload activations under a memory limit.
#
# If only memory keeps a forward from starting, its worker runs a weight gradient or, if there is
# none, sends the youngest activation to the host, whose backward comes last. The activation returns
# when few backwards remain before its own, and memory is reserved for its return. This rule is the
# greedy start of OptPipe (AdaOffload, arXiv:2510.05186). If memory is very short, an activation
# returns only when its gradient is on its way, and no stage runs ahead of one with less memory.

EXTRA_DEPTHS = (0.0, 0.5, 1.0)  # forwards in flight per later stage, beyond 1F1B
# (due, by_next) of `Rules`, which decide when an offloaded activation returns
RETURNS = ((1, False), (2, False), (0, True), (1, True))
LATEST_RETURN = (0, True)
MAX_DEPTHS = (2, 3)  # most forwards in flight on any stage, if a later stage has little memory
UNDELAYED: tuple[tuple[Phase, ...], ...] = ((Phase.I,), ())  # phases that W must not delay


def ada_offload_starts(
    pipe: LimitedPipe,
    *,
    offload: Numbers | None = None,
    load: Numbers | None = None,
    host_links: Sequence[Sequence[int]] = (),
) -> TimedOps:
    """Plan a pipe greedily under its memory limits, with offloads only if memory is short."""
    # Of plans by several rules, with and without offloads, return the one of least makespan.
    # `depths` are forwards in flight by stage: with 3 stages 3 2 1 (1F1B), 4 2 1 or 5 3 1
    work, later_stages = pipe.work(), range(pipe.num_stages)[::-1]  # stages after each stage
    depths = [[1 + n + int(extra * n) for n in later_stages] for extra in EXTRA_DEPTHS]
    rules = [
        Rules([depth], undelayed=undelayed, due=due, by_next=by_next, host_links=host_links)
        for depth, (due, by_next), undelayed in itertools.product(depths, RETURNS, UNDELAYED)
    ]
    # No offload is best on a slow link. Without offloads, all `RETURNS` give the same plan.
    runs = [list_schedule(work, rule) for rule in rules if (rule.due, rule.by_next) == RETURNS[0]]
    if offload is not None:
        offload_times = as_vector(offload, pipe.num_stages, "offload").tolist()
        load_times = offload_times
        if load is not None:
            load_times = as_vector(load, pipe.num_stages, "load").tolist()
        durations = {**work.durations, Phase.O: offload_times, Phase.L: load_times}
        for max_depth, undelayed in itertools.product(MAX_DEPTHS, UNDELAYED):
            depth = [min(max_depth, 1 + n) for n in later_stages]
            rules.append(Rules([depth], undelayed, *LATEST_RETURN, host_links))
        runs += [list_schedule(work._replace(durations=durations), rule) for rule in rules]
    ops = (TimedOps.from_tuples(run.log) for run in runs if run is not None)
    return min(ops, key=lambda plan: float(plan.end.max()))


# Memory-limited zero-bubble schedules by heuristic, after Qi et al. (arXiv:2401.10241, 3.1).
#
# Every round adds one forward to each stage, from the first to the last, and one input gradient,
# from the last to the first; before the first gradient, a stage takes as many forwards as time and
# memory allow. A weight gradient runs if an op would otherwise wait long enough for its input, or
# if memory is short; the others run at the end. Rounds need the memory of 1F1B; under a lower
# limit, a greedy schedule is tried too.

F, I, W = Phase.F, Phase.I, Phase.W  # noqa: E741


class RoundRules(NamedTuple):
    """Choices of the zero-bubble heuristic, which tries both values of each choice."""

    # the forwards before the first gradient end before its input arrives
    waits_before_gradient: bool
    # a stage may leave its forward to a later round, to be ready for the next gradient
    prefers_gradients: bool
    # a weight gradient may delay the next op of a stage that idles less than another
    fills_every_gap: bool


ALL_RULES = tuple(RoundRules(*bits) for bits in itertools.product((True, False), repeat=3))


def zero_bubble_starts(pipe: LimitedPipe, *, by_span: bool = True) -> TimedOps:
    """Plan a pipe with split backwards under its memory limits.

    Of several plans, return the one with the least span of a worker. If `by_span` is False, return
    the one with the least makespan.
    """
    plans = [_Rounds(pipe, rules).run() for rules in ALL_RULES]
    if (pipe.limits < pipe.num_stages * pipe.sizes).any():
        plans.append(ada_offload_starts(pipe))

    def objectives(ops: TimedOps) -> tuple[float, float]:
        """Return (main objective, tie-breaker): span and makespan of a plan, both to minimise."""
        span, makespan = float(ops.spans(int(ops.worker.max()) + 1).max()), float(ops.end.max())
        return (span, makespan) if by_span else (makespan, span)

    return min(plans, key=objectives)


class _Rounds:
    """One run of the zero-bubble heuristic, which chooses each stage's next op."""

    def __init__(self, pipe: LimitedPipe, rules: RoundRules) -> None:
        self.rules, self.total, self.stages = rules, pipe.num_microbatches, range(pipe.num_stages)
        work = pipe.work()
        self.timeline = Timeline(work)
        self.clock, self.held, self.limit = self.timeline.clock, self.timeline.held, work.limits
        self.done = {phase: rows[0] for phase, rows in self.timeline.done.items()}
        self.durations = work.durations
        self.sizes, self.weight_sizes = work.sizes, work.weight_sizes
        self.back = work.lag[1][0]
        self.idle: list[Time] = [0 for _ in self.stages]  # idle time since the first op
        microbatch_time = sum(map(np.sum, (pipe.forward, pipe.input_grad, pipe.there)))
        self.tolerance = ROUNDING * float(pipe.num_microbatches * microbatch_time)

    def put(self, phase: Phase, stage: int) -> None:
        """Start a stage's next op of a phase as soon as its input and the stage are ready."""
        op = Op(phase, stage, self.done[phase][stage])
        start = max(self.clock[stage], self.timeline.arrival[op])
        if self.done[F][stage]:  # the wait before the first forward does not count as idle
            self.idle[stage] += start - self.clock[stage]
        self.timeline.start(op, start)
        self.timeline.end(op)  # the next op of the stage starts after this op

    def num_pending_weights(self, stage: int) -> int:
        return self.done[I][stage] - self.done[W][stage]

    def weights_before_forward(self, stage: int) -> int | None:
        """Return how many W must run to make room for a forward; None if all W are not enough."""
        excess = self.held[stage] + self.sizes[stage] - self.limit[stage]
        for count in range(self.num_pending_weights(stage) + 1):
            if excess - count * self.weight_sizes[stage] <= 0:
                return count
        return None

    def fill_wait(self, stage: int, phase: Phase) -> None:
        """Run weight gradients while the next op of a phase on a stage waits for its input."""
        arrival = self.timeline.arrival[Op(phase, stage, self.done[phase][stage])]
        duration = self.durations[W][stage]
        latest_end = arrival + self.tolerance
        while self.num_pending_weights(stage) and self.clock[stage] + duration <= latest_end:
            self.put(W, stage)
        gap = arrival - self.clock[stage]
        if self.num_pending_weights(stage) and gap > self.tolerance:  # W would delay the op
            # idling is harmless while another stage has idled longer
            may_idle = gap <= max(self.idle) - self.idle[stage] + self.tolerance
            if self.rules.fills_every_gap or not may_idle:
                self.put(W, stage)

    def warm_up(self) -> None:
        """Run forwards on each stage until its first gradient arrives, then that gradient."""
        for stage in self.stages:
            self.put(F, stage)
        for stage, count in enumerate(self.extra_forwards()):
            for _ in range(count):
                self.put(F, stage)
        for stage in reversed(self.stages):
            self.put(I, stage)

    def extra_forwards(self) -> list[int]:
        """Return each stage's number of forwards between its first F and its first gradient."""
        # From the last stage to the first, the gradient of microbatch 0 is followed back: a stage
        # runs forwards until it arrives, as far as memory allows.
        extra = [0 for _ in self.stages]
        last = len(self.stages) - 1
        gradient_end = self.clock[last] + self.durations[I][last]
        for stage in reversed(self.stages[:-1]):
            arrival, clock = gradient_end + self.back[stage], self.clock[stage]
            duration, size = self.durations[F][stage], self.sizes[stage]
            held, latest_start = self.held[stage], arrival - self.tolerance
            if self.rules.waits_before_gradient:
                latest_start = arrival - duration + self.tolerance
            while (
                extra[stage] + 1 < self.total
                and held + size <= self.limit[stage]
                and clock <= latest_start
            ):
                extra[stage], clock, held = extra[stage] + 1, clock + duration, held + size
            gradient_end = max(clock, arrival) + self.durations[I][stage]
        # a stage takes fewer extra forwards than the stage before it, or both take none or all:
        # 3 3 2 becomes 3 2 1
        for stage in self.stages[1:]:
            while extra[stage] > extra[stage - 1] or (
                0 < extra[stage] == extra[stage - 1] and extra[stage] + 1 < self.total
            ):
                extra[stage] -= 1
        return extra

    def is_late(self, stage: int) -> bool:
        """Return whether a stage should run its next backward before one more forward."""
        # The stage should if the gradient has arrived, or would arrive during the forward and the W
        # that make room for it. In the second case, waiting must not make the stage the one that
        # idled longest. Without a lead of two forwards, the next stage would wait for this forward.
        if stage + 1 == len(self.stages) or self.done[F][stage] < self.done[F][stage + 1] + 2:
            return False
        next_stage = stage + 1
        next_ops = self.durations[F][next_stage] + self.durations[I][next_stage]
        arrival = self.clock[next_stage] + next_ops + self.back[stage]  # arrival of the gradient
        if self.clock[stage] >= arrival:
            return True
        num_weights = self.weights_before_forward(stage) or 0  # None: the forward cannot run
        work = self.durations[F][stage] + num_weights * self.durations[W][stage]
        may_idle = arrival - self.clock[stage] <= max(self.idle) - self.idle[stage]
        return self.clock[stage] + work > arrival + self.tolerance and may_idle

    def run_forwards(self, microbatch: int) -> None:
        """Run a forward on each stage that can take one before the gradient of a microbatch."""
        takes_forward = [True for _ in self.stages]
        for stage in self.stages:
            leaves_forward = self.rules.prefers_gradients and self.is_late(stage)
            if leaves_forward or self.done[F][stage] == self.total:
                # no stage before this one takes a forward either
                takes_forward[: stage + 1] = [False] * (stage + 1)
        for stage in self.stages:
            is_needed = self.done[F][stage] == microbatch
            has_input = stage == 0 or self.done[F][stage] < self.done[F][stage - 1]
            num_weights = self.weights_before_forward(stage)
            can_run = takes_forward[stage] and has_input and num_weights is not None
            if is_needed or can_run:
                for _ in range(num_weights or 0):
                    self.put(W, stage)
                self.fill_wait(stage, F)
                self.put(F, stage)

    def run(self) -> TimedOps:
        """Run a round for each microbatch, then the remaining W; return all ops with times."""
        self.warm_up()
        for microbatch in range(1, self.total):
            self.run_forwards(microbatch)
            for stage in reversed(self.stages):
                self.fill_wait(stage, I)
                # no stage waits for an I of stage 0: without a forward to run, its W may go first
                if stage == 0 and self.done[F][0] == self.total:
                    while self.num_pending_weights(0):
                        self.put(W, 0)
                self.put(I, stage)
        for stage in self.stages:
            while self.done[W][stage] < self.total:
                self.put(W, stage)
        return TimedOps.from_tuples(self.timeline.log)
