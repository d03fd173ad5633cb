"""How the dataset of a sweep is laid out: its variables, and the blocks that they come in.

A block is a part of the grid that is evaluated and written as one, a chunk of the store.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.sensitivity import RESOURCES
from pipejax.base.array_types import NumpyArray
from pipejax.sweep.declaration import Sweep

STATUS = ("not evaluated", "feasible", "out of memory", "illegal")
FEASIBLE, OUT_OF_MEMORY, ILLEGAL = 1, 2, 3
NO_RESOURCE = -1
POINTS = 1 << 17  # of a block at most: a second of work or so, and files of a megabyte
SHAPES = 8  # programs of a block at most, for they take time whatever the number of systems


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
        """Positions of the axes that are its dimensions: those given as a list."""
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


class Block(NamedTuple):
    """A box of the grid.

    Attributes:
      number: counted from 0, the last axis fastest.
      cuts: (axes) values of each axis that it has.
    """

    number: int
    cuts: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(axes) values of each axis."""
        return tuple(cut.stop - cut.start for cut in self.cuts)

    @property
    def num_points(self) -> int:
        """Points of the block."""
        return math.prod(self.shape)


def block_shape(sweep: Sweep) -> tuple[int, ...]:
    """Choose how many values of each axis a block has, from the last axis to the first.

    Returns (axes) values of each axis; blocks at the end of an axis may have fewer.
    """
    chosen: list[int] = []
    points = shapes = 1
    for place in reversed(range(len(sweep.axes))):
        is_shape = place < len(sweep.shape_axes)
        room = max(1, min(POINTS // points, SHAPES // shapes if is_shape else POINTS))
        length = len(sweep.axes[place].values)
        count = -(-length // -(-length // room))  # blocks of one size share compilations
        points *= count
        shapes *= count if is_shape else 1
        chosen.insert(0, count)
    return tuple(chosen)


def num_blocks(sweep: Sweep) -> int:
    """Count the blocks of a grid."""
    return math.prod(_blocks_by_axis(sweep))


def get_block(sweep: Sweep, number: int) -> Block:
    """Return a block by its number."""
    places = np.unravel_index(number, _blocks_by_axis(sweep))
    starts = [int(at) * size for at, size in zip(places, block_shape(sweep), strict=True)]
    cuts = [
        slice(start, min(len(axis.values), start + size))
        for axis, start, size in zip(sweep.axes, starts, block_shape(sweep), strict=True)
    ]
    return Block(number, tuple(cuts))


def _blocks_by_axis(sweep: Sweep) -> list[int]:
    size = block_shape(sweep)
    return [-(-len(axis.values) // count) for axis, count in zip(sweep.axes, size, strict=True)]
