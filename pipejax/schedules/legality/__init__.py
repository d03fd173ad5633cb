"""What makes a schedule legal. A table runs these checks when it is made, in this order."""

from collections.abc import Callable

from pipejax.schedules.cells.cells import Content
from pipejax.schedules.legality.arrays import check_arrays, check_ranges, check_rows
from pipejax.schedules.legality.completeness import check_complete, check_once, check_workers
from pipejax.schedules.legality.deadlock import check_communication, check_order
from pipejax.schedules.legality.updates import check_updates

__all__ = ["RULES", "check"]

RULES: tuple[Callable[[Content], None], ...] = (
    check_arrays,
    check_rows,
    check_ranges,
    check_workers,
    check_once,
    check_complete,
    check_order,
    check_updates,
    check_communication,
)


def check(content: Content) -> None:
    """Check a schedule completely."""
    for rule in RULES:
        rule(content)
