"""Outliers of a measured run: slow workers, stages, links, microbatches and steps, wrong clocks.

Delays that all stages or all microbatches share are subtracted first. So a slow worker makes no
microbatch slow. A replay of the job with the suspect as fast as the others gives its cost: the
difference of both step times.

A run is a pipeline in one step. A cell is a microbatch on a stage in a run.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.data_files import load_json
from pipejax.base.display import ResultList, short_repr
from pipejax.base.medians import DEVIATION, medians_of_others
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.traces.clocks import Offset
from pipejax.traces.findings.attribution import JobSteps, job_steps
from pipejax.traces.findings.op_times import cost_fields
from pipejax.traces.record import MESSAGES, NONE, OPS, Trace
from pipejax.traces.replaying.pipelines import PipelineOps, Pipelines, op_name
from pipejax.traces.replaying.replay import (
    FIRST,
    Replay,
    by_link,
    group_ops,
    link_workers,
    simple_evidence,
)

MIN_RATIO = 1.1  # smallest ratio of an outlier to the median of the others
MIN_Z = 5.0  # smallest excess of an outlier, in standard errors
RELATIVE_ERROR = 0.01  # smallest relative standard error of a time
MEDIAN_ERROR = 1.2533  # standard error of a median over the standard error of a mean
MAX_SHADOW = 1.25  # a place with at most this ratio of cost to a starved host is slow by the host
MIN_RATE = 0.01  # least share of a worker's time that remains if its host launches in time
MACHINES = ("worker", "host")  # kinds of suspects with a rank in the files
MAX_LISTED = 10  # largest number of suspects of a kind
GAP_ERROR = 0.1  # standard error of the time between two steps, over the median op
MIN_MESSAGE_DELAY = 0.05  # smallest delay of messages on a suspect link, over the median op
MAX_OTHER_PHASE = 0.25  # largest excess of other phases, over the excess of the slow phase
PHASES = "forwards", "backwards", "input gradients", "weight gradients", "recomputations"
# {kind of suspect: sentence with the ratio to the others}
WHY: Mapping[str, str] = load_json(Path(__file__).with_name("suspects.json"))

Logs = Float[NumpyArray, " values"]
Ranks = Mapping[tuple[int, int], int]  # {(replica, worker): rank in the files}
Place = Mapping[str, int]  # such as {"worker": 2, "replica": 0}
Cells = Bool[NumpyArray, "runs stages microbatches"]
CellLogs = Float[NumpyArray, "runs stages microbatches"]  # logarithms of seconds


@short_repr
class Suspect(NamedTuple):
    """An outlier among the workers, stages, links or other places of its kind.

    Attributes:
      kind: clock, replica, worker, stage, link (from a worker to another), microbatch or step;
        host, if the host of a worker launches late; launch, if an op starts late in most steps.
      name: number or name of the suspect.
      seconds: time that a step would save if all that the name lists were as fast as others [s];
        for a place in one step, time that this step would save; for a clock, the lead.
      ratio: time of the suspect over the median of the others; None for clocks and late starts.
      z: difference in standard errors.
      why: reason, in words.
      place: {"step", "replica", "worker", "stage" or "microbatch": number}. A link has "source" and
        "target" workers, and "ways": 2 if both directions are slow.
    """

    kind: str
    name: str
    seconds: float
    ratio: float | None
    z: float
    why: str
    place: Place


def suspects(replayed: Replay, offsets: Sequence[Offset] = ()) -> Sequence[Suspect]:
    """Find workers, stages, links, microbatches, replicas and steps that are outliers.

    With one stage per worker, a slow stage is also a slow worker, and both are suspects. If there
    are only two of a kind, the slower one is a suspect.

    Args:
      replayed: a replayed trace.
      offsets: offsets of clocks, from `aligned`.

    Returns:
      Suspects by cost per step, the largest first and at most ten of a kind; then wrong clocks.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.0, 1.3, 1.0], backward=[2, 2, 2.6, 2]))
      >>> replayed = pj.traces.replay(pj.traces.find_pipelines(pj.traces.record_runs([run] * 4)))
      >>> [(row.kind, row.name, round(row.ratio, 3)) for row in pj.traces.suspects(replayed)]
      [('worker', '2', 1.3), ('stage', '2', 1.3)]
    """
    check_types(replayed=(replayed, Replay), offsets=(offsets, Sequence))
    pipelines = replayed.pipelines
    times = _MicrobatchTimes.measure(pipelines)
    wrong_workers = {offset.worker for offset in offsets if offset.is_corrected}
    usual = times.without([*odd_steps(pipelines)])
    links = _slow_links(pipelines, wrong_workers, times.median_op)
    kinds = (*usual.slow_places(), _merge_ways(links))
    by_kind: dict[str, list[Suspect]] = {}
    for suspect in sorted(chain.from_iterable(kinds), key=lambda suspect: -(suspect.ratio or 0)):
        by_kind.setdefault(suspect.kind, []).append(suspect)
    places = [suspect for rows in by_kind.values() for suspect in rows[:MAX_LISTED]]
    places += _starved_hosts(pipelines, times)
    places = [*_with_costs(replayed, times, places), *_late_launches(replayed)]
    costly = _without_shadows(places, times)
    results = [*costly, *[*step_suspects(pipelines)][:MAX_LISTED]]
    first_step, num_steps = pipelines.pipelines[0].step, len({*times.step.tolist()})

    def cost_per_step(suspect: Suspect) -> float:
        """Return the cost per step that orders suspects; 0 for the first step (warm-up)."""
        if "step" not in suspect.place:
            return suspect.seconds
        weight = 1.0
        if suspect.kind == "step":
            # a step counts half, so that a microbatch that explains most of the step comes first
            weight = 0.0 if suspect.place["step"] == first_step else 0.5
        return weight * suspect.seconds / num_steps

    results.sort(key=cost_per_step, reverse=True)
    results = [*_with_ranks([*_without_explained(results, usual)], pipelines.trace.ranks)]
    return ResultList([*results, *list(_wrong_clocks(offsets))[:MAX_LISTED]])


def slow_machines(
    suspects: Iterable[Suspect], pipelines: Pipelines, layers: Sequence[int] | None = None
) -> list[Suspect]:
    """List the workers whose machines are slow, in all replicas or in some."""
    # `layers` (stages) are numbers of layers, if known
    table, num_replicas = pipelines.table, len({run.replica for run in pipelines.pipelines})
    has_twins = len(table.placement) == 1 and table.num_stages <= table.num_workers
    stages = table.placement[0].tolist()
    rows = [row for row in suspects if row.kind == "worker"]
    in_all = {row.place["worker"]: row for row in rows if "replica" not in row.place}
    if has_twins:  # the only stage of a worker may be the slow part
        sizes = len(stages), num_replicas
        in_all = {
            worker: row
            for worker, row in in_all.items()
            if not is_slow_stage(stages.index(worker), row.ratio or 1.0, *sizes, layers)
        }
    in_some = [row for row in rows if "replica" in row.place and row.place["worker"] not in in_all]
    return [*in_all.values(), *in_some]


def at_usual_speed(replayed: Replay, suspects: Sequence[Suspect]) -> Replay:
    """Return the replay with the ops of these suspects as fast as those of their peers."""
    if not suspects:
        return replayed
    pipelines, trace = replayed.pipelines, replayed.pipelines.trace
    times, gaps = _MicrobatchTimes.measure(pipelines), pipelines.gaps
    ops, seconds = times.ops, trace.end - trace.start
    for suspect in suspects:
        cells, ratio = times.cells(suspect.place), suspect.ratio or 1.0
        if suspect.kind == "host":  # it delays its ops, too: these gaps are no time of ops
            on_host = cells[ops.run, ops.stage, ops.microbatch]
            total, host_gaps = ops.seconds[on_host].sum(), gaps[ops.slices[on_host]]
            excess = (1 - 1 / ratio) * (total + host_gaps.sum())
            excess -= (host_gaps - np.median(gaps[ops.slices])).sum()
            ratio = total / max(total - max(excess, 0.0), MIN_RATE * total)
        seconds *= times.slice_factors(cells, ratio)
    usual = dataclasses.replace(trace, end=trace.start + seconds)
    pipelines = dataclasses.replace(pipelines, trace=usual)
    return dataclasses.replace(replayed, pipelines=pipelines)


def is_slow_stage(
    stage: int, ratio: float, num_stages: int, num_replicas: int, layers: Sequence[int] | None
) -> bool:
    """Return whether a stage, not the machine of its worker, is slow: one reading for all advice.

    The first and the last stage may have embedding or head. A stage that is slow in all replicas
    has other machines there. Layers are a reason if they explain half of the excess time.
    """
    usual = 0 if layers is None else float(np.median(layers))
    has_more = layers is not None and layers[stage] / usual - 1 >= (ratio - 1) / 2
    return has_more or num_replicas > 1 or stage in (0, num_stages - 1)


def _suspect(kind: str, place: Place, ratio: float, z: float) -> Suspect:
    """Return a suspect with its name, before its cost is computed."""
    words = ["and back"] if place.get("ways") == 2 else []
    words += [f"of replica {place['replica']}"] if "replica" in place and kind != "replica" else []
    words += [f"in step {place['step']}"] if "step" in place else []
    number = "worker {source} to {target}".format(**place) if kind == "link" else place[kind]
    name, why = " ".join([str(number), *words]), WHY[kind]
    return Suspect(kind, name, seconds=0.0, ratio=ratio, z=z, why=why, place=place)


def _with_ranks(suspects: Sequence[Suspect], ranks: Ranks) -> Iterator[Suspect]:
    """Add their ranks in the files to workers and hosts, and the names of those that mask them."""
    named = [(row, f"{row.name}{rank_text(ranks, row.place)}") for row in suspects]
    for row, name in named:
        # machines that mask each other have the same, joint cost
        masked = [(other, text) for other, text in named if other.kind == row.kind and row.seconds]
        joint = [text for other, text in masked if other.seconds == row.seconds]
        names = dict.fromkeys([name, *(joint if _is_masked(row) else ())])
        numbers = _rank_numbers(ranks, row.place)
        rank = {"rank": numbers[0]} if len(numbers) == 1 and row.kind in MACHINES else {}
        yield row._replace(name=" and ".join(names), place={**row.place, **rank})


def _rank_numbers(ranks: Ranks, place: Place) -> list[int]:
    """List the ranks of a worker in the files; empty if its number is its rank."""
    place_key = (place.get("replica"), place.get("worker"))
    numbers = [ranks[key] for key in sorted(ranks) if place_key in (key, (None, key[1]))]
    return [] if numbers == [place.get("worker")] else numbers


def rank_text(ranks: Ranks, place: Place) -> str:
    """Return the ranks of a worker, as " (ranks 2, 3)"; "" if its number is its rank."""
    numbers = _rank_numbers(ranks, place)
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f" ({noun} {', '.join(map(str, numbers))})" if numbers else ""


def _compare_others(values: Logs, errors: Logs | float) -> tuple[Logs, Logs, Logs]:
    """Return for each value the median of all others, the excess, and the excess over its error."""
    # `errors` are standard errors of the values; the spread of the other values adds to them.
    # Values 1 2 9 have the medians 5.5 5 1.5 and the excesses -4.5 -3 7.5.
    size = len(values)
    if size < 2:
        return values, np.zeros(size), np.zeros(size)
    medians, spread = medians_of_others(values), np.zeros(size)
    for median in np.unique(medians):  # a spread around each of the at most three medians
        is_same = medians == median
        spread[is_same] = DEVIATION * medians_of_others(np.abs(values - median))[is_same]
    excess = values - medians
    z = excess / np.sqrt(spread**2 + np.square(errors) + RELATIVE_ERROR**2)
    return medians, excess, z


def _find_outliers(logs: Logs, errors: Logs | float) -> Iterator[tuple[int, float, float, float]]:
    """Yield (index, median of all others [s], ratio to this median, z) of outliers in log times."""
    medians, excess, z = _compare_others(logs, errors)
    for k in np.flatnonzero((excess > np.log(MIN_RATIO)) & (z > MIN_Z)).tolist():
        yield k, float(np.exp(medians[k])), float(np.exp(excess[k])), float(z[k])


class _MicrobatchTimes(NamedTuple):
    """Total op time of every microbatch on every stage; a run is one pipeline in one step."""

    step: Int[NumpyArray, " runs"]
    replica: Int[NumpyArray, " runs"]
    worker: Int[NumpyArray, "stages microbatches"]
    logs: CellLogs
    # excess of the logarithms over the medians of the stages that most stages of a microbatch share
    common: Float[NumpyArray, "runs microbatches"]
    stage_logs: CellLogs  # logs - common
    noise: float  # standard deviation of stage_logs around the median of the stage
    median_op: float  # [s]
    trace: Trace
    ops: PipelineOps
    seconds: Float[NumpyArray, " ops"]  # time of each op; fused pairs are divided into two ops

    @classmethod
    def measure(cls, pipelines: Pipelines) -> "_MicrobatchTimes":
        """Sum op times by run, stage and microbatch, and separate the excess of microbatches."""
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
        step, replica = np.array([(run.step, run.replica) for run in runs]).T
        median = float(np.median(durations))
        common, stage_logs, noise = _separate_microbatches(logs)
        times = (logs, common, stage_logs, noise, median)
        return cls(step, replica, worker, *times, trace, ops, durations)

    def without(self, steps: Sequence[int]) -> "_MicrobatchTimes":
        """Return the times without these steps, so that odd steps do not move the medians."""
        runs = ~np.isin(self.step, steps)
        other_runs = self._replace(step=self.step[runs], replica=self.replica[runs])
        return other_runs.with_logs(self.logs[runs])

    def with_logs(self, logs: CellLogs) -> "_MicrobatchTimes":
        common, stage_logs, noise = _separate_microbatches(logs)
        return self._replace(common=common, stage_logs=stage_logs, noise=noise, logs=logs)

    def cells(
        self, place: Place, runs: slice | Bool[NumpyArray, " runs"] = slice(None)
    ) -> NumpyArray:
        """Return a mask of the cells (runs, stages, microbatches) of a place."""
        _, stages, microbatches = self.logs.shape
        numbers = {
            "step": self.step[runs, None, None],
            "replica": self.replica[runs, None, None],
            "worker": self.worker,
            "stage": np.arange(stages)[:, None],
            "microbatch": np.arange(microbatches),
        }
        result = np.ones((len(self.step[runs]), stages, microbatches), bool)
        for name in numbers.keys() & place.keys():  # a place may also have a rank
            result &= numbers[name] == place[name]
        return result

    def ratio(self, cells: Cells, is_normal: Cells, *, is_stage: bool) -> float | None:
        """Return the mean ratio of times of cells to normal cells; None without normal cells."""
        # Cells of a stage are compared with normal cells of this stage; with `is_stage`, cells of a
        # slow stage with the median stage. Means are more precise than medians, that find suspects.
        # `logs` has the axes runs, stages and microbatches
        normal = np.ma.masked_array(self.logs, ~is_normal).mean(axis=(0, 2), keepdims=True)
        if is_stage and normal.count():
            normal = np.median(normal.compressed())
        excess = (self.logs - normal)[cells]
        return float(np.exp(excess.mean())) if np.ma.count(excess) else None

    def are_stages_slow(self, cells: Cells) -> bool:
        """Return whether the mean of these cells is slow on every stage."""
        excess = np.ma.masked_array(self.logs - _stage_medians(self.logs), ~cells)
        return bool((excess.mean(axis=(0, 2)) > np.log(MIN_RATIO)).all())

    def slice_factors(self, cells: Cells, ratio: float) -> Float[NumpyArray, " slices"]:
        """Return a factor for the time of each slice that makes the cells `ratio` times faster."""
        ops, recorded, result = self.ops, self.seconds.copy(), np.ones(len(self.trace))
        faster = recorded / np.where(cells[ops.run, ops.stage, ops.microbatch], ratio, 1.0)
        # both ops of a fused pair, k and k + 1, take the time of the pair
        first = np.flatnonzero(ops.is_first)
        for seconds in (recorded, faster):
            seconds[first] += seconds[first + 1]
        result[ops.slices] = faster / np.maximum(recorded, 1e-12)
        return result

    def slow_phase(self, cells: Cells) -> str:
        """Name the only phase in which ops of these cells are slow; "" if there are more."""
        ops, ratios = self.ops, {}
        is_in_cells = cells[ops.run, ops.stage, ops.microbatch]
        # peers: ops of the same stage at other places, or ops of other stages
        is_peer = np.isin(ops.stage, ops.stage[is_in_cells]) & ~is_in_cells
        is_peer = is_peer if is_peer.any() else ~is_in_cells
        for k in np.unique(ops.phase).tolist():
            is_phase = ops.phase == k
            in_cells, peers = (self.seconds[is_phase & rows] for rows in (is_in_cells, is_peer))
            if len(in_cells) and len(peers):
                ratios[k] = float(np.median(in_cells) / max(np.median(peers), 1e-12))
        *others, ratio = sorted(ratios.values()) or [1.0]
        if not others or max(1 - others[0], others[-1] - 1) > MAX_OTHER_PHASE * (ratio - 1):
            return ""
        name = max(ratios, key=lambda k: ratios[k])
        return f", as its {PHASES[name]} ({OPS[name]}) take {ratio:.3g} times"

    def _error(self, count: int) -> float:
        """Return the standard error of a median of `count` logarithms."""
        return MEDIAN_ERROR * self.noise / np.sqrt(count)

    def slow_places(self) -> Iterator[Sequence[Suspect]]:
        """Yield slow workers, stages and microbatches of the run, then in replicas and steps."""
        (_, stages, count), replicas = self.logs.shape, np.unique(self.replica).tolist()
        workers = _places("worker", np.unique(self.worker).tolist())
        # if workers have one stage each, different machines hold a stage in different replicas
        has_machines = stages == len(workers) and len(replicas) > 1
        suspects = [] if has_machines else self._outliers("worker", self.stage_logs, workers)
        yield suspects
        slow_workers = {suspect.place["worker"] for suspect in suspects}
        slow_stages = self._outliers("stage", self.stage_logs, _places("stage", range(stages)))
        if stages > len(workers):  # slow workers explain their stages
            unexplained = [{*numbers.tolist()} - slow_workers for numbers in self.worker]
            slow_stages = [row for row in slow_stages if unexplained[row.place["stage"]]]
        yield slow_stages
        yield self._outliers(
            "microbatch", self.common[:, None], _places("microbatch", range(count))
        )
        if len(replicas) > 1:
            yield from self._slow_in_replicas(_places("replica", replicas), workers)
        yield self._slow_in_steps(replicas)

    def _slow_in_replicas(
        self, replicas: Sequence[Place], workers: Sequence[Place]
    ) -> Iterator[Sequence[Suspect]]:
        """Yield slow workers of one replica, then slow replicas, then slow microbatches of one."""
        microbatches = _places("microbatch", range(self.common.shape[1]))
        machines = [{**worker, **replica} for replica in replicas for worker in workers]
        yield self._outliers("worker", self.stage_logs - _stage_medians(self.stage_logs), machines)
        yield self._outliers("replica", self.logs - _stage_medians(self.logs), replicas)
        excess = self.common - np.median(self.common, axis=0)
        places = [{**row, **replica} for replica in replicas for row in microbatches]
        yield self._outliers("microbatch", excess[:, None], places)

    def _slow_in_steps(self, replicas: Sequence[int]) -> Sequence[Suspect]:
        """Return microbatches that are slower in one step than in other steps of the replica."""
        excess = np.empty_like(self.common)
        for replica in replicas:
            runs = self.replica == replica
            excess[runs] = self.common[runs] - np.median(self.common[runs], axis=0)
        excess -= np.median(excess, axis=1, keepdims=True)
        suspects = []
        for k, _, ratio, z in _find_outliers(excess.ravel(), self._error(1)):
            run, number = divmod(k, excess.shape[1])
            place = {"microbatch": number, "step": int(self.step[run])}
            place |= {"replica": int(self.replica[run])} if len(replicas) > 1 else {}
            suspects.append(_suspect("microbatch", place, ratio, z))
        return suspects

    def _outliers(self, kind: str, logs: CellLogs, places: Sequence[Place]) -> Sequence[Suspect]:
        """Return the places that are outliers even on the stage where they are least slow."""
        logs = np.broadcast_to(logs, self.logs.shape)
        medians, counts = [], []  # median of the least slow stage, fewest microbatches of a stage
        for place in places:
            # only the runs of its replica are read, as jobs may have thousands of places
            runs = self.replica == place.get("replica", self.replica)
            cells, times = self.cells(place, runs), logs[runs]
            on_stages = [times[:, k][cells[:, k]] for k in np.flatnonzero(cells.any(axis=(0, 2)))]
            medians.append(min(float(np.median(values)) for values in on_stages))
            counts.append(min(len(values) for values in on_stages))
        errors = np.array([self._error(count) for count in counts])
        outliers = _find_outliers(np.array(medians), errors)
        return [_suspect(kind, places[k], ratio, z) for k, _, ratio, z in outliers]


def _separate_microbatches(
    logs: CellLogs,
) -> tuple[Float[NumpyArray, "runs microbatches"], CellLogs, float]:
    """Return the common excess of microbatches, op times without this excess, and their noise."""
    # All are logarithms; the noise is a standard deviation. A long microbatch exceeds the medians
    # of most stages, and a slow worker exceeds the medians of its stages only.
    excess = logs - _stage_medians(logs)
    # lower quartile over stages, so that one interrupted op makes no microbatch slow
    common = np.quantile(excess, 0.25, axis=1, method="lower")
    stage_logs = logs - common[:, None]
    residuals = stage_logs - _stage_medians(stage_logs)
    return common, stage_logs, float(DEVIATION * np.median(np.abs(residuals)))


def _places(kind: str, numbers: Iterable[int]) -> list[Place]:
    return [{kind: number} for number in numbers]


def _stage_medians(logs: CellLogs) -> Float[NumpyArray, "1 stages 1"]:
    """Return each stage's lower median, which a slow replica among two does not move."""
    return np.quantile(logs, 0.5, axis=(0, 2), method="lower", keepdims=True)


