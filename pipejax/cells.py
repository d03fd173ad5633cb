"""The arrays behind a table: what each cell holds, by worker and slot."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipejax.ops import COMPUTE, NO_MICROBATCH, Cell, Op, Phase
from pipejax.shapes import Bool, Index, Int, NumpyArray


class Cells(NamedTuple):
    """The cells of a table as four dense arrays (workers, slots).

    Attributes:
      phase: code of `Phase`; `Phase.IDLE` where the cell is empty.
      stage: stage, or `NO_STAGE`.
      microbatch: microbatch, or `NO_MICROBATCH`.
      pipe: pipe of that microbatch, or `NO_PIPE`.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> ScheduleTable.from_rows([["0F0", "", "0B0"]]).cells.phase.tolist()
      [[1, 0, 2]]
    """

    phase: Int[NumpyArray, "workers slots"]
    stage: Int[NumpyArray, "workers slots"]
    microbatch: Int[NumpyArray, "workers slots"]
    pipe: Int[NumpyArray, "workers slots"]


class Content(NamedTuple):
    """Everything that a schedule consists of.

    Attributes:
      cells: (workers, slots) the op of each slot.
      partners: (workers, slots) the backward of each fused pair.
      placement: (pipes, stages) worker of each stage.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]]).content
      >>> content.num_stages, content.placement.tolist()
      (2, [[0, 1]])
    """

    cells: Cells
    partners: Cells
    placement: Int[NumpyArray, "pipes stages"]

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

    @property
    def _computes(self) -> Bool[NumpyArray, "workers slots"]:
        """Where a cell computes: messages say nothing about how many microbatches there are."""
        return np.isin(self.cells.phase, COMPUTE)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches over all pipes."""
        return int(self.cells.microbatch[self._computes].max(initial=NO_MICROBATCH)) + 1

    @property
    def pipe_of_microbatch(self) -> Int[NumpyArray, " microbatches"]:
        """Pipe of each microbatch."""
        pipe_of = np.zeros(self.num_microbatches, np.int32)
        held = self._computes
        pipe_of[self.cells.microbatch[held]] = self.cells.pipe[held]
        return pipe_of

    def cell(self, worker: Index, slot: Index) -> Cell:
        """Return the ops of one cell: none where it is idle, two for a fused pair.

        Args:
          worker: row.
          slot: column.

        Returns:
          The ops, the forward of a fused pair first.

        Example:
          >>> from pipejax.table import ScheduleTable
          >>> [str(op) for op in ScheduleTable.from_rows([["0F0", "0B0"]]).content.cell(0, 1)]
          ['0B0']
        """
        place = worker, slot
        return tuple(
            Op(Phase(int(c.phase[place])), int(c.stage[place]), int(c.microbatch[place]))
            for c in (self.cells, self.partners)
            if c.phase[place] != Phase.IDLE
        )

    def rows(self) -> Iterator[list[Cell]]:
        """Yield the cells of each worker; all of them cost far less than `cell` for each.

        Example:
          >>> from pipejax.table import ScheduleTable
          >>> content = ScheduleTable.from_rows([["0F0", "", "0B0"]]).content
          >>> [[str(op) for cell in row for op in cell] for row in content.rows()]
          [['0F0', '0B0']]
        """
        for worker in range(self.num_workers):
            ops, partners = (
                zip(*(field[worker].tolist() for field in c[:3]), strict=True)
                for c in (self.cells, self.partners)
            )
            yield [
                tuple(Op(Phase(phase), stage, microbatch) for phase, stage, microbatch in cell
                      if phase != Phase.IDLE)
                for cell in zip(ops, partners, strict=True)
            ]  # fmt: skip

    def place(self, cell: Index) -> tuple[int, int]:
        """Return worker and slot of a cell that is numbered worker * slots + slot.

        Args:
          cell: number of the cell.

        Returns:
          Worker and slot.

        Example:
          >>> from pipejax.table import ScheduleTable
          >>> ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]]).content.place(3)
          (1, 1)
        """
        worker, slot = divmod(int(cell), self.num_slots)
        return worker, slot
