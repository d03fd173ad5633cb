"""Parts of the time of a training step, with its other outputs and bands."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, busy_times
from pipejax.analysis.step.outputs import step_outputs
from pipejax.base.checks import check_types
from pipejax.base.data_files import load_json
from pipejax.base.display import short_repr
from pipejax.costs.costs import Costs, with_leaves
from pipejax.costs.model.launchers import launches
from pipejax.costs.model.workload import Workload
from pipejax.costs.scaling import ScaledFields
from pipejax.costs.stage.stage_costs import PARTS, stage_parts
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.costs.system.system import System
from pipejax.engine.lowering.program import HostRun, Program, run_on_host
from pipejax.engine.pricing import cost_vector, lower_and_price
from pipejax.schedules.cells.ops import COMPUTING, INPUT_GRADS, Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

# Parts of any step that sum to its time.
#
# The mean worker computes for a part of the step and waits for the rest. Each reason to wait is
# added to a run with all earlier reasons; its part is the step's growth. Parts sum to the step:
#
#     equal stages, no messages            compute + start + gaps + end
#     rules of the table among usual ops   + rules
#     microbatches as they are             + uneven microbatches
#     stages as they are                   + imbalance
#     messages that use no resource        + messages
#     links as they are                    + blocking
#     offloads, sharding, exchange, update + the exposed time of each, then of each lane
#
# Uneven microbatches and imbalance can be negative, as uneven stages may suit a schedule.

# {part: its texts and cost fields}, in the order in which parts are added
PARTS_FILE = Path(__file__).with_name("step_parts.json")
PART_RECORDS: Mapping[str, Mapping[str, Any]] = load_json(PARTS_FILE)
# {reason to wait: fields of `Costs` that it adds}; blocking adds no field, but the link model
WAITS: Mapping[str, tuple[str, ...]] = {
    name: tuple(record["adds"]) for name, record in PART_RECORDS.items() if "adds" in record
}
LANE = "lane "  # prefix of the part of a lane that a table declares
RULES = "rules"  # name of the part of a table's ordering rules


@short_repr
class Part(NamedTuple):
    """A part of a step's time, such as messages.

    Attributes:
      name: compute, start, gaps, end, uneven microbatches, imbalance, one of `WAITS`, rules of the
        table among usual ops, or a lane.
      seconds: time that the part adds to the step [s].
      meaning: the part in words.
    """

    name: str
    seconds: float
    meaning: str


def _waits(table: ScheduleTable) -> Mapping[str, tuple[str, ...]]:
    """Return {reason to wait: cost fields that it adds}: `WAITS`, then lanes beside compute."""
    phases = table.grammar.custom_phases
    lanes = dict.fromkeys(phase.kind.lane for phase in phases if phase.kind.lane != COMPUTING)
    fields = {lane: tuple(p.kind.time for p in phases if p.kind.lane == lane) for lane in lanes}
    return {**WAITS, **{LANE + lane: times for lane, times in fields.items()}}


def step_parts(evaluation: Evaluation) -> list[Part]:
    """Divide a run's makespan into parts, such as messages, that sum to it.

    Args:
      evaluation: a run.

    Returns:
      All parts in the order in which they are added, including parts of 0 s.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.5], backward=[2.0, 3.0], transmit=0.5))
      >>> [(part.name, part.seconds) for part in step_parts(run) if part.seconds]
      [('compute', 15.0), ('start', 1.875), ('end', 1.875), ('imbalance', 2.25), ('messages', 1.0)]
    """
    check_types(evaluation=(evaluation, Evaluation))
    parts = []
    for name, seconds in _part_growths(evaluation):
        record = PART_RECORDS.get(name, {"meaning": f"ops on {name}"})
        meaning = record["meaning"]
        if evaluation.table.grammar.forward_only:
            meaning = record.get("forward_meaning", meaning)
        parts.append(Part(name, seconds, meaning))
    return parts


def without_rules(table: ScheduleTable) -> ScheduleTable | None:
    """Remove the rules among usual phases that a table adds. Return None if it adds no rules."""
    rules = table.grammar.rules
    other_rules = [rule for rule in rules if {rule.consumer, *rule.producers} - {*Phase}]
    if len(other_rules) == len(rules):
        return None
    return dataclasses.replace(table, grammar=dataclasses.replace(table.grammar, rules=other_rules))


def _part_growths(evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    """Yield each part's name, and the time [s] by which it makes the run longer."""
    table, delay = evaluation.table, Links("delay")
    no_waits = {field: 0.0 for fields in _waits(table).values() for field in fields}
    compute_costs = with_leaves(evaluation.costs, no_waits)
    program, vector = lower_and_price(table, compute_costs, delay)
    compute = float(busy_times(program, vector).mean())
    even_costs = with_equal_stages(compute_costs, table, microbatches=True)
    table_without_rules = without_rules(table)
    program, run = _run(table_without_rules or table, even_costs, delay)
    makespan = float(run.finish.max())
    start, gaps = _start_and_gaps(table, program, run)
    yield "compute", compute
    yield "start", start
    yield "gaps", gaps
    yield "end", makespan - compute - start - gaps
    # each level adds a reason to wait, and its part is the growth of the makespan
    levels = [*_levels(evaluation, compute_costs)]
    if table_without_rules is not None:
        levels.insert(0, (RULES, (even_costs, delay)))
    for name, (costs, links) in levels:
        _, level_run = _run(table, costs, links)
        previous, makespan = makespan, float(level_run.finish.max())
        yield name, makespan - previous


