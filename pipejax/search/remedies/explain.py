"""`explain`: causes of a long step, and remedies."""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.analysis.scenario import Scenario
from pipejax.analysis.step.evidence import memory_factors, operand_bits, sure_memory
from pipejax.analysis.step.faults import JOINT, NEGLIGIBLE, WHY, Fault, pipeline_ends
from pipejax.analysis.step.step_report import Part, breakdown
from pipejax.base.checks import as_tuple, check_types, wrong
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import mapped
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.costs.edits import RecomputeCells
from pipejax.costs.model.launchers import COMBINED as COMBINED_1F1B, Launch, find_launcher
from pipejax.costs.model.workload import Workload
from pipejax.costs.sources import ModelCosts
from pipejax.costs.stage.stage_costs import stage_parts
from pipejax.costs.system.parts import HEADROOM
from pipejax.costs.system.system import System
from pipejax.engine.lowering.program import makespan_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import UNIT_SLOTS, Phase
from pipejax.schedules.naming import named
from pipejax.schedules.registry import REGISTRY, has_same_order, registered
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.remedies import changes
from pipejax.search.remedies.candidates import (
    RECORDS,
    SHELVES,
    Candidate,
    Memory,
    TableSearch,
    change_launchers,
    complete_launchers,
    first_candidate,
    is_run_by_options,
    run_launch,
    run_launches,
)

_step_time = operator.attrgetter("step_time")
_RECOMPUTATION = re.compile(r"^recomputation \S+(?: with )?| with recomputation \S+$")  # of titles
Changes = Callable[[Candidate], Iterator[Candidate]]
# {kind of remedy: function that yields changes}, in the order in which kinds combine. Changes of
# the table come first, because scaling rules of single stages hold for one table only.
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
LIMITED = {"settings": changes.settings, "microbatches": changes.microbatches}  # read the limit
COMBINED = ("schedule", "settings", "microbatches", "layers", "places", "order", "messages")
SMALLER_FIRST = ("microbatches", "schedule", "settings", "layers", "places", "order", "messages")
COMBINED_KIND = "combined"
SEARCHES: Mapping[str, Changes] = {"optimise": changes.optimised, "layout": changes.layouts}
# kinds with one remedy per launcher, the best, and one that no launcher runs
BEST_ONLY = ("schedule", "microbatches", "layers", "in flight")
OF_HARDWARE = ("repair", "hardware")  # kinds that need other hardware
REPAIR_WEIGHT = 1.1  # factor on the time that a repair saves when remedies are sorted
IN_LAYERS: Mapping[str, str] = RECORDS["exchanges in layers"]  # {part of ops: description}
LARGE_EXCHANGE = 0.25  # share of a step from which such an exchange is a cause; few runs reach it
LARGE_ENDS = 0.05  # share of a step from which start and end of the pipeline are a cause
GAPS = "the order of ops leaves gaps between first backwards and last forwards"
MAX_ASSUMPTIONS = 1  # largest number of assumptions of a remedy
# {kind of cause: {kind of remedy that removes it: description}}
TREATMENTS: Mapping[str, Mapping[str, str]] = RECORDS["treatments"]
PARTS = {"link": "messages"}  # {kind of cause: its part of the step, if the name differs}
ENDS = "start", "end"
CAUSE_PARTS = {"schedule": ENDS, "microbatches": ENDS}
MIN_SHORTENED = 0.1  # share of a cause that a remedy must save to count as shortening the cause
MIN_DIFFERENCE = 0.05  # share of the larger time from which two effects differ


