"""What a training run shows, alone or many at once."""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.short_repr import short_repr

DIVERGED = 1000.0  # times the gap at the start


@short_repr
class TrainingRun(NamedTuple):
    """One training run, or many with the same leading axes on every array but `update`.

    Attributes:
      update: (samples) block updates done at each sample, from 0.
      gap: (..., samples) f - f* there; of a run that diverged a number without meaning, so take
        `reported`.
      diverged: (...) whether a gap is not finite, or above 1000 times the one at the start.
      blocks: (..., stages, width) at the end.
      largest_squared_gradient: (...) largest |g|^2 among the block gradients that were applied:
        the measured G^2 of the bounds.
      mean_squared_gradient: (...) mean of |grad f(w_k)|^2 over all k below the number of updates;
        None where it was not asked for.
      time: (samples) when the samples were taken [s, or slots]; None for a run without a clock.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> run = pj.training.randomized_pipedream(
      ...     objective, step_size=40.0, seed=0, updates=300, every=100)
      >>> run.update.tolist(), bool(run.diverged), int(run.reported.count())
      ([0, 100, 200, 300], True, 0)
    """

    update: Int[NumpyArray, " samples"]
    gap: Float[Array, "*runs samples"]
    diverged: Bool[Array, "*runs"]
    blocks: Float[Array, "*runs stages width"]
    largest_squared_gradient: Float[Array, "*runs"]
    mean_squared_gradient: Float[Array, "*runs"] | None
    time: Float[NumpyArray, " samples"] | None = None

    @property
    def reported(self) -> "np.ma.MaskedArray[tuple[int, ...], np.dtype[np.floating]]":
        """Gaps (..., samples) on the host, masked for runs that diverged."""
        gap = np.asarray(self.gap)
        mask = np.broadcast_to(np.asarray(self.diverged)[..., None], gap.shape)
        return np.ma.masked_array(gap, mask)
