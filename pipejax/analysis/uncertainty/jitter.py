"""Step times under jitter: every op and message of every sample has its own random duration."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.analysis.uncertainty.distributions import (
    LARGEST_SCORE,
    Distribution,
    Jitter,
    Straggler,
    factor_table,
)
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_fits, check_types, is_number, whole_number, wrong
from pipejax.base.display import ResultList, short_repr, with_short_repr
from pipejax.base.files import provenance
from pipejax.base.jax_on_demand import mapped
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.costs.precision import check_finite
from pipejax.engine.lowering.program import run_many_on_host
from pipejax.engine.pricing import PerOpCosts, per_op_costs, price
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

MAX_BYTES = 1 << 28  # largest size of durations and choices in one block [B]
GROUP = 64  # samples that are drawn together, from generators of their own
MAX_GROUPS = 16  # groups that are evaluated together
BYTES_OF_COLUMN = 60  # size of an op's or message's duration, finish, choice, path, count [B]
MAX_SAMPLES = 2**32
BYTES_PER_SAMPLE = 40  # makespan, draw, and the copies that quantiles and ranks need
LARGEST_SEED = 2**63 - 1
QUANTILES = (0.05, 0.5, 0.95, 0.99)
OPS, WORKERS, MESSAGES, STRAGGLERS, OP_STRAGGLERS = range(5)  # streams of random numbers

Samples = Float[NumpyArray, " samples"]


@with_short_repr("evaluation deterministic mean worst makespans jitter seed")
@dataclasses.dataclass(frozen=True, eq=False)
class Jittered:
    """Makespans of one schedule under jitter. Times are seconds, arrays are NumPy's.

    Attributes:
      evaluation: the deterministic run, in which every factor is 1.
      jitter: the distributions.
      seed: seed of the random numbers.
      makespans: (samples) makespan of each sample.
      node_share: (nodes) share of the samples in which a node is on the critical path.
      message_share: (messages) share of the samples in which a message is on the critical path.
      replicas: number of pipelines in a sample, each with its own factors; the sample takes as long
        as the slowest of them.
      draws: (samples) index of the draw that was the slowest replica of each sample.
    """

    evaluation: Evaluation
    jitter: Jitter
    seed: int
    makespans: Samples
    node_share: Float[NumpyArray, " nodes"]
    message_share: Float[NumpyArray, " messages"]
    replicas: int
    draws: Int[NumpyArray, " samples"]

    @property
    def deterministic(self) -> float:
        """Return the makespan without jitter [s]."""
        return self.evaluation.makespan

    @property
    def mean(self) -> float:
        """Return the mean makespan [s]."""
        # a mean of differences, so that the mean of equal numbers is that number
        return self.deterministic + float((self.makespans - self.deterministic).mean())

    @property
    def worst(self) -> float:
        """Return the longest makespan [s]."""
        return float(self.makespans.max())

    @property
    def worst_sample(self) -> int:
        """Return the index of the sample with the longest makespan; at a tie, the first."""
        return int(self.makespans.argmax())

    def quantile(self, level: float) -> float:
        """Return the makespan [s] that a share `level` of the samples does not exceed."""
        return float(np.quantile(self.makespans, level))

    def slowdown(self, level: float) -> float:
        """Return a makespan quantile divided by the deterministic makespan."""
        # It is 1 if nothing takes time.
        return self.quantile(level) / self.deterministic if self.deterministic else 1.0


def jitter(
    table: ScheduleTable,
    costs: Costs,
    factors: Jitter,
    *,
    samples: int = 10_000,
    seed: int = 0,
    replicas: int = 1,
    link: str | Links = "delay",
    max_bytes: int = MAX_BYTES,
    on_progress: OnProgress | None = None,
) -> Jittered:
    """Evaluate a schedule many times, each with random durations of its ops and messages.

    Schedules with equal numbers of workers get the same factors of workers in sample k. Schedules
    with the same ops, such as GPipe and 1F1B, get the same factors of ops and messages. So one
    seed compares schedules under the same jitter.

    Args:
      table: the schedule.
      costs: unbatched costs [s]: the means of the durations.
      factors: distributions of the factors on durations.
      samples: number of samples; a larger number adds samples and changes no earlier sample.
      seed: seed of NumPy's random generator, whose numbers do not depend on the machine.
      replicas: number of pipelines with factors of their own. A sample takes as long as the
        slowest pipeline, as each step exchanges gradients. The running time is proportional.
      link: link model, or `Links`.
      max_bytes: memory of one block of samples, about [B]; it changes no result.
      on_progress: called after each block with the number of finished samples, the number of all
        samples, and "samples"; default: a bar in notebooks.

    Returns:
      The makespans, and how often each op and message is on the critical path.

    Raises:
      ValueError: as `evaluate`; or if samples, seed or max_bytes is no whole number in range, or a
        makespan is too large for a float.
      ScheduleError: as `evaluate`.

    Cost:
      Some 40 ns per op and sample, half of it for random numbers; nothing is compiled.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> uneven = pj.analysis.Jitter(op=pj.analysis.Distribution("lognormal", 0.1))
      >>> run = pj.jitter(table, pj.Costs(forward=1.0, backward=2.0), uneven, samples=1000)
      >>> f"{run.deterministic:.0f} s, with jitter {run.mean:.1f} s"
      '33 s, with jitter 34.1 s'
    """
    check_types(table=(table, ScheduleTable), costs=(costs, Costs), factors=(factors, Jitter))
    samples = whole_number(samples, "samples", maximum=MAX_SAMPLES)
    check_fits(samples * BYTES_PER_SAMPLE, f"{samples} samples need")
    replicas = whole_number(replicas, "replicas", maximum=MAX_SAMPLES // samples)
    if whole_number(seed, "seed", minimum=0) > LARGEST_SEED:
        raise wrong("seed", f"must be at most {LARGEST_SEED}, got {seed}")
    whole_number(max_bytes, "max_bytes")
    run = evaluate(table, costs, link=link)
    costs_in_float64 = mapped(lambda leaf: np.asarray(leaf, np.float64), costs)
    per_op = per_op_costs(run.program, price(run.program, costs_in_float64))
    slowest = _Slowest(samples, replicas)
    draws = samples * replicas
    # a makespan that overflows is an error below
    with telling("jitter", on_progress) as tell, np.errstate(over="ignore", invalid="ignore"):
        for start, values, on_path in _blocks(per_op, factors, run.workers, draws, seed, max_bytes):
            slowest.add(start, values, on_path)
            tell((start + len(values)) // replicas, samples, "samples")
        makespans, counts = slowest.makespans, slowest.counts
        check_finite([makespans, makespans.sum()], costs)
    # columns of counts are ops, then messages
    node_share, message_share = np.zeros(run.program.num_nodes), np.zeros(len(per_op.messages))
    node_share[per_op.ops] = counts[: len(per_op.ops)] / samples
    message_counts = counts[len(per_op.ops) :][: len(per_op.messages)]
    message_share[per_op.messages] = message_counts / samples
    carrier = run.program.messages.carrier  # the node of each message; 0 if it has no node
    node_share[carrier[carrier > 0]] = message_share[carrier > 0]
    node_share[0] = 1.0  # every path starts at the source
    results = makespans, node_share, message_share, replicas, slowest.draws
    return Jittered(run, factors, int(seed), *results)


class _Slowest:
    """Slowest replica of each sample, with counts of ops and messages on critical paths."""

    def __init__(self, samples: int, replicas: int) -> None:
        self.makespans = np.full(samples, -np.inf)
        self.draws = np.zeros(samples, np.int64)
        # counts of columns on the longest paths of all samples, and of the last sample
        self.counts: NumpyArray = np.zeros(1, np.int64)
        self._last_counts = self.counts
        self._replicas = replicas

    def add(self, start: int, values: Samples, on_path: Int[NumpyArray, "columns samples"]) -> None:
        """Merge a block of draws: number of its first draw, makespans [s], counts on paths."""
        # 2 replicas: draws 2 3 4 5 belong to samples 1 1 2 2. Draws are sorted by sample, then by
        # makespan, then with the earlier draw last. So the last draw of a sample is its slowest.
        draws = start + np.arange(len(values))
        samples = draws // self._replicas
        order = np.lexsort((-draws, values, samples))
        slowest = order[np.diff(samples, append=-1) != 0]
        # a sample that began in an earlier block counts again only if this block is slower
        slowest = slowest[values[slowest] > self.makespans[samples[slowest]]]
        if not len(slowest):
            return
        if np.isfinite(self.makespans[samples[slowest[0]]]):
            self.counts = self.counts - self._last_counts  # of the replaced earlier draw
        self.counts = self.counts + on_path @ np.bincount(slowest, minlength=len(values))
        self._last_counts = on_path[:, slowest[-1]]
        self.makespans[samples[slowest]] = values[slowest]
        self.draws[samples[slowest]] = draws[slowest]


def _blocks(
    per_op: PerOpCosts, factors: Jitter, workers: int, samples: int, seed: int, max_bytes: int
) -> Iterator[tuple[int, Samples, Int[NumpyArray, "columns samples"]]]:
    """Yield blocks: first sample, makespans (samples) [s], counts on longest paths (columns)."""
    # A column is an op or a message. A group is 64 samples with random generators of their own, so
    # factors do not depend on the sizes of blocks: group 2 has samples 128 to 191.
    columns = len(per_op.ops) + len(per_op.messages) * len(per_op.message_seconds)
    groups = min(MAX_GROUPS, max(1, max_bytes // (BYTES_OF_COLUMN * GROUP * columns)))
    draw = functools.partial(_durations, per_op, factors, workers, seed)
    for start in range(0, samples, groups * GROUP):
        count = min(groups * GROUP, samples - start)
        group_numbers = range(start // GROUP, -(-(start + count) // GROUP))
        durations = np.concatenate(list(map(draw, group_numbers)), axis=1)[:, :count]
        values, counts = run_many_on_host(per_op.program, durations)
        yield start, values, counts[1:]


def _durations(
    per_op: PerOpCosts, factors: Jitter, workers: int, seed: int, group: int
) -> Float[NumpyArray, "columns samples"]:
    """Draw the durations [s] of all ops and messages (columns) in a group of samples."""

    def generator(stream: int) -> np.random.Generator:  # a stream for each kind of factor
        return np.random.default_rng([seed, stream, group])

    # The rows of a small `count` are the first rows of a larger `count`. Factors of 1 need no draw.
    def draw_factors(stream: int, distribution: Distribution, count: int) -> Any:
        if distribution.spread == 0:
            return np.ones((1, GROUP), np.float32)
        scores = generator(stream).standard_normal((count, GROUP), np.float32)
        return _look_up(factor_table(distribution), scores)

    def draw_slowdowns(stream: int, straggler: Straggler, count: int) -> Any:
        """Draw factors: the slowdown with the straggler's probability, else 1."""
        if straggler.probability == 0 or straggler.slowdown == 1:
            return 1.0
        chance = generator(stream).random((count, GROUP), np.float32)
        return np.where(chance < straggler.probability, straggler.slowdown, 1.0)

    worker = np.ones((workers + 1, GROUP))  # entry -1: all-reduces, which run on no worker
    worker[:-1] *= draw_factors(WORKERS, factors.worker, workers)
    worker[:-1] *= draw_slowdowns(STRAGGLERS, factors.straggler, workers)
    op = draw_factors(OPS, factors.op, len(per_op.ops)) * per_op.op_seconds[:, None]
    op *= draw_slowdowns(OP_STRAGGLERS, factors.op_straggler, len(per_op.ops))
    if (worker != 1).any():
        op *= worker[per_op.op_worker]
    message = draw_factors(MESSAGES, factors.message, len(per_op.messages))
    messages = (message * seconds[:, None] for seconds in per_op.message_seconds)
    return np.concatenate([np.zeros((1, GROUP)), op, *messages])


