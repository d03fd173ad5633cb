"""Schedules of the literature for the same pipe, as baselines and starts."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipejax import schedules
from pipejax.schedules.cells.ops import HOST, SPLIT, Phase
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.initial_plans import ada_offload_plan, is_pipe
from pipejax.search.schedule.plan import keeps_limits, to_table
from pipejax.search.schedule.problem import NAMES, Problem

# the most promising first: a short time limit may leave out the last ones
IN_MEMORY: tuple[str, ...] = ("zero-bubble", "zb-1p", "zb-h1", "zb-2p", "zb-h2", "1f1b")
WITH_OFFLOADS: tuple[str, ...] = ("ada-offload", "pipe-offload")
LEAST = 1e-4  # of the longest time: slots have a length, and sums of floats tell them apart


def baseline_tables(problem: Problem, given: ScheduleTable) -> Iterator[tuple[str, ScheduleTable]]:
    """Yield the given schedule and, for a plain pipe, those of the literature.

    Builders take one time for all stages: the mean. AdaOffload plans for those of each.
    """
    yield given.name, given
    if not is_pipe(problem):
        return
    size = {"num_workers": problem.num_workers, "num_microbatches": problem.num_microbatches}
    options = _options(problem)
    for name in (WITH_OFFLOADS if problem.offload is not None else ()) + IN_MEMORY:
        own_plan = ada_offload_plan(problem) if name == "ada-offload" else None
        if own_plan is not None and keeps_limits(problem, own_plan):
            yield name, to_table(problem, own_plan, name)
        elif name != given.name:
            takes = {*schedules.REGISTRY[name].options, "slots"}
            own = {option: value for option, value in options.items() if option in takes}
            yield name, schedules.build(name, **size, **own)


def _options(problem: Problem) -> Mapping[str, Any]:
    def mean(times: np.ndarray) -> float:
        return float(np.mean(times)) if np.size(times) else 0.0

    times = {phase.name: mean(problem.times[phase]) for phase in (*SPLIT, Phase.B)}
    transfer = mean(problem.lag + problem.transmit)
    shortest = LEAST * max(*times.values(), transfer) or 1.0
    options: dict[str, Any] = {
        "slots": {letter: max(time, shortest) for letter, time in times.items()},
        "transfer": transfer,
        "memory_limit": float((problem.limits / problem.sizes).min()),
        "weight_share": float((problem.kept / problem.sizes).max()),
    }
    if problem.offload is not None:
        options |= {NAMES[phase]: problem.times[phase] for phase in HOST}
        options |= {"offload_share": 1.0, "host_links": problem.host_links}
    return options
