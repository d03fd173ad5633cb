"""1F1B: warm-up, then one forward and one backward in turn, then cool-down."""

from collections.abc import Iterator, Mapping, Sequence

from pipejax.schedules.cells.ops import Cell, Op, Phase
from pipejax.schedules.cells.placement import looped
from pipejax.schedules.table.slot_durations import UNIT_SLOTS
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import ScheduleTable


def alternate(forwards: Sequence[Op], backwards: Sequence[Op], warmup: int) -> Iterator[Cell]:
    """Yield `warmup` forwards, then forward and backward in turn, then the rest.

    Args:
      forwards: forwards of a worker in order.
      backwards: as many backwards in order.
      warmup: forwards before the first turn, at most all of them.

    Yields:
      Cells of the worker's row.

    Example:
      >>> forwards, backwards = [[Op(p, 0, m) for m in range(3)] for p in (Phase.F, Phase.B)]
      >>> " ".join(str(op) for (op,) in alternate(forwards, backwards, 1))
      '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    warmup = min(warmup, len(forwards))
    for op in forwards[:warmup]:
        yield (op,)
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield (forward,)
        yield (backward,)
    for op in backwards[len(forwards) - warmup :]:
        yield (op,)


def _build(
    name: str, per_hop: int, workers: int, microbatches: int, slots: Mapping[str, float]
) -> ScheduleTable:
    """One stage per worker; worker r warms up with `per_hop` forwards per worker after it."""
    rows = [
        list(
            alternate(
                [Op(Phase.F, r, m) for m in range(microbatches)],
                [Op(Phase.B, r, m) for m in range(microbatches)],
                per_hop * (workers - r - 1),
            )
        )
        for r in range(workers)
    ]
    return spread(ScheduleTable.from_rows(rows, placement=looped(workers), name=name, slots=slots))


def one_f_one_b(
    num_workers: int, num_microbatches: int, *, slots: Mapping[str, float] = UNIT_SLOTS
) -> ScheduleTable:
    """One forward, one backward in turn; worker r holds at most P - r microbatches.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      slots: slot durations of F and B.

    Returns:
      The table.

    Raises:
      ScheduleError: if a count is below 1 or a slot duration is not above 0.

    Example:
      >>> print(one_f_one_b(2, 2, slots={"F": 1, "B": 1}))
                   0    1    2    3    4    5
        worker 0  0F0  0F1   .   0B0   .   0B1
        worker 1   .   1F0  1B0  1F1  1B1   .
    """
    return _build("1f1b", 1, num_workers, num_microbatches, slots)


def eager_1f1b(
    num_workers: int, num_microbatches: int, *, slots: Mapping[str, float] = UNIT_SLOTS
) -> ScheduleTable:
    """1F1B with a warm-up twice as long, so that messages overlap with compute.

    Args:
      num_workers: P; one stage each.
      num_microbatches: M.
      slots: slot durations of F and B.

    Returns:
      The table.

    Raises:
      ScheduleError: if a count is below 1 or a slot duration is not above 0.

    Example:
      >>> from pipejax.schedules.table.held_activations import peak_in_flight
      >>> peak_in_flight(eager_1f1b(4, 8)).tolist()
      [7, 5, 3, 1]
    """
    return _build("eager-1f1b", 2, num_workers, num_microbatches, slots)
