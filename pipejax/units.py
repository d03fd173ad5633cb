"""Data files with a unit in every key, read into plain SI numbers.

A key is a quantity and a unit, as in "bandwidth_GB_per_s". Here is the only place that knows
prefixes; a key without a known unit is an error, never a guess.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNITS: Mapping[str, tuple[str, float]] = {
    "TFLOP_per_s": ("FLOP/s", 1e12),
    "PFLOP_per_s": ("FLOP/s", 1e15),
    "GFLOP": ("FLOP", 1e9),
    "TFLOP": ("FLOP", 1e12),
    "GB_per_s": ("B/s", 1e9),
    "GiB_per_s": ("B/s", 2.0**30),
    "TB_per_s": ("B/s", 1e12),
    "MB": ("B", 1e6),
    "GB": ("B", 1e9),
    "GiB": ("B", 2.0**30),
    "ns": ("s", 1e-9),
    "us": ("s", 1e-6),
    "ms": ("s", 1e-3),
    "s": ("s", 1.0),
}


def parse_json(text: str) -> Any:
    """Read JSON in which no key stands twice.

    Args:
      text: the text.

    Returns:
      What it holds.

    Raises:
      ValueError: if it is not JSON, or an object has a key twice.

    Example:
      >>> parse_json('{"F": 1, "F": 2}')
      Traceback (most recent call last):
      ...
      ValueError: key 'F' stands twice
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"key {key!r} stands twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
      path: the file.

    Returns:
      The object.

    Raises:
      ValueError: if the file is not one JSON object; the message names it.
      OSError: if it cannot be read.
    """
    try:
        data = parse_json(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:  # undecodable bytes are one too
        raise ValueError(f"{path} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def is_number(value: Any, *, least: float = 0.0) -> bool:
    """Return whether a value read from JSON is a finite number of at least `least`.

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
      value: what the file holds.
      where: its place, for the message.
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


def quantity(
    section: Mapping[str, Any], name: str, dimension: str, where: str, default: float | None = None
) -> float:
    """Read a quantity in whatever unit its key states.

    Args:
      section: part of a data file.
      name: quantity, the key without its unit.
      dimension: "FLOP/s", "FLOP", "B/s", "B" or "s".
      where: place of the section, for messages.
      default: value if the quantity is absent; absent is an error if None.

    Returns:
      The quantity in SI units.

    Raises:
      ValueError: if it is missing, given twice, negative or without a unit.

    Example:
      >>> quantity({"bandwidth_GB_per_s": 50}, "bandwidth", "B/s", "network")
      50000000000.0
      >>> quantity({"bandwidth": 50}, "bandwidth", "B/s", "network")
      Traceback (most recent call last):
      ...
      ValueError: network: key 'bandwidth' has no unit: expected bandwidth_GB_per_s, ...
    """
    units = {f"{name}_{unit}": factor for unit, (kind, factor) in UNITS.items()
             if kind == dimension}  # fmt: skip
    if name in section:
        raise ValueError(f"{where}: key {name!r} has no unit: expected {', '.join(units)}")
    given = [key for key in section if key in units]
    if not given and default is not None:
        return default
    if len(given) != 1:
        state = f"has {' and '.join(given)}" if given else "is missing"
        raise ValueError(f"{where}: {name} {state}: expected one of {', '.join(units)}")
    return number(section[given[0]], f"{where}: {given[0]}") * units[given[0]]


def check_keys(section: Any, known: tuple[str, ...], where: str) -> None:
    """Refuse keys that nothing reads.

    Args:
      section: part of a data file.
      known: legal keys; a quantity stands for the key with any unit.
      where: place of the section, for messages.

    Raises:
      ValueError: if the section is not an object or has another key.
    """
    if not isinstance(section, dict):
        raise ValueError(f"{where} must be an object with the keys {', '.join(known)}")
    for key in section:
        stem = next((key[: -len(unit) - 1] for unit in UNITS if key.endswith(f"_{unit}")), key)
        if key not in known and stem not in known:
            raise ValueError(f"{where}: unknown key {key!r}: known are {', '.join(known)}")
