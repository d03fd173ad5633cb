"""Checks of single numbers, wherever they come from: Python, the command line, a file."""

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

MAX_COUNT = 10**9  # of what is counted: products of counts stay exact


def whole_number(value: Any, where: str, *, least: int = 1, most: int | None = None) -> int:
    """Check that a value is a whole number of at least `least` and at most `most`."""
    try:
        count = least - 1 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(f"{where} must be a whole number of at least {least}, got {value!r}")
    if most is not None and count > most:
        raise ValueError(f"{where} must be at most {most}, got {value}")
    return count


def are_positive(values: Any, count: int) -> bool:
    """Return whether values are a sequence of `count` finite numbers above 0."""
    return (
        isinstance(values, Sequence | np.ndarray)
        and not isinstance(values, str)
        and len(values) == count
        and all(
            isinstance(value, int | float | np.number) and 0 < float(value) < math.inf
            for value in values
        )
    )


def is_number(value: Any, *, least: float = 0.0) -> bool:
    """Return whether a value is a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value >= least
    except OverflowError:  # a whole number beyond every float
        return False


def number(value: Any, where: str, *, least: float = 0.0) -> float:
    """Check that a value is a finite number of at least `least`."""
    if not is_number(value, least=least):
        raise ValueError(f"{where} must be a number of at least {least:g}, got {value!r}")
    return float(value)


def share(value: Any, where: str) -> float:
    """Check that a value is a number from 0 to 1."""
    if not is_number(value) or value > 1:
        raise ValueError(f"{where} must be a number from 0 to 1, got {value!r}")
    return float(value)


def efficiency(value: Any, where: str) -> float:
    """Check that a value is an efficiency: above 0 and at most 1."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{where} must be a number above 0 and at most 1, got {value!r}")
    return float(value)


def positive(value: Any, where: str) -> float:
    """Check that a value is a finite number above 0."""
    if not is_number(value) or not value > 0:
        raise ValueError(f"{where} must be a number above 0, got {value!r}")
    return float(value)


def one_of(value: Any, known: Collection[Any], where: str) -> Any:
    """Check that a value is one of those that are known."""
    if value not in tuple(known):
        raise ValueError(f"{where} must be one of {', '.join(map(str, known))}, got {value!r}")
    return value
