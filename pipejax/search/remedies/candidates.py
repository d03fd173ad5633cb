"""Candidates: changed scenarios that may be faster than a run, with their memory needs."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, activation_memory
from pipejax.analysis.scenario import TABLE_FIELDS, Scenario
from pipejax.analysis.step.faults import Fault, find_faults
from pipejax.analysis.step.step_report import Part, step_parts
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, whole_number, wrong
from pipejax.base.data_files import load_json
from pipejax.base.display import short_repr, with_short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.edits import ScaledTimes
from pipejax.costs.model.launchers import Launch, find_launcher, machine_launches, pipeline_launches
from pipejax.costs.scaling import stage_overlaps
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.bounds import lower_bound
from pipejax.search.schedule.problem import build_problem

Needs = Float[NumpyArray, " workers"]


@short_repr
class TableSearch(NamedTuple):
    """Record of the search that found a candidate's table, so that it can be repeated."""

    kind: str  # "messages", "optimize" or "ring"
    scenario: Scenario  # the run whose table the search replaced
    limits: tuple[float, ...] = ()  # activations that each worker may hold


@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A scenario that may be faster than a run."""

    scenario: Scenario
    what: str = ""  # the change, in words
    assumes: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()  # layers of each measured stage, if they are known
    search: TableSearch | None = None

    @property
    def table(self) -> ScheduleTable:
        """Return the table."""
        return self.scenario.table()

    @property
    def table_costs(self) -> Costs:
        """Return the costs of the table [s]."""
        return self.scenario.table_costs()

    @property
    def run(self) -> Evaluation:
        """Return the evaluation."""
        return self.scenario.evaluate()

    @property
    def step_time(self) -> float:
        """Return the step time [s]."""
        return self.run.step_time

    @functools.cached_property
    def memory_bytes(self) -> Needs | None:
        """Return the peak memory of each worker [B]; None for measured times without a model."""
        workload = self.scenario.model_workload
        return None if workload is None else np.asarray(memory_bytes(workload, self.table), float)

    @functools.cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Return the options of each launcher that runs the scenario."""
        return run_launches(self.scenario, self.layers)

    @functools.cached_property
    def step_parts(self) -> list[Part]:
        """List the parts of the step time."""
        texts, parts = self.part_texts, step_parts(self.run)
        return [p._replace(meaning=texts.get(p.name, {}).get("meaning", p.meaning)) for p in parts]

    @property
    def parts(self) -> Mapping[str, float]:
        """Return {part of the step: time [s]}."""
        return {part.name: part.seconds for part in self.step_parts}

    @functools.cached_property
    def faults(self) -> list[Fault]:
        """List the faults that make the run slow."""
        texts, faults = self.part_texts, find_faults(self.run, self.step_parts)
        return [f._replace(why=texts.get(f.kind, {}).get("cause", f.why)) for f in faults]

    @property
    def part_texts(self) -> Mapping[str, Mapping[str, str]]:
        """Return texts on parts of the step that replicas with a split optimizer (ZeRO) run."""
        workload = self.scenario.source.workload
        if workload is None or workload.data_parallel * workload.context_parallel == 1:
            return {}
        return RECORDS["split optimizer"] if workload.zero in (1, 2) else {}

    @functools.cached_property
    def bound(self) -> float:
        """Return a lower bound on the step time of any schedule of these stages and workers [s]."""
        # If `optimize` does not support the problem, the bound is the work of the busiest worker.
        busy = float(self.run.busy.max())
        try:
            no_limit = float(self.table.num_stages * self.table.num_microbatches)
            problem = build_problem(self.table, self.table_costs, no_limit)
        except (ValueError, MismatchError):
            return busy
        return max(busy, min(lower_bound(problem).value * problem.unit, self.step_time))

    def changed(self, what: str, scenario: Scenario, *assumes: str, **fields: Any) -> "Candidate":
        """Return the candidate with a changed scenario and further assumptions."""
        assumptions = tuple(dict.fromkeys((*self.assumes, *assumes)))
        fields |= {"what": what, "scenario": scenario, "assumes": assumptions}
        return dataclasses.replace(self, **fields)

    def scaled(self, what: str, rules: Sequence[str], *assumes: str) -> "Candidate":
        """Return the candidate with costs scaled by rules such as "F@stage0*1.5"."""
        edit = self.scenario.find_edit(ScaledTimes)
        if edit is not None:
            edit.check_places(self.table)
        old_rules = () if edit is None else (edit.rules,)
        edit = ScaledTimes(",".join((*old_rules, *rules)), self.table.num_stages)
        return self.changed(what, self.scenario.pinned().with_edit(edit), *assumes)

    def rebuilt(self, what: str, *assumes: str, **schedule: Any) -> "Candidate":
        """Return the candidate with another schedule or another number of microbatches."""
        other = self.changed(what, self.scenario.replace(**schedule), *assumes)
        layers = restage_layers(self.layers, other.table.num_stages)
        return dataclasses.replace(other, layers=layers)

    def with_table(
        self, what: str, table: ScheduleTable, search: TableSearch, *assumes: str
    ) -> "Candidate":
        """Return the candidate with a table that a search found."""
        return self.changed(what, self.scenario.with_table(table), *assumes, search=search)


