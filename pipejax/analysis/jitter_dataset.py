"""Runs under jitter as a labelled dataset, which figures and other programs read."""

import dataclasses
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
    links = {
        (
            run.evaluation.links,
            run.evaluation.workers,
            run.evaluation.microbatches,
        )
        for run in every
    }
    if len(links) != 1:
        found = sorted(map(str, links))
        raise ValueError(f"runs must have the same links, workers and microbatches, got {found}")
    seconds = {"units": "s"}
    return xr.Dataset(
        {
            "makespan": (
                ("schedule", "sample"),
                np.stack([run.makespans for run in every]),
                seconds,
            ),
            "deterministic": ("schedule", np.array([run.deterministic for run in every]), seconds),
        },
        coords={"schedule": list(runs), "sample": np.arange(len(first.makespans))},
        attrs={
            "title": "Step time under jitter",
            **{
                f.name: str(getattr(first.jitter, f.name)) for f in dataclasses.fields(first.jitter)
            },
            "seed": first.seed,
            "link": first.evaluation.links.model,
            "queues": first.evaluation.links.queues,
            "workers": first.evaluation.workers,
            "microbatches": first.evaluation.microbatches,
            **provenance(),
        },
    )
