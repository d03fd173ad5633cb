"""Branch and bound over all layouts: an exact result with few exact evaluations.

Layouts are evaluated exactly in the order of their lower bounds. Layouts with the same program that
may be among the best are evaluated together. The search ends when the next lower bound exceeds the
slowest of the best layouts. Of all layouts with the same `Layouts.idea`, only the fastest counts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray, Shaped
from pipejax.base.display import short_repr
from pipejax.base.progress import OnProgress
from pipejax.base.ties import pareto_front, row_classes
from pipejax.costs.costs import Costs
from pipejax.costs.model.launchers import default_overlap
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload import Stages, assign_layers, build_stages
from pipejax.costs.model.workload_fields import parse_recompute
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import StageBytes, bytes_of_stages, work_of_stages
from pipejax.costs.system.system import System
from pipejax.engine.batched.pricing import priced_on_host
from pipejax.schedules.table.table import ScheduleTable
from pipejax.sweep.plan import programs
from pipejax.sweep.plan.layouts import ZERO, Layouts, PlanRequest, layout_workload, program_shape


class Priced(NamedTuple):
    """Times and memory of the stages of layouts with equal numbers of stages."""

    costs: Costs  # (layouts, stages) seconds; messages (layouts, 2, pipes, stages - 1)
    memory: StageBytes  # (layouts, stages) bytes


def price(request: PlanRequest, layouts: Layouts, systems: System | None = None) -> Priced:
    """Return times and memory of the stages of layouts, which have equal numbers of stages."""
    # Layout k runs on system k of the batch `systems`; by default on the system of the request.
    # Stages of a class have equal costs. One stage of each class is priced, and `stage_class`
    # copies the price to all stages. Layouts with equal recomputation in a layer are priced
    # together.
    layout_numbers = _layout_numbers(request, layouts)
    stages, stage_class = _layout_stages(request, layouts, layout_numbers)
    machine = request.system if systems is None else systems
    machines = jax.tree.map(lambda leaf: np.broadcast_to(leaf, len(layouts)), machine)
    numbers = machines, layout_numbers, stages
    recomputes_layers, _ = _whole_layers(request, layouts)
    # index of the recomputation within a layer; 0 (none) if whole layers are recomputed
    recomputation = np.where(recomputes_layers, 0, layouts.recompute)
    codes = np.unique(recomputation)
    rows_by_code = {code: np.flatnonzero(recomputation == code) for code in codes}
    parts = []
    for code, rows in rows_by_code.items():
        row_numbers = jax.tree.map(lambda leaf, rows=rows: leaf[rows], numbers)
        shared = request.model, request.recomputations[code]
        prices, _ = priced_on_host(_price_layout, shared, (), row_numbers)
        parts.append(prices)
    order = np.argsort(np.concatenate([*rows_by_code.values()]))  # back to the order of layouts
    joined: Priced = jax.tree.map(lambda *leaves: np.concatenate(leaves)[order], *parts)

    def for_stages(leaf: NumpyArray) -> NumpyArray:
        """Convert prices by class of stages to prices by stage; keep prices of messages."""
        return np.take_along_axis(leaf, stage_class, axis=1) if leaf.ndim == 2 else leaf

    return jax.tree.map(for_stages, joined)


def _price_layout(
    shared: tuple[Model, str], _: tuple[()], row: tuple[System, Layout, Stages]
) -> Priced:
    """Return times and memory of a layout's stages; `shared` is equal for a batch of layouts."""
    model, recompute = shared
    system, layout, stages = row
    work = work_of_stages(model, layout, stages, recompute=recompute)
    memory = bytes_of_stages(model, layout, stages, recompute)
    zeros = np.zeros(len(stages.layers))
    by_stage = jax.tree.map(lambda leaf: leaf + zeros if leaf.ndim < 2 else leaf, memory)
    return Priced(work_costs(work, system), by_stage)


