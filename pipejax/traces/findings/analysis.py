"""Analysis of a measured run in one record: replay, attribution, forecast and advice."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.analysis.scenario import Scenario
from pipejax.analysis.step.faults import Fault
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types, is_number, wrong
from pipejax.base.display import ResultList, short_repr, with_short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.costs import Costs
from pipejax.costs.edits import SlowWorkers
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.registry import registered
from pipejax.schedules.table.links import Links
from pipejax.search.orders.deal import deals
from pipejax.search.remedies.explain import Explanation, explain
from pipejax.traces.clocks import Offset, aligned
from pipejax.traces.findings.attribution import Attribution, attribute
from pipejax.traces.findings.op_times import OpTimes, cost_fields, measured_costs, op_times
from pipejax.traces.findings.suspects import (
    MAX_LISTED,
    Suspect,
    at_usual_speed,
    is_slow_stage,
    odd_steps,
    slow_machines,
    suspects,
)
from pipejax.traces.record import LeftOut, Trace
from pipejax.traces.replaying.pipelines import (
    Pipeline,
    PipelineOps,
    Pipelines,
    find_pipelines,
    op_name,
)
from pipejax.traces.replaying.replay import (
    MIN_STALL,
    Replay,
    find_late_launches,
    replay_late_launches,
    scale_links,
)

MAX_ROUNDS = 20  # largest number of rounds of the search; more rounds save little
MAX_WORK = 5e6  # largest number of ops in a round of the search; otherwise some steps are skipped
MAX_REPLICA_SHARE = 0.5  # above this share, replicas differ, and not their data


@with_short_repr("saves bound replica_share")
@dataclasses.dataclass(frozen=True, eq=False)
class NewDeal:
    """Best redistribution of each step's microbatches over the replicas that a search found.

    Attributes:
      steps: numbers of the steps; if steps are long, an evenly spread subset.
      before: (steps) replayed time of the slowest pipeline [s].
      after: (steps) time of the slowest pipeline of the new deal [s].
      least: (steps) lower bound on the time of any deal [s].
      order: (steps, replicas, microbatches) order[step, r, k] is the k-th microbatch that replica r
        runs; numbers count the microbatches replica by replica, as they ran.
      replica_share: share of the variance of microbatch times that lies between replicas. If the
        share is large, replicas are slow and not their data, so no deal helps.
    """

    steps: Sequence[int]
    before: Float[NumpyArray, " steps"]
    after: Float[NumpyArray, " steps"]
    least: Float[NumpyArray, " steps"]
    order: Int[NumpyArray, "steps replicas microbatches"]
    replica_share: float

    @property
    def saves(self) -> float:
        """Return the share of the slowest pipeline's mean time that the new order saves."""
        return 1 - float(self.after.mean() / self.before.mean())

    @property
    def bound(self) -> float:
        """Return an upper bound on the share that any deal saves."""
        return 1 - float(self.least.mean() / self.before.mean())


