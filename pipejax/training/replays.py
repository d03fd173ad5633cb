"""Training in the order of ops in a table's run, in which gradients read outdated weights.

PipeDream, PipeDream-2BW and LocalSGD are tables, so the same replay trains all of them. Times are
those of the run, in slots or seconds, so methods can be compared at equal times.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.analysis.runs.staleness import SAME_MOMENT, op_times
from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.checks import resolve_choice, whole_number, wrong
from pipejax.base.compiled import compiled
from pipejax.costs.costs import Costs
from pipejax.schedules.cells.dependencies import find_versions
from pipejax.schedules.cells.ops import COMPUTING
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.sharding import on_sharding_lane
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.training import training_run
from pipejax.training.objective import TrainingObjective

NO_SAMPLE = -1
ORDERS = ("epochs", "cyclic", "drawn")  # possible orders of the batches
Times = Float[NumpyArray, " samples"]
State = tuple[Array, Array, Array]  # stored versions, collected gradients, largest squared norm


def replay(
    objective: TrainingObjective, table: ScheduleTable, *, step_size: float, seed: int, **how: Any
) -> training_run.TrainingRun:
    """Train once, with gradients and updates in the order of a table's run.

    Args:
      objective: objective to train, with as many stages as the table.
      table: an asynchronous schedule.
      step_size: gamma.
      seed: random seed of the start and of the order of batches.
      **how: costs, link, times, each_run, batches and noise, as for `sweep_replay`.

    Returns:
      The run, without the axes of `sweep_replay`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("pipedream", num_workers=4, num_microbatches=60)
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> run = pj.training.replay(objective, table, step_size=0.25, seed=0, times=2)
      >>> run.time.tolist(), run.update.tolist(), bool(run.gap[-1] < 1e-2 * run.gap[0])
      ([0.0, 63.0, 126.0], [0, 116, 240], True)
    """
    return training_run.run_alone(sweep_replay, objective, step_size, seed, table=table, **how)


def sweep_replay(
    objective: TrainingObjective,
    table: ScheduleTable,
    *,
    step_sizes: training_run.Numbers,
    seeds: training_run.Seeds,
    costs: Costs | None = None,
    link: str | Links = "delay",
    times: Times | int = 100,
    each_run: bool = False,
    batches: str = "epochs",
    noise: float = 0.0,
) -> training_run.TrainingRun:
    """Train in the order of a table's run, for all step sizes and seeds in one compiled call.

    Args:
      objective: objective to train, with as many stages as the table; or stacked objectives, one
        for each seed.
      table: an asynchronous schedule: pipedream, pipedream-2bw, local-sgd or one of your own.
      step_sizes: (step_sizes) gamma; an update applies the mean of the gradients that it collects.
      seeds: (seeds) random seeds of the start and of the order of batches.
      costs: costs [s] without a batch axis; None: an op takes one slot, updates and messages none.
      link: link model, or `Links`.
      times: (samples) ascending times at which the gap is computed [s, or slots]; or the number of
        equal parts into which the time of the run is divided.
      each_run: with several models, as in LocalSGD: True gives the mean of the gaps of all models,
        False the gap of their mean.
      batches: one of `ORDERS`. "epochs" trains on all batches in a new random order, again and
        again. "cyclic" always uses the order 0, 1, ... "drawn" draws each batch at random, as
        Randomized PipeDream does.
      noise: standard deviation of normal noise on every coordinate of every block gradient.

    Returns:
      The runs, with leading axes (step_sizes, seeds). `gap` is the gap of the newest blocks of all
      stages at each time. `loss` is the loss of the batches at the weights that their forwards
      have read.

    Raises:
      ValueError: if an argument is out of range, if the stages do not match, if the table has no
        updates, or if it cannot be replayed.

    Cost:
      For each run, one model more than the age of the oldest one that is read. Compiles per shape.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("local-sgd", num_workers=4, num_microbatches=40)
      >>> runs = pj.training.sweep_replay(
      ...     pj.training.random_quadratic(4, dimension=8, seed=0), table, step_sizes=[0.5, 0.25],
      ...     seeds=range(3), times=5,
      ... )
      >>> runs.gap.shape, runs.diverged.shape
      ((2, 3, 6), (2, 3))
    """
    if objective.num_stages != table.num_stages:
        raise ValueError(
            f"objective has {objective.num_stages} stages, but {table.name} has {table.num_stages}"
        )
    if isinstance(times, int | np.integer):
        num_samples = whole_number(times, "times") + 1
    else:
        num_samples = len(times)
    deviation = training_run.checked_noise(noise)
    sizes, seed_array = training_run.check_runs(objective, step_sizes, seeds, num_samples)
    _, finish = op_times(table, costs, link=link)
    sample_times = _check_times(times, float(finish.max()))
    plan = make_plan(table, finish, sample_times)
    batch_orders = [
        batch_order(int(seed), table.num_microbatches, objective.num_batches, batches)
        for seed in seed_array
    ]
    events = _ReplayEvents(*map(_narrow, plan.events))
    events = events._replace(read=events.read % plan.depth, newest=events.newest % plan.depth)
    is_sample = np.asarray(plan.events.sample) != NO_SAMPLE
    gap, losses, diverged, blocks, largest = _train_all(
        objective,
        sizes,
        seed_array,
        np.stack(batch_orders)[:, plan.events.microbatch].astype(np.int32),
        deviation,
        events,
        _narrow(plan.sampled % plan.depth),
        (np.flatnonzero(is_sample), np.flatnonzero(~is_sample)),
        _ReplaySettings(plan.depth, each_run, deviation > 0),
    )
    loss = _mean_losses(np.asarray(losses), is_sample)
    minimum = np.broadcast_to(objective.minimum, diverged.shape)
    return training_run.TrainingRun(
        plan.update, gap, diverged, blocks, largest, None, sample_times, loss, minimum
    )


def _mean_losses(
    losses: Float[NumpyArray, "*runs gradients"], is_sample: Bool[NumpyArray, " events"]
) -> Float[NumpyArray, "*runs samples"]:
    """Return the mean loss of all gradients since the previous sample; NaN without gradients."""
    # An event is a gradient, which has a loss, or a sample, at which the gap is recorded. The last
    # event is a sample. Example: gradient, sample, gradient, gradient, sample. If the losses of
    # the gradients are 1 2 4, the means are 1 and 3.
    gradients_before = np.cumsum(~is_sample)[is_sample]
    groups = np.split(losses, gradients_before, axis=-1)[:-1]  # the last group is always empty
    count = np.diff(gradients_before, prepend=0)
    total = np.stack([group.sum(axis=-1) for group in groups], axis=-1)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def batch_order(
    seed: int, microbatches: int, num_batches: int, batches: str = "epochs"
) -> Int[NumpyArray, " microbatches"]:
    """Return the index of the batch that each microbatch trains on.

    Args:
      seed: random seed of the run.
      microbatches: M.
      num_batches: number of batches.
      batches: one of `ORDERS`, as for `sweep_replay`.

    Returns:
      (microbatches) indices of batches.

    Example:
      >>> import pipejax as pj
      >>> sorted(pj.training.batch_order(0, 6, 3)[3:].tolist())
      [0, 1, 2]
      >>> pj.training.batch_order(0, 6, 3, "drawn").tolist()
      [1, 2, 2, 2, 2, 0]
    """
    order = resolve_choice(batches, ORDERS, "batches")
    if order == "cyclic":
        return np.arange(microbatches) % num_batches
    random = np.random.default_rng([seed, num_batches])
    if order == "drawn":
        return random.integers(num_batches, size=microbatches)
    epochs = -(-microbatches // num_batches)
    return np.concatenate([random.permutation(num_batches) for _ in range(epochs)])[:microbatches]


# A plan says which weights each gradient of a table reads and updates, and in which order.
#
# The backwards of a microbatch use the weights that its forwards read (weight stashing). So they
# compute the gradient at one mixed model, in which each stage has the version that its forward
# read. A plan orders the gradients so that every version exists when it is read. Versions of a
# stage are stored in a ring buffer: version v has the index v mod depth.


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayPlan:
    """Plan of a replay: its events, which are gradients and samples, in order of computation."""

    events: "_ReplayEvents"
    sampled: Int[NumpyArray, "samples runs stages"]  # versions at the time of each sample
    update: Int[NumpyArray, " samples"]  # block updates before each sample, over all runs
    depth: int  # versions to store


def make_plan(
    table: ScheduleTable,
    finish: Float[NumpyArray, "workers slots"],
    time: Float[NumpyArray, " samples"],
) -> ReplayPlan:
    """Return the plan of a table's gradients, with samples of the gap at the times `time`."""
    # `finish` is the end of each cell. The version of a stage is the number of its updates so far.
    if not table.updates_within:
        raise ValueError(f"{table.name} does not update weights within the table: no U cell")
    check_usual(on_sharding_lane(table, COMPUTING), "training")  # sharding cells may be on any lane
    if table.num_pipes > 1:
        raise ValueError(f"{table.name} has {table.num_pipes} pipes, each with its own weights")
    order, gradients = _gradient_events(table)
    latest = time + SAME_MOMENT * float(finish.max())  # time of each sample, plus rounding
    first_end = finish.ravel()[find_versions(table).update_cell].min(axis=0)[order]
    has_begun = first_end[None] <= latest[:, None]
    # gradients before each sample, up to the last whose updates have begun: [T T F T F] -> 4
    needed = has_begun.shape[1] - has_begun[:, ::-1].argmax(axis=1)
    needed = np.where(has_begun.any(axis=1), needed, 0)
    versions = [
        [np.searchsorted(stage_ends, latest, side="right") for stage_ends in run_ends]
        for run_ends in _update_ends(table, finish)
    ]
    sampled = np.moveaxis(np.array(versions), -1, 0)
    is_of_run = gradients["run"][None] == np.arange(table.weights.runs)[:, None]
    # (runs, samples, stages) updates of the replay before each sample
    done = np.cumsum(gradients["applies"][None] * is_of_run[..., None], axis=1)
    done = np.concatenate([np.zeros_like(done[:, :1]), done], axis=1)[:, needed]
    largest_lag = max(
        int((gradients["newest"] + gradients["applies"] - gradients["read"]).max()),
        int((np.moveaxis(done, 1, 0) - sampled).max()),
    )
    # Merge gradients, with the keys 1, 3, .., and samples; a sample after n gradients has the key
    # 2 n. Three gradients, and samples after 0 and 2 of them, have the keys [1 3 5 | 0 4]: sample,
    # gradient, gradient, sample. Gradients after the last sample are dropped.
    key = np.concatenate([2 * np.arange(len(order)) + 1, 2 * needed])
    merged = np.argsort(key, kind="stable")
    merged = merged[: np.flatnonzero(merged >= len(order))[-1] + 1]
    source = np.append(np.arange(len(order)), np.maximum(needed - 1, 0))[merged]
    events = {name: values[source] for name, values in gradients.items()}
    is_sample = merged >= len(order)
    events["averages"] &= ~is_sample
    sample = np.where(is_sample, merged - len(order), NO_SAMPLE)
    return ReplayPlan(
        events=_ReplayEvents(**events, sample=sample),
        sampled=sampled,
        update=sampled.sum(axis=(1, 2)),
        depth=1 << largest_lag.bit_length(),  # a power of 2, because each depth is compiled anew
    )


