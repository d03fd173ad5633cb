"""Checks of single numbers, wherever they come from: Python, the command line, a file."""

import difflib
import math
import operator
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pipejax.base.display import abbreviated

MOST_LISTED = 12  # of what is legal
MAX_COUNT = 10**9  # of what is counted: products of counts stay exact


class ArgumentError(ValueError):
    """An argument must not have the value that it has; the command line names its option."""

    # `value` is there where it tells which of several arguments is meant

    def __init__(self, argument: str, value: Any, text: str) -> None:
        self.argument, self.value, self.text = argument, value, text

    def __str__(self) -> str:
        return self.text


class UnknownNameError(ArgumentError):
    """A name is none of those that are known; `argument` is what it should be a name of."""


class MismatchError(ArgumentError):
    """Values that are right each by itself and do not go together, as points of a grid may be."""

    def __init__(self, text: str, argument: str = "") -> None:
        super().__init__(argument, None, text)


def wrong(where: str, text: str, value: Any = None) -> ArgumentError:
    """Return the error of an argument that is not as it must be."""
    return ArgumentError(re.split("[ :[]", where, maxsplit=1)[0], value, f"{where} {text}")


def whole_number(value: Any, where: str, *, minimum: int = 1, maximum: int | None = None) -> int:
    """Check that a value is a whole number of at least `minimum` and at most `maximum`."""
    try:
        count = minimum - 1 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        count = minimum - 1
    if count < minimum:
        raise wrong(where, f"must be a whole number of at least {minimum}, got {value!r}", value)
    if maximum is not None and count > maximum:
        raise wrong(where, f"must be at most {maximum}, got {value}", value)
    return count


def divisors(total: int) -> list[int]:
    """List the divisors of a whole number of at least 1, ascending."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return small + [total // d for d in reversed(small) if d * d != total]


def legal_divisors(total: int, value: int) -> str:
    """Say which numbers divide `total`, or which are nearest to `value` where there are many."""
    legal = divisors(total)
    if len(legal) <= MOST_LISTED:
        return f"legal are {', '.join(map(str, legal))}"
    below = max(d for d in legal if d <= value)
    near = sorted({below, min((d for d in legal if d >= value), default=below)})
    return f"the nearest that do are {' and '.join(map(str, near))}"


def is_masked(values: Any) -> bool:
    """Return whether values are an array with a mask; NumPy imports those when one is made."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(values, masked.MaskedArray)


