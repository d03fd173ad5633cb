"""Late launches: the same op starts long after its inputs in most steps."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.schedules.table.links import Links
from pipejax.traces.record import MESSAGES, OPS, Trace
from pipejax.traces.replaying.pipelines import Pipelines
from pipejax.traces.replaying.replay import Replay, replay

MIN_STALL = 0.01  # delay of a start that counts as a stall, relative to the median pipeline
MAX_DIFFERENCE = 0.05  # of stalls on several workers by one pause, relative to one of them
MAX_PLACES = 0.05  # share of the ops of a step; more stalls are a fault of the link model

Slices = Int[NumpyArray, " stalls"]
Seconds = Float[NumpyArray, " slices"]
Flags = Bool[NumpyArray, " stalls"]


def replay_late_launches(pipelines: Pipelines, link: str | Links | None) -> Replay:
    """Replay pipelines, with the delays of late launches if these explain more of their time."""
    first = replay(pipelines, link=link)
    late = find_late_launches(first)
    if late is first.pipelines:
        return first
    second = replay(late, link=link)
    return second if second.mean_error < first.mean_error else first


def find_late_launches(replayed: Replay) -> Pipelines:
    """Return the pipelines with the delay of each op that stalls in most steps."""
    pipelines, delay = replayed.pipelines, replayed.stalls
    trace, num_steps = pipelines.trace, len({run.step for run in pipelines.pipelines})
    stalled = np.flatnonzero(delay > MIN_STALL * float(np.median(pipelines.spans)))
    max_places = max(2.0, MAX_PLACES * len(pipelines.pipelines[0].slices) * len(trace.replicas))
    if not 0 < len(stalled) <= max_places * num_steps:
        return pipelines
    is_usual = _is_unrecorded(trace, stalled, delay) & ~_is_common(pipelines, stalled, delay)
    groups = [rows for rows in group_ops(trace, stalled[is_usual]) if len(rows) > 1]
    groups = [rows for rows in groups if 2 * len(rows) > num_steps]
    if not groups:
        return pipelines
    late, rows = np.zeros(len(delay)), np.concatenate(groups)
    late[rows] = delay[rows] + pipelines.gaps[rows]
    return dataclasses.replace(pipelines, late_launches=late)


def group_ops(trace: Trace, slices: Slices) -> Iterator[Sequence[int]]:
    """Yield the slices of the same op in several steps."""
    fields = (trace.replica, trace.worker, trace.stage, trace.phase, trace.microbatch)
    by_op: dict[tuple[int, ...], list[int]] = {}
    for row in slices.tolist():
        by_op.setdefault(tuple(int(field[row]) for field in fields), []).append(row)
    yield from by_op.values()


def _is_unrecorded(trace: Trace, slices: Slices, delay: Seconds) -> Flags:
    """Return whether no slice, such as a collective, runs on the worker during each delay."""
    other = np.flatnonzero(~trace.has_phase((*OPS, *MESSAGES)))
    result = np.ones(len(slices), bool)
    for k, row in enumerate(slices.tolist() if len(other) else ()):
        overlaps = trace.start[other] < trace.start[row]
        overlaps &= trace.end[other] > trace.start[row] - delay[row]
        for field in (trace.step, trace.replica, trace.worker):
            overlaps &= field[other] == field[row]
        result[k] = not overlaps.any()
    return result


def _is_common(pipelines: Pipelines, slices: Slices, delay: Seconds) -> Flags:
    """Return whether another worker stalls as long at the same time: the whole job pauses."""
    trace, result = pipelines.trace, np.zeros(len(slices), bool)
    ops = np.concatenate([run.slices for run in pipelines.pipelines])
    longest_op = float((trace.end[ops] - trace.start[ops]).max())
    seconds, begin = delay[slices], trace.start[slices] - delay[slices]
    for k, row in enumerate(slices.tolist()):
        is_same = np.abs(seconds - seconds[k]) < MAX_DIFFERENCE * seconds[k]
        # a worker that is busy as the pause begins stalls at the end of its op
        is_same &= np.abs(begin - begin[k]) <= longest_op
        is_same &= (trace.step[slices] == trace.step[row]) & (
            (trace.worker[slices] != trace.worker[row])
            | (trace.replica[slices] != trace.replica[row])
        )
        result[k] = is_same.any()
    return result
