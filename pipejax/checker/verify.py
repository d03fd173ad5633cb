"""Check of a certificate: `check` derives all claims again and compares them with the claims."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from pipejax.checker.claims import (
    QUANTITIES,
    Discrepancy,
    derive,
    derive_optimum,
    differences,
    tolerances,
)
from pipejax.checker.form import check_form, form_text, read_form
from pipejax.checker.prices import MESSAGE, NO_LINKS, Prices, read_links, read_memory, read_seconds
from pipejax.checker.run import DeadlockError, Run
from pipejax.checker.table import Table
from pipejax.checker.values import (
    IllegalError,
    MalformedError,
    at_microbatch,
    check_keys,
    check_numbers,
    check_word,
    depth,
    is_time,
    require,
)

# Lower bounds of a makespan or span. All bounds but "path" hold for every order of the ops. Times
# are the minima over microbatches.

DERIVED = ("path", "worker", "stage", "memory chain", "memory area")
ROUNDING = 1e-9


class PipeStage(NamedTuple):
    """A stage of a pipe; times [s] and sizes are the minima over the pipe's microbatches."""

    worker: int
    stage: int
    microbatches: int
    forward: float
    update: float
    gradient: float  # B, or I and W
    input_gradient: float  # B or I
    step_end: float  # A and U, after the last gradient
    head: float  # from the start of the run to the first F
    trip: float  # from the end of F to the start of the input gradient
    tail: float  # from the input gradient to the end of the run
    weight: float  # W; 0 if a whole B is faster than I and W
    link: float  # O plus L
    size: float
    share: float  # share of the size that W needs


Group = list[tuple[list[PipeStage], float]]  # stages and limits of workers that share a host link


def derive_bounds(
    table: Table, links: Prices, seconds: Prices, memory: Prices, claims: Mapping[str, Any]
) -> dict[str, float]:
    """Return {kind of bound: lower bound [s]} for the kinds in `DERIVED` that apply."""
    # path: a run whose messages wait for no link. worker, stage: all ops of a worker or a stage.
    # memory chain: forwards also wait for memory. memory area: the memory x time of activations.
    is_span, limits = claims["objective"] == "span", claims["limits"]
    may_offload = claims["offload"]
    bounds = {}
    if not is_span:  # a span excludes the time before its first op
        links_without_queues = NO_LINKS | {"pairs": {}, "has_rendezvous": False}
        links_without_queues |= {"host_links": links["host_links"]}
        bounds["path"] = max(Run(table, links_without_queues, seconds).end.values())
    if not table.rules.is_usual:
        return bounds
    pipes = range(len(table.placement))
    stages = [s for pipe in pipes for s in pipe_stages(table, seconds, memory, pipe, is_span)]
    workers = range(len(table.rows))
    worker_stages = {worker: [s for s in stages if s.worker == worker] for worker in workers}
    bounds["worker"] = max(map(worker_end, worker_stages.values()))
    bounds["stage"] = max(stage_path(stage, None) for stage in stages)
    if limits is not None and not may_offload:
        bounds["memory chain"] = max(stage_path(s, limits[s.worker]) for s in stages)
    if limits is not None and (not may_offload or {"O", "L"} <= set(seconds)):
        shared = [] if is_span else links["host_links"]  # spans of workers need not overlap
        single = [[worker] for worker in workers if not any(worker in group for group in shared)]
        groups: list[Group] = [
            [(worker_stages[worker], limits[worker]) for worker in group if worker_stages[worker]]
            for group in [*shared, *single]
        ]
        ends = [least_end(group, may_offload) for group in groups if group]
        unit = common_unit(list_durations(table, links, seconds, may_offload))
        bounds["memory area"] = round_up(max(ends, default=0.0), unit)
    return bounds


def _minima(values: Any, axes: int) -> Any:
    """Return minima over microbatches, if these are an axis after the first `axes` axes."""
    if axes:
        return [_minima(entry, axes - 1) for entry in values]
    return min(values) if isinstance(values, list) else values


