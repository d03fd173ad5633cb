"""Slow workers, stages, links, microbatches and steps of a measured run.

Each is held against the median of the others of its kind. What all stages, or all microbatches,
have in common is taken off first, so a slow worker makes no microbatch slow. A suspect takes 1.1
times what the others do, by five times of what they and its own measurements differ.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import ResultList, short_repr
from pipejax.base.medians import DEVIATION, medians_of_others
from pipejax.traces.clocks import Offset
from pipejax.traces.record import NONE, OPS
from pipejax.traces.replaying.messages import FIRST, by_link, link_ends, simple_evidence
from pipejax.traces.replaying.pipelines import PipelineOps, Pipelines
from pipejax.traces.replaying.replay import Replay

NOTABLE = 1.1  # times the median of the others, below which nothing is suspect
CERTAIN = 5.0  # standard errors, likewise
EXACT = 0.01  # what is measured best is known to so much of itself
OF_MEDIAN = 1.2533  # standard error of its median over that of its mean
LISTED = 10  # of a kind: where more are slow, things of this kind differ
LATE = 0.1  # of the median op: how well the time between two steps is known
NOTICED = 0.05  # of the median op: a message that takes so little more than others is as they are

Logs = Float[NumpyArray, " things"]


@short_repr
class Suspect(NamedTuple):
    """Something that is slower than the others of its kind.

    Attributes:
      kind: clock, replica, worker, stage, link (from a worker to another), microbatch or step.
      name: which one.
      seconds: what a step has more of it than if it took what the others do [s]; of a link that of
        one message, of a step that of itself, of a clock how far it is ahead.
      ratio: how many times the median of the others it takes; None of a clock and of a late start.
      z: how many standard errors that is.
      why: in words.
    """

    kind: str
    name: str
    seconds: float
    ratio: float | None
    z: float
    why: str


def suspects(replayed: Replay, offsets: Sequence[Offset] = ()) -> Sequence[Suspect]:
    """Name what is slower than the others of its kind.

    With one stage on each worker a slow stage is a slow worker: both are named. Of two of a kind
    the slower one is named.

    Args:
      replayed: a replayed trace.
      offsets: of its clocks, as `aligned` says them.

    Returns:
      Wrong clocks first, then by what a step has more; ten of a kind at most.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.0, 1.3, 1.0], backward=[2, 2, 2.6, 2]))
      >>> replayed = pj.traces.replay(pj.traces.pipelines_of(pj.traces.of_runs([run] * 4)))
      >>> [(one.kind, one.name, round(one.ratio, 3)) for one in pj.traces.suspects(replayed)]
      [('worker', '2', 1.3), ('stage', '2', 1.3)]
    """
    check_types(replayed=(replayed, Replay), offsets=(offsets, Sequence))
    work = _MicrobatchTimes.measure(replayed.pipelines)
    wrong = {(offset.replica, offset.worker) for offset in offsets if offset.is_corrected}
    workers = list(work.workers())
    kinds = (
        work.replicas(),
        workers,
        work.stages(workers),
        work.microbatches(),
        _links(replayed.pipelines, wrong, work.op),
        _steps(replayed.pipelines, work.op),
    )
    results = [suspect for kind in kinds for suspect in sorted(kind, key=_by_seconds)[:LISTED]]
    return ResultList([*list(_clocks(offsets))[:LISTED], *sorted(results, key=_by_seconds)])


def _by_seconds(suspect: Suspect) -> float:
    return -suspect.seconds


def _compare_others(values: Logs, errors: Logs | float) -> tuple[Logs, Logs, Logs]:
    """Median of the others; how far above it each is; and by how many standard errors."""
    size = len(values)
    if size < 2:
        return values, np.zeros(size), np.zeros(size)
    middle, spread = medians_of_others(values), np.zeros(size)
    for median in np.unique(middle):  # three at most
        is_same = middle == median
        spread[is_same] = DEVIATION * medians_of_others(np.abs(values - median))[is_same]
    above = values - middle
    z = above / np.sqrt(spread**2 + np.square(errors) + EXACT**2)
    return middle, above, z


def _notable(values: Logs, errors: Logs | float) -> Iterator[tuple[int, float, float, float]]:
    """Position, usual size, ratio and z of what is above the others; values are logarithms."""
    middle, above, z = _compare_others(values, errors)
    for k in np.flatnonzero((above > np.log(NOTABLE)) & (z > CERTAIN)).tolist():
        yield k, float(np.exp(middle[k])), float(np.exp(above[k])), float(z[k])


def is_outlier(seconds: Logs) -> Bool[NumpyArray, " things"]:
    """Return which of some times would be suspect among the others."""
    result = np.zeros(len(seconds), bool)
    for k, *_ in _notable(np.log(np.maximum(seconds, 1e-12)), 0.0):
        result[k] = True
    return result


class _MicrobatchTimes(NamedTuple):
    """Time of every microbatch in every stage, all its ops together."""

    step: Int[NumpyArray, " runs"]  # number of the step of each pipeline
    replica: Int[NumpyArray, " runs"]
    worker: Int[NumpyArray, "stages microbatches"]  # that runs them
    logs: Float[NumpyArray, "runs stages microbatches"]  # logarithm of seconds
    # of a microbatch in the quicker stages, beyond their own
    common: Float[NumpyArray, "runs microbatches"]
    # logs of microbatches that all other stages take as usual
    stage_logs: Float[NumpyArray, "runs stages microbatches"]
    noise: float  # standard deviation of these, of the median of their stage
    op: float  # median op [s]

    @classmethod
    def measure(cls, pipelines: Pipelines) -> "_MicrobatchTimes":
        """Add up the ops of each microbatch in each stage."""
        trace, runs = pipelines.trace, pipelines.pipelines
        shape = pipelines.table.num_stages, pipelines.table.num_microbatches
        ops = PipelineOps.of(trace, runs)
        durations = _split_pairs(ops, trace.stages)
        place = ops.stage, ops.microbatch
        seconds = np.zeros((len(runs), *shape))
        np.add.at(seconds, (ops.run, *place), durations)
        worker = np.full(shape, NONE)
        worker[place] = trace.worker[ops.slices]
        logs = np.log(np.maximum(seconds, 1e-12))
        beyond = logs - np.median(logs, axis=(0, 2), keepdims=True)
        # an op that was interrupted makes no microbatch slow
        common = np.quantile(beyond, 0.25, axis=1, method="lower")
        step, replica = np.array([(run.step, run.replica) for run in runs]).T
        stage_logs = logs - common[:, None]
        off = stage_logs - np.median(stage_logs, axis=(0, 2), keepdims=True)
        noise, usual = float(DEVIATION * np.median(np.abs(off))), float(np.median(durations))
        return cls(step, replica, worker, logs, common, stage_logs, noise, usual)

    def _error(self, count: int) -> float:
        return OF_MEDIAN * self.noise / np.sqrt(count)

    def stages(self, workers: Sequence[Suspect]) -> Iterator[Suspect]:
        """Stages that are slow in all replicas; not where all stages of their worker are."""
        runs, microbatches = self.common.shape
        values = np.median(self.stage_logs, axis=(0, 2))
        named = {suspect.name for suspect in workers}
        for k, usual, ratio, z in _notable(values, self._error(runs * microbatches)):
            on = np.unique(self.worker[k]).tolist()
            is_alone = all((self.worker == worker).any(axis=1).sum() == 1 for worker in on)
            if is_alone or not named.issuperset(map(str, on)):
                seconds = (ratio - 1) * usual * microbatches
                why = f"takes {ratio:.3g} times the median stage"
                yield Suspect("stage", str(k), seconds, ratio, z, why)

    def replicas(self) -> Iterator[Suspect]:
        """Replicas that are slow in all of their stages, data and all."""
        numbers = np.unique(self.replica)
        beyond = self.logs - np.median(self.logs, axis=(0, 2), keepdims=True)
        values = np.array(
            [np.median(beyond[self.replica == k], axis=(0, 2)).min() for k in numbers]
        )
        error = self._error(self.common.size // len(numbers))
        for k, _, ratio, z in _notable(values, error):
            took = np.exp(self.logs[self.replica == numbers[k]]).sum(axis=(1, 2)).mean()
            seconds = float(took) / len(np.unique(self.worker)) * (1 - 1 / ratio)
            why = f"takes {ratio:.3g} times the others in all its stages"
            yield Suspect("replica", str(numbers[k]), seconds, ratio, z, why)

    def workers(self) -> Iterator[Suspect]:
        """Workers, of each replica, that are slow in all of their stages."""
        replicas = np.unique(self.replica)
        usual_of_stage = np.median(self.stage_logs, axis=(0, 2))
        # beside the same stages of other replicas; without any, beside the other stages
        logs = self.stage_logs - usual_of_stage[:, None] if len(replicas) > 1 else self.stage_logs
        names, values, counts = [], [], []
        for replica in replicas.tolist():
            replica_logs = logs[self.replica == replica]
            for worker in np.unique(self.worker).tolist():
                on = self.worker == worker
                rows = [replica_logs[:, k, on[k]] for k in np.flatnonzero(on.any(axis=1))]
                names.append((worker, replica))
                values.append(min(float(np.median(row)) for row in rows))
                counts.append(min(row.size for row in rows))
        errors = np.array([self._error(count) for count in counts])
        for k, _, ratio, z in _notable(np.array(values), errors):
            worker, replica = names[k]
            on = self.worker == worker
            took = np.exp(self.logs[self.replica == replica][:, on]).sum(axis=1).mean()
            several = f" of replica {replica}" if len(replicas) > 1 else ""
            why = f"takes {ratio:.3g} times the others in all its stages"
            seconds = float(took) * (1 - 1 / ratio)
            yield Suspect("worker", f"{worker}{several}", seconds, ratio, z, why)

    def microbatches(self) -> Iterator[Suspect]:
        """Microbatches that are slow in most stages: in all steps, or in one."""
        runs, count = self.common.shape
        usual = np.median(self.common, axis=0)
        took = np.exp(self.logs).sum(axis=1).mean(axis=0)
        for k, _, ratio, z in _notable(usual, self._error(runs)):
            why = f"takes {ratio:.3g} times the others, in most steps"
            yield Suspect("microbatch", str(k), float(took[k]) * (1 - 1 / ratio), ratio, z, why)
        rest = self.common - usual
        rest = rest - np.median(rest, axis=1, keepdims=True)
        if runs == 1:
            return
        several = len(np.unique(self.replica)) > 1
        for k, _, ratio, z in _notable(rest.ravel(), self._error(1)):
            run, microbatch = divmod(k, count)
            suffix = f" of replica {self.replica[run]}" if several else ""
            seconds = float(np.exp(self.logs[run, :, microbatch]).sum()) * (1 - 1 / ratio)
            why = f"takes {ratio:.3g} times the others in most stages"
            name = f"{microbatch}{suffix} in step {self.step[run]}"
            yield Suspect("microbatch", name, seconds, ratio, z, why)


def _split_pairs(ops: PipelineOps, stages: int) -> Float[NumpyArray, " ops"]:
    """Split times of fused pairs [s]: each op alone, times the slowdown of the pair."""
    # So that ops are quicker as a pair makes no stage quick, nor those slow that have fewer pairs.
    seconds, first = ops.seconds.copy(), ops.is_first
    if not first.any():
        return seconds
    is_alone, kind = ~(first | ops.is_second), ops.phase * stages + ops.stage
    alone = _medians(seconds[is_alone], kind[is_alone], len(OPS) * stages).reshape(-1, stages)
    whole, *parts = map(OPS.index, "BIW")
    _fill_in(alone[whole], alone[parts].sum(axis=0))
    for row in alone:  # the first F of a step is alone, and its last backward
        _fill_in(row, np.full(stages, np.median(seconds[first]) / 2))
    usual = _medians(seconds[first], ops.stage[first], stages)  # by the stage of the forward
    more = seconds[first] / usual[ops.stage[first]]
    for is_half in (first, ops.is_second):
        seconds[is_half] = alone.flat[kind[is_half]] * more
    return seconds


def _fill_in(row: Float[NumpyArray, " stages"], like: Float[NumpyArray, " stages"]) -> None:
    """Put in what is not known: such a share of the other as what is known is of it."""
    unknown = np.isnan(row)
    both = ~unknown & (like > 0)
    share = np.median(row[both] / like[both]) if both.any() else 1.0
    row[unknown] = share * like[unknown]


def _medians(
    values: Float[NumpyArray, " some"], group: Int[NumpyArray, " some"], groups: int
) -> Float[NumpyArray, " groups"]:
    order, medians = np.argsort(group, kind="stable"), np.full(groups, np.nan)
    for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        medians[group[part[0]]] = np.median(values[part])
    return medians


def _links(pipelines: Pipelines, wrong: set[tuple[int, int]], op: float) -> Iterator[Suspect]:
    """Links from a worker to another whose two quickest messages are slow, if any is waited for."""
    # No message is used before it is there, so the quickest have waited for nothing else. Where a
    # clock was wrong, what its messages take is not known.
    placement, boundaries = pipelines.table.placement[0], pipelines.table.num_stages - 1
    times: dict[tuple[int, ...], list[NumpyArray]] = {}
    waited: set[tuple[int, ...]] = set()
    for link, (took, strength) in enumerate(by_link(simple_evidence(pipelines), 2 * boundaries)):
        if not len(took):  # both stages are on one worker
            continue
        source, target = placement[[*link_ends(link, boundaries)]].tolist()
        for ends in ((source, target), (source, target, link)):  # all messages, and one boundary
            times.setdefault(ends, []).append(took)
            if (strength >= FIRST).any():
                waited.add(ends)
    at_wrong, named = {worker for _, worker in wrong}, set[str]()
    for size in (2, 3):
        pairs = [p for p in times if len(p) == size and p in waited and at_wrong.isdisjoint(p[:2])]
        least = [np.sort(np.maximum(np.concatenate(times[pair]), 1e-9))[:2] for pair in pairs]
        values = np.array([np.log(two).mean() for two in least])
        errors = np.array([np.ptp(np.log(two)) / 2 for two in least])
        for k, usual, ratio, z in _notable(values, errors):
            seconds, name = (ratio - 1) * usual, "worker {} to {}".format(*pairs[k])
            if seconds > NOTICED * op and name not in named:
                named.add(name)
                why = f"its quickest messages take {ratio:.3g} times those of the others"
                yield Suspect("link", name, seconds, ratio, z, why)


def _steps(pipelines: Pipelines, op: float) -> Iterator[Suspect]:
    """Steps that take longer than others, and those that begin later after the one before."""
    trace, runs = pipelines.trace, pipelines.pipelines
    steps, place = np.unique([run.step for run in runs], return_inverse=True)
    begin, end = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(begin, place, [trace.start[run.slices].min() for run in runs])
    np.maximum.at(end, place, [trace.end[run.slices].max() for run in runs])
    for k, usual, ratio, z in _notable(np.log(np.maximum(end - begin, 1e-12)), 0.0):
        why = f"takes {ratio:.3g} times the median step"
        yield Suspect("step", str(steps[k]), (ratio - 1) * usual, ratio, z, why)
    goes_on = np.diff(steps) == 1
    gaps = (begin[1:] - end[:-1])[goes_on] / op
    if (gaps < -1).any():  # every step has a clock of its own
        return
    _, above, errors = _compare_others(gaps, LATE)
    for k in np.flatnonzero((above > 1) & (errors > CERTAIN)).tolist():
        late, name = float(above[k]) * op, str(steps[1:][goes_on][k])
        why = "begins later after the step before than others do"
        yield Suspect("step", name, late, None, float(errors[k]), why)


def _clocks(offsets: Sequence[Offset]) -> Iterator[Suspect]:
    """Clocks of which a message would have arrived before it was sent."""
    several = len({offset.replica for offset in offsets}) > 1
    for offset in sorted(offsets, key=lambda offset: -abs(offset.seconds)):
        if (
            offset.is_corrected and offset.step == NONE
        ):  # where every step has a zero, none is wrong
            suffix = f" of replica {offset.replica}" if several else ""
            z = abs(offset.seconds) / max(offset.residual, EXACT * abs(offset.seconds), 1e-12)
            why = f"is ahead of the others, or behind; known to {1e3 * offset.residual:.3g} ms"
            yield Suspect("clock", f"{offset.worker}{suffix}", offset.seconds, None, z, why)
