"""Identification of the link model of a run, from step times under every candidate.

The noise of measured times is proportional to them, so a candidate is judged by log(measured /
predicted). Two candidates are distinguished if the measured times are `LIKELIHOOD_RATIO` times as
likely under one as under the other.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.display import with_short_repr
from pipejax.schedules.table.links import LINKS, MEETING, POSTINGS, QUEUES, Links

LIKELIHOOD_RATIO = 1000.0
MIN_CHI_SQUARE = 2 * math.log(LIKELIHOOD_RATIO)  # difference that rules a candidate out
EQUAL = 1e-9  # relative difference below which predictions are equal
MIN_NOISE = 1e-6

Predictions = Float[NumpyArray, "candidates runs"]


def single_models() -> list[Links]:
    """List all links with one model for every pair of workers, the simplest first."""
    simple = [Links(model) for model in LINKS if model not in MEETING]
    options = itertools.product(MEETING, POSTINGS, QUEUES)
    return [*simple, *(Links(model, scope, posting=posting) for model, posting, scope in options)]


@with_short_repr("links rms verdict excess")
@dataclasses.dataclass(frozen=True)
class LinkFit:
    """Fit of one candidate to the measured step times.

    Attributes:
      links: the candidate.
      rms: root mean square of log(measured / predicted); infinite for a deadlock.
      excess: its chi-square minus that of the best; may be below 0 if a more complicated candidate
        fits the noise.
      verdict: "best", "same" (predictions equal those of the best), "close" (not ruled out by
        these runs), "worse", or "deadlock".
      predicted: (runs) step times [s].
    """

    links: Links
    rms: float
    excess: float
    verdict: str
    predicted: Float[NumpyArray, " runs"]


@with_short_repr("links is_identified explains noise equivalent_models")
@dataclasses.dataclass(frozen=True)
class LinkIdentification:
    """Best link model of some runs, with all candidates.

    Attributes:
      links: the best candidate; of equal predictions, the simplest.
      is_identified: whether the runs rule out every other candidate.
      explains: whether its residuals are no larger than the stated noise.
      noise: relative noise, as stated, or the residuals of the best.
      fits: fits of all candidates, the best first.
      equivalent_models: candidates that these runs cannot distinguish from the best.
    """

    links: Links
    is_identified: bool
    explains: bool
    noise: float
    fits: tuple[LinkFit, ...]
    equivalent_models: tuple[Links, ...]


def judge(
    measured: Float[NumpyArray, " runs"],
    candidates: Sequence[Links],
    predicted: Predictions,
    noise: float | None,
    preferred: Links | None = None,
) -> LinkIdentification:
    """Rank candidates by the residuals of measured step times (runs) [s]."""
    # The best has the smallest residuals, unless another candidate is preferred. Candidates are in
    # order of simplicity; without `noise`, the residuals of the best are taken as the noise.
    squares = _squares(measured, predicted)
    if not np.isfinite(squares).any():
        raise ValueError(
            "every candidate is a deadlock in one of the runs: their tables cannot run"
        )
    simplest = int(np.argmin(squares > squares.min() + EQUAL))  # the first of equally good ones
    best = simplest if preferred is None else candidates.index(preferred)
    level = noise or max(MIN_NOISE, math.sqrt(squares[best] / len(measured)))
    excess = (squares - squares[best]) / level**2
    is_same = np.abs(predicted / predicted[best] - 1).max(axis=1, initial=0.0) < EQUAL
    order = np.argsort(squares, kind="stable").tolist()
    order = [best, *(k for k in order if k != best)]
    verdicts = np.select(
        [np.arange(len(squares)) == best, np.isinf(squares), is_same, excess < MIN_CHI_SQUARE],
        ["best", "deadlock", "same", "close"],
        "worse",
    ).tolist()
    fits = tuple(
        LinkFit(
            candidates[k],
            math.sqrt(squares[k] / len(measured)),
            float(excess[k]),
            verdicts[k],
            predicted[k],
        )
        for k in order
    )
    equivalent = tuple(fit.links for fit in fits if fit.verdict in ("same", "close"))
    # a chi-square with n degrees of freedom has mean n and variance 2 n: allow three deviations
    freedom = len(measured)
    limit = freedom + 3 * math.sqrt(2 * freedom)
    explains = bool(squares[best] / level**2 <= limit)
    return LinkIdentification(candidates[best], not equivalent, explains, level, fits, equivalent)


def _squares(
    measured: Float[NumpyArray, " runs"], predicted: Predictions
) -> Float[NumpyArray, " candidates"]:
    """Return the sum of squares of log(measured / predicted) (candidates)."""
    with np.errstate(divide="ignore"):  # infinite predictions of a deadlock
        squares: Float[NumpyArray, " candidates"] = (np.log(measured / predicted) ** 2).sum(axis=1)
    return squares
