"""`evaluate`, the main entry point: from a table and costs to all numbers of a report."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base import longest_path
from pipejax.base.array_types import Array, Bool, Float, Int, Num, NumpyArray
from pipejax.base.checks import as_floats, check_types, wrong
from pipejax.base.display import Drawn, with_short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.precision import check_finite
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, Program, run_on_host
from pipejax.engine.pricing import Vector, lower_and_price
from pipejax.schedules.cells.ops import AT_WORK, IN_I
from pipejax.schedules.table.held_activations import (
    GATHERED,
    WEIGHT_SHARE,
    MemoryChanges,
    MemoryOps,
    is_in_ledger,
    peak_in_flight,
)
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

Scalar = float | Float[Array, ""] | Float[NumpyArray, ""]
PerWorker = Float[Array, " workers"] | Float[NumpyArray, " workers"]
PerNode = Float[Array, " nodes"] | Float[NumpyArray, " nodes"]


@with_short_repr(
    "schedule workers stages microbatches links makespan bubble_ratio bound_by "
    "peak_in_flight busy path_share"
)
@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation(Drawn):
    """Run of a schedule at one set of costs. Times are seconds, arrays are NumPy's.

    Attributes:
      schedule: name of the schedule.
      workers: P.
      stages: S.
      microbatches: M.
      links: link model and further settings of the links.
      makespan: last end over all ops.
      start: (workers, slots) start of each cell; 0 for idle cells.
      finish: (workers, slots) end of each cell; 0 for idle cells.
      busy: (workers) compute time.
      bubble_ratio: idle / (P * makespan), in [0, 1).
      bubble_overhead: makespan / (sum(busy) / P) - 1.
      max_span: largest span of a worker: time between its first start and its last end.
      span_bubble_ratio: 1 - (sum(busy) / P) / max_span.
      peak_in_flight: (workers) largest number of activations held at once.
      critical: (nodes) whether a node of the program is on the critical path.
      path_share: {cost: share of the makespan that it takes on the critical path}.
      table: the schedule.
      costs: costs of ops and messages.
      program: the lowered schedule.
      node_start: (nodes) start of each node, which equals the last arrival of its inputs.
      node_finish: (nodes) finish time of each node.
      node_duration: (nodes) duration of each node.
      message_start: (messages) time at which each message of the program leaves.
      message_finish: (messages) time at which each message arrives.
      message_critical: (messages) whether a message is on the critical path.
    """

    schedule: str
    workers: int
    stages: int
    microbatches: int
    links: Links
    makespan: float
    start: Float[NumpyArray, "workers slots"]
    finish: Float[NumpyArray, "workers slots"]
    busy: Float[NumpyArray, " workers"]
    bubble_ratio: float
    bubble_overhead: float
    max_span: float
    span_bubble_ratio: float
    peak_in_flight: Num[NumpyArray, " workers"]
    critical: Bool[NumpyArray, " nodes"]
    path_share: Mapping[str, float]
    table: ScheduleTable
    costs: Costs
    program: Program
    node_start: Float[NumpyArray, " nodes"]
    node_finish: Float[NumpyArray, " nodes"]
    node_duration: Float[NumpyArray, " nodes"]
    message_start: Float[NumpyArray, " messages"]
    message_finish: Float[NumpyArray, " messages"]
    message_critical: Bool[NumpyArray, " messages"]

    @property
    def bound_by(self) -> str:
        """Return the kind of cost with the largest share of the critical path."""
        return max(self.path_share, key=lambda name: self.path_share[name], default="nothing")

    @property
    def step_time(self) -> float:
        """Return the step time [s]: the makespan with all-reduce and update."""
        return self.makespan


def evaluate(table: ScheduleTable, costs: Costs, *, link: str | Links = "delay") -> Evaluation:
    """Run a schedule once at some costs, and return all times in float64.

    The run contains the all-reduce of gradients and the optimizer update if their costs are set.

    Args:
      table: the schedule.
      costs: unbatched costs [s], by stage or by stage and microbatch.
      link: name of the link model (docs/link_models.md), or `Links`.

    Returns:
      Times, ratios, memory counts and the critical path.

    Raises:
      ValueError: if a cost is negative or not finite or has the wrong number of entries, a time
        or a ratio of times overflows, the link model is unknown, or a worker of the links does
        not exist.
      ScheduleError: if the table's transfers deadlock under rendezvous, or if its offloads and
        loads deadlock on a shared host link.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=8)
      >>> result = pj.evaluate(table, pj.Costs.uniform(table, forward=1.0, backward=2.0))
      >>> result.makespan, result.busy.tolist(), result.bound_by, result.peak_in_flight.tolist()
      (33.0, [24.0, 24.0, 24.0, 24.0], 'B', [8, 8, 8, 8])
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs))
    costs.check_values()
    with np.errstate(over="ignore", invalid="ignore"):  # overflows are refused below
        run = _evaluate_unchecked(table, costs, link)
    check_finite(run.makespan, costs)
    check_finite({name: getattr(run, name) for name in _SUMS_AND_RATIOS.split()}, costs)
    return run


