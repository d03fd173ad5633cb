"""Lower bounds on the time of all schedules, from paths, work and memory.

The head of a stage is the least time before F of a microbatch, the trip the least time from the end
of F to the start of I, and the tail the least time after I. Memory is counted in parts, and time in
units, both integers.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.search.schedule.problem import PerStage, Problem

PerPipe = Int[NumpyArray, "pipes stages"]


class Paths(NamedTuple):
    """Head, trip and tail of each stage [units]."""

    head: PerPipe  # from the start of the run to the start of F
    trip: PerPipe  # from the end of F to the start of I, through F and I of all later stages
    tail: PerPipe  # from the end of I to the end of the run


def paths(problem: Problem) -> Paths:
    """Return the least times before F, from F to I, and after I of each stage [units]."""
    pipes, stages = problem.placement.shape
    forward_hop, backward_hop = problem.lag + problem.transmit  # (pipes, boundaries)
    input_grad = np.minimum(problem.input_grad, problem.backward)
    is_split = problem.backward >= problem.input_grad + problem.weight_grad
    head, trip, tail = (np.zeros((pipes, stages), np.int64) for _ in range(3))
    tail[:] = np.where(is_split, problem.weight_grad, 0) + problem.step_end
    for stage in range(1, stages):
        head[:, stage] = head[:, stage - 1] + problem.forward[stage - 1] + forward_hop[:, stage - 1]
        # the longest path after I goes on to the previous stage, or ends with W of this stage
        to_previous = backward_hop[:, stage - 1] + input_grad[stage - 1] + tail[:, stage - 1]
        tail[:, stage] = np.maximum(tail[:, stage], to_previous)
    for stage in range(stages - 2, -1, -1):
        there_and_back = forward_hop[:, stage] + backward_hop[:, stage]
        work = problem.forward[stage + 1] + input_grad[stage + 1]
        trip[:, stage] = trip[:, stage + 1] + there_and_back + work
    return Paths(head, trip, tail)


class LowerBound(NamedTuple):
    """Lower bound on the objective of all schedules, with the reason."""

    value: int  # the bound [units]
    by: str  # reason of the bound, as in `CheckedBound`


def lower_bound(problem: Problem) -> LowerBound:
    """Return the highest lower bound on the objective, by work or by memory."""
    stage_paths = paths(problem)
    counts = np.bincount(problem.microbatch_pipes, minlength=len(problem.placement))
    work = problem.forward + problem.gradient
    forward_and_input = problem.forward + np.minimum(problem.input_grad, problem.backward)
    best = LowerBound(0, "worker")
    for worker in range(problem.num_workers):
        # (pipes, stages) whether the worker runs ops of the stage
        runs_stage = (problem.placement == worker) & (counts > 0)[:, None]
        if not runs_stage.any():
            continue
        busy = int((runs_stage * counts[:, None] * work).sum())
        if problem.objective == "span":
            best = max(best, LowerBound(busy, "worker"))
            continue
        stages = np.flatnonzero(runs_stage.any(axis=0))
        updates = max(int(problem.step_end[stages].min()), int(problem.update[stages].sum()))
        # after all F and I, the path from the last I to the end remains
        to_last_input = int((runs_stage * counts[:, None] * forward_and_input).sum())
        after_head = max(busy + updates, to_last_input + int(stage_paths.tail[runs_stage].min()))
        head = int(stage_paths.head[runs_stage].min())
        best = max(best, LowerBound(head + after_head, "worker"))
    reason = "memory chain" if problem.offload is None else "stage"
    for pipe, stage in np.ndindex(problem.placement.shape):
        if counts[pipe]:
            chain = _stage_bound(problem, stage_paths, pipe, stage, int(counts[pipe]))
            best = max(best, LowerBound(chain, reason))
    area = LowerBound(area_bound(problem), "memory area")
    return area if area.value > best.value else best


def stage_bounds(problem: Problem) -> PerStage:
    """Return lower bounds on the objective, each from one stage's work and memory [units]."""
    arguments = problem, paths(problem), 0
    count = problem.num_microbatches
    return np.array([_stage_bound(*arguments, s, count) for s in range(problem.num_stages)])