def _split_pairs(ops: PipelineOps, stages: int) -> Float[NumpyArray, " ops"]:
    """Return op times [s], with the time of a fused pair divided between its two ops."""
    # Each op of a pair gets the mean time of such ops outside pairs, times (time of the pair / mean
    # pair). So stages with many and with few pairs can be compared.
    seconds, means = ops.seconds.copy(), cost_fields(ops, (stages,))
    if "pair" not in means:
        return seconds
    half = means["pair"] / 2  # for a phase without ops outside pairs
    alone = np.stack([means.get(PHASE_FIELDS[name], half) for name in OPS])[ops.phase, ops.stage]
    slowdown = seconds[ops.is_first] / means["pair"][ops.stage[ops.is_first]]
    for is_half in (ops.is_first, ops.is_second):
        seconds[is_half] = alone[is_half] * slowdown
    return seconds


def _slow_links(
    pipelines: Pipelines, wrong_workers: set[int], median_op: float
) -> Iterator[Suspect]:
    """Yield links between workers whose quickest messages are slow."""
    # Workers with a wrong clock are skipped. Links that are slow in only one replica come last.
    ends = link_workers(pipelines.table)
    by_workers: dict[tuple[int, ...], list[NumpyArray]] = {}  # {(source, target): message times}
    by_boundary: dict[tuple[int, ...], list[NumpyArray]] = {}  # {(source, target, link): times}
    has_waits: set[tuple[int, ...]] = set()  # keys with a message for which an op waited
    for link, (seconds, strength) in enumerate(by_link(simple_evidence(pipelines), len(ends))):
        # without messages, both stages are on one worker
        if not len(seconds) or not wrong_workers.isdisjoint(ends[link]):
            continue
        for times, key in ((by_workers, ends[link]), (by_boundary, (*ends[link], link))):
            times.setdefault(key, []).append(seconds)
            if (strength >= FIRST).any():
                has_waits.add(key)
    places: list[Mapping[str, int]] = []
    for times in (by_workers, by_boundary):
        keys = [key for key in times if key in has_waits]
        # the two quickest messages of a link waited for no others; half their distance is the error
        seconds_by_key = (np.maximum(np.concatenate(times[key]), 1e-9) for key in keys)
        pairs = [np.log(np.sort(seconds)[:2]) for seconds in seconds_by_key]
        logs = np.array([pair.mean() for pair in pairs])
        errors = np.array([np.ptp(pair) / 2 for pair in pairs])
        for k, usual, ratio, z in _find_outliers(logs, errors):
            place = {"source": keys[k][0], "target": keys[k][1]}
            if (ratio - 1) * usual > MIN_MESSAGE_DELAY * median_op and place not in places:
                places.append(place)
                yield _suspect("link", place, ratio, z)
    if np.ndim(pipelines.link_scales):
        yield from _slow_replica_links(pipelines, ends)


