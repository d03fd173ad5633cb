"""Steps of ranks whose traces do not number them: one begins with the first forward of a rank."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray

OUTSIDE = -1  # of a slice whose step is not known
BY_MARKS = "they lie outside the marks ProfilerStep#"
BY_TIME = (
    "its steps are others by time than by count, and no marks ProfilerStep# say which they are"
)
Marks = Sequence[tuple[int, float, float]]  # number, start and end of steps that are marked


class RankSlices(NamedTuple):
    """Slices of a rank, ascending by start."""

    start: Float[NumpyArray, " slices"]  # of any unit
    is_op: Bool[NumpyArray, " slices"]  # whether it is an op
    is_first: Bool[NumpyArray, " slices"]  # whether it is the op that comes first on this rank
    is_before: Bool[NumpyArray, " slices"]  # comes before its op, as a RECV, so never last
    marks: Marks  # of steps, where the user marked them
    is_cut: bool  # whether its file ends early


def number_steps(ranks: Sequence[RankSlices]) -> tuple[list[Int[NumpyArray, " slices"]], str]:
    """Return the step of each slice of each rank, and why some are OUTSIDE of all steps."""
    # Marks count where they are there. Else a step begins where the first op of a rank comes again,
    # and the k-th steps of ranks that have as many as most are one. Another number of them comes
    # from a trace that begins late or ends early, or from an op that was doubled or lost. Then
    # steps are one whose first ops are nearest in time, and as clocks may be wrong, the count must
    # agree: the first step is the first of the others, or the last is the last; of a cut file it is
    # the first.
    if any(rank.marks for rank in ranks):
        return [_by_marks(rank) for rank in ranks], BY_MARKS
    found = [_by_first_op(rank) for rank in ranks]
    often = Counter(len(begin) for _, begin in found)
    most = max(often, key=lambda count: (often[count], count))
    others = next(begin for _, begin in found if len(begin) == most)
    numbers = [
        np.arange(most) if len(begin) == most else _beside(begin, others, is_cut=rank.is_cut)
        for rank, (_, begin) in zip(ranks, found, strict=True)
    ]
    earliest = min(int(own.min()) for own in numbers if own is not None)
    return [
        np.full(len(step), OUTSIDE) if own is None else (own - earliest)[step]
        for own, (step, _) in zip(numbers, found, strict=True)
    ], BY_TIME


def _by_marks(rank: RankSlices) -> Int[NumpyArray, " slices"]:
    if not rank.marks:
        return np.full(len(rank.start), OUTSIDE)
    marks = sorted(rank.marks, key=lambda mark: mark[1])
    number, start, end = (np.array(values) for values in zip(*marks, strict=True))
    at = np.searchsorted(start, rank.start, "right") - 1
    return np.where((at >= 0) & (rank.start < end[at]), number[at], OUTSIDE)


def _by_first_op(
    rank: RankSlices,
) -> tuple[Int[NumpyArray, " slices"], Float[NumpyArray, " steps"]]:
    """Count the first op, and say when it began; NaN of a step begun before the trace."""
    # What is no op goes with the op before or after it.
    begun, ops = np.cumsum(rank.is_first), np.flatnonzero(rank.is_op)
    if not len(ops):
        return np.zeros(len(begun), np.int64), np.array([np.nan])
    after = np.searchsorted(ops, np.arange(len(begun)))
    goes_on = rank.is_before | (after == 0)
    step = np.where(goes_on, begun[ops[np.minimum(after, len(ops) - 1)]], begun)
    begin = np.append(np.nan, rank.start[rank.is_first])[int(step.min()) :]
    return step - int(step.min()), begin


def _beside(
    begin: Float[NumpyArray, " steps"], others: Float[NumpyArray, " others"], *, is_cut: bool
) -> Int[NumpyArray, " steps"] | None:
    """Number steps as those of others that begin nearest, on beyond them; None if unsure."""
    known, before = np.flatnonzero(~np.isnan(begin)), int(np.isnan(others).sum())
    others = others[before:]
    if not len(known) or not len(others):
        return None
    apart = float(np.median(np.diff(others))) if len(others) > 1 else np.inf
    inside = np.clip(begin[known], others[0], others[-1])
    nearest = np.interp(inside, others, np.arange(len(others))) + (begin[known] - inside) / apart
    number = before + np.rint(nearest).astype(np.int64)
    number = np.append(np.repeat(number[0] - 1, known[0]), number)
    agrees = number[0] == 0 or (number[-1] == before + len(others) - 1 and not is_cut)
    return number if agrees else None
