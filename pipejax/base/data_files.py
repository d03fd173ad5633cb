"""Readers of JSON and CSV files, and conversion of units; only this module has SI prefixes."""

import csv
import functools
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from pipejax.base.checks import number, unknown
from pipejax.base.files import read_file

_UNITS = json.loads(Path(__file__).with_name("units.json").read_text("utf-8"))
# {unit of a key: (dimension, SI units in it)}
UNITS: Mapping[str, tuple[str, float]] = {k: tuple(unit) for k, unit in _UNITS["keys"].items()}
REPORT_UNITS: Mapping[str, tuple[float, str]] = _UNITS["reports"]  # {unit: (factor, shown unit)}
# for each dimension, the units that may follow a number in text, with their SI factors
UNITS_BY_DIMENSION: Mapping[str, Mapping[str, float]] = _UNITS["texts"]
_BITS = re.compile("([kMGTP]?)(?:b|bit|bits)(?:/s|ps)")
_UNIT = re.compile(r"(?<![A-Za-z])[^\W\d_]+(/[^\W\d_]+)?$")


def parse_json(text: str) -> Any:
    """Read JSON, and refuse duplicate keys and numbers that are not finite."""

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Build the dictionary of a JSON object from its keys and values."""
        section = dict(pairs)
        if len(section) < len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"key {twice!r} stands twice")
        for key, value in pairs:
            if not _is_finite(value):
                raise ValueError(f"{key} must be finite, got {value!r}")
        return section

    try:
        return json.loads(text, object_pairs_hook=to_dict, parse_float=exact_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _is_finite(value: Any) -> bool:
    """Return whether a JSON value, or every number in a nested list, is finite."""
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    data = _load(path, parse_json, "JSON")
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def load_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file."""
    import tomllib  # few commands need it

    parse = functools.partial(tomllib.loads, parse_float=exact_float)
    data: dict[str, Any] = _load(path, parse, "TOML")
    return data


def _load(path: str | Path, parse: Callable[[str], Any], language: str) -> Any:
    content = read_file(path)
    try:
        return parse(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # undecodable bytes are a ValueError too
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not {language}: {reason}") from None


def to_si(value: float, factor: float) -> float:
    """Multiply a number by the factor of its unit, with one rounding only."""
    return value / round(1 / factor) if factor < 1 else value * factor


def exact_float(text: str) -> float:
    """Read a number; refuse a number that a float rounds to 0, such as 1e-400."""
    value = float(text)
    if not value and not {*text.lower().partition("e")[0]}.isdisjoint("123456789"):
        raise ValueError(f"{text} is too small for a float: the least above 0 is 5e-324")
    return value


def read_quantity(text: str, dimension: str, where: str) -> float | None:
    """Read a text such as "40us" in the SI unit `dimension`; None if it has no unit."""
    value, unit = _split(text.replace("\u03bc", "\u00b5"))  # Greek mu to the micro sign
    if not unit:
        return None
    units = UNITS_BY_DIMENSION[dimension]
    if unit not in units:
        if bits := _BITS.fullmatch(unit):
            reason = f"bits per second are no unit here: divide by 8 and give {bits[1]}B/s"
            raise ValueError(f"{where} {text!r}: {reason}")
        raise ValueError(f"{where} {text!r}: {unknown('unit', unit, units)}")
    try:
        amount = number(parse_float(value), where)
    except ValueError:
        raise ValueError(
            f"{where} must be a number of at least 0 before {unit}, got {text!r}"
        ) from None
    return to_si(amount, units[unit])


def parse_ratio(text: str) -> float:
    """Read a number or a percentage such as "20 %"; return NaN for any other text."""
    bare = text.strip().removesuffix("%")
    return parse_float(bare.strip()) / (100 if "%" in text else 1)


def parse_float(text: str) -> float:
    """Read a number; return NaN, which fails every range check, for any other text."""
    try:
        float(text)
    except ValueError:
        return math.nan
    return exact_float(text) if is_plain(text) else math.nan


def is_plain(text: str) -> bool:
    """Return whether a number has only ASCII digits; Python also reads 1_0 and Arabic digits."""
    return text.isascii() and "_" not in text


def _split(text: str) -> tuple[str, str]:
    """Split a text such as "40us" into (number, unit); without a digit, the unit is empty."""
    unit = _UNIT.search(text)
    if unit is None or not any(letter.isdigit() for letter in text):
        return text, ""  # "nan" and "inf" are not units
    return text[: unit.start()].strip(), unit[0]


def time_unit(longest: float) -> tuple[float, str]:
    """Return (seconds, name) of the largest time unit that is not above the longest time."""
    for name in ("s", "ms", "us", "ns"):
        if abs(longest) >= UNITS[name][1]:
            return UNITS[name][1], name
    smallest = "ns" if longest else "s"
    return UNITS[smallest][1], smallest


_WITH_COMMA = re.compile(r"\s*-?[\d.]*\d,[\d.,]*(?:e[+-]?\d+)?\s*", re.IGNORECASE)


def read_lines(path: Path) -> list[list[str]]:
    """Read a CSV file as a list of lines of cells, the header first; skip empty lines."""
    try:
        text = read_file(path).decode("utf-8-sig")
        header = text.partition("\n")[0]  # spreadsheets also separate cells by ; or tabs
        delimiter = next((mark for mark in ",;\t" if mark in header), ",")
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not CSV: {error}") from None
    lines = [[cell.strip() for cell in line] for line in lines if any(line)] or [[]]
    points = decimal_points({cell for line in lines for cell in line})
    return [[points.get(cell, cell) for cell in line] for line in lines]


def decimal_points(cells: Set[str]) -> dict[str, str]:
    """Return {number with a decimal comma: with a point}; {} if commas may separate thousands."""
    # 1,250,000 and 12,500.5 have thousands, 0,500 and 12,5 have not, 12,500 alone may have
    numbers = {cell for cell in cells if _WITH_COMMA.fullmatch(cell)}
    has_thousands = any("." in text or text.count(",") > 1 for text in numbers)
    if has_thousands or all(
        re.fullmatch(r"-?[1-9]\d{0,2}(,\d{3})+", text.strip()) for text in numbers
    ):
        return {}
    return {text: text.replace(",", ".") for text in numbers}
