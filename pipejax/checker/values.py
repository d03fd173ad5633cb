"""Checks of values in a certificate, and the two errors for certificates that are refused."""

from collections.abc import Callable, Collection
from typing import Any

MAX_REAL = 1e308
MAX_VALUE_TEXT = 100  # characters of a value in an error


class MalformedError(ValueError):
    """Error about data without the form of a certificate."""


class IllegalError(Exception):
    """Error about a certificate whose table cannot run."""


def require_legal(condition: object, reason: str) -> None:
    """Raise an `IllegalError` with this reason if the condition is false."""
    if not condition:
        raise IllegalError(reason)


def require(condition: object, where: str, allowed: str, value: Any) -> None:
    """Raise a `MalformedError` with the allowed and the actual value if a condition is false."""
    if not condition:
        text = repr(value)
        shown = text if len(text) <= MAX_VALUE_TEXT else f"{text[:MAX_VALUE_TEXT]}..."
        raise MalformedError(f"{where} must be {allowed}, got {shown}")


def is_whole(value: Any, least: int = 0) -> bool:
    """Return whether a value is an integer of at least `least`, and not a boolean."""
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
    """Check that a section has exactly the given keys, and return it."""
    if not isinstance(section, dict) or set(section) != set(keys):
        got = sorted(map(str, section)) if isinstance(section, dict) else section
        raise MalformedError(f"{where} must have the keys {', '.join(keys)}, got {got!r}")
    return section


def check_word(value: Any, words: Collection[str], where: str) -> None:
    """Check that a value is one of the given words, with the same case."""
    is_word = isinstance(value, str) and value in words
    require(is_word, where, f"one of {', '.join(words)}", value)


def check_numbers(
    value: Any, shape: tuple[int, ...], where: str, check: Callable[[Any], bool] = is_time
) -> None:
    """Check that a value is a number, or nested lists of numbers of the given shape."""
    if not shape:
        require(check(value), where, FORMS[check], value)
        return
    is_of_shape = isinstance(value, list) and len(value) == shape[0]
    require(is_of_shape, where, f"{shape[0]} numbers or lists", value)
    for entry in value:
        check_numbers(entry, shape[1:], where, check)


def check_table_of_numbers(value: Any, width: int, where: str) -> None:
    """Check that a value is a list of lists, each of `width` integers."""
    require(isinstance(value, list), where, "a list", value)
    check_numbers(value, (len(value), width), where, is_whole)


def depth(value: Any) -> int:
    """Return the number of levels of nested lists: 0 for a number, 1 for a list of numbers."""
    return 1 + depth(value[0]) if isinstance(value, list) and value else 0


def at_microbatch(time: Any, microbatch: int) -> float:
    """Return the time of a microbatch [s]; `time` is a list by microbatch, or a single number."""
    return float(time[microbatch] if isinstance(time, list) else time)
