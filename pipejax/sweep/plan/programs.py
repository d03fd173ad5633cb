"""Tables and programs of layouts, each built once, and lower bounds on the step times of layouts.

The makespan is the length of the longest path, so every path is a lower bound. Three lower bounds
are cheap for all layouts at once: the row of one worker; one microbatch through all stages and
back; and the work of all workers, divided evenly. The last two also hold for two pipes.
"""

import contextlib
import functools
from typing import NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.base.jax_on_demand import mapped
from pipejax.costs.costs import Costs
from pipejax.engine.batched.makespans import makespans
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program
from pipejax.engine.periodic_makespan import extrapolated_makespans
from pipejax.schedules.builders.published import ANY
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.held_activations import HeldCounts, held_counts, is_recomputed
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.slot_simulation import without_idle_slots
from pipejax.schedules.table.table import ScheduleTable

MAX_OPS = 1 << 19  # programs with more ops are extrapolated from their period
MAX_CACHED = 64  # number of tables in the cache
CACHE_SIZE = 256  # number of counts of activations in the cache
SETTLED = (2, 3)  # microbatches per worker of two tables; if peaks are equal, they grow no more

PerStage = Float[NumpyArray, "layouts stages"]
Bound = Float[NumpyArray, " layouts"]


class Pipe(NamedTuple):
    """Properties of a table for bounds, the same for any number of microbatches."""

    placement: Int[NumpyArray, "pipes stages"]  # worker of each stage
    whole: Bool[NumpyArray, " stages"]  # whether a stage has full backwards B
    split: Bool[NumpyArray, " stages"]  # whether a stage has split backwards I and W
    is_recomputed: Bool[NumpyArray, " stages"]  # whether all microbatches of a stage have R

    @classmethod
    def from_table(cls, table: ScheduleTable) -> "Pipe":
        """Read the properties of a table."""

        def count(phase: Phase) -> Int[NumpyArray, " stages"]:
            both = [cells.stage[cells.phase == phase] for cells in (table.cells, table.partners)]
            return np.bincount(np.concatenate(both), minlength=table.num_stages)

        recomputed = is_recomputed(table).min(axis=1)
        return cls(np.asarray(table.placement), count(Phase.B) > 0, count(Phase.I) > 0, recomputed)


class _StageTimes(NamedTuple):
    """Times of each stage and of messages between stages [s], as (layouts, stages)."""

    forward: PerStage  # F
    back: PerStage  # time to the input gradient: the shorter of B and I
    work: PerStage  # all compute of one microbatch
    ending: PerStage  # A and U after the last gradient
    update: PerStage  # U
    activation: PerStage  # (layouts, stages - 1) message to the next stage, the least of all pipes
    gradient: PerStage  # (layouts, stages - 1) message to the previous stage, likewise


def lower_bounds(pipe: Pipe, costs: Costs, microbatches: Int[NumpyArray, " layouts"]) -> Bound:
    """Return lower bounds on the makespans of layouts with the same stages [s]."""
    times = _stage_times(pipe, costs, len(microbatches))
    workers = int(pipe.placement.max()) + 1
    # (layouts, stages) paths from the first stage to each stage, and from each stage to the first
    path_to = _sums_before(times.forward[:, :-1] + times.activation)
    path_from = _sums_before(times.back[:, :-1] + times.gradient)
    round_trip = path_to[:, -1] + times.forward[:, -1] + times.back[:, -1]
    # tail of stage s: gradients from s to a stage e <= s, path_from[s] - path_from[e], then its end
    tail = path_from + np.maximum.accumulate(times.ending - path_from, axis=1)
    bound = np.maximum(round_trip + tail[:, -1], microbatches * times.work.sum(axis=1) / workers)
    if len(pipe.placement) > 1:
        return bound
    for worker in range(workers):
        on_worker = pipe.placement[0] == worker
        busy = microbatches * times.work[:, on_worker].sum(axis=1)
        # a row may end with a W: only A and U wait for it, no gradient of an earlier stage does
        row_tail = np.where(pipe.split, times.ending, tail)[:, on_worker].min(axis=1)
        row_tail = np.maximum(row_tail, times.update[:, on_worker].sum(axis=1))
        bound = np.maximum(bound, path_to[:, on_worker].min(axis=1) + busy + row_tail)
    return bound


