"""The microbatch size: many small microbatches fill the pipeline, few large ones cost less each.

The relaxation takes any size b and M = N / b. Descent finds its minima in log b; whole sizes
around them, and those whose relaxed step time is almost as short, are evaluated with the program
of exactly their M.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.checks import divisors
from pipejax.costs import array_functions as xp
from pipejax.costs.model.workload import Workload
from pipejax.costs.system.system import Number, System
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem
from pipejax.search.tuning.step_time_objective import Given, Pair, StepTimeObjective

MARGIN = 0.1  # sizes whose relaxed step time is so close to the best are evaluated exactly


class NothingFitsError(ValueError):
    """No legal microbatch size leaves room on the accelerators."""


@dataclasses.dataclass(eq=False)
class Sizes:
    """Divisors of the minibatch of all pairs, pair by pair, ascending.

    Attributes:
      pair: (sizes) which pair.
      size: (sizes) b [sequences].
      microbatches: (sizes) M.
      capacity: (sizes) memory limit [B].
      is_known: (sizes) whether it was evaluated.
      step_time: (sizes) [s], infinite where not evaluated or not legal.
      memory_bytes: (sizes) need of the fullest worker, infinite likewise.
      on_progress: told the best so far after each evaluation, once every pair has one.
    """

    pair: Int[NumpyArray, " sizes"]
    size: Int[NumpyArray, " sizes"]
    microbatches: Int[NumpyArray, " sizes"]
    capacity: Float[NumpyArray, " sizes"]
    is_known: Bool[NumpyArray, " sizes"]
    step_time: Float[NumpyArray, " sizes"]
    memory_bytes: Float[NumpyArray, " sizes"]
    on_progress: "OnProgress | None" = None

    @classmethod
    def of(cls, problem: TuningProblem, on_progress: "OnProgress | None") -> "Sizes":
        """List the divisors of each minibatch, if memory holds so many microbatches."""
        problem.family.check_size(int(problem.pairs.minibatch.max()))
        totals = problem.pairs.minibatch.astype(int)
        found = {total: divisors(int(total)) for total in {*totals}}
        pair = np.repeat(np.arange(len(totals)), [len(found[total]) for total in totals])
        size = np.concatenate([found[total] for total in totals])
        no, far = np.zeros(len(pair), bool), np.full(len(pair), np.inf)
        capacity = problem.capacity[pair]
        return cls(pair, size, totals[pair] // size, capacity, no, far, far.copy(), on_progress)

    @property
    def is_legal(self) -> Bool[NumpyArray, " sizes"]:
        """Whether it was evaluated, and the schedule exists."""
        return np.isfinite(self.step_time)

    @property
    def fits(self) -> Bool[NumpyArray, " sizes"]:
        """Whether it was evaluated, is legal, and every worker has room."""
        return self.is_legal & (self.memory_bytes <= self.capacity)

    def evaluate(self, problem: TuningProblem, wanted: Bool[NumpyArray, " sizes"]) -> None:
        """Fill in step time and memory of the sizes that are wanted, exactly.

        Pairs with the same number of microbatches go through its program together.
        """
        wanted = wanted & ~self.is_known
        self.is_known |= wanted
        for count in np.unique(self.microbatches[wanted]).tolist():
            if problem.family.refusal(count):
                continue
            at = np.flatnonzero(wanted & (self.microbatches == count))
            self.step_time[at], self.memory_bytes[at] = size_objective(problem, count).evaluate(
                np.log(self.size[at]), problem.given(self.pair[at], limited=False)
            )
            if self.on_progress and len(np.unique(self.pair[self.fits])) == len(problem.capacity):
                self.on_progress(_best(problem, self))


class RelaxedSizes(NamedTuple):
    """The best of the relaxation, for each pair.

    Attributes:
      microbatch_size: (pairs) b, any number from 1 [sequences].
      microbatches: (pairs) N / b.
      step_time: (pairs) [s].
    """

    microbatch_size: Float[NumpyArray, " pairs"]
    microbatches: Float[NumpyArray, " pairs"]
    step_time: Float[NumpyArray, " pairs"]


class TunedSizes(NamedTuple):
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
    relaxed: RelaxedSizes | None = None


OnProgress = Callable[[TunedSizes], object]


def size_objective(problem: TuningProblem, *counts: int) -> StepTimeObjective:
    """Step time by log b: exact with the program of M alone, by the relaxation if none is given."""
    return problem.objective(any_size, *(counts or problem.family.few_microbatches))


def any_size(log_size: Array, given: Given) -> tuple[Pair, Number]:
    """Relax the microbatch size by its logarithm."""
    return given.pair, xp.exp(log_size)


def relax_microbatches(
    problem: TuningProblem, *, starts: int = 4, steps: int = 30
) -> tuple[RelaxedSizes, Float[NumpyArray, "starts pairs"], Float[NumpyArray, "starts pairs"]]:
    """Descend in log b from several starts of each pair, all at once.

    Returns the best of each pair; and sizes [sequences] and penalised step times [s] of all minima.
    """
    minibatch, pairs = problem.pairs.minibatch, np.arange(len(problem.capacity))
    upper = np.log(np.maximum(minibatch / problem.family.few_microbatches[0], 1.0))
    first = (np.arange(starts)[:, None] + 0.5) / starts * upper
    objective = size_objective(problem)
    found = objective.minima(
        first, problem.given(pairs), steps=steps, rate=0.3, lower=0.0, upper=upper
    )
    best = found.points[found.values.argmin(axis=0), pairs]
    times, _ = objective.evaluate(best, problem.given(pairs, limited=False))
    relaxed = RelaxedSizes(np.exp(best), minibatch / np.exp(best), np.asarray(times))
    return relaxed, np.exp(found.points), found.values


def tune_microbatches(
    family: ScheduleFamily,
    workloads: Sequence[Workload],
    systems: Sequence[System],
    *,
    memory_limit: bool = True,
    margin: float = MARGIN,
    starts: int = 4,
    steps: int = 30,
    on_progress: OnProgress | None = None,
) -> TunedSizes:
    """Find the microbatch size with the shortest step, by gradient and exact evaluation."""
    problem = TuningProblem.of(family, workloads, systems, memory_limit=memory_limit)
    sizes = Sizes.of(problem, None)
    relaxed, minima, values = relax_microbatches(problem, starts=starts, steps=steps)
    tell = on_progress or (lambda found: None)
    sizes.on_progress = lambda found: tell(found._replace(relaxed=relaxed))
    times, need = size_objective(problem).evaluate(
        np.log(sizes.size), problem.given(sizes.pair, limited=False)
    )
    near = _next_to(sizes, minima, values <= (1 + margin) * values.min(axis=0))
    # what the relaxation says of memory may be a little off where P does not divide M
    hopeful = need <= 1.1 * sizes.capacity
    while True:  # what turns out illegal, or not to fit, makes room for others
        hopeful &= ~sizes.is_known | sizes.fits
        best = _least(sizes.pair, np.where(hopeful, times, np.inf), len(workloads))
        wanted = hopeful & (near | (times <= (1 + margin) * best[sizes.pair])) & ~sizes.is_known
        if not wanted.any():
            break
        sizes.evaluate(problem, wanted)
    lost = ~np.isfinite(_least(sizes.pair, np.where(sizes.fits, 0, np.inf), len(workloads)))
    sizes.evaluate(problem, lost[sizes.pair])
    return _best(problem, sizes)._replace(relaxed=relaxed)


def search_microbatches(
    family: ScheduleFamily,
    workloads: Sequence[Workload],
    systems: Sequence[System],
    *,
    memory_limit: bool = True,
    on_progress: OnProgress | None = None,
) -> TunedSizes:
    """Evaluate every legal microbatch size; arguments and errors as for `tune_microbatches`."""
    problem = TuningProblem.of(family, workloads, systems, memory_limit=memory_limit)
    sizes = Sizes.of(problem, on_progress)
    sizes.evaluate(problem, np.ones(len(sizes.pair), bool))
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


def _best(problem: TuningProblem, sizes: Sizes) -> TunedSizes:
    """Pick the shortest step that fits in memory, the smaller size at a tie."""
    order = np.lexsort((sizes.size, np.where(sizes.fits, sizes.step_time, np.inf), sizes.pair))
    best = order[np.unique(sizes.pair[order], return_index=True)[1]]
    if not sizes.fits[best].all():
        raise _nothing_fits(problem, sizes, int(np.flatnonzero(~sizes.fits[best])[0]))
    return TunedSizes(
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
