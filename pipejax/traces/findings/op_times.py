"""Times of ops, messages and collectives, and of the gaps between ops."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import ResultList, short_repr
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.traces.record import MESSAGES, NONE, OPS
from pipejax.traces.replaying.pipelines import Pipeline, PipelineOps, Pipelines, cell_slices
from pipejax.traces.replaying.replay import (
    LinkTimes,
    MessageEvidence,
    Replay,
    best_evidence,
    by_link,
    link_ends,
    link_name,
    simple_evidence,
)

PerStage = Float[NumpyArray, "stages *microbatches"]

QUANTILES = (0.05, 0.5, 0.95)


@short_repr
class OpTimes(NamedTuple):
    """Summary of the times of slices of one kind.

    Attributes:
      kind: op, message, other or gap.
      name: phase, link of a message, or "pair" for a fused pair.
      stage: stage of the model, for a fused pair that of its forward; -1 without a stage.
      worker: worker that runs the slices, or receives the messages.
      slices: number of slices.
      mean: mean [s].
      low: 5 % quantile [s].
      median: median [s].
      high: 95 % quantile [s].
    """

    kind: str
    name: str
    stage: int
    worker: int
    slices: int
    mean: float
    low: float
    median: float
    high: float


def op_times(pipelines: Pipelines | Replay) -> Sequence[OpTimes]:
    """Summarize times of ops by phase and stage, of messages by link, of other slices by worker.

    Gaps are the idle times between two ops of a worker. A message counts only if an op waited for
    it; its time begins when it could be sent.

    Args:
      pipelines: recorded pipelines, in which messages are assumed not to wait for each other; or a
        replay, whose link model decides for what messages wait.

    Returns:
      Summaries: ops first, then other slices, messages and gaps.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.5], backward=2.0, transmit=0.5))
      >>> for row in pj.traces.op_times(pj.traces.find_pipelines(pj.traces.record_runs([run])))[:2]:
      ...     print(row.name, row.stage, row.slices, row.median)
      F 0 2 1.0
      F 1 2 1.5
    """
    check_types(pipelines=(pipelines, Pipelines, Replay))
    if isinstance(pipelines, Replay):
        evidence = pipelines.evidence
        pipelines = pipelines.pipelines
    else:
        evidence = simple_evidence(pipelines)
    return ResultList([*_slices(pipelines), *_messages(pipelines, evidence), *_gaps(pipelines)])


def _row(
    kind: str, name: str, stage: int, worker: int, seconds: Float[NumpyArray, " n"]
) -> OpTimes:
    quantiles = np.quantile(seconds, QUANTILES).tolist()
    return OpTimes(kind, name, stage, worker, len(seconds), float(seconds.mean()), *quantiles)


def _slices(pipelines: Pipelines) -> Iterator[OpTimes]:
    """Yield a summary of the times of ops, then of other slices, by phase, stage and worker."""
    trace = pipelines.trace
    ops = PipelineOps.select(trace, pipelines.pipelines)
    groups = [("op", name, phase_ops.slices) for name, phase_ops in ops.by_kind()]
    groups += [
        ("other", name, np.flatnonzero((trace.phase == code) & (trace.worker != NONE)))
        for code, name in enumerate(trace.phases)
        if name not in (*OPS, *MESSAGES)  # slices of messages show who waited
    ]
    for kind, name, slices in groups:
        stages, workers = trace.stage[slices], trace.worker[slices]
        for stage, worker in sorted({*zip(stages.tolist(), workers.tolist(), strict=True)}):
            rows = slices[(stages == stage) & (workers == worker)]
            yield _row(kind, name, stage, worker, trace.end[rows] - trace.start[rows])


def _messages(pipelines: Pipelines, evidence: Sequence[MessageEvidence]) -> Iterator[OpTimes]:
    """Yield a summary of the message times of each link that delayed ops show best."""
    boundaries, placement = pipelines.table.num_stages - 1, pipelines.table.placement[0]
    for link, link_evidence in enumerate(by_link(evidence, 2 * boundaries)):
        seconds = best_evidence(*link_evidence)
        if len(seconds):
            _, target = link_ends(link, boundaries)
            name = link_name(link, boundaries)
            yield _row("message", name, target, int(placement[target]), seconds)


def _gaps(pipelines: Pipelines) -> Iterator[OpTimes]:
    """Yield a summary of each worker's idle times between consecutive ops of a pipeline."""
    trace = pipelines.trace
    for worker in range(trace.workers):
        gaps = []
        for pipeline in pipelines.pipelines:
            cells = cell_slices(trace, pipeline.slices)
            row = cells[trace.worker[cells] == worker]
            gaps.append(np.maximum(trace.start[row[1:]] - trace.end[row[:-1]], 0.0))
        seconds = np.concatenate(gaps)
        if len(seconds):
            yield _row("gap", "between ops", NONE, worker, seconds)


