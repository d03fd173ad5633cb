"""Lower bounds that the checker derives itself: paths through workers and stages, in seconds.

"path" is the run in which messages use no resource: no order of the transfers undercuts it. The
others hold for every order of the ops: the work of one "worker" behind the shortest way to it;
one "stage" alone; a "memory chain", the same with the waits that its limit forces.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from pipejax.analysis.verify.certificate_file import CertificateContent
from pipejax.analysis.verify.event_run import EventRun, Seconds
from pipejax.analysis.verify.memory import ActivationSizes
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable


class _Pipe(NamedTuple):
    """Ways of a microbatch of one pipe, by stage: to its F, from F to its backward, and behind."""

    homes: Sequence[int]
    microbatches: int
    head: list[float]
    trip: list[float]
    tail: list[float]


class _Work(NamedTuple):
    """Least times by stage: F, the input gradient, the whole gradient, A and U, U."""

    forward: Sequence[float]
    least: list[float]
    gradient: list[float]
    step_end: list[float]
    update: Sequence[float]


def derived_bounds(content: CertificateContent) -> dict[str, float]:
    """Derive the best bound of each kind [s]."""
    table, costs = content.table, content.costs
    free = EventRun(table, costs, Links(host_links=content.links.host_links))
    found = {"path": max(free.end.values())}
    work, span = _work(costs), content.objective == "span"
    pipes = [_pipe(table, costs, work, pipe) for pipe in range(table.num_pipes)]
    stages = [(pipe, s) for pipe in pipes if pipe.microbatches for s in range(table.num_stages)]
    found["worker"] = max(_worker(stages, work, w, span) for w in range(table.num_workers))
    found["stage"] = max(_chain(p, work, s, None, content.sizes, span) for p, s in stages)
    if content.limits is not None and not content.offload:
        found["memory chain"] = max(
            _chain(p, work, s, content.limits[p.homes[s]], content.sizes, span) for p, s in stages
        )
    return found


def _work(costs: Seconds) -> _Work:
    forward, whole = costs["F"], costs["B"]
    split = zip(costs["I"], costs["W"], strict=True)
    gradient = [min(b, i + w) for b, (i, w) in zip(whole, split, strict=True)]
    least = [min(b, i) for b, i in zip(whole, costs["I"], strict=True)]
    step_end = [a + u for a, u in zip(costs["A"], costs["U"], strict=True)]
    return _Work(forward, least, gradient, step_end, costs["U"])


def _pipe(table: ScheduleTable, costs: Seconds, work: _Work, pipe: int) -> _Pipe:
    """Add up ops and messages before, between and after the ops of a microbatch."""
    homes = table.placement[pipe].tolist()
    stages = len(homes)

    def hop(direction: int, boundary: int) -> float:
        if homes[boundary] == homes[boundary + 1]:
            return 0.0
        return sum(costs[name][direction][pipe][boundary] for name in ("latency", "transmit"))

    rest = [g - i + end for g, i, end in zip(work.gradient, work.least, work.step_end, strict=True)]
    head, trip, tail = [0.0] * stages, [0.0] * stages, [*rest]
    for s in range(1, stages):
        head[s] = head[s - 1] + work.forward[s - 1] + hop(0, s - 1)
        tail[s] = max(rest[s], hop(1, s - 1) + work.least[s - 1] + tail[s - 1])
    for s in reversed(range(stages - 1)):
        turn = work.forward[s + 1] + trip[s + 1] + work.least[s + 1]
        trip[s] = hop(0, s) + turn + hop(1, s)
    count = table.pipe_of_microbatch.tolist().count(pipe)
    return _Pipe(homes, count, head, trip, tail)


def _worker(stages: Sequence[tuple[_Pipe, int]], work: _Work, worker: int, span: bool) -> float:
    """All ops of a worker one after the other, behind the shortest way to one of them."""
    own = [(p, s) for p, s in stages if p.homes[s] == worker]
    if not own:
        return 0.0
    busy = sum(p.microbatches * (work.forward[s] + work.gradient[s]) for p, s in own)
    if span:
        return busy
    copies = {s for _, s in own}
    ends = min(work.step_end[s] for s in copies), sum(work.update[s] for s in copies)
    return min(p.head[s] for p, s in own) + busy + max(ends)


def _chain(
    pipe: _Pipe, work: _Work, stage: int, limit: float | None, sizes: ActivationSizes, span: bool
) -> float:
    """The longest path through one stage, whose microbatches are alike and keep their order.

    Each F follows the one before it, each input gradient the one before it and, by the trip to the
    last stage and back, its own F. Where the limit leaves no room, F waits for gradients.
    """
    least, rest = work.least[stage], work.gradient[stage] - work.least[stage]
    forward_end, ends = 0.0 if span else pipe.head[stage], [0.0]
    for k in range(pipe.microbatches):
        inputs, needs_weight = _gradients_before(k, stage, limit, sizes)
        if inputs:  # the weight gradient of the last one too, or one more input gradient
            wait = ends[min(inputs, k)] + (min(least, rest) if needs_weight else 0.0)
            forward_end = max(forward_end, wait)
        forward_end += work.forward[stage]
        ends.append(max(forward_end + pipe.trip[stage], ends[-1]) + least)
    return ends[-1] + (rest if span else pipe.tail[stage])


def _gradients_before(
    k: int, stage: int, limit: float | None, sizes: ActivationSizes
) -> tuple[int, bool]:
    """Count the input gradients that F of microbatch k waits for: k + 1 activations are too many.

    Returns how many, and whether room takes the weight gradients of all of them as well.
    """
    size, share = sizes.whole[stage], sizes.weight_share[stage]
    if limit is None or not size:
        return 0, False
    over = k + 1 - limit / size  # in activations
    inputs = math.ceil(max(0.0, over - 1e-9))
    beyond = over - inputs * (1 - share)  # what so many input gradients alone do not free
    return inputs, inputs > 0 and share > 0 and beyond > (inputs - 1 + 1e-9) * share
