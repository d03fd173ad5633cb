"""Reader of Chrome traces, from PyTorch's profiler (a file per rank) and from our own exports."""

import dataclasses
import json
import re
from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.base.checks import MAX_COUNT, wrong
from pipejax.schedules.cells.ops import COMPUTING, Phase, format_cell, matching_receive, parse_cell
from pipejax.traces.readers import labels, sources
from pipejax.traces.readers.device import EXCHANGE, Key, Work, number_collective
from pipejax.traces.readers.rank_lists import file_rank
from pipejax.traces.readers.rank_slices import RankFile, Rows, Slice, drop_outer_ranges, join_ranks
from pipejax.traces.record import NONE, OPS, LeftOut, Trace

RECEIVES = ("gloo:recv", "nccl:recv")  # slices of a receive, from its start to its arrival
BROKEN, EARLY = "events that are not JSON", "it ends early"  # faults of a file that are counted
# A trace may have 10^7 other events: only used events, and the text of one file, stay in memory.
_GAP = re.compile(r"[\s,:]*")
_EVENT_GAP = re.compile(r"[\s,}]*")  # between events; a damaged event may leave a brace
_EVENT = re.compile(r'\{\s*"(?:ph|name|cat|pid|tid|ts)"\s*:')
_EVENTS_KEY = re.compile(r'"traceEvents"\s*:')
# (text, start) to (value, its end): the decoder's scanner, a fifth faster than `raw_decode`
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # its stub lacks it

Event = dict[str, Any]


_SCAN_ERRORS = (StopIteration, ValueError, RecursionError)  # of `_scan` at damaged text


def read_events(
    pieces: Iterator[str], header: dict[str, Any], faults: "Counter[str]"
) -> Iterator[Event]:
    """Yield the events of a trace file, whose text comes in `pieces`."""
    # A file is a list of events, or an object that holds it as "traceEvents"; it may end early. The
    # other keys of the object are added to `header`; `faults` counts the damages by their reason.
    parts, why = [], EARLY
    try:
        for piece in pieces:
            parts.append(piece)
    except sources.CutError as error:
        why = str(error)
    text = "".join(parts)
    position = _skip(_GAP, text, 0)  # `_skip` and `_scan` return the position after what they read
    is_list, is_complete = text[position : position + 1] == "[", False
    position += 1
    if is_list:
        position = yield from _list_events(text, position, faults)
        is_complete = why == EARLY and not text[position:].strip()  # "]" is optional
    while not is_list:  # the file is an object: read its keys up to the end or a last fault
        position = _skip(_GAP, text, position)
        is_complete = text[position : position + 1] == "}"
        if is_complete or position == len(text):
            break
        try:
            key, position = _scan(text, position)
            position = _skip(_GAP, text, position)
            if text[position : position + 1] == "[" and key == "traceEvents":
                position = yield from _list_events(text, position + 1, faults)
            else:
                header[str(key)], position = _scan(text, position)
        except _SCAN_ERRORS:  # skip a damaged value before the events
            match = _EVENTS_KEY.search(text, position + 1)
            if match is None:
                break
            position = match.start()
    if not is_complete:
        faults[why] += 1


def _skip(gap: "re.Pattern[str]", text: str, position: int) -> int:
    return gap.match(text, position).end()  # type: ignore[union-attr]  # it matches no text


def _list_events(text: str, position: int, faults: "Counter[str]") -> Generator[Event, None, int]:
    """Yield the undamaged events of a JSON list; return the position of its end in the text."""
    while True:
        position = _skip(_EVENT_GAP, text, position)
        if position == len(text) or text[position] == "]":
            return min(position + 1, len(text))
        try:
            value, position = _scan(text, position)
        except _SCAN_ERRORS:
            match = _EVENT.search(text, position + 1)
            if match is None:
                return position
            position = match.start()
            faults[BROKEN] += 1
            continue
        if type(value) is dict:
            yield value


_OUR_CATEGORIES = frozenset(("compute", "collective", "host link", "message"))
# categories without op labels; backwards on a stream have none, as another thread launches them
_UNLABELLED = frozenset(("gpu_user_annotation", "cpu_op", "python_function", "fwdbwd", "ac2g"))
_RANK = re.compile(r"\brank[ _=:-]*(\d{1,6})\b", re.IGNORECASE)
_WORK = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_CALLS = frozenset(("cuda_runtime", "cuda_driver", "runtime", "driver"))


