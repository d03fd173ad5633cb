"""Bands: how far measured times lie from predicted ones, and whether left-out rows lie in them."""

from collections.abc import Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.costs.calibration_record import Band

PERCENTS = (80, 90)


def band(residual: Float[NumpyArray, " rows"], percent: float, groups: int) -> Band:
    """Find the factors on predicted time between which so many percent of further rows lie.

    `residual` is the log of predicted over measured, of rows that were left out in so many groups.
    Rows of one group are wrong together, so what is expected of a further group is an order
    statistic of groups, not of rows: among K groups and a new one, the new one may be the farthest
    by the chance 1 / (K + 1), and the share within the band of the known ones has to be
    (K + 1) / K times larger.

    References:
      Lee, Barber, Willett: Distribution-free inference with hierarchical data (2023).
    """
    share = min(percent / 100 * (groups + 1) / groups, 1.0)
    low, high = np.quantile(-residual, [(1 - share) / 2, (1 + share) / 2])
    return Band(percent, float(np.exp(low)), float(np.exp(high)))


def bands_of(residual: Float[NumpyArray, " rows"], groups: int) -> tuple[Band, ...]:
    """Return a band for each of `PERCENTS`."""
    return tuple(band(residual, percent, groups) for percent in PERCENTS)


def coverage_of(
    by_fold: Sequence[Float[NumpyArray, " rows"]],
    residual: Float[NumpyArray, "folds rows"],
    left_out: Bool[NumpyArray, "folds rows"],
) -> Mapping[int, float]:
    """Share of left-out rows within their bands [%], by the percent that it should be.

    The band of a fold comes from the left-out rows of all other folds, or, where there is only
    one, from the rows that it was fitted to: never from the rows that are judged by it.
    """
    if not by_fold:
        return {}
    inside: dict[int, int] = dict.fromkeys(PERCENTS, 0)
    for k, own in enumerate(by_fold):
        others = [each for j, each in enumerate(by_fold) if j != k]
        known = np.concatenate(others) if others else residual[k][~left_out[k]]
        for percent in PERCENTS:
            _, low, high = band(known, percent, len(others) or len(known))
            ratio = np.exp(-own)
            inside[percent] += int(np.sum((low <= ratio) & (ratio <= high)))
    total = sum(map(len, by_fold))
    return {percent: 100 * count / total for percent, count in inside.items()}