def memory_order(problem: Problem, stage: int, worker: int, count: int) -> list[tuple[int, int]]:
    """Return (number of I, number of W) that must end before the F of each microbatch fits."""
    # Before F of microbatch k, memory has held k activations of the stage. If i input gradients
    # and w <= i weight gradients have ended, F fits if
    # (k + 1) size - i (size - weight_size) - w weight_size <= limit.
    # So at least i0(k) = ceil(((k + 1) size - limit) / size) input gradients must have ended
    # (w = i). With exactly i0(k), at least w0(k) weight gradients must have ended.
    size, weight_size = int(problem.sizes[stage]), int(problem.weight_sizes[stage])
    if not size:
        return [(0, 0)] * count
    order = []
    for k in range(count):
        excess = (k + 1) * size - int(problem.limits[worker])
        num_inputs = max(0, -(-excess // size))  # -(-a // b) rounds a / b up
        excess -= num_inputs * (size - weight_size)
        num_weights = max(0, -(-excess // weight_size)) if weight_size and num_inputs else 0
        order.append((num_inputs, num_weights))
    return order


def _stage_bound(problem: Problem, stage_paths: Paths, pipe: int, stage: int, count: int) -> int:
    """Return the longest path through the ops of a stage, with waits for memory."""
    # Microbatches of a pipe are interchangeable. So there is a best schedule in which F and I run
    # in microbatch order. An F follows the previous F. An I follows the previous I, and the F of
    # its microbatch after the trip to the last stage and back. If F of microbatch k fits in memory
    # only after i gradients, it waits for gradient i.
    forward = int(problem.forward[stage])
    input_grad = int(min(problem.input_grad[stage], problem.backward[stage]))
    weight_delay = min(input_grad, int(problem.gradient[stage]) - input_grad)
    trip = int(stage_paths.trip[pipe, stage])
    gradients_needed = [(0, 0)] * count
    if problem.offload is None:
        gradients_needed = memory_order(problem, stage, int(problem.placement[pipe, stage]), count)
    start = int(stage_paths.head[pipe, stage]) if problem.objective == "makespan" else 0
    forward_end, input_end = start, [0] * count
    for k, (num_inputs, num_weights) in enumerate(gradients_needed):
        if num_inputs:
            memory_free = input_end[num_inputs - 1]
            if num_weights >= num_inputs:  # the last weight gradient runs after its own I
                memory_free += weight_delay
            forward_end = max(forward_end, memory_free)
        forward_end += forward
        input_end[k] = max(forward_end + trip, input_end[k - 1] if k else 0) + input_grad
    if problem.objective == "span":
        return input_end[-1] + int(problem.gradient[stage]) - input_grad
    return input_end[-1] + int(stage_paths.tail[pipe, stage])


class _ActivationKind(NamedTuple):
    """Activations of one stage and pipe on a worker; times in units, sizes in parts."""

    num_activations: int
    head: int  # least time before F
    tail: int  # least time after I
    step_end: int  # time after the gradient
    forward: int  # time of F
    input_grad: int  # time of I
    size: int  # size of an activation
    weight_size: int  # size of the share of an activation that W needs
    weight_grad: int  # time of W; 0 if a full backward may be shorter than I and W
    turn: int  # least time from the start of F to the end of I
    saved_area: int  # memory area (size x time) that an offload saves
    link_time: int  # time of O and L


class _WorkerMemory(NamedTuple):
    """Memory of a worker: the limit, and the least memory area that a run needs."""

    limit: int  # parts of memory that whole activations can fill
    # memory area [parts x units] of all activations without offloads, and of unused memory
    demand: int
    kinds: Sequence[_ActivationKind]  # activations of the worker

    def link_time(self, end: int) -> float:
        """Return the least total time of O and L in a run that ends by `end`."""
        # It is infinite if no run can end by then.
        window = end - min(k.head for k in self.kinds) - min(k.tail for k in self.kinds)
        if window < sum(k.num_activations * (k.forward + k.input_grad) for k in self.kinds):
            return math.inf
        excess = self.demand - self.limit * window
        if excess <= 0:
            return 0
        offloadable = [k for k in self.kinds if k.saved_area]
        if excess > sum(k.num_activations * k.saved_area for k in offloadable):
            return math.inf
        # Two relaxations. In the first, each offload has the largest saving and the shortest link
        # time of all activations. In the second, parts of activations may be offloaded, the largest
        # saving per link time first.
        num_offloads = -(-excess // max(k.saved_area for k in offloadable))
        whole_bound = num_offloads * min(k.link_time for k in offloadable)
        fractional_bound = 0
        for kind in sorted(offloadable, key=lambda k: k.link_time / k.saved_area):
            area = min(excess, kind.num_activations * kind.saved_area)
            fractional_bound += -(-area * kind.link_time // kind.saved_area)
            excess -= area
        return max(whole_bound, fractional_bound)


def area_bound(problem: Problem) -> int:
    """Return a lower bound on the end of a run, from memory x time and host links [units]."""
    # A worker with N parts of memory has a memory area of N T in T units of time. An activation
    # takes its size from the start of F to the end of I: at least F, the trip, and I. An offloaded
    # activation takes its size from the start of F to the end of O, and from the start of L to the
    # end of I. It also takes the host link for O and L. The earlier the run ends, the more
    # activations must be offloaded, and the less time the link has for them.
    stage_paths = paths(problem)
    memories = {
        w: _worker_memory(problem, stage_paths, w) for w in np.unique(problem.worker).tolist()
    }
    shared_links: Sequence[tuple[int, ...]] = ()
    if problem.objective == "makespan":  # spans of two workers need not overlap
        shared_links = problem.host_links
    grouped_workers = {worker for group in shared_links for worker in group}
    single_workers = [(worker,) for worker in memories if worker not in grouped_workers]
    groups = (*shared_links, *single_workers)
    group_memories = [[memories[w] for w in group if w in memories] for group in groups]
    return max(_least_end(group, problem.exact) for group in group_memories if group)


def _least_end(group: Sequence[_WorkerMemory], exact: bool) -> int:
    """Return the earliest possible end of a run of workers that share a host link [units]."""
    # The link is idle until an F has ended, and after the last start of an I.
    kinds = [kind for memory in group for kind in memory.kinds]
    idle = min(k.head + k.forward for k in kinds) + min(k.input_grad + k.tail for k in kinds)
    low, high = 0, sum(k.head + k.tail for k in kinds) + sum(m.demand + 1 for m in group)
    while low < high:
        end = (low + high) // 2
        if sum(memory.link_time(end) for memory in group) <= max(0, end - idle):
            high = end
        else:
            low = end + 1
    return low if exact else low - 1  # if durations are rounded, a run may end within a unit


def _worker_memory(problem: Problem, stage_paths: Paths, worker: int) -> _WorkerMemory:
    """Return the memory of a worker, with the area that activations and unused memory take."""
    # The window lasts from the first F to the last I. Ops of a worker run one at a time. So while
    # memory fills, each F adds at most one activation, and while it empties, each I frees one.
    # Filling and emptying do not overlap, and some memory is unused in both. While a W runs, its
    # memory is not free for whole activations; a W after the window costs nothing. Both losses add
    # up, because the first loss counts only time without a W.
    kinds = list(_activation_kinds(problem, stage_paths, worker))
    largest, memory_limit = max(k.size for k in kinds), int(problem.limits[worker])
    is_uniform = min(k.size for k in kinds) == largest

    def usable_parts(parts: int) -> int:
        """Return the memory that whole activations can fill, out of `parts`."""
        return parts - parts % largest if is_uniform else parts

    limit = usable_parts(memory_limit)
    num_full = limit // largest  # number of activations that fit
    # unused while memory fills: limit - largest, limit - 2 largest, .. limit - num_full largest
    unused_parts = num_full * limit - largest * num_full * (num_full + 1) // 2
    unused_area = unused_parts * (min(k.forward for k in kinds) + min(k.input_grad for k in kinds))
    # parts that a running W blocks
    blocked_parts = [max(0, limit - usable_parts(memory_limit - k.weight_size)) for k in kinds]
    blocked_area = sum(
        kind.num_activations * kind.weight_grad * parts
        for kind, parts in zip(kinds, blocked_parts, strict=True)
    )
    time_after_window = min(k.tail for k in kinds) - min(k.step_end for k in kinds)
    blocked_area = max(0, blocked_area - max(blocked_parts) * time_after_window)
    activation_area = sum(k.num_activations * k.size * k.turn for k in kinds)
    return _WorkerMemory(limit, activation_area + unused_area + blocked_area, kinds)


def _activation_kinds(
    problem: Problem, stage_paths: Paths, worker: int
) -> Iterator[_ActivationKind]:
    """Yield the activations of each stage on a worker, with their memory and times [units]."""
    is_span = problem.objective == "span"
    for pipe, stage in np.argwhere(problem.placement == worker).tolist():
        count, size = int((problem.microbatch_pipes == pipe).sum()), int(problem.sizes[stage])
        forward, trip = int(problem.forward[stage]), int(stage_paths.trip[pipe, stage])
        input_grad = int(min(problem.input_grad[stage], problem.backward[stage]))
        weight_grad = int(problem.weight_grad[stage])
        after_input = int(problem.gradient[stage]) - input_grad
        link_time = time_on_host = 0
        if problem.offload is not None and problem.load is not None:
            link_time = int(problem.offload[stage] + problem.load[stage])
            time_on_host = max(0, trip - link_time)
        can_be_whole = int(problem.backward[stage]) < input_grad + weight_grad
        if count:
            yield _ActivationKind(
                num_activations=count,
                head=0 if is_span else int(stage_paths.head[pipe, stage]),
                tail=after_input if is_span else int(stage_paths.tail[pipe, stage]),
                step_end=0 if is_span else int(problem.step_end[stage]),
                forward=forward,
                input_grad=input_grad,
                size=size,
                weight_size=int(problem.weight_sizes[stage]),
                weight_grad=0 if can_be_whole else weight_grad,
                turn=forward + trip + input_grad,
                saved_area=size * time_on_host,
                link_time=link_time,
            )
