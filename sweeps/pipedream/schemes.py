"""Train one scheme of an experiment with all its step sizes and seeds, as a labelled dataset."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

import pipejax as pj
from pipejax.analysis import op_times
from pipejax.training import (
    Logistic,
    TrainingObjective,
    TrainingRun,
    nesterov_quadratic,
    random_logistic,
    random_quadratic,
    sweep_randomized_pipedream,
    sweep_replay,
)
from sweeps.pipedream.language_model import language_model
from sweeps.pipedream.settings import Problem, Scheme, Setting

SINGLE_PRECISION = "language model"  # the only problem whose last digits do not matter
AXES = ("step", "seed", "sample")
BY_SYSTEM = ["gap", "loss", "diverged", "time", "updates"]


def train(setting: Setting, scheme: Scheme) -> xr.Dataset:
    """Train with every step size and seed.

    Args:
      setting: problem, seeds and time.
      scheme: one of its schemes.

    Returns:
      gap (step, seed, sample), f - f* of the model, and loss, the mean of the batches since the
      sample before, both missing where a run diverged; diverged (step, seed); minimum (seed), f*;
      step_size (step); delta; time and updates (sample). With systems, what depends on them has
      a leading axis `system`, and time is in seconds.
    """
    with jax.enable_x64(setting.problem.kind != SINGLE_PRECISION):
        objective = make_objectives(setting)
        if scheme.method == "rpd":
            return _labelled(_randomized(objective, setting, scheme), setting, scheme)
        options: dict[str, Any] = {
            "step_sizes": scheme.step_sizes,
            "seeds": setting.seeds,
            "batches": scheme.batches,
            "noise": setting.problem.noise,
        }
        table = build_until(scheme.method, setting.stages, setting.until, **dict(scheme.options))
        if not setting.systems:
            times = np.linspace(0.0, setting.until, setting.samples + 1)
            return _labelled(
                sweep_replay(objective, table, times=times, **options), setting, scheme
            )
        parts = [
            _labelled(
                sweep_replay(
                    objective, table, times=setting.samples, costs=_costs(table, system), **options
                ),
                setting,
                scheme,
            )
            for system in setting.systems
        ]
        axis = xr.Variable("system", list(setting.systems))
        whole = xr.concat(parts, axis, data_vars=BY_SYSTEM)
        whole.time.attrs["units"] = "s"
        return whole


def _randomized(objective: TrainingObjective, setting: Setting, scheme: Scheme) -> TrainingRun:
    """As many block updates as PipeDream does, evenly over its time: RPD has no clock."""
    updates = setting.stages * round(setting.until / 2 - setting.stages + 1)
    spacing = updates // setting.samples
    run = sweep_randomized_pipedream(
        objective,
        step_sizes=scheme.step_sizes,
        seeds=setting.seeds,
        updates=spacing * setting.samples,
        delta=scheme.delta,
        interval=spacing,
        noise=setting.problem.noise,
    )
    return run._replace(time=np.linspace(0.0, setting.until, setting.samples + 1))


def _labelled(run: TrainingRun, setting: Setting, scheme: Scheme) -> xr.Dataset:
    """Everything of a run that the figures and claims read."""
    diverged = np.asarray(run.diverged)
    minimum = np.broadcast_to(np.asarray(run.minimum), diverged.shape)[0]
    data = {
        "gap": (AXES, run.reported.filled(np.nan), {"long_name": "f - f*"}),
        "diverged": (AXES[:2], diverged),
        "minimum": ("seed", minimum),
        "step_size": ("step", list(scheme.step_sizes)),
        "delta": ((), scheme.delta, {"units": "block updates"}),
        "time": ("sample", np.asarray(run.time), {"units": "slots"}),
        "updates": ("sample", run.update, {"units": "block updates"}),
    }
    if run.loss is not None:
        loss = np.where(diverged[..., None], np.nan, np.asarray(run.loss))
        data["loss"] = (AXES, loss, {"long_name": "mean loss of the batches since the last sample"})
    coords = {"step": list(scheme.steps), "seed": list(setting.seeds)}
    return xr.Dataset(data, coords=coords)


def build_until(method: str, workers: int, until: float, **options: Any) -> pj.ScheduleTable:
    """Build a table that is busy until a time.

    Args:
      method: pipedream, pipedream-2bw, naive or local-sgd.
      workers: P.
      until: time in slots of one forward or one backward.
      **options: of the schedule.

    Returns:
      The table, with whole groups or rounds.
    """
    unit = workers if method == "pipedream-2bw" else 1
    if method == "local-sgd":
        unit = options.get("runs", workers) * options.get("local_steps", 1)
    count = unit
    while True:
        table = pj.schedules.build(method, num_workers=workers, num_microbatches=count, **options)
        end = op_times(table)[1].max()
        if end >= until:
            return table
        count += max(1, round(count * (until - end) / end / unit)) * unit


def make_objectives(setting: Setting) -> TrainingObjective:
    """Make the objectives of all seeds.

    Args:
      setting: problem, stages and seeds.

    Returns:
      One objective with a leading axis on every leaf; the language model is one for all seeds.
    """
    problem = setting.problem
    if problem.kind == SINGLE_PRECISION:
        return language_model(
            setting.stages,
            width=problem.dimension,
            num_batches=problem.num_batches,
            batch_size=problem.batch_size,
            seed=0,
        )
    objectives = [MAKERS[problem.kind](setting.stages, problem, seed) for seed in setting.seeds]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *objectives)


def _random_quadratic(stages: int, problem: Problem, seed: int) -> TrainingObjective:
    return random_quadratic(stages, **_sizes(problem), seed=seed)


def _tridiagonal_quadratic(stages: int, problem: Problem, seed: int) -> TrainingObjective:
    """Hessian tridiag(-1, 2, -1) + 0.01 I, as the authors have it."""
    return nesterov_quadratic(
        stages,
        **_sizes(problem),
        condition_number=401.0,
        strong_convexity=0.01,
        minimiser="normal",
        seed=seed,
    )


@functools.cache
def _logistic_examples(problem: Problem, seed: int) -> Logistic:
    """In one stage: the search for the minimum takes longest, and is the same for all depths."""
    return random_logistic(1, **_sizes(problem), seed=seed)


def _random_logistic(stages: int, problem: Problem, seed: int) -> TrainingObjective:
    whole = _logistic_examples(problem, seed)
    features = jnp.reshape(whole.features, (*whole.features.shape[:2], stages, -1))
    return dataclasses.replace(whole, features=features, num_stages=stages)


def _sizes(problem: Problem) -> dict[str, Any]:
    return {
        "dimension": problem.dimension,
        "num_batches": problem.num_batches,
        "batch_size": problem.batch_size,
    }


def _costs(table: pj.ScheduleTable, system: str) -> pj.Costs:
    """Seconds of a transformer of 128 layers; an update costs what its memory traffic costs."""
    workload = pj.Workload(pj.load_model("tabular-128l"), minibatch=table.num_microbatches)
    costs = pj.stage_costs(workload, pj.load_system(system), table)
    return dataclasses.replace(costs, all_reduce=0.0)


MAKERS: Mapping[str, Callable[[int, Problem, int], TrainingObjective]] = {
    "random quadratic": _random_quadratic,
    "tridiagonal quadratic": _tridiagonal_quadratic,
    "logistic regression": _random_logistic,
}


def collected(parts: Sequence[xr.Dataset], schemes: Sequence[Scheme]) -> xr.Dataset:
    """Put the schemes of one setting side by side.

    Args:
      parts: as from `train`.
      schemes: of each.

    Returns:
      The same with an axis `scheme`; what only some schemes have is missing for the others.
    """
    axis = xr.Variable("scheme", [scheme.label for scheme in schemes])
    whole = xr.concat(parts, axis, join="outer", data_vars="all", fill_value={"diverged": False})
    return whole.assign(minimum=whole.minimum.isel(scheme=0))
