"""Reader of Chrome traces: of PyTorch's profiler, one file per rank, and of our own exports."""

import json
import re
from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import wrong
from pipejax.schedules.cells.ops import COMPUTING, Phase, format_cell, matching_receive, parse_cell
from pipejax.traces.readers.device import Work, find_calls
from pipejax.traces.readers.labels import PYTORCH, parse_label
from pipejax.traces.readers.parts import passing_rows
from pipejax.traces.readers.rank_lists import file_rank
from pipejax.traces.readers.rank_slices import RankFile, Rows, join_ranks
from pipejax.traces.readers.sources import (
    HEAD_BYTES,
    CutError,
    OnBytes,
    Reader,
    Request,
    is_json,
    read_texts,
)
from pipejax.traces.record import NONE, LeftOut, Trace

RECEIVES = ("gloo:recv", "nccl:recv")  # slices of a receive, from its start to its arrival
STEP = "ProfilerStep#"
BROKEN, EARLY = "events that are not JSON", "it ends early"  # faults that are counted
# A trace may have 10^7 other events: only used events, and the text of one file, stay in memory.
_GAP = re.compile(r"[\s,:]*")
_EVENT_GAP = re.compile(r"[\s,}]*")  # between events; a damaged event may leave a brace
_EVENT = re.compile(r'\{\s*"(?:ph|name|cat|pid|tid|ts)"\s*:')
_EVENTS = re.compile(r'"traceEvents"\s*:')
# the decoder's own scanner, a fifth faster than `raw_decode`; its stub does not list it
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # its stub lacks it

Event = dict[str, Any]


_DAMAGE = (StopIteration, ValueError, RecursionError)


def read_events(
    pieces: Iterator[str], header: dict[str, Any], faults: "Counter[str]"
) -> Iterator[Event]:
    """Yield the events of a trace; add other keys of the file to `header`, and count faults."""
    parts, why = [], EARLY
    try:
        for piece in pieces:
            parts.append(piece)
    except CutError as error:
        why = str(error)
    text = "".join(parts)
    position = _end(_GAP, text, 0)
    is_list, is_complete = text[position : position + 1] == "[", False
    position += 1
    if is_list:
        position = yield from _list_events(text, position, faults)
        is_complete = why == EARLY and not text[position:].strip()  # "]" is optional
    while not is_list:
        position = _end(_GAP, text, position)
        is_complete = text[position : position + 1] == "}"
        if is_complete or position == len(text):
            break
        try:
            key, position = _scan(text, position)
            position = _end(_GAP, text, position)
            if text[position : position + 1] == "[" and key == "traceEvents":
                position = yield from _list_events(text, position + 1, faults)
            else:
                header[str(key)], position = _scan(text, position)
        except _DAMAGE:  # skip a damaged value before the events
            match = _EVENTS.search(text, position + 1)
            if match is None:
                break
            position = match.start()
    if not is_complete:
        faults[why] += 1


def _end(gap: "re.Pattern[str]", text: str, position: int) -> int:
    """Return the end of a gap."""
    return gap.match(text, position).end()  # type: ignore[union-attr]  # it matches no text


def _list_events(text: str, position: int, faults: "Counter[str]") -> Generator[Event, None, int]:
    """Yield the events of a JSON list without damaged ones; return the position of its end."""
    while True:
        position = _end(_EVENT_GAP, text, position)
        if position == len(text) or text[position] == "]":
            return min(position + 1, len(text))
        try:
            value, position = _scan(text, position)
        except _DAMAGE:
            match = _EVENT.search(text, position + 1)
            if match is None:
                return position
            position = match.start()
            faults[BROKEN] += 1
            continue
        if type(value) is dict:
            yield value


_PYTORCH_PREFIXES = (PYTORCH, *RECEIVES, STEP, "Forward ", "Backward ")
_OUR_CATEGORIES = frozenset(("compute", "collective", "host link", "message"))
# category of a label on a stream; backwards have none, as another thread launches their kernels
_ON_STREAM = "gpu_user_annotation"
_KERNEL, _LAUNCHES = "kernel", frozenset(("cuda_runtime", "cuda_driver", "runtime", "driver"))
_SLICE, _RECEIVE, _MARK, _OURS = range(4)  # kinds of slices
_COLUMNS = {
    "kind": np.int8,
    "label": np.int64,
    "start": np.float64,
    "length": np.float64,
    "process": np.int64,
    "thread": np.int64,
}


