"""Initial plans: schedules of the literature, and greedy ones in many variants."""

import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.schedules.cells.ops import SPLIT, Phase
from pipejax.schedules.heuristics.list_scheduling import NO_LIMIT, Goal, Rules, list_schedule
from pipejax.schedules.heuristics.memory_limited_pipe import (
    LimitedPipe,
    ada_offload_starts,
    zero_bubble_starts,
)
from pipejax.schedules.heuristics.timeline import FOREVER, TimedOps, Work
from pipejax.search.schedule.bounds import paths
from pipejax.search.schedule.offload_assignment import add_offloads
from pipejax.search.schedule.plan import NEVER, Plan, objective_of, peaks
from pipejax.search.schedule.problem import Problem

OFFLOAD_SECONDS = 3.0  # to find offloads for one plan, at most
ROOM = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # times the limit that compute is planned for


class Variant(NamedTuple):
    """Rules of a greedy plan, of which all combinations are tried.

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
    active: int = NO_LIMIT


VARIANTS = tuple(
    Variant(patient, backlog, extra)
    for extra, backlog, patient in itertools.product(
        (NO_LIMIT, 0, 1, 2, 3), (NO_LIMIT, 0, 1, 2, 4), (False, True)
    )
)
FEW_ACTIVE = tuple(
    Variant(False, NO_LIMIT, NO_LIMIT, active) for active in (1, 2, 3, 4, 6, 8, 12, 16)
)


class Start(NamedTuple):
    """A plan and what made it.

    Attributes:
      source: name.
      plan: starts within the limits.
    """

    source: str
    plan: Plan


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
    variant: Variant = VARIANTS[0],
    shorter_than: float = FOREVER,
) -> Plan | None:
    """Run the workers greedily, nothing offloaded; None where memory stops them, or it is long."""
    trip = paths(problem).trip + problem.forward + problem.input_grad
    work = np.maximum(problem.forward + problem.gradient, 1)  # a stage may take no time
    rules = Rules(
        depth=(-(-trip // work) + variant.extra).tolist(),
        active=variant.active,
        backlog=variant.backlog,
        patience=(Phase.F, Phase.I) if variant.patient else (),
    )
    goal = Goal(shorter_than, problem.objective == "span")
    run = list_schedule(work_of(problem, limits), rules, goal)
    return None if run is None else plan_of(problem, TimedOps.of(run.log))


def one_by_one(problem: Problem) -> Plan:
    """Run microbatch after microbatch, one op at a time: this fits wherever anything does.

    Activations go to the host where their worker has no room for all its stages of a microbatch.
    """
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


def greedy_starts(problem: Problem, seconds: float, best: float = FOREVER) -> Iterator[Start]:
    """Yield successively better greedy plans, all of them shorter than the best one so far.

    Where activations may be offloaded, compute is also planned for more memory than there is,
    and the shortest plan that offloads can make fit is kept.
    """
    until = time.monotonic() + seconds
    too_large: list[tuple[int, int, Plan]] = []
    variants = VARIANTS if is_pipe(problem) else FEW_ACTIVE + VARIANTS
    for room in ROOM if problem.offload is not None else ROOM[:1]:
        for number, variant in enumerate(variants):
            if number and time.monotonic() > until - seconds / 2:
                break
            limits = (problem.limits * room).astype(np.int64)
            plan = greedy_plan(problem, limits, variant, best)
            if plan is None or (value := objective_of(problem, plan)) >= best:
                continue
            if (peaks(problem, plan) <= problem.limits).all():
                best = value
                yield Start("greedy", plan)
            elif problem.offload is not None:
                too_large.append((value, len(too_large), plan))
    for value, _, plan in sorted(too_large, key=lambda entry: entry[:2]):
        if time.monotonic() > until or value >= best:
            return
        seconds = min(OFFLOAD_SECONDS, until - time.monotonic())
        with_offloads = add_offloads(problem, plan, seconds)
        if with_offloads is not None:
            best = value
            yield Start("greedy with offloads", with_offloads)
