"""Causes of a slow step, each with the time that its removal would save.

A run without the cause gives the saving. A stage, worker or link is compared with the median of the
other ones. The start and end of the pipeline are compared with a run of 2 P microbatches, in which
they take less than a third of the step.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.analysis.paths.head_of_line_blocking import transfer_waits
from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.analysis.step.step_report import (
    LANE,
    PART_RECORDS,
    RULES,
    Part,
    step_parts,
    with_equal_microbatches,
    without_rules,
)
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import short_repr
from pipejax.base.medians import medians_of_others
from pipejax.costs.costs import MESSAGE_FIELDS, Costs
from pipejax.costs.scaling import scaled_costs
from pipejax.engine.lowering.program import makespan_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.table.table import ScheduleTable

# A place is a stage or a worker.
MIN_SLOW_RATIO = 1.02  # smallest ratio to the median of the other places that counts as slow
EQUAL_LOAD = 0.999  # share of the busiest worker's time from which workers count as equally busy
SINGLE_CAUSE_SHARE = 0.5  # share of imbalance from which one slow place counts as the only cause
UNEVEN_DIFFERENCE = 0.1  # difference of a stage from the median that makes a split uneven
SHARED_BLAME = 0.5  # share of the largest difference from which other stages are causes, too
EQUAL_BLAME = 0.9  # two stages are equally slow if their ratio is between this and its inverse
# share of a worker's slowdown that each of its stages must show (half, if two pipes share a stage)
STAGE_SHARE_OF_SLOWDOWN = 0.4
ENOUGH = 2  # microbatches per worker from which start and end are no fault
HIDING_RATIO = 1.2  # two causes hide each other if both cost this much more than their sum
JOINT = "joint"  # kind of two causes that hide each other
NEGLIGIBLE = 0.01  # share of the step; smaller savings are no cause


@short_repr
class Fault(NamedTuple):
    """Cause of a slow step, and the time that its removal would save.

    Attributes:
      kind: imbalance, link, messages, blocking, offloads, sharding, exchange, update, name of a
        lane, rules (of the table), microbatches (too few), uneven microbatches, memory, recompute,
        joint (imbalance and a link that hide each other), host (it starts kernels late), tensor,
        context, expert or weights (exchanges inside layers), gaps (idle time by the order of ops),
        or schedule (start and end of the pipeline).
      seconds: time that the step would save without the cause [s]. If memory rules out a schedule:
        time that this schedule would save beyond the best schedule that fits.
      why: one sentence.
      worker: the worker with the fault, or None.
      stage: the stage with the fault, or None.
      link: the pair of workers with the fault, or None.
      rules: rules of `scaled_costs` that remove the fault; empty if no scaling does.
    """

    kind: str
    seconds: float
    why: str
    worker: int | None = None
    stage: int | None = None
    link: tuple[int, int] | None = None
    rules: str = ""


def find_faults(evaluation: Evaluation, parts: Sequence[Part] | None = None) -> list[Fault]:
    """Find the causes of a slow run.

    Args:
      evaluation: a run.
      parts: parts of the run, if they are known.

    Returns:
      Causes that cost more than 1 % of the step, the largest saving first.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=16)
      >>> costs = pj.Costs(forward=[1.0, 1.0, 1.5, 1.0], backward=[2.0, 2.0, 3.0, 2.0])
      >>> worst = find_faults(pj.evaluate(table, costs))[0]
      >>> worst.kind, worst.worker, worst.stage, worst.seconds
      ('imbalance', 2, 2, 22.5)
    """
    check_types(evaluation=(evaluation, Evaluation))
    trial = FaultRemoved(evaluation)
    parts = step_parts(evaluation) if parts is None else parts
    slow_places = [*_imbalance(trial), *_slow_links(trial)]
    faults = [*slow_places, *_joint_faults(trial, slow_places), *_rule_faults(trial)]
    # a slow link is a cause of its own, so the parts are computed without the slow link
    slow = next((fault for fault in faults if fault.kind == "link"), None)
    if slow is not None:
        parts = step_parts(evaluate(trial.table, trial.costs(slow.rules), link=evaluation.links))
    faults += _part_faults(trial, {part.name: part.seconds for part in parts})
    large = (fault for fault in faults if fault.seconds > NEGLIGIBLE * evaluation.makespan)
    return sorted(large, key=lambda fault: -fault.seconds)


class FaultRemoved:
    """Runs of a table at scaled costs, to find the time that removing a fault would save."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.run, self.table = evaluation, evaluation.table

    def costs(self, rules: str) -> Costs:
        """Return the run's costs, scaled by rules such as compute@stage2*0.5."""
        return scaled_costs(self.run.costs, self.table, rules or None)

    def saves(self, rules: str) -> float:
        """Return by how much the step is shorter at scaled costs [s]."""
        program, vector = lower_and_price(self.table, self.costs(rules), self.run.links)
        return self.run.makespan - makespan_on_host(program, vector)