def _layout_numbers(request: PlanRequest, layouts: Layouts) -> Layout:
    """Return one `Layout` whose numbers are arrays (layouts)."""
    first = layout_workload(request, layouts, 0).layout(_short_table(request, layouts, 0), 1.0)
    names = ("tensor", "context", "expert", "expert_tensor", "data", "pipeline", "zero")
    columns = {name: getattr(layouts, name).astype(float) for name in names}
    columns["microbatch_size"] = layouts.microbatch_size.astype(float)
    columns["sequence_parallel"] = (layouts.tensor > 1) * float(request.has_sequence_parallel)
    _, columns["recompute_group"] = _whole_layers(request, layouts)
    if "overlap" not in request.shared:
        overlaps = [default_overlap(request.launcher, zero).get("overlap", 0.0) for zero in ZERO]
        columns["overlap"] = np.array(overlaps)[layouts.zero]
    all_layouts = dataclasses.replace(first, **columns)
    numbers: Layout = jax.tree.map(lambda leaf: np.broadcast_to(leaf, len(layouts)), all_layouts)
    return numbers


def _whole_layers(request: PlanRequest, layouts: Layouts) -> Int[NumpyArray, "two layouts"]:
    """Return (2, layouts): whether layouts recompute whole layers, and layers per checkpoint."""
    modes = map(parse_recompute, request.recomputations)
    numbers = np.array([(mode.layers > 0, mode.group) for mode in modes])
    return numbers[layouts.recompute].T


def _short_table(request: PlanRequest, layouts: Layouts, row: int) -> ScheduleTable:
    shape = program_shape(request, layouts, row)
    return programs.build_table(shape, 2 * shape.workers)


OF_BOUNDARIES = ("senders", "receivers", "mtp_before")
OF_STAGES = tuple(name for name in Stages._fields if name not in OF_BOUNDARIES)


def _layout_stages(
    request: PlanRequest, layouts: Layouts, numbers: Layout
) -> tuple[Stages, Int[NumpyArray, "layouts stages"]]:
    """Return one stage of each class of stages, and the class of each stage, by layout."""
    # Stages of a class have equal costs. Stages A B B C have the classes 0 1 1 2, with the first
    # stages 0 1 3. Layouts with equal layers on all stages have one kind, and share the stages of
    # the first layout of the kind.
    recomputes_layers, _ = _whole_layers(request, layouts)
    whole_layers = layouts.recompute * recomputes_layers
    first_rows, kind = row_classes([*layouts[:3], layouts.edge_units, whole_layers])
    kinds = []  # (stages, first stage of each class, class of each stage)
    for row in first_rows.tolist():
        workload = layout_workload(request, layouts, row)
        table = _short_table(request, layouts, row)
        stages = build_stages(table, assign_layers(workload, table))
        if any(numbers.wide_layers):  # costs depend on all earlier layers, so no stages are equal
            first_stages = stage_class = np.arange(table.num_stages)
        else:
            first_stages, stage_class = _stage_classes(request.model, stages)
        kinds.append((stages, first_stages, stage_class))
    num_classes = max(len(first_stages) for _, first_stages, _ in kinds)
    stages_by_kind = [_take_stages(stages, first, num_classes) for stages, first, _ in kinds]
    by_layout: Stages = jax.tree.map(lambda *leaves: np.stack(leaves)[kind], *stages_by_kind)
    return by_layout, np.stack([stage_class for _, _, stage_class in kinds])[kind]


def _take_stages(stages: Stages, rows: Int[NumpyArray, " classes"], size: int) -> Stages:
    """Select stages; pad to `size` stages by repeating the last stage, which is not read."""
    padded = np.pad(rows, (0, size - len(rows)), mode="edge")
    columns = {name: np.asarray(getattr(stages, name), float)[padded] for name in OF_STAGES}
    is_real = np.arange(size) < len(rows)  # padding is no end of the pipeline
    ends = {name: columns[name] * is_real for name in ("first", "last")}
    return stages._replace(**columns | ends)


