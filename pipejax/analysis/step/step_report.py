"""Parts of the time of a training step, and its MFU, tokens, price and bands."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, busy_times
from pipejax.analysis.step.step_parts import LANE, RULES, step_parts
from pipejax.base.checks import check_types
from pipejax.base.display import short_repr
from pipejax.costs.layers.formulas import model_flop
from pipejax.costs.model.launchers import launches
from pipejax.costs.model.workload import Workload
from pipejax.costs.stage.stage_costs import PARTS, stage_parts
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.costs.system.system import Number, System
from pipejax.engine.pricing import cost_vector
from pipejax.schedules.table.table import ScheduleTable

# parts of the step by their names here, where workers are not distinguished
WAITS: Mapping[str, tuple[str, ...]] = {
    "bubble": ("start", "gaps", "end", "uneven microbatches", "imbalance"),
    "messages": ("messages", "blocking"),
    "offloads": ("offloads",),
    "gradients": ("sharding", "exchange"),
    "optimizer": ("update",),
}


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class StepReport:
    """Parts of the time of a training step, and its throughput and price.

    Attributes:
      step_time: [s].
      breakdown: seconds by part, which sum to the step time: compute, host (the accelerator waits
        for it), tensor, context, expert (collectives of layers that compute does not hide), weights
        (gathered layer by layer), bubble, messages, offloads, gradients (their exchange),
        optimizer (with the weights gathered after it).
      accelerators: of the whole job.
      precision: of the products, whose peak MFU refers to.
      mfu: share of that peak that the model's FLOP reach, in [0, 1].
      flops_per_accelerator: the model's FLOP per second and accelerator.
      tokens_per_second: of the whole job.
      bands: bounds of the step time by percent, from the system's calibration [s].
      cost_per_step: None where the system has no price [USD].
      cost_per_token: likewise [USD].

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=8, tensor_parallel=8)
      >>> system = pj.load_system("h100")
      >>> run = pj.evaluate(table, pj.stage_costs(workload, system, table))
      >>> report = pj.step_report(run, workload, system)
      >>> report.accelerators, max(report.breakdown, key=report.breakdown.get)
      (32, 'compute')
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


def step_report(evaluation: Evaluation, workload: Workload, system: System) -> StepReport:
    """Report the parts of a step's time, its throughput and price.

    Args:
      evaluation: the run, priced by `stage_costs` of the same workload and system.
      workload: model, minibatch and parallelism.
      system: the machine.

    Returns:
      Its breakdown, MFU, tokens per second, price, and bands where the system is calibrated.

    Raises:
      ValueError: if the evaluation was priced in another way.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=64)
      >>> workload = pj.Workload(pj.load_model("gpt3-175b"), minibatch=64, tensor_parallel=8)
      >>> system = pj.load_system("h100")
      >>> run = pj.evaluate(table, pj.stage_costs(workload, system, table))
      >>> report = pj.step_report(run, workload, system)
      >>> abs(sum(report.breakdown.values()) / run.step_time - 1) < 1e-9
      True
    """
    check_types(
        evaluation=(evaluation, Evaluation), workload=(workload, Workload), system=(system, System)
    )
    step, sequences = evaluation.step_time, workload.minibatch * workload.data_parallel
    accelerators = workload.accelerators_per_worker * workload.data_parallel * evaluation.workers
    tokens = sequences * float(workload.model.sequence)
    flop = model_flop(workload.model, sequences, workload.layout(evaluation.table))
    if evaluation.table.grammar.forward_only:  # a backward has two products for each of a forward
        flop = model_flop(workload.model, sequences) / 3
    price = float(system.price) * accelerators * step if float(system.price) > 0 else None
    return StepReport(
        step_time=step,
        breakdown=breakdown(evaluation, workload, system),
        accelerators=accelerators,
        precision=workload.precision,
        mfu=float(mfu(flop, step, accelerators, system.peak(workload.precision))),
        flops_per_accelerator=float(flop) / (step * accelerators),
        tokens_per_second=tokens / step,
        bands=bands(system, step),
        cost_per_step=price,
        cost_per_token=None if price is None else price / tokens,
    )


def mfu(flop: Number, step_time: Number, accelerators: Number, peak: Number) -> Number:
    """Model FLOP utilisation: share of the peak [FLOP/s] that the model's own FLOP reach."""
    return flop / (step_time * accelerators * peak)


def bands(system: System, step_time: float) -> dict[str, tuple[float, float]]:
    """Return bounds of a step time by percent [s], from the errors of the system's calibration."""
    if system.calibration is None:
        return {}
    return {
        f"{band.percent:g}": (band.low * step_time, band.high * step_time)
        for band in system.calibration.bands
    }


def breakdown(evaluation: Evaluation, workload: Workload, system: System) -> dict[str, float]:
    """Break a step down into parts that sum to it [s]."""
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
    lanes = {name: seconds for name, seconds in parts.items() if name.startswith((LANE, RULES))}
    return compute | {name: sum(parts[key] for key in keys) for name, keys in WAITS.items()} | lanes


# Smallest changes that make a workload fit: sequence parallelism, ZeRO, recomputation.

Change = Mapping[str, Any]
# possible changes and their cost rank: each is above the sum of all before it
COST_RANKS: Mapping[tuple[str, Any], int] = {
    ("sequence_parallel", True): 0,
    ("zero", 1): 1,
    ("recompute", "selective"): 2,
    ("zero", 2): 4,
    ("recompute", "full"): 8,
    ("zero", 3): 16,
}


def fitting_change(
    workload: Workload, table: ScheduleTable, room: float, launcher: str | None = None
) -> Change | None:
    """Find the smallest change, that a launcher runs, with which a workload fits memory [B]."""

    def rank(change: Change) -> tuple[int, int]:
        return sum(COST_RANKS[entry] for entry in change.items()), len(change)

    for change in sorted(_changes(workload), key=rank):  # the least cost, then the fewest fields
        changed = dataclasses.replace(workload, **change)
        lacks = launches(changed, table, launcher)[0].lacks if launcher else ()
        if not lacks and memory_bytes(changed, table).max() <= room:
            return change
    return None


def _changes(workload: Workload) -> Iterator[dict[str, Any]]:
    """Yield every combination of possible changes, as fields of the workload, but not none."""
    values: dict[str, list[Any]] = {name: [None] for name, _ in COST_RANKS}
    if workload.tensor_parallel > 1 and not workload.sequence_parallel:
        values["sequence_parallel"].append(True)
    if workload.data_parallel * workload.context_parallel > 1:
        values["zero"].extend(range(workload.zero + 1, 4))
    # flash attention writes no scores out that could be recomputed
    if workload.recompute == "none" and not workload.model.flash_attention:
        values["recompute"].append("selective")
    if not workload.recomputation.layers:
        values["recompute"].append("full")
    for choice in itertools.product(*values.values()):
        change = {k: v for k, v in zip(values, choice, strict=True) if v is not None}
        if change:
            yield change
