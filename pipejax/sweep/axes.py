"""One axis of a sweep: a list of values, or a linear or logarithmic range."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.checks import MAX_COUNT, efficiency, number, one_of, positive, whole_number
from pipejax.base.units import check_keys, quantity
from pipejax.costs.system import SECTIONS

SCALES = ("linear", "log")
MAX_POINTS = 10**6  # of one axis: a label each
SMALLEST, LARGEST = 1e-15, 1e24  # of a field of a system, in SI units
RANGE = ("from", "to", "points", "scale")


class Axis(NamedTuple):
    """Values that one dimension of a grid takes.

    Attributes:
      name: of the dimension.
      values: what it takes, in SI units.
      unit: of the values, or "".
      is_listed: whether a list or range was given, not a single value: only then the dataset has
        a dimension for it.
    """

    name: str
    values: tuple[Any, ...]
    unit: str
    is_listed: bool


def label(value: Any) -> Any:
    """Return what a value is called in the dataset."""
    return str(value) if isinstance(value, tuple) else getattr(value, "name", value)


def read_axis(name: str, given: Any, where: str, check: Any, unit: str = "") -> Axis:
    """Read one value or a list of them."""
    is_listed = isinstance(given, Sequence) and not isinstance(given, str)
    values = tuple(check(value, where) for value in (given if is_listed else [given]))
    if not values:
        raise ValueError(f"{where} is empty: an axis needs at least one value")
    labels = [label(value) for value in values]
    if len(set(labels)) < len(labels):
        twice = next(name for name in labels if labels.count(name) > 1)
        raise ValueError(f"{where} holds {twice} twice")
    return Axis(name, values, unit, is_listed)


def read_system_axes(section: Any, where: str) -> tuple[Axis, ...]:
    """Read the axes over fields of the systems.

    They are written as in a system file, section by section and with a unit in every key; a value
    is a number, a list, or `{from, to, points, scale}` with the scale "linear" or "log".
    """
    if not isinstance(section, Mapping):
        raise ValueError(f"{where} must be a table of {', '.join(SECTIONS)}, got {section!r}")
    check_keys(dict(section), dict.fromkeys(SECTIONS, ""), where)
    axes: list[Axis] = []
    for part, fields in section.items():
        place = f"{where}: {part}"
        check_keys(fields, SECTIONS[part], place)
        for key, given in fields.items():
            axes.append(_read_field(part, key, given, place))
            if axes[-1].name in [axis.name for axis in axes[:-1]]:
                raise ValueError(f"{place}: {key}: {axes[-1].name} is given twice")
    return tuple(axes)


def _read_field(part: str, key: str, given: Any, place: str) -> Axis:
    name = next(
        name
        for name in sorted(SECTIONS[part], key=len, reverse=True)
        if key == name or key.startswith(f"{name}_")
    )
    where, dimension = f"{place}: {key}", SECTIONS[part][name]
    if isinstance(given, Mapping):
        given = _read_range(given, where)
    axis = read_axis(f"{part}.{name}", given, where, _CHECKS.get(name, positive), dimension)
    if not dimension:
        return axis
    values = tuple(quantity({key: value}, name, dimension, place) for value in axis.values)
    for given_value, value in zip(axis.values, values, strict=True):
        if value and not SMALLEST <= value <= LARGEST:  # what no time could be made of
            raise ValueError(
                f"{where} must be from {SMALLEST:g} to {LARGEST:g} {dimension}, got {given_value:g}"
            )
    return axis._replace(values=values)


def _read_range(given: Mapping[str, Any], where: str) -> list[float]:
    check_keys(dict(given), dict.fromkeys(RANGE, ""), where)
    for key in ("from", "to", "points"):
        if key not in given:
            raise ValueError(f"{where}: {key} is missing: a range is {{{', '.join(RANGE)}}}")
    low, high = (number(given[key], f"{where}: {key}") for key in ("from", "to"))
    points = whole_number(given["points"], f"{where}: points", most=MAX_POINTS)
    scale = one_of(given.get("scale", "linear"), SCALES, f"{where}: scale")
    if scale == "log" and not min(low, high) > 0:
        raise ValueError(f"{where}: a log range needs ends above 0, got {low:g} to {high:g}")
    if points == 1 and low != high:
        raise ValueError(f"{where}: one point cannot reach from {low:g} to {high:g}")
    spaced = np.geomspace if scale == "log" else np.linspace
    return spaced(low, high, points).tolist()


count = partial(whole_number, most=MAX_COUNT)

_CHECKS: Mapping[str, Any] = {"latency": number, "efficiency": efficiency, "gpus": count}
