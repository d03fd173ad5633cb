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
from pipejax.traces.replaying.messages import (
    TakenMessages,
    by_link,
    link_ends,
    link_name,
    simple_evidence,
    telling,
)
from pipejax.traces.replaying.pipelines import Pipeline, PipelineOps, Pipelines, cell_slices
from pipejax.traces.replaying.replay import Replay

PerStage = Float[NumpyArray, "stages *microbatches"]

QUANTILES = (0.05, 0.5, 0.95)


@short_repr
class OpTimes(NamedTuple):
    """Times of slices of one kind.

    Attributes:
      kind: op, message or other.
      name: phase, the link of a message, or pair: a forward and a backward as one.
      stage: of the model, of a pair that of its forward; -1 where it is of none.
      worker: that runs it, or receives it.
      slices: how many there are.
      mean: [s].
      low: 5 % quantile [s].
      median: [s].
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
    """Times of ops by phase and stage, of messages by link, of all else by phase and worker.

    Gaps are what a worker waits before an op whose input has come and that follows another op. Of
    messages those are counted that were waited for, from when they could be sent.

    Args:
      pipelines: what ran, whose messages are taken to wait for no other; or its replay, whose
        links say for which they do.

    Returns:
      Rows, ops first.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.5], backward=2.0, transmit=0.5))
      >>> for row in pj.traces.op_times(pj.traces.pipelines_of(pj.traces.of_runs([run])))[:2]:
      ...     print(row.name, row.stage, row.slices, row.median)
      F 0 2 1.0
      F 1 2 1.5
    """
    check_types(pipelines=(pipelines, Pipelines, Replay))
    if isinstance(pipelines, Replay):
        ran, evidence = pipelines.pipelines, pipelines.evidence
    else:
        ran, evidence = pipelines, simple_evidence(pipelines)
    return ResultList([*_slices(ran), *_messages(ran, evidence), *_gaps(ran)])


def _row(
    kind: str, name: str, stage: int, worker: int, seconds: Float[NumpyArray, " n"]
) -> OpTimes:
    quantiles = np.quantile(seconds, QUANTILES).tolist()
    return OpTimes(kind, name, stage, worker, len(seconds), float(seconds.mean()), *quantiles)


def _slices(pipelines: Pipelines) -> Iterator[OpTimes]:
    trace = pipelines.trace
    slices = [
        ("op", name, ops.slices)
        for name, ops in PipelineOps.of(trace, pipelines.pipelines).by_kind()
    ]
    slices += [
        ("other", name, np.flatnonzero((trace.phase == code) & (trace.worker != NONE)))
        for code, name in enumerate(trace.phases)
        if name not in (*OPS, *MESSAGES)  # how long messages last says who waited
    ]
    for kind, name, indices in slices:
        stages, workers = trace.stage[indices], trace.worker[indices]
        for stage, worker in sorted({*zip(stages.tolist(), workers.tolist(), strict=True)}):
            rows = indices[(stages == stage) & (workers == worker)]
            yield _row(kind, name, stage, worker, trace.end[rows] - trace.start[rows])


def _messages(pipelines: Pipelines, evidence: Sequence[TakenMessages]) -> Iterator[OpTimes]:
    boundaries, placement = pipelines.table.num_stages - 1, pipelines.table.placement[0]
    for link, link_evidence in enumerate(by_link(evidence, 2 * boundaries)):
        seconds = telling(*link_evidence)
        if len(seconds):
            _, target = link_ends(link, boundaries)
            yield _row(
                "message", link_name(link, boundaries), target, int(placement[target]), seconds
            )


def _gaps(pipelines: Pipelines) -> Iterator[OpTimes]:
    trace = pipelines.trace
    for worker in range(trace.workers):
        parts = []
        for pipeline in pipelines.pipelines:
            cells = cell_slices(trace, pipeline.slices)
            row = cells[trace.worker[cells] == worker]
            parts.append(np.maximum(trace.start[row[1:]] - trace.end[row[:-1]], 0.0))
        seconds = np.concatenate(parts)
        if len(seconds):
            yield _row("gap", "between ops", NONE, worker, seconds)


def costs_of(replayed: Replay, *, pipeline: Pipeline | None = None) -> Costs:
    """Mean time of every op by stage, and of messages by link, as costs.

    Where some stages ran whole backwards and others split ones, B is I + W on a stage without a B,
    and I and W are half of B on one without them.

    Args:
      replayed: a replayed trace.
      pipeline: one of its pipelines, of which every op takes what it took, by stage and microbatch;
        the mean of all if None.

    Returns:
      Costs of the table that ran [s].

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.5], backward=2.0, transmit=0.5))
      >>> pipelines = pj.traces.pipelines_of(pj.traces.of_runs([run]))
      >>> costs = pj.traces.costs_of(pj.traces.replay(pipelines))
      >>> costs.forward.tolist(), costs.transmit.tolist()
      ([1.0, 1.5], [[[0.5]], [[0.5]]])
    """
    check_types(replayed=(replayed, Replay), pipeline=(pipeline, Pipeline, type(None)))
    pipelines = replayed.pipelines
    stages, microbatches = pipelines.table.num_stages, pipelines.table.num_microbatches
    ops = PipelineOps.of(pipelines.trace, [pipeline] if pipeline else pipelines.pipelines)
    fields = fields_of(ops, (stages, microbatches) if pipeline else (stages,))
    transmit = replayed.link_times.reshape(2, 1, stages - 1)
    return Costs(**fields, transmit=transmit if stages > 1 else 0.0)


def fields_of(ops: PipelineOps, shape: tuple[int, ...]) -> dict[str, NumpyArray]:
    """Mean times of ops as fields of costs, by stage or by stage and microbatch [s]."""
    # Where ops of a kind never ran, it is what other kinds say, or the mean of all.
    fields, size = {}, math.prod(shape)
    for kind, kind_ops in ops.by_kind():
        name = PHASE_FIELDS.get(kind, kind)
        place = np.ravel_multi_index((kind_ops.stage, kind_ops.microbatch)[: len(shape)], shape)
        count = np.bincount(place, minlength=size)
        total = np.bincount(place, kind_ops.seconds, minlength=size)
        means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        fields[name] = means.reshape(shape)
    return _fill_stages(fields)


def _fill_stages(times: dict[str, PerStage]) -> dict[str, PerStage]:
    """Put in what a stage never ran: B is I + W, I and W are half of B; else the mean of stages."""
    if {"backward", "input_grad", "weight_grad"} <= times.keys():
        whole, i, w = (times[name] for name in ("backward", "input_grad", "weight_grad"))
        i, w = (np.where(np.isnan(half), whole / 2, half) for half in (i, w))
        whole = np.where(np.isnan(whole), i + w, whole)
        times = times | {"backward": whole, "input_grad": i, "weight_grad": w}
    return {name: np.where(np.isnan(x), np.nanmean(x), x) for name, x in times.items()}
