"""Reader of Parquet and CSV files with one slice per row."""

import csv
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MAX_COUNT, MAX_LISTED, resolve_choice, resolve_name, wrong
from pipejax.traces.readers.finish import finish_trace
from pipejax.traces.readers.parts import (
    Columns,
    empty_trace,
    number_groups,
    phase_positions,
)
from pipejax.traces.readers.readings import KINDS
from pipejax.traces.readers.sources import (
    CutError,
    OnBytes,
    Reader,
    Request,
    find_delimiter,
    is_json,
    read_lines,
)
from pipejax.traces.record import MESSAGES, NONE, OPS, LeftOut, Trace

# role of a column, and its names in files; `chunk` counts the stages of a worker
NAMES: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "iteration", "iter"),
    "replica": ("replica", "dp_rank", "dp", "data_parallel_rank"),
    "worker": ("worker", "pp_rank", "pp", "pipeline_rank", "pipeline_parallel_rank"),
    "stage": ("gmc", "stage", "stage_id", "global_chunk"),
    "chunk": ("chunk", "mc", "model_chunk", "vpp_rank", "vp_stage", "virtual_stage"),
    "phase": ("phase", "optype", "op_type", "op", "name", "event"),
    "microbatch": ("microbatch", "mb_id", "mb", "micro_batch", "microbatch_id", "micro_batch_id"),
    "start": ("start", "start_ts", "begin", "start_time", "ts"),
    "end": ("end", "end_ts", "finish", "end_time", "stop"),
    "duration": ("duration", "dur", "elapsed"),
}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
UNIT = "unit"
# a gap before a backward is a wait for another stage if it is longer than this many median
# backwards, and than this many usual gaps
_WAIT_BACKWARDS, _WAIT_GAPS = 0.5, 3.0
_COARSE_SECONDS = 1.0  # spacing of neighbouring floats at which times of ops are lost
_BATCH_ROWS = 2**16  # rows of CSV that are read at once
_MAX_NAME = 80  # characters of a phase's name: arrays pad every name to the longest
_NO_PYARROW = "Parquet needs pyarrow: pip install 'pipejax[traces]'"
Roles = dict[str, tuple[str, float]]  # by role: name of the column, and seconds of its unit


def read_columns(paths: Sequence[Path], request: Request) -> Trace:
    """Read Parquet and CSV files, with the user's names of columns and phases."""
    column_names, sizes, on_bytes = request
    for role in column_names:
        resolve_name(role, (*NAMES, UNIT, *OPS), "columns")
    batches: list[Columns] = []
    left_out: list[LeftOut] = []
    for number, path in enumerate(paths):
        try:
            for batch in _batches(path, column_names, on_bytes, left_out):
                batches.append(batch | {"file": np.full(len(batch["start"]), number)})
        except (ValueError, OSError) as error:
            left_out.append(LeftOut(str(path), str(error)))
    if not batches:
        return empty_trace(left_out)
    roles = {role for batch in batches for role in batch}
    names = sorted({str(name) for batch in batches for name in np.unique(batch["phase"])})
    phase_names = {column_names[op]: op for op in OPS if op in column_names}
    position, phases = phase_positions(names, phase_names)
    rows = {
        role: np.concatenate(
            [batch.get(role, np.full(len(batch["start"]), np.nan)) for batch in batches]
        )
        for role in roles - {"phase"}
    }
    rows["phase"] = np.concatenate([_encode(batch["phase"], position) for batch in batches])
    _check_one_run(rows, paths)
    if "stage" in rows:
        rows.pop("chunk", None)
    _check_numbers(rows)
    trace = finish_trace(rows, phases, sizes, left_out)
    workers = sizes.world // (int(trace.replica.max(initial=0)) + 1)
    if workers:
        return dataclasses.replace(trace, known_workers=workers)
    note = f"no file says workers: {trace.workers}, the largest number in the rows"
    _check_last_stage(vars(trace), trace.phases)
    return dataclasses.replace(trace, inferred=(*trace.inferred, note))