def _gradient_events(
    table: ScheduleTable,
) -> tuple[Int[NumpyArray, " microbatches"], dict[str, NumpyArray]]:
    """Return the microbatches in the order of their gradients, and fields of `_ReplayEvents`."""
    # Fields have the shape (microbatches) or (microbatches, stages). An update of a stage collects
    # gradients of several microbatches; the last gradient applies it. A run is a model of
    # LocalSGD.
    versions, rule = find_versions(table), table.weights
    _, finish = op_times(table)
    first_end = finish.ravel()[table.backward_end_cells].min(axis=0)
    order = np.argsort(first_end, kind="stable")
    run, applied = order % rule.runs, versions.applied[:, order].T
    key = applied * rule.runs + run[:, None]  # number of the update, for each stage
    size = np.stack([np.bincount(column)[column] for column in key.T], axis=1)  # count of the key
    rank = np.empty_like(key)  # position among equal keys: [5 7 5 5] -> [0 0 1 2]
    for stage, column in enumerate(key.T):
        by_key = np.argsort(column, kind="stable")
        group = np.append(0, np.cumsum(np.diff(column[by_key]) != 0))
        rank[by_key, stage] = np.arange(len(by_key)) - np.searchsorted(group, group)
    for run_number in range(rule.runs):
        if np.any(np.diff(applied[run == run_number], axis=0) < 0):
            raise ValueError(
                f"{table.name} updates the microbatches of run {run_number} in another order on "
                "one stage than on another: it cannot be replayed microbatch by microbatch"
            )
    rounds = order // rule.round_size
    averages = np.append(False, rounds[1:] != rounds[:-1]) & (rule.runs > 1)
    applies = rank == size - 1
    _check_averages(table, run, applies, averages)
    return order, {
        "microbatch": order,
        "run": run,
        "read": versions.read[:, order].T,
        "newest": applied,
        "applies": applies,
        "collected": size,
        "averages": averages,
    }


