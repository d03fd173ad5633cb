"""Differences between two tables: order and workers of ops, split backwards, messages."""

import itertools
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
    """Differences between a worker's rows in two tables."""

    worker: int
    first: int  # number of equal cells before the first that differs
    cells: tuple[Sequence[Cell], Sequence[Cell]]  # cells of both rows without idle slots
    reordered: int  # smallest number of shared ops whose move makes their order equal
    only: tuple[int, int]  # number of ops that only the first, or only the second row has

    def around(self, count: int) -> Iterator[tuple[int, Sequence[Cell]]]:
        """Yield (index of the first difference, cells around it) for the row of each table."""
        begin = max(self.first - count, 0)
        for row in self.cells:
            yield self.first - begin, row[begin : self.first + count + 1]


@short_repr
class TableDifference(NamedTuple):
    """Differences between two tables."""

    # pairs hold the value of the first table, then that of the second
    sizes: Mapping[str, tuple[int, int]]  # {workers, stages or microbatches: numbers that differ}
    rows: Sequence[RowDifference]  # workers of both tables whose rows differ
    moved: Mapping[Op, tuple[int, int]]  # {op that runs on different workers: its workers}
    split: tuple[int, int]  # numbers of backwards that only this table splits
    fused: tuple[int, int]  # numbers of fused pairs
    only: Mapping[AnyPhase, tuple[int, int]]  # {phase: numbers of ops that only this table has}
    other_placement: bool  # whether stages are on other workers, or microbatches in other pipes

    @property
    def communication(self) -> tuple[int, int]:
        """Return the numbers of communication cells that only the first, only the second has."""
        counts = [self.only.get(phase, (0, 0)) for phase in COMMUNICATION]
        return sum(first for first, _ in counts), sum(second for _, second in counts)

    @property
    def is_none(self) -> bool:
        """Return whether the tables are equal, apart from idle slots."""
        return not (self.sizes or self.rows or self.other_placement)


def table_difference(first: ScheduleTable, second: ScheduleTable) -> TableDifference:
    """Compare two tables cell by cell; their sizes may differ."""
    if first.grammar.slices != second.grammar.slices:
        raise MismatchError(
            f"{first.name} has {first.grammar.slices} slices of a microbatch, {second.name} "
            f"{second.grammar.slices}: no op of one is one of the other"
        )
    rows, other_rows = _rows(first), _rows(second, first.grammar)
    workers, other_workers = _workers(rows), _workers(other_rows)
    only_first = [op for op in workers if op not in other_workers]
    only_second = [op for op in other_workers if op not in workers]
    counts, other_counts = (Counter(op.phase for op in ops) for ops in (only_first, only_second))
    worker_pairs = {op: (worker, other_workers.get(op, worker)) for op, worker in workers.items()}
    sizes = {
        name: (getattr(first, f"num_{name}"), getattr(second, f"num_{name}"))
        for name in ("workers", "stages", "microbatches")
    }
    differences = map(_row_difference, range(len(rows)), rows, other_rows)  # of shared workers
    return TableDifference(
        sizes={name: (a, b) for name, (a, b) in sizes.items() if a != b},
        rows=[row for row in differences if row is not None],
        moved={op: (a, b) for op, (a, b) in worker_pairs.items() if a != b},
        split=(_count_split(only_first, other_workers), _count_split(only_second, workers)),
        fused=(_count_fused(rows), _count_fused(other_rows)),
        only={
            phase: (counts[phase], other_counts[phase])
            for phase in sorted(counts | other_counts, key=int)
        },
        other_placement=_pipes(first) != _pipes(second),
    )


def row_exchanges(
    table: ScheduleTable, other: ScheduleTable, workers: Sequence[int], costs: Costs, link: Links
) -> Iterator[float | None]:
    """Yield `table`'s makespan [s] with a worker's row from `other`; None for an illegal table."""
    rows, other_rows = _rows(table), _rows(other, table.grammar)
    for worker in workers:
        new_rows = [*rows[:worker], other_rows[worker], *rows[worker + 1 :]]
        try:
            yield evaluate(table.with_rows(new_rows), costs, link=link).makespan
        except ScheduleError:
            yield None


def _rows(table: ScheduleTable, like: Grammar = USUAL) -> list[list[Cell]]:
    """Return cells by row without idle slots, with the phase codes of grammar `like`."""
    # Tables may number their own phases differently; with equal codes their ops can be compared.
    rows = [[cell for cell in row if cell] for row in table.rows()]
    if not table.grammar.custom_phases:
        return rows
    phases = {p: cast(Phase, like.by_letters.get(p.name, p)) for p in table.grammar.phases}
    return [
        [tuple(op._replace(phase=phases[op.phase]) for op in cell) for cell in row] for row in rows
    ]


def _count_fused(rows: Rows) -> int:
    return sum(len(cell) == 2 for row in rows for cell in row)


def _workers(rows: Rows) -> dict[Op, int]:
    """Return the worker of each op; ops without a stage get the worker's number as stage."""
    workers: dict[Op, int] = {}
    for worker, row in enumerate(rows):
        for op in itertools.chain(*row):
            key = op._replace(stage=worker) if op.stage == NO_STAGE else op
            workers[key] = worker
    return workers


def _pipes(table: ScheduleTable) -> list[list[int]]:
    """Return the workers of all stages that each microbatch visits."""
    return [table.placement[pipe].tolist() for pipe in table.pipe_of_microbatch.tolist()]


def _count_split(ops: Sequence[Op], other_workers: Mapping[Op, int]) -> int:
    """Count backwards that are split into I and W in `ops`, but whole (B) in the other table."""
    return sum(op.phase is Phase.I and op._replace(phase=Phase.B) in other_workers for op in ops)


def _row_difference(
    worker: int, first: Sequence[Cell], second: Sequence[Cell]
) -> RowDifference | None:
    """Compare a worker's rows in two tables; return None if the rows are equal."""
    # Example: rows a b c d and c a d e. The shared ops a c d have positions 1 0 2 in the second
    # row. At most two of these positions ascend, so one op is reordered.
    if list(first) == list(second):
        return None
    position = next(
        (k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    ops, other_ops = _numbered(first), _numbered(second)
    position_by_op = {op: k for k, op in enumerate(other_ops)}
    shared_positions = [position_by_op[op] for op in ops if op in position_by_op]
    num_shared = len(shared_positions)
    reordered = num_shared - _longest_ascent(shared_positions)
    only = (len(ops) - num_shared, len(other_ops) - num_shared)
    return RowDifference(worker, position, (first, second), reordered, only)


def _numbered(row: Sequence[Cell]) -> list[tuple[Op, int]]:
    """Return (op, number of equal ops before it in the row) for each op of a row."""
    # only ops without a microbatch repeat, such as sharding ops of a stage
    counts: Counter[Op] = Counter()
    numbered = []
    for op in itertools.chain(*row):
        numbered.append((op, counts[op]))
        if op.microbatch == NO_MICROBATCH:
            counts[op] += 1
    return numbered


def _longest_ascent(numbers: Sequence[int]) -> int:
    """Return the length of the longest ascending subsequence of distinct numbers."""
    # smallest_last[k] is the smallest last number of an ascending subsequence of length k + 1.
    # Numbers 3 1 2 give [3], then [1], then [1 2].
    smallest_last: list[int] = []
    for number in numbers:
        length = bisect_left(smallest_last, number)
        smallest_last[length : length + 1] = [number]
    return len(smallest_last)
