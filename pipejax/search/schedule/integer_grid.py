"""Seconds and sizes as whole numbers: a constraint solver knows nothing else."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray

FINEST = 10**6  # units in the largest duration, at most, where all of them come out exactly
COARSE = 20_000  # units in the largest duration, where they do not
_EQUAL = 1e-9  # relative difference that is rounding of floats and nothing else


class Grid(NamedTuple):
    """A unit of time.

    Attributes:
      unit: its length [s].
      exact: whether every duration is a whole multiple of it.
    """

    unit: float
    exact: bool

    def down(self, seconds: Float[NumpyArray, "..."]) -> Int[NumpyArray, "..."]:
        """Count whole units: what is left over is dropped, so that no bound is too high."""
        units = np.asarray(seconds, float) / self.unit
        nearest = np.round(units)
        return np.where(
            np.isclose(units, nearest, rtol=_EQUAL, atol=_EQUAL), nearest, np.floor(units)
        ).astype(np.int64)


def choose_grid(durations: Float[NumpyArray, " some"]) -> Grid:
    """Choose the largest unit of which all durations are whole multiples, or a small one."""
    largest = float(np.max(durations, initial=0.0))
    if largest == 0:
        return Grid(1.0, True)
    decade = 10.0 ** math.ceil(math.log10(largest))
    shares = [float(d) / decade for d in durations if d > 0]
    given = [Fraction(share).limit_denominator(10**8) for share in shares]
    if all(math.isclose(f, d, rel_tol=_EQUAL) for f, d in zip(given, shares, strict=True)):
        scale = math.lcm(*(f.denominator for f in given))
        multiples = [int(f * scale) for f in given]
        common = math.gcd(*multiples)
        if max(multiples) // common <= FINEST:
            return Grid(decade * common / scale, True)
    return Grid(largest / COARSE, False)


def common_parts(values: Sequence[float], finest: int = FINEST) -> list[int]:
    """Return whole numbers in the proportion of the values, the first ones rounded up."""
    small = [Fraction(value).limit_denominator(10**4) for value in values]
    if all(math.isclose(f, v, rel_tol=_EQUAL) for f, v in zip(small, values, strict=True)):
        scale = math.lcm(*(f.denominator for f in small))
        whole = [int(f * scale) for f in small]
        common = math.gcd(*whole) or 1
        if max(whole) // common <= finest:
            return [n // common for n in whole]
    scale_by = finest / values[-1]
    return [*(math.ceil(v * scale_by * (1 - _EQUAL)) for v in values[:-1]), finest]
