"""The idealised table: the schedule run in slots, without messages.

This is the middle one of the three levels that the literature compares (formula, table,
communication-aware run). Builders use it to draw a table with its idle slots, and the rendezvous
link model to order transfers where a table does not say how.
"""

from collections.abc import Mapping

import numpy as np

from pipejax.graph import topological_order
from pipejax.ops import EXECUTED, Phase
from pipejax.shapes import Float, NumpyArray
from pipejax.table import ScheduleTable, dependencies_of, row_order

MOST_IDLE = 64  # columns per distinct start beyond which a table is drawn without its scale


def slot_times(
    table: ScheduleTable, slots: Mapping[str, float] | None = None, *, shares: bool = True
) -> tuple[Float[NumpyArray, "workers slots"], Float[NumpyArray, "workers slots"]]:
    """Run a table without messages, each op as early as it can.

    Args:
      table: the schedule.
      slots: duration of each phase letter in slots; those of the table if None. A fused pair
        takes the sum.
      shares: whether a stage with more layers takes more, by the table's stage shares.

    Returns:
      (workers, slots) start and finish of each cell [slots]; 0 where a cell is idle.

    Example:
      >>> from pipejax import schedules
      >>> table = schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> _, finish = slot_times(table, {"F": 1, "B": 1})
      >>> float(finish.max())
      6.0
    """
    duration = _durations(table, table.slots if slots is None else slots, shares)
    cells = row_order(table, EXECUTED)
    edges = dependencies_of(table)
    same_row = cells[1:] // table.num_slots == cells[:-1] // table.num_slots
    tail = np.concatenate([cells[:-1][same_row], edges.producer])
    head = np.concatenate([cells[1:][same_row], edges.consumer])
    waits_for: dict[int, list[int]] = {}
    for u, v in zip(tail.tolist(), head.tolist(), strict=True):
        waits_for.setdefault(v, []).append(u)
    start, finish = [0.0] * duration.size, [0.0] * duration.size
    lasts = duration.ravel().tolist()
    for cell in topological_order(duration.size, tail, head):
        start[cell] = max((finish[u] for u in waits_for.get(cell, ())), default=0.0)
        finish[cell] = start[cell] + lasts[cell]
    return np.reshape(start, duration.shape), np.reshape(finish, duration.shape)


def _durations(
    table: ScheduleTable, slots: Mapping[str, float], shares: bool
) -> Float[NumpyArray, "workers slots"]:
    """Slots that each cell takes."""
    by_phase = np.array([slots.get(phase.name, 0) for phase in Phase], float)
    share = np.append(
        table.stage_shares if shares else np.ones(table.num_stages), 0.0
    )  # the last entry serves idle cells
    return sum(
        (by_phase[cells.phase] * share[cells.stage] for cells in (table.cells, table.partners)),
        np.zeros(table.cells.phase.shape),
    )


def spread(table: ScheduleTable) -> ScheduleTable:
    """Draw a table with its idle slots: every op in the column of its start.

    Args:
      table: the schedule; only the order of its rows matters.

    Returns:
      The same schedule. A column is one slot where all starts are whole numbers and not far
      apart; otherwise there is one column per distinct start.

    Example:
      >>> table = ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]], slots={"B": 1})
      >>> print(spread(table))
                 0    1    2    3
        worker 0 0F0   .    .   0B0
        worker 1  .   1F0  1B0   .
    """
    start, _ = slot_times(table)
    held = table.cells.phase != Phase.IDLE
    times, rank = np.unique(start[held], return_inverse=True)
    is_to_scale = np.all(times == np.round(times)) and times.max() <= MOST_IDLE * len(times)
    column = times[rank].astype(int) if is_to_scale else rank
    shape = (table.num_workers, int(column.max()) + 1)
    worker = np.nonzero(held)[0]

    def move(array: NumpyArray, empty: int) -> NumpyArray:
        moved = np.full(shape, empty, np.int32)
        moved[worker, column] = array[held]
        return moved

    def move_all(cells: tuple[NumpyArray, ...]) -> list[NumpyArray]:
        return [move(array, Phase.IDLE if k == 0 else -1) for k, array in enumerate(cells)]

    return ScheduleTable(
        type(table.cells)(*move_all(table.cells)),
        type(table.partners)(*move_all(table.partners)),
        table.placement.copy(),
        table.name,
        table.slots,
        table.stage_shares,
    )
