"""Plans: the start of every op, in units of the problem; conversion to and from tables."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.display import with_short_repr
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import HostRun, Program, run_on_host
from pipejax.engine.pricing import cost_vector
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.heuristics.timeline import TimedOps, rows_from_starts
from pipejax.schedules.table.held_activations import MemoryChanges, MemoryOps, held_in_rows
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.problem import NAMES, PerStage, Problem

NEVER = -1  # start of an offload that does not happen

PerOp = Int[NumpyArray, "stages microbatches"]


@with_short_repr("table status bound_by source seconds effort offloaded rounding")
@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best schedule of a search, with a lower bound and the effort; times are seconds.

    Attributes:
      table: the schedule.
      status: "optimal" if the schedule reaches the bound within the rounding, else "feasible".
      bound_by: reason of the bound: "worker", "stage", "memory chain" or "memory area", which
        `verify` derives again, or "solver".
      rounding: largest difference from the bound that rounding to units can cause [s].
      source: the step of the search that found the schedule.
      seconds: time since the start of the search.
      effort: work since the start of the search, about the seconds of one idle core.
      found_after: time from the start of the search to this schedule.
    """

    table: ScheduleTable
    status: str
    bound_by: str
    rounding: float
    source: str
    seconds: float
    effort: float
    found_after: float

    @property
    def offloaded(self) -> int:
        """Return the number of activations that are offloaded to the host and loaded back."""
        return self.table.num_offloaded


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Starts of all ops."""

    # a full backward B is stored as I at its start and W at its end
    forward: PerOp  # start of F
    input_grad: PerOp  # start of I or B
    weight_grad: PerOp  # start of W, or end of B
    whole: Bool[NumpyArray, "stages microbatches"]  # whether the backward is a full B
    offload: PerOp  # start of O, or `NEVER`
    load: PerOp  # start of L, or `NEVER`

    @classmethod
    def from_starts(cls, starts: Mapping[str, PerOp], whole: NumpyArray | None = None) -> "Plan":
        """Make a plan from {phase letter: start times}; default: split backwards, no offloads."""
        never = np.full_like(starts["F"], NEVER)
        whole = np.zeros(never.shape, bool) if whole is None else whole
        compute_starts = starts["F"], starts["I"], starts["W"]
        return cls(*compute_starts, whole, starts.get("O", never), starts.get("L", never))

    @property
    def starts(self) -> Mapping[str, PerOp]:
        """Return {phase letter: start times}; I also stands for a full backward B."""
        starts = self.forward, self.input_grad, self.weight_grad, self.offload, self.load
        return dict(zip("FIWOL", starts, strict=True))

    def with_starts(self, change: Callable[[PerOp], PerOp]) -> "Plan":
        """Return the plan with all start times changed by a function, except `NEVER`."""
        pairs = self.starts.items()
        starts = {phase: np.where(at == NEVER, NEVER, change(at)) for phase, at in pairs}
        return Plan.from_starts(starts, self.whole)


def gradient_end(problem: Problem, plan: Plan) -> PerOp:
    """Return the end of each gradient: the end of W or B [units]."""
    durations = np.where(plan.whole, 0, problem.weight_grad[:, None])
    return plan.weight_grad + durations


def input_grad_end(problem: Problem, plan: Plan) -> PerOp:
    """Return the end of each input gradient: the end of I or B [units]."""
    durations = np.where(plan.whole, problem.backward[:, None], problem.input_grad[:, None])
    return plan.input_grad + durations


def plan_objective(problem: Problem, plan: Plan) -> int:
    """Return the objective [units]: the makespan, or the longest span of a worker."""
    end = gradient_end(problem, plan)
    if problem.objective == "span":
        worker = problem.worker
        return max(
            int(end[worker == w].max() - plan.forward[worker == w].min())
            for w in range(problem.num_workers)
        )
    row_end = np.array([end[problem.worker == w].max() for w in range(problem.num_workers)])
    workers = np.arange(problem.num_workers)
    # (workers, stages) whether the worker has a copy of the stage, which it updates
    has_stage = (problem.placement[:, :, None] == workers).any(axis=0).T
    stage_end = _all_reduce_end(problem, end.max(axis=1)) + problem.update
    return int(max(stage_end.max(), (row_end + has_stage @ problem.update).max()))


def search_horizon(problem: Problem, plan: Plan) -> int:
    """Return a time after the end of any better plan [units]."""
    if problem.objective == "makespan":
        return plan_objective(problem, plan)
    # a plan with a short span may begin late
    return 2 * int(gradient_end(problem, plan).max() + problem.step_end.max())


def _all_reduce_end(problem: Problem, ready: PerStage) -> PerStage:
    """Return the end of each stage's all-reduce, with one all-reduce at a time on a worker."""
    # `ready` is the end of the last gradient of each stage [units]; the earliest one runs first.
    end, free = ready.copy(), np.zeros(problem.num_workers, np.int64)
    for stage in np.argsort(ready, kind="stable") if problem.all_reduce.any() else ():
        workers = problem.placement[:, stage]
        end[stage] = max(int(ready[stage]), int(free[workers].max())) + problem.all_reduce[stage]
        free[workers] = end[stage]
    return end


