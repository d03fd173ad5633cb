"""A file for each rank with lists of starts and ends, as Primus writes with --dump_pp_data.

Times are milliseconds since the rank began the step, so each rank and step has its own zero. Where
no file says microbatch and chunk of each op, they are inferred.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.checks import MAX_COUNT, MAX_LISTED, is_number, wrong
from pipejax.traces.readers.parts import Columns, nothing, sound, with_split_backwards
from pipejax.traces.readers.readings import RunSizes, complete
from pipejax.traces.readers.sources import Tell, texts
from pipejax.traces.record import LeftOut, Trace

_SERIES = {"fwd": "F", "bwd": "B", "wgrad": "W"}
_PHASES = tuple(_SERIES.values())
_MILLISECOND = 1e-3
_UNSAID = -2
_MOST = 10**6  # of workers, stages or microbatches: what says more is damaged
_STEP = re.compile(r'"(\d{1,9})"\s*:\s*(?=\{)')
_RANK = re.compile(r"rank[_-]?(\d{1,6})")


class _Series(NamedTuple):
    """Ops of one phase of a worker in a step, in the order of the file."""

    step: int
    worker: int
    phase: int
    start: list[Any]
    end: list[Any]
    microbatch: list[Any]
    chunk: list[Any]


def read_rank_lists(
    paths: Sequence[Path], size_paths: Sequence[Path], arguments: RunSizes, tell: Tell
) -> Trace:
    """Read the files of all ranks; the files of `size_paths` state the sizes of the run."""
    left_out: list[LeftOut] = []
    if not paths:
        unused = "sizes of a run without its ranks"
        return nothing(LeftOut(str(path), unused) for path in size_paths)
    sizes = _sizes(size_paths, tell, left_out)
    sizes = RunSizes(*(argument or read for argument, read in zip(arguments, sizes, strict=True)))
    by_rank: dict[int, dict[str, Any]] = {}
    for path in paths:
        rank, data = file_rank(path), _object(path, tell, left_out)
        if data is None:
            continue
        if rank is None or rank in by_rank:
            why = "its name says no rank" if rank is None else f"another file is of rank {rank}"
            left_out.append(LeftOut(str(path), why))
            continue
        by_rank[rank] = data
    named = [rank for path in paths if (rank := file_rank(path)) is not None]
    workers = arguments.world or sizes.workers or max(named, default=-1) + 1
    inferred = check_ranks(by_rank, sizes.workers, arguments.world, left_out)
    series = [
        entry
        for rank, data in by_rank.items()
        for entry in _rank_series(rank, data, left_out)
        if rank < workers
    ]
    return _trace(series, sizes._replace(workers=workers), left_out, inferred)


def check_ranks(
    ranks: Collection[int], stated: int, accepted: int, left_out: list[LeftOut]
) -> list[str]:
    """Check that every rank has a sound file, and note if no file says how many there are."""
    world = accepted or max(stated, max(ranks, default=-1) + 1)
    missing = (rank for rank in range(world) if rank not in ranks)
    numbers = [str(rank) for rank in itertools.islice(missing, MAX_LISTED)]
    count = world - sum(rank < world for rank in ranks)
    listed = ", ".join(numbers) + ", ..." * (count > len(numbers))
    if numbers and ranks and not accepted:
        why = f"of {world} there is no sound file of {count}: rank {listed}"
        raise wrong("files", f"must be of all ranks: {why}; --world {world} accepts what is there")
    if numbers:
        left_out.append(LeftOut(f"rank {listed}", "there is no sound file of it", count))
    return [] if accepted or stated else [f"ranks: {world}, as the files; --world says more"]


def file_rank(path: Path) -> int | None:
    """Return the rank that stands in the name of a file."""
    numbers = _RANK.findall(path.name.casefold())
    return int(numbers[-1]) if numbers else None


def _object(path: Path, tell: Tell, left_out: list[LeftOut]) -> dict[str, Any] | None:
    """Read a JSON object; of a damaged one the steps that are whole, if there is one."""
    pieces: list[str] = []
    try:
        for piece in texts(path, tell):
            pieces.append(piece)
        data = json.loads("".join(pieces))
    except (ValueError, OSError, RecursionError) as error:
        data = _whole_steps("".join(pieces))
        what = "steps of " * bool(data)
        left_out.append(LeftOut(f"{what}{path}", f"it is no sound JSON: {error}"))
    return data if isinstance(data, dict) and data else None


def _whole_steps(text: str) -> dict[str, Any]:
    steps = {}
    for begin in _STEP.finditer(text):
        with contextlib.suppress(ValueError, RecursionError):
            steps[begin[1]] = json.JSONDecoder().raw_decode(text, begin.end())[0]
    return steps


def _sizes(paths: Sequence[Path], tell: Tell, left_out: list[LeftOut]) -> RunSizes:
    data: dict[str, Any] = {}
    for path in paths:
        data |= _object(path, tell, left_out) or {}
    names = ("pp_size",), ("vp_size", "vpp_size"), ("num_mbs", "micro_batches")
    values = [next((data[k] for k in keys if k in data), None) for keys in names]
    odd = [value for value in values if value is not None and not _is_count(value)]
    if odd:
        left_out.append(LeftOut(str(paths[-1]), f"a size must be a whole number, got {odd[0]!r}"))
    return RunSizes(*(int(value or 0) if _is_count(value) else 0 for value in values))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < _MOST


def _rank_series(rank: int, data: Mapping[str, Any], left_out: list[LeftOut]) -> Iterator[_Series]:
    """Yield the lists of a rank, those of a step that is damaged not."""
    for step, entry in data.items():
        if not (step.isascii() and step.isdigit() and len(step) < 10 and isinstance(entry, dict)):
            why = "it is no step with its lists"
            left_out.append(LeftOut(f"{step[:20]!r} of rank {rank}", why))
            continue
        series = []
        for code, name in enumerate(_SERIES):
            lists = [
                entry.get(f"{name}_{key}") or [] for key in ("start", "end", "minibatch", "chunk")
            ]
            start, end, microbatch, chunk = lists
            if not all(isinstance(values, list) for values in lists) or len(start) != len(end):
                why = f"its {name}_start and {name}_end are not lists of one length"
                left_out.append(LeftOut(f"step {step} of rank {rank}", why))
                break
            microbatch, chunk = (v if len(v) == len(start) else [] for v in (microbatch, chunk))
            series.append(_Series(int(step), rank, code, start, end, microbatch, chunk))
        else:
            yield from series


def _trace(
    series: Sequence[_Series], sizes: RunSizes, left_out: list[LeftOut], inferred: list[str]
) -> Trace:
    parts = [_columns(entry) for entry in series if entry.start]
    if not parts:
        return nothing(left_out)
    columns: Columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    finite = np.isfinite(columns["start"]) & np.isfinite(columns["end"])
    # a list that says nothing of its ops says -2
    has_numbers = {key: bool((columns[key] != _UNSAID).all()) for key in ("microbatch", "chunk")}
    is_sound = [columns[key] >= 0 for key, has_all in has_numbers.items() if has_all]
    for key in [key for key, has_all in has_numbers.items() if not has_all]:
        del columns[key]
    passes, faults = sound(
        [
            (~finite, "its start or end is no finite number"),
            (columns["end"] < columns["start"], "it ends before it starts"),
            (~np.all([finite, *is_sound], axis=0), "its microbatch or chunk is no whole number"),
        ],
        "ops",
    )
    columns = {key: values[passes] for key, values in columns.items()}
    if sizes.stages == 1 and "chunk" not in columns:
        columns["stage"] = columns["worker"].copy()
    inferred += complete(columns, columns["phase"], sizes, by_step=True)
    columns.pop("chunk", None)
    is_op = columns["microbatch"] >= 0
    columns, more = (
        {key: values[is_op] for key, values in columns.items()},
        sound([(~is_op, "it is one op too many")], "ops")[1],
    )
    if has_numbers["microbatch"] and is_op.any():
        columns["microbatch"] -= columns["microbatch"].min()  # some count from 1
    columns["phase"], phases = with_split_backwards(columns, _PHASES)
    return Trace.of(
        columns,
        phases,
        [*left_out, *faults, *more],
        known_workers=sizes.workers,
        inferred=(*inferred,),
        has_step_clocks=True,
    )


def _columns(entry: _Series) -> Columns:
    size = len(entry.start)
    columns: Columns = {
        key: np.array([v if is_number(v, least=-np.inf) else np.nan for v in values], np.float64)
        * _MILLISECOND
        for key, values in (("start", entry.start), ("end", entry.end))
    }
    for key, values in (("microbatch", entry.microbatch), ("chunk", entry.chunk)):
        numbers = [v if type(v) is int and 0 <= v < MAX_COUNT else -1 for v in values]
        columns[key] = np.array(numbers or [_UNSAID] * size, np.int64)
    number = {"step": entry.step, "replica": 0, "worker": entry.worker, "phase": entry.phase}
    return columns | {key: np.full(size, value, np.int64) for key, value in number.items()}