def _slow_replica_links(pipelines: Pipelines, ends: Sequence[tuple[int, int]]) -> Iterator[Suspect]:
    """Yield links that are slow in one replica, from the factors on their message times."""
    replicas = {run.replica: k for k, run in enumerate(pipelines.pipelines)}
    ratios: dict[tuple[int, int, int], float] = {}  # {(source, target, replica): largest factor}
    for replica, k in replicas.items():
        scales = np.asarray(pipelines.link_scales)[k].tolist()
        for (source, target), scale in zip(ends, scales, strict=True):
            key = source, target, replica
            ratios[key] = max(ratios.get(key, 0.0), scale)
    for (source, target, replica), ratio in ratios.items():
        if ratio > MIN_RATIO:
            place = {"source": source, "target": target, "replica": replica}
            yield _suspect("link", place, ratio, MIN_Z)


def _merge_ways(links: Iterable[Suspect]) -> Iterator[Suspect]:
    """Join both directions between two workers into one suspect if both are slow."""
    merged: dict[tuple[int, ...], Suspect] = {}
    for row in links:
        low, high = sorted((row.place["source"], row.place["target"]))
        other = merged.get(key := (low, high, row.place.get("replica", NONE)))
        if other is not None and other.place != row.place:
            place = {**other.place, "source": low, "target": high, "ways": 2}
            ratio = max(row.ratio or 0, other.ratio or 0)
            row = _suspect("link", place, ratio, min(row.z, other.z))
        merged[key] = row
    yield from merged.values()


