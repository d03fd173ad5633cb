"""Randomized PipeDream: updates of random stages, with gradients at mixed old weights.

Randomized PipeDream is a model of asynchronous pipeline training that can be analysed. Update k
draws a stage and a batch. For each stage s, it also draws one of the last delta + 1 models, and
reads block s of that model. The gradient at these blocks changes only the drawn stage:

  z = (w^0[j_0], ..., w^{S-1}[j_{S-1}]),    w^s <- w^s - gamma * grad_s f(z; batch).

Source: arXiv 2606.03498, the method Randomized PipeDream (RPD).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray, UInt
from pipejax.base.checks import resolve_choice, whole_number, wrong
from pipejax.base.compiled import compiled
from pipejax.training.objective import TrainingObjective
from pipejax.training.training_run import (
    DIVERGED,
    LARGEST_COUNT,
    Delays,
    Numbers,
    Seeds,
    TrainingRun,
    check_runs,
    checked_delays,
    checked_delta,
    checked_noise,
    draw,
    drawn_stage,
    gradient_noise,
    over_runs,
    run_alone,
    start_key,
)

Table = Int[NumpyArray, "..."]
Outcome = tuple[Array, Array, Array, Array, Array | None, Array]
RANDOM_ORDERS = ("drawn", "cyclic")  # possible orders of the batches


def randomized_pipedream(
    objective: TrainingObjective, *, step_size: float, seed: int, **how: Any
) -> TrainingRun:
    """Train once by Randomized PipeDream.

    Args:
      objective: objective to train.
      step_size: gamma.
      seed: random seed of start, stages, batches and delays.
      **how: updates, delta, delays, interval, norms, batches and noise, as for
        `sweep_randomized_pipedream`.

    Returns:
      The run, without the axes of `sweep_randomized_pipedream`.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> run = pj.training.randomized_pipedream(
      ...     objective, step_size=0.25, seed=0, updates=400, delta=14, interval=200
      ... )
      >>> run.update.tolist(), bool(run.gap[-1] < 1e-3 * run.gap[0])
      ([0, 200, 400], True)
    """
    return run_alone(sweep_randomized_pipedream, objective, step_size, seed, **how)


def sweep_randomized_pipedream(
    objective: TrainingObjective,
    *,
    step_sizes: Numbers,
    seeds: Seeds,
    updates: int,
    delta: int | Sequence[int] = 0,
    delays: Table | None = None,
    interval: int = 1,
    norms: bool = False,
    batches: str = "drawn",
    noise: float = 0.0,
) -> TrainingRun:
    """Train by Randomized PipeDream with every step size and seed, in one compiled call.

    The random choices of a seed do not depend on the step size or on other runs.

    Args:
      objective: objective to train, or stacked objectives, one for each seed.
      step_sizes: (step_sizes) gamma.
      seeds: (seeds) random seeds of start, stages, batches and delays.
      updates: number of block updates, a multiple of `interval`.
      delta: largest delay; each block is read from one of the last delta + 1 models, at random. 0
        is stochastic block coordinate descent. Several values give a leading axis.
      delays: samples of delays, such as those of a schedule, instead of delta. The shape is
        (samples, stages), or (stages, samples, stages) by updated stage. An update draws one
        sample: the age of each block in updates, at most back to the start.
      interval: updates between two samples of the gap.
      norms: whether to compute the full gradient before every update, which costs as much as f.
      batches: "drawn", or "cyclic": update k uses batch k mod num_batches.
      noise: standard deviation of normal noise on every coordinate of every block gradient.

    Returns:
      The runs, with leading axes (step_sizes, seeds), or (deltas, step_sizes, seeds), in the
      precision of the objective.

    Raises:
      ValueError: if an argument is out of range, or both delta and delays are given.

    Cost:
      Memory for (largest delay + a multiple of S) blocks per run. Compiles once per shape; new
      step sizes, seeds, deltas and delays need no compilation.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> runs = pj.training.sweep_randomized_pipedream(
      ...     objective, step_sizes=[0.5, 0.25], seeds=range(3), updates=400, delta=14, interval=100
      ... )
      >>> runs.gap.shape, runs.diverged.shape
      ((2, 3, 5), (2, 3))
    """
    whole_number(interval, "interval")
    if whole_number(updates, "updates") % interval:
        raise wrong("updates", f"must be a multiple of interval {interval}, got {updates}")
    num_samples = updates // interval + 1
    sizes, seed_array = check_runs(objective, step_sizes, seeds, num_samples, interval)
    law = _delay_law(objective, delta, delays)
    order, deviation = resolve_choice(batches, RANDOM_ORDERS, "batches"), checked_noise(noise)
    oldest = int(law.max())
    depth = oldest + _longest_rest(seed_array, updates, objective.num_stages)
    settings = _RandomizedSettings(
        window=oldest + 1,
        depth=1 << (depth - 1).bit_length(),  # a power of 2, because each depth is compiled anew
        samples=updates // interval,
        interval=interval,
        norms=norms,
        cyclic=order == "cyclic",
        noisy=deviation > 0,
    )
    results = _train_all(objective, sizes, seed_array, law, deviation, settings)
    gap, diverged, blocks, largest, mean, loss = results
    update = interval * np.arange(updates // interval + 1)
    minimum = np.broadcast_to(objective.minimum, diverged.shape)
    return TrainingRun(update, gap, diverged, blocks, largest, mean, None, loss, minimum)


def _longest_rest(seeds: UInt[NumpyArray, " seeds"], updates: int, num_stages: int) -> int:
    """Return the longest interval, in updates, in which a stage is not updated."""
    # Block s < S is the start of stage s, update k makes block S + k, and S + K marks the end of
    # the run. With S = 2 and updates of the stages 1 1 0, stage 0 has the blocks 0 4, stage 1 has
    # 1 2 3, and 5 marks the end. The longest interval is 4 updates, from block 0 to block 4.
    stages = np.arange(num_stages)
    end = np.full(num_stages, num_stages + updates)
    number = np.concatenate([stages, num_stages + np.arange(updates), end])
    longest = 0
    for updated in np.asarray(_stages(seeds, np.arange(updates), num_stages)):
        by_stage = np.argsort(np.concatenate([stages, updated, stages]), kind="stable")
        longest = max(longest, int(np.diff(number[by_stage]).max()))
    return longest


@functools.partial(compiled, static_argnames="num_stages")
def _stages(
    seeds: UInt[Array, " seeds"], updates: Int[Array, " updates"], num_stages: int
) -> Int[Array, "seeds updates"]:
    stages_by_update = jax.vmap(drawn_stage, (None, 0, None))
    return jax.vmap(stages_by_update, (0, None, None))(seeds, updates, num_stages)


def _delay_law(
    objective: TrainingObjective, delta: int | Sequence[int], delays: Table | None
) -> Table:
    """Check `delta` and `delays`; return the largest delays, or the samples of delays."""
    counts = {"num_stages": objective.num_stages + 2, "num_batches": objective.num_batches}
    for name, count in counts.items():
        if count > LARGEST_COUNT:
            raise ValueError(f"{name} must be at most {LARGEST_COUNT}, got {count}")
    if delays is not None:
        if not isinstance(delta, int) or delta != 0:
            raise wrong("delta", f"must be left out if delays are given, got {delta!r}")
        return checked_delays(delays, objective.num_stages)
    if not isinstance(delta, Sequence | np.ndarray):
        return np.array(checked_delta(delta), np.int32)
    if not len(delta):
        raise wrong("delta", f"must be one or more whole numbers, got {delta!r}")
    return np.array([checked_delta(largest_delay) for largest_delay in delta], np.int32)


class _RandomizedSettings(NamedTuple):
    window: int  # number of latest models that can be read
    depth: int  # number of stored blocks
    samples: int  # samples of the gap after the start
    interval: int  # updates between two samples
    norms: bool  # whether full gradients are computed
    cyclic: bool  # whether batches are used in turn
    noisy: bool  # whether gradients have noise


class _State(NamedTuple):
    """State of a run that each update changes."""

    # A model is stored as the numbers of its S blocks. Blocks 0 to S - 1 are the start, and update
    # k makes block S + k. So the history of a run has one block per update instead of S. The
    # numbers depend on the seed only, so `vmap` computes them once for all step sizes.

    history: Float[Array, "depth width"]  # block n has the index n mod depth
    blocks: Float[Array, "stages width"]  # the newest model
    largest: Float[Array, ""]  # largest squared norm of a block gradient
    total: Float[Array, ""]  # sum of squared norms of full gradients


class _Choice(NamedTuple):
    """Random choices of an update: stage, batch, blocks to read, and noise."""

    k: Int[Array, "*updates"]  # number of the update
    stage: Int[Array, "*updates"]  # stage whose block is updated
    batch: Int[Array, "*updates"]  # index of the batch
    read: Int[Array, "*updates stages"]  # numbers of the blocks that are read
    noise: Float[Array, "*updates width"]  # added to the gradient, or () without noise


@functools.partial(compiled, static_argnames="settings")
def _train_all(
    objective: TrainingObjective,
    step_sizes: Float[Array, " step_sizes"],
    seeds: UInt[Array, " seeds"],
    law: Int[Array, "..."],
    noise: Float[Array, ""],
    settings: _RandomizedSettings,
) -> Outcome:
    """Train for all step sizes, seeds and delay distributions in one compiled call."""
    train = over_runs(functools.partial(_train, noise=noise, settings=settings), objective, None)
    if law.ndim == 1:
        train = jax.vmap(train, (None, None, None, 0))
    return train(objective, step_sizes, seeds, law)


def _train(
    objective: TrainingObjective,
    step_size: Float[Array, ""],
    seed: UInt[Array, ""],
    law: Delays,
    *,
    noise: Float[Array, ""],
    settings: _RandomizedSettings,
) -> Outcome:
    """Train once by Randomized PipeDream."""
    # A model is a row of block numbers, one per stage (see `_State`). With 2 stages, updates 0 and
    # 1 of stage 1 change the model [0 1] to [0 2] and then to [0 3].
    start = objective.init(start_key(seed))
    size, (num_stages, width) = step_size.astype(start.dtype), start.shape
    stages = jnp.arange(num_stages, dtype=jnp.int32)
    choose = functools.partial(
        draw, seed, num_stages=num_stages, num_batches=objective.num_batches, delays=law
    )

    def choices(models: Array, first: Array) -> tuple[Array, _Choice]:
        """Return the latest models at the next sample, and the choices of updates from `first`."""
        # `models` (window, stages) are the latest models before update `first`. Block numbers of a
        # stage only grow, so a running maximum of new numbers gives the model after each update.
        # Row window - 1 of `latest` is the model before update `first`.
        k = first + jnp.arange(settings.interval, dtype=jnp.int32)
        draws = jax.vmap(choose)(k)
        new_block = jnp.where(draws.stage[:, None] == stages[None], num_stages + k[:, None], 0)
        latest = jnp.concatenate([models, jnp.maximum(jax.lax.cummax(new_block), models[-1:])])
        read = latest[draws.read - first + settings.window - 1, stages[None]]
        batch = k % objective.num_batches if settings.cyclic else draws.batch
        added = jnp.zeros(settings.interval, start.dtype)
        if settings.noisy:
            added = _block_noise(objective, seed, k, draws.stage, start) * noise.astype(start.dtype)
        return latest[-settings.window :], _Choice(k, draws.stage, batch, read, added)

    def apply_update(state: _State, choice: _Choice) -> tuple[_State, Float[Array, ""]]:
        """Update the block of the drawn stage by a gradient at the drawn blocks."""
        k, stage, batch, read, added = choice
        mixed = state.history[read % settings.depth]
        loss, gradients = jax.value_and_grad(objective.batch_loss)(mixed, objective.batch(batch))
        gradient = gradients[stage] + added
        total = state.total
        if settings.norms:
            total += jnp.sum(jax.grad(objective.value)(state.blocks) ** 2)
        new_block = state.blocks[stage] - size * gradient
        return _State(
            history=state.history.at[(num_stages + k) % settings.depth].set(new_block),
            blocks=state.blocks.at[stage].set(new_block),
            largest=jnp.maximum(state.largest, gradient @ gradient),
            total=total,
        ), loss

    def to_sample(
        carry: tuple[_State, Array], first: Array
    ) -> tuple[tuple[_State, Array], tuple[Array, Array]]:
        """Train from update `first` to the next sample; return the gap and the mean loss there."""
        models, choice = choices(carry[1], first)
        state, losses = jax.lax.scan(apply_update, carry[0], choice)
        return (state, models), (objective.gap(state.blocks), jnp.mean(losses))

    zero = jnp.zeros((), start.dtype)
    history = jnp.zeros((settings.depth, width), start.dtype).at[:num_stages].set(start)
    models = jnp.broadcast_to(stages, (settings.window, num_stages))
    firsts = settings.interval * jnp.arange(settings.samples, dtype=jnp.int32)
    initial = _State(history, start, zero, zero), models
    (state, _), (gaps, losses) = jax.lax.scan(to_sample, initial, firsts)
    gap = jnp.append(objective.gap(start), gaps)
    diverged = jnp.any(~jnp.isfinite(gap) | (gap > DIVERGED * gap[0]))
    mean = state.total / (settings.samples * settings.interval) if settings.norms else None
    return gap, diverged, state.blocks, state.largest, mean, jnp.append(jnp.nan, losses)


def _block_noise(
    objective: TrainingObjective, seed: Array, k: Array, stage: Array, start: Array
) -> Float[Array, "updates width"]:
    """Return standard normal noise for the block of each update; 0 at padding."""
    is_parameter = jnp.broadcast_to(jnp.asarray(objective.held()), start.shape)
    width = (start.shape[1],)
    normal = jax.vmap(lambda number: gradient_noise(seed, number, width, start.dtype))(k)
    return is_parameter[stage] * normal
