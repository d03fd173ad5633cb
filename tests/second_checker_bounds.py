"""Of the second checker: lower bounds, as docs/certificates.md has them."""

import math
from fractions import Fraction
from typing import NamedTuple

from second_checker_run import NO_LINKS, Run, depth, of

DERIVED = ("path", "worker", "stage", "memory chain", "memory area")
ROUNDING = 1e-9


class Stage(NamedTuple):
    """A stage of a pipe with microbatches: least times, sizes, and ways to it and from it."""

    worker: int
    stage: int
    n: int
    forward: float
    update: float
    whole: float  # g
    grad: float  # i
    end: float  # e
    head: float
    trip: float
    tail: float
    weight: float  # W, where B is no faster than I and W
    link: float  # O and L
    size: float
    share: float


def least(value, axes):
    if axes:
        return [least(entry, axes - 1) for entry in value]
    return min(value) if isinstance(value, list) else value


def derive(table, links, seconds, memory, claim):
    """The largest bound of each kind."""
    span, limits, offload = claim["objective"] == "span", claim["limits"], claim["offload"]
    found = {}
    if not span:
        free = Run(table, NO_LINKS | {"host_links": links["host_links"]}, seconds)
        found["path"] = max(free.end.values())
    if not table.own.is_usual:
        return found
    stages = [s for pipe in range(len(table.placement)) for s in ways(table, seconds, memory, pipe)]
    workers = range(len(table.rows))
    own = {w: [s for s in stages if s.worker == w] for w in workers}
    found["worker"] = max(work(own[w], span) for w in workers)
    found["stage"] = max(chain(s, None, span) for s in stages)
    if limits is not None and not offload:
        found["memory chain"] = max(chain(s, limits[s.worker], span) for s in stages)
    if limits is not None and (not offload or {"O", "L"} <= set(seconds)):
        shared = [] if span else links["host_links"]
        alone = [[w] for w in workers if not any(w in group for group in shared)]
        groups = [[(own[w], limits[w]) for w in g if own[w]] for g in [*shared, *alone]]
        ends = [least_end(group, span, offload) for group in groups if group]
        unit = common_unit(durations(table, links, seconds, offload))
        found["memory area"] = whole_units(max(ends, default=0.0), unit)
    return found


def ways(table, seconds, memory, pipe):
    """Stages of a pipe."""
    n, home = table.pipe_of.count(pipe), table.placement[pipe]
    if not n:
        return []
    axes = {"latency": 3, "transmit": 3}
    t = {key: least(value, axes.get(key, 1)) for key, value in seconds.items()}
    size = {key: least(memory[key], 1) for key in ("sizes", "weight_share")}
    stages = range(table.stages)

    def hop(way, boundary):
        if home[boundary] == home[boundary + 1]:
            return 0.0
        return sum(t[key][way][pipe][boundary] for key in ("latency", "transmit"))

    whole = [min(t["B"][s], t["I"][s] + t["W"][s]) for s in stages]
    grad = [min(t["B"][s], t["I"][s]) for s in stages]
    end = [t["A"][s] + t["U"][s] for s in stages]
    rest = [whole[s] - grad[s] + end[s] for s in stages]
    head, tail, trip = [0.0], [rest[0]], [0.0] * table.stages
    for s in stages[1:]:
        head.append(head[-1] + t["F"][s - 1] + hop(0, s - 1))
        tail.append(max(rest[s], hop(1, s - 1) + grad[s - 1] + tail[-1]))
    for s in reversed(stages[:-1]):
        trip[s] = hop(0, s) + t["F"][s + 1] + trip[s + 1] + grad[s + 1] + hop(1, s)
    link = [t["O"][s] + t["L"][s] if {"O", "L"} <= set(t) else math.inf for s in stages]
    return [
        Stage(
            *(home[s], s, n, t["F"][s], t["U"][s], whole[s], grad[s], end[s]),
            *(head[s], trip[s], tail[s]),
            t["W"][s] if t["B"][s] >= t["I"][s] + t["W"][s] else 0.0,
            *(link[s], size["sizes"][s], size["weight_share"][s]),
        )
        for s in stages
    ]


def work(stages, span):
    """All ops of a worker."""
    busy = sum(s.n * (s.forward + s.whole) for s in stages)
    if span or not stages:
        return busy
    updates = sum({s.stage: s.update for s in stages}.values())
    turned = sum(s.n * (s.forward + s.grad) for s in stages) + min(s.tail for s in stages)
    behind = max(min(s.end for s in stages), updates)
    return min(s.head for s in stages) + max(busy + behind, turned)