def _starved_hosts(pipelines: Pipelines, times: _MicrobatchTimes) -> Iterator[Suspect]:
    """Yield workers whose device waits longer than others for the host to launch work."""
    # without this wait, ops of the worker would start earlier by the same time
    ops, steps = times.ops, len({*times.step.tolist()})
    op_seconds = ops.seconds + pipelines.gaps[ops.slices]
    for (replica, worker), seconds in pipelines.starved_hosts.items():
        place = {"worker": worker}
        if len({run.replica for run in pipelines.pipelines}) > 1:
            place["replica"] = replica
        name = " of replica ".join(map(str, place.values()))
        on_host = times.cells(place)[ops.run, ops.stage, ops.microbatch]
        total = op_seconds[on_host].sum() / steps
        ratio = total / max(total - seconds, MIN_RATE * total)
        why = (
            f"the device of worker {name} idles {1e3 * seconds:.3g} ms per step longer than others "
            "until its host launches work"
        )
        yield Suspect("host", name, seconds, ratio=ratio, z=0.0, why=why, place=place)


def _without_shadows(suspects: Sequence[Suspect], times: _MicrobatchTimes) -> list[Suspect]:
    """Drop the workers, stages and links that a starved host makes slow."""
    # A host is starved if its device waits for launches. If a single op of a worker starts late (a
    # "launch"), the host of this worker is dropped, too.
    late = [row.place["worker"] for row in suspects if row.kind == "launch"]
    suspects = [row for row in suspects if row.kind != "host" or row.place["worker"] not in late]
    hosts = {row.place["worker"]: row.seconds for row in suspects if row.kind == "host"}

    def is_shadow(row: Suspect) -> bool:
        stage = row.place.get("stage")
        worker = row.place.get("target", row.place.get("worker", NONE))
        workers = [worker] if stage is None else times.worker[stage].tolist()
        is_place = row.kind in ("worker", "stage", "link") and {*workers} <= hosts.keys()
        return is_place and row.seconds <= MAX_SHADOW * max(hosts[k] for k in workers)

    return [row for row in suspects if not is_shadow(row)]


