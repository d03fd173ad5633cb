"""Values that a certificate may hold, and the two ways to refuse one."""

from collections.abc import Callable, Collection
from typing import Any

MAX_REAL = 1e308
MAX_VALUE_TEXT = 100  # characters of a value in an error


class MalformedError(ValueError):
    """Error of data that is no certificate."""


class IllegalError(Exception):
    """Error of a table that cannot run."""


def require_legal(condition: object, reason: str) -> None:
    """Raise an `IllegalError` unless a condition holds."""
    if not condition:
        raise IllegalError(reason)


def require(condition: object, where: str, allowed: str, value: Any) -> None:
    """Raise a `MalformedError` that names a value unless a condition holds."""
    if not condition:
        text = repr(value)
        shown = text if len(text) <= MAX_VALUE_TEXT else f"{text[:MAX_VALUE_TEXT]}..."
        raise MalformedError(f"{where} must be {allowed}, got {shown}")


def is_whole(value: Any, least: int = 0) -> bool:
    """Return whether a value is a whole number of at least `least`, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 10**300


def is_real(value: Any) -> bool:
    """Return whether a value is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -MAX_REAL < value < MAX_REAL


def is_time(value: Any) -> bool:
    """Return whether a value is a finite number of at least 0."""
    return is_real(value) and value >= 0


def is_share(value: Any) -> bool:
    """Return whether a value is a number from 0 to 1."""
    return is_time(value) and value <= 1


def is_list(value: Any, check: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list whose entries all pass a check."""
    return isinstance(value, list) and all(map(check, value))


FORMS: dict[Callable[[Any], bool], str] = {
    is_time: "a number of at least 0",
    is_share: "a number from 0 to 1",
    is_whole: "a whole number of at least 0",
}


def check_keys(section: Any, keys: Collection[str], where: str) -> dict[str, Any]:
    """Return a section, which has exactly these keys."""
    if not isinstance(section, dict) or set(section) != set(keys):
        got = sorted(map(str, section)) if isinstance(section, dict) else section
        raise MalformedError(f"{where} must have the keys {', '.join(keys)}, got {got!r}")
    return section


def check_word(value: Any, words: Collection[str], where: str) -> None:
    """Check that a value is one of some words, letter for letter."""
    is_word = isinstance(value, str) and value in words
    require(is_word, where, f"one of {', '.join(words)}", value)


def check_numbers(
    value: Any, shape: tuple[int, ...], where: str, check: Callable[[Any], bool] = is_time
) -> None:
    """Check that a value is a number, or a list of lists of numbers of a shape."""
    if not shape:
        require(check(value), where, FORMS[check], value)
        return
    is_of_shape = isinstance(value, list) and len(value) == shape[0]
    require(is_of_shape, where, f"{shape[0]} numbers or lists", value)
    for entry in value:
        check_numbers(entry, shape[1:], where, check)


def check_table_of_numbers(value: Any, width: int, where: str) -> None:
    """Check that a value is a list of lists of so many whole numbers."""
    require(isinstance(value, list), where, "a list", value)
    check_numbers(value, (len(value), width), where, is_whole)


def depth(value: Any) -> int:
    """Return the number of nested lists around the first entry."""
    return 1 + depth(value[0]) if isinstance(value, list) and value else 0


def at_microbatch(time: Any, microbatch: int) -> float:
    """Return a time that is one number, or has one for each microbatch [s]."""
    return float(time[microbatch] if isinstance(time, list) else time)