# further fields that may overflow
_SUMS_AND_RATIOS = "busy bubble_ratio bubble_overhead max_span span_bubble_ratio message_finish"


def _evaluate_unchecked(table: ScheduleTable, costs: Costs, link: str | Links) -> Evaluation:
    """Run a schedule; times may overflow, which the caller checks."""
    program, vector = lower_and_price(table, costs, link)
    run = run_on_host(program, vector)
    start, finish = run.start, run.finish
    makespan = float(finish.max())
    critical, edges = longest_path.critical_path(run.preds, run.finish, run.lag)
    busy = busy_times(program, vector)
    span = float(spans(program, run.duration, finish).max())
    nodes, messages = program.node_of_cell, program.messages
    # a message in a queue is a node; other messages are edges from their producer to their consumer
    has_node = messages.carrier != SOURCE
    # (messages, preds) whether an edge is the message. Two fused pairs may exchange an activation
    # and a gradient, whose lags differ.
    is_edge = (program.preds[messages.consumer] == messages.producer[:, None]) & (
        program.lag_index[messages.consumer] == messages.lag_index[:, None]
    )
    is_edge_critical = (edges[messages.consumer] & is_edge).any(axis=1)
    producer_finish = finish[messages.producer]
    departure = np.where(has_node, start[messages.carrier], producer_finish)
    arrival = np.where(has_node, finish[messages.carrier], producer_finish)
    return Evaluation(
        schedule=table.name,
        workers=table.num_workers,
        stages=table.num_stages,
        microbatches=table.num_microbatches,
        links=program.links,
        makespan=makespan,
        start=start[nodes],
        finish=finish[nodes],
        busy=np.asarray(busy),
        bubble_ratio=float(bubble_ratio(busy, makespan)),
        bubble_overhead=float(bubble_overhead(busy, makespan)),
        max_span=span,
        span_bubble_ratio=float(bubble_ratio(busy, span)),
        critical=critical,
        path_share=_path_share(program, vector, critical, edges),
        table=table,
        costs=costs,
        program=program,
        node_start=start,
        node_finish=finish,
        node_duration=run.duration,
        message_start=departure,
        message_finish=arrival + vector[messages.lag_index],
        message_critical=np.where(has_node, critical[messages.carrier], is_edge_critical),
        peak_in_flight=peak_in_flight(table),
    )


def op_counts(program: Program) -> Int[NumpyArray, "workers costs"]:
    """Count the ops of each worker by cost, in the order of `CostLayout`.

    The busy times at any costs are this matrix times the cost vector.
    """
    workers, costs = np.asarray(program.worker), np.asarray(program.duration_index)
    is_on_worker = workers != NO_WORKER
    counts = np.zeros((program.num_workers, len(program.layout.cost_names)), int)
    np.add.at(counts, (workers[is_on_worker], costs[is_on_worker]), 1)
    return counts