class ComputeTimes(NamedTuple):
    """Compute times by stage, by worker and by microbatch [s]."""

    # Ops without a stage count on their worker alone.
    stages: Float[NumpyArray, " stages"]  # time of the mean microbatch on each stage
    workers: Float[NumpyArray, " workers"]  # time of a step on each worker
    microbatches: Float[NumpyArray, " microbatches"]  # time of each microbatch on all stages

    @classmethod
    def from_run(cls, evaluation: Evaluation) -> "ComputeTimes":
        """Sum a run's compute times; the ops of a fused pair count as if each ran alone."""
        ops, costs = evaluation.table.ops, evaluation.costs
        shape = evaluation.stages, evaluation.microbatches
        stage_seconds, microbatch_seconds = np.zeros(shape[0]), np.zeros(shape[1])
        for phase in evaluation.table.used_phases:
            time = costs.time(phase)
            if phase not in evaluation.table.grammar.compute_phases or time is None:
                continue
            cost = np.asarray(time, float)
            seconds = np.broadcast_to(cost[:, None] if cost.ndim == 1 else cost, shape)
            is_phase = ops.phase == phase
            stages, microbatches = ops.stage[is_phase], ops.microbatch[is_phase]
            # bincount with weights sums them by index: stages [0 1 0] and 1, 2, 3 s give [4 2]
            op_seconds = seconds[stages, microbatches]
            stage_seconds += np.bincount(stages, op_seconds, shape[0])
            microbatch_seconds += np.bincount(microbatches, op_seconds, shape[1])
        return cls(stage_seconds / evaluation.microbatches, evaluation.busy, microbatch_seconds)

    @property
    def even_stage_rules(self) -> str:
        """Return scaling rules that set the times of all stages to their mean."""
        return _evening_rules("stage", self.stages)

    @property
    def even_worker_rules(self) -> str:
        """Return scaling rules that set the times of all workers to their mean."""
        return _evening_rules("worker", self.workers)


def _evening_rules(scope: str, seconds: Float[NumpyArray, " places"]) -> str:
    """Return rules such as compute@stage0*1.5 that set all stages or workers to their mean."""
    # idle stages and workers stay idle
    factors = {k: float(seconds.mean() / value) for k, value in enumerate(seconds) if value > 0}
    changes = {k: factor for k, factor in factors.items() if abs(factor - 1) > 1e-12}
    return ",".join(f"compute@{scope}{k}*{factor:.12g}" for k, factor in changes.items())


def against_others(values: Float[NumpyArray, " places"]) -> Float[NumpyArray, " places"]:
    """Divide each value by the median of all other values; 0 / 0 is 1."""
    if len(values) < 2:
        return np.ones(len(values))
    others = medians_of_others(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values == others, 1.0, values / others)