class _EventCollector:
    """Collector of the used events of a file.

    `names` are the numbers of labels of all files, `keys` those of collectives.
    """

    def __init__(self, names: dict[str, int], keys: dict[Key, int], microseconds: float) -> None:
        self.names, self.keys, self.count = names, keys, 0
        self.microseconds = microseconds  # unit of the file's times [us]
        self.faults = Counter[str]()  # reasons for which slices were left out
        self.unknown_ops = Counter[str]()  # names of ops in our exports without a known phase
        self.slices: dict[Any, list[Slice]] = {}  # by process
        self.receives: list[tuple[float, float]] = []
        self.marks: list[tuple[str, float, float]] = []
        self.process_ranks: dict[Any, int] = {}
        self.open_events: dict[tuple[Any, Any], list[Event]] = {}  # by process and thread
        # of our exports: process, thread, and start, end and name; tracks that receive
        self.export_slices: list[tuple[Any, Any, float, float, str]] = []
        self.receive_tracks: set[tuple[Any, Any]] = set()
        self.work = array("d")  # rows of `Work`, each with the correlation of its launch
        self.launches = array("d")  # correlation and start of each host call that launches work
        self.waits: list[tuple[float, float, Any]] = []  # start, end, thread of calls that wait
        self.threads: set[Any] = set()  # threads that launch work or label ops

    def add(self, event: Event) -> None:
        """Append an event by its kind: slice of a pipeline, kernel, host call, or metadata."""
        self.count += 1
        name, category, kind = event.get("name"), event.get("cat"), event.get("ph")
        # an asynchronous slice, from b to e, has its own track
        track = event.get("pid"), str(event.get("id")) if kind in ("b", "e") else event.get("tid")
        if kind in ("E", "e"):
            self._close(event, self.open_events.get(track))
        if type(name) is not str or kind in ("E", "e"):
            return
        if kind in ("B", "b"):
            self.open_events.setdefault(track, []).append(event)
        elif kind != "X":
            self._read_metadata(event, name)
        elif category in _WORK:
            self._add_work(event, name)
        elif category in _CALLS:
            self._add_call(event, name)
        elif category in _OUR_CATEGORIES and labels.parse_label(name):
            self._add_slice(event, name, is_ours=True)
        elif category == COMPUTING:
            self.unknown_ops[name] += 1
        elif category not in _UNLABELLED and (
            name.startswith(RECEIVES) or labels.STEP.fullmatch(name) or labels.is_label(name)
        ):
            self._add_slice(event, name, is_ours=False)

    def _close(self, event: Event, stack: list[Event] | None) -> None:
        """Append the slice that an end event closes; `stack` has the open events of its track."""
        if stack:
            names = (begin["name"] for begin in reversed(stack))
            depth = next((k for k, name in enumerate(names) if name == event.get("name")), 0)
            begin = stack.pop(-1 - depth)  # if times are equal, the next slice may have begun
            length = self._time(event, "ts") - self._time(begin, "ts")
            self.add(begin | {"ph": "X", "dur": length / self.microseconds})

    def _add_slice(self, event: Event, name: str, *, is_ours: bool) -> None:
        """Append a labelled slice; if its times are wrong, count the reason in `faults`."""
        start, length = self._time(event, "ts"), self._time(event, "dur")
        end, step = start + length, _arguments(event).get("step_num")
        self.threads.add(str(event.get("tid")))
        if not np.isfinite(end):
            self.faults["its time is no finite number"] += 1
        elif length < 0:
            self.faults["it ends before it starts"] += 1
        elif is_ours:
            self.export_slices.append((event.get("pid"), event.get("tid"), start, end, name))
        elif name.startswith(RECEIVES):
            self.receives.append((start, end))
        elif labels.STEP.fullmatch(name):
            mark = f"step {step}" if str(step).isdecimal() else name  # XProf counts beside the name
            self.marks.append((mark, start, end))
        else:
            label = self.names.setdefault(name, len(self.names))
            self.slices.setdefault(event.get("pid"), []).append((start, end, label))

    def _add_work(self, event: Event, name: str) -> None:
        """Append a kernel or copy, with the correlation number of the call that launched it."""
        args, start = _arguments(event), self._time(event, "ts")
        length, correlation = self._time(event, "dur"), args.get("correlation")
        stream = args.get("stream", event.get("tid"))
        stream = stream if type(stream) is int else hash(str(stream)) >> 12  # exact as a float
        is_exchange = EXCHANGE.search(name) or (name.startswith("Memcpy") and "DtoD" not in name)
        number = correlation if type(correlation) is int else NONE
        # PyTorch names the process group of its collectives
        groups = (str(args.get(f"Process Group {part}", "")) for part in ("Name", "Ranks"))
        size = args.get("In msg nelems")
        call = " ".join(groups).strip(), size if type(size) is int else NONE
        key = number_collective(name, *call, self.keys, is_exchange=bool(is_exchange))
        self.work.extend((number, start, start + length, stream, bool(is_exchange), key))

    def _add_call(self, event: Event, name: str) -> None:
        """Append a host call that launches work or waits for it."""
        start, correlation = self._time(event, "ts"), _arguments(event).get("correlation")
        end = start + self._time(event, "dur")
        is_wait = "Synchronize" in name or ("Memcpy" in name and "Async" not in name)
        if is_wait and np.isfinite(end):
            self.waits.append((start, end, str(event.get("tid"))))
        if type(correlation) is int and correlation > 0 and np.isfinite(start):
            self.launches.extend((correlation, start))
            self.threads.add(str(event.get("tid")))

    def device_work(self) -> Work:
        """Return all device work; work without a launch call has the launch time -inf."""
        work = np.array(self.work).reshape(-1, 6).T
        call_correlation, call_start = np.array(self.launches).reshape(-1, 2).T
        # calls [9 5], work [5 7]: positions [0 1] among the sorted calls, which are [5 9]; so the
        # first work has call 5, and the second none
        order = np.argsort(call_correlation, kind="stable")
        position = np.searchsorted(call_correlation[order], work[0])
        call = np.append(order, -1)[position]
        has_call = np.append(call_correlation, NONE - 1)[call] == work[0]
        work[0] = np.where(has_call, np.append(call_start, 0)[call], -np.inf)
        return work

    def export_rows(self) -> list[Rows]:
        """Return {worker: slices} of one of our exports; SEND on a track of receives is a RECV."""
        by_worker: dict[int, list[Slice]] = {}
        for worker, thread, start, end, name in self.export_slices:
            # other tracks also have names that are not cells, such as 3A
            cell = parse_cell(name) if (worker, thread) in self.receive_tracks else ()
            if len(cell) == 1 and cell[0].phase in (Phase.SEND_F, Phase.SEND_B):
                name = format_cell((matching_receive(cell[0]),))
            if type(worker) is int and 0 <= worker < MAX_COUNT:
                label = self.names.setdefault(name, len(self.names))
                by_worker.setdefault(worker, []).append((start, end, label))
        return [
            Rows.from_slices(worker, slices)._replace(world=len(by_worker), is_ours=True)
            for worker, slices in sorted(by_worker.items())
        ]

    def _read_metadata(self, event: Event, name: str) -> None:
        """Store the rank of a process, or a track of our own exports that shows receives."""
        if name in ("process_name", "process_labels"):
            values = " ".join(map(str, _arguments(event).values()))
            if match := _RANK.search(values):
                self.process_ranks[event.get("pid")] = int(match[1])
        title = _arguments(event).get("name") if name == "thread_name" else None
        if str(title).startswith("receive from worker"):
            self.receive_tracks.add((event.get("pid"), event.get("tid")))

    def _time(self, event: Event, key: str) -> float:
        """Return a time of an event [us]; NaN if the event has none."""
        value: Any = event.get(key)
        is_number = type(value) in (int, float) and abs(value) < 1e300
        return value * self.microseconds if is_number else np.nan


