"""Medians, which outliers change little."""

import numpy as np

from pipejax.base.array_types import Float, NumpyArray

DEVIATION = 1.4826  # standard deviation of a normal distribution over its median deviation

Numbers = Float[NumpyArray, " things"]


def medians_of_others(values: Numbers) -> Numbers:
    """Return the median of all other entries for each of at least two entries."""
    order = np.argsort(values, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(values))
    sorted_values = values[order]
    # deleting the entry of rank r moves all entries above r down by one:
    #   sorted [1 2 3 4] without rank 1 is [1 3 4], whose entry 1 is sorted[1 + 1]
    middles = (len(values) - 2) // 2, (len(values) - 1) // 2
    low, high = (sorted_values[middle + (middle >= ranks)] for middle in middles)
    return (low + high) / 2
