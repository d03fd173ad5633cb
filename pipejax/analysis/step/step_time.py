"""Predicted step times of measured runs, and their exact gradients by the numbers of a system.

A row is a measured run. Its work is counted once on the host, because no number of a system changes
it. Rows of one structure are padded to equal numbers of stages, and priced together. Each program
then solves the costs of all its rows, for all values of the numbers, as one batch. The step time is
the sum of the costs on the critical path, so one reverse pass gives the gradient by all numbers.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.analysis.runs.evaluate import spans
from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.jax_on_demand import jax, mapped
from pipejax.costs import array_functions as xp
from pipejax.costs.costs import MESSAGE_FIELDS, PHASE_FIELDS, Costs, unchecked_costs
from pipejax.costs.measured.measured_rows import BANDWIDTHS, OPS, STEP, MeasuredRows
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import Model
from pipejax.costs.model.stack import OF_WORKLOAD
from pipejax.costs.model.workload import Stages, Workload, assign_layers, build_stages
from pipejax.costs.planning import build_for_run
from pipejax.costs.stage.slices import check_whole
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import StageWork, work_of_stages
from pipejax.costs.system.parts import Link, override_number
from pipejax.costs.system.system import Number, System
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program, run_on_host
from pipejax.engine.pricing import cost_vector
from pipejax.schedules.cells.ops import STEP_END
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

MAX_PAIRS = 2048  # largest number of pairs (row, set of values) that are priced at once

Rows = Int[NumpyArray, " rows"]
Leaves = Mapping[str, Array | NumpyArray]
Values = Float[NumpyArray, "batch values"]


class RowInputs(NamedTuple):
    """Inputs that price a measured row, apart from the system."""

    model: Model
    layout: Layout
    stages: Stages
    recompute: str  # recomputation inside a layer
    setting: "Setting"


class Setting(NamedTuple):
    """Numbers of the machine that a row states, and the group whose layer factor it uses."""

    # 0 stands for the number of the system
    gpus_per_node: Number
    node_bandwidth: Number  # bandwidth of messages within a node [B/s]
    network_bandwidth: Number  # bandwidth of messages between nodes [B/s]
    layer_groups: tuple[Number, ...]  # one-hot: 1 at the group of the row


class RowBatch(NamedTuple):
    """Measured rows of one structure, which are priced together."""

    rows: Rows  # indices among all rows
    inputs: tuple[StageWork, Setting]  # arrays have the axis of rows first
    fields: tuple[str, ...]  # fields of `Costs` that the programs read
    # (program, rows of the batch that run it, whether steps overlap in these rows)
    programs: tuple[tuple[Program, Rows, bool], ...]
    ops: tuple[tuple[str, Rows, Rows], ...]  # (field of `Costs`, rows of profiles, their stages)

    def predict_and_grad(
        self, system: System, names: Sequence[str], values: Values
    ) -> tuple[Float[NumpyArray, "batch rows"], Float[NumpyArray, "batch rows values"]]:
        """Return step times [s] of the rows for each set of values, and slopes by the values."""
        from pipejax.engine.batched.pricing import path_slopes, priced_on_host

        size, rows = len(values), len(self.rows)
        # 2 sets of values and 3 rows: value_index is 0 0 0 1 1 1, row_index 0 1 2 0 1 2
        value_index, row_index = (index.ravel() for index in np.indices((size, rows)))
        inputs = jax.tree.map(lambda leaf: leaf[row_index], self.inputs)
        costs, cost_slopes = priced_on_host(
            _price_row, (system, names, self.fields), [*values[value_index].T], inputs, slopes=True
        )
        by_field = {name: getattr(costs, name) for name in self.fields}
        seconds, counts = _solve(
            self,
            {name: leaf.reshape(size, rows, *leaf.shape[1:]) for name, leaf in by_field.items()},
        )
        pair_counts = {name: count.reshape(by_field[name].shape) for name, count in counts.items()}
        slopes = path_slopes(unchecked_costs(pair_counts), cost_slopes)
        return seconds, slopes.reshape(size, rows, -1)


def _price_row(
    shared: tuple[System, Sequence[str], Sequence[str]],
    values: Sequence[Number],
    inputs: tuple[StageWork, Setting],
) -> Costs:
    """Return the fields of the costs of `inputs` at other numbers of the system (`names`)."""
    # `values` holds these numbers, then a factor of layer times for each group of layers.
    (system, names, fields), (work, setting) = shared, inputs
    for name, number in zip(names, values, strict=False):
        system = override_number(system, name, number)
    if factors := values[len(names) :]:
        factor = sum(map(operator.mul, factors, setting.layer_groups))
        work = work._replace(
            layers=tuple(count * factor for count in work.layers),
            recomputed=tuple(count * factor for count in work.recomputed),
        )
    costs = work_costs(work, _with_setting(system, setting))
    return unchecked_costs({name: getattr(costs, name) for name in fields})


class StepTimes:
    """Step times of measured rows on any system; rows of a profile have op times instead."""

    def __init__(
        self,
        rows: MeasuredRows,
        *,
        link: str | Links = "delay",
        layer_group: Rows | None = None,
        system: System | None = None,
    ) -> None:
        # `link` is the link model of rows that name none. `layer_group` (rows) is the index of each
        # row's layer factor in `predict_and_grad`. If `system` is given, planned schedules of
        # `predict_and_grad` are ordered for the times on this system.
        check_types(rows=(rows, MeasuredRows))
        group = np.zeros(len(rows), int) if layer_group is None else layer_group
        timed = rows.op.tolist(), rows.stage.tolist(), rows.steps_overlap.tolist()
        self.size = len(rows)
        self.workloads = row_workloads(rows)
        self.tables = row_tables(rows)
        self._builders = [schedules.find(name) for name in rows.schedule.tolist()]
        # for each row: (`STEP` or the letter of an op, stage of the op, whether workers begin the
        # next step without waiting for other workers)
        self._timed = [*zip(*timed, strict=True)]
        self._lower = functools.cache(lambda table, name: lower(table, link=name, step_end=True))
        self._links = [name or link for name in rows.link.tolist()]
        self.programs = list(map(self._lower, self.tables, self._links))
        bandwidths = (getattr(rows, name) for name in BANDWIDTHS)
        groups = np.eye(group.max(initial=0) + 1)[group]
        columns = rows.accelerators_per_node.astype(float), *bandwidths, map(tuple, groups)
        settings = (Setting(*row) for row in zip(*columns, strict=True))
        parts = zip(self.workloads, self.tables, settings, strict=True)
        self.inputs = [_inputs(*row_parts) for row_parts in parts]
        if system is not None:
            self.programs = list(map(self._program, range(self.size), self._costs(system)))

    def _program(self, row: int, costs: Costs) -> Program:
        """Return a row's program; a planned schedule is ordered for these costs."""
        builder, table = self._builders[row], self.tables[row]
        if not builder.planned:
            return self.programs[row]
        size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
        options = {}
        if "stages_per_worker" in builder.options:
            options["stages_per_worker"] = table.stages_per_worker
        planned_table = build_for_run(builder, size, options, lambda _: costs)
        return self._lower(planned_table, self._links[row])

    @functools.cached_property
    def batches(self) -> tuple[RowBatch, ...]:
        """Return a batch for each group of rows whose inputs have equal structure and shapes."""
        max_stages = max((inputs.stages.layers.shape[-1] for inputs in self.inputs), default=0)
        groups: dict[tuple[Any, ...], list[int]] = {}
        trees: list[tuple[StageWork, Setting]] = []
        for k, inputs in enumerate(self.inputs):
            padded = inputs._replace(stages=_pad_stages(inputs.stages, max_stages))
            tree = _work(padded), padded.setting
            trees.append(jax.tree.map(lambda leaf: np.asarray(leaf, float), tree))
            leaves, structure = jax.tree.flatten(trees[k])
            groups.setdefault((structure, *(leaf.shape for leaf in leaves)), []).append(k)
        return tuple(
            self._make_batch(np.array(rows), [trees[k] for k in rows]) for rows in groups.values()
        )

    def _make_batch(self, rows: Rows, trees: Sequence[tuple[StageWork, Setting]]) -> RowBatch:
        """Combine rows into a batch; their inputs have one structure and equal shapes."""
        # rows of steps need all costs of their programs; rows of profiles need the cost of one op
        timed = [self._timed[row] for row in rows]
        steps = [k for k, (op, _, _) in enumerate(timed) if op == STEP]
        programs = {k: self.programs[rows[k]] for k in steps}
        overlaps = [steps_overlap for _, _, steps_overlap in timed]
        ops = _rows_by_op(timed)
        fields = {"forward"} | _program_fields(programs.values()) | {field for field, _, _ in ops}
        inputs = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
        used_fields = (*sorted(fields), *MESSAGE_FIELDS)
        return RowBatch(rows, inputs, used_fields, _rows_by_program(programs, overlaps), ops)

    def predict(self, system: System) -> Float[NumpyArray, " rows"]:
        """Predict the step time of each row [s]."""
        seconds = np.empty(self.size)
        for row, costs in enumerate(self._costs(system)):
            op, stage, steps_overlap = self._timed[row]
            if op == STEP:
                program = self._program(row, costs)
                vector = np.asarray(cost_vector(program, costs))
                run = run_on_host(program, vector)
                ends = spans(program, run.duration, run.finish) if steps_overlap else run.finish
                seconds[row] = ends.max()
            else:  # the row measures an op of one microbatch
                seconds[row] = np.asarray(getattr(costs, PHASE_FIELDS[op]))[stage]
        return seconds

    def _costs(self, system: System) -> list[Costs]:
        """Return each row's costs on a system; equal rows are priced once."""
        costs_by_key: dict[Hashable, Costs] = {}
        costs = []
        for k, inputs in enumerate(self.inputs):
            stages = tuple(np.asarray(leaf).tobytes() for leaf in inputs.stages)
            model = id(self.workloads[k].model)
            key = (model, inputs.layout, stages, inputs.recompute, inputs.setting)
            if key not in costs_by_key:
                costs_by_key[key] = work_costs(_work(inputs), _with_setting(system, inputs.setting))
            costs.append(costs_by_key[key])
        return costs

    def predict_and_grad(
        self, system: System, names: Sequence[str], values: Values
    ) -> tuple[Float[NumpyArray, "batch rows"], Float[NumpyArray, "batch rows values"]]:
        """Return all rows' step times [s] for each set of values, and slopes by the values."""
        # A set holds values for the numbers of the system in `names` (NaN: unchanged), then a
        # factor of layer times for each group of layers.
        # names and other text are removed, because they would cause further compilations
        unnamed = dataclasses.replace(system, name="", source="", calibration=None)
        system = mapped(lambda leaf: np.asarray(leaf, float), unnamed)
        seconds = np.empty((len(values), self.size))
        slopes = np.empty((len(values), self.size, values.shape[1]))
        with jax.enable_x64(True):
            for batch in self.batches:
                sets = max(1, MAX_PAIRS // len(batch.rows))
                for block in (slice(k, k + sets) for k in range(0, len(values), sets)):
                    result = batch.predict_and_grad(system, names, values[block])
                    seconds[block, batch.rows], slopes[block, batch.rows] = result
        return seconds, slopes


def _work(row: RowInputs) -> StageWork:
    return work_of_stages(row.model, row.layout, row.stages, recompute=row.recompute)


def _with_setting(system: System, setting: Setting) -> System:
    """Set the node size and the bandwidths of a system to those that a row states."""
    per_node = xp.where(setting.gpus_per_node > 0, setting.gpus_per_node, system.gpus_per_node)
    return dataclasses.replace(
        system,
        gpus_per_node=per_node,
        node=_with_rate(system.node, setting.node_bandwidth),
        network=_with_rate(system.network, setting.network_bandwidth),
    )


def _with_rate(link: Link, rate: Number) -> Link:
    """Set the bandwidth so that the link reaches a measured rate [B/s]; 0 changes nothing."""
    bandwidth = xp.where(rate > 0, rate / link.efficiency, link.bandwidth)
    return dataclasses.replace(link, bandwidth=bandwidth)


def row_workloads(rows: MeasuredRows) -> tuple[Workload, ...]:
    """Return the workload of each measured row."""
    columns: dict[str, Sequence[Any]] = {
        "model": [rows.models[k] for k in rows.model.tolist()],
        "minibatch": (rows.microbatches * rows.microbatch_size).tolist(),
        "tensor_parallel": rows.tensor.tolist(),
        "sequence_parallel": (rows.sequence_parallel > 0).tolist(),
        "context_parallel": rows.context.tolist(),
        "expert_parallel": rows.expert.tolist(),
        "expert_tensor_parallel": rows.expert_tensor.tolist(),
        "data_parallel": rows.data.tolist(),
        "zero": rows.zero.tolist(),
        **{name: getattr(rows, name).tolist() for name in OF_WORKLOAD},
        "scatter_gather": [True] * len(rows),  # as Megatron, DeepSpeed and NeMo do
        "recompute": rows.recompute.tolist(),
        "precision": rows.precision.tolist(),
        "embedding_units": rows.embedding_units.tolist(),
        "loss_units": rows.loss_units.tolist(),
        "pipeline_layout": rows.pipeline_layout.tolist(),
    }
    return tuple(
        Workload(**dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    )


def row_tables(rows: MeasuredRows) -> tuple[ScheduleTable, ...]:
    """Build the schedule of each row; rows with equal sizes share a table."""

    @functools.cache
    def build_table(name: str, workers: int, per_worker: int, microbatches: int) -> ScheduleTable:
        options = {"stages_per_worker": per_worker} if per_worker > 1 else {}
        table = schedules.build(name, num_workers=workers, num_microbatches=microbatches, **options)
        check_whole(table, "a measured row")
        return table

    columns = (rows.schedule, rows.pipeline, rows.stages_per_worker, rows.microbatches)
    shapes = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(build_table(*shape) for shape in shapes)


def _inputs(workload: Workload, table: ScheduleTable, setting: Setting) -> RowInputs:
    # texts of a model are part of a compiled function's key; without texts, equal models share it
    model = dataclasses.replace(workload.model, name="", source="")
    stages = build_stages(table, assign_layers(workload, table))
    recompute = workload.recomputation.in_layer
    return RowInputs(model, workload.layout(table), stages, recompute, setting)


def _pad_stages(stages: Stages, num_stages: int) -> Stages:
    """Pad the stages axis to `num_stages` with empty stages, which are never read."""
    padding = [(0, 0)] * 2 + [(0, num_stages - np.shape(stages.layers)[-1])]
    padded = Stages(*(np.pad(leaf, padding[-np.ndim(leaf) :]) for leaf in stages))
    return padded._replace(copies=np.maximum(padded.copies, 1.0))  # 0 copies cannot be priced


def _rows_by_op(timed: Sequence[tuple[str, int, bool]]) -> tuple[tuple[str, Rows, Rows], ...]:
    """Group rows of profiles by op; return (cost field of the op, rows, their stages)."""
    row_ops, stages, _ = (np.array(column) for column in zip(*timed, strict=True))
    by_op = {op: np.flatnonzero(row_ops == op) for op in OPS}
    return tuple((PHASE_FIELDS[op], rows, stages[rows]) for op, rows in by_op.items() if len(rows))


def _program_fields(programs: Iterable[Program]) -> set[str]:
    """Return the fields of op times that any of the programs reads."""
    layouts = {id(program): program.layout for program in programs}.values()
    phases = {phase for layout in layouts for phase in (*layout.phases, *layout.paired_phases)}
    return {PHASE_FIELDS[phase.name] for phase in (*phases, *STEP_END)}


def _rows_by_program(
    programs: Mapping[int, Program], overlaps: Sequence[bool]
) -> tuple[tuple[Program, Rows, bool], ...]:
    """Group rows by program and overlap; return (program, rows, whether steps overlap)."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for row, program in programs.items():
        groups.setdefault((id(program), overlaps[row]), []).append(row)
    return tuple(
        (programs[rows[0]], np.array(rows), steps_overlap)
        for (_, steps_overlap), rows in groups.items()
    )


def _solve(
    batch: RowBatch, costs: Mapping[str, NumpyArray]
) -> tuple[Float[NumpyArray, "batch rows"], dict[str, NumpyArray]]:
    """Return step times (batch, rows) [s], and {field: counts of its costs on critical paths}."""
    from pipejax.engine.batched.pricing import padded

    # Costs and counts are {field: (batch, rows, ...)}.
    counts = {name: np.zeros_like(leaf) for name, leaf in costs.items()}
    seconds = np.empty(costs["forward"].shape[:2])
    for field, rows, stages in batch.ops:  # rows of profiles are the time of one op
        seconds[:, rows] = costs[field][:, rows, stages]
        counts[field][:, rows, stages] = 1.0
    for program, rows, steps_overlap in batch.programs:
        leaf_index = _program_index(rows, program.layout.num_stages)
        shape = len(seconds), len(rows)
        size = math.prod(shape)
        flat_costs = {}  # (batch * rows, ...)
        for name, leaf in costs.items():
            row_leaf = leaf[leaf_index(name, leaf)]
            flat_costs[name] = row_leaf.reshape(size, *row_leaf.shape[2:])
        times, path_counts = _solve_part(program, steps_overlap, padded(flat_costs, size))
        seconds[:, rows] = np.asarray(times)[:size].reshape(shape)
        for name, leaf in counts.items():
            count = np.asarray(path_counts[name])[:size]
            leaf[leaf_index(name, leaf)] = count.reshape(*shape, *count.shape[1:])
    return seconds, counts


def _solve_part(program: Program, steps_overlap: bool, leaves: Any) -> tuple[Any, Leaves]:
    """Return step times (batch) and {field: counts on critical paths}, from costs (batch, ...)."""
    from pipejax.engine.batched.makespans import makespans_and_grad
    from pipejax.engine.recurrence import longest_spans_and_grad

    size = len(next(iter(leaves.values())))
    if steps_overlap:
        return longest_spans_and_grad(program, leaves)
    values, counts = makespans_and_grad(program, Costs(**leaves), batch_size=size)
    return values, {name: getattr(counts, name) for name in leaves}


def _program_index(rows: Rows, stages: int) -> Callable[[str, NumpyArray], tuple[Any, ...]]:
    """Return a function from a cost (batch, rows, ..) to the index that selects these rows."""
    # The index leaves out the padding of the last axis, which is the axis of stages, or of
    # boundaries for message times.

    def index(name: str, leaf: NumpyArray) -> tuple[Any, ...]:
        if leaf.ndim <= 2:
            return slice(None), rows
        return slice(None), rows, ..., slice(stages - 1 if name in MESSAGE_FIELDS else stages)

    return index
