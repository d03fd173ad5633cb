"""Arrays of a table: the op of each worker and slot, and the rule for weights of forwards."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Index, Int, NumpyArray
from pipejax.base.checks import check_fits, whole_number
from pipejax.base.display import short_repr
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import (
    COMPUTE,
    UPDATES,
    WEIGHT_GRADS,
    AnyPhase,
    Cell,
    Op,
    Phase,
    ScheduleError,
    is_phase,
)

# Placement of stages: one row per pipe, one worker per stage.
#
# A bidirectional schedule (Chimera, DualPipe) has two opposite pipes, or several such couples, each
# shifted round the workers.

Placement = Int[NumpyArray, "pipes stages"]
PipeOfMicrobatch = Int[NumpyArray, " microbatches"]


def looped(num_workers: int, stages_per_worker: int = 1) -> Placement:
    """Place stage s on worker s mod P, as interleaved schedules do."""
    return np.tile(np.arange(num_workers, dtype=np.int32), stages_per_worker)[None]


def zigzag(num_workers: int, waves: int = 1) -> Placement:
    """Place stages down the workers and up again, `waves` times, as Hanayo does."""
    down = np.arange(num_workers, dtype=np.int32)
    return np.tile(np.concatenate([down, down[::-1]]), waves)[None]


def bidirectional(num_workers: int, pipes: int = 2) -> Placement:
    """Place pipes down and up the workers alternately, as Chimera does."""
    # each couple of pipes begins P / f workers after the previous couple, if there are 2f pipes
    return mirror_pipes(np.arange(num_workers, dtype=np.int32), num_workers, pipes)


def mirror_pipes(first: Int[NumpyArray, " stages"], num_workers: int, pipes: int) -> Placement:
    """Return each stage's worker: in a pipe, its mirror image, and shifted copies of both."""
    # first 0 1 2 3 on four workers, with four pipes: 0 1 2 3, 3 2 1 0, 2 3 0 1, 1 0 3 2
    couple = np.stack([first, num_workers - 1 - first])
    shifts = np.arange(0, num_workers, num_workers // (pipes // 2))[: pipes // 2]
    placement = (couple + shifts[:, None, None]) % num_workers  # (couples, 2, stages)
    return placement.reshape(-1, len(first)).astype(np.int32)


def infer_placement(
    rows: Sequence[Sequence[Cell]], compute: Sequence[AnyPhase] = COMPUTE
) -> tuple[Placement, PipeOfMicrobatch]:
    """Infer placement (pipes, stages) and each microbatch's pipe from the rows of a table."""
    # Refuse pipes that are no mirror image and no shifted copy of the first pipe. `first_ops` has
    # the first op (op, worker, slot) of each (stage, microbatch).
    first_ops: dict[tuple[int, int], tuple[Op, int, int]] = {}
    for worker, row in enumerate(rows):
        for slot, op in ((t, op) for t, cell in enumerate(row) for op in cell):
            if op.phase not in compute:
                continue  # messages and sharding follow the ops that they serve
            key = op.stage, op.microbatch
            first, first_worker, _ = first_ops.setdefault(key, (op, worker, slot))
            if first_worker != worker:
                raise ScheduleError(
                    f"op {op} is on worker {worker}, but {first} is on worker {first_worker}: "
                    "all ops of a stage and microbatch must be on one worker",
                    place=(worker, slot),
                )
    if not first_ops:
        raise ScheduleError("the table holds no op", place=(0, None))
    num_stages = 1 + max(stage for stage, _ in first_ops)
    num_microbatches = 1 + max(microbatch for _, microbatch in first_ops)
    if num_stages * num_microbatches > len(first_ops):
        raise _missing_error(first_ops, num_stages, num_microbatches)
    stage_workers = np.empty((num_microbatches, num_stages), np.int32)
    for (stage, microbatch), (_, worker, _) in first_ops.items():
        stage_workers[microbatch, stage] = worker
    # pipes are numbered in the order of their first microbatches:
    #   rows b a b of stage_workers are pipes 0 1 0; unique sorts them as a b, with indices 1 0
    unique_rows, first_microbatches, row_indices = np.unique(
        stage_workers, axis=0, return_index=True, return_inverse=True
    )
    order = np.argsort(first_microbatches)
    pipes = unique_rows[order]
    microbatch_pipes = np.argsort(order)[row_indices.ravel()].astype(np.int32)
    for pipe in _illegal_pipes(pipes, len(rows)):
        microbatch = int(np.flatnonzero((stage_workers == pipe).all(axis=1))[0])
        stage = int(np.flatnonzero(stage_workers[microbatch] != pipes[0])[0])
        op, worker, slot = first_ops[stage, microbatch]
        raise ScheduleError(
            f"op {op} is on worker {worker}, but stage {stage} of microbatch 0 is on worker "
            f"{pipes[0][stage]}: all microbatches must use the same workers, or mirrored workers, "
            "or one of several mirrored couples that are shifted by a fixed number of workers",
            place=(worker, slot),
        )
    return pipes, microbatch_pipes


def _illegal_pipes(pipes: Placement, num_workers: int) -> list[list[int]]:
    """Return the pipes that are no mirror image and no shifted copy of the first pipe."""
    if len(pipes) == 1:
        return []
    # an odd number of pipes, or a number that does not divide the workers, cannot be couples
    can_be_couples = len(pipes) % 2 == 0 and num_workers % len(pipes) == 0
    legal_pipes = mirror_pipes(pipes[0], num_workers, len(pipes) if can_be_couples else 2).tolist()
    return [pipe for pipe in pipes.tolist() if pipe not in legal_pipes]


def _missing_error(
    first_ops: Mapping[tuple[int, int], object], stages: int, microbatches: int
) -> ScheduleError:
    """Return an error that names the first (stage, microbatch) without an op."""
    # the counts may be huge: no array of that size
    places = ((s, m) for m in range(microbatches) for s in range(stages))
    stage, microbatch = next(place for place in places if place not in first_ops)
    return ScheduleError(
        f"missing op {stage}F{microbatch}: the table has stages up to {stages - 1} and "
        f"microbatches up to {microbatches - 1}, but no op of stage {stage} and microbatch "
        f"{microbatch}",
        place=(0, None),
    )


# With U cells a table is asynchronous: the order of its rows decides which updates a forward can
# see, and the weight rule which of these it reads. The backward of a microbatch uses the weights of
# its forward (weight stashing, arXiv:1806.03377).


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """Rule for the version of the weights that a forward reads.

    Attributes:
      lag: updates between the version that a microbatch reads and the update with its gradient, on
        all stages: 1 is the double buffering of PipeDream-2BW (arXiv:2006.09503). None reads the
        newest version of the stage when the forward runs, as PipeDream does.
      runs: R, models that are trained side by side; microbatch m belongs to run m mod R.
      local_steps: H, updates of a run after which the models of all runs are averaged; a round
        is R * H microbatches. Without effect if there is one run.

    Raises:
      ValueError: if a number is not whole, lag is below 0 or another below 1.

    Example:
      >>> import pipejax as pj
      >>> pj.schedules.WeightRule(runs=2, local_steps=5).round_size
      10
    """

    lag: int | None = None
    runs: int = 1
    local_steps: int = 1

    def __post_init__(self) -> None:
        if self.lag is not None:
            object.__setattr__(self, "lag", whole_number(self.lag, "lag", minimum=0))
        for name in ("runs", "local_steps"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name))

    @property
    def round_size(self) -> int:
        """Return the number of microbatches between two averages of the runs' models."""
        return self.runs * self.local_steps


