"""Comparison of a published formula, an idealised table and a run with communication."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.scaling import op_factors, op_workers
from pipejax.schedules.cells.grammar import Grammar
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

# Closed forms that papers print for a schedule, with their assumptions


class Shape(NamedTuple):
    """Sizes of a schedule that published formulas depend on."""

    p: int  # workers
    m: int  # microbatches
    v: int  # stages per worker
    f: int = 1  # couples of pipes, where there are several pipes: 2f pipes
    k: int = 1  # slices of a microbatch


Ratio = tuple[str, Callable[[Shape], float]]


class Times(NamedTuple):
    """Times [s] of F, I, W and a fused pair on a stage, on which published formulas depend."""

    f: float
    i: float
    w: float
    pair: float  # a fused pair, F&B

    @property
    def b(self) -> float:
        """A whole backward."""
        return self.i + self.w


class ClosedForm(NamedTuple):
    """Formulas that a paper gives for a schedule, and the assumptions they hold under."""

    source: str  # publication
    bubble_ratio: Ratio | None = None  # idle / total as text and as a function
    # activations that worker r holds, in stages (or slices of them), as text and as a function of
    # the shape and r
    in_flight: tuple[str, Callable[[Shape, int], int]] | None = None
    assumes: str = "equal stages"  # conditions under which the ratios are exact
    holds: Callable[[Shape], bool] = lambda n: True  # whether the shape fits these assumptions
    weight_copies: int = 1  # copies of the model's weights over all workers
    span_bubble_ratio: Ratio | None = None  # idle / total of the longest span of a worker
    # longest wait of a worker [s], as text and as a function of shape and times
    idle: tuple[str, Callable[[Shape, Times], float]] | None = None
    idle_assumes: str = ""  # conditions under which that is exact


_PIPELINE = ("(P-1)/(M+P-1)", lambda n: (n.p - 1) / (n.m + n.p - 1))
_LOOPED = ("(P-1)/(VM+P-1)", lambda n: (n.p - 1) / (n.v * n.m + n.p - 1))
_SLICED = ("(P-1)/(KM+P-1)", lambda n: (n.p - 1) / (n.k * n.m + n.p - 1))
_FUSED = "F = I, W at most I, max(F, B) <= F&B <= F + B"


def _span_ratio(text: str, idle: Callable[[int], int]) -> Ratio:
    """Return the bubble ratio of a worker with two stages: x idle and 6 M busy slots."""
    return f"x/(6M+x), x = {text}", lambda n: idle(n.p) / (6 * n.m + idle(n.p))


def _chimera_in_flight(n: Shape, r: int) -> int:
    distance = n.p // n.f  # workers from one couple of pipes to the next
    return n.p - distance // 2 + 1 + min(r % distance, distance - 1 - r % distance)


def _interleaved(n: Shape, r: int) -> int:
    return min(2 * (n.p - r - 1) + (n.v - 1) * n.p + 1, n.m * n.v)


CLOSED_FORMS: Mapping[str, ClosedForm] = {
    "gpipe": ClosedForm(
        "arXiv:1811.06965, section 2.3; arXiv:2104.04473, section 2.2",
        _PIPELINE,
        ("M", lambda n, r: n.m),
    ),
    "1f1b": ClosedForm(
        "arXiv:2104.04473, section 2.2", _PIPELINE, ("min(P-r, M)", lambda n, r: min(n.p - r, n.m))
    ),
    "eager-1f1b": ClosedForm(
        "arXiv:2211.05322",
        _PIPELINE,
        ("min(2(P-r)-1, M)", lambda n, r: min(2 * (n.p - r) - 1, n.m)),
    ),
    "interleaved-1f1b": ClosedForm(
        "arXiv:2104.04473, section 2.2.2; in flight arXiv:2503.01328, section 3",
        _LOOPED,
        ("min(2(P-r-1)+(V-1)P+1, MV)", _interleaved),
        "equal stages, M a multiple of P",
        holds=lambda n: n.m % n.p == 0,
    ),
    "circular": ClosedForm(
        "AI-Hypercomputer/maxtext, base.yml", _LOOPED, ("MV", lambda n, r: n.m * n.v)
    ),
    "looped-bfs": ClosedForm(
        "arXiv:2407.21783, section 3.3.2",
        _LOOPED,
        ("MV", lambda n, r: n.m * n.v),
        "equal stages, M at least P",
        holds=lambda n: n.m >= n.p,
    ),
    "chimera": ClosedForm(
        "arXiv:2107.06925, Tables 2 and 3 (smallest and largest worker; between them our count)",
        (
            "(P-2f)/(2fM+P-2f), 2f pipes",
            lambda n: (n.p - 2 * n.f) / (2 * n.f * n.m + n.p - 2 * n.f),
        ),
        ("P-P/2f+1+min(q, P/f-1-q), q = r mod P/f", _chimera_in_flight),
        "equal stages, F = B, M a multiple of P",
        holds=lambda n: n.m % n.p == 0,
    ),
    "dualpipe": ClosedForm(
        "deepseek-ai/DualPipe, table of the README",
        ("(P-2)/(3M+P-2)", lambda n: (n.p - 2) / (3 * n.m + n.p - 2)),
        ("P+1", lambda n, r: n.p + 1),
        "F = I = W, F&B = F + B",
        idle=("(P/2-1)(F&B+B-3W)", lambda n, t: (n.p / 2 - 1) * (t.pair + t.b - 3 * t.w)),
        idle_assumes=_FUSED,
    ),
    "dualpipe-v": ClosedForm(
        "deepseek-ai/DualPipe, table of the README, of 2P stages",
        ("(P-1)/(3M+P-1)", lambda n: (n.p - 1) / (3 * n.m + n.p - 1)),
        ("2P+1", lambda n, r: 2 * n.p + 1),
        "F = I = W, F&B = F + B",
        idle=("(P-1)(F&B+B-3W)", lambda n, t: (n.p - 1) * (t.pair + t.b - 3 * t.w)),
        idle_assumes=_FUSED,
    ),
    "zb-h1": ClosedForm(
        "arXiv:2401.10241, Table 2; in flight section 2.3",
        ("(P-1)/(3M+P-1)", lambda n: (n.p - 1) / (3 * n.m + n.p - 1)),
        ("min(P, M)", lambda n, r: min(n.p, n.m)),
        "F = I = W, M at least P",
        holds=lambda n: n.m >= n.p,
    ),
    "zb-h2": ClosedForm(
        "arXiv:2401.10241, Table 2 and section 2.3",
        in_flight=("min(2P-1, M)", lambda n, r: min(2 * n.p - 1, n.m)),
        assumes="F = I = W, M at least 2P-1",
        holds=lambda n: n.m >= 2 * n.p - 1,
        span_bubble_ratio=("0", lambda n: 0.0),
    ),
    "zb-v": ClosedForm(
        "arXiv:2401.10241, section 6; arXiv:2405.15362, section 3",
        in_flight=("2 min(P, M)", lambda n, r: 2 * min(n.p, n.m)),
        assumes="F = I = W, M at least 2P-1",
        holds=lambda n: n.m >= 2 * n.p - 1,
        span_bubble_ratio=("0", lambda n: 0.0),
    ),
    "v-half": ClosedForm(
        "arXiv:2405.15362, the authors' generator",
        in_flight=("2 min(P//2+1, M)", lambda n, r: 2 * min(n.p // 2 + 1, n.m)),
        assumes="F = I = W, P at least 3, M at least P",
        holds=lambda n: n.m >= n.p >= 3,
        span_bubble_ratio=_span_ratio("3P-7 (P even), 3P-4 (odd)", lambda p: 3 * p - 7 + p % 2 * 3),
    ),
    "v-min": ClosedForm(
        "arXiv:2405.15362, the authors' generator",
        in_flight=("2 min((P+4)//3, M)", lambda n, r: 2 * min((n.p + 4) // 3, n.m)),
        assumes="F = I = W, M at least P",
        holds=lambda n: n.m >= n.p >= 2,
        span_bubble_ratio=_span_ratio(
            "4P-7 (3 divides P), 4P-5", lambda p: 4 * p - (5 if p % 3 else 7)
        ),
    ),
    "seq-1f1b": ClosedForm(
        "arXiv:2406.03488: 1F1B of KM units; in flight thunlp/Seq1F1B, issue 4",
        _SLICED,
        ("min(P-r-1+K, KM)", lambda n, r: min(n.p - r - 1 + n.k, n.k * n.m)),
        "equal stages and slices",
    ),
    "terapipe": ClosedForm(
        "arXiv:2102.07988: GPipe of KM units",
        _SLICED,
        ("KM", lambda n, r: n.k * n.m),
        "equal stages and slices",
    ),
    "slimpipe": ClosedForm(
        "arXiv:2504.14519: interleaved 1F1B of KM units, a microbatch and its warm-up in flight",
        ("(P-1)/(KVM+P-1)", lambda n: (n.p - 1) / (n.k * n.v * n.m + n.p - 1)),
        ("min(KV+2(P-r-1), KVM)", lambda n, r: min(n.k * n.v + 2 * (n.p - r - 1), n.k * n.v * n.m)),
        "equal stages and slices",
    ),
}
NO_FORM = ClosedForm(
    "-", assumes="no closed form is published that we could verify", holds=lambda n: False
)


def closed_form(table: ScheduleTable) -> tuple[ClosedForm, Shape]:
    """Return the closed form of a schedule, and the shape to evaluate it at."""
    couples, slices = max(table.num_pipes // 2, 1), table.grammar.slices
    sizes = table.num_workers, table.num_microbatches // slices, table.stages_per_worker
    is_usual = table.grammar == Grammar(slices=slices)
    form = CLOSED_FORMS.get(table.name, NO_FORM) if is_usual else NO_FORM
    shape = Shape(*sizes, couples, slices)
    return form._replace(weight_copies=table.num_pipes), shape


TOLERANCE = 1e-9
_PHASES: tuple[AnyPhase, ...] = tuple(  # of all schedules
    phase for phase in COMPUTE if phase not in USUAL_PHASES.recomputing
)
_PATH_COSTS = {  # costs that the idealised table does not have
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
    """Return a table's bubble ratio if messages take no time, by default at its own slots."""
    start, finish = slot_times(table, slots)
    total = float(finish.max()) * table.num_workers
    busy = (finish - start)[np.isin(table.phase, table.grammar.busy)].sum()
    return float((total - busy) / total) if total else 0.0


