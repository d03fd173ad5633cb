"""Three levels side by side: published formula, idealised table, communication-aware run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.comparison.closed_forms import closed_form
from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.scaling import op_factors, op_workers
from pipejax.schedules.cells.ops import (
    COMPUTE,
    HOST,
    STEP_END,
    USUAL_PHASES,
    AnyPhase,
    Phase,
    Slots,
)
from pipejax.schedules.table.held_activations import in_flight
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.slot_simulation import slot_times
from pipejax.schedules.table.table import ScheduleTable

TOLERANCE = 1e-9
_PHASES: tuple[AnyPhase, ...] = tuple(  # of all schedules
    phase for phase in COMPUTE if phase not in USUAL_PHASES.recomputing
)
_ON_THE_PATH = {  # costs that the idealised table does not have
    ("latency", "transmit", "message"): "messages",
    tuple(phase.name for phase in HOST): "offloads and loads",
    tuple(phase.name for phase in STEP_END): "all-reduce and update",
}


@with_short_repr(
    "schedule workers stages microbatches makespan bubble_ratio table_bubble_ratio "
    "formula_bubble_ratio bound_by peak_in_flight why"
)
class Comparison(NamedTuple):
    """One schedule by published formula, idealised table and run with messages.

    Attributes:
      schedule: name.
      workers: P.
      stages: S.
      microbatches: M.
      formula_bubble_ratio: as printed in the literature, or None.
      table_bubble_ratio: of the idealised table, in `slots`.
      bubble_ratio: of the run.
      formula_in_flight: largest count over workers as printed, or None.
      peak_in_flight: largest count over workers on the table.
      peak_microbatches: the same in microbatches of all layers of a worker, so that schedules with
        several stages per worker compare: a stage's activation counts as its share of the worker.
      weight_copies: copies of the weights over all workers.
      makespan: of the run [s].
      bound_by: cost with the largest share of the critical path.
      path_share: share of the critical path by cost.
      why: reasons why the levels disagree.
      slots: durations of F, B, I and W in the idealised table, in units of F.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> both = pj.compare(table, pj.Costs(forward=1.0, backward=2.0, transmit=1.0))
      >>> round(both.table_bubble_ratio, 3), round(both.bubble_ratio, 3)
      (0.273, 0.51)
    """

    schedule: str
    workers: int
    stages: int
    microbatches: int
    formula_bubble_ratio: float | None
    table_bubble_ratio: float
    bubble_ratio: float
    formula_in_flight: int | None
    peak_in_flight: int
    peak_microbatches: float
    weight_copies: int
    makespan: float
    bound_by: str
    path_share: dict[str, float]
    why: str
    slots: dict[str, float]


def table_bubble_ratio(table: ScheduleTable, slots: Slots | None = None) -> float:
    """Return the bubble ratio of the table without messages, by default with its own slots."""
    start, finish = slot_times(table, slots)
    total = float(finish.max()) * table.num_workers
    busy = (finish - start)[np.isin(table.phase, table.grammar.busy)].sum()
    return float((total - busy) / total) if total else 0.0


def mean_slots(costs: Costs, table: ScheduleTable) -> dict[str, float]:
    """Return mean times of F, B, I, W and custom kinds, in units of the first above 0, mostly F."""
    times = {phase.name: costs.time(phase) for phase in [*_PHASES, *table.grammar.custom_phases]}
    mean = {letter: float(np.mean(time)) for letter, time in times.items() if time is not None}
    unit = next(filter(None, mean.values()), 1.0)
    return {letter: time / unit for letter, time in mean.items()}


def compare(
    table: ScheduleTable,
    costs: Costs,
    *,
    link: str | Links = "delay",
    slots: Mapping[str, float] | None = None,
) -> Comparison:
    """Compare one schedule at three levels: published formula, idealised table, run.

    Args:
      table: the schedule.
      costs: costs of the run [s].
      link: link model of the run, or `Links`.
      slots: durations by phase letter in the idealised table; by default the mean `costs` over the
        stages. The slots that the table was built with only decide the order of its ops.

    Returns:
      The three levels and an explanation of where they disagree.

    Raises:
      ValueError: as `evaluate`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=8)
      >>> pj.compare(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.5)).why
      'run above table: messages take 8.3 % of the critical path'
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs))
    form, shape = closed_form(table)
    run = evaluate(table, costs, link=link)
    formula = form.bubble_ratio[1](shape) if form.bubble_ratio else None
    slots = {**mean_slots(costs, table), **(slots or {})}
    in_table, peak = table_bubble_ratio(table, slots), int(run.peak_in_flight.max())
    formula_in_flight: int | None = None
    reasons: list[str] = []
    if formula is None:
        only_span = "only the bubble within a worker's span is published"
        reasons.append(f"no formula: {only_span if form.span_bubble_ratio else form.assumes}")
    elif abs(formula - in_table) > TOLERANCE:
        side = "above" if in_table > formula else "below"
        reasons.append(
            f"table {side} formula: the formula assumes {form.assumes}; "
            f"slots here are {_slots(table, slots)}, M/P = {shape.m / shape.p:g}"
        )
    if form.in_flight:
        text, count = form.in_flight
        formula_in_flight = max(count(shape, worker) for worker in range(shape.p))
        if formula_in_flight != peak:
            reasons.append(f"in flight: {text} says {formula_in_flight}, the table holds {peak}")
    if abs(run.bubble_ratio - in_table) > TOLERANCE:
        side = "above" if run.bubble_ratio > in_table else "below"
        reasons.append(f"run {side} table: " + _why_run_differs(table, costs, run, slots))
    return Comparison(
        schedule=table.name,
        workers=table.num_workers,
        stages=table.num_stages,
        microbatches=table.num_microbatches // table.grammar.slices,
        formula_bubble_ratio=formula,
        table_bubble_ratio=in_table,
        bubble_ratio=run.bubble_ratio,
        formula_in_flight=formula_in_flight,
        peak_in_flight=peak,
        peak_microbatches=float(in_flight(table, table.worker_parts).max() / table.grammar.slices),
        weight_copies=form.weight_copies,
        makespan=run.makespan,
        bound_by=run.bound_by,
        path_share=dict(run.path_share),
        why="; ".join(reasons) or "all three agree",
        slots=slots,
    )