def to_table(problem: Problem, plan: Plan, name: str) -> ScheduleTable:
    """Convert a plan to a table whose rows keep the memory limits at any op times."""
    rows = rows_from_starts(
        timed_ops(problem, plan),
        sizes=problem.sizes.astype(float),
        limits=problem.limits.astype(float),
        weight_share=problem.weight_sizes / problem.sizes,
        host_links=problem.host_links,
    )
    return ScheduleTable.from_rows(
        rows, placement=problem.placement, pipe_of_microbatch=problem.microbatch_pipes, name=name
    )


def timed_ops(problem: Problem, plan: Plan) -> TimedOps:
    """List a plan's ops with ranks in place of times, so that no op has length 0."""
    # Several ops without length may start at one moment. They are ordered in three groups. Group 0:
    # gradients of earlier forwards, which free memory. Group 1: microbatches whose ops all run at
    # this moment, one microbatch after the other. Group 2: all other ops.
    is_split, is_offloaded = ~plan.whole, plan.offload != NEVER
    is_any = np.ones_like(is_split)
    # positions on the path of a microbatch: F of stage s at s, I at 2 S - s
    last_position = 2 * problem.num_stages
    parts = []
    for phase, start, mask, first_position, direction in (
        (Phase.F, plan.forward, is_any, 0.0, 1),
        (Phase.O, plan.offload, is_offloaded, 0.2, 1),
        (Phase.L, plan.load, is_offloaded, last_position - 0.2, -1),
        (Phase.I, plan.input_grad, is_split, last_position, -1),
        (Phase.B, plan.input_grad, plan.whole, last_position, -1),
        (Phase.W, plan.weight_grad, is_split, last_position + 0.2, -1),
    ):
        stage, microbatch = np.nonzero(mask)
        end = start[mask] + problem.times[phase][stage]
        code, position = np.full_like(stage, phase), first_position + direction * stage
        worker = problem.worker[mask]
        parts.append((code, stage, microbatch, worker, start[mask], end, position))
    columns = map(np.concatenate, zip(*parts, strict=True))
    code, stage, microbatch, worker, start, end, position = columns
    is_instant = (plan.forward[:, microbatch] == start) & (problem.forward == 0)[:, None]
    is_last_end = input_grad_end(problem, plan)[0, microbatch] == start
    group = np.where(is_instant.any(axis=0), np.where(is_last_end, 1, 2), 0)
    order = np.lexsort((position, microbatch, group))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    # each moment has a tick for ends of long ops, then two ticks for each op without length, then a
    # tick for starts of long ops
    is_long, ticks = end > start, 2 * len(order) + 2
    start = ticks * start + np.where(is_long, ticks - 1, 2 * number + 1)
    end = ticks * end + np.where(is_long, 0, 2 * number + 2)
    ranks = np.unique(np.stack([start, end]), return_inverse=True)[1].reshape(2, -1).astype(float)
    return TimedOps(code, stage, microbatch, worker, *ranks)


