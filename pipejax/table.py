"""The schedule as a dense table, workers x slots, and the only judge of what is legal.

A table is validated completely when it is made, so a wrong one cannot exist and everything to
the right of this module may rely on it: every op is there once, on the worker that its stage is
placed on, and the rows can be executed in order without a deadlock.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from pipejax import placement as placements
from pipejax.dependencies import NOWHERE, Dependencies, find_dependencies, locate
from pipejax.graph import CycleError, topological_order
from pipejax.grid import MAX_SLOTS, format_grid
from pipejax.ops import (
    CELL_PHASES,
    COMMUNICATION,
    NO_MICROBATCH,
    NO_PIPE,
    NO_STAGE,
    SHARDING,
    Cell,
    Op,
    Phase,
    format_cell,
    parse_cell,
)
from pipejax.shapes import Bool, Int, NumpyArray

UNIT_SLOTS: Mapping[str, int] = MappingProxyType({"F": 1, "B": 2, "I": 1, "W": 1, "R": 1})


class ScheduleError(ValueError):
    """A schedule that cannot run.

    Attributes:
      reason: one line that names the op.
      grid: the table as text with the place marked, empty where there is no place to show.
    """

    def __init__(self, reason: str, grid: str = "") -> None:
        """Join the reason and the grid to the message."""
        super().__init__(f"{reason}\n{grid}" if grid else reason)
        self.reason = reason
        self.grid = grid


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
class ScheduleTable:
    """A pipeline schedule: what each worker executes, in order.

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

    Raises:
      ScheduleError: on construction, if the schedule cannot run.

    Example:
      >>> table = ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
      >>> table.num_workers, table.num_stages, table.num_microbatches
      (2, 2, 1)
      >>> print(table)
                 0     1
        worker 0 0F0   0B0
        worker 1 1F0   1B0
    """

    cells: Cells
    partners: Cells
    placement: placements.Placement
    name: str = "table"
    slots: Mapping[str, float] = dataclasses.field(default_factory=lambda: UNIT_SLOTS)
    stage_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Freeze the arrays and check the schedule."""
        for array in (*self.cells, *self.partners, self.placement):
            array.flags.writeable = False
        object.__setattr__(self, "slots", MappingProxyType({**UNIT_SLOTS, **self.slots}))
        if not self.stage_shares:
            object.__setattr__(self, "stage_shares", (1.0,) * self.num_stages)
        for check in _CHECKS:
            check(self)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[Cell | str]],
        *,
        placement: placements.Placement | None = None,
        pipe_of_microbatch: Sequence[int] | placements.PipeOfMicrobatch | None = None,
        name: str = "table",
        slots: Mapping[str, float] = UNIT_SLOTS,
        stage_shares: Sequence[float] = (),
    ) -> "ScheduleTable":
        """Make a table from the cells of each worker.

        Args:
          rows: cells by worker and slot, as text or as tuples of ops; rows may differ in length.
          placement: (pipes, stages) worker of each stage; read off the rows if None.
          pipe_of_microbatch: (microbatches) pipe of each microbatch; pipe 0 if None.
          name: schedule name, for reports.
          slots: slot durations that the rows were drawn with.
          stage_shares: (stages) relative share of the layers on each stage; equal if empty.

        Returns:
          The table.

        Raises:
          ScheduleError: if a cell is not an op or the schedule cannot run.

        Example:
          >>> ScheduleTable.from_rows([["0F0", "0B0", "0B0"]])
          Traceback (most recent call last):
          ...
          pipejax.table.ScheduleError: op 0B0 stands twice on worker 0: in slots 1 and 2 ...
        """
        cells = _parse_rows(rows)
        try:
            if placement is None:
                placement, pipe_of_microbatch = placements.infer(cells)
        except placements.PlacementError as error:
            texts = [[format_cell(cell) for cell in row] for row in cells]
            grid = format_grid(texts, (error.worker, error.slot), MAX_SLOTS)
            raise ScheduleError(str(error), grid) from None
        if pipe_of_microbatch is None:
            last = max((op.microbatch for row in cells for cell in row for op in cell), default=-1)
            pipe_of_microbatch = np.zeros(last + 1, np.int32)
        pipe_of = np.asarray(pipe_of_microbatch, np.int32)
        return cls(
            cells=_dense(cells, 0, pipe_of),
            partners=_dense(cells, 1, pipe_of),
            placement=np.array(placement, np.int32),
            name=name,
            slots=slots,
            stage_shares=tuple(map(float, stage_shares)),
        )

    @property
    def phase(self) -> Int[NumpyArray, "workers slots"]:
        """Phase code of each cell."""
        return self.cells.phase

    @property
    def stage(self) -> Int[NumpyArray, "workers slots"]:
        """Stage of each cell."""
        return self.cells.stage

    @property
    def microbatch(self) -> Int[NumpyArray, "workers slots"]:
        """Microbatch of each cell."""
        return self.cells.microbatch

    @property
    def pipe(self) -> Int[NumpyArray, "workers slots"]:
        """Pipe of each cell."""
        return self.cells.pipe

    @property
    def num_workers(self) -> int:
        """Number of workers: rows of the table."""
        return self.cells.phase.shape[0]

    @property
    def num_slots(self) -> int:
        """Number of slots: columns of the table."""
        return self.cells.phase.shape[1]

    @property
    def num_stages(self) -> int:
        """Number of stages of one pipe."""
        return self.placement.shape[1]

    @property
    def num_pipes(self) -> int:
        """Number of pipes: two in a bidirectional schedule."""
        return self.placement.shape[0]

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches over all pipes."""
        return int(self.cells.microbatch.max(initial=NO_MICROBATCH)) + 1

    @property
    def stages_per_worker(self) -> int:
        """Largest number of stages that one pipe has on one worker."""
        return int(max(np.bincount(row).max() for row in self.placement))

    @property
    def is_split(self) -> bool:
        """Whether any backward is split into input and weight gradient."""
        return bool(np.any(self.cells.phase == Phase.W))

    @property
    def is_fused(self) -> Bool[NumpyArray, "workers slots"]:
        """Where a slot holds a forward and a backward that run as one."""
        return self.partners.phase != Phase.IDLE

    @property
    def has_communication(self) -> bool:
        """Whether the rows hold SEND and RECV cells."""
        return bool(np.isin(self.cells.phase, COMMUNICATION).any())

    @property
    def pipe_of_microbatch(self) -> placements.PipeOfMicrobatch:
        """Pipe of each microbatch."""
        pipe_of = np.zeros(self.num_microbatches, np.int32)
        held = self.cells.microbatch != NO_MICROBATCH
        pipe_of[self.cells.microbatch[held]] = self.cells.pipe[held]
        return pipe_of

    def cell(self, worker: int, slot: int) -> Cell:
        """Return the ops of one cell.

        Args:
          worker: row.
          slot: column.

        Returns:
          No op where the cell is idle, two where it holds a fused pair.
        """
        return tuple(
            Op(Phase(int(c.phase[worker, slot])), int(c.stage[worker, slot]),
               int(c.microbatch[worker, slot]))
            for c in (self.cells, self.partners)
            if c.phase[worker, slot] != Phase.IDLE
        )  # fmt: skip

    def rows(self) -> Iterator[list[Cell]]:
        """Yield the cells of each worker."""
        for worker in range(self.num_workers):
            yield [self.cell(worker, slot) for slot in range(self.num_slots)]

    def __str__(self) -> str:
        """Return the table as a grid."""
        return format_grid([[format_cell(cell) for cell in row] for row in self.rows()])

    def error(self, reason: str, worker: int, slot: int | None = None) -> ScheduleError:
        """Return an error that shows this table with a place marked.

        Args:
          reason: one line that names the op.
          worker: row to mark.
          slot: column to mark; the whole row if None.

        Returns:
          The error, for the caller to raise.
        """
        width = min(self.num_slots, MAX_SLOTS)
        start = min(max((slot or 0) - width // 2, 0), self.num_slots - width)
        texts = [
            [format_cell(self.cell(w, t)) if start <= t < start + width else ""
             for t in range(self.num_slots)]
            for w in range(self.num_workers)
        ]  # fmt: skip
        return ScheduleError(reason, format_grid(texts, (worker, slot), MAX_SLOTS))


def _parse_rows(rows: Sequence[Sequence[Cell | str]]) -> list[list[Cell]]:
    parsed = []
    for worker, row in enumerate(rows):
        cells: list[Cell] = []
        for slot, cell in enumerate(row):
            try:
                cells.append(parse_cell(cell) if isinstance(cell, str) else tuple(cell))
            except ValueError as error:
                raise ScheduleError(f"worker {worker}, slot {slot}: {error}") from None
        parsed.append(cells)
    return parsed


def _dense(rows: Sequence[Sequence[Cell]], member: int, pipe_of: NumpyArray) -> Cells:
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
            if max(stage.max(), microbatch.max()) > np.iinfo(np.int32).max:
                raise ScheduleError(f"worker {worker}: a stage or microbatch number is too large")
            cells.phase[worker, slots], cells.stage[worker, slots] = phase, stage
            cells.microbatch[worker, slots] = microbatch
            numbered = microbatch != NO_MICROBATCH
            known = numbered & (microbatch < len(pipe_of))
            pipes = np.full(len(slots), NO_PIPE)
            pipes[known] = pipe_of[microbatch[known]]
            cells.pipe[worker, slots] = pipes
    return cells


# --- what makes a schedule legal, in the order in which it is checked -------------------------


def _check_arrays(table: ScheduleTable) -> None:
    shapes = {array.shape for array in (*table.cells, *table.partners)}
    if len(shapes) != 1 or len(table.cells.phase.shape) != 2:
        raise ScheduleError(f"the arrays of a table have one shape (workers, slots), got {shapes}")
    if table.placement.ndim != 2 or 0 in table.placement.shape:
        raise ScheduleError(
            f"placement has shape (pipes, stages), got {table.placement.shape}: no stage is placed"
        )
    if len(table.stage_shares) != table.num_stages or not all(
        share > 0 and np.isfinite(share) for share in table.stage_shares
    ):
        raise ScheduleError(
            f"stage_shares needs {table.num_stages} positive numbers, got {table.stage_shares}"
        )
    if not np.isin(table.cells.phase, [Phase.IDLE, *CELL_PHASES]).all():
        wrong = int(table.cells.phase[~np.isin(table.cells.phase, [Phase.IDLE, *CELL_PHASES])][0])
        raise ScheduleError(f"{wrong} is not the code of a phase that a cell can hold")
    outside = (table.placement < 0) | (table.placement >= table.num_workers)
    if outside.any():
        pipe, stage = map(int, np.argwhere(outside)[0])
        raise ScheduleError(
            f"stage {stage} of pipe {pipe} is placed on worker {table.placement[pipe, stage]}: "
            f"the table has workers 0 to {table.num_workers - 1}"
        )


def _check_rows(table: ScheduleTable) -> None:
    for worker in range(table.num_workers):
        if not np.isin(table.cells.phase[worker], CELL_PHASES).any():
            raise table.error(f"worker {worker} has no op: every worker runs a stage", worker)
    pairs = np.argwhere(table.is_fused)
    for worker, slot in pairs:
        forward, backward = table.cells.phase[worker, slot], table.partners.phase[worker, slot]
        if forward != Phase.F or backward not in (Phase.B, Phase.I):
            cell = format_cell(table.cell(worker, slot))
            raise table.error(
                f"{cell} on worker {worker} fuses other ops than a forward and a backward",
                int(worker), int(slot),
            )  # fmt: skip


def _check_ranges(table: ScheduleTable) -> None:
    for cells in (table.cells, table.partners):
        sharding = np.isin(cells.phase, SHARDING)
        held = cells.phase != Phase.IDLE
        pipes_wrong = held & ~sharding & ((cells.pipe < 0) | (cells.pipe >= table.num_pipes))
        stage_wrong = held & ((cells.stage < 0) | (cells.stage >= table.num_stages))
        number_wrong = held & ~sharding & (cells.microbatch < 0)
        for wrong, what in (
            (stage_wrong, f"has no place: stages are 0 to {table.num_stages - 1}"),
            (number_wrong, "has no microbatch"),
            (pipes_wrong, f"belongs to no pipe: pipes are 0 to {table.num_pipes - 1}"),
        ):
            for worker, slot in np.argwhere(wrong):
                op = format_cell(table.cell(worker, slot))
                raise table.error(f"op {op} on worker {worker} {what}", int(worker), int(slot))


def _check_workers(table: ScheduleTable) -> None:
    """Every op stands on the worker of its stage, every microbatch keeps to one pipe."""
    row = np.arange(table.num_workers)[:, None]
    pipe_of = table.pipe_of_microbatch
    for cells in (table.cells, table.partners):
        held = (cells.phase != Phase.IDLE) & ~np.isin(cells.phase, SHARDING)
        should = np.where(held, table.placement[cells.pipe, cells.stage], row)
        for worker, slot in np.argwhere(should != row):
            op = format_cell(table.cell(worker, slot))
            raise table.error(
                f"op {op} stands on worker {worker}, but stage {cells.stage[worker, slot]} of "
                f"pipe {cells.pipe[worker, slot]} is placed on worker {should[worker, slot]}",
                int(worker), int(slot),
            )  # fmt: skip
        strays = held & (pipe_of[cells.microbatch] != cells.pipe)
        for worker, slot in np.argwhere(strays):
            raise table.error(
                f"microbatch {cells.microbatch[worker, slot]} is in two pipes",
                int(worker), int(slot),
            )  # fmt: skip
        sharded = np.isin(cells.phase, SHARDING)
        here = (table.placement[:, cells.stage] == row).any(axis=0)
        for worker, slot in np.argwhere(sharded & ~here):
            op = format_cell(table.cell(worker, slot))
            raise table.error(
                f"op {op} stands on worker {worker}, which does not hold that stage",
                int(worker), int(slot),
            )  # fmt: skip


def _check_once(table: ScheduleTable) -> None:
    """No op stands twice."""
    phases, stages, microbatches, flat = [], [], [], []
    for cells in (table.cells, table.partners):
        held = (cells.phase != Phase.IDLE) & ~np.isin(cells.phase, SHARDING)
        phases.append(cells.phase[held])
        stages.append(cells.stage[held])
        microbatches.append(cells.microbatch[held])
        flat.append(np.flatnonzero(held))
    phase, stage = np.concatenate(phases), np.concatenate(stages)
    microbatch, where = np.concatenate(microbatches), np.concatenate(flat)
    order = np.lexsort((where, microbatch, stage, phase))
    keys = np.stack([phase, stage, microbatch])[:, order]
    twice = np.flatnonzero((keys[:, 1:] == keys[:, :-1]).all(axis=0))
    if len(twice):
        op = Op(Phase(int(keys[0, twice[0]])), int(keys[1, twice[0]]), int(keys[2, twice[0]]))
        (first, before), (worker, slot) = (
            divmod(int(where[order[twice[0] + k]]), table.num_slots) for k in (0, 1)
        )
        place = (
            f"on worker {worker}: in slots {before} and {slot}"
            if first == worker
            else f"on worker {first} in slot {before} and on worker {worker} in slot {slot}"
        )
        raise table.error(f"op {op} stands twice {place}", worker, slot)


def _check_complete(table: ScheduleTable) -> None:
    """Every microbatch meets every stage: a forward and a whole or a split backward."""
    num_ops = int((table.cells.phase != Phase.IDLE).sum() + table.is_fused.sum())
    if table.num_stages * table.num_microbatches > num_ops:
        raise _missing(table, Phase.F)
    where = locate(table.cells, table.partners, table.num_stages, table.num_microbatches)
    has = {phase: where[phase] != NOWHERE for phase in (Phase.F, Phase.B, Phase.I, Phase.W)}
    for phase, absent, why in (
        (Phase.F, ~has[Phase.F], "there is no forward"),
        (Phase.B, ~has[Phase.B] & ~has[Phase.I] & ~has[Phase.W], "there is no backward"),
        (Phase.I, ~has[Phase.I] & has[Phase.W], "there is a weight gradient alone"),
        (Phase.W, has[Phase.I] & ~has[Phase.W], "there is an input gradient alone"),
    ):
        for stage, microbatch in np.argwhere(absent):
            op = Op(phase, int(stage), int(microbatch))
            worker = int(table.placement[table.pipe_of_microbatch[microbatch], stage])
            raise table.error(f"missing op {op} on worker {worker}: {why}", worker)
    both = has[Phase.B] & (has[Phase.I] | has[Phase.W])
    for stage, microbatch in np.argwhere(both):
        worker, slot = divmod(int(where[Phase.B][stage, microbatch]), table.num_slots)
        op = Op(Phase.B, int(stage), int(microbatch))
        raise table.error(
            f"op {op} on worker {worker} does the backward twice: it is also split into I and W",
            worker, slot,
        )  # fmt: skip


def _missing(table: ScheduleTable, phase: Phase) -> ScheduleError:
    """Name an op that a table with more stages x microbatches than ops must lack."""
    held = (table.cells.phase == phase) & ~table.is_fused | (table.cells.phase == phase)
    present = set(zip(table.stage[held].tolist(), table.microbatch[held].tolist(), strict=True))
    stage, microbatch = next(
        (s, m)
        for m in range(table.num_microbatches)
        for s in range(table.num_stages)
        if (s, m) not in present
    )
    return table.error(f"missing op {Op(phase, stage, microbatch)}: there is no forward", 0)


def _check_order(table: ScheduleTable) -> None:
    """The rows can be executed: no op waits for a later one of its row, and no cycle."""
    edges = dependencies_of(table)
    tail_worker, tail_slot = np.divmod(edges.producer, table.num_slots)
    head_worker, head_slot = np.divmod(edges.consumer, table.num_slots)
    late = (tail_worker == head_worker) & (tail_slot >= head_slot)
    for k in np.flatnonzero(late):
        worker, slot = int(head_worker[k]), int(head_slot[k])
        first, then = (format_cell(table.cell(worker, int(s))) for s in (slot, tail_slot[k]))
        raise table.error(
            f"deadlock: {first} on worker {worker} waits for {then}, which "
            + ("is the same fused pair" if tail_slot[k] == slot else "stands after it in the row"),
            worker, slot,
        )  # fmt: skip
    busy = np.flatnonzero((table.cells.phase != Phase.IDLE).ravel())
    same_row = busy[1:] // table.num_slots == busy[:-1] // table.num_slots
    tail = np.concatenate([busy[:-1][same_row], edges.producer])
    head = np.concatenate([busy[1:][same_row], edges.consumer])
    try:
        topological_order(table.cells.phase.size, tail, head)
    except CycleError as error:
        places = [divmod(cell, table.num_slots) for cell in error.cycle]
        names = [f"{format_cell(table.cell(w, t))} (worker {w})" for w, t in places]
        raise table.error(
            "deadlock: no op of this cycle can start: " + " -> ".join([*names, names[0]]),
            *places[0],
        ) from None


def _check_communication(table: ScheduleTable) -> None:
    """Each message between workers has one SEND after its producer, one RECV before its use."""
    if not table.has_communication:
        return
    messages = dependencies_of(table).messages()
    where = locate(table.cells, table.partners, table.num_stages, table.num_microbatches)
    expected: set[tuple[int, int, int]] = set()
    for k in range(len(messages.producer)):
        microbatch = int(messages.microbatch[k])
        for send, phases in ((True, (Phase.SEND_F, Phase.SEND_B)),
                             (False, (Phase.RECV_F, Phase.RECV_B))):  # fmt: skip
            phase = phases[int(messages.direction[k])]
            stage = int((messages.from_stage if send else messages.to_stage)[k])
            worker, slot = divmod(
                int((messages.producer if send else messages.consumer)[k]), table.num_slots
            )
            cell = int(where[phase][stage, microbatch])
            op, partner = Op(phase, stage, microbatch), format_cell(table.cell(worker, slot))
            if cell == NOWHERE:
                raise table.error(
                    f"missing op {op} on worker {worker}: {partner} "
                    + ("sends a message" if send else "waits for a message"),
                    worker, slot,
                )  # fmt: skip
            if (cell % table.num_slots <= slot) if send else (cell % table.num_slots >= slot):
                raise table.error(
                    f"deadlock: {op} on worker {worker} stands "
                    + (f"before {partner}, which makes its message" if send
                       else f"after {partner}, which waits for its message"),
                    worker, cell % table.num_slots,
                )  # fmt: skip
            expected.add((int(phase), stage, microbatch))
    for worker, slot in np.argwhere(np.isin(table.cells.phase, COMMUNICATION)):
        op = table.cell(worker, slot)[0]
        if tuple(map(int, op)) not in expected:
            raise table.error(
                f"op {op} on worker {worker} belongs to no message between workers",
                int(worker), int(slot),
            )  # fmt: skip


_CHECKS = (
    _check_arrays,
    _check_rows,
    _check_ranges,
    _check_workers,
    _check_once,
    _check_complete,
    _check_order,
    _check_communication,
)


def dependencies_of(table: ScheduleTable) -> Dependencies:
    """Return what waits for what in a table.

    Args:
      table: the schedule.

    Returns:
      One entry per dependency; producers and consumers are cells, worker * slots + slot.
    """
    return find_dependencies(
        table.cells, table.partners, table.placement, table.num_stages, table.num_microbatches
    )


def row_order(table: ScheduleTable, phases: Iterable[Phase]) -> Int[NumpyArray, " cells"]:
    """Return the cells that hold one of the phases, row by row in slot order.

    Args:
      table: the schedule.
      phases: phases to keep.

    Returns:
      Cells, worker * slots + slot, ascending.
    """
    return np.flatnonzero(np.isin(table.cells.phase, list(phases)).ravel())
