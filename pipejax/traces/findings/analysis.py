"""Everything that is said of a trace, in one record."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, is_number, wrong
from pipejax.base.display import ResultList, short_repr, with_short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.schedules.table.links import Links
from pipejax.search.remedies.explain import Explanation, explain_setup
from pipejax.search.remedies.setup import MeasuredTimes, Schedule, Setup, begin
from pipejax.traces.clocks import Offset, aligned
from pipejax.traces.findings.attribution import Attribution, attribute
from pipejax.traces.findings.new_deal import (
    MOST_WORK,
    OF_RANK,
    NewDeal,
    deal_anew,
    round_work,
    share_of_replica,
)
from pipejax.traces.findings.op_times import OpTimes, costs_of, op_times
from pipejax.traces.findings.suspects import Suspect, is_outlier, suspects
from pipejax.traces.record import LeftOut, Trace
from pipejax.traces.replaying.pipelines import PipelineOps, Pipelines, pipelines_of, registered
from pipejax.traces.replaying.replay import Replay, replay


def begin_setup(replayed: Replay, stage_layers: Sequence[int] | None = None) -> Setup:
    """Set up the table that ran most, at the mean times of its ops and messages, over its links."""
    table, match = replayed.pipelines.table, registered(replayed.pipelines.table)
    schedule = None if match is None else Schedule(*match)
    if schedule is not None:
        table = dataclasses.replace(table, name=schedule.name)
    source = MeasuredTimes(costs_of(replayed), table.num_stages)
    return begin(table, replayed.links, source, schedule, stage_layers)


def advise(
    replayed: Replay,
    *,
    stage_layers: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    search: bool = False,
    on_progress: OnProgress | None = None,
) -> Explanation:
    """Say what would make the pipelines of a trace shorter.

    An op takes its mean over steps, replicas and microbatches here; what differs from microbatch to
    microbatch is for `pj.search.deal`. What the workers hold is not in a trace: remedies may need
    as much as the run does now.

    Args:
      replayed: a replayed trace.
      stage_layers: (stages) layers of each stage; then they are moved whole.
      schedules: names of those that are tried; all of the registry if None.
      search: whether to run the solvers too, which take some seconds.
      on_progress: called with how much is done, of how much, and a text.

    Returns:
      As `pj.explain`: parts, causes and remedies of the mean pipeline.

    Raises:
      ValueError: as `pj.explain`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=8)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.1))
      >>> replayed = pj.traces.replay(pj.traces.pipelines_of(pj.traces.of_runs([run])))
      >>> pj.traces.advise(replayed, schedules=["zb-h1"]).remedies[0].what
      'schedule zb-h1; 16 microbatches of 0.5 times the size'
    """
    check_types(replayed=(replayed, Replay))
    return explain_setup(
        begin_setup(replayed, stage_layers),
        None,
        schedules=schedules,
        search=search,
        on_progress=on_progress,
    )


LEAST = 4  # steps that a forecast is made of


@with_short_repr("predicted low high median_error inside")
@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
    """The second half of the steps, predicted by the first.

    Attributes:
      predicted: median of the replayed steps of the first half, times what these took longer than
        replayed [s].
      low: of the band that a step should lie in [s].
      high: likewise [s].
      confidence: with which probability it should.
      errors: (steps) of the second half: predicted over recorded, minus 1.
      inside: share of them that lie in the band.
      left_out: numbers of the steps of the first half that nothing is predicted from.
    """

    predicted: float
    low: float
    high: float
    confidence: float
    errors: Float[NumpyArray, " steps"]
    inside: float
    left_out: Sequence[int] = ()

    @property
    def median_error(self) -> float:
        """Median of the absolute errors."""
        return float(np.median(np.abs(self.errors)))


def forecast(attribution: Attribution, *, confidence: float = 0.9) -> Forecast:
    """Predict the second half of the steps of a job from the first.

    The band is Student's prediction interval for one further step, so it assumes steps that scatter
    normally about a mean that stays. A step of the first half that would be suspect beside the
    others of that half, by what it takes or by what the replay does not explain of it, is not from
    such a sample: where these are fewer than half of it, nothing is predicted from them. Of the
    second half all steps count.

    Args:
      attribution: steps as recorded and as replayed.
      confidence: with which probability a step should lie in the band.

    Returns:
      Prediction, band, and how the second half met them.

    Raises:
      ValueError: if there are fewer than 4 steps, or the confidence is not between 0 and 1.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> runs = [pj.evaluate(table, pj.Costs(forward=x, backward=2.0)) for x in (1.0, 1.1) * 4]
      >>> pipelines = pj.traces.pipelines_of(pj.traces.of_runs(runs))
      >>> found = pj.traces.attribute(pj.traces.replay(pipelines))
      >>> pj.traces.forecast(found).inside
      1.0

    References:
      Prediction interval of a normal sample: Hahn and Meeker, Statistical Intervals, section 4.7.
    """
    from scipy.special import stdtrit  # at first use: it takes a while

    check_types(attribution=(attribution, Attribution))
    if not is_number(confidence) or not 0 < confidence < 1:
        raise wrong("confidence", f"must be between 0 and 1, got {confidence!r}", confidence)
    order = np.argsort(attribution.steps)
    recorded, replayed = attribution.recorded[order], attribution.replayed[order]
    if len(recorded) < LEAST:
        raise ValueError(f"a forecast needs {LEAST} steps at least, there are {len(recorded)}")
    half = len(recorded) // 2
    odd = is_outlier(recorded[:half]) | is_outlier(recorded[:half] / replayed[:half])
    odd &= 2 * odd.sum() < half
    regular = np.flatnonzero(~odd)
    # what the model does not explain is taken to go on as it was
    steps = replayed[regular] * (recorded[regular].sum() / replayed[regular].sum())
    quantile = float(stdtrit(len(regular) - 1, (1 + confidence) / 2))  # of Student's t
    reach = quantile * np.sqrt(1 + 1 / len(regular))
    middle, width = float(steps.mean()), float(steps.std(ddof=1) * reach)
    later, predicted = recorded[half:], float(np.median(steps))
    inside = (later >= middle - width) & (later <= middle + width)
    return Forecast(
        predicted,
        middle - width,
        middle + width,
        confidence,
        predicted / later - 1,
        float(inside.mean()),
        [int(attribution.steps[k]) for k in order[np.flatnonzero(odd)]],
    )


STALL = 0.01  # of the median pipeline, that an op starts later than it might have


@short_repr
class Stall(NamedTuple):
    """An op that started long after all that it waited for.

    Attributes:
      step: number of the step.
      replica: number of the replica.
      worker: that ran it.
      op: stage, phase and microbatch.
      seconds: how much later [s].
    """

    step: int
    replica: int
    worker: int
    op: str
    seconds: float


@with_short_repr("pipelines replay attribution")
@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """A measured run: replayed, explained and improved.

    Attributes:
      pipelines: what ran, and what is left out.
      replay: how far recorded times in recorded order explain it.
      attribution: who makes steps long.
      op_times: of ops, messages and all else.
      forecast: the second half of the steps by the first; None of too few steps.
      advice: what would make the mean pipeline shorter.
      offsets: clocks that were set right, for messages came before they were sent.
      suspects: what is slower than the others of its kind, and clocks that were wrong.
      deal: the data dealt anew; None where that makes no sense, see `deal_anew`, where times differ
        by replica more than by data, or where steps are so long that it takes a search of its own.
      against: who makes steps longer than in another run, if there is one.
    """

    pipelines: Pipelines
    replay: Replay
    attribution: Attribution
    op_times: Sequence[OpTimes]
    forecast: Forecast | None
    advice: Explanation
    offsets: Sequence[Offset]
    suspects: Sequence[Suspect]
    deal: NewDeal | None = None
    against: Attribution | None = None

    @property
    def left_out(self) -> Sequence[LeftOut]:
        """Parts of the files that are not used."""
        return self.pipelines.left_out

    @property
    def schedule(self) -> str | None:
        """The registered schedule that ran, with its options; None if it is none of them."""
        match = registered(self.pipelines.table)
        if match is None:
            return None
        name, options = match
        return ", ".join([name, *(f"{k.replace('_', ' ')} {v}" for k, v in options.items())])

    @property
    def stalls(self) -> Sequence[Stall]:
        """Ops that started long after all that they waited for, the longest first.

        Long is 1 % of the median pipeline: nothing that was recorded explains it.
        """
        trace, late = self.pipelines.trace, self.replay.stalls
        least = STALL * float(np.median(self.pipelines.spans))
        places = np.flatnonzero(late > least)
        return ResultList(
            Stall(
                int(trace.step[k]),
                int(trace.replica[k]),
                int(trace.worker[k]),
                f"{trace.stage[k]}{trace.phases[trace.phase[k]]}{trace.microbatch[k]}",
                float(late[k]),
            )
            for k in places[np.argsort(-late[places], kind="stable")].tolist()
        )

    @property
    def op_spread(self) -> float:
        """Standard deviation of the logarithm of times of one kind: phase or pair, by stage."""
        ops = PipelineOps.of(self.pipelines.trace, self.pipelines.pipelines)
        parts = [
            logs - logs.mean()
            for _, kind in ops.by_kind()
            for stage in np.unique(kind.stage)
            for logs in [np.log(kind.seconds[(kind.stage == stage) & (kind.seconds > 0)])]
            if len(logs)
        ]
        return float(np.concatenate([np.zeros(1), *parts]).std())


PARTS = ("pipelines", "replay", "attribution", "remedies", "deal")


def analyse(
    trace: Trace,
    *,
    against: Trace | None = None,
    link: str | Links | None = None,
    stage_layers: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    search: bool = False,
    on_progress: OnProgress | None = None,
) -> Analysis:
    """Replay a measured run, say who makes it slow and what would make it faster.

    Args:
      trace: what was recorded.
      against: another run of the same stages, to say what got slower.
      link: link model, or `Links`; the one that explains the pipelines best if None.
      stage_layers: (stages) layers of each stage; then they are moved whole.
      schedules: names of those that are tried; all of the registry if None.
      search: whether to run the solvers too, which take some seconds.
      on_progress: called with how much is done, of how much, and a text.

    Returns:
      All of it.

    Raises:
      ValueError: if no pipeline keeps the rules of a table, or as its parts.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.0, 1.4, 1.0], backward=2.0))
      >>> found = pj.traces.analyse(pj.traces.of_runs([run] * 4), schedules=["zb-h1"])
      >>> found.replay.worst_error, found.advice.bottleneck.stage
      (0.0, 2)

    References:
      What-if analysis of stragglers: arXiv 2505.05713.
    """
    check_types(trace=(trace, Trace), against=(against, Trace, type(None)))
    with telling("trace", on_progress) as tell:
        tell(0, len(PARTS), PARTS[0])
        trace, offsets = aligned(trace)
        pipelines = pipelines_of(trace)
        tell(1, len(PARTS), PARTS[1])
        replayed = replay(pipelines, link=link)
        other = None
        if against is not None:
            other = replay(pipelines_of(aligned(against)[0]), link=replayed.links)
        tell(2, len(PARTS), PARTS[2])
        shares = attribute(replayed)
        tell(3, len(PARTS), PARTS[3])
        advice = advise(replayed, stage_layers=stage_layers, schedules=schedules, search=search)
        tell(4, len(PARTS), PARTS[4])
        # a deal of long steps takes a search of its own
        is_short = round_work(replayed) <= MOST_WORK
        is_of_data = is_short and share_of_replica(replayed) < OF_RANK
        dealt = deal_anew(replayed) if is_of_data else None
    return Analysis(
        pipelines,
        replayed,
        shares,
        op_times(replayed),
        forecast(shares) if len(shares.steps) >= LEAST else None,
        advice,
        [offset for offset in offsets if offset.is_corrected],
        suspects(replayed, offsets),
        dealt,
        None if other is None else attribute(replayed, against=other),
    )
