"""Staleness: age, in updates, of the weights with which a table computes its gradients.

A table with U cells fixes the weights of every gradient. The order of a row decides which weights
of its stage a gradient uses. The times of the ops decide which weights of other stages it uses, so
messages change the delay. A block update is an update of one stage. Block updates are numbered in
order of time, and simultaneous updates in order of stage. The model after j block updates is model
j. A forward reads the weights of its stage from the newest model. If the weight rule makes the
forward read weights that an update has replaced, it reads from the model before that update. Let
block update k apply the gradient of a microbatch whose forward on stage s reads from model j. The
delay of this gradient with respect to stage s is k - j. It is k - j_k(s) of the mixed model in
arXiv:2606.03498, where every forward reads the newest weights.
"""

import dataclasses

import numpy as np

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.costs.costs import Costs
from pipejax.schedules.cells.dependencies import Versions, find_versions, versions_held
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.slot_simulation import slot_times
from pipejax.schedules.table.table import ScheduleTable

SAME_MOMENT = 1e-9  # share of the makespan; ends that differ by less are simultaneous
BLOCK = 64  # microbatches whose delays are counted at once

PerCell = Float[NumpyArray, "workers slots"]
PerGradient = Int[NumpyArray, "stages microbatches"]


@with_short_repr(
    "schedule workers stages microbatches weight_versions own_lag max_delay mean_delay"
)
@dataclasses.dataclass(frozen=True, eq=False)
class Staleness:
    """Weight versions and gradient delays of a table; delays are 0 without update cells.

    The steady state is the middle half of the microbatches. If no other microbatch updates a stage
    while a microbatch is in the pipeline, its delay is 0.

    Attributes:
      schedule: name of the schedule.
      workers: P.
      stages: S.
      microbatches: M.
      versions: (workers, stages) largest number of versions of the stage's weights that the worker
        holds at once, over all runs; 0 if the worker does not hold the stage.
      own_lag: (workers) number of updates of a stage between the version that a microbatch reads
        and the update with its gradient; maximum over the steady state and the worker's stages.
      applied: (stages, steady) number of the block update that applies each gradient.
      read: (stages, steady) number of the model that each forward reads from.

    Source:
      arXiv 2606.03498: delays of asynchronous 1F1B. If a forward reads replaced weights, as in
      PipeDream-2BW, the delay uses the read index of the paper's mixed model.
    """

    schedule: str
    workers: int
    stages: int
    microbatches: int
    versions: Int[NumpyArray, "workers stages"]
    own_lag: Int[NumpyArray, " workers"]
    applied: Int[NumpyArray, "stages steady"]
    read: Int[NumpyArray, "stages steady"]

    @property
    def weight_versions(self) -> Int[NumpyArray, " workers"]:
        """Return the largest number of versions of a stage that each worker holds at once."""
        return self.versions.max(axis=1)

    @property
    def max_delay(self) -> int:
        """Return the largest delay in the steady state, with respect to any stage."""
        return int((self.applied.max(axis=0) - self.read.min(axis=0)).max())

    @property
    def mean_delay(self) -> float:
        """Return the mean delay over all updates and stages in the steady state."""
        return float(self.applied.mean() - self.read.mean())

    @property
    def delays(self) -> Int[NumpyArray, "stages steady stages"]:
        """Return delays (updated stage, microbatch of the steady state, stage that was read)."""
        return self.applied[:, :, None] - np.moveaxis(self.read, 0, -1)[None]

    def histogram(self) -> Int[NumpyArray, " delays"]:
        """Count the delays in the steady state: entry d is the number of delays equal to d.

        Example:
          >>> from pipejax import schedules
          >>> table = schedules.build("pipedream", num_workers=2, num_microbatches=80)
          >>> staleness(table).histogram().tolist()
          [0, 40, 80, 40]
        """
        counts = np.zeros(self.max_delay + 1, np.int64)
        for start in range(0, self.applied.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            applied, read = self.applied[:, block], self.read[:, block]
            delays = dataclasses.replace(self, applied=applied, read=read).delays
            counts += np.bincount(delays.ravel(), minlength=len(counts))
        return counts


def staleness(
    table: ScheduleTable, costs: Costs | None = None, *, link: str | Links = "delay"
) -> Staleness:
    """Find the weight versions and delays of a table.

    Args:
      table: the schedule.
      costs: unbatched costs [s]; default: every op takes one slot, messages take no time.
      link: link model, or `Links`.

    Returns:
      Weight versions and delays. If an update applies several gradients, each gradient counts.

    Raises:
      ValueError: if an asynchronous table has fewer microbatches than stages, or as `evaluate`.
      ScheduleError: if the transfers of the table deadlock under rendezvous.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("pipedream", num_workers=2, num_microbatches=40)
      >>> slow = pj.Costs(forward=1.0, backward=1.0, transmit=3.0)  # messages take their time
      >>> pj.staleness(table).max_delay, pj.staleness(table, slow).max_delay
      (3, 3)
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs, type(None)))
    quarter = table.num_microbatches // 4
    steady = slice(quarter, table.num_microbatches - quarter)
    applied = read = np.zeros((table.num_stages, steady.stop - steady.start), np.int64)
    own_lag = np.zeros(table.num_workers, np.int64)
    versions = find_versions(table)
    if table.updates_within:
        if table.weights.runs == 1 and table.num_microbatches < table.num_stages:
            raise ValueError(
                f"the number of microbatches must be at least that of stages, {table.num_stages}, "
                f"got {table.num_microbatches}: the pipe is never full and has no steady state"
            )
        lag = (versions.applied - versions.read)[:, steady]
        worker = table.placement[table.pipe_of_microbatch[steady]].T
        np.maximum.at(own_lag, worker, lag)
        updates = _block_updates(table, versions, *op_times(table, costs, link=link))
        applied, read = (np.where(lag.any(axis=0), numbers[:, steady], 0) for numbers in updates)
    sizes = table.num_workers, table.num_stages, table.num_microbatches
    held = versions_held(table)
    return Staleness(table.name, *sizes, held, own_lag=own_lag, applied=applied, read=read)


def op_times(
    table: ScheduleTable, costs: Costs | None = None, *, link: str | Links = "delay"
) -> tuple[PerCell, PerCell]:
    """Return start and end of each cell (workers, slots) [s]; in slots if `costs` is None."""
    if costs is None:
        slots = dict.fromkeys(table.grammar.unit_slots, 1)
        return slot_times(table, slots, is_scaled=False, link=link)
    run = evaluate(table, costs, link=link)
    return run.start, run.finish


def _block_updates(
    table: ScheduleTable, versions: Versions, start: PerCell, finish: PerCell
) -> tuple[PerGradient, PerGradient]:
    """Return the numbers of each gradient's update, and of the model that its forward reads."""
    # Updates of all stages are numbered by their ends, from 0 in each run. Model j has j updates.
    tolerance = SAME_MOMENT * float(finish.max())
    updates, runs = table.updates, table.weights.runs
    run = table.cells.microbatch.ravel()[updates] % runs
    ends = finish.ravel()[updates]
    # Ends within the tolerance are one moment. Ends 3, 1, 1, 2 are moments 2, 0, 0, 1.
    by_end = np.argsort(ends, kind="stable")
    moment = np.empty(len(updates), np.int64)
    moment[by_end] = np.cumsum(np.append(False, np.diff(ends[by_end]) > tolerance))
    # Updates of a run are sorted by moment, then stage, and numbered. Sorted runs 0, 0, 0, 1, 1
    # begin at 0, 0, 0, 3, 3, so the numbers are 0, 1, 2, 0, 1.
    stage = table.cells.stage.ravel()[updates]
    order = np.lexsort((stage, moment, run))
    number = np.empty(len(updates), np.int64)
    number[order] = np.arange(len(updates)) - np.searchsorted(run[order], run[order])
    applied = number[np.searchsorted(updates, versions.update_cell)]
    # A forward reads the model with all updates of its run that ended before the forward starts.
    forward_start = start.ravel()[table.op_cells[Phase.F]] + tolerance
    microbatch_run = np.arange(table.num_microbatches) % runs
    newest_model = np.empty_like(applied)
    for k in range(runs):
        run_ends, in_run = np.sort(ends[run == k]), microbatch_run == k
        newest_model[:, in_run] = np.searchsorted(run_ends, forward_start[:, in_run], side="right")
    # update k replaces the weights that a forward reads: model k is the newest that has them
    return applied, np.minimum(newest_model, _replaced_by(table, versions, applied))


def _replaced_by(table: ScheduleTable, versions: Versions, applied: PerGradient) -> PerGradient:
    """Return the update that replaces the weights of each forward; a huge number if none does."""
    runs, pipe = table.weights.runs, table.pipe_of_microbatch
    stage, microbatch = np.indices(applied.shape)
    # index of a stage's copy on a worker in a run; run r trains on microbatches r, r + runs, ...
    copy = (table.placement[pipe].T * table.num_stages + stage) * runs + microbatch % runs
    # row: copy of a stage in a run; column: version; value: the update that replaces the version
    num_versions = int(versions.updates.max()) + 1
    replaced_by = np.full((int(copy.max()) + 1, num_versions), np.iinfo(np.int64).max)
    replaced_by[copy, versions.applied] = applied
    return replaced_by[copy, versions.read]
