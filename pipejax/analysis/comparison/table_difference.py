"""What two tables do differently: order, workers, split phases, cells of communication."""

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
    """How the rows of one worker differ."""

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
    """What two tables do differently."""

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
        return sum(one for one, _ in counts), sum(other for _, other in counts)

    @property
    def is_none(self) -> bool:
        """Whether there is no difference but idle slots."""
        return not (self.sizes or self.rows or self.other_placement)


def table_difference(one: ScheduleTable, other: ScheduleTable) -> TableDifference:
    """Compare two tables, cell by cell, whatever their sizes are."""
    tables = (one, other)
    if one.grammar.slices != other.grammar.slices:
        raise MismatchError(
            f"{one.name} has {one.grammar.slices} slices of a microbatch, {other.name} "
            f"{other.grammar.slices}: no op of one is one of the other"
        )
    rows = [_rows(one), _rows(other, one.grammar)]
    worker_of = [_workers(each) for each in rows]
    both = worker_of[0].keys() & worker_of[1].keys()
    alone = [[op for op in of if op not in both] for of in worker_of]
    counts = [Counter(op.phase for op in ops) for ops in alone]
    shared = range(min(table.num_workers for table in tables))
    found = (_row_difference(worker, rows[0][worker], rows[1][worker]) for worker in shared)
    sizes = {
        name: (getattr(one, f"num_{name}"), getattr(other, f"num_{name}"))
        for name in ("workers", "stages", "microbatches")
    }
    moved = {
        op: (worker_of[0][op], worker_of[1][op])
        for op in worker_of[0]
        if op in both and worker_of[0][op] != worker_of[1][op]
    }
    split = [_split(alone[place], worker_of[1 - place]) for place in range(2)]
    fused = [sum(len(cell) == 2 for row in each for cell in row) for each in rows]
    return TableDifference(
        sizes={name: pair for name, pair in sizes.items() if pair[0] != pair[1]},
        rows=[row for row in found if row is not None],
        moved=moved,
        split=(split[0], split[1]),
        fused=(fused[0], fused[1]),
        only={
            phase: (counts[0][phase], counts[1][phase])
            for phase in sorted(counts[0] | counts[1], key=int)
        },
        other_placement=_pipes(one) != _pipes(other),
    )


def row_exchanges(
    one: ScheduleTable, other: ScheduleTable, workers: Sequence[int], costs: Costs, link: Links
) -> Iterator[float | None]:
    """Yield the makespan [s] of `one` with one worker's row of `other`, each worker in turn."""
    rows, others = _rows(one), _rows(other, one.grammar)
    for worker in workers:
        exchanged = [*rows[:worker], others[worker], *rows[worker + 1 :]]
        try:
            yield evaluate(one.with_rows(exchanged), costs, link=link).makespan
        except ScheduleError:
            yield None


def _rows(table: ScheduleTable, like: Grammar = USUAL) -> list[list[Cell]]:
    """Cells by row; kinds of its own are those of another grammar that has such letters."""
    if not table.grammar.own:
        return [[cell for cell in row if cell] for row in table.rows()]
    known = {p: cast(Phase, like.by_letters.get(p.name, p)) for p in table.grammar.phases}
    return [
        [tuple(op._replace(phase=known[op.phase]) for op in cell) for cell in row if cell]
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
    worker: int, one: Sequence[Cell], other: Sequence[Cell]
) -> RowDifference | None:
    if list(one) == list(other):
        return None
    first = next(
        (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    sequences = [_numbered(row) for row in (one, other)]
    place = {op: k for k, op in enumerate(sequences[1])}
    shared = [place[op] for op in sequences[0] if op in place]
    reordered = len(shared) - _longest_ascent(shared)
    only = (len(sequences[0]) - len(shared), len(sequences[1]) - len(shared))
    return RowDifference(worker, first, (one, other), reordered, only)


def _numbered(row: Sequence[Cell]) -> list[tuple[Op, int]]:
    """Ops of a row; those of sharding, which come again, by which time it is."""
    seen: Counter[Op] = Counter()
    found = []
    for cell in row:
        for op in cell:
            found.append((op, seen[op]))
            seen[op] += op.microbatch == NO_MICROBATCH
    return found


def _longest_ascent(numbers: Sequence[int]) -> int:
    """Length of the longest ascending part of a sequence of different numbers."""
    least: list[int] = []  # last number of the best ascent of each length
    for number in numbers:
        place = bisect_left(least, number)
        least[place : place + 1] = [number]
    return len(least)
