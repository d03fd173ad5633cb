"""Initial plans: published schedules, greedy schedules, and repeated building blocks.

A building block holds the ops of one microbatch, and is repeated at an interval. A few random
numbers (a draw) define a block, and how closely a plan follows its order. A plan is given up if it
cannot become the best. A few microbatches are planned before all. So most draws cost little.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.base.array_types import Int, NumpyArray
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.costs.planning import plans
from pipejax.schedules.cells.ops import HOST, SPLIT, Phase
from pipejax.schedules.heuristics.building_block import (
    Order,
    Waits,
    building_block,
    least_interval,
    number_legs,
)
from pipejax.schedules.heuristics.list_scheduling import NO_LIMIT, Rules, list_schedule
from pipejax.schedules.heuristics.memory_limited_pipe import LimitedPipe, ada_offload_starts
from pipejax.schedules.heuristics.timeline import FOREVER, TimedOps, Work
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.bounds import paths
from pipejax.search.schedule.effort import GREEDY_SECONDS_PER_OP, Budget
from pipejax.search.schedule.plan import NEVER, Plan, keeps_limits, plan_objective, to_table
from pipejax.search.schedule.problem import NAMES, Problem

RUN_AHEAD = (1, 2, NO_LIMIT)  # choices of `extra` in `greedy_plan`
# the most promising first, because a short time limit leaves out the last ones
PIPE_SCHEDULES = "ada-offload pipe-offload zero-bubble zb-1p zb-h1 zb-2p zb-h2 1f1b"
OFFLOAD_SHARES = (1.0, 0.5)  # shares of the activations that PipeOffload moves


def is_pipe(problem: Problem) -> bool:
    """Return whether there is one pipe, with stage k alone on worker k."""
    return np.array_equal(problem.placement, np.arange(problem.num_workers)[None])


def ada_offload_plan(problem: Problem) -> Plan:
    """Return AdaOffload's plan for the times of each stage and the memory limits."""
    there, back = (problem.lag + problem.transmit)[:, 0]  # (boundaries) times of messages
    names = "forward", "input_grad", "weight_grad", "sizes", "limits"
    options = {name: getattr(problem, name) for name in names} | {"there": there, "back": back}
    share = float((problem.weight_sizes / problem.sizes).max())
    size = problem.num_stages, problem.num_microbatches
    pipe = LimitedPipe.from_numbers(*size, weight_share=share, **options)
    ops = ada_offload_starts(
        pipe, offload=problem.offload, load=problem.load, host_links=problem.host_links
    )
    return to_plan_starts(problem, ops)


def to_plan_starts(problem: Problem, ops: TimedOps) -> Plan:
    """Return a plan with the starts of executed ops."""
    starts_by_phase = {letter: np.full(problem.worker.shape, NEVER, np.int64) for letter in "FIWOL"}
    for letter, starts in starts_by_phase.items():
        is_phase = ops.phase == Phase[letter]
        starts[ops.stage[is_phase], ops.microbatch[is_phase]] = np.round(ops.start[is_phase])
    return Plan.from_starts(starts_by_phase)


