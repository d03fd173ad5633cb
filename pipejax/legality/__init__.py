"""What makes a schedule legal. A table runs these checks when it is made, in this order."""

from collections.abc import Callable

from pipejax.cells import Content
from pipejax.legality.arrays import check_arrays, check_ranges, check_rows
from pipejax.legality.illegal import IllegalSchedule
from pipejax.legality.ops import check_complete, check_once, check_workers
from pipejax.legality.order import check_communication, check_order
from pipejax.legality.updates import check_updates

__all__ = ["RULES", "IllegalSchedule", "check"]

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
    """Check a schedule completely.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: for the first check that fails; the reason names the op.

    Example:
      >>> import dataclasses, numpy as np
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"]]).content
      >>> check(dataclasses.replace(content, placement=np.array([[3]])))
      Traceback (most recent call last):
      pipejax.legality.illegal.IllegalSchedule: stage 0 of pipe 0 is placed on worker 3: ...
    """
    for rule in RULES:
        rule(content)
