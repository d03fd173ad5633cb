"""Plans as tables, and tables as plans."""

import numpy as np

from pipejax.costs import Costs, cost_vector
from pipejax.lowering import lower
from pipejax.ops import Phase
from pipejax.optimize.plan import NEVER, Plan, gradient_end, input_grad_end
from pipejax.optimize.problem import Problem
from pipejax.program import Program
from pipejax.schedules.from_starts import TimedOps, rows_from_starts
from pipejax.shapes import Float, Int, NumpyArray
from pipejax.table import ScheduleTable


def to_table(problem: Problem, plan: Plan, name: str) -> ScheduleTable:
    """Make a table whose rows keep the limits whatever the times are.

    Args:
      problem: the problem.
      plan: starts within its limits.
      name: schedule name.

    Returns:
      The table.

    Raises:
      ValueError: if the plan does not keep the limits.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> costs = Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
      >>> problem = pose(table, costs, memory_limit=2)
      >>> from pipejax.optimize.greedy import greedy_plan
      >>> print(to_table(problem, greedy_plan(problem, problem.limits), "greedy"))
                 0    1    2    3    4    5
      worker 0  0F0  0F1  0I0  0W0  0I1  0W1
      worker 1  1F0  1I0  1F1  1I1  1W0  1W1
    """
    ops = timed_ops(problem, plan)
    rows = rows_from_starts(
        ops,
        sizes=problem.sizes.astype(float),
        limits=problem.limits.astype(float),
        weight_share=problem.kept / problem.sizes,
        host_links=problem.host_links,
    )
    return ScheduleTable.from_rows(
        rows,
        placement=problem.placement,
        pipe_of_microbatch=problem.pipe_of,
        name=name,
    )


def timed_ops(problem: Problem, plan: Plan) -> TimedOps:
    """List the ops of a plan with their times.

    Args:
      problem: the problem.
      plan: its starts.

    Returns:
      F, I and W or B, O and L.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> costs = Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
      >>> problem = pose(table, costs, memory_limit=2)
      >>> from pipejax.optimize.greedy import greedy_plan
      >>> len(timed_ops(problem, greedy_plan(problem, problem.limits)).start)
      12
    """
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
    """Run a table at the times of a problem, every op as early as it can.

    Args:
      problem: the problem.
      table: any order of its ops.

    Returns:
      The plan; it need not keep the limits.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> costs = Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
      >>> problem = pose(table, costs, memory_limit=2)
      >>> to_plan(problem, table).forward.tolist(), to_plan(problem, table).whole.all()
      ([[0, 1], [1, 4]], np.True_)
    """
    program = lower(table, link="queued" if problem.queues else "delay", step_end=False,
                    host_links=problem.host_links)  # fmt: skip
    none = np.zeros(problem.num_stages)
    vector = np.asarray(cost_vector(program, Costs(
        forward=problem.forward.astype(float),
        backward=problem.backward.astype(float),
        input_grad=problem.input_grad.astype(float),
        weight_grad=problem.weight_grad.astype(float),
        offload=none if problem.offload is None else problem.offload.astype(float),
        load=none if problem.load is None else problem.load.astype(float),
        latency=problem.lag.astype(float),
        transmit=problem.transmit.astype(float),
    )))  # fmt: skip
    start = host_finish(program, vector) - vector[program.duration_index]
    at = {letter: np.full((problem.num_stages, problem.num_microbatches), NEVER, np.int64)
          for letter in "FBIWOL"}  # fmt: skip
    for cells in (table.cells, table.partners):
        for letter, starts in at.items():
            held = cells.phase == Phase[letter]
            node = program.node_of_cell[held]
            starts[cells.stage[held], cells.microbatch[held]] = np.round(start[node])
    whole = at["B"] != NEVER
    turn = np.where(whole, at["B"], at["I"])
    last = np.where(whole, at["B"] + problem.backward[:, None], at["W"])
    return Plan(at["F"], turn, last, whole, at["O"], at["L"])


def host_finish(
    program: Program, vector: Float[NumpyArray, " costs"]
) -> Float[NumpyArray, " nodes"]:
    """Finish times of one program at one cost vector, on the host: there is nothing to compile.

    Args:
      program: lowered schedule.
      vector: (costs) the cost vector.

    Returns:
      (nodes) finish times, the same floats as those of `evaluate`.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> costs = Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
      >>> problem = pose(table, costs, memory_limit=2)
      >>> program = lower(table, step_end=False)
      >>> float(host_finish(program, cost_vector(program, costs)).max())
      9.0
    """
    lag, lasts = vector[program.lag_index].tolist(), vector[program.duration_index].tolist()
    finish: list[float] = []
    for node, (preds, lags) in enumerate(zip(np.asarray(program.preds).tolist(), lag, strict=True)):
        ready = max((finish[u] + w for u, w in zip(preds, lags, strict=True) if u < node),
                    default=0.0)  # fmt: skip
        finish.append(ready + lasts[node])
    return np.array(finish)


def keeps_limits(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan keeps the problem's limits, and offloads only where that may be.

    Args:
      problem: the problem.
      plan: its starts.

    Returns:
      Whether it does.

    Example:
      >>> from pipejax import schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("gpipe", num_workers=2, num_microbatches=4)
      >>> problem = pose(table, Costs.uniform(table, forward=1.0, backward=2.0), memory_limit=3)
      >>> keeps_limits(problem, to_plan(problem, table))
      False
    """
    may_offload = problem.offload is not None or not plan.offloaded
    return may_offload and bool((peaks(problem, plan) <= problem.limits).all())


def peaks(problem: Problem, plan: Plan) -> Int[NumpyArray, " workers"]:
    """Return the most parts that each worker holds at once.

    Args:
      problem: the problem.
      plan: its starts.

    Returns:
      (workers) parts.

    Example:
      >>> from pipejax import Costs, schedules
      >>> from pipejax.optimize.problem import pose
      >>> table = schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> costs = Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
      >>> problem = pose(table, costs, memory_limit=2)
      >>> peaks(problem, to_plan(problem, table)).tolist()  # three parts to an activation
      [6, 3]
    """
    size, kept = problem.sizes[:, None], problem.kept[:, None]
    whole, out = plan.whole, plan.offload != NEVER
    every = np.ones_like(whole)
    input_end, end = input_grad_end(problem, plan), gradient_end(problem, plan)
    left = plan.offload + (0 if problem.offload is None else problem.offload[:, None])
    moments, workers, changes = [], [], []
    for time, change, which in (
        (plan.forward, size, every), (input_end, kept - size, ~whole), (end, -kept, ~whole),
        (input_end, -size, whole), (left, -size, out), (plan.load, size, out),
    ):  # fmt: skip
        moments.append(np.broadcast_to(time, whole.shape)[which])
        workers.append(problem.worker[which])
        changes.append(np.broadcast_to(change, whole.shape)[which])
    moment, worker, change = map(np.concatenate, (moments, workers, changes))
    order = np.lexsort((change, moment))  # at one moment, what leaves comes first
    peak = np.zeros(problem.num_workers, np.int64)
    for w in range(problem.num_workers):
        mine = order[worker[order] == w]
        peak[w] = np.cumsum(change[mine]).max(initial=0)
    return peak