@short_repr
class Remedy(NamedTuple):
    """A change that makes the step shorter.

    Attributes:
      kind: kind of the remedy.
      what: the change, in words.
      saves: time that the step saves [s].
      step_time: new step time [s].
      assumes: assumptions of the change, at most one.
      shelf: "launcher" if options of a launcher run the change, "code" if it needs a table file or
        code, "hardware" if it needs other hardware or a repair.
      launchers: launchers whose options run the change.
      bound: lower bound on the step time of any schedule of the same stages and workers [s].
      memory: memory of the fullest worker, relative to the unchanged run.
      fits: whether the changed run keeps the memory limit; without a limit, the present peak.
      scenario: the changed run.
      layers: layers of each stage, if they are known.
      search: the search that found the table; None without a search.
    """

    kind: str
    what: str
    saves: float
    step_time: float
    assumes: tuple[str, ...]
    shelf: str
    launchers: tuple[str, ...]
    bound: float
    memory: float
    fits: bool
    scenario: Scenario
    layers: tuple[int, ...] = ()
    search: TableSearch | None = None

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Return the options of launchers; for measured times only pipeline options."""
        return run_launches(self.scenario, self.layers)


@short_repr
class Effect(NamedTuple):
    """Time of a cause, or time that a change saves, and why it differs from the cause's part."""

    what: str  # "part", "cause", or the remedy in a few words
    seconds: float  # time [s]
    # part of the step that explains the difference: another part that changes, or the cause's part
    # if some of it remains; empty without a difference
    part: str = ""
    # time by which the other part grows, or that remains of the cause's part [s]
    grows: float = 0.0
    # time that the change saves if the growing part is removed, too [s]; None if it stays
    without: float | None = None


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Reasons for the length of a step, and remedies that make it shorter.

    Attributes:
      run: evaluation of the unchanged run.
      parts: parts of the step time, which sum to it.
      faults: causes of lost time, the largest saving first. Joint causes come last, and so does
        memory if no limit was given.
      bottleneck: the first fault that is neither joint nor memory without a limit; if there is
        none, the start and end of the pipeline.
      effects: the bottleneck's part of the step, the time saved without the bottleneck, and the
        time that its remedy saves; empty if these times are equal.
      remedies: remedies by shelf; within a shelf, the largest saving first, combined ones last.
      skipped: remedies with more than one assumption.
      memory: memory needs and limits of the workers.
      tolerated: factor on message times that makes the step 1 % longer; infinite if no op waits for
        messages, None if messages take no time.
      launcher: the only launcher whose options count; None for all launchers.
    """

    run: Evaluation
    parts: Sequence[Part]
    faults: Sequence[Fault]
    bottleneck: Fault
    effects: Sequence[Effect]
    remedies: Sequence[Remedy]
    skipped: Sequence[str]
    memory: Memory
    tolerated: float | None
    launcher: str | None = None

    @property
    def step_time(self) -> float:
        """Return the step time of the unchanged run [s]."""
        return self.run.step_time


def explain(
    run: Scenario | ScheduleTable,
    costs: Costs | Workload | None = None,
    *,
    system: System | None = None,
    link: str | Links = "delay",
    memory_limit: float | Sequence[float] | None = None,
    stage_layers: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    launcher: str | None = None,
    search: bool = False,
    on_progress: OnProgress | None = None,
) -> Explanation:
    """Find the causes of a long step, and remedies that make it shorter.

    The run is repeated without each cause and with each remedy. So effects are exact for its costs.

    Args:
      run: a scenario of a synchronous schedule; or a table, with the next three arguments.
      costs: measured costs [s], unbatched; or a workload, on a system.
      system: machine of a workload.
      link: link model, or `Links`.
      memory_limit: memory of a worker, in activations of the table or bytes of a workload; default:
        memory of the system. Without both, remedies that need more memory than now are marked.
      stage_layers: (stages) layers of each stage; if set, remedies move whole layers.
      schedules: names of schedules to try; default: the registry.
      launcher: launcher whose options make the first shelf, as "Megatron-LM"; default: any.
      search: whether to run the solvers, too, which take some seconds: schedules under the limit,
        and layers of stages.
      on_progress: called with the number of finished kinds of remedies, of all kinds, and a text.

    Returns:
      Parts, causes and remedies.

    Raises:
      ValueError: if the table is asynchronous or does not run at the costs, a workload has no
        system, stage_layers do not match the stages, or the limit is not above 0.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=16)
      >>> costs = pj.Costs(forward=[1.0, 1.0, 1.5, 1.0], backward=[2.0, 2.0, 3.0, 2.0])
      >>> result = pj.explain(table, costs)
      >>> result.bottleneck.kind, result.bottleneck.stage
      ('imbalance', 2)
    """
    check_types(system=(system, System, type(None)), run=(run, Scenario, ScheduleTable))
    if isinstance(run, Scenario):
        scenario = named_scenario(run)
    else:
        check_types(costs=(costs, Costs, Workload))
        if isinstance(costs, Workload) != (system is not None):
            raise wrong("system", "goes with a workload in place of costs, and a workload needs it")
        source: Any = costs
        if isinstance(costs, Workload) and system is not None:
            source = ModelCosts(costs, system)
        scenario = named_scenario(Scenario(run, costs=source, link=link))
    base = first_candidate(scenario, stage_layers)
    if launcher is not None:
        launcher = run_launch(base.scenario, launcher, base.layers).launcher
    kinds = {**KINDS, **(SEARCHES if search else {})}
    if schedules is not None or search:
        names = [*REGISTRY, COMBINED_1F1B] if schedules is None else as_tuple(schedules)
        kinds["schedule"] = functools.partial(changes.schedules, names=[*map(named, names)])
    with telling("explain", on_progress) as report:
        for memory in _memories(memory_limit, base, launcher):
            for kind, function in LIMITED.items():
                kinds[kind] = functools.partial(function, memory=memory, launcher=launcher)
            shelved = _Shelves(memory, launcher, kinds)
            if remedies := shelved.remedies(report):
                break
    faults, bottleneck = shelved.faults(remedies)
    return Explanation(
        run=base.run,
        parts=_parts_with_places(base),
        faults=faults,
        bottleneck=bottleneck,
        effects=_effects(base, bottleneck, remedies),
        remedies=remedies,
        skipped=[candidate.what for candidate in shelved.skipped],
        memory=memory,
        tolerated=_tolerated_factor(base),
        launcher=launcher,
    )


def _effects(base: Candidate, fault: Fault, remedies: Sequence[Remedy]) -> tuple[Effect, ...]:
    """List the effects of a cause and of its first remedy; empty if their times are equal."""
    treatments = TREATMENTS.get(fault.kind, {})
    remedy = next((remedy for remedy in remedies if remedy.kind in treatments), None)
    if remedy is None:
        return ()
    fault_part = PARTS.get(fault.kind, fault.kind)
    effects = [Effect("part", base.parts[fault_part])]
    if fault.rules:
        without_cause = base.scaled("", [fault.rules], "")  # needs no title and no assumption
        effects.append(_effect("cause", base, without_cause, fault_part))
    after_remedy = Candidate(remedy.scenario)
    effects.append(_effect(treatments[remedy.kind], base, after_remedy, fault_part))
    seconds = [effect.seconds for effect in effects]
    is_unequal = max(seconds) - min(seconds) > MIN_DIFFERENCE * max(map(abs, seconds))
    return tuple(effects) if is_unequal else ()


def _effect(what: str, base: Candidate, changed: Candidate, fault_part: str) -> Effect:
    """Return the time that a change saves, and why it differs from the time of the fault's part."""
    # If the part takes 10 s and the change saves 6 s, another part grows by 4 s, or 4 s of the part
    # remain. The effect names the part that explains most of this difference.
    saved, parts = base.step_time - changed.step_time, changed.parts
    difference = base.parts[fault_part] - saved
    if abs(difference) <= MIN_DIFFERENCE * max(abs(saved), base.parts[fault_part]):
        return Effect(what, saved)
    growths = {part: parts[part] - seconds for part, seconds in base.parts.items()}
    growths[fault_part] = parts[fault_part]  # time that remains of the fault
    sign = math.copysign(1.0, difference)
    part = max(growths, key=lambda part: sign * growths[part])
    can_be_removed = part in WHY and part != fault_part and growths[part] > 0
    without = saved + parts[part] if can_be_removed else None
    return Effect(what, saved, part, growths[part], without)


