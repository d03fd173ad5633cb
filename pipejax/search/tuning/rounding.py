"""Rounding of a relaxed optimum to integers, and local search among integers."""

import itertools
from collections.abc import Callable

import numpy as np
import scipy  # scipy imports its parts at their first use

from pipejax.base.array_types import Float, Int, NumpyArray

Points = Int[NumpyArray, "points stages"]
Evaluate = Callable[[Points, Int[NumpyArray, " points"]], Float[NumpyArray, " points"]]
MAX_EXHAUSTIVE = 200_000  # largest number of points in an exhaustive search


class TooManyError(ValueError):
    """An exhaustive search would exceed its limit of evaluations."""


def whole_with_sum(points: Float[NumpyArray, "points stages"]) -> Points:
    """Round to integers with the same sum: up at the largest remainders, else down."""
    down = np.floor(points + 1e-9)
    missing = np.round(points.sum(axis=1) - down.sum(axis=1)).astype(int)
    # two argsorts give ranks: remainders .2 .7 .5 have ranks 2 0 1
    rank = np.argsort(np.argsort(down - points, axis=1, kind="stable"), axis=1)
    return (down + (rank < missing[:, None])).astype(int)


def swaps(stages: int) -> Points:
    """Return changes of the layers (moves, stages) that move one layer to another stage."""
    add_one = np.eye(stages, dtype=int)
    moves = (add_one[None, :] - add_one[:, None]).reshape(-1, stages)
    return moves[moves.any(axis=1)]


def improve(
    points: Points,
    owner: Int[NumpyArray, " points"],
    moves: Int[NumpyArray, "moves stages"],
    evaluate: Evaluate,
) -> tuple[Points, Float[NumpyArray, " points"]]:
    """Move points to their best neighbours until none is better; return points and values."""
    # `evaluate` gets points and the `owner` of each point.
    points, values = points.copy(), evaluate(points, owner)
    active = np.arange(len(points)) if len(moves) else np.arange(0)
    while len(active):
        neighbours = (points[active, None] + moves).reshape(-1, points.shape[1])
        neighbour_values = evaluate(neighbours, np.repeat(owner[active], len(moves)))
        neighbour_values = neighbour_values.reshape(len(active), len(moves))
        best = neighbour_values.argmin(axis=1)
        best_values, current = neighbour_values[np.arange(len(active)), best], values[active]
        # ignore gains within rounding: two equal points could alternate for ever
        is_better = best_values < current - 1e-12 * np.where(np.isfinite(current), current, 0)
        active = active[is_better]
        points[active] += moves[best[is_better]]
        values[active] = best_values[is_better]
    return points, values


def compositions(total: int, parts: int) -> Points:
    """Return all ordered ways (ways, parts) to write a total as `parts` integers >= 1."""
    # the ways for 4 in 2 parts are 1 3, 2 2 and 3 1
    if total < parts:
        raise ValueError(f"{total} cannot be the sum of {parts} numbers of at least 1")
    num_sums = scipy.special.comb(total - 1, parts - 1)
    if num_sums > MAX_EXHAUSTIVE:
        raise TooManyError(
            f"{num_sums:.3g} ways to split {total} into {parts}: at most {MAX_EXHAUSTIVE} are tried"
        )
    # positions at which a row of `total` ones is cut into parts
    cuts = np.array([*itertools.combinations(range(1, total), parts - 1)], int)
    return np.diff(cuts, prepend=0, append=total)
