"""Functions that join traces of single files into the trace of a run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.checks import MAX_LISTED, wrong
from pipejax.base.data_files import load_json
from pipejax.schedules.cells.ops import Phase
from pipejax.traces.record import INTEGERS, NONE, TIMES, LeftOut, Trace, collective_scope

Columns = dict[str, NumpyArray]  # {name of an array of `Trace`: (rows) values}


def number_groups(*keys: NumpyArray) -> Int[NumpyArray, " rows"]:
    """Return each row's group number; rows with equal keys share a group, in sorted order."""
    # keys 7 7 5 and 0 1 0: groups 1 2 0. Renumbering after each key keeps numbers small.
    group = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        _, code = np.unique(key, return_inverse=True)
        group = group * (int(code.max(initial=0)) + 1) + code
        _, group = np.unique(group, return_inverse=True)
    return group


def rank_in_group(group: Int[NumpyArray, " rows"], *keys: NumpyArray) -> Int[NumpyArray, " rows"]:
    """Return each row's position in its group, from 0, in the order of the keys."""
    rows = np.lexsort([*reversed(keys), group])
    # groups 0 0 0 1 1 of sorted rows begin at 0 and 3: ranks are 0 1 2 0 1
    group_begins = np.flatnonzero(np.diff(group[rows], prepend=-1))
    sizes = np.diff(group_begins, append=len(rows))
    rank = np.empty(len(rows), np.int64)
    rank[rows] = np.arange(len(rows)) - np.repeat(group_begins, sizes)
    return rank


def list_rows(rows: Sequence[int]) -> str:
    """Return the first row numbers of a list as the last part of the text of a reason."""
    more = ", ..." if len(rows) > MAX_LISTED else ""
    return f": {', '.join(map(str, rows[:MAX_LISTED]))}{more}" if len(rows) else ""


def rows_left_out(path: Path, why: str, rows: Sequence[int]) -> list[LeftOut]:
    """Return an entry of `left_out` for unused rows of a file, in a list; [] without rows."""
    return [LeftOut(f"rows of {path}", f"{why}{list_rows(rows)}", len(rows))] if rows else []


def passing_rows(
    checks: Sequence[tuple[Bool[NumpyArray, " rows"], str]],
    what: str,
    numbers: Int[NumpyArray, " rows"] | None = None,
) -> tuple[Bool[NumpyArray, " rows"], list[LeftOut]]:
    """Return for each row whether it passes all checks; list the others for `left_out`."""
    # A check is a pair: a mask of wrong rows, and the reason. `what` says what a row is ("ops");
    # `numbers` are the row numbers in the file, which entries then list.
    passes = np.ones(len(checks[0][0]), bool)
    left_out = []
    for is_wrong, why in checks:
        if count := int(np.sum(is_wrong & passes)):
            rows = [] if numbers is None else numbers[is_wrong & passes].astype(int).tolist()
            left_out.append(LeftOut(what, f"{why}{list_rows(rows)}", count))
        passes &= ~is_wrong
    return passes, left_out


def empty_trace(left_out: Iterable[LeftOut]) -> Trace:
    """Return a trace without slices, for files that cannot be read."""
    columns = {name: np.zeros(0) for name in (*INTEGERS, *TIMES)}
    return Trace.from_columns(columns, (), left_out)


def join_traces(traces: Sequence[Trace], source: str) -> Trace:
    """Join the traces of several files of one run; drop slices that are equal in every column."""
    traces = [trace for trace in traces if len(trace) or trace.left_out]
    phases = tuple(dict.fromkeys(t.phases[k] for t in traces for k in np.unique(t.phase).tolist()))
    columns = {
        name: np.concatenate([np.zeros(0), *(getattr(trace, name) for trace in traces)])
        for name in (*INTEGERS, *TIMES)
    }
    phase_codes = [np.zeros(0)]
    for trace in filter(len, traces):  # each trace numbers its own phases
        codes = np.array([phases.index(name) if name in phases else NONE for name in trace.phases])
        phase_codes.append(codes[trace.phase])
    columns["phase"] = np.concatenate(phase_codes)
    left_out = [entry for trace in traces for entry in trace.left_out]
    # in sorted rows, duplicates follow each other without a change in any column
    rows = np.lexsort([*columns.values()])
    is_new = np.zeros(len(rows), bool)
    is_new[:1] = True
    for values in columns.values():
        is_new[1:] |= np.diff(values[rows]) != 0
    if duplicates := int(np.sum(~is_new)):
        left_out.append(LeftOut("slices", "they are exact copies of others", duplicates))
    columns = {name: values[np.sort(rows[is_new])] for name, values in columns.items()}
    return Trace.from_columns(
        columns,
        phases,
        left_out,
        source=source,
        known_workers=max((trace.known_workers for trace in traces), default=0),
        inferred=tuple(dict.fromkeys(text for trace in traces for text in trace.inferred)),
        has_step_clocks=any(trace.has_step_clocks for trace in traces),
        budgets=tuple(budget for trace in traces for budget in trace.budgets),
        marks=tuple(mark for trace in traces for mark in trace.marks),
        ranks={place: rank for trace in traces for place, rank in trace.ranks.items()},
        launcher=max((trace.launcher for trace in traces), default=""),
    )


