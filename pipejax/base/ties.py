"""The least of several names, where numbers equal up to rounding are a tie."""

from collections.abc import Sequence

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray

TIE = 1e-9  # by which costs differ, relative to the least, that only rounding tells apart


def least_named(
    costs: Float[NumpyArray, "names *places"], names: Sequence[str]
) -> tuple[list[str], Int[NumpyArray, "*places"]]:
    """Name the least at each place, ties as "a = b"."""
    best = costs.min(axis=0)
    is_there = np.isfinite(best)
    here = costs[:, is_there]
    is_least = here <= best[is_there] + TIE * np.abs(best[is_there])
    ties, tie = np.unique(is_least, axis=1, return_inverse=True)
    order = np.argsort(-np.bincount(tie.ravel(), minlength=ties.shape[1]), kind="stable")
    codes = np.full(best.shape, -1)
    codes[is_there] = np.argsort(order)[tie.ravel()]
    return [" = ".join(np.array(names)[ties[:, k]].tolist()) for k in order.tolist()], codes