def whole_numbers(values: Any, where: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Check that values are an array of whole numbers, and small enough for 32 bits."""
    if type(values) is np.ndarray and values.dtype == np.int32:
        return values
    try:
        numbers = np.asarray(values)
        # among whole numbers in a list, NumPy reads a boolean as one
        mixed = () if hasattr(values, "dtype") else np.asarray(values, object).ravel()
    except ValueError:  # rows that differ in length
        numbers, mixed = np.array(None), ()
    is_whole = numbers.size == 0 or numbers.dtype.kind in "iu"
    is_whole &= not is_masked(values)
    if not is_whole or any(isinstance(value, bool | np.bool_) for value in mixed):
        raise wrong(where, f"must be whole numbers, got {abbreviated(values)}", values)
    if numbers.size and not -MAX_COUNT <= numbers.min() <= numbers.max() <= MAX_COUNT:
        raise wrong(where, f"must be whole numbers of at most {MAX_COUNT}", values)
    return numbers.astype(np.int32)


def are_positive(values: Any, count: int) -> bool:
    """Return whether values are a sequence of `count` finite numbers above 0."""
    return (
        isinstance(values, Sequence | np.ndarray)
        and not (isinstance(values, str) or is_masked(values))
        and len(values) == count
        and all(map(_is_positive, values))
    )


def _is_positive(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:  # a whole number beyond every float
        return False


def as_floats(value: Any, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Read a number or an array of them; texts and booleans are none."""
    try:
        numbers = np.asarray(value)
    except ValueError:  # rows that differ in length
        numbers = np.array(None)
    if numbers.dtype.kind not in "iuf":
        raise wrong(where, f"must be a number or several, got {abbreviated(value)}", value)
    return numbers.astype(float)


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
        raise wrong(where, f"must be a number of at least {least:g}, got {value!r}", value)
    return float(value)


def share(value: Any, where: str) -> float:
    """Check that a value is a number from 0 to 1."""
    if not is_number(value) or value > 1:
        raise wrong(where, f"must be a number from 0 to 1, got {value!r}", value)
    return float(value)


def efficiency(value: Any, where: str) -> float:
    """Check that a value is an efficiency: above 0 and at most 1."""
    if not is_number(value) or not 0 < value <= 1:
        raise wrong(where, f"must be a number above 0 and at most 1, got {value!r}", value)
    return float(value)


def positive(value: Any, where: str) -> float:
    """Check that a value is a finite number above 0."""
    if not is_number(value) or not value > 0:
        raise wrong(where, f"must be a number above 0, got {value!r}", value)
    return float(value)


def match_name(value: Any, valid_names: Collection[Any]) -> Any:
    """Return the valid name that a value stands for, or None; case does not matter."""
    if isinstance(value, str):
        matches = [name for name in valid_names if str(name).casefold() == value.casefold()]
        return value if value in matches else matches[0] if len(matches) == 1 else None
    return value if value in tuple(valid_names) else None


def unknown(
    kind: str, value: Any, valid_names: Collection[Any], more: str = ""
) -> UnknownNameError:
    """Return the error that lists the valid names and the nearest one."""
    listed = ", ".join(map(_shown, valid_names)) or "none"
    text = f"unknown {kind} {value!r}: known are {listed}{more}{nearest(value, valid_names)}"
    return UnknownNameError(kind.partition(" ")[0], value, text)


def _shown(name: Any) -> str:
    """A name in a list of them: an empty one is seen by its quotes."""
    return str(name) or repr(name)


def nearest(value: Any, valid_names: Collection[Any]) -> str:
    """Suggest names that begin with this word, or else the nearest, if it is near."""
    folded, begin = {str(name).casefold(): name for name in valid_names}, str(value).casefold()
    near = [name for name in folded if begin and name.startswith((f"{begin}-", f"{begin}_"))]
    if not 0 < len(near) <= MOST_LISTED:
        near = difflib.get_close_matches(begin, folded, n=1)
    return f"; did you mean {' or '.join(str(folded[name]) for name in near)}?" if near else ""


def resolve_name(value: Any, valid_names: Collection[Any], kind: str, more: str = "") -> Any:
    """Return the valid name that a value stands for, such as a schedule's or a model's."""
    name = match_name(value, valid_names)
    if name is None:
        raise unknown(kind, value, valid_names, more)
    return name


def resolve_choice(value: Any, valid_values: Collection[Any], where: str) -> Any:
    """Return the valid value that an argument, option or key stands for."""
    match = match_name(value, valid_values)
    if match is None:
        listed = ", ".join(map(_shown, valid_values))
        raise wrong(
            where, f"must be one of {listed}, got {value!r}{nearest(value, valid_values)}", value
        )
    return match


def check_types(**arguments: tuple[Any, *tuple[type, ...]]) -> None:
    """Check arguments, each with the types it may have, as public functions do."""
    # Tracers pass: costs and workloads are trees whose leaves are traced, not they themselves.
    for name, (value, *kinds) in arguments.items():
        if not isinstance(value, tuple(kinds)):
            type_names = " or ".join(
                "None" if kind is type(None) else kind.__name__ for kind in kinds
            )
            received = f"{abbreviated(value)} of type {type(value).__name__}"
            raise TypeError(f"{name} must be of type {type_names}, got {received}")


def check_local_search(iterations: Any, seed: Any, time_limit: Any) -> tuple[int, int]:
    """Check how long a search goes on and what it draws from; return iterations and seed."""
    is_limit = isinstance(time_limit, int | float) and time_limit >= 0
    if time_limit is not None and not is_limit:
        received = abbreviated(time_limit)
        raise wrong("time_limit", f"must be at least 0, or None for no limit, got {received}")
    return whole_number(iterations, "iterations", minimum=0), whole_number(seed, "seed", minimum=0)