def _arguments(event: Event) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def read_chrome(paths: Sequence[Path], request: sources.Request) -> Trace:
    """Read the Chrome traces of all ranks of a run; a file or a process is a rank."""
    names: dict[str, int] = {}
    keys: dict[Key, int] = {}
    paths = sorted(paths, key=sources.name_order)
    files = [RankFile(path, *_read_file(path, names, keys, request)) for path in paths]
    by_label = labels.parse_labels(names)
    cells = [by_label.get(name, ()) for name in names]
    notes = []
    if all(rows.rank == NONE for file in files for rows in file.ranks):
        files = _number_ranks(files, cells)
        notes.append("no file states ranks: they follow stages, then file names, then processes")
    is_pytorch = any(labels.parse_label(name) for name in by_label)
    for k, (path, ranks, zero) in enumerate(files):
        if count := sum(rows.rank == NONE for rows in ranks):
            why = "neither its content nor its name states its rank"
            request.left_out.append(LeftOut(str(path), why, count))
        ranks = [
            rows for rows in ranks if rows.rank != NONE and any(map(cells.__getitem__, rows.label))
        ]
        if not is_pytorch:
            ranks = [drop_outer_ranges(rows, cells, request) for rows in ranks]
        files[k] = RankFile(path, ranks, zero)
    trace = join_ranks(files, cells, request, [*keys], notes)
    trace = dataclasses.replace(trace, launcher=labels.label_launcher(by_label))
    seconds = (trace.end - trace.start)[trace.has_phase(OPS)]
    starts = [rows.start for file in files for rows in file.ranks if not rows.is_ours]
    if request.unit is None and len(seconds) and starts:
        sources.infer_unit(seconds * 1e6, np.concatenate(starts), expected="us")
    return trace


