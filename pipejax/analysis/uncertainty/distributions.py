"""Distributions of random factors on durations, by name; all have mean 1.

A distribution is a table of the factors at many standard normal scores. All distributions use the
same random scores, so runs with one seed compare. With spread 0 every factor is exactly 1.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import scipy  # its parts are imported at first use

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, is_number, resolve_name
from pipejax.base.display import short_repr

LARGEST_SCORE = 6.0  # normal scores in single precision stay below 5.5
KNOTS = 4097  # entries of a table; linear interpolation between them errs below a millionth
SMALLEST_SPREAD = 1e-9  # smaller spreads vanish in single precision
NORMAL_LIMIT = 0.25  # four standard deviations to 0: cutting there takes 0.06 % off the spread

Scores = Float[NumpyArray, " knots"]


class Kind(NamedTuple):
    """A family of distributions."""

    factor: Callable[[Scores, float], Scores]  # factors at normal scores for a spread above 0
    largest: float  # largest spread
    summary: str


def _lognormal(score: Scores, spread: float) -> Scores:
    variance = math.log1p(spread**2)  # variance of the factor's logarithm
    return np.exp(math.sqrt(variance) * score - variance / 2)


def _gamma(score: Scores, spread: float) -> Scores:
    shape = spread**-2
    return scipy.special.gammaincinv(shape, scipy.special.ndtr(score)) / shape


def _normal(score: Scores, spread: float) -> Scores:
    low, high = scipy.special.ndtr(-1 / spread), scipy.special.ndtr(1 / spread)
    return 1 + spread * scipy.special.ndtri(low + (high - low) * scipy.special.ndtr(score))


def _uniform(score: Scores, spread: float) -> Scores:
    return 1 + spread * math.sqrt(3) * (2 * scipy.special.ndtr(score) - 1)


def _exponential(score: Scores, spread: float) -> Scores:
    return 1 - spread - spread * scipy.special.log_ndtr(-score)


DISTRIBUTIONS: Mapping[str, Kind] = {
    "lognormal": Kind(_lognormal, 2.0, "logarithm is normal"),
    "gamma": Kind(_gamma, 2.0, "gamma"),
    "normal": Kind(_normal, NORMAL_LIMIT, "normal, cut at 0 and, so that its mean stays 1, at 2"),
    "uniform": Kind(_uniform, 1 / math.sqrt(3), "even from 1 - w to 1 + w, w = spread * 3**0.5"),
    "exponential": Kind(_exponential, 1.0, "1 - spread, and an exponential delay of mean spread"),
}


@short_repr
@dataclasses.dataclass(frozen=True)
class Distribution:
    """A distribution of factors with mean 1.

    Attributes:
      name: one of `DISTRIBUTIONS`.
      spread: standard deviation; that of "normal" is up to 0.06 % smaller, as its ends are cut.

    Raises:
      ValueError: if the name is unknown, or the spread is negative or above the distribution's
        limit.
    """

    name: str = "lognormal"
    spread: float = 0.0

    def __post_init__(self) -> None:
        name = resolve_name(self.name, DISTRIBUTIONS, "distribution")
        object.__setattr__(self, "name", name)
        largest = DISTRIBUTIONS[self.name].largest
        if is_number(self.spread) and 0 < self.spread < SMALLEST_SPREAD:
            raise ValueError(f"spread must be 0 or from {SMALLEST_SPREAD:g}, got {self.spread!r}")
        if not is_number(self.spread) or self.spread > largest:
            raise ValueError(
                f"the spread of {self.name} must be a number from 0 to {largest:.3g}, "
                f"got {self.spread!r}"
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.spread:g}"


@short_repr
@dataclasses.dataclass(frozen=True)
class Straggler:
    """A rare slowdown, which raises the mean duration by probability * (slowdown - 1).

    Attributes:
      probability: probability of a slowdown in a sample; samples are independent.
      slowdown: factor on durations in a slow sample, at least 1.

    Raises:
      ValueError: if the probability is not in [0, 1], or the slowdown below 1 or not finite.
    """

    probability: float = 0.0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if not is_number(self.probability) or self.probability > 1:
            raise ValueError(
                f"the probability of a straggler must be from 0 to 1, got {self.probability!r}"
            )
        if not is_number(self.slowdown, least=1.0):
            raise ValueError(
                f"the slowdown of a straggler must be finite and at least 1, got {self.slowdown!r}"
            )

    def __str__(self) -> str:
        return f"{self.probability:g}:{self.slowdown:g}"


@short_repr
@dataclasses.dataclass(frozen=True)
class Jitter:
    """Random factors on durations: several factors on the same op are multiplied.

    Attributes:
      op: factor of each op, all-reduce and update.
      worker: factor of all ops of a worker in a sample, such as a slow accelerator; it does not
        change messages and all-reduces.
      message: factor of each message; it multiplies latency and transmit time.
      straggler: rare slowdown of a worker in a whole sample.
      op_straggler: rare slowdown of single ops.
    """

    op: Distribution = Distribution()
    worker: Distribution = Distribution()
    message: Distribution = Distribution()
    straggler: Straggler = Straggler()
    op_straggler: Straggler = Straggler()

    def __post_init__(self) -> None:
        for name, factors in vars(self).items():
            check_types(**{name: (factors, Straggler if "straggler" in name else Distribution)})


@functools.lru_cache(maxsize=16)
def factor_table(distribution: Distribution) -> Float[NumpyArray, " knots"]:
    """Tabulate a distribution's factors (knots) at evenly spaced normal scores, in float32."""
    scores = np.linspace(-LARGEST_SCORE, LARGEST_SCORE, KNOTS)
    factors = DISTRIBUTIONS[distribution.name].factor(scores, float(distribution.spread))
    return factors.astype(np.float32)