def _stage_times(pipe: Pipe, costs: Costs, count: int) -> _StageTimes:
    """Return the times of `count` layouts by stage."""
    # if a stage has both kinds of backwards, the shorter one counts
    stages = pipe.placement.shape[1]

    def stage_cost(name: str) -> PerStage:
        value = getattr(costs, name)
        return np.broadcast_to(np.asarray(0.0 if value is None else value, float), (count, stages))

    def message_cost(kind: str) -> Float[NumpyArray, "layouts 2 pipes boundaries"]:
        value = np.asarray(getattr(costs, kind), float)
        # (layouts, boundaries) becomes (layouts, 1, 1, boundaries)
        value = value.reshape(value.shape[:1] + (1,) * (4 - value.ndim) + value.shape[1:])
        return np.broadcast_to(value, (count, 2, len(pipe.placement), stages - 1))

    crosses = pipe.placement[:, 1:] != pipe.placement[:, :-1]
    messages = (message_cost("latency") + message_cost("transmit")) * crosses

    def shorter(whole: PerStage, split: PerStage) -> PerStage:
        """Return the shorter kind of backward, of those that a stage has."""
        return np.minimum(np.where(pipe.whole, whole, np.inf), np.where(pipe.split, split, np.inf))

    # a fused pair takes max(F, B) + k min(F, B), which is at least (1 + k) / 2 of F + B
    factor = 1.0 if costs.pair_factor is None else np.min(np.asarray(costs.pair_factor))
    split_backward = stage_cost("input_grad") + stage_cost("weight_grad")
    work = stage_cost("forward") + shorter(stage_cost("backward"), split_backward)
    activation, gradient = messages.min(axis=2).swapaxes(0, 1)
    return _StageTimes(
        forward=stage_cost("forward"),
        back=shorter(stage_cost("backward"), stage_cost("input_grad")),
        work=work * (1 + min(factor, 1.0)) / 2 + pipe.is_recomputed * stage_cost("recompute"),
        ending=stage_cost("all_reduce") + stage_cost("update"),
        update=stage_cost("update"),
        activation=activation,
        gradient=gradient,
    )


def _sums_before(steps: Float[NumpyArray, "layouts boundaries"]) -> PerStage:
    """Return the sum of steps before each stage: (layouts, stages) from (layouts, stages - 1)."""
    return np.concatenate([np.zeros((len(steps), 1)), np.cumsum(steps, axis=1)], axis=1)


class ProgramShape(NamedTuple):
    """Choices that determine a table, except its number of microbatches."""

    schedule: str  # name of the schedule
    workers: int  # P
    stages_per_worker: int  # V

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return self.workers * self.stages_per_worker

    @property
    def options(self) -> dict[str, int]:
        """Return `stages_per_worker`, if the schedule has this option."""
        has_several = "stages_per_worker" in schedules.find(self.schedule).options
        return {"stages_per_worker": self.stages_per_worker} if has_several else {}

    def ops(self, microbatches: int) -> int:
        """Count forwards and backwards."""
        return 2 * self.stages * microbatches


@functools.lru_cache(MAX_CACHED)
def build_table(shape: ProgramShape, microbatches: int) -> ScheduleTable:
    """Build the table for M microbatches; a cache holds the latest tables."""
    size = {"num_workers": shape.workers, "num_microbatches": microbatches}
    with without_idle_slots():
        return schedules.find(shape.schedule).function(**size, **shape.options)


def refusal(shape: ProgramShape, microbatches: int) -> str:
    """Return why the schedule does not exist for M microbatches; empty if it exists."""
    # Built-in schedules need multiples of 2 or P, or at least 2 P microbatches. So a table with
    # fewer than 8 P microbatches decides for a longer table. A user's schedule may have any
    # conditions.
    legal = schedules.find(shape.schedule).legal
    if legal == ANY:
        return ""
    period = 4 * shape.workers
    few_microbatches = min(microbatches, period + microbatches % period) if legal else microbatches
    with contextlib.suppress(MismatchError):
        build_table(shape, few_microbatches)
        return ""
    try:  # the message names the requested M
        build_table(shape, microbatches)
    except MismatchError as error:
        return str(error)
    return ""


@functools.lru_cache(None)
def table_pipe(shape: ProgramShape) -> Pipe:
    """Return the properties that all tables of a program shape share."""
    return Pipe.from_table(build_table(shape, 2 * shape.workers))


def count_activations(shape: ProgramShape, microbatches: int) -> HeldCounts:
    """Count the activations that workers hold with M microbatches."""
    # If two short tables have the same peaks, a longer table only repeats their period.
    fewer, more = (count * shape.workers for count in SETTLED)
    if microbatches > more:
        counts, more_counts = _table_activations(shape, fewer), _table_activations(shape, more)
        if np.array_equal(counts.parts, more_counts.parts):
            return more_counts
    return _table_activations(shape, microbatches)


@functools.lru_cache(CACHE_SIZE)
def _table_activations(shape: ProgramShape, microbatches: int) -> HeldCounts:
    return held_counts(build_table(shape, microbatches))


def exact_times(
    shape: ProgramShape, microbatches: int, costs: Costs, links: Links
) -> Float[NumpyArray, " layouts"]:
    """Return the makespans [s] of layouts with one program, including all-reduce and update."""
    # A very long program repeats the period of a shorter program, so extrapolation is exact
    # (engine/periodic_makespan.py). A program without a period is lowered completely.
    size = len(np.asarray(costs.forward))
    if shape.ops(microbatches) > MAX_OPS:
        try:
            few_microbatches = 4 * shape.workers + microbatches % shape.workers
            short = _program(shape, few_microbatches, links)
            times = []
            for k in range(size):  # one layout at a time, because each takes a GB for matrices
                row = mapped(lambda leaf, k=k: leaf[k : k + 1] if np.ndim(leaf) else leaf, costs)
                sizes = {"num_microbatches": microbatches, "batch_size": 1}
                times.append(extrapolated_makespans(short, row, **sizes))
            return np.concatenate(times)
        except ValueError:
            pass  # the program has no period, or not with so many microbatches
    program = _program(shape, microbatches, links)
    return np.asarray(makespans(program, costs, batch_size=size, unroll=False))


def _program(shape: ProgramShape, microbatches: int, links: Links) -> Program:
    return lower(build_table(shape, microbatches), link=links, step_end=True)
