"""What is read off a run: busy time, spans, bubbles.

Pure functions of arrays, NumPy's or JAX's; batch with `jax.vmap`.
"""

import numpy as np

from pipejax.costs import NodeCosts, Vector
from pipejax.program import NO_WORKER, Program
from pipejax.shapes import Array, Float, Int, NumpyArray

Scalar = float | Float[Array, ""] | Float[NumpyArray, ""]
PerWorker = Float[Array, " workers"] | Float[NumpyArray, " workers"]
PerNode = Float[Array, " nodes"] | Float[NumpyArray, " nodes"]


def op_counts(program: Program) -> Int[NumpyArray, "workers costs"]:
    """Count how often each cost is spent on each worker's compute.

    Busy times are this matrix times the cost vector, for any costs.

    Args:
      program: lowered schedule.

    Returns:
      (workers, costs) counts, in the order of `CostLayout`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=4)
      >>> op_counts(pj.lower(table, step_end=False))[:, 1:5].tolist()  # F and B of both stages
      [[4, 0, 4, 0], [0, 4, 0, 4]]
    """
    on_worker = np.asarray(program.worker) != NO_WORKER
    counts = np.zeros((program.num_workers, len(program.layout.groups)), int)
    where = np.asarray(program.worker)[on_worker], np.asarray(program.duration_index)[on_worker]
    np.add.at(counts, where, 1)
    return counts


def busy_times(program: Program, vector: Vector) -> PerWorker:
    """Sum the durations of the ops on each worker.

    Args:
      program: lowered schedule.
      vector: (costs) the cost vector [s].

    Returns:
      (workers) compute time [s].

    Example:
      >>> import pipejax as pj
      >>> from pipejax.costs import cost_vector
      >>> program = pj.lower(pj.schedules.build("gpipe", num_workers=2, num_microbatches=4))
      >>> busy_times(program, cost_vector(program, pj.Costs(forward=1.0, backward=2.0))).tolist()
      [12.0, 12.0]
    """
    return op_counts(program) @ vector


def spans(program: Program, costs: NodeCosts, finish: PerNode) -> PerWorker:
    """Time between each worker's own first start and its own last end.

    Args:
      program: lowered schedule.
      costs: duration (nodes) and lag (nodes, max_preds) [s].
      finish: (nodes) finish times [s].

    Returns:
      (workers) span [s].

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
      >>> program = pj.lower(table)
      >>> costs = pj.price(program, pj.Costs(forward=1.0, backward=2.0))
      >>> spans(program, costs, pj.finish_times(program, costs)).tolist()
      [6.0, 3.0]
    """
    return finish[program.last_node] - (finish - costs.duration)[program.first_node]


def bubble_ratio(busy: PerWorker, total: Scalar) -> Scalar:
    """Share of the workers' time that is idle: 1 - sum(busy) / (P * total).

    Args:
      busy: (workers) compute time [s].
      total: makespan, or the largest span [s].

    Returns:
      Ratio in [0, 1); 0 where nothing takes time.

    Example:
      >>> float(bubble_ratio(np.array([2.0, 2.0]), 4.0))
      0.5
    """
    return (total - busy.mean()) / (total + (total == 0))


def bubble_overhead(busy: PerWorker, total: Scalar) -> Scalar:
    """Time lost relative to perfect balance: P * makespan / sum(busy) - 1.

    Args:
      busy: (workers) compute time [s].
      total: makespan [s].

    Returns:
      Ratio, at least 0; 0 where nothing takes time.

    Example:
      >>> float(bubble_overhead(np.array([2.0, 2.0]), 4.0))
      1.0
    """
    mean = busy.mean()
    return (total - mean) / (mean + (mean == 0))
