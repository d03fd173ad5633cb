"""Initial plans: schedules of the literature, and greedy ones."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.base.array_types import Int, NumpyArray
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.costs.planning import plans
from pipejax.schedules.cells.ops import HOST, SPLIT, Phase
from pipejax.schedules.heuristics.list_scheduling import NO_LIMIT, Goal, Rules, list_schedule
from pipejax.schedules.heuristics.memory_limited_pipe import (
    LimitedPipe,
    ada_offload_starts,
    zero_bubble_starts,
)
from pipejax.schedules.heuristics.timeline import FOREVER, TimedOps, Work
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.bounds import paths
from pipejax.search.schedule.effort import LIST, Budget
from pipejax.search.schedule.plan import (
    NEVER,
    Plan,
    keeps_limits,
    objective_of,
    to_table,
)
from pipejax.search.schedule.problem import NAMES, Problem

EXTRA = (1, 2, NO_LIMIT)  # forwards that run ahead, as `greedy_plan` counts them
# the most promising first: a short time limit may leave out the last ones
OF_A_PIPE = (
    "ada-offload",
    "pipe-offload",
    "zero-bubble",
    "zb-1p",
    "zb-h1",
    "zb-2p",
    "zb-h2",
    "1f1b",
)
OFFLOAD_SHARES = (1.0, 0.5)  # of the activations that PipeOffload moves


class Start(NamedTuple):
    """A plan and what made it."""

    source: str  # name
    plan: Plan  # starts within the limits


def is_pipe(problem: Problem) -> bool:
    """Return whether every worker has one stage of one pipe, in order."""
    return np.array_equal(problem.placement, np.arange(problem.num_workers)[None])


def pipe_plans(problem: Problem) -> Iterator[Start]:
    """Yield what heuristics for a pipe make of the problem's own times and limits."""
    by_span = problem.objective == "span"
    ops = zero_bubble_starts(_limited_pipe(problem), by_span=by_span)
    yield Start("zero-bubble", plan_of(problem, ops))


def ada_offload_plan(problem: Problem) -> Plan:
    """Return AdaOffload's plan of a pipe for the times, sizes and limits of each of its stages."""
    ops = ada_offload_starts(
        _limited_pipe(problem),
        offload=problem.offload,
        load=problem.load,
        host_links=problem.host_links,
    )
    return plan_of(problem, ops)


def _limited_pipe(problem: Problem) -> LimitedPipe:
    """Return the pipe of a problem with one stage on each worker, for heuristics."""
    there, back = (problem.lag + problem.transmit)[:, 0]
    names = "forward", "input_grad", "weight_grad", "sizes", "limits"
    given = {name: getattr(problem, name) for name in names} | {"there": there, "back": back}
    share = float((problem.kept / problem.sizes).max())
    return LimitedPipe.of(problem.num_stages, problem.num_microbatches, weight_share=share, **given)


def plan_of(problem: Problem, ops: TimedOps) -> Plan:
    """Return the starts of ops that have run."""
    at = {letter: np.full(problem.worker.shape, NEVER, np.int64) for letter in "FIWOL"}
    for letter, starts in at.items():
        which = ops.phase == Phase[letter]
        starts[ops.stage[which], ops.microbatch[which]] = np.round(ops.start[which])
    return Plan.of(at)