def rebalance(replayed: Replay, *, on_progress: OnProgress | None = None) -> NewDeal | None:
    """Redistribute the microbatches of every step over the replicas.

    The time of an op is assumed to depend on its data alone. So a microbatch takes equal times on
    all replicas.

    Args:
      replayed: a replayed trace.
      on_progress: called after each round of the search.

    Returns:
      The new deal, with its gain and a bound. None if there is one replica, if replicas ran
      different orders, or if all microbatches take equal times.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> lengths = np.array([[5.0, 4.0], [1.0, 1.0]])
      >>> runs = [pj.evaluate(table, pj.Costs(forward=[x, x], backward=[x, x])) for x in lengths]
      >>> trace = pj.traces.record_runs(runs, replicas=2)
      >>> result = pj.traces.rebalance(pj.traces.replay(pj.traces.find_pipelines(trace)))
      >>> result.before.tolist(), result.after.tolist()
      ([27.0], [21.0])
    """
    check_types(replayed=(replayed, Replay))
    table, all_steps = replayed.pipelines.table, _complete_steps(replayed)
    # select evenly spread steps, as many as the work limit of the search allows
    max_steps = max(1, int(MAX_WORK / round_work(replayed)))
    stride = max(1, -(-len(all_steps) // max_steps))
    steps = {step: all_steps[step] for step in list(all_steps)[::stride]}
    replicas = max(map(len, steps.values()), default=0)
    if replicas < 2 or table.num_pipes > 1:
        return None
    costs = [_step_costs(replayed, step_pipelines) for step_pipelines in steps.values()]
    if not all(cost.per_microbatch() for cost in costs):
        return None
    best_deals = deals(
        table,
        costs,
        replicas=replicas,
        link=replayed.links,
        iterations=MAX_ROUNDS,
        time_limit=None,  # `MAX_WORK` limits the work of a round
        on_progress=on_progress,
    )
    return NewDeal(
        steps=list(steps),
        before=np.array([deal.baselines["given"] for deal in best_deals]),
        after=np.array([deal.value for deal in best_deals]),
        least=np.array([deal.lower_bound for deal in best_deals]),
        order=np.stack([deal.best.order for deal in best_deals]),
        replica_share=replica_share(replayed),
    )


def round_work(replayed: Replay) -> float:
    """Count the ops that a round of the search in `rebalance` runs for one step."""
    # A round pairs a quarter of the replicas, and runs (2 M)^2 exchanges for every pair.
    pipelines = replayed.pipelines.pipelines
    replicas = len({pipeline.replica for pipeline in pipelines})
    ops = len(pipelines[0].slices)
    return float(replicas * replayed.pipelines.table.num_microbatches**2 * ops)


def _step_costs(replayed: Replay, replicas: Sequence[Pipeline]) -> Costs:
    """Return a step's recorded op times as costs (stages, microbatches of all replicas)."""
    table = replayed.pipelines.table
    ops, size = PipelineOps.select(replayed.pipelines.trace, replicas), table.num_microbatches
    # microbatch m of replica r becomes microbatch r M + m of one long step
    ops = ops._replace(microbatch=ops.microbatch + ops.run * size)
    fields = cost_fields(ops, (table.num_stages, len(replicas) * size))
    transmit = replayed.link_times.reshape(2, 1, -1)  # (directions, pipes, boundaries)
    return Costs(**fields, transmit=transmit if table.num_stages > 1 else 0.0)


def replica_share(replayed: Replay) -> float:
    """Return the share of the variance of microbatch times that lies between replicas."""
    # This is the intraclass correlation of the total time of a microbatch, in [0, 1].
    steps = _complete_steps(replayed).values()
    if not steps:
        return 0.0
    step_pipelines = [pipeline for pipelines in steps for pipeline in pipelines]
    ops = PipelineOps.select(replayed.pipelines.trace, step_pipelines)
    count = replayed.pipelines.table.num_microbatches
    totals = np.bincount(ops.run * count + ops.microbatch, ops.seconds)
    totals = totals.reshape(len(steps), -1, count)  # (steps, replicas, microbatches)
    within = float(totals.var(axis=(0, 2)).mean())
    # the means of replicas with equal data differ by chance; `chance` is the variance of a mean
    chance = within / (totals.shape[0] * totals.shape[2])
    between = max(0.0, float(totals.mean(axis=(0, 2)).var()) - chance)
    return between / ((between + within) or 1.0)


def _complete_steps(replayed: Replay) -> Mapping[int, Sequence[Pipeline]]:
    """Return {step in which all replicas ran the most frequent table: its pipelines}."""
    pipelines, steps = replayed.pipelines.pipelines, replayed.pipelines.complete_steps
    by_step = {step: [pipelines[k] for k in positions] for step, positions in steps.items()}
    return {step: row for step, row in by_step.items() if all(p.table == 0 for p in row)}


def trace_scenario(
    replayed: Replay, outliers: Sequence[Suspect], layers: Sequence[int] | None
) -> tuple[Replay, Scenario]:
    """Return the replay without slow machines and hosts, and the scenario with slow machines."""
    # The table is the most frequent one, at mean times. Machines that are slow in the slowest
    # replica are slow in the scenario, as all replicas wait for it. Remedies do not move the wait
    # for a host: the scenario has hosts that launch in time.
    machines = slow_machines(outliers, replayed.pipelines, layers)
    hosts = [row for row in outliers if row.kind == "host"]
    spans, replicas = replayed.pipelines.spans, [r.replica for r in replayed.pipelines.pipelines]
    slowest = max({*replicas}, key=lambda k: float(spans[np.equal(replicas, k)].mean()))
    rows = (row for row in machines if row.place.get("replica", slowest) == slowest)
    stragglers = {row.place["worker"]: row.ratio or 1.0 for row in rows}
    usual = at_usual_speed(replayed, [*machines, *hosts])
    table, costs = replayed.pipelines.table, measured_costs(usual)
    match, edits = registered(table), (SlowWorkers(stragglers),) if stragglers else ()
    if match is None or Phase.R in table.used_phases:  # `explain` compares recomputations
        return usual, Scenario(table, costs=costs, link=replayed.links, edits=edits)
    name, options = match
    sizes = table.num_workers, table.num_microbatches // table.grammar.slices
    return usual, Scenario(name, *sizes, options, costs=costs, link=replayed.links, edits=edits)


MIN_STEPS = 4  # least number of steps for a forecast
MIN_CHANCE = 0.05  # a band has failed if its result is less probable than this


@with_short_repr("predicted low high median_error inside")
@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
    """Prediction of the second half of the steps from the first half.

    Attributes:
      predicted: median replayed step of the first half, times the ratio of recorded to replayed
        time in the first half [s].
      low: lower end of the prediction band [s].
      high: upper end of the prediction band [s].
      confidence: probability that a step lies in the band.
      errors: (steps) predicted / recorded time - 1 in the second half.
      inside: share of the second half inside the band.
    """

    predicted: float
    low: float
    high: float
    confidence: float
    errors: Float[NumpyArray, " steps"]
    inside: float

    @property
    def median_error(self) -> float:
        """Return the median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors)))

    @property
    def has_failed(self) -> bool:
        """Return whether so few steps in the band have a probability below 5 % by chance."""
        from scipy.special import bdtr  # slow to import

        size = len(self.errors)
        return bool(bdtr(round(self.inside * size), size, self.confidence) < MIN_CHANCE)


def forecast(attribution: Attribution, *, confidence: float = 0.9) -> Forecast:
    """Predict the second half of the steps of a job from the first half.

    The band is Student's prediction interval for one further step. It assumes that step times are
    normal, with a constant mean.

    Args:
      attribution: steps as recorded and as replayed.
      confidence: probability that a step lies in the band.

    Returns:
      Prediction, band, and errors in the second half.

    Raises:
      ValueError: if there are fewer than 4 steps, or the confidence is not between 0 and 1.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> runs = [pj.evaluate(table, pj.Costs(forward=x, backward=2.0)) for x in (1.0, 1.1) * 4]
      >>> pipelines = pj.traces.find_pipelines(pj.traces.record_runs(runs))
      >>> result = pj.traces.attribute(pj.traces.replay(pipelines))
      >>> pj.traces.forecast(result).inside
      1.0

    References:
      Prediction interval of a normal sample: Hahn and Meeker, Statistical Intervals, section 4.7.
    """
    from scipy.special import stdtrit  # slow to import

    check_types(attribution=(attribution, Attribution))
    if not is_number(confidence) or not 0 < confidence < 1:
        raise wrong("confidence", f"must be between 0 and 1, got {confidence!r}", confidence)
    order = np.argsort(attribution.steps)
    recorded, replayed = attribution.recorded[order], attribution.replayed[order]
    if len(recorded) < MIN_STEPS:
        raise ValueError(f"a forecast needs at least {MIN_STEPS} steps, there are {len(recorded)}")
    half = len(recorded) // 2
    # the share of unexplained time in a step is assumed to stay the same
    steps = replayed[:half] * (recorded[:half].sum() / replayed[:half].sum())
    quantile = float(stdtrit(half - 1, (1 + confidence) / 2))  # quantile of Student's t
    num_deviations = quantile * np.sqrt(1 + 1 / half)
    middle, width = float(steps.mean()), float(steps.std(ddof=1) * num_deviations)
    later, predicted = recorded[half:], float(np.median(steps))
    low, high, errors = middle - width, middle + width, predicted / later - 1
    inside = float(((later >= low) & (later <= high)).mean())
    return Forecast(predicted, low, high, confidence=confidence, errors=errors, inside=inside)


@short_repr
class Stall(NamedTuple):
    """An op that started long after all its inputs.

    Attributes:
      step: number of the step.
      replica: number of the replica.
      worker: rank in the pipeline.
      op: name of the op, such as 0F1.
      seconds: delay after the last input [s].
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
      pipelines: the pipelines that ran, and unused content of the files.
      replay: replay of recorded times in recorded order, with its errors.
      attribution: time per step that each worker, stage, phase and so on costs.
      op_times: times of ops, messages and other slices.
      forecast: prediction of the second half of the steps from the first half; None for few steps.
      advice: remedies for the mean pipeline; None if the replay is too far off. If the finding is a
        stage, remedies that move layers come first.
      offsets: offsets of corrected clocks.
      suspects: outliers among workers, stages, links and so on, and wrong clocks.
      finding: the suspect or slow place that costs most; None if no single place matters.
      complete: replay of all steps, including odd steps; its errors are those of `replay`.
      usual: the replay with ops of slow machines and starved hosts as fast as those of others. The
        advice has these times, and slow machines as factors.
      deal: redistribution of the microbatches; None if `rebalance` returns None, if times differ
        more by replica than by data, or if steps are too long for a quick search.
      against: comparison with another run; None without another run.
    """

    pipelines: Pipelines
    replay: Replay
    attribution: Attribution
    op_times: Sequence[OpTimes]
    forecast: Forecast | None
    advice: Explanation | None
    offsets: Sequence[Offset]
    suspects: Sequence[Suspect]
    finding: Suspect | None
    complete: Replay
    usual: Replay
    deal: NewDeal | None = None
    against: Attribution | None = None

    @property
    def left_out(self) -> Sequence[LeftOut]:
        """List unused parts of the files."""
        return self.pipelines.left_out

    @property
    def schedule(self) -> str | None:
        """Return name and options of the registered schedule that ran; None if none matches."""
        match = registered(self.pipelines.table)
        if match is None and self.advice is not None:  # perhaps a plan for these times
            name = self.advice.memory.begin.scenario.schedule
            match = (name, {}) if isinstance(name, str) else None
        if match is None:
            return None
        name, options = match
        return ", ".join([name, *(f"{k.replace('_', ' ')} {v}" for k, v in options.items())])

    @property
    def no_advice(self) -> str | None:
        """Return the reason why there is no advice; None if there is advice."""
        if self.advice is not None:
            return None
        error = 100 * self.replay.mean_error
        return f"the replay is {error:.3g} % off; above {100 * MAX_ERROR:g} % there is no advice"

    @property
    def stalls(self) -> Sequence[Stall]:
        """List ops that started long after their last input, the longest delay first."""
        # A delay is long from 1 % of the median pipeline on.
        trace, late = self.complete.pipelines.trace, self.complete.pipelines.late_launches
        delay = np.maximum(self.complete.stalls, late)
        stalled = np.flatnonzero(delay > MIN_STALL * float(np.median(self.pipelines.spans)))
        return ResultList(
            Stall(
                step=int(trace.step[k]),
                replica=int(trace.replica[k]),
                worker=int(trace.worker[k]),
                op=op_name(trace, k),
                seconds=float(delay[k]),
            )
            for k in stalled[np.argsort(-delay[stalled], kind="stable")].tolist()
        )

    @property
    def op_spread(self) -> float:
        """Return the standard deviation of log(time) over ops of equal phase and stage."""
        ops = PipelineOps.select(self.usual.pipelines.trace, self.pipelines.pipelines)
        deviations = [np.zeros(1)]
        for _, kind in ops.by_kind():
            for stage in np.unique(kind.stage):
                seconds = kind.seconds[(kind.stage == stage) & (kind.seconds > 0)]
                if len(seconds):
                    deviations.append(np.log(seconds) - np.log(seconds).mean())
        return float(np.concatenate(deviations).std())


def usual_steps(trace: Trace, pipelines: Pipelines) -> Pipelines:
    """Return the pipelines without odd steps, which `left_out` then names."""
    odd = odd_steps(pipelines)
    if not odd:
        return pipelines
    left_out = [LeftOut(f"step {step}", f"odd: {suspect.why}") for step, suspect in odd.items()]
    in_usual_step = ~np.isin(trace.step, [*odd])
    usual = dataclasses.replace(trace.only(in_usual_step), left_out=(*trace.left_out, *left_out))
    return find_pipelines(usual)


MIN_COST = 0.001  # share of the step from which the cost of a suspect matters
MIN_PLACE = 0.02  # share of the step from which the cost of a place that is no outlier matters


def _first_finding(
    suspects: Sequence[Suspect],
    shares: Attribution,
    advice: Explanation | None,
    deal: NewDeal | None,
    first_step: int,
    layers: Sequence[int] | None,
) -> Suspect | None:
    """Return the suspect or slow place that costs most; None if no single place matters."""
    # If the redistribution of microbatches `deal` saves more, the finding is uneven data.
    # `first_step`, which may be a warm-up, comes last.
    causes = () if advice is None else advice.faults
    fault = next((cause for cause in causes if cause.kind not in ("schedule", "gaps")), None)
    step, counts = float(shares.recorded.mean()), Counter(suspect.kind for suspect in suspects)
    # a wrong clock costs no time; if there are many suspects of a kind, no single one matters
    costly = [
        row
        for row in suspects
        if row.kind != "clock" and counts[row.kind] < MAX_LISTED and row.seconds > MIN_COST * step
    ]
    rows = [row for row in costly if row.place != {"step": first_step}]
    rows += [row for row in _slow_places(shares, fault) if row.seconds > MIN_PLACE * step]
    first = next(iter([*rows, *costly]), None)  # `costly` may have the first step
    seconds = 0.0 if first is None else first.seconds
    saves = 0.0 if deal is None else deal.saves * float(deal.before.mean())
    if saves > max(MIN_PLACE * step, seconds):
        why = "replicas wait for the one with the longest microbatches"
        return Suspect("data", "", saves, ratio=None, z=0.0, why=why, place={})
    # a worker and its only stage have equal costs
    stages = [row for row in suspects if row.kind == "stage" and row.seconds == seconds]
    if first is None or not stages:
        return first
    stage, ratio = stages[0].place["stage"], stages[0].ratio or 1.0
    sizes = len(shares.by_name("stage")), len(shares.by_name("replica"))
    return stages[0] if is_slow_stage(stage, ratio, *sizes, layers) else first


def _slow_places(shares: Attribution, fault: Fault | None) -> Sequence[Suspect]:
    """Return the costliest worker of a replica and the place of `fault`, the costliest first."""
    places = []
    share = next(iter(shares.by_name("place").values()), None)
    if share is not None:
        why = f"{share.name} is slower than the mean"
        name = share.name.removeprefix("worker ")
        worker, replica = map(int, name.split(" of replica "))
        place = {"worker": worker, "replica": replica}
        suspect = Suspect("worker", name, share.saves, ratio=None, z=0.0, why=why, place=place)
        places.append(suspect)
    if fault is not None and (fault.link or fault.worker is not None):
        number = fault.worker if fault.stage is None else fault.stage
        kind, name = "worker" if fault.stage is None else "stage", str(number)
        place = {} if number is None else {kind: number}
        if fault.stage is None and fault.link:
            kind, name = "link", "worker {} to {} and back".format(*fault.link)
            place = dict(zip(("source", "target"), fault.link, strict=True)) | {"ways": 2}
        why = fault.why.partition("; ")[0]
        suspect = Suspect(kind, name, fault.seconds, ratio=None, z=0.0, why=why, place=place)
        places.append(suspect)
    return sorted(places, key=lambda place: -place.seconds)


MAX_ERROR = 0.05  # mean error of a replay that is a basis for advice
PROGRESS_TEXTS = ("pipelines", "replay", "attribution", "remedies", "deal")


def analyse(
    trace: Trace,
    *,
    against: Trace | None = None,
    link: str | Links | None = None,
    stage_layers: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    launcher: str | None = None,
    search: bool = False,
    all_steps: bool = False,
    on_progress: OnProgress | None = None,
) -> Analysis:
    """Replay a measured run, and find the causes of its step time and possible remedies.

    Args:
      trace: a measured run.
      against: another run of the same stages, for a comparison.
      link: link model, or `Links`; default: the model that explains the pipelines best.
      stage_layers: (stages) layers of each stage; if set, remedies move whole layers.
      schedules: names of schedules to try; default: the registry.
      launcher: launcher whose options make the first shelf of remedies; default: that of the
        labels, or any.
      search: whether to run the solvers, too, which take some seconds.
      all_steps: whether means include odd steps, such as a warm-up step.
      on_progress: called with the number of finished parts, the number of parts, and a text.

    Returns:
      Replay, attribution, forecast, advice, suspects and a new deal. If the replay is more than 5 %
      off, there is no advice and no deal.

    Raises:
      ValueError: if no pipeline follows the rules of a table, or as `explain` and `replay`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.0, 1.4, 1.0], backward=2.0))
      >>> result = pj.traces.analyse(pj.traces.record_runs([run] * 4), schedules=["zb-h1"])
      >>> result.replay.worst_error, result.finding.kind, result.finding.name
      (0.0, 'worker', '2')

    References:
      What-if analysis of stragglers: arXiv 2505.05713.
    """
    check_types(trace=(trace, Trace), against=(against, Trace, type(None)))
    with telling("trace", on_progress) as report:
        num_parts = len(PROGRESS_TEXTS)
        report(0, num_parts, PROGRESS_TEXTS[0])
        trace, offsets = aligned(trace)
        all_pipelines = find_pipelines(trace)
        pipelines = all_pipelines if all_steps else usual_steps(trace, all_pipelines)
        report(1, num_parts, PROGRESS_TEXTS[1])
        replayed = replay_late_launches(pipelines, link)
        complete = dataclasses.replace(replayed, pipelines=scale_links(all_pipelines))
        if np.ndim(replayed.pipelines.late_launches):
            complete = dataclasses.replace(complete, pipelines=find_late_launches(complete))
        other_run = None
        if against is not None:
            against, _ = aligned(against)
            others = find_pipelines(against)
            others = others if all_steps else usual_steps(against, others)
            other_run = replay_late_launches(others, replayed.links)
        report(2, num_parts, PROGRESS_TEXTS[2])
        shares = attribute(replayed)
        report(3, num_parts, PROGRESS_TEXTS[3])
        outliers, advice, new_deal = suspects(complete, offsets), None, None
        usual, scenario = trace_scenario(replayed, outliers, stage_layers)
        if replayed.mean_error <= MAX_ERROR:
            advice = explain(
                scenario,
                stage_layers=stage_layers,
                schedules=schedules,
                launcher=launcher or trace.launcher or None,
                search=search,
            )
            report(4, num_parts, PROGRESS_TEXTS[4])
            is_short = round_work(replayed) <= MAX_WORK
            has_uneven_data = is_short and replica_share(replayed) < MAX_REPLICA_SHARE
            new_deal = rebalance(replayed) if has_uneven_data else None
        first_step = all_pipelines.pipelines[0].step
        finding = _first_finding(outliers, shares, advice, new_deal, first_step, stage_layers)
        if advice is not None:  # reports name a repair in a line of its own
            remedies = [remedy for remedy in advice.remedies if remedy.kind != "repair"]
            if finding is not None and finding.kind == "stage":
                remedies.sort(key=lambda remedy: remedy.kind != "layers")
            if finding is not None and finding.kind == "worker" and "replica" in finding.place:
                # moved layers would change all replicas for one slow machine
                remedies = [remedy for remedy in remedies if remedy.kind != "layers"]
            advice = dataclasses.replace(advice, remedies=remedies)
    return Analysis(
        pipelines=pipelines,
        replay=replayed,
        attribution=shares,
        op_times=op_times(replayed),
        forecast=forecast(shares) if len(shares.steps) >= MIN_STEPS else None,
        advice=advice,
        offsets=[offset for offset in offsets if offset.is_corrected],
        suspects=outliers,
        finding=finding,
        complete=complete,
        usual=usual,
        deal=new_deal,
        against=None if other_run is None else attribute(replayed, against=other_run),
    )
