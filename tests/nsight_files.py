"""Writer of SQLite exports of Nsight Systems, by the published schema 3.16 (nsys 2024.6)."""

import json
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

TABLES = json.loads((Path(__file__).parent / "data" / "nsight_tables.json").read_text())
COLLECTIVE_SCHEMA = 100
COPY_TO_DEVICE = 1


class Range(NamedTuple):
    """An NVTX range [ms]."""

    start: float
    end: float | None
    label: str
    thread: int = 1
    payload: object = None  # of a call of NCCL: communicator, bytes


class Kernel(NamedTuple):
    """A kernel, or a copy of a kind, with the host call that launched it [ms]."""

    launch: float | None
    start: float
    end: float
    name: str | int = "gemm"
    stream: int = 7
    thread: int = 1


class Process(NamedTuple):
    """Content of a process; calls are start, end, name and thread of other host calls."""

    ranges: list
    kernels: list
    calls: tuple = ()
    pid: int = 100
    device: int = 0


def write_export(path, processes, *, utc=0, lacks=(), old=False, binary=False, types=(59,)):
    """Write processes; `lacks` are tables or columns, `old` puts labels into text, not textId."""
    rows = {name: [] for name in TABLES}
    strings = {}

    def text_id(text):
        return strings.setdefault(text, len(strings) + 1)

    def ns(time):
        return None if time is None else round(time * 1e6)

    for process in processes:
        above = process.pid << 24
        rows["PROCESSES"].append({"globalPid": above, "pid": process.pid, "name": "python"})
        for k, entry in enumerate(process.ranges):
            tid = above | entry.thread
            row = {"start": ns(entry.start), "end": ns(entry.end), "globalTid": tid, "rangeId": k}
            row |= {"eventType": types[k % len(types)]}
            row |= {"text": entry.label} if old else {"textId": text_id(entry.label)}
            if entry.payload is not None:
                communicator, size = entry.payload
                content = {"NCCL communicator ID": communicator, "Message size [bytes]": size}
                header = struct.pack("<IIIIQQ", 1, 0, COLLECTIVE_SCHEMA, 0, 16, 48)
                data = header + struct.pack("<QQ", communicator, size)
                row |= {"binaryData": data} if binary else {"jsonText": json.dumps(content)}
            rows["NVTX_EVENTS"].append(row)
        for k, kernel in enumerate(process.kernels, 1):
            row = {"start": ns(kernel.start), "end": ns(kernel.end), "deviceId": process.device}
            row |= {"contextId": 1, "streamId": kernel.stream, "correlationId": k}
            row |= {"globalPid": above}
            if isinstance(kernel.name, int):
                copies = rows["CUPTI_ACTIVITY_KIND_MEMCPY"]
                copies.append(row | {"bytes": 8, "copyKind": kernel.name})
            else:
                code = text_id(kernel.name)
                row |= {"demangledName": code, "shortName": code}
                rows["CUPTI_ACTIVITY_KIND_KERNEL"].append(row)
            if kernel.launch is not None:
                call = kernel.launch, kernel.launch + 0.004, "cudaLaunchKernel_v7000", kernel.thread
                _add_call(rows, above, call, k, text_id, ns)
        for call in process.calls:
            _add_call(rows, above, call, None, text_id, ns)
    if binary:
        for name, offset in (("NCCL communicator ID", None), ("Message size [bytes]", 8)):
            entry = {"domainId": 1, "schemaId": COLLECTIVE_SCHEMA, "name": name, "offset": offset}
            rows["NVTX_PAYLOAD_SCHEMA_ENTRIES"].append(entry)
    if utc is not None:
        rows["TARGET_INFO_SESSION_START_TIME"].append({"utcEpochNs": utc})
    rows["StringIds"] = [{"id": number, "value": text} for text, number in strings.items()]
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        for name, columns in TABLES.items():
            if name in lacks:
                continue
            columns_there = [c for c in columns.split(", ") if c.split()[0] not in lacks]
            database.execute(f"CREATE TABLE {name} ({', '.join(columns_there)})")
            for row in rows[name]:
                row = {key: value for key, value in row.items() if key not in lacks}
                marks = ", ".join("?" * len(row))
                names = ", ".join(row)
                database.execute(f"INSERT INTO {name} ({names}) VALUES ({marks})", [*row.values()])
        database.commit()
    return path


def _add_call(rows, above, call, correlation, text_id, ns):
    start, end, name, thread = call
    row = {"start": ns(start), "end": ns(end), "eventClass": 0, "globalTid": above | thread}
    row |= {"correlationId": correlation, "nameId": text_id(name), "returnValue": 0}
    rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append(row)


def run_processes(run, label, *, steps=2, gap=5.0, lead=2.0, marks=None):
    """Return a process for each worker of an evaluated run [s], repeated step by step.

    `label` takes worker, the ops of a cell, and the step. The host launches each op `lead` ms
    before it starts; backwards are launched by a thread of their own.
    """
    table, period = run.table, run.makespan * 1e3 + gap
    times = {}
    for worker, row in enumerate(table.rows()):
        starts, ends = run.start[worker], run.finish[worker]
        seconds = zip(row, (starts * 1e3).tolist(), (ends * 1e3).tolist(), strict=True)
        times[worker] = [(cell, start, end) for cell, start, end in seconds if cell]
    processes = []
    for worker, cells in times.items():
        ranges, kernels = [], []
        for step in range(steps):
            base = 10.0 + step * period
            for cell, start, end in cells:
                launch = base + start - lead
                thread = 1 + any(op.phase.name in "BI" for op in cell)
                ranges.append(Range(launch, launch + 0.02, label(worker, cell, step)))
                middle = base + (start + end) / 2
                kernels.append(Kernel(launch + 0.005, base + start, middle, thread=thread))
                kernels.append(Kernel(launch + 0.010, middle, base + end, thread=thread))
            if marks:
                last = base + cells[-1][1] - lead
                ranges.append(Range(base + cells[0][1] - lead - 0.1, last + 0.5, marks(step)))
        processes.append(Process(ranges, kernels, pid=100 + worker, device=worker))
    return processes