def shortens(remedy: Remedy, explanation: Explanation) -> bool:
    """Return whether a remedy of the run shortens its first cause, or may do so."""
    fault, base = explanation.bottleneck, explanation.memory.begin
    if fault.kind == "recompute":
        return "recomputation" in remedy.what
    changed = Candidate(remedy.scenario)
    if fault.kind in IN_LAYERS or fault.kind == "link":
        rest = [*changed.faults, *_faults_of_layers(changed)]
        seconds = next((other.seconds for other in rest if other.kind == fault.kind), 0.0)
        return fault.seconds - seconds > MIN_SHORTENED * fault.seconds
    names = CAUSE_PARTS.get(fault.kind, (fault.kind,))
    if remedy.kind in TREATMENTS.get(fault.kind, ()) or names[0] not in base.parts:
        return True  # a treatment, or a fault that is no part of the step, such as memory
    saved = sum(base.parts[name] - changed.parts.get(name, 0.0) for name in names)
    return saved > MIN_SHORTENED * fault.seconds


def named_scenario(scenario: Scenario) -> Scenario:
    """Replace a scenario's table by the name and options of a schedule that builds it, if any."""
    if isinstance(scenario.schedule, str) and scenario.schedule in REGISTRY:
        return scenario
    table = scenario.replace(edits=()).table()
    cells = (RecomputeCells(),) if Phase.R in table.used_phases else ()
    if cells and has_same_order(table, table.with_recomputation()):
        scenario = scenario.with_edit(*cells)  # other schedules recompute, too
    size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
    for name, variant in (*filter(None, [registered(table)]), *_planned_schedules(table)):
        match = scenario.replace(schedule=name, options=variant, **size)
        try:
            # a file may have other idle slots than a plan for these times
            has_other_slots = bool(cells) or REGISTRY[name].planned
            is_same = has_same_order if has_other_slots else is_same_table
            if is_same(match.replace(edits=cells).table(), table):
                return match
        except ValueError:  # no such schedule exists for these numbers
            continue
    return scenario


