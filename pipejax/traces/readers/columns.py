"""Reader of Parquet and CSV files with one slice per row."""

import csv
import dataclasses
import datetime
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MAX_COUNT, MAX_LISTED, resolve_name, wrong
from pipejax.base.data_files import decimal_points
from pipejax.traces.readers.chrome import read_events
from pipejax.traces.readers.finish import Places, finish_trace, place_ranks
from pipejax.traces.readers.labels import Cell, LabelOp, parse_labels
from pipejax.traces.readers.parts import (
    FILE_NAMES,
    Columns,
    empty_trace,
    number_groups,
    phase_name,
    phase_positions,
    rows_left_out,
)
from pipejax.traces.readers.readings import KINDS
from pipejax.traces.readers.sources import (
    SECONDS,
    UNIT,
    CutError,
    Reader,
    Request,
    find_delimiter,
    infer_unit,
    is_json,
    is_json_lines,
    is_json_rows,
    read_lines,
)
from pipejax.traces.record import MESSAGES, NONE, OPS, LeftOut, Trace

# role (meaning) of a column, and its names in files; `chunk` counts the stages of a worker
NAMES: Mapping[str, Sequence[str]] = FILE_NAMES["columns"]
_TIMES = ("start", "end", "duration")
_MAX_DIFFERENCE = 0.01  # between end - start and the duration, relative to the duration
_SUFFIXES = {suffix: unit for unit, suffixes in FILE_NAMES["units"].items() for suffix in suffixes}
# a gap before a backward is a wait for another stage if it is longer than this many median
# backwards, and than this many usual gaps
_WAIT_BACKWARDS, _WAIT_GAPS = 0.5, 3.0
_COARSE_SECONDS = 1.0  # distance of neighbouring 32-bit floats at which times of ops are lost
_BATCH_ROWS = 2**16  # rows of CSV that are read at once
_MAX_NAME = 80  # characters of a phase's name: arrays pad every name to the longest
_NO_PYARROW = "Parquet needs pyarrow: pip install 'pipejax[traces]'"
Roles = dict[str, tuple[str, str | None]]  # by role: name of the column, and unit of its times


def read_columns(paths: Sequence[Path], request: Request) -> Trace:
    """Read Parquet and CSV files, with the user's names for columns and phases."""
    column_names = request.column_names
    phase_names = {column_names[op]: op for op in OPS if op in column_names}
    for role in column_names:
        resolve_name(role, (*NAMES, UNIT, *OPS), "columns")
    notes: list[str] = []
    batches_by_file: list[list[Columns]] = []
    unstated_by_file: list[set[str]] = []
    for number, path in enumerate(paths):
        batches_by_file.append([])
        unstated_by_file.append(set())
        try:
            for batch in _read_batches(path, request, unstated_by_file[-1]):
                rows = {"file": np.full(len(batch["start"]), number)}
                batches_by_file[-1].append(batch | rows)
        except (ValueError, OSError) as error:
            request.left_out.append(LeftOut(str(path), str(error)))
    batches_by_file = _split_labels(batches_by_file, phase_names)
    for path, file_batches, unstated in zip(paths, batches_by_file, unstated_by_file, strict=True):
        notes += _set_unit(path, file_batches, unstated, phase_names)
        _set_end(path, file_batches, unstated, request)
    batches = [*itertools.chain.from_iterable(batches_by_file)]
    if not batches:
        return empty_trace(request.left_out)
    rows, phases = _join_batches(batches, phase_names)
    _check_one_run(rows, rows.pop("file"), paths)
    if "stage" in rows:
        rows.pop("chunk", None)
    _check_numbers(rows)
    return _with_workers(_finish(rows, phases, request, notes), request.sizes.world or None)