class _EventCollector:
    """Columns of the used events of a file; `names` numbers the labels of all files."""

    def __init__(self, names: dict[str, int]) -> None:
        self.names, self.count = names, 0
        self.unknown_ops = Counter[str]()  # names of ops in our exports without a known phase
        self.label_kinds: dict[str, tuple[int, int]] = {}  # kind and number of labels
        self.kind, self.label = array("b"), array("q")
        self.start, self.length = array("d"), array("d")
        self.process, self.thread = array("q"), array("q")
        self.receive_tracks: set[tuple[int, int]] = set()  # of our exports: process and thread
        # correlation, start, length and stream of kernels; correlation and start of launches
        self.kernels = array("q"), array("d"), array("d"), array("q")
        self.launches = array("q"), array("d")

    def add(self, event: Event) -> None:
        """Append an event to the columns if it is a slice of a pipeline, a kernel or a title."""
        self.count += 1
        name = event.get("name")
        if type(name) is not str:
            return
        if event.get("ph") != "X":
            self._add_title(event, name)
            return
        category = event.get("cat")
        if category == _KERNEL or category in _LAUNCHES:
            self._add_kernel(event, is_launch=category != _KERNEL)
            return
        is_ours = not name.startswith(_PYTORCH_PREFIXES)
        if is_ours and (category not in _OUR_CATEGORIES or not parse_label(name)):
            if category == COMPUTING:
                self.unknown_ops[name] += 1
            return
        if name not in self.label_kinds:
            self.label_kinds[name] = self._label_kind(name)
        kind, label = self.label_kinds[name]
        if label < 0:
            return
        if is_ours:
            kind = _OURS
        elif kind == _SLICE and category == _ON_STREAM:
            return
        self.kind.append(kind)
        self.label.append(label)
        self.start.append(_number(event.get("ts")))
        self.length.append(_number(event.get("dur")))
        self.process.append(_integer(event.get("pid")))
        self.thread.append(_integer(event.get("tid")))

    def _add_kernel(self, event: Event, *, is_launch: bool) -> None:
        """Append a kernel, or the host call that launched it: both have the same correlation."""
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        correlation = args.get("correlation")
        if type(correlation) is not int or correlation <= 0:
            return
        correlations, starts = self.launches if is_launch else self.kernels[:2]
        correlations.append(correlation)
        starts.append(_number(event.get("ts")))
        if not is_launch:
            self.kernels[2].append(_number(event.get("dur")))
            self.kernels[3].append(_integer(args.get("stream", event.get("tid"))))

    def launched_kernels(self) -> Work:
        """Return every kernel whose launch is known; exchanges count as all kernels."""
        correlation, start, length, stream = map(np.array, self.kernels)
        call_correlation, call_start = map(np.array, self.launches)
        call = find_calls(correlation, call_correlation)
        launch = np.append(call_start, np.nan)[call]
        zeros = np.zeros(len(start))
        work = np.stack([launch, start, start + length, stream, zeros, zeros + NONE])
        return work[:, np.isfinite(work).all(axis=0) & (length >= 0)]

    def _label_kind(self, name: str) -> tuple[int, int]:
        """Return kind and number of a label; the number is -1 if the label names no pipeline op."""
        if name.startswith(RECEIVES):
            name, kind = RECEIVES[0], _RECEIVE  # drop peer and tag
        elif name.startswith(STEP):
            kind = _MARK
        elif parse_label(name):
            kind = _SLICE
        else:
            return _SLICE, -1
        return kind, self.names.setdefault(name, len(self.names))

    def _add_title(self, event: Event, name: str) -> None:
        """Remember a track of our exports whose title says that it receives."""
        args = event.get("args")
        title = args.get("name") if name == "thread_name" and isinstance(args, dict) else None
        if str(title).startswith("receive from worker"):
            self.receive_tracks.add((_integer(event.get("pid")), _integer(event.get("tid"))))


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else np.nan


def _integer(value: Any) -> int:
    """Return the number of a process or thread; of a name, its hash."""
    return value if type(value) is int and abs(value) < 2**62 else hash(str(value)) >> 2


def read_chrome(paths: Sequence[Path], request: Request) -> Trace:
    """Read the traces of all ranks."""
    left_out: list[LeftOut] = []
    names: dict[str, int] = {}
    files = [RankFile(path, *_read_file(path, names, request.on_bytes, left_out)) for path in paths]
    return join_ranks(files, [parse_label(name) for name in names], request.sizes, left_out)