def measured_costs(replayed: Replay, *, pipeline: Pipeline | None = None) -> Costs:
    """Return mean recorded times of ops by stage, and of messages by link, as costs.

    If only some stages split their backwards, B is I + W on a stage without B, and I and W are half
    of B on a stage without I and W. If links are slow in some replicas, messages take the times of
    the replica with the longest messages, because all replicas wait for it.

    Args:
      replayed: a replayed trace.
      pipeline: a pipeline of the trace, for times by stage and microbatch; default: means over all
        pipelines.

    Returns:
      Costs of the table that ran [s].

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.5], backward=2.0, transmit=0.5))
      >>> pipelines = pj.traces.find_pipelines(pj.traces.record_runs([run]))
      >>> costs = pj.traces.measured_costs(pj.traces.replay(pipelines))
      >>> costs.forward.tolist(), costs.transmit.tolist()
      ([1.0, 1.5], [[[0.5]], [[0.5]]])
    """
    check_types(replayed=(replayed, Replay), pipeline=(pipeline, Pipeline, type(None)))
    pipelines = replayed.pipelines
    stages, microbatches = pipelines.table.num_stages, pipelines.table.num_microbatches
    ops = PipelineOps.select(pipelines.trace, [pipeline] if pipeline else pipelines.pipelines)
    fields = cost_fields(ops, (stages, microbatches) if pipeline else (stages,))
    transmit = _message_times(replayed, pipeline).reshape(2, 1, stages - 1)
    return Costs(**fields, transmit=transmit if stages > 1 else 0.0)


def _message_times(replayed: Replay, pipeline: Pipeline | None) -> LinkTimes:
    """Return the message time of each link in a pipeline, or in the one of the longest messages."""
    runs, times = replayed.pipelines.pipelines, replayed.link_times
    scales = np.broadcast_to(replayed.pipelines.link_scales, (len(runs), len(times)))
    if pipeline is None:
        return times * scales[(scales @ times).argmax()]
    return times * scales[[run[:2] for run in runs].index(pipeline[:2])]  # by step and replica


def cost_fields(ops: PipelineOps, shape: tuple[int, ...]) -> dict[str, NumpyArray]:
    """Return {field of `Costs`: mean op times [s]}, with times in the shape `shape`."""
    # `shape` is (stages) or (stages, microbatches). Entries without an op get the mean of others.
    fields, size = {}, math.prod(shape)
    for kind, kind_ops in ops.by_kind():
        place = np.ravel_multi_index((kind_ops.stage, kind_ops.microbatch)[: len(shape)], shape)
        count = np.bincount(place, minlength=size)
        total = np.bincount(place, kind_ops.seconds, minlength=size)
        means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        fields[PHASE_FIELDS.get(kind, kind)] = means.reshape(shape)
    return _fill_stages(fields)


def _fill_stages(times: dict[str, PerStage]) -> dict[str, PerStage]:
    """Replace NaN in {field: times}: B by I + W, I and W by B / 2, all others by the mean."""
    if {"backward", "input_grad", "weight_grad"} <= times.keys():
        b, i, w = (times[name] for name in ("backward", "input_grad", "weight_grad"))
        i, w = (np.where(np.isnan(half), b / 2, half) for half in (i, w))
        b = np.where(np.isnan(b), i + w, b)
        times = times | {"backward": b, "input_grad": i, "weight_grad": w}
    return {name: np.where(np.isnan(time), np.nanmean(time), time) for name, time in times.items()}
