"""What messages took: what ops that waited for them say.

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

    def some(self, most: int) -> "TableRuns":
        """So many of them that they have so many nodes at most, one at least, spread evenly."""
        apart = -(-self.members.size * len(self.graph.preds) // most)
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
    number = np.array([one.table for one in pipelines.pipelines])
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
        beside = preds[self.taker]
        self.beside = np.where(beside == self.message[:, None], SOURCE, beside)
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
        """When ops ended, and messages that take so long or were taken before (nodes, runs) [s]."""
        end, graph = self.end.copy(), self.graph
        for level in self.levels:
            ready = end[graph.preds[level]].max(axis=1)
            end[level] = np.minimum(ready + times[graph.link[level], None], self.latest[level])
        return end

    def evidence(self, end: Ends) -> TakenMessages:
        """What ops say of messages, if what these waited for had ended so [s]."""
        preds, taken = self.graph.preds, self.start[self.taker]
        ready = end[preds[self.message]].max(axis=1)
        free = end[self.beside].max(axis=1)
        is_first = (self.beside == SOURCE).all(axis=1, keepdims=True)
        strength = np.select(
            [np.broadcast_to(is_first, ready.shape), ready > free, taken - free > self.idle],
            [FIRST, WAITED, IDLE],
            THERE,
        )
        seconds = taken - ready
        seconds[np.abs(seconds) < self.rounding] = 0.0
        return TakenMessages(self.graph.link[self.message], seconds, strength)


def simple_evidence(pipelines: Pipelines) -> list[TakenMessages]:
    """What ops say of messages, as if none waited for another."""
    return [one.evidence(one.end) for one in map(Messages, table_runs(pipelines, Links()))]


def ends_of(link: int, boundaries: int) -> tuple[int, int]:
    """The stages that a link leads from and to."""
    direction, boundary = divmod(link, boundaries)
    return boundary + direction, boundary + 1 - direction


def name_of(link: int, boundaries: int) -> str:
    """What a link is called."""
    return "stage {} to {}".format(*ends_of(link, boundaries))


class LinkEstimate(NamedTuple):
    """Time of a message of each link."""

    times: LinkTimes  # [s]; without evidence the usual time, if it can be as long
    is_told: Bool[NumpyArray, " links"]  # whether anything waited for one of its messages
    most: LinkTimes  # (links) a message took no longer [s]; infinite where none was sent
    # share of messages that were taken before they could be sent
    early: Float[NumpyArray, " links"]


def by_link(evidence: Sequence[TakenMessages], links: int) -> Iterator[tuple[Seconds, Strength]]:
    """What is said of the messages of every link, of all tables."""
    for link in range(links):
        own = [slice(*np.searchsorted(one.link, (link, link + 1))) for one in evidence]
        both = [*zip(evidence, own, strict=True)]
        yield (
            np.concatenate([one.seconds[rows].ravel() for one, rows in both]),
            np.concatenate([one.strength[rows].ravel() for one, rows in both]),
        )


def telling(seconds: Seconds, strength: Strength) -> Seconds:
    """Select the times that determine a link best [s]; none if nothing does."""
    # Of receivers that were only idle at the end, that of the quickest message: all others say that
    # it took no longer.
    for most in (WAITED, FIRST):
        if (strength == most).any():
            return seconds[strength == most]
    quickest = np.argsort(seconds, kind="stable")[:1]
    return seconds[quickest][strength[quickest] == IDLE]


def estimate(evidence: Sequence[TakenMessages], links: int, average: Average) -> LinkEstimate:
    """What links take, by the average of what tells it."""
    each = [*by_link(evidence, links)]
    waited = np.concatenate([[], *(seconds[strength == WAITED] for seconds, strength in each)])
    usual = average(waited) if len(waited) else 0.0
    told = [telling(*one) for one in each]
    most = np.array([seconds.min(initial=np.inf) for seconds, _ in each])
    times = [
        average(own) if len(own) else min(usual, at) for own, at in zip(told, most, strict=True)
    ]
    is_told = np.array([len(own) > 0 for own in told], bool)
    early = np.array([(seconds < 0).mean() if len(seconds) else 0.0 for seconds, _ in each])
    return LinkEstimate(np.maximum(times, 0.0), is_told, np.maximum(most, 0.0), early)


def link_times(messages: Sequence[Messages], links: int) -> Iterator[LinkTimes]:
    """Times of a message by link [s]: such as explain when all were taken, and simpler ones."""
    # The simpler ones are as if none waited for another. The median is of messages that differ; the
    # lower quartile where many stood behind others that this link model does not know of.
    alone = [one.evidence(one.end) for one in messages]
    for average in (median, _lower_quartile):
        times = estimate(alone, links, average).times
        yield _settled(messages, times, average)
        yield times


def _settled(messages: Sequence[Messages], times: LinkTimes, average: Average) -> LinkTimes:
    """Ends of messages from their times, and times from ends, by turns."""
    for _ in range(ROUNDS):
        before = times
        evidence = [one.evidence(one.ended(before)) for one in messages]
        times = estimate(evidence, len(before), average).times
        if np.allclose(times, before, rtol=1e-9, atol=0.0):
            break
    return times


def median(seconds: Seconds) -> float:
    """The middle one."""
    return float(np.median(seconds))


def _lower_quartile(seconds: Seconds) -> float:
    return float(np.quantile(seconds, 0.25, method="lower"))
