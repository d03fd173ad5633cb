"""Reader of SQLite exports of Nsight Systems: NVTX ranges, device work and CUDA calls.

Tables and columns are those of the published schema (3.16, of Nsight Systems 2024.6). Older exports
have no textId or globalPid, and empty texts where newer ones have NULL.
"""

import bisect
import contextlib
import dataclasses
import itertools
import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipejax.base.checks import wrong
from pipejax.traces.readers.device import EXCHANGE, Key, number_collective
from pipejax.traces.readers.labels import (
    FRAMEWORKS,
    STEP,
    Cell,
    is_label,
    label_launcher,
    number_marks,
    parse_labels,
)
from pipejax.traces.readers.rank_lists import file_rank
from pipejax.traces.readers.rank_slices import RankFile, Rows, drop_outer_ranges, join_ranks
from pipejax.traces.readers.sources import Reader, Request, name_order
from pipejax.traces.record import NONE, LeftOut, Trace

if TYPE_CHECKING:
    from sqlite3 import Connection

_RANGES, _CALLS = "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
# tables of device work, and SQL for a name that shows exchanges: of a kernel its name, of a copy
# 'copy' if it leaves the device; a graph is one row if nsys did not trace its nodes
_WORK = {
    _KERNELS: "(SELECT value FROM StringIds WHERE id = work.shortName)",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "CASE work.copyKind WHEN 8 THEN '' ELSE 'copy' END",
    "CUPTI_ACTIVITY_KIND_MEMSET": "''",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "''",
}
# calls that wait for the device
_WAITS = "value LIKE '%Synchronize%' OR value LIKE 'cu%Memcpy%' AND value NOT LIKE '%Async%'"
_RANK = re.compile(r"rank[ =](\d{1,9})\b")
_COMMUNICATOR, _SIZE = "NCCL communicator ID", "Message size [bytes]"
_SCHEMA_OFFSET, _PAYLOAD_OFFSET = 8, 32  # positions in a record [bytes]
_MICROSECOND = 1e3  # [ns]


class _Range(NamedTuple):
    """NVTX range of a thread [us]; the end is NaN if the trace ended before the range."""

    start: float
    end: float
    thread: int
    label: str
    call: tuple[str, int]  # communicator and bytes of a call of NCCL


class _Process:
    """Ranges, device work and waiting calls of a process."""

    def __init__(self) -> None:
        self.ranges: list[_Range] = []
        self.work: list[tuple[float, ...]] = []
        self.waits: list[tuple[float, float]] = []
        self.threads: set[int] = set()  # threads that launch work or label ops
        self.devices: set[int] = set()
        self.rank: int | None = None


def read_nsight(paths: Sequence[Path], request: Request) -> Trace:
    """Read the SQLite exports of a run; a file has one or several processes, each with a rank."""
    import sqlite3  # most runs have no such file

    keys: dict[Key, int] = {}
    exports: list[tuple[Path, list[_Process], int | None]] = []
    for path in sorted(paths, key=name_order):
        uri = f"{path.resolve().as_uri()}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
                exports.append((path, *_read_file(path, database, keys)))
        except (sqlite3.Error, TypeError, OverflowError) as error:
            request.left_out.append(LeftOut(str(path), f"it is no sound export: {error}"))
        request.on_bytes(path.stat().st_size)
    all_processes = [process for _, processes, _ in exports for process in processes]
    cells = parse_labels(entry.label for process in all_processes for entry in process.ranges)
    notes = []
    if all_processes and all(process.rank is None for process in all_processes):
        notes.append("no file states ranks: they follow file names, then devices and processes")
        for rank, process in enumerate(all_processes):
            process.rank = rank
    files = []
    for path, processes, zero in exports:
        ranks = [rows for process in processes for rows in _rank_rows(process, cells, request)]
        if len(ranks) < max(len(processes), 1):
            why = f"it has no op of {', '.join(FRAMEWORKS)}, or nothing states its rank"
            count = max(len(processes), 1) - len(ranks)
            request.left_out.append(LeftOut(f"process of {path}", why, count))
        files.append(RankFile(path, ranks, zero))
    trace = join_ranks(files, [*cells.values()], request, [*keys], notes)
    return dataclasses.replace(trace, launcher=label_launcher(cells))


