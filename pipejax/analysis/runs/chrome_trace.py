"""A run as a trace in the Trace Event Format, which Perfetto and chrome://tracing open.

A worker is a process, with tracks (threads) for its ops and messages. Slices of a track never
overlap, because overlapping slices go to several tracks. A flow leads from the producer of a
message over the message to its consumer. docs/perfetto.md describes the picture.

Perfetto counts in integer nanoseconds, and drops a slice that overlaps another slice of its track.
So times are rounded to nanoseconds once, and then written in microseconds, the unit of the format.
"""

import dataclasses
import heapq
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.analysis.runs.timeline import Arrow, Bar, arrows, bars, phases_beside
from pipejax.base.checks import check_types
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.schedules.cells.ops import HOST, HOST_LINK, NO_MICROBATCH, NO_STAGE
from pipejax.schedules.table.held_activations import END, START, memory_ledger
from pipejax.schedules.table.table import ScheduleTable

COMPUTE, COLLECTIVES, LANE, SEND, RECEIVE = range(5)  # kinds of tracks, from top to bottom
_LANE_TITLES = {HOST_LINK: "host link"}  # default: the name of the lane
_NANOSECONDS, _PER_MICROSECOND = 1e9, 1000

Event = dict[str, Any]


class Track(NamedTuple):
    """Track of a worker in the trace; overlapping slices go to several tracks of one name."""

    worker: int
    kind: int  # one of the kinds above; it also orders the tracks of a worker
    number: int  # number of the other worker of a message, or of the lane beside compute
    title: str
    category: str  # category of the slices


def _compute_track(worker: int) -> Track:
    return Track(worker, COMPUTE, 0, "compute", "compute")


@dataclasses.dataclass
class _Slice:
    """Interval on a track, from start to end [ns]; `_assign_threads` sets its thread `tid`."""

    track: Track
    start: int
    end: int
    name: str
    args: dict[str, Any]
    tid: int = 0

    def event(self) -> Event:
        fields = {"dur": _duration(self.start, self.end), "cat": self.track.category}
        fields["args"] = self.args
        return _event("X", self.track.worker, self.tid, self.name, self.start, **fields)


def chrome_trace(evaluation: Evaluation) -> str:
    """Return a run as a trace, for Perfetto or chrome://tracing.

    Args:
      evaluation: a run.

    Returns:
      JSON text in the Trace Event Format. Process `w` is worker `w`, with tracks for its compute,
      collectives, lanes beside compute and messages. The durations of its slices of category
      "compute" add up to its busy time. Flows lead from the producer of a message to its consumer.
      Counters show activations in flight and idle workers. Times [us] are whole nanoseconds.

    Example:
      >>> import json, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=3)
      >>> run = pj.evaluate(table, pj.Costs.uniform(table, forward=1.0, backward=2.0))
      >>> events = json.loads(pj.files.chrome_trace(run))["traceEvents"]
      >>> [event["dur"] for event in events if event.get("name") == "0F0"]
      [1000000.0]
      >>> compute = [event for event in events if event.get("cat") == "compute"]
      >>> sum(event["dur"] for event in compute if event["pid"] == 1) / 1e6, run.busy[1].item()
      (9.0, 9.0)
    """
    check_types(evaluation=(evaluation, Evaluation))
    ops, messages = bars(evaluation), arrows(evaluation)
    lanes = list(phases_beside(evaluation.table))
    op_slices = [_op_slices(evaluation.table, bar, lanes) for bar in ops]
    message_slices = [_message_slices(evaluation.table, arrow) for arrow in messages]
    slices = [*itertools.chain(*op_slices, *message_slices)]
    names = _assign_threads(slices, evaluation.workers)
    slice_by_node = {bar.node: parts[0] for bar, parts in zip(ops, op_slices, strict=True)}
    timed = [
        *(part.event() for part in slices),
        *_flows(evaluation, slice_by_node, message_slices),
        *_in_flight(evaluation.table, ops),
        *_idle_workers(evaluation.workers, slices),
    ]
    metadata = {
        "schedule": evaluation.schedule,
        "link": evaluation.links.model,
        "makespan_s": evaluation.makespan,
    }
    # the sort is stable: at equal times, a slice stays before the flows that bind to it
    events = [*names, *sorted(timed, key=lambda event: event["ts"])]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata})