def slowest_place(evaluation: Evaluation) -> Fault | None:
    """Return the slow stage or worker whose speed-up would save most; None if none is slow."""
    trial, times = FaultRemoved(evaluation), ComputeTimes.from_run(evaluation)
    faults = [*_slow_stages(trial, times), *_slow_workers(trial, times)]
    return max(faults, key=lambda fault: (fault.seconds, fault.stage is not None), default=None)


def _imbalance(trial: FaultRemoved) -> Iterator[Fault]:
    """Yield at most one cause: a single slow stage or worker, or an uneven split of layers."""
    times, table = ComputeTimes.from_run(trial.run), trial.table
    single = slowest_place(trial.run)
    # time saved [s] by scaling all stages, or all workers, to their mean time
    all_rules = filter(None, (times.even_stage_rules, times.even_worker_rules))
    even = [(trial.saves(rules), rules) for rules in all_rules]
    saved_by_even, even_rules = max(even, default=(0.0, ""))
    if single is None and saved_by_even <= 0:
        return
    busiest = int(times.workers.argmax())
    # a ratio and no percentage, because percentages in a report are shares of the step
    ratio = float(times.workers[busiest] / times.workers.mean())
    computes = f"computes {ratio:.3g} times as long as the mean worker"
    ratios = times.stages / np.median(times.stages[times.stages > 0])
    if (
        single is not None
        and single.seconds >= SINGLE_CAUSE_SHARE * saved_by_even
        and not _is_shared(single, ratios, table, is_even_better=saved_by_even > single.seconds)
    ):
        why = f"{single.why}; it {computes}" if single.worker == busiest else single.why
        yield single._replace(why=why)
        return
    stages = np.flatnonzero((table.placement == busiest).any(axis=0))
    equals = np.flatnonzero(times.workers >= EQUAL_LOAD * times.workers.max()).tolist()
    subject = f"worker {busiest} {computes}"
    if len(equals) > 1:
        workers = " and ".join([", ".join(map(str, equals[:-1])), str(equals[-1])])
        subject = f"workers {workers} {computes.replace('computes', 'compute', 1)}"
    yield Fault(
        "imbalance",
        saved_by_even,
        f"the split over stages is uneven: {subject}; stages take "
        f"{ratios.min():.3g} to {ratios.max():.3g} times the median stage",
        worker=busiest,
        stage=int(stages[times.stages[stages].argmax()]),
        rules=even_rules,
    )


def _is_shared(
    fault: Fault, ratios: Float[NumpyArray, " stages"], table: ScheduleTable, is_even_better: bool
) -> bool:
    """Return whether stages on other workers are causes of the imbalance, too."""
    # `ratios` are stage times over the median. Differences below `UNEVEN_DIFFERENCE` do not count,
    # because the first and last stage are a little longer in most models. If an even split saves no
    # more than a faster place, only stages as slow as the place count, no fast stages.
    differences = np.abs(ratios - 1) if is_even_better else ratios - 1
    is_blamed = (table.placement == fault.worker).any(axis=0)  # (stages)
    if fault.stage is not None:
        is_blamed = np.arange(len(ratios)) == fault.stage
    largest = float(differences[is_blamed].max())
    low, high = (SHARED_BLAME, np.inf) if is_even_better else (EQUAL_BLAME, 1 / EQUAL_BLAME)
    is_uneven = (differences > max(UNEVEN_DIFFERENCE, low * largest)) & (
        differences <= high * max(largest, UNEVEN_DIFFERENCE)
    )
    is_on_others = (table.placement != fault.worker).all(axis=0)
    return bool((is_uneven & is_on_others).any())


def _share(seconds: float, total: float) -> str:
    return f"{100 * seconds / (total or 1.0):.3g} %"


