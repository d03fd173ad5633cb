"""Estimation of message times from the starts of ops that waited for messages.

An op that waited for a message started when the message arrived. Message times follow from the ends
of messages, and ends follow from message times. So the estimate alternates between both until
nothing changes. A link here is one direction over one stage boundary, with the number
direction * boundaries + boundary.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.longest_path import finish_times
from pipejax.base.medians import medians_of_others
from pipejax.engine.lowering.program import SOURCE
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.traces.record import NONE
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
        """Return (nodes, runs) the ends of ops and messages [s] at these link times."""
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
        strength = np.select(
            [np.broadcast_to(is_first, ready.shape), ready > free, is_idle],
            [FIRST, WAITED, IDLE],
            ARRIVED,
        )
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
