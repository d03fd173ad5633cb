"""Replay: recorded op times in recorded order, run under a link model, and its errors."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.base.medians import DEVIATION
from pipejax.schedules.table.links import LINKS, MEETING, POSTINGS, QUEUES, Links
from pipejax.traces.record import MESSAGES, OPS, Trace
from pipejax.traces.replaying.messages import (
    LinkEstimate,
    LinkTimes,
    MessageEvidence,
    Messages,
    TableRuns,
    estimate,
    link_name,
    link_times,
    link_workers,
    median,
    scale_links,
    table_runs,
)
from pipejax.traces.replaying.pipelines import Pipelines

# Replays under every candidate identify the link model of a run.
#
# The noise of a measured time is proportional to the time. So a candidate is judged by
# log(measured / predicted). Two candidates are distinguished if the measured times are
# `LIKELIHOOD_RATIO` times as likely under one candidate as under the other.

LIKELIHOOD_RATIO = 1000.0
MIN_CHI_SQUARE = 2 * math.log(LIKELIHOOD_RATIO)  # difference of chi square that rules one out
EQUAL = 1e-9  # relative difference below which predictions are equal
MIN_NOISE = 1e-6


def single_models() -> list[Links]:
    """List the link models with equal links for all pairs of workers, the simplest first."""
    simple = [Links(model) for model in LINKS if model not in MEETING]
    options = itertools.product(MEETING, POSTINGS, QUEUES)
    return [*simple, *(Links(model, scope, posting=posting) for model, posting, scope in options)]


MAX_EARLY = 0.05  # a model is impossible if a larger share of messages is taken before it is sent
MAX_NOISE = 0.2  # relative noise above which the simplest equivalent link model is chosen
MAX_NODES = 1 << 18  # nodes of all runs of a table that are used to estimate message times


@with_short_repr("links message_time mean_error worst_error")
@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """Pipelines of a trace, simulated again under a link model with recorded op times.

    Attributes:
      pipelines: pipelines of the trace.
      links: link model of the replay.
      link_times: (2 (stages - 1)) estimated time of a message by direction and stage boundary [s].
      errors: (pipelines) replayed span / recorded span - 1.
      fits: {possible link model: mean absolute error}, the best model first.
      equivalent_models: other link models that explain these pipelines equally well.
    """

    pipelines: Pipelines
    links: Links
    link_times: LinkTimes
    errors: Float[NumpyArray, " pipelines"]
    fits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    equivalent_models: Sequence[str] = ()

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
        """Return the median of the links' message times [s]."""
        return float(np.median(self.link_times)) if len(self.link_times) else 0.0

    @functools.cached_property
    def by_step(self) -> Mapping[int, float]:
        """Return {step: mean absolute error of its pipelines}."""
        steps = np.array([pipeline.step for pipeline in self.pipelines.pipelines])
        errors = np.abs(self.errors)
        return {int(step): float(errors[steps == step].mean()) for step in np.unique(steps)}

    @functools.cached_property
    def evidence(self) -> Sequence[MessageEvidence]:
        """Return evidence on message times under the replay's links, for each table."""
        tables = map(Messages, table_runs(self.pipelines, self.links))
        return [messages.evidence(messages.ends(self.link_times)) for messages in tables]

    @functools.cached_property
    def link_estimate(self) -> LinkEstimate:
        """Estimate the message time of each link, with an upper bound."""
        return estimate(self.evidence, link_workers(self.pipelines.table), median)

    @property
    def unobserved(self) -> Mapping[str, float]:
        """Return {link for whose messages no op waited: upper bound on the message time [s]}."""
        upper, boundaries = self.link_estimate.upper, self.pipelines.table.num_stages - 1
        links = np.flatnonzero(~self.link_estimate.is_observed & np.isfinite(upper)).tolist()
        return {link_name(link, boundaries): float(upper[link]) for link in links}

    @functools.cached_property
    def residuals(self) -> Float[NumpyArray, " slices"]:
        """Return (slices) recorded start - replayed start of ops [s]; 0 for other slices."""
        result = np.zeros(len(self.pipelines.trace))
        for runs in table_runs(self.pipelines, self.links):
            start, _ = runs.replay(self.link_times[None])
            begin = runs.start.min(axis=1, keepdims=True)
            result[runs.slices] = runs.start - begin - start[0]
        return result

    @functools.cached_property
    def stalls(self) -> Float[NumpyArray, " slices"]:
        """Return (slices) delays of ops after the ends of their inputs [s]; 0 for other slices."""
        result = np.zeros(len(self.pipelines.trace))
        for runs in table_runs(self.pipelines, self.links):
            messages = Messages(runs)
            ready = messages.ends(self.link_times)[runs.graph.preds[runs.ops]].max(axis=1)
            result[runs.slices] = np.maximum(messages.start[runs.ops] - ready, 0.0).T
        return result