def _finish(rows: Columns, phases: Sequence[str], request: Request, notes: list[str]) -> Trace:
    """Complete the trace; without a column of replicas, workers with the same ops are replicas."""
    fields = ("phase", "stage", "microbatch")
    if "replica" in rows or not {"worker", *fields} <= rows.keys():
        return finish_trace(rows, phases, request, notes)
    is_op = np.all([rows[name] >= 0 for name in ("worker", *fields)], axis=0)
    op, worker = number_groups(*(rows[name][is_op] for name in fields)), rows["worker"][is_op]
    workers_with_ops = np.unique(np.stack([op, worker]), axis=1)
    if workers_with_ops.shape[1] == len(np.unique(op)):  # no op has two workers
        return finish_trace(rows, phases, request, notes)
    ranks, index = np.unique(rows["worker"], return_inverse=True)
    parts = [{name: rows[name][index == k] for name in fields} for k in range(len(ranks))]

    def build(places: Places, _: int) -> Trace:
        replica, worker = np.array(places).T[:, index]
        return finish_trace(rows | {"replica": replica, "worker": worker}, phases, request, notes)

    world, replicas = request.sizes.world or len(ranks), request.sizes.replicas
    return place_ranks(ranks.astype(int).tolist(), parts, world, replicas, build)


def _split_labels(
    batches_by_file: list[list[Columns]], phase_names: Mapping[str, str]
) -> list[list[Columns]]:
    """Replace labels such as "fwd mb=3 stage=1" by phases, and add columns of their numbers."""
    batches = [*itertools.chain.from_iterable(batches_by_file)]
    names = {name for batch in batches for name in np.unique(batch["phase"]).tolist()}
    cells = parse_labels(names - phase_names.keys())
    ops = [op for cell in cells.values() for op in cell if op.phase in OPS]
    has_numbers = ops and all(op.microbatch != NONE for op in ops)
    if not has_numbers or any("microbatch" in batch for batch in batches):
        return batches_by_file
    return [
        [part for batch in file for part in _label_ops(batch, cells)] for file in batches_by_file
    ]


def _label_ops(batch: Columns, cells: Mapping[str, Cell]) -> Iterator[Columns]:
    """Yield the rows of a batch with the first op of each label, then with the second of pairs."""
    labels, code = np.unique(batch["phase"], return_inverse=True)
    row_cells = [cells.get(label, (LabelOp(label),)) for label in labels.tolist()]
    for position in (0, -1):  # both ops of a fused pair have the times of its row
        has_op = np.array([position == 0 or len(cell) > 1 for cell in row_cells])[code]
        part = {role: values[has_op] for role, values in batch.items()}
        columns = zip(*(cell[position] for cell in row_cells), strict=True)
        for role, numbers in zip(LabelOp._fields, columns, strict=True):
            if role == "phase" or (role not in batch and max(numbers) >= 0):
                part[role] = np.array(numbers)[code[has_op]]
        if has_op.any():
            yield part


def _join_batches(
    batches: Sequence[Columns], phase_names: Mapping[str, str]
) -> tuple[Columns, tuple[str, ...]]:
    """Return the columns of all batches, with NaN where one lacks a column, and phase names."""
    names = sorted({str(name) for batch in batches for name in np.unique(batch["phase"])})
    position, phases = phase_positions(names, phase_names)
    roles = {role for batch in batches for role in batch} - {"phase"}
    rows: Columns = {}
    for role in roles:
        columns = [batch.get(role, np.full(len(batch["start"]), np.nan)) for batch in batches]
        rows[role] = np.concatenate(columns)
    rows["phase"] = np.concatenate([_encode(batch["phase"], position) for batch in batches])
    return rows, phases


def _with_workers(trace: Trace, world: int | None) -> Trace:
    """Return a trace with its number of workers: `world` if stated, else the number in rows."""
    if world is None:
        _check_last_stage(vars(trace), trace.phases)
        note = f"no file states workers: {trace.workers}, from the largest number in the rows"
        return dataclasses.replace(trace, inferred=(*trace.inferred, note))
    replicas = int(trace.replica.max(initial=0)) + 1
    workers, rest = divmod(world, replicas)
    if rest or workers < trace.workers:
        sizes = f"a multiple of the {replicas} replicas, with at least {trace.workers} workers"
        raise wrong("world", f"must be {sizes} as in the files, got {world}", world)
    return dataclasses.replace(trace, known_workers=workers)


