"""Lower bounds that the checker derives itself: paths through workers and stages, in seconds.

"path" is the run in which messages use no resource: no order of the transfers undercuts it. The
others hold for every order of the ops, and for times that differ by microbatch at the least of
them: the work of one "worker" behind the shortest way to it;
one "stage" alone; a "memory chain", the same with the waits that its limit forces; and "memory
area": what a worker can hold, times seconds, against what its activations take of it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from pipejax.analysis.verify.certificate_file import MESSAGE, OF_BOUNDS, RunContent
from pipejax.analysis.verify.event_run import ActivationSizes, EventRun, Seconds, of_microbatch
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

ROUNDING = 1e-9  # of a time, which is rounding of floats and nothing else
DERIVED = ("path", "worker", "stage", "memory chain", "memory area")  # others are on trust


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


def derived_bounds(content: RunContent) -> dict[str, float]:
    """Derive the best bound of each kind [s]."""
    table, costs = content.table, content.costs
    found = {}
    if content.objective == "makespan":  # a span may be shorter than the way to its first op
        free = EventRun(table, costs, Links(host_links=content.links.host_links))
        found["path"] = max(free.end.values())
    if not table.grammar.is_usual:  # the others add up the usual ops
        return found
    durations = _durations(content) if content.limits is not None else []
    costs = {name: _least(times, 3 if name in MESSAGE else 1) for name, times in costs.items()}
    sizes = ActivationSizes(*(_least(size, 1) for size in content.sizes))
    content = content._replace(costs=costs, sizes=sizes)
    work, span = _work(costs), content.objective == "span"
    pipes = [_pipe(table, costs, work, pipe) for pipe in range(table.num_pipes)]
    stages = [(pipe, s) for pipe in pipes if pipe.microbatches for s in range(table.num_stages)]
    found["worker"] = max(_worker(stages, work, w, span) for w in range(table.num_workers))
    found["stage"] = max(_chain(p, work, s, None, content.sizes, span) for p, s in stages)
    if content.limits is not None and not content.offload:
        found["memory chain"] = max(
            _chain(p, work, s, content.limits[p.homes[s]], content.sizes, span) for p, s in stages
        )
    if content.limits is not None and (not content.offload or {"O", "L"} <= set(costs)):
        area = _area(content, work, pipes)
        found["memory area"] = _at_whole_unit(area, durations)
    return found


def _least(times: Any, axes: int) -> Any:
    """Take of each list of microbatches the least, behind so many axes [s]."""
    if axes:
        return [_least(part, axes - 1) for part in times]
    return min(times) if isinstance(times, list) else times


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
    """All ops of a worker one after the other, behind the shortest way to one of them.

    Or its forwards and input gradients alone, with the shortest way from one of these too.
    """
    own = [(p, s) for p, s in stages if p.homes[s] == worker]
    if not own:
        return 0.0
    busy = sum(p.microbatches * (work.forward[s] + work.gradient[s]) for p, s in own)
    if span:
        return busy
    copies = {s for _, s in own}
    ends = min(work.step_end[s] for s in copies), sum(work.update[s] for s in copies)
    turned = sum(p.microbatches * (work.forward[s] + work.least[s]) for p, s in own)
    turned += min(p.tail[s] for p, s in own)
    return min(p.head[s] for p, s in own) + max(busy + max(ends), turned)


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


class _Held(NamedTuple):
    """Activations of a stage and pipe: how many, and of each its size and seconds.

    Attributes:
      number: microbatches.
      size: of one, in the unit of the limits.
      before: from the start of the run to F.
      turn: F, the way to the last stage and back, and the input gradient.
      away: of `turn`, while it can be on the host.
      behind: from the end of the input gradient to the end of the run.
      forward: F.
      least: the input gradient.
      weight: W alone; nothing where the backward may be whole.
      kept: what W needs of the size.
      step_end: A and U, from the gradient to the end of the run.
      link: O and L.
    """

    number: int
    size: float
    before: float
    turn: float
    away: float
    behind: float
    forward: float
    least: float
    weight: float
    kept: float
    step_end: float
    link: float


def _area(content: RunContent, work: _Work, pipes: Sequence[_Pipe]) -> float:
    """The least end at which memory times seconds, and the host links, suffice for all.

    An activation is held for all of its turn, or goes away for a part of it and uses the link.
    """
    workers = range(content.table.num_workers)
    held = {w: list(_held(content, work, pipes, w)) for w in workers}
    shared: Sequence[Sequence[int]] = ()
    if content.objective == "makespan":  # spans of two workers need not meet
        shared = content.links.host_links
    groups = [*shared, *([w] for w in workers if not any(w in group for group in shared))]
    assert content.limits is not None
    found = 0.0
    for group in groups:
        own = [(held[w], content.limits[w]) for w in group if held[w]]
        found = max(found, _least_end(own)) if own else found
    return found


def _durations(content: RunContent) -> list[float]:
    """List what ops and messages take in any order of them [s]."""
    costs, pipes = content.costs, content.table.placement.tolist()
    microbatches = range(content.table.num_microbatches)
    letters = (*OF_BOUNDS, *("OL" if content.offload else ""))
    times = [time for letter in letters if letter in costs for time in costs[letter]]
    shares = [t for time in times for t in (time if isinstance(time, list) else [time])]
    for way, (pipe, homes) in itertools.product((0, 1), enumerate(pipes)):
        for boundary, (one, other) in enumerate(itertools.pairwise(homes)):
            message = [costs[name][way][pipe][boundary] for name in MESSAGE]
            differ = any(isinstance(time, list) for time in message)
            for m in (microbatches if differ else (0,)) if one != other else ():
                parts = [of_microbatch(time, m) for time in message]
                shares += [sum(parts)] if content.links.models == {"delay"} else parts
    return shares


def _at_whole_unit(bound: float, shares: Sequence[float]) -> float:
    """Round up to a unit of which all durations are multiples, for so are the ends of runs."""
    if not math.isfinite(bound):
        return bound
    scale = 10.0 ** math.ceil(math.log10(max(shares, default=0.0) or 1.0))
    exact = [Fraction(t / scale).limit_denominator(10**8) for t in shares if t]
    given = [t / scale for t in shares if t]
    if not all(math.isclose(e, t, rel_tol=1e-9) for e, t in zip(exact, given, strict=True)):
        return bound
    common = math.lcm(*(e.denominator for e in exact))
    unit = scale * float(Fraction(math.gcd(*(int(e * common) for e in exact)), common))
    if unit <= ROUNDING * bound:  # so fine, or of no duration at all, that it says nothing
        return bound
    return math.ceil(bound / unit * (1 - ROUNDING)) * unit


def _held(content: RunContent, work: _Work, pipes: Sequence[_Pipe], worker: int) -> Iterator[_Held]:
    times, span = content.costs, content.objective == "span"
    for pipe in pipes:
        for s in [s for s, home in enumerate(pipe.homes) if home == worker and pipe.microbatches]:
            link = times["O"][s] + times["L"][s] if content.offload else math.inf
            yield _Held(
                number=pipe.microbatches,
                size=content.sizes.whole[s],
                before=0.0 if span else pipe.head[s],
                turn=work.forward[s] + pipe.trip[s] + work.least[s],
                away=max(0.0, pipe.trip[s] - link),
                behind=work.gradient[s] - work.least[s] if span else pipe.tail[s],
                forward=work.forward[s],
                least=work.least[s],
                weight=times["W"][s] if times["B"][s] >= times["I"][s] + times["W"][s] else 0.0,
                kept=content.sizes.whole[s] * content.sizes.weight_share[s],
                step_end=0.0 if span else work.step_end[s],
                link=link,
            )


def _least_end(workers: Sequence[tuple[list[_Held], float]]) -> float:
    """Halve the interval in which the host link becomes fast enough for its workers."""
    every = [h for held, _ in workers for h in held]
    idle = min(h.before + h.forward for h in every) + min(h.least + h.behind for h in every)
    low, high = 0.0, 1.0
    while _on_link(workers, high) > max(0.0, high - idle):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        end = (low + high) / 2
        low, high = (end, high) if _on_link(workers, end) > max(0.0, end - idle) else (low, end)
    return high


def _on_link(workers: Sequence[tuple[list[_Held], float]], end: float) -> float:
    """Seconds that a link needs at least for a run that ends by then."""
    return sum(_transfers(held, limit, end) for held, limit in workers)


def _transfers(held: list[_Held], limit: float, end: float) -> float:
    """Seconds of the host link that one worker needs at least; infinite if no number suffices."""
    lasts = end - min(h.before for h in held) - min(h.behind for h in held)
    if lasts < sum(h.number * (h.forward + h.least) for h in held):
        return math.inf
    room = _filled(held, limit)
    if room <= 0:  # not one activation fits
        return math.inf
    lacks = sum(h.number * h.size * h.turn for h in held) + _empty(held, limit) - room * lasts
    able = [h for h in held if h.size * h.away > 0]
    if lacks <= 1e-9 * room * lasts:
        return 0.0
    if not able:
        return math.inf
    most = max(h.size * h.away for h in able)
    several = math.ceil(lacks / most - 1e-9) * min(h.link for h in able)
    seconds = 0.0
    for h in sorted(able, key=lambda h: h.link / (h.size * h.away)):
        share = min(lacks, h.number * h.size * h.away)
        seconds += h.link * share / (h.size * h.away)
        lacks -= share
    return math.inf if lacks > 1e-9 * room * lasts else max(several, seconds)


def _filled(held: list[_Held], limit: float) -> float:
    """What whole activations can fill of a limit, where all have one size; else all of it."""
    sizes = [h.size for h in held]
    room = max(0.0, min(limit, sum(h.number * h.size for h in held)))
    alike = min(sizes) == max(sizes) > 0
    return math.floor(room / sizes[0] + 1e-9) * sizes[0] if alike else room


def _empty(held: list[_Held], limit: float) -> float:
    """What of memory times seconds no activation can use.

    One F after the other takes memory, and one input gradient after the other frees it. And beside
    what a W needs there may be room for fewer activations; a W that runs after the last input
    gradient is outside of the account.
    """
    room, largest = _filled(held, limit), max(h.size for h in held)
    step = min(h.forward for h in held) + min(h.least for h in held)
    steps = int(room / largest + 1e-9) if largest else 0
    filling = step * sum(room - k * largest for k in range(1, steps + 1))
    total = sum(h.number * h.size for h in held)
    beside = [max(0.0, room - _filled(held, min(limit, total) - h.kept)) for h in held]
    after = min(h.behind for h in held) - min(h.step_end for h in held)
    lost = sum(h.number * h.weight * b for h, b in zip(held, beside, strict=True))
    return filling + max(0.0, lost - max(beside) * after)
