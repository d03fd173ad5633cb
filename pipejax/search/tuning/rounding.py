"""Rounding of a relaxed optimum, and local search among whole numbers."""

from collections.abc import Callable

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray

Points = Int[NumpyArray, "points stages"]
Evaluate = Callable[[Points, Int[NumpyArray, " points"]], Float[NumpyArray, " points"]]
MOST = 200_000  # points of an exhaustive search


class TooManyError(ValueError):
    """An exhaustive search would exceed its limit of evaluations."""


def whole_with_sum(points: Float[NumpyArray, "points stages"]) -> Points:
    """Round to whole numbers with the same sum: down, and up at the largest remainders."""
    down = np.floor(points + 1e-9)
    missing = np.round(points.sum(axis=1) - down.sum(axis=1)).astype(int)
    rank = np.argsort(np.argsort(down - points, axis=1, kind="stable"), axis=1)
    return (down + (rank < missing[:, None])).astype(int)


def swaps(stages: int) -> Points:
    """Moves of one layer from one stage to another: (moves, stages) changes, each with sum 0."""
    add_one = np.eye(stages, dtype=int)
    moves = (add_one[None, :] - add_one[:, None]).reshape(-1, stages)
    return moves[moves.any(axis=1)]


def improve(
    points: Points,
    owner: Int[NumpyArray, " points"],
    moves: Int[NumpyArray, "moves stages"],
    evaluate: Evaluate,
) -> tuple[Points, Float[NumpyArray, " points"]]:
    """Move to the best neighbour while there is a better one, all points at once."""
    points, values = points.copy(), evaluate(points, owner)
    active = np.arange(len(points)) if len(moves) else np.arange(0)  # one stage alone stays
    while len(active):
        around = (points[active, None] + moves).reshape(-1, points.shape[1])
        neighbour_values = evaluate(around, np.repeat(owner[active], len(moves)))
        neighbour_values = neighbour_values.reshape(len(active), len(moves))
        best = neighbour_values.argmin(axis=1)
        least, now = neighbour_values[np.arange(len(active)), best], values[active]
        # a gain within rounding is none, or two equal points could take turns for ever
        better = least < now - 1e-12 * np.where(np.isfinite(now), now, 0)
        active = active[better]
        points[active] += moves[best[better]]
        values[active] = least[better]
    return points, values


def compositions(total: int, parts: int) -> Points:
    """All ways to write a number as a sum of whole numbers of at least 1, in order."""
    if total < parts:
        raise ValueError(f"{total} cannot be the sum of {parts} numbers of at least 1")
    ways = 1.0
    for k in range(1, parts):
        ways = ways * (total - k) / k
    if ways > MOST:
        raise TooManyError(
            f"{ways:.3g} ways to split {total} into {parts}: at most {MOST} are tried"
        )
    rows = np.arange(1, total - parts + 2)[:, None]
    for part in range(2, parts + 1):
        rest = total - (parts - part) - rows.sum(axis=1)  # what the next number may be at most
        index = np.repeat(np.arange(len(rows)), rest)
        first = np.repeat(np.cumsum(rest) - rest, rest)
        rows = np.column_stack([rows[index], np.arange(len(index)) - first + 1])
    return rows[rows.sum(axis=1) == total]
