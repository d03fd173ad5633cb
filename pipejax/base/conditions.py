"""Conditions in text: a name, a sign and a value, as step_time<0.75s."""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipejax.base.data_files import WRITTEN, read_quantity

_CONDITION = re.compile(r"\s*([^\s=<>!][^=<>!]*?)\s*(!=|<=|>=|==|=|<|>)\s*(.*\S)\s*")
# comparisons of numbers, and of arrays of them
SIGNS: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def split_condition(text: str) -> tuple[str, str, str] | None:
    """Return name, sign and value of a condition; None if the text is none."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        return None
    name, sign, value = match.groups()
    return name, sign.replace("==", "="), value


def si_number(value: str, unit: str, where: str) -> float | None:
    """Read a number with a unit of the dimension of an SI unit; None if it has no unit."""
    return read_quantity(value, unit, where) if unit in WRITTEN else None
