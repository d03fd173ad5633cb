"""Numbers as a person reads them."""

import math

from pipejax.base.data_files import time_unit

ROUNDING = 1e-12  # of a ratio: what is smaller is none


def digits(value: float) -> str:
    """Format a number with three significant digits, and all digits before the point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Format a time with the prefix that suits it."""
    rounded = float(f"{value:.3g}") if abs(value) < 1e3 else value
    factor, unit = time_unit(rounded)
    return f"{digits(rounded / factor)} {unit}"


def percent(value: float | None) -> str:
    """Format a ratio as a percentage, or a dash where there is none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{digits(100 * value if abs(value) > ROUNDING else 0.0)} %"


def short_percent(ratio: float) -> str:
    """Format a share in three digits; one too small to matter says so."""
    return "under 0.01 %" if 0 < ratio < 1e-4 else f"{100 * ratio:.3g} %"


def above(ratio: float) -> str:
    """Format how far a value lies above the best one, relative to that."""
    digits = ".1f" if abs(ratio) >= 1e-3 else ".2g"
    return f"{100 * ratio:+{digits}} %" if abs(ratio) > 1e-9 else "0 %"


def gigabytes(value: float) -> str:
    """Format bytes."""
    return f"{digits(value / 1e9)} GB"