def _look_up(
    table: Float[NumpyArray, " knots"], score: Float[NumpyArray, "count samples"]
) -> Float[NumpyArray, "count samples"]:
    """Return factors at normal scores, interpolated in a table with evenly spaced knots."""
    # Position 2.3 is between knots 2 and 3: the factor is 0.7 table[2] + 0.3 table[3].
    last = len(table) - 1
    position = (score + LARGEST_SCORE) * (last / (2 * LARGEST_SCORE))
    knot = np.clip(position.astype(np.int32), 0, last - 1)
    return table[knot] + np.diff(table)[knot] * (position - knot.astype(np.float32))


if TYPE_CHECKING:
    import xarray as xr


@short_repr
class Robustness(NamedTuple):
    """A schedule's makespan and rank among schedules under the same jitter.

    Attributes:
      schedule: name of the schedule.
      deterministic: makespan without jitter [s].
      makespan: quantile of the makespan [s].
      slowdown: quantile of the makespan, divided by the deterministic makespan.
      makespan_rank: 1 for the shortest quantile of the makespan; equal quantiles share a rank.
      slowdown_rank: 1 for the smallest slowdown.
      fastest_share: share of the samples in which no other schedule is faster.
      fits: whether the schedule fits in the memory of its machine. Schedules that do not fit rank
        after all others, and never count as the fastest.
    """

    schedule: str
    deterministic: float
    makespan: float
    slowdown: float
    makespan_rank: int
    slowdown_rank: int
    fastest_share: float
    fits: bool = True


