"""Reader of SQLite exports of Nsight Systems: NVTX ranges, device work and CUDA calls.

Tables and columns are those of the published schema (3.16, of Nsight Systems 2024.6). Older exports
lack `textId` or `globalPid`, and have empty cells where newer ones have NULL.
"""

import contextlib
import itertools
import json
import operator
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.traces.readers.device import (
    CollectiveKey,
    DeviceWork,
    find_calls,
    find_launches,
    is_exchange,
    is_sync,
    number_collective,
)
from pipejax.traces.readers.labels import (
    FRAMEWORKS,
    find_framework,
    parse_label,
    parse_mark,
)
from pipejax.traces.readers.parts import number_groups
from pipejax.traces.readers.rank_lists import file_rank
from pipejax.traces.readers.rank_slices import Place, RankFile, Rows, join_ranks
from pipejax.traces.readers.sources import Reader, Request
from pipejax.traces.record import NONE, LeftOut, Trace

if TYPE_CHECKING:
    from sqlite3 import Connection

_RANGES, _CALLS = "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"
_KERNELS, _COPIES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"
# tables of device work; graphs have one row each unless nsys traced their nodes
_WORK = (_KERNELS, _COPIES, "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
_SESSION, _PAYLOADS = "TARGET_INFO_SESSION_START_TIME", "NVTX_PAYLOAD_SCHEMA_ENTRIES"
_TRACED = {_RANGES: "nvtx", _CALLS: "cuda", _KERNELS: "cuda"}  # what nsys must trace for a table
_RANGE_TYPES = "59, 60"  # of events: ranges by push and pop, and by start and end
_ON_DEVICE = 8  # kind of a copy that stays on its device
_PROCESS_SHIFT = 24  # of a global process or thread: the lower bits are the thread
_MICROSECOND = 1e3  # [ns]
_RANK = re.compile(r"rank[ =](\d{1,9})\b")
# PithTrain states the place of a rank: position and size on each axis
_PLACE = re.compile(r"rank=\d+; pp=(?P<worker>\d+)/(?P<workers>\d+)(?P<axes>(?: \w+=\d+/\d+)*)")
_COMMUNICATOR, _SIZE = "NCCL communicator ID", "Message size [bytes]"
_SCHEMA_OFFSET, _PAYLOAD_OFFSET = 8, 32  # in bytes; a header comes before the payload

_START = operator.attrgetter("start")


class _Range(NamedTuple):
    """NVTX range of a thread [us]; its end is None if the trace ended before."""

    start: float
    end: float | None
    thread: int
    label: str
    payload: tuple[str, int] = ("", NONE)  # communicator and bytes of a call of NCCL


class _Process(NamedTuple):
    """Ranges and device work of a process."""

    number: int
    device: int
    ranges: list[_Range]
    work: DeviceWork
    syncs: NumpyArray  # starts and ends of host calls that wait (2, calls)


def read_nsight(paths: Sequence[Path], request: Request) -> Trace:
    """Read the exports of a run, with one or several processes in each file."""
    if not paths:
        return join_ranks([], [], request.sizes, [])
    import sqlite3  # most runs have no such file

    left_out: list[LeftOut] = []
    collectives: dict[CollectiveKey, int] = {}
    exports: list[tuple[Path, list[_Process], int | None]] = []
    for path in sorted(paths, key=_name_order):
        try:
            uri = f"{path.resolve().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
                export = _Export(path, database)
                exports.append((path, [*export.processes(collectives, left_out)], export.zero()))
        except (sqlite3.Error, TypeError, OverflowError) as error:
            left_out.append(LeftOut(str(path), f"it is no sound export of Nsight Systems: {error}"))
        request.on_bytes(path.stat().st_size)
    processes = [process for _, in_file, _ in exports for process in in_file]
    labels = sorted({entry.label for process in processes for entry in process.ranges})
    framework = find_framework(labels)
    labels = [label for label in labels if parse_label(label, framework)]
    numbers = {label: number for number, label in enumerate(labels)}
    ranks, inferred = _find_ranks(exports, left_out)
    files = []
    for path, in_file, zero in exports:
        rows = [
            _rank_rows(process, ranks[id(process)], numbers, framework, left_out)
            for process in in_file
            if id(process) in ranks and any(entry.label in numbers for entry in process.ranges)
        ]
        if not rows:
            why = f"none of its NVTX ranges is a label of {', '.join(FRAMEWORKS)}"
            left_out.append(LeftOut(str(path), why))
        files.append(RankFile(path, rows, zero))
    cells = [parse_label(label, framework) for label in labels]
    return join_ranks(files, cells, request.sizes, left_out, [*collectives], inferred)


def _name_order(path: Path) -> list[tuple[int, str]]:
    """Return the sort key of a file name that puts 2 before 10."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", str(path))]


class _Export:
    """Tables of a file."""

    def __init__(self, path: Path, database: "Connection") -> None:
        self.path, self.database = path, database
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
        known_tables = {_RANGES, _CALLS, _SESSION, _PAYLOADS, *_WORK}.intersection(tables)
        self.columns = {
            table: [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            for table in known_tables
        }
        lacking = [table for table in _TRACED if table not in self.columns]
        if len(lacking) == len(_TRACED):
            raise TypeError(f"it has no table {_RANGES}")
        if lacking:
            flags = ",".join(sorted({_TRACED[table] for table in lacking}))
            raise wrong(
                "files",
                f"must be exports of Nsight Systems with ranges, kernels and CUDA calls: {path} "
                f"lacks {', '.join(lacking)}; write nsys profile --trace=cuda,nvtx, which records "
                f"them (here {flags} is missing)",
            )
        self.strings: dict[int, str] = dict(database.execute("SELECT id, value FROM StringIds"))

    def select(self, table: str, names: Sequence[str], condition: str = "") -> Iterator[Any]:
        """Yield rows of a table; a missing column is NULL."""
        columns = [f'"{name}"' if name in self.columns[table] else "NULL" for name in names]
        return self.database.execute(f"SELECT {', '.join(columns)} FROM {table} {condition}")

    def integers(self, table: str, names: Sequence[str]) -> Int[NumpyArray, "columns rows"]:
        """Return columns of a table as integers; NONE for NULL."""
        cells = itertools.chain.from_iterable(self.select(table, names))
        values = np.fromiter((NONE if cell is None else cell for cell in cells), np.int64)
        return values.reshape(-1, len(names)).T

    def zero(self) -> int | None:
        """Return the start of the session [ns], which is 0 in all tables; None if unknown."""
        starts = self.select(_SESSION, ["utcEpochNs"]) if _SESSION in self.columns else ()
        return next((start for (start,) in starts if start is not None), None)

    def processes(
        self, collectives: dict[CollectiveKey, int], left_out: list[LeftOut]
    ) -> Iterator[_Process]:
        """Yield the processes with labels of ops."""
        by_process: dict[int, list[_Range]] = {}
        for entry in self._ranges():
            by_process.setdefault(entry.thread >> _PROCESS_SHIFT, []).append(entry)
        names = ("start", "end", "globalTid", "correlationId", "nameId")
        calls = self.integers(_CALLS, names)
        work = self._work()
        for number, ranges in by_process.items():
            if not any(parse_label(entry.label, name) for entry in ranges for name in FRAMEWORKS):
                continue
            is_own = work[-1] == number
            if (work[-1] == NONE >> _PROCESS_SHIFT).any():  # older exports have no globalPid
                if len(np.unique(calls[2] >> _PROCESS_SHIFT)) > 1:
                    why = f"{self.path} has several processes and no globalPid"
                    raise wrong("files", f"must state the process of each kernel: {why}")
                is_own[:] = True
            own_calls = calls[:, calls[2] >> _PROCESS_SHIFT == number]
            yield self._process(number, ranges, own_calls, work[:-1, is_own], collectives, left_out)

    def _ranges(self) -> Iterator[_Range]:
        """Yield ranges with labels of ops, steps, places and calls of NCCL."""
        texts = ("text", "textId", "jsonText", "jsonTextId", "binaryData")
        condition = f"WHERE eventType IN ({_RANGE_TYPES})"
        is_used: dict[str, bool] = {}
        offsets = self._payload_offsets()
        for start, end, thread, text, text_id, *payload in self.select(
            _RANGES, ("start", "end", "globalTid", *texts), condition
        ):
            # PyTorch's emit_nvtx adds numbers of the call, as in "PP:0F1, op_id = 7"
            label = (text or self.strings.get(text_id, "")).partition(", ")[0]
            if label not in is_used:
                is_used[label] = (
                    label.startswith("nccl")
                    or parse_mark(label) is not None
                    or _RANK.match(label) is not None
                    or any(parse_label(label, name) for name in FRAMEWORKS)
                )
            if is_used[label]:
                stop = None if end is None else end / _MICROSECOND
                entry = _Range(start / _MICROSECOND, stop, thread, label)
                if label.startswith("nccl"):
                    entry = entry._replace(payload=self._payload(payload, offsets))
                yield entry

    def _payload_offsets(self) -> dict[tuple[int, str], int]:
        """Return the positions of values in payloads by the number of their schema."""
        if _PAYLOADS not in self.columns:
            return {}
        rows = self.select(_PAYLOADS, ("schemaId", "name", "offset"))
        return {(schema, name): offset or 0 for schema, name, offset in rows}

    def _payload(
        self, cells: Sequence[Any], offsets: Mapping[tuple[int, str], int]
    ) -> tuple[str, int]:
        """Return communicator and bytes of a call of NCCL, from its payload as text or bytes."""
        text, text_id, data = cells
        text = text or self.strings.get(text_id)
        values: dict[str, Any] = {}
        if text:
            with contextlib.suppress(ValueError):
                values = json.loads(text)
        elif isinstance(data, bytes) and len(data) >= _PAYLOAD_OFFSET:
            (schema,) = struct.unpack_from("<I", data, _SCHEMA_OFFSET)
            for name in (_COMMUNICATOR, _SIZE):
                position = offsets.get((schema, name), len(data)) + _PAYLOAD_OFFSET
                if position + 8 <= len(data):
                    (values[name],) = struct.unpack_from("<Q", data, position)
        size = values.get(_SIZE)
        return str(values.get(_COMMUNICATOR) or ""), size if type(size) is int else NONE

    def _work(self) -> Int[NumpyArray, "7 works"]:
        """Return start, end, device, stream, correlation, string or NONE, process of all work."""
        parts = []
        for table in _WORK:
            if table not in self.columns:
                continue
            kind = {_KERNELS: "shortName", _COPIES: "copyKind"}.get(table, "")
            names = ("start", "end", "deviceId", "streamId", "correlationId", kind, "globalPid")
            part = self.integers(table, names)
            if table == _COPIES:  # -2: an exchange that is no kernel
                part[5] = np.where(part[5] == _ON_DEVICE, NONE, NONE - 1)
            parts.append(part)
        work = np.concatenate(parts, axis=1)
        work[-1] >>= _PROCESS_SHIFT
        return work

    def _process(
        self,
        number: int,
        ranges: list[_Range],
        calls: Int[NumpyArray, "5 calls"],
        work: Int[NumpyArray, "6 works"],
        collectives: dict[CollectiveKey, int],
        left_out: list[LeftOut],
    ) -> _Process:
        """Join the work of a process with the calls that launched it."""
        start, end, devices, stream, correlation, name = work
        device = int(np.bincount(devices + 1, end - start).argmax()) - 1 if len(devices) else NONE
        if other := int(np.sum(devices != device)):
            why = f"they ran on other devices than {device}, on which its process worked longest"
            left_out.append(LeftOut(f"kernels of {self.path}", why, other))
        call = find_calls(correlation, calls[3])
        exchange_names = {
            code: self.strings[code]
            for code in np.unique(name[name >= 0]).tolist()
            if is_exchange(self.strings.get(code, ""))
        }
        collective = np.full(len(start), NONE)
        by_thread: dict[int, list[_Range]] = {}
        for entry in sorted(ranges, key=_START):
            if entry.label.startswith("nccl"):
                by_thread.setdefault(entry.thread, []).append(entry)
        for row in np.flatnonzero(np.isin(name, [*exchange_names])).tolist():
            # a group launches its kernel after the range of the call
            payload = "", NONE
            if call[row] != NONE:
                launch, thread = calls[0, call[row]] / _MICROSECOND, int(calls[2, call[row]])
                before = [entry for entry in by_thread.get(thread, ()) if entry.start <= launch]
                payload = before[-1].payload if before else payload
            key = CollectiveKey.from_kernel(exchange_names[int(name[row])], *payload)
            collective[row] = number_collective(key, collectives)
        times = [values / _MICROSECOND for values in (start, end)]
        launch = find_launches(call, calls[0] / _MICROSECOND)
        exchanges = np.isin(name, [*exchange_names, NONE - 1])
        columns = (launch, *times, stream, exchanges, collective)
        all_work = DeviceWork(*(np.asarray(values, np.float64) for values in columns))
        sync_names = [code for code, text in self.strings.items() if is_sync(text)]
        # threads that neither launch nor label ops, such as a watchdog, may wait at any time
        threads = {entry.thread for entry in ranges} | {*calls[2, call[call >= 0]].tolist()}
        waits = np.isin(calls[4], sync_names) & np.isin(calls[2], [*threads])
        syncs = calls[:2, waits] / _MICROSECOND
        return _Process(number, device, ranges, all_work.select(devices == device), syncs)


def _find_ranks(
    exports: Sequence[tuple[Path, list[_Process], int | None]], left_out: list[LeftOut]
) -> tuple[dict[int, int], list[str]]:
    """Return the rank of each process by its id, and a note if no file states ranks."""
    ranks: dict[int, int] = {}
    unknown = []
    for path, processes, _ in exports:
        for process in processes:
            matches = (_RANK.match(entry.label) for entry in process.ranges)
            match = next((match for match in matches if match), None)
            rank = int(match[1]) if match else file_rank(path) if len(processes) == 1 else None
            if rank is None:
                unknown.append((path, process))
            else:
                ranks[id(process)] = rank
    if ranks:
        why = "neither its labels nor the name of its file state its rank"
        left_out += [LeftOut(f"process {entry.number} of {path}", why) for path, entry in unknown]
        return ranks, []
    order = {path: k for k, (path, _, _) in enumerate(exports)}
    unknown.sort(key=lambda entry: (order[entry[0]], entry[1].device, entry[1].number))
    note = "no file says ranks: they follow the names of files, then devices and processes"
    return {id(process): rank for rank, (_, process) in enumerate(unknown)}, [note] * bool(unknown)


def _rank_rows(
    process: _Process,
    rank: int,
    numbers: Mapping[str, int],
    framework: str,
    left_out: list[LeftOut],
) -> Rows:
    """Return the slices of a process as those of a rank."""
    ranges = sorted(process.ranges, key=_START)
    labelled = [entry for entry in ranges if entry.label in numbers]
    ended = [entry for entry in labelled if entry.end is not None]
    if unfinished := len(labelled) - len(ended):
        left_out.append(LeftOut(f"ranges of rank {rank}", "they have no end", unfinished))
    start, end = np.array([entry[:2] for entry in ended], np.float64).reshape(-1, 2).T
    label = np.array([numbers[entry.label] for entry in ended], np.int64)
    phases = [parse_label(entry.label, framework)[0].phase for entry in ended]
    # of nested ranges of one phase, such as a function in a function, the inner one is the op
    group = number_groups(np.array(phases)) if phases else label
    order = np.lexsort([-end, start, group])
    is_outer = np.zeros(len(order), bool)
    is_outer[order[:-1]] = (
        (np.diff(group[order]) == 0)
        & (start[order[1:]] < end[order[:-1]])
        & (end[order[1:]] <= end[order[:-1]])
    )
    if is_outer.any():
        why = "ranges of the same phase lie inside"
        left_out.append(LeftOut(f"ranges of rank {rank}", why, int(is_outer.sum())))
    marks = [
        (parse_mark(entry.label) or 0, entry.start, entry.end)
        for entry in ranges
        if parse_mark(entry.label) is not None and entry.end is not None
    ]
    if any(number != NONE for number, _, _ in marks):
        marks = [mark for mark in marks if mark[0] != NONE]
    else:
        marks = [(k, begin, stop) for k, (_, begin, stop) in enumerate(marks)]
    stated = next((m for entry in ranges if (m := _PLACE.match(entry.label))), None)
    place = None
    if stated is not None:
        axes = tuple(int(number) for number in re.findall(r"=(\d+)/", stated["axes"]))
        place = Place(axes, int(stated["worker"]), int(stated["workers"]))
    return Rows(
        rank,
        0,
        label=label[~is_outer],
        start=start[~is_outer],
        end=end[~is_outer],
        receives=np.zeros((2, 0)),
        work=process.work,
        syncs=process.syncs,
        marks=marks,
        place=place,
    )


READER = Reader(
    "Nsight Systems",
    "`nsys export --type sqlite`",
    f"NVTX ranges of {', '.join(FRAMEWORKS)}, kernels and CUDA calls of one or several ranks",
    lambda head: head.content.startswith(b"SQLite format 3\0"),
    read_nsight,
)