def _without_explained(suspects: Sequence[Suspect], times: _MicrobatchTimes) -> Iterator[Suspect]:
    """Yield suspects that remain outliers if the first suspect is as fast as its peers."""
    kinds = ("worker", "stage", "replica", "microbatch")
    first = next((row for row in suspects if row.kind in kinds and "step" not in row.place), None)
    if first is None:
        yield from suspects
        return
    cells = times.cells(first.place)
    without_excess = times.with_logs(times.logs - cells * math.log(first.ratio or 1.0))
    remaining_rows = chain.from_iterable(without_excess.slow_places())
    names = {(row.kind, row.name) for row in remaining_rows}
    for row in suspects:  # a worker and its only stage are one place
        is_twin = row.kind in kinds and np.array_equal(times.cells(row.place), cells)
        if row.kind not in kinds or is_twin or (row.kind, row.name) in names:
            yield row


def step_suspects(pipelines: Pipelines) -> Iterator[Suspect]:
    """Yield steps that take longer than others, or begin late after the previous step."""
    trace, runs = pipelines.trace, pipelines.pipelines
    steps, position = np.unique(trace.step, return_inverse=True)
    begin, end = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    slices = ~trace.has_phase(MESSAGES)
    np.minimum.at(begin, position[slices], trace.start[slices])
    np.maximum.at(end, position[slices], trace.end[slices])
    is_run = np.isin(steps, [run.step for run in runs])
    steps, begin, end = steps[is_run], begin[is_run], end[is_run]
    ops = PipelineOps.select(trace, runs)
    for k, usual, ratio, z in _find_outliers(np.log(np.maximum(end - begin, 1e-12)), 0.0):
        place, warmup = {"step": int(steps[k])}, " in the warm-up" if k == 0 else ""
        lost = (ratio - 1) * usual
        why = f"took {ratio * usual:.3g} s{warmup}, {ratio:.3g} times the median step"
        why += _late_op(trace, ops, place["step"], lost)
        yield Suspect("step", str(steps[k]), lost, ratio=ratio, z=z, why=why, place=place)
    median_op = float(np.median(ops.seconds))
    is_consecutive = np.diff(steps) == 1
    gaps = (begin[1:] - end[:-1])[is_consecutive] / median_op
    if (gaps < -1).any():  # every step has its own clock
        return
    _, excess, z_scores = _compare_others(gaps, GAP_ERROR)
    for k in np.flatnonzero((excess > 1) & (z_scores > MIN_Z)).tolist():
        delay, step = float(excess[k]) * median_op, int(steps[1:][is_consecutive][k])
        why, z = f"began {delay:.3g} s later after the step before than others", float(z_scores[k])
        place = {"step": step}
        yield Suspect("step", str(step), delay, ratio=None, z=z, why=why, place=place)


