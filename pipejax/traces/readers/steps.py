"""Steps of ranks whose traces do not number them: one ends where one of its cells comes again."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray

OUTSIDE = -1  # of a slice that no mark of a step holds
Marks = Sequence[tuple[int, float, float]]  # number, start and end of steps that are marked


class RepeatedCells(NamedTuple):
    """Slices of a rank, ascending by start.

    Attributes:
      label: (slices) number of what is written on it.
      start: (slices) of any unit.
      marks: of steps, where the user marked them.
    """

    label: Int[NumpyArray, " slices"]
    start: Float[NumpyArray, " slices"]
    marks: Marks


def number_steps(ranks: Sequence[RepeatedCells]) -> list[Int[NumpyArray, " slices"]]:
    """Return the step of each slice of each rank.

    Marks count where they are there. Else a step is as long as no cell of a rank comes twice. Where
    ranks then have steps in other numbers, a cell was doubled or a trace begins late: they are
    put beside the steps of a rank that has as many as most, by the time that they share.
    """
    if any(rank.marks for rank in ranks):
        return [_by_marks(rank) for rank in ranks]
    found = [_by_repetition(rank.label) for rank in ranks]
    counts = Counter(int(step.max(initial=-1)) + 1 for step in found if len(step))
    if len(counts) <= 1:
        return found
    most = max(counts.values())
    usual = min(count for count, often in counts.items() if often == most)
    clock = next(k for k, step in enumerate(found) if step.max(initial=-1) + 1 == usual)
    first = [ranks[clock].start[found[clock] == number].min() for number in range(usual)]
    return [_beside(rank, step, np.array(first)) for rank, step in zip(ranks, found, strict=True)]


def _by_marks(rank: RepeatedCells) -> Int[NumpyArray, " slices"]:
    if not rank.marks:
        return np.full(len(rank.start), OUTSIDE)
    number, start, end = (np.array(values) for values in zip(*sorted(rank.marks), strict=True))
    order = np.argsort(start)
    number, start, end = number[order].astype(np.int64), start[order], end[order]
    at = np.searchsorted(start, rank.start, "right") - 1
    return np.where((at >= 0) & (rank.start < end[at]), number[at], OUTSIDE)


def _by_repetition(label: Int[NumpyArray, " slices"]) -> Int[NumpyArray, " slices"]:
    seen: set[int] = set()
    step, number = np.empty(len(label), np.int64), 0
    for place, one in enumerate(label.tolist()):
        if one in seen:
            number += 1
            seen.clear()
        seen.add(one)
        step[place] = number
    return step


def _beside(
    rank: RepeatedCells, step: Int[NumpyArray, " slices"], first: Float[NumpyArray, " steps"]
) -> Int[NumpyArray, " slices"]:
    """Give each step of a rank the number of the one of another rank that most of it lies in."""
    begun = np.searchsorted(first, rank.start, "right")  # 0: before the first of the other rank
    new = np.empty(len(step), np.int64)
    for number in range(int(step.max(initial=-1)) + 1):
        mine = step == number
        new[mine] = np.bincount(begun[mine]).argmax()
    return new
