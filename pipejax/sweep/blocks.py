"""Blocks: the parts in which a grid is evaluated and written, one chunk of the store each."""

import math
from typing import NamedTuple

import numpy as np

from pipejax.sweep.declaration import Sweep

POINTS = 1 << 17  # of a block at most: a second of work or so, and files of a megabyte
SHAPES = 8  # programs of a block at most, for they take time whatever the number of systems


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