def _late_op(trace: Trace, ops: PipelineOps, step: int, excess: float) -> str:
    """Return the end of a sentence on the op that took most of a step's excess [s]; else ""."""
    kinds, kind = np.unique(ops.stage * len(OPS) + ops.phase, return_inverse=True)
    usual = np.array([np.median(ops.seconds[kind == k]) for k in range(len(kinds))])
    delays = np.where(trace.step[ops.slices] == step, ops.seconds - usual[kind], -np.inf)
    position = int(delays.argmax())
    if delays[position] < excess / 2:
        return ""
    row = ops.slices[position]
    worker = int(trace.worker[row])
    place = {"worker": worker, "replica": int(trace.replica[row])}
    where = f"worker {worker}{rank_text(trace.ranks, place)}"
    delay = f"{delays[position]:.3g} s longer than usual"
    return f"; {op_name(trace, row)} on {where} took {delay}"


def odd_steps(pipelines: Pipelines) -> Mapping[int, Suspect]:
    """Return {slow step to exclude from means: suspect}; empty if half of the steps are slow."""
    odd = {row.place["step"]: row for row in step_suspects(pipelines) if row.ratio is not None}
    return odd if 2 * len(odd) < len({run.step for run in pipelines.pipelines}) else {}


def _with_costs(
    replayed: Replay, times: _MicrobatchTimes, suspects: Sequence[Suspect]
) -> list[Suspect]:
    """Return each suspect with its ratio and cost, the time that a step saves without it [s]."""
    # The job runs again, with ops or messages of the suspect as fast as those of its peers. Slow
    # machines of different replicas mask each other: if all together cost more, each has this cost.
    odd, jobs = [*odd_steps(replayed.pipelines)], job_steps(replayed)
    results = list[Suspect]()
    slow = [times.cells(suspect.place) for suspect in suspects if _is_masked(suspect)]
    others = ~np.any(slow, axis=0) if slow else True  # cells of usual machines
    joint_factors = {kind: np.ones(len(times.trace) + 1) for kind in MACHINES}
    for suspect in suspects:
        # the last entries are for nodes without a slice, or without a link
        factors, link_factors = np.ones(len(times.trace) + 1), np.ones(len(replayed.link_times) + 1)
        ratio, extra_seconds, share, phase = suspect.ratio or 1.0, 0.0, "most", ""
        if suspect.kind == "link":
            link_factors[:-1] = _link_factors(replayed, suspect.place)
        else:
            cells, ratio = _mean_ratio(suspect, times, odd, others if _is_masked(suspect) else True)
            factors[:-1] = times.slice_factors(cells, ratio)
            extra_seconds = (1 - 1 / ratio) * float(np.exp(times.logs[cells]).sum())
            if suspect.kind == "microbatch" and times.are_stages_slow(cells):
                share = "all"
            elif suspect.kind in ("worker", "stage", "replica"):
                phase = times.slow_phase(cells)
        # a step without all replicas cannot be replayed, so the cost is the extra time of its ops
        saved = _savings(jobs, suspect.place, odd, factors, link_factors) or [extra_seconds]
        why = suspect.why.format(ratio, share=share) + phase
        results.append(suspect._replace(seconds=float(np.mean(saved)), ratio=ratio, why=why))
        if _is_masked(suspect):
            joint_factors[suspect.kind] *= factors
    usual_links = np.ones(len(replayed.link_times) + 1)
    for kind, factors in joint_factors.items() if slow else ():
        rows = [row for row in results if row.kind == kind and _is_masked(row)]
        seconds = float(np.mean(_savings(jobs, {}, odd, factors, usual_links) or [0.0]))
        if seconds > MIN_RATIO * sum(row.seconds for row in rows):
            results = [row._replace(seconds=seconds) if row in rows else row for row in results]
    return results


