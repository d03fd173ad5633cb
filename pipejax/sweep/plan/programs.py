"""The tables and programs of layouts: each made once, when it is asked for."""

import functools
from typing import NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.costs.costs import Costs
from pipejax.engine.batched.makespans import makespans
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program
from pipejax.engine.periodic_makespan import extrapolated_makespans
from pipejax.schedules.registry import ANY
from pipejax.schedules.table.held_activations import HeldCounts, held_counts
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.sweep.plan.bounds import Pipe

MOST_OPS = 1 << 17  # of a program that is lowered whole: longer ones grow from their periods
KEPT = 64  # tables that are kept for layouts to come
SETTLED = (2, 3)  # microbatches for each worker after which what workers hold grows no more


class ProgramShape(NamedTuple):
    """What makes a table, but for its number of microbatches.

    Attributes:
      schedule: its name.
      workers: P.
      stages_per_worker: V.
    """

    schedule: str
    workers: int
    stages_per_worker: int

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.workers * self.stages_per_worker

    def ops(self, microbatches: int) -> int:
        """Count forwards and backwards."""
        return 2 * self.stages * microbatches


@functools.lru_cache(KEPT)
def table_of(shape: ProgramShape, microbatches: int) -> ScheduleTable:
    """Build the table for M microbatches."""
    several = "stages_per_worker" in schedules.find(shape.schedule).options
    options = {"stages_per_worker": shape.stages_per_worker} if several else {}
    return schedules.build(
        shape.schedule, num_workers=shape.workers, num_microbatches=microbatches, **options
    )


def refusal(shape: ProgramShape, microbatches: int) -> str:
    """Say why the schedule does not exist for M microbatches; nothing if it does.

    Built-in schedules ask for multiples of 2 or P, or for at least 2P: there the table of another
    M, less than 8P, answers for a long one. What a user's own schedule asks for is not known.
    """
    legal = schedules.find(shape.schedule).legal
    if legal == ANY:
        return ""
    period = 4 * shape.workers
    few = min(microbatches, period + microbatches % period) if legal else microbatches
    try:
        table_of(shape, few)
        return ""
    except MismatchError:
        pass
    try:  # the message names the M that was asked for
        table_of(shape, microbatches)
    except MismatchError as error:
        return str(error)
    return ""


@functools.lru_cache(None)
def pipe_of(shape: ProgramShape) -> Pipe:
    """What all its tables have in common."""
    return Pipe.of(table_of(shape, 2 * shape.workers))


def held_in(shape: ProgramShape, microbatches: int) -> HeldCounts:
    """What workers hold with M microbatches.

    Where twice and three times as many microbatches as workers leave the same peaks, a schedule
    has settled: more of them only repeat its period.
    """
    few, more = (count * shape.workers for count in SETTLED)
    if microbatches > more and np.array_equal(_held(shape, few).parts, _held(shape, more).parts):
        return _held(shape, more)
    return _held(shape, microbatches)


@functools.lru_cache(4 * KEPT)
def _held(shape: ProgramShape, microbatches: int) -> HeldCounts:
    return held_counts(table_of(shape, microbatches))


def exact_times(
    shape: ProgramShape, microbatches: int, costs: Costs, links: Links
) -> Float[NumpyArray, " layouts"]:
    """Makespans (layouts) of one program, all-reduce and update included [s].

    A long program is that of fewer microbatches with its period put in as often as is missing,
    which is exact (engine/periodic_makespan.py); where it has no period it is lowered whole.
    """
    size = len(np.asarray(costs.forward))
    if shape.ops(microbatches) > MOST_OPS:
        try:
            few = 4 * shape.workers + microbatches % shape.workers
            short = _program(shape, few, links)
            return np.asarray(
                extrapolated_makespans(short, costs, num_microbatches=microbatches, batch_size=size)
            )
        except ValueError:
            pass  # no period, or none of so many microbatches
    program = _program(shape, microbatches, links)
    return np.asarray(makespans(program, costs, batch_size=size, unroll=False))


def _program(shape: ProgramShape, microbatches: int, links: Links) -> Program:
    return lower(table_of(shape, microbatches), link=links, step_end=True)