def _start_and_gaps(table: ScheduleTable, program: Program, run: HostRun) -> tuple[float, float]:
    """Return mean idle times [s] of a worker: start (to its first backward), and gaps."""
    # Gaps are idle times from the first backward to the last forward. Without backwards, the first
    # forward takes the place of the first backward.
    # Ops of a row run one after the other. So the idle time up to the end of an op is this end
    # minus the durations so far. Durations 1 2 and ends 1 5 give idle times 0 and 5 - (1 + 2) = 2.
    nodes = program.node_of_cell  # (workers, slots); empty slots are the source, at time 0
    idle = run.finish[nodes] - run.duration[nodes].cumsum(axis=1)
    is_backward, is_forward = (
        np.isin(table.phase, phases) | np.isin(table.partners.phase, phases)
        for phases in (INPUT_GRADS, (Phase.F,))
    )
    # argmax is the index of the first True; in the reversed row, the last True, from the end
    first_backward = (is_backward if is_backward.any() else is_forward).argmax(axis=1)
    last_forward = nodes.shape[1] - 1 - is_forward[:, ::-1].argmax(axis=1)
    last_forward = np.where(is_forward.any(axis=1), last_forward, 0)
    workers = np.arange(len(nodes))
    start = idle[workers, first_backward]  # 0 without backwards, so all idle time is in the end
    gaps = np.maximum(idle[workers, last_forward] - start, 0.0)
    return float(start.mean()), float(gaps.mean())


def _levels(evaluation: Evaluation, costs: Costs) -> Iterator[tuple[str, tuple[Costs, Links]]]:
    """Yield (reason to wait, costs and links of a run with this and all earlier reasons)."""
    # `costs` are costs of compute ops alone, with all differences of microbatches and stages.
    links = Links("delay")
    yield "uneven microbatches", (with_equal_stages(costs, evaluation.table), links)
    yield "imbalance", (costs, links)
    for name, fields in _waits(evaluation.table).items():
        costs = with_leaves(costs, {field: getattr(evaluation.costs, field) for field in fields})
        if name == "blocking":  # from here on, messages use the evaluation's link model
            links = evaluation.links
        yield name, (costs, links)


