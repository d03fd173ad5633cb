"""Reader of JSON files with lists of starts and ends, one per rank: Primus' --dump_pp_data.

Times are milliseconds since the rank began the step, so each rank and step has its own zero. If no
file states the microbatch and chunk of each op, they are inferred.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from pipejax.base.checks import MAX_LISTED, is_number, wrong
from pipejax.traces.readers.finish import finish_trace
from pipejax.traces.readers.parts import Columns, empty_trace
from pipejax.traces.readers.readings import RunSizes
from pipejax.traces.readers.sources import HEAD_BYTES, Reader, Request, read_head, read_texts
from pipejax.traces.record import TIMES, LeftOut, Trace

_SERIES = {"fwd": "F", "bwd": "B", "wgrad": "W"}
_PHASES = tuple(_SERIES.values())
_KEYS = {"start": "start", "end": "end", "microbatch": "minibatch", "chunk": "chunk"}
_MILLISECOND = 1e-3
_MAX_SIZE = 10**6  # workers, stages or microbatches of a run; a larger number is damage
_LIST_OF_TIMES = re.compile(r'"(fwd|bwd|wgrad)_(start|end)"\s*:\s*\[')
_STEP = re.compile(r'"(\d{1,9})"\s*:\s*(?=\{)')
_RANK = re.compile(r"((?:[cdept]p_)?)rank[_-]?(\d{1,6})")


def read_rank_lists(paths: Sequence[Path], request: Request) -> Trace:
    """Read a file for each rank, and any files that state the sizes of the run."""
    # The file rank_3.json holds {step: {"fwd_start": [..], "fwd_end": [..], ..}, ..}, in ms.
    user_sizes = request.sizes
    size_paths = [path for path in paths if not _LIST_OF_TIMES.search(read_head(path))]
    rank_paths = [path for path in paths if path not in size_paths]
    configs = {path.parent / "config.json" for path in rank_paths}.difference(size_paths)
    size_paths += sorted(filter(Path.is_file, configs))
    if not rank_paths:
        unused = "sizes of a run without its ranks"
        return empty_trace(LeftOut(str(path), unused) for path in size_paths)
    file_sizes = _read_sizes(size_paths, request)
    size_pairs = zip(user_sizes, file_sizes, strict=True)
    sizes = RunSizes(*(user_size or file_size for user_size, file_size in size_pairs))
    by_rank = _read_ranks(rank_paths, request)
    file_ranks = [rank for path in rank_paths if (rank := file_rank(path)) is not None]
    workers = user_sizes.world or sizes.workers or max(file_ranks, default=-1) + 1
    inferred = check_ranks(by_rank, sizes.workers, user_sizes.world, request)
    parts = [part for rank, data in by_rank.items() for part in _rank_columns(rank, data, request)]
    if not parts:
        return empty_trace(request.left_out)
    columns: Columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    for key in ("microbatch", "chunk"):  # stated by all ops or by none
        if any(np.isnan(part[key]).all() for part in parts):
            del columns[key]
    if sizes.stages == 1 and "chunk" not in columns:
        columns["stage"] = columns["worker"].copy()
    request = request._replace(sizes=sizes._replace(workers=workers))
    return finish_trace(columns, _PHASES, request, inferred, by_step=True)


def _read_ranks(paths: Sequence[Path], request: Request) -> dict[int, dict[str, Any]]:
    """Read the steps of every rank, as {rank: {step: lists}}; a rank may have several files."""
    by_rank: dict[int, dict[str, Any]] = {}
    for path in paths:
        rank, data = file_rank(path), _read_object(path, request)
        if data is None:
            continue
        if rank is None:
            request.left_out.append(LeftOut(str(path), "its name says no rank"))
            continue
        steps = by_rank.setdefault(rank, {})  # of earlier files
        if differing := [step for step in data if steps.get(step, data[step]) != data[step]]:
            why = f"{path.name} and another file hold step {differing[0]} of rank {rank}"
            raise wrong("files", f"must be of one run: {why}; give the files of one job")
        by_rank[rank] = steps | data
    return by_rank


def check_ranks(
    ranks: Collection[int], file_world: int, user_world: int, request: Request, hint: str = ""
) -> list[str]:
    """Check that every rank has a readable file; return a note if the world size is unstated."""
    # A world size is the number of ranks that files or the user state; 0 if unknown. If the user
    # states it, missing ranks are entries of `left_out`, else an error. `hint` ends that error;
    # {world} in it becomes the world size.
    world = user_world or file_world or max(ranks, default=-1) + 1
    largest = max(ranks, default=-1)
    if user_world and largest >= user_world:
        text = f"must be above the largest rank of the files, {largest}, got {user_world}"
        raise wrong("world", text, user_world)
    if file_world and largest >= world:
        raise wrong("files", f"must be of one run: one states {world} ranks, another is {largest}")
    missing = (rank for rank in range(world) if rank not in ranks)
    numbers = [str(rank) for rank in itertools.islice(missing, MAX_LISTED)]
    count = world - len(ranks)
    listed = ", ".join([*numbers, "..."] if count > len(numbers) else numbers)
    if numbers and ranks and not user_world:
        why = f"of {world} there is no sound file of {count}: rank {listed}"
        raise wrong("files", f"must be of all ranks: {why}{hint.format(world=world)}")
    if numbers:
        request.left_out.append(LeftOut(f"rank {listed}", "there is no sound file of it", count))
    is_stated = user_world or file_world
    return [] if is_stated else [f"ranks: {world}, as the files; --world says more"]


def file_rank(path: Path) -> int | None:
    """Return the rank in the name of a file or its folder, as in rank-3.json; None without one."""
    # ranks on single axes of the mesh, such as pp_rank_1_tp_rank_0, are not the rank in the run
    for name in (path.name, path.absolute().parent.name):
        numbers = _RANK.findall(name.casefold())
        whole = [number for axis, number in numbers if not axis or len(numbers) == 1]
        if numbers:
            return int(whole[-1]) if whole else None
    return None


def _read_object(path: Path, request: Request) -> dict[str, Any] | None:
    """Read a JSON object, or the undamaged steps of a damaged file; return None without any."""
    pieces: list[str] = []
    try:
        for piece in read_texts(path, request.on_bytes):
            pieces.append(piece)
        data = json.loads("".join(pieces))
    except (ValueError, OSError, RecursionError) as error:
        data = _salvage_steps("".join(pieces))
        what = f"steps of {path}" if data else str(path)
        request.left_out.append(LeftOut(what, f"it is no sound JSON: {error}"))
    return data if isinstance(data, dict) and data else None


def _salvage_steps(text: str) -> dict[str, Any]:
    steps = {}
    for begin in _STEP.finditer(text):
        with contextlib.suppress(ValueError, RecursionError):
            steps[begin[1]] = json.JSONDecoder().raw_decode(text, begin.end())[0]
    return steps


def _read_sizes(paths: Sequence[Path], request: Request) -> RunSizes:
    """Read the workers, stages per worker and microbatches from JSON files; 0 if missing."""
    data: dict[str, Any] = {}
    for path in paths:
        data |= _read_object(path, request) or {}
    aliases = ("pp_size",), ("vp_size", "vpp_size"), ("num_mbs", "micro_batches")
    values = [next((data[key] for key in keys if key in data), None) for keys in aliases]
    invalid = [value for value in values if value is not None and not _is_size(value)]
    if invalid:
        why = f"a size must be a whole number, got {invalid[0]!r}"
        request.left_out.append(LeftOut(str(paths[-1]), why))
    return RunSizes(*(value if _is_size(value) else 0 for value in values))


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value < _MAX_SIZE


def _rank_columns(rank: int, data: Mapping[str, Any], request: Request) -> Iterator[Columns]:
    """Yield the ops of a rank by step and phase; note damaged steps in `request.left_out`."""
    # `data` is the JSON object of the rank's file, by step: {"fwd_start": [..], "fwd_end": [..],
    # ..}. Values that are no numbers become NaN.
    for step, entry in data.items():
        if not (step.isascii() and step.isdigit() and len(step) < 10 and isinstance(entry, dict)):
            why = "it is no step with its lists"
            request.left_out.append(LeftOut(f"{step[:20]!r} of rank {rank}", why))
            continue
        parts: list[Columns] = []
        for phase, name in enumerate(_SERIES):
            columns = _read_series(entry, name)
            if columns is None:
                why = f"its {name}_start and {name}_end are not lists of one length"
                request.left_out.append(LeftOut(f"step {step} of rank {rank}", why))
                parts = []
                break
            if size := len(columns["start"]):
                constants = {"step": int(step), "replica": 0, "worker": rank, "phase": phase}
                parts.append(columns | {key: np.full(size, n) for key, n in constants.items()})
        yield from parts


def _read_series(entry: Mapping[str, Any], name: str) -> Columns | None:
    """Return (start [s], end [s], microbatch, chunk) of a step's ops; None if damaged."""
    lists = {key: entry.get(f"{name}_{suffix}") or [] for key, suffix in _KEYS.items()}
    if not all(isinstance(values, list) for values in lists.values()):
        return None
    size = len(lists["start"])
    if len(lists["end"]) != size:
        return None
    columns: Columns = {}
    for key, values in lists.items():
        numbers = values if len(values) == size else [None] * size
        columns[key] = np.array([n if is_number(n, least=-np.inf) else np.nan for n in numbers])
    return columns | {key: columns[key] * _MILLISECOND for key in TIMES}


def _is_rank_lists(head: str) -> bool:
    is_sizes = '"pp_size"' in head and '"traceEvents"' not in head and len(head) < HEAD_BYTES // 4
    return head.lstrip()[:1] == "{" and (is_sizes or bool(_LIST_OF_TIMES.search(head)))


READER = Reader(
    form="JSON with lists of starts and ends",
    writers="Primus, by its option dump_pp_data",
    content="a file for each rank; each step has its own zero, so clocks are aligned step by step",
    can_read=_is_rank_lists,
    read=read_rank_lists,
)