def busy_times(program: Program, vector: Vector) -> PerWorker:
    """Sum the durations [s] of the compute ops on each worker (workers)."""
    if not program.layout.per_microbatch:
        return op_counts(program) @ vector
    # with costs by microbatch, a matrix of counts would have a column for every op
    on_worker = np.flatnonzero(np.asarray(program.worker) != NO_WORKER)
    worker, index = (np.asarray(x)[on_worker] for x in (program.worker, program.duration_index))
    return np.bincount(worker, np.asarray(vector)[index], minlength=program.num_workers)


def spans(program: Program, duration: PerNode, finish: PerNode) -> PerWorker:
    """Return the time [s] from each worker's first start to its last end (workers)."""
    return finish[program.last_node] - (finish - duration)[program.first_node]


def bubble_ratio(busy: PerWorker, total: Scalar) -> Scalar:
    """Return the idle share of the workers' time: 1 - sum(busy) / (P * total)."""
    return (total - busy.mean()) / (total + (total == 0))


def bubble_overhead(busy: PerWorker, total: Scalar) -> Scalar:
    """Return the time lost relative to perfect balance: P * makespan / sum(busy) - 1."""
    mean = busy.mean()
    return (total - mean) / (mean + (mean == 0))


def _path_share(
    program: Program,
    vector: Float[NumpyArray, " costs"],
    nodes: Bool[NumpyArray, " nodes"],
    edges: Bool[NumpyArray, "nodes preds"],
) -> dict[str, float]:
    """Return {cost: share of the makespan} from masks of the critical nodes and edges."""
    costs = np.concatenate([program.duration_index[nodes], program.lag_index[edges]])
    names = program.layout.cost_names
    seconds: dict[str, float] = {}
    for cost in costs[vector[costs] > 0].tolist():
        seconds[names[cost]] = seconds.get(names[cost], 0.0) + float(vector[cost])
    total = sum(seconds.values())
    return {name: time / total for name, time in seconds.items()}


_ROUNDING = 1e-9  # relative rounding error of sums of sizes
Sizes = float | Sequence[float | Sequence[float]] | Num[NumpyArray, "..."]
PerStage = Float[NumpyArray, "stages *microbatches"]


@with_short_repr("peak peak_at sizes weight_share time held worker")
class ActivationMemory(NamedTuple):
    """Activation memory of each worker as a step function of time, in the unit of the sizes.

    Attributes:
      worker: (steps) worker whose memory changes; ascending.
      time: (steps) time of the change, ascending for each worker [s].
      held: (steps) memory of the worker from this time on.
      peak: (workers) largest memory.
      peak_at: (workers) first time of the peak [s].
      sizes: (stages) or (stages, microbatches) size of an activation.
      weight_share: as sizes: share of an activation that the weight gradient needs after I.
      checkpoints: as sizes: size of the checkpoint between F and R.
      at_work: (3, *sizes) memory that B, I and W recompute while they run.
    """

    worker: Int[NumpyArray, " steps"]
    time: Float[NumpyArray, " steps"]
    held: Float[NumpyArray, " steps"]
    peak: Float[NumpyArray, " workers"]
    peak_at: Float[NumpyArray, " workers"]
    sizes: PerStage
    weight_share: PerStage
    checkpoints: PerStage
    at_work: Float[NumpyArray, "ops stages *microbatches"] = np.zeros((len(AT_WORK), 0))

    def curve(
        self, worker: int
    ) -> tuple[Float[NumpyArray, " moments"], Float[NumpyArray, " moments"]]:
        """Return the moments when a worker's memory changes [s], and its memory from then on."""
        on_worker = self.worker == worker
        return self.time[on_worker], self.held[on_worker]


