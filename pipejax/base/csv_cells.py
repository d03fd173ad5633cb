"""Cells of CSV files: every mistake is named with its file, row and column."""

import csv
import io
import math
from collections.abc import Collection, Mapping
from pathlib import Path

from pipejax.base.checks import MAX_COUNT, unknown, whole_number
from pipejax.base.files import read_file


def read_cells(path: Path, known: Collection[str]) -> list[dict[str, str]]:
    """Read the cells of a CSV file that are not empty, by row and column."""
    try:
        text = read_file(path).decode("utf-8-sig")
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not CSV: {error}") from None
    lines = [[cell.strip() for cell in line] for line in lines if line]
    if len(lines) < 2:
        raise ValueError(f"{path} has no rows: give a header and a row for each run")
    header, *rows = lines
    for name in header:
        if name not in known:
            raise ValueError(f"{path}: {unknown('column', name, known)}")
        if header.count(name) > 1:
            raise ValueError(f"{path}: column {name} stands twice")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(
                f"{path}, row {number}: it has {len(row)} cells, the header {len(header)}"
            )
    return [{k: v for k, v in zip(header, row, strict=True) if v} for row in rows]


def whole_cell(text: str, name: str, least: int, most: int) -> int:
    """Read a whole number."""
    value = int(text) if text.isascii() and text.isdigit() else text
    return whole_number(value, name, least=least, most=most)


def relative_variance(cells: Mapping[str, str], mean: float) -> float:
    """Variance of the mean of `n` repetitions that `spread`, relative to its square."""
    repetitions = whole_cell(cells.get("n", "1"), "n", 1, MAX_COUNT)
    spread = positive_cell(cells, "spread") if "spread" in cells else 0.0
    return (spread / mean) ** 2 / repetitions if spread else 0.0


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
