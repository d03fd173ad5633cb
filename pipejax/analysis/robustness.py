"""Schedules under the same jitter: ranked by step time and by slowdown, and as a dataset."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipejax.analysis.jitter import Jittered
from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.checks import check_types, is_number
from pipejax.base.display import ResultList, short_repr
from pipejax.base.provenance import provenance
from pipejax.schedules.table.links import format_pair_links, format_pairs

if TYPE_CHECKING:
    import xarray as xr


@short_repr
class Robustness(NamedTuple):
    """One schedule among others under the same jitter.

    Attributes:
      schedule: name.
      deterministic: makespan without jitter [s].
      makespan: quantile of the makespan [s].
      slowdown: that quantile relative to the deterministic makespan.
      makespan_rank: 1 for the shortest quantile of the makespan; equals share a rank.
      slowdown_rank: 1 for the smallest slowdown.
      fastest_share: share of the samples in which no other schedule is faster.
      fits: whether its machine has the memory; those that do not fit rank behind all that do, and
        are nowhere the fastest.

    Example:
      >>> Robustness("gpipe", 10.0, 12.0, 1.2, 1, 1, 0.9).slowdown_rank
      1
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
      runs: runs with the same distributions, seed and number of samples.
      quantile: which quantile of the makespan decides, from 0 to 1.
      fits: of each run, whether its machine has the memory; all if None.

    Returns:
      A row for each run, in their order.

    Raises:
      ValueError: if there is no run, the quantile is not from 0 to 1, the runs differ in jitter,
        seed or number of samples, or fits says not of each whether it does.

    Example:
      >>> import pipejax as pj
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.2)
      >>> uneven = pj.Jitter(op=pj.Distribution("gamma", 0.1))
      >>> runs = [pj.jitter(pj.schedules.build(name, num_workers=4, num_microbatches=8), costs,
      ...                   uneven, samples=200) for name in ("gpipe", "1f1b")]
      >>> [(row.schedule, row.makespan_rank, row.slowdown_rank) for row in pj.robustness(runs)]
      [('gpipe', 1, 2), ('1f1b', 2, 1)]
    """
    if not is_number(quantile) or quantile > 1:
        raise ValueError(f"quantile must be from 0 to 1, got {quantile!r}")
    for run in runs if isinstance(runs, Sequence) else [runs]:
        check_types(runs=(run, Jittered))
    settings = {(run.jitter, run.seed, len(run.makespans)) for run in runs}
    if len(settings) != 1:
        raise ValueError(
            "runs must have the same jitter, seed and number of samples, got "
            + ("no run" if not runs else " and ".join(map(str, sorted(map(_words, settings)))))
        )
    makespan = np.array([run.quantile(quantile) for run in runs])
    slowdown = np.array([run.slowdown(quantile) for run in runs])
    is_fit = np.ones(len(runs), bool) if fits is None else np.array(fits, bool)
    if is_fit.shape != (len(runs),):
        raise ValueError(f"fits must say of each of {len(runs)} runs whether it does, got {fits!r}")
    samples = np.stack([run.makespans for run in runs])
    least = samples[is_fit].min(axis=0, keepdims=True, initial=np.inf)
    fastest = ((samples == least) & is_fit[:, None]).mean(axis=1)
    ranks = (_rank(values, is_fit) for values in (makespan, slowdown))
    columns = (makespan, slowdown, *ranks, fastest, is_fit)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return ResultList(
        [
            Robustness(run.evaluation.schedule, run.deterministic, *row)
            for run, row in zip(runs, rows, strict=True)
        ]
    )


def jitter_dataset(runs: Mapping[str, Jittered]) -> "xr.Dataset":
    """Label the samples of schedules that were run under the same jitter; needs xarray.

    Returns makespan (schedule, sample) and deterministic (schedule) [s]; all settings as
    attributes.
    """
    import xarray as xr  # an extra: the engine does without

    every = list(runs.values())
    robustness(every)  # refuses runs that are not comparable
    first = every[0]
    links = {(r.evaluation.links, r.evaluation.workers, r.evaluation.microbatches) for r in every}
    if len(links) != 1:
        found = sorted(map(str, links))
        raise ValueError(f"runs must have the same links, workers and microbatches, got {found}")
    seconds, run = {"units": "s"}, first.evaluation
    makespans = np.stack([each.makespans for each in every])
    deterministic = np.array([each.deterministic for each in every])
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
            "link": run.links.model,
            "queues": run.links.queues,
            "host_links": ",".join("+".join(map(str, group)) for group in run.links.host_links),
            "posting": run.links.posting,
            "shared_links": format_pairs(run.links.shared_links),
            "pair_links": format_pair_links(run.links.named_pairs),
            "eager_below": run.links.eager_below,
            "workers": run.workers,
            "microbatches": run.microbatches,
            **provenance(),
        },
    )


def _words(setting: tuple[object, int, int]) -> str:
    jitter, seed, samples = setting
    return f"({jitter}, seed {seed}, {samples} samples)"


def _rank(values: NumpyArray, is_fit: Bool[NumpyArray, " runs"]) -> Int[NumpyArray, " runs"]:
    """1 for the smallest value of those that fit, the others behind them; equals share a rank."""
    is_before = (values[None, :] < values[:, None]) & (is_fit[None, :] == is_fit[:, None])
    return 1 + (is_before | (is_fit[None, :] & ~is_fit[:, None])).sum(axis=1)
