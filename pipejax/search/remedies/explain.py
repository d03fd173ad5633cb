"""`explain`: causes of a long step, and remedies."""

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
    begin_setup,
    plan_schedule,
)

Changes = Callable[[Setup], Iterator[tuple[str, Setup]]]
# kinds of remedies, in the order in which they combine: those that replace the table come first,
# because scaling rules of single stages hold for one table only
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
BEST_ONLY = ("schedule", "microbatches", "layers", "in flight")  # kinds with one reported remedy


@short_repr
class Remedy(NamedTuple):
    """A change that makes the step shorter.

    Attributes:
      kind: kind of the remedy.
      what: the change, in words.
      saves: time that the step saves [s].
      step_time: new step time [s].
      assumes: assumptions of the change.
      bound: lower bound on the step time of any schedule of the same stages and workers [s].
      memory: need of the fullest worker over that of the unchanged run.
      fits: whether it stays within the limit; without a limit, within the present peak.
      setup: table, costs and links, and the options that set them on the command line.

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
      parts: parts of the step time, which sum to it.
      faults: causes of lost time, by the time that the step saves without each.
      bottleneck: the first fault; without faults, start and end of the pipeline.
      remedies: remedies, by the time they save.
      memory: needs and limits of the workers.
      tolerated: factor on message times that makes the step 1 % longer; infinite if no op waits for
        messages, None if messages take no time.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=16)
      >>> costs = pj.Costs(forward=[1.0, 1.0, 1.5, 1.0], backward=[2.0, 2.0, 3.0, 2.0])
      >>> result = pj.explain(table, costs)
      >>> result.bottleneck.kind, result.bottleneck.stage
      ('imbalance', 2)
      >>> abs(sum(part.seconds for part in result.parts) - result.run.step_time) < 1e-9
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
        """Return the step time of the unchanged run [s]."""
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
    """Find the causes of a long step, and remedies that make it shorter.

    The run is repeated without every cause and with every remedy, so effects are exact for these
    costs.

    Args:
      table: a synchronous schedule.
      costs: measured costs [s], unbatched; or a workload, on a system.
      system: machine of a workload.
      link: link model, or `Links`.
      memory_limit: memory of a worker, in activations of the table or bytes of a workload; default:
        that of the system. Without any, remedies that need more memory than now are marked.
      stage_layers: (stages) layers of each stage; if set, remedies move whole layers.
      schedules: names of schedules to try; default: the registry.
      search: whether to run the solvers too, which take some seconds: schedules under the limit,
        layers over stages.
      on_progress: called with the kinds of remedies done, all kinds, and a text.

    Returns:
      Parts, causes and remedies.

    Raises:
      ValueError: if the table is asynchronous or does not run at these costs, a workload has no
        system, stage_layers do not match the stages, or the limit is not above 0.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=4)
      >>> result = pj.explain(table, pj.Costs(forward=1.0, backward=2.0))
      >>> result.bottleneck.kind, result.bottleneck.seconds
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
    begin = begin_setup(table, Links.resolve(link), source, schedule, stage_layers)
    return explain_setup(
        begin,
        _limit(memory_limit, begin),
        schedules=schedules,
        search=search,
        on_progress=on_progress,
    )


def _recognized_schedule(table: ScheduleTable, source: Source) -> Schedule | None:
    """Return the named schedule, planned for these times, that equals a table; None without one."""
    size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
    for options in changes.VARIANTS.get(table.name, ({},)) if table.name in REGISTRY else ():
        try:
            schedule = plan_schedule(Schedule(table.name, options), size, source.table_costs)
            if _is_same(schedule.build(size), table):
                return schedule
        except ValueError:  # it does not exist for these numbers
            continue
    return None


def _is_same(table: ScheduleTable, other: ScheduleTable) -> bool:
    """Return whether two tables have the same rows, grammar and placement."""
    pairs = zip((*table.cells, *table.partners), (*other.cells, *other.partners), strict=True)
    is_same = table.grammar == other.grammar and np.array_equal(table.placement, other.placement)
    return is_same and all(np.array_equal(array, other_array) for array, other_array in pairs)


def _limit(
    memory_limit: float | Sequence[float] | None, begin: Setup
) -> Float[NumpyArray, " workers"] | float | None:
    """Check a memory limit; default: the memory of the system, if there is one."""
    if memory_limit is None:
        system = begin.source.system
        return None if system is None else float(system.memory_available)
    limit = np.asarray(memory_limit, float)
    if limit.shape not in ((), (begin.table.num_workers,)) or not (limit > 0).all():
        raise wrong("memory_limit", f"must be above 0, or so for each worker, got {memory_limit!r}")
    return limit