def _planned_schedules(table: ScheduleTable) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (schedule, options) that may plan this table, with times of the run or equal ones."""
    is_small = table.num_workers * table.num_microbatches <= changes.MAX_OPS_PLANNED
    for name, builder in REGISTRY.items():
        has_stages = builder.stages_per_worker * table.num_workers == table.num_stages
        is_plan = builder.planned and "offload" not in builder.options and has_stages and is_small
        if is_plan or name == table.name:
            yield name, {}
        if is_plan:
            yield name, {"slots": UNIT_SLOTS}


def is_same_table(table: ScheduleTable, other: ScheduleTable) -> bool:
    """Return whether two tables have the same rows, grammar and placement."""
    pairs = zip((*table.cells, *table.partners), (*other.cells, *other.partners), strict=True)
    is_same = table.grammar == other.grammar and np.array_equal(table.placement, other.placement)
    return is_same and all(np.array_equal(array, other_array) for array, other_array in pairs)


def _memories(
    memory_limit: float | Sequence[float] | None, base: Candidate, launcher: str | None
) -> Iterator[Memory]:
    """Yield the memory limit; without one, yield limits of the system to try in turn."""
    # If the run fits in the machine's memory, the limit is that of `plan`, or the need of the run
    # if this is larger. If the run does not fit, a less sure limit follows, which is used if
    # nothing fits under the first.
    workload, system = base.scenario.model_workload, base.scenario.system
    if memory_limit is not None or workload is None or system is None:
        limit = None if memory_limit is None else np.asarray(memory_limit, float)
        shapes = ((), (base.table.num_workers,))
        if limit is not None and (limit.shape not in shapes or not (limit > 0).all()):
            must = "must be above 0, or so for each worker"
            raise wrong("memory_limit", f"{must}, got {memory_limit!r}")
        yield Memory(base, limit)
        return
    source = find_launcher(launcher).source if launcher else ""
    factors = memory_factors(source, bits=operand_bits(workload.precision))
    available, need = float(system.memory_available), float(Memory(base).begin_needs.max())
    planned = (1 - HEADROOM) * available
    sure = sure_memory(planned, available, factors)
    for bytes_limit in [max(sure, need)] if need <= available else dict.fromkeys((sure, planned)):
        yield Memory(base, bytes_limit, available, factors)


TOLERANCE = 0.01  # share of the step that slower messages may cost in `tolerated`
MAX_FACTOR = 1e6  # tolerated factors above this count as infinite


def _tolerated_factor(base: Candidate) -> float | None:
    """Return the factor on message times that lengthens the step by `TOLERANCE`."""
    # It is infinite if no factor does, and None if messages take no time.
    program, vector = lower_and_price(base.table, base.table_costs, base.scenario.links)
    first_link = program.layout.first_link
    if not vector[first_link:].any():
        return None

    def is_too_long(factor: float) -> bool:
        slower = vector.copy()
        slower[first_link:] *= factor  # costs of messages are last
        return makespan_on_host(program, slower) > (1 + TOLERANCE) * base.step_time

    if not is_too_long(MAX_FACTOR):
        return math.inf
    low, high = 1.0, MAX_FACTOR  # bisection on a logarithmic scale
    while high > low * (1 + 1e-4):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_too_long(middle) else (middle, high)
    return low


def _parts_with_places(base: Candidate) -> list[Part]:
    """Return the parts of a step; imbalance and messages name their worker or link."""
    places: dict[str, str] = {}
    for fault in reversed(base.faults):
        if fault.kind == "imbalance" and fault.worker is not None:
            stage = "" if fault.stage is None else f", stage {fault.stage}"
            places["imbalance"] = f"worker {fault.worker}{stage}"
        elif fault.link is not None:
            places["messages"] = "workers {} and {}".format(*fault.link)
    return [
        part._replace(meaning=f"{part.meaning}: {places[part.name]}")
        if part.name in places
        else part
        for part in base.step_parts
    ]


class _Shelves:
    """Selection of candidates as remedies, with the launchers that can apply them."""

    def __init__(self, memory: Memory, launcher: str | None, kinds: Mapping[str, Changes]) -> None:
        self.memory, self.launcher, self.kinds = memory, launcher, kinds
        self.skipped: list[Candidate] = []  # candidates with several assumptions
        self._candidates: dict[tuple[str, Candidate], list[Candidate]] = {}

    def candidates(self, kind: str, old: Candidate) -> list[Candidate]:
        """List the changes of this kind that can be made to a candidate, from a cache."""
        if (kind, old) not in self._candidates:
            self._candidates[kind, old] = list(self.kinds[kind](old))
        return self._candidates[kind, old]

    def select(self, kind: str) -> list[Remedy]:
        """Return the remedies of a kind that shorten the step or make it fit in memory."""
        # Kinds in `BEST_ONLY` have one remedy per launcher.
        base, memory, remedies = self.memory.begin, self.memory, []
        min_gain = changes.MIN_GAIN * base.step_time
        if not memory.fits(base):  # remedies that fit may be slower
            min_gain = -math.inf
        schedule = self.best_builtin_schedule() if kind == "schedule" else None
        # without a limit, a schedule may need more memory than the run: the loop would skip it
        if schedule is not None and not memory.fits(schedule):
            remedies.append(self.remedy(kind, schedule, self.launchers(kind, base, schedule)))
        served: set[str] = set()  # launchers with a remedy of this kind; "" stands for none
        for candidate in sorted(self.candidates(kind, base), key=_step_time):
            if base.step_time - candidate.step_time <= min_gain or not memory.fits(candidate):
                continue
            if len(candidate.assumes) > MAX_ASSUMPTIONS:
                self.skipped.append(candidate)
                continue
            launchers = self.launchers(kind, base, candidate)
            candidate_launchers = {*launchers} or {""}
            if kind in BEST_ONLY and candidate_launchers <= served:
                continue
            served |= candidate_launchers
            remedies.append(self.remedy(kind, candidate, launchers))
        return remedies

    def remedies(self, report: OnProgress) -> list[Remedy]:
        """Return all remedies by shelf (options, code, hardware), the largest saving first."""
        remedies: list[Remedy] = []
        for done, kind in enumerate(self.kinds):
            report(done, len(self.kinds) + 1, kind)
            remedies += self.select(kind)
        report(len(self.kinds), len(self.kinds) + 1, "combined")
        # combinations of options alone, then of any changes
        for has_options in (True, False):
            combined = self.combine(has_options)
            compared_shelves = ("launcher",) if has_options else ("launcher", "code")
            best = max((r.saves for r in remedies if r.shelf in compared_shelves), default=0.0)
            if combined and combined.saves > best * (1 + 1e-9):
                remedies.append(combined)
        shelves = [*SHELVES]
        remedies.sort(key=lambda r: -r.saves * (REPAIR_WEIGHT if r.kind == "repair" else 1.0))
        # the sort is stable; on a shelf, combined remedies are last
        remedies.sort(key=lambda r: (shelves.index(r.shelf), r.kind == COMBINED_KIND))
        return remedies

    def launchers(
        self, kind: str, old: Candidate, new: Candidate, *, may_lack: bool = False
    ) -> tuple[str, ...]:
        names = () if kind in OF_HARDWARE else change_launchers(old, new, may_lack=may_lack)
        return tuple(name for name in names if self.launcher in (None, name))

    def remedy(self, kind: str, candidate: Candidate, launchers: Sequence[str]) -> Remedy:
        """Return a candidate as a remedy that the options of these launchers can apply."""
        return Remedy(
            kind,
            candidate.what,
            saves=self.memory.begin.step_time - candidate.step_time,
            step_time=candidate.step_time,
            assumes=candidate.assumes,
            shelf="hardware" if kind in OF_HARDWARE else "launcher" if launchers else "code",
            launchers=tuple(launchers),
            bound=candidate.bound,
            memory=self.memory.ratio(candidate),
            fits=self.memory.fits(candidate),
            scenario=candidate.scenario,
            layers=candidate.layers,
            search=candidate.search,
        )

    def allowed(self, kind: str) -> list[Candidate]:
        """List changes of the run with few assumptions that options of the launcher can apply."""
        base = self.memory.begin
        few = (c for c in self.candidates(kind, base) if len(c.assumes) <= MAX_ASSUMPTIONS)
        return [c for c in few if self.launcher is None or self.launchers(kind, base, c)]

    def best_builtin_schedule(self) -> Candidate | None:
        """Return the schedule of least memory that saves at least half of the gaps, or None."""
        # It has the run's number of stages, and fits in memory. A user's table without memory limit
        # may have gaps to save memory: then schedules that need more memory count, too.
        memory, base = self.memory, self.memory.begin
        step, gaps = base.step_time, base.parts["gaps"]
        may_need_more = memory.limit is None and not isinstance(base.scenario.schedule, str)
        schedules = self.allowed("schedule") if gaps > NEGLIGIBLE * step else []
        faster = [c for c in schedules if c.step_time < step - gaps / 2]
        comparable = [c for c in faster if c.table.num_stages == base.table.num_stages]
        fitting = [c for c in comparable if may_need_more or memory.fits(c)]
        return min(
            fitting, key=lambda c: (memory.ratio(c), len(c.assumes), c.step_time), default=None
        )

    def faults(self, remedies: Sequence[Remedy]) -> tuple[list[Fault], Fault]:
        """Return all faults, the costliest first, and the bottleneck (see `Explanation`)."""
        memory, base = self.memory, self.memory.begin
        # a setting is no fault if the launcher has no better setting
        lacks, settings = _lacks(base, self.launcher), self.candidates("settings", base)
        settings = [c for c in settings if _lacks(c, self.launcher).issubset(lacks)]
        faults = [*base.faults, *_faults_of_layers(base), *_faults_of_settings(memory, settings)]
        if (order := self.best_builtin_schedule()) is not None:
            gain = min(base.parts["gaps"], base.step_time - order.step_time)
            faults.append(Fault("gaps", gain, GAPS))
        schedules = self.allowed("schedule")
        faults = self._add_pipeline_ends(faults, schedules)
        faults += self._faults_of_memory(schedules, remedies)
        # Joint faults come last. So does memory without a limit, as the run itself sets the limit.
        last_kinds = {JOINT} if memory.limit is not None else {JOINT, "memory"}
        fits = memory.fits(base)  # if the run does not fit, memory comes first
        faults.sort(key=lambda f: (f.kind in last_kinds, fits or f.kind != "memory", -f.seconds))
        bottleneck = next((fault for fault in faults if fault.kind not in last_kinds), None)
        return faults, bottleneck or _schedule_fault(base)

    def _faults_of_memory(
        self, schedules: Sequence[Candidate], remedies: Sequence[Remedy]
    ) -> Iterator[Fault]:
        """Yield memory as a fault if the run exceeds it or it rules out the best schedule."""
        memory, base = self.memory, self.memory.begin
        if memory.limit is not None and not memory.fits(base):
            needs = memory.begin_needs
            limit = np.broadcast_to(memory.available or memory.limit, base.run.workers)
            worker = int((needs / limit).argmax())
            why = (
                f"it does not fit: worker {worker} needs {memory.text(needs[worker])} of "
                f"{memory.text(limit[worker])}"
            )
            yield Fault("memory", 0.0, why, worker)
            return
        # A run by options of a launcher is compared with other options first. If these gain nothing
        # and the limit is known, or if the run itself needs code, any change counts.
        is_by_options = self.launcher is not None or is_run_by_options(base)
        groups: list[Any] = [("option", ("launcher",))] if is_by_options else []
        if memory.limit is not None or not is_by_options:
            groups.append(("change", ("launcher", "code")))
        for noun, shelves in groups:
            fitting = [r.step_time for r in remedies if r.fits and r.shelf in shelves]
            max_time = min([base.step_time, *fitting]) - NEGLIGIBLE * base.step_time
            faster = sorted((c for c in schedules if c.step_time < max_time), key=_step_time)
            is_any = "code" in shelves
            best = next((c for c in faster if is_any or self.launchers("schedule", base, c)), None)
            if best is None:
                continue
            gain = min([base.step_time, *fitting]) - best.step_time
            names = " or ".join(self.launchers("schedule", base, best))
            shelf = f"an option of {names}" if names else SHELVES["code"]
            need = math.ceil(100 * memory.needs(best).max()) / 100  # a limit that admits `best`
            limit_text = "" if memory.limit is not None else f" (--memory-limit {need:g} allows it)"
            more = f" more than the best {noun} that fits" if fitting else ""
            why = (
                f"{best.what} ({shelf}) would save {100 * gain / base.step_time:.3g} % of the step"
                f"{more}, but needs {memory.ratio(best):.3g} times the memory of now{limit_text}"
            )
            yield Fault("memory", gain, why)
            return

    def _add_pipeline_ends(self, faults: list[Fault], schedules: list[Candidate]) -> list[Fault]:
        """Add a long start and end of the pipeline to the fault "microbatches", or as a fault."""
        memory, base, step = self.memory, self.memory.begin, self.memory.begin.step_time
        fitting = [c for c in (*schedules, *self.allowed("microbatches")) if memory.fits(c)]
        best = min(fitting, key=_step_time, default=base)
        end_seconds, why = pipeline_ends(base.parts, step)
        saved = min(end_seconds, step - best.step_time)
        if end_seconds < LARGE_ENDS * step or saved <= NEGLIGIBLE * step:
            return faults
        if saved < end_seconds:
            why += f", and {best.what} would save {100 * saved / step:.3g} %"
        end_fault = Fault("schedule", 0.0, why)
        end_fault = next((fault for fault in faults if fault.kind == "microbatches"), end_fault)
        others = [fault for fault in faults if fault is not end_fault]
        return [*others, end_fault._replace(seconds=max(end_fault.seconds, saved))]

    def combine(self, has_options: bool) -> Remedy | None:
        """Return the best combination of changes, or None; options alone if `has_options`."""
        # If memory rules out good changes, another order of kinds starts with smaller microbatches.
        memory = self.memory
        orders: list[tuple[str, ...]] = [COMBINED]
        max_time = (1 - changes.MIN_GAIN) * memory.begin.step_time
        runs = [c for kind in COMBINED[:2] for c in self.candidates(kind, memory.begin)]
        if any(c.step_time < max_time and not memory.fits(c) for c in runs):
            orders.append(SMALLER_FIRST)
        # the best schedule may rule out compiled kernels, or need less recomputation
        orders += [("settings", *COMBINED)] if has_options else []
        combined = (self._apply_in_turn(order, has_options) for order in orders)
        return min(filter(None, combined), key=lambda remedy: remedy.step_time, default=None)

    def _apply_in_turn(self, kinds: Sequence[str], has_options: bool) -> Remedy | None:
        """Apply the best change of each kind in this order; return None if fewer than two help."""
        # With `has_options`, options of one launcher must apply all changes.
        base = best = self.memory.begin
        names: set[str] | None = None  # launchers with options for all changes
        titles: list[str] = []
        queue = [*kinds]
        while queue:
            kind = queue.pop(0)
            max_time = best.step_time - changes.MIN_GAIN * base.step_time
            options = self.candidates(kind, best)
            better = [c for c in options if c.step_time < max_time and self.memory.fits(c)]
            # if options run the combination so far, a setting must not need code
            is_by_options = names and kind == "settings" and names & complete_launchers(best)
            for candidate in sorted(better, key=_step_time):
                common_names = {*self.launchers(kind, best, candidate, may_lack=True)}
                if names is not None:
                    common_names &= names
                is_complete = bool(common_names & complete_launchers(candidate))
                is_possible = is_complete or not (has_options or is_by_options)
                if len(candidate.assumes) <= MAX_ASSUMPTIONS and is_possible:
                    best, names = candidate, common_names
                    if "recomputation" in candidate.what:  # it replaces an earlier one
                        titles = [*filter(None, (_RECOMPUTATION.sub("", t) for t in titles))]
                    titles.append(candidate.what)
                    if kind == "settings":
                        queue.insert(0, kind)  # settings add to each other
                    break
        launchers = sorted((names or set()) & complete_launchers(best))
        if len(titles) < 2 or (has_options and not launchers):
            return None
        combined = best.changed(f"combined: {'; '.join(titles)}", best.scenario)
        return self.remedy(COMBINED_KIND, combined, launchers)


def _faults_of_settings(memory: Memory, settings: Sequence[Candidate]) -> Iterator[Fault]:
    """Yield recomputation as a fault if the step fits in memory with less of it."""
    base = memory.begin
    fitting = [c for c in settings if "recomputation" in c.what and memory.fits(c)]
    best = min(fitting, key=_step_time, default=base)
    gain = base.step_time - best.step_time
    if gain > NEGLIGIBLE * base.step_time:
        workload: Any = base.scenario.source.workload
        why = f"activations are recomputed ({workload.recompute}) although {best.what} fits"
        yield Fault("recompute", gain, why)


def _lacks(candidate: Candidate, launcher: str | None) -> set[str]:
    """Return the features of a candidate that a launcher lacks; empty if `launcher` is None."""
    return {text for row in candidate.launches if row.launcher == launcher for text in row.lacks}


def _faults_of_layers(base: Candidate) -> list[Fault]:
    """List large exchanges inside layers, and a slow host, as faults of runs of a workload."""
    workload, system, faults = base.scenario.workload, base.scenario.system, []
    if workload is None or system is None:
        return []
    costs, times = base.table_costs, breakdown(base.run, workload, system)
    for name, part in stage_parts(workload, system, base.table).items():
        min_share = NEGLIGIBLE if name == "host" else LARGE_EXCHANGE
        if name not in IN_LAYERS or times[name] < min_share * base.step_time:
            continue
        other_costs = mapped(np.subtract, costs, part)
        run = evaluate(base.table, other_costs, link=base.scenario.links)
        gain = base.step_time - run.step_time
        faults.append(Fault(name, gain, f"no compute hides {IN_LAYERS[name]}"))
    return faults


def _schedule_fault(base: Candidate) -> Fault:
    """Return pipeline start and end as the fault of a run that has no other fault."""
    ends, why = pipeline_ends(base.parts, base.step_time)
    count = base.run.microbatches
    why += f", as this schedule has them with {count} microbatch{'es' if count > 1 else ''}"
    why = why if base.table.num_workers > 1 else "the step has no pipeline"
    return Fault("schedule", ends, f"nothing stands out: {why}")
