"""What the steps to come will take: the first half of the steps predicts the second."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, is_number, wrong
from pipejax.base.display import short_repr_of
from pipejax.traces.findings.attribution import Attribution
from pipejax.traces.findings.suspects import stand_out

LEAST = 4  # steps that a forecast is made of


@short_repr_of("predicted low high median_error inside")
@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
    """The second half of the steps, predicted by the first.

    Attributes:
      predicted: median of the replayed steps of the first half, times what these took longer than
        replayed [s].
      low: of the band that a step should lie in [s].
      high: likewise [s].
      confidence: with which probability it should.
      errors: (steps) of the second half: predicted over recorded, minus 1.
      inside: share of them that lie in the band.
      left_out: numbers of the steps of the first half that nothing is predicted from.
    """

    predicted: float
    low: float
    high: float
    confidence: float
    errors: Float[NumpyArray, " steps"]
    inside: float
    left_out: Sequence[int] = ()

    @property
    def median_error(self) -> float:
        """Median of the absolute errors."""
        return float(np.median(np.abs(self.errors)))


def forecast(attribution: Attribution, *, confidence: float = 0.9) -> Forecast:
    """Predict the second half of the steps of a job from the first.

    The band is Student's prediction interval for one further step, so it assumes steps that scatter
    normally about a mean that stays. A step of the first half that would be suspect beside the
    others of that half, by what it takes or by what the replay does not explain of it, is not from
    such a sample: where these are fewer than half of it, nothing is predicted from them. Of the
    second half all steps count.

    Args:
      attribution: steps as recorded and as replayed.
      confidence: with which probability a step should lie in the band.

    Returns:
      Prediction, band, and how the second half met them.

    Raises:
      ValueError: if there are fewer than 4 steps, or the confidence is not between 0 and 1.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> runs = [pj.evaluate(table, pj.Costs(forward=x, backward=2.0)) for x in (1.0, 1.1) * 4]
      >>> pipelines = pj.traces.pipelines_of(pj.traces.of_runs(runs))
      >>> found = pj.traces.attribute(pj.traces.replay(pipelines))
      >>> pj.traces.forecast(found).inside
      1.0

    References:
      Prediction interval of a normal sample: Hahn and Meeker, Statistical Intervals, section 4.7.
    """
    from scipy.special import stdtrit  # at first use: it takes a while

    check_types(attribution=(attribution, Attribution))
    if not is_number(confidence) or not 0 < confidence < 1:
        raise wrong("confidence", f"must be between 0 and 1, got {confidence!r}", confidence)
    order = np.argsort(attribution.steps)
    recorded, replayed = attribution.recorded[order], attribution.replayed[order]
    if len(recorded) < LEAST:
        raise ValueError(f"a forecast needs {LEAST} steps at least, there are {len(recorded)}")
    half = len(recorded) // 2
    odd = stand_out(recorded[:half]) | stand_out(recorded[:half] / replayed[:half])
    odd &= 2 * odd.sum() < half
    kept = np.flatnonzero(~odd)
    # what the model does not explain is taken to go on as it was
    steps = replayed[kept] * (recorded[kept].sum() / replayed[kept].sum())
    quantile = float(stdtrit(len(kept) - 1, (1 + confidence) / 2))  # of Student's t
    reach = quantile * np.sqrt(1 + 1 / len(kept))
    middle, width = float(steps.mean()), float(steps.std(ddof=1) * reach)
    later, predicted = recorded[half:], float(np.median(steps))
    inside = (later >= middle - width) & (later <= middle + width)
    return Forecast(
        predicted,
        middle - width,
        middle + width,
        confidence,
        predicted / later - 1,
        float(inside.mean()),
        [int(attribution.steps[k]) for k in order[np.flatnonzero(odd)]],
    )