def explain_setup(
    begin: Setup,
    limit: Float[NumpyArray, " workers"] | float | None,
    *,
    schedules: Sequence[str] | None = None,
    search: bool = False,
    on_progress: OnProgress | None = None,
) -> Explanation:
    """Explain an unchanged setup, as `explain` does for a table at costs."""
    memory = Memory(begin, limit)
    kinds = {**KINDS, **(SEARCHES if search else {})}
    if schedules is not None or search:
        names = [named(name) for name in schedules] if schedules is not None else [*REGISTRY]
        kinds["schedule"] = functools.partial(changes.schedules, names=names)
    remedies: list[Remedy] = []
    candidates: dict[str, list[Remedy]] = {}
    with telling("explain", on_progress) as report:
        for done, (kind, change) in enumerate(kinds.items()):
            report(done, len(kinds) + 1, kind)
            candidates[kind] = _apply(kind, change, begin, begin, memory)
            remedies += _select(kind, candidates[kind], begin, memory)
        report(len(kinds), len(kinds) + 1, "combined")
        remedies += _combine(kinds, candidates, remedies, begin, memory)
    remedies.sort(key=lambda remedy: -remedy.saves)
    faults = _faults_with_memory(begin, memory, candidates["schedule"])
    return Explanation(
        run=begin.run,
        parts=_parts_with_places(begin),
        faults=faults,
        bottleneck=faults[0] if faults else _schedule_fault(begin),
        remedies=remedies,
        memory=memory,
        tolerated=_tolerated_factor(begin),
    )


TOLERANCE = 0.01  # share of the step that slower messages may cost
MAX_FACTOR = 1e6  # tolerated factors above this count as infinite


def _tolerated_factor(begin: Setup) -> float | None:
    """Return the factor on message times that lengthens the step by the tolerance."""
    # None if messages take no time, infinite if the step does not depend on them.
    program, vector = lower_and_price(begin.table, begin.costs, begin.links)
    first_link = program.layout.first_link
    if not vector[first_link:].any():
        return None

    def is_too_long(factor: float) -> bool:
        slower = vector.copy()
        slower[first_link:] *= factor  # costs of messages are last
        return makespan_on_host(program, slower) > (1 + TOLERANCE) * begin.step_time

    if not is_too_long(MAX_FACTOR):
        return math.inf
    low, high = 1.0, MAX_FACTOR  # bisection on a logarithmic scale
    while high > low * (1 + 1e-4):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_too_long(middle) else (middle, high)
    return low


def _parts_with_places(begin: Setup) -> list[Part]:
    """Return the parts of a step, with the worker or link of each."""
    places: dict[str, str] = {}
    for fault in reversed(begin.faults):
        if fault.kind == "imbalance" and fault.worker is not None:
            stage = "" if fault.stage is None else f", stage {fault.stage}"
            places["imbalance"] = f"worker {fault.worker}{stage}"
        elif fault.link is not None:
            places["messages"] = "workers {} and {}".format(*fault.link)
    return [
        part._replace(meaning=f"{part.meaning}: {places[part.name]}")
        if part.name in places
        else part
        for part in begin.step_parts
    ]


def _remedy(kind: str, what: str, setup: Setup, begin: Setup, memory: Memory) -> Remedy:
    """Compare a changed setup with the unchanged one."""
    return Remedy(
        kind,
        what,
        saves=begin.step_time - setup.step_time,
        step_time=setup.step_time,
        assumes=setup.assumes,
        bound=setup.bound,
        memory=memory.ratio(setup),
        fits=memory.fits(setup),
        setup=setup,
    )


def _apply(kind: str, change: Changes, setup: Setup, begin: Setup, memory: Memory) -> list[Remedy]:
    """Apply every change of a kind to a setup; savings count against the unchanged `begin`."""
    return [_remedy(kind, what, changed, begin, memory) for what, changed in change(setup)]


