"""Data files: JSON with a unit in every key, read into plain SI numbers, and cells of CSV.

A key is a quantity and a unit, as in "bandwidth_GB_per_s". Only this module knows
prefixes; a key without a known unit is an error, never a guess. Every mistake in a CSV file is
named with its file, row and column.
"""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pipejax.base.checks import MAX_COUNT, number, share, unknown, whole_number
from pipejax.base.files import read_file

Row = TypeVar("Row")

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
    "TB": ("B", 1e12),
    "ns": ("s", 1e-9),
    "us": ("s", 1e-6),
    "ms": ("s", 1e-3),
    "s": ("s", 1.0),
    "USD_per_hour": ("USD/s", 1 / 3600),
}

_BYTES: Mapping[str, float] = {
    "B": 1,
    **{f"{prefix}B": 1e3**k for k, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024.0**k for k, prefix in enumerate("KMGT", 1)},
}
# units that may follow a number in text, by dimension: factors of the SI unit
WRITTEN: Mapping[str, Mapping[str, float]] = {
    "s": {
        "ns": 1e-9,
        "us": 1e-6,
        "\N{MICRO SIGN}s": 1e-6,
        "ms": 1e-3,
        "s": 1,
        "min": 60,
        "h": 3600,
    },
    "B": _BYTES,
    "B/s": {f"{unit}/s": factor for unit, factor in _BYTES.items()},
    "FLOP/s": {"FLOP/s": 1, **{f"{prefix}FLOP/s": 1e3**k for k, prefix in enumerate("kMGTP", 1)}},
}
_BITS = re.compile("([kMGTP]?)(?:b|bit|bits)(?:/s|ps)")
_UNIT = re.compile(r"(?<![A-Za-z])[^\W\d_]+(/[^\W\d_]+)?$")


def parse_json(text: str) -> Any:
    """Read JSON, and refuse duplicate keys and numbers that are not finite."""

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        section = dict(pairs)
        if len(section) < len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"key {twice!r} stands twice")
        for key, value in pairs:
            if not _is_finite(value):
                raise ValueError(f"{key} must be finite, got {value!r}")
        return section

    try:
        return json.loads(text, object_pairs_hook=to_dict)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _is_finite(value: Any) -> bool:
    """Return whether a JSON value, or every value of a list, is neither NaN nor infinite."""
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def load_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    content = read_file(path)
    try:
        data = parse_json(content.decode("utf-8-sig"))
    except ValueError as error:  # undecodable bytes are one too
        raise ValueError(f"{path} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def quantity(
    section: Mapping[str, Any], name: str, dimension: str, where: str, default: float | None = None
) -> float:
    """Read `{name}_{unit}` from a section, in SI units; the key's unit must have the dimension."""
    key_factors = {
        f"{name}_{unit}": factor
        for unit, (unit_dimension, factor) in UNITS.items()
        if unit_dimension == dimension
    }
    valid_keys = ", ".join(key_factors)
    if name in section:
        raise ValueError(f"{where}: key {name!r} has no unit: expected {valid_keys}")
    keys = [key for key in section if key in key_factors]
    if not keys and default is not None:
        return default
    if len(keys) != 1:
        state = f"has {' and '.join(keys)}" if keys else "is missing"
        raise ValueError(f"{where}: {name} {state}: expected one of {valid_keys}")
    (key,) = keys
    return to_si(number(section[key], f"{where}: {key}"), key_factors[key])


def to_si(value: float, factor: float) -> float:
    """Convert a number to SI units, correctly rounded."""
    return value / round(1 / factor) if factor < 1 else value * factor


def read_quantity(text: str, dimension: str, where: str) -> float | None:
    """Read a number with a unit behind it, such as "40us", "80GiB" or "100GB/s", in SI units."""
    value, unit = _split(text)
    if not unit:
        return None
    units = WRITTEN[dimension]
    if unit not in units:
        if bits := _BITS.fullmatch(unit):
            reason = f"bits per second are not known: divide by 8 and give {bits[1]}B/s"
            raise ValueError(f"{where} {text!r}: {reason}")
        raise ValueError(f"{where} {text!r}: {unknown('unit', unit, units)}")
    try:
        plain = value.isascii() and "_" not in value
        return to_si(number(float(value) if plain else None, where), units[unit])
    except ValueError:
        raise ValueError(
            f"{where} must be a number of at least 0 before {unit}, got {text!r}"
        ) from None


