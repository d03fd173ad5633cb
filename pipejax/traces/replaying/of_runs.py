"""Runs of this package as a trace: what a recorder on every worker would have written."""

from collections.abc import Sequence

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import check_types, whole_number
from pipejax.schedules.cells.ops import Phase
from pipejax.traces.record import NONE, OPS, Trace


def of_runs(runs: Sequence[Evaluation], *, replicas: int = 1) -> Trace:
    """Record runs: one behind the other are the replicas of a step, then those of the next.

    Args:
      runs: evaluated tables.
      replicas: how many of them run side by side in a step.

    Returns:
      Their ops; every step begins at 0.

    Raises:
      ValueError: if the number of runs is no multiple of the replicas.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> trace = pj.traces.of_runs([run, run], replicas=2)
      >>> len(trace), trace.replicas, float(trace.end.max())
      (16, [0, 1], 9.0)
    """
    check_types(runs=(runs, Sequence))
    whole_number(replicas, "replicas")
    if not runs or len(runs) % replicas:
        raise ValueError(f"runs must be a multiple of {replicas} replicas, got {len(runs)}")
    parts = [_ops_of(run, *divmod(number, replicas)) for number, run in enumerate(runs)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Trace.of(columns, OPS, source=", ".join(dict.fromkeys(run.table.name for run in runs)))


def _ops_of(run: Evaluation, step: int, replica: int) -> dict[str, NumpyArray]:
    ops = run.table.ops
    position = {Phase[name]: k for k, name in enumerate(OPS)}
    code = np.array([position.get(Phase(phase), NONE) for phase in ops.phase.tolist()])
    kept = code != NONE
    cell = ops.cell[kept]
    return {
        "step": np.full(len(cell), step),
        "replica": np.full(len(cell), replica),
        "worker": cell // run.table.num_slots,
        "stage": ops.stage[kept],
        "phase": code[kept],
        "microbatch": ops.microbatch[kept],
        "start": run.start.ravel()[cell],
        "end": run.finish.ravel()[cell],
    }
