"""Step times of one machine and layout are a line in the number of microbatches.

A further microbatch takes one cycle time; what does not depend on their number, filling and
draining the pipe, gradients and optimizer, is the offset. Two measured numbers of microbatches
tell both, and with them the step time at any other.
"""

from typing import NamedTuple

import numpy as np

from pipejax.files import MeasuredRows
from pipejax.typing import Float, Int, NumpyArray

# may differ between runs on one line: the rest is the machine and the layout of a pipeline
FREE = ("data", "global_batch", "seconds", "memory_bytes", "source", "row")


class StepLine(NamedTuple):
    """Step time by the number of microbatches.

    Attributes:
      cycle_time: of a further microbatch [s].
      offset: of a step, without them [s].
    """

    cycle_time: float
    offset: float

    def at(self, microbatches: Int[NumpyArray, "..."]) -> Float[NumpyArray, "..."]:
        """Step times [s] at numbers of microbatches."""
        return self.offset + self.cycle_time * np.asarray(microbatches)


def median_times(
    microbatches: Int[NumpyArray, " rows"], seconds: Float[NumpyArray, " rows"]
) -> tuple[Int[NumpyArray, " counts"], Float[NumpyArray, " counts"]]:
    """Return each number of microbatches (counts), ascending, and the median of its step times."""
    counts = np.unique(microbatches)
    return counts, np.array([np.median(seconds[microbatches == count]) for count in counts])


def step_line(
    microbatches: Int[NumpyArray, " rows"], seconds: Float[NumpyArray, " rows"]
) -> StepLine:
    """Draw the line through the medians at the smallest and the largest number of microbatches.

    Args:
      microbatches: of each run.
      seconds: a step of it.

    Returns:
      Cycle time and offset.

    Raises:
      ValueError: if all runs have as many microbatches.

    Example:
      >>> step_line(np.array([8, 8, 128]), np.array([0.92, 0.94, 11.07])).at(16).round(2)
      np.float64(1.61)
    """
    counts, medians = median_times(microbatches, seconds)
    if len(counts) < 2:
        raise ValueError(
            f"a line needs runs of two numbers of microbatches, got only {counts.tolist()}"
        )
    cycle_time = (medians[-1] - medians[0]) / (counts[-1] - counts[0])
    return StepLine(float(cycle_time), float(medians[0] - cycle_time * counts[0]))


def on_one_line(rows: MeasuredRows) -> list[MeasuredRows]:
    """Split rows into those that differ only in replicas and microbatches."""
    columns = [column for name, column in rows.columns.items() if name not in FREE]
    keys = list(zip(*(column.tolist() for column in columns), strict=True))
    return [rows.take(np.array([key == chosen for chosen in keys])) for key in dict.fromkeys(keys)]
