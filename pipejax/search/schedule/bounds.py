"""Lower bounds on all schedules, from paths and sums."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.search.schedule.problem import PerStage, Problem

PerPipe = Int[NumpyArray, "pipes stages"]


class Paths(NamedTuple):
    """Least times before, between and after the ops of one microbatch [units]."""

    head: PerPipe  # from the start of the run to the start of F
    trip: PerPipe  # from the end of F to the start of I
    tail: PerPipe  # from the end of I to the end of the run


def paths(problem: Problem) -> Paths:
    """Return the least times before, between and after F and I of each stage, per pipe [units]."""
    pipes, stages = problem.placement.shape
    hop = problem.lag + problem.transmit
    input_grad = np.minimum(problem.input_grad, problem.backward)
    is_split = problem.backward >= problem.input_grad + problem.weight_grad
    rest = np.where(is_split, problem.weight_grad, 0) + problem.step_end
    head, trip, tail = (np.zeros((pipes, stages), np.int64) for _ in range(3))
    tail[:] = rest
    for stage in range(1, stages):
        head[:, stage] = head[:, stage - 1] + problem.forward[stage - 1] + hop[0, :, stage - 1]
        tail_below = hop[1, :, stage - 1] + input_grad[stage - 1] + tail[:, stage - 1]
        tail[:, stage] = np.maximum(tail[:, stage], tail_below)
    for stage in range(stages - 2, -1, -1):
        there_and_back = hop[0, :, stage] + hop[1, :, stage]
        work = problem.forward[stage + 1] + input_grad[stage + 1]
        trip[:, stage] = trip[:, stage + 1] + there_and_back + work
    return Paths(head, trip, tail)


class LowerBound(NamedTuple):
    """Lower bound on the objective of all schedules, with the reason."""

    value: int  # the bound [units]
    by: str  # what it rests on, in the words of `CheckedBound`


def lower_bound(problem: Problem) -> LowerBound:
    """Return the best of the bounds by work and by memory, for the problem's objective."""
    way = paths(problem)
    counts = np.bincount(problem.microbatch_pipes, minlength=len(problem.placement))
    work = problem.forward + problem.gradient
    turn = problem.forward + np.minimum(problem.input_grad, problem.backward)
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
        before = int(way.head[held].min())
        # after all F and I, the path from the last I to the end remains
        turned = int((held * counts[:, None] * turn).sum() + way.tail[held].min())
        best = max(best, LowerBound(before + max(busy + updates, turned), "worker"))
    by = "memory chain" if problem.offload is None else "stage"
    for pipe, stage in np.ndindex(problem.placement.shape):
        if counts[pipe]:
            chain = _chain(problem, way, pipe, stage, int(counts[pipe]))
            best = max(best, LowerBound(chain, by))
    area = LowerBound(area_bound(problem), "memory area")
    return area if area.value > best.value else best


def stage_bounds(problem: Problem) -> PerStage:
    """Bound the objective by each stage's own work and memory: (stages) [units]."""
    way, count = paths(problem), problem.num_microbatches
    return np.array([_chain(problem, way, 0, s, count) for s in range(problem.num_stages)])


