"""Step times of measured rows, and their exact gradients by numbers of the system.

The work of every row is counted on the host, once: no number of a system changes it. Rows whose
work differs in numbers alone are priced by one compiled function, with stages filled up to the most
that a row has: their numbers are one matrix, for XLA compiles it in a fraction of the time that it
takes for the counting. Each program then solves the costs of all its rows, under all values of the
numbers, as one batch. Its counts of the costs on the critical path turn the step time into a plain
sum of costs, so that one reverse pass gives the gradient by all numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.jax_on_demand import jax, jnp
from pipejax.base.trees import mapped
from pipejax.costs import array_functions as xp
from pipejax.costs.costs import MESSAGE_FIELDS, PHASE_FIELDS, Costs
from pipejax.costs.measured.measured_rows import OPS, STEP, MeasuredRows
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import Model
from pipejax.costs.model.stack import OF_WORKLOAD
from pipejax.costs.model.workload import Stages, Workload, assign_layers, build_stages
from pipejax.costs.planning import build_for_run
from pipejax.costs.stage.slices import check_whole
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import StageWork, work_of_stages
from pipejax.costs.system.parts import with_known
from pipejax.costs.system.system import Number, System
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import cost_vector
from pipejax.engine.recurrence_host import makespan_on_host
from pipejax.schedules.cells.ops import STEP_END
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

PAIRS = 512  # of a row and a set of values that are priced at once
FEW_PAIRS, FEW = 64, 8  # the same of at most so many rows, of which a fit makes few pairs

Rows = Int[NumpyArray, " rows"]
Leaves = dict[str, Array]
Known = dict[str, NumpyArray]
Shapes = tuple[tuple[int, ...], ...]
Values = Float[NumpyArray, "batch values"]


class RowInputs(NamedTuple):
    """Inputs of a row's price beside the system."""

    model: Model  # the transformer
    layout: Layout  # how accelerators share the work
    stages: Stages  # what each stage holds, and where
    recompute: str  # what a layer itself recomputes
    setting: "Setting"  # what a row says of its machine


class Setting(NamedTuple):
    """Machine numbers of a row, and the fitted group of its layers."""

    gpus_per_node: Number  # accelerators of a node, 0 where the system says it
    # that a message between nodes reaches, 0 where the system says it [B/s]
    network_bandwidth: Number
    layer_group: Number  # which factor the time of its layers has, where they have factors


@dataclasses.dataclass(frozen=True)
class PricingKind:
    """Costs of one row, for the pricer."""

    reads: tuple[str, ...]  # fields of `Costs` that the programs read
    form: Any  # structure of the row's work and setting
    shapes: Shapes  # (leaves) of their numbers, which lie one behind the other
    names: tuple[str, ...] = ()  # numbers of the system that values are given for

    def row(self, numbers: Float[Array, " numbers"]) -> tuple[StageWork, Setting]:
        """Put together the work and the setting of a row."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        parts = zip(jnp.split(numbers, ends[:-1]), self.shapes, strict=True)
        row: tuple[StageWork, Setting] = jax.tree.unflatten(
            self.form, [part.reshape(shape) for part, shape in parts]
        )
        return row

    def __call__(self, system: System, values: Array, numbers: Array) -> Leaves:
        """Price the costs of one row under one set of values."""
        work, setting = self.row(numbers)
        for k, name in enumerate(self.names):
            system = with_known(system, name, values[k])
        system = _as_it_was(system, setting)
        factors = values[len(self.names) :]
        if factors.size:
            factor = factors[jnp.asarray(setting.layer_group).astype(int)]
            layers, recomputed = (
                tuple(count * factor for count in counts)
                for counts in (work.layers, work.recomputed)
            )
            work = work._replace(layers=layers, recomputed=recomputed)
        costs = work_costs(work, system)
        return {name: jnp.asarray(getattr(costs, name), float) for name in self.reads}


class RowBatch(NamedTuple):
    """Rows that are priced together."""

    rows: Rows  # which of all rows
    numbers: Float[NumpyArray, "rows numbers"]  # (rows, numbers) their work and settings
    kind: PricingKind  # all else
    programs: tuple[tuple[Program, Rows], ...]  # each program, and which of these rows run it
    # fields of `Costs` that rows of profiles read, which rows, and of which stages
    ops: tuple[tuple[str, Rows, Rows], ...]

    def prices(self, kind: PricingKind, system: System, values: Values) -> Known:
        """Costs of all rows under each set of values: (batch, rows, ...)."""
        from pipejax.engine.batched.pricing import priced  # rows are read without JAX

        def price(pairs: tuple[Values, NumpyArray]) -> Leaves:
            leaves: Leaves = priced(kind, system, *pairs, quickly=True)
            return leaves

        costs: Known = self._map_pairs(price, values, {})
        return costs

    def slopes(
        self, kind: PricingKind, system: System, values: Values, counts: Known
    ) -> Float[NumpyArray, "batch rows values"]:
        """Slopes by the values of the sum of the costs on each row's critical path."""
        from pipejax.engine.batched.pricing import pulled

        def pull(pairs: tuple[Values, NumpyArray, Known]) -> Array:
            _, slopes = pulled(kind, system, *pairs, quickly=True)
            result: Array = slopes
            return result

        result: NumpyArray = self._map_pairs(pull, values, counts)
        return result

    def _map_pairs(self, function: Callable[..., Any], values: Values, counts: Known) -> Any:
        """Call a function on parts of all pairs of values and rows: (batch, rows, ...) each."""
        from pipejax.engine.batched.pricing import in_parts

        size, rows = len(values), len(self.rows)
        value, row = (index.ravel() for index in np.indices((size, rows)))
        flat = {name: leaf.reshape(size * rows, *leaf.shape[2:]) for name, leaf in counts.items()}
        pairs = (values[value], self.numbers[row], *([flat] if flat else []))
        result = in_parts(function, pairs, FEW_PAIRS if rows <= FEW else PAIRS)
        return jax.tree.map(lambda leaf: leaf.reshape(size, rows, *leaf.shape[1:]), result)


