"""Offloads for a plan whose compute is fixed: which activations go out, and when.

Given the starts of all ops, the workers of one host link are a small problem of their own. Where
it has a solution, a plan made for more memory runs, as fast, in less.
"""

import dataclasses
import time

import numpy as np
from ortools.sat.python import cp_model

from pipejax.search.schedule.plan import NEVER, Plan, gradient_end, input_grad_end
from pipejax.search.schedule.problem import PerStage, Problem


def add_offloads(problem: Problem, plan: Plan, seconds: float) -> Plan | None:
    """Find offloads that keep a plan within the limits."""
    if problem.offload is None or problem.load is None:
        raise ValueError("nothing may be offloaded: the problem has no time of an offload")
    times = problem.offload, problem.load
    offload, load = (np.full_like(plan.forward, NEVER) for _ in range(2))
    shared = {worker for group in problem.host_links for worker in group}
    own = [(worker,) for worker in range(problem.num_workers) if worker not in shared]
    until = time.monotonic() + seconds
    for group in (*problem.host_links, *own):
        found = _on_link(problem, plan, group, times, max(0.01, until - time.monotonic()))
        if found is None:
            return None
        for (stage, microbatch), (leaves, comes) in found.items():
            offload[stage, microbatch], load[stage, microbatch] = leaves, comes
    return dataclasses.replace(plan, offload=offload, load=load)


def _on_link(
    problem: Problem,
    plan: Plan,
    group: tuple[int, ...],
    host_times: tuple[PerStage, PerStage],
    seconds: float,
) -> dict[tuple[int, int], tuple[int, int]] | None:
    """Offloads of the workers of one link, by stage and microbatch: starts of O and L."""
    model = cp_model.CpModel()
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
            lasts = [int(time_of[stage]) for time_of in host_times]
            if turn - there < sum(lasts):
                held += _stays(model, forward, ends, size, kept, None)
                continue
            out = model.new_bool_var("")
            leaves = model.new_int_var(there, turn - sum(lasts), "")
            comes = model.new_int_var(there + lasts[0], turn - lasts[1], "")
            model.add(comes >= leaves + lasts[0])
            link.append(model.new_optional_fixed_size_interval_var(leaves, lasts[0], out, ""))
            link.append(model.new_optional_fixed_size_interval_var(comes, lasts[1], out, ""))
            held += _stays(model, forward, ends, size, kept, ~out)
            for since, until, parts in (
                (forward, leaves + lasts[0], size),
                (comes, ends[0], size - kept),
                (comes, ends[1], kept),
            ):
                if parts:
                    length = model.new_int_var(0, ends[1] - forward, "")
                    held.append(
                        (model.new_optional_interval_var(since, length, until, out, ""), parts)
                    )
            choices[stage, m] = out, leaves, comes
        limit = int(problem.limits[worker])
        model.add_cumulative([i for i, _ in held], [parts for _, parts in held], limit)
    model.add_no_overlap(link)
    model.minimize(sum(out for out, *_ in choices.values()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.stop_after_first_solution = True
    solver.parameters.catch_sigint_signal = False  # the caller's to handle
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return {
        place: (solver.value(leaves), solver.value(comes))
        for place, (out, leaves, comes) in choices.items()
        if solver.boolean_value(out)
    }


def _stays(
    model: cp_model.CpModel,
    since: int,
    ends: tuple[int, int],
    size: int,
    kept: int,
    if_: "cp_model.BoolVarT | None",
) -> list[tuple[cp_model.IntervalVar, int]]:
    """An activation that stays: its whole size until I, what W needs until W."""
    held = []
    for until, parts in ((ends[0], size - kept), (ends[1], kept)):
        if parts:
            held.append(
                (
                    model.new_fixed_size_interval_var(since, until - since, "")
                    if if_ is None
                    else model.new_optional_fixed_size_interval_var(since, until - since, if_, ""),
                    parts,
                )
            )
    return held
