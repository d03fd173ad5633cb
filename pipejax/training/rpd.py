"""Randomized PipeDream: block updates at random stages, computed at outdated mixed models.

It stands for asynchronous pipeline training as analysis can handle it. Update k draws a stage, a
batch, and for each stage a model of the last delta updates that its block is read from; the
gradient of the drawn stage's block at this mixture moves only that block:

  z = (w^0[j_0], ..., w^{S-1}[j_{S-1}]),    w^s <- w^s - gamma * grad_s f(z; batch).

Source: arXiv 2606.03498, the method Randomized PipeDream (RPD).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray, UInt
from pipejax.base.checks import whole_number
from pipejax.training.draws import (
    LARGEST_COUNT,
    Delays,
    Draw,
    checked_delays,
    checked_delta,
    draw,
    start_key,
)
from pipejax.training.many_runs import Numbers, Seeds, checked_runs, over_runs, run_alone
from pipejax.training.objective import TrainingObjective, block_gradient
from pipejax.training.training_run import DIVERGED, TrainingRun

Table = Int[NumpyArray, "..."]
Outcome = tuple[Array, Array, Array, Array, Array | None]  # a run without its updates
State = tuple[Array, Array, Array, Array]  # models kept, current one, largest and sum of squares


def randomized_pipedream(
    objective: TrainingObjective,
    *,
    step_size: float,
    seed: int,
    updates: int,
    delta: int = 0,
    delays: Table | None = None,
    every: int = 1,
    norms: bool = False,
) -> TrainingRun:
    """Train once by Randomized PipeDream.

    Args:
      objective: what is trained.
      step_size: gamma.
      seed: of start, stages, batches and delays.
      updates: block updates to do, a multiple of `every`.
      delta: largest delay: every block is read from a model of the last delta updates, uniformly
        and on its own. 0 is stochastic block coordinate descent.
      delays: instead of delta, whole numbers (samples, stages), or (stages, samples, stages) by the
        stage that is updated: one sample is drawn uniformly and says how many updates old each
        block is, never older than the start. They can be those of a schedule.
      every: updates from one sample of the gap to the next.
      norms: whether to measure the full gradient before every update, which costs as much as f.

    Returns:
      The run, in the precision of the objective.

    Raises:
      ValueError: if the step size is no finite number above 0, a count or the seed no whole number
        in range, the delays no such table, or both delta and delays are given.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> run = pj.training.randomized_pipedream(
      ...     objective, step_size=0.25, seed=0, updates=400, delta=14, every=200
      ... )
      >>> run.update.tolist(), bool(run.gap[-1] < 1e-3 * run.gap[0])
      ([0, 200, 400], True)
    """
    how = {"updates": updates, "delta": delta, "delays": delays, "every": every, "norms": norms}
    return run_alone(sweep_randomized_pipedream, objective, step_size, seed, **how)


def sweep_randomized_pipedream(
    objective: TrainingObjective,
    *,
    step_sizes: Numbers,
    seeds: Seeds,
    updates: int,
    delta: int | Sequence[int] = 0,
    delays: Table | None = None,
    every: int = 1,
    norms: bool = False,
) -> TrainingRun:
    """Train with every step size and seed, in one compiled call.

    The choices of a seed are the same whatever the step size, and whatever is run beside it.

    Args:
      objective: what is trained; either one, or those of the seeds, stacked.
      step_sizes: (step_sizes) gamma.
      seeds: (seeds) of start, stages, batches and delays.
      updates: block updates to do, a multiple of `every`.
      delta: largest delay, as for `randomized_pipedream`; if several, they are a further, leading
        axis.
      delays: instead of delta, as for `randomized_pipedream`.
      every: updates from one sample of the gap to the next.
      norms: whether to measure the full gradient before every update, which costs as much as f.

    Returns:
      The runs, with leading axes (step_sizes, seeds), or (deltas, step_sizes, seeds).

    Raises:
      ValueError: as `randomized_pipedream`; if there are no step sizes, seeds or deltas, or not as
        many stacked objectives as seeds.

    Cost:
      Holds (largest delay + 1) models for each run. Compiles once per shape: step sizes, seeds,
      deltas and delays are data.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> runs = pj.training.sweep_randomized_pipedream(
      ...     objective, step_sizes=[0.5, 0.25], seeds=range(3), updates=400, delta=14, every=100
      ... )
      >>> runs.gap.shape, runs.diverged.shape
      ((2, 3, 5), (2, 3))
    """
    whole_number(every, "every")
    if whole_number(updates, "updates") % every:
        raise ValueError(f"updates must be a multiple of every {every}, got {updates}")
    chosen, checked = checked_runs(objective, step_sizes, seeds, updates // every + 1, every)
    law = _law(objective, delta, delays)
    how = _RandomizedSettings(int(law.max()) + 1, updates // every, every, norms)
    outcome = _compiled(objective, chosen, checked, law, how)
    return TrainingRun(every * np.arange(updates // every + 1), *outcome)


def _law(objective: TrainingObjective, delta: int | Sequence[int], delays: Table | None) -> Table:
    """What delays are drawn from: a scalar or (deltas), or (stages, samples, stages)."""
    counts = {"num_stages": objective.num_stages + 2, "num_batches": objective.num_batches}
    for name, count in counts.items():
        if count > LARGEST_COUNT:
            raise ValueError(f"{name} must be at most {LARGEST_COUNT}, got {count}")
    if delays is not None:
        if not isinstance(delta, int) or delta != 0:
            raise ValueError(f"delta must be left out where delays are given, got {delta!r}")
        return checked_delays(delays, objective.num_stages)
    if not isinstance(delta, Sequence | np.ndarray):
        return np.array(checked_delta(delta), np.int32)
    if not len(delta):
        raise ValueError(f"delta must be one or more whole numbers, got {delta!r}")
    return np.array([checked_delta(each) for each in delta], np.int32)


class _RandomizedSettings(NamedTuple):
    """Models kept, samples of the gap, updates between them, and whether norms are measured."""

    window: int
    samples: int
    every: int
    norms: bool


@functools.partial(jax.jit, static_argnames="how")
def _compiled(
    objective: TrainingObjective,
    step_sizes: Float[Array, " step_sizes"],
    seeds: UInt[Array, " seeds"],
    law: Int[Array, "..."],
    how: _RandomizedSettings,
) -> Outcome:
    train = over_runs(functools.partial(_train, how=how), objective, None)
    if law.ndim == 1:
        train = jax.vmap(train, (None, None, None, 0))
    return train(objective, step_sizes, seeds, law)


def _train(
    objective: TrainingObjective,
    step_size: Float[Array, ""],
    seed: UInt[Array, ""],
    law: Delays,
    how: _RandomizedSettings,
) -> Outcome:
    """One run. Model k is kept at place k mod window until model k + window takes it."""
    window, samples, every, norms = how
    start = objective.init(start_key(seed))
    size = step_size.astype(start.dtype)
    stages = jnp.arange(objective.num_stages)
    choose = functools.partial(
        draw, num_stages=objective.num_stages, num_batches=objective.num_batches, delays=law
    )

    def update(state: State, choice: tuple[Array, Draw]) -> tuple[State, None]:
        kept, blocks, largest, total = state
        k, (stage, batch, read) = choice
        mixed = kept[read % window, stages]
        gradient = block_gradient(objective, mixed, objective.batch(batch), stage)
        if norms:
            total += jnp.sum(jax.grad(objective.value)(blocks) ** 2)
        moved = blocks - size * gradient[None, :]
        blocks = jnp.where((stages == stage)[:, None], moved, blocks)
        kept = jax.lax.dynamic_update_index_in_dim(kept, blocks, (k + 1) % window, 0)
        return (kept, blocks, jnp.maximum(largest, gradient @ gradient), total), None

    def to_sample(state: State, first: Array) -> tuple[State, Array]:
        k = first + jnp.arange(every, dtype=jnp.int32)
        state, _ = jax.lax.scan(update, state, (k, jax.vmap(functools.partial(choose, seed))(k)))
        return state, objective.gap(state[1])

    zero = jnp.zeros((), start.dtype)
    kept = jnp.broadcast_to(start, (window, *start.shape))
    firsts = every * jnp.arange(samples, dtype=jnp.int32)
    (_, blocks, largest, total), gaps = jax.lax.scan(to_sample, (kept, start, zero, zero), firsts)
    gap = jnp.append(objective.gap(start), gaps)
    diverged = jnp.any(~jnp.isfinite(gap) | (gap > DIVERGED * gap[0]))
    return gap, diverged, blocks, largest, total / (samples * every) if norms else None
