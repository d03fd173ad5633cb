"""Activation memory of a run as a function of time: what each worker holds, and when most.

Levels are not added up change by change. A worker holds so many activations of each size, whole
numbers that are counted exactly, and a level is the sum of count times size: where all is released
it is 0, and four activations are 4.0.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.analysis.evaluate import Evaluation
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import is_number
from pipejax.base.short_repr import short_repr
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.held_activations import WEIGHT_SHARE

START, END = 0, 1  # of the op
# what a worker holds of a (stage, microbatch): all, what W needs, inputs for R, or what F left,
# which is all or, where R comes later, the inputs
WHOLE, FOR_W, FOR_R, LEFT_BY_F = 0, 1, 2, 3
CHANGES: Mapping[Phase, tuple[tuple[int, int, int], ...]] = {  # when, of what, how many more
    Phase.F: ((START, LEFT_BY_F, 1),),
    Phase.R: ((START, FOR_R, -1), (START, WHOLE, 1)),
    Phase.B: ((END, WHOLE, -1),),
    Phase.I: ((END, WHOLE, -1), (END, FOR_W, 1)),
    Phase.W: ((END, FOR_W, -1),),
    Phase.O: ((END, LEFT_BY_F, -1),),
    Phase.L: ((START, LEFT_BY_F, 1),),
}

Sizes = float | Sequence[float] | Float[NumpyArray, " stages"] | Int[NumpyArray, " stages"]


@short_repr
class ActivationMemory(NamedTuple):
    """Activation memory by worker as steps; sizes are in the unit that they were given in.

    Attributes:
      worker: (steps) worker, ascending.
      time: (steps) when its level changes, ascending for each worker [s].
      held: (steps) what it holds from then on.
      peak: (workers) most that it holds at once.
      peak_at: (workers) when it first holds that much [s].
      sizes: (stages) size of an activation.
      weight_share: share of it that the weight gradient needs after I.

    Example:
      >>> import pipejax as pj
      >>> table = pj.ScheduleTable.from_rows([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0))
      >>> [steps.tolist() for steps in activation_memory(run, weight_share=0.25).curve(0)]
      [[0.0, 1.0, 3.0, 4.0, 5.0, 6.0], [1.0, 2.0, 1.25, 0.5, 0.25, 0.0]]
    """

    worker: Int[NumpyArray, " steps"]
    time: Float[NumpyArray, " steps"]
    held: Float[NumpyArray, " steps"]
    peak: Float[NumpyArray, " workers"]
    peak_at: Float[NumpyArray, " workers"]
    sizes: Float[NumpyArray, " stages"]
    weight_share: float

    def curve(
        self, worker: int
    ) -> tuple[Float[NumpyArray, " moments"], Float[NumpyArray, " moments"]]:
        """Return the steps of one worker.

        Args:
          worker: row of the table.

        Returns:
          (moments) times [s], and what is held from each of them on; nothing before the first.
        """
        mine = self.worker == worker
        return self.time[mine], self.held[mine]


def activation_memory(
    evaluation: Evaluation,
    *,
    sizes: Sizes = 1.0,
    weight_share: float = WEIGHT_SHARE,
    checkpoints: Sizes | None = None,
) -> ActivationMemory:
    """Follow what each worker holds of the activations during a run.

    F takes an activation at its start, B frees it at its end. Of a split backward, I frees all but
    the weight share and W the rest. Where the table has R, F takes a checkpoint only and R the
    rest. O frees at its end what is held, L takes that back at its start. At one moment releases
    come before takes; in a fused pair both ops count while it runs.

    Args:
      evaluation: a run.
      sizes: size of an activation, a number or (stages), in any unit.
      weight_share: share of it that is held from the end of I to the end of W, in [0, 1].
      checkpoints: what is held between F and R, a number or (stages); as sizes if None.

    Returns:
      The steps and peaks.

    Raises:
      ValueError: if a size is no finite number of at least 0, there are not as many as stages, or
        weight_share is not in [0, 1].

    Cost:
      That of sorting the ops by time, and a pass for each different size.

    Example:
      >>> import pipejax as pj
      >>> row = ["0F0", "0O0", "0WAIT_O0", "0F1", "0B1", "0L0", "0B0"]
      >>> table = pj.ScheduleTable.from_rows([row])
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, offload=3.0))
      >>> memory = activation_memory(run)
      >>> memory.peak.tolist(), run.peak_in_flight.tolist()
      ([1.0], [2])
    """
    stages = evaluation.stages
    whole = _per_stage("sizes", sizes, stages)
    inputs = whole if checkpoints is None else _per_stage("checkpoints", checkpoints, stages)
    if not (is_number(weight_share) and weight_share <= 1):
        raise ValueError(f"weight_share must be a number from 0 to 1, got {weight_share!r}")
    events = _events(evaluation)
    size = np.stack([whole, weight_share * whole, inputs])[events.part, events.stage]
    held = np.zeros(len(size))
    for value in np.unique(size):  # counts of one size are whole numbers: they end at 0
        held += value * np.cumsum(np.where(size == value, events.change, 0))
    last = np.append(_differ(events.worker, events.time), True)  # of all changes at one moment
    worker, time, held = events.worker[last], events.time[last], held[last]
    peak, peak_at = np.zeros((2, evaluation.workers))
    np.maximum.at(peak, worker, held)
    is_peak = np.flatnonzero(held == peak[worker])[::-1]  # the first one is written last
    peak_at[worker[is_peak]] = time[is_peak]
    return ActivationMemory(worker, time, held, peak, peak_at, whole, float(weight_share))


class _Events(NamedTuple):
    """Changes of what workers hold, by worker, then time."""

    worker: Int[NumpyArray, " changes"]
    time: Float[NumpyArray, " changes"]
    stage: Int[NumpyArray, " changes"]
    part: Int[NumpyArray, " changes"]
    change: Int[NumpyArray, " changes"]


def _events(evaluation: Evaluation) -> _Events:
    table = evaluation.table
    recomputed = table.content.where[Phase.R] >= 0
    moments = evaluation.start, evaluation.finish
    found: list[tuple[NumpyArray, ...]] = []
    for cells in (table.cells, table.partners):
        for phase, changes in CHANGES.items():
            place = np.nonzero(cells.phase == phase)
            stage, microbatch = cells.stage[place], cells.microbatch[place]
            left = np.where(recomputed[stage, microbatch], FOR_R, WHOLE)
            for when, of, more in changes:
                part = left if of == LEFT_BY_F else np.full_like(left, of)
                found.append((place[0], moments[when][place], stage, part, 0 * left + more))
    events = _Events(*map(np.concatenate, zip(*found, strict=True)))
    order = np.lexsort((events.time, events.worker))
    return _Events(*(field[order] for field in events))


def _differ(worker: NumpyArray, time: NumpyArray) -> Bool[NumpyArray, " neighbours"]:
    return (worker[1:] != worker[:-1]) | (time[1:] != time[:-1])


def _per_stage(name: str, value: Sizes, stages: int) -> Float[NumpyArray, " stages"]:
    """Read a number, or one for each stage."""
    values = np.asarray(value, float)
    if values.shape not in ((), (stages,)):
        raise ValueError(
            f"{name} must be a number or one for each of {stages} stages, got shape {values.shape}"
        )
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"{name} must be finite numbers of at least 0, got {value!r}")
    return np.broadcast_to(values, stages)
