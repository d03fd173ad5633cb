"""Numbers as a person reads them: three digits, with a unit that suits them."""

import math

from pipejax.base.data_files import REPORT_UNITS, time_unit

ROUNDING = 1e-12  # smaller ratios count as 0
MAX_WRITTEN_OUT = 1e9  # larger numbers are written with an exponent


def digits(value: float) -> str:
    """Format a number with three significant digits, and all digits before the point."""
    return f"{value:.0f}" if 999.5 <= abs(value) < MAX_WRITTEN_OUT else f"{value:.3g}"


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


def gigabytes(value: float) -> str:
    """Format bytes."""
    return f"{digits(value / 1e9)} GB"


def quantity(value: float, unit: str) -> str:
    """Format a number of an SI unit with a prefix that suits it."""
    if format := {"s": seconds, "B": gigabytes, "1": percent}.get(unit):
        return format(value)
    factor, name = REPORT_UNITS.get(unit, (1.0, unit))
    return f"{digits(value / factor)} {name}".rstrip()


def saving(before: float | None, after: float) -> float | None:
    """Return the share of a time that a shorter one saves; None where there is no time before."""
    return 1 - after / before if before else before