def _number_ranks(files: Sequence[RankFile], cells: labels.Cells) -> list[RankFile]:
    """Number the ranks of all files by their first stage, then in the order of the files."""
    stages = [
        min((cells[label][0].stage for label in rows.label if cells[label]), default=NONE)
        for file in files
        for rows in file.ranks
    ]
    # first stages 2 0 1 -> ranks 2 0 1
    numbers = iter(np.argsort(np.argsort(stages, kind="stable")).tolist())
    return [
        file._replace(ranks=[rows._replace(rank=next(numbers)) for rows in file.ranks])
        for file in files
    ]


def _read_file(
    path: Path, names: dict[str, int], keys: dict[Key, int], request: sources.Request
) -> tuple[list[Rows], int | None]:
    """Return the slices of each rank that labels ops, and the clock's zero [ns] if stated."""
    header: dict[str, Any] = {}
    faults: Counter[str] = Counter()
    events = _EventCollector(names, keys, 1e6 * sources.SECONDS[request.unit or "us"])
    for event in read_events(sources.read_texts(path, request.on_bytes), header, faults):
        events.add(event)
    stacks = events.open_events.values()
    if count := sum(labels.is_label(str(event["name"])) for stack in stacks for event in stack):
        events.faults["it has no end"] = count
    left_out = request.left_out
    left_out += [LeftOut(f"parts of {path}", why, count) for why, count in faults.items()]
    left_out += [LeftOut(f"slices of {path}", why, n) for why, n in events.faults.items()]
    if not (events.slices or events.export_slices or events.faults):
        why = f"none of its {events.count:,} events has a label of {', '.join(labels.FRAMEWORKS)}"
        left_out.append(LeftOut(str(path), f"{why}, such as PP:0F1 or forward_step"))
        return [], None
    if events.export_slices:
        if unknown := events.unknown_ops:
            ((name, _),) = unknown.most_common(1)
            what = f"{unknown.total()} ops of {path} have others, such as {name!r}"
            raise wrong("files", f"must have phases by known names: {what}")
        return events.export_rows(), None
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    if events.work and len(events.slices) > 1:
        why = "several processes label ops, and kernels name none: ops are timed by the host"
        left_out.append(LeftOut(f"kernels of {path}", why, len(events.device_work().T)))
    is_cut = any(why != BROKEN for why in faults)  # other faults: the file ends too early
    zero = header.get("baseTimeNanoseconds")
    return _rank_rows(events, info, file_rank(path), is_cut), zero if type(zero) is int else None


def _rank_rows(
    events: _EventCollector, info: Mapping[str, Any], name_rank: int | None, is_cut: bool
) -> list[Rows]:
    """Return the slices of each process that labels ops; its rank is NONE if unknown."""
    # `info` is the file's record of its rank, `name_rank` the rank in its name; `is_cut` says
    # whether the file ends early.
    rank, world = info.get("rank"), info.get("world_size")
    rank = rank if type(rank) is int and rank >= 0 else name_rank
    syncs = [(start, end) for start, end, thread in events.waits if thread in events.threads]
    syncs += events.receives
    is_only_process = len(events.slices) == 1
    results = []
    for process in sorted(events.slices, key=lambda process: sources.name_order(str(process))):
        process_rank = events.process_ranks.get(process, NONE)
        if is_only_process and rank is not None:
            process_rank = rank
        # drop duplicates: a repeated first op would be read as the start of another step
        rows = Rows.from_slices(process_rank, {*events.slices[process]})
        rows = rows._replace(marks=labels.number_marks(events.marks), is_cut=is_cut)
        rows = rows._replace(world=world if type(world) is int and 0 < world < MAX_COUNT else 0)
        if is_only_process:  # else unknown: an event of the device names no process
            rows = rows._replace(
                receives=np.array(events.receives).reshape(-1, 2).T,
                work=events.device_work(),
                syncs=np.array(syncs).reshape(-1, 2).T,
                has_all_work=bool(events.work) and bool(events.launches),
            )
        results.append(rows)
    return results


READER = sources.Reader(
    form="Chrome trace",
    writers="torch.profiler, XProf, Perfetto; `pipejax run --trace`, `pipejax export`",
    content="labels as below, a file or a process for each rank; or a run of this package",
    can_read=lambda head: (
        sources.is_json(head)
        and not sources.is_json_lines(head)
        and not sources.is_json_rows(head)
        and (
            '"traceEvents"' in head
            or head.lstrip()[0] == "["
            or len(head) >= sources.HEAD_BYTES // 4
        )
    ),
    read=read_chrome,
)
