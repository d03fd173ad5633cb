"""Training as a table does it: the gradients of its timeline, with the weights that they read.

PipeDream, PipeDream-2BW and LocalSGD are tables, so one replay runs them all. Time is that of the
table: slots of one op, or seconds under given costs, so that methods can be compared at the same
time on the same machine.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.analysis.runs.staleness import op_times
from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.checks import one_of, whole_number, wrong
from pipejax.base.compiled import compiled
from pipejax.costs.costs import Costs
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.training.draws import checked_noise, gradient_noise, start_key
from pipejax.training.objective import TrainingObjective
from pipejax.training.plan import NO_SAMPLE, make_plan
from pipejax.training.training_run import (
    DIVERGED,
    Numbers,
    Seeds,
    TrainingRun,
    checked_runs,
    over_runs,
    run_alone,
)

ORDERS = ("epochs", "cyclic", "drawn")  # of the batches
Times = Float[NumpyArray, " samples"]
State = tuple[Array, Array, Array]  # versions kept, gradients collected, largest square


def replay(
    objective: TrainingObjective,
    table: ScheduleTable,
    *,
    step_size: float,
    seed: int,
    costs: Costs | None = None,
    link: str | Links = "delay",
    times: Times | int = 100,
    each_run: bool = False,
    batches: str = "epochs",
    noise: float = 0.0,
) -> TrainingRun:
    """Train once along the timeline of a table.

    Args:
      objective: what is trained, cut into as many stages as the table has.
      table: an asynchronous schedule: pipedream, pipedream-2bw, local-sgd or one of your own.
      step_size: gamma; an update applies the mean of the gradients that it collects.
      seed: of the start and of the order of batches.
      costs: unbatched costs [s]; every op takes one slot, updates and messages nothing if None.
      link: link model, or `Links`.
      times: (samples) when to look at the gap [s, or slots], ascending; or into how many equal
        parts the time of the table is cut.
      each_run: whether the gap is the mean over the models of all runs, where there are several,
        instead of that of their mean model.
      batches: one of `ORDERS`: "epochs" runs through all batches in a new order each time, "cyclic"
        in the same order, 0, 1, ..., "drawn" draws every one by itself, as Randomized PipeDream
        does.
      noise: standard deviation of the normal numbers that are added to every coordinate of every
        block gradient.

    Returns:
      The run; its gap is that of the model that the stages hold together at each time, its loss
      that of the batches at the mixed models that their forwards have read.

    Raises:
      ValueError: if the step size is no finite number above 0, the noise none of at least 0, the
        seed no whole number in range, the stages do not match, a time is not finite, negative or
        not ascending, nothing updates within the table, or it cannot be replayed.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("pipedream", num_workers=4, num_microbatches=60)
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> run = pj.training.replay(objective, table, step_size=0.25, seed=0, times=2)
      >>> run.time.tolist(), run.update.tolist(), bool(run.gap[-1] < 1e-2 * run.gap[0])
      ([0.0, 63.0, 126.0], [0, 116, 240], True)
    """
    how = {"costs": costs, "link": link, "times": times, "each_run": each_run, "batches": batches}
    return run_alone(sweep_replay, objective, step_size, seed, table=table, noise=noise, **how)


def sweep_replay(
    objective: TrainingObjective,
    table: ScheduleTable,
    *,
    step_sizes: Numbers,
    seeds: Seeds,
    costs: Costs | None = None,
    link: str | Links = "delay",
    times: Times | int = 100,
    each_run: bool = False,
    batches: str = "epochs",
    noise: float = 0.0,
) -> TrainingRun:
    """Train along the timeline of a table with every step size and seed, in one compiled call.

    Args:
      objective: what is trained; either one, or those of the seeds, stacked.
      table: as for `replay`.
      step_sizes: (step_sizes) gamma.
      seeds: (seeds) of start and order of batches.
      costs: as for `replay`.
      link: link model, or `Links`.
      times: as for `replay`.
      each_run: as for `replay`.
      batches: as for `replay`.
      noise: as for `replay`.

    Returns:
      The runs, with leading axes (step_sizes, seeds).

    Raises:
      ValueError: as `replay`; if there are no step sizes or seeds, or not as many stacked
        objectives as seeds.

    Cost:
      Holds R * (versions + 1) models for each run. Compiles once per shape.

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
    looks = whole_number(times, "times") + 1 if isinstance(times, int | np.integer) else len(times)
    deviation = checked_noise(noise)
    chosen, checked = checked_runs(objective, step_sizes, seeds, looks)
    _, finish = op_times(table, costs, link=link)
    plan = make_plan(table, finish, _checked_times(times, float(finish.max())))
    num_batches, microbatches = objective.num_batches, table.num_microbatches
    taken = [batch_order(int(seed), microbatches, num_batches, batches) for seed in checked]
    events = {name: _narrow(getattr(plan, name)) for name in _ReplayEvents._fields}
    events |= {name: events[name] % plan.depth for name in ("read", "newest")}
    is_sample = plan.sample != NO_SAMPLE
    gap, losses, diverged, blocks, largest = _compiled(
        objective,
        chosen,
        checked,
        np.stack(taken)[:, plan.microbatch].astype(np.int32),
        deviation,
        _ReplayEvents(**events),
        _narrow(plan.sampled % plan.depth),
        (np.flatnonzero(is_sample), np.flatnonzero(~is_sample)),
        _ReplaySettings(plan.depth, each_run, deviation > 0),
    )
    loss = _by_sample(np.asarray(losses), is_sample)
    minimum = np.broadcast_to(objective.minimum, diverged.shape)
    return TrainingRun(plan.update, gap, diverged, blocks, largest, None, plan.time, loss, minimum)


