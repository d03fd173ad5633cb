"""Checks of values that come from Python, the command line or a file; memory of this process."""

import contextlib
import difflib
import functools
import math
import operator
import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.base.display import abbreviated

CGROUPS = Path("/sys/fs/cgroup")
ALWAYS_FREE = 1 << 18  # bytes that every process has, so no limit is read
MAX_LISTED = 12  # legal values that an error lists
MAX_COUNT = 10**9  # limit of all counts, so that products of two counts are exact


class ArgumentError(ValueError):
    """An argument has an illegal value; the command line names its option in the error."""

    # `value` distinguishes arguments of the same name

    def __init__(self, argument: str, value: Any, text: str) -> None:
        self.argument, self.value, self.text = argument, value, text

    def __str__(self) -> str:
        return self.text


class UnknownNameError(ArgumentError):
    """A name is unknown; `argument` says what kind of name is expected, such as "schedule"."""


class MismatchError(ArgumentError):
    """Two values contradict each other, although each value alone is valid."""

    def __init__(self, text: str, argument: str = "") -> None:
        super().__init__(argument, None, text)


def wrong(where: str, text: str, value: Any = None) -> ArgumentError:
    """Build the error about an illegal argument; the first word of `where` is its name."""
    return ArgumentError(re.split("[ :[]", where, maxsplit=1)[0], value, f"{where} {text}")


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Return values as a tuple; a text or a number becomes a tuple with one entry."""
    is_single = isinstance(values, str) or not isinstance(values, Iterable)
    return (values,) if is_single else tuple(values)


def whole_number(value: Any, where: str, *, minimum: int = 1, maximum: int | None = None) -> int:
    """Check that a value is a whole number of at least `minimum` and at most `maximum`."""
    try:
        count = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < minimum:
        raise wrong(where, f"must be a whole number of at least {minimum}, got {value!r}", value)
    if maximum is not None and count > maximum:
        raise wrong(where, f"must be at most {maximum}, got {value}", value)
    return count


def divisors(total: int) -> list[int]:
    """List the divisors of a whole number of at least 1, ascending."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return small + [total // d for d in reversed(small) if d * d != total]


def legal_divisors(total: int, value: int) -> str:
    """Write the divisors of `total`; if there are many, only those nearest to `value`."""
    legal = divisors(total)
    if len(legal) <= MAX_LISTED:
        return f"legal are {', '.join(map(str, legal))}"
    lower = max(divisor for divisor in legal if divisor <= value)
    upper = min((divisor for divisor in legal if divisor >= value), default=lower)
    return f"the nearest that do are {' and '.join(map(str, sorted({lower, upper})))}"


def is_masked(values: Any) -> bool:
    """Return whether values are a masked array of NumPy."""
    masked = sys.modules.get("numpy.ma")  # no import: without it, no masked array exists
    return masked is not None and isinstance(values, masked.MaskedArray)


