"""Conditions as texts of a name, a sign and a value, such as step_time<0.75s."""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipejax.base.data_files import UNITS_BY_DIMENSION, parse_ratio, read_quantity

_CONDITION = re.compile(r"\s*([^\s=<>!][^=<>!]*?)\s*(!=|<=|>=|==|=|<|>)\s*(.*\S)\s*")
EQUAL = 1e-9  # relative difference of equal numbers, because conversion of units rounds
_ORDERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def split_condition(text: str) -> tuple[str, str, str] | None:
    """Split a condition into (name, comparison sign, value); None for any other text."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        return None
    name, sign, value = match.groups()
    return name, sign.replace("==", "="), value


def si_number(value: str, unit: str, where: str) -> float | None:
    """Convert a text such as "40us" to the SI unit `unit`; None if the text has no unit."""
    return read_quantity(value, unit, where) if unit in UNITS_BY_DIMENSION else None


def share_number(value: str, where: str) -> float:
    """Read a share: a number from 0 to 1, or a percentage with %; NaN for any other text."""
    number = parse_ratio(value)
    if number > 1:
        hint = f"give it as {number / 100:g} or {number:g}%" if number <= 100 else "give it as 10%"
        raise ValueError(f"{where} a share is at most 1, or 100%: {hint}")
    return number


def compare(values: Any, sign: str, number: float, equal: Any = None) -> Any:
    """Return whether values, a number or an array, meet a condition such as ("<=", 0.75).

    `equal` tells which values equal the number; default: those that differ only by rounding.
    """
    if equal is None:
        equal = np.isclose(values, number, rtol=EQUAL, atol=0.0)
    if sign in ("=", "!="):
        return equal if sign == "=" else ~equal
    ordered = _ORDERS[sign](values, number)
    return ordered | equal if sign in ("<=", ">=") else ordered & ~equal