def pipe_stages(
    table: Table, seconds: Prices, memory: Prices, pipe: int, is_span: bool
) -> list[PipeStage]:
    """List the stages of a pipe with their times; the list is empty without microbatches."""
    # With `is_span`, a run begins with the first op of a worker and ends with its last gradient.
    count, workers = table.pipes.count(pipe), table.placement[pipe]
    if not count:
        return []
    times = {key: _minima(value, 3 if key in MESSAGE else 1) for key, value in seconds.items()}
    sizes = {key: _minima(memory[key], 1) for key in ("sizes", "weight_share")}
    f, b, i, w, a, u = (times[letters] for letters in "FBIWAU")  # times by stage [s]
    stages = range(table.num_stages)

    def message_time(direction: int, boundary: int) -> float:
        """Return the time of a message over a stage boundary [s]; 0 within a worker."""
        if workers[boundary] == workers[boundary + 1]:
            return 0.0
        return float(sum(times[key][direction][pipe][boundary] for key in MESSAGE))

    gradient = [min(b[s], i[s] + w[s]) for s in stages]
    input_gradient = [min(b[s], i[s]) for s in stages]
    step_end = [a[s] + u[s] for s in stages]
    # from the end of an input gradient to the end of the step on the same stage
    stage_tail = [gradient[s] - input_gradient[s] + step_end[s] for s in stages]
    # head: from the start of the run to the first forward of a stage; trip: from the end of a
    # forward to the start of its backward; tail: from the last input gradient to the end of the
    # step
    head, tail, trip = [0.0], [stage_tail[0]], [0.0] * table.num_stages
    for s in stages[1:]:
        head.append(head[-1] + f[s - 1] + message_time(0, s - 1))
        way_back = message_time(1, s - 1) + input_gradient[s - 1]
        tail.append(max(stage_tail[s], way_back + tail[-1]))
    for s in reversed(stages[:-1]):
        next_ops = message_time(0, s) + f[s + 1] + trip[s + 1] + input_gradient[s + 1]
        trip[s] = next_ops + message_time(1, s)
    if is_span:
        head = u = step_end = [0.0] * table.num_stages
        tail = [gradient[s] - input_gradient[s] for s in stages]
    has_link = {"O", "L"} <= set(times)
    return [
        PipeStage(
            worker=workers[s],
            stage=s,
            microbatches=count,
            forward=f[s],
            update=u[s],
            gradient=gradient[s],
            input_gradient=input_gradient[s],
            step_end=step_end[s],
            head=head[s],
            trip=trip[s],
            tail=tail[s],
            weight=w[s] if b[s] >= i[s] + w[s] else 0.0,
            link=times["O"][s] + times["L"][s] if has_link else math.inf,
            size=sizes["sizes"][s],
            share=sizes["weight_share"][s],
        )
        for s in stages
    ]


def worker_end(stages: list[PipeStage]) -> float:
    """Return a lower bound on a worker's end [s]: time to its first op, its ops, the step end."""
    if not stages:
        return 0.0
    busy = sum(s.microbatches * (s.forward + s.gradient) for s in stages)
    updates = sum({s.stage: s.update for s in stages}.values())
    # after the last op come A and U of its stage, and all updates of the worker
    after_all = max(min(s.step_end for s in stages), updates)
    # after the last input gradient comes at least the shortest tail
    until_inputs = sum(s.microbatches * (s.forward + s.input_gradient) for s in stages)
    shortest_tail = min(s.tail for s in stages)
    return min(s.head for s in stages) + max(busy + after_all, until_inputs + shortest_tail)


def stage_path(s: PipeStage, limit: float | None) -> float:
    """Return the length of the longest path through all ops of one stage [s]."""
    # Each F waits for the previous F. Each input gradient waits for its F and for the previous
    # input gradient. If an activation would exceed the limit, its F also waits for earlier
    # gradients.
    forward, ends = s.head, [0.0]  # end of the last F, and ends of input gradients
    weight_gradient = s.gradient - s.input_gradient
    for k in range(s.microbatches):
        if limit is not None and s.size:
            # example: limit of 2.5 activations, third F (k = 2): 0.5 too many, wait for 1 gradient
            excess = k + 1 - limit / s.size  # activations to be freed first
            num_gradients = math.ceil(max(0.0, excess - ROUNDING))
            # an input gradient does not free the share of W: is a weight gradient needed too?
            left_over = excess - num_gradients * (1 - s.share)
            needs_weight = left_over > (num_gradients - 1 + ROUNDING) * s.share
            if num_gradients:
                delay = 0.0
                if s.share > 0 and needs_weight:
                    delay = min(s.input_gradient, weight_gradient)
                forward = max(forward, ends[min(num_gradients, k)] + delay)
        forward += s.forward
        ends.append(max(forward + s.trip, ends[-1]) + s.input_gradient)
    return ends[-1] + s.tail


