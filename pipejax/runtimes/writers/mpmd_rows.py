"""What runtimes that dispatch one program per worker have in common: F, B, I, W, one pipe.

Their schedules are objects of Python, so a table becomes a module: its rows as literals, and the
few lines that make objects of them.
"""

import warnings
from collections.abc import Iterable, Sequence

from pipejax.schedules.cells.ops import CELL_PHASES, SPLIT, Cell, Op, Phase
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable, check_usual, without
from pipejax.schedules.table.table_files import LossWarning

# Cells that a runtime has no word for: left out when a table is written for it, with a warning.


def with_known_cells(
    table: ScheduleTable, unknown: tuple[Phase, ...], runtime: str
) -> ScheduleTable:
    """Leave out cells of phases that a runtime does not have; the table itself if it has none."""
    count = {phase: int((table.phase == phase).sum()) for phase in unknown}
    found = ", ".join(f"{count[phase]} {phase.name}" for phase in unknown if count[phase])
    if not found:
        return table
    later = ": it updates after the whole table" * table.updates_within
    warnings.warn(
        f"{found} cells are left out, {runtime} has none{later}; --format json keeps them",
        LossWarning,
        stacklevel=2,
    )
    return spread(without(table, unknown))


UNKNOWN = tuple(p for p in CELL_PHASES if p not in (*SPLIT, Phase.B))


def checked(table: ScheduleTable, runtime: str) -> ScheduleTable:
    """Leave out what the runtime has no word for, with a warning; refuse several pipes."""
    # And a grammar of its own, which says more than cells do.
    check_usual(table, runtime)
    if table.num_pipes > 1:
        raise ValueError(
            f"{runtime} places each stage on one worker, but {table.name} has {table.num_pipes} "
            "pipes; --format json holds them"
        )
    return with_known_cells(table, UNKNOWN, runtime)


def splits(table: ScheduleTable) -> bool:
    """Whether any backward is split into I and W."""
    return bool((table.where[Phase.I] >= 0).any())


def halves(op: Op, *, split: bool) -> tuple[Op, ...]:
    """Return I and W for a whole backward where the runtime splits all of them."""
    if op.phase is not Phase.B or not split:
        return (op,)
    return op._replace(phase=Phase.I), op._replace(phase=Phase.W)


def ops_in(cell: Cell, *, split: bool) -> list[Op]:
    """List what a cell runs."""
    return [half for op in cell for half in halves(op, split=split)]


def literal(rows: Iterable[Sequence[object]]) -> str:
    """Write rows as a list in Python, a line each."""
    return "[\n" + "".join(f"    {row!r},\n" for row in rows) + "]"


def title(table: ScheduleTable, runtime: str) -> str:
    """Say in the first line of a module what it holds; a name of the user's may hold anything."""
    name = table.name.encode("unicode_escape").decode().replace('"', "'")
    sizes = f"{table.num_workers} workers, {table.num_stages} stages"
    return (
        f"{name}, {sizes}, {table.num_microbatches} microbatches, written by pipejax for {runtime}"
    )
