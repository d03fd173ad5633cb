"""Activations in flight over the slots of a table, and their peak."""

import numpy as np

from pipejax.ops import Phase
from pipejax.shapes import Float, Int, NumpyArray
from pipejax.table import ScheduleTable


def in_flight(table: ScheduleTable) -> Int[NumpyArray, "workers slots"]:
    """Count the (stage, microbatch) activations that each worker holds during each slot.

    One is taken at F and released at the end of B, or at the end of W where the backward is
    split; in a fused pair both count while it runs.

    Args:
      table: the schedule.

    Returns:
      (workers, slots) activations held.

    Example:
      >>> in_flight(ScheduleTable.from_rows([["0F0", "0F1", "0B0", "0B1"]])).tolist()
      [[1, 2, 2, 1]]
    """
    return _held(table, np.ones(table.num_stages, int))


def peak_in_flight(table: ScheduleTable) -> Int[NumpyArray, " workers"]:
    """Return the largest number of activations that each worker holds at once.

    Args:
      table: the schedule.

    Returns:
      (workers) activations.

    Example:
      >>> from pipejax import schedules
      >>> peak_in_flight(schedules.build("1f1b", num_workers=3, num_microbatches=8)).tolist()
      [3, 2, 1]
    """
    return in_flight(table).max(axis=1)


def peak_activation_bytes(
    table: ScheduleTable, bytes_per_stage: Float[NumpyArray, " stages"]
) -> Float[NumpyArray, " workers"]:
    """Return the most activation memory that each worker holds at once.

    Args:
      table: the schedule.
      bytes_per_stage: (stages) bytes that one microbatch leaves on a stage.

    Returns:
      (workers) bytes.
    """
    return _held(table, np.asarray(bytes_per_stage, float)).max(axis=1)


def persistent_bytes(
    table: ScheduleTable, bytes_per_stage: Float[NumpyArray, " stages"]
) -> Float[NumpyArray, " workers"]:
    """Return the memory that lasts the whole step: every copy of a stage counts.

    Args:
      table: the schedule.
      bytes_per_stage: (stages) parameters, gradients and optimizer state of one copy.

    Returns:
      (workers) bytes.
    """
    total = np.zeros(table.num_workers)
    for workers in table.placement:
        np.add.at(total, workers, np.asarray(bytes_per_stage, float))
    return total


def _held(table: ScheduleTable, size: NumpyArray) -> NumpyArray:
    """Sum of the sizes held during each slot: taken in it or before, released after it."""
    size = np.append(size, 0)  # the last entry serves idle cells
    taken, released = (
        sum(
            np.where(np.isin(cells.phase, phases), size[cells.stage], 0)
            for cells in (table.cells, table.partners)
        )
        for phases in ([Phase.F], [Phase.B, Phase.W])
    )
    return np.cumsum(taken, axis=1) - np.cumsum(released, axis=1) + released