def chain(s, limit, span):
    """One stage in a row."""
    f, ends, rest = 0.0 if span else s.head, [0.0], s.whole - s.grad
    for k in range(s.n):
        if limit is not None and s.size:
            over = k + 1 - limit / s.size
            q = math.ceil(max(0.0, over - ROUNDING))
            lacks = over - q * (1 - s.share) > (q - 1 + ROUNDING) * s.share
            if q:
                waits = min(s.grad, rest) if s.share > 0 and lacks else 0.0
                f = max(f, ends[min(q, k)] + waits)
        f += s.forward
        ends.append(max(f + s.trip, ends[-1]) + s.grad)
    return ends[-1] + (rest if span else s.tail)


# --------------------------------------------------------------------------------- memory area
def least_end(group, span, offload):
    """The least end by which the link of a group can carry enough."""
    every = [s for stages, _ in group for s in stages]
    idle = min(before(s, span) + s.forward for s in every)
    idle += min(s.grad + behind(s, span) for s in every)

    def suffices(end):
        seconds = sum(on_link(stages, limit, end, span, offload) for stages, limit in group)
        return seconds <= max(0.0, end - idle)

    low, high = 0.0, 1.0
    while not suffices(high):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def before(s, span):
    return 0.0 if span else s.head


def behind(s, span):
    return s.whole - s.grad if span else s.tail


def filled(stages, limit):
    room, sizes = max(0.0, min(limit, sum(s.n * s.size for s in stages))), {s.size for s in stages}
    (one, *more) = sizes
    return room if more or not one else math.floor(room / one + ROUNDING) * one


def on_link(stages, limit, end, span, offload):
    """Seconds of the link that a worker needs."""
    lasts = end - min(before(s, span) for s in stages) - min(behind(s, span) for s in stages)
    room = filled(stages, limit)
    if lasts < sum(s.n * (s.forward + s.grad) for s in stages) or room <= 0:
        return math.inf
    link = {s: s.link if offload else math.inf for s in stages}
    away = {s: max(0.0, s.trip - link[s]) for s in stages}
    held = sum(s.n * s.size * (s.forward + s.trip + s.grad) for s in stages)
    lack = held + lost(stages, limit, room, span) - room * lasts
    if lack <= ROUNDING * room * lasts:
        return 0.0
    able = sorted(
        (s for s in stages if s.size * away[s] > 0), key=lambda s: link[s] / (s.size * away[s])
    )
    if not able:
        return math.inf
    most = max(s.size * away[s] for s in able)
    several = math.ceil(lack / most - ROUNDING) * min(link[s] for s in able)
    seconds = 0.0
    for s in able:
        part = min(lack, s.n * s.size * away[s])
        seconds += link[s] * part / (s.size * away[s])
        lack -= part
    return math.inf if lack > ROUNDING * room * lasts else max(several, seconds)


def lost(stages, limit, room, span):
    largest, every = max(s.size for s in stages), sum(s.n * s.size for s in stages)
    steps = int(room / largest + ROUNDING)
    step = min(s.forward for s in stages) + min(s.grad for s in stages)
    filling = step * sum(room - k * largest for k in range(1, steps + 1))
    beside = {
        s: max(0.0, room - filled(stages, min(limit, every) - s.size * s.share)) for s in stages
    }
    after = min(behind(s, span) for s in stages) - min(0.0 if span else s.end for s in stages)
    kept_out = sum(s.n * s.weight * beside[s] for s in stages)
    return filling + max(0.0, kept_out - max(beside.values()) * after)


def durations(table, links, seconds, offload):
    found = []
    for letter in "FBIWAU" + "OL" * offload:
        for time in seconds.get(letter, []):
            found += time if isinstance(time, list) else [time]
    only_delay = {links["model"], *links["pairs"].values()} == {"delay"}
    for way in (0, 1):
        for pipe, home in enumerate(table.placement):
            for k in range(table.stages - 1):
                parts = [seconds[key][way][pipe][k] for key in ("latency", "transmit")]
                count = len(table.pipe_of) if any(map(depth, parts)) else 1
                for m in range(count if home[k] != home[k + 1] else 0):
                    each = [of(part, m) for part in parts]
                    found += [sum(each)] if only_delay else each
    return [time for time in found if time]


def common_unit(times):
    """The unit of which all durations are whole multiples; None without one."""
    if not times:
        return None
    scale = 10.0 ** math.ceil(math.log10(max(times)))
    exact = [Fraction(t / scale).limit_denominator(10**8) for t in times]
    near = [math.isclose(e, t / scale, rel_tol=1e-9) for e, t in zip(exact, times, strict=True)]
    if not all(near):
        return None
    below = math.lcm(*(e.denominator for e in exact))
    return scale * float(Fraction(math.gcd(*(int(e * below) for e in exact)), below))


def whole_units(bound, unit):
    if unit is None or not math.isfinite(bound) or unit <= ROUNDING * bound:
        return bound
    return math.ceil(bound / unit * (1 - ROUNDING)) * unit
