"""A replayed trace for Perfetto: every worker as it ran, and below it as it is replayed."""

import json
from typing import Any

import numpy as np

from pipejax.base.checks import check_types
from pipejax.traces.record import NONE
from pipejax.traces.replaying.replay import Replay

PER_SECOND = 1e6  # microseconds, which the format counts in


def perfetto(replayed: Replay, *, step: int | None = None) -> str:
    """Return a step as a trace in the Trace Event Format.

    A replica is a process; each of its workers has a track of what it ran, and one of the replay.
    Arguments of a slice are stage, microbatch, and how much later it started than in the replay.

    Args:
      replayed: a replayed trace.
      step: number of the step; the first if None.

    Returns:
      Text of a .json file.

    Raises:
      ValueError: if there is no such step.

    Example:
      >>> import json, pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> replayed = pj.traces.replay(pj.traces.pipelines_of(pj.traces.of_runs([run])))
      >>> events = json.loads(pj.traces.perfetto(replayed))["traceEvents"]
      >>> sum(event["ph"] == "X" for event in events)
      16
    """
    check_types(replayed=(replayed, Replay))
    trace, pipelines = replayed.pipelines.trace, replayed.pipelines.pipelines
    steps = sorted({one.step for one in pipelines})
    step = steps[0] if step is None else step
    if step not in steps:
        raise ValueError(f"step must be one of {', '.join(map(str, steps[:8]))}, .., got {step}")
    events: list[dict[str, Any]] = []
    for one in (each for each in pipelines if each.step == step):
        begin = trace.start[one.slices].min()
        own = np.flatnonzero((trace.step == step) & (trace.replica == one.replica))
        is_op = np.isin(own, one.slices)
        for worker in range(trace.workers):
            for tid, title in ((2 * worker, "as it ran"), (2 * worker + 1, "replayed")):
                events.append(_named(one.replica, tid, f"worker {worker} {title}"))
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": one.replica,
                "args": {"name": f"replica {one.replica}, step {step}"},
            }
        )
        for at, replays in zip(own.tolist(), is_op.tolist(), strict=True):
            tid = 2 * int(trace.worker[at])
            events.append(_slice(replayed, at, one.replica, tid, trace.start[at] - begin))
            if replays:
                start = trace.start[at] - begin - replayed.residuals[at]
                events.append(_slice(replayed, at, one.replica, tid + 1, start))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(pid: int, tid: int, title: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}}


def _slice(replayed: Replay, at: int, pid: int, tid: int, start: float) -> dict[str, Any]:
    """A slice that starts so long after its pipeline [s]."""
    trace = replayed.pipelines.trace
    stage, microbatch = int(trace.stage[at]), int(trace.microbatch[at])
    name = trace.phases[trace.phase[at]]
    label = name if NONE in (stage, microbatch) else f"{stage}{name}{microbatch}"
    return {
        "ph": "X",
        "name": label,
        "cat": name,
        "pid": pid,
        "tid": tid,
        "ts": float(start) * PER_SECOND,
        "dur": float(trace.end[at] - trace.start[at]) * PER_SECOND,
        "args": {
            "stage": stage,
            "microbatch": microbatch,
            "later_than_replayed_us": float(replayed.residuals[at]) * PER_SECOND,
        },
    }
