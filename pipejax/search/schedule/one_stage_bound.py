"""A bound from one stage alone: the others never keep it waiting, but messages and memory do."""

import dataclasses
from typing import Any

import numpy as np

from pipejax.search.schedule.bounds import paths
from pipejax.search.schedule.cp_model import ScheduleModel
from pipejax.search.schedule.cp_search import search
from pipejax.search.schedule.problem import OP_TIMES, STEP_END_TIMES, Problem

PER_STAGE = (*OP_TIMES, *STEP_END_TIMES, "sizes", "kept")


def alone(problem: Problem, pipe: int, stage: int) -> Problem:
    """Keep one stage; what is before and after it becomes two stages that take no time."""
    way = paths(problem)
    count = int((problem.pipe_of == pipe).sum())

    def only(values: np.ndarray) -> np.ndarray:
        return np.array([0, int(values[stage]), 0])

    before, between, after = (int(way_of[pipe, stage]) for way_of in way)
    if problem.objective == "span":  # of the stage's own worker: what is around it does not count
        before = after = 0
    kept: dict[str, Any] = {name: only(getattr(problem, name)) for name in PER_STAGE}
    lag = np.array([[[before, between]], [[after, 0]]])
    return dataclasses.replace(
        problem,
        placement=np.arange(3)[None],
        pipe_of=np.zeros(count, np.int64),
        **kept,
        lag=lag,
        transmit=np.zeros_like(lag),
        offload=None if problem.offload is None else only(problem.offload),
        load=None if problem.load is None else only(problem.load),
        host_links=(),
        limits=np.array([1, int(problem.limits[problem.placement[pipe, stage]]), 1]),
    )


def relaxed_bound(
    problem: Problem, stage: int, horizon: int, seconds: float, num_threads: int
) -> int:
    """Bound the objective by what one stage alone needs."""
    bound = 0
    for found in search(ScheduleModel(alone(problem, 0, stage), horizon), seconds, num_threads):
        bound = max(bound, found.bound)
    return bound