def least_end(group: Group, may_offload: bool) -> float:
    """Return the earliest end of a run [s] by which a host link can carry all needed offloads."""
    stages = [s for worker_stages, _ in group for s in worker_stages]
    # no offload begins before the first F ends, and no load ends after the last I begins
    unused = min(s.head + s.forward for s in stages)
    unused += min(s.input_gradient + s.tail for s in stages)

    def is_enough(end: float) -> bool:
        """Return whether the host link can carry the needed offloads and loads before `end`."""
        needed = sum(link_time(*worker, end, may_offload) for worker in group)
        return needed <= max(0.0, end - unused)

    low, high = 0.0, 1.0  # double `high` until it is enough, then bisect
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _usable(stages: list[PipeStage], limit: float) -> float:
    """Return the memory that activations can fill: whole activations if all sizes are equal."""
    room = max(0.0, min(limit, sum(s.microbatches * s.size for s in stages)))
    sizes = {s.size for s in stages}
    size = min(sizes)
    if len(sizes) > 1 or not size:
        return room
    return math.floor(room / size + ROUNDING) * size


def link_time(stages: list[PipeStage], limit: float, end: float, may_offload: bool) -> float:
    """Return the least time [s] of offloads and loads on a worker in a run that ends at `end`."""
    # An activation needs an area, memory x time. The worker has the area `room` x `length`, from
    # the earliest start of its ops to their latest end. Offloads must save the missing area.
    length = end - min(s.head for s in stages) - min(s.tail for s in stages)
    room = _usable(stages, limit)
    if length < sum(s.microbatches * (s.forward + s.input_gradient) for s in stages) or room <= 0:
        return math.inf
    needed = sum(s.microbatches * s.size * (s.forward + s.trip + s.input_gradient) for s in stages)
    lack = needed + _unused_area(stages, limit, room) - room * length
    if lack <= ROUNDING * room * length:
        return 0.0
    link = {s: s.link if may_offload else math.inf for s in stages}
    saved = {s: s.size * max(0.0, s.trip - link[s]) for s in stages}  # area by one offload
    offloaded = sorted((s for s in stages if saved[s] > 0), key=lambda s: link[s] / saved[s])
    if not offloaded:
        return math.inf
    largest = max(saved[s] for s in offloaded)
    # the number of offloads is at least lack / largest, and each takes at least the shortest time
    min_seconds = math.ceil(lack / largest - ROUNDING) * min(link[s] for s in offloaded)
    seconds = 0.0
    for s in offloaded:  # first the stages that save most area per second of the link
        area = min(lack, s.microbatches * saved[s])
        seconds += link[s] * area / saved[s]
        lack -= area
    return math.inf if lack > ROUNDING * room * length else max(min_seconds, seconds)


def _unused_area(stages: list[PipeStage], limit: float, room: float) -> float:
    """Return the area (memory x time) that no activation can use."""
    # At the start of a run, forwards take memory one by one. At the end, input gradients free
    # memory one by one. While a W runs, the share that it needs leaves less memory for other
    # activations.
    largest, total = max(s.size for s in stages), sum(s.microbatches * s.size for s in stages)
    max_held = int(room / largest + ROUNDING)
    # while the k-th forward or the k-th last input gradient runs, at most k activations are held
    seconds = min(s.forward for s in stages) + min(s.input_gradient for s in stages)
    filling = seconds * sum(room - k * largest for k in range(1, max_held + 1))
    # memory that no activation fills while the W of a stage runs
    spare = {
        s: max(0.0, room - _usable(stages, min(limit, total) - s.size * s.share)) for s in stages
    }
    lost = sum(s.microbatches * s.weight * spare[s] for s in stages)
    # W ops after the last input gradient take no memory from other activations
    after = min(s.tail for s in stages) - min(s.step_end for s in stages)
    return filling + max(0.0, lost - max(spare.values()) * after)


def list_durations(table: Table, links: Prices, seconds: Prices, may_offload: bool) -> list[float]:
    """List all durations of ops and messages [s], without zeros."""
    # On links of model "delay", a message is one duration, on others a latency and a transmit time.
    times: list[float] = []
    for letters in (*"FBIWAU", *("OL" if may_offload else "")):
        for time in seconds.get(letters, []):
            times += time if isinstance(time, list) else [time]
    is_delay = {links["model"], *links["pairs"].values()} == {"delay"}  # all pairs of workers
    for direction in (0, 1):
        for pipe, workers in enumerate(table.placement):
            for k in range(table.num_stages - 1):
                parts = [seconds[key][direction][pipe][k] for key in MESSAGE]
                count = table.num_microbatches if any(map(depth, parts)) else 1  # 1: for all
                for microbatch in range(count if workers[k] != workers[k + 1] else 0):
                    pair = [at_microbatch(part, microbatch) for part in parts]
                    times += [sum(pair)] if is_delay else pair
    return [time for time in times if time]


