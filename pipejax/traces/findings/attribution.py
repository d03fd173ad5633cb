"""Time that each worker, stage, phase, replica, microbatch and link costs per step.

The normal time of an op is the mean of its phase. The normal time of a message or a collective is
the median, because their times have long tails, as in the what-if analysis of arXiv 2505.05713. A
place is for example a worker, a stage or a link. It saves time if it were normal and all other
places as recorded; it adds time if it were as recorded and all other places normal.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.base.checks import MismatchError, check_types
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.longest_path import run_in_place
from pipejax.base.progress import OnProgress, telling
from pipejax.traces.record import NONE, collective_scope
from pipejax.traces.replaying.replay import Replay, link_name
from pipejax.traces.replaying.step_graph import find_non_ops, step_graph

Times = Float[NumpyArray, "runs nodes"]
Name = tuple[str, str]  # kind and name of a share, such as ("worker", "3")

MAX_TIMES = 1 << 23  # number of times that one pass over the nodes holds in memory
FULL_BACKWARD, BACKWARD_HALVES = "B", ("I", "W")
KINDS_WITH_ADDS = ("worker", "stage", "phase", "replica", "link", "place")
MAX_PLACES = 512  # up to so many workers of all replicas, each worker of a replica has a share


@short_repr
class Share(NamedTuple):
    """Effect of the ops of one worker, stage, phase, .. on the step time.

    Attributes:
      kind: worker, stage, phase, replica, place (a worker of a replica), microbatch or link.
      name: number or name of the worker, stage, ..
      saves: time that the mean step saves if these ops take normal times [s].
      adds: time that these ops, as recorded, add to a step of normal times [s]; None for single
        microbatches.
      by_step: (steps) time that each step saves [s].
    """

    kind: str
    name: str
    saves: float
    adds: float | None
    by_step: Float[NumpyArray, " steps"]


@with_short_repr("slowdown recorded ideal")
@dataclasses.dataclass(frozen=True, eq=False)
class Attribution:
    """Comparison of steps as recorded with steps in which every op takes its normal time.

    Attributes:
      steps: numbers of the steps that have all replicas.
      recorded: (steps) time from the first start to the last end [s].
      replayed: (steps) step time in a replay of the whole job with recorded times [s].
      ideal: step time if every op takes its normal time [s].
      shares: effects of workers, stages, ..; the largest saving first.
      other: mean step of the other run [s]; None without another run.
    """

    steps: Sequence[int]
    recorded: Float[NumpyArray, " steps"]
    replayed: Float[NumpyArray, " steps"]
    ideal: float
    shares: Sequence[Share]
    other: float | None = None

    @property
    def slowdown(self) -> float:
        """Return the mean recorded step time over the ideal step time."""
        return float(self.recorded.mean()) / self.ideal

    @property
    def replayed_slowdown(self) -> float:
        """Return the mean replayed over the ideal step time, as in arXiv 2505.05713."""
        return float(self.replayed.mean()) / self.ideal

    def by_name(self, kind: str) -> Mapping[str, Share]:
        """Return {name: share} of a kind, such as worker or stage."""
        return {share.name: share for share in self.shares if share.kind == kind}


def attribute(
    replayed: Replay, *, against: Replay | None = None, on_progress: OnProgress | None = None
) -> Attribution:
    """Attribute the step time of a job to its workers, stages, phases, replicas and links.

    Args:
      replayed: replayed pipelines of the job.
      against: another run of the same stages. The normal time of an op is then its recorded time,
        scaled by the ratio of mean times of its phase and stage in both runs.
      on_progress: called with the amount of finished work, of all work, and a text.

    Returns:
      Recorded, replayed and ideal step times, and the effect of every place.

    Raises:
      ValueError: if no step has all replicas, or the other run has different stages.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> slow = pj.Costs(forward=[1.0, 1.5], backward=[2.0, 3.0])
      >>> runs = pj.traces.record_runs([pj.evaluate(table, slow)])
      >>> result = pj.traces.attribute(pj.traces.replay(pj.traces.find_pipelines(runs)))
      >>> result.recorded.tolist(), result.ideal, result.shares[0].kind, result.shares[0].name
      ([21.0], 18.75, 'worker', '1')
    """
    check_types(replayed=(replayed, Replay), against=(against, Replay, type(None)))
    jobs = job_steps(replayed)
    if against is None:
        ideal = _Ideal.mean_times(jobs)
    else:
        stages, other_stages = (run.pipelines.table.num_stages for run in (replayed, against))
        if stages != other_stages:
            raise MismatchError(f"the other run has {other_stages} stages, this one {stages}")
        ideal = _Ideal.ratios(job_steps(against), jobs)
    with telling("attribute", on_progress) as report:
        masks = [job.masks() for job in jobs]
        names = list(dict.fromkeys(key for mask in masks for key in mask))
        # names without `adds` come last, because a batch of such names runs once instead of twice
        names.sort(key=lambda name: name[0] not in KINDS_WITH_ADDS)
        step_times = [job.graph.finish(job.duration).max(axis=1) for job in jobs]
        ideal_times = [job.graph.finish(job.ideal(ideal)).max(axis=1) for job in jobs]
        effects = [
            job.effects(mask, names, ideal, as_recorded, as_ideal, report)
            for job, mask, as_recorded, as_ideal in zip(
                jobs, masks, step_times, ideal_times, strict=True
            )
        ]
    saves, adds = (np.concatenate(column, axis=1) for column in zip(*effects, strict=True))
    shares = [
        Share(
            *name,
            saves=float(name_saves.mean()),
            adds=float(name_adds.mean()) if name[0] in KINDS_WITH_ADDS else None,
            by_step=name_saves,
        )
        for name, name_saves, name_adds in zip(names, saves, adds, strict=True)
    ]
    return Attribution(
        steps=[step for job in jobs for step in job.steps],
        recorded=np.concatenate([job.recorded for job in jobs]),
        replayed=np.concatenate(step_times),
        ideal=float(np.concatenate(ideal_times).mean()),
        shares=sorted(shares, key=lambda share: -share.saves),
        other=ideal.step,
    )


def job_steps(replayed: Replay) -> list["JobSteps"]:
    """List the steps that have all replicas, grouped by the tables that ran."""
    pipelines = replayed.pipelines.pipelines
    groups: dict[tuple[int, ...], dict[int, Sequence[int]]] = {}
    for step, positions in replayed.pipelines.complete_steps.items():
        tables = tuple(pipelines[position].table for position in positions)
        groups.setdefault(tables, {})[step] = positions
    if not groups:
        replicas = {pipeline.replica for pipeline in pipelines}
        raise ValueError(f"no step has all {len(replicas)} replicas")
    return [JobSteps(replayed, steps) for steps in groups.values()]


class JobSteps:
    """Steps of a job whose replicas run the same tables, as one graph with recorded durations."""

    def __init__(self, replayed: Replay, positions: Mapping[int, Sequence[int]]) -> None:
        """Build the graph of steps; `positions` is {step: index of each replica's pipeline}."""
        # `slice_index` and `duration` [s] are (steps, nodes). `kind` (index in the trace's phases),
        # `stage`, `worker` and `microbatch` are (nodes). `recorded` is (steps) the length [s].
        # Nodes without a slice, such as messages, have -1. Non-ops are collectives and updates.
        pipelines, trace = replayed.pipelines, replayed.pipelines.trace
        self.steps, self.replayed = list(positions), replayed
        step_pipelines = [[pipelines.pipelines[k] for k in row] for row in positions.values()]
        tables = [pipelines.tables[pipeline.table] for pipeline in step_pipelines[0]]
        self.replicas = [pipeline.replica for pipeline in step_pipelines[0]]
        non_ops, non_op_slices, non_op_seconds = find_non_ops(pipelines, step_pipelines)
        self.graph = step_graph(tables, replayed.links, non_ops)
        graph = self.graph
        self.slice_index = np.full((len(step_pipelines), len(graph.preds)), NONE)
        for replica in range(len(tables)):
            op_nodes = np.flatnonzero((graph.replica == replica) & (graph.op != NONE))
            slices = np.stack([step[replica].slices for step in step_pipelines])
            self.slice_index[:, op_nodes] = slices[:, graph.op[op_nodes]]
        non_op_nodes = np.flatnonzero(graph.non_op != NONE)
        self.slice_index[:, non_op_nodes] = non_op_slices[:, graph.non_op[non_op_nodes]]
        any_slice = self.slice_index.max(axis=0)  # (nodes) slice in a step that has one
        # the appended value has index -1, so it is the value of nodes without a slice
        self.kind, self.stage, self.worker, self.microbatch = (
            np.append(field, NONE)[any_slice]
            for field in (trace.phase, trace.stage, trace.worker, trace.microbatch)
        )
        durations = np.append(trace.end - trace.start + pipelines.gaps, 0.0)
        self.duration = durations[self.slice_index]
        self.duration[:, non_op_nodes] = non_op_seconds[:, graph.non_op[non_op_nodes]]
        messages = np.flatnonzero(graph.link != NONE)
        scale_shape = len(pipelines.pipelines), len(replayed.link_times)
        scales = np.broadcast_to(pipelines.link_scales, scale_shape)
        self.link_scales = scales[np.array([*positions.values()])]
        scale = self.link_scales[:, graph.replica[messages], graph.link[messages]]
        self.duration[:, messages] = replayed.link_times[graph.link[messages]] * scale
        # nodes without a slice repeat the slice of another node, so that they change no extremum
        largest = self.slice_index.max(axis=1, keepdims=True)
        slices = np.where(self.slice_index == NONE, largest, self.slice_index)
        self.recorded = trace.end[slices].max(axis=1) - trace.start[slices].min(axis=1)

    def kind_seconds(self, code: int, stage: int | None = None) -> Float[NumpyArray, " slices"]:
        """Return the times [s] of all slices of a phase, or of its slices on one stage."""
        is_selected = self.kind == code
        if stage is not None:
            is_selected &= self.stage == stage
        return self.duration[:, is_selected][self.slice_index[:, is_selected] != NONE]

    def ideal(self, ideal: "_Ideal") -> Times:
        """Return normal times (steps, nodes) [s]; recorded times for nodes without normal time."""
        seconds = ideal.ops[self.kind, self.stage] * (self.duration if ideal.are_factors else 1.0)
        is_message = self.graph.link != NONE
        seconds[..., is_message] = ideal.links[self.graph.link[is_message]]
        is_known = ((self.slice_index != NONE) | is_message) & np.isfinite(seconds)
        return np.where(is_known, seconds, self.duration)

    def effects(
        self,
        masks: Mapping[Name, Bool[NumpyArray, " nodes"]],
        names: Sequence[Name],
        ideal: "_Ideal",
        step_times: Float[NumpyArray, " steps"],
        ideal_times: Float[NumpyArray, " steps"],
        report: OnProgress,
    ) -> tuple[Float[NumpyArray, "names steps"], Float[NumpyArray, "names steps"]]:
        """Return times (names, steps) [s]: what a name, as ("worker", "3"), saves and adds."""
        # The mask of a name selects its nodes. A name saves time compared with `step_times` (all
        # nodes as recorded) if its nodes take ideal times and all others recorded times. It adds
        # time to `ideal_times` (all nodes ideal) in the reverse case.
        recorded_durations, ideal_durations = self.duration.T, self.ideal(ideal).T
        shape = len(names), len(self.steps)
        without_fault, fault_alone = np.zeros(shape), np.zeros(shape)
        batch_size = max(1, MAX_TIMES // recorded_durations.size)
        for begin in range(0, len(names), batch_size):
            batch = names[begin : begin + batch_size]
            report(begin, len(names), " ".join(batch[0]))
            runs = [(ideal_durations, recorded_durations, without_fault)]
            if any(kind in KINDS_WITH_ADDS for kind, _ in batch):
                runs.append((recorded_durations, ideal_durations, fault_alone))
            for name_durations, other_durations, result in runs:
                times = np.repeat(other_durations[:, None], len(batch), axis=1)
                for column, name in enumerate(batch):  # times: (nodes, names, steps)
                    if name in masks:
                        times[masks[name], column] = name_durations[masks[name]]
                run_in_place(self.graph.preds, times.reshape(len(times), -1))
                result[begin : begin + batch_size] = times.max(axis=0)
        return step_times - without_fault, fault_alone - ideal_times

    def masks(self) -> Mapping[Name, Bool[NumpyArray, " nodes"]]:
        """Return {(kind, name): mask of nodes} of workers, stages, phases, links and so on."""
        trace, graph = self.replayed.pipelines.trace, self.graph
        is_slice = self.kind != NONE
        fields = {"worker": self.worker, "stage": self.stage, "microbatch": self.microbatch}
        by_name: dict[Name, Bool[NumpyArray, " nodes"]] = {}
        for kind, value in fields.items():
            for number in np.unique(value[value != NONE]).tolist():
                by_name[kind, str(number)] = value == number
        has_replicas = len(self.replicas) > 1
        has_places = has_replicas and len(self.replicas) * trace.workers <= MAX_PLACES
        for position, replica in enumerate(self.replicas):
            on_replica = (graph.replica == position) & is_slice
            if has_replicas:
                by_name["replica", str(replica)] = on_replica
            if has_places:
                for worker in np.unique(self.worker[on_replica]).tolist():
                    name = f"worker {worker} of replica {replica}"
                    by_name["place", name] = on_replica & (self.worker == worker)
        for code in np.unique(self.kind[is_slice]).tolist():
            by_name["phase", trace.phases[code]] = self.kind == code
        boundaries = self.replayed.pipelines.table.num_stages - 1
        for link in np.unique(graph.link[graph.link != NONE]).tolist():
            by_name["link", link_name(link, boundaries)] = graph.link == link
        return by_name


class _Ideal(NamedTuple):
    """Normal times of ops and messages."""

    # times [s], or factors on recorded times; NaN if unknown; last column: slices without a stage
    ops: Float[NumpyArray, "phases stages"]
    links: Float[NumpyArray, " links"]  # time of a message [s]
    are_factors: bool = False  # whether `ops` holds factors
    step: float | None = None  # mean step of the other run [s]; None without another run

    @classmethod
    def mean_times(cls, jobs: Sequence["JobSteps"]) -> "_Ideal":
        """Return normal times: the mean of each phase, medians for collectives and messages."""
        replayed = jobs[0].replayed
        trace = replayed.pipelines.trace
        means = np.zeros((len(trace.phases), trace.stages + 1))
        for code, name in enumerate(trace.phases):
            seconds = np.concatenate([job.kind_seconds(code) for job in jobs])
            if len(seconds):
                is_collective = collective_scope(name) is not None
                means[code] = np.median(seconds) if is_collective else seconds.mean()
        return cls(means, np.full_like(replayed.link_times, replayed.message_time))

    @classmethod
    def ratios(cls, other_jobs: Sequence["JobSteps"], jobs: Sequence["JobSteps"]) -> "_Ideal":
        """Return factors on ops: ratios of mean times in both runs, by phase and stage."""
        # The variation within the run remains. So a run compared with itself saves nothing.
        names = jobs[0].replayed.pipelines.trace.phases
        other_names = other_jobs[0].replayed.pipelines.trace.phases
        stages = range(NONE, jobs[0].replayed.pipelines.trace.stages)
        factors = np.full((len(names), len(stages)), np.nan)
        for code, name in enumerate(names):
            # if only one run splits backwards, compare B with I + W
            phases, other_phases = [name], [name]
            if name in BACKWARD_HALVES and name not in other_names:
                phases, other_phases = [*BACKWARD_HALVES], [FULL_BACKWARD]
            elif name == FULL_BACKWARD and name not in other_names:
                other_phases = [*BACKWARD_HALVES]
            for stage in stages:
                mean = sum(_mean_seconds(jobs, phase, stage) for phase in phases)
                other_mean = sum(_mean_seconds(other_jobs, phase, stage) for phase in other_phases)
                if mean > 0 and other_mean > 0:
                    factors[code, stage] = other_mean / mean
        step = float(np.concatenate([job.recorded for job in other_jobs]).mean())
        return cls(factors, other_jobs[0].replayed.link_times, are_factors=True, step=step)


def _mean_seconds(jobs: Sequence[JobSteps], name: str, stage: int) -> float:
    """Return the mean time of the slices of a phase on a stage [s]; 0 without slices."""
    phases = jobs[0].replayed.pipelines.trace.phases
    if name not in phases:
        return 0.0
    code = phases.index(name)
    seconds = np.concatenate([job.kind_seconds(code, stage) for job in jobs])
    return float(seconds.mean()) if len(seconds) else 0.0