class StepTimes:
    """Step times of measured rows on any system; of rows of a profile, times of their ops."""

    def __init__(
        self,
        rows: MeasuredRows,
        *,
        link: str | Links = "delay",
        layer_group: Rows | None = None,
        system: System | None = None,
    ) -> None:
        """Build the schedule of every row, and lay the numbers of all rows out as arrays."""
        # link is that of rows that do not say theirs. layer_group says which factor the time of a
        # row's layers has (predict_and_grad), and system for whose times it takes planned
        # schedules: predict takes those of its own.
        check_types(rows=(rows, MeasuredRows))
        group = np.zeros(len(rows), int) if layer_group is None else layer_group
        self.size = len(rows)
        self.workloads = row_workloads(rows)
        self.tables = row_tables(rows)
        self._builders = [schedules.find(name) for name in rows.schedule.tolist()]
        self.read = [(str(op), int(stage)) for op, stage in zip(rows.op, rows.stage, strict=True)]
        self._lower = functools.cache(lambda table, name: lower(table, link=name, step_end=True))
        self._links = [name or link for name in rows.link.tolist()]
        self.programs = list(map(self._lower, self.tables, self._links))
        columns = (rows.accelerators_per_node, rows.network_bandwidth, group)
        settings = (Setting(*map(float, row)) for row in zip(*columns, strict=True))
        self.inputs = [
            _inputs(*args) for args in zip(self.workloads, self.tables, settings, strict=True)
        ]
        if system is not None:
            self.programs = list(map(self._program, range(self.size), self._costs(system)))

    def _program(self, row: int, costs: Costs) -> Program:
        builder, table = self._builders[row], self.tables[row]
        if not builder.planned:
            return self.programs[row]
        size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches}
        several = "stages_per_worker" in builder.options
        options = {"stages_per_worker": table.stages_per_worker} if several else {}
        planned = build_for_run(builder, size, options, lambda _: costs)
        return self._lower(planned, self._links[row])

    @functools.cached_property
    def batches(self) -> tuple[RowBatch, ...]:
        """Group the rows by compiled function, and lay each group out as arrays."""
        most_stages = max((inputs.stages.layers.shape[-1] for inputs in self.inputs), default=0)
        alike: dict[tuple[Any, Shapes], list[int]] = {}
        leaves: list[list[NumpyArray]] = []
        for k, inputs in enumerate(self.inputs):
            full = inputs._replace(stages=_filled(inputs.stages, most_stages))
            numbers, form = jax.tree.flatten((_work(full), full.setting))
            leaves.append([np.asarray(leaf, float) for leaf in numbers])
            alike.setdefault((form, tuple(leaf.shape for leaf in leaves[k])), []).append(k)
        return tuple(
            self._batch(np.array(members), [leaves[k] for k in members], form, shapes)
            for (form, shapes), members in alike.items()
        )

    def _batch(
        self,
        rows: Rows,
        leaves: Sequence[Sequence[NumpyArray]],
        form: Any,
        shapes: Shapes,
    ) -> RowBatch:
        read = [self.read[k] for k in rows]
        programs = {k: self.programs[row] for k, row in enumerate(rows) if read[k][0] == STEP}
        ops = _by_op(read)
        fields = {"forward"} | _reads(programs.values()) | {field for field, _, _ in ops}
        kind = PricingKind((*sorted(fields), *MESSAGE_FIELDS), form, shapes)
        numbers = np.array([np.concatenate([leaf.ravel() for leaf in parts]) for parts in leaves])
        return RowBatch(rows, numbers, kind, _by_program(programs), ops)

    def predict(self, system: System) -> Float[NumpyArray, " rows"]:
        """Predict the step time of each row [s]."""
        costs = self._costs(system)
        programs = map(self._program, range(self.size), costs)
        return np.array(
            [_step_or_op(*run) for run in zip(costs, programs, self.read, strict=True)], float
        )

    def _costs(self, system: System) -> list[Costs]:
        """Costs of each row; rows alike are priced once."""
        costs_by_key: dict[Hashable, Costs] = {}
        costs = []
        for k, inputs in enumerate(self.inputs):
            stages = tuple(np.asarray(leaf).tobytes() for leaf in inputs.stages)
            model = id(self.workloads[k].model)
            key = (model, inputs.layout, stages, inputs.recompute, inputs.setting)
            if key not in costs_by_key:
                costs_by_key[key] = work_costs(_work(inputs), _as_it_was(system, inputs.setting))
            costs.append(costs_by_key[key])
        return costs

    def predict_and_grad(
        self, system: System, names: Sequence[str], values: Values
    ) -> tuple[Float[NumpyArray, "batch rows"], Float[NumpyArray, "batch rows values"]]:
        """Predict all rows under each set of values of named numbers; NaN is the system's own."""
        # More values than names are factors of layer times, one for each group of layers. Returns
        # (batch, rows) step times [s], and (batch, rows, values) their derivatives.
        system = _numbers(system)
        seconds = np.empty((len(values), self.size))
        slopes = np.empty((len(values), self.size, values.shape[1]))
        with jax.enable_x64(True):
            for batch in self.batches:
                kind = dataclasses.replace(batch.kind, names=tuple(names))
                costs = batch.prices(kind, system, values)
                seconds[:, batch.rows], counts = _solved(batch, costs)
                slopes[:, batch.rows] = batch.slopes(kind, system, values, counts)
        return seconds, slopes


