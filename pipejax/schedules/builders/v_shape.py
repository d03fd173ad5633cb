"""V schedules: two stages per worker, down the workers and up again, in a given part of the memory.

A building block says when the ops of one microbatch start; all others repeat it at the interval of
six ops that a worker has of each. How long an activation stays in the block is the memory that the
schedule takes, so slower blocks have fewer gaps and take more (arXiv:2405.15362). Offsets of the
published blocks are in ops of one length (F = I = W), and the order that follows from them is kept
whatever ops cost. Repeated, a block leaves the workers idle while the pipe fills and empties: the
list scheduler runs it again from its order, squeezed, and reordered where the limit leaves room.
"""

from pipejax.schedules.cells.ops import SPLIT
from pipejax.schedules.cells.placement import zigzag
from pipejax.schedules.heuristics.building_block import Waits, building_block
from pipejax.schedules.heuristics.list_scheduling import Rules, list_schedule
from pipejax.schedules.heuristics.row_order import Order
from pipejax.schedules.heuristics.timeline import Work
from pipejax.schedules.table.slot_durations import UNIT_SLOTS, Slots
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable

INTERVAL = 6  # F, I and W of two stages


def v_half(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """V schedule in half the memory of 1F1B: at F = I = W about half of its bubble.

    Forwards go down at every second op, up at every op, gradients as well: a worker holds
    P // 2 + 1 microbatches.

    Args:
      num_workers: P; each holds stages w and 2 P - 1 - w.
      num_microbatches: M.
      slots: slot durations of F, I and W, in which the table is drawn.

    Returns:
      The table, with 2 P stages.

    Raises:
      ValueError: if a count is no whole number of at least 1, or a slot duration is not above 0.

    Example:
      >>> print(v_half(2, 2))
                   0    1    2    3    4    5    6    7    8    9   10   11   12
        worker 0  0F0  0F1   .   3F0  3I0  3F1  3I1  0I0  3W0  0I1  0W0  3W1  0W1
        worker 1   .   1F0  2F0  1F1  2F1  2I0  1I0  2I1  1I1  1W0  2W0  1W1  2W1
    """
    gap = 0 if num_workers % 2 else 3  # without it, ops of even P would meet
    waits = Waits(forward=[1, 0], gradient=[0, 1], turns=[1, gap, 0])
    limit = 2 * (num_workers // 2 + 1)
    return _repeated("v-half", num_workers, num_microbatches, waits, limit, slots)


def v_min(num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS) -> ScheduleTable:
    """V schedule in a third of the memory of 1F1B: at F = I = W about two thirds of its bubble.

    A microbatch goes its way without a wait: a worker holds (P + 4) // 3 microbatches.

    Args:
      num_workers: P; each holds stages w and 2 P - 1 - w.
      num_microbatches: M.
      slots: slot durations of F, I and W, in which the table is drawn.

    Returns:
      The table, with 2 P stages.

    Raises:
      ValueError: if a count is no whole number of at least 1, or a slot duration is not above 0.

    Example:
      >>> print(v_min(2, 2))
                   0    1    2    3    4    5    6    7    8    9   10   11   12   13   14
        worker 0  0F0   .    .   3F0  3I0  0F1  3W0  0I0  0W0  3F1  3I1  3W1   .   0I1  0W1
        worker 1   .   1F0  2F0   .    .   2I0  1I0  1F1  2F1  1W0  2W0  2I1  1I1  1W1  2W1
    """
    gap = 0 if num_workers % 3 else 2  # without it, ops of P = 3, 6, 9, .. would meet
    waits = Waits(forward=[0, 0], gradient=[0, 0], turns=[0, gap, 0])
    limit = 2 * ((num_workers + 4) // 3)
    return _repeated(
        "v-min", num_workers, num_microbatches, waits, limit, slots, runs_ahead=gap > 0
    )


def _repeated(
    name: str,
    workers: int,
    microbatches: int,
    waits: Waits,
    limit: int,
    slots: Slots,
    *,
    runs_ahead: bool = True,
) -> ScheduleTable:
    """Repeat a block of ops that take one slot each; `limit` counts activations of one stage.

    Where a block has no wait at all, running ahead of it makes microbatches meet later.
    """
    work = v_work(workers, microbatches, limit)
    block = building_block(work, waits, INTERVAL)
    order = Order(block, INTERVAL / 2, True, runs_ahead, prefers_weights=False)
    run = list_schedule(work, Rules(order=order))
    assert run is not None  # in its own limit a block can run
    return spread_rows(name, run.rows(), slots, zigzag(workers))


def v_work(workers: int, microbatches: int, limit: float) -> Work:
    """All ops on a V placement, each of one slot, without messages; W frees an activation."""
    placement = zigzag(workers).tolist()
    ones, none = [1] * (2 * workers), [[[0] * (2 * workers - 1)]] * 2
    lasts = dict.fromkeys(SPLIT, ones)
    return Work(placement, [0] * microbatches, lasts, none, none, ones, ones, [limit] * workers)