def _select(kind: str, remedies: Sequence[Remedy], begin: Setup, memory: Memory) -> list[Remedy]:
    """Keep remedies that shorten the step or make it fit in memory; of alternatives, the best."""
    # Also keep the best without more pipes than now, which most runtimes do not support.
    min_gain = changes.MIN_GAIN * begin.step_time if memory.fits(begin) else -math.inf
    useful = [remedy for remedy in remedies if remedy.fits and remedy.saves > min_gain]
    if kind not in BEST_ONLY or not useful:
        return useful
    pipes = begin.table.num_pipes
    no_new_pipe = [remedy for remedy in useful if remedy.setup.table.num_pipes <= pipes]
    best = [max(group, key=lambda remedy: remedy.saves) for group in (useful, no_new_pipe) if group]
    return best if best[0] is not best[-1] else best[:1]


def _combine(
    kinds: Mapping[str, Changes],
    candidates: Mapping[str, Sequence[Remedy]],
    remedies: Sequence[Remedy],
    begin: Setup,
    memory: Memory,
) -> list[Remedy]:
    """Combine candidates of several kinds; return the best combination if it beats all remedies."""
    # If memory rules out a good schedule, a second order starts with smaller microbatches.
    orders: list[tuple[str, ...]] = [COMBINED]
    min_gain = changes.MIN_GAIN * begin.step_time
    if any(not remedy.fits and remedy.saves > min_gain for remedy in candidates["schedule"]):
        orders.append(SMALLER_FIRST)
    combinations = [
        _apply_in_turn({kind: kinds[kind] for kind in order}, candidates, begin, memory)
        for order in orders
    ]
    best = max(filter(None, combinations), key=lambda remedy: remedy.saves, default=None)
    best_single = max((remedy.saves for remedy in remedies), default=0.0)
    return [best] if best is not None and best.saves > best_single * (1 + 1e-9) else []


def _apply_in_turn(
    kinds: Mapping[str, Changes],
    candidates: Mapping[str, Sequence[Remedy]],
    begin: Setup,
    memory: Memory,
) -> Remedy | None:
    """Apply the best remedy of each kind in this order; None if fewer than two help."""
    # `candidates` are the remedies of each kind on the unchanged setup.
    setup, titles = begin, list[str]()
    for kind, change in kinds.items():
        remedies = candidates[kind]
        if setup is not begin:
            remedies = _apply(kind, change, setup, begin, memory)
        max_time = setup.step_time - changes.MIN_GAIN * begin.step_time
        better = [remedy for remedy in remedies if remedy.fits and remedy.step_time < max_time]
        if better:
            best = min(better, key=lambda remedy: remedy.step_time)
            setup = best.setup
            titles.append(best.what)
    if len(titles) < 2:
        return None
    return _remedy("combined", "; ".join(titles), setup, begin, memory)


def _faults_with_memory(begin: Setup, memory: Memory, schedules: Sequence[Remedy]) -> list[Fault]:
    """List the faults, with memory if the setup does not fit or it rules out a better schedule."""
    faults = list(begin.faults)
    if memory.limit is not None and not memory.fits(begin):
        needs, limit = memory.begin_needs, np.broadcast_to(memory.limit, begin.run.workers)
        worker = int((needs / limit).argmax())
        why = (
            f"it does not fit: worker {worker} needs {memory.text(needs[worker])} of "
            f"{memory.text(limit[worker])}"
        )
        return [Fault("memory", 0.0, why, worker), *faults]
    if memory.limit is not None and schedules:
        best = max(schedules, key=lambda remedy: remedy.saves)
        best_fitting = max((remedy.saves for remedy in schedules if remedy.fits), default=0.0)
        gain = best.saves - max(best_fitting, 0.0)
        if gain > NEGLIGIBLE * begin.step_time:
            percent, gain_percent = (100 * x / begin.step_time for x in (best.saves, gain))
            why = (
                f"memory rules out {best.what}, which needs {best.memory:.3g} times as much and "
                f"would save {percent:.3g} % of the step, {gain_percent:.3g} % more than what fits"
            )
            faults.append(Fault("memory", gain, why))
    return sorted(faults, key=lambda fault: -fault.seconds)


def _schedule_fault(begin: Setup) -> Fault:
    """Return start and end of the pipeline as the fault of a setup without any other."""
    parts = begin.parts
    ends = parts["start"] + parts["gaps"] + parts["end"]
    share = 100 * ends / (begin.step_time or 1.0)
    return Fault(
        "schedule",
        ends,
        f"nothing stands out: start and end of the pipeline take {share:.3g} % of the step, as "
        f"this schedule has them with {begin.run.microbatches} microbatches",
    )
