"""Runs under jitter as a labelled dataset, which figures and other programs read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pipejax.analysis.jitter import Jittered
from pipejax.analysis.robustness import robustness
from pipejax.base.provenance import provenance

if TYPE_CHECKING:
    import xarray as xr


def jitter_dataset(runs: Mapping[str, Jittered]) -> "xr.Dataset":
    """Label the samples of schedules that were run under the same jitter; needs xarray.

    Returns makespan (schedule, sample) and deterministic (schedule) [s]; all settings as
    attributes.
    """
    import xarray as xr  # an extra: the engine does without

    every = list(runs.values())
    robustness(every)  # refuses runs that are not comparable
    first = every[0]
    links = {(r.evaluation.links, r.evaluation.workers, r.evaluation.microbatches) for r in every}
    if len(links) != 1:
        found = sorted(map(str, links))
        raise ValueError(f"runs must have the same links, workers and microbatches, got {found}")
    seconds, run = {"units": "s"}, first.evaluation
    makespans = np.stack([each.makespans for each in every])
    deterministic = np.array([each.deterministic for each in every])
    return xr.Dataset(
        {
            "makespan": (("schedule", "sample"), makespans, seconds),
            "deterministic": ("schedule", deterministic, seconds),
        },
        coords={"schedule": list(runs), "sample": np.arange(len(first.makespans))},
        attrs={
            "title": "Step time under jitter",
            **{name: str(factors) for name, factors in vars(first.jitter).items()},
            "seed": first.seed,
            "link": run.links.model,
            "queues": run.links.queues,
            "workers": run.workers,
            "microbatches": run.microbatches,
            **provenance(),
        },
    )