def _check_averages(
    table: ScheduleTable, run: NumpyArray, applies: NumpyArray, averages: NumpyArray
) -> None:
    """Check that all runs have equal numbers of updates of each stage before each average."""
    # shapes: run (events), applies (events, stages), averages (events); averages[0] is False
    event_before = np.flatnonzero(averages) - 1
    update_counts = [
        np.cumsum(applies * (run == run_number)[:, None], axis=0)[event_before]
        for run_number in range(table.weights.runs)
    ]
    if any(np.any(counts != update_counts[0]) for counts in update_counts):
        raise ValueError(f"{table.name} averages runs that do not have equal numbers of updates")


def _update_ends(
    table: ScheduleTable, finish: Float[NumpyArray, "workers slots"]
) -> list[list[Float[NumpyArray, " updates"]]]:
    """Return nested lists [run][stage] of the end times of updates, in row order."""
    cell, stages, runs = table.updates, table.num_stages, table.weights.runs
    run, stage = table.microbatch.ravel()[cell] % runs, table.stage.ravel()[cell]
    ends = finish.ravel()[cell]
    return [[ends[(run == r) & (stage == s)] for s in range(stages)] for r in range(runs)]


class _ReplayEvents(NamedTuple):
    """Gradients and samples in the order of their computation; a run is one of several models."""

    # weight versions are numbers of updates, or indices into the ring buffer
    microbatch: Any  # (events) microbatch of the gradient, or of the last gradient before a sample
    run: Any  # (events) run of the gradient
    read: Any  # (events, stages) weight version that the gradient reads
    newest: Any  # (events, stages) newest weight version of the run before the gradient
    applies: Any  # (events, stages) whether an update of the stage follows the gradient
    collected: Any  # (events, stages) number of gradients in that update
    averages: Any  # (events) whether the weights of all runs are averaged before the event
    sample: Any  # (events) number of the sample; `NO_SAMPLE` if the event is a gradient