def with_equal_stages(costs: Costs, table: ScheduleTable, *, microbatches: bool = False) -> Costs:
    """Set op times to their mean over stages, and over microbatches if `microbatches`."""
    leaves = {}
    for name in (*ScaledFields.from_table(table).words["compute"], "pair_factor"):
        value = getattr(costs, name)
        if value is not None and np.ndim(value):
            values = np.asarray(value, float)  # (stages), or (stages, microbatches)
            is_scalar = microbatches or values.ndim == 1
            leaves[name] = values.mean() if is_scalar else values.mean(axis=0, keepdims=True)
    return with_leaves(costs, leaves)


def with_equal_microbatches(costs: Costs, table: ScheduleTable) -> Costs:
    """Set op times of each stage to their mean over microbatches."""
    names = (*ScaledFields.from_table(table).words["compute"], "pair_factor")
    values = {name: np.asarray(getattr(costs, name), float) for name in names}
    means = {name: value.mean(axis=1) for name, value in values.items() if value.ndim > 1}
    return with_leaves(costs, means)


def _run(table: ScheduleTable, costs: Costs, links: Links) -> tuple[Program, HostRun]:
    program, vector = lower_and_price(table, costs, links)
    return program, run_on_host(program, vector)


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class StepReport:
    """Parts of a training step's time, with its throughput and price.

    Attributes:
      step_time: [s].
      breakdown: {part: seconds}; the parts sum to the step time. They are compute, host (the
        accelerator waits for the host), tensor, context and expert (collectives of layers that
        compute does not hide), weights (gathered layer by layer), bubble, messages, offloads,
        gradients (exchange of gradients), and optimizer (with the weights gathered after it).
      accelerators: number of accelerators of the whole job.
      precision: precision of the matrix products; MFU refers to the peak in this precision.
      mfu: model FLOP per second divided by the peak, in [0, 1].
      flops_per_accelerator: model FLOP per second and accelerator.
      tokens_per_second: tokens per second of the whole job.
      bands: {percent: bounds of the step time [s]} from the system's calibration.
      cost_per_step: price of a step [USD]; None if the system has no price.
      cost_per_token: price of a token [USD]; None if the system has no price.
      outputs: {name: value} of these and all other outputs of a step; `pipejax schema evaluate`
        lists names and units.
    """

    step_time: float
    breakdown: Mapping[str, float]
    accelerators: int
    precision: str
    mfu: float
    flops_per_accelerator: float
    tokens_per_second: float
    bands: Mapping[str, tuple[float, float]]
    cost_per_step: float | None
    cost_per_token: float | None
    outputs: dict[str, float]


def step_report(evaluation: Evaluation, workload: Workload, system: System) -> StepReport:
    """Report the parts of a step's time, its throughput and its price.

    Args:
      evaluation: the run, priced by `stage_costs` of the same workload and system.
      workload: model, minibatch and parallelism.
      system: the machine.

    Returns:
      Breakdown, MFU, tokens per second and price; bands, if the system is calibrated.

    Raises:
      ValueError: if the evaluation was priced in another way.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=64)
      >>> workload = pj.Workload(pj.load_model("gpt3-175b"), minibatch=64, tensor_parallel=8)
      >>> system = pj.load_system("h100")
      >>> run = pj.evaluate(table, pj.stage_costs(workload, system, table))
      >>> report = pj.step_report(run, workload, system)
      >>> report.accelerators, max(report.breakdown, key=report.breakdown.get)
      (64, 'compute')
      >>> abs(sum(report.breakdown.values()) / run.step_time - 1) < 1e-9
      True
    """
    check_types(evaluation=(evaluation, Evaluation), workload=(workload, Workload))
    check_types(system=(system, System))
    per_replica = workload.accelerators_per_worker * evaluation.workers
    outputs = step_outputs(evaluation, workload, system)
    return StepReport(
        step_time=evaluation.step_time,
        breakdown=breakdown(evaluation, workload, system),
        accelerators=per_replica * workload.data_parallel,
        precision=workload.precision,
        mfu=outputs["mfu"],
        flops_per_accelerator=outputs["flops_per_accelerator"],
        tokens_per_second=outputs["tokens_per_second"],
        bands=bands(system, evaluation.step_time),
        cost_per_step=outputs.get("cost_per_step"),
        cost_per_token=outputs.get("cost_per_token"),
        outputs=outputs,
    )