def _event(kind: str, worker: int, tid: int, name: str, time: int, **fields: Any) -> Event:
    """Return a trace event of a kind such as "X" (slice) at a time [ns]."""
    ids = {"ph": kind, "name": name, "pid": worker, "tid": tid}
    return {**ids, "ts": time / _PER_MICROSECOND, **fields}


def _duration(start: int, end: int) -> float:
    """Return an interval's duration [us], rounded down until start + duration <= end in floats."""
    # otherwise the slice may overlap the next slice by a rounding error
    begin, finish = start / _PER_MICROSECOND, end / _PER_MICROSECOND
    duration = (end - start) / _PER_MICROSECOND
    while begin + duration > finish:
        duration = min(math.nextafter(duration, 0.0), finish - begin)
    return duration


def _op_slices(table: ScheduleTable, bar: Bar, lanes: Sequence[str]) -> list[_Slice]:
    """Return the slices of a bar: one, or for a collective one on each of its workers."""
    op, tracks = bar.ops[0], [_compute_track(bar.worker)]
    if bar.worker == NO_WORKER:
        workers = sorted(set(table.placement[:, op.stage].tolist()))
        tracks = [Track(w, COLLECTIVES, 0, "collectives", "collective") for w in workers]
    elif bar.lane in lanes:
        title = _LANE_TITLES.get(bar.lane, bar.lane)
        number = lanes.index(bar.lane)
        tracks = [Track(bar.worker, LANE, number, title=title, category=title)]
    microbatch, part = divmod(op.microbatch, bar.slices)
    args: dict[str, Any] = {"phase": "+".join(op.phase.name for op in bar.ops)}
    if op.stage != NO_STAGE:
        args["stage"] = op.stage
    if op.microbatch != NO_MICROBATCH:
        args["microbatch"] = microbatch
    if bar.slices > 1:
        args["slice"] = part
    args["critical"] = bar.is_critical
    return [_slice(track, bar, bar.label, args) for track in tracks]


def _message_slices(table: ScheduleTable, arrow: Arrow) -> list[_Slice]:
    """Return a message's slices at its sender and receiver; none if it takes no time."""
    sender, receiver, args = arrow.sender, arrow.receiver, {"critical": arrow.is_critical}
    tracks = (
        Track(sender, SEND, receiver, f"send to worker {receiver}", "message"),
        Track(receiver, RECEIVE, sender, f"receive from worker {sender}", "message"),
    )
    parts = [_slice(track, arrow, table.grammar.text((arrow.op,)), args) for track in tracks]
    return [part for part in parts if part.end > part.start]


def _slice(track: Track, timed: Bar | Arrow, name: str, args: dict[str, Any]) -> _Slice:
    start, end = (round(time * _NANOSECONDS) for time in (timed.start, timed.finish))
    return _Slice(track, start, end, name, args)


def _assign_threads(slices: Sequence[_Slice], num_workers: int) -> list[Event]:
    """Assign threads so that slices of a thread never overlap; return events that name them."""
    slices_by_track: dict[Track, list[_Slice]] = {_compute_track(w): [] for w in range(num_workers)}
    for piece in slices:
        slices_by_track.setdefault(piece.track, []).append(piece)
    names = _name_events("process", num_workers, COMPUTE, "pipeline", 0)
    for worker in range(num_workers):
        names += _name_events("process", worker, COMPUTE, f"worker {worker}", worker + 1)
    # Perfetto takes a thread with its process's number for the main thread: use other numbers
    tids = itertools.count(num_workers + 1)
    for track, pieces in sorted(slices_by_track.items(), key=lambda item: item[0]):
        for number, lane in enumerate(_lanes(pieces), 1):
            tid = COMPUTE if track.kind == COMPUTE and number == 1 else next(tids)
            title = f"{track.title} ({number})" if number > 1 else track.title
            names += _name_events("thread", track.worker, tid, title, tid)
            for piece in lane:
                piece.tid = tid
    return names


