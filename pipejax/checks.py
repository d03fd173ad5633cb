"""Checks of single numbers, wherever they come from: Python, the command line, a file."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np


def whole_number(value: Any, where: str, *, least: int = 1) -> int:
    """Check that a value is a whole number of at least `least`.

    Args:
      value: Python's or NumPy's whole number.
      where: its name, for the message.
      least: smallest legal value.

    Returns:
      The number, as Python's.

    Raises:
      ValueError: otherwise.

    Example:
      >>> whole_number(1.5, "waves")
      Traceback (most recent call last):
      ...
      ValueError: waves must be a whole number of at least 1, got 1.5
    """
    try:
        count = least - 1 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(f"{where} must be a whole number of at least {least}, got {value!r}")
    return count


def are_positive(values: Any, count: int) -> bool:
    """Return whether values are a sequence of so many finite numbers above 0.

    Args:
      values: what was given.
      count: how many there should be.

    Returns:
      Whether they are.

    Example:
      >>> are_positive([1, 0.5], 2), are_positive(3, 1), are_positive(["1"], 1)
      (True, False, False)
    """
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
    """Return whether a value is a finite number of at least `least`.

    Args:
      value: what was given.
      least: smallest legal value.

    Returns:
      Whether it is.

    Example:
      >>> is_number(10**400), is_number(True), is_number(2)
      (False, False, True)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value >= least
    except OverflowError:  # a whole number beyond every float
        return False


def number(value: Any, where: str, *, least: float = 0.0) -> float:
    """Check that a value is a finite number of at least `least`.

    Args:
      value: what was given.
      where: its name or place, for the message.
      least: smallest legal value.

    Returns:
      The number.

    Raises:
      ValueError: otherwise.

    Example:
      >>> number(-1, "latency_us")
      Traceback (most recent call last):
      ...
      ValueError: latency_us must be a number of at least 0, got -1
    """
    if not is_number(value, least=least):
        raise ValueError(f"{where} must be a number of at least {least:g}, got {value!r}")
    return float(value)
