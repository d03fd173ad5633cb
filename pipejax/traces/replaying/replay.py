"""Replay: recorded times in recorded order through the recurrence, and its errors."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.base.medians import DEVIATION
from pipejax.schedules.table.links import LINKS, MEETING, POSTINGS, QUEUES, Links
from pipejax.traces.replaying.messages import (
    LinkEstimate,
    LinkTimes,
    Messages,
    TableRuns,
    TakenMessages,
    estimate,
    link_name,
    link_times,
    link_workers,
    median,
    scale_links,
    table_runs,
)
from pipejax.traces.replaying.pipelines import Pipelines

# Identification of the link model of a run, from step times under every candidate.
#
# The noise of measured times is proportional to them, so a candidate is judged by log(measured /
# predicted). Two candidates are distinguished if the measured times are `LIKELIHOOD_RATIO` times
# as likely under one as under the other.

LIKELIHOOD_RATIO = 1000.0
MIN_CHI_SQUARE = 2 * math.log(LIKELIHOOD_RATIO)  # difference that rules a candidate out
EQUAL = 1e-9  # relative difference below which predictions are equal
MIN_NOISE = 1e-6

Predictions = Float[NumpyArray, "candidates runs"]


def single_models() -> list[Links]:
    """List all links with one model for every pair of workers, the simplest first."""
    simple = [Links(model) for model in LINKS if model not in MEETING]
    options = itertools.product(MEETING, POSTINGS, QUEUES)
    return [*simple, *(Links(model, scope, posting=posting) for model, posting, scope in options)]


@with_short_repr("links rms verdict excess")
@dataclasses.dataclass(frozen=True)
class LinkFit:
    """Fit of one candidate to the measured step times.

    Attributes:
      links: the candidate.
      rms: root mean square of log(measured / predicted); infinite for a deadlock.
      excess: its chi-square minus that of the best; may be below 0 if a more complicated candidate
        fits the noise.
      verdict: "best", "same" (predictions equal those of the best), "close" (not ruled out by
        these runs), "worse", or "deadlock".
      predicted: (runs) step times [s].
    """

    links: Links
    rms: float
    excess: float
    verdict: str
    predicted: Float[NumpyArray, " runs"]


@with_short_repr("links is_identified explains noise equivalent_models")
@dataclasses.dataclass(frozen=True)
class LinkIdentification:
    """Best link model of some runs, with all candidates.

    Attributes:
      links: the best candidate; of equal predictions, the simplest.
      is_identified: whether the runs rule out every other candidate.
      explains: whether its residuals are no larger than the stated noise.
      noise: relative noise, as stated, or the residuals of the best.
      fits: fits of all candidates, the best first.
      equivalent_models: candidates that these runs cannot distinguish from the best.
    """

    links: Links
    is_identified: bool
    explains: bool
    noise: float
    fits: tuple[LinkFit, ...]
    equivalent_models: tuple[Links, ...]


def judge(
    measured: Float[NumpyArray, " runs"],
    candidates: Sequence[Links],
    predicted: Predictions,
    noise: float | None,
    preferred: Links | None = None,
) -> LinkIdentification:
    """Rank candidates by the residuals of measured step times (runs) [s]."""
    # The best has the smallest residuals, unless another candidate is preferred. Candidates are in
    # order of simplicity; without `noise`, the residuals of the best are taken as the noise.
    squares = _squares(measured, predicted)
    if not np.isfinite(squares).any():
        raise ValueError(
            "every candidate is a deadlock in one of the runs: their tables cannot run"
        )
    simplest = int(np.argmin(squares > squares.min() + EQUAL))  # the first of equally good ones
    best = simplest if preferred is None else candidates.index(preferred)
    level = noise or max(MIN_NOISE, math.sqrt(squares[best] / len(measured)))
    excess = (squares - squares[best]) / level**2
    is_same = np.abs(predicted / predicted[best] - 1).max(axis=1, initial=0.0) < EQUAL
    order = np.argsort(squares, kind="stable").tolist()
    order = [best, *(k for k in order if k != best)]
    verdicts = np.select(
        [np.arange(len(squares)) == best, np.isinf(squares), is_same, excess < MIN_CHI_SQUARE],
        ["best", "deadlock", "same", "close"],
        "worse",
    ).tolist()
    fits = tuple(
        LinkFit(
            candidates[k],
            math.sqrt(squares[k] / len(measured)),
            float(excess[k]),
            verdicts[k],
            predicted[k],
        )
        for k in order
    )
    equivalent = tuple(fit.links for fit in fits if fit.verdict in ("same", "close"))
    # a chi-square with n degrees of freedom has mean n and variance 2 n: allow three deviations
    freedom = len(measured)
    limit = freedom + 3 * math.sqrt(2 * freedom)
    explains = bool(squares[best] / level**2 <= limit)
    return LinkIdentification(candidates[best], not equivalent, explains, level, fits, equivalent)


def _squares(
    measured: Float[NumpyArray, " runs"], predicted: Predictions
) -> Float[NumpyArray, " candidates"]:
    """Return the sum of squares of log(measured / predicted) (candidates)."""
    with np.errstate(divide="ignore"):  # infinite predictions of a deadlock
        squares: Float[NumpyArray, " candidates"] = (np.log(measured / predicted) ** 2).sum(axis=1)
    return squares


MAX_EARLY = 0.05  # share of a link's messages taken before they could be sent, by a possible model
MAX_NOISE = 0.2  # of a pipeline; beyond it the simplest equivalent link model is chosen
MAX_NODES = 1 << 18  # of all runs of a table from which message times are estimated


@with_short_repr("links message_time mean_error worst_error")
@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """Pipelines of a trace, run again under a link model.

    Attributes:
      pipelines: pipelines of the trace.
      links: link model of the replay.
      link_times: (2 (stages - 1)) best estimate of the time of a message by direction and stage
        boundary [s].
      errors: (pipelines) replayed over recorded time from first start to last end, minus 1.
      identified: fits of all link models that were tried; None if none was.
    """

    pipelines: Pipelines
    links: Links
    link_times: LinkTimes
    errors: Float[NumpyArray, " pipelines"]
    identified: LinkIdentification | None = None

    @property
    def mean_error(self) -> float:
        """Return the mean of the absolute errors."""
        return float(np.abs(self.errors).mean())

    @property
    def worst_error(self) -> float:
        """Return the largest absolute error."""
        return float(np.abs(self.errors).max())

    @property
    def message_time(self) -> float:
        """Return the median over links of the time of a message [s]."""
        return float(np.median(self.link_times)) if len(self.link_times) else 0.0

    @functools.cached_property
    def by_step(self) -> Mapping[int, float]:
        """Return the mean absolute error of the pipelines of each step, by step."""
        steps = np.array([pipeline.step for pipeline in self.pipelines.pipelines])
        errors = np.abs(self.errors)
        return {int(step): float(errors[steps == step].mean()) for step in np.unique(steps)}

    @property
    def fits(self) -> Mapping[str, float]:
        """Return the mean absolute error of every possible link model, by name."""
        spans, fits = self.pipelines.spans, () if self.identified is None else self.identified.fits
        return {
            model_name(fit.links): float(np.abs(fit.predicted / spans - 1).mean()) for fit in fits
        }

    @property
    def equivalent_models(self) -> list[str]:
        """List other link models that explain these pipelines equally well."""
        models = () if self.identified is None else self.identified.equivalent_models
        return [model_name(links) for links in models]

    @functools.cached_property
    def evidence(self) -> Sequence[TakenMessages]:
        """Return the evidence of ops on message times under these links, by table."""
        tables = map(Messages, table_runs(self.pipelines, self.links))
        return [messages.evidence(messages.ends(self.link_times)) for messages in tables]

    @functools.cached_property
    def link_estimate(self) -> LinkEstimate:
        """Estimate the message time of each link, with an upper bound."""
        return estimate(self.evidence, link_workers(self.pipelines.table), median)

    @property
    def unobserved(self) -> Mapping[str, float]:
        """Return links for whose messages no op waited, with an upper bound on their time [s]."""
        upper, boundaries = self.link_estimate.upper, self.pipelines.table.num_stages - 1
        links = np.flatnonzero(~self.link_estimate.is_observed & np.isfinite(upper)).tolist()
        return {link_name(link, boundaries): float(upper[link]) for link in links}

    @functools.cached_property
    def residuals(self) -> Float[NumpyArray, " slices"]:
        """Return the delay of the start of every op against the replay [s]; 0 for other slices."""
        # Both starts count from the first start of the pipeline.
        result = np.zeros(len(self.pipelines.trace))
        for runs in table_runs(self.pipelines, self.links):
            start, _ = runs.replay(self.link_times[None])
            begin = runs.start.min(axis=1, keepdims=True)
            result[runs.slices] = runs.start - begin - start[0]
        return result

    @functools.cached_property
    def stalls(self) -> Float[NumpyArray, " slices"]:
        """Return the delay of every op after the recorded ends of its inputs [s]; 0 for others."""
        result = np.zeros(len(self.pipelines.trace))
        for runs in table_runs(self.pipelines, self.links):
            messages = Messages(runs)
            ready = messages.ends(self.link_times)[runs.graph.preds[runs.ops]].max(axis=1)
            result[runs.slices] = np.maximum(messages.start[runs.ops] - ready, 0.0).T
        return result


def replay(pipelines: Pipelines, *, link: str | Links | None = None) -> Replay:
    """Run the pipelines of a trace again, with recorded times in recorded order.

    Args:
      pipelines: pipelines of the trace.
      link: link model, or `Links`; default: the one that explains the pipelines best.

    Returns:
      The replay, with its errors by pipeline and by op.

    Raises:
      ValueError: if the link model is unknown, or the tables deadlock under it.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.25))
      >>> result = pj.traces.replay(pj.traces.find_pipelines(pj.traces.record_runs([run])))
      >>> result.links.model, result.message_time, result.worst_error
      ('delay', 0.25, 0.0)
    """
    check_types(pipelines=(pipelines, Pipelines))
    pipelines = scale_links(pipelines)
    candidates = [Links()] if pipelines.table.num_workers == 1 else single_models()
    results: list[Replay] = []
    implausible: list[Replay] = []  # ops would have taken messages before they could be sent
    for links in candidates if link is None else [Links.resolve(link)]:
        try:
            runs = [*table_runs(pipelines, links)]
        except ValueError:  # a deadlock under these links
            if link is not None:
                raise
            continue
        times, early = _best_times(pipelines, runs)
        result = Replay(pipelines, links, times, _span_errors(pipelines, runs, times[None])[0])
        (implausible if early > MAX_EARLY else results).append(result)
    results = results or implausible
    # of equal errors up to rounding, the first wins: the simplest model
    best = min(results, key=lambda result: round(result.mean_error, 9))
    spans = pipelines.spans
    predicted = spans * (1 + np.stack([result.errors for result in results]))
    # the median ignores steps that no model explains, such as the first of a run
    noise = max(MIN_NOISE, DEVIATION * float(np.median(np.abs(best.errors))))
    candidates = [result.links for result in results]
    identified = judge(spans, candidates, predicted, noise, best.links)
    if noise > MAX_NOISE:
        models = (best.links, *identified.equivalent_models)
        best = next(result for result in results if result.links in models)
        identified = judge(spans, candidates, predicted, noise, best.links)
    return dataclasses.replace(best, identified=identified)


def model_name(links: Links) -> str:
    """Return the name of a link model, with queues and posting of rendezvous."""
    if not links.is_rendezvous:
        return links.model
    posting = [f"posting {links.posting}"] if links.posting != Links().posting else []
    return " ".join([links.model, links.queues, *posting])


def _best_times(pipelines: Pipelines, runs: Sequence[TableRuns]) -> tuple[LinkTimes, float]:
    """Return the message times (links) [s] with the least error, and a share of early messages."""
    # Early messages were taken before they could be sent; the link with the most of them counts.
    samples = [run.sample(MAX_NODES) for run in runs]
    workers = link_workers(pipelines.table)
    messages = [Messages(sample) for sample in samples]
    candidates = np.stack([*link_times(messages, workers)])
    errors = np.abs(_span_errors(pipelines, samples, candidates))
    is_sampled = ~np.isnan(errors[0])
    best = candidates[np.argmin(errors[:, is_sampled].mean(axis=1).round(9))]
    evidence = [table.evidence(table.ends(best)) for table in messages]
    return best, float(estimate(evidence, workers, median).early.max(initial=0.0))


def _span_errors(
    pipelines: Pipelines, runs: Sequence[TableRuns], times: Float[NumpyArray, "candidates links"]
) -> Float[NumpyArray, "candidates pipelines"]:
    """Return replayed over recorded span, minus 1, for each candidate; NaN of other pipelines."""
    # A candidate is a time of every message by link [s].
    errors = np.full((len(times), len(pipelines.pipelines)), np.nan)
    for run in runs:
        _, spans = run.replay(times)
        errors[:, run.members] = spans / pipelines.spans[run.members] - 1
    return errors
