"""Which step size is the best of a sweep."""

import dataclasses

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.short_repr import short_repr
from pipejax.training.training_run import TrainingRun

Masked = np.ma.MaskedArray[tuple[int, ...], np.dtype[np.floating]]


@short_repr
@dataclasses.dataclass(frozen=True)
class Summary:
    """Runs by step size, over their seeds.

    A step size counts only if no seed diverged: everything is masked where one did.

    Attributes:
      gap: (step_sizes, samples) mean gap over the seeds.
      spread: (step_sizes) standard deviation of the final gap over the seeds; of one seed masked.
      diverged: (step_sizes) seeds that diverged.
      best: place of the step size with the least final gap, None where all diverged.

    Example:
      >>> import pipejax as pj
      >>> runs = pj.training.sweep_randomized_pipedream(
      ...     pj.training.random_quadratic(4, dimension=8, seed=0), step_sizes=[40.0, 0.25, 0.001],
      ...     seeds=range(2), updates=400, every=200,
      ... )
      >>> found = pj.training.summarise(runs)
      >>> found.diverged.tolist(), found.best, found.final_gap.mask.tolist()
      ([2, 0, 0], 1, [True, False, False])
    """

    gap: Masked
    spread: Masked
    diverged: Int[NumpyArray, " step_sizes"]
    best: int | None

    @property
    def final_gap(self) -> Masked:
        """(step_sizes) mean gap over the seeds at the last sample."""
        return self.gap[:, -1]


def summarise(runs: TrainingRun) -> Summary:
    """Summarise runs over their seeds.

    Args:
      runs: with axes (step_sizes, seeds).

    Returns:
      Means by step size, and which is the best.

    Raises:
      ValueError: if the runs have other axes.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("pipedream", num_workers=4, num_microbatches=60)
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> sizes = [0.25, 0.125, 0.0625]
      >>> runs = pj.training.sweep_replay(
      ...     objective, table, step_sizes=sizes, seeds=range(3), times=10)
      >>> sizes[pj.training.summarise(runs).best]
      0.125
    """
    reported = runs.reported
    if reported.ndim != 3:
        raise ValueError(
            f"runs must have the axes (step_sizes, seeds), got a gap of shape {reported.shape}"
        )
    failed = np.asarray(runs.diverged).sum(axis=1)
    kept = np.ma.masked_where(np.broadcast_to(failed[:, None, None] > 0, reported.shape), reported)
    gap = kept.mean(axis=1)
    final: Float[NumpyArray, " step_sizes"] = gap[:, -1].filled(np.inf)
    return Summary(
        gap=gap,
        spread=np.ma.masked_invalid(_deviation(kept[:, :, -1])),
        diverged=failed,
        best=int(final.argmin()) if np.isfinite(final).any() else None,
    )


def _deviation(final: Masked) -> Masked:
    """Unbiased, so that one seed has none."""
    if final.shape[1] == 1:
        return np.ma.masked_array(np.zeros(len(final)), True)
    return final.std(axis=1, ddof=1)
