"""Reader of SQLite exports of Nsight Systems: NVTX ranges, device work and CUDA calls.

Tables and columns are those of the published schema (3.16, of Nsight Systems 2024.6). Older exports
have no textId or globalPid, and empty texts where newer ones have NULL.
"""

import bisect
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
from pipejax.traces.readers.device import Key, Work, find_calls
from pipejax.traces.readers.labels import FRAMEWORKS, Cell, parse_label, parse_labels
from pipejax.traces.readers.parts import number_groups, passing_rows
from pipejax.traces.readers.rank_lists import file_rank
from pipejax.traces.readers.rank_slices import RankFile, Rows, join_ranks
from pipejax.traces.readers.sources import Reader, Request
from pipejax.traces.record import NONE, LeftOut, Trace

if TYPE_CHECKING:
    from sqlite3 import Connection

_CALLS, _RANGES, _KERNELS = (
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND_KERNEL",
)
_COPIES, _MEMSETS = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"  # graphs whose nodes were not traced
_ON_DEVICE = 8  # copyKind of a copy that stays on its device
_COPY = NONE - 1  # instead of the name of a kernel, for a copy that leaves its device
_PROCESS_SHIFT = 24  # of a global process or thread: lower bits are the thread
_MICROSECOND = 1e3  # [ns]
_EXCHANGE = re.compile(r"nccl|nvshmem|deep_?ep", re.IGNORECASE)  # at the start of a kernel's name
_COLLECTIVE = re.compile("AllReduce|AllGather|ReduceScatter|Broadcast|Reduce")
_WAIT = re.compile(r".*Synchronize|cu(?:da)?Memcpy(?!\w*Async)")  # names of calls
# marks of steps; without a number, the k-th mark of a rank
_STEP = re.compile(
    r"(?:ProfilerStep#|(?:train(?:ing)?[ _])?(?:iteration|iter|step)[ _:#=]*)(?P<number>\d{1,9})"
    r"|train(?:ing)?[ _](?:step|iteration)|iteration",
    re.IGNORECASE,
)
_RANK = re.compile(r"rank[ =](\d{1,9})\b")
# place of a rank in PithTrain: position and size on each axis
_PLACE = re.compile(r"rank=\d+; pp=(?P<worker>\d+)/(?P<workers>\d+)(?P<axes>(?: \w+=\d+/\d+)*)")
_COMMUNICATOR, _SIZE = "NCCL communicator ID", "Message size [bytes]"
_SCHEMA_OFFSET, _PAYLOAD_OFFSET = 8, 32  # [bytes]; a header comes before the payload


class _Range(NamedTuple):
    """NVTX range of a thread [us]; its end is NaN if the trace ended before."""

    start: float
    end: float
    thread: int
    label: str
    call: tuple[str, int]  # communicator and bytes of a call of NCCL


class _Process(NamedTuple):
    """Ranges, device work and waiting calls of a process."""

    rank: int | None
    number: int
    device: int
    ranges: list[_Range]
    work: Work
    syncs: NumpyArray


_DEVICE = operator.attrgetter("device")


