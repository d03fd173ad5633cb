"""A lower bound of the step time from costs alone: no program is built, no order of ops is asked.

In max-plus terms a makespan is the longest of many paths, and the length of any one of them is a
bound. Three kinds of path are cheap for all layouts at once:

- the row of one worker: the shortest way from the start to its first op, all that it computes, and
  the shortest way from its last op to the end of the step;
- one microbatch: down all stages and back again;
- the work of all workers, shared evenly: it bounds tables with two pipes, too.
"""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.costs.costs import Costs
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.table import ScheduleTable

PerStage = Float[NumpyArray, "layouts stages"]
Bound = Float[NumpyArray, " layouts"]


class Pipe(NamedTuple):
    """What a bound needs to know of a table, the same for any number of microbatches.

    Attributes:
      placement: (pipes, stages) worker of each stage.
      whole: (stages) whether a stage has whole backwards, B.
      split: (stages) whether it has split ones, I and W.
      again: (stages) whether all microbatches have R there.
    """

    placement: Int[NumpyArray, "pipes stages"]
    whole: Bool[NumpyArray, " stages"]
    split: Bool[NumpyArray, " stages"]
    again: Bool[NumpyArray, " stages"]

    @classmethod
    def of(cls, table: ScheduleTable) -> "Pipe":
        """Read it off a table."""

        def count(phase: Phase) -> Int[NumpyArray, " stages"]:
            both = [cells.stage[cells.phase == phase] for cells in (table.cells, table.partners)]
            return np.bincount(np.concatenate(both), minlength=table.num_stages)

        every = table.num_microbatches
        placement = np.asarray(table.placement)
        return cls(placement, count(Phase.B) > 0, count(Phase.I) > 0, count(Phase.R) == every)


class _StageTimes(NamedTuple):
    """Seconds of each stage (layouts, stages), and of the ways between them.

    Attributes:
      forward: F.
      back: till the input gradient is there: B or I, what is less.
      work: all that one microbatch computes there.
      ending: A and U after its last gradient.
      update: U.
      there: (layouts, stages - 1) message of an activation, the least of all pipes.
      home: (layouts, stages - 1) message of a gradient.
    """

    forward: PerStage
    back: PerStage
    work: PerStage
    ending: PerStage
    update: PerStage
    there: PerStage
    home: PerStage


def lower_bounds(pipe: Pipe, costs: Costs, microbatches: Int[NumpyArray, " layouts"]) -> Bound:
    """Bound the makespans of layouts with the same stages from below.

    Args:
      pipe: what their tables have in common.
      costs: leaves with a leading axis of layouts, or scalars; message times not below 0.
      microbatches: (layouts) M.

    Returns:
      (layouts) bounds [s], for every link model: none makes a message shorter than `delay` does.
    """
    times = _stage_times(pipe, costs, len(microbatches))
    workers = int(pipe.placement.max()) + 1
    way_in = _sums_before(times.forward[:, :-1] + times.there)
    way_out = _sums_before(times.back[:, :-1] + times.home)
    there_and_back = way_in[:, -1] + times.forward[:, -1] + times.back[:, -1]
    # a way home may end at any stage before: its all-reduce and update still follow
    after = way_out + np.maximum.accumulate(times.ending - way_out, axis=1)
    bound = np.maximum(
        there_and_back + after[:, -1],
        microbatches * times.work.sum(axis=1) / workers,
    )
    if len(pipe.placement) > 1:
        return bound
    for worker in range(workers):
        own = pipe.placement[0] == worker
        busy = microbatches * times.work[:, own].sum(axis=1)
        # where a row may end with W, nothing but the end of the step is sure to follow
        last = np.where(pipe.split, times.ending, after)[:, own].min(axis=1)
        last = np.maximum(last, times.update[:, own].sum(axis=1))
        bound = np.maximum(bound, way_in[:, own].min(axis=1) + busy + last)
    return bound


def _stage_times(pipe: Pipe, costs: Costs, count: int) -> _StageTimes:
    """Lay costs out as arrays of all layouts; a phase that may be whole or split takes the less."""
    stages = pipe.placement.shape[1]

    def of(name: str) -> PerStage:
        value = getattr(costs, name)
        return np.broadcast_to(np.asarray(0.0 if value is None else value, float), (count, stages))

    def message(direction: int, kind: str) -> Float[NumpyArray, "layouts pipes boundaries"]:
        value = np.asarray(getattr(costs, kind), float)
        shape = (count, 2, len(pipe.placement), stages - 1)
        value = value.reshape(value.shape[:1] + (1,) * (4 - value.ndim) + value.shape[1:])
        return np.broadcast_to(value, shape)[:, direction]

    crosses = pipe.placement[:, 1:] != pipe.placement[:, :-1]
    sent = [(message(k, "latency") + message(k, "transmit")) * crosses for k in (0, 1)]
    halves = of("input_grad") + of("weight_grad")

    def least(whole: PerStage, split: PerStage) -> PerStage:
        return np.minimum(np.where(pipe.whole, whole, np.inf), np.where(pipe.split, split, np.inf))

    return _StageTimes(
        forward=of("forward"),
        back=least(of("backward"), of("input_grad")),
        work=of("forward") + least(of("backward"), halves) + pipe.again * of("recompute"),
        ending=of("all_reduce") + of("update"),
        update=of("update"),
        there=sent[0].min(axis=1),
        home=sent[1].min(axis=1),
    )


def _sums_before(steps: PerStage) -> PerStage:
    """Sum the steps before each stage: (layouts, stages), from (layouts, stages - 1)."""
    return np.concatenate([np.zeros((len(steps), 1)), np.cumsum(steps, axis=1)], axis=1)
