"""A schedule as a dense table of workers x slots, with checks of legality.

A table is validated completely when it is made: every op is there once, on the worker of its stage,
and the rows can be executed in order without a deadlock.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.base.checks import MismatchError, check_types, whole_numbers
from pipejax.base.display import Drawn, abbreviated, grid_html
from pipejax.schedules.cells.cells import (
    NEWEST,
    NOWHERE,
    Cells,
    Content,
    PipeOfMicrobatch,
    Placement,
    WeightRule,
    cell_arrays,
    infer_placement,
)
from pipejax.schedules.cells.dependencies import Dependencies, find_dependencies
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import (
    INPUT_GRADS,
    MESSAGES,
    UNIT_SLOTS,
    UPDATES,
    AnyPhase,
    Cell,
    Phase,
    ScheduleError,
    is_phase,
)
from pipejax.schedules.legality import check, check_shares, check_slots

_IN_NOTEBOOKS = (16, 24)  # most workers and slots that are shown


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleTable(Content, Drawn):
    """A pipeline schedule: the ops that each worker executes, in order.

    ```
               slot   0    1    2    3    4    5
    worker 0         0F0  0F1   .    .   0B0  0B1      empty slots mean order only
    worker 1          .   1F0  1B0  1F1  1B1   .
    ```

    Attributes:
      cells: (workers, slots) the op of each slot.
      partners: (workers, slots) the backward that runs as one with the forward in `cells`, idle
        where the slot holds no fused pair.
      placement: (pipes, stages) worker of each stage.
      name: schedule name, for reports.
      slots: slot durations by phase letter that the table was drawn with.
      stage_shares: (stages) share of the model's layers on each stage, relative to the mean.
      weights: rule for the weights that a forward reads, if U cells update them within the table.
      grammar: custom kinds of ops and rules, slices of microbatches, a graph of stages.

    Raises:
      ScheduleError: on construction, if the schedule cannot run.

    Example:
      >>> import pipejax as pj
      >>> table = pj.ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
      >>> table.num_workers, table.num_stages, table.num_microbatches
      (2, 2, 1)
      >>> print(table)
                 0     1
        worker 0 0F0   0B0
        worker 1 1F0   1B0
    """

    cells: Cells
    partners: Cells
    placement: Placement
    name: str = "table"
    slots: Mapping[str, float] = dataclasses.field(default_factory=lambda: UNIT_SLOTS)
    stage_shares: Sequence[float] = ()
    weights: WeightRule = NEWEST
    grammar: Grammar = USUAL

    def __post_init__(self) -> None:
        """Freeze the arrays, check the schedule, and complete slots and stage shares."""
        for name in ("cells", "partners"):
            arrays = (_whole_numbers(array, name) for array in getattr(self, name))
            object.__setattr__(self, name, Cells(*arrays))
        object.__setattr__(self, "placement", _whole_numbers(self.placement, "placement"))
        for array in (*self.cells, *self.partners, self.placement):
            array.flags.writeable = False
        if np.size(self.stage_shares) == 0 and self.placement.ndim == 2:
            object.__setattr__(self, "stage_shares", (1.0,) * self.num_stages)
        try:
            check(self)
            check_shares(self.stage_shares, self.num_stages)
            check_slots(self.slots, self.grammar)
        except ScheduleError as error:
            raise self.error(error.reason, error.worker, error.slot) from None
        slots = {x: int(t) if t == int(t) else float(t) for x, t in self.slots.items()}
        object.__setattr__(self, "slots", MappingProxyType({**self.grammar.unit_slots, **slots}))
        object.__setattr__(self, "stage_shares", tuple(map(float, self.stage_shares)))

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[Cell | str]],
        *,
        placement: Sequence[Sequence[int]] | Placement | None = None,
        pipe_of_microbatch: Sequence[int] | PipeOfMicrobatch | None = None,
        name: str = "table",
        slots: Mapping[str, float] = UNIT_SLOTS,
        stage_shares: Sequence[float] = (),
        weights: WeightRule = NEWEST,
        grammar: Grammar = USUAL,
    ) -> "ScheduleTable":
        """Make a table from the cells of each worker.

        Args:
          rows: cells by worker and slot, as text or as tuples of ops; rows may differ in length.
          placement: (pipes, stages) worker of each stage; None to infer it from the rows.
          pipe_of_microbatch: (microbatches) pipe of each microbatch, with a placement; pipe 0 if
            None.
          name: schedule name, for reports.
          slots: slot durations that the rows were drawn with.
          stage_shares: (stages) relative share of the layers on each stage; equal if empty.
          weights: rule for the weights that a forward reads, if U cells update them.
          grammar: custom kinds of ops and rules, slices, a graph of stages.

        Raises:
          ScheduleError: if a cell is not an op or the schedule cannot run.

        Example:
          >>> import pipejax as pj
          >>> pj.ScheduleTable.from_rows([["0F0", "0B0", "0B0"]])
          Traceback (most recent call last):
          pipejax.schedules.cells.ops.ScheduleError: op 0B0 stands twice ...
        """
        check_types(rows=(rows, Sequence, np.ndarray), name=(name, str))
        check_types(weights=(weights, WeightRule), grammar=(grammar, Grammar))
        cells = _parse_rows(rows, grammar)
        if placement is None and pipe_of_microbatch is not None:
            raise ScheduleError("pipe_of_microbatch needs a placement, with a row for each pipe")
        try:
            if placement is None:
                placement, pipe_of_microbatch = infer_placement(cells, grammar.compute_phases)
        except ScheduleError as error:
            texts = [[grammar.text(cell) for cell in row] for row in cells]
            grid = format_grid(texts, (error.worker or 0, error.slot), MAX_SLOTS)
            raise ScheduleError(error.reason, grid, place=(error.worker or 0, error.slot)) from None
        if pipe_of_microbatch is None:
            last = max((op.microbatch for row in cells for cell in row for op in cell), default=-1)
            pipe_of_microbatch = np.zeros(last + 1, np.int32)
        microbatch_pipes = _whole_numbers(pipe_of_microbatch, "pipe_of_microbatch")
        if microbatch_pipes.ndim != 1:
            shape = microbatch_pipes.shape
            raise ScheduleError(f"pipe_of_microbatch must be (microbatches), got shape {shape}")
        return cls(
            cells=cell_arrays(cells, 0, microbatch_pipes),  # first op of each cell
            partners=cell_arrays(cells, 1, microbatch_pipes),  # second op of each fused pair
            placement=np.array(_whole_numbers(placement, "placement")),
            name=name,
            slots=slots,
            stage_shares=stage_shares,
            weights=weights,
            grammar=grammar,
        )

    @property
    def phase(self) -> Int[NumpyArray, "workers slots"]:
        """Return the phase code of each cell."""
        return self.cells.phase

    @property
    def stage(self) -> Int[NumpyArray, "workers slots"]:
        """Return the stage of each cell."""
        return self.cells.stage

    @property
    def microbatch(self) -> Int[NumpyArray, "workers slots"]:
        """Return the microbatch of each cell."""
        return self.cells.microbatch

    @property
    def pipe(self) -> Int[NumpyArray, "workers slots"]:
        """Return the pipe of each cell."""
        return self.cells.pipe

    @property
    def dependencies(self) -> Dependencies:
        """Return the edges between cells, from each op to the ops that wait for it."""
        return find_dependencies(self)

    @property
    def stages_per_worker(self) -> int:
        """Return the largest number of stages that one pipe has on one worker."""
        return int(max(np.bincount(row).max() for row in self.placement))

    @property
    def worker_parts(self) -> Float[NumpyArray, " stages"]:
        """Return each stage's share of a microbatch's work on its worker."""
        workers = self.placement[0]
        num_stages_there = np.bincount(workers, minlength=self.num_workers)[workers]
        return np.asarray(self.stage_shares) / num_stages_there

    @property
    def is_fused(self) -> Bool[NumpyArray, "workers slots"]:
        """Return for each worker and slot whether the slot holds a fused pair."""
        return self.partners.phase != Phase.IDLE

    @property
    def has_communication(self) -> bool:
        """Return whether the rows hold SEND and RECV cells."""
        return not {*self.used_phases}.isdisjoint(MESSAGES)

    @property
    def offloads(self) -> bool:
        """Return whether O cells offload activations to the host."""
        return not {*self.used_phases}.isdisjoint(self.grammar.host_phases)

    @property
    def updates_within(self) -> bool:
        """Return whether U cells update weights within the table, so that it is asynchronous."""
        return len(self.updates) > 0

    def with_rows(self, rows: Sequence[Sequence[Cell | str]]) -> "ScheduleTable":
        """Return a copy with new rows of cells; without any update it has no weight rule.

        Raises:
          ScheduleError: if the schedule cannot run.
        """
        parsed_rows = _parse_rows(rows, self.grammar)
        cells, partners = (
            cell_arrays(parsed_rows, member, self.pipe_of_microbatch) for member in (0, 1)
        )
        weights = self.weights if is_phase(cells.phase, UPDATES).any() else NEWEST
        return dataclasses.replace(self, cells=cells, partners=partners, weights=weights)

    def with_recomputation(self) -> "ScheduleTable":
        """Return a table in which every backward recomputes its forward first: R before B or I.

        An R comes right before its backward, or before the fused pair that holds its backward. A
        backward that has an R keeps it.

        Returns:
          The table, with an R for every stage and microbatch.

        Example:
          >>> import pipejax as pj
          >>> table = pj.ScheduleTable.from_rows([["0F0", "0I0", "0W0"]])
          >>> print(table.with_recomputation())
                     0     1     2     3
            worker 0 0F0   0R0   0I0   0W0
        """

        def recomputations(cell: Cell) -> list[Cell]:
            backwards = (op for op in cell if op.phase in INPUT_GRADS)
            return [
                (op._replace(phase=Phase.R),)
                for op in backwards
                if self.op_cells[Phase.R][op.stage, op.microbatch] == NOWHERE
            ]

        return self.with_rows(
            [[new for cell in row for new in (*recomputations(cell), cell)] for row in self.rows()]
        )

    def __repr__(self) -> str:
        return (
            f"ScheduleTable({abbreviated(self.name)}: "
            f"{self.num_workers} workers x {self.num_slots} slots, "
            f"{self.num_stages} stages, {self.num_microbatches} microbatches)"
        )

    def _repr_html_(self) -> str:
        """Return the table's first workers and slots as a grid for notebooks."""
        workers, slots = map(range, np.minimum(self.cells.phase.shape, _IN_NOTEBOOKS).tolist())
        texts = [[self.grammar.text(self.cell(w, slot)) for slot in slots] for w in workers]
        grid = grid_html(repr(self), (f"worker {w}" for w in workers), texts)
        return self.above_picture(grid)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the fields; cached results are recomputed after loading."""
        fields = (self.cells, self.partners, self.placement, self.name, dict(self.slots))
        return ScheduleTable, (*fields, self.stage_shares, self.weights, self.grammar)

    def __str__(self) -> str:
        return format_grid([[self.grammar.text(cell) for cell in row] for row in self.rows()])

    def error(
        self, reason: str, worker: int | None = None, slot: int | None = None
    ) -> ScheduleError:
        """Return an error whose text shows this table with a cell, or a whole row, marked."""
        if worker is None:
            return ScheduleError(reason)
        shown_slots = _window(self.num_slots, slot, MAX_SLOTS)
        texts = [[""] * self.num_slots for _ in range(self.num_workers)]
        for w, row in enumerate(texts):
            for t in shown_slots:
                row[t] = self.grammar.text(self.cell(w, t))
        grid = format_grid(texts, (worker, slot), MAX_SLOTS)
        return ScheduleError(reason, grid, place=(worker, slot))


def check_usual(table: ScheduleTable, who: str) -> None:
    """Refuse a table with a custom grammar; the error says that `who` does not support it."""
    if not table.grammar.is_usual:
        has = f"{table.name} has {table.grammar.first_difference}"
        raise MismatchError(f"{who} knows the usual ops and rules alone, and {has}")


def dense_rows(table: ScheduleTable) -> list[list[Cell]]:
    """Return the cells of each worker, without idle cells."""
    return [[cell for cell in row if cell] for row in table.rows()]


def without_phases(table: ScheduleTable, phases: tuple[AnyPhase, ...]) -> ScheduleTable:
    """Return a table without the cells of these phases, unchanged if it has no such cells."""
    return table if len(phase_cells(table, phases)) == 0 else _without_phases(table, phases)


@cached_method
def _without_phases(table: ScheduleTable, phases: tuple[AnyPhase, ...]) -> ScheduleTable:
    return table.with_rows(
        [[cell for cell in row if not (cell and cell[0].phase in phases)] for row in table.rows()]
    )


def _parse_rows(rows: Sequence[Sequence[Cell | str]], grammar: Grammar) -> list[list[Cell]]:
    """Return the checked cells of each row, given as texts or as ops."""
    parsed = []
    for worker, row in enumerate(rows):
        if isinstance(row, str) or not isinstance(row, Sequence | np.ndarray):
            raise ScheduleError(f"rows: worker {worker} has no list of cells, got {row!r}")
        cells: list[Cell] = []
        for slot, cell in enumerate(row):
            try:
                cells.append(grammar.read(cell))
            except ValueError as error:
                raise ScheduleError(f"worker {worker}, slot {slot}: {error}") from None
        parsed.append(cells)
    return parsed


def _whole_numbers(values: Any, name: str) -> Int[NumpyArray, "..."]:
    try:
        return whole_numbers(values, name)
    except ValueError as error:
        raise ScheduleError(str(error)) from None


@cached_method
def phase_cells(table: Content, phases: tuple[AnyPhase, ...]) -> Int[NumpyArray, " cells"]:
    """Return the cells that hold one of the phases, row by row in slot order."""
    return np.flatnonzero(is_phase(table.cells.phase, list(phases)).ravel())


def op_before(
    table: Content, executed: Int[NumpyArray, " ops"], cells: Int[NumpyArray, " cells"]
) -> Int[NumpyArray, " cells"]:
    """Return, for each cell, the index in `executed` of the last cell before it in its row."""
    rows = cells // table.num_slots
    # `executed` are cells in ascending order, worker * slots + slot. With 10 slots, executed 3 12
    # and cells 5 11 13: the results are 0 (cell 3), NOWHERE and 1 (cell 12).
    before = np.searchsorted(executed, cells) - 1  # may be in an earlier row
    return np.where(before >= np.searchsorted(executed, rows * table.num_slots), before, NOWHERE)


# A schedule table as text: one line per worker, one column per slot, a place marked.

MAX_SLOTS = 16  # columns shown around a marked place
MAX_WORKERS = 32


def format_grid(
    rows: Sequence[Sequence[str]],
    mark: tuple[int, int | None] | None = None,
    max_slots: int | None = None,
) -> str:
    """Return a table as text in columns; cut a large table to the part around the mark."""
    # `mark`, the place of an error, is (worker, slot), or (worker, None) for a whole row.
    num_slots = max((len(row) for row in rows), default=0)
    slots = _window(num_slots, mark[1] if mark else None, max_slots or num_slots)
    workers = _window(len(rows), mark[0] if mark else None, MAX_WORKERS)
    texts = {(w, t): _text(rows[w], t, (w, t) == mark) for w in workers for t in slots}
    label = max((len(f"worker {w}") for w in workers), default=0)
    widths = {t: max([len(str(t)), *(len(texts[w, t]) for w in workers)]) for t in slots}
    header = "  ".join(f"{t:^{widths[t]}}" for t in slots)
    lines = [(" " * (label + 4) + header).rstrip()]
    for w in workers:
        pointer = ">" if mark == (w, None) else " "
        cells = "  ".join(f"{texts[w, t]:^{widths[t]}}" for t in slots)
        lines.append(f"{pointer} {f'worker {w}':<{label}}  {cells}".rstrip())
    hidden = num_slots - len(slots)
    if hidden:
        lines.append(f"  (slots {slots.start} to {slots.stop - 1} of {num_slots})")
    return "\n".join(lines)


def _window(size: int, centre: int | None, width: int) -> range:
    """Return up to `width` of `size` indices around a centre, or from 0."""
    start = min(max((centre or 0) - width // 2, 0), max(size - width, 0))
    return range(start, min(start + width, size))


def _text(row: Sequence[str], slot: int, marked: bool) -> str:
    text = (row[slot] if slot < len(row) else "") or "."
    return f">{text}<" if marked else text
