"""The arrays behind a table: what each cell holds, by worker and slot."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Index, Int, NumpyArray
from pipejax.base.short_repr import short_repr
from pipejax.schedules.cells.ops import (
    COMPUTE,
    NO_MICROBATCH,
    NO_PIPE,
    NO_STAGE,
    NUMBERED,
    Cell,
    Op,
    Phase,
)
from pipejax.schedules.cells.weight_rule import NEWEST, WeightRule

NOWHERE = -1  # an op that the table does not hold


@short_repr
class Cells(NamedTuple):
    """The cells of a table as four dense arrays (workers, slots).

    Attributes:
      phase: code of `Phase`; `Phase.IDLE` where the cell is empty.
      stage: stage, or `NO_STAGE`.
      microbatch: microbatch, or `NO_MICROBATCH`.
      pipe: pipe of that microbatch, or `NO_PIPE`.
    """

    phase: Int[NumpyArray, "workers slots"]
    stage: Int[NumpyArray, "workers slots"]
    microbatch: Int[NumpyArray, "workers slots"]
    pipe: Int[NumpyArray, "workers slots"]


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """Everything that a schedule consists of.

    Attributes:
      cells: (workers, slots) the op of each slot.
      partners: (workers, slots) the backward of each fused pair.
      placement: (pipes, stages) worker of each stage.
      weights: which weights a forward reads, where cells update them.
    """

    cells: Cells
    partners: Cells
    placement: Int[NumpyArray, "pipes stages"]
    weights: WeightRule = NEWEST

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
    def _computes(self) -> Bool[NumpyArray, "workers slots"]:
        """Where a cell computes: messages say nothing about how many microbatches there are."""
        return np.isin(self.cells.phase, COMPUTE)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches over all pipes."""
        return int(self.cells.microbatch[self._computes].max(initial=NO_MICROBATCH)) + 1

    @functools.cached_property
    def pipe_of_microbatch(self) -> Int[NumpyArray, " microbatches"]:
        """Pipe of each microbatch."""
        pipe_of = np.zeros(self.num_microbatches, np.int32)
        held = self._computes
        pipe_of[self.cells.microbatch[held]] = self.cells.pipe[held]
        return pipe_of

    @functools.cached_property
    def where(self) -> Mapping[Phase, Int[NumpyArray, "stages microbatches"]]:
        """Cell of every op by phase, worker * slots + slot, or `NOWHERE`."""
        shape = self.num_stages, self.num_microbatches
        where = {phase: np.broadcast_to(NOWHERE, shape) for phase in NUMBERED}
        for cells in (self.cells, self.partners):
            held = np.flatnonzero(cells.phase.ravel())
            codes = cells.phase.ravel()[held]
            for phase in set(np.unique(codes).tolist()) & set(NUMBERED):
                found = held[codes == phase]
                stage, microbatch = cells.stage.ravel()[found], cells.microbatch.ravel()[found]
                where[phase] = where[phase].copy()
                where[phase][stage, microbatch] = found
        return where

    def cell(self, worker: Index, slot: Index) -> Cell:
        """Return the ops of one cell: none where it is idle, two for a fused pair."""
        place = worker, slot
        return tuple(
            Op(Phase(int(c.phase[place])), int(c.stage[place]), int(c.microbatch[place]))
            for c in (self.cells, self.partners)
            if c.phase[place] != Phase.IDLE
        )

    def rows(self) -> Iterator[list[Cell]]:
        """Yield the cells of each worker; all of them cost far less than `cell` for each."""
        for worker in range(self.num_workers):
            ops, partners = (
                zip(*(field[worker].tolist() for field in c[:3]), strict=True)
                for c in (self.cells, self.partners)
            )
            yield [
                tuple(
                    Op(Phase(phase), stage, microbatch)
                    for phase, stage, microbatch in cell
                    if phase != Phase.IDLE
                )
                for cell in zip(ops, partners, strict=True)
            ]

    def place(self, cell: Index) -> tuple[int, int]:
        """Return worker and slot of a cell that is numbered worker * slots + slot."""
        worker, slot = divmod(int(cell), self.num_slots)
        return worker, slot


def lay_out(
    rows: Sequence[Sequence[Cell]], member: int, pipe_of: Int[NumpyArray, " microbatches"]
) -> Cells:
    """Lay the first or the second op of every cell out as arrays."""
    shape = (len(rows), max((len(row) for row in rows), default=0))
    cells = Cells(
        np.full(shape, Phase.IDLE, np.int32),
        np.full(shape, NO_STAGE, np.int32),
        np.full(shape, NO_MICROBATCH, np.int32),
        np.full(shape, NO_PIPE, np.int32),
    )
    for worker, row in enumerate(rows):
        held = [(slot, cell[member]) for slot, cell in enumerate(row) if len(cell) > member]
        if held:
            slots = [slot for slot, _ in held]
            phase, stage, microbatch = np.array([op for _, op in held], np.int64).T
            cells.phase[worker, slots], cells.stage[worker, slots] = phase, stage
            cells.microbatch[worker, slots] = microbatch
            numbered = microbatch != NO_MICROBATCH
            known = numbered & (microbatch < len(pipe_of))
            pipes = np.full(len(slots), NO_PIPE)
            pipes[known] = pipe_of[microbatch[known]]
            cells.pipe[worker, slots] = pipes
    return cells
