"""Slices in columns, one a row: Parquet and CSV, by the names of the public jobs or the user's."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MAX_LISTED, resolve_choice, resolve_name, wrong
from pipejax.traces.readers.parts import (
    Columns,
    check_phases,
    nothing,
    number_groups,
    positions,
    sound,
    with_split_backwards,
)
from pipejax.traces.readers.readings import KINDS, RunSizes, complete
from pipejax.traces.readers.sources import CutError, Tell, find_delimiter, lines
from pipejax.traces.record import MESSAGES, NONE, OPS, LeftOut, Trace

# Messages that do not say of which microbatch they are: told by the order of the ops.
#
# A worker sends what its ops make in their order, and receives what they take. Interleaved
# schedules of Megatron time a call also where nothing is sent: those are more slices than
# messages.

_STEP_TO = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}  # stage at the other end
_EARLY = 1e-4  # a message may begin so long before its op ends by the clock of its file [s]


def matched(
    columns: Columns, phases: tuple[str, ...]
) -> tuple[Columns, Bool[NumpyArray, " slices"], list[LeftOut]]:
    """Give stage and microbatch to messages that have none; return which slices remain."""
    # Where a worker has as many messages of a kind in a step as its ops need, they are told by
    # order; where it has one for each op, those that no op needs are left out; where it has more,
    # each op takes the first that can be its own; where it has fewer, none can be told.
    stays, left_out = np.ones(len(columns["start"]), bool), []
    group = number_groups(*(columns[name] for name in ("step", "replica", "worker")))
    for name in MESSAGES:
        if name not in phases:
            continue
        unmatched = np.flatnonzero(
            (columns["phase"] == phases.index(name)) & (columns["microbatch"] == NONE)
        )
        ops, is_needed = _message_ops(name, columns, phases)
        message_op = _match_ops(name, columns, group, unmatched, ops, is_needed)
        for key in ("stage", "microbatch"):
            columns[key][unmatched[message_op >= 0]] = columns[key][message_op[message_op >= 0]]
        stays[unmatched[message_op < 0]] = False
        for code, why in _WHY.items():
            if count := int(np.sum(message_op == code)):
                left_out.append(LeftOut(name, why, count))
    return columns, stays, left_out


_EXTRA, _UNMATCHED = -1, -2
_WHY = {
    _EXTRA: "no op of its worker needs this message: a call without one",
    _UNMATCHED: (
        "which microbatch it is of cannot be told: its worker's messages and ops do not match"
    ),
}


def _message_ops(
    name: str, columns: Columns, phases: tuple[str, ...]
) -> tuple[Int[NumpyArray, " ops"], Bool[NumpyArray, " ops"]]:
    """Ops at this worker's end of messages, and which of them need one."""
    codes = [phases.index(op) for op in ("F" if name.endswith("F") else "BI") if op in phases]
    ops = np.flatnonzero(np.isin(columns["phase"], codes) & (columns["stage"] >= 0))
    stage, worker = columns["stage"][ops], columns["worker"][ops]
    stage_workers = np.full(int(stage.max(initial=0)) + 1, NONE)
    stage_workers[stage] = worker
    other = stage + _STEP_TO[name]
    inside = (other >= 0) & (other < len(stage_workers))
    at_other = stage_workers[np.where(inside, other, 0)]
    return ops, inside & (at_other != worker) & (at_other != NONE)


