"""A file for each rank with lists of starts and ends, as Primus writes with --dump_pp_data.

Times are milliseconds since the rank began the step, so each rank and step has its own zero. Where
a file says microbatch and chunk of each op, they are taken; else the k-th forward is that of the
k-th turn: with one stage a worker microbatch k, with several that of interleaved 1F1B.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import MAX_COUNT, MOST_LISTED, is_number
from pipejax.schedules.builders.one_f_one_b import Turns
from pipejax.schedules.cells.ops import Phase
from pipejax.traces.readers.parts import Columns, nothing, sound
from pipejax.traces.readers.phase_names import with_split_backwards
from pipejax.traces.readers.sources import Tell, texts
from pipejax.traces.record import LeftOut, Trace

_SERIES = {"fwd": "F", "bwd": "B", "wgrad": "W"}
_PHASES = tuple(_SERIES.values())
_MILLISECOND = 1e-3
_MOST = 10**6  # of workers, stages or microbatches: what says more is damaged
_STEP = re.compile(r'"(\d{1,9})"\s*:\s*(?=\{)')
_RANK = re.compile(r"rank[_-]?(\d{1,6})")


class RunSizes(NamedTuple):
    """Sizes of a run: workers, stages a worker, microbatches; 0 where no file says them."""

    workers: int = 0
    chunks: int = 0
    microbatches: int = 0


class _Series(NamedTuple):
    """Ops of one phase of a worker in a step, in the order of the file."""

    step: int
    worker: int
    phase: int
    start: list[Any]
    end: list[Any]
    microbatch: list[Any]
    chunk: list[Any]


def read_rank_lists(paths: Sequence[Path], of_sizes: Sequence[Path], tell: Tell) -> Trace:
    """Read the files of all ranks; `of_sizes` are files beside them that say how many there are."""
    left_out: list[LeftOut] = []
    if not paths:
        unused = "sizes of a run without its ranks"
        return nothing(LeftOut(str(path), unused) for path in of_sizes)
    sizes = _sizes(of_sizes, tell, left_out)
    of_rank: dict[int, dict[str, Any]] = {}
    for path in paths:
        rank, data = rank_of(path), _object(path, tell, left_out)
        if data is None:
            continue
        if rank is None or rank in of_rank:
            why = "its name says no rank" if rank is None else f"another file is of rank {rank}"
            left_out.append(LeftOut(str(path), why))
            continue
        of_rank[rank] = data
    named = [rank for path in paths if (rank := rank_of(path)) is not None]
    workers = sizes.workers or max(named, default=-1) + 1
    left_out += missing_ranks(of_rank, workers)
    series = [
        entry
        for rank, data in of_rank.items()
        for entry in _series_of(rank, data, left_out)
        if rank < workers
    ]
    return _trace(series, sizes._replace(workers=workers), left_out)


def missing_ranks(found: Collection[int], workers: int) -> list[LeftOut]:
    """Name the ranks of a run of which there is no file."""
    missing = (rank for rank in range(workers) if rank not in found)
    some = [str(rank) for rank in itertools.islice(missing, MOST_LISTED)]
    count = workers - sum(rank < workers for rank in found)
    listed = ", ".join(some) + ", ..." * (count > len(some))
    return [LeftOut(f"rank {listed}", "there is no sound file of it", count)] if some else []


def rank_of(path: Path) -> int | None:
    """Return the rank that stands in the name of a file."""
    found = _RANK.findall(path.name.casefold())
    return int(found[-1]) if found else None


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
    """Read what can be read of a damaged object."""
    found = {}
    for begin in _STEP.finditer(text):
        with contextlib.suppress(ValueError, RecursionError):
            found[begin[1]] = json.JSONDecoder().raw_decode(text, begin.end())[0]
    return found


def _sizes(paths: Sequence[Path], tell: Tell, left_out: list[LeftOut]) -> RunSizes:
    """Read sizes by the names that Primus gives them."""
    data: dict[str, Any] = {}
    for path in paths:
        data |= _object(path, tell, left_out) or {}
    names = ("pp_size",), ("vp_size", "vpp_size"), ("num_mbs", "micro_batches")
    given = [next((data[k] for k in keys if k in data), None) for keys in names]
    odd = [value for value in given if value is not None and not _is_count(value)]
    if odd:
        left_out.append(LeftOut(str(paths[-1]), f"a size must be a whole number, got {odd[0]!r}"))
    return RunSizes(*(int(value or 0) if _is_count(value) else 0 for value in given))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < _MOST


def _series_of(rank: int, data: Mapping[str, Any], left_out: list[LeftOut]) -> Iterator[_Series]:
    """Yield the lists of a rank, those of a step that is damaged not."""
    for step, entry in data.items():
        if not (step.isascii() and step.isdigit() and len(step) < 10 and isinstance(entry, dict)):
            why = "it is no step with its lists"
            left_out.append(LeftOut(f"{step[:20]!r} of rank {rank}", why))
            continue
        found = []
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
            found.append(_Series(int(step), rank, code, start, end, microbatch, chunk))
        else:
            yield from found


def _trace(series: Sequence[_Series], sizes: RunSizes, left_out: list[LeftOut]) -> Trace:
    """Give every op its stage and microbatch."""
    sizes = sizes._replace(chunks=sizes.chunks or 1 + _most_chunk(series))
    parts = [_columns(entry, sizes) for entry in series if entry.start]
    if not parts:
        return nothing(left_out)
    columns: Columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    finite = np.isfinite(columns["start"]) & np.isfinite(columns["end"])
    told = (columns["chunk"] >= 0) & (columns["microbatch"] >= 0)
    passes, faults = sound(
        [
            (~finite, "its start or end is no finite number"),
            (columns["end"] < columns["start"], "it ends before it starts"),
            (~told, "its microbatch or chunk is no whole number, or it is one op too many"),
        ],
        "ops",
    )
    columns = {key: values[passes] for key, values in columns.items()}
    columns["stage"] = _stages(columns, sizes.workers)
    del columns["chunk"]
    if len(columns["microbatch"]) and any(entry.microbatch for entry in series):
        columns["microbatch"] -= columns["microbatch"].min()  # some count from 1
    columns["phase"], phases = with_split_backwards(columns, _PHASES)
    return Trace.of(columns, phases, [*left_out, *faults], known_workers=sizes.workers)


def _most_chunk(series: Sequence[_Series]) -> int:
    return max((c for entry in series for c in entry.chunk if _is_count(c)), default=0)


def _columns(entry: _Series, sizes: RunSizes) -> Columns:
    """Make columns of a list; where it does not say which op is which, by their turns."""
    size = len(entry.start)
    start, end = (
        np.array([v if is_number(v, least=-np.inf) else np.nan for v in values], np.float64)
        for values in (entry.start, entry.end)
    )
    if entry.microbatch and (entry.chunk or sizes.chunks == 1):
        told = np.array(
            [
                [v if type(v) is int and 0 <= v < MAX_COUNT else -1 for v in values]
                for values in (entry.microbatch, entry.chunk or [0] * size)
            ],
            np.int64,
        )
    else:
        told = _by_turn(entry.phase, size, sizes)
    number = {"step": entry.step, "replica": 0, "worker": entry.worker, "phase": entry.phase}
    return {
        **{key: np.full(size, value, np.int64) for key, value in number.items()},
        "microbatch": told[0],
        "chunk": told[1],
        "start": start * _MILLISECOND,
        "end": end * _MILLISECOND,
    }


def _by_turn(phase: int, size: int, sizes: RunSizes) -> Int[NumpyArray, "2 ops"]:
    """Microbatch and chunk of each turn, -1 beyond the last."""
    told = np.full((2, size), -1, np.int64)
    count, chunks = sizes.microbatches, min(sizes.chunks, size)
    if not size <= count * chunks < 2 * size:  # the sizes are not those of this run
        count = -(-size // chunks)
    turns = Turns.of(sizes.workers, count, chunks)
    ops = turns.forwards(0) if phase == 0 else turns.backwards(Phase.B, 0)
    some = min(size, len(ops))
    told[0, :some], told[1, :some] = ops[:some, 2], ops[:some, 1] // sizes.workers
    return told


def _stages(columns: Columns, workers: int) -> Int[NumpyArray, " ops"]:
    """Stage of each op: round the workers, or down and up where the last takes the turn first."""
    worker, chunk = columns["worker"], columns["chunk"]
    in_turn = (columns["phase"] == 0) & (chunk == 1)
    first, last = (
        columns["start"][in_turn & (worker == rank)].min(initial=np.inf)
        for rank in (0, workers - 1)
    )
    is_up = (chunk % 2 == 1) & bool(last < first)
    return chunk * workers + np.where(is_up, workers - 1 - worker, worker)
