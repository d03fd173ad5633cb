"""Rounding of a relaxed optimum, and local search among whole numbers."""

import itertools
from collections.abc import Callable

import numpy as np
import scipy  # its parts are imported at first use

from pipejax.base.array_types import Float, Int, NumpyArray

Points = Int[NumpyArray, "points stages"]
Evaluate = Callable[[Points, Int[NumpyArray, " points"]], Float[NumpyArray, " points"]]
MAX_EXHAUSTIVE = 200_000  # points of an exhaustive search


class TooManyError(ValueError):
    """An exhaustive search would exceed its limit of evaluations."""


def whole_with_sum(points: Float[NumpyArray, "points stages"]) -> Points:
    """Round to whole numbers with the same sum: down, and up at the largest remainders."""
    down = np.floor(points + 1e-9)
    missing = np.round(points.sum(axis=1) - down.sum(axis=1)).astype(int)
    # two argsorts give ranks: remainders .2 .7 .5 have ranks 2 0 1
    rank = np.argsort(np.argsort(down - points, axis=1, kind="stable"), axis=1)
    return (down + (rank < missing[:, None])).astype(int)


def swaps(stages: int) -> Points:
    """Return all moves of one layer to another stage, as changes of the layers (moves, stages)."""
    add_one = np.eye(stages, dtype=int)
    moves = (add_one[None, :] - add_one[:, None]).reshape(-1, stages)
    return moves[moves.any(axis=1)]


def improve(
    points: Points,
    owner: Int[NumpyArray, " points"],
    moves: Int[NumpyArray, "moves stages"],
    evaluate: Evaluate,
) -> tuple[Points, Float[NumpyArray, " points"]]:
    """Move points to best neighbours until no neighbour is better; return points and values."""
    # `owner` is passed through to `evaluate`, with the neighbours of each point.
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
    """Return all ways to write a total as `parts` whole numbers >= 1, in order (ways, parts)."""
    # 4 in 2 parts: 1 3, 2 2, 3 1
    if total < parts:
        raise ValueError(f"{total} cannot be the sum of {parts} numbers of at least 1")
    num_sums = scipy.special.comb(total - 1, parts - 1)
    if num_sums > MAX_EXHAUSTIVE:
        raise TooManyError(
            f"{num_sums:.3g} ways to split {total} into {parts}: at most {MAX_EXHAUSTIVE} are tried"
        )
    # where to cut a row of `total` ones into parts
    cuts = np.array([*itertools.combinations(range(1, total), parts - 1)], int)
    return np.diff(cuts, prepend=0, append=total)