def robustness(
    runs: Sequence[Jittered], *, quantile: float = 0.95, fits: Sequence[bool] | None = None
) -> list[Robustness]:
    """Rank schedules that were run under the same jitter.

    Args:
      runs: runs with the same distributions, seed, number of samples and replicas.
      quantile: quantile of the makespan that ranks the schedules, from 0 to 1.
      fits: whether the machine of each run has enough memory; default: all machines have.

    Returns:
      A row for each run, in the order of the runs.

    Raises:
      ValueError: if there is no run, the quantile is not from 0 to 1, the runs differ in jitter,
        seed, number of samples or replicas, or `fits` has another length.

    Example:
      >>> import pipejax as pj
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.2)
      >>> uneven = pj.analysis.Jitter(op=pj.analysis.Distribution("gamma", 0.1))
      >>> runs = [pj.jitter(pj.schedules.build(name, num_workers=4, num_microbatches=8), costs,
      ...                   uneven, samples=200) for name in ("gpipe", "1f1b")]
      >>> ranked = pj.analysis.robustness(runs)
      >>> [(row.schedule, row.makespan_rank, row.slowdown_rank) for row in ranked]
      [('gpipe', 1, 2), ('1f1b', 2, 1)]
    """
    if not is_number(quantile) or quantile > 1:
        raise wrong("quantile", f"must be from 0 to 1, got {quantile!r}")
    for run in runs if isinstance(runs, Sequence) else [runs]:
        check_types(runs=(run, Jittered))
    settings = {(run.jitter, run.seed, len(run.makespans), run.replicas) for run in runs}
    if len(settings) != 1:
        form = "({}, seed {}, {} samples, {} replicas)".format
        texts = " and ".join(sorted(form(*setting) for setting in settings)) or "no run"
        raise ValueError(
            f"runs must have the same jitter, seed, number of samples and replicas, got {texts}"
        )
    makespan = np.array([run.quantile(quantile) for run in runs])
    slowdown = np.array([run.slowdown(quantile) for run in runs])
    is_fit = np.ones(len(runs), bool) if fits is None else np.array(fits, bool)
    if is_fit.shape != (len(runs),):
        raise ValueError(f"fits must have one entry for each of {len(runs)} runs, got {fits!r}")
    samples = np.stack([run.makespans for run in runs])
    shortest = samples[is_fit].min(axis=0, keepdims=True, initial=np.inf)
    fastest_share = ((samples == shortest) & is_fit[:, None]).mean(axis=1)
    ranks = (_rank(values, is_fit) for values in (makespan, slowdown))
    columns = (makespan, slowdown, *ranks, fastest_share, is_fit)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return ResultList(
        [
            Robustness(run.evaluation.schedule, run.deterministic, *row)
            for run, row in zip(runs, rows, strict=True)
        ]
    )