def greedy_plan(
    problem: Problem,
    limits: Int[NumpyArray, " workers"],
    *,
    extra: int = NO_LIMIT,
    is_patient: bool = False,
    shorter_than: float = FOREVER,
) -> Plan | None:
    """Plan greedily without offloads. Return None if memory blocks a worker or the plan is long."""
    # A stage may run `depth` forwards ahead of its gradients. They keep it busy while a microbatch
    # is on its trip to the last stage and back; `extra` ones are added. If `is_patient`, a weight
    # gradient does not start if a forward or input gradient arrives before its end.
    trip = paths(problem).trip + problem.forward + problem.input_grad
    work = np.maximum(problem.forward + problem.gradient, 1)  # a stage may take no time
    undelayed = (Phase.F, Phase.I) if is_patient else ()
    depth = -(-trip // work) + extra  # the quotient rounded up
    rules = Rules(depth=depth.tolist(), undelayed=undelayed)
    by_span = problem.objective == "span"
    run = list_schedule(list_work(problem, limits), rules, shorter_than, by_span=by_span)
    return None if run is None else to_plan_starts(problem, TimedOps.from_tuples(run.log))


def one_by_one(problem: Problem) -> Plan:
    """Plan one op at a time, microbatch by microbatch; it fits in memory if any plan does."""
    # If all stages of a worker do not fit for one microbatch, its activations go to the host.
    starts = {letter: np.full(problem.worker.shape, NEVER, np.int64) for letter in "FIWOL"}
    durations = {phase.name: times for phase, times in problem.times.items()}
    hop, stages = problem.lag + problem.transmit, range(problem.num_stages)
    now = 0
    for microbatch, pipe in enumerate(problem.microbatch_pipes.tolist()):
        workers = problem.placement[pipe]
        needs = np.bincount(workers, problem.sizes, problem.num_workers)
        is_offloaded = (needs > problem.limits)[workers]
        forward_ops = [("FO" if is_offloaded[stage] else "F", stage, 0) for stage in stages]
        backward_ops = [("LIW" if is_offloaded[stage] else "IW", stage, 1) for stage in stages]
        for letters, stage, direction in forward_ops + backward_ops[::-1]:
            for letter in letters:
                starts[letter][stage, microbatch] = now
                now += int(durations[letter][stage])
            now += int(hop[direction, pipe].max(initial=0))
    return Plan.from_starts(starts)


def list_work(problem: Problem, limits: Int[NumpyArray, " workers"]) -> Work:
    """Convert a problem to the input of the list scheduler."""
    return Work(
        placement=problem.placement.tolist(),
        microbatch_pipes=problem.microbatch_pipes.tolist(),
        durations={phase: problem.times[phase].tolist() for phase in SPLIT},
        lag=problem.lag.tolist(),
        transmit=problem.transmit.tolist(),
        sizes=problem.sizes.tolist(),
        weight_sizes=problem.weight_sizes.tolist(),
        limits=limits.tolist(),
    )


def greedy_starts(problem: Problem, budget: Budget, best: float) -> Iterator[Plan]:
    """Yield greedy plans, each shorter than the best plan so far."""
    for extra, is_patient in itertools.product(RUN_AHEAD, (True, False)):
        if budget.is_over:
            return
        rules: Any = {"extra": extra, "is_patient": is_patient, "shorter_than": best}
        plan = greedy_plan(problem, problem.limits, **rules)
        budget.spend(GREEDY_SECONDS_PER_OP * 3 * problem.worker.size)
        if plan is not None and (value := plan_objective(problem, plan)) < best:
            best = value
            yield plan


def baseline_tables(problem: Problem, start: ScheduleTable) -> Iterator[tuple[str, ScheduleTable]]:
    """Yield (name, table) of the start table and, for a plain pipe, of published schedules."""
    # Builders use mean times over stages. AdaOffload is also planned for the times of each stage.
    yield start.name, start
    if not is_pipe(problem):
        return
    size = {"num_workers": problem.num_workers, "num_microbatches": problem.num_microbatches}
    options = {
        "memory_limit": float((problem.limits / problem.sizes).min()),
        "weight_share": float((problem.weight_sizes / problem.sizes).max()),
        "host_links": problem.host_links,
    }
    times = _times(problem)
    plan = ada_offload_plan(problem)
    if keeps_limits(problem, plan):
        yield "ada-offload", to_table(problem, plan, "ada-offload")
    offload_shares = (0.0,) if problem.offload is None else OFFLOAD_SHARES
    for name in PIPE_SCHEDULES.split():
        builder = schedules.REGISTRY[name]
        arguments = {option: options[option] for option in builder.options if option in options}
        if builder.planned:
            ((_, arguments),) = plans(builder, arguments, times)  # a batch of one
        variants: list[dict[str, float]] = [{}]
        if name == "pipe-offload":
            variants = [{"offload_share": share} for share in offload_shares]
        for variant in variants:
            yield name, builder.function(**size, **arguments | variant)


def _times(problem: Problem) -> Mapping[str, NumpyArray]:
    """Return {field of `Costs`: times [units], with a batch axis of length 1}."""
    times = {PHASE_FIELDS[phase.name]: problem.times[phase] for phase in (*SPLIT, Phase.B)}
    times |= {"latency": problem.lag, "transmit": problem.transmit}
    times |= {NAMES[phase]: getattr(problem, NAMES[phase]) for phase in HOST}
    return {name: np.asarray(time)[None] for name, time in times.items() if time is not None}


MAX_WAITS = (1, 2, 4, 8)  # choices of the longest wait, in halves of a mean op time
STRETCHES = (1.0, 1.0, 1.0, 1.0, 1.05, 1.1, 1.2, 1.4, 1.7)  # choices of `stretch`
DELAYS = (0.0, 0.5, 1.0, 2.0, 4.0, FOREVER)  # choices of `delay`
USUALLY = (True, True, True, False)  # choices of `has_weights_last` and `runs_ahead`
STALE = 200  # the search ends after STALE + 3 * (number of the last improving draw) draws
FEW = 3  # microbatches per worker in short plans, which select draws for complete plans


class BlockDraw(NamedTuple):
    """Random parameters of a plan."""

    waits: tuple[int, ...]  # waits of forwards, of gradients and between legs [half ops]
    stretch: float  # interval, relative to the least interval that memory and work allow
    delay: float  # time until a weight gradient is due [intervals]
    has_weights_last: bool  # as in `Order`
    runs_ahead: bool  # as in `Order`
    prefers_weights: bool  # as in `Order`


def block_starts(problem: Problem, budget: Budget, enough: int) -> Iterator[Plan]:
    """Yield ever better plans from building blocks until a plan takes at most `enough` units."""
    # If there are many microbatches, a draw is planned in full only if its plan of the first
    # `count` microbatches is short.
    best, effort_before, full_effort = FOREVER, budget.spent, 0.0
    count = FEW * problem.num_workers
    is_full = problem.num_microbatches <= count + count // 2
    pipes = problem.microbatch_pipes if is_full else np.resize(problem.microbatch_pipes, count)
    short_problem = dataclasses.replace(problem, microbatch_pipes=pipes)
    search = BlockSearch(short_problem, problem.num_microbatches - len(pipes))
    while best > enough and not search.is_stale and not budget.is_over:
        block_draw = search.draw()
        plan = search.run(block_draw)
        budget.spend(GREEDY_SECONDS_PER_OP * 3 * short_problem.worker.size)
        if plan is None:
            continue
        if not is_full:
            if 2 * full_effort > budget.spent - effort_before:
                continue  # complete plans take at most half of the effort
            plan = run_draw(problem, block_draw, best)
            effort = GREEDY_SECONDS_PER_OP * 3 * problem.worker.size
            budget.spend(effort)
            full_effort += effort
        if plan is not None and (value := plan_objective(problem, plan)) < best:
            best = value
            yield plan


def run_draw(problem: Problem, block_draw: BlockDraw, shorter_than: float) -> Plan | None:
    """Plan all ops in the order of a drawn building block; None if not below `shorter_than`."""
    # A leg is a series of stages on different workers. The draw has waits in the L legs of
    # forwards, in the L legs of gradients, and at the 2 L - 1 changes of the leg.
    work = list_work(problem, problem.limits)
    legs = num_legs(work)
    half_op = float(np.mean([work.durations[phase] for phase in SPLIT])) / 2
    waits = [half_op * number for number in block_draw.waits]
    block_waits = Waits(waits[:legs], waits[legs : 2 * legs], waits[2 * legs :])
    block = building_block(work, block_waits, least_interval(work))
    interval = block_draw.stretch * least_interval(work, block)
    block = building_block(work, block_waits, interval)
    _, _, delay, has_weights_last, runs_ahead, prefers_weights = block_draw
    order = Order(block, delay * interval, has_weights_last, runs_ahead, prefers_weights)
    by_span = problem.objective == "span"
    run = list_schedule(work, Rules(order=order), shorter_than, by_span=by_span)
    return None if run is None else to_plan_starts(problem, TimedOps.from_tuples(run.log))


def num_legs(work: Work) -> int:
    """Return the largest number of legs of a pipe."""
    return 1 + max(number_legs(row)[-1] for row in work.placement)


class BlockSearch:
    """Search over random building blocks."""

    def __init__(self, problem: Problem, num_dropped: int) -> None:
        """Start without a plan; the complete problem has `num_dropped` more microbatches."""
        self.problem, self.num_dropped, self.random = problem, num_dropped, random.Random(0)
        work = list_work(problem, problem.limits)
        self.min_interval = least_interval(work)
        self.legs = num_legs(work)
        self.best = FOREVER  # least objective of the complete problem [units]
        self.num_draws = self.last_improving_draw = 0

    @property
    def is_stale(self) -> bool:
        """Return whether too many draws gave no better plan."""
        return self.num_draws > STALE + 3 * self.last_improving_draw

    def draw(self) -> BlockDraw:
        """Draw a block's parameters at random."""
        choose = self.random.choice
        max_wait = choose(MAX_WAITS)
        return BlockDraw(
            tuple(self.random.randint(0, max_wait) for _ in range(4 * self.legs - 1)),
            choose(STRETCHES),
            choose(DELAYS),
            has_weights_last=choose(USUALLY),
            runs_ahead=choose(USUALLY),
            prefers_weights=choose((True, False)),
        )

    def run(self, block_draw: BlockDraw) -> Plan | None:
        """Plan the problem by a draw. Return None if all microbatches would exceed the best."""
        # Each dropped microbatch adds a cycle of the steady state. The 1 admits equally fast plans.
        self.num_draws += 1
        max_length = self.best - self.num_dropped * self.min_interval + 1
        plan = run_draw(self.problem, block_draw, max_length)
        if plan is None:
            return None
        cycle = max(self.min_interval, _cycle(plan))  # time that a further microbatch adds
        value = plan_objective(self.problem, plan) + self.num_dropped * cycle
        if value > self.best:
            return None
        if value < self.best:
            self.best, self.last_improving_draw = value, self.num_draws
        return plan


def _cycle(plan: Plan) -> float:
    """Return the mean time between forwards of the first stage, in the later half [units]."""
    starts = np.sort(plan.forward[0])
    half = len(starts) // 2
    return float(starts[-1] - starts[half]) / max(len(starts) - 1 - half, 1)
