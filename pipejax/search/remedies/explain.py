"""`explain`: why a step takes so long, and what would make it shorter."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.analysis.step.faults import NEGLIGIBLE, Fault
from pipejax.analysis.step.step_parts import Part
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, wrong
from pipejax.base.display import short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.costs.model.workload import Workload
from pipejax.costs.system.system import System
from pipejax.engine.pricing import lower_and_price
from pipejax.engine.recurrence_host import makespan_on_host
from pipejax.schedules.naming import named
from pipejax.schedules.registry import REGISTRY
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.remedies import changes
from pipejax.search.remedies.setup import (
    MeasuredTimes,
    Memory,
    ModelTimes,
    Schedule,
    Setup,
    Source,
    begin,
    planned,
)

Changes = Callable[[Setup], Iterator[tuple[str, Setup]]]
# kinds of remedies, in the order in which they combine: what sets the table comes first, for what
# is said of single stages holds of one table alone
KINDS: Mapping[str, Changes] = {
    "schedule": changes.schedules,
    "settings": changes.settings,
    "microbatches": changes.microbatches,
    "repair": changes.repairs,
    "layers": changes.balance,
    "hardware": changes.hardware,
    "places": changes.places,
    "order": changes.microbatch_orders,
    "messages": changes.orders,
    "in flight": changes.in_flight,
}
COMBINED = ("schedule", "settings", "microbatches", "layers", "places", "order", "messages")
SMALLER_FIRST = (
    "microbatches",
    "schedule",
    *(kind for kind in COMBINED[1:] if kind != "microbatches"),
)
SEARCHES: Mapping[str, Changes] = {"optimise": changes.optimised, "layout": changes.layouts}
ONE_OF = ("schedule", "microbatches", "layers", "in flight")  # of these only the best is reported


@short_repr
class Remedy(NamedTuple):
    """A change that makes the step shorter.

    Attributes:
      kind: of which kind it is.
      what: what is done, in words.
      saves: what the step gets shorter [s].
      step_time: of the step then [s].
      assumes: what must hold for that.
      bound: no schedule of the same stages on the same workers is shorter then [s].
      memory: what the fullest worker needs then, against what it needs now.
      fits: whether that keeps the limit; without a limit, whether it is no more than now.
      setup: table, costs and links, and the options that give them on the command line.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=8)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=4.0)
      >>> faster = next(r for r in pj.explain(table, costs).remedies if r.kind == "hardware")
      >>> faster.what, faster.saves
      ('links twice as fast', 16.0)
    """

    kind: str
    what: str
    saves: float
    step_time: float
    assumes: tuple[str, ...]
    bound: float
    memory: float
    fits: bool
    setup: Setup


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Reasons for the length of a step, and remedies that make it shorter.

    Attributes:
      run: evaluation of the unchanged run.
      parts: of the step, which sum to it.
      faults: causes of lost time, by the time that the step would save without each.
      bottleneck: the first of them; where nothing is wrong, start and end of the pipeline.
      remedies: by what they save.
      memory: what workers need and have.
      tolerated: how many times as long messages may take before the step is 1 % longer; infinite
        where none is waited for, None where none takes any time.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=16)
      >>> costs = pj.Costs(forward=[1.0, 1.0, 1.5, 1.0], backward=[2.0, 2.0, 3.0, 2.0])
      >>> found = pj.explain(table, costs)
      >>> found.bottleneck.kind, found.bottleneck.stage
      ('imbalance', 2)
      >>> abs(sum(part.seconds for part in found.parts) - found.run.step_time) < 1e-9
      True
    """

    run: Evaluation
    parts: Sequence[Part]
    faults: Sequence[Fault]
    bottleneck: Fault
    remedies: Sequence[Remedy]
    memory: Memory
    tolerated: float | None

    @property
    def step_time(self) -> float:
        """Step time of the unchanged run [s]."""
        return self.run.step_time