def _read_file(
    path: Path, database: "Connection", keys: dict[Key, int]
) -> tuple[list[_Process], int | None]:
    """Return the processes that label ops, sorted by device, and the session's start [ns]."""
    names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    tables = {name for (name,) in names if any(_select(database, name, ["1"]))}
    missing_tables = [table for table in (_RANGES, _CALLS, _KERNELS) if table not in tables]
    if len(missing_tables) == 3:
        raise TypeError(f"it has no rows in tables of Nsight Systems such as {_RANGES}")
    if missing_tables:
        why = f"must have NVTX ranges, kernels and CUDA calls: {path} lacks "
        hint = "; write nsys profile --trace=cuda,nvtx, which records them"
        raise wrong("files", why + ", ".join(missing_tables) + hint)
    by_number: dict[int, _Process] = defaultdict(_Process)
    for entry in sorted(_read_ranges(database)):
        process = by_number[entry.thread >> 24]  # the lower 24 bits are the thread
        process.ranges.append(entry)
        process.threads.add(entry.thread)
    for table in filter(tables.__contains__, _WORK):
        _read_work(table, database, by_number, keys)
    for start, end, thread in database.execute(
        f"SELECT start, end, globalTid FROM {_CALLS} JOIN StringIds ON id = nameId WHERE {_WAITS}"
    ):
        # other threads, such as a watchdog, may wait at any time and are ignored
        if thread in by_number[thread >> 24].threads:
            by_number[thread >> 24].waits.append((start / _MICROSECOND, end / _MICROSECOND))
    processes = [
        process
        for _, process in sorted(by_number.items())
        if any(is_label(entry.label) for entry in process.ranges)
    ]
    for process in processes:
        labels = filter(None, (_RANK.match(entry.label) for entry in process.ranges))
        ranks = sorted({int(match[1]) for match in labels})
        if len(ranks) > 1:
            why = f"labels of one process of {path} state ranks {ranks[0]} and {ranks[1]}"
            raise wrong("files", f"must have a process for each rank: {why}")
        process.rank = min(ranks, default=file_rank(path) if len(processes) == 1 else None)
    session = _select(database, "TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])
    processes.sort(key=lambda process: min(process.devices, default=NONE))
    return processes, next((zero for (zero,) in session if type(zero) is int), None)


def _select(database: "Connection", table: str, names: Sequence[str]) -> Iterator[Any]:
    """Return the rows of a table; a missing column is NULL, and a missing table has no rows."""
    present = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
    columns = [f'"{name}"' if name in present else "NULL" for name in names]
    return database.execute(f"SELECT {', '.join(columns)} FROM {table}") if present else iter(())


def _read_ranges(database: "Connection") -> Iterator[_Range]:
    """Yield NVTX ranges whose label names an op, a step, a rank or a call of NCCL."""
    strings: dict[int, str] = dict(_select(database, "StringIds", ["id", "value"]))
    schemas = _select(database, "NVTX_PAYLOAD_SCHEMA_ENTRIES", ["schemaId", "name", "offset"])
    offsets = {(schema, name): offset or 0 for schema, name, offset in schemas}
    is_used: dict[str, bool] = {}
    names = ("eventType", "start", "end", "globalTid", "text", "textId")
    payloads = ("jsonText", "jsonTextId", "binaryData")
    rows = _select(database, _RANGES, (*names, *payloads))
    for kind, start, end, thread, text, text_id, *payload in rows:
        if kind not in (59, 60):  # ranges by push and pop, or by start and end
            continue
        # PyTorch's emit_nvtx adds numbers of the call, as in "PP:0F1, op_id = 7"
        label = (text or strings.get(text_id, "")).partition(", ")[0]
        if label not in is_used:
            is_mark = bool(STEP.fullmatch(label) or _RANK.match(label))
            is_used[label] = is_mark or is_label(label) or label.startswith("nccl")
        if is_used[label]:
            stop = np.nan if end is None else end / _MICROSECOND
            call = _read_payload(payload, strings, offsets)
            yield _Range(start / _MICROSECOND, stop, thread, label, call)


def _read_payload(
    payload: Sequence[Any], strings: Mapping[int, str], offsets: Mapping[tuple[int, str], int]
) -> tuple[str, int]:
    """Return (communicator, bytes) of an NCCL call, from a payload in JSON or binary form."""
    text, text_id, data = payload
    text, values = text or strings.get(text_id), {}
    if text:
        with contextlib.suppress(ValueError):
            values = json.loads(text)
    elif isinstance(data, bytes) and len(data) > _PAYLOAD_OFFSET:
        (schema,) = struct.unpack_from("<I", data, _SCHEMA_OFFSET)
        for name in (_COMMUNICATOR, _SIZE):
            position = offsets.get((schema, name), len(data)) + _PAYLOAD_OFFSET  # or past the end
            if position + 8 <= len(data):
                (values[name],) = struct.unpack_from("<Q", data, position)
    size = values.get(_SIZE)
    return str(values.get(_COMMUNICATOR, "")), size if type(size) is int else NONE


def _read_work(
    table: str, database: "Connection", by_number: dict[int, _Process], keys: dict[Key, int]
) -> None:
    """Add the device work in a table to its processes, with the call that launched it."""
    # `keys` numbers the collectives of all files; new ones are added.
    # older exports have no globalPid: a kernel belongs to the process of its call
    has_process = bool(
        database.execute(
            f"SELECT 1 FROM pragma_table_info('{table}') WHERE name = 'globalPid'"
        ).fetchone()
    )
    owner = "work.globalPid" if has_process else "call.globalTid"
    if not has_process and len(by_number) > 1:
        raise wrong("files", f"must state the process of each kernel: {table} has no globalPid")
    nccl: dict[int, list[_Range]] = defaultdict(list)
    for entry in itertools.chain.from_iterable(p.ranges for p in by_number.values()):
        if entry.label.startswith("nccl"):
            nccl[entry.thread].append(entry)
    for number, device, launch, start, end, stream, name, thread in database.execute(
        f"SELECT {owner} >> 24, work.deviceId, call.start, work.start, work.end, work.streamId, "
        f"{_WORK[table]}, call.globalTid FROM {table} work LEFT JOIN {_CALLS} call "
        f"ON call.correlationId = work.correlationId AND call.globalTid >> 24 = {owner} >> 24"
    ):
        process = by_number[number]
        process.threads.add(thread)
        process.devices.add(device)
        launch = -np.inf if launch is None else launch / _MICROSECOND
        name, call = name or "", ("", NONE)
        is_exchange = bool(EXCHANGE.search(name))
        if is_exchange and (position := bisect.bisect(nccl[thread], (launch,))):
            # a group of NCCL calls launches its kernel after the ranges of the calls
            call = nccl[thread][position - 1].call
        key = number_collective(name, *call, keys, is_exchange=is_exchange)
        times = start / _MICROSECOND, end / _MICROSECOND
        stream += device << 32  # each device numbers its streams
        process.work.append((launch, *times, stream, is_exchange, key))


def _rank_rows(process: _Process, cells: Mapping[str, Cell], request: Request) -> Iterator[Rows]:
    """Yield the rows of a rank; note ranges without an end in `request.left_out`."""
    numbers = {label: number for number, label in enumerate(cells)}
    ranges = [entry for entry in process.ranges if not np.isnan(entry.end)]
    slices = [(start, end, numbers[label]) for start, end, _, label, _ in ranges if label in cells]
    if count := sum(entry.label in cells for entry in process.ranges) - len(slices):
        what = f"ranges of rank {process.rank}"
        request.left_out.append(LeftOut(what, "they have no end", count))
    # PithTrain states the place of a rank, as in "rank=3; pp=1/2 dp=0/1; mbs=1"
    setup = next((entry.label for entry in process.ranges if "; pp=" in entry.label), "")
    axes = {name: (int(k), int(n)) for name, k, n in re.findall(r"(\w+)=(\d+)/(\d+)", setup)}
    worker, workers = axes.pop("pp", (NONE, 0))
    position = tuple(index for index, _ in axes.values())
    if slices and process.rank is not None:
        rows = Rows.from_slices(process.rank, slices)
        yield drop_outer_ranges(rows, [*cells.values()], request)._replace(
            work=np.array(process.work, np.float64).reshape(-1, 6).T,  # fields of `Work`, if empty
            syncs=np.array(process.waits).reshape(-1, 2).T,  # start and end
            has_all_work=True,
            marks=number_marks((label, start, end) for start, end, _, label, _ in ranges),
            place=(position, worker, workers) if workers else None,
        )


READER = Reader(
    "Nsight Systems",
    "`nsys export --type sqlite`",
    f"NVTX ranges of {', '.join(FRAMEWORKS)}; kernels and CUDA calls of one or several ranks",
    can_read=lambda head: head.startswith("SQLite format 3"),
    read=read_nsight,
)