FILE_NAMES: Mapping[str, Any] = load_json(Path(__file__).with_name("names.json"))
# other names of phases stay unchanged
_NAME_PHASES = {name: phase for phase, names in FILE_NAMES["phases"].items() for name in names}


def phase_name(name: str) -> str:
    """Translate the name of a slice to a phase; return other names unchanged.

    Example:
      >>> phase_name("forward-compute"), phase_name("recv_backward"), phase_name("optimizer")
      ('F', 'RECV_B', 'optimizer')
    """
    words = name.casefold().replace("_", " ").split()
    return _NAME_PHASES.get("-".join(words), name.strip())


def phase_positions(
    names: Iterable[str], phase_names: Mapping[str, str]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return {name: index of its phase}, and the phases."""
    # `phase_names` is {name in the file: phase}, as the user states it
    meanings = {name: phase_names.get(name) or phase_name(name) for name in names}
    phases = tuple(dict.fromkeys(meanings.values()))
    return {name: phases.index(phase) for name, phase in meanings.items()}, phases


def check_phases(columns: Columns, phases: Sequence[str]) -> None:
    """Refuse a phase of unknown name if its slices look like those of ops."""
    # Slices of ops have a stage and a microbatch; those of a collective have not. In files without
    # stages, ops have all microbatches of the forwards. In files without microbatches, an unknown
    # phase with as many slices as the forwards is one of ops.
    count = np.bincount(columns["phase"], minlength=len(phases))
    is_forward = columns["phase"] == (phases.index("F") if "F" in phases else NONE)
    for code, name in enumerate(phases):
        if name == "R" and count[code] and not {"stage", "microbatch"} <= columns.keys():
            why = f"must state stage and microbatch of {count[code]} recomputations (R)"
            raise wrong("files", why)
        if name in Phase.__members__ or not count[code] or collective_scope(name):
            continue
        is_phase = columns["phase"] == code
        if {"stage", "microbatch"} <= columns.keys():
            is_op = bool((is_phase & (columns["stage"] >= 0) & (columns["microbatch"] >= 0)).any())
        elif "microbatch" in columns:
            numbers = (columns["microbatch"][rows] for rows in (is_forward, is_phase))
            is_op = is_forward.any() and set.issubset(*({*part.tolist()} for part in numbers))
        else:
            is_op = is_forward.any() and count[code] == is_forward.sum()
        if is_op:
            raise wrong(
                "files",
                f"must have phases by known names: {count[code]} slices of microbatches are of "
                f"phase {name!r}; say which it is: --columns F={name}, B={name}, I={name}, "
                f"W={name} or R={name} (recomputation)",
            )


def with_split_backwards(
    columns: Columns, phases: Sequence[str]
) -> tuple[Int[NumpyArray, " slices"], tuple[str, ...]]:
    """Replace each B whose microbatch has a W by I; return phase codes of slices, and phases."""
    # Most frameworks write B for the input gradient of a split backward.
    code = columns["phase"]
    if "W" not in phases or "B" not in phases:
        return code, (*phases,)
    phases = (*phases, *{"I"}.difference(phases))
    place = number_groups(*(columns[key] for key in ("step", "replica", "stage", "microbatch")))
    is_w, is_b = code == phases.index("W"), code == phases.index("B")
    is_split = is_b & np.isin(place, place[is_w])
    return np.where(is_split, phases.index("I"), code), phases