def _run_table(
    problem: Problem, table: ScheduleTable, *, step_end: bool
) -> tuple[Program, HostRun]:
    """Run a table at a problem's op times [units], with or without all-reduces and updates."""
    links = Links("queued" if problem.queues else "delay", host_links=problem.host_links)
    program = lower(table, link=links, step_end=step_end)
    times = {NAMES[phase]: time for phase, time in problem.times.items()}
    times |= {"latency": problem.lag, "transmit": problem.transmit}
    times |= {"all_reduce": problem.all_reduce, "update": problem.update}
    costs = Costs(**{name: time.astype(float) for name, time in times.items()})
    return program, run_on_host(program, np.asarray(cost_vector(program, costs)))


def table_objective(problem: Problem, table: ScheduleTable) -> int:
    """Return the objective (makespan or longest span) of a table when it runs [units]."""
    # A run orders all-reduces as docs/semantics.md says; a plan orders them by their inputs' times.
    if problem.objective == "span" or not problem.step_end.any():
        return plan_objective(problem, to_plan(problem, table))
    _, run = _run_table(problem, table, step_end=True)
    return round(float(run.finish.max()))


def to_plan(problem: Problem, table: ScheduleTable) -> Plan:
    """Run a table at a problem's op times, each op as early as possible; return the plan."""
    program, run = _run_table(problem, table, step_end=False)
    starts = {letter: np.full(problem.worker.shape, NEVER, np.int64) for letter in "FBIWOL"}
    for letter, phase_starts in starts.items():
        phase_ops = table.ops.take(table.ops.phase == Phase[letter])
        node = program.node_of_cell.ravel()[phase_ops.cell]
        phase_starts[phase_ops.stage, phase_ops.microbatch] = np.round(run.start[node])
    # a plan stores a full backward B as I at its start and W at its end
    is_whole = starts["B"] != NEVER
    input_grad = np.where(is_whole, starts["B"], starts["I"])
    weight_grad = np.where(is_whole, starts["B"] + problem.backward[:, None], starts["W"])
    return Plan.from_starts({**starts, "I": input_grad, "W": weight_grad}, is_whole)


def broken_limit(problem: Problem, plan: Plan) -> str | None:
    """Return the first limit that a plan exceeds, as a text, or None."""
    if (plan.offload != NEVER).any() and problem.offload is None:
        return "its schedule offloads activations, which the problem does not allow"
    for worker, (peak, limit) in enumerate(zip(peaks(problem, plan), problem.limits, strict=True)):
        if peak > limit:
            return f"its schedule takes {peak} of {limit} parts of the memory of worker {worker}"
    return None


def keeps_limits(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan keeps the memory limits, and offloads only if the problem allows it."""
    return broken_limit(problem, plan) is None


def table_keeps_limits(problem: Problem, table: ScheduleTable) -> bool:
    """Return whether a table keeps the memory limits; with offloads, at the problem's op times."""
    if table.offloads:
        return keeps_limits(problem, to_plan(problem, table))
    sizes = np.stack([problem.sizes, problem.weight_sizes, problem.sizes])
    return bool((held_in_rows(table).peaks(sizes, problem.num_workers) <= problem.limits).all())


def peaks(problem: Problem, plan: Plan) -> Int[NumpyArray, " workers"]:
    """Return the memory peak of each worker [parts]."""
    ops = timed_ops(problem, plan)
    recomputed = np.zeros(len(ops.phase), bool)
    held = MemoryOps(ops.phase, ops.stage, ops.worker, recomputed, ops.start, ops.end)
    sizes = np.stack([problem.sizes, problem.weight_sizes, problem.sizes])
    return MemoryChanges.from_ops(held).peaks(sizes, problem.num_workers)