def _match_ops(
    name: str,
    columns: Columns,
    group: Int[NumpyArray, " slices"],
    unmatched: Int[NumpyArray, " messages"],
    ops: Int[NumpyArray, " ops"],
    is_needed: Bool[NumpyArray, " ops"],
) -> Int[NumpyArray, " messages"]:
    """Op of each message, or why it has none."""
    size, is_send = int(group.max(initial=0)) + 1, name.startswith("SEND")
    result = np.full(len(unmatched), _EXTRA)
    message_count = np.bincount(group[unmatched], minlength=size)
    op_count = np.bincount(group[ops], minlength=size)
    needed_count = np.bincount(group[ops[is_needed]], minlength=size)
    result[message_count[group[unmatched]] < needed_count[group[unmatched]]] = _UNMATCHED
    time = columns["end" if is_send else "start"]
    by_need = (message_count == needed_count) & (message_count > 0)
    by_call = (message_count == op_count) & (message_count > needed_count)
    for chosen, candidates in ((by_need, ops[is_needed]), (by_call, ops)):
        rows = np.flatnonzero(chosen[group[unmatched]])
        assigned_ops = candidates[chosen[group[candidates]]]
        rows = rows[np.lexsort([rows, columns["start"][unmatched[rows]], group[unmatched[rows]]])]
        result[rows] = assigned_ops[
            np.lexsort([assigned_ops, time[assigned_ops], group[assigned_ops]])
        ]
    needs = np.zeros(len(group), bool)
    needs[ops[is_needed]] = True
    result[(result >= 0) & ~needs[result]] = _EXTRA
    for number in np.flatnonzero((message_count > needed_count) & ~by_call & (needed_count > 0)):
        rows = np.flatnonzero(group[unmatched] == number)
        rows = rows[np.argsort(columns["start"][unmatched[rows]], kind="stable")]
        worker_ops = ops[is_needed & (group[ops] == number)]
        worker_ops = worker_ops[np.argsort(time[worker_ops], kind="stable")]
        result[rows] = _first_that_can(columns, unmatched[rows], worker_ops, is_send=is_send)
    return result


def _first_that_can(
    columns: Columns,
    messages: Int[NumpyArray, " messages"],
    ops: Int[NumpyArray, " ops"],
    *,
    is_send: bool,
) -> Int[NumpyArray, " messages"]:
    """Op of each message of one worker: a send after its op, a receive before it, in order."""
    result, at = np.full(len(messages), _EXTRA), 0
    if not is_send:  # from the end on, time runs backwards
        messages, ops = messages[::-1], ops[::-1]
    for op in ops:
        while at < len(messages) and not (
            columns["start"][messages[at]] >= columns["end"][op] - _EARLY
            if is_send
            else columns["end"][messages[at]] <= columns["start"][op] + _EARLY
        ):
            at += 1
        if at == len(messages):
            return np.full(len(messages), _UNMATCHED)
        result[at] = op
        at += 1
    return result if is_send else result[::-1]


# what a column is, and what files call it. `chunk` counts the stages of a worker
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
_OF_OPS = ("stage", "chunk", "microbatch")
_WAITS, _USUAL = 0.5, 3.0  # of a backward, and of usual gaps: how long one waits for a stage
_COARSE = 1.0  # [s] between neighbouring times that are no times of ops
_BATCH = 2**16  # rows of CSV that are read at once
_LONGEST = 80  # characters of a phase's name: an array gives all of them the room of the longest
_NO_PYARROW = "Parquet needs pyarrow: pip install 'pipejax[traces]'"
Found = dict[str, tuple[str, float]]  # by role: the column, and the seconds of its unit


def read_columns(
    paths: Sequence[Path], column_names: Mapping[str, str], sizes: RunSizes, tell: Tell
) -> Trace:
    """Read files of columns."""
    for role in column_names:
        resolve_name(role, (*NAMES, UNIT, *OPS), "columns")
    batches: list[Columns] = []
    left_out: list[LeftOut] = []
    for number, path in enumerate(paths):
        try:
            for batch in _batches(path, column_names, tell, left_out):
                batches.append(batch | {"file": np.full(len(batch["start"]), number)})
        except (ValueError, OSError) as error:
            left_out.append(LeftOut(str(path), str(error)))
    if not batches:
        return nothing(left_out)
    roles = {role for batch in batches for role in batch}
    names = sorted({str(name) for batch in batches for name in np.unique(batch["phase"])})
    position, phases = positions(names, {column_names[op]: op for op in OPS if op in column_names})
    rows = {
        role: np.concatenate(
            [batch.get(role, np.full(len(batch["start"]), np.nan)) for batch in batches]
        )
        for role in roles - {"phase"}
    }
    rows["phase"] = np.concatenate([_coded(batch["phase"], position) for batch in batches])
    _check_one_run(rows, paths)
    return _trace(rows, phases, left_out, sizes)


