"""Ways to train through a pipeline that the experiments compare, and their curves."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import xarray as xr

import pipejax as pj
from pipejax.analysis.staleness import op_times
from pipejax.training import (
    TrainingObjective,
    TrainingRun,
    pipedream_delay,
    sweep_randomized_pipedream,
    sweep_replay,
)

Train = Callable[[TrainingObjective, Sequence[float], Sequence[int]], TrainingRun]
SAMPLES = 60  # of each curve, after the start


class Scheme(NamedTuple):
    """A way to train.

    Attributes:
      label: how it is called in the dataset.
      train: trains with every step size and seed.
    """

    label: str
    train: Train


def table_of(name: str, workers: int, until: float, **options: int) -> pj.ScheduleTable:
    """Build a table that is busy until a time.

    Args:
      name: pipedream, pipedream-2bw or local-sgd.
      workers: P.
      until: time in slots of one forward or one backward.
      **options: of the schedule.

    Returns:
      The table, with whole groups or rounds.
    """
    unit = workers if name == "pipedream-2bw" else 1
    if name == "local-sgd":
        unit = options.get("runs", workers) * options.get("local_steps", 1)
    count = unit
    while True:
        table = pj.schedules.build(name, num_workers=workers, num_microbatches=count, **options)
        end = op_times(table)[1].max()
        if end >= until:
            return table
        count += max(1, round(count * (until - end) / end / unit)) * unit


def timeline(
    label: str,
    name: str,
    workers: int,
    until: float,
    *,
    each_run: bool = False,
    batches: str = "epochs",
    **options: int,
) -> Scheme:
    """Train along a table, in slots, with samples at equal times.

    Args:
      label: how it is called in the dataset.
      name: pipedream, pipedream-2bw or local-sgd.
      workers: P.
      until: last sample [slots].
      each_run: whether the gap is the mean over the models of all runs.
      batches: "epochs" or "drawn".
      **options: of the schedule.

    Returns:
      The scheme.
    """

    def train(
        objective: TrainingObjective, step_sizes: Sequence[float], seeds: Sequence[int]
    ) -> TrainingRun:
        times = np.linspace(0.0, until, SAMPLES + 1)
        return sweep_replay(
            objective,
            table_of(name, workers, until, **options),
            step_sizes=step_sizes,
            seeds=seeds,
            times=times,
            each_run=each_run,
            batches=batches,
        )

    return Scheme(label, train)


def randomized(workers: int, updates: int, delta: int | None = None) -> Scheme:
    """Randomized PipeDream; one block update takes 2 / S slots, as PipeDream's do on average.

    Args:
      workers: S.
      updates: block updates, rounded down to a multiple of the samples.
      delta: largest delay; the largest of PipeDream if None.

    Returns:
      The scheme.
    """
    bound = int(pipedream_delay(workers)) if delta is None else delta

    def train(
        objective: TrainingObjective, step_sizes: Sequence[float], seeds: Sequence[int]
    ) -> TrainingRun:
        every = max(1, updates // SAMPLES)
        run = sweep_randomized_pipedream(
            objective,
            step_sizes=step_sizes,
            seeds=seeds,
            updates=every * SAMPLES,
            delta=bound,
            every=every,
        )
        return run._replace(time=run.update * 2.0 / workers)

    return Scheme(f"rpd delta={bound}", train)


def stacked(make: Callable[[int], TrainingObjective], seeds: Sequence[int]) -> TrainingObjective:
    """Stack the objectives of several seeds.

    Args:
      make: makes the objective of a seed.
      seeds: of the data.

    Returns:
      One objective with a leading axis on every leaf.
    """
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(make, seeds))


def curves(runs: Mapping[str, TrainingRun], step_sizes: Sequence[float]) -> xr.Dataset:
    """Collect the curves of several schemes.

    Args:
      runs: by label, each with axes (step_sizes, seeds, samples).
      step_sizes: gamma.

    Returns:
      gap (scheme, step_size, seed, sample), missing where a run diverged; diverged; time and
      updates (scheme, sample).
    """
    gap = np.stack([run.reported.filled(np.nan) for run in runs.values()])
    data = {
        "gap": (
            ("scheme", "step_size", "seed", "sample"),
            gap,
            {"long_name": "f - f*, missing where a run diverged"},
        ),
        "diverged": (
            ("scheme", "step_size", "seed"),
            np.stack([np.asarray(run.diverged) for run in runs.values()]),
        ),
        "time": (
            ("scheme", "sample"),
            np.stack([np.asarray(run.time) for run in runs.values()]),
            {"units": "slots of one forward or backward"},
        ),
        "updates": (("scheme", "sample"), np.stack([run.update for run in runs.values()])),
    }
    seeds = np.arange(gap.shape[2])
    return xr.Dataset(
        data, coords={"scheme": list(runs), "step_size": list(step_sizes), "seed": seeds}
    )


def best_place(data: xr.Dataset) -> xr.DataArray:
    """Choose a step size: least geometric mean gap at the end, among those where no seed diverged.

    Args:
      data: as from `curves`, perhaps with further axes.

    Returns:
      Its place on the axis of step sizes; the first where some seed diverged with every one.
    """
    end = data.gap.isel(sample=-1) if "sample" in data.gap.dims else data.gap
    mean = geometric_mean(end).where(~data.diverged.any("seed"))
    return mean.fillna(np.inf).argmin("step_size")


def best(data: xr.Dataset) -> xr.Dataset:
    """Take the step size of each scheme that `best_place` chooses.

    Args:
      data: as from `curves`, perhaps with further axes.

    Returns:
      The data at that step size, without its axis; `step_size` is a coordinate. A scheme that
      diverged with every step size keeps missing values.
    """
    return data.isel(step_size=best_place(data))


def geometric_mean(gap: xr.DataArray) -> xr.DataArray:
    """Average over the seeds on a logarithmic scale, for gaps span many orders of magnitude.

    Args:
      gap: by seed; what is missing or not positive makes the mean missing.

    Returns:
      The mean.
    """
    logs: xr.DataArray = xr.apply_ufunc(np.log, gap.where(gap > 0))
    return xr.apply_ufunc(np.exp, logs.mean("seed", skipna=False))


def powers(first: int, last: int) -> list[float]:
    """Return step sizes 2^-first, ..., 2^-last."""
    return [2.0**-k for k in range(first, last + 1)]