def _narrow(values: NumpyArray) -> NumpyArray:
    return values if values.dtype == bool else values.astype(np.int32)


def _check_times(times: Times | int, end: float) -> Times:
    """Return the sample times after a check; an integer n means n equal intervals up to `end`."""
    if isinstance(times, int | np.integer):
        return np.linspace(0.0, end, times + 1)
    values = np.asarray(times, np.float64)
    is_row = values.ndim == 1 and len(values) > 0
    if not is_row or not np.isfinite(values).all() or np.any(np.diff(values, prepend=0.0) < 0):
        raise wrong("times", f"must be finite, at least 0 and ascending, got {times!r}")
    return values


class _ReplaySettings(NamedTuple):
    """Static settings of a run."""

    depth: int  # weight versions to store
    each_run: bool  # gap: mean over the models, instead of the gap of their mean
    noisy: bool  # whether gradients have noise


@functools.partial(compiled, static_argnames="settings")
def _train_all(
    objective: TrainingObjective,
    step_sizes: Float[Array, " step_sizes"],
    seeds: Array,
    batches: Int[Array, "seeds events"],
    noise: Float[Array, ""],
    events: _ReplayEvents,
    sampled: Int[Array, "samples runs stages"],
    places: tuple[Int[Array, " samples"], Int[Array, " gradients"]],
    settings: _ReplaySettings,
) -> tuple[Array, Array, Array, Array, Array]:
    """Train all runs; return gaps, losses of gradients, and the last three results of `_train`."""
    # `places` are the indices of samples of the gap, and of gradients, among the events
    run = functools.partial(_train, noise=noise, events=events, sampled=sampled, settings=settings)
    gaps_and_losses, *results = training_run.over_runs(run, objective, 0)(
        objective, step_sizes, seeds, batches
    )
    return gaps_and_losses[..., places[0]], gaps_and_losses[..., places[1]], *results


