"""`evaluate`, the main entry point: from a table and costs to all numbers of a report."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from pipejax.base import longest_path
from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import Drawn, with_short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.precision import check_finite
from pipejax.engine.lowering.program import NO_WORKER, SOURCE, Program
from pipejax.engine.pricing import Vector, lower_and_price
from pipejax.engine.recurrence_host import run_on_host
from pipejax.schedules.table.held_activations import peak_in_flight
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

Scalar = float | Float[Array, ""] | Float[NumpyArray, ""]
PerWorker = Float[Array, " workers"] | Float[NumpyArray, " workers"]
PerNode = Float[Array, " nodes"] | Float[NumpyArray, " nodes"]


@with_short_repr(
    "schedule workers stages microbatches links makespan bubble_ratio bound_by "
    "peak_in_flight busy path_share"
)
@dataclasses.dataclass(frozen=True)
class Evaluation(Drawn):
    """Run of one schedule at one set of costs. Times are seconds, arrays are NumPy's.

    Attributes:
      schedule: name.
      workers: P.
      stages: S.
      microbatches: M.
      links: link model and further settings of the links.
      makespan: last end over all ops.
      start: (workers, slots) start of each cell; 0 where it is idle.
      finish: (workers, slots) finish of each cell; 0 where it is idle.
      busy: (workers) compute time.
      bubble_ratio: idle / (P * makespan), in [0, 1).
      bubble_overhead: makespan / (sum(busy) / P) - 1.
      max_span: largest time between a worker's own first start and last end.
      span_bubble_ratio: 1 - (sum(busy) / P) / max_span.
      peak_in_flight: (workers) largest number of activations held at once.
      critical: (nodes) whether a node of the program is on the critical path.
      path_share: share of the makespan that each cost takes on the critical path.
      table: the schedule.
      costs: costs of ops and messages.
      program: the lowered schedule.
      node_start: (nodes) start of each node: exactly its last arrival.
      node_finish: (nodes) finish time of each node.
      node_duration: (nodes) duration of each node.
      message_start: (messages) time at which each message of the program leaves.
      message_finish: (messages) time at which it arrives.
      message_critical: (messages) whether it is on the critical path.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> run.busy.tolist(), run.makespan, run.bubble_ratio, run.bound_by
      ([12.0, 12.0], 15.0, 0.2, 'B')
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
    peak_in_flight: Int[NumpyArray, " workers"]
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
        """Return the cost with the largest share of the critical path."""
        return max(self.path_share, key=lambda name: self.path_share[name], default="nothing")

    @property
    def step_time(self) -> float:
        """Return the step time [s]: the makespan with all-reduce and update."""
        return self.makespan


def evaluate(table: ScheduleTable, costs: Costs, *, link: str | Links = "delay") -> Evaluation:
    """Evaluate a schedule once, in float64.

    The all-reduce of gradients and the optimizer update take part where they cost anything.

    Args:
      table: the schedule.
      costs: unbatched costs [s], by stage or by stage and microbatch.
      link: link model: "delay", "queued", "blocking" or "rendezvous", or `Links`.

    Returns:
      Times, ratios, memory counts and the critical path.

    Raises:
      ValueError: if a cost is negative or not finite or has the wrong number of entries, a time
        or a ratio of times overflows, the link model is unknown, or a worker of the links does
        not exist.
      ScheduleError: if the transfers of the table deadlock under rendezvous, or its offloads and
        loads on a shared host link.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=8)
      >>> result = pj.evaluate(table, pj.Costs.uniform(table, forward=1.0, backward=2.0))
      >>> result.makespan, result.peak_in_flight.tolist()
      (33.0, [8, 8, 8, 8])
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs))
    costs.check_values()
    with np.errstate(over="ignore", invalid="ignore"):  # overflows are refused below
        run = _evaluated(table, costs, link)
    check_finite(run.makespan, costs)
    check_finite({name: getattr(run, name) for name in _SUMS_AND_RATIOS}, costs)
    return run


_SUMS_AND_RATIOS = (  # fields that may overflow beside the makespan
    "busy",
    "bubble_ratio",
    "bubble_overhead",
    "max_span",
    "span_bubble_ratio",
    "message_finish",
)


def _evaluated(table: ScheduleTable, costs: Costs, link: str | Links) -> Evaluation:
    """Evaluate a schedule without a check of overflows."""
    program, vector = lower_and_price(table, costs, link)
    run = run_on_host(program, vector)
    start, finish = run.start, run.finish
    makespan = float(finish.max())
    critical, edges = longest_path.critical_path(run.preds, run.finish, run.lag)
    busy = busy_times(program, vector)
    span = float(spans(program, run.duration, finish).max())
    nodes, sent = program.node_of_cell, program.messages
    has_node = sent.carrier != SOURCE  # else a message is an edge from producer to consumer
    # two fused pairs may send each other an activation and a gradient: the lag tells them apart
    is_edge = (program.preds[sent.consumer] == sent.producer[:, None]) & (
        program.lag_index[sent.consumer] == sent.lag_index[:, None]
    )
    is_edge_critical = (edges[sent.consumer] & is_edge).any(axis=1)
    leaves = np.where(has_node, start[sent.carrier], finish[sent.producer])
    arrives = np.where(has_node, finish[sent.carrier], finish[sent.producer])
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
        message_start=leaves,
        message_finish=arrives + vector[sent.lag_index],
        message_critical=np.where(has_node, critical[sent.carrier], is_edge_critical),
        peak_in_flight=peak_in_flight(table),
    )


def op_counts(program: Program) -> Int[NumpyArray, "workers costs"]:
    """Return how often each worker's ops have each cost, in the order of `CostLayout`.

    Busy times are this matrix times the cost vector, for any costs.
    """
    workers, costs = np.asarray(program.worker), np.asarray(program.duration_index)
    is_on_worker = workers != NO_WORKER
    counts = np.zeros((program.num_workers, len(program.layout.groups)), int)
    np.add.at(counts, (workers[is_on_worker], costs[is_on_worker]), 1)
    return counts


def busy_times(program: Program, vector: Vector) -> PerWorker:
    """Sum the durations of the ops on each worker: (workers) compute time [s]."""
    if not program.layout.per_microbatch:
        return op_counts(program) @ vector
    # a matrix of counts would have a column for every op
    on_worker = np.flatnonzero(np.asarray(program.worker) != NO_WORKER)
    worker, index = (np.asarray(x)[on_worker] for x in (program.worker, program.duration_index))
    return np.bincount(worker, np.asarray(vector)[index], minlength=program.num_workers)


def spans(program: Program, duration: PerNode, finish: PerNode) -> PerWorker:
    """Return the time from each worker's own first start to its own last end (workers) [s]."""
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
    """Return the share of the makespan by kind of cost, from the nodes and edges on its path."""
    costs = np.concatenate([program.duration_index[nodes], program.lag_index[edges]])
    groups = program.layout.groups
    seconds: dict[str, float] = {}
    for cost in costs[vector[costs] > 0].tolist():
        group = groups[cost]
        seconds[group] = seconds.get(group, 0.0) + float(vector[cost])
    total = sum(seconds.values())
    return {group: time / total for group, time in seconds.items()}
