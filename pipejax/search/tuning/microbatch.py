"""The microbatch size: many small microbatches fill the pipeline, few large ones cost less each.

The relaxation takes any size b and M = N / b. At fixed costs the makespan is affine in M beyond a
few periods, so makespans of a few small programs give that of every M. Descent finds the minima in
log b; whole sizes around them, and those whose relaxed step time is almost as short, are evaluated
with the program of exactly their M.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.costs.system import System
from pipejax.costs.workload import Workload
from pipejax.search.tuning.descent import descend
from pipejax.search.tuning.microbatch_sizes import Sizes, TuningProblem
from pipejax.search.tuning.schedule_family import ScheduleFamily
from pipejax.search.tuning.step_time_objective import in_bucket

MARGIN = 0.03  # sizes whose forecast is so close to the best are evaluated exactly


class NothingFitsError(ValueError):
    """No legal microbatch size leaves room on the accelerators."""


class Relaxed(NamedTuple):
    """The best of the relaxation, for each pair.

    Attributes:
      microbatch_size: (pairs) b, any number from 1 [sequences].
      microbatches: (pairs) N / b.
      step_time: (pairs) [s].
    """

    microbatch_size: Float[NumpyArray, " pairs"]
    microbatches: Float[NumpyArray, " pairs"]
    step_time: Float[NumpyArray, " pairs"]


class Tuned(NamedTuple):
    """The best legal microbatch size of each pair.

    Attributes:
      microbatch_size: (pairs) b [sequences].
      microbatches: (pairs) M.
      step_time: (pairs) exact [s].
      memory_bytes: (pairs) need of the fullest worker [B].
      sizes: what was evaluated.
      relaxed: the best of the relaxation; None after an exhaustive search.
    """

    microbatch_size: Int[NumpyArray, " pairs"]
    microbatches: Int[NumpyArray, " pairs"]
    step_time: Float[NumpyArray, " pairs"]
    memory_bytes: Float[NumpyArray, " pairs"]
    sizes: Sizes
    relaxed: Relaxed | None = None


def relax_microbatches(
    problem: TuningProblem, *, starts: int = 4, steps: int = 30
) -> tuple[Relaxed, Float[NumpyArray, "starts pairs"], Float[NumpyArray, "starts pairs"]]:
    """Descend in log b from several starts of each pair, all at once.

    Returns The best of each pair; and sizes [sequences] and penalised step times [s] of all minima.
    """
    minibatch = problem.pairs.minibatch
    pair = np.tile(np.arange(len(minibatch)), starts)
    upper = np.log(np.maximum(minibatch / problem.nodes[0], 1.0))[pair]
    share = np.repeat((np.arange(starts) + 0.5) / starts, len(minibatch))
    first, upper, given = in_bucket((share * upper, upper, problem.given_of(pair)), len(pair))
    found = descend(
        lambda points: problem.objective.value_and_grad(points, given),
        first,
        steps=steps,
        lower=0.0,
        upper=upper,
    )
    size, value = (
        each[: len(pair)].reshape(starts, -1) for each in (np.exp(found.points), found.values)
    )
    best = size[value.argmin(axis=0), np.arange(len(minibatch))]
    times = problem.relaxed_step_times(np.arange(len(minibatch)), best)
    return Relaxed(best, minibatch / best, times), size, value


def tune_microbatches(
    family: ScheduleFamily,
    workloads: Sequence[Workload],
    systems: Sequence[System],
    *,
    memory_limit: bool = True,
    margin: float = MARGIN,
    starts: int = 4,
    steps: int = 30,
) -> Tuned:
    """Find the microbatch size with the shortest step, by gradient and exact evaluation.

    Args:
      family: the schedule.
      workloads: model, minibatch and parallelism of each pair; alike but for numbers.
      systems: system of each pair; alike but for numbers.
      memory_limit: whether every worker must have room on its accelerators.
      margin: sizes whose forecast is within this share of the best are evaluated exactly.
      starts: starts of the descent for each pair.
      steps: gradients to take.

    Returns:
      The best legal size of each pair among those evaluated.

    Raises:
      ValueError: if pairs are not alike, the schedule does not exist, or nothing fits.

    Example:
      >>> from pipejax import load_model, load_system
      >>> workload = Workload(load_model("gpt-22b"), minibatch=96, tensor_parallel=8)
      >>> systems = [load_system(name) for name in ("a100", "b200")]
      >>> found = tune_microbatches(ScheduleFamily("interleaved-1f1b", 4), [workload] * 2, systems)
      >>> found.microbatch_size.tolist()
      [2, 4]
    """
    problem = TuningProblem.of(family, workloads, systems, memory_limit=memory_limit)
    relaxed, minima, values = relax_microbatches(problem, starts=starts, steps=steps)
    sizes = Sizes.of(problem.pairs.minibatch)
    size = sizes.size.astype(float)
    times = problem.forecast(sizes)
    # what the relaxation says of memory may be a little off where P does not divide M
    hopeful = problem.relaxed_need(sizes.pair, size) <= 1.1 * problem.capacity[sizes.pair]
    near = _next_to(sizes, minima, values <= (1 + margin) * values.min(axis=0))
    while True:  # what turns out not to fit makes room for others
        hopeful &= ~sizes.is_known | sizes.fits
        best = _least(sizes.pair, np.where(hopeful, times, np.inf), len(workloads))
        wanted = hopeful & (near | (times <= (1 + margin) * best[sizes.pair])) & ~sizes.is_known
        if not wanted.any():
            break
        problem.evaluate(sizes, wanted)
    lost = ~np.isfinite(_least(sizes.pair, np.where(sizes.fits, 0, np.inf), len(workloads)))
    if lost.any():
        problem.evaluate(sizes, lost[sizes.pair] & ~sizes.is_known)
    return _best(problem, sizes)._replace(relaxed=relaxed)


def search_microbatches(
    family: ScheduleFamily,
    workloads: Sequence[Workload],
    systems: Sequence[System],
    *,
    memory_limit: bool = True,
) -> Tuned:
    """Evaluate every legal microbatch size.

    Args:
      family: the schedule.
      workloads: as for `tune_microbatches`.
      systems: likewise.
      memory_limit: likewise.

    Returns:
      The best legal size of each pair, and all others.

    Raises:
      ValueError: as `tune_microbatches`.

    Example:
      >>> from pipejax import load_model, load_system
      >>> workload = Workload(load_model("llama3-70b"), minibatch=8, tensor_parallel=8)
      >>> family = ScheduleFamily("chimera", 4)
      >>> found = search_microbatches(family, [workload], [load_system("h200")])
      >>> found.sizes.microbatches[found.sizes.is_legal].tolist()
      [8, 4, 2]
    """
    problem = TuningProblem.of(family, workloads, systems, memory_limit=memory_limit)
    sizes = Sizes.of(problem.pairs.minibatch)
    problem.evaluate(sizes, np.ones(len(sizes.pair), bool))
    return _best(problem, sizes)


def _least(
    pair: Int[NumpyArray, " sizes"], values: Float[NumpyArray, " sizes"], count: int
) -> Float[NumpyArray, " pairs"]:
    """Least value of each pair, infinite where it has none."""
    least = np.full(count, np.inf)
    np.minimum.at(least, pair, values)
    return least


def _next_to(
    sizes: Sizes,
    minima: Float[NumpyArray, "starts pairs"],
    counts: Bool[NumpyArray, "starts pairs"],
) -> Bool[NumpyArray, " sizes"]:
    """Mark the sizes on both sides of the minima that count."""
    near = np.zeros(len(sizes.pair), bool)
    for own, is_good in zip(minima[:, sizes.pair], counts[:, sizes.pair], strict=True):
        for distance in (own * (1 + 1e-9) - sizes.size, sizes.size - own * (1 - 1e-9)):
            distance = np.where(distance >= 0, distance, np.inf)
            least = _least(sizes.pair, distance, minima.shape[1])
            near |= is_good & np.isfinite(distance) & (distance == least[sizes.pair])
    return near


def _best(problem: TuningProblem, sizes: Sizes) -> Tuned:
    """Pick the shortest step that fits, the smaller size at a tie."""
    times = np.where(sizes.fits, sizes.step_time, np.inf)
    order = np.lexsort((sizes.size, times, sizes.pair))
    _, first = np.unique(sizes.pair[order], return_index=True)
    best = order[first]
    if not sizes.fits[best].all():
        raise _nothing_fits(problem, sizes, int(np.flatnonzero(~sizes.fits[best])[0]))
    return Tuned(
        sizes.size[best],
        sizes.microbatches[best],
        sizes.step_time[best],
        sizes.memory_bytes[best],
        sizes,
    )


def _nothing_fits(problem: TuningProblem, sizes: Sizes, pair: int) -> ValueError:
    own = sizes.pair == pair
    which = f"pair {pair}: " if len(problem.capacity) > 1 else ""
    if not sizes.is_legal[own].any():
        total = int(problem.pairs.minibatch[pair])
        return ValueError(
            f"{which}no microbatch size is legal for a minibatch of {total}: "
            f"{problem.family.refusal(total)}"
        )
    least = np.flatnonzero(own)[sizes.memory_bytes[own].argmin()]
    return NothingFitsError(
        f"{which}no microbatch size fits: the smallest need is "
        f"{sizes.memory_bytes[least] / 1e9:.1f} GB per accelerator, with a microbatch size of "
        f"{sizes.size[least]}; the system has {problem.capacity[pair] / 1e9:.1f} GB"
    )