def restage_layers(layers: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Return the layers of each stage after stages merge or divide."""
    # The result is empty if a layer would be divided.
    if not layers:
        return ()
    layers_per_stage = stage_overlaps(len(layers), stages) @ np.array(layers)
    rounded = tuple(round(layer_count) for layer_count in layers_per_stage.tolist())
    return rounded if np.allclose(layers_per_stage, rounded, rtol=0, atol=1e-9) else ()


def first_candidate(scenario: Scenario, layers: Sequence[int] | None = None) -> Candidate:
    """Return the unchanged run as a candidate; refuse an asynchronous schedule."""
    table = scenario.table()
    edits = tuple(
        dataclasses.replace(edit, stages=table.num_stages)
        if isinstance(edit, ScaledTimes)
        else edit
        for edit in scenario.edits
    )
    costs = scenario.source.with_stages(table.num_stages)
    if table.updates_within:
        raise ValueError(
            f"{table.name} updates weights during a step: an asynchronous schedule has no step to "
            "explain; pipejax sensitivity names its bottleneck"
        )
    fixed = scenario.replace(edits=edits, costs=costs)
    return Candidate(fixed, layers=_check_layers(layers, scenario))


def _check_layers(layers: Sequence[int] | None, scenario: Scenario) -> tuple[int, ...]:
    """Return the number of layers of each stage; empty if it is unknown."""
    if layers is None:
        return ()
    if scenario.source.workload is not None:
        raise wrong("stage_layers", "need measured times: a model has its own layers")
    counts, stages = [whole_number(c, "stage_layers") for c in layers], scenario.table().num_stages
    if len(counts) != stages:
        raise MismatchError(
            f"stage_layers has {len(counts)} entries, the table has {stages} stages", "stage_layers"
        )
    return tuple(counts)


@with_short_repr("begin limit")
@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """Memory needs and limits of the workers."""

    begin: Candidate  # the unchanged run
    limit: Needs | Float[NumpyArray, ""] | float | None = None  # of a worker; None if unknown
    available: float = 0.0  # memory of an accelerator [B], if the limit follows from it
    # ratios measured / predicted memory of the launcher's runs, ascending; empty without runs
    factors: Sequence[float] = ()

    @property
    def unit(self) -> str:
        """Return the unit of memory: "bytes" with a model, else "activations" of the table."""
        return "activations" if self.begin.scenario.model_workload is None else "bytes"

    def text(self, amount: float) -> str:
        """Format a need with its unit."""
        return f"{amount / 1e9:.1f} GB" if self.unit == "bytes" else f"{amount:.4g} activations"

    def needs(self, candidate: Candidate) -> Needs:
        """Return the peak memory need of each worker."""
        if candidate.memory_bytes is not None:
            return candidate.memory_bytes
        table = candidate.table
        # The unit is an activation of the first run, on the worker with the most layers. All
        # candidates divide the same minibatch, so fewer microbatches are larger.
        first = self.begin.table
        size = first.num_microbatches / table.num_microbatches
        sizes = size * table.worker_parts / first.worker_parts.max()
        return activation_memory(candidate.run, sizes=sizes).peak

    @functools.cached_property
    def begin_needs(self) -> Needs:
        """Return the peak memory need of each worker in the unchanged run."""
        return self.needs(self.begin)

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate keeps the limit, or without a limit the first run's peak."""
        limit = self.begin_needs.max() if self.limit is None else self.limit
        return bool((self.needs(candidate) <= np.asarray(limit) * (1 + 1e-9)).all())

    def ratio(self, candidate: Candidate) -> float:
        """Return the largest need of a worker over that in the unchanged run; 0 / 0 is 1."""
        need, begin_need = self.needs(candidate).max(), self.begin_needs.max()
        return 1.0 if need == begin_need else float(need / begin_need)


RECORDS = load_json(Path(__file__).with_name("remedies.json"))
SHELVES: Mapping[str, str] = RECORDS["shelves"]  # {shelf: what its remedies need}
TABLE_SUFFIX = ".csv"  # ending of an option's value that names the file of a table
# {launcher: its options for the stages of each worker}; without them, a worker has one or two
STAGE_OPTIONS: Mapping[str, Collection[str]] = RECORDS["stage options"]


def run_launches(scenario: Scenario, layers: Sequence[int]) -> tuple[Launch, ...]:
    """Return the options of launchers for a run; for measured times only pipeline options."""
    workload, system = scenario.source.workload, scenario.source.system
    if workload is not None and system is not None:
        return machine_launches(workload, scenario.table(), system, scenario.source.stack, None)
    return pipeline_launches(scenario.table(), layers or None)


def run_launch(scenario: Scenario, launcher: str, layers: Sequence[int] = ()) -> Launch:
    """Return the options of a launcher for a run; refuse a launcher without such options."""
    by_name = {launch.launcher: launch for launch in run_launches(scenario, layers)}
    name, schedules = find_launcher(launcher).name, find_launcher(launcher).schedules
    if name not in by_name and len(schedules) == 1:
        return Launch(name, {}, ())  # no option changes its schedule
    if name not in by_name:
        names = ", ".join(by_name)
        reason = f"got {name}, whose options need a model's batch size: leave --launcher out"
        raise wrong("launcher", f"must be one of {names} at measured times, {reason}")
    return by_name[name]


def change_launchers(old: Candidate, new: Candidate, *, may_lack: bool = False) -> tuple[str, ...]:
    """List the launchers whose options turn the old run into the new run."""
    # `may_lack` keeps launchers that lack a feature of the new run, which a later change may remove
    if old.layers and not new.layers:
        return ()  # no options divide a layer
    old_launches = {launch.launcher: launch for launch in old.launches}
    # a launcher runs any stages of an unchanged schedule, as the run has the table file already
    is_same_schedule = all(
        getattr(old.scenario, name) == getattr(new.scenario, name) for name in TABLE_FIELDS
    )
    return tuple(
        launch.launcher
        for launch in new.launches
        if (may_lack or not launch.lacks)
        and (_has_stages(launch, new) or is_same_schedule)
        # equal options would start the old run: times, places and orders are not options
        and launch != old_launches[launch.launcher]
    )


def complete_launchers(candidate: Candidate) -> set[str]:
    """Return the launchers that lack no feature of a run."""
    return {launch.launcher for launch in candidate.launches if not launch.lacks}


def is_run_by_options(candidate: Candidate) -> bool:
    """Return whether options of a launcher, without a table file, start the run."""
    launches = (launch for launch in candidate.launches if not launch.lacks)
    return any(_has_stages(launch, candidate) for launch in launches)


def _has_stages(launch: Launch, candidate: Candidate) -> bool:
    """Return whether the options alone, without a table file, give each worker its stages."""
    # by default a launcher gives a worker one stage, or the two of a V
    names = STAGE_OPTIONS.get(launch.launcher, launch.options)
    is_stated = candidate.table.stages_per_worker <= 2 or any(
        name in launch.options for name in names
    )
    has_file = any(str(value).endswith(TABLE_SUFFIX) for value in launch.options.values())
    return is_stated and not has_file
