"""Answers of the optimiser, derived again by the checker."""

import contextlib
import dataclasses

import numpy as np

import pipejax as pj


def check_solution(result, costs, *, memory_limit, link="delay", objective="makespan", **more):
    """Order, starts, limits and bound of a solution hold; its own makespan is that of the run."""
    sizes = {name: more[name] for name in ("sizes", "weight_share") if name in more}
    run = pj.evaluate(result.best.table, costs, link=link)
    reached = run.makespan if objective == "makespan" else run.max_span
    assert reached == result.value
    claimed = pj.certificate(
        run,
        memory=pj.analysis.activation_memory(run, **sizes),
        limits=np.broadcast_to(memory_limit, run.workers),
        objective=objective,
        offload=more.get("offload", False),
        lower_bounds={result.best.bound_by: result.lower_bound},
    )
    assert claimed["claim"]["offloaded"] == result.best.offloaded
    assert pj.verify(claimed).problems == ()


class _EnoughError(Exception):
    """Ends a search at its first solution."""


def get_first(*problem, **options):
    """The first solution of a search, which ends there."""
    result = []

    def take(solution):
        result.append(solution)
        raise _EnoughError

    with contextlib.suppress(_EnoughError):
        pj.optimize(*problem, **options, on_best=take)
    return result[0]


def get_all(*problem, **options):
    """All solutions of a search, in their order; the last one is its answer."""
    result = []
    answer = pj.optimize(*problem, **options, on_best=result.append)
    assert answer == dataclasses.replace(result[-1], stopped=answer.stopped)
    return result
