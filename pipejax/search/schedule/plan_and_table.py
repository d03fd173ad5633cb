"""Plans as tables, and tables as plans."""

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.lower import lower
from pipejax.engine.pricing import cost_vector
from pipejax.engine.recurrence_host import run_on_host
from pipejax.schedules.cells.memory_ledger import HeldOps, HeldParts
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.heuristics.rows_from_starts import TimedOps, rows_from_starts
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.plan import NEVER, Plan, gradient_end, input_grad_end
from pipejax.search.schedule.problem import HOST_TIMES, OP_TIMES, Problem


def to_table(problem: Problem, plan: Plan, name: str) -> ScheduleTable:
    """Make a table whose rows keep the limits whatever the times are."""
    ops = timed_ops(problem, plan)
    rows = rows_from_starts(
        ops,
        sizes=problem.sizes.astype(float),
        limits=problem.limits.astype(float),
        weight_share=problem.kept / problem.sizes,
        host_links=problem.host_links,
    )
    return ScheduleTable.from_rows(
        rows, placement=problem.placement, pipe_of_microbatch=problem.pipe_of, name=name
    )


def timed_ops(problem: Problem, plan: Plan) -> TimedOps:
    """List the ops of a plan with their times."""
    whole, out = plan.whole, plan.offload != NEVER
    every = np.ones_like(whole)
    forward_end = plan.forward + problem.forward[:, None]
    host = np.zeros_like(plan.forward)
    offload = host if problem.offload is None else host + problem.offload[:, None]
    load = host if problem.load is None else host + problem.load[:, None]
    input_end, end = input_grad_end(problem, plan), gradient_end(problem, plan)
    parts = []
    for phase, start, until, which in (
        (Phase.F, plan.forward, forward_end, every),
        (Phase.I, plan.input_grad, input_end, ~whole),
        (Phase.W, plan.weight_grad, end, ~whole),
        (Phase.B, plan.input_grad, input_end, whole),
        (Phase.O, plan.offload, plan.offload + offload, out),
        (Phase.L, plan.load, plan.load + load, out),
    ):
        stage, microbatch = np.nonzero(which)
        code = np.full(len(stage), int(phase))
        worker = problem.worker[which]
        parts.append(np.stack([code, stage, microbatch, worker, start[which], until[which]]))
    columns = np.concatenate(parts, axis=1)
    return TimedOps(*columns[:4], *columns[4:].astype(float))


def to_plan(problem: Problem, table: ScheduleTable) -> Plan:
    """Run a table at the times of a problem, every op as early as it can."""
    links = Links("queued" if problem.queues else "delay", host_links=problem.host_links)
    program = lower(table, link=links, step_end=False)
    given = {name: getattr(problem, name) for name in (*OP_TIMES, *HOST_TIMES)}
    costs = Costs(
        latency=problem.lag.astype(float),
        transmit=problem.transmit.astype(float),
        **{
            name: np.zeros(problem.num_stages) if times is None else times.astype(float)
            for name, times in given.items()
        },
    )
    vector = np.asarray(cost_vector(program, costs))
    start = run_on_host(program, vector).start
    at = {
        letter: np.full((problem.num_stages, problem.num_microbatches), NEVER, np.int64)
        for letter in "FBIWOL"
    }
    for cells in (table.cells, table.partners):
        for letter, starts in at.items():
            held = cells.phase == Phase[letter]
            node = program.node_of_cell[held]
            starts[cells.stage[held], cells.microbatch[held]] = np.round(start[node])
    whole = at["B"] != NEVER
    turn = np.where(whole, at["B"], at["I"])
    last = np.where(whole, at["B"] + problem.backward[:, None], at["W"])
    return Plan.of({**at, "I": turn, "W": last}, whole)


def keeps_limits(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan keeps the problem's limits, and offloads only where that may be."""
    may_offload = problem.offload is not None or not plan.offloaded
    return may_offload and bool((peaks(problem, plan) <= problem.limits).all())


def peaks(problem: Problem, plan: Plan) -> Int[NumpyArray, " workers"]:
    """Return the most parts that each worker holds at once: (workers) parts."""
    ops = timed_ops(problem, plan)
    recomputed = np.zeros(len(ops.phase), bool)
    held = HeldOps(ops.phase, ops.stage, ops.worker, recomputed, ops.start, ops.end)
    sizes = np.stack([problem.sizes, problem.kept, problem.sizes])
    return HeldParts.of(held).peaks(sizes, problem.num_workers)