def read_nsight(paths: Sequence[Path], request: Request) -> Trace:
    """Read the exports of a run, with one or several processes in each file."""
    import sqlite3  # most runs have no such file

    left_out: list[LeftOut] = []
    keys: dict[Key, int] = {}
    exports: list[tuple[Path, list[_Process], int | None]] = []
    for path in sorted(paths, key=_name_order):
        uri = f"{path.resolve().as_uri()}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
                processes = [*_read_processes(path, database, keys, left_out)]
                session = _select(database, "TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])
                exports.append((path, processes, next((zero for (zero,) in session), None)))
        except (sqlite3.Error, TypeError, OverflowError) as error:
            left_out.append(LeftOut(str(path), f"it is no sound export: {error}"))
        request.on_bytes(path.stat().st_size)
    everything = [process for _, processes, _ in exports for process in processes]
    cells = parse_labels(entry.label for process in everything for entry in process.ranges)
    notes: list[str] = []
    if everything and all(process.rank is None for process in everything):
        notes.append("no file says ranks: they follow file names, then devices and processes")
        numbers = itertools.count()
        exports = [
            (path, [p._replace(rank=next(numbers)) for p in sorted(processes, key=_DEVICE)], zero)
            for path, processes, zero in exports
        ]
    files = []
    for path, processes, zero in exports:
        ranks = [rows for entry in processes for rows in _rank_rows(entry, cells, path, left_out)]
        if not ranks:
            why = f"none of its ranges is an op of {', '.join(FRAMEWORKS)} with a known rank"
            left_out.append(LeftOut(str(path), why))
        files.append(RankFile(path, ranks, zero))
    return join_ranks(files, [*cells.values()], request.sizes, left_out, [*keys], notes)


def _name_order(path: Path) -> list[tuple[str, int]]:
    """Return the sort key of a file name that puts 2 before 10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]


def _select(database: "Connection", table: str, names: Sequence[str]) -> Iterator[Any]:
    """Return the rows of a table; a missing column is NULL, and a missing table has no rows."""
    present = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
    columns = [f'"{name}"' if name in present else "NULL" for name in names]
    return database.execute(f"SELECT {', '.join(columns)} FROM {table}") if present else iter(())


def _integers(database: "Connection", table: str, names: Sequence[str]) -> NumpyArray:
    """Return columns of a table as integers (columns, rows); NONE for NULL."""
    cells = itertools.chain.from_iterable(_select(database, table, names))
    values = np.fromiter((NONE if cell is None else cell for cell in cells), np.int64)
    return values.reshape(-1, len(names)).T


def _read_processes(
    path: Path, database: "Connection", keys: dict[Key, int], left_out: list[LeftOut]
) -> Iterator[_Process]:
    """Yield the processes of a file that have labels of ops."""
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    lacking = [table for table in (_RANGES, _CALLS, _KERNELS) if table not in tables]
    if len(lacking) == 3:
        raise TypeError(f"Nsight Systems writes tables as {_RANGES}, and it has none of them")
    if lacking:
        why = f"must have NVTX ranges, kernels and CUDA calls: {path} lacks {', '.join(lacking)}"
        raise wrong("files", f"{why}; write nsys profile --trace=cuda,nvtx, which records them")
    strings: dict[int, str] = dict(_select(database, "StringIds", ["id", "value"]))
    by_process: dict[int, list[_Range]] = {}
    for entry in sorted(_read_ranges(database, strings)):
        by_process.setdefault(entry.thread >> _PROCESS_SHIFT, []).append(entry)
    calls = _integers(database, _CALLS, ("start", "end", "globalTid", "correlationId", "nameId"))
    work = np.concatenate([*_read_work(database)], axis=1)
    process_of_call, process_of_work = calls[2] >> _PROCESS_SHIFT, work[-1] >> _PROCESS_SHIFT
    if (process_of_work == NONE).any() and len(np.unique(process_of_call)) == 1:
        process_of_work[:] = process_of_call[0]  # older exports have no globalPid
    if lost := int(np.sum(process_of_work == NONE)):
        left_out.append(LeftOut(f"kernels of {path}", "no globalPid states their process", lost))
    for number, ranges in sorted(by_process.items()):
        if any(parse_label(entry.label, name) for entry in ranges for name in FRAMEWORKS):
            process_calls = calls[:, process_of_call == number]
            process_work = work[:-1, process_of_work == number]
            device, arrays = _join_work(ranges, process_calls, process_work, strings, keys)
            if other := process_work.shape[1] - arrays.shape[1]:
                why = f"they ran on other devices than {device}, where their process worked longest"
                left_out.append(LeftOut(f"kernels of {path}", why, other))
            # threads that neither launch nor label, such as a watchdog, may wait at any time
            threads = {entry.thread for entry in ranges}
            threads |= {*process_calls[2, np.isin(process_calls[3], process_work[4])].tolist()}
            waits = [code for code, text in strings.items() if _WAIT.match(text)]
            is_wait = np.isin(process_calls[4], waits) & np.isin(process_calls[2], [*threads])
            syncs = process_calls[:2, is_wait] / _MICROSECOND
            matches = (_RANK.match(entry.label) for entry in ranges)
            match = next(filter(None, matches), None)
            rank = int(match[1]) if match else file_rank(path) if len(by_process) == 1 else None
            yield _Process(rank, number, device, ranges, arrays, syncs)


def _read_ranges(database: "Connection", strings: Mapping[int, str]) -> Iterator[_Range]:
    """Yield ranges with labels of ops, steps, ranks and calls of NCCL."""
    schemas = _select(database, "NVTX_PAYLOAD_SCHEMA_ENTRIES", ["schemaId", "name", "offset"])
    offsets = {(schema, name): offset or 0 for schema, name, offset in schemas}
    is_used: dict[str, bool] = {}
    names = ("eventType", "start", "end", "globalTid", "text", "textId")
    payloads = ("jsonText", "jsonTextId", "binaryData")
    for kind, start, end, thread, text, text_id, *payload in _select(
        database, _RANGES, (*names, *payloads)
    ):
        if kind not in (59, 60):  # ranges by push and pop, or by start and end
            continue
        # PyTorch's emit_nvtx adds numbers of the call, as in "PP:0F1, op_id = 7"
        label = (text or strings.get(text_id, "")).partition(", ")[0]
        if label not in is_used:
            is_mark = bool(_STEP.fullmatch(label) or _RANK.match(label))
            is_op = any(parse_label(label, name) for name in FRAMEWORKS)
            is_used[label] = is_mark or is_op or label.startswith("nccl")
        if is_used[label]:
            call = _read_payload(payload, strings, offsets)
            stop = np.nan if end is None else end / _MICROSECOND
            yield _Range(start / _MICROSECOND, stop, thread, label, call)


def _read_payload(
    payload: Sequence[Any], strings: Mapping[int, str], offsets: Mapping[tuple[int, str], int]
) -> tuple[str, int]:
    """Return communicator and bytes of a call of NCCL, from a payload as JSON or as bytes."""
    text, text_id, data = payload
    text, values = text or strings.get(text_id), {}
    if text:
        with contextlib.suppress(ValueError):
            values = json.loads(text)
    elif isinstance(data, bytes) and len(data) > _PAYLOAD_OFFSET:
        (schema,) = struct.unpack_from("<I", data, _SCHEMA_OFFSET)
        for name in (_COMMUNICATOR, _SIZE):
            position = offsets.get((schema, name), len(data)) + _PAYLOAD_OFFSET
            if position + 8 <= len(data):
                (values[name],) = struct.unpack_from("<Q", data, position)
    size = values.get(_SIZE)
    return str(values.get(_COMMUNICATOR, "")), size if type(size) is int else NONE


def _read_work(database: "Connection") -> Iterator[Int[NumpyArray, "7 works"]]:
    """Yield start, end, device, stream, correlation, name and process of work, by table."""
    for table in (_KERNELS, _COPIES, _MEMSETS, _GRAPHS):
        kind = {_KERNELS: "shortName", _COPIES: "copyKind"}.get(table, "")
        names = ("start", "end", "deviceId", "streamId", "correlationId", kind, "globalPid")
        work = _integers(database, table, names)
        if table == _COPIES:
            work[5] = np.where(work[5] == _ON_DEVICE, NONE, _COPY)
        yield work


def _join_work(
    ranges: Sequence[_Range],
    calls: Int[NumpyArray, "5 calls"],
    work: Int[NumpyArray, "6 works"],
    strings: Mapping[int, str],
    keys: dict[Key, int],
) -> tuple[int, Work]:
    """Join work with its calls; return the device with most work, and its work."""
    start, end, devices, stream, correlation, name = work
    device = int(np.bincount(devices + 1, end - start).argmax()) - 1 if len(devices) else NONE
    call = find_calls(correlation, calls[3])
    launch = np.append(calls[0] / _MICROSECOND, -np.inf)[call]
    exchanges = [code for code, text in strings.items() if _EXCHANGE.match(text)]
    nccl: dict[int, list[_Range]] = {}
    for entry in ranges:
        if entry.label.startswith("nccl"):
            nccl.setdefault(entry.thread, []).append(entry)
    starts = {thread: [entry.start for entry in entries] for thread, entries in nccl.items()}
    key = np.full(len(start), NONE)
    for row in np.flatnonzero(np.isin(name, exchanges)).tolist():
        kernel = strings[int(name[row])]
        if match := _COLLECTIVE.search(kernel):
            thread = int(calls[2, call[row]]) if call[row] != NONE else NONE
            # a group of calls launches its kernel after the ranges of the calls
            position = bisect.bisect(starts.get(thread, ()), launch[row])
            communicator, size = nccl[thread][position - 1].call if position else ("", NONE)
            entry_key = communicator, match[0] if communicator else kernel, size
            key[row] = keys.setdefault(entry_key, len(keys))
    is_exchange = np.isin(name, [*exchanges, _COPY])
    rows = np.stack([launch, start / _MICROSECOND, end / _MICROSECOND, stream, is_exchange, key])
    return device, rows[:, devices == device]


def _rank_rows(
    process: _Process, cells: Mapping[str, Cell], path: Path, left_out: list[LeftOut]
) -> Iterator[Rows]:
    """Yield the slices of a process as those of a rank, if it has any."""
    if process.rank is None:
        why = "neither its labels nor the name of its file state its rank"
        left_out.append(LeftOut(f"process {process.number} of {path}", why))
        return
    ranges = [entry for entry in process.ranges if entry.label in cells]
    numbers = {label: number for number, label in enumerate(cells)}
    start, end = np.array([entry[:2] for entry in ranges]).reshape(-1, 2).T
    label = np.array([numbers[entry.label] for entry in ranges], np.int64)
    # of nested ranges of one phase, such as a function in a function, the inner one is the op
    phase = number_groups(np.array([cells[entry.label][0].phase for entry in ranges]))
    order = np.lexsort([-end, start, phase])
    is_outer = np.zeros(len(order), bool)
    is_inside = (start[order[1:]] < end[order[:-1]]) & (end[order[1:]] <= end[order[:-1]])
    is_outer[order[:-1]] = is_inside & (np.diff(phase[order]) == 0)
    passes, faults = passing_rows(
        [(np.isnan(end), "they have no end"), (is_outer, "others of their phase lie inside")],
        f"ranges of rank {process.rank}",
    )
    left_out += faults
    marks = [
        (int(match["number"] or NONE), entry.start, entry.end)
        for entry in process.ranges
        if (match := _STEP.fullmatch(entry.label)) and not np.isnan(entry.end)
    ]
    numbered = [mark for mark in marks if mark[0] != NONE]
    place = next(filter(None, (_PLACE.match(entry.label) for entry in process.ranges)), None)
    if passes.any():
        yield Rows(
            process.rank,
            0,
            label=label[passes],
            start=start[passes],
            end=end[passes],
            receives=np.zeros((2, 0)),
            work=process.work,
            syncs=process.syncs,
            marks=numbered or [(k, *mark[1:]) for k, mark in enumerate(marks)],
            place=place
            and (
                (*map(int, re.findall(r"=(\d+)/", place["axes"])),),
                int(place["worker"]),
                int(place["workers"]),
            ),
        )


READER = Reader(
    "Nsight Systems",
    "`nsys export --type sqlite`",
    f"NVTX ranges of {', '.join(FRAMEWORKS)}, kernels and CUDA calls of one or several ranks",
    lambda head: head.startswith("SQLite format 3"),
    read_nsight,
)