def common_unit(times: list[float]) -> float | None:
    """Return the largest time of which all `times` are whole multiples; None if there is none."""
    if not times:
        return None
    scale = 10.0 ** math.ceil(math.log10(max(times)))
    fractions = [Fraction(time / scale).limit_denominator(10**8) for time in times]
    pairs = zip(fractions, times, strict=True)
    if not all(math.isclose(fraction, time / scale, rel_tol=1e-9) for fraction, time in pairs):
        return None
    # example: 1/2 and 3/4 are 2/4 and 3/4, so the unit is gcd(2, 3) / 4
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    divisor = math.gcd(*(int(fraction * denominator) for fraction in fractions))
    return scale * float(Fraction(divisor, denominator))


def round_up(bound: float, unit: float | None) -> float:
    """Round a lower bound up to a multiple of `unit`; every end of a run is such a multiple."""
    if unit is None or not math.isfinite(bound) or unit <= ROUNDING * bound:
        return bound
    return math.ceil(bound / unit * (1 - ROUNDING)) * unit


VERSION = 2
KEYS = ("kind", "version", "table", "costs", "claim", "proof")
QUESTION = ("objective", "limits", "offload")
KINDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "run": {
        "costs": ("links", "seconds", "memory"),
        "claim": (
            *QUESTION,
            *("makespan", "max_span", "busy", "peak_in_flight", "offloaded", "peak_memory"),
            "lower_bounds",
        ),
        "proof": ("ops", "transfers", "held_from", "held"),
    },
    "optimum": {
        "costs": ("links", "seconds", "memory"),
        "claim": (*QUESTION, "value", "lower_bounds"),
        "proof": ("starts", "prover", "seconds", "source", "checksum"),
    },
    "formula": {
        "costs": ("links", "parameters", "box"),
        "claim": ("facets", "gap"),
        "proof": ("points", "rays", "cells"),
    },
}
NOT_DERIVED = (
    "which needs a makespan (path), limits (memory), no offloads (chain), times of O and L"
)


class CheckedBound(NamedTuple):
    """A lower bound that a certificate claims, and whether the checker derived it."""

    value: float  # in the unit of the verdict
    by: str  # one of `DERIVED`, or another name from the certificate, such as "solver"
    checked: bool  # whether the checker derived the bound again


class Verdict(NamedTuple):
    """Result of checking a certificate.

    Attributes:
      makespan: derived makespan, in `unit`; None if the schedule cannot run.
      problems: claims that do not hold.
      bounds: the claimed lower bounds.
      unit: unit of all times: "seconds", or "units" of a solved problem.
      form: claim of a closed form, as "exact for F = 1, B from 1 to 3"; else empty.
    """

    makespan: float | None
    problems: tuple[Discrepancy, ...]
    bounds: tuple[CheckedBound, ...] = ()
    unit: str = "seconds"
    form: str = ""

    @property
    def ok(self) -> bool:
        """Return whether all claims hold."""
        return not self.problems


def check(data: Mapping[str, Any], name: str = "certificate") -> Verdict:
    """Check all claims of a certificate; raise a `MalformedError` if its form is wrong."""
    report, data = split_report(data)
    read_envelope(data, name)
    try:
        if data["kind"] == "formula":
            form = read_form(data, name)
            return Verdict(None, tuple(check_form(form, report)), form=form_text(form))
        return _check_run(data, name)
    except IllegalError as error:  # the table cannot run
        return Verdict(None, (Discrepancy("table", "legal", str(error)),))


