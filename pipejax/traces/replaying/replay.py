"""Replay: recorded op times in recorded order, run under a link model, and its errors.

An op that waited for a message started when the message arrived. Message times follow from the ends
of messages, and ends follow from message times. So the estimate alternates between both until
nothing changes. A link here is one direction over one stage boundary, with the number
direction * boundaries + boundary.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.base.longest_path import finish_times
from pipejax.base.medians import DEVIATION, medians_of_others
from pipejax.engine.lowering.program import SOURCE
from pipejax.schedules.table.links import LINKS, MEETING, POSTINGS, QUEUES, Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.traces.record import MESSAGES, NONE, OPS, Trace
from pipejax.traces.replaying.pipelines import PipelineOps, Pipelines
from pipejax.traces.replaying.step_graph import StepGraph, step_graph


@dataclasses.dataclass(frozen=True, eq=False)
class TableRuns:
    """Pipelines that ran the same table, with its graph under a link model; a run is a pipeline."""

    graph: StepGraph  # graph of the table
    members: Int[NumpyArray, " runs"]  # indices of the pipelines in the trace
    ops: Int[NumpyArray, " ops"]  # nodes that are ops
    slices: Int[NumpyArray, "runs ops"]  # slices of these ops in the trace
    start: Float[NumpyArray, "runs ops"]  # recorded start minus the launch delay of the op [s]
    end: Float[NumpyArray, "runs ops"]  # recorded end [s]
    scale: Float[NumpyArray, "runs links"]  # factors on message times

    def sample(self, max_nodes: int) -> "TableRuns":
        """Select evenly spread runs with at most `max_nodes` nodes in total, at least one run."""
        stride = -(-self.members.size * len(self.graph.preds) // max_nodes)
        names = ("members", "slices", "start", "end", "scale")
        return dataclasses.replace(self, **{name: getattr(self, name)[::stride] for name in names})

    def replay(
        self, link_times: Float[NumpyArray, "candidates links"]
    ) -> tuple[Float[NumpyArray, "candidates runs ops"], Float[NumpyArray, "candidates runs"]]:
        """Replay the runs with message times of links [s]; return starts of ops, and spans."""
        graph, messages = self.graph, np.flatnonzero(self.graph.link != NONE)
        duration = np.zeros((len(link_times), len(self.members), len(graph.preds)))
        duration[..., self.ops] = self.end - self.start
        scaled_times = link_times[:, None] * self.scale
        duration[..., messages] = scaled_times[..., graph.link[messages]]
        finish = graph.finish(duration.reshape(-1, len(graph.preds))).reshape(duration.shape)
        finish = finish[..., self.ops]
        start = finish - duration[..., self.ops]
        first_start = start.min(axis=2)
        return start - first_start[..., None], finish.max(axis=2) - first_start


def table_runs(pipelines: Pipelines, links: Links) -> Iterator[TableRuns]:
    """Yield the runs of each table; raise ValueError if a table deadlocks under the links."""
    table_number = np.array([pipeline.table for pipeline in pipelines.pipelines])
    for number, table in enumerate(pipelines.tables):
        graph = step_graph([table], links)
        members = np.flatnonzero(table_number == number)
        ops = np.flatnonzero(graph.op != NONE)
        slices = np.stack([pipelines.pipelines[k].slices for k in members])[:, graph.op[ops]]
        start = pipelines.trace.start[slices] - pipelines.gaps[slices]
        end, shape = pipelines.trace.end[slices], (len(table_number), 2 * (table.num_stages - 1))
        scale = np.broadcast_to(pipelines.link_scales, shape)[members]
        yield TableRuns(graph, members, ops, slices, start, end, scale)


LinkTimes = Float[NumpyArray, " links"]
Ends = Float[NumpyArray, "nodes runs"]
Seconds = Float[NumpyArray, " messages"]
Strength = Int[NumpyArray, " messages"]
Average = Callable[[Seconds], float]

# Strength of the evidence on a message time, for the op that takes the message. WAITED: the worker
# was free before the message could be sent, so the op waited for all of the message. FIRST: the op
# is the first of its worker. IDLE: the worker was idle before the op, so the time is an upper
# bound. ARRIVED: the worker was busy, so the message may have arrived at any time before.
WAITED, FIRST, IDLE, ARRIVED = 3, 2, 1, 0
USUAL_DELAY_QUANTILE = 0.99  # of delays of ops without a message; larger delays are idle time
RELATIVE_ROUNDING = 1e-9  # rounding of clocks over the length of a pipeline
# a replica's messages are slow if they exceed those of others by this, in median ops and in errors
MIN_EXCESS, MIN_Z = 0.05, 5.0
MAX_ROUNDS = 20  # largest number of alternations; most cases converge in three


class MessageEvidence(NamedTuple):
    """Evidence on message times, with one entry for each message in each run."""

    link: Int[NumpyArray, " messages"]  # number of the link, ascending
    # start of the op minus the earliest possible send [s], divided by the scale of the link: an
    # upper bound on the message time; below 0 under an impossible link model
    seconds: Float[NumpyArray, "messages runs"]
    strength: Int[NumpyArray, "messages runs"]  # WAITED, FIRST, IDLE or ARRIVED


class Messages:
    """Messages in the runs of one table, with the recorded times of the ops around them."""

    # Attributes; times are (nodes, runs) after the first start [s]:
    #   graph: graph of the table.
    #   start: recorded starts of ops.
    #   end: recorded ends of ops; -inf of messages.
    #   message: (messages) node of every message, by link.
    #   consumer: (messages) node of the op that takes the message.
    #   other_preds: (messages, max_preds) other predecessors of this op, padded by the source.
    #   latest: upper bound on the end of each message: the first start of a consumer.
    #   levels: nodes of messages by depth, the number of messages in a row that they wait for.
    #   scale: (links, runs) factors on message times.
    #   rounding: (runs) rounding of clocks.
    #   max_usual_delay: (runs) delay of an op after its inputs beyond which the worker is idle.

    def __init__(self, runs: TableRuns) -> None:
        """Collect the recorded times (nodes, runs) between which messages were sent and taken."""
        self.graph, preds = runs.graph, runs.graph.preds
        is_message, shape = self.graph.link != NONE, (len(preds), len(runs.members))
        begin = runs.start.min(axis=1)
        self.start, self.end = np.zeros(shape), np.full(shape, -np.inf)
        self.start[runs.ops] = (runs.start - begin[:, None]).T
        self.end[runs.ops] = (runs.end - begin[:, None]).T
        self.end[SOURCE] = 0.0
        # one entry for each pair of a message and an op that takes it
        row, column = np.nonzero(is_message[preds[runs.ops]])
        consumer, message = runs.ops[row], preds[runs.ops][row, column]
        order = np.argsort(self.graph.link[message], kind="stable")
        self.consumer, self.message = consumer[order], message[order]
        consumer_preds = preds[self.consumer]
        is_self = consumer_preds == self.message[:, None]
        self.other_preds = np.where(is_self, SOURCE, consumer_preds)
        self.scale = runs.scale.T
        self.latest = np.full(shape, np.inf)
        np.minimum.at(self.latest, self.message, self.start[self.consumer])
        # A message that waits for two messages in a row has depth 3. Messages of one depth wait
        # only for messages of lower depths, so they are solved together.
        nodes = np.flatnonzero(is_message)
        depth = finish_times(np.where(is_message[preds], preds, SOURCE), is_message.astype(float))
        nodes = nodes[np.argsort(depth[nodes], kind="stable")]
        self.levels = np.split(nodes, np.flatnonzero(np.diff(depth[nodes])) + 1)
        # ops that take no message show the usual delay after the last predecessor
        no_message = runs.ops[~is_message[preds[runs.ops]].any(axis=1)]
        delays = (self.start[no_message] - self.end[preds[no_message]].max(axis=1)).ravel()
        usual_delay = np.quantile(delays, USUAL_DELAY_QUANTILE) if len(delays) else 0.0
        self.rounding = RELATIVE_ROUNDING * self.end.max(axis=0)
        self.max_usual_delay = self.rounding + usual_delay

    def ends(self, times: LinkTimes) -> Ends:
        """Return the ends (nodes, runs) of ops and messages [s] at these link times."""
        # A message ends at the latest when its first consumer starts.
        end, graph = self.end.copy(), self.graph
        for level in self.levels:
            ready = end[graph.preds[level]].max(axis=1)
            link = graph.link[level]
            seconds = times[link, None] * self.scale[link]
            end[level] = np.minimum(ready + seconds, self.latest[level])
        return end

    def evidence(self, end: Ends) -> MessageEvidence:
        """Return observed message times [s] and their strength, given the ends of all nodes [s]."""
        # A message takes at most the time from its earliest possible send (`ready`) to the start of
        # its op. If the worker was `free` earlier, the op waited for the message alone, so the
        # message took exactly this time.
        preds, start = self.graph.preds, self.start[self.consumer]
        ready = end[preds[self.message]].max(axis=1)
        free = end[self.other_preds].max(axis=1)
        is_first = (self.other_preds == SOURCE).all(axis=1, keepdims=True)
        is_idle = start - free > self.max_usual_delay
        conditions = [np.broadcast_to(is_first, ready.shape), ready > free, is_idle]
        strength = np.select(conditions, [FIRST, WAITED, IDLE], ARRIVED)
        seconds = (start - ready) / self.scale[self.graph.link[self.message]]
        seconds[np.abs(seconds) < self.rounding] = 0.0
        return MessageEvidence(self.graph.link[self.message], seconds, strength)


def simple_evidence(pipelines: Pipelines) -> list[MessageEvidence]:
    """Return evidence on message times for each table, as if no message waited for another."""
    runs = map(Messages, table_runs(pipelines, Links()))
    return [messages.evidence(messages.end) for messages in runs]


def scale_links(pipelines: Pipelines) -> Pipelines:
    """Return the pipelines with factors on message times of links that are slow in a replica."""
    # For each link, the median message time of a replica is compared with those of other replicas.
    # Only messages for which an op waited count.
    replica = np.array([pipeline.replica for pipeline in pipelines.pipelines])
    replicas, num_links = np.unique(replica), 2 * (pipelines.table.num_stages - 1)
    if len(replicas) < 2 or len(pipelines.tables) > 1 or np.ndim(pipelines.link_scales):
        return pipelines
    (evidence,), scales = simple_evidence(pipelines), np.full((len(replicas), num_links), np.nan)
    ops = PipelineOps.select(pipelines.trace, pipelines.pipelines)
    min_excess = MIN_EXCESS * median(ops.seconds)
    for link in range(num_links):
        rows, medians, errors = evidence.link == link, [], []
        for number in replicas:
            seconds, strength = (field[rows][:, replica == number] for field in evidence[1:])
            seconds = seconds[strength >= FIRST]
            medians.append(median(seconds) if len(seconds) else np.nan)
            spread = median(np.abs(seconds - medians[-1])) if len(seconds) else np.nan
            errors.append(spread / np.sqrt(max(len(seconds), 1)))
        observed = np.flatnonzero(np.isfinite(medians))
        if len(observed) > 1:
            times = np.maximum(np.array(medians)[observed], MIN_EXCESS * min_excess)
            excess = times - medians_of_others(times)
            is_slow = excess > np.maximum(min_excess, MIN_Z * np.array(errors)[observed])
            scales[observed, link] = np.where(is_slow, times / (times - excess), 1.0)
    # without evidence, a link is as slow as the others with the same sender and receiver
    pairs = link_workers(pipelines.table)
    for link, pair in enumerate(pairs):
        slowest = np.fmax.reduce(scales[:, [other == pair for other in pairs]], axis=1, initial=1.0)
        scales[:, link] = np.where(np.isnan(scales[:, link]), slowest, scales[:, link])
    return dataclasses.replace(pipelines, link_scales=scales[np.searchsorted(replicas, replica)])


def link_ends(link: int, boundaries: int) -> tuple[int, int]:
    """Return the source and target stage of a link."""
    direction, boundary = divmod(link, boundaries)
    return boundary + direction, boundary + 1 - direction


LinkWorkers = Sequence[tuple[int, int]]  # (links) workers that send and receive on a link


def link_workers(table: ScheduleTable) -> LinkWorkers:
    """Return the workers that send and receive on each link."""
    placement, boundaries = table.placement[0].tolist(), table.num_stages - 1
    ends = (link_ends(link, boundaries) for link in range(2 * boundaries))
    return [(placement[source], placement[target]) for source, target in ends]


def link_name(link: int, boundaries: int) -> str:
    """Return the name of a link by its two stages."""
    return "stage {} to {}".format(*link_ends(link, boundaries))


class LinkEstimate(NamedTuple):
    """Estimated time of a message on each link, with its bounds and evidence."""

    times: LinkTimes  # [s]; without evidence, the time of other links, at most the upper bound
    is_observed: Bool[NumpyArray, " links"]  # whether an op waited for a message of the link
    upper: LinkTimes  # upper bound [s]; infinite without messages
    early: Float[NumpyArray, " links"]  # share of messages taken before they could be sent


def by_link(evidence: Sequence[MessageEvidence], links: int) -> Iterator[tuple[Seconds, Strength]]:
    """Yield (message times [s], strengths of evidence) of every link, over all tables."""
    for link in range(links):
        seconds, strength = [], []
        for table in evidence:  # messages are sorted by link
            rows = slice(*np.searchsorted(table.link, (link, link + 1)))
            seconds.append(table.seconds[rows].ravel())
            strength.append(table.strength[rows].ravel())
        yield np.concatenate(seconds), np.concatenate(strength)


def best_evidence(seconds: Seconds, strength: Strength) -> NumpyArray:
    """Return the times [s] of those messages of a link with the strongest evidence."""
    for level in (WAITED, FIRST):
        if (strength == level).any():
            return seconds[strength == level]
    # All others are upper bounds. The smallest counts if it is IDLE; ARRIVED is no evidence.
    quickest = np.argsort(seconds, kind="stable")[:1]
    return seconds[quickest][strength[quickest] == IDLE]


def estimate(
    evidence: Sequence[MessageEvidence], workers: LinkWorkers, average: Average
) -> LinkEstimate:
    """Estimate the message time of each link as an average of its strongest evidence."""
    # A link without evidence gets the average of messages between the same workers, or else of all
    # messages, and at most its upper bound. `workers` are the sender and receiver of each link.
    link_evidence = [*by_link(evidence, len(workers))]
    observed = [seconds[strength == WAITED] for seconds, strength in link_evidence]
    all_observed = np.concatenate([[], *observed])
    samples = [best_evidence(*link) for link in link_evidence]
    upper = np.array([seconds.min(initial=np.inf) for seconds, _ in link_evidence])
    times = []
    for pair, sample, bound in zip(workers, samples, upper.tolist(), strict=True):
        same_pair = [s for s, other in zip(observed, workers, strict=True) if other == pair]
        usual = next(filter(len, (np.concatenate([[], *same_pair]), all_observed)), np.zeros(1))
        times.append(average(sample) if len(sample) else min(average(usual), bound))
    is_observed = np.array([len(sample) > 0 for sample in samples], bool)
    early = [(seconds < 0).mean() if len(seconds) else 0.0 for seconds, _ in link_evidence]
    upper = np.maximum(upper, 0.0)
    return LinkEstimate(np.maximum(times, 0.0), is_observed, upper, np.array(early))


def link_times(messages: Sequence[Messages], workers: LinkWorkers) -> Iterator[LinkTimes]:
    """Yield four candidates for the message times of all links [s]."""
    # Two kinds of times, consistent with the link model or as if no message waited for another, are
    # combined with two averages of observed times. The median suits messages that differ. The lower
    # quartile suits messages that waited in queues that the link model lacks.
    evidence = [table.evidence(table.end) for table in messages]
    for average in (median, partial(np.quantile, q=0.25, method="lower")):
        times = estimate(evidence, workers, average).times
        yield _consistent_times(messages, times, workers, average)
        yield times


def _consistent_times(
    messages: Sequence[Messages], times: LinkTimes, workers: LinkWorkers, average: Average
) -> LinkTimes:
    """Alternate between message ends and link times until both are consistent [s]."""
    for _ in range(MAX_ROUNDS):
        previous = times
        evidence = [table.evidence(table.ends(previous)) for table in messages]
        times = estimate(evidence, workers, average).times
        if np.allclose(times, previous, rtol=1e-9, atol=0.0):
            break
    return times


def median(seconds: Seconds) -> float:
    """Return the median of some times."""
    return float(np.median(seconds))


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


LONG_MESSAGE = 0.25  # of the shortest op: schedules with up to four stages per worker send as often
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
        """Return recorded start - replayed start of each op's slice [s]; 0 for other slices."""
        result = np.zeros(len(self.pipelines.trace))
        for runs in table_runs(self.pipelines, self.links):
            start, _ = runs.replay(self.link_times[None])
            begin = runs.start.min(axis=1, keepdims=True)
            result[runs.slices] = runs.start - begin - start[0]
        return result

    @functools.cached_property
    def stalls(self) -> Float[NumpyArray, " slices"]:
        """Return how long after its inputs each op's slice starts [s]; 0 for other slices."""
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
        times, early_share = _best_times(pipelines, runs)
        (errors,) = _span_errors(pipelines, runs, times[None])  # of one candidate
        result = Replay(pipelines, links, times, errors)
        (implausible if early_share > MAX_EARLY else results).append(result)
    results = results or implausible
    # if errors are equal up to rounding, the first and simplest model wins
    best = min(results, key=lambda result: round(result.mean_error, 9))
    # the median ignores steps that no model explains, such as the first step of a run
    noise = max(MIN_NOISE, DEVIATION * float(np.median(np.abs(best.errors))))
    fits, equivalent = _compare_models(results, best, noise)
    if noise > MAX_NOISE:  # the first equivalent model is the simplest: compare with it instead
        best = next(result for result in results if result is best or result in equivalent)
        fits, equivalent = _compare_models(results, best, noise)
    queued = [result for result in equivalent if result.links.model == "queued"]
    if best.links.model == "delay" and queued and _has_long_messages(best):
        (best,) = queued  # no remedy is faster with it than with `delay`
        fits, equivalent = _compare_models(results, best, noise)
    names = [model_name(result.links) for result in equivalent]
    return dataclasses.replace(best, fits=fits, equivalent_models=names)


def _has_long_messages(replayed: Replay) -> bool:
    """Return whether other schedules may send on a link before its last message has arrived."""
    ops = PipelineOps.select(replayed.pipelines.trace, replayed.pipelines.pipelines)
    shortest_op = min(median(kind.seconds) for _, kind in ops.by_kind())
    return bool(replayed.link_times.max(initial=0.0) > LONG_MESSAGE * shortest_op)


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
    mean_error = np.abs(predicted / measured - 1).mean(axis=1).tolist()  # of each replay
    fits = {model_name(results[k].links): mean_error[k] for k in order}
    return fits, [results[k] for k in order[1:] if is_equivalent[k]]


def model_name(links: Links) -> str:
    """Return the name of a link model, with queues and posting of rendezvous."""
    if not links.is_rendezvous:
        return links.model
    posting = [f"posting {links.posting}"] if links.posting != Links().posting else []
    return " ".join([links.model, links.queues, *posting])


def _best_times(pipelines: Pipelines, runs: Sequence[TableRuns]) -> tuple[LinkTimes, float]:
    """Return the message times of links [s] with the least error, and a share of early messages."""
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
    """Return for each op whether the trace explains its delay."""
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