def _read_file(
    path: Path, names: dict[str, int], on_bytes: OnBytes, left_out: list[LeftOut]
) -> tuple[list[Rows], int | None]:
    """Read the slices of each rank in a file, and the zero of its clock [ns], if it is stated."""
    # `names` numbers the labels of all files; new ones are added
    header: dict[str, Any] = {}
    faults: Counter[str] = Counter()
    collector = _EventCollector(names)
    for event in read_events(read_texts(path, on_bytes), header, faults):
        collector.add(event)
    for why, count in faults.items():
        left_out.append(LeftOut(f"parts of {path}", why, count))
    if not np.isin(collector.kind, (_SLICE, _OURS)).any():
        why = (
            f"none of its {collector.count:,} events has a label of PyTorch's pipelining, as PP:0F1"
        )
        left_out.append(LeftOut(str(path), why))
        return [], None
    columns = {name: np.array(getattr(collector, name), dtype) for name, dtype in _COLUMNS.items()}
    passes, dropped = passing_rows(
        [
            (~np.isfinite(columns["start"] + columns["length"]), "its time is no finite number"),
            (columns["length"] < 0, "it ends before it starts"),
        ],
        f"slices of {path}",
    )
    left_out += dropped
    columns = {name: values[passes] for name, values in columns.items()}
    if np.any(columns["kind"] == _OURS):
        if collector.unknown_ops:
            name, count = collector.unknown_ops.most_common(1)[0][0], collector.unknown_ops.total()
            raise wrong(
                "files", f"must have phases by known names: {count} ops of {path} are as {name!r}"
            )
        return _our_rows(columns, collector, names), None
    rank, world = _find_rank(header, path)
    if rank is None:
        left_out.append(LeftOut(str(path), "neither it nor its name says of which rank it is"))
        return [], None
    zero = header.get("baseTimeNanoseconds")
    is_cut = any(why != BROKEN for why in faults)
    rows = _rank_rows(columns, rank, world, names)
    rows = rows._replace(is_cut=is_cut, work=collector.launched_kernels())
    return ([rows] if len(rows.label) else []), zero if type(zero) is int else None


def _find_rank(header: Mapping[str, Any], path: Path) -> tuple[int | None, int]:
    """Return rank and world size by the header or the file name; None and 0 if unknown."""
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = info.get("rank"), info.get("world_size")
    rank = rank if type(rank) is int and rank >= 0 else file_rank(path)
    return rank, world if type(world) is int and 0 < world < 10**6 else 0


def _rank_rows(
    columns: Mapping[str, NumpyArray], rank: int, world: int, names: Mapping[str, int]
) -> Rows:
    """Divide the columns of a rank into slices, receives and marks of steps."""
    columns = dict(columns) | {"end": columns["start"] + columns["length"]}
    masks = {kind: columns["kind"] == kind for kind in range(_OURS)}
    text = {number: name for name, number in names.items()}
    marks = [
        (int(number), start, end)
        for label, start, end in zip(
            *(columns[k][masks[_MARK]].tolist() for k in ("label", "start", "end")), strict=True
        )
        if (number := text[label].removeprefix(STEP)).isdecimal() and len(number) < 10
    ]
    slices = np.flatnonzero(masks[_SLICE])
    # drop duplicates, which would begin a new step
    key = np.stack([columns[k][slices] for k in ("start", "end", "label")])
    slices = slices[np.unique(key, axis=1, return_index=True)[1]]
    return Rows(
        rank,
        world=world,
        label=columns["label"][slices],
        start=columns["start"][slices],
        end=columns["end"][slices],
        receives=np.stack([columns[k][masks[_RECEIVE]] for k in ("start", "end")]),
        marks=marks,
    )


def _our_rows(
    columns: Mapping[str, NumpyArray], collector: _EventCollector, names: dict[str, int]
) -> list[Rows]:
    """Divide one of our exports into its workers; on a receive track, a SEND becomes its RECV."""
    label = columns["label"].copy()
    tracks = zip(columns["process"].tolist(), columns["thread"].tolist(), strict=True)
    text = {number: name for name, number in names.items()}
    is_receive = np.array([track in collector.receive_tracks for track in tracks], bool)
    for number in np.unique(label[is_receive]):
        cell = parse_cell(text[number])
        if len(cell) == 1 and cell[0].phase in (Phase.SEND_F, Phase.SEND_B):
            name = format_cell((matching_receive(cell[0]),))
            label[is_receive & (label == number)] = names.setdefault(name, len(names))
    columns = dict(columns) | {"label": label, "kind": np.full(len(label), _SLICE)}
    workers = np.unique(columns["process"])
    by_worker = []
    for worker in workers[(workers >= 0) & (workers < 10**6)]:
        on_worker = columns["process"] == worker
        worker_columns = {name: values[on_worker] for name, values in columns.items()}
        rows = _rank_rows(worker_columns, int(worker), len(workers), names)
        by_worker.append(rows._replace(is_ours=True))
    return by_worker


READER = Reader(
    "Chrome trace",
    "torch.profiler around PyTorch's pipelining; `pipejax run --trace`, `pipejax export`",
    "labels as `PP:0F1`, one file for each rank; or a run of this package",
    lambda head: (
        is_json(head)
        and ('"traceEvents"' in head or head.lstrip()[0] == "[" or len(head) >= HEAD_BYTES // 4)
    ),
    read_chrome,
)