def bands(system: System, step_time: float) -> dict[str, tuple[float, float]]:
    """Return {percent: range of the step time [s]}; empty if the system has no calibration."""
    if system.calibration is None:
        return {}
    return {
        f"{band.percent:g}": (band.low * step_time, band.high * step_time)
        for band in system.calibration.bands
    }


def breakdown(evaluation: Evaluation, workload: Workload, system: System) -> dict[str, float]:
    """Return {part: seconds} of a step, with compute divided into kernels, host and so on."""
    program, costs = evaluation.program, stage_parts(workload, system, evaluation.table)
    compute = {
        name: float(busy_times(program, np.asarray(cost_vector(program, costs[name]))).mean())
        for name in PARTS
    }
    parts = {part.name: part.seconds for part in step_parts(evaluation)}
    if not np.isclose(sum(compute.values()), parts["compute"], rtol=1e-6):
        raise ValueError(
            f"{evaluation.schedule} was not priced by this workload and system: evaluate it with "
            "the costs that stage_costs gives for them"
        )
    # lanes and rules of the table keep their names; other parts add up to the lines of the report
    lanes = {name: seconds for name, seconds in parts.items() if name.startswith((LANE, RULES))}
    lines: dict[str, float] = {}
    for name, record in PART_RECORDS.items():
        if (line := record.get("reported_as")) is not None:
            lines[line] = lines.get(line, 0) + parts[name]
    return compute | lines | lanes


# Smallest changes that make a workload fit: sequence parallelism, ZeRO, recomputation.

Change = Mapping[str, Any]
# {change: cost rank}: a rank is above the sum of all smaller ranks, so one costly change is worse
# than all cheaper changes together
COST_RANKS: Mapping[tuple[str, Any], int] = {
    ("sequence_parallel", True): 0,
    ("zero", 1): 1,
    ("recompute", "selective"): 2,
    ("zero", 2): 4,
    ("recompute", "full"): 8,
    ("zero", 3): 16,
}


def fitting_change(
    workload: Workload, table: ScheduleTable, limit: float, launcher: str | None = None
) -> Change | None:
    """Find the cheapest change with which a workload fits in `limit` bytes, or None."""
    # A change is {field of the workload: value}. A named launcher must run the changed workload.

    def rank(change: Change) -> tuple[int, int]:
        return sum(COST_RANKS[entry] for entry in change.items()), len(change)

    for change in sorted(_changes(workload), key=rank):  # the least cost, then the fewest fields
        changed = dataclasses.replace(workload, **change)
        lacks = launches(changed, table, launcher)[0].lacks if launcher else ()
        if not lacks and memory_bytes(changed, table).max() <= limit:
            return change
    return None


def _changes(workload: Workload) -> Iterator[dict[str, Any]]:
    """Yield each combination of changes that save memory, as {field of the workload: value}."""
    values: dict[str, list[Any]] = {name: [None] for name, _ in COST_RANKS}
    if workload.tensor_parallel > 1 and not workload.sequence_parallel:
        values["sequence_parallel"].append(True)
    if workload.data_parallel * workload.context_parallel > 1:
        values["zero"].extend(range(workload.zero + 1, 4))
    # flash attention stores no scores that could be recomputed
    if workload.recompute == "none" and not workload.model.flash_attention:
        values["recompute"].append("selective")
    if not workload.recomputation.layers:
        values["recompute"].append("full")
    for choice in itertools.product(*values.values()):
        change = {k: v for k, v in zip(values, choice, strict=True) if v is not None}
        if change:
            yield change
