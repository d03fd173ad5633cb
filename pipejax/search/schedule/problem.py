"""Scheduling problems in integers: ops, their times, and the memory of workers.

A constraint solver needs integers. So times are counted in units, and sizes in parts.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import ArgumentError, as_floats, resolve_choice, wrong
from pipejax.costs.costs import Costs
from pipejax.schedules.cells.ops import COMMUNICATION, HOST, KINDS, SHARDING, SPLIT, UPDATES, Phase
from pipejax.schedules.table.held_activations import WEIGHT_SHARE
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, check_usual

OP_TIMES = ("forward", "input_grad", "weight_grad", "backward")
STEP_END_TIMES = ("step_end", "update")
TIMES = (*OP_TIMES, "lag", "transmit", *STEP_END_TIMES)
HOST_TIMES = ("offload", "load")
NAMES = dict(zip((*SPLIT, Phase.B, *HOST), (*OP_TIMES, *HOST_TIMES), strict=True))
OBJECTIVES = ("makespan", "span")
LINKS_OF_SEARCH = ("delay", "queued")
FINEST = 10**6  # limit of the units in the largest duration if all durations are whole units
COARSE = 20_000  # units in the largest duration if durations are rounded
MEMORY_PART = 2.0**-30  # a part of memory, over the largest limit, if sizes have no common part
_EQUAL = 1e-9  # relative difference that rounding of floats can cause

# phases of cells that a table may have: messages follow from the links, the rest is reordered
SCHEDULED = (Phase.IDLE, Phase.F, Phase.B, Phase.I, Phase.W, *HOST, Phase.WAIT_O, *COMMUNICATION)

PerEntry = float | Sequence[float] | Float[NumpyArray, "..."]
PerStage = Int[NumpyArray, " stages"]
PerBoundary = Int[NumpyArray, "directions pipes boundaries"]


class InfeasibleError(ArgumentError):
    """Error for a problem without a schedule within the memory limit."""

    def __init__(self, text: str, argument: str = "") -> None:
        super().__init__(argument, None, text)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A scheduling problem. Times are integers of units, rounded down; sizes of parts."""

    placement: Int[NumpyArray, "pipes stages"]  # worker of each stage
    microbatch_pipes: Int[NumpyArray, " microbatches"]  # pipe of each microbatch
    forward: PerStage  # F
    input_grad: PerStage  # I
    weight_grad: PerStage  # W
    backward: PerStage  # B, where a backward is not split
    lag: PerBoundary  # delay of a message after its time on the link
    transmit: PerBoundary  # time of a message on its link; 0 if messages occupy no link
    step_end: PerStage  # all-reduce and update after the last gradient
    update: PerStage  # update alone
    offload: PerStage | None  # O; None if offloads are not allowed
    load: PerStage | None  # L
    # groups of workers that share a host link; other workers have a host link each
    host_links: tuple[tuple[int, ...], ...]
    sizes: PerStage  # parts of an activation
    weight_sizes: PerStage  # parts of an activation that stay after I for W
    limits: Int[NumpyArray, " workers"]  # parts that a worker can hold
    # "makespan", or "span": the longest time between a worker's first start and last end, as if the
    # optimizer did not synchronize workers
    objective: str
    unit: float  # length of a unit of time [s]
    exact: bool  # whether every duration is a whole number of units

    @property
    def num_stages(self) -> int:
        """Return the number of stages of one pipe."""
        return int(self.placement.shape[1])

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        return len(self.limits)

    @property
    def num_microbatches(self) -> int:
        """Return the number of microbatches over all pipes."""
        return len(self.microbatch_pipes)

    @property
    def worker(self) -> Int[NumpyArray, "stages microbatches"]:
        """Return the worker that runs each microbatch on each stage (stages, microbatches)."""
        return self.placement[self.microbatch_pipes].T

    @property
    def queues(self) -> bool:
        """Return whether messages occupy their links."""
        return bool(self.transmit.any())

    @property
    def all_reduce(self) -> PerStage:
        """Return each stage's all-reduce time, without the update [units]."""
        return self.step_end - self.update

    @property
    def gradient(self) -> PerStage:
        """Return each stage's backward time [units]: B, or I and W if these are shorter."""
        return np.minimum(self.backward, self.input_grad + self.weight_grad)

    @property
    def times(self) -> Mapping[Phase, PerStage]:
        """Return {phase: duration of an op on each stage [units]}."""
        by_phase = {phase: getattr(self, name) for phase, name in NAMES.items()}
        return {phase: 0 * self.forward if t is None else t for phase, t in by_phase.items()}

    def finer(self, parts: int) -> "Problem":
        """Return the problem with each unit of time divided into `parts` units."""
        # In a small domain, the solver has a variable for every value. That helps it to prove small
        # problems, but slows it down on large ones.
        counts = {name: getattr(self, name) for name in (*TIMES, *HOST_TIMES)}
        finer = {name: parts * count for name, count in counts.items() if count is not None}
        return dataclasses.replace(self, unit=self.unit / parts, **finer)

    def coarser(self, parts: int) -> "Problem":
        """Return the problem with times rounded up to larger units; its plans stay valid."""
        # The longest forward and backward then has about `parts` units, or as few as it has now.
        factor = max(1, int((self.forward + self.gradient).max()) // parts)
        counts = {name: getattr(self, name) for name in (*TIMES, *HOST_TIMES)}
        coarser = {name: -(-count // factor) for name, count in counts.items() if count is not None}
        return dataclasses.replace(self, unit=self.unit * factor, **coarser)

    def content(self) -> dict[str, Any]:
        """Return all fields that determine the solution, without the unit, which scales it."""
        fields = dataclasses.asdict(self)
        del fields["unit"], fields["exact"]
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()}

    @property
    def key(self) -> str:
        """Return a short hash of the content."""
        return hashlib.sha256(json.dumps(self.content(), sort_keys=True).encode()).hexdigest()[:24]


class Grid(NamedTuple):
    """A unit of time."""

    unit: float  # length of the unit [s]
    exact: bool  # whether every duration is an integer multiple of the unit

    def down(self, seconds: Float[NumpyArray, "..."]) -> Int[NumpyArray, "..."]:
        """Convert seconds to units, rounded down, so that no lower bound is too high."""
        units = np.asarray(seconds, float) / self.unit
        nearest = np.round(units)
        is_whole = np.isclose(units, nearest, rtol=_EQUAL, atol=_EQUAL)
        return np.where(is_whole, nearest, np.floor(units)).astype(np.int64)


def choose_grid(durations: Float[NumpyArray, " some"]) -> Grid:
    """Choose the largest time unit that divides all durations; if none does, a small unit."""
    largest = float(np.max(durations, initial=0.0))
    if largest == 0:
        return Grid(1.0, True)
    decade = 10.0 ** math.ceil(math.log10(largest))  # the next power of ten
    shares = [float(d) / decade for d in durations if d > 0]
    multiples = _whole_multiples(shares, 10**8)
    if multiples is None:
        return Grid(largest / COARSE, False)
    _, divisor, scale = multiples
    return Grid(decade * divisor / scale, True)


def _whole_multiples(
    values: Sequence[float], max_denominator: int
) -> tuple[list[int], int, int] | None:
    """Return (multiples, divisor, scale): values are multiples of the unit divisor / scale."""
    # None if no unit divides all values, or a multiple is too large. 0.4 and 0.6 are 2 / 5 and
    # 3 / 5, so the result is ([2, 3], 1, 5).
    fractions = [Fraction(value).limit_denominator(max_denominator) for value in values]
    if not all(math.isclose(f, v, rel_tol=_EQUAL) for f, v in zip(fractions, values, strict=True)):
        return None
    scale = math.lcm(*(f.denominator for f in fractions))
    numbers = [int(f * scale) for f in fractions]
    divisor = math.gcd(*numbers)
    if max(numbers) // divisor > FINEST:
        return None
    return [number // divisor for number in numbers], divisor, scale


def common_parts(sizes: Sequence[float], limits: Sequence[float]) -> list[int]:
    """Return sizes, then limits, as multiples of a common divisor (a part of memory)."""
    # Without a common divisor, sizes are rounded down and limits up, by less than `MEMORY_PART` of
    # the largest limit. A schedule within the limits in bytes is then within the limits in parts,
    # so no bound is too high. The reverse holds up to rounding.
    values = [value / max(sizes) for value in (*sizes, *limits)]
    multiples = _whole_multiples(values, 10**4)
    if multiples is not None:
        return multiples[0]
    part = MEMORY_PART * max(limits)
    return [
        *(math.floor(size / part) for size in sizes),
        *(math.floor(limit / part * (1 + _EQUAL)) for limit in limits),
    ]


def build_problem(
    table: ScheduleTable,
    costs: Costs,
    memory_limit: PerEntry,
    sizes: PerEntry = 1.0,
    weight_share: PerEntry = WEIGHT_SHARE,
    offload: bool = False,
    link: str | Links = "delay",
    objective: str = "makespan",
) -> Problem:
    """Make a scheduling problem from the stages and microbatches of a table, costs and limits."""
    links = Links.resolve(link)
    objective = resolve_choice(objective, OBJECTIVES, "objective")
    check_usual(table, "optimize")
    resolve_choice(links.model, LINKS_OF_SEARCH, "link")
    links.check_known(("model", "queues", "host_links"), "optimize")
    _check_costs(table, costs, offload)
    shares = np.broadcast_to(as_floats(weight_share, "weight_share"), table.num_stages)
    if not ((shares >= 0) & (shares <= 1)).all():
        raise wrong("weight_share", f"must be in [0, 1], got {weight_share!r}")
    stages = table.num_stages
    size = _positive(sizes, stages, "sizes", "stages")
    limits = _positive(memory_limit, table.num_workers, "memory_limit", "workers")
    _check_room(table, size, limits, offload)
    size_parts, weight_parts, limit_parts = _to_parts(table, size, shares, limits, offload)

    def seconds(name: str, *shape: int) -> Float[NumpyArray, "..."]:
        return np.broadcast_to(np.asarray(getattr(costs, name), float), shape)

    names = [*OP_TIMES, "all_reduce", "update", *(HOST_TIMES if offload else ())]
    times = {name: seconds(name, stages) for name in names}
    if objective == "span":  # the span ends before all-reduce and update
        times |= {name: np.zeros(stages) for name in ("all_reduce", "update")}
    is_sent = table.placement[:, :-1] != table.placement[:, 1:]
    lag, transmit = (
        seconds(name, 2, table.num_pipes, stages - 1) * is_sent for name in ("latency", "transmit")
    )
    if links.model != "queued":  # messages occupy no link, and are lags alone
        lag, transmit = lag + transmit, np.zeros_like(transmit)
    grid = choose_grid(np.concatenate([*times.values(), lag.ravel(), transmit.ravel()]))
    units: dict[str, Any] = dict.fromkeys(HOST_TIMES)
    units |= {name: grid.down(time) for name, time in times.items()}
    units["step_end"] = units.pop("all_reduce") + units["update"]
    return Problem(
        placement=np.array(table.placement, np.int64),
        microbatch_pipes=np.array(table.pipe_of_microbatch, np.int64),
        lag=grid.down(lag),
        transmit=grid.down(transmit),
        host_links=tuple(map(tuple, links.host_links)),
        sizes=size_parts,
        weight_sizes=weight_parts,
        limits=limit_parts,
        objective=objective,
        unit=grid.unit,
        exact=grid.exact,
        **units,
    )


def _check_costs(table: ScheduleTable, costs: Costs, offload: bool) -> None:
    """Check that the costs are complete, and that only schedulable phases cost time."""
    costs.check_values()
    costs.check_known((*SPLIT, Phase.B, *(HOST if offload else ())))
    costs.check_shapes(table.num_stages, table.num_pipes, table.num_microbatches)
    if costs.per_microbatch():
        raise ValueError(
            "costs differ by microbatch, but the search assumes equal microbatches: give one entry "
            "per stage"
        )
    for code in sorted(set(table.ops.phase.tolist()) - {*SCHEDULED}):
        phase = Phase(code)
        hint = "; start from a synchronous schedule such as 1f1b" if phase in UPDATES else ""
        if phase not in SHARDING or np.any(np.asarray(getattr(costs, KINDS[phase].time)) > 0):
            raise ValueError(
                f"the table has {phase.name} cells: only F, B, I, W, O and L are scheduled{hint}"
            )


def _check_room(table: ScheduleTable, size: NumpyArray, limits: NumpyArray, offload: bool) -> None:
    """Check that each worker has memory for one microbatch."""
    needs = _needs_of_one_microbatch(table, size, offload)
    for worker, (need, limit) in enumerate(zip(needs.tolist(), limits.tolist(), strict=True)):
        if need > limit * (1 + _EQUAL):
            demand, stages = "one activation", int((table.placement == worker).sum(axis=1).max())
            if not offload and stages > 1:
                demand += f" of each of its {stages} stages"
            why = f"memory_limit of worker {worker} is {limit:g}, but {demand} takes {need:g}"
            raise InfeasibleError(f"{why}: infeasible", "memory_limit")


def _needs_of_one_microbatch(table: ScheduleTable, size: NumpyArray, offload: bool) -> NumpyArray:
    """Return each worker's least memory for one microbatch, in the unit of the sizes."""
    # Without offloads a worker holds all its stages at once, because gradients follow all forwards.
    needs = np.zeros((table.num_pipes, table.num_workers), size.dtype)
    pipes = np.arange(table.num_pipes)[:, None]
    (np.maximum if offload else np.add).at(needs, (pipes, table.placement), size)
    return needs.max(axis=0)


def _to_parts(
    table: ScheduleTable, size: NumpyArray, shares: NumpyArray, limits: NumpyArray, offload: bool
) -> tuple[PerStage, PerStage, Int[NumpyArray, " workers"]]:
    """Return each stage's size and size for W, and each worker's limit, in parts of memory."""
    # A limit above the sum of all activations becomes this sum. Schedules that just fit stay legal.
    counts = np.bincount(table.pipe_of_microbatch, minlength=table.num_pipes)

    def worker_totals(size: NumpyArray) -> NumpyArray:  # memory of all activations
        totals = np.zeros(table.num_workers, size.dtype)
        np.add.at(totals, table.placement, counts[:, None] * size)
        return totals

    usable_limits = np.minimum(limits, worker_totals(size))
    numbers = np.array(common_parts([*size, *size * shares], [*usable_limits]), np.int64)
    size_parts, weight_parts, limit_parts = np.split(numbers, [len(size), 2 * len(size)])
    size_parts = np.maximum(size_parts, 1)  # a tiny size does not become 0
    limit_parts = np.maximum(limit_parts, _needs_of_one_microbatch(table, size_parts, offload))
    is_ample = limits >= worker_totals(size) * (1 - _EQUAL)
    return size_parts, weight_parts, np.where(is_ample, worker_totals(size_parts), limit_parts)


def _positive(value: Any, count: int, name: str, what: str) -> Float[NumpyArray, " entries"]:
    numbers = as_floats(value, name)
    if numbers.ndim and numbers.shape != (count,):
        raise wrong(name, f"has {numbers.size} entries, the table has {count} {what}")
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        raise wrong(name, f"must be finite and above 0, got {value!r}")
    return np.broadcast_to(numbers, (count,)).copy()
