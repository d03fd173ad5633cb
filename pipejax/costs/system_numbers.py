"""Numbers of a system by name, as `compute.peak`: read, replaced, and written to its file."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipejax.base.units import UNITS
from pipejax.costs.system import FIELDS, SECTIONS, Efficiency, Number, System

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


def put_number(system: System, name: str, value: Number) -> System:
    """Replace a number; a share in the place of a curve is the same for all sizes."""
    found: System = _put(system, FIELDS[name], value)
    return found


def _put(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    if rest == ["shares"]:
        return dataclasses.replace(tree, **{name: Efficiency((0.0,), (value,))})
    new = _put(getattr(tree, name), tuple(rest), value) if rest else value
    return dataclasses.replace(tree, **{name: new})


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
