"""Cost of each worker, stage, phase, replica, microbatch and link, each put right alone.

What an op should take is the mean of its kind, of all stages, replicas, steps and microbatches
alike; what a message or a collective should take is the median of its kind, for these have long
tails (both as in the what-if analysis of arXiv 2505.05713). The whole job is run again each time.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, check_types
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.longest_path import run_in_place
from pipejax.base.progress import OnProgress, telling
from pipejax.traces.readers.parts import collective_scope
from pipejax.traces.record import NONE
from pipejax.traces.replaying.messages import link_name
from pipejax.traces.replaying.replay import Replay
from pipejax.traces.replaying.step_graph import find_rests, step_graph

Times = Float[NumpyArray, "runs nodes"]

MOST_NUMBERS = 1 << 23  # times that one pass over the nodes holds
WHOLE, HALVES = "B", ("I", "W")  # of a backward
ALONE = ("worker", "stage", "phase", "replica", "link", "place")  # what they add alone is said
MOST_PLACES = 512  # workers of all replicas, up to which each is put right alone


@short_repr
class Share(NamedTuple):
    """Effect of one place, or one kind of op, on the step.

    Attributes:
      of: worker, stage, phase, replica, place (a worker of a replica), microbatch or link.
      name: which one.
      saves: what the mean step gets shorter if its ops took what they should [s].
      adds: what the step in which all ops take what they should gets longer with its ops as they
        were [s]; None of single microbatches.
      by_step: (steps) what each step would save [s].
    """

    of: str
    name: str
    saves: float
    adds: float | None
    by_step: Float[NumpyArray, " steps"]


@with_short_repr("slowdown recorded ideal")
@dataclasses.dataclass(frozen=True, eq=False)
class Attribution:
    """Why steps take longer than if every op took what it should.

    Attributes:
      steps: their numbers; those in which a replica is left out are not among them.
      recorded: (steps) from the first start to the last end [s].
      replayed: (steps) the whole job run again with recorded times [s].
      ideal: the step if every op took what it should [s].
      shares: by what they save, the largest first.
      other: mean step of the other run, where it is held against one [s].
    """

    steps: Sequence[int]
    recorded: Float[NumpyArray, " steps"]
    replayed: Float[NumpyArray, " steps"]
    ideal: float
    shares: Sequence[Share]
    other: float | None = None

    @property
    def slowdown(self) -> float:
        """The mean step as it ran over the ideal one."""
        return float(self.recorded.mean()) / self.ideal

    @property
    def replayed_slowdown(self) -> float:
        """The same of the replayed steps: what the published analysis calls slowdown."""
        return float(self.replayed.mean()) / self.ideal

    def of(self, kind: str) -> Mapping[str, Share]:
        """The shares of all workers, stages, phases, replicas, microbatches or links, by name."""
        return {share.name: share for share in self.shares if share.of == kind}


def attribute(
    replayed: Replay, *, against: Replay | None = None, on_progress: OnProgress | None = None
) -> Attribution:
    """Say who makes the steps of a job long.

    Args:
      replayed: its pipelines, replayed.
      against: another run of the same stages: ops should then take as many times what they did as
        the mean of their kind and stage did there; the mean of their kind if None.
      on_progress: called with how much is done, of how much, and a text.

    Returns:
      The step as it ran, replayed and ideal, and what every place costs.

    Raises:
      ValueError: if no step has all replicas, or the other run has other stages or no such ops.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> slow = pj.Costs(forward=[1.0, 1.5], backward=[2.0, 3.0])
      >>> runs = pj.traces.of_runs([pj.evaluate(table, slow)])
      >>> found = pj.traces.attribute(pj.traces.replay(pj.traces.pipelines_of(runs)))
      >>> found.recorded.tolist(), found.ideal, found.shares[0].of, found.shares[0].name
      ([21.0], 18.75, 'worker', '1')
    """
    check_types(replayed=(replayed, Replay), against=(against, Replay, type(None)))
    jobs = [_JobSteps(replayed, part) for part in _whole_steps(replayed)]
    if against is None:
        ideal = _Ideal.alike(jobs)
    else:
        _check_same_stages(replayed, against)
        ideal = _Ideal.as_in([_JobSteps(against, part) for part in _whole_steps(against)], jobs)
    with telling("attribute", on_progress) as tell:
        masks = [job.masks() for job in jobs]
        names = list(dict.fromkeys(key for mask in masks for key in mask))
        names.sort(key=lambda name: name[0] not in ALONE)  # those stand in one pass
        as_run = [job.graph.finish(job.duration).max(axis=1) for job in jobs]
        best = [job.graph.finish(job.ideal(ideal)).max(axis=1) for job in jobs]
        parts = [
            job.put_right(mask, names, ideal, run_times, alike, tell)
            for job, mask, run_times, alike in zip(jobs, masks, as_run, best, strict=True)
        ]
    saves, adds = (np.concatenate(column, axis=1) for column in zip(*parts, strict=True))
    shares = [
        Share(
            *name,
            saves=float(saved.mean()),
            adds=float(added.mean()) if name[0] in ALONE else None,
            by_step=saved,
        )
        for name, saved, added in zip(names, saves, adds, strict=True)
    ]
    return Attribution(
        steps=[step for job in jobs for step in job.steps],
        recorded=np.concatenate([job.recorded for job in jobs]),
        replayed=np.concatenate(as_run),
        ideal=float(np.concatenate(best).mean()),
        shares=sorted(shares, key=lambda share: -share.saves),
        other=ideal.step,
    )


def _check_same_stages(replayed: Replay, other: Replay) -> None:
    stages = [run.pipelines.table.num_stages for run in (replayed, other)]
    if stages[0] != stages[1]:
        raise MismatchError(f"the other run has {stages[1]} stages, this one {stages[0]}")


def _whole_steps(replayed: Replay) -> Iterator[Mapping[int, Sequence[int]]]:
    """Positions of the pipelines of steps that have all replicas, by tables that replicas run."""
    pipelines = replayed.pipelines.pipelines
    replicas = sorted({pipeline.replica for pipeline in pipelines})
    by_step: dict[int, dict[int, int]] = {}
    for k, pipeline in enumerate(pipelines):
        by_step.setdefault(pipeline.step, {})[pipeline.replica] = k
    alike: dict[tuple[int, ...], dict[int, Sequence[int]]] = {}
    for step, by_replica in by_step.items():
        if len(by_replica) == len(replicas):
            members = [by_replica[replica] for replica in replicas]
            tables = tuple(pipelines[k].table for k in members)
            alike.setdefault(tables, {})[step] = members
    if not alike:
        raise ValueError(f"no step has all {len(replicas)} replicas")
    yield from alike.values()


class _JobSteps:
    def __init__(self, replayed: Replay, members: Mapping[int, Sequence[int]]) -> None:
        pipelines, trace = replayed.pipelines, replayed.pipelines.trace
        self.steps, self.replayed = list(members), replayed
        step_pipelines = [[pipelines.pipelines[k] for k in places] for places in members.values()]
        tables = [pipelines.tables[pipeline.table] for pipeline in step_pipelines[0]]
        self.replicas = [pipeline.replica for pipeline in step_pipelines[0]]
        self.rests = find_rests(pipelines, step_pipelines)
        self.graph = step_graph(tables, replayed.links, self.rests.places)
        graph, shape = self.graph, (len(step_pipelines), len(self.graph.preds))
        # (steps, nodes) the slice that each node was in each step
        self.slice = np.full(shape, NONE)
        for replica in range(len(tables)):
            op_nodes = np.flatnonzero((graph.replica == replica) & (graph.op != NONE))
            slices = np.stack([step[replica].slices for step in step_pipelines])
            self.slice[:, op_nodes] = slices[:, graph.op[op_nodes]]
        other = np.flatnonzero(graph.rest != NONE)
        self.slice[:, other] = self.rests.slices[:, graph.rest[other]]
        durations = np.append(trace.end - trace.start, 0.0)  # the last is of what did not run
        self.duration = durations[self.slice]
        self.duration[:, other] = self.rests.seconds[:, graph.rest[other]]
        sent = np.flatnonzero(graph.link != NONE)
        self.duration[:, sent] = replayed.link_times[graph.link[sent]]
        whole = np.where(self.slice == NONE, self.slice.max(axis=1, keepdims=True), self.slice)
        self.recorded = trace.end[whole].max(axis=1) - trace.start[whole].min(axis=1)

    @functools.cached_property
    def kind(self) -> Int[NumpyArray, " nodes"]:
        """Position of every node's phase among those of the trace; -1 of messages and gates."""
        first = self.slice.max(axis=0)
        phase = np.append(self.replayed.pipelines.trace.phase, NONE)
        return phase[first]

    @functools.cached_property
    def stage(self) -> Int[NumpyArray, " nodes"]:
        return np.append(self.replayed.pipelines.trace.stage, NONE)[self.slice.max(axis=0)]

    def kind_seconds(self, code: int, stage: int | None = None) -> Float[NumpyArray, " slices"]:
        """Return the times of all slices of a phase, or those of a stage [s]."""
        nodes = self.kind == code
        if stage is not None:
            nodes = nodes & (self.stage == stage)
        return self.duration[:, nodes][self.slice[:, nodes] != NONE]

    def ideal(self, means: "_Ideal") -> Times:
        """Return the normal time of every node (steps, nodes) [s]."""
        should = means.ops[self.kind, self.stage] * (self.duration if means.are_factors else 1.0)
        sent = self.graph.link != NONE
        should[..., sent] = means.links[self.graph.link[sent]]
        is_known = ((self.slice != NONE) | sent) & np.isfinite(should)
        return np.where(is_known, should, self.duration)

    def put_right(
        self,
        masks: Mapping[tuple[str, str], Bool[NumpyArray, " nodes"]],
        names: Sequence[tuple[str, str]],
        means: "_Ideal",
        as_run: Float[NumpyArray, " steps"],
        best: Float[NumpyArray, " steps"],
        tell: OnProgress,
    ) -> tuple[Float[NumpyArray, "names steps"], Float[NumpyArray, "names steps"]]:
        """Run steps with the nodes of each name put right, then with them alone as recorded."""
        durations, count = self.duration.T, len(self.steps)
        ideal = self.ideal(means).T
        saves, adds = (np.zeros((len(names), count)) for _ in range(2))
        at_once = max(1, MOST_NUMBERS // durations.size)  # names whose steps run side by side
        for first in range(0, len(names), at_once):
            batch = names[first : first + at_once]
            tell(first, len(names), " ".join(batch[0]))
            is_alone = any(kind in ALONE for kind, _ in batch)
            both = ((ideal, saves, durations), (durations, adds, ideal))
            for put, into, rest in both if is_alone else both[:1]:
                # (nodes, names, steps): of each name its nodes as `put`, all others as `rest`
                times = np.repeat(rest[:, None], len(batch), axis=1)
                for place, name in enumerate(batch):
                    if name in masks:
                        times[masks[name], place] = put[masks[name]]
                run_in_place(self.graph.preds, times.reshape(len(times), -1))
                into[first : first + at_once] = times.max(axis=0)
        return as_run - saves, adds - best

    def masks(self) -> Mapping[tuple[str, str], Bool[NumpyArray, " nodes"]]:
        """Select the nodes of each worker, stage, phase, replica, microbatch and link."""
        trace, graph = self.replayed.pipelines.trace, self.graph
        first = self.slice.max(axis=0)
        is_slice = first != NONE
        fields = {"worker": trace.worker, "stage": trace.stage, "microbatch": trace.microbatch}
        by_name: dict[tuple[str, str], Bool[NumpyArray, " nodes"]] = {}
        for kind, field in fields.items():
            value = np.append(field, NONE)[first]
            for number in np.unique(value[is_slice & (value != NONE)]).tolist():
                by_name[kind, str(number)] = value == number
        worker = np.append(trace.worker, NONE)[first]
        several = len(self.replicas) > 1
        each_place = several and len(self.replicas) * trace.workers <= MOST_PLACES
        for place, replica in enumerate(self.replicas):
            on_replica = (graph.replica == place) & is_slice
            if several:
                by_name["replica", str(replica)] = on_replica
            for member in np.unique(worker[on_replica]).tolist() if each_place else ():
                name = f"worker {member} of replica {replica}"
                by_name["place", name] = on_replica & (worker == member)
        for code in np.unique(self.kind[is_slice]).tolist():
            by_name["phase", trace.phases[code]] = self.kind == code
        boundaries = self.replayed.pipelines.table.num_stages - 1
        for link in np.unique(graph.link[graph.link != NONE]).tolist():
            by_name["link", link_name(link, boundaries)] = graph.link == link
        return by_name


class _Ideal(NamedTuple):
    """Ideal durations of ops."""

    ops: Float[NumpyArray, "phases stages"]  # [s] or factors; the last of no stage; NaN if unknown
    links: Float[NumpyArray, " links"]  # of messages [s]
    are_factors: bool = False  # whether ops are factors
    step: float | None = None  # mean step of the run that says so, if it is another [s]

    @classmethod
    def alike(cls, jobs: Sequence["_JobSteps"]) -> "_Ideal":
        """The mean of a kind over all steps, stages, microbatches; the median of what is sent."""
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
    def as_in(cls, others: Sequence["_JobSteps"], jobs: Sequence["_JobSteps"]) -> "_Ideal":
        """Ops as much faster or slower as their kind is there, stage by stage; links as there."""
        # So what scatters in a run goes on to do so: a run against itself saves nothing.
        names = jobs[0].replayed.pipelines.trace.phases
        there = others[0].replayed.pipelines.trace.phases
        stages = range(NONE, jobs[0].replayed.pipelines.trace.stages)
        factors = np.full((len(names), len(stages)), np.nan)
        for code, name in enumerate(names):
            # a backward as a whole is held against both of its halves
            ours, theirs = [name], [name]
            if name in HALVES and name not in there:
                ours, theirs = [*HALVES], [WHOLE]
            elif name == WHOLE and name not in there:
                theirs = [*HALVES]
            for stage in stages:
                here = sum(_mean(jobs, phase, stage) for phase in ours)
                other = sum(_mean(others, phase, stage) for phase in theirs)
                if here > 0 and other > 0:
                    factors[code, stage] = other / here
        step = float(np.concatenate([job.recorded for job in others]).mean())
        return cls(factors, others[0].replayed.link_times, are_factors=True, step=step)


def _mean(jobs: Sequence[_JobSteps], name: str, stage: int | None = None) -> float:
    """Mean of what slices of a phase, or those of a stage, took [s]; 0 where there are none."""
    phases = jobs[0].replayed.pipelines.trace.phases
    if name not in phases:
        return 0.0
    code = phases.index(name)
    seconds = np.concatenate([job.kind_seconds(code, stage) for job in jobs])
    return float(seconds.mean()) if len(seconds) else 0.0
