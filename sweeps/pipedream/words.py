"""Numbers of PipeDream's experiments in words, for claims and figures alike."""

from typing import NamedTuple


class End(NamedTuple):
    """End of a scheme.

    Attributes:
      median: over the seeds.
      low: least.
      high: largest.
      step_size: gamma.
      edge: whether it is the smallest or largest that was tried.
    """

    median: float
    low: float
    high: float
    step_size: float
    edge: bool = False

    def __str__(self) -> str:
        """As 2.7 (2.6 to 2.9; 1/256)."""
        median, low, high = map(short, self[:3])
        spread = "" if low == high else f"{low} to {high}; "
        return f"{median} ({spread}{fraction(self.step_size)})"


def short(number: float) -> str:
    """Write a number with two digits, or as many as it has before the point.

    Args:
      number: of any size.

    Returns:
      The number.

    Example:
      >>> short(0.01234), short(268.7), short(2.9e-7)
      ('0.012', '269', '2.9e-07')
    """
    return f"{number:.0f}" if 100 <= abs(number) < 1e4 else f"{number:.2g}"


def fraction(step_size: float) -> str:
    """Write a step size as a fraction.

    Args:
      step_size: a power of two.

    Returns:
      The fraction.

    Example:
      >>> fraction(0.0625), fraction(2.0)
      ('1/16', '2')
    """
    return f"1/{1 / step_size:g}" if step_size < 1 else f"{step_size:g}"