def _check_one_run(rows: Columns, paths: Sequence[Path]) -> None:
    """Refuse two files with different times of one op; drop the column `file` of the rows."""
    file = rows.pop("file")
    if len(paths) == 1:
        return
    times = ("start", "duration", "end")
    group = number_groups(*(rows[role] for role in NAMES if role in rows and role not in times))
    # first row of each group: assigned from the last row to the first, the first one stays
    first_rows = np.full(int(group.max(initial=0)) + 1, -1)
    first_rows[group[::-1]] = np.arange(len(group))[::-1]
    first_row = first_rows[group]
    differs = (file != file[first_row]) & (rows["start"] != rows["start"][first_row])
    has_microbatch = rows.get("microbatch", np.zeros(len(file))) >= 0
    contradictions = np.flatnonzero(differs & has_microbatch)
    if len(contradictions):
        row = contradictions[0]
        earlier, later = paths[int(file[first_row[row]])], paths[int(file[row])]
        where = [f"{k} {rows[k][row]:.0f}" for k in ("step", "replica", "worker") if k in rows]
        message = f"{earlier} and {later} both tell of {', '.join(where)}"
        raise wrong("files", f"must be of one run: {message}")


def _encode(names: NumpyArray, position: Mapping[str, int]) -> NumpyArray:
    """Return the position of every name (rows)."""
    distinct, code = np.unique(names, return_inverse=True)
    return np.array([position[str(name)] for name in distinct], np.int64)[code]


def _batches(
    path: Path, column_names: Mapping[str, str], on_bytes: OnBytes, left_out: list[LeftOut]
) -> Iterator[Columns]:
    """Yield the rows of a file in batches: floats, NaN for an invalid cell, times in seconds."""
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    read_file = _read_parquet if is_parquet else _read_csv
    for roles, cells in read_file(path, column_names, on_bytes, left_out):
        batch = {
            role: _names(cells[name]) if role == "phase" else _numbers(cells[name]) * unit
            for role, (name, unit) in roles.items()
        }
        if "end" not in batch:
            batch["end"] = batch["start"] + batch.pop("duration")
        batch.pop("duration", None)
        yield batch


def _read_parquet(
    path: Path, column_names: Mapping[str, str], on_bytes: OnBytes, left_out: list[LeftOut]
) -> Iterator[tuple[Roles, Columns]]:
    """Yield the roles of the columns and their cells by name, one row group after the other."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_NO_PYARROW, name=error.name) from None
    try:
        file = parquet.ParquetFile(path)
        groups, header = file.num_row_groups, file.schema_arrow.names
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        left_out.append(LeftOut(str(path), f"it is no sound Parquet: {_first_line(error)}"))
        return
    roles = find_roles(path, header, column_names)
    names = [name for name, _ in roles.values()]
    for group in range(groups):
        try:
            table = file.read_row_group(group, columns=names)
            cells = {name: table[name].to_numpy() for name in names}
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            why = f"its row group {group} is damaged: {_first_line(error)}"
            left_out.append(LeftOut(str(path), why))
            continue
        yield roles, cells
    on_bytes(path.stat().st_size)


def _read_csv(
    path: Path, column_names: Mapping[str, str], on_bytes: OnBytes, left_out: list[LeftOut]
) -> Iterator[tuple[Roles, Columns]]:
    """Yield the roles of the columns and their cells by name, in batches of `_BATCH_ROWS` rows."""
    text = read_lines(path, on_bytes)
    header_line = next(text, "")
    delimiter = find_delimiter(header_line) or ","
    header = [cell.strip() for cell in next(csv.reader([header_line], delimiter=delimiter))]
    roles, num_invalid = find_roles(path, header, column_names), 0
    position = {name: header.index(name) for name, _ in roles.values()}
    rows: list[list[str]] = []
    reader = csv.reader(_undamaged_lines(text, path, left_out), delimiter=delimiter)
    while True:
        try:
            row = next(reader, None)
        except csv.Error:
            num_invalid += 1
            continue
        if rows and (row is None or len(rows) == _BATCH_ROWS):
            cells = {n: np.array([row[k] for row in rows], object) for n, k in position.items()}
            yield roles, cells
            rows = []
        if row is None:
            break
        if len(row) == len(header):
            rows.append(row)
        elif row:
            num_invalid += 1
    if num_invalid:
        why = f"they have other than the {len(header)} cells of the header"
        left_out.append(LeftOut(f"rows of {path}", why, num_invalid))


def _undamaged_lines(text: Iterator[str], path: Path, left_out: list[LeftOut]) -> Iterator[str]:
    """Yield the lines before any damage of the file; add an entry to `left_out` for the rest."""
    try:
        yield from (line.replace("\0", "\ufffd") for line in text)
    except CutError as error:
        left_out.append(LeftOut(f"the end of {path}", str(error)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def find_roles(path: Path, header: Sequence[str], column_names: Mapping[str, str]) -> Roles:
    """Find the column of each role by the user's names or known aliases, with the unit of times."""
    columns = {_split_unit(name)[0]: name for name in reversed(header)}  # by lower-case name
    unit = column_names.get(UNIT)
    if unit is not None:
        unit = resolve_choice(unit, SECONDS, f"columns: {UNIT}")
    roles = {}
    names = dict(column_names)
    if {"gmc", "stage"} <= columns.keys() and not {"worker", "stage"} & names.keys():
        names["worker"] = columns["stage"]  # the public jobs call the worker a stage
    for role, aliases in NAMES.items():
        name = names.get(role) or next((columns[k] for k in aliases if k in columns), None)
        if name is None:
            continue
        if name not in header:
            raise wrong(
                f"columns: {role}", f"must be one of {', '.join(header)} in {path}, got {name!r}"
            )
        is_time = role in ("start", "end", "duration")
        roles[role] = name, SECONDS[unit or _split_unit(name)[1]] if is_time else 1.0
    if "end" in roles:
        roles.pop("duration", None)
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


