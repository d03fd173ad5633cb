"""Initial plans: schedules of the literature, greedy ones in many variants, and offloads for them.

Given the starts of all ops, the workers of one host link are a small separate problem: which
activations go to the host, and when. Where it has a solution, a plan made for more memory runs
equally fast in less.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from ortools.sat.python import cp_model

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
    gradient_end,
    input_grad_end,
    keeps_limits,
    objective_of,
    peaks,
    to_table,
)
from pipejax.search.schedule.problem import NAMES, Problem

OFFLOADS_MOST = 3.0  # to find offloads for one plan, of effort or seconds
CONFLICTS = 1000  # of the solver there: its deterministic time hardly counts them
EXTRA = (1, 2, NO_LIMIT)  # forwards that run ahead, as `greedy_plan` counts them
ROOM = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # times the limit that compute is planned for
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
    # Where activations may be offloaded, compute is also planned for more memory than there is, and
    # the shortest plan that offloads can make fit is kept.
    half = budget.part(budget.left / 2)
    too_large: list[tuple[int, int, Plan]] = []
    for room in ROOM if problem.offload is not None else ROOM[:1]:
        limits = (problem.limits * room).astype(np.int64)
        for extra, is_patient in itertools.product(EXTRA, (True, False)):
            if half.is_over:
                break
            plan = greedy_plan(
                problem, limits, extra=extra, is_patient=is_patient, shorter_than=best
            )
            budget.spend(LIST * 3 * problem.worker.size)
            if plan is None or (value := objective_of(problem, plan)) >= best:
                continue
            if (peaks(problem, plan) <= problem.limits).all():
                best = value
                yield Start("greedy", plan)
            else:
                too_large.append((value, len(too_large), plan))
    for value, _, plan in sorted(too_large, key=lambda entry: entry[:2]):
        if budget.is_over or value >= best:
            return
        with_offloads = add_offloads(problem, plan, budget.part(OFFLOADS_MOST))
        if with_offloads is not None:
            best = value
            yield Start("greedy with offloads", with_offloads)


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


def add_offloads(problem: Problem, plan: Plan, budget: Budget) -> Plan | None:
    """Find offloads that keep a plan within the limits."""
    if problem.offload is None or problem.load is None:
        raise ValueError("nothing may be offloaded: the problem has no time of an offload")
    offload, load = (np.full_like(plan.forward, NEVER) for _ in range(2))
    shared = {worker for group in problem.host_links for worker in group}
    own = [(worker,) for worker in range(problem.num_workers) if worker not in shared]
    for group in (*problem.host_links, *own):
        found = _on_link(problem, plan, group, budget)
        if found is None:
            return None
        for (stage, microbatch), (leaves, comes) in found.items():
            offload[stage, microbatch], load[stage, microbatch] = leaves, comes
    return dataclasses.replace(plan, offload=offload, load=load)


def _on_link(
    problem: Problem, plan: Plan, group: tuple[int, ...], budget: Budget
) -> dict[tuple[int, int], tuple[int, int]] | None:
    """Offloads of the workers of one link, by stage and microbatch: starts of O and L."""
    model, times = cp_model.CpModel(), problem.times
    input_end, weight_end = input_grad_end(problem, plan), gradient_end(problem, plan)
    link: list[cp_model.IntervalVar] = []
    choices: dict[tuple[int, int], tuple[cp_model.BoolVarT, ...]] = {}
    for worker in group:
        held: list[tuple[cp_model.IntervalVar, int]] = []
        for stage, m in np.argwhere(problem.worker == worker).tolist():
            size, kept = int(problem.sizes[stage]), int(problem.kept[stage])
            forward, turn = int(plan.forward[stage, m]), int(plan.input_grad[stage, m])
            ends = int(input_end[stage, m]), int(weight_end[stage, m])
            there = forward + int(problem.forward[stage])
            offload, load = (int(times[phase][stage]) for phase in HOST)
            # an activation that stays: its whole size until I, what W needs until W
            stays = [
                (end - forward, p) for end, p in zip(ends, (size - kept, kept), strict=True) if p
            ]
            if turn - there < offload + load:
                held += [(model.new_fixed_size_interval_var(forward, n, ""), p) for n, p in stays]
                continue
            out = model.new_bool_var("")
            leaves = model.new_int_var(there, turn - offload - load, "")
            comes = model.new_int_var(there + offload, turn - load, "")
            model.add(comes >= leaves + offload)
            optional = model.new_optional_fixed_size_interval_var
            link += [optional(leaves, offload, out, ""), optional(comes, load, out, "")]
            held += [(optional(forward, length, ~out, ""), parts) for length, parts in stays]
            for since, until, parts in (
                (forward, leaves + offload, size),
                (comes, ends[0], size - kept),
                (comes, ends[1], kept),
            ):
                if parts:
                    length = model.new_int_var(0, ends[1] - forward, "")
                    away = model.new_optional_interval_var(since, length, until, out, "")
                    held.append((away, parts))
            choices[stage, m] = out, leaves, comes
        limit = int(problem.limits[worker])
        model.add_cumulative([i for i, _ in held], [parts for _, parts in held], limit)
    model.add_no_overlap(link)
    model.minimize(sum(out for out, *_ in choices.values()))
    solver = budget.new_solver(1)
    solver.parameters.stop_after_first_solution = True
    solver.parameters.max_number_of_conflicts = CONFLICTS
    status = budget.solve(solver, model, len(choices))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return {
        place: (solver.value(leaves), solver.value(comes))
        for place, (out, leaves, comes) in choices.items()
        if solver.boolean_value(out)
    }