def explain(
    table: ScheduleTable,
    costs: Costs | Workload,
    *,
    system: System | None = None,
    link: str | Links = "delay",
    memory_limit: float | Sequence[float] | None = None,
    stage_layers: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    search: bool = False,
    on_progress: OnProgress | None = None,
) -> Explanation:
    """Say why a step takes so long, and what would make it shorter.

    Every cause is undone and every remedy applied, and the run repeated: what is said of them is
    exact for these costs.

    Args:
      table: the schedule; a synchronous one.
      costs: measured [s], unbatched; or a workload, on a system.
      system: the machine of a workload.
      link: link model, or `Links`.
      memory_limit: what a worker may hold: activations of the table, or bytes of a workload; what
        the system has if None. Without any, remedies that need more memory than now are marked.
      stage_layers: (stages) layers of each stage, of measured costs: then they are moved whole.
      schedules: names of those that are tried; all of the registry if None.
      search: whether to run the solvers too, which take some seconds: schedules under the limit,
        layers over stages.
      on_progress: called with how many kinds of remedies were tried, how many there are, and a
        text.

    Returns:
      Parts, causes and remedies.

    Raises:
      ValueError: if the table is asynchronous or does not run at these costs, a workload is
        without its system, layers are of other stages, or the limit is not above 0.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=4)
      >>> found = pj.explain(table, pj.Costs(forward=1.0, backward=2.0))
      >>> found.bottleneck.kind, found.bottleneck.seconds
      ('microbatches', 4.5)
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs, Workload))
    check_types(system=(system, System, type(None)))
    if isinstance(costs, Workload) != (system is not None):
        raise wrong("system", "goes with a workload in place of costs, and a workload needs it")
    source: Source
    if isinstance(costs, Workload) and system is not None:
        source = ModelTimes(costs, system)
    else:
        assert isinstance(costs, Costs)
        source = MeasuredTimes(costs, table.num_stages)
    schedule = _recognized_schedule(table, source)
    first = begin(table, Links.resolve(link), source, schedule, stage_layers)
    return explain_setup(
        first,
        _limit(memory_limit, first),
        schedules=schedules,
        search=search,
        on_progress=on_progress,
    )


def _recognized_schedule(table: ScheduleTable, source: Source) -> Schedule | None:
    """Return the named schedule planned for these times, if the table equals it."""
    size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
    for options in changes.VARIANTS.get(table.name, ({},)) if table.name in REGISTRY else ():
        try:
            schedule = planned(Schedule(table.name, options), size, source.table_costs)
            if _is_same(schedule.built(size), table):
                return schedule
        except ValueError:  # it does not exist for these numbers
            continue
    return None


def _is_same(table: ScheduleTable, other: ScheduleTable) -> bool:
    """Return whether two tables have the same rows and the same meaning."""
    pairs = zip((*table.cells, *table.partners), (*other.cells, *other.partners), strict=True)
    same = table.grammar == other.grammar and np.array_equal(table.placement, other.placement)
    return same and all(np.array_equal(array, other_array) for array, other_array in pairs)


def _limit(
    memory_limit: float | Sequence[float] | None, first: Setup
) -> Float[NumpyArray, " workers"] | float | None:
    if memory_limit is None:
        system = first.source.system
        return None if system is None else float(system.memory_available)
    limit = np.asarray(memory_limit, float)
    if limit.shape not in ((), (first.table.num_workers,)) or not (limit > 0).all():
        raise wrong("memory_limit", f"must be above 0, or so for each worker, got {memory_limit!r}")
    return limit


def explain_setup(
    first: Setup,
    limit: Float[NumpyArray, " workers"] | float | None,
    *,
    schedules: Sequence[str] | None = None,
    search: bool = False,
    on_progress: OnProgress | None = None,
) -> Explanation:
    """Explain a setup that is given with all that can be changed about it."""
    memory = Memory(first, limit)
    kinds = {**KINDS, **(SEARCHES if search else {})}
    if schedules is not None or search:
        names = [named(name) for name in schedules] if schedules is not None else [*REGISTRY]
        kinds["schedule"] = functools.partial(changes.schedules, names=names)
    remedies: list[Remedy] = []
    tried: dict[str, list[Remedy]] = {}
    with telling("explain", on_progress) as tell:
        for done, (kind, change) in enumerate(kinds.items()):
            tell(done, len(kinds) + 1, kind)
            tried[kind] = _tried(kind, change, first, first, memory)
            remedies += _worth(kind, tried[kind], first, memory)
        tell(len(kinds), len(kinds) + 1, "combined")
        remedies += _combined(kinds, tried, remedies, first, memory)
    remedies.sort(key=lambda remedy: -remedy.saves)
    faults = _faults(first, memory, tried["schedule"])
    return Explanation(
        run=first.run,
        parts=_named_parts(first),
        faults=faults,
        bottleneck=faults[0] if faults else _nothing_wrong(first),
        remedies=remedies,
        memory=memory,
        tolerated=_tolerated(first),
    )


TOLERANCE = 0.01  # of the step, that slower messages may cost
SLOWEST = 1e6  # messages that may take so many times as long may take any time


def _tolerated(first: Setup) -> float | None:
    """Return the factor on message times that lengthens the step by the tolerance."""
    program, vector = lower_and_price(first.table, first.costs, first.links)
    first_link = program.layout.first_link
    if not vector[first_link:].any():
        return None

    def too_long(factor: float) -> bool:
        slower = vector.copy()
        slower[first_link:] *= factor  # everything behind it is of messages
        return makespan_on_host(program, slower) > (1 + TOLERANCE) * first.step_time

    if not too_long(SLOWEST):
        return math.inf
    low, high = 1.0, SLOWEST  # the step grows with the factor: halve its logarithm
    while high > low * (1 + 1e-4):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if too_long(middle) else (middle, high)
    return low


def _named_parts(first: Setup) -> list[Part]:
    """Return the parts of a step, with the worker or link of each."""
    places: dict[str, str] = {}
    for fault in reversed(first.faults):
        if fault.kind == "imbalance" and fault.worker is not None:
            stage = "" if fault.stage is None else f", stage {fault.stage}"
            places["imbalance"] = f"worker {fault.worker}{stage}"
        elif fault.link is not None:
            places["messages"] = "workers {} and {}".format(*fault.link)
    return [
        part._replace(of=f"{part.of}: {places[part.name]}" if part.name in places else part.of)
        for part in first.step_parts
    ]


def _remedy(kind: str, what: str, setup: Setup, first: Setup, memory: Memory) -> Remedy:
    return Remedy(
        kind,
        what,
        saves=first.step_time - setup.step_time,
        step_time=setup.step_time,
        assumes=setup.assumes,
        bound=setup.bound,
        memory=memory.ratio(setup),
        fits=memory.fits(setup),
        setup=setup,
    )


def _tried(kind: str, change: Changes, now: Setup, first: Setup, memory: Memory) -> list[Remedy]:
    """Apply every remedy of a kind to a setup, on top of earlier changes."""
    return [_remedy(kind, what, to, first, memory) for what, to in change(now)]


def _worth(kind: str, remedies: Sequence[Remedy], first: Setup, memory: Memory) -> list[Remedy]:
    """Keep remedies that shorten the step or make it fit in memory; of alternatives, the best."""
    # Also keep the best without a second pipe, which most runtimes do not support.
    least = changes.WORTH * first.step_time if memory.fits(first) else -math.inf
    useful = [remedy for remedy in remedies if remedy.fits and remedy.saves > least]
    if kind not in ONE_OF or not useful:
        return useful
    pipes = first.table.num_pipes
    as_now = [remedy for remedy in useful if remedy.setup.table.num_pipes <= pipes]
    best = [max(group, key=lambda remedy: remedy.saves) for group in (useful, as_now) if group]
    return best if best[0] is not best[-1] else best[:1]


def _combined(
    kinds: Mapping[str, Changes],
    tried: Mapping[str, Sequence[Remedy]],
    remedies: Sequence[Remedy],
    first: Setup,
    memory: Memory,
) -> list[Remedy]:
    """Combine remedies in two orders; return the better combination, if it adds anything."""
    ways: list[tuple[str, ...]] = [COMBINED]
    # smaller microbatches may make room for a schedule that does not fit as it is
    worth = changes.WORTH * first.step_time
    if any(not remedy.fits and remedy.saves > worth for remedy in tried["schedule"]):
        ways.append(SMALLER_FIRST)
    orders = ({kind: kinds[kind] for kind in way} for way in ways)
    combinations = filter(None, [_together(order, tried, first, memory) for order in orders])
    best = max(combinations, key=lambda remedy: remedy.saves, default=None)
    best_single = max((remedy.saves for remedy in remedies), default=0.0)
    return [best] if best is not None and best.saves > best_single * (1 + 1e-9) else []


def _together(
    way: Mapping[str, Changes],
    tried: Mapping[str, Sequence[Remedy]],
    first: Setup,
    memory: Memory,
) -> Remedy | None:
    """Apply the best remedy of each kind in this order; None if fewer than two help."""
    now, titles = first, list[str]()
    for kind, change in way.items():
        # on top of nothing they were tried already
        remedies = tried[kind] if now is first else _tried(kind, change, now, first, memory)
        least = now.step_time - changes.WORTH * first.step_time
        better = [remedy for remedy in remedies if remedy.fits and remedy.step_time < least]
        if better:
            best = min(better, key=lambda remedy: remedy.step_time)
            now = best.setup
            titles.append(best.what)
    return _remedy("combined", "; ".join(titles), now, first, memory) if len(titles) > 1 else None


def _faults(first: Setup, memory: Memory, schedules: Sequence[Remedy]) -> list[Fault]:
    """List the faults, with memory if it does not suffice or rules out a better schedule."""
    faults = list(first.faults)
    if memory.limit is not None and not memory.fits(first):
        needs, limit = memory.at_first, np.broadcast_to(memory.limit, first.run.workers)
        worker = int((needs / limit).argmax())
        why = (
            f"it does not fit: worker {worker} needs {memory.text(needs[worker])} of "
            f"{memory.text(limit[worker])}"
        )
        return [Fault("memory", 0.0, why, worker), *faults]
    if memory.limit is not None and schedules:
        free = max(schedules, key=lambda remedy: remedy.saves)
        best = max((remedy.saves for remedy in schedules if remedy.fits), default=0.0)
        more = free.saves - max(best, 0.0)
        if more > NEGLIGIBLE * first.step_time:
            saved, beyond = (100 * seconds / first.step_time for seconds in (free.saves, more))
            why = (
                f"memory rules out {free.what}, which needs {free.memory:.3g} times as much and "
                f"would save {saved:.3g} % of the step, {beyond:.3g} % more than what fits"
            )
            faults.append(Fault("memory", more, why))
    return sorted(faults, key=lambda fault: -fault.seconds)


def _nothing_wrong(first: Setup) -> Fault:
    """Start and end of the pipeline, which no step is without."""
    parts = first.parts
    ends = parts["start"] + parts["gaps"] + parts["end"]
    share = 100 * ends / (first.step_time or 1.0)
    return Fault(
        "schedule",
        ends,
        f"nothing stands out: start and end of the pipeline take {share:.3g} % of the step, as "
        f"this schedule has them with {first.run.microbatches} microbatches",
    )