def whole_numbers(values: Any, where: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Check that values are whole numbers, in an array or in lists; return an int32 array."""
    if type(values) is np.ndarray and values.dtype == np.int32:
        return values
    try:
        numbers = np.asarray(values)
        # NumPy reads a boolean in a list of whole numbers as a whole number
        entries = () if hasattr(values, "dtype") else np.asarray(values, object).ravel()
    except ValueError:  # rows that differ in length
        numbers, entries = np.array(None), ()
    is_whole = numbers.size == 0 or numbers.dtype.kind in "iu"
    is_whole &= not is_masked(values)
    if not is_whole or any(isinstance(entry, bool | np.bool_) for entry in entries):
        raise wrong(where, f"must be whole numbers, got {abbreviated(values)}", values)
    if numbers.size and not -MAX_COUNT <= numbers.min() <= numbers.max() <= MAX_COUNT:
        raise wrong(where, f"must be whole numbers of at most {MAX_COUNT}", values)
    return numbers.astype(np.int32)


def are_positive(values: Any, count: int) -> bool:
    """Return whether values are a sequence of `count` finite, positive numbers."""
    return (
        isinstance(values, Sequence | np.ndarray)
        and not (isinstance(values, str) or is_masked(values))
        and len(values) == count
        and all(is_number(value) and value > 0 for value in values)
    )


def as_floats(value: Any, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Convert a number or an array of numbers to floats; refuse texts and booleans."""
    try:
        numbers = np.asarray(value)
    except ValueError:  # rows that differ in length
        numbers = np.array(None)
    if numbers.dtype.kind not in "iuf":
        raise wrong(where, f"must be a number or several, got {abbreviated(value)}", value)
    return numbers.astype(float)


def is_number(value: Any, *, least: float = 0.0) -> bool:
    """Return whether a value is a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return bool(math.isfinite(value) and value >= least)
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
    """Return the valid name that equals a value, ignoring case; None if there is none."""
    if isinstance(value, str):
        matches = [name for name in valid_names if str(name).casefold() == value.casefold()]
        if value not in matches:
            return matches[0] if len(matches) == 1 else None
    return value if value in tuple(valid_names) else None


def unknown(
    kind: str, value: Any, valid_names: Collection[Any], more: str = ""
) -> UnknownNameError:
    """Build the error about an unknown name, which lists the valid names and the nearest one."""
    names = ", ".join(map(_quote_empty, valid_names))
    listed = f"known are {names}" if names else "there are none"
    text = f"unknown {kind} {value!r}: {listed}{more}{nearest(value, valid_names)}"
    return UnknownNameError(kind.partition(" ")[0], value, text)


def _quote_empty(name: Any) -> str:
    """Return a name, or a pair of quotes if the name is empty."""
    return str(name) or repr(name)


NEAR = 0.9  # an error suggests two names if both have at least this share of equal letters


SYNONYMS = {"gpus": "accelerators", "devices": "accelerators", "ranks": "accelerators"}


def nearest(value: Any, valid_names: Collection[Any]) -> str:
    """Return the text "; did you mean x?" for an error, or "" if no name is similar."""
    lower_names = {str(name).casefold(): name for name in valid_names}
    word = str(value).casefold()
    if SYNONYMS.get(word) in lower_names:
        return f"; did you mean {SYNONYMS[word]}?"
    matches = [name for name in lower_names if word and name.startswith((f"{word}-", f"{word}_"))]
    if not 0 < len(matches) <= MAX_LISTED:
        matches = difflib.get_close_matches(word, lower_names, n=2, cutoff=NEAR)
        matches = matches or difflib.get_close_matches(word, lower_names, n=1)
    if not matches:
        return ""
    return f"; did you mean {' or '.join(str(lower_names[name]) for name in matches)}?"


def resolve_name(value: Any, valid_names: Collection[Any], kind: str, more: str = "") -> Any:
    """Return the valid name that equals a value, ignoring case, or raise an UnknownNameError."""
    name = match_name(value, valid_names)
    if name is None:
        raise unknown(kind, value, valid_names, more)
    return name


def resolve_choice(value: Any, valid_values: Collection[Any], where: str) -> Any:
    """Return the valid value that an argument equals, ignoring case, or raise an error."""
    match = match_name(value, valid_values)
    if match is None:
        listed = ", ".join(map(_quote_empty, valid_values))
        hint = nearest(value, valid_values)
        raise wrong(where, f"must be one of {listed}, got {value!r}{hint}", value)
    return match


def check_types(**arguments: tuple[Any, *tuple[type, ...]]) -> None:
    """Check types: each keyword names an argument and has the tuple (value, type, type, ..)."""
    # Traced arguments pass: JAX traces the leaves of a record, not the record.
    for name, (value, *kinds) in arguments.items():
        if not isinstance(value, tuple(kinds)):
            names = ("None" if kind is type(None) else kind.__name__ for kind in kinds)
            received = f"{abbreviated(value)} of type {type(value).__name__}"
            raise TypeError(f"{name} must be of type {' or '.join(names)}, got {received}")


def check_local_search(iterations: Any, seed: Any, time_limit: Any) -> tuple[int, int]:
    """Check the limits and the seed of a search; return iterations and seed."""
    is_limit = isinstance(time_limit, int | float) and time_limit >= 0
    if time_limit is not None and not is_limit:
        received = abbreviated(time_limit)
        raise wrong("time_limit", f"must be at least 0, or None for no limit, got {received}")
    return whole_number(iterations, "iterations", minimum=0), whole_number(seed, "seed", minimum=0)


def memory(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many bytes of memory the machine, the container and the process limits allow."""
    limits = [sys.maxsize]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # sysconf may be missing
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(ImportError, OSError):
        import resource

        limits += [
            soft
            for soft, _ in map(resource.getrlimit, (resource.RLIMIT_AS, resource.RLIMIT_DATA))
            if soft != resource.RLIM_INFINITY
        ]
    return min([*limits, *_container_limits(cgroups, membership)])


@functools.cache  # reading the files takes longer than building a small table
def _container_limits(cgroups: Path, membership: Path) -> list[int]:
    """List the memory limits [bytes] of this process's control groups, version 1 or 2."""
    limits = []
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            folder = cgroups / controllers / name.lstrip("/")
            for group in (folder, *folder.parents):
                for file in ("memory.max", "memory.limit_in_bytes"):
                    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                        limits.append(int((group / file).read_text()))
                if group == cgroups:
                    break
    return limits


def check_fits(num_bytes: int, what: str) -> None:
    """Raise a ValueError if the machine has less memory; `what` is its subject and verb."""
    if num_bytes > ALWAYS_FREE and num_bytes > (available := memory()):
        raise ValueError(
            f"{what} at least {num_bytes // 10**9:,} GB of memory; this machine has "
            f"{available / 1e9:,.1f} GB"
        )