def _is_masked(suspect: Suspect) -> bool:
    """Return whether a suspect is a machine or host of one replica, which others may mask."""
    return suspect.kind in MACHINES and "replica" in suspect.place


def _mean_ratio(
    suspect: Suspect, times: _MicrobatchTimes, odd: Sequence[int], others: Cells | bool
) -> tuple[Cells, float]:
    """Return the cells of a suspect, and the mean ratio of their times to those of its peers."""
    # Odd steps are slow as a whole. They count only if the suspect is a place in one step.
    cells, in_usual_step = times.cells(suspect.place), ~np.isin(times.step, odd)[:, None, None]
    if "step" not in suspect.place:
        cells &= in_usual_step
    ratio = suspect.ratio or 1.0
    if suspect.kind != "host":
        is_stage = suspect.place.keys() <= {"worker", "stage"}
        ratio = times.ratio(cells, in_usual_step & ~cells & others, is_stage=is_stage) or ratio
    return cells, ratio


def _savings(
    jobs: Iterable[JobSteps],
    place: Place,
    odd: Sequence[int],
    factors: Float[NumpyArray, " slices_and_1"],
    link_factors: Float[NumpyArray, " links_and_1"],
) -> list[float]:
    """Return the time [s] that each step saves if factors multiply times of slices and links."""
    # If the place has a step, only this step counts; otherwise all steps but odd ones. If the place
    # has a replica, factors on links apply to this replica only. The last factor, at index -1, is 1
    # and applies to nodes without a slice or a link.
    saved, step = [], place.get("step")
    for job in jobs:
        is_step = [k == step if step is not None else k not in odd for k in job.steps]
        recorded = job.duration[is_step]  # (steps, nodes)
        replicas = place.get("replica", np.array(job.replicas))
        is_on_link = np.append(replicas == np.array(job.replicas), False)[job.graph.replica]
        link_factor = np.where(is_on_link, link_factors[job.graph.link], 1.0)
        faster = recorded * factors[job.slice_index[is_step]] * link_factor
        before, after = (job.graph.finish(time).max(axis=1) for time in (recorded, faster))
        saved.extend((before - after).tolist())
    return saved


