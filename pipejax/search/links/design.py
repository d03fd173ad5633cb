"""Which runs tell link models apart best, before anything is measured."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, whole_number
from pipejax.base.display import short_repr_of
from pipejax.costs.costs import Costs
from pipejax.schedules.table.communication_cells import messages_of
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.links.identify import SAME, candidates_of, check_noise, predict
from pipejax.search.links.link_runs import LinkRun

MOST_RUNS = 200  # that a design is chosen from


@short_repr_of("runs error_bound alike")
class LinkDesign(NamedTuple):
    """Runs that tell link models apart.

    Attributes:
      runs: what to run, in the order in which they help; their `seconds` are to be measured.
      error_bound: bound on the probability to take one candidate for another, summed over all
        pairs that differ at all.
      alike: pairs of candidates that no run of all that were possible tells apart.
    """

    runs: list[LinkRun]
    error_bound: float
    alike: list[tuple[Links, Links]]


def design_link_runs(
    tables: Sequence[ScheduleTable],
    costs: Sequence[Costs],
    *,
    count: int = 12,
    delay: float | None = None,
    noise: float = 0.02,
    candidates: Sequence[Links] | None = None,
) -> LinkDesign:
    """Choose runs whose step times tell link models apart.

    The times of a run scatter by `noise`. Two candidates whose predictions differ by d are taken
    for one another with a probability of at most exp(-sum((d / noise)**2) / 8) (Bhattacharyya).
    Run by run the one is added that lowers the sum of this bound over all pairs of candidates
    most; a run may come several times.

    Args:
      tables: schedules that can be run.
      costs: costs at which they can be run, as of several message sizes [s].
      count: how many runs to choose.
      delay: an extra delay that can be injected [s], on a message, a link, an op or a worker;
        none if None.
      noise: relative noise of a step time.
      candidates: as for `identify_links`.

    Returns:
      The runs, how sure they are, and what they cannot tell apart.

    Raises:
      ValueError: if there is nothing to choose from, or a number is wrong.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=4)
      >>> costs = [pj.Costs(forward=1.0, backward=2.0, transmit=x) for x in (0.5, 3.0)]
      >>> known = [pj.Links("delay"), pj.Links("queued"), pj.Links("blocking")]
      >>> found = pj.links.design_link_runs([table], costs, count=2, candidates=known)
      >>> [run.costs.transmit for run in found.runs], found.alike
      ([3.0, 3.0], [])
    """
    check_types(tables=(tables, Sequence), costs=(costs, Sequence))
    whole_number(count, "count")
    check_noise(noise)
    if not tables or not costs:
        raise ValueError("tables and costs are needed, at least one of each")
    pool = [
        run
        for table in tables
        for each in costs
        for run in with_delays(LinkRun(table, each), delay)
    ]
    return choose_runs(pool, count, noise, candidates)


def with_delays(run: LinkRun, delay: float | None) -> list[LinkRun]:
    """List a run without a delay, and with one [s] wherever it can be."""
    targets = "", *(_targets(run.table) if delay else ())
    return [LinkRun(run.table, run.costs, target, delay or 0.0) for target in targets]


def choose_runs(
    pool: Sequence[LinkRun], count: int, noise: float, candidates: Sequence[Links] | None = None
) -> LinkDesign:
    """Choose the runs among these whose step times tell candidates apart."""
    if len(pool) > MOST_RUNS:
        pool = [pool[k] for k in np.linspace(0, len(pool) - 1, MOST_RUNS).astype(int)]
    known = candidates_of(pool) if candidates is None else [*candidates]
    times = predict(pool, known)
    one, other = np.triu_indices(len(known), 1)
    apart = _distances(times, noise)[:, one, other]
    differs = apart.max(axis=0, initial=0.0) > (SAME / noise) ** 2
    chosen, bound = _greedy(apart[:, differs], count)
    alike = [
        (known[a], known[b])
        for a, b in zip(one[~differs].tolist(), other[~differs].tolist(), strict=True)
    ]
    return LinkDesign([pool[k] for k in chosen], bound, alike)


def _distances(
    times: Float[NumpyArray, "candidates runs"], noise: float
) -> Float[NumpyArray, "runs candidates candidates"]:
    """Squares of what predictions differ by, in units of the noise; a deadlock shows at once."""
    logs = np.log(np.where(np.isinf(times), 1e9 * np.nanmax(times[np.isfinite(times)]), times)).T
    found: Float[NumpyArray, "runs candidates candidates"] = (
        (logs[:, :, None] - logs[:, None, :]) / noise
    ) ** 2
    return found


def _greedy(apart: Float[NumpyArray, "runs pairs"], count: int) -> tuple[list[int], float]:
    """Choose runs one after the other: (count) their numbers, and the bound on errors."""
    total, chosen = np.zeros(apart.shape[1]), []
    for _ in range(count):
        bounds = np.exp(-(total + apart) / 8).sum(axis=1)
        chosen.append(int(np.argmin(bounds)))
        total += apart[chosen[-1]]
    return chosen, float(np.exp(-total / 8).sum())


def _targets(table: ScheduleTable) -> list[str]:
    """List what can be delayed: links, and messages and forwards of two microbatches."""
    sent = messages_of(table)
    ends = zip(sent.producer // table.num_slots, sent.consumer // table.num_slots, strict=True)
    links = dict.fromkeys(f"{a}-{b}" for a, b in ends)
    some = (0, table.num_microbatches // 2)
    messages = [
        f"{stage}SEND_{'FB'[way]}{m}"
        for stage, way, m in zip(
            *(x.tolist() for x in (sent.from_stage, sent.direction, sent.microbatch)), strict=True
        )
        if m in some
    ]
    ops = [f"{stage}F{m}" for stage in (0, table.num_stages - 1) for m in some]
    return [*links, *dict.fromkeys(messages), *ops]
