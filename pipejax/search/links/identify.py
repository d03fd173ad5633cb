"""Which link model a machine follows, from step times of known tables under known delays.

Every candidate predicts every run. Measured times scatter by a share of themselves (`noise`), so
what counts is the logarithm of measured over predicted. Two candidates are told apart where the
measured times are `ODDS` times as likely under one as under the other; what predicts the same in
all runs cannot be told apart by them, however little noise there is.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, is_number
from pipejax.base.display import short_repr_of
from pipejax.engine.pricing import lower_and_price
from pipejax.engine.recurrence_host import makespan_on_host
from pipejax.schedules.cells.ops import ScheduleError
from pipejax.schedules.table.communication_cells import messages_of
from pipejax.schedules.table.links import CARRIED, LINKS, MEETING, POSTINGS, QUEUES, Links
from pipejax.search.links.link_runs import LinkRun

ODDS = 1000.0
DECIDES = 2 * math.log(ODDS)  # by which chi-squares must differ
SAME = 1e-9  # relative: predictions that differ by less are the same
LEAST_NOISE = 1e-6
MOST_SIZES = 5  # of messages, between which one may be that below which they are buffered
STARTS = 3  # machines of one link model from which those by pair are searched

Predictions = Float[NumpyArray, "candidates runs"]


def single_models() -> list[Links]:
    """List machines of one link model, the simplest first."""
    ways = itertools.product(MEETING, POSTINGS, QUEUES)
    alone = [Links(model) for model in LINKS if model not in MEETING]
    return [*alone, *(Links(model, scope, posting=posting) for model, posting, scope in ways)]


def candidates_of(runs: Sequence[LinkRun] = ()) -> list[Links]:
    """List machines of one link model, also on shared links; of several message sizes eager ones.

    Eager messages are those below a size between two that the runs have.
    """
    alone = single_models()
    shared = [dataclasses.replace(links, shared_links="pairs") for links in alone if links.carries]
    sizes = np.unique([x for run in runs for x in np.ravel(np.asarray(run.costs.transmit))])
    gaps = [(a + b) / 2 for a, b in itertools.pairwise(sizes.tolist())]
    eager = [
        dataclasses.replace(links, eager_below=below)
        for links in (alone if len(gaps) < MOST_SIZES else [])
        if links.meets
        for below in gaps
    ]
    return [*alone, *shared, *eager]


def predict(runs: Sequence[LinkRun], candidates: Sequence[Links]) -> Predictions:
    """Step time of every run under every candidate [s]; infinite where it is a deadlock."""
    times = np.full((len(candidates), len(runs)), np.inf)
    costs = [run.delayed for run in runs]
    for row, links in enumerate(candidates):
        for column, run in enumerate(runs):
            try:
                program, vector = lower_and_price(run.table, costs[column], links)
            except ScheduleError:
                continue
            times[row, column] = makespan_on_host(program, vector)
    return times


@short_repr_of("links rms verdict excess")
@dataclasses.dataclass(frozen=True)
class LinkFit:
    """How well one candidate explains the measured step times.

    Attributes:
      links: the candidate.
      rms: root mean square of log(measured / predicted); infinite where it would be a deadlock.
      excess: by how much its chi-square exceeds that of the best; below 0 where it meets noise with
        models of pairs that the runs do not call for.
      verdict: "best", "same" (predicts as the best in all runs), "close" (these runs do not rule
        it out), "worse", or "deadlock".
      predicted: (runs) step times [s].
    """

    links: Links
    rms: float
    excess: float
    verdict: str
    predicted: Float[NumpyArray, " runs"]


@short_repr_of("links told_apart explains noise alike")
@dataclasses.dataclass(frozen=True)
class LinkIdentification:
    """Which link model the runs follow.

    Attributes:
      links: the best candidate; the simplest of those that predict the same.
      told_apart: whether the runs rule out every other candidate.
      explains: whether its residuals are no larger than the noise that was given.
      noise: relative noise that was given, or the residuals of the best.
      fits: all machines of one link model, the best first.
      alike: candidates that cannot be told apart from the best by these runs.
      pairs: where models of pairs were asked for: by pair, the link model of each and those that
        cannot be told apart from it by these runs, first the one that is taken.
    """

    links: Links
    told_apart: bool
    explains: bool
    noise: float
    fits: tuple[LinkFit, ...]
    alike: tuple[Links, ...]
    pairs: Mapping[tuple[int, int], tuple[str, ...]]


def identify_links(
    runs: Sequence[LinkRun],
    *,
    noise: float | None = None,
    by_pair: bool = False,
    candidates: Sequence[Links] | None = None,
) -> LinkIdentification:
    """Find the link model that explains measured step times.

    Args:
      runs: what was run, with its step time; several tables, delays or message sizes.
      noise: relative noise of a step time, as 0.02; what the best candidate leaves if None.
      by_pair: whether pairs of workers may have models of their own.
      candidates: machines to choose from; every link model with every scope of queues, posting,
        and shared links or not, if None.

    Returns:
      The best candidate, how well each does, and what cannot be told apart by these runs.

    Raises:
      ValueError: if a step time is missing or not above 0, or there are too few runs to tell
        anything.

    Cost:
      Every table is lowered and run once per candidate; by pair some hundred times more.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=4)
      >>> costs = [pj.Costs(forward=1.0, backward=2.0, transmit=x) for x in (0.5, 1.5, 3.0)]
      >>> times = [pj.evaluate(table, c, link="blocking").makespan for c in costs]
      >>> runs = [pj.links.LinkRun(table, c, seconds=t) for c, t in zip(costs, times)]
      >>> found = pj.links.identify_links(runs, noise=0.02)
      >>> found.links.model, found.told_apart
      ('blocking', True)
    """
    check_types(runs=(runs, Sequence), candidates=(candidates, Sequence, type(None)))
    check_types(by_pair=(by_pair, bool))
    if noise is not None:
        check_noise(noise)
    if not runs:
        raise ValueError("runs are needed, got none")
    for number, run in enumerate(runs):
        check_types(**{f"runs[{number}]": (run, LinkRun)})
        if not run.seconds > 0:
            raise ValueError(f"runs[{number}] has no step time: seconds is {run.seconds!r}")
    chosen = candidates_of(runs) if candidates is None else [*candidates]
    if not chosen:
        raise ValueError("candidates must hold at least one")
    measured = np.array([run.seconds for run in runs])
    found = judge(measured, chosen, predict(runs, chosen), noise)
    return _by_pair(runs, measured, found, noise) if by_pair else found


def check_noise(noise: float, where: str = "noise") -> None:
    """Refuse a relative noise of step times that is none."""
    if not is_number(noise) or noise == 0:
        raise ValueError(f"{where} must be a number above 0, got {noise!r}")


def judge(
    measured: Float[NumpyArray, " runs"],
    candidates: Sequence[Links],
    predicted: Predictions,
    noise: float | None,
    taken: Links | None = None,
) -> LinkIdentification:
    """Rank candidates by what they leave of measured step times (runs) [s].

    The best is the one that leaves least, unless another one is taken already.
    """
    left = _squares(measured, predicted)
    if not np.isfinite(left).any():
        raise ValueError(
            "every candidate is a deadlock in one of the runs: their tables cannot run"
        )
    simplest = int(np.argmin(left > left.min() + SAME))  # of equals, as they stand
    best = simplest if taken is None else candidates.index(taken)
    level = noise or max(LEAST_NOISE, math.sqrt(left[best] / len(measured)))
    excess = (left - left[best]) / level**2
    same = np.abs(predicted / predicted[best] - 1).max(axis=1, initial=0.0) < SAME
    order = np.argsort(left, kind="stable").tolist()
    order = [best, *(k for k in order if k != best)]
    verdicts = np.select(
        [np.arange(len(left)) == best, np.isinf(left), same, excess < DECIDES],
        ["best", "deadlock", "same", "close"],
        "worse",
    ).tolist()
    fits = tuple(
        LinkFit(
            candidates[k],
            math.sqrt(left[k] / len(measured)),
            float(excess[k]),
            verdicts[k],
            predicted[k],
        )
        for k in order
    )
    alike = tuple(fit.links for fit in fits if fit.verdict in ("same", "close"))
    # chi-square of the best: three standard deviations above its mean are too many
    freedom = len(measured)
    limit = freedom + 3 * math.sqrt(2 * freedom)
    explains = bool(left[best] / level**2 <= limit)
    return LinkIdentification(candidates[best], not alike, explains, level, fits, alike, {})


def _squares(
    measured: Float[NumpyArray, " runs"], predicted: Predictions
) -> Float[NumpyArray, " candidates"]:
    """Sum of squares of log(measured / predicted): (candidates)."""
    with np.errstate(divide="ignore"):  # a deadlock takes forever: it explains no time
        squares: Float[NumpyArray, " candidates"] = (np.log(measured / predicted) ** 2).sum(axis=1)
    return squares


def pairs_of(runs: Iterable[LinkRun]) -> list[tuple[int, int]]:
    """Pairs of workers, the smaller first, between which messages go."""
    found = set()
    for run in runs:
        sent = messages_of(run.table)
        ends = np.sort(
            [sent.producer // run.table.num_slots, sent.consumer // run.table.num_slots], 0
        )
        found |= {*zip(*ends.tolist(), strict=True)}
    return sorted(found)


def _by_pair(
    runs: Sequence[LinkRun],
    measured: Float[NumpyArray, " runs"],
    whole: LinkIdentification,
    noise: float | None,
) -> LinkIdentification:
    """Give pairs models of their own, one after the other, as long as the runs call for it."""
    pairs, known = pairs_of(runs), {fit.links: fit.predicted for fit in whole.fits}

    def left(links: Links) -> float:
        if links not in known:
            known[links] = predict(runs, [links])[0]
        return float(_squares(measured, known[links][None])[0])

    def others(links: Links) -> list[Links]:
        return [c for pair in pairs for model in LINKS for c in with_pair(links, pair, model)]

    level = noise or LEAST_NOISE
    ends = []
    for fit in [fit for fit in whole.fits if fit.verdict != "deadlock"][:STARTS]:
        links = fit.links
        while True:
            step = min(others(links), key=left, default=links)
            if left(links) - left(step) < DECIDES * level**2:
                break
            links = step
        ends.append(links)
    best = min(ends, key=left)
    level = noise or max(LEAST_NOISE, math.sqrt(left(best) / len(runs)))
    near = left(best) + DECIDES * level**2
    models = {}
    for pair in pairs:
        own = [links for links in known if left(links) < near]
        models[pair] = tuple(dict.fromkeys(model_of(links, pair) for links in (best, *own)))
    # that noise is met a little better by more models than are called for says nothing
    found = judge(measured, [*known], np.array([*known.values()]), noise, best)
    return dataclasses.replace(found, pairs=models)


def model_of(links: Links, pair: tuple[int, int]) -> str:
    """Link model of a pair of workers."""
    return dict(links.named_pairs).get(pair, links.model)


def with_pair(links: Links, pair: tuple[int, int], model: str) -> list[Links]:
    """The same machine with another link model of a pair; nothing where it has that one.

    Where a pair is the first to meet in a rendezvous, in every scope of queues and posting.
    """
    if model_of(links, pair) == model:
        return []
    named = {**dict(links.named_pairs), pair: model}
    named = {pair: own for pair, own in named.items() if own != links.model}
    models = {links.model, *named.values()}
    meets = bool(models & {*MEETING})
    if meets and not links.meets:
        kinds = [(scope, posting) for posting in POSTINGS for scope in QUEUES]
    else:
        kinds = [(links.queues, links.posting if meets else "early")]
    is_carried = bool(models & {*CARRIED})
    return [
        dataclasses.replace(
            links,
            queues=scope if meets else "worker",
            posting=posting,
            pair_links=named,
            eager_below=links.eager_below if meets else 0.0,
            shared_links=links.shared_links if is_carried else (),
        )
        for scope, posting in kinds
    ]
