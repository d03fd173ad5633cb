"""Link model of a run, judged by step times under every candidate.

Measured times scatter by a share of themselves (the noise), so the measure is the logarithm of
measured over predicted. Two candidates are told apart where the measured times are `ODDS` times as
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

ODDS = 1000.0
DECIDES = 2 * math.log(ODDS)  # by which chi-squares must differ
SAME = 1e-9  # relative: predictions that differ by less are the same
LEAST_NOISE = 1e-6

Predictions = Float[NumpyArray, "candidates runs"]


def single_models() -> list[Links]:
    """List machines of one link model, the simplest first."""
    ways = itertools.product(MEETING, POSTINGS, QUEUES)
    alone = [Links(model) for model in LINKS if model not in MEETING]
    return [*alone, *(Links(model, scope, posting=posting) for model, posting, scope in ways)]


@with_short_repr("links rms verdict excess")
@dataclasses.dataclass(frozen=True)
class LinkFit:
    """Fit of one candidate to the measured step times.

    Attributes:
      links: the candidate.
      rms: root mean square of log(measured / predicted); infinite where it would be a deadlock.
      excess: by how much its chi-square exceeds that of the best; below 0 where it meets noise with
        models of pairs that the runs do not call for.
      verdict: "best", "same" (predicts as the best in all runs), "close" (these runs do not rule
        it out), "worse", or "deadlock".
      predicted: (runs) step times [s].
    """

    links: Links
    rms: float
    excess: float
    verdict: str
    predicted: Float[NumpyArray, " runs"]


@with_short_repr("links told_apart explains noise alike")
@dataclasses.dataclass(frozen=True)
class LinkIdentification:
    """Link model that the runs follow.

    Attributes:
      links: the best candidate; the simplest of those that predict the same.
      told_apart: whether the runs rule out every other candidate.
      explains: whether its residuals are no larger than the noise that was given.
      noise: relative noise that was given, or the residuals of the best.
      fits: all machines of one link model, the best first.
      alike: candidates that cannot be told apart from the best by these runs.
    """

    links: Links
    told_apart: bool
    explains: bool
    noise: float
    fits: tuple[LinkFit, ...]
    alike: tuple[Links, ...]


def judge(
    measured: Float[NumpyArray, " runs"],
    candidates: Sequence[Links],
    predicted: Predictions,
    noise: float | None,
    preferred: Links | None = None,
) -> LinkIdentification:
    """Rank candidates by what they leave of measured step times (runs) [s]."""
    # The best is the one that leaves least, unless another one is taken already.
    squares = _squares(measured, predicted)
    if not np.isfinite(squares).any():
        raise ValueError(
            "every candidate is a deadlock in one of the runs: their tables cannot run"
        )
    simplest = int(np.argmin(squares > squares.min() + SAME))  # of equals, as they stand
    best = simplest if preferred is None else candidates.index(preferred)
    level = noise or max(LEAST_NOISE, math.sqrt(squares[best] / len(measured)))
    excess = (squares - squares[best]) / level**2
    same = np.abs(predicted / predicted[best] - 1).max(axis=1, initial=0.0) < SAME
    order = np.argsort(squares, kind="stable").tolist()
    order = [best, *(k for k in order if k != best)]
    verdicts = np.select(
        [np.arange(len(squares)) == best, np.isinf(squares), same, excess < DECIDES],
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
    alike = tuple(fit.links for fit in fits if fit.verdict in ("same", "close"))
    # chi-square of the best: three standard deviations above its mean are too many
    freedom = len(measured)
    limit = freedom + 3 * math.sqrt(2 * freedom)
    explains = bool(squares[best] / level**2 <= limit)
    return LinkIdentification(candidates[best], not alike, explains, level, fits, alike)


def _squares(
    measured: Float[NumpyArray, " runs"], predicted: Predictions
) -> Float[NumpyArray, " candidates"]:
    """Sum of squares of log(measured / predicted): (candidates)."""
    with np.errstate(divide="ignore"):  # a deadlock takes forever: it explains no time
        squares: Float[NumpyArray, " candidates"] = (np.log(measured / predicted) ** 2).sum(axis=1)
    return squares
