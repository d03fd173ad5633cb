"""The arrays behind a table: what each cell holds, by worker and slot; its rule of weights."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Index, Int, NumpyArray
from pipejax.base.checks import whole_number
from pipejax.base.display import short_repr
from pipejax.base.machine import check_fits
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import UPDATES, WEIGHT_GRADS, AnyPhase, Cell, Op, Phase

# Which weights a forward reads, where a table updates them before its end.
#
# A table without U cells is synchronous: every microbatch reads the weights that the step began
# with. With U cells the table is asynchronous, and the order of its rows says which updates a
# forward can see; the rule says which of those it reads. The backward of a microbatch always uses
# the weights of its forward (weight stashing, arXiv:1806.03377).


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """Rule for the version of the weights that a forward reads.

    Attributes:
      behind: None for the newest of its stage when it runs, as PipeDream does. A number holds
        every microbatch that many updates behind the one that applies its own gradient, on all
        stages alike: 1 is the double buffering of PipeDream-2BW (arXiv:2006.09503).
      runs: R, models that are trained side by side; microbatch m belongs to run m mod R.
      local_steps: H, updates of a run after which the models of all runs are averaged; a round
        is R * H microbatches. Without effect where there is one run.

    Raises:
      ValueError: if a number is not whole, behind is below 0 or another below 1.

    Example:
      >>> import pipejax as pj
      >>> pj.schedules.WeightRule(runs=2, local_steps=5).round_size
      10
      >>> pj.schedules.WeightRule(local_steps=0)
      Traceback (most recent call last):
      ...
      pipejax.base.checks.ArgumentError: local_steps must be a whole number of at least 1, got 0
    """

    behind: int | None = None
    runs: int = 1
    local_steps: int = 1

    def __post_init__(self) -> None:
        if self.behind is not None:
            object.__setattr__(self, "behind", whole_number(self.behind, "behind", minimum=0))
        for name in ("runs", "local_steps"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name))

    @property
    def round_size(self) -> int:
        """Microbatches from one average of the runs to the next."""
        return self.runs * self.local_steps


NEWEST = WeightRule()


NOWHERE = -1  # an op that the table does not hold
BYTES_PER_CELL = 32  # of a table: four numbers for the op, four for its partner
EMPTY = Phase.IDLE, -1, -1, -1  # phase, stage, microbatch and pipe of a cell that holds nothing


@short_repr
class Cells(NamedTuple):
    """The cells of a table as four dense arrays (workers, slots)."""

    phase: Int[NumpyArray, "workers slots"]  # code of `Phase`; `Phase.IDLE` where the cell is empty
    stage: Int[NumpyArray, "workers slots"]  # stage, or `NO_STAGE`
    microbatch: Int[NumpyArray, "workers slots"]  # microbatch, or `NO_MICROBATCH`
    pipe: Int[NumpyArray, "workers slots"]  # pipe of that microbatch, or `NO_PIPE`


def empty_cells(shape: tuple[int, int]) -> Cells:
    """Return cells (workers, slots) that hold nothing yet, if a table of them fits into memory."""
    num_bytes = shape[0] * shape[1] * BYTES_PER_CELL
    check_fits(num_bytes, f"a table of {shape[0]} workers x {shape[1]} slots needs")
    return Cells(*(np.full(shape, empty, np.int32) for empty in EMPTY))


class HeldCells(NamedTuple):
    """All ops of a table, row by row; behind them the partners of fused pairs."""

    cell: Int[NumpyArray, " ops"]  # where the op stands, worker * slots + slot
    phase: Int[NumpyArray, " ops"]  # phase code
    stage: Int[NumpyArray, " ops"]
    microbatch: Int[NumpyArray, " ops"]
    pipe: Int[NumpyArray, " ops"]  # pipe of that microbatch

    def take(self, which: NumpyArray) -> "HeldCells":
        """Return some of the ops, chosen by a mask or by their numbers."""
        return HeldCells(*(field[which] for field in self))


class Content:
    """Contents of the cells of a table, whether or not it is legal."""

    cells: Cells  # (workers, slots) the op of each slot
    partners: Cells  # (workers, slots) the backward of each fused pair
    placement: Int[NumpyArray, "pipes stages"]  # worker of each stage
    weights: WeightRule  # which weights a forward reads, where cells update them
    grammar: Grammar = USUAL  # what the ops are, and what they wait for

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
    def ops(self) -> HeldCells:
        """All ops, fused pairs included."""
        parts = []
        for cells in (self.cells, self.partners):
            held = np.flatnonzero(cells.phase)
            parts.append((held, *(field.ravel()[held] for field in cells)))
        return HeldCells(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    @functools.cached_property
    def used_phases(self) -> tuple[AnyPhase, ...]:
        """Phases of its ops, by code."""
        used = np.flatnonzero(np.bincount(self.ops.phase))
        return tuple(self.grammar.phases[code] for code in used.tolist())

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches over all pipes; messages say nothing about it."""
        computed = self.ops.microbatch[np.isin(self.ops.phase, self.grammar.compute)]
        return int(computed.max(initial=-1)) + 1

    @functools.cached_property
    def pipe_of_microbatch(self) -> Int[NumpyArray, " microbatches"]:
        """Pipe (microbatches) of each microbatch."""
        grammar, count = self.grammar, self.num_microbatches
        # of kinds of its own some microbatches may have none that computes
        has_pipe = np.isin(self.ops.phase, grammar.numbered if grammar.own else grammar.compute)
        ops = self.ops.take(has_pipe & (self.ops.microbatch < count))
        pipes = np.zeros(count, np.int32)
        pipes[ops.microbatch] = ops.pipe
        return pipes

    @functools.cached_property
    def where(self) -> Mapping[AnyPhase, Int[NumpyArray, "places microbatches"]]:
        """Cell (stages, microbatches) of every op by phase, worker * slots + slot, or `NOWHERE`."""
        # What is of workers, and of no stage, has an entry for each worker instead.
        numbered, worker_phases = self.grammar.numbered, self.grammar.worker_phases
        shape = self.num_stages, self.num_microbatches
        where = dict.fromkeys(numbered, np.broadcast_to(NOWHERE, shape))
        where |= dict.fromkeys(
            worker_phases, np.broadcast_to(NOWHERE, (self.num_workers, shape[1]))
        )
        for phase in set(np.unique(self.ops.phase).tolist()) & set(numbered):
            ops = self.ops.take(self.ops.phase == phase)
            place = ops.cell // self.num_slots if phase in worker_phases else ops.stage
            where[phase] = np.full(where[phase].shape, NOWHERE)
            where[phase][place, ops.microbatch] = ops.cell
        return where

    @functools.cached_property
    def op_of_cell(self) -> Int[NumpyArray, " cells"] | None:
        """The first of the cells that are one op with each (cells); None where all are alone."""
        if not self.grammar.together:
            return None
        first_cells = np.arange(self.cells.phase.size)
        for phase in self.grammar.together:
            cells = self.where[phase]
            shared = np.where(cells == NOWHERE, cells.max(axis=0) + 1, cells).min(axis=0)
            first_cells[cells[cells != NOWHERE]] = np.broadcast_to(shared, cells.shape)[
                cells != NOWHERE
            ]
        return first_cells

    @functools.cached_property
    def updates(self) -> Int[NumpyArray, " cells"]:
        """Cells (cells) that update weights, worker * slots + slot, row by row."""
        return np.flatnonzero(np.isin(self.cells.phase, UPDATES))

    @property
    def num_offloaded(self) -> int:
        """Activations that go to the host and back."""
        return int((self.cells.phase == Phase.O).sum())

    @functools.cached_property
    def last_of_backward(self) -> Int[NumpyArray, "stages microbatches"]:
        """Cell (stages, microbatches) of the op that ends each backward."""
        whole, split = (self.where[phase] for phase in WEIGHT_GRADS)
        return np.maximum(whole, split)

    def cell(self, worker: Index, slot: Index) -> Cell:
        """Return the ops of one cell."""
        place, phases = (worker, slot), self.grammar.phases
        return tuple(
            Op(phases[c.phase[place]], int(c.stage[place]), int(c.microbatch[place]))
            for c in (self.cells, self.partners)
            if c.phase[place] != Phase.IDLE
        )

    def rows(self) -> Iterator[list[Cell]]:
        """Yield the cells of each worker, far faster than `cell` one by one."""
        phases = self.grammar.phases
        for worker in range(self.num_workers):
            ops, partners = (
                zip(*(field[worker].tolist() for field in c[:3]), strict=True)
                for c in (self.cells, self.partners)
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
        """Return worker and slot of a cell that is numbered worker * slots + slot."""
        worker, slot = divmod(int(cell), self.num_slots)
        return worker, slot

    def text(self, cell: Index) -> str:
        """Return the text of a cell that is numbered worker * slots + slot."""
        return self.grammar.text(self.cell(*self.place(cell)))

    def text_of_cycle(self, cycle: Iterable[Index]) -> str:
        """Return the cells of a cycle as text, and the first one again."""
        names = [f"{self.text(cell)} (worker {self.place(cell)[0]})" for cell in cycle]
        return " -> ".join([*names, names[0]])


def lay_out(
    rows: Sequence[Sequence[Cell]], member: int, microbatch_pipes: Int[NumpyArray, " microbatches"]
) -> Cells:
    """Return the first or the second op of every cell as arrays (workers, slots)."""
    shape = (len(rows), max((len(row) for row in rows), default=0))
    cells = empty_cells(shape)
    for worker, row in enumerate(rows):
        slots = [slot for slot, cell in enumerate(row) if len(cell) > member]
        if slots:
            ops = np.array([row[slot][member] for slot in slots], np.int64)
            for field, values in zip(cells[:3], ops.T, strict=True):
                field[worker, slots] = values
    has_pipe = (cells.microbatch >= 0) & (cells.microbatch < len(microbatch_pipes))
    cells.pipe[has_pipe] = microbatch_pipes[cells.microbatch[has_pipe]]
    return cells
