"""Export to the Chrome trace format, which Perfetto opens.

One process per worker with a track for compute, two for messages and one for its host link, where
it offloads; arrows (flow events) from every send to its receive; a counter of activations in
flight. Times are microseconds.
"""

import json
from typing import Any

from pipejax.analysis.evaluate import Evaluation
from pipejax.analysis.timeline import arrows, bars
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.schedules.cells.ops import Phase

COMPUTE, SEND, RECEIVE, COLLECTIVE, HOST_LINK = 0, 1, 2, 3, 4
_TRACKS = {
    COMPUTE: "compute",
    SEND: "send",
    RECEIVE: "receive",
    COLLECTIVE: "collectives",
    HOST_LINK: "host link",
}
_MICROSECONDS = 1e6


def chrome_trace(evaluation: Evaluation) -> str:
    """Return a run as a Chrome trace, for chrome://tracing or Perfetto.

    Args:
      evaluation: a run.

    Returns:
      JSON text: a track per worker for its ops, its messages and its host link, times in
      microseconds.

    Example:
      >>> import json, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=3)
      >>> run = pj.evaluate(table, pj.Costs.uniform(table, forward=1.0, backward=2.0))
      >>> events = json.loads(pj.chrome_trace(run))["traceEvents"]
      >>> [event["dur"] for event in events if event.get("name") == "0F0"]
      [1000000.0]
    """
    tracks = [track for track in _TRACKS if track != HOST_LINK or evaluation.table.offloads]
    events = _names(evaluation.workers, tracks)
    for bar in bars(evaluation):
        copies = [bar.worker] if bar.worker != NO_WORKER else _participants(evaluation, bar.ops[0])
        track = HOST_LINK if bar.on_host_link else COMPUTE
        track = track if bar.worker != NO_WORKER else COLLECTIVE
        category = "+".join(op.phase.name for op in bar.ops)
        args = {
            "critical": bar.is_critical,
            "stage": bar.ops[0].stage,
            "microbatch": bar.ops[0].microbatch,
        }
        for worker in copies:
            events.append(_slice(bar.label, category, worker, track, bar.start, bar.finish, args))
    for number, arrow in enumerate(arrows(evaluation)):
        label, args = str(arrow.op), {"critical": arrow.is_critical}
        span = arrow.start, arrow.finish
        for worker, track in ((arrow.sender, SEND), (arrow.receiver, RECEIVE)):
            events.append(_slice(label, "message", worker, track, *span, args))
        for kind, worker, track, time in (
            ("s", arrow.sender, SEND, arrow.start),
            ("f", arrow.receiver, RECEIVE, arrow.finish),
        ):
            events.append(
                {
                    "ph": kind,
                    "id": number,
                    "name": label,
                    "cat": "message",
                    "pid": worker,
                    "tid": track,
                    "ts": time * _MICROSECONDS,
                    "bp": "e",
                }
            )
    events += _counters(evaluation)
    metadata = {
        "schedule": evaluation.schedule,
        "link": evaluation.links.model,
        "makespan_s": evaluation.makespan,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata})


def _names(num_workers: int, tracks: list[int]) -> list[dict[str, Any]]:
    events = []
    for worker in range(num_workers):
        name = {"name": f"worker {worker}"}
        events.append({"ph": "M", "name": "process_name", "pid": worker, "args": name})
        order = {"sort_index": worker}
        events.append({"ph": "M", "name": "process_sort_index", "pid": worker, "args": order})
        for track in tracks:
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": worker,
                    "tid": track,
                    "args": {"name": _TRACKS[track]},
                }
            )
    return events


def _slice(
    label: str,
    category: str,
    worker: int,
    track: int,
    start: float,
    finish: float,
    args: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": label,
        "cat": category,
        "pid": worker,
        "tid": track,
        "ts": start * _MICROSECONDS,
        "dur": (finish - start) * _MICROSECONDS,
        "args": args,
    }


def _participants(evaluation: Evaluation, op: Any) -> list[int]:
    return sorted({int(worker) for worker in evaluation.table.placement[:, op.stage]})


def _counters(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Activations in flight: up at the start of F, down at the end of B or W."""
    events: list[dict[str, Any]] = []
    changes = [
        (time, bar.worker, change)
        for bar in bars(evaluation)
        for op in bar.ops
        for time, change, phases in (
            (bar.start, 1, (Phase.F,)),
            (bar.finish, -1, (Phase.B, Phase.W)),
        )
        if op.phase in phases
    ]
    held = dict.fromkeys(range(evaluation.workers), 0)
    for time, worker, change in sorted(changes):
        held[worker] += change
        events.append(
            {
                "ph": "C",
                "name": "activations in flight",
                "pid": worker,
                "tid": COMPUTE,
                "ts": time * _MICROSECONDS,
                "args": {"activations": held[worker]},
            }
        )
    return events