def activation_memory(
    evaluation: Evaluation,
    *,
    sizes: Sizes = 1.0,
    weight_share: Sizes = WEIGHT_SHARE,
    checkpoints: Sizes | None = None,
    at_work: Sequence[Sizes] | Float[NumpyArray, "phases ..."] = (0.0, 0.0, 0.0),
) -> ActivationMemory:
    """Follow the activations that each worker holds during a run.

    F takes an activation at its start, B frees it at its end. In a split backward, I frees all but
    the weight share, and W frees the weight share. If the table has R cells, F takes a checkpoint
    only, and R takes the rest of the activation. O frees the activation at its end, L takes it back
    at its start. B, I and W may recompute memory, which they hold while they run. At equal times,
    memory is freed before it is taken. Both ops of a fused pair count while the pair runs.

    Args:
      evaluation: a run.
      sizes: size of an activation in any unit: a number, (stages) or (stages, microbatches).
      weight_share: share of an activation that is held from the end of I to the end of W, of the
        same shapes. It is at most 1, unless I recomputes memory.
      checkpoints: memory between F and R, of the same shapes; default: as sizes.
      at_work: memory that B, I and W recompute while they run, three entries of the same shapes.

    Returns:
      The memory of each worker after each change, and its peak.

    Raises:
      ValueError: if a size is no finite number of at least 0, if the shape does not fit the stages
        and microbatches, or if W needs more memory than is held when I ends.

    Example:
      >>> import pipejax as pj
      >>> row = ["0F0", "0O0", "0WAIT_O0", "0F1", "0B1", "0L0", "0B0"]
      >>> table = pj.ScheduleTable.from_rows([row])
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, offload=3.0))
      >>> memory = pj.analysis.activation_memory(run)
      >>> memory.peak.tolist(), run.peak_in_flight.tolist()
      ([1.0], [2])
    """
    check_types(evaluation=(evaluation, Evaluation))
    shape = evaluation.stages, evaluation.microbatches
    activations = per_stage("sizes", sizes, shape)
    checkpoint_sizes = activations
    if checkpoints is not None:
        checkpoint_sizes = per_stage("checkpoints", checkpoints, shape)
    shares = _read_numbers("weight_share", weight_share, shape)
    recomputed = [per_stage("at_work", entry, shape) for entry in at_work]
    size, share, size_in_i = _same_axes(activations, shares, recomputed[AT_WORK.index(IN_I)])
    available = (size + size_in_i) * (1 + _ROUNDING)  # to W: the activation and what I recomputes
    if not ((share >= 0) & (share * size <= available)).all():
        raise wrong("weight_share", f"must be a number from 0 to 1, got {weight_share!r}")
    ops = MemoryOps.from_content(evaluation.table)
    cell = ops.worker, ops.start  # starts are slots here, times [s] below
    ops = ops._replace(start=evaluation.start[cell], end=evaluation.finish[cell])
    arrays = _same_axes(activations, shares, checkpoint_sizes, *recomputed)
    if arrays[0].ndim == 2:
        # each (stage, microbatch) counts as a stage: with 4 microbatches, stage 1 becomes 4 to 7
        microbatch = evaluation.table.ops.microbatch[is_in_ledger(evaluation.table)]
        microbatch = np.maximum(microbatch, 0)  # ops without microbatch count as microbatch 0
        ops = ops._replace(stage=ops.stage * shape[1] + microbatch)
        arrays = [np.broadcast_to(array, shape).ravel() for array in arrays]
    size, share, *other_sizes = arrays
    has_work = any(entry.any() for entry in recomputed)
    parts = MemoryChanges.from_ops(ops, evaluation.table.grammar, at_work=has_work)
    steps = _memory_steps(parts, np.stack([size, share * size, *other_sizes]), evaluation.workers)
    work = np.stack(np.broadcast_arrays(*_same_axes(*recomputed)))
    return ActivationMemory(*steps, activations, shares, checkpoint_sizes, work)


@with_short_repr("peak peak_at time held worker")
class GatheredWeights(NamedTuple):
    """Gathered weights of each worker as a step function of time, in the unit of the sizes.

    Attributes:
      worker: (steps) worker whose memory changes; ascending.
      time: (steps) time of the change, ascending for each worker [s].
      held: (steps) memory of the worker from this time on.
      peak: (workers) largest memory.
      peak_at: (workers) first time of the peak [s].
    """

    worker: Int[NumpyArray, " steps"]
    time: Float[NumpyArray, " steps"]
    held: Float[NumpyArray, " steps"]
    peak: Float[NumpyArray, " workers"]
    peak_at: Float[NumpyArray, " workers"]


