"""Numbers as a person reads them."""

import math

from pipejax.base.data_files import time_unit


def seconds(value: float) -> str:
    """Format a time with the prefix that suits it.

    Example:
      >>> seconds(0.0616), seconds(33.0), seconds(0.0), seconds(0.000999999999)
      ('61.6 ms', '33 s', '0 s', '1 ms')
    """
    rounded = float(f"{value:.5g}")
    factor, unit = time_unit(rounded)
    return f"{rounded / factor:.5g} {unit}"


def percent(value: float | None) -> str:
    """Format a ratio as a percentage, or a dash where there is none.

    Example:
      >>> percent(0.2727), percent(None)
      ('27.27 %', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{100 * value:.2f} %"


def short_percent(ratio: float) -> str:
    """Format a share in three digits; one too small to matter says so.

    Example:
      >>> short_percent(0.645), short_percent(4.85e-10)
      ('64.5 %', 'under 0.01 %')
    """
    return "under 0.01 %" if 0 < ratio < 1e-4 else f"{100 * ratio:.3g} %"


def above(ratio: float) -> str:
    """Format how far a value lies above the best one, relative to that.

    Example:
      >>> above(0.031), above(0.0), above(-0.0002)
      ('+3.1 %', '0 %', '-0.02 %')
    """
    digits = ".1f" if abs(ratio) >= 1e-3 else ".2g"
    return f"{100 * ratio:+{digits}} %" if abs(ratio) > 1e-9 else "0 %"


def gigabytes(value: float) -> str:
    """Format bytes.

    Example:
      >>> gigabytes(2.5e9)
      '2.50 GB'
    """
    return f"{value / 1e9:.2f} GB"
