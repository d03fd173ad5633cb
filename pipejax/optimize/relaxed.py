"""A bound from one stage alone: the others never keep it waiting, but messages and memory do."""

import dataclasses

import numpy as np

from pipejax.optimize.bounds import paths
from pipejax.optimize.model import ScheduleModel
from pipejax.optimize.problem import Problem
from pipejax.optimize.search import search


def alone(problem: Problem, pipe: int, stage: int) -> Problem:
    """Keep one stage; what is before and after it becomes two stages that take no time.

    Args:
      problem: the problem.
      pipe: pipe of the stage.
      stage: the stage.

    Returns:
      A problem that no schedule of the whole one can make longer than itself.

    Example:
      >>> from pipejax import schedules
      >>> from pipejax.costs import Costs
      >>> from pipejax.optimize.bounds import lower_bound
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> costs = Costs.uniform(table, forward=10.0, backward=20.0)
      >>> one = alone(pose(table, costs, memory_limit=4), 0, 3)
      >>> one.num_stages, lower_bound(one) * one.unit  # 30 until the last stage starts, 8 x 30
      (3, 270.0)
    """
    way = paths(problem)
    count = int((problem.pipe_of == pipe).sum())

    def only(values: np.ndarray) -> np.ndarray:
        return np.array([0, int(values[stage]), 0])

    before, between, after = (int(way_of[pipe, stage]) for way_of in way)
    if problem.objective == "span":  # of the stage's own worker: what is around it does not count
        before = after = 0
    lag = np.array([[[before, between]], [[after, 0]]])
    return dataclasses.replace(
        problem,
        placement=np.arange(3)[None],
        pipe_of=np.zeros(count, np.int64),
        forward=only(problem.forward),
        input_grad=only(problem.input_grad),
        weight_grad=only(problem.weight_grad),
        backward=only(problem.backward),
        lag=lag,
        transmit=np.zeros_like(lag),
        step_end=only(problem.step_end),
        update=only(problem.update),
        offload=None if problem.offload is None else only(problem.offload),
        load=None if problem.load is None else only(problem.load),
        host_links=(),
        sizes=only(problem.sizes),
        kept=only(problem.kept),
        limits=np.array([1, int(problem.limits[problem.placement[pipe, stage]]), 1]),
    )


def relaxed_bound(problem: Problem, stage: int, horizon: int, seconds: float, workers: int) -> int:
    """Bound the objective by what one stage alone needs.

    Args:
      problem: a problem with one stage per worker.
      stage: the stage.
      horizon: units in which the whole can be done.
      seconds: time to spend, at most.
      workers: threads.

    Returns:
      Units that no schedule of the whole can go below.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> costs = Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
      >>> problem = pose(table, costs, memory_limit=2)
      >>> relaxed_bound(problem, stage=1, horizon=20, seconds=10.0, workers=1)
      7
    """
    bound = 0
    for found in search(ScheduleModel(alone(problem, 0, stage), horizon), seconds, workers):
        bound = max(bound, found.bound)
    return bound
