"""Measured costs from a CSV file with a row for each stage: the content of a cost file in JSON.

So a spreadsheet is a door to the same reader; here is only what a table has of its own: units in
its header, and mistakes that are named with row and column.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipejax.base.checks import MAX_COUNT, nearest
from pipejax.base.data_files import UNITS, positive_cell, read_each, read_lines, to_si, whole_cell
from pipejax.costs.costs import MESSAGE_FIELDS, TIME_FIELDS

BACK = "_back"  # behind a part of messages that are gradients
_PARTS = {**dict.fromkeys(MESSAGE_FIELDS, "s"), "bytes": "B", "bandwidth": "B/s"}
_MESSAGES = {f"{part}{way}": kind for part, kind in _PARTS.items() for way in ("", BACK)}
# columns beside `stage`, and the dimension that the unit in their header has
COLUMNS: Mapping[str, str] = {**dict.fromkeys(TIME_FIELDS, "s"), **_MESSAGES}


def read_csv(path: Path) -> dict[str, Any]:
    """Read a file of costs that is a table, into what a file of JSON would hold."""
    # Headers are `stage` and columns with a unit: F_ms, latency_us, bandwidth_GB_per_s. A message
    # stands in the row of the stage before its boundary, so the last row has none.
    header = read_lines(path)[0]
    if "stage" not in header:
        hint = ": columns are parted by ,, not by ;" * (";" in "".join(header))
        raise ValueError(
            f"{path} is not JSON, and no table of costs: column 'stage' is missing, of a row for "
            f"each stage from 0{hint}"
        )
    heads = {name: _column(name, path) for name in header}
    columns = {name: head for name, head in heads.items() if name != "stage"}
    keys = [key for key, _ in columns.values()]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{path}: column {key} stands twice, with two units")
    rows: dict[int, dict[str, float]] = {}

    def read(_: int, cells: dict[str, str]) -> None:
        stage = whole_cell(cells.get("stage", ""), "stage", 0, MAX_COUNT)
        if stage in rows:
            raise ValueError(f"stage {stage} stands twice")
        rows[stage] = {
            key: to_si(positive_cell(cells, name, or_zero=True), factor)
            for name, (key, factor) in columns.items()
            if name in cells
        }

    read_each(path, list(heads), read)
    for stage in range(len(rows)):
        if stage not in rows:
            raise ValueError(f"{path}: stage {stage} has no row: stages count from 0")
    return _content(path, keys, [rows[stage] for stage in range(len(rows))])


def _column(name: str, path: Path) -> tuple[str, float]:
    """Find what a column holds, and the factor of its unit."""
    if name == "stage":
        return name, 1.0
    for key, kind in COLUMNS.items():
        units = {f"{key}_{unit}": factor for unit, (of, factor) in UNITS.items() if of == kind}
        if kind == "B":  # the word is a unit already
            units = {key: 1.0}
        if name in units:
            return key, units[name]
        if name == key:
            raise ValueError(f"{path}: column {name!r} has no unit: expected {', '.join(units)}")
    listed = ", ".join(("stage", *COLUMNS))
    raise ValueError(
        f"{path}: unknown column {name!r}: known are {listed}, each time with its unit, as F_ms"
        f"{nearest(name, COLUMNS)}"
    )


def _content(path: Path, keys: list[str], rows: list[dict[str, float]]) -> dict[str, Any]:
    """Put columns together: a list by stage, of messages by boundary."""
    content: dict[str, Any] = {"unit": "seconds"}
    for key in keys:
        count = len(rows) - (key in _MESSAGES)
        for stage, row in enumerate(rows):
            if (key in row) != (stage < count):
                wrong = "is given: no message leaves the last stage" if key in row else "is missing"
                raise ValueError(f"{path}, stage {stage}: {key} {wrong}")
        section = content
        if key in _MESSAGES:
            name = "message" + BACK * key.endswith(BACK)
            section = content.setdefault(name, {})
        section[key.removesuffix(BACK)] = [row[key] for row in rows[:count]]
    return content
