"""Replay: recorded times in recorded order through the recurrence, and what it does not explain."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import short_repr_of
from pipejax.engine.lowering.lower import lower
from pipejax.schedules.table.links import LINKS, MEETING, POSTINGS, QUEUES, Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.traces.record import NONE
from pipejax.traces.replaying.pipelines import Pipeline, Pipelines
from pipejax.traces.replaying.step_graph import StepGraph, op_of_nodes, step_graph

LinkTimes = Float[NumpyArray, " links"]


@short_repr_of("links message_time mean_error worst_error")
@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """Pipelines of a trace, run again.

    Attributes:
      pipelines: what ran.
      links: link model under which they run.
      link_times: (2 (stages - 1)) time of a message by direction and stage boundary [s]: median
        or lower quartile of those that were waited for, by what explains the pipelines better.
      errors: (pipelines) replayed over recorded from first start to last end, minus 1.
      fits: mean absolute error of every link model that was tried, by what it is called.
    """

    pipelines: Pipelines
    links: Links
    link_times: LinkTimes
    errors: Float[NumpyArray, " pipelines"]
    fits: Mapping[str, float]

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
        steps = np.array([one.step for one in self.pipelines.pipelines])
        errors = np.abs(self.errors)
        return {int(step): float(errors[steps == step].mean()) for step in np.unique(steps)}

    @functools.cached_property
    def residuals(self) -> Float[NumpyArray, " slices"]:
        """How much later than in the replay every op started (slices) [s]; 0 of what is no op.

        Both are counted from the first start of the pipeline.
        """
        trace, found = self.pipelines.trace, np.zeros(len(self.pipelines.trace))
        for number, table in enumerate(self.pipelines.tables):
            members = [one for one in self.pipelines.pipelines if one.table == number]
            graph = step_graph([table], self.links)
            duration, slices = pipeline_durations(self.pipelines, members, graph, self.link_times)
            start = graph.finish(duration) - duration
            mine = np.flatnonzero(graph.op != NONE)
            own = trace.start[slices]
            own -= own.min(axis=1, keepdims=True)
            found[slices] = own - (start[:, mine] - start[:, mine].min(axis=1, keepdims=True))
        return found

    @functools.cached_property
    def stalls(self) -> Float[NumpyArray, " slices"]:
        """How long after all that it waits for every op started (slices) [s]; 0 of what is no op.

        What it waits for is taken as recorded: so nothing that came before is counted again.
        """
        trace, found = self.pipelines.trace, np.zeros(len(self.pipelines.trace))
        for number, table in enumerate(self.pipelines.tables):
            members = [one for one in self.pipelines.pipelines if one.table == number]
            graph = step_graph([table], self.links)
            duration, slices = pipeline_durations(self.pipelines, members, graph, self.link_times)
            begin = trace.start[slices].min(axis=1, keepdims=True)
            mine = np.flatnonzero(graph.op != NONE)
            recorded = np.full(duration.shape, np.nan)
            recorded[:, mine] = trace.end[slices] - begin
            ready = graph.ready(duration, recorded)[:, mine]
            found[slices] = np.maximum(trace.start[slices] - begin - ready, 0.0)
        return found


def pipeline_durations(
    pipelines: Pipelines, members: Sequence[Pipeline], graph: StepGraph, link_times: LinkTimes
) -> tuple[Float[NumpyArray, "runs nodes"], Int[NumpyArray, "runs ops"]]:
    """What every node of some pipelines took [s], and which slice each op node is of."""
    trace = pipelines.trace
    lasts = trace.end - trace.start
    mine = np.flatnonzero(graph.op != NONE)
    slices = np.stack([one.slices for one in members])[:, graph.op[mine]]
    duration = np.zeros((len(members), len(graph.preds)))
    duration[:, mine] = lasts[slices]
    sent = np.flatnonzero(graph.link != NONE)
    duration[:, sent] = link_times[graph.link[sent]]
    return duration, slices


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
    candidates = _candidates(pipelines.table) if link is None else [Links.of(link)]
    fits: dict[str, float] = {}
    found: list[Replay] = []
    for links, times in itertools.product(
        candidates, _message_times(waits_of(pipelines), pipelines)
    ):
        try:
            errors = _errors(pipelines, links, times)
        except ValueError:  # a deadlock under these links
            if link is not None:
                raise
            continue
        found.append(Replay(pipelines, links, times, errors, fits))
        name = _called(links)
        fits[name] = min(fits.get(name, np.inf), found[-1].mean_error)
    # the simplest comes first: another has to be better than rounding
    return min(found, key=lambda one: round(one.mean_error, 9))


def _candidates(table: ScheduleTable) -> list[Links]:
    """Link models, the simplest first."""
    if table.num_workers == 1:
        return [Links()]
    alone = [Links(model) for model in LINKS if model not in MEETING]
    meeting = itertools.product(POSTINGS, MEETING, QUEUES)
    return [*alone, *(Links(model, q, posting=posting) for posting, model, q in meeting)]


def _called(links: Links) -> str:
    """What a candidate is called."""
    if not links.meets:
        return links.model
    posted = [f"posting {links.posting}"] if links.posting != Links().posting else []
    return " ".join([links.model, links.queues, *posted])


def _errors(
    pipelines: Pipelines, links: Links, link_times: LinkTimes
) -> Float[NumpyArray, " pipelines"]:
    """Replayed over recorded span of every pipeline, minus 1."""
    spans, found = pipelines.spans, np.zeros(len(pipelines.pipelines))
    number = np.array([one.table for one in pipelines.pipelines])
    for table in range(len(pipelines.tables)):
        mine = np.flatnonzero(number == table)
        graph = step_graph([pipelines.tables[table]], links)
        members = [pipelines.pipelines[k] for k in mine]
        duration, _ = pipeline_durations(pipelines, members, graph, link_times)
        ops = np.flatnonzero(graph.op != NONE)
        finish = graph.finish(duration)[:, ops]
        first = (finish - duration[:, ops]).min(axis=1)
        found[mine] = (finish.max(axis=1) - first) / spans[mine] - 1
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class MessageWaits:
    """Messages of all pipelines, and whether their receivers waited for them.

    Attributes:
      link: (messages) direction * boundaries + boundary.
      seconds: (messages) from the end of the op that makes it to the start of that which uses it.
      waited: (messages) whether the receiver was idle when the message was made.
      first: (messages) whether it is for the first op of its receiver, which waits for it, or has
        not begun the step.
    """

    link: Int[NumpyArray, " messages"]
    seconds: Float[NumpyArray, " messages"]
    waited: Bool[NumpyArray, " messages"]
    first: Bool[NumpyArray, " messages"]

    def tell(self, link: int) -> Bool[NumpyArray, " messages"]:
        """Which messages tell what a link takes: those waited for; of none, those of first ops."""
        own = self.link == link
        waited = own & self.waited
        return waited if waited.any() else own & self.first


def waits_of(pipelines: Pipelines) -> MessageWaits:
    """All messages between workers, by what ran before and after them."""
    trace, parts = pipelines.trace, []
    for number, table in enumerate(pipelines.tables):
        slices = np.stack([one.slices for one in pipelines.pipelines if one.table == number])
        link, producer, consumer, before = _message_ops(table)
        if not len(link):
            continue
        made, used = trace.end[slices[:, producer]], trace.start[slices[:, consumer]]
        free = np.where(before == NONE, np.inf, trace.end[slices[:, before]])
        first = np.broadcast_to(before == NONE, made.shape)
        parts.append((np.broadcast_to(link, made.shape), used - made, made > free, first))
    if not parts:
        return MessageWaits(np.zeros(0, int), np.zeros(0), np.zeros(0, bool), np.zeros(0, bool))
    joined = (np.concatenate([x.ravel() for x in each]) for each in zip(*parts, strict=True))
    return MessageWaits(*joined)


def _message_ops(table: ScheduleTable) -> tuple[NumpyArray, NumpyArray, NumpyArray, NumpyArray]:
    """Link, producer, consumer and the op before the consumer on its worker, of every message."""
    program = lower(table, step_end=False)
    op = op_of_nodes(program, table)
    messages = program.messages
    producer, consumer = op[messages.producer], op[messages.consumer]
    forward = program.stage[messages.consumer] > program.stage[messages.producer]
    boundary = np.minimum(program.stage[messages.producer], program.stage[messages.consumer])
    link = np.where(forward, 0, table.num_stages - 1) + boundary
    before = np.full(len(op), NONE)
    for row in np.asarray(program.node_of_cell):
        own = op[row[row > 0]]
        before[row[row > 0][1:]] = own[:-1]
    return link, producer, consumer, before[messages.consumer]


def _message_times(waits: MessageWaits, pipelines: Pipelines) -> Iterator[LinkTimes]:
    """Times of a message by link [s]: of those that were waited for; of all links where none was.

    A message that came while its receiver was busy shows only that it was no later. The median is
    of messages that differ; the lower quartile where many stood behind others.
    """
    links = 2 * (pipelines.table.num_stages - 1)
    seconds = np.maximum(waits.seconds, 0.0)
    by_link = [seconds[waits.tell(link)] for link in range(links)]
    every = seconds[waits.waited]
    for of in (np.median, _lower_quartile):
        usual = float(of(every)) if len(every) else 0.0
        yield np.array([float(of(x)) if len(x) else usual for x in by_link])


def _lower_quartile(seconds: Float[NumpyArray, " messages"]) -> float:
    return float(np.quantile(seconds, 0.25, method="lower"))
