"""Message times, from the ops that waited for the messages.

Nobody recorded when a message was sent, or arrived. But it could be sent when all that it waits for
under a link model had ended, its producer and the messages before it, and it was there when an op
took it. Ops that waited for it say when it arrived. So what a link takes follows from when messages
end, and this from what links take: by turns, until nothing changes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.longest_path import finish_times
from pipejax.engine.lowering.program import SOURCE
from pipejax.schedules.table.links import Links
from pipejax.traces.record import NONE, Trace
from pipejax.traces.replaying.pipelines import Pipelines
from pipejax.traces.replaying.step_graph import StepGraph, step_graph


@dataclasses.dataclass(frozen=True, eq=False)
class TableRuns:
    """Pipelines that ran one table, under a link model."""

    trace: Trace  # what was recorded
    graph: StepGraph  # of the table
    members: Int[NumpyArray, " runs"]  # their positions among the pipelines of the trace
    ops: Int[NumpyArray, " ops"]  # nodes that are ops
    slices: Int[NumpyArray, "runs ops"]  # where these are in the trace

    def sample(self, max_nodes: int) -> "TableRuns":
        """Select runs, spread evenly, of at most so many nodes together; one at least."""
        apart = -(-self.members.size * len(self.graph.preds) // max_nodes)
        return dataclasses.replace(self, members=self.members[::apart], slices=self.slices[::apart])

    def replayed(
        self, link_times: Float[NumpyArray, "ways links"]
    ) -> tuple[Float[NumpyArray, "ways runs ops"], Float[NumpyArray, "ways runs"]]:
        """Starts of ops after the first one, and spans, at several times of messages [s]."""
        graph, sent = self.graph, np.flatnonzero(self.graph.link != NONE)
        duration = np.zeros((len(link_times), len(self.members), len(graph.preds)))
        duration[..., self.ops] = self.trace.end[self.slices] - self.trace.start[self.slices]
        duration[..., sent] = link_times[:, None, graph.link[sent]]
        finish = graph.finish(duration.reshape(-1, len(graph.preds))).reshape(duration.shape)
        finish = finish[..., self.ops]
        start = finish - duration[..., self.ops]
        first = start.min(axis=2)
        return start - first[..., None], finish.max(axis=2) - first


def table_runs(pipelines: Pipelines, links: Links) -> Iterator[TableRuns]:
    """All pipelines of a trace, table by table; ValueError where one deadlocks."""
    number = np.array([pipeline.table for pipeline in pipelines.pipelines])
    for table, cells in enumerate(pipelines.tables):
        graph = step_graph([cells], links)
        members = np.flatnonzero(number == table)
        ops = np.flatnonzero(graph.op != NONE)
        slices = np.stack([pipelines.pipelines[k].slices for k in members])[:, graph.op[ops]]
        yield TableRuns(pipelines.trace, graph, members, ops, slices)


LinkTimes = Float[NumpyArray, " links"]
Ends = Float[NumpyArray, "nodes runs"]
Seconds = Float[NumpyArray, " messages"]
Strength = Int[NumpyArray, " messages"]
Average = Callable[[Seconds], float]

# what an op says of a message that it took: it waited all the time; it is the first of its worker,
# which waits for it, or has not begun the step; it was idle at the end; only that it was there
WAITED, FIRST, IDLE, THERE = 3, 2, 1, 0
USUAL = 0.99  # of ops that wait for no message: what they start later than they could is usual
ROUNDING = 1e-9  # of a pipeline: clocks tell less from nothing
ROUNDS = 20  # of turns; most are settled after three


class TakenMessages(NamedTuple):
    """Evidence of the ops of some runs on the messages that they took."""

    link: Int[NumpyArray, " messages"]  # direction * boundaries + boundary, ascending
    # from when it could be sent to when it was taken [s]: it took that, or less;
    # below 0 under a link model that cannot be
    seconds: Float[NumpyArray, "messages runs"]
    strength: Int[NumpyArray, "messages runs"]  # what that says of it


class Messages:
    """Messages in runs of one table, held against the ops that made and took them."""

    def __init__(self, runs: TableRuns) -> None:
        self.graph, preds = runs.graph, runs.graph.preds
        is_message, shape = self.graph.link != NONE, (len(preds), len(runs.members))
        begin = runs.trace.start[runs.slices].min(axis=1)
        # (nodes, runs) of what was recorded; messages have ended long before until they are known
        self.start, self.end = np.zeros(shape), np.full(shape, -np.inf)
        self.start[runs.ops] = (runs.trace.start[runs.slices] - begin[:, None]).T
        self.end[runs.ops] = (runs.trace.end[runs.slices] - begin[:, None]).T
        self.end[SOURCE] = 0.0
        row, column = np.nonzero(is_message[preds[runs.ops]])
        taker, message = runs.ops[row], preds[runs.ops][row, column]
        order = np.argsort(self.graph.link[message], kind="stable")
        self.taker, self.message = taker[order], message[order]
        others = preds[self.taker]
        self.others = np.where(others == self.message[:, None], SOURCE, others)
        self.latest = np.full(shape, np.inf)
        np.minimum.at(self.latest, self.message, self.start[self.taker])
        # messages that wait for as many others, one behind the other, are known at once
        sent = np.flatnonzero(is_message)
        depth = finish_times(np.where(is_message[preds], preds, SOURCE), is_message.astype(float))
        sent = sent[np.argsort(depth[sent], kind="stable")]
        self.levels = np.split(sent, np.flatnonzero(np.diff(depth[sent])) + 1)
        alone = runs.ops[~is_message[preds[runs.ops]].any(axis=1)]
        later = (self.start[alone] - self.end[preds[alone]].max(axis=1)).ravel()
        self.rounding = ROUNDING * self.end.max(axis=0)
        self.idle = self.rounding + (np.quantile(later, USUAL) if len(later) else 0.0)

    def ended(self, times: LinkTimes) -> Ends:
        """Return ends (nodes, runs) [s] of ops and of messages, which take `times` at most."""
        end, graph = self.end.copy(), self.graph
        for level in self.levels:
            ready = end[graph.preds[level]].max(axis=1)
            end[level] = np.minimum(ready + times[graph.link[level], None], self.latest[level])
        return end

    def evidence(self, end: Ends) -> TakenMessages:
        """Return observed times of messages [s] and their strength, given when nodes ended."""
        preds, start = self.graph.preds, self.start[self.taker]
        ready = end[preds[self.message]].max(axis=1)
        free = end[self.others].max(axis=1)
        is_first = (self.others == SOURCE).all(axis=1, keepdims=True)
        strength = np.select(
            [np.broadcast_to(is_first, ready.shape), ready > free, start - free > self.idle],
            [FIRST, WAITED, IDLE],
            THERE,
        )
        seconds = start - ready
        seconds[np.abs(seconds) < self.rounding] = 0.0
        return TakenMessages(self.graph.link[self.message], seconds, strength)


def simple_evidence(pipelines: Pipelines) -> list[TakenMessages]:
    """Return the evidence on message times as if no message waited for another."""
    runs = map(Messages, table_runs(pipelines, Links()))
    return [messages.evidence(messages.end) for messages in runs]


def link_ends(link: int, boundaries: int) -> tuple[int, int]:
    """The stages that a link leads from and to."""
    direction, boundary = divmod(link, boundaries)
    return boundary + direction, boundary + 1 - direction


def link_name(link: int, boundaries: int) -> str:
    """Return the name of a link."""
    return "stage {} to {}".format(*link_ends(link, boundaries))


class LinkEstimate(NamedTuple):
    """Time of a message of each link."""

    times: LinkTimes  # [s]; without evidence the usual time, if it can be as long
    is_told: Bool[NumpyArray, " links"]  # whether anything waited for one of its messages
    upper: LinkTimes  # (links) a message took no longer [s]; infinite where none was sent
    # share of messages that were taken before they could be sent
    early: Float[NumpyArray, " links"]


def by_link(evidence: Sequence[TakenMessages], links: int) -> Iterator[tuple[Seconds, Strength]]:
    """Yield the evidence on the messages of every link, from all tables."""
    for link in range(links):
        rows_by_table = [slice(*np.searchsorted(part.link, (link, link + 1))) for part in evidence]
        both = [*zip(evidence, rows_by_table, strict=True)]
        yield (
            np.concatenate([part.seconds[rows].ravel() for part, rows in both]),
            np.concatenate([part.strength[rows].ravel() for part, rows in both]),
        )


def telling(seconds: Seconds, strength: Strength) -> Seconds:
    """Select the times that determine a link best [s]; none if nothing does."""
    # Of receivers that were only idle at the end, that of the quickest message: all others say that
    # it took no longer.
    for level in (WAITED, FIRST):
        if (strength == level).any():
            return seconds[strength == level]
    quickest = np.argsort(seconds, kind="stable")[:1]
    return seconds[quickest][strength[quickest] == IDLE]


def estimate(evidence: Sequence[TakenMessages], links: int, average: Average) -> LinkEstimate:
    """Estimate the message time of each link, by an average of its best evidence."""
    evidences = [*by_link(evidence, links)]
    waited = np.concatenate([[], *(seconds[strength == WAITED] for seconds, strength in evidences)])
    usual = average(waited) if len(waited) else 0.0
    telling_times = [telling(*link) for link in evidences]
    upper = np.array([seconds.min(initial=np.inf) for seconds, _ in evidences])
    times = [
        average(sample) if len(sample) else min(usual, at)
        for sample, at in zip(telling_times, upper, strict=True)
    ]
    is_told = np.array([len(sample) > 0 for sample in telling_times], bool)
    early = np.array([(seconds < 0).mean() if len(seconds) else 0.0 for seconds, _ in evidences])
    return LinkEstimate(np.maximum(times, 0.0), is_told, np.maximum(upper, 0.0), early)


def link_times(messages: Sequence[Messages], links: int) -> Iterator[LinkTimes]:
    """Times of a message by link [s]: such as explain when all were taken, and simpler ones."""
    # The simpler ones are as if none waited for another. The median is of messages that differ; the
    # lower quartile where many stood behind others that this link model does not know of.
    alone = [part.evidence(part.end) for part in messages]
    for average in (median, _lower_quartile):
        times = estimate(alone, links, average).times
        yield _settled(messages, times, average)
        yield times


def _settled(messages: Sequence[Messages], times: LinkTimes, average: Average) -> LinkTimes:
    """Ends of messages from their times, and times from ends, by turns."""
    for _ in range(ROUNDS):
        before = times
        evidence = [part.evidence(part.ended(before)) for part in messages]
        times = estimate(evidence, len(before), average).times
        if np.allclose(times, before, rtol=1e-9, atol=0.0):
            break
    return times


def median(seconds: Seconds) -> float:
    """The middle one."""
    return float(np.median(seconds))


def _lower_quartile(seconds: Seconds) -> float:
    return float(np.quantile(seconds, 0.25, method="lower"))
