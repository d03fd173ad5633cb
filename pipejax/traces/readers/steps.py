"""Steps of ranks whose traces do not number them: one begins with the first forward of a rank."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray

OUTSIDE = -1  # of a slice that no mark of a step holds
Marks = Sequence[tuple[int, float, float]]  # number, start and end of steps that are marked


class RankSlices(NamedTuple):
    """Slices of a rank, ascending by start.

    Attributes:
      start: (slices) of any unit.
      end: (slices) of the same.
      is_op: (slices) whether it is an op.
      is_first: (slices) whether it is the op that comes first on this rank.
      is_before: (slices) whether it comes before what it is for, as a RECV, and so never last.
      marks: of steps, where the user marked them.
    """

    start: Float[NumpyArray, " slices"]
    end: Float[NumpyArray, " slices"]
    is_op: Bool[NumpyArray, " slices"]
    is_first: Bool[NumpyArray, " slices"]
    is_before: Bool[NumpyArray, " slices"]
    marks: Marks


def number_steps(ranks: Sequence[RankSlices]) -> list[Int[NumpyArray, " slices"]]:
    """Return the step of each slice of each rank.

    Marks count where they are there. Else a step begins where the first op of a rank comes again.
    Where ranks then have steps in other numbers, that op was doubled or a trace begins late: they
    are put beside the steps of a rank that has as many as most, by the time that they share.
    """
    if any(rank.marks for rank in ranks):
        return [_by_marks(rank) for rank in ranks]
    found = [_by_first_op(rank) for rank in ranks]
    counts = Counter(int(step.max(initial=-1)) + 1 for step in found)
    if len(counts) <= 1:
        return found
    most = max(counts.values())
    usual = min(count for count, often in counts.items() if often == most)
    clock = next(k for k, step in enumerate(found) if step.max(initial=-1) + 1 == usual)
    borders = _borders(ranks[clock], found[clock])
    return [_beside(rank, step, borders) for rank, step in zip(ranks, found, strict=True)]


def _by_marks(rank: RankSlices) -> Int[NumpyArray, " slices"]:
    if not rank.marks:
        return np.full(len(rank.start), OUTSIDE)
    marks = sorted(rank.marks, key=lambda mark: mark[1])
    number, start, end = (np.array(values) for values in zip(*marks, strict=True))
    at = np.searchsorted(start, rank.start, "right") - 1
    return np.where((at >= 0) & (rank.start < end[at]), number[at], OUTSIDE)


def _by_first_op(rank: RankSlices) -> Int[NumpyArray, " slices"]:
    """Count how often the first op came; what is no op goes with the op before or after it."""
    begun, ops = np.cumsum(rank.is_first), np.flatnonzero(rank.is_op)
    if not len(ops):
        return np.zeros(len(begun), np.int64)
    after = np.searchsorted(ops, np.arange(len(begun)))
    goes_on = rank.is_before | (after == 0)
    step = np.where(goes_on, begun[ops[np.minimum(after, len(ops) - 1)]], begun)
    return step - int(step.min())


def _borders(rank: RankSlices, step: Int[NumpyArray, " slices"]) -> Float[NumpyArray, " steps"]:
    """Times between the steps of a rank, in the middle of the gaps; as long before its first."""
    ops = np.flatnonzero(rank.is_op)
    ops = ops if len(ops) else np.arange(len(step))
    numbers = range(int(step.max(initial=-1)) + 1)
    first = np.array([rank.start[ops][step[ops] == k].min(initial=np.inf) for k in numbers])
    last = np.array([rank.end[ops][step[ops] == k].max(initial=-np.inf) for k in numbers])
    gaps = (first[1:] - last[:-1]) / 2
    return first - np.concatenate([[np.median(gaps) if len(gaps) else np.inf], gaps])


def _beside(
    rank: RankSlices, step: Int[NumpyArray, " slices"], borders: Float[NumpyArray, " steps"]
) -> Int[NumpyArray, " slices"]:
    """Give each step of a rank the number of the one of another rank that most of it lies in."""
    begun = np.searchsorted(borders, rank.start, "right")  # 0: before the first of the other rank
    new = np.empty(len(step), np.int64)
    for number in range(int(step.max(initial=-1)) + 1):
        mine = step == number
        if mine.any():
            new[mine] = np.bincount(begun[mine]).argmax()
    return new