def split_report(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return (report, certificate); the report is empty except for closed forms."""
    inner = data.get("certificate")
    is_report = isinstance(inner, dict) and inner.get("kind") == "formula"
    return (data, inner) if is_report and isinstance(inner, dict) else ({}, data)


def read_envelope(data: Mapping[str, Any], name: str) -> None:
    """Check the kind, the version and the keys of a certificate."""
    kind, version = data.get("kind"), data.get("version")
    lead, kinds = f"{name} is not a certificate (saved proof)", " or ".join(map(json.dumps, KINDS))
    if not (isinstance(kind, str) and kind in KINDS):
        raise MalformedError(f'{lead}: it needs "kind" {kinds}, got {kind!r}')
    if (type(version), version) != (int, VERSION):
        raise MalformedError(f'{lead}: it needs "version" {VERSION}, got {version!r}')
    check_keys({**data}, KEYS, name)
    for part, keys in KINDS[kind].items():
        check_keys(data[part], keys, f"{name}: {part}")


def certificate_checksum(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 hash of a certificate without the key `checksum`."""
    proof = {key: value for key, value in data["proof"].items() if key != "checksum"}
    text = json.dumps({**data, "proof": proof}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_run(data: Mapping[str, Any], name: str) -> Verdict:
    """Check the claims about a run or an optimum, by a run of the table."""
    costs, claims = data["costs"], {**data["claim"], **data["proof"]}
    is_optimum = data["kind"] == "optimum"
    bounds = claims["lower_bounds"]
    require(isinstance(bounds, list), f"{name}: lower_bounds", "a list", bounds)
    for bound in bounds:
        check_keys(bound, ("by", "value"), f"{name}: a lower bound")
        by, value = bound["by"], bound["value"]
        require(isinstance(by, str), f"{name}: by of a lower bound", "a text", by)
        require(is_time(value), f"{name}: a lower bound", "a number of at least 0", value)
    table = Table(data["table"])
    check_word(claims["objective"], ("makespan", "span"), f"{name}: objective")
    offload, limits = claims["offload"], claims["limits"]
    require(isinstance(offload, bool), f"{name}: offload", "true or false", offload)
    if limits is not None:
        check_numbers(limits, (len(table.rows),), f"{name}: limits")
    links = read_links(costs["links"], table, f"{name}: links")
    options = {"is_in_units": is_optimum, "has_bounds": bool(bounds)}
    seconds = read_seconds(costs["seconds"], table, f"{name}: seconds", **options)
    memory = read_memory(costs["memory"], table, f"{name}: memory")
    try:
        run = Run(table, links, seconds)
    except DeadlockError as error:
        return Verdict(None, (Discrepancy("run", "to the end", str(error)),))
    derived = derive(run, memory)
    allowed = tolerances(derived, memory, table.rules)
    value = derived["max_span" if claims["objective"] == "span" else "makespan"]
    compared = derive_optimum(run, value, certificate_checksum(data)) if is_optimum else derived
    problems = [
        _explain(run, problem)
        for key, expected in compared.items()
        for problem in differences(claims[key], expected, allowed[QUANTITIES.get(key, "time")], key)
    ]
    peaks = derived["peak_memory"].items()
    for limit, (worker, peak) in zip(limits or (), peaks, strict=False):
        if peak > limit + allowed["memory"]:
            problems.append(Discrepancy(f"limit: {worker}", limit, peak))
    derived_bounds = derive_bounds(table, links, seconds, memory, claims) if bounds else {}
    problems += _check_bounds(bounds, derived_bounds, value, allowed["time"])
    checked = tuple(CheckedBound(b["value"], b["by"], b["by"] in derived_bounds) for b in bounds)
    unit = "units" if is_optimum else "seconds"
    return Verdict(derived["makespan"], tuple(problems), checked, unit)


def _check_bounds(
    bounds: list[dict[str, Any]], derived: Mapping[str, float], value: float, tolerance: float
) -> Iterator[Discrepancy]:
    """List claimed lower bounds above the derived bound or above the value of the run."""
    for claimed in bounds:
        by, bound = claimed["by"], claimed["value"]
        claim = f"lower bound by {by}"
        if by in DERIVED and bound > derived.get(by, -math.inf) + tolerance:
            yield Discrepancy(claim, bound, derived.get(by), "" if by in derived else NOT_DERIVED)
        if bound > value + tolerance:
            yield Discrepancy(claim, bound, value, "which was reached")


def _explain(run: Run, problem: Discrepancy) -> Discrepancy:
    """If the start of an op is wrong, add the input that arrived last, as a reason."""
    _, _, name = problem.claim.partition(": ")
    if not name.endswith((": start", ": leaves")):
        return problem
    events = {run.name(event): event for event in run.end}
    event = events.get(name.rpartition(": ")[0])
    cause = None if event is None else run.last_wait.get(event)
    return problem if cause is None else problem._replace(why=f"behind {run.name(cause)}")