def _name_events(what: str, worker: int, tid: int, title: str, rank: int) -> list[Event]:
    """Return two events that set the name and the sort order of a process or thread."""
    ids = {"ph": "M", "pid": worker, "tid": tid}
    return [
        {**ids, "name": f"{what}_name", "args": {"name": title}},
        {**ids, "name": f"{what}_sort_index", "args": {"sort_index": rank}},
    ]


def _lanes(slices: Sequence[_Slice]) -> list[list[_Slice]]:
    """Divide slices over lanes without overlap; a slice takes the first lane free at its start."""
    lanes: list[list[_Slice]] = [[]]
    busy: list[tuple[int, int]] = []  # heap of (end, lane)
    free = [0]  # heap of lanes
    for piece in sorted(slices, key=lambda piece: piece.start):
        while busy and busy[0][0] <= piece.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, len(lanes))
            lanes.append([])
        lane = heapq.heappop(free)
        heapq.heappush(busy, (piece.end, lane))
        lanes[lane].append(piece)
    return lanes


def _flows(
    evaluation: Evaluation, slices: Mapping[int, _Slice], messages: Sequence[Sequence[_Slice]]
) -> list[Event]:
    """Return the arrows (flows) of messages; `slices` is {node: slice of its op}."""
    # `messages` has the slices of each message. A flow binds to the slice that contains its time: a
    # nanosecond inside the slice, because other slices may begin and end at the borders.
    events, program_messages = [], evaluation.program.messages
    ends = zip(program_messages.producer.tolist(), program_messages.consumer.tolist(), strict=True)
    for number, (producer, consumer) in enumerate(ends):
        source, target = slices[producer], slices[consumer]
        if source.start == source.end or target.start == target.end:
            continue  # an arrow cannot begin or end in a slice of no length
        steps = [("s", source, max(source.start, source.end - 1))]  # kind of event, slice, time
        steps += [("t", sent, min(sent.start + 1, sent.end - 1)) for sent in messages[number][:1]]
        steps.append(("f", target, min(target.start + 1, target.end - 1)))
        name = evaluation.table.grammar.text(program_messages.cells(number)[:1])
        fields = {"cat": "message", "id": number, "bp": "e"}
        for kind, piece, time in steps:
            events.append(_event(kind, piece.track.worker, piece.tid, name, time, **fields))
    return events


def _in_flight(table: ScheduleTable, ops: Sequence[Bar]) -> list[Event]:
    """Return counter events of activations in flight on each worker: +1 at F, -1 after B or W."""
    # Phases that a table declares may hold other items, which have counters of their own.
    ledger = memory_ledger(phase for phase in table.used_phases if phase not in HOST)
    item_by_part = {table.grammar.parts[name]: name for name in table.grammar.items}
    changes: list[tuple[int, int, Counter[str]]] = []  # time [ns], worker, change by item
    for bar in ops:  # row order is kept at equal times, so ends come before starts
        entries = [entry for op in bar.ops for entry in ledger.get(op.phase, ())]
        for moment, seconds in ((START, bar.start), (END, bar.finish)):
            change = Counter[str]()
            for entry in entries:
                if entry.moment == moment:
                    change[item_by_part.get(entry.part, "activations")] += entry.change
            if any(change.values()):
                changes.append((round(seconds * _NANOSECONDS), bar.worker, change))
    zeros = dict.fromkeys(["activations", *table.grammar.items], 0)
    events, counts = [], defaultdict[int, Counter[str]](lambda: Counter(zeros))
    for time, worker, change in sorted(changes, key=lambda row: row[0]):
        counts[worker].update(change)
        events.append(_event("C", worker, COMPUTE, "in flight", time, args=dict(counts[worker])))
    return events


def _idle_workers(num_workers: int, slices: Sequence[_Slice]) -> list[Event]:
    """Return counter events of the number of idle workers."""
    changes = Counter({0: num_workers})  # of the number of idle workers, by time [ns]
    for piece in slices:
        if piece.track.kind == COMPUTE:
            changes[piece.start] -= 1
            changes[piece.end] += 1
    times = sorted(changes)
    counts = itertools.accumulate(changes[time] for time in times)
    return [
        _event("C", num_workers, COMPUTE, "idle", time, args={"workers": count})
        for time, count in zip(times, counts, strict=True)
    ]
