"""Requests to a runtime that runs a table, and their results.

A runtime trains a small model for one step, divided into the stages of the table, and compares its
gradients with those of the model without a pipeline. It may also time steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from pipejax.base.checks import resolve_name
from pipejax.base.display import short_repr
from pipejax.costs.costs import Costs
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, check_usual

# each the function `run_table` of its module, imported when it is asked for
RUNTIMES = {"jax": "pipejax.runtimes.spmd.runtime", "torch": "pipejax.runtimes.gloo.runtime"}


class RuntimeJob(NamedTuple):
    """A table, a model and options for one run of a runtime."""

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
    """Results of one run: gradient errors, and times if they were measured."""

    runtime: str  # its name
    version: str  # of the library that ran the table
    # largest difference to gradients without a pipeline, relative to the largest entry; or NaN
    gradient_error: float
    loss: float  # mean over the microbatches
    loss_error: float  # relative difference to the loss of the model without a pipeline
    # cells that the runtime does not execute, by phase, and why
    left_out: Mapping[str, str] = {}
    step_times: Sequence[float] = ()  # measured steps [s]
    predicted: float | None = None  # makespan at the times of the profile [s]
    profile: Mapping[str, Sequence[float]] = {}  # [s] of an op by phase letter, by stage
    message: Sequence[float] = ()  # seconds of a message, one for each stage boundary
    step_size: float | None = None  # factor of the mean gradient in U cells

    @property
    def error(self) -> float:
        """Return the larger of both errors; infinite if one is NaN."""
        errors = (self.gradient_error, self.loss_error)
        return math.inf if any(map(math.isnan, errors)) else max(errors)


def run_table(runtime: str, job: RuntimeJob) -> RuntimeRun:
    """Run a table on a runtime; raise ValueError if the runtime cannot."""
    check_usual(job.table, f"the runtime {runtime}")
    module = RUNTIMES[resolve_name(runtime, RUNTIMES, "runtime")]
    run: Callable[[RuntimeJob], RuntimeRun] = import_module(module).run_table
    return run(job)