def replay(pipelines: Pipelines, *, link: str | Links | None = None) -> Replay:
    """Simulate the pipelines of a trace with recorded op times in recorded order.

    Args:
      pipelines: pipelines of the trace.
      link: link model, or `Links`; default: the link model that explains the pipelines best.

    Returns:
      The replay, with errors of pipelines and of ops.

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
    implausible: list[Replay] = []  # models under which ops take messages before they are sent
    for links in candidates if link is None else [Links.resolve(link)]:
        try:
            runs = [*table_runs(pipelines, links)]
        except ValueError:  # a deadlock under these links
            if link is not None:
                raise
            continue
        times, early = _best_times(pipelines, runs)
        result = Replay(pipelines, links, times, _span_errors(pipelines, runs, times[None])[0])
        if early > MAX_EARLY:
            implausible.append(result)
        else:
            results.append(result)
    results = results or implausible
    # if errors are equal up to rounding, the first and simplest model wins
    best = min(results, key=lambda result: round(result.mean_error, 9))
    # the median ignores steps that no model explains, such as the first step of a run
    noise = max(MIN_NOISE, DEVIATION * float(np.median(np.abs(best.errors))))
    fits, equivalent = _compare_models(results, best, noise)
    if noise > MAX_NOISE:
        best = next(result for result in results if result is best or result in equivalent)
        fits, equivalent = _compare_models(results, best, noise)
    names = [model_name(result.links) for result in equivalent]
    return dataclasses.replace(best, fits=fits, equivalent_models=names)


def _compare_models(
    results: Sequence[Replay], best: Replay, noise: float
) -> tuple[Mapping[str, float], list[Replay]]:
    """Return {link model: mean error}, and the other replays that are as likely as the best."""
    measured, best_row = best.pipelines.spans, results.index(best)
    predicted = measured * (1 + np.stack([result.errors for result in results]))
    squares = (np.log(measured / predicted) ** 2).sum(axis=1)
    is_same = np.abs(predicted / predicted[best_row] - 1).max(axis=1, initial=0.0) < EQUAL
    is_equivalent = is_same | ((squares - squares[best_row]) / noise**2 < MIN_CHI_SQUARE)
    order = [best_row, *(k for k in np.argsort(squares, kind="stable").tolist() if k != best_row)]
    fits = {
        model_name(results[k].links): float(np.abs(predicted[k] / measured - 1).mean())
        for k in order
    }
    return fits, [results[k] for k in order[1:] if is_equivalent[k]]


def model_name(links: Links) -> str:
    """Return the name of a link model, with queues and posting of rendezvous."""
    if not links.is_rendezvous:
        return links.model
    posting = [f"posting {links.posting}"] if links.posting != Links().posting else []
    return " ".join([links.model, links.queues, *posting])


def _best_times(pipelines: Pipelines, runs: Sequence[TableRuns]) -> tuple[LinkTimes, float]:
    """Return (links) message times [s] with the least error, and a share of early messages."""
    # An early message is taken before it can be sent. The share is the largest of all links.
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
    """Return replayed span / recorded span - 1; NaN for pipelines that are not in `runs`."""
    errors = np.full((len(times), len(pipelines.pipelines)), np.nan)
    for run in runs:
        _, spans = run.replay(times)
        errors[:, run.members] = spans / pipelines.spans[run.members] - 1
    return errors


# Late launches: ops that start long after their inputs in most steps.

MIN_STALL = 0.01  # delay of a start that counts as a stall, over the median pipeline
MAX_DIFFERENCE = 0.05  # relative difference of stalls on several workers by one pause
MAX_PLACES = 0.05  # share of the ops of a step; if more ops stall, the link model is wrong


def replay_late_launches(pipelines: Pipelines, link: str | Links | None) -> Replay:
    """Replay pipelines, with delays of ops that start late in most steps if that fits better."""
    first = replay(pipelines, link=link)
    late = find_late_launches(first)
    second = first if late is first.pipelines else replay(late, link=link)
    return second if second.mean_error < first.mean_error else first


def find_late_launches(replayed: Replay) -> Pipelines:
    """Return the pipelines with the delay of each op that starts late in most steps."""
    pipelines, delay, late = replayed.pipelines, replayed.stalls, np.zeros(len(replayed.stalls))
    trace, num_steps = pipelines.trace, len({run.step for run in pipelines.pipelines})
    stalled = np.flatnonzero(delay > MIN_STALL * float(np.median(pipelines.spans)))
    max_places = max(2.0, MAX_PLACES * len(pipelines.pipelines[0].slices) * len(trace.replicas))
    if 0 < len(stalled) <= max_places * num_steps:
        for rows in group_ops(trace, stalled[~_has_cause(pipelines, stalled, delay)]):
            if 2 * len(rows) > num_steps:
                late[rows] = delay[rows] + pipelines.gaps[rows]
    return dataclasses.replace(pipelines, late_launches=late) if late.any() else pipelines


def group_ops(trace: Trace, slices: Int[NumpyArray, " n"]) -> list[Int[NumpyArray, " steps"]]:
    """Group the slices of each op, one slice per step."""
    fields = (trace.replica, trace.worker, trace.stage, trace.phase, trace.microbatch)
    ops, group = np.unique([field[slices] for field in fields], axis=1, return_inverse=True)
    return [slices[group.ravel() == k] for k in range(ops.shape[1])]


def _has_cause(
    pipelines: Pipelines, slices: Int[NumpyArray, " n"], delay: Float[NumpyArray, " slices"]
) -> Bool[NumpyArray, " n"]:
    """Return (n) whether the trace explains the delay of an op."""
    # A slice that is no op may run during the delay. Or the whole job paused: then another worker
    # stalls for an equal time at about the same time in the step. `slices` are the delayed ops, and
    # `delay` (slices of the trace) are delays [s].
    trace = pipelines.trace
    ops = np.concatenate([run.slices for run in pipelines.pipelines])
    begin, end, seconds = trace.start[slices] - delay[slices], trace.start[slices], delay[slices]
    rank = trace.replica * trace.workers + trace.worker
    is_alike = np.abs(seconds[:, None] - seconds) < MAX_DIFFERENCE * seconds
    # if a worker computes when the job pauses, it stalls at the end of its op
    longest_op = float((trace.end[ops] - trace.start[ops]).max())
    is_alike &= np.abs(begin[:, None] - begin) <= longest_op
    is_alike &= rank[slices][:, None] != rank[slices]
    is_alike &= trace.step[slices][:, None] == trace.step[slices]
    result = is_alike.any(axis=1)
    for k in np.flatnonzero(~trace.has_phase((*OPS, *MESSAGES))).tolist():
        overlaps = (trace.start[k] < end) & (trace.end[k] > begin) & (rank[k] == rank[slices])
        result |= overlaps & (trace.step[k] == trace.step[slices])
    return result
