"""Updates within a table: every gradient is applied, every version that is read is there."""

import numpy as np

from pipejax.base.array_types import Bool, NumpyArray
from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.ops import Op, Phase
from pipejax.schedules.cells.schedule_error import ScheduleError
from pipejax.schedules.cells.weight_rule import NEWEST
from pipejax.schedules.cells.weight_versions import find_versions


def check_updates(content: Content) -> None:
    """U cells apply every gradient once, and forwards read versions that exist."""
    if not (content.cells.phase == Phase.U).any():
        if content.weights != NEWEST:
            raise ScheduleError(
                f"the table has a weight rule, {content.weights}, but no U cell updates weights"
            )
        return
    versions, where = find_versions(content), content.where
    gradient = np.maximum(where[Phase.B], where[Phase.W])
    letter = np.where(where[Phase.B] == NOWHERE, Phase.W, Phase.B)
    for stage, microbatch in np.argwhere(versions.update_cell == NOWHERE):
        op = Op(Phase(int(letter[stage, microbatch])), int(stage), int(microbatch))
        raise ScheduleError(
            f"the gradient of {op} is never applied: no U of stage {stage}"
            + f", run {microbatch % content.weights.runs}," * (content.weights.runs > 1)
            + " stands after it",
            place=content.place(gradient[stage, microbatch]),
        )
    own = where[Phase.U]
    for stage, microbatch in np.argwhere((own != NOWHERE) & (own != versions.update_cell)):
        raise ScheduleError(
            f"op {Op(Phase.U, int(stage), int(microbatch))} does not apply the gradient that it "
            "is named after: an update before it has done so",
            place=content.place(own[stage, microbatch]),
        )
    for stage, microbatch in np.argwhere(versions.read > versions.newest):
        raise ScheduleError(
            f"op {Op(Phase.F, int(stage), int(microbatch))} reads weights with "
            f"{versions.read[stage, microbatch]} updates, but only "
            f"{versions.newest[stage, microbatch]} stand before it (behind="
            f"{content.weights.behind})",
            place=content.place(where[Phase.F][stage, microbatch]),
        )
    for stage, microbatch in np.argwhere(_reads_early(content, versions.newest)):
        raise ScheduleError(
            f"op {Op(Phase.F, int(stage), int(microbatch))} begins a round before all runs have "
            f"ended the one before it: a round is {content.weights.runs} runs of "
            f"{content.weights.local_steps} updates, then an average",
            place=content.place(where[Phase.F][stage, microbatch]),
        )


def _reads_early(content: Content, newest: NumpyArray) -> Bool[NumpyArray, "stages microbatches"]:
    """Where a forward of a round stands before an update of the rounds before it."""
    if content.weights.runs == 1:
        return np.zeros_like(newest, bool)
    where = content.where
    rounds = np.arange(content.num_microbatches) // content.weights.round_size
    # the last update of a copy of a stage in all rounds before one; a copy is a worker's
    last = np.full((content.num_workers, content.num_stages, rounds[-1] + 2), NOWHERE)
    stage, microbatch = np.nonzero(where[Phase.U] != NOWHERE)
    cell = where[Phase.U][stage, microbatch]
    np.maximum.at(last, (cell // content.num_slots, stage, rounds[microbatch] + 1), cell)
    last = np.maximum.accumulate(last, axis=2)
    worker = where[Phase.F] // content.num_slots
    return where[Phase.F] < last[worker, np.arange(content.num_stages)[:, None], rounds]