def _split_unit(name: str) -> tuple[str, str]:
    """Split a column name into lower-case base and unit, as start_ms; default: seconds."""
    name = name.casefold()
    base, _, unit = name.rpartition("_")
    return (base, unit) if base and unit in SECONDS else (name, "s")


def _names(cells: NumpyArray) -> NumpyArray:
    return np.array(["" if cell is None else str(cell)[:_MAX_NAME] for cell in cells.tolist()])


def _numbers(cells: NumpyArray) -> Float[NumpyArray, " rows"]:
    if cells.dtype.kind == "M":
        since = cells.astype("datetime64[ns]")
        return np.where(np.isnat(since), np.nan, since.astype(np.int64) / 1e9)
    try:
        with np.errstate(invalid="ignore"):  # a value out of range becomes NaN
            return cells.astype(np.float64)
    except (ValueError, TypeError):
        return np.array([_number(cell) for cell in cells.tolist()], np.float64)


def _number(cell: object) -> float:
    try:
        return float(cell)  # type: ignore[arg-type]  # other types raise a TypeError
    except (ValueError, TypeError):
        return np.nan


def _check_last_stage(columns: Columns, phases: Sequence[str]) -> None:
    """Refuse a trace whose last stage waits before its first backward: a later stage is missing."""
    phase_kinds = np.array([NONE if name in MESSAGES else KINDS.get(name, 0) for name in phases])
    rows = np.lexsort([columns[name] for name in ("start", "worker", "step", "replica")])
    rows = rows[phase_kinds[columns["phase"][rows]] != NONE]
    kind = phase_kinds[columns["phase"][rows]]
    start, end, stage, worker = (columns[key][rows] for key in ("start", "end", "stage", "worker"))
    pipeline = number_groups(columns["replica"][rows], columns["step"][rows])
    gap = np.append(0.0, start[1:] - end[:-1])
    gap[1:][(worker[1:] != worker[:-1]) | (pipeline[1:] != pipeline[:-1])] = 0.0
    backwards = np.flatnonzero((kind % 2 == 1) & (stage == stage.max(initial=0)))
    firsts = backwards[np.unique(pipeline[backwards], return_index=True)[1]]  # of each pipeline
    if len(firsts) and np.median(gap[firsts]) > max(
        _WAIT_BACKWARDS * float(np.median((end - start)[firsts])),
        _WAIT_GAPS * float(np.median(gap[np.isin(worker, worker[firsts])])),
    ):
        why = f"backwards of the last stage, {stage.max()}, wait for what is no op"
        ranks = (int(columns["worker"].max()) + 1) * (int(columns["replica"].max()) + 1)
        raise wrong("files", f"must be of all workers: {why}; --world {ranks} accepts them so")


def _check_numbers(rows: Columns) -> None:
    """Refuse absurd numbers of workers, and times stored in 32 bits."""
    workers = rows.get("worker", np.zeros(0))
    absurd = np.flatnonzero((workers >= len(rows["start"])) & (workers < MAX_COUNT))
    if len(absurd):
        where = f"row {absurd[0] + 1} has worker {workers[absurd[0]]:.0f}"
        raise wrong("files", f"must have no more workers than rows ({len(workers)}): {where}")
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
    "Parquet, CSV",
    "production jobs, your own recorder",
    "a slice of time in each row",
    lambda head: (
        head.startswith("PAR1")
        or (not is_json(head) and find_delimiter(head.split("\n", 1)[0]) is not None)
    ),
    read_columns,
)