def _by_sample(
    losses: Float[NumpyArray, "*runs gradients"], is_sample: Bool[NumpyArray, " events"]
) -> Float[NumpyArray, "*runs samples"]:
    """Mean loss of the gradients between the sample before and each sample; NaN without any."""
    until = np.cumsum(~is_sample)[is_sample]
    parts = np.split(losses, until[:-1], axis=-1)
    count = np.diff(until, prepend=0)
    total = np.stack([part.sum(axis=-1) for part in parts], axis=-1)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def batch_order(
    seed: int, microbatches: int, num_batches: int, batches: str = "epochs"
) -> Int[NumpyArray, " microbatches"]:
    """Return the batch of each microbatch.

    Args:
      seed: of the run.
      microbatches: M.
      num_batches: number of batches.
      batches: one of `ORDERS`, as for `replay`.

    Returns:
      (microbatches) indices of batches.

    Raises:
      ValueError: if there is no such order.

    Example:
      >>> import pipejax as pj
      >>> sorted(pj.training.batch_order(0, 6, 3)[3:].tolist())
      [0, 1, 2]
      >>> pj.training.batch_order(0, 6, 3, "drawn").tolist()
      [1, 2, 2, 2, 2, 0]
    """
    order = one_of(batches, ORDERS, "batches")
    if order == "cyclic":
        return np.arange(microbatches) % num_batches
    random = np.random.default_rng([seed, num_batches])
    if order == "drawn":
        return random.integers(num_batches, size=microbatches)
    epochs = -(-microbatches // num_batches)
    return np.concatenate([random.permutation(num_batches) for _ in range(epochs)])[:microbatches]


class _ReplayEvents(NamedTuple):
    """The events of a plan, versions as places in the ring."""

    microbatch: Int[Array, "*events"] | Int[NumpyArray, "*events"]
    run: Int[Array, "*events"] | Int[NumpyArray, "*events"]
    read: Int[Array, "*events stages"] | Int[NumpyArray, "*events stages"]
    newest: Int[Array, "*events stages"] | Int[NumpyArray, "*events stages"]
    applies: Bool[Array, "*events stages"] | Bool[NumpyArray, "*events stages"]
    collected: Int[Array, "*events stages"] | Int[NumpyArray, "*events stages"]
    averages: Bool[Array, "*events"] | Bool[NumpyArray, "*events"]
    sample: Int[Array, "*events"] | Int[NumpyArray, "*events"]


def _narrow(values: NumpyArray) -> NumpyArray:
    return values if values.dtype == bool else values.astype(np.int32)


def _checked_times(times: Times | int, end: float) -> Times:
    if isinstance(times, int | np.integer):
        return np.linspace(0.0, end, times + 1)
    chosen = np.asarray(times, np.float64)
    if (
        chosen.ndim != 1
        or not len(chosen)
        or not np.all(np.isfinite(chosen))
        or chosen[0] < 0
        or np.any(np.diff(chosen) < 0)
    ):
        raise wrong("times", f"must be finite, at least 0 and ascending, got {times!r}")
    return chosen


class _ReplaySettings(NamedTuple):
    """Versions kept, whether the gap is the mean over all runs, and whether there is noise."""

    depth: int
    each_run: bool
    noisy: bool


@functools.partial(compiled, static_argnames="how")
def _compiled(
    objective: TrainingObjective,
    step_sizes: Float[Array, " step_sizes"],
    seeds: Array,
    batches: Int[Array, "seeds events"],
    noise: Float[Array, ""],
    events: _ReplayEvents,
    sampled: Int[Array, "samples runs stages"],
    places: tuple[Int[Array, " samples"], Int[Array, " gradients"]],
    how: _ReplaySettings,
) -> tuple[Array, Array, Array, Array, Array]:
    """Return gaps of samples and losses of gradients, by their places, and what `_train` does."""
    train = functools.partial(_train, noise=noise, events=events, sampled=sampled, how=how)
    seen, *rest = over_runs(train, objective, 0)(objective, step_sizes, seeds, batches)
    return seen[..., places[0]], seen[..., places[1]], *rest


def _train(
    objective: TrainingObjective,
    step_size: Float[Array, ""],
    seed: Array,
    batches: Int[Array, " events"],
    *,
    noise: Float[Array, ""],
    events: _ReplayEvents,
    sampled: Int[Array, "samples runs stages"],
    how: _ReplaySettings,
) -> tuple[Array, Array, Array, Array]:
    """One run; events and samples are the same for all, so that branches stay branches."""
    depth, each_run, noisy = how
    start = objective.init(start_key(seed))
    size = step_size.astype(start.dtype)
    stages, runs = jnp.arange(objective.num_stages), jnp.arange(sampled.shape[1])

    def gradient(
        state: State, event: _ReplayEvents, batch: Array
    ) -> tuple[State, Float[Array, ""]]:
        kept, collected, largest = state
        kept = jax.lax.cond(event.averages, average, lambda kept, _: kept, kept, event.newest)
        own = kept[event.run]
        mixed = own[event.read, stages]
        loss, found = jax.value_and_grad(objective.batch_loss)(mixed, objective.batch(batch))
        if noisy:
            drawn = gradient_noise(seed, jnp.asarray(event.microbatch), found.shape, found.dtype)
            found += noise.astype(found.dtype) * objective.held() * drawn
        total = collected[event.run] + found
        current = own[event.newest, stages]
        moved = current - size * total / event.collected[:, None].astype(start.dtype)
        applies = event.applies[:, None]
        place = jnp.where(event.applies, (event.newest + 1) % depth, event.newest)
        kept = kept.at[event.run, place, stages].set(jnp.where(applies, moved, current))
        collected = collected.at[event.run].set(jnp.where(applies, 0, total))
        return (kept, collected, jnp.maximum(largest, jnp.max(jnp.sum(found**2, axis=1)))), loss

    def average(kept: Array, place: Array) -> Array:
        mean = jnp.mean(kept[:, place, stages], axis=0)
        return kept.at[:, place, stages].set(mean[None])

    def models(kept: Array, versions: Array) -> Array:
        return kept[runs[:, None], versions, stages[None]]

    def look(held: Array) -> Array:
        if each_run:
            return jnp.mean(jax.vmap(objective.gap)(held))
        return objective.gap(jnp.mean(held, axis=0))

    def step(state: State, event: tuple[_ReplayEvents, Array]) -> tuple[State, Array]:
        what, batch = event
        return jax.lax.cond(
            what.sample == NO_SAMPLE,
            lambda: gradient(state, what, batch),
            lambda: (state, look(models(state[0], sampled[what.sample]))),
        )

    kept = jnp.broadcast_to(start, (len(runs), depth, *start.shape))
    nothing = jnp.zeros((len(runs), *start.shape), start.dtype)
    state = kept, nothing, jnp.zeros((), start.dtype)
    (kept, _, largest), seen = jax.lax.scan(step, state, (events, batches))
    is_sample = events.sample != NO_SAMPLE
    bad = ~jnp.isfinite(seen) | (seen > DIVERGED * objective.gap(start))
    return seen, jnp.any(bad & is_sample), jnp.mean(models(kept, sampled[-1]), axis=0), largest
