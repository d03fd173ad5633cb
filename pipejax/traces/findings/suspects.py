"""Outliers of a measured run: slow workers, stages, links, microbatches and steps, wrong clocks.

Each is compared with the median of the others of its kind. Common delays of all stages or all
microbatches are subtracted first, so a slow worker makes no microbatch slow. A suspect takes at
least 1.1 times the time of the others, and differs by at least five standard errors.
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

MIN_RATIO = 1.1  # to the median of the others
MIN_Z = 5.0  # standard errors
RELATIVE_ERROR = 0.01  # smallest standard error of a time
MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean
MAX_LISTED = 10  # suspects of a kind
GAP_ERROR = 0.1  # standard error of the time between two steps, relative to the median op
MIN_MESSAGE_DELAY = 0.05  # of a suspect link, relative to the median op

Logs = Float[NumpyArray, " things"]


@short_repr
class Suspect(NamedTuple):
    """An outlier among the others of its kind.

    Attributes:
      kind: clock, replica, worker, stage, link (from a worker to another), microbatch or step.
      name: its number or name.
      seconds: extra time per step against the others [s]; of a link, per message; of a clock, its
        lead over the others.
      ratio: its time over the median of the others; None of a clock and of a late start.
      z: difference in standard errors.
      why: reason, in words.
    """

    kind: str
    name: str
    seconds: float
    ratio: float | None
    z: float
    why: str


def suspects(replayed: Replay, offsets: Sequence[Offset] = ()) -> Sequence[Suspect]:
    """Find workers, stages, links, microbatches, replicas and steps that are outliers.

    With one stage per worker, a slow stage is also a slow worker, and both are suspects. Of only
    two of a kind, the slower one is a suspect.

    Args:
      replayed: a replayed trace.
      offsets: offsets of its clocks, from `aligned`.

    Returns:
      Wrong clocks first, then others by extra time per step; at most ten of a kind.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.0, 1.3, 1.0], backward=[2, 2, 2.6, 2]))
      >>> replayed = pj.traces.replay(pj.traces.find_pipelines(pj.traces.record_runs([run] * 4)))
      >>> [(row.kind, row.name, round(row.ratio, 3)) for row in pj.traces.suspects(replayed)]
      [('worker', '2', 1.3), ('stage', '2', 1.3)]
    """
    check_types(replayed=(replayed, Replay), offsets=(offsets, Sequence))
    times = _MicrobatchTimes.measure(replayed.pipelines)
    wrong_workers = {offset.worker for offset in offsets if offset.is_corrected}
    workers = list(times.slow_workers())
    kinds = (
        times.slow_replicas(),
        workers,
        times.slow_stages(workers),
        times.slow_microbatches(),
        _slow_links(replayed.pipelines, wrong_workers, times.median_op),
        _slow_steps(replayed.pipelines, times.median_op),
    )
    results = [suspect for kind in kinds for suspect in sorted(kind, key=_sort_key)[:MAX_LISTED]]
    return ResultList([*list(_wrong_clocks(offsets))[:MAX_LISTED], *sorted(results, key=_sort_key)])


def _sort_key(suspect: Suspect) -> float:
    return -suspect.seconds


def _compare_others(values: Logs, errors: Logs | float) -> tuple[Logs, Logs, Logs]:
    """Compare each value with all others: their median, the excess over it, its standard errors."""
    # `errors` are standard errors of the values themselves; the spread of the others adds to them.
    size = len(values)
    if size < 2:
        return values, np.zeros(size), np.zeros(size)
    medians, spread = medians_of_others(values), np.zeros(size)
    for median in np.unique(medians):  # at most three different ones
        is_same = medians == median
        spread[is_same] = DEVIATION * medians_of_others(np.abs(values - median))[is_same]
    excess = values - medians
    z = excess / np.sqrt(spread**2 + np.square(errors) + RELATIVE_ERROR**2)
    return medians, excess, z


def _find_outliers(logs: Logs, errors: Logs | float) -> Iterator[tuple[int, float, float, float]]:
    """Yield position, median of the others [s], ratio to it, and z of outliers among log times."""
    medians, excess, z = _compare_others(logs, errors)
    for k in np.flatnonzero((excess > np.log(MIN_RATIO)) & (z > MIN_Z)).tolist():
        yield k, float(np.exp(medians[k])), float(np.exp(excess[k])), float(z[k])


def is_outlier(seconds: Logs) -> Bool[NumpyArray, " things"]:
    """Return which times [s] are outliers among the others."""
    result = np.zeros(len(seconds), bool)
    for k, *_ in _find_outliers(np.log(np.maximum(seconds, 1e-12)), 0.0):
        result[k] = True
    return result


class _MicrobatchTimes(NamedTuple):
    """Total time of every microbatch on every stage; a run is one pipeline in one step."""

    step: Int[NumpyArray, " runs"]
    replica: Int[NumpyArray, " runs"]
    worker: Int[NumpyArray, "stages microbatches"]
    logs: Float[NumpyArray, "runs stages microbatches"]  # log of seconds
    # log excess of a microbatch that most stages share, over the medians of the stages
    common: Float[NumpyArray, "runs microbatches"]
    stage_logs: Float[NumpyArray, "runs stages microbatches"]  # logs minus common
    noise: float  # standard deviation of stage_logs about the median of the stage
    median_op: float  # [s]

    @classmethod
    def measure(cls, pipelines: Pipelines) -> "_MicrobatchTimes":
        """Sum the ops of each microbatch on each stage, and separate common from stage times."""
        trace, runs = pipelines.trace, pipelines.pipelines
        shape = pipelines.table.num_stages, pipelines.table.num_microbatches
        ops = PipelineOps.select(trace, runs)
        durations = _split_pairs(ops, trace.stages)
        place = ops.stage, ops.microbatch
        seconds = np.zeros((len(runs), *shape))
        np.add.at(seconds, (ops.run, *place), durations)
        worker = np.full(shape, NONE)
        worker[place] = trace.worker[ops.slices]
        logs = np.log(np.maximum(seconds, 1e-12))
        excess = logs - np.median(logs, axis=(0, 2), keepdims=True)
        # lower quartile over stages: one interrupted op makes no microbatch slow
        common = np.quantile(excess, 0.25, axis=1, method="lower")
        step, replica = np.array([(run.step, run.replica) for run in runs]).T
        stage_logs = logs - common[:, None]
        residuals = stage_logs - np.median(stage_logs, axis=(0, 2), keepdims=True)
        noise = float(DEVIATION * np.median(np.abs(residuals)))
        median_op = float(np.median(durations))
        return cls(step, replica, worker, logs, common, stage_logs, noise, median_op)

    def _error(self, count: int) -> float:
        """Return the standard error of a median of so many logs."""
        return MEDIAN_ERROR * self.noise / np.sqrt(count)

    def slow_stages(self, workers: Sequence[Suspect]) -> Iterator[Suspect]:
        """Yield stages that are slow in all replicas, unless a slow worker explains them."""
        runs, microbatches = self.common.shape
        medians = np.median(self.stage_logs, axis=(0, 2))
        slow_workers = {suspect.name for suspect in workers}
        for k, usual, ratio, z in _find_outliers(medians, self._error(runs * microbatches)):
            stage_workers = np.unique(self.worker[k]).tolist()
            is_only_stage = all(
                (self.worker == worker).any(axis=1).sum() == 1 for worker in stage_workers
            )
            if is_only_stage or not slow_workers.issuperset(map(str, stage_workers)):
                seconds = (ratio - 1) * usual * microbatches
                why = f"takes {ratio:.3g} times the median stage"
                yield Suspect("stage", str(k), seconds, ratio, z, why)

    def slow_replicas(self) -> Iterator[Suspect]:
        """Yield replicas that are slow on all of their stages, for whatever reason."""
        numbers = np.unique(self.replica)
        excess = self.logs - np.median(self.logs, axis=(0, 2), keepdims=True)
        least_excess = np.array(
            [np.median(excess[self.replica == k], axis=(0, 2)).min() for k in numbers]
        )
        error = self._error(self.common.size // len(numbers))
        for k, _, ratio, z in _find_outliers(least_excess, error):
            total = np.exp(self.logs[self.replica == numbers[k]]).sum(axis=(1, 2)).mean()
            seconds = float(total) / len(np.unique(self.worker)) * (1 - 1 / ratio)
            why = f"takes {ratio:.3g} times the others in all its stages"
            yield Suspect("replica", str(numbers[k]), seconds, ratio, z, why)

    def slow_workers(self) -> Iterator[Suspect]:
        """Yield workers of a replica that are slow on all of their stages."""
        replicas = np.unique(self.replica)
        logs = self.stage_logs
        if len(replicas) > 1:  # compare with the same stages of other replicas
            logs = logs - np.median(logs, axis=(0, 2))[:, None]
        names, least_excess, counts = [], [], []
        for replica in replicas.tolist():
            replica_logs = logs[self.replica == replica]
            for worker in np.unique(self.worker).tolist():
                on_worker = self.worker == worker
                stages = np.flatnonzero(on_worker.any(axis=1))
                stage_logs = [replica_logs[:, stage, on_worker[stage]] for stage in stages]
                names.append((worker, replica))
                least_excess.append(min(float(np.median(row)) for row in stage_logs))
                counts.append(min(row.size for row in stage_logs))
        errors = np.array([self._error(count) for count in counts])
        for k, _, ratio, z in _find_outliers(np.array(least_excess), errors):
            worker, replica = names[k]
            on_worker = self.worker == worker
            total = np.exp(self.logs[self.replica == replica][:, on_worker]).sum(axis=1).mean()
            suffix = f" of replica {replica}" if len(replicas) > 1 else ""
            why = f"takes {ratio:.3g} times the others in all its stages"
            seconds = float(total) * (1 - 1 / ratio)
            yield Suspect("worker", f"{worker}{suffix}", seconds, ratio, z, why)

    def slow_microbatches(self) -> Iterator[Suspect]:
        """Yield microbatches that are slow on most stages: in most steps, or in one step."""
        runs, count = self.common.shape
        usual = np.median(self.common, axis=0)
        totals = np.exp(self.logs).sum(axis=1).mean(axis=0)
        for k, _, ratio, z in _find_outliers(usual, self._error(runs)):
            why = f"takes {ratio:.3g} times the others, in most steps"
            yield Suspect("microbatch", str(k), float(totals[k]) * (1 - 1 / ratio), ratio, z, why)
        if runs == 1:
            return
        excess = self.common - usual
        excess = excess - np.median(excess, axis=1, keepdims=True)
        has_replicas = len(np.unique(self.replica)) > 1
        for k, _, ratio, z in _find_outliers(excess.ravel(), self._error(1)):
            run, microbatch = divmod(k, count)
            suffix = f" of replica {self.replica[run]}" if has_replicas else ""
            seconds = float(np.exp(self.logs[run, :, microbatch]).sum()) * (1 - 1 / ratio)
            why = f"takes {ratio:.3g} times the others in most stages"
            name = f"{microbatch}{suffix} in step {self.step[run]}"
            yield Suspect("microbatch", name, seconds, ratio, z, why)


def _split_pairs(ops: PipelineOps, stages: int) -> Float[NumpyArray, " ops"]:
    """Return the times of ops, where each half of a fused pair has a time of its own [s]."""
    # A half gets the median time of such ops alone, scaled by the pair's time over the median pair.
    # So stages with more or fewer pairs compare with each other.
    seconds, is_first = ops.seconds.copy(), ops.is_first
    if not is_first.any():
        return seconds
    is_alone, kind = ~(is_first | ops.is_second), ops.phase * stages + ops.stage
    alone = _medians(seconds[is_alone], kind[is_alone], len(OPS) * stages).reshape(-1, stages)
    full, *halves = map(OPS.index, "BIW")
    _fill_unknown(alone[full], alone[halves].sum(axis=0))
    for row in alone:
        _fill_unknown(row, np.full(stages, np.median(seconds[is_first]) / 2))
    median_pair = _medians(seconds[is_first], ops.stage[is_first], stages)  # by the forward's stage
    slowdown = seconds[is_first] / median_pair[ops.stage[is_first]]
    for is_half in (is_first, ops.is_second):
        seconds[is_half] = alone.flat[kind[is_half]] * slowdown
    return seconds


def _fill_unknown(row: Float[NumpyArray, " stages"], model: Float[NumpyArray, " stages"]) -> None:
    """Replace NaN in a row by the model, scaled by the median ratio of both; in place."""
    is_unknown = np.isnan(row)
    has_ratio = ~is_unknown & (model > 0)
    ratio = np.median(row[has_ratio] / model[has_ratio]) if has_ratio.any() else 1.0
    row[is_unknown] = ratio * model[is_unknown]


def _medians(
    values: Float[NumpyArray, " some"], group: Int[NumpyArray, " some"], groups: int
) -> Float[NumpyArray, " groups"]:
    """Return the median of the values of each group; NaN of an empty group."""
    order, medians = np.argsort(group, kind="stable"), np.full(groups, np.nan)
    for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        medians[group[members[0]]] = np.median(values[members])
    return medians


def _slow_links(
    pipelines: Pipelines, wrong_workers: set[int], median_op: float
) -> Iterator[Suspect]:
    """Yield links between workers whose two quickest messages are slow and some op waited for."""
    # The quickest messages have waited for nothing else. Workers with a wrong clock are skipped.
    placement, boundaries = pipelines.table.placement[0], pipelines.table.num_stages - 1
    # by (sender, receiver), all messages; by (sender, receiver, link), those of one boundary
    times: dict[tuple[int, ...], list[NumpyArray]] = {}
    has_waits: set[tuple[int, ...]] = set()
    for link, (seconds, strength) in enumerate(by_link(simple_evidence(pipelines), 2 * boundaries)):
        if not len(seconds):  # both stages are on one worker
            continue
        source, target = placement[[*link_ends(link, boundaries)]].tolist()
        for key in ((source, target), (source, target, link)):
            times.setdefault(key, []).append(seconds)
            if (strength >= FIRST).any():
                has_waits.add(key)
    names = set[str]()
    for size in (2, 3):
        keys = [k for k in times if len(k) == size and k in has_waits]
        keys = [key for key in keys if wrong_workers.isdisjoint(key[:2])]
        quickest = [np.sort(np.maximum(np.concatenate(times[key]), 1e-9))[:2] for key in keys]
        logs = np.array([np.log(pair).mean() for pair in quickest])
        errors = np.array([np.ptp(np.log(pair)) / 2 for pair in quickest])
        for k, usual, ratio, z in _find_outliers(logs, errors):
            delay, name = (ratio - 1) * usual, "worker {} to {}".format(*keys[k])
            if delay > MIN_MESSAGE_DELAY * median_op and name not in names:
                names.add(name)
                why = f"its quickest messages take {ratio:.3g} times those of the others"
                yield Suspect("link", name, delay, ratio, z, why)


def _slow_steps(pipelines: Pipelines, median_op: float) -> Iterator[Suspect]:
    """Yield steps that take longer than others, and steps that begin later after the previous."""
    trace, runs = pipelines.trace, pipelines.pipelines
    steps, run_step = np.unique([run.step for run in runs], return_inverse=True)
    begin, end = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(begin, run_step, [trace.start[run.slices].min() for run in runs])
    np.maximum.at(end, run_step, [trace.end[run.slices].max() for run in runs])
    for k, usual, ratio, z in _find_outliers(np.log(np.maximum(end - begin, 1e-12)), 0.0):
        why = f"takes {ratio:.3g} times the median step"
        yield Suspect("step", str(steps[k]), (ratio - 1) * usual, ratio, z, why)
    is_consecutive = np.diff(steps) == 1
    gaps = (begin[1:] - end[:-1])[is_consecutive] / median_op
    if (gaps < -1).any():  # every step has its own clock
        return
    _, excess, z_scores = _compare_others(gaps, GAP_ERROR)
    for k in np.flatnonzero((excess > 1) & (z_scores > MIN_Z)).tolist():
        delay, name = float(excess[k]) * median_op, str(steps[1:][is_consecutive][k])
        why = "begins later after the step before than others do"
        yield Suspect("step", name, delay, None, float(z_scores[k]), why)


def _wrong_clocks(offsets: Sequence[Offset]) -> Iterator[Suspect]:
    """Yield corrected clocks; none if clocks restart in every step, as they are not wrong then."""
    has_replicas = len({offset.replica for offset in offsets}) > 1
    for offset in sorted(offsets, key=lambda offset: -abs(offset.seconds)):
        if offset.is_corrected and offset.step == NONE:
            suffix = f" of replica {offset.replica}" if has_replicas else ""
            error = max(offset.residual, RELATIVE_ERROR * abs(offset.seconds), 1e-12)
            why = f"is ahead of the others, or behind; known to {1e3 * offset.residual:.3g} ms"
            z = abs(offset.seconds) / error
            yield Suspect("clock", f"{offset.worker}{suffix}", offset.seconds, None, z, why)