NEWEST = WeightRule()
NOWHERE = -1  # cell of an op that the table does not hold
BYTES_PER_CELL = 32  # four numbers for the op of a cell, four for its partner
EMPTY = Phase.IDLE, -1, -1, -1  # phase, stage, microbatch and pipe of an empty cell


@short_repr
class Cells(NamedTuple):
    """Cells of a table as four dense arrays (workers, slots)."""

    phase: Int[NumpyArray, "workers slots"]  # code of `Phase`; `Phase.IDLE` where the cell is empty
    stage: Int[NumpyArray, "workers slots"]  # stage, or `NO_STAGE`
    microbatch: Int[NumpyArray, "workers slots"]  # microbatch, or `NO_MICROBATCH`
    pipe: Int[NumpyArray, "workers slots"]  # pipe of that microbatch, or `NO_PIPE`


def empty_cells(shape: tuple[int, int]) -> Cells:
    """Return empty cells (workers, slots); refuse a table too large for this machine's memory."""
    num_bytes = shape[0] * shape[1] * BYTES_PER_CELL
    check_fits(num_bytes, f"a table of {shape[0]} workers x {shape[1]} slots needs")
    return Cells(*(np.full(shape, empty, np.int32) for empty in EMPTY))


class TableOps(NamedTuple):
    """All ops of a table, row by row; second ops of fused pairs come after all first ops."""

    cell: Int[NumpyArray, " ops"]  # cell of the op, worker * slots + slot
    phase: Int[NumpyArray, " ops"]  # phase code
    stage: Int[NumpyArray, " ops"]
    microbatch: Int[NumpyArray, " ops"]
    pipe: Int[NumpyArray, " ops"]  # pipe of that microbatch

    def take(self, which: NumpyArray) -> "TableOps":
        """Return the ops that a mask or an array of indices selects."""
        return TableOps(*(field[which] for field in self))