def greedy_plan(
    problem: Problem,
    limits: Int[NumpyArray, " workers"],
    *,
    extra: int = NO_LIMIT,
    is_patient: bool = False,
    shorter_than: float = FOREVER,
) -> Plan | None:
    """Run the workers greedily, nothing offloaded; None where memory stops them, or it is long."""
    # `extra` forwards may run ahead of the gradients of their stage, beyond those that keep it busy
    # while a microbatch goes to the last stage and comes back. A patient weight gradient waits
    # where it would delay an op whose time is known.
    trip = paths(problem).trip + problem.forward + problem.input_grad
    work = np.maximum(problem.forward + problem.gradient, 1)  # a stage may take no time
    patience = (Phase.F, Phase.I) if is_patient else ()
    rules = Rules(depth=(-(-trip // work) + extra).tolist(), patience=patience)
    goal = Goal(shorter_than, problem.objective == "span")
    run = list_schedule(work_of(problem, limits), rules, goal)
    return None if run is None else plan_of(problem, TimedOps.of(run.log))


def one_by_one(problem: Problem) -> Plan:
    """Run microbatch after microbatch, one op at a time: this fits wherever anything does."""
    # Activations go to the host where their worker has no room for all its stages of a microbatch.
    at = {letter: np.full(problem.worker.shape, NEVER, np.int64) for letter in "FIWOL"}
    hop, lasts = problem.lag + problem.transmit, {p.name: t for p, t in problem.times.items()}
    now = 0
    for microbatch, pipe in enumerate(problem.pipe_of.tolist()):
        row = problem.placement[pipe]
        held = np.bincount(row, problem.sizes, problem.num_workers)
        goes = (held > problem.limits)[row]
        there = [("FO" if goes[stage] else "F", stage, 0) for stage in range(len(row))]
        back = [("LIW" if goes[stage] else "IW", stage, 1) for stage in range(len(row))]
        for letters, stage, way in there + back[::-1]:
            for letter in letters:
                at[letter][stage, microbatch] = now
                now += int(lasts[letter][stage])
            now += int(hop[way, pipe].max(initial=0))
    return Plan.of(at)


def work_of(problem: Problem, limits: Int[NumpyArray, " workers"]) -> Work:
    """Return what a list scheduler is to run."""
    return Work(
        placement=problem.placement.tolist(),
        pipe_of=problem.pipe_of.tolist(),
        lasts={phase: problem.times[phase].tolist() for phase in SPLIT},
        lag=problem.lag.tolist(),
        transmit=problem.transmit.tolist(),
        sizes=problem.sizes.tolist(),
        kept=problem.kept.tolist(),
        limits=limits.tolist(),
    )


def greedy_starts(problem: Problem, budget: Budget, best: float) -> Iterator[Start]:
    """Yield successively better greedy plans, all of them shorter than the best one so far."""
    for extra, is_patient in itertools.product(EXTRA, (True, False)):
        if budget.is_over:
            return
        plan = greedy_plan(
            problem, problem.limits, extra=extra, is_patient=is_patient, shorter_than=best
        )
        budget.spend(LIST * 3 * problem.worker.size)
        if plan is not None and (value := objective_of(problem, plan)) < best:
            best = value
            yield Start("greedy", plan)


def baseline_tables(problem: Problem, given: ScheduleTable) -> Iterator[tuple[str, ScheduleTable]]:
    """Yield the given schedule and, for a plain pipe, those of the literature by name."""
    # Builders take one time for all stages: the mean. AdaOffload plans for those of each too.
    yield given.name, given
    if not is_pipe(problem):
        return
    size = {"num_workers": problem.num_workers, "num_microbatches": problem.num_microbatches}
    options, times = _options(problem), _times(problem)
    own_plan = ada_offload_plan(problem)
    if keeps_limits(problem, own_plan):
        yield "ada-offload", to_table(problem, own_plan, "ada-offload")
    for name in OF_A_PIPE:
        builder = schedules.REGISTRY[name]
        arguments = {option: options[option] for option in builder.options if option in options}
        if builder.planned:
            ((_, arguments),) = plans(builder, arguments, times)
        shares = [0.0] if problem.offload is None else OFFLOAD_SHARES
        for share in shares if name == "pipe-offload" else [None]:
            if share is not None:
                arguments["offload_share"] = share
            yield name, builder.function(**size, **arguments)


def _options(problem: Problem) -> Mapping[str, Any]:
    """Options of builders that keep the problem's limits."""
    return {
        "memory_limit": float((problem.limits / problem.sizes).min()),
        "weight_share": float((problem.kept / problem.sizes).max()),
        "host_links": problem.host_links,
    }


def _times(problem: Problem) -> Mapping[str, NumpyArray]:
    """Times that schedules are planned for, as a batch of one by field of `Costs` [s]."""
    times = {PHASE_FIELDS[phase.name]: problem.times[phase] for phase in (*SPLIT, Phase.B)}
    times |= {"latency": problem.lag, "transmit": problem.transmit}
    times |= {NAMES[phase]: getattr(problem, NAMES[phase]) for phase in HOST}
    return {name: np.asarray(time)[None] for name, time in times.items() if time is not None}
