"""Lanes beside compute: how long they are busy, and how much of that compute does not hide."""

from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import ResultList, short_repr
from pipejax.schedules.cells.ops import COMPUTING, AnyPhase
from pipejax.schedules.table.table import ScheduleTable

Times = Float[NumpyArray, " ops"]


@short_repr
class LaneTimes(NamedTuple):
    """What a lane of every worker does.

    Attributes:
      lane: its name.
      busy: (workers) time in which it runs an op [s].
      exposed: (workers) part of it in which the compute of its worker is idle [s].
    """

    lane: str
    busy: Float[NumpyArray, " workers"]
    exposed: Float[NumpyArray, " workers"]


def lane_times(evaluation: Evaluation) -> list[LaneTimes]:
    """Follow the lanes beside compute that have ops in the cells of a table.

    Args:
      evaluation: a run.

    Returns:
      Lanes in the order of their first kind of op; none where all ops compute.

    Example:
      >>> import pipejax as pj
      >>> table = pj.ScheduleTable.from_rows([["0F0", "0O0", "0F1", "0B1", "0L0", "0B0"]])
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, offload=2.5))
      >>> [(lane.lane, lane.busy.tolist(), lane.exposed.tolist())
      ...  for lane in pj.analysis.lane_times(run)]
      [('host', [5.0], [2.5])]
    """
    check_types(evaluation=(evaluation, Evaluation))
    table, found = evaluation.table, ResultList[LaneTimes]()
    for lane, phases in phases_beside(table).items():
        on_lane = np.isin(table.phase, phases)
        both = [
            _busy_and_hidden(evaluation, worker, on_lane[worker])
            for worker in range(evaluation.workers)
        ]
        busy, hidden = np.array(both).T
        found.append(LaneTimes(lane, busy, busy - hidden))
    return found


def phases_beside(table: ScheduleTable) -> dict[str, list[AnyPhase]]:
    """List what the cells of a table hold on each lane beside compute, by lane."""
    found: dict[str, list[AnyPhase]] = {}
    for phase in table.used_phases:
        if phase.kind.time and phase.kind.lane != COMPUTING:
            found.setdefault(phase.kind.lane, []).append(phase)
    return found


def _busy_and_hidden(
    evaluation: Evaluation, worker: int, on_lane: NumpyArray
) -> tuple[float, float]:
    """How long a lane of a worker is busy, and how long its compute is beside it [s]."""
    start, finish = evaluation.start[worker], evaluation.finish[worker]
    # compute up to a moment is a line that rises while an op runs: what lies between two moments
    # of it is what runs between them; ops of a row, and updates behind it, do not overlap
    row = np.flatnonzero(np.asarray(evaluation.program.worker) == worker)
    begins, ends = evaluation.node_start[row], evaluation.node_finish[row]
    moments = np.stack([begins, ends], axis=1).ravel()
    done = np.stack([np.zeros(len(row)), ends - begins], axis=1).ravel().cumsum()
    if not len(moments):
        moments, done = np.zeros(1), np.zeros(1)
    up_to = np.interp(np.stack([start[on_lane], finish[on_lane]]), moments, done)
    return float((finish - start)[on_lane].sum()), float((up_to[1] - up_to[0]).sum())