def _check_one_run(rows: Columns, paths: Sequence[Path]) -> None:
    """Check that no two files tell different things of one step of a worker."""
    file = rows.pop("file")
    if len(paths) == 1:
        return
    times = ("start", "duration", "end")
    group = number_groups(*(rows[role] for role in NAMES if role in rows and role not in times))
    first = np.full(int(group.max(initial=0)) + 1, -1)
    first[group[::-1]] = np.arange(len(group))[::-1]
    first = first[group]
    differs = (file != file[first]) & (rows["start"] != rows["start"][first])
    for row in np.flatnonzero(differs & (rows.get("microbatch", np.zeros(len(file))) >= 0))[:1]:
        earlier, later = paths[int(file[first[row]])], paths[int(file[row])]
        where = [f"{k} {rows[k][row]:.0f}" for k in ("step", "replica", "worker") if k in rows]
        message = f"{earlier} and {later} both tell of {', '.join(where)}"
        raise wrong("files", f"must be of one run: {message}")


def _coded(names: NumpyArray, position: Mapping[str, int]) -> NumpyArray:
    distinct, place = np.unique(names, return_inverse=True)
    return np.array([position[str(name)] for name in distinct], np.int64)[place]


def _batches(
    path: Path, column_names: Mapping[str, str], tell: Tell, left_out: list[LeftOut]
) -> Iterator[Columns]:
    """Yield rows of a file: times in seconds, numbers as floats, NaN where a cell is none."""
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    read_file = _read_parquet if is_parquet else _read_csv
    for roles, cells in read_file(path, column_names, tell, left_out):
        batch = {
            role: _names(cells[name]) if role == "phase" else _numbers(cells[name]) * unit
            for role, (name, unit) in roles.items()
        }
        if "end" not in batch:
            batch["end"] = batch["start"] + batch.pop("duration")
        batch.pop("duration", None)
        yield batch


def _read_parquet(
    path: Path, column_names: Mapping[str, str], tell: Tell, left_out: list[LeftOut]
) -> Iterator[tuple[Found, Columns]]:
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
    tell(path.stat().st_size)


def _read_csv(
    path: Path, column_names: Mapping[str, str], tell: Tell, left_out: list[LeftOut]
) -> Iterator[tuple[Found, Columns]]:
    text = lines(path, tell)
    first = next(text, "")
    delimiter = find_delimiter(first) or ","
    header = [cell.strip() for cell in next(csv.reader([first], delimiter=delimiter))]
    roles, odd = find_roles(path, header, column_names), 0
    place = {name: header.index(name) for name, _ in roles.values()}
    rows: list[list[str]] = []
    reader = csv.reader(_sound_text(text, path, left_out), delimiter=delimiter)
    while True:
        try:
            row = next(reader, None)
        except csv.Error:
            odd += 1
            continue
        if rows and (row is None or len(rows) == _BATCH):
            yield roles, {n: np.array([row[k] for row in rows], object) for n, k in place.items()}
            rows = []
        if row is None:
            break
        if len(row) == len(header):
            rows.append(row)
        elif row:
            odd += 1
    if odd:
        why = f"they have other than the {len(header)} cells of the header"
        left_out.append(LeftOut(f"rows of {path}", why, odd))


