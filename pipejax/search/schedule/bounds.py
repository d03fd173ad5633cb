"""Lower bounds of all schedules, from paths and sums alone."""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.search.schedule.problem import PerStage, Problem

PerPipe = Int[NumpyArray, "pipes stages"]


class Paths(NamedTuple):
    """Least times before, between and after the ops of one microbatch [units].

    Attributes:
      head: (pipes, stages) from the start of the run to the start of F.
      trip: (pipes, stages) from the end of F to the start of I.
      tail: (pipes, stages) from the end of I to the end of the run.
    """

    head: PerPipe
    trip: PerPipe
    tail: PerPipe


def paths(problem: Problem) -> Paths:
    """Add up ops and messages along the path of a microbatch."""
    pipes, stages = problem.placement.shape
    hop = problem.lag + problem.transmit
    least = np.minimum(problem.input_grad, problem.backward)
    is_split = problem.backward >= problem.input_grad + problem.weight_grad
    after = np.where(is_split, problem.weight_grad, 0) + problem.step_end
    head, trip, tail = (np.zeros((pipes, stages), np.int64) for _ in range(3))
    tail[:] = after
    for stage in range(1, stages):
        head[:, stage] = head[:, stage - 1] + problem.forward[stage - 1] + hop[0, :, stage - 1]
        down = hop[1, :, stage - 1] + least[stage - 1] + tail[:, stage - 1]
        tail[:, stage] = np.maximum(tail[:, stage], down)
    for stage in range(stages - 2, -1, -1):
        there_and_back = hop[0, :, stage] + hop[1, :, stage]
        work = problem.forward[stage + 1] + least[stage + 1]
        trip[:, stage] = trip[:, stage + 1] + there_and_back + work
    return Paths(head, trip, tail)


class LowerBound(NamedTuple):
    """No schedule is shorter.

    Attributes:
      value: the bound [units].
      by: what it rests on, in the words of `CheckedBound`.
    """

    value: int
    by: str


def lower_bound(problem: Problem) -> LowerBound:
    """Return the best of the bounds by work and by memory, for the problem's objective."""
    way = paths(problem)
    counts = np.bincount(problem.pipe_of, minlength=len(problem.placement))
    work = problem.forward + problem.gradient
    best = LowerBound(0, "worker")
    for worker in range(problem.num_workers):
        held = (problem.placement == worker) & (counts > 0)[:, None]
        if not held.any():
            continue
        busy = int((held * counts[:, None] * work).sum())
        if problem.objective == "span":
            best = max(best, LowerBound(busy, "worker"))
            continue
        stages = np.flatnonzero(held.any(axis=0))
        updates = max(int(problem.step_end[stages].min()), int(problem.update[stages].sum()))
        best = max(best, LowerBound(int(way.head[held].min()) + busy + updates, "worker"))
    by = "memory chain" if problem.offload is None else "stage"
    for pipe, stage in np.ndindex(problem.placement.shape):
        if counts[pipe]:
            chain = _chain(problem, way, pipe, stage, int(counts[pipe]))
            best = max(best, LowerBound(chain, by))
    return best


def stage_bounds(problem: Problem) -> PerStage:
    """Bound the objective by each stage's own work and memory: (stages) [units]."""
    way, count = paths(problem), problem.num_microbatches
    return np.array([_chain(problem, way, 0, s, count) for s in range(problem.num_stages)])


def memory_order(problem: Problem, stage: int, worker: int, count: int) -> list[tuple[int, int]]:
    """Return how many (input, weight) gradients must be done before F of each microbatch.

    With i input and w weight gradients done, w <= i, the stage still holds at least what its
    other microbatches take. F of microbatch k finds room where

        (k + 1) size - i (size - kept) - w kept <= limit.

    So at least i0(k) = ceil(((k + 1) size - limit) / size) input gradients must be there (w = i),
    and with exactly that many, w0(k) weight gradients.
    """
    size, kept = int(problem.sizes[stage]), int(problem.kept[stage])
    if not size:
        return [(0, 0)] * count
    order = []
    for k in range(count):
        over = (k + 1) * size - int(problem.limits[worker])
        inputs = max(0, -(-over // size))
        rest = over - inputs * (size - kept)
        order.append((inputs, max(0, -(-rest // kept)) if kept and inputs else 0))
    return order


def _chain(problem: Problem, way: Paths, pipe: int, stage: int, count: int) -> int:
    """Longest path [units] through the ops of one stage, with the waits that its memory forces.

    Microbatches of a pipe are alike, so some best schedule runs each kind of op in their order.
    Then F and I of the stage are two chains: each F follows the one before it, each I follows its
    own F by the trip to the last stage and back, and the I before it. Memory links them back: if F
    of microbatch k finds room only after i gradients, it waits for the i-th one.
    """
    first = int(problem.forward[stage])
    least = int(min(problem.input_grad[stage], problem.backward[stage]))
    least_more = min(least, int(problem.gradient[stage]) - least)
    trip = int(way.trip[pipe, stage])
    order = [(0, 0)] * count
    if problem.offload is None:
        order = memory_order(problem, stage, int(problem.placement[pipe, stage]), count)
    start = int(way.head[pipe, stage]) if problem.objective == "makespan" else 0
    forward_end, input_end = start, [0] * count
    for k, (inputs, weights) in enumerate(order):
        if inputs:
            # as many weight gradients as input gradients: the last of them ran behind its own I
            wait = input_end[inputs - 1] + (least_more if weights >= inputs else 0)
            forward_end = max(forward_end, wait)
        forward_end += first
        input_end[k] = max(forward_end + trip, input_end[k - 1] if k else 0) + least
    if problem.objective == "span":
        return input_end[-1] + int(problem.gradient[stage]) - least
    return input_end[-1] + int(way.tail[pipe, stage])