def _slow_stages(trial: FaultRemoved, times: ComputeTimes) -> Iterator[Fault]:
    """Yield slow stages; `trial.saves` evaluates the run at times that the rules scale."""
    for stage, ratio in enumerate(against_others(times.stages).tolist()):
        if MIN_SLOW_RATIO < ratio < np.inf:
            rules = f"compute@stage{stage}*{1 / ratio!r}"
            workers = sorted(set(trial.table.placement[:, stage].tolist()))
            names = " and ".join(map(str, workers))
            why = (
                f"stage {stage} on worker {names} takes {ratio:.3g} times the median of the others"
            )
            yield Fault("imbalance", trial.saves(rules), why, workers[0], stage, rules=rules)


def _slow_workers(trial: FaultRemoved, times: ComputeTimes) -> Iterator[Fault]:
    """Yield workers that are slow on all of their stages."""
    stage_ratios = against_others(times.stages)
    for worker, ratio in enumerate(against_others(times.workers).tolist()):
        stages = np.flatnonzero((trial.table.placement == worker).any(axis=0))
        min_stage_ratio = 1 + STAGE_SHARE_OF_SLOWDOWN * (ratio - 1)
        if not MIN_SLOW_RATIO < ratio < np.inf or (stage_ratios[stages] < min_stage_ratio).any():
            continue
        rules = f"compute@worker{worker}*{1 / ratio!r}"
        names = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        why = f"worker {worker} ({names}) takes {ratio:.3g} times the median of the others"
        only_stage = int(stages[0]) if len(stages) == 1 else None
        yield Fault("imbalance", trial.saves(rules), why, worker, only_stage, rules=rules)


def _slow_links(trial: FaultRemoved) -> Iterator[Fault]:
    """Yield the link whose speed-up saves most, of those above the median of the other links."""
    faults = []
    groups = message_times(trial.table, trial.run.costs)
    seconds = np.array([np.mean(list(by_boundary.values())) for by_boundary in groups.values()])
    ratios = against_others(seconds).tolist()
    for (pair, by_boundary), ratio in zip(groups.items(), ratios, strict=True):
        if ratio > MIN_SLOW_RATIO:
            rules = ",".join(f"message@boundary{b}*{1 / ratio!r}" for b in by_boundary)
            boundaries = ", ".join(map(str, by_boundary))
            excess = f"take {ratio:.3g} times the median of the others"
            if np.isinf(ratio):
                excess = "take time, but most other messages take none"
            workers = f"messages between workers {pair[0]} and {pair[1]}"
            why = f"{workers} (stage boundary {boundaries}) {excess}"
            faults.append(Fault("link", trial.saves(rules), why, link=pair, rules=rules))
    if faults:
        yield max(faults, key=lambda fault: fault.seconds)


def _place(fault: Fault) -> str:
    """Name the link, stage or worker of a fault, or the split over all stages."""
    if fault.link is not None:
        return f"the link between workers {fault.link[0]} and {fault.link[1]}"
    if fault.stage is not None:
        return f"stage {fault.stage}"
    return "the split over stages" if fault.worker is None else f"worker {fault.worker}"


def _joint_faults(trial: FaultRemoved, faults: Sequence[Fault]) -> Iterator[Fault]:
    """Yield a joint fault of two if, without one of them, ops still wait for the other."""
    rules, total = ",".join(fault.rules for fault in faults), trial.run.makespan
    saved, alone = trial.saves(rules), [max(fault.seconds, 0.0) for fault in faults]
    if len(faults) > 1 and saved > HIDING_RATIO * sum(alone) + NEGLIGIBLE * total:
        names = " and ".join(map(_place, faults))
        both, first, second = (_share(seconds, total) for seconds in (saved, *alone))
        why = f"{names} hide each other: without both the step is {both} shorter"
        why += f", without the first {first}, without the second {second}"
        yield Fault(JOINT, saved, why, rules=rules)


