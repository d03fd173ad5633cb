"""Chimera: two pipes that run against each other, so that one fills the other's idle slots.

Every worker holds two stages, one of the down pipe and one of the up pipe; every stage has two
copies, whose gradients are added at the end of the step. Half of the microbatches go down, half
up. The published schedule is drawn with F = B = 1 slot; with other slot durations the rows come
out in another order, which may suit real durations better.
"""

from collections.abc import Mapping, Sequence

from pipejax.schedules.cells.placement import bidirectional
from pipejax.schedules.heuristics.plan_table import admission_table
from pipejax.schedules.table.slot_durations import EQUAL_SLOTS
from pipejax.schedules.table.table import ScheduleTable


def chimera(
    num_workers: int, num_microbatches: int, *, slots: Mapping[str, float] = EQUAL_SLOTS
) -> ScheduleTable:
    """Two pipes against each other; fewer idle slots, two copies of every stage.

    Args:
      num_workers: P, even; each worker holds stage w of one pipe and P - 1 - w of the other.
      num_microbatches: M, even; microbatches alternate between the pipes. Each pipe keeps at
        most P of them active, 1F1B's own limit.
      slots: slot durations of F and B.

    Returns:
      The table, with P stages in two pipes.

    Raises:
      ValueError: if P or M is odd.

    Example:
      >>> print(chimera(2, 2))
                   0    1    2    3
        worker 0  0F0  1F1  1B1  0B0
        worker 1  0F1  1F0  1B0  0B1
    """
    return _bidirectional("chimera", num_workers, num_microbatches, (1.0,) * num_workers, slots)


def chimera_asymmetric(
    num_workers: int,
    num_microbatches: int,
    *,
    stage_shares: Sequence[float] | None = None,
    slots: Mapping[str, float] = EQUAL_SLOTS,
) -> ScheduleTable:
    """Chimera with unequal layer shares: by default 1:2 between the two stages of a worker.

    The early stages, which hold most microbatches, get the smaller share, so every worker has
    one small and one large stage and the same work.

    Args:
      num_workers: P, even.
      num_microbatches: M, even.
      stage_shares: (P) share of the layers on each stage, in any unit; 1 for the first half of
        the stages and 2 for the second if None.
      slots: slot durations of F and B on a stage of mean size.

    Returns:
      The table, with P stages in two pipes.

    Raises:
      ValueError: if P or M is odd.

    Example:
      >>> chimera_asymmetric(4, 4).stage_shares
      (0.666..., 0.666..., 1.333..., 1.333...)
    """
    _check_even(num_workers, num_microbatches, "chimera-asymmetric")
    if stage_shares is None:
        stage_shares = [1.0] * (num_workers // 2) + [2.0] * (num_workers // 2)
    mean = sum(stage_shares) / num_workers
    shares = tuple(share / mean for share in stage_shares)
    return _bidirectional("chimera-asymmetric", num_workers, num_microbatches, shares, slots)


def _check_even(num_workers: int, num_microbatches: int, name: str) -> None:
    if num_workers % 2:
        raise ValueError(
            f"{name} needs an even number of workers (2, 4, 6, ...), got {num_workers}: "
            "the two pipes meet in the middle"
        )
    if num_microbatches % 2:
        raise ValueError(
            f"{name} needs an even number of microbatches (2, 4, 6, ...), got "
            f"{num_microbatches}: half go down, half go up"
        )


def _bidirectional(
    name: str,
    num_workers: int,
    num_microbatches: int,
    shares: tuple[float, ...],
    slots: Mapping[str, float],
) -> ScheduleTable:
    _check_even(num_workers, num_microbatches, name)
    return admission_table(
        name,
        bidirectional(num_workers),
        [m % 2 for m in range(num_microbatches)],
        in_flight_limit=num_workers,
        slots=slots,
        stage_shares=shares,
    )