def _stage_classes(
    model: Model, stages: Stages
) -> tuple[Int[NumpyArray, " classes"], Int[NumpyArray, " stages"]]:
    """Return the first stage of each class, and the class of each stage."""
    # the layers before a stage matter if some are dense; places matter if stages have copies
    dense_layers = 0 if model.moe is None else int(model.moe.dense_layers)
    has_copies = stages.copies > 1
    properties = stages._replace(
        before=np.minimum(stages.before, dense_layers),
        nearest=stages.nearest * has_copies,
        farthest=stages.farthest * has_copies,
    )
    return row_classes([getattr(properties, name) for name in OF_STAGES])


TIE = 0.01  # relative difference of step times within which layouts of an idea are reported
ROUNDING = 1e-9  # relative rounding by which a lower bound may exceed the makespan

Times = Float[NumpyArray, " layouts"]
Rows = Int[NumpyArray, " rows"]


@short_repr
class Estimates(NamedTuple):
    """Memory, bounds and step times of all layouts."""

    lower_bound: Times  # lower bound of the step time [s]
    memory_bytes: Float[NumpyArray, " layouts"]  # of the fullest worker, per accelerator
    fits: Bool[NumpyArray, " layouts"]  # whether this memory need is within the limit
    step_time: Times  # exact step time [s]; NaN if it was not evaluated


def row_groups(columns: Sequence[Shaped[NumpyArray, " rows"]]) -> list[Int[NumpyArray, " _"]]:
    """Group rows that agree in all columns; groups come in the order of their first rows."""
    # If rows belong to groups [1 0 1 1], then rows sorted by group are [1 0 2 3], starts are [0 1],
    # and the groups are [1] and [0 2 3].
    first_rows, group = row_classes(columns)
    rows_by_group = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[rows_by_group], np.arange(len(first_rows)))
    groups = np.split(rows_by_group, starts[1:])
    return [groups[k] for k in np.argsort(first_rows, kind="stable")]


def estimate(request: PlanRequest, layouts: Layouts, tell: OnProgress) -> Estimates:
    """Return lower bounds and memory of all layouts, without step times."""
    bound, memory = np.empty(len(layouts)), np.empty(len(layouts))
    done = 0
    for rows in row_groups((layouts.schedule, layouts.pipeline, layouts.stages_per_worker)):
        shape, microbatches = program_shape(request, layouts, rows[0]), layouts.microbatches[rows]
        prices = price(request, layouts.take(rows))
        bound[rows] = programs.lower_bounds(programs.table_pipe(shape), prices.costs, microbatches)
        for members in row_groups((microbatches,)):
            count = int(microbatches[members[0]])
            memory[rows[members]] = _memory_needs(shape, prices, members, count)
        done += len(rows)
        tell(done, len(layouts), "layouts priced")
    unknown_times = np.full(len(layouts), np.nan)
    return Estimates(bound, memory, memory <= request.usable_memory, unknown_times)


def _memory_needs(
    shape: programs.ProgramShape, prices: Priced, rows: Rows, microbatches: int
) -> Float[NumpyArray, " rows"]:
    """Return the memory need of the fullest worker [B] for each layout of one program."""
    counts = programs.count_activations(shape, microbatches)
    sizes: StageBytes = jax.tree.map(lambda leaf: leaf[rows], prices.memory)
    need = counts.static_bytes(sizes.static, sizes.version) + counts.activation_bytes(sizes.parts)
    return need.max(axis=1)