def gathered_weights(evaluation: Evaluation, *, sizes: Sizes = 1.0) -> GatheredWeights:
    """Follow the gathered weights that each worker holds during a run, in addition to its shards.

    UNSHARD takes the weights of a stage at its start, RESHARD frees them at its end. Weights that
    no cell gathers do not count. At equal times, memory is freed before it is taken.

    Args:
      evaluation: a run.
      sizes: size of the weights of a stage in any unit: a number or (stages).

    Returns:
      The memory of each worker after each change, and its peak.

    Raises:
      ValueError: if a size is no finite number of at least 0, or there is not one per stage.

    Example:
      >>> import pipejax as pj
      >>> table = pj.ScheduleTable.from_rows([["0F0", "1F0", "1B0", "0B0"]])
      >>> table = pj.schedules.insert_sharding(table, lookahead=1)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, unshard=0.25))
      >>> weights = pj.analysis.gathered_weights(run, sizes=[3.0, 4.0])
      >>> weights.time.tolist(), weights.held.tolist(), weights.peak.tolist()
      ([0.0, 0.25, 4.25, 6.25], [3.0, 7.0, 3.0, 0.0], [7.0])
    """
    check_types(evaluation=(evaluation, Evaluation))
    size = per_stage("sizes", sizes, (evaluation.stages, 0))  # no axis of microbatches
    # `GATHERED` lists the memory that UNSHARD takes at its start and RESHARD frees at its end
    ops = MemoryOps.from_content(evaluation.table, GATHERED)  # their `start` is still a slot
    start, end = (times[ops.worker, ops.start] for times in (evaluation.start, evaluation.finish))
    parts = MemoryChanges.from_ledger(ops._replace(start=start, end=end), GATHERED)
    return GatheredWeights(*_memory_steps(parts, size[None], evaluation.workers))


def _memory_steps(
    parts: MemoryChanges, sizes: Float[NumpyArray, "parts stages"], num_workers: int
) -> tuple[NumpyArray, NumpyArray, NumpyArray, NumpyArray, NumpyArray]:
    """Return worker, time [s] and memory of each step, then each worker's peak and its time [s]."""
    held = parts.levels(sizes)
    worker, time = parts.worker[parts.is_last_at_time], parts.time[parts.is_last_at_time]
    peak, peak_at = np.zeros((2, num_workers))
    np.maximum.at(peak, worker, held)
    # assigned in reverse, so that the first of several steps at the peak overwrites the others
    peak_steps = np.flatnonzero(held == peak[worker])[::-1]
    peak_at[worker[peak_steps]] = time[peak_steps]
    return worker, time, held, peak, peak_at


def _same_axes(*sizes: Float[NumpyArray, "stages ..."]) -> list[Float[NumpyArray, "stages ..."]]:
    """Add an axis of microbatches to all sizes if one of them has this axis."""
    has_microbatches = any(size.ndim == 2 for size in sizes)
    return [size[:, None] if has_microbatches and size.ndim == 1 else size for size in sizes]


def per_stage(name: str, value: Sizes, shape: tuple[int, int]) -> PerStage:
    """Convert sizes to an array by stage, or by stage and microbatch; refuse negative sizes."""
    values = _read_numbers(name, value, shape)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"{name} must be finite numbers of at least 0, got {value!r}")
    return values


def _read_numbers(name: str, value: Sizes, shape: tuple[int, int]) -> PerStage:
    """Convert numbers to an array (stages); an array (stages, microbatches) stays."""
    values, (stages, microbatches) = as_floats(value, name), shape
    if values.shape not in ((), (stages,), shape):
        extra = f" and {microbatches} microbatches" if values.ndim == 2 else ""
        raise ValueError(
            f"{name} must be a number or one for each of {stages} stages{extra}, got shape "
            f"{values.shape}"
        )
    return values if values.ndim == 2 else np.broadcast_to(values, stages)