def _check_one_run(rows: Columns, file: NumpyArray, paths: Sequence[Path]) -> None:
    """Refuse files that give one op different times; `file` has the file number of each row."""
    if len(paths) == 1:
        return
    times = ("start", "duration", "end")
    identity = [role for role in NAMES if role in rows and role not in times]
    group = number_groups(*(rows[role] for role in identity))
    # first_row[i]: the first row with the same op as row i; of ops [a b a], it is [0 1 0]
    _, first_rows, inverse = np.unique(group, return_index=True, return_inverse=True)
    first_row = first_rows[inverse]
    differs = (file != file[first_row]) & (rows["start"] != rows["start"][first_row])
    has_microbatch = rows.get("microbatch", np.zeros(len(file))) >= 0
    contradictions = np.flatnonzero(differs & has_microbatch)
    if len(contradictions):
        row = contradictions[0]
        earlier, later = paths[int(file[first_row[row]])], paths[int(file[row])]
        where = [f"{k} {rows[k][row]:.0f}" for k in ("step", "replica", "worker") if k in rows]
        message = f"{earlier} and {later} both have ops of {', '.join(where)}"
        raise wrong("files", f"must be of one run: {message}")


def _encode(names: NumpyArray, position: Mapping[str, int]) -> NumpyArray:
    """Return the position of each row's name."""
    distinct, code = np.unique(names, return_inverse=True)
    return np.array([position[str(name)] for name in distinct], np.int64)[code]


def _read_batches(path: Path, request: Request, unstated: set[str]) -> Iterator[Columns]:
    """Yield batches of a file's rows, with invalid cells as NaN and times in seconds."""
    # Roles (start, end, duration) whose unit no column name states are added to `unstated`; their
    # times stay in the unit of the file.
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    read_file = _read_parquet if is_parquet else _read_csv
    for roles, cells, rows in read_file(path, request):
        times = {name: cells[name].tolist() for role, (name, _) in roles.items() if role in _TIMES}
        texts = {cell for column in times.values() for cell in column if isinstance(cell, str)}
        if points := decimal_points(texts):
            cells |= {n: np.array([points.get(c, c) for c in times[n]], object) for n in times}
        batch = {"phase": _texts(cells[roles["phase"][0]]), "row": rows}
        for role, (name, unit) in roles.items():
            if role != "phase":
                batch[role], has_dates = _times_or_numbers(cells[name])
                if role in _TIMES and unit and not has_dates:
                    batch[role] *= SECONDS[unit]
                elif role in _TIMES and not has_dates:
                    unstated.add(role)
        yield batch


def _set_unit(
    path: Path, batches: Sequence[Columns], unstated: set[str], phase_names: Mapping[str, str]
) -> Iterator[str]:
    """Convert times without a stated unit to seconds, in place; yield a note on the unit."""
    # `unstated` names these times: start, end or duration. If rows have an end, `_set_end` finds
    # the unit of their duration.
    roles = {role for batch in batches for role in batch if role in _TIMES}
    roles -= {"duration"} if "end" in roles else set()
    stated, unstated = roles - unstated, roles & unstated
    starts, durations = [np.zeros(0)], [np.zeros(0)]
    for batch in batches:
        names, code = np.unique(batch["phase"], return_inverse=True)
        ops = [(phase_names.get(name) or phase_name(name)) in OPS for name in names.tolist()]
        length = batch["end"] - batch["start"] if "end" in roles else batch["duration"]
        is_valid = np.array(ops, bool)[code] & (length > 0) & np.isfinite(batch["start"])
        starts.append(batch["start"][is_valid])
        durations.append(length[is_valid])
    seconds, start = np.concatenate(durations), np.concatenate(starts)
    if unstated and len(seconds):
        if "start" in unstated and stated:
            why = f"{path} states the unit of {', '.join(sorted(stated))}, but not of start"
            raise wrong("files", f"must state the unit of times: {why}; rename its columns")
        unit = infer_unit(seconds, start if "start" in unstated else np.zeros(1))
        for batch, role in itertools.product(batches, unstated):
            batch[role] *= SECONDS[unit]
        median = float(np.median(seconds)) * SECONDS[unit]
        yield f"unit of times in {path.name}: {unit}, in which the median op takes {median:.3g} s"