class Evaluator:
    """Exact evaluation of step times, program by program."""

    def __init__(
        self,
        request: PlanRequest,
        layouts: Layouts,
        estimates: Estimates,
        tell: Callable[[], object],
    ) -> None:
        self.request, self.layouts, self.estimates, self.tell = request, layouts, estimates, tell
        self.num_evaluated = 0  # number of evaluated programs
        self.idea = layouts.idea  # (layouts) number of the idea
        # programs differ by schedule, workers, stages per worker or microbatches
        self._rows_by_program = row_groups((*layouts[:3], layouts.microbatches))
        self._program_number = np.empty(len(layouts), int)
        for number, rows in enumerate(self._rows_by_program):
            self._program_number[rows] = number

    def find_best(self, count: int, is_candidate: Bool[NumpyArray, " layouts"]) -> Rows:
        """Return the best layout of each of the `count` best ideas, after exact evaluations."""
        # Other layouts of these ideas within `TIE` of the best are evaluated, too.
        bound, times = self.estimates.lower_bound, self.estimates.step_time
        while True:
            # evaluate the program with the lowest bound among those that may change the answer
            may_tie = is_candidate & (bound <= (1 + TIE) * self._idea_limits(count, is_candidate))
            missing = np.flatnonzero(self.estimates.fits & may_tie & np.isnan(times))
            if not len(missing):
                break
            self._evaluate(self._program_number[missing[bound[missing].argmin()]], may_tie)
        order = self._evaluated_rows(is_candidate)
        _, first = np.unique(self.idea[order], return_index=True)
        return order[np.sort(first)][:count]

    def ties(self, row: int) -> Rows:
        """Return layouts with the idea of `row` whose step times differ by at most `TIE`."""
        times = self.estimates.step_time
        order = self._evaluated_rows(self.idea == self.idea[row])
        return order[(times[order] <= (1 + TIE) * times[row]) & (order != row)]

    def _evaluated_rows(self, is_candidate: Bool[NumpyArray, " layouts"]) -> Rows:
        """Return the evaluated rows, sorted by step time and memory."""
        times = self.estimates.step_time
        order = np.lexsort((self.estimates.memory_bytes, times))
        return order[(is_candidate & ~np.isnan(times))[order]]

    def find_front(self) -> Bool[NumpyArray, " layouts"]:
        """Evaluate layouts until the front of step time and memory is exact; return the front."""
        memory, fits = self.estimates.memory_bytes, self.estimates.fits
        while True:
            times = self.estimates.step_time
            min_times = self.estimates.lower_bound * (1 - ROUNDING)
            min_times = np.where(np.isnan(times), min_times, times)
            front = np.zeros(len(fits), bool)
            front[np.flatnonzero(fits)[pareto_front(min_times[fits], memory[fits])]] = True
            missing = np.flatnonzero(front & np.isnan(times))
            if not len(missing):
                return front
            for number in np.unique(self._program_number[missing]):
                self._evaluate(number, front)

    def evaluate_all(self) -> None:
        """Evaluate all layouts that fit."""
        for number in range(len(self._rows_by_program)):
            self._evaluate(number, self.estimates.fits)

    def _evaluate(self, number: int, selected: Bool[NumpyArray, " layouts"]) -> None:
        """Evaluate the selected layouts of a program that fit and have no step time yet."""
        rows = self._rows_by_program[number]
        rows = rows[(self.estimates.fits & selected & np.isnan(self.estimates.step_time))[rows]]
        if not len(rows):
            return
        layouts = self.layouts.take(rows)
        shape, count = program_shape(self.request, layouts, 0), int(layouts.microbatches[0])
        costs, links = price(self.request, layouts).costs, self.request.links
        self.estimates.step_time[rows] = programs.exact_times(shape, count, costs, links)
        self.num_evaluated += 1
        self.tell()

    def _idea_limits(
        self, count: int, is_candidate: Bool[NumpyArray, " layouts"]
    ) -> Float[NumpyArray, " layouts"]:
        """Return for each layout the step time [s] from which it cannot change the answer."""
        # A layout changes nothing if it is slower than another layout of its idea, or slower than
        # the `count`-th best idea.
        rows = np.flatnonzero(is_candidate & ~np.isnan(self.estimates.step_time))
        idea_times = np.full(max(count, 1 + self.idea.max()), np.inf)
        np.minimum.at(idea_times, self.idea[rows], self.estimates.step_time[rows])
        last_best = np.partition(idea_times, count - 1)[count - 1]
        return np.minimum(idea_times, last_best)[self.idea]
