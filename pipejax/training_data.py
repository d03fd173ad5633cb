"""Training runs as a labelled dataset, which figures and other programs read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipejax.provenance import provenance
from pipejax.training.run import Run

if TYPE_CHECKING:
    import xarray as xr


def training_dataset(
    runs: Run,
    step_sizes: Sequence[float],
    seeds: Sequence[int],
    *,
    unit: str | None = None,
    attributes: Mapping[str, str | int | float] | None = None,
) -> "xr.Dataset":
    """Label the runs of a sweep over step sizes and seeds; needs xarray.

    Args:
      runs: with axes (step_sizes, seeds).
      step_sizes: (step_sizes) gamma.
      seeds: (seeds) seed of each run.
      unit: of the time of the runs, "s" or "slots"; for runs without a clock it says nothing.
      attributes: what was run, to be kept beside the numbers.

    Returns:
      gap (step_size, seed, sample) and largest_squared_gradient (step_size, seed), not a number
      where the run diverged; diverged (step_size, seed); updates and, of runs with a clock, time as
      coordinates of the samples.

    Raises:
      ValueError: if the runs are not as many as step sizes and seeds.

    Example:
      >>> from pipejax.training import random_quadratic, sweep_randomized_pipedream
      >>> sizes, seeds = [40.0, 0.25], range(3)
      >>> runs = sweep_randomized_pipedream(
      ...     random_quadratic(4, dimension=8, seed=0), step_sizes=sizes, seeds=seeds,
      ...     updates=400, every=100,
      ... )
      >>> data = training_dataset(runs, sizes, seeds)
      >>> dict(data.sizes), data.gap.isnull().all(["seed", "sample"]).values.tolist()
      ({'step_size': 2, 'seed': 3, 'sample': 5}, [True, False])
    """
    import xarray as xr  # an extra: the engine does without

    gap, diverged = runs.reported, np.asarray(runs.diverged)
    if diverged.shape != (len(step_sizes), len(seeds)):
        raise ValueError(
            f"runs must have the axes (step_sizes, seeds) of {len(step_sizes)} and {len(seeds)}, "
            f"got {diverged.shape}"
        )
    largest = np.where(diverged, np.nan, np.asarray(runs.largest_squared_gradient))
    each = ("step_size", "seed")
    clock = {} if runs.time is None else {"time": ("sample", runs.time, {"units": unit or "slots"})}
    return xr.Dataset(
        {
            "gap": ((*each, "sample"), gap.filled(np.nan), {"long_name": "f - f*"}),
            "diverged": (each, diverged),
            "largest_squared_gradient": (each, largest),
        },
        coords={"step_size": np.asarray(step_sizes, np.float64), "seed": np.asarray(seeds),
                "updates": ("sample", runs.update, {"long_name": "block updates done"}), **clock},
        attrs={"title": "Gap of training runs", **(attributes or {}), **provenance()},
    )  # fmt: skip