def _set_end(path: Path, batches: Sequence[Columns], unstated: set[str], request: Request) -> None:
    """Set ends from durations, in the unit that agrees best; drop rows whose two ends differ."""
    contradictions: list[int] = []
    for batch in batches:
        duration = batch.pop("duration", None)
        if duration is None or "end" not in batch:
            batch.setdefault("end", batch["start"] + (0.0 if duration is None else duration))
            continue
        with np.errstate(all="ignore"):  # damaged times may be infinite
            length = batch["end"] - batch["start"]
            if "duration" in unstated:
                ratios = (length / duration)[(length > 0) & (duration > 0)]
                factor = np.median(ratios) if len(ratios) else 1.0
                duration *= min(SECONDS.values(), key=lambda unit: abs(np.log(factor / unit)))
            rounding = sum(map(_rounding, (batch["start"], batch["end"], duration)))
            differs = np.abs(length - duration) > rounding + _MAX_DIFFERENCE * duration
        contradictions += batch["row"][differs].tolist()
        batch.update({role: values[~differs] for role, values in batch.items()})
    why = "end and duration differ (remove the wrong one)"
    request.left_out.extend(rows_left_out(path, why, contradictions))


def _rounding(seconds: NumpyArray) -> float:
    """Return the largest rounding error of times [s], from their number of decimal places."""
    times = seconds[np.isfinite(seconds)]
    for unit in 10.0 ** -np.arange(9):  # 1 s to 10 ns
        if np.allclose(times / unit, np.rint(times / unit), rtol=1e-15, atol=1e-6):
            return float(unit) / 2
    return 0.0


def _read_parquet(path: Path, request: Request) -> Iterator[tuple[Roles, Columns, NumpyArray]]:
    """Yield (roles of columns, {column name: cells}, row numbers) of each row group."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_NO_PYARROW, name=error.name) from None
    try:
        file = parquet.ParquetFile(path)
        groups, header = file.num_row_groups, file.schema_arrow.names
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        request.left_out.append(LeftOut(str(path), f"it is no sound Parquet: {_first_line(error)}"))
        return
    roles = find_roles(path, header, request)
    names, count = [name for name, _ in roles.values()], 0
    for group in range(groups):
        first, count = count, count + file.metadata.row_group(group).num_rows
        try:
            table = file.read_row_group(group, columns=names)
            cells = {name: table[name].to_numpy() for name in names}
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            why = f"its row group {group} is damaged: {_first_line(error)}"
            request.left_out.append(LeftOut(str(path), why))
            continue
        yield roles, cells, np.arange(first, count) + 1
    request.on_bytes(path.stat().st_size)


def _read_csv(path: Path, request: Request) -> Iterator[tuple[Roles, Columns, NumpyArray]]:
    """Yield (roles of columns, {column name: cells}, line numbers) of each batch of rows."""
    text = read_lines(path, request.on_bytes)
    header_line = next(text, "")
    if is_json(header_line):
        yield from _read_json(path, itertools.chain([header_line], text), request)
        return
    delimiter = find_delimiter(header_line) or ","
    header = [cell.strip() for cell in next(csv.reader([header_line], delimiter=delimiter))]
    roles, invalid = find_roles(path, header, request), []
    position = {name: header.index(name) for name, _ in roles.values()}
    rows: list[list[str]] = []
    lines: list[int] = []
    reader = csv.reader(_undamaged_lines(text, path, request), delimiter=delimiter)
    while True:
        try:
            row = next(reader, None)
        except csv.Error:
            invalid.append(reader.line_num + 1)  # the header is line 1
            continue
        if rows and (row is None or len(rows) == _BATCH_ROWS):
            cells = {n: np.array([line[k] for line in rows], object) for n, k in position.items()}
            yield roles, cells, np.array(lines)
            rows, lines = [], []
        if row is None:
            break
        if len(row) == len(header):
            rows.append(row)
            lines.append(reader.line_num + 1)
        elif row:
            invalid.append(reader.line_num + 1)
    why = f"their number of cells is not the header's, {len(header)}"
    request.left_out.extend(rows_left_out(path, why, invalid))


def _read_json(
    path: Path, text: Iterator[str], request: Request
) -> Iterator[tuple[Roles, Columns, NumpyArray]]:
    """Yield (roles of keys, {key: values}, row numbers) of a list, or an object a line, of JSON."""
    objects: list[dict[str, Any]] = []
    lines, invalid = [], []
    for number, value in enumerate(_json_values(path, text, request), 1):
        if isinstance(value, dict):
            objects.append(value)
            lines.append(number)
        elif value != "":
            invalid.append(number)
    request.left_out.extend(rows_left_out(path, "they are no JSON objects", invalid))
    header = [*dict.fromkeys(key for entry in objects for key in entry)]
    roles = find_roles(path, header, request)
    names = {name for name, _ in roles.values()}
    cells = {n: np.array([entry.get(n) for entry in objects], object) for n in names}
    yield roles, cells, np.array(lines)


def _json_values(path: Path, text: Iterator[str], request: Request) -> Iterator[Any]:
    """Yield the objects of a JSON list, or the value of each line: None if it is damaged."""
    lines, faults = _undamaged_lines(text, path, request), Counter[str]()
    first = next(lines, "")
    lines = itertools.chain([first], lines)
    if first.lstrip()[:1] == "[":
        yield from read_events(lines, {}, faults)
        request.left_out.extend(LeftOut(f"parts of {path}", *fault) for fault in faults.items())
    for line in lines:  # none after a list
        try:
            yield json.loads(line) if line.strip() else ""
        except (ValueError, RecursionError):
            yield None


def _undamaged_lines(text: Iterator[str], path: Path, request: Request) -> Iterator[str]:
    """Yield the lines before the first damage in a file; note the rest as left out."""
    try:
        yield from (line.replace("\0", "\ufffd") for line in text)
    except CutError as error:
        request.left_out.append(LeftOut(f"the end of {path}", str(error)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def find_roles(path: Path, header: Sequence[str], request: Request) -> Roles:
    """Return {role: (name of the column, time unit)}, by the user's names or by known aliases."""
    columns = {_split_unit(name)[0]: name for name in reversed(header)}  # by lower-case name
    roles: Roles = {}
    names, is_public = dict(request.column_names), {"gmc", "stage"} <= columns.keys()
    if is_public and not {"worker", "stage"} & names.keys():
        names["worker"] = columns["stage"]  # the public jobs call the worker a stage
    for role, aliases in NAMES.items():
        name = names.get(role) or next((columns[k] for k in aliases if k in columns), None)
        if name is None:
            continue
        if name not in header:
            raise wrong(
                f"columns: {role}", f"must be one of {', '.join(header)} in {path}, got {name!r}"
            )
        # the recorder of the public jobs counts seconds
        roles[role] = name, request.unit or _split_unit(name)[1] or ("s" if is_public else None)
    if "replica" in roles and roles.get("worker", ("",))[0].casefold() == "rank":
        roles.pop("worker")  # it counts the ranks of all replicas
    missing = [role for role in ("phase", "start") if role not in roles]
    if not {"end", "duration"} & roles.keys():
        missing.append("end or duration")
    if not {"worker", "stage"} & roles.keys():
        missing.append("worker or stage")
    if missing:
        named = [name for name in header if name]
        listed = ", ".join([*named[:MAX_LISTED], "..."] if len(named) > MAX_LISTED else named)
        why = f"must say which column of {path} is {', '.join(missing)}: it has {listed}"
        raise wrong("columns", why)
    return roles