def _sound_text(text: Iterator[str], path: Path, left_out: list[LeftOut]) -> Iterator[str]:
    """Yield lines up to where the file cannot be read any further."""
    try:
        yield from (line.replace("\0", "\ufffd") for line in text)
    except CutError as error:
        left_out.append(LeftOut(f"the end of {path}", str(error)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def find_roles(path: Path, header: Sequence[str], column_names: Mapping[str, str]) -> Found:
    """Tell which column is what, and the unit of those that hold times."""
    lowered = {_without_unit(name)[0]: name for name in reversed(header)}
    unit = column_names.get(UNIT)
    if unit is not None:
        unit = resolve_choice(unit, SECONDS, f"columns: {UNIT}")
    roles = {}
    names = dict(column_names)
    if {"gmc", "stage"} <= lowered.keys() and not {"worker", "stage"} & names.keys():
        names["worker"] = lowered["stage"]  # the public jobs call the worker a stage
    for role, aliases in NAMES.items():
        name = names.get(role) or next((lowered[k] for k in aliases if k in lowered), None)
        if name is None:
            continue
        if name not in header:
            raise wrong(
                f"columns: {role}", f"must be one of {', '.join(header)} in {path}, got {name!r}"
            )
        is_time = role in ("start", "end", "duration")
        roles[role] = name, SECONDS[unit or _without_unit(name)[1]] if is_time else 1.0
    if "end" in roles:
        roles.pop("duration", None)
    lacks = [role for role in ("phase", "start") if role not in roles]
    lacks += [] if {"end", "duration"} & roles.keys() else ["end or duration"]
    lacks += [] if {"worker", "stage"} & roles.keys() else ["worker or stage"]
    if lacks:
        named = [name for name in header if name]
        listed = ", ".join([*named[:MAX_LISTED], *["..."] * (len(named) > MAX_LISTED)])
        raise wrong(
            "columns",
            f"must say which column of {path} is {', '.join(lacks)}: it has {listed}",
        )
    return roles


def _without_unit(name: str) -> tuple[str, str]:
    name = name.casefold()
    base, _, unit = name.rpartition("_")
    return (base, unit) if base and unit in SECONDS else (name, "s")


def _names(cells: NumpyArray) -> NumpyArray:
    return np.array(["" if cell is None else str(cell)[:_LONGEST] for cell in cells.tolist()])


def _numbers(cells: NumpyArray) -> Float[NumpyArray, " rows"]:
    if cells.dtype.kind == "M":
        since = cells.astype("datetime64[ns]")
        return np.where(np.isnat(since), np.nan, since.astype(np.int64) / 1e9)
    try:
        with np.errstate(invalid="ignore"):  # what 32 bits hold and no float is becomes NaN
            return cells.astype(np.float64)
    except (ValueError, TypeError):
        return np.array([_number(cell) for cell in cells.tolist()], np.float64)


def _number(cell: object) -> float:
    try:
        return float(cell)  # type: ignore[arg-type]  # what is no number is caught
    except (ValueError, TypeError):
        return np.nan


def _trace(
    rows: Columns, phases: tuple[str, ...], left_out: list[LeftOut], sizes: RunSizes
) -> Trace:
    """Check rows, give every op its stage and microbatch, and every message its own."""
    kind = np.array([KINDS.get(name, NONE) for name in phases])[rows["phase"]]
    is_op = kind >= 0
    if "chunk" in rows and "stage" not in rows:
        rows["chunk"] = np.where(np.isnan(rows["chunk"]), NONE, rows["chunk"])
    else:
        rows.pop("chunk", None)
    whole = [name for name in ("step", "replica", "worker", *_OF_OPS) if name in rows]
    checks = [
        (~np.isfinite(rows[name]), f"its {name} is no finite number") for name in ("start", "end")
    ]
    checks.append((rows["end"] < rows["start"], "it ends before it starts"))
    for name in whole:
        least = NONE if name in _OF_OPS else 0
        if name in _OF_OPS:
            rows[name] = np.where(np.isnan(rows[name]), NONE, rows[name])  # an empty cell
        with np.errstate(invalid="ignore"):
            fits = (rows[name] >= least) & (rows[name] == np.rint(rows[name])) & (rows[name] < 1e9)
        checks.append((~fits, f"its {name} is no whole number of at least {least}"))
    for name in _OF_OPS:
        if name in rows:
            checks.append((is_op & (rows[name] < 0), f"it is an op and has no {name}"))
    passes, faults = sound(checks, "rows")
    columns = {name: values[passes] for name, values in rows.items()}
    columns |= {name: columns[name].astype(np.int64) for name in (*whole, "phase")}
    _check_numbers(columns, phases, np.flatnonzero(passes))
    kind = kind[passes]
    inferred = complete(columns, kind, sizes, by_step=False)
    columns.pop("chunk", None)
    passes = (kind < 0) | (columns["microbatch"] >= 0)
    columns = {name: values[passes] for name, values in columns.items()}
    is_unplaced = (kind[passes] < 0) & (columns["stage"] == NONE)
    columns["microbatch"][is_unplaced] = NONE  # the public jobs number their garbage collections
    columns, stays, unmatched = matched(columns, phases)
    columns = {name: values[stays] for name, values in columns.items()}
    columns["phase"], phases = with_split_backwards(columns, phases)
    workers = sizes.world // (int(columns["replica"].max(initial=0)) + 1)
    if not workers:
        count = int(columns["worker"].max(initial=NONE)) + 1
        inferred.append(f"no file says workers: {count}, the largest number in the rows")
        _check_last_stage(columns, phases)
    return Trace.of(
        columns,
        phases,
        [*left_out, *faults, *unmatched],
        known_workers=workers,
        inferred=(*inferred,),
    )


def _check_last_stage(columns: Columns, phases: Sequence[str]) -> None:
    """Refuse a last stage whose first backward waits for what is no op: it is not the last."""
    kind = np.array([NONE if name in MESSAGES else KINDS.get(name, 0) for name in phases])
    rows = np.lexsort([columns[name] for name in ("start", "worker", "step", "replica")])
    rows = rows[kind[columns["phase"][rows]] != NONE]
    start, end, stage, worker = (columns[key][rows] for key in ("start", "end", "stage", "worker"))
    pipeline = number_groups(columns["replica"][rows], columns["step"][rows])
    gap = np.append(0.0, start[1:] - end[:-1])
    gap[1:][(worker[1:] != worker[:-1]) | (pipeline[1:] != pipeline[:-1])] = 0.0
    backs = np.flatnonzero(
        (kind[columns["phase"][rows]] % 2 == 1) & (stage == stage.max(initial=0))
    )
    first = backs[np.unique(pipeline[backs], return_index=True)[1]]
    if len(first) and np.median(gap[first]) > max(
        _WAITS * float(np.median((end - start)[first])),
        _USUAL * float(np.median(gap[np.isin(worker, worker[first])])),
    ):
        why = f"backwards of the last stage, {stage.max()}, wait for what is no op"
        ranks = (int(columns["worker"].max()) + 1) * (int(columns["replica"].max()) + 1)
        raise wrong("files", f"must be of all workers: {why}; --world {ranks} accepts them so")


def _check_numbers(columns: Columns, phases: Sequence[str], row: NumpyArray) -> None:
    """Refuse numbers that make no sense, and phases of ops whose name is none."""
    absurd = np.flatnonzero(columns.get("worker", np.zeros(0)) >= len(row))
    if len(absurd):
        where = f"row {row[absurd[0]] + 1} has worker {columns['worker'][absurd[0]]}"
        raise wrong("files", f"must have no more workers than rows ({len(row)}): {where}")
    times = np.concatenate([columns["start"], columns["end"]])
    largest = np.float32(np.abs(times).max(initial=0.0))
    apart = float(np.spacing(largest))
    if len(times) and apart > _COARSE and (times == times.astype(np.float32)).all():
        raise wrong(
            "files",
            f"must have times in 64 bits: in 32 bits those of {largest:.4g} s are "
            f"{apart:g} s apart",
        )
    check_phases(columns, phases)
