"""What a runtime is asked to do with a table, and what it gives back.

A runtime trains a small model for one step, cut into the stages of the table, and says how far its
gradients are from those of the same model without a pipeline. It may also time steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from pipejax.base.checks import known_as
from pipejax.base.display import short_repr
from pipejax.costs.costs import Costs
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, check_usual

# each the function `run_table` of its module, imported when it is asked for
RUNTIMES = {"jax": "pipejax.runtimes.spmd.runtime", "torch": "pipejax.runtimes.gloo.runtime"}


class RuntimeJob(NamedTuple):
    """Job of a runtime."""

    table: ScheduleTable  # the schedule
    links: Links = Links()  # what the prediction of its step time assumes of messages
    costs: Costs | None = None  # [s]; None: as long as they compute
    hidden: int = 16  # width of the layers of a stage
    batch_size: int = 2  # examples of a microbatch
    steps: int = 0  # steps to time, after one that is not; 0 times nothing
    seed: int = 0  # of parameters and data
    trace: Path | None = None  # folder for a trace of the timed steps


@short_repr
class RuntimeRun(NamedTuple):
    """What a runtime gives back.

    Attributes:
      runtime: its name.
      version: of the library that ran the table.
      gradient_error: largest difference to the gradients of the model without a pipeline, relative
        to the largest entry of the array that it is in; NaN where a gradient is none.
      loss: mean over the microbatches.
      loss_error: relative difference to the loss of the model without a pipeline.
      left_out: cells of the table that the runtime does not execute, by phase, and why.
      step_times: measured steps [s].
      predicted: makespan of the table at the times of the profile [s], where there is one.
      profile: seconds of an op by phase letter, one for each stage.
      message: seconds of a message, one for each stage boundary.
      step_size: what U cells multiply the mean gradient with; None where none is executed.
    """

    runtime: str
    version: str
    gradient_error: float
    loss: float
    loss_error: float
    left_out: Mapping[str, str] = {}
    step_times: Sequence[float] = ()
    predicted: float | None = None
    profile: Mapping[str, Sequence[float]] = {}
    message: Sequence[float] = ()
    step_size: float | None = None

    @property
    def error(self) -> float:
        """The larger of both errors; infinite where one is no number."""
        errors = (self.gradient_error, self.loss_error)
        return math.inf if any(map(math.isnan, errors)) else max(errors)


def run_table(runtime: str, job: RuntimeJob) -> RuntimeRun:
    """Run a table on a runtime; a ValueError says what it refuses."""
    check_usual(job.table, f"the runtime {runtime}")
    module = RUNTIMES[known_as(runtime, RUNTIMES, "runtime")]
    run: Callable[[RuntimeJob], RuntimeRun] = import_module(module).run_table
    return run(job)