def mean_slots(costs: Costs, table: ScheduleTable) -> dict[str, float]:
    """Return mean times of kinds of ops, relative to the first time above 0, which is mostly F."""
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
    formula = None
    if form.bubble_ratio:
        _, function = form.bubble_ratio
        formula = function(shape)
    slots = {**mean_slots(costs, table), **(slots or {})}
    table_ratio, peak = table_bubble_ratio(table, slots), int(run.peak_in_flight.max())
    formula_in_flight: int | None = None
    reasons: list[str] = []
    if formula is None:
        only_span = "only the bubble within a worker's span is published"
        reasons.append(f"no formula: {only_span if form.span_bubble_ratio else form.assumes}")
    elif abs(formula - table_ratio) > TOLERANCE:
        side = "above" if table_ratio > formula else "below"
        used = (phase.name for phase in table.used_phases if phase.name in slots)
        slots_text = ", ".join(f"{letter} = {slots[letter]:.3g}" for letter in used)
        reasons.append(
            f"table {side} formula: the formula assumes {form.assumes}; "
            f"slots here are {slots_text}, M/P = {shape.m / shape.p:g}"
        )
    if form.in_flight:
        text, count = form.in_flight
        formula_in_flight = max(count(shape, worker) for worker in range(shape.p))
        if formula_in_flight != peak:
            reasons.append(f"in flight: {text} says {formula_in_flight}, the table holds {peak}")
    if abs(run.bubble_ratio - table_ratio) > TOLERANCE:
        side = "above" if run.bubble_ratio > table_ratio else "below"
        reasons.append(f"run {side} table: " + _why_run_differs(table, costs, run, slots))
    return Comparison(
        schedule=table.name,
        workers=table.num_workers,
        stages=table.num_stages,
        microbatches=table.num_microbatches // table.grammar.slices,
        formula_bubble_ratio=formula,
        table_bubble_ratio=table_ratio,
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


def _why_run_differs(table: ScheduleTable, costs: Costs, run: Evaluation, slots: Slots) -> str:
    """Return, as text, the reasons for which a run differs from the idealised table."""
    reasons = _path_reasons(run)
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
        factors_by_op = op_factors(table, factors)  # (stages) or (stages, microbatches)
        for name, cost in times.items():
            if 0 < cost.ndim < factors_by_op.ndim:
                cost = cost[:, None]
            times[name] = cost / factors_by_op
    stage_times = {name: _per_layer_share(table, cost) for name, cost in times.items()}
    has_uneven_stages = any(np.ptp(seconds) > TOLERANCE for seconds in stage_times.values())
    has_uneven_microbatches = any(
        cost.ndim == 2 and np.ptp(cost, axis=1).max() > TOLERANCE for cost in times.values()
    )
    if has_uneven_stages:
        reasons.append("stages are unequal")
    if has_uneven_microbatches:
        reasons.append("microbatches are unequal")
    slot_seconds = {
        round(float((seconds / (slots[name] or 1.0)).max()), 9)
        for name, seconds in stage_times.items()
    }
    is_even = factors is None and not has_uneven_stages and not has_uneven_microbatches
    if is_even and len(slot_seconds) > 1:
        ratio = ", ".join(f"{name} = {float(cost.max()):.3g} s" for name, cost in times.items())
        reasons.append(f"times are not in the ratio of the slots ({ratio})")
    if np.any(table.partners.phase != Phase.IDLE):
        if costs.pair is not None:
            reasons.append("fused pairs have a time of their own")
        elif costs.pair_factor is not None and np.any(np.asarray(costs.pair_factor) != 1):
            reasons.append(f"fused pairs overlap (pair factor {_range_text(costs.pair_factor)})")
    return ", ".join(reasons) or "the reason is not known"


def _path_reasons(run: Evaluation) -> list[str]:
    """List the shares of the critical path that messages, offloads and so on take, as texts."""
    reasons: list[str] = []
    for names, words in _PATH_COSTS.items():
        percent = 100 * sum(run.path_share.get(name, 0.0) for name in names)
        if percent > 0:
            total = "it" if reasons else "the critical path"
            share = "less than 0.01" if percent < 0.01 else f"{percent:.2g}"
            reasons.append(f"{words} take {share} % of {total}")
    return reasons


def _range_text(value: Any) -> str:
    """Write a number, or the smallest and the largest number of an array."""
    low, high = float(np.min(value)), float(np.max(value))
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _worker_factors(
    table: ScheduleTable, times: Mapping[str, NumpyArray]
) -> Float[NumpyArray, " workers"] | None:
    """Return each worker's op times over the median worker's; None if ops differ otherwise."""
    sizes = (table.num_stages, table.num_microbatches)
    worker = np.broadcast_to(op_workers(table).reshape(sizes[0], -1), sizes)
    if len(np.unique(worker)) < table.num_workers:
        return None
    factors: NumpyArray | None = None
    for cost in times.values():
        # (), (stages) and (stages, microbatches) become (stages, microbatches)
        seconds = np.broadcast_to(cost if cost.ndim == 2 else cost[..., None], sizes)
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


def _per_layer_share(table: ScheduleTable, cost: NumpyArray) -> NumpyArray:
    """Return each stage's mean cost, divided by the stage's share of layers (stages)."""
    mean = cost.mean(axis=1) if cost.ndim == 2 else cost
    return np.broadcast_to(mean, table.num_stages) / np.asarray(table.stage_shares)