def _work(row: RowInputs) -> StageWork:
    return work_of_stages(row.model, row.layout, row.stages, recompute=row.recompute)


def _as_it_was(system: System, setting: Setting) -> System:
    near, rate = setting.gpus_per_node, setting.network_bandwidth
    per_node = xp.where(near > 0, near, system.gpus_per_node)
    bandwidth = xp.where(rate > 0, rate / system.network.efficiency, system.network.bandwidth)
    network = dataclasses.replace(system.network, bandwidth=bandwidth)
    return dataclasses.replace(system, gpus_per_node=per_node, network=network)


def _step_or_op(costs: Costs, program: Program, read: tuple[str, int]) -> float:
    """Seconds of a step, or of an op of one microbatch on a stage."""
    op, stage = read
    if op != STEP:
        return float(np.asarray(getattr(costs, PHASE_FIELDS[op]))[stage])
    return makespan_on_host(program, np.asarray(cost_vector(program, costs)))


def _numbers(system: System) -> System:
    """Return a system without its name, so that names compile nothing."""
    unnamed = dataclasses.replace(system, name="", source="", calibration=None)
    numbers: System = mapped(lambda leaf: np.asarray(leaf, float), unnamed)
    return numbers


def row_workloads(rows: MeasuredRows) -> tuple[Workload, ...]:
    """Return the workload of each row."""
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
    """Build the schedule of each row; rows of one shape share a table."""

    @functools.cache
    def build(name: str, workers: int, per_worker: int, microbatches: int) -> ScheduleTable:
        options = {"stages_per_worker": per_worker} if per_worker > 1 else {}
        table = schedules.build(name, num_workers=workers, num_microbatches=microbatches, **options)
        check_whole(table, "a measured row")
        return table

    columns = (rows.schedule, rows.pipeline, rows.stages_per_worker, rows.microbatches)
    shapes = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(build(*shape) for shape in shapes)