def _split_unit(name: str) -> tuple[str, str | None]:
    """Split a column name such as start_ms or Start (ms) into base and unit; unit may be None."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).casefold()
    words = re.sub(r"[\W_]+", "_", words).strip("_")
    base, _, suffix = words.rpartition("_")
    return (base, _SUFFIXES[suffix]) if base and suffix in _SUFFIXES else (words, None)


def _texts(cells: NumpyArray) -> NumpyArray:
    return np.array(["" if cell is None else str(cell)[:_MAX_NAME] for cell in cells.tolist()])


def _times_or_numbers(cells: NumpyArray) -> tuple[Float[NumpyArray, " rows"], bool]:
    """Return cells as numbers, and whether they are times or dates (converted to seconds)."""
    kind = cells.dtype.kind
    if kind in "mM":
        times = cells.astype(f"{kind}8[ns]")
        return np.where(np.isnat(times), np.nan, times.astype(np.int64) / 1e9), True
    try:
        with np.errstate(invalid="ignore"):  # a value out of range becomes NaN
            return cells.astype(np.float64), False
    except (ValueError, TypeError):
        numbers = np.array([_convert_or_nan(cell, float) for cell in cells.tolist()], np.float64)
    if np.isfinite(numbers).any():
        return numbers, False
    dates = [_convert_or_nan(cell, _date_seconds) for cell in cells.tolist()]
    return np.array(dates, np.float64), True


def _date_seconds(text: str) -> float:
    """Return a date as seconds since 1970, without a time zone as UTC: no clock change cuts it."""
    date = datetime.datetime.fromisoformat(text)
    return date.replace(tzinfo=date.tzinfo or datetime.UTC).timestamp()


def _convert_or_nan(cell: object, convert: Callable[[Any], float]) -> float:
    try:
        return convert(cell)
    except (ValueError, TypeError):
        return np.nan


def _check_last_stage(columns: Columns, phases: Sequence[str]) -> None:
    """Refuse a trace whose last stage waits before its first backward, as a stage is missing."""
    # Only the true last stage runs backwards right after forwards. A gap is idle time before an op.
    phase_kinds = np.array([NONE if name in MESSAGES else KINDS.get(name, 0) for name in phases])
    rows = np.lexsort([columns[name] for name in ("start", "worker", "step", "replica")])
    rows = rows[phase_kinds[columns["phase"][rows]] != NONE]
    kind = phase_kinds[columns["phase"][rows]]
    start, end, stage, worker = (columns[key][rows] for key in ("start", "end", "stage", "worker"))
    pipeline = number_groups(columns["replica"][rows], columns["step"][rows])
    gap = np.append(0.0, start[1:] - end[:-1])
    gap[1:][(worker[1:] != worker[:-1]) | (pipeline[1:] != pipeline[:-1])] = 0.0
    is_backward = np.isin(kind, (KINDS["B"], KINDS["I"]))
    backwards = np.flatnonzero(is_backward & (stage == stage.max(initial=0)))
    if not len(backwards):
        return
    _, first = np.unique(pipeline[backwards], return_index=True)
    first_backwards = backwards[first]  # of each pipeline
    usual_time = np.median((end - start)[first_backwards])
    usual_gap = np.median(gap[np.isin(worker, worker[first_backwards])])
    usual_wait = max(_WAIT_BACKWARDS * usual_time, _WAIT_GAPS * usual_gap)
    if np.median(gap[first_backwards]) > usual_wait:
        why = f"backwards of the last stage, {stage.max()}, wait for no op of these files"
        ranks = (int(columns["worker"].max()) + 1) * (int(columns["replica"].max()) + 1)
        raise wrong("files", f"must be of all workers: {why}; --world {ranks} accepts the files")


def _check_numbers(rows: Columns) -> None:
    """Refuse worker numbers that do not count from 0, and times stored in 32 bits."""
    workers = rows.get("worker", np.zeros(0))
    absurd = np.flatnonzero((workers >= len(rows["start"])) & (workers < MAX_COUNT))
    if len(absurd):
        where = f"row {absurd[0] + 1} has worker {workers[absurd[0]]:.0f}"
        raise wrong("files", f"must have no more workers than rows ({len(workers)}): {where}")
    numbers = np.unique(workers[np.isfinite(workers)]).astype(int).tolist()
    steps = {*np.diff(numbers).tolist()}
    # 1 2 3 4, or global ranks 0 8 16 24
    if len(steps) == 1 and (numbers[0] == 1 or steps != {1}):
        listed = ", ".join([*map(str, numbers[:MAX_LISTED]), *[".."] * (len(numbers) > MAX_LISTED)])
        raise wrong("files", f"must hold all workers, numbered 0, 1, 2 and so on, got {listed}")
    times = np.concatenate([rows["start"], rows["end"]])
    times = times[np.isfinite(times)]
    largest = np.float32(np.abs(times).max(initial=0.0))
    spacing = float(np.spacing(largest))
    if len(times) and spacing > _COARSE_SECONDS and (times == times.astype(np.float32)).all():
        raise wrong(
            "files",
            f"must have times in 64 bits: in 32 bits those of {largest:.4g} s are "
            f"{spacing:g} s apart",
        )


READER = Reader(
    form="Parquet, CSV, JSON rows",
    writers="production jobs, your own recorder",
    content="a slice of time in each row",
    can_read=lambda head: (
        head.startswith("PAR1")
        or is_json_lines(head)
        or is_json_rows(head)
        or (not is_json(head) and find_delimiter(head.split("\n", 1)[0]) is not None)
    ),
    read=read_columns,
)
