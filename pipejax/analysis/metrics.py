"""What is read off a run: busy time, spans, bubbles.

Pure functions of arrays, NumPy's or JAX's; batch with `jax.vmap`.
"""

import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.engine.lowering.program import NO_WORKER, Program
from pipejax.engine.pricing import Vector

Scalar = float | Float[Array, ""] | Float[NumpyArray, ""]
PerWorker = Float[Array, " workers"] | Float[NumpyArray, " workers"]
PerNode = Float[Array, " nodes"] | Float[NumpyArray, " nodes"]


def op_counts(program: Program) -> Int[NumpyArray, "workers costs"]:
    """Count how often each cost is spent on each worker's compute.

    Busy times are this matrix times the cost vector, for any costs.

    Returns (workers, costs) counts, in the order of `CostLayout`.
    """
    on_worker = np.asarray(program.worker) != NO_WORKER
    counts = np.zeros((program.num_workers, len(program.layout.groups)), int)
    where = np.asarray(program.worker)[on_worker], np.asarray(program.duration_index)[on_worker]
    np.add.at(counts, where, 1)
    return counts


def busy_times(program: Program, vector: Vector) -> PerWorker:
    """Sum the durations of the ops on each worker: (workers) compute time [s]."""
    return op_counts(program) @ vector


def spans(program: Program, duration: PerNode, finish: PerNode) -> PerWorker:
    """Time between each worker's own first start and its own last end: (workers) span [s]."""
    return finish[program.last_node] - (finish - duration)[program.first_node]


def bubble_ratio(busy: PerWorker, total: Scalar) -> Scalar:
    """Share of the workers' time that is idle: 1 - sum(busy) / (P * total)."""
    return (total - busy.mean()) / (total + (total == 0))


def bubble_overhead(busy: PerWorker, total: Scalar) -> Scalar:
    """Time lost relative to perfect balance: P * makespan / sum(busy) - 1."""
    mean = busy.mean()
    return (total - mean) / (mean + (mean == 0))
