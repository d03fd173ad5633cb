"""The variables of a sweep's dataset: what is kept of every point."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.sensitivity import RESOURCES
from pipejax.base.array_types import NumpyArray
from pipejax.sweep.declaration import Sweep

STATUS = ("not evaluated", "feasible", "out of memory", "illegal")
FEASIBLE, OUT_OF_MEMORY, ILLEGAL = 1, 2, 3
NO_RESOURCE = -1


class Variable(NamedTuple):
    """A variable of the dataset.

    Attributes:
      dtype: of its values; "str" for text.
      fill: value where nothing is known.
      unit: of its values.
      meaning: what it says.
      per_system: whether it has a value for every system, or one for every schedule and workload.
      extra: further dimension and its labels, or none.
      flags: what the numbers 0, 1, ... stand for, where they stand for something.
    """

    dtype: str
    fill: Any
    unit: str
    meaning: str
    per_system: bool
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    flags: tuple[str, ...] = ()

    def places(self, sweep: Sweep) -> list[int]:
        """Places of the axes that are its dimensions: those given as a list."""
        used = sweep.axes if self.per_system else sweep.shape_axes
        return [place for place, axis in enumerate(used) if axis.is_listed]

    def empty(self, num_systems: int) -> NumpyArray:
        """Return an array for one schedule and workload, filled: (systems, ...) or one value."""
        shape = ((num_systems,) if self.per_system else ()) + self.extra_shape
        return np.full(shape, self.fill, object if self.dtype == "str" else self.dtype)

    @property
    def extra_shape(self) -> tuple[int, ...]:
        """Size of the further dimension."""
        return tuple(len(labels) for _, labels in self.extra)


def variables_of(sweep: Sweep) -> Mapping[str, Variable]:
    """List the variables that a sweep keeps."""
    always = {
        "step_time": Variable(sweep.dtype, np.nan, "s", "time of one training step", True),
        "status": Variable(
            "int8", 0, "1", "whether the point is legal and fits the memory", True, flags=STATUS
        ),
        "memory_bytes": Variable("float64", np.nan, "B", "need of the fullest accelerator", False),
        "reason": Variable("str", "", "1", "why the point is illegal", False),
    }
    resource = (("resource", RESOURCES),)
    chosen = {
        "bubble_ratio": Variable(sweep.dtype, np.nan, "1", "idle share of the workers", True),
        "tokens_per_second": Variable(sweep.dtype, np.nan, "token/s", "tokens of a second", True),
        "bound_by": Variable(
            "int8",
            NO_RESOURCE,
            "1",
            "resource that takes the largest share of the critical path",
            True,
            flags=RESOURCES,
        ),
        "share": Variable("float32", np.nan, "1", "share of the critical path", True, resource),
    }
    return always | {name: chosen[name] for name in sweep.outputs}
