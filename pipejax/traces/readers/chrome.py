"""Chrome traces: PyTorch's profiler around its pipelining, a file a rank, and our own exports.

What a slice of PyTorch's runtime holds: F, I and B contain the wait for their RECV, which is taken
off; a SEND is what its worker spends on posting it, its transfer has no slice; a RECV lasts until
somebody has waited for it. Where kernels were traced too, an op is what the kernels take that it
launched, on the stream that most of them run on; a RECV ends with those that it launched.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.traces.readers.event_rows import Cell, Rows, parse_label, read_rows
from pipejax.traces.readers.parts import Columns, check_phases, nothing
from pipejax.traces.readers.rank_lists import check_ranks
from pipejax.traces.readers.readings import RunSizes
from pipejax.traces.readers.sources import Tell
from pipejax.traces.record import NONE, OPS, LeftOut, Trace

OUTSIDE = -1  # of a slice whose step is not known
BY_MARKS = "they lie outside the marks ProfilerStep#"
BY_TIME = (
    "its steps are others by time than by count, and no marks ProfilerStep# say which they are"
)
Marks = Sequence[tuple[int, float, float]]  # number, start and end of steps that are marked


class RankSlices(NamedTuple):
    """Slices of a rank, ascending by start."""

    start: Float[NumpyArray, " slices"]  # of any unit
    is_op: Bool[NumpyArray, " slices"]  # whether it is an op
    is_first: Bool[NumpyArray, " slices"]  # whether it is the op that comes first on this rank
    is_before: Bool[NumpyArray, " slices"]  # comes before its op, as a RECV, so never last
    marks: Marks  # of steps, where the user marked them
    is_cut: bool  # whether its file ends early


def number_steps(ranks: Sequence[RankSlices]) -> tuple[list[Int[NumpyArray, " slices"]], str]:
    """Return the step of each slice of each rank, and why some are OUTSIDE of all steps."""
    # Marks count where they are there. Else a step begins where the first op of a rank comes again,
    # and the k-th steps of ranks that have as many as most are one. Another number of them comes
    # from a trace that begins late or ends early, or from an op that was doubled or lost. Then
    # steps are one whose first ops are nearest in time, and as clocks may be wrong, the count must
    # agree: the first step is the first of the others, or the last is the last; of a cut file it is
    # the first.
    if any(rank.marks for rank in ranks):
        return [_by_marks(rank) for rank in ranks], BY_MARKS
    by_rank = [_by_first_op(rank) for rank in ranks]
    often = Counter(len(begin) for _, begin in by_rank)
    usual_count = max(often, key=lambda count: (often[count], count))
    others = next(begin for _, begin in by_rank if len(begin) == usual_count)
    numbers = [
        np.arange(usual_count)
        if len(begin) == usual_count
        else _align_steps(begin, others, is_cut=rank.is_cut)
        for rank, (_, begin) in zip(ranks, by_rank, strict=True)
    ]
    earliest = min(int(rank_steps.min()) for rank_steps in numbers if rank_steps is not None)
    return [
        np.full(len(step), OUTSIDE) if rank_steps is None else (rank_steps - earliest)[step]
        for rank_steps, (step, _) in zip(numbers, by_rank, strict=True)
    ], BY_TIME


def _by_marks(rank: RankSlices) -> Int[NumpyArray, " slices"]:
    if not rank.marks:
        return np.full(len(rank.start), OUTSIDE)
    marks = sorted(rank.marks, key=lambda mark: mark[1])
    number, start, end = (np.array(values) for values in zip(*marks, strict=True))
    at = np.searchsorted(start, rank.start, "right") - 1
    return np.where((at >= 0) & (rank.start < end[at]), number[at], OUTSIDE)


def _by_first_op(
    rank: RankSlices,
) -> tuple[Int[NumpyArray, " slices"], Float[NumpyArray, " steps"]]:
    """Count the first op, and say when it began; NaN of a step begun before the trace."""
    # What is no op goes with the op before or after it.
    begun, ops = np.cumsum(rank.is_first), np.flatnonzero(rank.is_op)
    if not len(ops):
        return np.zeros(len(begun), np.int64), np.array([np.nan])
    after = np.searchsorted(ops, np.arange(len(begun)))
    goes_on = rank.is_before | (after == 0)
    step = np.where(goes_on, begun[ops[np.minimum(after, len(ops) - 1)]], begun)
    begin = np.append(np.nan, rank.start[rank.is_first])[int(step.min()) :]
    return step - int(step.min()), begin


def _align_steps(
    begin: Float[NumpyArray, " steps"], others: Float[NumpyArray, " others"], *, is_cut: bool
) -> Int[NumpyArray, " steps"] | None:
    """Number steps as those of others that begin nearest, on beyond them; None if unsure."""
    present, before = np.flatnonzero(~np.isnan(begin)), int(np.isnan(others).sum())
    others = others[before:]
    if not len(present) or not len(others):
        return None
    apart = float(np.median(np.diff(others))) if len(others) > 1 else np.inf
    inside = np.clip(begin[present], others[0], others[-1])
    nearest = np.interp(inside, others, np.arange(len(others))) + (begin[present] - inside) / apart
    number = before + np.rint(nearest).astype(np.int64)
    number = np.append(np.repeat(number[0] - 1, present[0]), number)
    agrees = number[0] == 0 or (number[-1] == before + len(others) - 1 and not is_cut)
    return number if agrees else None


_MICROSECOND, _NANOSECONDS = 1e-6, 1000  # seconds of one, and how many are in it
_BEFORE = ("UNSHARD", "RECV_F", "RECV_B")  # what comes before what it is for
_OF_OP = ("phase", "stage", "microbatch")
_RECEIVED = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}  # what an op waits for


def read_chrome(paths: Sequence[Path], sizes: RunSizes, tell: Tell) -> Trace:
    """Read the traces of all ranks; the clock is that of the machines, from the first slice on."""
    left_out: list[LeftOut] = []
    names: dict[str, int] = {}
    files = [(path, *read_rows(path, names, tell, left_out)) for path in paths]
    ranks = _merge_files(files, left_out)
    if not ranks:
        return nothing(left_out)
    cells = [parse_label(name) for name in names]
    merged = _on_kernels([rows for _, rows in sorted(ranks.items())], cells, left_out)
    is_ours = any(rows.is_ours for rows in ranks.values())
    world_size = max(rows.world for rows in ranks.values())
    inferred = check_ranks(ranks, world_size, 0 if is_ours else sizes.world, left_out)
    world = sizes.world or max(world_size, 1 + max(ranks))
    steps, why_outside = number_steps([_in_time(rows, cells) for rows in merged])
    for rows, step in zip(merged, steps, strict=True):
        if count := int(np.sum(step == OUTSIDE)):
            left_out.append(LeftOut(f"slices of rank {rows.rank}", why_outside, count))
    phases = tuple(dict.fromkeys(phase for cell in cells for phase, _, _ in cell))
    parts = [_expanded(rows, step, cells, phases) for rows, step in zip(merged, steps, strict=True)]
    places, workers = _places(parts, merged, world)
    for columns, place in zip(parts, places, strict=True):
        for name, number in zip(("replica", "worker"), place, strict=True):
            columns[name] = np.full(len(columns["start"]), number)
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    origin = columns["start"].min(initial=np.inf)
    for name in ("start", "end"):
        columns[name] = (columns[name] - origin) * _MICROSECOND
    is_op = np.isin(columns["phase"], [k for k, name in enumerate(phases) if name in OPS])
    columns["stage"] = np.where(
        is_op & (columns["stage"] == NONE), columns["worker"], columns["stage"]
    )
    check_phases(columns, phases)
    is_inside = columns["step"] != OUTSIDE
    columns = {key: values[is_inside] for key, values in columns.items()}
    return Trace.of(columns, phases, left_out, known_workers=workers, inferred=(*inferred,))


def _merge_files(
    files: Sequence[tuple[Path, list[Rows], int | None]], left_out: list[LeftOut]
) -> dict[int, Rows]:
    """Put the files of each rank together, on the clock of the first that has a zero."""
    zeros = [zero for _, rows, zero in files if rows and zero is not None]
    first = min(zeros, default=None)
    ranks: dict[int, Rows] = {}
    for path, file_rows, zero in files:
        if file_rows and first is not None and zero is None:
            why = "it has no baseTimeNanoseconds, so its clock is not that of the other files"
            left_out.append(LeftOut(str(path), why))
            continue
        for rows in file_rows:
            later = 0.0 if zero is None or first is None else (zero - first) / _NANOSECONDS
            moved = _later(rows, later)
            ranks[rows.rank] = _both(ranks[rows.rank], moved) if rows.rank in ranks else moved
    return ranks


def _later(rows: Rows, by: float) -> Rows:
    kernels = rows.kernels.copy()
    kernels[:3] += by
    return dataclasses.replace(
        rows,
        start=rows.start + by,
        end=rows.end + by,
        receives=rows.receives + by,
        kernels=kernels,
        marks=[(number, start + by, end + by) for number, start, end in rows.marks],
    )


def _both(first: Rows, second: Rows) -> Rows:
    start = np.concatenate([first.start, second.start])
    order = np.argsort(start, kind="stable")
    return Rows(
        first.rank,
        max(first.world, second.world),
        label=np.concatenate([first.label, second.label])[order],
        start=start[order],
        end=np.concatenate([first.end, second.end])[order],
        receives=np.concatenate([first.receives, second.receives], axis=1),
        kernels=np.concatenate([first.kernels, second.kernels], axis=1),
        marks=[*first.marks, *second.marks],
        is_cut=first.is_cut or second.is_cut,
        is_ours=first.is_ours or second.is_ours,
    )


def _on_kernels(
    ranks: Sequence[Rows], cells: Sequence[Cell], left_out: list[LeftOut]
) -> Sequence[Rows]:
    """Let ops last as their kernels do on all ranks; leave out ops whose kernels do not fit."""
    # If they fit on none, ops are timed by the host.
    timed = [_timed(rows, cells) for rows in ranks]
    for rows, on in zip(ranks, timed, strict=True):
        if on is None and any(timed):
            why = "some ops have no kernel, and other ranks are timed by theirs"
            left_out.append(LeftOut(f"slices of rank {rows.rank}", why, len(rows.start)))
        elif on is None and rows.kernels.size:
            why = "some ops have none: ops are timed by the host"
            left_out.append(LeftOut(f"kernels of rank {rows.rank}", why, rows.kernels.shape[1]))
    return [on for on in timed if on is not None] or ranks


def _timed(rows: Rows, cells: Sequence[Cell]) -> Rows | None:
    """Ops as long as their kernels, on the stream that takes the most of them; None without."""
    # Where no op of a phase and stage launches any, as I of the first stage, it takes no time
    # there.
    firsts = [cell[0][0] if cell else "" for cell in cells]
    are_ops = np.array([any(phase in OPS for phase, _, _ in cell) for cell in cells], bool)
    receive = np.array([phase.startswith("RECV_") for phase in firsts], bool)
    launch, start, end, stream = rows.kernels
    ops = np.flatnonzero(are_ops[rows.label])
    owner, inside = _launched_in(rows, ops, launch)
    if not inside.any():
        return None
    streams, place = np.unique(stream[inside], return_inverse=True)
    main = streams[np.bincount(place, (end - start)[inside]).argmax()]
    inside &= stream == main
    begin, finish = np.full(len(rows.start), np.inf), np.full(len(rows.start), -np.inf)
    np.minimum.at(begin, owner[inside], start[inside])
    np.maximum.at(finish, owner[inside], end[inside])
    kinds = [cells[label][0][:2] if cells[label] else () for label in rows.label[ops].tolist()]
    idle = np.isinf(begin[ops])
    if {*itertools.compress(kinds, idle)} & {*itertools.compress(kinds, ~idle)}:
        return None
    # what launches nothing is done when the host is, and the kernels before it are
    done = np.maximum.accumulate(np.where(idle, rows.end[ops], finish[ops]))
    begin[ops[idle]] = finish[ops[idle]] = done[idle]
    on = dataclasses.replace(rows, start=rows.start.copy(), end=rows.end.copy())
    on.start[ops], on.end[ops] = begin[ops], finish[ops]
    owner, inside = _launched_in(rows, np.flatnonzero(receive[rows.label]), launch)
    np.maximum.at(on.end, owner[inside], end[inside])
    order = np.argsort(on.start, kind="stable")
    return dataclasses.replace(on, label=on.label[order], start=on.start[order], end=on.end[order])


def _launched_in(
    rows: Rows, slices: Int[NumpyArray, " own"], launch: Float[NumpyArray, " kernels"]
) -> tuple[Int[NumpyArray, " kernels"], Bool[NumpyArray, " kernels"]]:
    """Find the slice of the host that launched each kernel, if any did."""
    # Whatever thread did: that of the slice waits meanwhile.
    if not len(slices):
        return np.zeros(len(launch), np.int64), np.zeros(len(launch), bool)
    at = np.searchsorted(rows.start[slices], launch, "right") - 1
    owner = slices[at]
    return owner, (at >= 0) & (launch <= rows.end[owner])


def _in_time(rows: Rows, cells: Sequence[Cell]) -> RankSlices:
    """Tell of each slice what steps are told by."""
    firsts = [cell[0] if cell else ("", 0, 0) for cell in cells]
    is_op = np.array([phase in OPS for phase, _, _ in firsts], bool)[rows.label]
    is_before = np.array([phase in _BEFORE for phase, _, _ in firsts], bool)[rows.label]
    # the first op of a rank is the forward of its first microbatch on its first stage, or, where
    # every op comes as often, that which came first
    forwards = [
        (microbatch, stage, label)
        for label in np.unique(rows.label).tolist()
        for phase, stage, microbatch in firsts[label : label + 1]
        if phase == "F"
    ]
    first = min(forwards)[-1] if forwards else NONE
    ran = rows.label[is_op]
    if len(np.unique(np.unique(ran, return_counts=True)[1])) == 1:
        first = ran[0]
    is_first = (rows.label == first) & (not rows.is_ours)  # one step, whatever comes first
    return RankSlices(rows.start, is_op, is_first, is_before, rows.marks, rows.is_cut)


def _expanded(
    rows: Rows, step: Int[NumpyArray, " slices"], cells: Sequence[Cell], phases: Sequence[str]
) -> Columns:
    """Make a slice of each op of each label, without its wait."""
    start, end = _without_waits(rows, step, cells)
    parts = [
        (place, phases.index(phase), stage, microbatch)
        for place, cell in enumerate(cells)
        for phase, stage, microbatch in cell
    ]
    label_ops = np.array(parts, np.int64).reshape(-1, 4)
    first = np.searchsorted(label_ops[:, 0], np.arange(len(cells) + 1))
    counts = np.diff(first)[rows.label]
    slices = np.repeat(np.arange(len(rows.label)), counts)
    turn = np.arange(len(slices)) - np.repeat(np.cumsum(counts) - counts, counts)
    named = label_ops[first[rows.label[slices]] + turn]
    return {
        "step": step[slices],
        "phase": named[:, 1],
        "stage": named[:, 2],
        "microbatch": named[:, 3],
        "start": start[slices],
        "end": end[slices],
    }


def _without_waits(
    rows: Rows, step: Int[NumpyArray, " slices"], cells: Sequence[Cell]
) -> tuple[Float[NumpyArray, " slices"], Float[NumpyArray, " slices"]]:
    """Start and end of each slice: of a RECV until it is there, of an op from then on."""
    labels = {part: place for place, cell in enumerate(cells) for part in cell}
    wait_for = np.full((len(cells), 2), NONE)  # labels of the RECVs that an op waits for
    for place, cell in enumerate(cells):
        for turn, (phase, stage, microbatch) in enumerate(cell):
            received = _RECEIVED.get(phase, ""), stage, microbatch
            wait_for[place, turn] = labels.get(received, NONE)
    firsts = [cell[0] if cell else ("", 0, 0) for cell in cells]
    is_receive = np.array([phase.startswith("RECV_") for phase, _, _ in firsts], bool)
    is_holder = is_receive | np.array([stage == NONE for _, stage, _ in firsts], bool)
    start, end, wait = rows.start, rows.end.copy(), np.full(len(rows.start), -np.inf)
    holders = np.flatnonzero(is_holder[rows.label])
    holders = holders[np.argsort(start[holders], kind="stable")]
    begun, arrived = rows.receives
    at = np.searchsorted(start[holders], begun, "right") - 1
    inside = (at >= 0) & (begun <= rows.end[holders][at]) if len(holders) else at >= 0
    owner, arrived = holders[at[inside]], arrived[inside]
    owner_receives = is_receive[rows.label[owner]]
    np.maximum.at(end, owner[owner_receives], arrived[owner_receives])
    np.maximum.at(wait, owner[~owner_receives], arrived[~owner_receives])
    receives = np.flatnonzero(is_receive[rows.label])
    key = (step - OUTSIDE) * len(cells)
    keys, group = np.unique((key + rows.label)[receives], return_inverse=True)
    there = np.full(len(keys), -np.inf)
    np.maximum.at(there, group, end[receives])
    for label in wait_for[rows.label].T:
        at = np.searchsorted(keys, key + label)
        is_found = (label != NONE) & (at < len(keys))
        is_found[is_found] = keys[at[is_found]] == (key + label)[is_found]
        wait[is_found] = np.maximum(wait[is_found], there[at[is_found]])
    return np.where((wait > start) & (wait <= end), wait, start), end


def _places(
    parts: Sequence[Columns], rows: Sequence[Rows], world: int
) -> tuple[list[tuple[int, int]], int]:
    """Replica and worker of each rank, told by its ops; and how many workers there are."""
    # A pipeline runs every op once: an op that so many ranks ran has so many replicas. Ranks are
    # dealt to replicas in turn, or worker by worker.
    ranks = [rank_rows.rank for rank_rows in rows]
    ops = [
        {*zip(*(part[name][part["stage"] >= 0].tolist() for name in _OF_OP), strict=True)}
        for part in parts
    ]
    count = Counter(op for rank_ops in ops for op in rank_ops if op[2] >= 0)
    replicas = max(count.values(), default=1)
    if replicas == 1 or world % replicas or any(rank_rows.is_ours for rank_rows in rows):
        return [(0, rank) for rank in ranks], world
    workers = world // replicas
    deals = [
        [divmod(rank, replicas)[::-1] for rank in ranks],
        [divmod(rank, workers) for rank in ranks],
    ]
    can_be = []
    for deal in deals[: 1 + (deals[0] != deals[1])]:
        ran = Counter(
            (r, op) for (r, _), rank_ops in zip(deal, ops, strict=True) for op in rank_ops
        )
        can_be += [deal] * (max(ran.values()) == 1)
    if len(can_be) != 1:
        why = f"{replicas} replicas run the same ops, and {len(can_be)} deals of ranks can be"
        raise wrong("files", f"must tell replicas apart, by a folder for each: {why}")
    return can_be[0], workers
