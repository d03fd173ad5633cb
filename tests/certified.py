"""What the optimiser answers, derived again by the checker."""

import contextlib
import dataclasses

import numpy as np

import pipejax as pj


def check_solution(
    found,
    costs,
    *,
    memory_limit,
    sizes=1.0,
    weight_share=1 / 3,
    offload=False,
    link="delay",
    objective="makespan",
    **_,
):
    """Order, starts, limits and bound of a solution hold; its own makespan is that of the run."""
    run = pj.evaluate(found.best.table, costs, link=link)
    reached = run.makespan if objective == "makespan" else run.max_span
    assert reached == found.value
    claimed = pj.certificate(
        run,
        memory=pj.analysis.activation_memory(run, sizes=sizes, weight_share=weight_share),
        limits=np.broadcast_to(memory_limit, run.workers),
        objective=objective,
        offload=offload,
        lower_bounds={found.best.bound_by: found.lower_bound},
    )
    assert claimed["claim"]["offloaded"] == found.best.offloaded
    assert pj.verify(claimed).problems == ()


class _EnoughError(Exception):
    """Ends a search at its first solution."""


def first_of(*problem, **options):
    """The first solution of a search, which ends there."""
    found = []

    def take(solution):
        found.append(solution)
        raise _EnoughError

    with contextlib.suppress(_EnoughError):
        pj.optimize(*problem, **options, on_best=take)
    return found[0]


def all_of(*problem, **options):
    """All solutions of a search, in their order; the last one is its answer."""
    found = []
    answer = pj.optimize(*problem, **options, on_best=found.append)
    assert answer == dataclasses.replace(found[-1], stopped=answer.stopped)
    return found
