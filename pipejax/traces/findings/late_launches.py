"""Late launches: ops that start long after their inputs in most steps."""

import dataclasses

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.schedules.table.links import Links
from pipejax.traces.record import MESSAGES, OPS, Trace
from pipejax.traces.replaying.pipelines import Pipelines
from pipejax.traces.replaying.replay import Replay, replay

MIN_STALL = 0.01  # delay of a start that counts as a stall, relative to the median pipeline
MAX_DIFFERENCE = 0.05  # of stalls on several workers by one pause, relative to one of them
MAX_PLACES = 0.05  # share of the ops of a step; more stalls are a fault of the link model


def replay_late_launches(pipelines: Pipelines, link: str | Links | None) -> Replay:
    """Replay pipelines, with late launches as delays if that reduces the replay's mean error."""
    first = replay(pipelines, link=link)
    late = find_late_launches(first)
    second = first if late is first.pipelines else replay(late, link=link)
    return second if second.mean_error < first.mean_error else first


def find_late_launches(replayed: Replay) -> Pipelines:
    """Return the pipelines with the delay of each op that starts late in most steps."""
    pipelines, delay, late = replayed.pipelines, replayed.stalls, np.zeros(len(replayed.stalls))
    trace, num_steps = pipelines.trace, len({run.step for run in pipelines.pipelines})
    stalled = np.flatnonzero(delay > MIN_STALL * float(np.median(pipelines.spans)))
    max_places = max(2.0, MAX_PLACES * len(pipelines.pipelines[0].slices) * len(trace.replicas))
    if 0 < len(stalled) <= max_places * num_steps:
        for rows in group_ops(trace, stalled[~_has_cause(pipelines, stalled, delay)]):
            if 2 * len(rows) > num_steps:
                late[rows] = delay[rows] + pipelines.gaps[rows]
    return dataclasses.replace(pipelines, late_launches=late) if late.any() else pipelines


def group_ops(trace: Trace, slices: Int[NumpyArray, " n"]) -> list[Int[NumpyArray, " steps"]]:
    """Group the slices of each op, one slice per step."""
    fields = (trace.replica, trace.worker, trace.stage, trace.phase, trace.microbatch)
    ops, group = np.unique([field[slices] for field in fields], axis=1, return_inverse=True)
    return [slices[group.ravel() == k] for k in range(ops.shape[1])]


def _has_cause(
    pipelines: Pipelines, slices: Int[NumpyArray, " n"], delay: Float[NumpyArray, " slices"]
) -> Bool[NumpyArray, " n"]:
    """Return for each delay whether a non-op slice, or a pause of another worker, explains it."""
    trace = pipelines.trace
    ops = np.concatenate([run.slices for run in pipelines.pipelines])
    begin, end, seconds = trace.start[slices] - delay[slices], trace.start[slices], delay[slices]
    rank = trace.replica * trace.workers + trace.worker
    is_alike = np.abs(seconds[:, None] - seconds) < MAX_DIFFERENCE * seconds
    # a worker that is busy as the whole job pauses stalls at the end of its op
    longest_op = float((trace.end[ops] - trace.start[ops]).max())
    is_alike &= np.abs(begin[:, None] - begin) <= longest_op
    is_alike &= rank[slices][:, None] != rank[slices]
    is_alike &= trace.step[slices][:, None] == trace.step[slices]
    result = is_alike.any(axis=1)
    for k in np.flatnonzero(~trace.has_phase((*OPS, *MESSAGES))).tolist():
        overlaps = (trace.start[k] < end) & (trace.end[k] > begin) & (rank[k] == rank[slices])
        result |= overlaps & (trace.step[k] == trace.step[slices])
    return result
