"""Runs with every step size and every seed: what is checked, how they are mapped, and one alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray, UInt
from pipejax.base.checks import are_positive, whole_number
from pipejax.base.machine import check_fits
from pipejax.training.objective import TrainingObjective
from pipejax.training.training_run import PER_RUN, TrainingRun

BYTES_PER_LOOK, BYTES_PER_UPDATE = 16, 100  # measured, and rounded down
LARGEST_SEED = (1 << 32) - 1
Numbers = Sequence[float] | Float[NumpyArray, " step_sizes"]
Seeds = Sequence[int] | range | Int[NumpyArray, " seeds"]


def run_alone(
    sweep: Callable[..., TrainingRun],
    objective: TrainingObjective,
    step_size: float,
    seed: int,
    **how: Any,
) -> TrainingRun:
    """Do a sweep over one step size and one seed, and leave out these axes."""
    if not are_positive([step_size], 1):
        raise ValueError(f"step_size must be a finite number above 0, got {step_size!r}")
    if np.ndim(objective.minimum):
        raise ValueError(f"objective must be a single one, got {len(objective.minimum)} stacked")
    whole_number(seed, "seed", least=0)
    runs = sweep(objective, step_sizes=[step_size], seeds=[seed], **how)
    of_runs = {name: getattr(runs, name) for name in PER_RUN}
    return runs._replace(**jax.tree.map(lambda leaf: leaf[0, 0], of_runs))


def checked_runs(
    objective: TrainingObjective, step_sizes: Numbers, seeds: Seeds, looks: int, updates: int = 0
) -> tuple[Float[NumpyArray, " step_sizes"], UInt[NumpyArray, " seeds"]]:
    """Check what a sweep of runs is made over, and that there is memory for it.

    A run is looked at `looks` times, and holds the random numbers of `updates` at once.
    """
    num_runs = len(step_sizes) * len(seeds)
    num_bytes = num_runs * looks * BYTES_PER_LOOK + len(seeds) * updates * BYTES_PER_UPDATE
    check_fits(num_bytes, f"{num_runs} runs that are looked at {looks} times need")
    if not are_positive(step_sizes, len(step_sizes)) or not len(step_sizes):
        raise ValueError(
            f"step_sizes must be one or more finite numbers above 0, got {list(step_sizes)}"
        )
    for seed in seeds:
        if whole_number(seed, "each of seeds", least=0) > LARGEST_SEED:
            raise ValueError(f"each of seeds must be at most {LARGEST_SEED}, got {seed}")
    stacked = np.shape(objective.minimum)
    if not len(seeds) or stacked not in ((), (len(seeds),)):
        raise ValueError(
            "seeds must be as many as objectives are stacked, or one or more for a single one: "
            f"got {len(seeds)} seeds, and stacked {stacked}"
        )
    return np.asarray(step_sizes, np.float64), np.asarray(seeds, np.uint32)


def over_runs(train: Callable[..., Any], objective: TrainingObjective, batches: int | None) -> Any:
    """Map a run over seeds, then over step sizes.

    Args:
      train: takes objective, step size, seed, and a fourth argument.
      objective: one for all seeds, or stacked: one for each.
      batches: axis of the seeds in the fourth argument; None if it is the same for all of them.

    Returns:
      The function of all runs, with the same arguments.
    """
    stacked = 0 if jnp.ndim(objective.minimum) else None
    over_seeds = jax.vmap(train, (stacked, None, 0, batches))
    return jax.vmap(over_seeds, (None, 0, None, None))