def _inputs(workload: Workload, table: ScheduleTable, setting: Setting) -> RowInputs:
    model = dataclasses.replace(workload.model, name="", source="")
    stages = build_stages(table, assign_layers(workload, table))
    return RowInputs(model, workload.layout(table), stages, workload.recompute_in_layer, setting)


def _filled(stages: Stages, num_stages: int) -> Stages:
    """Fill up with stages without layers, which are never read."""
    more = [(0, 0)] * 2 + [(0, num_stages - np.shape(stages.layers)[-1])]
    full = Stages(*(np.pad(leaf, more[-np.ndim(leaf) :]) for leaf in stages))
    return full._replace(copies=np.maximum(full.copies, 1.0))  # a group of none has no price


def _by_op(read: Sequence[tuple[str, int]]) -> tuple[tuple[str, Rows, Rows], ...]:
    """Group rows of profiles by op: a field of `Costs`, the rows, and their stages."""
    by_op = {op: np.array([k for k, (row_op, _) in enumerate(read) if row_op == op]) for op in OPS}
    return tuple(
        (PHASE_FIELDS[op], rows, np.array([read[k][1] for k in rows]))
        for op, rows in by_op.items()
        if len(rows)
    )


def _reads(programs: Iterable[Program]) -> set[str]:
    """Name the times of ops that any of the programs reads."""
    layouts = {id(program): program.layout for program in programs}.values()
    phases = {phase for layout in layouts for phase in (*layout.phases, *layout.paired_phases)}
    return {PHASE_FIELDS[phase.name] for phase in (*phases, *STEP_END)}


def _by_program(programs: Mapping[int, Program]) -> tuple[tuple[Program, Rows], ...]:
    users: dict[int, list[int]] = {}
    for k, program in programs.items():
        users.setdefault(id(program), []).append(k)
    return tuple((programs[rows[0]], np.array(rows)) for rows in users.values())


def _solved(
    batch: RowBatch, costs: Mapping[str, NumpyArray]
) -> tuple[Float[NumpyArray, "batch rows"], dict[str, NumpyArray]]:
    """Solve the programs of all rows: makespans, and counts of all costs on the critical path."""
    counts = {name: np.zeros_like(leaf) for name, leaf in costs.items()}
    seconds = np.empty(costs["forward"].shape[:2])
    for field, rows, stages in batch.ops:
        seconds[:, rows] = costs[field][:, rows, stages]
        counts[field][:, rows, stages] = 1.0
    from pipejax.engine.batched.pricing import in_parts

    for program, rows in batch.programs:
        index = _program_index(rows, program.layout.num_stages)
        shape = seconds[:, rows].shape
        size = shape[0] * shape[1]
        read = {name: leaf[index(name, leaf)] for name, leaf in costs.items()}
        flat = {name: leaf.reshape(size, *leaf.shape[2:]) for name, leaf in read.items()}
        values, parts = in_parts(functools.partial(_solved_part, program), flat)
        seconds[:, rows] = values.reshape(shape)
        for name, leaf in counts.items():
            leaf[index(name, leaf)] = parts[name].reshape(*shape, *parts[name].shape[1:])
    return seconds, counts


def _solved_part(program: Program, leaves: Any) -> tuple[Any, Leaves]:
    from pipejax.engine.batched.makespans import makespans_and_grad

    size = len(next(iter(leaves.values())))
    values, counts = makespans_and_grad(program, Costs(**leaves), batch_size=size)
    return values, {name: getattr(counts, name) for name in leaves}


def _program_index(rows: Rows, stages: int) -> Callable[[str, NumpyArray], tuple[Any, ...]]:
    """Return the index of some rows in a leaf of costs, without padded stages."""

    def index(name: str, leaf: NumpyArray) -> tuple[Any, ...]:
        real_places = slice(stages - (name in MESSAGE_FIELDS))
        return (slice(None), rows, ..., real_places) if leaf.ndim > 2 else (slice(None), rows)

    return index
