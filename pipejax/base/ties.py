"""Names of the least costs, where costs tie within rounding, Pareto fronts, and equal rows."""

from collections.abc import Sequence

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray, Shaped

TIE = 1e-9  # relative difference up to which costs count as equal to the least cost


def least_named(
    costs: Float[NumpyArray, " names *places"], names: Sequence[str]
) -> tuple[list[str], Int[NumpyArray, "*places"]]:
    """Return texts of the least costs, ties as "a = b", and an index into them (*places)."""
    min_costs = costs.min(axis=0)
    is_finite = np.isfinite(min_costs)  # the index is -1 where no cost is finite
    limits = min_costs[is_finite] + TIE * np.abs(min_costs[is_finite])
    is_winner = costs[:, is_finite] <= limits
    # each distinct column of is_winner is a text; the most frequent text gets index 0:
    #   winners a, ab, ab -> columns [a, ab], column_ids 0 1 1, order 1 0, indices 1 0 0
    columns, column_ids = np.unique(is_winner, axis=1, return_inverse=True)
    column_ids = column_ids.ravel()
    counts = np.bincount(column_ids, minlength=columns.shape[1])
    order = np.argsort(-counts, kind="stable")
    indices = np.full(min_costs.shape, -1)
    indices[is_finite] = np.argsort(order)[column_ids]
    texts = [" = ".join(np.array(names)[columns[:, k]].tolist()) for k in order.tolist()]
    return texts, indices


def pareto_front(
    first: Float[NumpyArray, " points"], second: Float[NumpyArray, " points"]
) -> Int[NumpyArray, " front"]:
    """Return the indices of the Pareto front of two costs, sorted by the first cost."""
    order = np.lexsort([second, first])
    # second costs 3 4 1 in this order: 4 is not on the front, because 3 is before it
    min_before = np.minimum.accumulate(np.append(np.inf, second[order]))[:-1]
    front: NumpyArray = order[second[order] < min_before]
    return front


def row_classes(
    columns: Sequence[Shaped[NumpyArray, " rows"]] | Shaped[NumpyArray, "columns rows"],
) -> tuple[Int[NumpyArray, " classes"], Int[NumpyArray, " rows"]]:
    """Return the first row of each class of equal rows, and the class of each row."""
    # rows (1, 2) (1, 3) (1, 2) have the first rows [0 1] and the classes [0 1 0]
    rows = np.stack([*columns], axis=1)
    _, first_rows, classes = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first_rows, classes.ravel()
