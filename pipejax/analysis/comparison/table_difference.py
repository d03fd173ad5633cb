"""Differences of two tables: order, workers, split phases, cells of communication."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.checks import MismatchError
from pipejax.base.display import short_repr
from pipejax.costs.costs import Costs
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import (
    COMMUNICATION,
    NO_MICROBATCH,
    NO_STAGE,
    AnyPhase,
    Cell,
    Op,
    Phase,
    ScheduleError,
)
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

Rows = Sequence[Sequence[Cell]]


class RowDifference(NamedTuple):
    """Differences between two rows of one worker."""

    worker: int
    first: int  # number of equal cells before the first that differs
    cells: tuple[Sequence[Cell], Sequence[Cell]]  # cells of both rows, idle slots left out
    reordered: int  # of the ops that both rows have, how many stand in another order, at least
    only: tuple[int, int]  # how many ops one of the two rows has alone, in both tables' order

    def around(self, count: int) -> Iterator[tuple[int, Sequence[Cell]]]:
        """Yield for both rows the cells around the first that differs, and where that is."""
        begin = max(self.first - count, 0)
        for row in self.cells:
            yield self.first - begin, row[begin : self.first + count + 1]


@short_repr
class TableDifference(NamedTuple):
    """Differences between two tables."""

    # workers, stages and microbatches where the tables differ in one of them, by name
    sizes: Mapping[str, tuple[int, int]]
    # workers whose rows differ; workers that only one table has are left out
    rows: Sequence[RowDifference]
    moved: Mapping[Op, tuple[int, int]]  # ops that both have on different workers, with the two
    # backwards (stage, microbatch) that one table does as B and the other as I and W, by which
    # of the tables splits them
    split: tuple[int, int]
    fused: tuple[int, int]  # pairs that run as one op, in both tables
    # ops of a phase that one table has alone, in both tables' order
    only: Mapping[AnyPhase, tuple[int, int]]
    # whether a stage lies on another worker, or a microbatch goes another way
    other_placement: bool

    @property
    def communication(self) -> tuple[int, int]:
        """Cells of communication that one table has alone, in both tables' order."""
        counts = [self.only.get(phase, (0, 0)) for phase in COMMUNICATION]
        return sum(first for first, _ in counts), sum(second for _, second in counts)

    @property
    def is_none(self) -> bool:
        """Return whether the tables differ in idle slots at most."""
        return not (self.sizes or self.rows or self.other_placement)


def table_difference(first: ScheduleTable, second: ScheduleTable) -> TableDifference:
    """Compare two tables, cell by cell, whatever their sizes are."""
    tables = (first, second)
    if first.grammar.slices != second.grammar.slices:
        raise MismatchError(
            f"{first.name} has {first.grammar.slices} slices of a microbatch, {second.name} "
            f"{second.grammar.slices}: no op of one is one of the other"
        )
    rows = [_rows(first), _rows(second, first.grammar)]
    workers_by_op = [_workers(table_rows) for table_rows in rows]
    both = workers_by_op[0].keys() & workers_by_op[1].keys()
    alone = [[op for op in workers if op not in both] for workers in workers_by_op]
    counts = [Counter(op.phase for op in ops) for ops in alone]
    shared = range(min(table.num_workers for table in tables))
    differences = (_row_difference(worker, rows[0][worker], rows[1][worker]) for worker in shared)
    sizes = {
        name: (getattr(first, f"num_{name}"), getattr(second, f"num_{name}"))
        for name in ("workers", "stages", "microbatches")
    }
    moved = {
        op: (workers_by_op[0][op], workers_by_op[1][op])
        for op in workers_by_op[0]
        if op in both and workers_by_op[0][op] != workers_by_op[1][op]
    }
    split = [_split(alone[place], workers_by_op[1 - place]) for place in range(2)]
    fused = [sum(len(cell) == 2 for row in table_rows for cell in row) for table_rows in rows]
    return TableDifference(
        sizes={name: pair for name, pair in sizes.items() if pair[0] != pair[1]},
        rows=[row for row in differences if row is not None],
        moved=moved,
        split=(split[0], split[1]),
        fused=(fused[0], fused[1]),
        only={
            phase: (counts[0][phase], counts[1][phase])
            for phase in sorted(counts[0] | counts[1], key=int)
        },
        other_placement=_pipes(first) != _pipes(second),
    )


def row_exchanges(
    table: ScheduleTable, other: ScheduleTable, workers: Sequence[int], costs: Costs, link: Links
) -> Iterator[float | None]:
    """Yield the makespan [s] of `table` with one worker's row from `other`, worker by worker."""
    rows, others = _rows(table), _rows(other, table.grammar)
    for worker in workers:
        exchanged = [*rows[:worker], others[worker], *rows[worker + 1 :]]
        try:
            yield evaluate(table.with_rows(exchanged), costs, link=link).makespan
        except ScheduleError:
            yield None


def _rows(table: ScheduleTable, like: Grammar = USUAL) -> list[list[Cell]]:
    """Return the cells by row; kinds of the table's own become those of grammar `like`."""
    if not table.grammar.custom_phases:
        return [[cell for cell in row if cell] for row in table.rows()]
    phases = {p: cast(Phase, like.by_letters.get(p.name, p)) for p in table.grammar.phases}
    return [
        [tuple(op._replace(phase=phases[op.phase]) for op in cell) for cell in row if cell]
        for row in table.rows()
    ]


def _workers(rows: Rows) -> dict[Op, int]:
    """Worker of each op of a microbatch, and of the sharding of each stage."""
    return {
        op if op.stage != NO_STAGE else op._replace(stage=worker): worker
        for worker, row in enumerate(rows)
        for cell in row
        for op in cell
    }


def _pipes(table: ScheduleTable) -> list[list[int]]:
    """Workers of the stages that each microbatch goes through."""
    return [table.placement[pipe].tolist() for pipe in table.pipe_of_microbatch.tolist()]


def _split(alone: Sequence[Op], other: Mapping[Op, int]) -> int:
    """Count backwards that are split here, and whole in the other table."""
    return sum(op.phase is Phase.I and op._replace(phase=Phase.B) in other for op in alone)


def _row_difference(
    worker: int, first: Sequence[Cell], second: Sequence[Cell]
) -> RowDifference | None:
    if list(first) == list(second):
        return None
    position = next(
        (k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    sequences = [_numbered(row) for row in (first, second)]
    place = {op: k for k, op in enumerate(sequences[1])}
    shared = [place[op] for op in sequences[0] if op in place]
    reordered = len(shared) - _longest_ascent(shared)
    only = (len(sequences[0]) - len(shared), len(sequences[1]) - len(shared))
    return RowDifference(worker, position, (first, second), reordered, only)


def _numbered(row: Sequence[Cell]) -> list[tuple[Op, int]]:
    """Number equal ops of a row, from 0: ops of sharding come again."""
    seen: Counter[Op] = Counter()
    numbered = []
    for cell in row:
        for op in cell:
            numbered.append((op, seen[op]))
            seen[op] += op.microbatch == NO_MICROBATCH
    return numbered


def _longest_ascent(numbers: Sequence[int]) -> int:
    """Length of the longest ascending part of a sequence of different numbers."""
    least: list[int] = []  # last number of the best ascent of each length
    for number in numbers:
        place = bisect_left(least, number)
        least[place : place + 1] = [number]
    return len(least)