class Content:
    """Contents of a table's cells, which need not form a legal schedule."""

    cells: Cells  # (workers, slots) op of each slot
    partners: Cells  # (workers, slots) backward of each fused pair
    placement: Int[NumpyArray, "pipes stages"]  # worker of each stage
    weights: WeightRule  # rule for the weights that a forward reads, if cells update them
    grammar: Grammar = USUAL  # kinds of the ops, and their dependencies

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return int(self.cells.phase.shape[0])

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return int(self.cells.phase.shape[1])

    @property
    def num_stages(self) -> int:
        """Number of stages of one pipe."""
        return int(self.placement.shape[1])

    @property
    def num_pipes(self) -> int:
        """Number of pipes."""
        return int(self.placement.shape[0])

    @functools.cached_property
    def ops(self) -> TableOps:
        """Return all ops of the cells, then the second ops of fused pairs."""
        parts = []
        for cells in (self.cells, self.partners):
            occupied = np.flatnonzero(cells.phase)
            parts.append((occupied, *(field.ravel()[occupied] for field in cells)))
        return TableOps(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    @functools.cached_property
    def used_phases(self) -> tuple[AnyPhase, ...]:
        """Return the phases of the table's ops, in order of their codes."""
        codes = np.flatnonzero(np.bincount(self.ops.phase))
        return tuple(self.grammar.phases[code] for code in codes.tolist())

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Count the microbatches of all pipes that have an op that computes."""
        is_compute = is_phase(self.ops.phase, self.grammar.compute_phases)
        return int(self.ops.microbatch[is_compute].max(initial=-1)) + 1

    @functools.cached_property
    def pipe_of_microbatch(self) -> Int[NumpyArray, " microbatches"]:
        """Return the pipe of each microbatch."""
        grammar, count = self.grammar, self.num_microbatches
        # custom kinds may leave a microbatch without any op that computes
        phases = grammar.microbatch_phases if grammar.custom_phases else grammar.compute_phases
        ops = self.ops.take(is_phase(self.ops.phase, phases) & (self.ops.microbatch < count))
        pipes = np.zeros(count, np.int32)
        pipes[ops.microbatch] = ops.pipe
        return pipes

    @functools.cached_property
    def op_cells(self) -> Mapping[AnyPhase, Int[NumpyArray, "places microbatches"]]:
        """Return {phase: cells of its ops (stages, microbatches)}; for workers (workers, ..)."""
        # a cell is numbered worker * slots + slot, or `NOWHERE` if the table lacks the op
        worker_phases, count = self.grammar.worker_phases, self.num_microbatches
        no_stage_ops = np.broadcast_to(NOWHERE, (self.num_stages, count))
        no_worker_ops = np.broadcast_to(NOWHERE, (self.num_workers, count))
        op_cells = dict.fromkeys(self.grammar.microbatch_phases, no_stage_ops)
        op_cells |= dict.fromkeys(worker_phases, no_worker_ops)
        for phase in set(np.unique(self.ops.phase).tolist()) & op_cells.keys():
            ops = self.ops.take(self.ops.phase == phase)
            place = ops.cell // self.num_slots if phase in worker_phases else ops.stage
            op_cells[phase] = np.full(op_cells[phase].shape, NOWHERE)
            op_cells[phase][place, ops.microbatch] = ops.cell
        return op_cells

    @functools.cached_property
    def first_cells(self) -> Int[NumpyArray, " cells"] | None:
        """Return for each cell the first cell of its collective, or itself; None without any."""
        if not self.grammar.collective_phases:
            return None
        first_cells = np.arange(self.cells.phase.size)
        for phase in self.grammar.collective_phases:
            cells = self.op_cells[phase]  # (workers, microbatches)
            is_held = cells != NOWHERE
            # missing cells become larger than all others, so that the smallest is a real one
            first = np.where(is_held, cells, cells.max(axis=0) + 1).min(axis=0)  # (microbatches)
            first_cells[cells[is_held]] = np.broadcast_to(first, cells.shape)[is_held]
        return first_cells

    @functools.cached_property
    def updates(self) -> Int[NumpyArray, " cells"]:
        """Return the cells that update weights, as worker * slots + slot, row by row."""
        return np.flatnonzero(is_phase(self.cells.phase, UPDATES))

    @property
    def num_offloaded(self) -> int:
        """Count the activations that are offloaded to the host."""
        return int((self.cells.phase == Phase.O).sum())

    @functools.cached_property
    def backward_end_cells(self) -> Int[NumpyArray, "stages microbatches"]:
        """Return the cell of the B or W that ends each backward, as (stages, microbatches)."""
        whole, split = (self.op_cells[phase] for phase in WEIGHT_GRADS)
        return np.maximum(whole, split)

    def cell(self, worker: Index, slot: Index) -> Cell:
        """Return the ops of one cell."""
        place, phases = (worker, slot), self.grammar.phases
        return tuple(
            Op(phases[cells.phase[place]], int(cells.stage[place]), int(cells.microbatch[place]))
            for cells in (self.cells, self.partners)
            if cells.phase[place] != Phase.IDLE
        )

    def rows(self) -> Iterator[list[Cell]]:
        """Yield the list of cells of each worker; much faster than calling `cell` repeatedly."""
        phases = self.grammar.phases
        for worker in range(self.num_workers):
            # (phase, stage, microbatch) of each slot; a partner is the backward of a fused pair
            ops, partners = (
                zip(*(field[worker].tolist() for field in cells[:3]), strict=True)
                for cells in (self.cells, self.partners)
            )
            yield [
                tuple(
                    Op(phases[phase], stage, microbatch)
                    for phase, stage, microbatch in cell
                    if phase != Phase.IDLE
                )
                for cell in zip(ops, partners, strict=True)
            ]

    def place(self, cell: Index) -> tuple[int, int]:
        """Return worker and slot of a cell, which is numbered worker * slots + slot."""
        worker, slot = divmod(int(cell), self.num_slots)
        return worker, slot

    def text(self, cell: Index) -> str:
        """Return the text of a cell, which is numbered worker * slots + slot."""
        return self.grammar.text(self.cell(*self.place(cell)))

    def text_of_cycle(self, cycle: Iterable[Index]) -> str:
        """Return the cells of a cycle as text; the first cell stands at both ends."""
        names = [f"{self.text(cell)} (worker {self.place(cell)[0]})" for cell in cycle]
        return " -> ".join([*names, names[0]])


def cell_arrays(
    rows: Sequence[Sequence[Cell]], member: int, microbatch_pipes: Int[NumpyArray, " microbatches"]
) -> Cells:
    """Return the first (`member` 0) or second (1) op of every cell, as arrays (workers, slots)."""
    shape = (len(rows), max((len(row) for row in rows), default=0))
    cells = empty_cells(shape)
    for worker, row in enumerate(rows):
        slots = [slot for slot, cell in enumerate(row) if len(cell) > member]
        if slots:
            ops = np.array([row[slot][member] for slot in slots], np.int64)
            for field, values in zip(cells[:3], ops.T, strict=True):  # phase, stage, microbatch
                field[worker, slots] = values
    has_pipe = (cells.microbatch >= 0) & (cells.microbatch < len(microbatch_pipes))
    cells.pipe[has_pipe] = microbatch_pipes[cells.microbatch[has_pipe]]
    return cells
