"""Measured runs of Randomized PipeDream against the published bound on their gradients.

Quadratic and logistic regression on random examples, eight stages, over step sizes, largest delays
and seeds. G and L of the bound are measured, so it holds for what was run. Beside them stand runs
that would break the bound if its delay term were left out, and the law Theta(S^4/K) of that term.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax.training as pt
from pipejax.files import provenance
from pipejax.typing import Bool, Float, NumpyArray
from sweeps.kit.command import write

STAGES, DIMENSION, UPDATES = 8, 88, 3200
OBJECTIVES: Mapping[str, Callable[[], pt.Quadratic | pt.Logistic]] = {
    "random quadratic": lambda: pt.random_quadratic(STAGES, dimension=DIMENSION, seed=0),
    "logistic regression": lambda: pt.random_logistic(STAGES, dimension=DIMENSION, seed=0),
}
DELTAS = (0, 8, 30, 60, 180)
STEP_SIZES = tuple(10.0 ** np.arange(-4, 1.01, 0.25))
SEEDS = tuple(range(5))
SAMPLES = 10  # of the gap in a run, by which divergence is seen
LAW_STAGES, LAW_UPDATES = (2, 4, 8, 16, 32, 64, 128), (1e4, 1e6, 1e8)


Values = float | NumpyArray


class Reported(NamedTuple):
    """Numbers that a setting is judged by, missing (NaN) where a run diverged.

    Attributes:
      mean: (...) mean of |grad f(w_k)|^2 over the updates.
      largest: (...) largest |g|^2 of an applied block gradient.
      diverged: (...) whether the run did.
    """

    mean: Float[NumpyArray, "*runs"]
    largest: Float[NumpyArray, "*runs"]
    diverged: Bool[NumpyArray, "*runs"]


class Late(NamedTuple):
    """Runs that swing about the minimum because of their delays.

    Attributes:
      step_size: gamma.
      delta: largest delay [updates].
      is_constant: whether every delay is delta; else they are uniform up to it.
      seeds: how many.
    """

    step_size: float
    delta: int
    is_constant: bool
    seeds: int


LATE = {
    "up to 400 updates": Late(0.0245, 400, False, 1),
    "always 200 updates": Late(0.0154, 200, True, 3),
}
LATE_UPDATES, LATE_STAGES = 40_000, 2


def sweep(
    updates: int = UPDATES,
    step_sizes: Sequence[float] = STEP_SIZES,
    seeds: Sequence[int] = SEEDS,
    late_updates: int = LATE_UPDATES,
) -> xr.Dataset:
    """Train, and put the bound beside what is measured.

    Args:
      updates: K, block updates of a run, a multiple of 10.
      step_sizes: gamma.
      seeds: of every setting; the bound is held against their mean.
      late_updates: K of the runs that break the bound without its delay term, a multiple of 10.

    Returns:
      By (objective, delta, step_size, seed): diverged, and mean_squared_gradient, missing where a
      run diverged. By (objective, delta, step_size), missing where any seed diverged: measured, the
      mean over the seeds, largest_squared_gradient, the G^2 of the bound, its terms, total, and
      total_without_delay. By (objective, delta): the step size at which the bound is least
      for the G^2 of the best one on the grid, best_step_size, the bound there, least_bound, and the
      step size of the grid with the least measurement, best_measured. Variables
      late_* (late) are those of late blocks, law_* (law_updates, law_stages) delay terms.
    """
    with jax.enable_x64(True):
        parts = [_trained(name, updates, step_sizes, seeds) for name in OBJECTIVES]
        data = xr.concat(parts, "objective").assign_coords(objective=list(OBJECTIVES))
        late = _late(late_updates)
    data = xr.merge([data, late, _law()])
    for name in data.variables:
        data[name].attrs["units"] = "block updates" if "delta" in str(name) else "1"
    return data.assign_attrs(
        {
            "title": "Randomized PipeDream against its bound",
            "stages": STAGES,
            "dimension": DIMENSION,
            "updates": updates,
            "late_updates": late_updates,
            "late_stages": LATE_STAGES,
            **provenance(),
        }
    )


def _trained(
    name: str, updates: int, step_sizes: Sequence[float], seeds: Sequence[int]
) -> xr.Dataset:
    """Runs of one objective, seed after seed: all have one shape and compile once."""
    objective = OBJECTIVES[name]()
    runs = [
        pt.sweep_randomized_pipedream(
            objective,
            step_sizes=np.array(step_sizes),
            seeds=[seed],
            updates=updates,
            delta=list(DELTAS),
            interval=updates // SAMPLES,
            norms=True,
        )
        for seed in track(seeds, name, console=Console(stderr=True))
    ]
    mean, largest, diverged = (
        np.concatenate(parts, axis=-1) for parts in zip(*map(_reported, runs), strict=True)
    )
    start = {"smoothness": pt.smoothness(objective), "gap": float(runs[0].gap[0, 0, 0, 0])}
    measured, largest = mean.mean(axis=-1), largest.max(axis=-1)
    delta, gamma = np.array(DELTAS), np.array(step_sizes)
    terms = _bound(STAGES, updates, gamma, largest, delta[:, None], **start)
    least = np.nanargmin(terms["total"], axis=-1)[:, None]
    largest_at_best = np.take_along_axis(largest, least, axis=-1)[:, 0]
    best = pt.best_step_size(
        stages=STAGES,
        updates=updates,
        delta=delta,
        gradient_bound=np.sqrt(largest_at_best),
        **start,
    )
    by_setting = {"measured": measured, "largest_squared_gradient": largest, **terms}
    return xr.Dataset(
        {
            "mean_squared_gradient": (("delta", "step_size", "seed"), mean),
            "diverged": (("delta", "step_size", "seed"), diverged),
            **{key: (("delta", "step_size"), value) for key, value in by_setting.items()},
            "best_step_size": ("delta", best),
            "least_bound": (
                "delta",
                _bound(STAGES, updates, best, largest_at_best, delta, **start)["total"],
            ),
            "best_measured": ("delta", gamma[np.nanargmin(measured, axis=-1)]),
            **start,
        },
        coords={"delta": delta, "step_size": gamma, "seed": list(seeds)},
    )


def _reported(run: pt.TrainingRun) -> Reported:
    """Take what is measured to the host; of a run that diverged nothing but that it did."""
    diverged = np.asarray(run.diverged)
    mean, largest = map(np.asarray, (run.mean_squared_gradient, run.largest_squared_gradient))
    return Reported(np.where(diverged, np.nan, mean), np.where(diverged, np.nan, largest), diverged)


def _bound(
    stages: int,
    updates: int,
    step_size: Values,
    largest: Values,
    delta: Values,
    *,
    smoothness: float,
    gap: float,
) -> dict[str, NumpyArray]:
    """Terms of the bound with the measured G^2, missing where there is none; their sums."""
    is_measured = np.isfinite(largest)
    bound = pt.convergence_bound(
        stages,
        updates,
        step_size,
        smoothness,
        np.sqrt(np.where(is_measured, largest, 1.0)),
        delta,
        gap,
    )
    named = {**bound._asdict(), "total_without_delay": bound.start + bound.noise}
    return {name: np.where(is_measured, value, np.nan) for name, value in named.items()}


def _late(updates: int) -> xr.Dataset:
    """Runs on one curvature and one batch, just where late blocks stop the descent."""
    flat = pt.spectral_quadratic(
        LATE_STAGES, spectrum=[1.0] * LATE_STAGES, num_batches=1, batch_size=2, seed=0
    )
    rows = []
    for late in track(LATE.values(), "late blocks", console=Console(stderr=True)):
        constant = np.full((1, LATE_STAGES), late.delta)
        run = pt.sweep_randomized_pipedream(
            flat,
            step_sizes=[late.step_size],
            seeds=range(late.seeds),
            updates=updates,
            interval=updates // SAMPLES,
            norms=True,
            **({"delays": constant} if late.is_constant else {"delta": late.delta}),
        )
        mean, largest, diverged = _reported(run)
        terms = _bound(
            LATE_STAGES,
            updates,
            late.step_size,
            largest.max(),
            late.delta,
            smoothness=pt.smoothness(flat),
            gap=float(run.gap[0, 0, 0]),
        )
        rows.append(
            {
                "measured": mean.mean(),
                "diverged": diverged.any(),
                **terms,
                "step_size": late.step_size,
                "delta": late.delta,
            }
        )
    columns = {f"late_{key}": ("late", [row[key] for row in rows]) for key in rows[0]}
    return xr.Dataset(columns, coords={"late": list(LATE)})


def _law() -> xr.Dataset:
    """Delay terms of PipeDream in units of L (f_0 - f*), for G^2 = L (f_0 - f*)."""
    updates = np.array(LAW_UPDATES)
    axes = ("law_updates", "law_stages")
    fixed = [pt.delay_term_law(s, updates, smoothness=1.0, gap=1.0) for s in LAW_STAGES]
    best = []
    for stages in LAW_STAGES:
        step_size = pt.best_step_size(stages, updates, 1.0, 1.0, pt.pipedream_delay(stages), 1.0)
        bound = pt.convergence_bound(
            stages, updates, step_size, 1.0, 1.0, pt.pipedream_delay(stages), 1.0
        )
        best.append(bound.delay)
    return xr.Dataset(
        {
            "law_delay": (axes, np.stack(fixed, axis=-1), {"step size": "best without delays"}),
            "law_delay_tuned": (axes, np.stack(best, axis=-1), {"step size": "best with delays"}),
        },
        coords={"law_updates": updates, "law_stages": list(LAW_STAGES)},
    )


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.diverged.size} runs")


if __name__ == "__main__":
    main()
