"""Numbers of a system by name, as `compute.peak`: read, and written to its file."""

from collections.abc import Mapping
from typing import Any

from pipejax.base.data_files import UNITS
from pipejax.costs.system import System
from pipejax.costs.system_fields import FIELDS, SECTIONS
from pipejax.costs.system_parts import Number

# in which unit a file states a quantity that was fitted
WRITTEN_IN: Mapping[str, str] = {
    "FLOP/s": "TFLOP_per_s",
    "B/s": "GB_per_s",
    "B": "GB",
    "FLOP": "GFLOP",
    "s": "us",
}


def dimension_of(name: str) -> str:
    """Return the SI unit of a number, empty for a share or a count."""
    section, key = name.split(".")
    return SECTIONS[section][key]


def number_of(system: System, name: str) -> Number:
    """Return a number of a system; of a curve, the share that the largest ops reach."""
    found: Any = system
    for part in FIELDS[name]:
        found = getattr(found, part)
    return found[-1] if isinstance(found, tuple) else found


def written_with(data: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """Return the content of a system file with other numbers, each in one unit.

    `values` are in SI units. What else the file says stays as it is.
    """
    changed = {key: dict(part) if isinstance(part, dict) else part for key, part in data.items()}
    for name, value in values.items():
        section, key = name.split(".")
        dimension = SECTIONS[section][key]
        own = changed.setdefault(section, {})
        units = [f"{key}_{unit}" for unit, (kind, _) in UNITS.items() if kind == dimension]
        for known in (key, *units):
            own.pop(known, None)
        if dimension:
            unit = WRITTEN_IN[dimension]
            own[f"{key}_{unit}"] = value / UNITS[unit][1]
        else:
            own[key] = value
    return changed
