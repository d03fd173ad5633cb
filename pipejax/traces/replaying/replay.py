"""Replay: recorded times in recorded order through the recurrence, and what it does not explain."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.base.medians import DEVIATION
from pipejax.schedules.table.links import Links
from pipejax.traces.replaying.link_models import (
    LEAST_NOISE,
    LinkIdentification,
    judge,
    single_models,
)
from pipejax.traces.replaying.messages import (
    LinkEstimate,
    LinkTimes,
    Messages,
    TableRuns,
    TakenMessages,
    estimate,
    link_name,
    link_times,
    median,
    table_runs,
)
from pipejax.traces.replaying.pipelines import Pipelines

EARLY = 0.2  # of the messages of a link, taken before they could be sent: its model is another one
UNEXPLAINED = 0.2  # of a pipeline, beyond which the simplest of the possible link models counts
MOST_NODES = 1 << 18  # of all runs of a table that what messages take is found from


@with_short_repr("links message_time mean_error worst_error")
@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """Pipelines of a trace, run again.

    Attributes:
      pipelines: what ran.
      links: link model under which they run.
      link_times: (2 (stages - 1)) time of a message by direction and stage boundary [s], such as
        explains the pipelines best.
      errors: (pipelines) replayed over recorded from first start to last end, minus 1.
      identified: how well every link model explains them that was tried, and which of them cannot
        be told apart; None where none was tried.
    """

    pipelines: Pipelines
    links: Links
    link_times: LinkTimes
    errors: Float[NumpyArray, " pipelines"]
    identified: LinkIdentification | None = None

    @property
    def mean_error(self) -> float:
        """Mean of the absolute errors."""
        return float(np.abs(self.errors).mean())

    @property
    def worst_error(self) -> float:
        """Largest absolute error."""
        return float(np.abs(self.errors).max())

    @property
    def message_time(self) -> float:
        """Median over links of the time of a message [s]."""
        return float(np.median(self.link_times)) if len(self.link_times) else 0.0

    @functools.cached_property
    def by_step(self) -> Mapping[int, float]:
        """Mean absolute error of the pipelines of each step."""
        steps = np.array([pipeline.step for pipeline in self.pipelines.pipelines])
        errors = np.abs(self.errors)
        return {int(step): float(errors[steps == step].mean()) for step in np.unique(steps)}

    @property
    def fits(self) -> Mapping[str, float]:
        """Mean absolute error of every link model that can be, by what it is called."""
        spans, tried = self.pipelines.spans, () if self.identified is None else self.identified.fits
        return {called(fit.links): float(np.abs(fit.predicted / spans - 1).mean()) for fit in tried}

    @property
    def alike(self) -> list[str]:
        """Link models that were tried and that these pipelines do not tell from this one."""
        return [] if self.identified is None else [called(links) for links in self.identified.alike]

    @functools.cached_property
    def evidence(self) -> Sequence[TakenMessages]:
        """Evidence of ops on messages under these links, by table."""
        tables = map(Messages, table_runs(self.pipelines, self.links))
        return [messages.evidence(messages.ended(self.link_times)) for messages in tables]

    @functools.cached_property
    def link_estimate(self) -> LinkEstimate:
        """Estimate of the message time of each link, with an upper bound."""
        return estimate(self.evidence, len(self.link_times), median)

    @property
    def untold(self) -> Mapping[str, float]:
        """Links for whose messages nothing waited, and what one took at most [s]."""
        upper, boundaries = self.link_estimate.upper, self.pipelines.table.num_stages - 1
        links = np.flatnonzero(~self.link_estimate.is_told & np.isfinite(upper)).tolist()
        return {link_name(link, boundaries): float(upper[link]) for link in links}

    @functools.cached_property
    def residuals(self) -> Float[NumpyArray, " slices"]:
        """Delay of the start of every op against the replay (slices) [s]; 0 for other slices.

        Both are counted from the first start of the pipeline.
        """
        trace, result = self.pipelines.trace, np.zeros(len(self.pipelines.trace))
        for runs in table_runs(self.pipelines, self.links):
            start, _ = runs.replayed(self.link_times[None])
            recorded = trace.start[runs.slices]
            result[runs.slices] = recorded - recorded.min(axis=1, keepdims=True) - start[0]
        return result

    @functools.cached_property
    def stalls(self) -> Float[NumpyArray, " slices"]:
        """Delay of the start of every op after all its inputs (slices) [s]; 0 for other slices.

        What it waits for is taken as recorded: so nothing that came before is counted again.
        """
        result = np.zeros(len(self.pipelines.trace))
        for runs in table_runs(self.pipelines, self.links):
            messages = Messages(runs)
            ready = messages.ended(self.link_times)[runs.graph.preds[runs.ops]].max(axis=1)
            result[runs.slices] = np.maximum(messages.start[runs.ops] - ready, 0.0).T
        return result


def replay(pipelines: Pipelines, *, link: str | Links | None = None) -> Replay:
    """Run the pipelines of a trace again.

    Args:
      pipelines: what ran.
      link: link model, or `Links`; the one that explains the recorded pipelines best if None.

    Returns:
      How far the replay is off, pipeline by pipeline and op by op.

    Raises:
      ValueError: if the link model is unknown, or the tables deadlock under it.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.25))
      >>> found = pj.traces.replay(pj.traces.pipelines_of(pj.traces.of_runs([run])))
      >>> found.links.model, found.message_time, found.worst_error
      ('delay', 0.25, 0.0)
    """
    check_types(pipelines=(pipelines, Pipelines))
    candidates = [Links()] if pipelines.table.num_workers == 1 else single_models()
    results: list[Replay] = []
    impossible: list[Replay] = []  # ops would have taken messages before they could be sent
    for links in candidates if link is None else [Links.resolve(link)]:
        try:
            runs = [*table_runs(pipelines, links)]
        except ValueError:  # a deadlock under these links
            if link is not None:
                raise
            continue
        times, early = _best_times(pipelines, runs)
        result = Replay(pipelines, links, times, _errors(pipelines, runs, times[None])[0])
        (impossible if early > EARLY else results).append(result)
    results = results or impossible
    # the simplest comes first: another has to be better than rounding
    best = min(results, key=lambda result: round(result.mean_error, 9))
    spans = pipelines.spans
    predicted = spans * (1 + np.stack([result.errors for result in results]))
    # a step that nothing explains, as the first of a run, says nothing of links
    noise = max(LEAST_NOISE, DEVIATION * float(np.median(np.abs(best.errors))))
    candidates = [result.links for result in results]
    identified = judge(spans, candidates, predicted, noise, best.links)
    if noise > UNEXPLAINED:
        best = next(result for result in results if result.links in (best.links, *identified.alike))
        identified = judge(spans, candidates, predicted, noise, best.links)
    return dataclasses.replace(best, identified=identified)


def called(links: Links) -> str:
    """Return the name of a link model."""
    if not links.is_rendezvous:
        return links.model
    posted = [f"posting {links.posting}"] if links.posting != Links().posting else []
    return " ".join([links.model, links.queues, *posted])


def _best_times(pipelines: Pipelines, runs: Sequence[TableRuns]) -> tuple[LinkTimes, float]:
    """Times of messages that explain some of the pipelines best (links) [s]."""
    # And the share of messages that were taken before they could be sent, of the link with the
    # most.
    samples = [run.sample(MOST_NODES) for run in runs]
    links = 2 * (pipelines.table.num_stages - 1)
    messages = [Messages(sample) for sample in samples]
    ways = np.stack([*link_times(messages, links)])
    errors = np.abs(_errors(pipelines, samples, ways))
    is_valid = ~np.isnan(errors[0])
    best = ways[np.argmin(errors[:, is_valid].mean(axis=1).round(9))]
    evidence = [part.evidence(part.ended(best)) for part in messages]
    return best, float(estimate(evidence, links, median).early.max(initial=0.0))


def _errors(
    pipelines: Pipelines, runs: Sequence[TableRuns], ways: Float[NumpyArray, "ways links"]
) -> Float[NumpyArray, "ways pipelines"]:
    """Replayed over recorded span of the pipelines in these runs, minus 1; NaN of others."""
    errors = np.full((len(ways), len(pipelines.pipelines)), np.nan)
    for run in runs:
        _, spans = run.replayed(ways)
        errors[:, run.members] = spans / pipelines.spans[run.members] - 1
    return errors