def jitter_dataset(runs: Mapping[str, Jittered]) -> "xr.Dataset":
    """Convert samples of schedules under the same jitter to a dataset of xarray.

    The dataset has the variables makespan (schedule, sample) and deterministic (schedule) [s]. The
    settings of the runs are its attributes.
    """
    import xarray as xr  # an optional dependency

    results = list(runs.values())
    robustness(results)  # refuses runs that are not comparable
    first = results[0]
    links = {(r.evaluation.links, r.evaluation.workers, r.evaluation.microbatches) for r in results}
    if len(links) != 1:
        texts = sorted(map(str, links))
        raise ValueError(f"runs must have the same links, workers and microbatches, got {texts}")
    seconds, run = {"units": "s"}, first.evaluation
    makespans = np.stack([result.makespans for result in results])
    deterministic = np.array([result.deterministic for result in results])
    return xr.Dataset(
        {
            "makespan": (("schedule", "sample"), makespans, seconds),
            "deterministic": ("schedule", deterministic, seconds),
        },
        coords={"schedule": list(runs), "sample": np.arange(len(first.makespans))},
        attrs={
            "title": "Step time under jitter",
            **{name: str(factors) for name, factors in vars(first.jitter).items()},
            "seed": first.seed,
            "replicas": first.replicas,
            **{"link" if k == "model" else k: v for k, v in run.links.written().items()},
            "workers": run.workers,
            "microbatches": run.microbatches,
            **provenance(),
        },
    )


def _rank(values: NumpyArray, is_fit: Bool[NumpyArray, " runs"]) -> Int[NumpyArray, " runs"]:
    """Rank values from 1, smallest first; runs that do not fit in memory rank last."""
    # row i, column j: whether run j ranks before run i; the rank is 1 + the row's sum
    is_smaller = (values[None, :] < values[:, None]) & (is_fit[None, :] == is_fit[:, None])
    return 1 + (is_smaller | (is_fit[None, :] & ~is_fit[:, None])).sum(axis=1)
