"""Offloads for a plan with fixed compute: which activations go to the host, and when.

Given the starts of all ops, the workers of one host link are a small separate problem. Where it has
a solution, a plan made for more memory runs equally fast in less.
"""

import dataclasses
import time

import numpy as np
from ortools.sat.python import cp_model

from pipejax.schedules.cells.ops import HOST
from pipejax.search.schedule.plan import NEVER, Plan, gradient_end, input_grad_end
from pipejax.search.schedule.problem import Problem


def add_offloads(problem: Problem, plan: Plan, seconds: float) -> Plan | None:
    """Find offloads that keep a plan within the limits."""
    if problem.offload is None or problem.load is None:
        raise ValueError("nothing may be offloaded: the problem has no time of an offload")
    offload, load = (np.full_like(plan.forward, NEVER) for _ in range(2))
    shared = {worker for group in problem.host_links for worker in group}
    own = [(worker,) for worker in range(problem.num_workers) if worker not in shared]
    until = time.monotonic() + seconds
    for group in (*problem.host_links, *own):
        found = _on_link(problem, plan, group, max(0.01, until - time.monotonic()))
        if found is None:
            return None
        for (stage, microbatch), (leaves, comes) in found.items():
            offload[stage, microbatch], load[stage, microbatch] = leaves, comes
    return dataclasses.replace(plan, offload=offload, load=load)


def _on_link(
    problem: Problem, plan: Plan, group: tuple[int, ...], seconds: float
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
