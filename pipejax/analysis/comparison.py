"""Comparison of a published formula, an idealised table and a run with communication."""

import functools
import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, check_types
from pipejax.base.data_files import load_json
from pipejax.base.display import short_repr, with_short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.scaling import op_factors, op_workers
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    NO_MICROBATCH,
    NO_STAGE,
    STEP_END,
    USUAL_PHASES,
    AnyPhase,
    Cell,
    Op,
    Phase,
    ScheduleError,
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
    f: int = 1  # couples of pipes; a table with several pipes has 2f pipes
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
        """Return the time of a full backward."""
        return self.i + self.w


class ClosedForm(NamedTuple):
    """Formulas that a paper prints for a schedule, and their assumptions."""

    # each formula is (text, function)
    source: str  # publication
    bubble_ratio: Ratio | None = None  # idle / total
    # number of activations (of a stage, or of a slice) that worker r holds, by shape and r
    in_flight: tuple[str, Callable[[Shape, int], int]] | None = None
    assumes: str = "equal stages"  # conditions under which the ratios are exact
    holds: Callable[[Shape], bool] = lambda n: True  # whether the shape fits these conditions
    weight_copies: int = 1  # copies of the model's weights over all workers
    span_bubble_ratio: Ratio | None = None  # idle / total of the longest span of a worker
    # longest wait of a worker [s], by shape and times
    idle: tuple[str, Callable[[Shape, Times], float]] | None = None
    idle_assumes: str = ""  # conditions under which the wait is exact


_FUNCTION_FIELDS = ("bubble_ratio", "in_flight", "span_bubble_ratio", "idle")
# place of a multiplication sign: between adjacent numbers, letters, brackets and min (@)
_PRODUCT = re.compile(r"(?<=[\w)]) *(?=[A-Za-z(@])")


def _function(formula: str) -> Callable[..., Any]:
    """Compile a formula to a function of a shape, and of a worker or of times."""
    # KV+2(P-r-1) becomes K*V+2*(P-r-1); a fused pair F&B becomes T
    text = formula.replace("F&B", "T").replace("min(", "@(")
    code = compile(_PRODUCT.sub("*", text).replace("@", "min"), formula, "eval")

    def evaluate_formula(n: Shape, place: int | Times = 0) -> Any:
        """Evaluate the formula; `place` is a worker r, or the times F, I, W, B and F&B."""
        numbers: dict[str, Any] = {"P": n.p, "M": n.m, "V": n.v, "f": n.f, "K": n.k, "r": place}
        if isinstance(place, Times):
            f, i, w, pair = place
            numbers |= {"F": f, "I": i, "W": w, "B": place.b, "T": pair}
        return eval(code, {"__builtins__": {"min": min}}, numbers)

    return evaluate_formula


@functools.cache
def closed_forms() -> Mapping[str, ClosedForm]:
    """Return {schedule: closed form} of `closed_forms.json`."""
    # a formula is one text, or two: a text for readers and a text that is evaluated
    forms = {}
    for name, fields in load_json(Path(__file__).with_name("closed_forms.json")).items():
        for field in fields.keys() & _FUNCTION_FIELDS:
            texts = fields[field] if isinstance(fields[field], list) else [fields[field]]
            fields[field] = texts[0], _function(texts[-1])
        if "holds" in fields:
            fields["holds"] = _function(fields["holds"])
        forms[name] = ClosedForm(**fields)
    return forms


NO_FORM = ClosedForm(
    "-", assumes="no closed form is published that we could verify", holds=lambda n: False
)


