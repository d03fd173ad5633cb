"""A run as bars and arrows: what the terminal, the drawings and the trace export all show.

The trace is in the Chrome trace format, which Perfetto opens: a process for each worker with a
track for compute, two for messages and one for its host link, where it offloads; arrows (flow
events) from every send to its receive; a counter of activations in flight.
"""

import json
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.evaluate import Evaluation
from pipejax.base.checks import check_types
from pipejax.engine.lowering.program import NO_WORKER, SOURCE
from pipejax.schedules.cells.ops import HOST, NO_MICROBATCH, Op, Phase, format_cell

COMPUTE, SEND, RECEIVE, COLLECTIVE, HOST_LINK = 0, 1, 2, 3, 4
_TRACKS = {
    COMPUTE: "compute",
    SEND: "send",
    RECEIVE: "receive",
    COLLECTIVE: "collectives",
    HOST_LINK: "host link",
}
_MICROSECONDS = 1e6  # the unit of a trace


class Bar(NamedTuple):
    """An op on a worker.

    Attributes:
      worker: worker, or `NO_WORKER` for a collective, which runs beside compute.
      start: [s].
      finish: [s].
      ops: the op, or the forward and backward of a fused pair.
      is_critical: whether it is on the critical path.
      node: node of the program, or the source where the run had none.
    """

    worker: int
    start: float
    finish: float
    ops: tuple[Op, ...]
    is_critical: bool
    node: int = SOURCE

    @property
    def on_host_link(self) -> bool:
        """Whether it is an offload or a load, which run beside the worker's compute."""
        return self.ops[0].phase in HOST

    @property
    def label(self) -> str:
        """Text of the cell."""
        return format_cell(self.ops)


class Arrow(NamedTuple):
    """A message between workers.

    Attributes:
      sender: worker.
      receiver: worker.
      start: when it leaves [s].
      finish: when it arrives [s].
      op: the SEND_F or SEND_B.
      is_critical: whether it is on the critical path.
    """

    sender: int
    receiver: int
    start: float
    finish: float
    op: Op
    is_critical: bool


def bars(evaluation: Evaluation) -> list[Bar]:
    """List every op of the table, then all-reduces and updates where they cost anything."""
    program = evaluation.program
    cells = [
        (int(program.node_of_cell[at]), int(at[0]), evaluation.table.cell(*at))
        for at in zip(*np.nonzero(program.node_of_cell), strict=True)
    ]
    at_end = [
        (node, int(program.worker[node]), (Op(Phase(phase), stage, NO_MICROBATCH),))
        for node in program.beside_cells.tolist()
        for phase, stage in [(int(program.phase[node]), int(program.stage[node]))]
    ]
    return [
        Bar(
            worker,
            float(evaluation.node_start[node]),
            float(evaluation.node_finish[node]),
            ops,
            bool(evaluation.critical[node]),
            node,
        )
        for node, worker, ops in cells + at_end
    ]


def arrows(evaluation: Evaluation) -> list[Arrow]:
    """List every message between workers."""
    sent = evaluation.program.messages
    return [
        Arrow(
            int(sent.sender[k]),
            int(sent.receiver[k]),
            float(evaluation.message_start[k]),
            float(evaluation.message_finish[k]),
            Op(Phase(int(sent.phase[k])), int(sent.stage[k]), int(sent.microbatch[k])),
            bool(evaluation.message_critical[k]),
        )
        for k in range(len(sent.producer))
    ]


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
    check_types(evaluation=(evaluation, Evaluation))
    events = _names(evaluation)
    for bar in bars(evaluation):
        workers, track = [bar.worker], HOST_LINK if bar.on_host_link else COMPUTE
        if bar.worker == NO_WORKER:
            workers, track = _participants(evaluation, bar.ops[0]), COLLECTIVE
        first = bar.ops[0]
        args = {"critical": bar.is_critical, "stage": first.stage, "microbatch": first.microbatch}
        category = "+".join(op.phase.name for op in bar.ops)
        events += [_slice(bar, worker, track, bar.label, category, args) for worker in workers]
    for number, arrow in enumerate(arrows(evaluation)):
        label, args = str(arrow.op), {"critical": arrow.is_critical}
        for worker, track, kind, time in (
            (arrow.sender, SEND, "s", arrow.start),
            (arrow.receiver, RECEIVE, "f", arrow.finish),
        ):
            events.append(_slice(arrow, worker, track, label, "message", args))
            flow = {"id": number, "cat": "message", "bp": "e"}
            events.append(_event(kind, worker, track, label, ts=time * _MICROSECONDS, **flow))
    events += _counters(evaluation)
    metadata = {
        "schedule": evaluation.schedule,
        "link": evaluation.links.model,
        "makespan_s": evaluation.makespan,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata})


def _event(kind: str, worker: int, track: int, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": worker, "tid": track, **more}


def _slice(
    at: Bar | Arrow, worker: int, track: int, name: str, category: str, args: dict[str, Any]
) -> dict[str, Any]:
    """An event with a duration."""
    begin, lasts = at.start * _MICROSECONDS, (at.finish - at.start) * _MICROSECONDS
    return _event("X", worker, track, name, cat=category, ts=begin, dur=lasts, args=args)


def _names(evaluation: Evaluation) -> list[dict[str, Any]]:
    """What the processes and tracks are called."""
    events: list[dict[str, Any]] = []
    for worker in range(evaluation.workers):
        named: list[tuple[str, dict[str, int], dict[str, Any]]] = [
            ("process_name", {}, {"name": f"worker {worker}"}),
            ("process_sort_index", {}, {"sort_index": worker}),
            *(
                ("thread_name", {"tid": track}, {"name": name})
                for track, name in _TRACKS.items()
                if track != HOST_LINK or evaluation.table.offloads
            ),
        ]
        events += [
            {"ph": "M", "name": what, "pid": worker, "args": args, **track}
            for what, track, args in named
        ]
    return events


def _participants(evaluation: Evaluation, op: Op) -> list[int]:
    return sorted({int(worker) for worker in evaluation.table.placement[:, op.stage]})


def _counters(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Activations in flight: up at the start of F, down at the end of B or W."""
    events, held = [], [0] * evaluation.workers
    changes = [
        (bar.start, bar.worker, 1) if op.phase == Phase.F else (bar.finish, bar.worker, -1)
        for bar in bars(evaluation)
        for op in bar.ops
        if op.phase in (Phase.F, Phase.B, Phase.W)
    ]
    for time, worker, change in sorted(changes):
        held[worker] += change
        args, begin = {"activations": held[worker]}, time * _MICROSECONDS
        events.append(_event("C", worker, COMPUTE, "activations in flight", ts=begin, args=args))
    return events