def memory_order(problem: Problem, stage: int, worker: int, count: int) -> list[tuple[int, int]]:
    """Return how many (input, weight) gradients must be done before F of each microbatch."""
    # With i input and w weight gradients done, w <= i, the stage still holds at least what its
    # other microbatches take. F of microbatch k finds room where
    # (k + 1) size - i (size - weight_size) - w weight_size <= limit.
    # So at least i0(k) = ceil(((k + 1) size - limit) / size) input gradients must be there (w = i),
    # and with exactly that many, w0(k) weight gradients.
    size, weight_size = int(problem.sizes[stage]), int(problem.weight_sizes[stage])
    if not size:
        return [(0, 0)] * count
    order = []
    for k in range(count):
        over = (k + 1) * size - int(problem.limits[worker])
        inputs = max(0, -(-over // size))
        rest = over - inputs * (size - weight_size)
        order.append((inputs, max(0, -(-rest // weight_size)) if weight_size and inputs else 0))
    return order


def _chain(problem: Problem, stage_paths: Paths, pipe: int, stage: int, count: int) -> int:
    """Return the longest path through the ops of a stage, with waits forced by its memory."""
    # Microbatches of a pipe are alike, so some best schedule runs each kind of op in their order.
    # Then F and I of the stage are two chains: each F follows the one before it, each I follows its
    # own F by the trip to the last stage and back, and the I before it. Memory links them back: if
    # F of microbatch k finds room only after i gradients, it waits for the i-th one.
    forward = int(problem.forward[stage])
    input_grad = int(min(problem.input_grad[stage], problem.backward[stage]))
    weight_rest = min(input_grad, int(problem.gradient[stage]) - input_grad)
    trip = int(stage_paths.trip[pipe, stage])
    gradients_needed = [(0, 0)] * count
    if problem.offload is None:
        gradients_needed = memory_order(problem, stage, int(problem.placement[pipe, stage]), count)
    start = int(stage_paths.head[pipe, stage]) if problem.objective == "makespan" else 0
    forward_end, input_end = start, [0] * count
    for k, (inputs, weights) in enumerate(gradients_needed):
        if inputs:
            # as many weight gradients as input gradients: the last of them ran behind its own I
            wait = input_end[inputs - 1] + (weight_rest if weights >= inputs else 0)
            forward_end = max(forward_end, wait)
        forward_end += forward
        input_end[k] = max(forward_end + trip, input_end[k - 1] if k else 0) + input_grad
    if problem.objective == "span":
        return input_end[-1] + int(problem.gradient[stage]) - input_grad
    return input_end[-1] + int(stage_paths.tail[pipe, stage])


class _Kind(NamedTuple):
    """Activations of one stage and pipe on a worker."""

    number: int  # how many
    first: int  # units of the run before F
    last: int  # units of the run after I
    step_end: int  # those after the gradient
    forward: int  # units of F
    input_grad: int  # units of I
    size: int  # parts of one
    weight_size: int  # those that W needs
    weight_grad: int  # units of W; 0 where a whole backward may take its place
    turn: int  # least time from the start of F to the end of I [units]
    saves: int  # memory area that an offloaded one does not take, of size x turn
    link: int  # O and L [units]


class _Memory(NamedTuple):
    """Memory of a worker: its limit, and the least demand on it."""

    limit: int  # parts that whole activations can fill
    # memory area of all activations if none is offloaded, and of unused memory [parts x units]
    demand: int
    kinds: Sequence[_Kind]  # its activations

    def link_time(self, end: int) -> float:
        """Return the least time of the host link in a run of this length, infinite if too short."""
        window = end - min(k.first for k in self.kinds) - min(k.last for k in self.kinds)
        if window < sum(k.number * (k.forward + k.input_grad) for k in self.kinds):
            return math.inf
        excess = self.demand - self.limit * window
        offloadable = sorted((k for k in self.kinds if k.saves), key=lambda k: k.link / k.saves)
        if excess <= 0:
            return 0
        if excess > sum(k.number * k.saves for k in offloadable):
            return math.inf
        # Two relaxations: whole activations, each with the largest saving and the shortest link
        # time of any; and parts of activations, those that save most for their link time first.
        whole_bound = -(-excess // max(k.saves for k in offloadable)) * min(
            k.link for k in offloadable
        )
        fractional_bound = 0
        for kind in offloadable:
            amount = min(excess, kind.number * kind.saves)
            fractional_bound += -(-amount * kind.link // kind.saves)
            excess -= amount
        return max(whole_bound, fractional_bound)


def area_bound(problem: Problem) -> int:
    """Return the least end [units] that memory area and host links allow together."""
    # In T units a worker with room for N parts has a memory area of N T. An activation takes its
    # size from the start of F to the end of I, at least F, the way to the last stage and back, and
    # I. One that is offloaded takes it from the start of F to the end of O and from the start of L
    # to the end of I, and O and L of the host link. The earlier the end, the more have to be
    # offloaded, and the less time there is to carry them.
    stage_paths = paths(problem)
    memories = {w: _memory(problem, stage_paths, w) for w in np.unique(problem.worker).tolist()}
    shared_links: Sequence[tuple[int, ...]] = ()
    if problem.objective == "makespan":  # spans of two workers need not overlap
        shared_links = problem.host_links
    single_workers = [
        (worker,) for worker in memories if not any(worker in group for group in shared_links)
    ]
    groups = [
        [memories[w] for w in group if w in memories] for group in (*shared_links, *single_workers)
    ]
    return max(_least_end(group, problem.exact) for group in groups if group)


def _least_end(group: Sequence[_Memory], exact: bool) -> int:
    """Find the least end that the workers of a host link allow."""
    # The link is idle until an F has ended, and from the last start of an I on.
    kinds = [kind for memory in group for kind in memory.kinds]
    idle = min(k.first + k.forward for k in kinds) + min(k.input_grad + k.last for k in kinds)
    low, high = 0, sum(k.first + k.last for k in kinds) + sum(m.demand + 1 for m in group)
    while low < high:
        end = (low + high) // 2
        if sum(memory.link_time(end) for memory in group) <= max(0, end - idle):
            high = end
        else:
            low = end + 1
    return low if exact else low - 1  # runs end at whole units, if their durations are whole


def _memory(problem: Problem, way: Paths, worker: int) -> _Memory:
    """Account for the memory of a worker, while activations are whole."""
    # Ops of a worker run one at a time. So memory fills by at most one activation per F, and is
    # emptied by one per I before the last one ends. The two do not overlap: all F and I are in the
    # window, and the limit is never above all activations. While a W runs, its memory is not free
    # for whole activations; a W after the window costs nothing. Both losses add up, since the first
    # counts only time without a W.
    kinds = list(_kinds(problem, way, worker))
    largest, room = max(k.size for k in kinds), int(problem.limits[worker])
    is_uniform = min(k.size for k in kinds) == largest

    def usable(parts: int) -> int:
        """Return the memory that whole activations can fill, out of `parts`."""
        return parts - parts % largest if is_uniform else parts

    limit = usable(room)
    max_activations = limit // largest
    unused = max_activations * limit - largest * max_activations * (max_activations + 1) // 2
    unused *= min(k.forward for k in kinds) + min(k.input_grad for k in kinds)
    unusable = [max(0, limit - usable(room - k.weight_size)) for k in kinds]
    after_window = min(k.last for k in kinds) - min(k.step_end for k in kinds)
    lost = sum(k.number * k.weight_grad * b for k, b in zip(kinds, unusable, strict=True))
    demand = sum(k.number * k.size * k.turn for k in kinds)
    return _Memory(limit, demand + unused + max(0, lost - max(unusable) * after_window), kinds)


def _kinds(problem: Problem, way: Paths, worker: int) -> Iterator[_Kind]:
    """Yield the activations of each stage on a worker, with their memory and times [units]."""
    span = problem.objective == "span"
    for pipe, stage in np.argwhere(problem.placement == worker).tolist():
        count, size = int((problem.microbatch_pipes == pipe).sum()), int(problem.sizes[stage])
        forward, trip = int(problem.forward[stage]), int(way.trip[pipe, stage])
        least = int(min(problem.input_grad[stage], problem.backward[stage]))
        rest, weight = int(problem.gradient[stage]) - least, int(problem.weight_grad[stage])
        link = away = 0
        if problem.offload is not None and problem.load is not None:
            link = int(problem.offload[stage] + problem.load[stage])
            away = max(0, trip - link)
        if count:
            yield _Kind(
                number=count,
                first=0 if span else int(way.head[pipe, stage]),
                last=rest if span else int(way.tail[pipe, stage]),
                step_end=0 if span else int(problem.step_end[stage]),
                forward=forward,
                input_grad=least,
                size=size,
                weight_size=int(problem.weight_sizes[stage]),
                weight_grad=weight if int(problem.backward[stage]) >= least + weight else 0,
                turn=forward + trip + least,
                saves=size * away,
                link=link,
            )
