"""Text for a sweep's axes and measures: column heads with units, and numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipejax.base.data_files import time_unit

# SI unit in the dataset -> divisor and unit in printed tables
IN_TABLES: dict[str, tuple[float, str]] = {
    "B/s": (1e9, "GB/s"),
    "B": (1e9, "GB"),
    "FLOP/s": (1e12, "TFLOP/s"),
    "s": (1e-6, "us"),
    "USD/token": (1e-6, "USD per million tokens"),
}
PERCENTAGES = ("bubble_ratio", "mfu")
FORMS = {"step_time": "{:.5g}", "memory_bytes": "{:.2f}", **dict.fromkeys(PERCENTAGES, "{:.2f}")}


def words(name: str) -> str:
    """Return the name of an axis or a measure in words: "step_time" is "step time"."""
    return name.replace("_bytes", "").replace("_", " ")


Scale = tuple[float, str]


def display_scale(units: Mapping[str, str], name: str, values: Sequence[Any]) -> Scale:
    """Return (divisor, unit) for printing values [SI unit] of an axis or a measure."""
    if name in PERCENTAGES:
        return 0.01, "%"
    unit = units.get(name, "")
    if name == "step_time":
        return time_unit(max(values, default=0.0))
    return IN_TABLES.get(unit, (1.0, "" if unit == "1" else unit))  # "1" is a number without unit


def head(name: str, scale: Scale) -> str:
    """Return the head of a column or the label of an axis: the name with its unit."""
    return f"{words(name)} [{scale[1]}]" if scale[1] else words(name)


def cell(name: str, value: Any, scale: Scale) -> str:
    """Write one value of an axis or a measure in the unit of a scale (divisor, unit)."""
    if not isinstance(value, float):
        return str(value)
    number = value / scale[0]
    return FORMS[name].format(number) if name in FORMS else four_digits(number)


def four_digits(number: float) -> str:
    """Write four significant digits, and all digits before the point of a large number."""
    return f"{number:.0f}" if 9999.5 <= abs(number) < 1e9 else f"{number:.4g}"


def span(name: str, values: list[Any], scale: Scale, count: int) -> str:
    """Write values of an axis, as "1 to 5" or "a, b"; write "any" if they are all `count`."""
    if len(values) == count:
        return "any"
    cells = [cell(name, value, scale) for value in values]
    is_range = isinstance(values[0], float) and len(values) > 2
    return f"{cells[0]} to {cells[-1]}" if is_range else ", ".join(cells)


def named(units: Mapping[str, str], name: str, value: Any) -> str:
    """Write an axis, its value and the unit, such as "latency 5 us"."""
    scale = display_scale(units, name, [value])
    return f"{words(name)} {cell(name, value, scale)} {scale[1]}".rstrip()