def closed_form(table: ScheduleTable) -> tuple[ClosedForm, Shape]:
    """Return a schedule's closed form, and the shape (P, M, V, ..) for which it is evaluated."""
    couples, slices = max(table.num_pipes // 2, 1), table.grammar.slices
    sizes = table.num_workers, table.num_microbatches // slices, table.stages_per_worker
    has_usual_rules = table.grammar == Grammar(slices=slices)
    form = closed_forms().get(table.name, NO_FORM) if has_usual_rules else NO_FORM
    shape = Shape(*sizes, couples, slices)
    return form._replace(weight_copies=table.num_pipes), shape


TOLERANCE = 1e-9
_PHASES: tuple[AnyPhase, ...] = tuple(  # compute phases of all schedules
    phase for phase in COMPUTE if phase not in USUAL_PHASES.recomputing_phases
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
      schedule: name of the schedule.
      workers: P.
      stages: S.
      microbatches: M.
      formula_bubble_ratio: bubble ratio of the published formula; None without a formula.
      table_bubble_ratio: bubble ratio of the idealised table, at the durations `slots`.
      bubble_ratio: bubble ratio of the run.
      formula_in_flight: published number of activations on the fullest worker, or None.
      peak_in_flight: number of activations on the fullest worker of the table.
      peak_microbatches: `peak_in_flight` in microbatches of all layers of a worker, which compares
        schedules with several stages per worker. A stage's activation counts as its share of the
        worker's layers.
      weight_copies: copies of the weights over all workers.
      makespan: makespan of the run [s].
      bound_by: cost with the largest share of the critical path.
      path_share: {cost: share of the critical path}.
      why: reasons why formula, table and run disagree.
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
    """Return a table's bubble ratio if messages take no time; default: at the table's slots."""
    start, finish = slot_times(table, slots)
    total = float(finish.max()) * table.num_workers
    busy = (finish - start)[np.isin(table.phase, table.grammar.busy_phases)].sum()
    return float((total - busy) / total) if total else 0.0


def mean_slots(costs: Costs, table: ScheduleTable) -> dict[str, float]:
    """Return {phase letter: mean time}, in units of the first mean above 0, which is mostly F."""
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
      slots: {phase letter: duration in the idealised table}; default: means of `costs` over the
        stages. The slots that the table was built with decide only the order of its ops.

    Returns:
      Results of the three levels, and reasons why they disagree.

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
    if form.bubble_ratio:  # (text of the formula, function)
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
    """Say why the bubble ratios of a run and its table differ."""
    reasons = _path_reasons(run)
    phases = {*table.grammar.compute_phases} - {*table.grammar.recomputing_phases}
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
    by_microbatch = [cost for cost in times.values() if cost.ndim == 2]
    has_uneven_microbatches = any(np.ptp(cost, axis=1).max() > TOLERANCE for cost in by_microbatch)
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
    return ", ".join(reasons) or "the reason is unknown"


def _path_reasons(run: Evaluation) -> list[str]:
    """List texts with the shares of the critical path that messages and other waits take."""
    reasons: list[str] = []
    for names, words in _PATH_COSTS.items():
        percent = 100 * sum(run.path_share.get(name, 0.0) for name in names)
        if percent > 0:
            total = "it" if reasons else "the critical path"
            share = "less than 0.01" if percent < 0.01 else f"{percent:.2g}"
            reasons.append(f"{words} take {share} % of {total}")
    return reasons


def _range_text(value: Any) -> str:
    low, high = float(np.min(value)), float(np.max(value))
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _worker_factors(
    table: ScheduleTable, times: Mapping[str, NumpyArray]
) -> Float[NumpyArray, " workers"] | None:
    """Return how many times as long as the median worker each worker takes for its ops."""
    # It is None if all workers are equally fast, or if the ops of a worker have different factors.
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


Rows = Sequence[Sequence[Cell]]


class RowDifference(NamedTuple):
    """Differences between a worker's rows in two tables."""

    worker: int
    first: int  # number of equal cells before the first that differs
    cells: tuple[Sequence[Cell], Sequence[Cell]]  # cells of both rows without idle slots
    reordered: int  # smallest number of shared ops whose move makes their order equal
    only: tuple[int, int]  # number of ops that only the first, or only the second row has

    def around(self, count: int) -> Iterator[tuple[int, Sequence[Cell]]]:
        """Yield (index of the first difference, cells around it) for the row of each table."""
        begin = max(self.first - count, 0)
        for row in self.cells:
            yield self.first - begin, row[begin : self.first + count + 1]


@short_repr
class TableDifference(NamedTuple):
    """Differences between two tables."""

    # pairs hold the values of the first and of the second table
    sizes: Mapping[str, tuple[int, int]]  # {workers, stages or microbatches: numbers that differ}
    rows: Sequence[RowDifference]  # workers of both tables whose rows differ
    moved: Mapping[Op, tuple[int, int]]  # {op that runs on different workers: its workers}
    split: tuple[int, int]  # numbers of backwards that only this table splits
    fused: tuple[int, int]  # numbers of fused pairs
    only: Mapping[AnyPhase, tuple[int, int]]  # {phase: numbers of ops that only this table has}
    other_placement: bool  # whether stages are on other workers, or microbatches in other pipes

    @property
    def communication(self) -> tuple[int, int]:
        """Return the numbers of communication cells that only the first, only the second has."""
        counts = [self.only.get(phase, (0, 0)) for phase in COMMUNICATION]
        return sum(first for first, _ in counts), sum(second for _, second in counts)

    @property
    def is_none(self) -> bool:
        """Return whether the tables are equal, apart from idle slots."""
        return not (self.sizes or self.rows or self.other_placement)


def table_difference(first: ScheduleTable, second: ScheduleTable) -> TableDifference:
    """Compare two tables cell by cell; their sizes may differ."""
    if first.grammar.slices != second.grammar.slices:
        raise MismatchError(
            f"{first.name} has {first.grammar.slices} slices of a microbatch, {second.name} "
            f"{second.grammar.slices}: no op of one is one of the other"
        )
    rows, other_rows = _rows(first), _rows(second, first.grammar)
    workers, other_workers = _workers(rows), _workers(other_rows)
    only_first = [op for op in workers if op not in other_workers]
    only_second = [op for op in other_workers if op not in workers]
    counts, other_counts = (Counter(op.phase for op in ops) for ops in (only_first, only_second))
    worker_pairs = {op: (worker, other_workers.get(op, worker)) for op, worker in workers.items()}
    sizes = {
        name: (getattr(first, f"num_{name}"), getattr(second, f"num_{name}"))
        for name in ("workers", "stages", "microbatches")
    }
    differences = map(_row_difference, range(len(rows)), rows, other_rows)  # of shared workers
    return TableDifference(
        sizes={name: (a, b) for name, (a, b) in sizes.items() if a != b},
        rows=[row for row in differences if row is not None],
        moved={op: (a, b) for op, (a, b) in worker_pairs.items() if a != b},
        split=(_count_split(only_first, other_workers), _count_split(only_second, workers)),
        fused=(_count_fused(rows), _count_fused(other_rows)),
        only={
            phase: (counts[phase], other_counts[phase])
            for phase in sorted(counts | other_counts, key=int)
        },
        other_placement=_pipes(first) != _pipes(second),
    )


def row_exchanges(
    table: ScheduleTable, other: ScheduleTable, workers: Sequence[int], costs: Costs, link: Links
) -> Iterator[float | None]:
    """Yield `table`'s makespan [s] with a worker's row from `other`; None for an illegal table."""
    rows, other_rows = _rows(table), _rows(other, table.grammar)
    for worker in workers:
        new_rows = [*rows[:worker], other_rows[worker], *rows[worker + 1 :]]
        try:
            yield evaluate(table.with_rows(new_rows), costs, link=link).makespan
        except ScheduleError:
            yield None


def _rows(table: ScheduleTable, like: Grammar = USUAL) -> list[list[Cell]]:
    """Return cells by row without idle slots, with the phase codes of grammar `like`."""
    # Tables may number their own phases differently; with equal codes their ops can be compared.
    rows = [[cell for cell in row if cell] for row in table.rows()]
    if not table.grammar.custom_phases:
        return rows
    phases = {p: cast(Phase, like.by_letters.get(p.name, p)) for p in table.grammar.phases}
    return [
        [tuple(op._replace(phase=phases[op.phase]) for op in cell) for cell in row] for row in rows
    ]


def _count_fused(rows: Rows) -> int:
    return sum(len(cell) == 2 for row in rows for cell in row)


def _workers(rows: Rows) -> dict[Op, int]:
    """Return the worker of each op; ops without a stage get the worker's number as stage."""
    workers: dict[Op, int] = {}
    for worker, row in enumerate(rows):
        for op in itertools.chain(*row):
            workers[op._replace(stage=worker) if op.stage == NO_STAGE else op] = worker
    return workers


def _pipes(table: ScheduleTable) -> list[list[int]]:
    """Return the workers of all stages that each microbatch visits."""
    return [table.placement[pipe].tolist() for pipe in table.pipe_of_microbatch.tolist()]


def _count_split(ops: Sequence[Op], other_workers: Mapping[Op, int]) -> int:
    """Count backwards that are split into I and W in `ops`, but whole (B) in the other table."""
    return sum(op.phase is Phase.I and op._replace(phase=Phase.B) in other_workers for op in ops)


def _row_difference(
    worker: int, first: Sequence[Cell], second: Sequence[Cell]
) -> RowDifference | None:
    """Compare a worker's rows in two tables; return None if the rows are equal."""
    # Example: rows a b c d and c a d e. The shared ops a c d have positions 1 0 2 in the second
    # row. At most two of these positions ascend, so one op is reordered.
    if list(first) == list(second):
        return None
    position = next(
        (k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    ops, other_ops = _numbered(first), _numbered(second)
    position_by_op = {op: k for k, op in enumerate(other_ops)}
    shared_positions = [position_by_op[op] for op in ops if op in position_by_op]
    num_shared = len(shared_positions)
    reordered = num_shared - _longest_ascent(shared_positions)
    only = (len(ops) - num_shared, len(other_ops) - num_shared)
    return RowDifference(worker, position, (first, second), reordered, only)


def _numbered(row: Sequence[Cell]) -> list[tuple[Op, int]]:
    """Return (op, number of equal ops before it in the row) for each op of a row."""
    # only ops without a microbatch repeat, such as sharding ops of a stage
    counts: Counter[Op] = Counter()
    numbered = []
    for op in itertools.chain(*row):
        numbered.append((op, counts[op]))
        if op.microbatch == NO_MICROBATCH:
            counts[op] += 1
    return numbered


def _longest_ascent(numbers: Sequence[int]) -> int:
    """Return the length of the longest ascending subsequence of distinct numbers."""
    # smallest_last[k] is the smallest last number of an ascending subsequence of length k + 1.
    # Numbers 3 1 2 give [3], then [1], then [1 2].
    smallest_last: list[int] = []
    for number in numbers:
        length = bisect_left(smallest_last, number)
        smallest_last[length : length + 1] = [number]
    return len(smallest_last)
