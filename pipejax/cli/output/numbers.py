"""How numbers are printed for people."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pipejax.base.data_files import time_unit

NARROWEST = 40  # columns: in fewer, tables lose their text


def console() -> Console:
    """Return the console on stdout: as wide as the terminal or COLUMNS say, or 80 columns."""
    found = Console(highlight=False)
    found.width = max(found.width, NARROWEST)
    return found


def print_json(data: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print one JSON object on stdout, or one list of them."""
    sys.stdout.write(json.dumps(data, default=_plain, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def seconds(value: float) -> str:
    """Format a time with the prefix that suits it.

    Example:
      >>> seconds(0.0616), seconds(33.0), seconds(0.0)
      ('61.6 ms', '33 s', '0 s')
    """
    factor, unit = time_unit(value)
    return f"{value / factor:.5g} {unit}"


def percent(value: float | None) -> str:
    """Format a ratio as a percentage, or a dash where there is none.

    Example:
      >>> percent(0.2727), percent(None)
      ('27.27 %', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{100 * value:.2f} %"


def gigabytes(value: float) -> str:
    """Format bytes.

    Example:
      >>> gigabytes(2.5e9)
      '2.50 GB'
    """
    return f"{value / 1e9:.2f} GB"
