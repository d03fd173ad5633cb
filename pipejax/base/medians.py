"""Medians, which a few numbers that are far off do not move."""

import numpy as np

from pipejax.base.array_types import Float, NumpyArray

DEVIATION = 1.4826  # standard deviation of a normal distribution over its median deviation

Numbers = Float[NumpyArray, " things"]


def medians_of_others(values: Numbers) -> Numbers:
    """Median of all numbers but each (things), of two or more."""
    order = np.argsort(values, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(values))
    # without one, those behind it in the order stand one place further in front
    middle = ((len(values) - 2) // 2, (len(values) - 1) // 2)
    low, high = (values[order][place + (place >= rank)] for place in middle)
    return (low + high) / 2
