"""Numbers as a person reads them."""

import math

from pipejax.base.data_files import time_unit


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