def _slots(table: ScheduleTable, slots: Slots) -> str:
    used = (phase.name for phase in table.used_phases)
    return ", ".join(f"{letter} = {slots[letter]:.3g}" for letter in used if letter in slots)


def _why_run_differs(table: ScheduleTable, costs: Costs, run: Evaluation, slots: Slots) -> str:
    """Name the reasons why a run differs from the idealised table."""
    reasons: list[str] = []
    for names, words in _ON_THE_PATH.items():
        percent = 100 * sum(run.path_share.get(name, 0.0) for name in names)
        if percent > 0:
            total = "it" if reasons else "the critical path"
            share = "less than 0.01" if percent < 0.01 else f"{percent:.2g}"
            reasons.append(f"{words} take {share} % of {total}")
    phases = {*table.grammar.compute} - {*table.grammar.recomputing}
    times = {
        phase.name: np.asarray(costs.time(phase), float)
        for phase in table.used_phases
        if phase in phases and costs.time(phase) is not None
    }
    factors = _worker_factors(table, times)
    if factors is not None:
        slow = [
            f"worker {worker} takes {factor:.3g} times as long"
            for worker, factor in enumerate(factors.tolist())
            if abs(factor - 1) > TOLERANCE
        ]
        reasons.append(f"workers are not equally fast ({', '.join(slow)})")
        by_op = op_factors(table, factors)
        times = {
            name: (cost[:, None] if cost.ndim < by_op.ndim and cost.ndim else cost) / by_op
            for name, cost in times.items()
        }
    uneven = {
        "stages": any(np.ptp(_relative(table, cost)) > TOLERANCE for cost in times.values()),
        "microbatches": any(
            cost.ndim == 2 and np.ptp(cost, axis=1).max() > TOLERANCE for cost in times.values()
        ),
    }
    reasons += [f"{what} are unequal" for what, differ in uneven.items() if differ]
    per_slot = {k: _relative(table, cost) / (slots[k] or 1.0) for k, cost in times.items()}
    ratios = {round(float(seconds.max()), 9) for seconds in per_slot.values()}
    if factors is None and len(ratios) > 1 and not any(uneven.values()):
        ratio = ", ".join(f"{k} = {float(c.max()):.3g} s" for k, c in times.items())
        reasons.append(f"times are not in the ratio of the slots ({ratio})")
    if np.any(table.partners.phase != Phase.IDLE):
        if costs.pair is not None:
            reasons.append("fused pairs have a time of their own")
        elif costs.pair_factor is not None and np.any(np.asarray(costs.pair_factor) != 1):
            reasons.append(f"fused pairs overlap (pair factor {_span(costs.pair_factor)})")
    return ", ".join(reasons) or "the reason is not known"


def _span(value: Any) -> str:
    """Write a number, or the smallest and the largest of several."""
    low, high = float(np.min(value)), float(np.max(value))
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _worker_factors(
    table: ScheduleTable, times: Mapping[str, NumpyArray]
) -> Float[NumpyArray, " workers"] | None:
    """Return the time of each worker divided by the median, if ops differ by their worker alone.

    None if all workers are equally fast, or other differences exist. Times have shape (), (stages)
    or (stages, microbatches).
    """
    sizes = (table.num_stages, table.num_microbatches)
    worker = np.broadcast_to(op_workers(table).reshape(sizes[0], -1), sizes)
    if len(np.unique(worker)) < table.num_workers:
        return None
    factors: NumpyArray | None = None
    for cost in times.values():
        seconds = np.broadcast_to(cost.reshape(*cost.shape, *[1] * (2 - cost.ndim)), sizes)
        seconds = seconds / np.asarray(table.stage_shares)[:, None]
        if not seconds.any():
            continue
        means = np.array([seconds[worker == k].mean() for k in range(table.num_workers)])
        median = np.sort(means)[(len(means) - 1) // 2]
        if means.min() <= 0 or np.any(np.abs(seconds / means[worker] - 1) > TOLERANCE):
            return None
        if factors is not None and np.any(np.abs(means / median - factors) > TOLERANCE):
            return None
        factors = means / median
    return None if factors is None or np.ptp(factors) <= TOLERANCE else factors


def _relative(table: ScheduleTable, cost: NumpyArray) -> NumpyArray:
    """Return the mean cost of each stage (stages) over its share of the layers."""
    mean = cost.mean(axis=1) if cost.ndim == 2 else cost
    return np.broadcast_to(mean, table.num_stages) / np.asarray(table.stage_shares)