def _rule_faults(trial: FaultRemoved) -> Iterator[Fault]:
    """Yield a cause for the ordering rules that the table adds to the usual ones, if it has any."""
    table, run = without_rules(trial.table), trial.run
    if table is not None:
        texts = [text for text in trial.table.grammar.texts if text not in table.grammar.texts]
        saved = run.makespan - evaluate(table, run.costs, link=run.links).makespan
        why = f"ops wait by rules of the table, as {texts[0]} ({len(texts)} in all)"
        yield Fault(RULES, saved, why)


def message_times(
    table: ScheduleTable, costs: Costs
) -> Mapping[tuple[int, int], Mapping[int, float]]:
    """Return {pair of workers: {stage boundary between them: mean message time [s]}}."""
    edges = table.grammar.edges(table.num_stages)
    times = np.zeros((2, table.num_pipes, len(edges)))  # mean message times [s]
    for name in MESSAGE_FIELDS:
        seconds = np.asarray(getattr(costs, name), float)
        if seconds.ndim == 4:  # the last axis is microbatches
            seconds = seconds.mean(axis=-1)
        times += seconds
    times_by_pair: dict[tuple[int, int], dict[int, float]] = {}
    placement = table.placement[0]
    for boundary, mean in enumerate(times.mean(axis=(0, 1)).tolist()):
        first, second = sorted(placement[list(edges[boundary])].tolist())
        if first != second:
            times_by_pair.setdefault((first, second), {})[boundary] = mean
    return times_by_pair


def _longest_wait(run: Evaluation) -> str:
    """Say which transfer waits longest, and behind which; empty without queues."""
    try:
        longest = transfer_waits(run).transfers[0]
    except ValueError:  # other link models have no such queues
        return ""
    if longest.cell is None or longest.front is None:
        return ""
    text = run.table.grammar.text
    transfer, front = text((longest.cell,)), text((longest.front,))
    return f"; on worker {longest.worker}, {transfer} waits longest, behind {front}"


def _longest_microbatch(run: Evaluation) -> str:
    seconds = ComputeTimes.from_run(run).microbatches
    longest = int(seconds.argmax())
    ratio = seconds[longest] / (seconds.mean() or 1.0)
    return f"; microbatch {longest} takes {ratio:.3g} times the mean"


WHY: Mapping[str, str] = {  # by the name of a part
    name: record["cause"] for name, record in PART_RECORDS.items() if "cause" in record
}
DETAILS = {"blocking": _longest_wait, "uneven microbatches": _longest_microbatch}


def _part_faults(trial: FaultRemoved, seconds: Mapping[str, float]) -> Iterator[Fault]:
    """Yield a cause for each part of the step in which ops wait, and for too few microbatches."""
    # `seconds` is {part: time [s]}. The part of uneven microbatches is added before messages, and
    # so differs from the time that equal microbatches would save.
    run = trial.run
    equal = evaluate(run.table, with_equal_microbatches(run.costs, run.table), link=run.links)
    seconds = {**seconds, "uneven microbatches": run.makespan - equal.makespan}
    lanes = {name: f"compute waits for ops on {name}" for name in seconds if name.startswith(LANE)}
    for name, why in {**WHY, **lanes}.items():
        if seconds[name] > 0:
            details = DETAILS[name](run) if name in DETAILS else ""
            yield Fault(name, seconds[name], f"{why}{details}")
    ends, ends_text = pipeline_ends(seconds, run.makespan)
    saved_share = max(0.0, 1 - run.microbatches / (ENOUGH * run.workers))
    noun = "microbatches are" if run.microbatches > 1 else "microbatch is"
    why = f"{run.microbatches} {noun} few for {run.workers} workers: {ends_text}"
    yield Fault("microbatches", ends * saved_share, why)


def pipeline_ends(seconds: Mapping[str, float], step: float) -> tuple[float, str]:
    """Return the time [s] in which a pipeline fills and drains, and a sentence about it."""
    ends = seconds["start"] + seconds["end"]
    return ends, f"start and end of the pipeline take {_share(ends, step)} of the step"
