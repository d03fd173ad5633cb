"""Training runs as a labelled dataset, which figures and other programs read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipejax.base.provenance import provenance
from pipejax.training.training_run import TrainingRun

if TYPE_CHECKING:
    import xarray as xr


def training_dataset(
    runs: TrainingRun,
    step_sizes: Sequence[float],
    seeds: Sequence[int],
    *,
    unit: str | None = None,
    attributes: Mapping[str, str | int | float] | None = None,
) -> "xr.Dataset":
    """Label the runs of a sweep over step sizes and seeds; needs xarray."""
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
        coords={
            "step_size": np.asarray(step_sizes, np.float64),
            "seed": np.asarray(seeds),
            "updates": ("sample", runs.update, {"long_name": "block updates done"}),
            **clock,
        },
        attrs={"title": "Gap of training runs", **(attributes or {}), **provenance()},
    )