def _late_launches(replayed: Replay) -> Iterator[Suspect]:
    """Yield ops that start late in most steps although their inputs are ready."""
    pipelines, odd = replayed.pipelines, [*odd_steps(replayed.pipelines)]
    trace, late = pipelines.trace, np.broadcast_to(pipelines.late_launches, len(pipelines.trace))
    num_steps = len({run.step for run in pipelines.pipelines} - {*odd})
    gap = np.median(np.concatenate([pipelines.gaps[run.slices] for run in pipelines.pipelines]))
    for slices in group_ops(trace, np.flatnonzero((late > 0) & ~np.isin(trace.step, odd))):
        excess = late[slices] - gap  # delay beyond the median launch delay
        factors, links = np.ones(len(trace) + 1), np.ones(len(replayed.link_times) + 1)
        # factors on (launch delay + duration) that remove the excess; the last one stays 1
        factors[slices] -= excess / (trace.end - trace.start + pipelines.gaps)[slices]
        names = ("worker", "replica") if len(trace.replicas) > 1 else ("worker",)
        place = {name: int(getattr(trace, name)[slices[0]]) for name in (*names, "microbatch")}
        label, seconds = op_name(trace, slices[0]), float(np.mean(excess))
        name = f"{label} on " + " of ".join(f"{name} {place[name]}" for name in names)
        time = f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
        steps = f"{len(slices)} of {num_steps} steps" if num_steps > 1 else "the only step"
        why = f"{name} starts {time} late in {steps}"
        # if there is no complete step to replay, the cost is the mean excess
        saved = _savings(job_steps(replayed), place, odd, factors, links) or [seconds]
        yield Suspect("launch", name, float(np.mean(saved)), None, z=0.0, why=why, place=place)


def _link_factors(replayed: Replay, place: Place) -> Float[NumpyArray, " links"]:
    """Return factors on the message times of links that make a slow link as fast as its peers."""
    ends, times = link_workers(replayed.pipelines.table), replayed.link_times
    source, target = place["source"], place["target"]
    directions = [(source, target)]
    if place.get("ways") == 2:
        directions.append((target, source))
    is_slow = np.array([workers in directions for workers in ends]) & (times > 0)
    if "replica" in place:
        runs = [run.replica for run in replayed.pipelines.pipelines]
        scale = np.asarray(replayed.pipelines.link_scales)[runs.index(place["replica"])]
        return np.where(is_slow, 1 / scale, 1.0)  # scale: slowdown of the link in this replica
    normal = times[replayed.link_estimate.is_observed & ~is_slow]
    usual = np.median(normal) if len(normal) else np.inf
    return np.where(is_slow & np.isfinite(usual), usual / np.where(is_slow, times, 1.0), 1.0)


def _wrong_clocks(offsets: Sequence[Offset]) -> Iterator[Suspect]:
    """Yield a suspect for each corrected clock; none if clocks restart in every step."""
    has_replicas = len({offset.replica for offset in offsets}) > 1
    for offset in sorted(offsets, key=lambda offset: -abs(offset.seconds)):
        if offset.is_corrected and offset.step == NONE:
            suffix = f" of replica {offset.replica}" if has_replicas else ""
            error = max(offset.residual, RELATIVE_ERROR * abs(offset.seconds), 1e-12)
            why = f"differs from the others; its offset is known to {1e3 * offset.residual:.3g} ms"
            z, name = abs(offset.seconds) / error, f"{offset.worker}{suffix}"
            yield Suspect("clock", name, offset.seconds, ratio=None, z=z, why=why, place={})