def _train(
    objective: TrainingObjective,
    step_size: Float[Array, ""],
    seed: Array,
    batches: Int[Array, " events"],
    *,
    noise: Float[Array, ""],
    events: _ReplayEvents,  # equal for all runs, so `vmap` does not turn `cond` into `select`
    sampled: Int[Array, "samples runs stages"],
    settings: _ReplaySettings,
) -> tuple[Array, Array, Array, Array]:
    """Train once; return results by event, divergence, last blocks, largest squared gradient."""
    depth, each_run, noisy = settings
    start = objective.init(training_run.start_key(seed))
    step_size = step_size.astype(start.dtype)
    stages, runs = jnp.arange(objective.num_stages), jnp.arange(sampled.shape[1])

    def apply_gradient(
        state: State, event: _ReplayEvents, batch: Array
    ) -> tuple[State, Float[Array, ""]]:
        """Compute the gradient of an event, and do the updates of stages that follow it."""
        # weights (runs, versions, stages, width): at depth 8, version 9 has the index 1
        weights, collected, largest = state
        weights = jax.lax.cond(event.averages, average, lambda same, _: same, weights, event.newest)
        run_weights = weights[event.run]
        mixed = run_weights[event.read, stages]
        loss, gradient = jax.value_and_grad(objective.batch_loss)(mixed, objective.batch(batch))
        if noisy:
            number, dtype = jnp.asarray(event.microbatch), gradient.dtype
            normal = training_run.gradient_noise(seed, number, gradient.shape, dtype)
            gradient += noise.astype(gradient.dtype) * objective.held() * normal
        total = collected[event.run] + gradient
        current = run_weights[event.newest, stages]
        updated = current - step_size * total / event.collected[:, None].astype(start.dtype)
        applies = event.applies[:, None]
        version = jnp.where(event.applies, (event.newest + 1) % depth, event.newest)
        weights = weights.at[event.run, version, stages].set(jnp.where(applies, updated, current))
        collected = collected.at[event.run].set(jnp.where(applies, 0, total))
        largest = jnp.maximum(largest, jnp.max(jnp.sum(gradient**2, axis=1)))
        return (weights, collected, largest), loss

    def average(weights: Array, version: Array) -> Array:
        """Set a weight version of all models to their mean, as LocalSGD does after a round."""
        mean = jnp.mean(weights[:, version, stages], axis=0)
        return weights.at[:, version, stages].set(mean[None])

    def models(weights: Array, versions: Array) -> Array:
        """Return the blocks (runs, stages, width) of the weight versions (runs, stages)."""
        return weights[runs[:, None], versions, stages[None]]

    def sample_gap(run_models: Array) -> Array:
        """Return the gap of the mean of all models, or the mean of their gaps."""
        if each_run:
            return jnp.mean(jax.vmap(objective.gap)(run_models))
        return objective.gap(jnp.mean(run_models, axis=0))

    def replay(state: State, event_and_batch: tuple[_ReplayEvents, Array]) -> tuple[State, Array]:
        event, batch = event_and_batch
        return jax.lax.cond(
            event.sample == NO_SAMPLE,  # a gradient; otherwise a sample of the gap
            lambda: apply_gradient(state, event, batch),
            lambda: (state, sample_gap(models(state[0], sampled[event.sample]))),
        )

    weights = jnp.broadcast_to(start, (len(runs), depth, *start.shape))
    zeros = jnp.zeros((len(runs), *start.shape), start.dtype)
    state = weights, zeros, jnp.zeros((), start.dtype)
    (weights, _, largest), results = jax.lax.scan(replay, state, (events, batches))
    is_sample = events.sample != NO_SAMPLE
    is_far = ~jnp.isfinite(results) | (results > training_run.DIVERGED * objective.gap(start))
    blocks = jnp.mean(models(weights, sampled[-1]), axis=0)
    return results, jnp.any(is_far & is_sample), blocks, largest