def _split(text: str) -> tuple[str, str]:
    """Split a text such as "40us" into number and unit; the unit is empty if there is no digit."""
    unit = _UNIT.search(text)
    if unit is None or not any(letter.isdigit() for letter in text):
        return text, ""  # so "nan" and "inf" are no units
    return text[: unit.start()].strip(), unit[0]


def check_keys(section: Any, dimensions: Mapping[str, str], where: str) -> None:
    """Refuse unknown keys; `dimensions` maps each known key to its dimension, or to ""."""
    valid_keys = []
    for key, dimension in dimensions.items():
        units = [unit for unit, (unit_dimension, _) in UNITS.items() if unit_dimension == dimension]
        valid_keys += [f"{key}_{unit}" for unit in units] if dimension else [key]
    if not isinstance(section, dict):
        raise ValueError(f"{where} must be an object with the keys {', '.join(valid_keys)}")
    for key in section:
        # `quantity` refuses a key that lacks its unit, and names the units
        if key not in valid_keys and not dimensions.get(key):
            raise ValueError(f"{where}: {unknown('key', key, valid_keys)}")


def time_unit(longest: float) -> tuple[float, str]:
    """Return the largest time unit of at most the longest time: its seconds and its name."""
    for name in ("s", "ms", "us", "ns"):
        if abs(longest) >= UNITS[name][1]:
            return UNITS[name][1], name
    return UNITS["ns" if longest else "s"][1], "ns" if longest else "s"


def read_lines(path: Path) -> list[list[str]]:
    """Read the cells of a CSV file, line by line, its header first."""
    try:
        text = read_file(path).decode("utf-8-sig")
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not CSV: {error}") from None
    return [[cell.strip() for cell in line] for line in lines if line] or [[]]


def read_each(
    path: Path, columns: Collection[str], read: Callable[[int, dict[str, str]], Row]
) -> list[Row]:
    """Apply `read` to each row of a CSV file: its number from 1, and its cells but for empty ones.

    An error of a row names file and row.
    """
    rows = []
    for row_number, cells in enumerate(_cells(path, columns), 1):
        try:
            rows.append(read(row_number, cells))
        except ValueError as error:
            reason = getattr(error, "reason", error)  # a ScheduleError appends its table
            raise ValueError(f"{path}, row {row_number}: {reason}") from None
    return rows


def _cells(path: Path, columns: Collection[str]) -> list[dict[str, str]]:
    """Read the cells of each row by column name, without empty ones; check the header."""
    lines = read_lines(path)
    if len(lines) < 2:
        raise ValueError(f"{path} has no rows: give a header and a row for each run")
    header, *rows = lines
    for name in header:
        if name not in columns:
            raise ValueError(f"{path}: {unknown('column', name, columns)}")
        if header.count(name) > 1:
            raise ValueError(f"{path}: column {name} stands twice")
    for row_number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(
                f"{path}, row {row_number}: it has {len(row)} cells, the header {len(header)}"
            )
    return [{name: cell for name, cell in zip(header, row, strict=True) if cell} for row in rows]


def whole_cell(text: str, name: str, minimum: int, maximum: int) -> int:
    """Read a whole number."""
    value = int(text) if text.isascii() and text.isdigit() else text
    return whole_number(value, name, minimum=minimum, maximum=maximum)


def relative_variance(cells: Mapping[str, str], mean: float) -> float:
    """Return the variance of the mean of `n` runs with standard deviation `spread`, over mean^2."""
    repetitions = whole_cell(cells.get("n", "1"), "n", 1, MAX_COUNT)
    spread = positive_cell(cells, "spread") if "spread" in cells else 0.0
    return (spread / mean) ** 2 / repetitions if spread else 0.0


def share_cell(cells: Mapping[str, str], name: str) -> float:
    """Read a number from 0 to 1."""
    try:
        return share(float(cells[name]), name)
    except ValueError:
        raise ValueError(f"{name} must be a number from 0 to 1, got {cells[name]!r}") from None


def positive_cell(cells: Mapping[str, str], name: str, *, or_zero: bool = False) -> float:
    """Read a number above 0 (or of at least 0), NaN where the cell is empty."""
    if name not in cells:
        return math.nan
    try:
        value = float(cells[name])
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf or (or_zero and value == 0)):
        least = "of at least 0" if or_zero else "above 0"
        raise ValueError(f"{name} must be a number {least}, got {cells[name]!r}")
    return value
