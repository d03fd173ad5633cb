"""Slices of labelled ops by rank, with their times, steps, replicas and workers.

In PyTorch's runtime, F, I and B contain the wait for their RECV, which we subtract. A SEND lasts
as long as its posting; a RECV until an op has waited for it, or until its kernels end. If kernels
were traced, the time of an op is that of its kernels on the busiest stream.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.schedules.registry import REGISTRY
from pipejax.traces.readers.device import Key, Work, match_clocks, split_windows
from pipejax.traces.readers.finish import Places, finish_trace, place_ranks
from pipejax.traces.readers.labels import ONLY_STAGE, Cells, LabelOp
from pipejax.traces.readers.parts import Columns, empty_trace, passing_rows
from pipejax.traces.readers.rank_lists import check_ranks
from pipejax.traces.readers.sources import Request
from pipejax.traces.record import NONE, OPS, LeftOut, StepBudget, Trace

OUTSIDE = -1  # step of a slice whose step is unknown
_NO_TIMES, _NO_WORK = np.zeros((2, 0)), np.zeros((6, 0))
_IN_2001 = 1e15  # [us] since 1970: a clock with such times began in no recording
BY_MARKS = "they lie outside the marks of steps"
BY_TIME = "its steps are others by time than by count, and no marks of steps say which they are"


Slice = tuple[float, float, int]  # start, end and number of the label
Steps = Int[NumpyArray, " slices"]
PerSlice = Float[NumpyArray, " slices"]  # times [us]


class Rows(NamedTuple):
    """Slices of one rank in ascending order of start; times are in microseconds."""

    rank: int  # rank in the run; the worker if the file is an export of ours
    label: Int[NumpyArray, " slices"]  # number of the label
    start: PerSlice
    end: PerSlice
    receives: Float[NumpyArray, "2 receives"] = _NO_TIMES  # start and arrival
    work: Work = _NO_WORK
    marks: Sequence[tuple[int, float, float]] = ()  # number, start and end of every marked step
    world: int = 0  # number of ranks of the run, if the file states it
    is_cut: bool = False  # whether its file ends early
    is_ours: bool = False  # an export of ours: a worker of one pipeline in one step
    syncs: Float[NumpyArray, "2 syncs"] = _NO_TIMES  # start, end of calls that wait for a device
    has_all_work: bool = False  # whether the file has all work of the device, and such calls
    # if a label states them: position on all axes except the pipeline's, worker, workers
    place: tuple[tuple[int, ...], int, int] | None = None
    step: Steps | None = None  # of each slice, once it is known

    @classmethod
    def from_slices(cls, rank: int, slices: Iterable[Slice]) -> "Rows":
        """Return the rows of slices, which may come in any order."""
        start, end, label = np.array(sorted(slices), np.float64).reshape(-1, 3).T
        return cls(rank, label.astype(np.int64), start, end)

    def take(self, index: NumpyArray) -> "Rows":
        """Return the rows of selected slices."""
        step = None if self.step is None else self.step[index]
        fields = {name: getattr(self, name)[index] for name in ("label", "start", "end")}
        return self._replace(**fields, step=step)


class RankFile(NamedTuple):
    """A file with the slices of each of its ranks."""

    path: Path
    ranks: list[Rows]
    zero: int | None  # zero of the file's clock [ns]; None if the file does not state it


def drop_outer_ranges(rows: Rows, cells: Cells, request: Request) -> Rows:
    """Drop ranges that contain other ranges of their phase, such as nested function calls."""
    phases = [cell[0].phase if cell else "" for cell in cells]
    numbers = {name: k for k, name in enumerate(dict.fromkeys(phases))} | {"": NONE}
    phase = np.array([numbers[name] for name in phases], np.int64)[rows.label]
    # by phase and start, longest first: a range is an outer one if the next ends within it
    order = np.lexsort([-rows.end, rows.start, phase])
    is_outer = np.zeros(len(order), bool)
    is_outer[order[:-1]] = (np.diff(phase[order]) == 0) & (np.diff(rows.end[order]) <= 0)
    is_outer &= phase != NONE
    checks = [(is_outer, "others of their phase lie inside")]
    request.left_out.extend(passing_rows(checks, f"ranges of rank {rows.rank}")[1])
    return rows.take(~is_outer)


def _with_steps(
    ranks: Sequence[Rows], cells: Cells, request: Request, notes: list[str], *, has_clock: bool
) -> list[Rows]:
    """Return the slices of all ranks with their steps; list those outside all steps."""
    # If steps are marked, the marks are used. Else a step begins at each first op of a rank. If
    # ranks have a common clock, marks at the same time belong to one step, and a note says so.
    if any(rank.marks for rank in ranks):
        if has_clock:
            ranks = _with_common_numbers(ranks, notes)
        why, begins = BY_MARKS, [np.array([mark[1] for mark in rank.marks]) for rank in ranks]
        numbers = _match_steps(ranks, begins)
        ranks = [_with_marks(rank, steps) for rank, steps in zip(ranks, numbers, strict=True)]
    else:
        counts, first_ops = zip(*(_steps_by_first_op(rank, cells) for rank in ranks), strict=True)
        numbers, why = _match_steps(ranks, first_ops), BY_TIME
        numbered = zip(ranks, numbers, counts, strict=True)
        ranks = [rank._replace(step=steps[count]) for rank, steps, count in numbered]
    for rank in ranks:
        is_outside = np.asarray(rank.step) == OUTSIDE
        request.left_out.extend(passing_rows([(is_outside, why)], f"slices of rank {rank.rank}")[1])
    return [*ranks]


def _match_steps(ranks: Sequence[Rows], begins: Sequence[NumpyArray]) -> list[NumpyArray]:
    """Number the steps of all ranks by their starts; OUTSIDE if a rank's numbers are uncertain."""
    # The k-th steps of all ranks with the usual number of steps are one step. The steps of other
    # ranks, whose trace begins late or ends early, or repeats or lacks an op, are matched in time.
    frequency = Counter(len(begin) for begin in begins if len(begin))
    usual_count = max(frequency, key=lambda count: (frequency[count], count))
    usual_begin = next(begin for begin in begins if len(begin) == usual_count)
    numbers = [
        np.arange(usual_count)
        if len(begin) == usual_count
        else _align_steps(begin, usual_begin, is_cut=rank.is_cut)
        for rank, begin in zip(ranks, begins, strict=True)
    ]
    earliest = min(int(steps.min()) for steps in numbers if steps is not None)
    return [
        np.full(len(begin), OUTSIDE) if steps is None else steps - earliest
        for steps, begin in zip(numbers, begins, strict=True)
    ]


def _with_common_numbers(ranks: Sequence[Rows], notes: list[str]) -> list[Rows]:
    """Renumber the marks of ranks that use other numbers than the first rank at the same time."""
    first = next(rank for rank in ranks if rank.marks)
    renumbered = []
    for rank in ranks:
        overlaps = [
            (number, other, other_begin < (begin + end) / 2 < other_end)
            for number, begin, end in rank.marks
            for other, other_begin, other_end in first.marks
            if begin < other_end and other_begin < end
        ]
        shifts = {number - other for number, other, is_centred in overlaps if is_centred}
        if len(shifts) == 1 and all(number != other for number, other, _ in overlaps):
            (shift,) = shifts
            notes.append(
                f"steps: rank {rank.rank} counts {shift:+} from rank {first.rank} at the same "
                f"times; step numbers are those of rank {first.rank}"
            )
            marks = [(number - shift, begin, end) for number, begin, end in rank.marks]
            rank = rank._replace(marks=marks)
        renumbered.append(rank)
    return renumbered


def _with_marks(rank: Rows, steps: Int[NumpyArray, " marks"]) -> Rows:
    """Return slices with the step of the mark around their start; `steps` if it has no number."""
    marks = [
        (step if number == NONE else number, begin, end)
        for step, (number, begin, end) in zip(steps.tolist(), rank.marks, strict=True)
    ]
    slice_steps = np.full(len(rank.start), OUTSIDE)
    for step, begin, end in marks:
        slice_steps[slice(*np.searchsorted(rank.start, (begin, end)))] = step
    return rank._replace(marks=[mark for mark in marks if mark[0] != OUTSIDE], step=slice_steps)


def _steps_by_first_op(rows: Rows, cells: Cells) -> tuple[Steps, Float[NumpyArray, " steps"]]:
    """Start a step at each run of a rank's first op; return each slice's step, and step starts."""
    # A step that began before the trace has the start NaN. A slice that is no op belongs to the
    # step of the op before it; a receive or an unshard, to that of the op after it.
    first_ops = [cell[0] if cell else LabelOp("", 0, 0) for cell in cells]
    is_op = np.array([op.phase in OPS for op in first_ops], bool)[rows.label]
    is_before = np.array([op.phase in _BEFORE for op in first_ops], bool)[rows.label]
    # a step begins with the forward of the first microbatch on the first stage, or, if all ops
    # are equally frequent, with the op that ran first
    label_ops = [(first_ops[label], label) for label in np.unique(rows.label).tolist()]
    forwards = [
        (op.microbatch, op.stage, op.chunk, label) for op, label in label_ops if op.phase == "F"
    ]
    first_label = min(forwards)[-1] if forwards else NONE
    op_labels = rows.label[is_op]
    _, frequencies = np.unique(op_labels, return_counts=True)
    if len(np.unique(frequencies)) == 1:
        first_label = op_labels[0]
    is_first = (rows.label == first_label) & (not rows.is_ours)  # our exports have one step
    count, ops = np.cumsum(is_first), np.flatnonzero(is_op)
    if not len(ops):
        return np.zeros(len(count), np.int64), np.array([np.nan])
    next_op = np.searchsorted(ops, np.arange(len(count)))
    follows = is_before | (next_op == 0)
    step = np.where(follows, count[ops[np.minimum(next_op, len(ops) - 1)]], count)
    begin = np.append(np.nan, rows.start[is_first])[int(step.min()) :]
    return step - int(step.min()), begin


def _align_steps(
    begin: Float[NumpyArray, " steps"], usual_begin: Float[NumpyArray, " others"], *, is_cut: bool
) -> Int[NumpyArray, " steps"] | None:
    """Number a rank's steps like the nearest steps in time of a usual rank; None if uncertain."""
    # Starts are NaN for a step that began before the trace. A usual rank begins its steps at 0 10
    # 20: a rank that begins them at 11 21 has steps 1 and 2. As clocks may be wrong, either the
    # first steps of both must agree or, unless the rank's file is cut, the last ones.
    present, offset = np.flatnonzero(~np.isnan(begin)), int(np.isnan(usual_begin).sum())
    usual_begin = usual_begin[offset:]
    if not len(present) or not len(usual_begin):
        return None
    period = float(np.median(np.diff(usual_begin))) if len(usual_begin) > 1 else np.inf
    # interpolate inside the usual steps, and continue with the period outside
    inside = np.clip(begin[present], usual_begin[0], usual_begin[-1])
    position = np.interp(inside, usual_begin, np.arange(len(usual_begin)))
    position += (begin[present] - inside) / period
    number = offset + np.rint(position).astype(np.int64)
    number = np.append(np.repeat(number[0] - 1, present[0]), number)
    agrees = number[0] == 0 or (number[-1] == offset + len(usual_begin) - 1 and not is_cut)
    return number if agrees else None


_MICROSECOND = 1e-6  # [s]
_NANOSECONDS = 1000  # in a microsecond
_BEFORE = ("UNSHARD", "RECV_F", "RECV_B")  # phases that stand before their op
_RECEIVE_PHASES = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}  # {op: receive it waits for}


_WORLD = "--world {world}"
_REPLICAS_NOTE = (
    "replicas are ranks that run the same ops; those of tensor or context parallelism do so, too: "
    "of these, give one file per stage"
)
_REPLICAS_HINT = f"; if these run several replicas, {_WORLD} leaves out those of the missing"


def _are_pipeline(ranks: Mapping[int, Rows], cells: Cells, stride: int, world: int) -> bool:
    """Return whether the recorded ranks 0, stride, 2 stride, .. are the workers of one pipeline."""
    # They must be all such ranks of the world (size 0 if unknown), the labels name forwards of
    # all stages, and no two ranks run the same forward.
    stages = {op.stage for cell in cells for op in cell if op.phase == "F"}
    is_whole = [*range(0, world or stride * len(ranks), stride)] == sorted(ranks)
    return is_whole and stages == {*range(len(stages))} and not _have_replicas(ranks, cells)


def join_ranks(
    files: Sequence[RankFile],
    cells: Cells,
    request: Request,
    keys: Sequence[Key] = (),
    inferred: Sequence[str] = (),
) -> Trace:
    """Join the slices of all ranks into a trace, with times counted from the first slice."""
    # `cells` are the ops of each label by its number, `keys` the collectives by number, for the
    # clocks of files. `inferred` are notes on numbers that no file states.
    ranks, notes, has_clock = _merge_files(files, keys, request)
    if not ranks:
        return empty_trace(request.left_out)
    # if labels lack numbers of ops, they are inferred
    forwards = (op for cell in cells for op in cell if op.phase == "F")
    is_numbered = all(op.microbatch >= 0 and {op.stage, op.chunk} != {NONE} for op in forwards)
    # ranks 0, 4, 8, .. of one pipeline, with tensor parallelism of 4: a stride of 4
    stride, file_world = math.gcd(*ranks) or 1, max(rows.world for rows in ranks.values())
    has_replicas = _have_replicas(ranks, cells)
    hint = _REPLICAS_HINT if has_replicas else ""
    if is_numbered:
        stride = stride if _are_pipeline(ranks, cells, stride, file_world) else 1
        file_world //= stride
    elif stride > 1 and file_world and not request.sizes.world:
        stride, hint = 1, f"; if one in {stride} is a worker of one pipeline, {_WORLD} says so"
    if stride > 1:
        notes.append(f"ranks: only every {stride}th has a file, and is a worker of one pipeline")
    by_rank = [rows._replace(rank=rank // stride) for rank, rows in sorted(ranks.items())]
    is_ours = any(rows.is_ours for rows in by_rank)
    user_world = request.sizes.world // stride
    numbers = [rows.rank for rows in by_rank]
    notes += check_ranks(numbers, file_world, 0 if is_ours else user_world, request, hint)
    world = user_world or max(file_world, 1 + numbers[-1])
    has_steps = is_numbered or any(rows.marks for rows in by_rank)
    if has_steps:
        by_rank = _with_steps(by_rank, cells, request, notes, has_clock=has_clock)
        # one step without marks may be several, over which labels count their microbatches
        has_steps = is_ours or any(len(rows.marks) or np.any(rows.step) for rows in by_rank)
    merged = _time_by_kernels(by_rank, cells, request)
    phases = tuple(dict.fromkeys(op.phase for cell in cells for op in cell))
    parts = [_op_columns(rows, cells, phases) for rows in merged]
    if not has_steps:
        for columns in parts:
            del columns["step"]
    origin = min(columns["start"].min(initial=np.inf) for columns in parts)
    for columns, name in itertools.product(parts, ("start", "end")):
        columns[name] = (columns[name] - origin) * _MICROSECOND

    def build(places: Places, num_workers: int) -> Trace:
        """Make the trace for one assignment of ranks to replicas and workers."""
        columns = _place_columns(parts, phases, places, num_workers, is_numbered=is_numbered)
        sized = request._replace(sizes=request.sizes._replace(workers=num_workers))
        trace = finish_trace(columns, phases, sized, (*inferred, *notes))
        trace = trace.with_marks(_marks_and_spans(trace, merged))
        budgets = _budget_steps(trace, merged, places, origin)
        ranks = {place: rows.rank * stride for place, rows in zip(places, merged, strict=True)}
        return dataclasses.replace(trace, budgets=(*budgets,), ranks=ranks)

    if is_ours:
        return build([(0, rank) for rank in numbers], world)
    stated_places = [rows.place for rows in merged if rows.place]
    if len(stated_places) == len(merged):
        # positions in the mesh without the axis of workers, numbered as replicas
        positions = sorted({position for position, _, _ in stated_places})
        places = [(positions.index(position), worker) for position, worker, _ in stated_places]
        return build(places, num_workers=stated_places[0][2])
    if has_replicas and not request.sizes.replicas:
        notes.append(_REPLICAS_NOTE)
    return place_ranks([rows.rank for rows in merged], parts, world, request.sizes.replicas, build)


def _marks_and_spans(trace: Trace, ranks: Sequence[Rows]) -> Iterator[tuple[int, float, float]]:
    """Yield (number, time of the mark, time of the ops) of each marked step of each rank."""
    ops = trace.only(trace.has_phase(OPS))  # sorted by step
    steps, first = np.unique(ops.step, return_index=True)
    seconds = np.maximum.reduceat(ops.end, first) - np.minimum.reduceat(ops.start, first)
    spans = dict(zip(steps.tolist(), seconds.tolist(), strict=True))
    for step, begin, end in (mark for rows in ranks for mark in rows.marks):
        if step in spans:
            yield step, (end - begin) * _MICROSECOND, spans[step]


def _have_replicas(ranks: Mapping[int, Rows], cells: Cells) -> bool:
    counts = Counter(label for rows in ranks.values() for label in np.unique(rows.label).tolist())
    shared = [cells[label] for label, count in counts.items() if count > 1]
    return any(cell and cell[0].phase == "F" and cell[0].stage >= 0 for cell in shared)


def _place_columns(
    parts: list[Columns], phases: Sequence[str], places: Places, workers: int, *, is_numbered: bool
) -> Columns:
    """Join the columns of ranks, add replica and worker, and drop columns that no label states."""
    # `is_numbered` says whether labels number all ops but the weight gradients of DualPipeV.
    rank_columns = []
    for part, (replica, worker) in zip(parts, places, strict=True):
        size = len(part["start"])
        columns = {name: values.copy() for name, values in part.items()}
        columns |= {"replica": np.full(size, replica), "worker": np.full(size, worker)}
        if is_numbered:
            _number_weights(columns, phases, worker, workers)
        rank_columns.append(columns)
    columns = {key: np.concatenate([part[key] for part in rank_columns]) for key in columns}
    is_op = np.isin(columns["phase"], [k for k, name in enumerate(phases) if name in OPS])
    is_on_only_stage = is_op & (columns["stage"] == ONLY_STAGE)
    columns["stage"] = np.where(is_on_only_stage, columns["worker"], columns["stage"])
    if "step" in columns:
        is_inside = columns["step"] != OUTSIDE
        columns = {key: values[is_inside] for key, values in columns.items()}
        is_op = is_op[is_inside]
    for name in ("stage", "microbatch", "chunk"):
        if (columns[name][is_op] == NONE).any():
            del columns[name]
    if "stage" in columns:
        columns.pop("chunk", None)
    return columns


def _merge_files(
    files: Sequence[RankFile], keys: Sequence[Key], request: Request
) -> tuple[dict[int, Rows], list[str], bool]:
    """Join the slices of each rank on a common clock."""
    # Return {rank: slices}, notes on clocks, and whether files show that their clock is common.
    zeros = [file.zero for file in files if file.ranks and file.zero is not None]
    shifted_files = []
    for path, file_rows, zero in files:
        if file_rows and zeros and zero is None:
            why = "it does not state when its clock began, as other files do"
            request.left_out.append(LeftOut(str(path), why))
        elif file_rows:
            delay = 0.0 if zero is None else (zero - min(zeros)) / _NANOSECONDS
            sound_rows = [_drop_damaged_work(rows, request) for rows in file_rows]
            shifted_files.append((path, [_delay_rows(rows, delay) for rows in sound_rows]))
    matches = match_clocks([[rows.work for rows in ranks] for _, ranks in shifted_files], keys)
    notes: list[str] = []
    if len(shifted_files) > 1 and not zeros and None in matches:
        notes.append("clocks: all files count as one clock, as no file states when its clock began")
    if keys and None in matches:
        pairs = zip(shifted_files, matches, strict=True)
        names = ", ".join(path.name for (path, _), match in pairs if match is None)
        why = "as recorded, as no collective matches them; times of messages may be off by the same"
        notes.append(f"clocks of {names}: {why}")
    ranks: dict[int, Rows] = {}
    sources: dict[int, list[tuple[Path, Rows]]] = {}
    for (path, file_rows), match in zip(shifted_files, matches, strict=True):
        lead = 0.0 if match is None else match.lead
        if match is not None and match.num_collectives:
            lag = f"{abs(lead) / 1e3:.3f} ms {'ahead' if lead > 0 else 'behind'}"
            spread = f"{match.spread / 1e3:.3f} ms"
            why = f"{match.num_collectives} collectives end together within {spread}"
            notes.append(f"clock of {path.name}: {lag}, corrected: {why}")
        for rows in file_rows:
            rows = _delay_rows(rows, -lead)
            for source, other in sources.get(rows.rank, []):
                if all(map(np.array_equal, rows[1:4], other[1:4])):  # label, start, end
                    request.left_out.append(LeftOut(str(path), f"a copy of {source.name}"))
                    break
                if max(rows.start[0], other.start[0]) < min(rows.end.max(), other.end.max()):
                    why = f"{source} and {path} hold rank {rows.rank} at the same time"
                    raise wrong("files", f"must be of one run: {why}; give the files of one job")
            else:
                joined = ranks.get(rows.rank)
                ranks[rows.rank] = rows if joined is None else _join_rows(joined, rows)
                sources.setdefault(rows.rank, []).append((path, rows))
    since_1970 = min((rows.start[0] for rows in ranks.values()), default=0.0) > _IN_2001
    has_clock = len(shifted_files) == 1 or bool(zeros) or None not in matches or since_1970
    return ranks, notes, bool(has_clock)


def _drop_damaged_work(rows: Rows, request: Request) -> Rows:
    _, start, end, *_ = rows.work
    why = "they have no duration of at least 0, so the times of their ops lack them"
    is_sound = end >= start  # false for NaN
    request.left_out.extend(passing_rows([(~is_sound, why)], f"kernels of rank {rows.rank}")[1])
    return rows._replace(work=rows.work[:, is_sound])


def _delay_rows(rows: Rows, delay: float) -> Rows:
    """Return the slices of a rank with all their times later by `delay` [us]."""
    return rows._replace(
        start=rows.start + delay,
        end=rows.end + delay,
        receives=rows.receives + delay,
        work=rows.work + np.array([delay, delay, delay, 0.0, 0.0, 0.0])[:, None],
        syncs=rows.syncs + delay,
        marks=[(number, start + delay, end + delay) for number, start, end in rows.marks],
    )


def _join_rows(first: Rows, second: Rows) -> Rows:
    """Join the slices of a rank from two files."""
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(second, name)], axis=-1)
        for name in ("label", "start", "end", "receives", "work", "syncs")
    }
    joined = first._replace(
        **arrays,
        world=max(first.world, second.world),
        marks=sorted([*first.marks, *second.marks], key=lambda mark: mark[1]),
        is_cut=first.is_cut or second.is_cut,
        is_ours=first.is_ours or second.is_ours,
    )
    return joined.take(np.argsort(joined.start, kind="stable"))


def _number_weights(columns: Columns, phases: Sequence[str], worker: int, workers: int) -> None:
    """Number the weight gradients of a worker, which must run DualPipeV, in place."""
    names = np.array([*phases])[columns["phase"]]
    is_weight = (names == "W") & (columns["microbatch"] == NONE)
    if not is_weight.any():
        return
    size = int(columns["microbatch"].max()) + 1
    table = REGISTRY["dualpipe-v"].function(num_workers=workers, num_microbatches=size)
    cells = itertools.chain.from_iterable([*table.rows()][worker])
    ops = [(op.phase.name, op.microbatch, op.stage // workers) for op in cells]
    # labels name I as B, and W without numbers
    expected = [
        ("W", NONE, NONE) if name == "W" else (name.replace("I", "B"), microbatch, chunk)
        for name, microbatch, chunk in ops
    ]
    for step in np.unique(columns["step"][is_weight]):
        rows = np.flatnonzero(columns["step"] == step)
        rows = rows[np.argsort(columns["start"][rows], kind="stable")]
        recorded = (x[rows].tolist() for x in (names, columns["microbatch"], columns["chunk"]))
        if [*zip(*recorded, strict=True)] != expected:
            why = f"worker {worker} runs step {step} in another order than DualPipeV"
            raise wrong("files", f"must state the microbatch of each weight gradient: {why}")
        columns["microbatch"][rows], columns["chunk"][rows] = np.array([op[1:] for op in ops]).T


def _budget_steps(
    trace: Trace, ranks: Sequence[Rows], places: Places, origin: float
) -> Iterator[StepBudget]:
    """Yield the `StepBudget` (times by cause) of each rank and step."""
    # A step lasts as its mark does, or from its first op to its last. `places` are the replica and
    # worker of each rank; `origin` is the time 0 of the trace on the clock of the files [us].
    is_op = trace.has_phase(OPS)

    def span(ops: Bool[NumpyArray, " slices"]) -> tuple[float, float]:
        """Return the first start and last end of ops by the device's clock [us]."""
        begin, end = trace.start[ops].min(initial=np.inf), trace.end[ops].max(initial=-np.inf)
        return begin / _MICROSECOND + origin, end / _MICROSECOND + origin

    for rows, (replica, worker) in zip(ranks, places, strict=True):
        if not rows.has_all_work:
            continue
        windows = {number: tuple(times) for number, *times in rows.marks}
        on_replica = is_op & (trace.replica == replica)
        if not windows:
            for step in np.unique(trace.step[on_replica]).tolist():
                windows[step] = span(on_replica & (trace.step == step))
        on_worker = on_replica & (trace.worker == worker)
        op_windows = [span(on_worker & (trace.step == step)) for step in windows]
        times = np.array([*windows.values(), *op_windows]).reshape(-1, 2).T
        parts = split_windows(rows.work, rows.syncs, *np.nan_to_num(times)) * _MICROSECOND
        steps, ops = np.split(parts.T, 2)
        has_waits = steps[:, [1, 2]].sum(axis=1) > 0  # columns 1, 2: exposed, blocking
        starved = np.where(has_waits, ops[:, 3], 0.0)  # column 3: starved
        for step, row in zip(windows, np.column_stack([steps, starved]).tolist(), strict=True):
            yield StepBudget(step, replica, worker, *row)


def _time_by_kernels(ranks: Sequence[Rows], cells: Cells, request: Request) -> Sequence[Rows]:
    """Return the slices of all ranks; those of ranks with kernels have times of their kernels."""
    kernel_rows = [_kernel_times(rows, cells, request) for rows in ranks]
    for rows, timed in zip(ranks, kernel_rows, strict=True):
        if timed is not None:
            launch, start, _, _, is_exchange, _ = rows.work
            is_lost = np.isinf(launch) & (is_exchange == 0) & (start >= rows.start.min())
            why = "no recorded call launched them, so the times of ops lack them"
            _, lost = passing_rows([(is_lost, why)], f"kernels of rank {rows.rank}")
            request.left_out.extend(lost)
        if timed is None and any(kernel_rows):
            why = "some ops have no kernel, and other ranks are timed by theirs"
            request.left_out.append(LeftOut(f"slices of rank {rows.rank}", why, len(rows.start)))
        elif timed is None and rows.work.size:
            why = "some ops have none: ops are timed by the host"
            count = rows.work.shape[1]
            request.left_out.append(LeftOut(f"kernels of rank {rows.rank}", why, count))
    return [timed for timed in kernel_rows if timed is not None] or ranks


def _kernel_times(rows: Rows, cells: Cells, request: Request) -> Rows | None:
    """Return a rank's slices with the times of their kernels; None if ops lack kernels."""
    # An op takes the time of its kernels on the busiest stream. If no op of a phase and stage has
    # kernels, as I of the first stage, these ops take no time. Ops that lack kernels after the last
    # launch are dropped. The result is None if more ops lack kernels that ops of their kind have.
    has_op = np.array([any(op.phase in OPS for op in cell) for cell in cells], bool)
    ops = np.flatnonzero(has_op[rows.label])
    begin, finish, last_launch = _op_kernels(rows, ops)
    lacks_kernel = np.isinf(begin[ops])
    if lacks_kernel.all():
        return None
    first_ops = [cells[label][0] for label in rows.label[ops].tolist()]
    kinds = [(op.phase, op.stage) for op in first_ops]
    if {*itertools.compress(kinds, lacks_kernel)} & {*itertools.compress(kinds, ~lacks_kernel)}:
        # ranges at the end of a recording lack kernels: drop all slices from the first such op on
        begins = rows.start[ops[lacks_kernel]]
        late = begins[begins > last_launch]
        if not len(late):
            return None
        stays = rows.start < late.min()
        why = "the capture ended before their kernels"
        request.left_out.append(LeftOut(f"slices of rank {rows.rank}", why, int(np.sum(~stays))))
        return _kernel_times(rows.take(stays), cells, request)
    # an op without kernels ends after the host and all kernels of the ops before it
    last_end = np.maximum.accumulate(np.where(lacks_kernel, rows.end[ops], finish[ops]))
    begin[ops[lacks_kernel]] = finish[ops[lacks_kernel]] = last_end[lacks_kernel]
    new_start, new_end = rows.start.copy(), rows.end.copy()
    new_start[ops], new_end[ops] = begin[ops], finish[ops]
    # other slices last until the end of their work; all but receives begin with it
    is_receive = np.array([bool(c) and c[0].phase.startswith("RECV_") for c in cells], bool)
    other_slices = np.flatnonzero(~has_op[rows.label])
    launch, start, end, *_ = rows.work
    launcher, is_launched = _find_launchers(rows, other_slices, launch)
    np.maximum.at(new_end, launcher[is_launched], end[is_launched])
    np.minimum.at(begin, launcher[is_launched], start[is_launched])
    begins = other_slices[np.isfinite(begin[other_slices]) & ~is_receive[rows.label[other_slices]]]
    new_start[begins] = begin[begins]
    timed = rows._replace(start=new_start, end=new_end)
    return timed.take(np.argsort(new_start, kind="stable"))


def _op_kernels(rows: Rows, ops: Int[NumpyArray, " ops"]) -> tuple[PerSlice, PerSlice, float]:
    """Return start and end of each op's kernels on the busiest stream, and their last launch."""
    launch, start, end, stream, is_exchange, _ = rows.work
    begin, finish = np.full(len(rows.start), np.inf), np.full(len(rows.start), -np.inf)
    launcher, is_launched = _find_launchers(rows, ops, launch)
    is_launched &= is_exchange == 0
    if is_launched.any():
        streams, code = np.unique(stream[is_launched], return_inverse=True)
        busiest = streams[np.bincount(code, (end - start)[is_launched]).argmax()]
        is_launched &= stream == busiest
    np.minimum.at(begin, launcher[is_launched], start[is_launched])
    np.maximum.at(finish, launcher[is_launched], end[is_launched])
    return begin, finish, float(launch[is_launched].max(initial=-np.inf))


def _find_launchers(
    rows: Rows, slices: Int[NumpyArray, " candidates"], launch: Float[NumpyArray, " kernels"]
) -> tuple[Int[NumpyArray, " kernels"], Bool[NumpyArray, " kernels"]]:
    """Return the slice in which each kernel was launched, and whether there is such a slice."""
    # The thread of the launch is not compared, as the thread of the slice waits during the launch.
    if not len(slices):
        return np.zeros(len(launch), np.int64), np.zeros(len(launch), bool)
    position = np.searchsorted(rows.start[slices], launch, "right") - 1
    launcher = slices[position]
    return launcher, (position >= 0) & (launch <= rows.end[launcher])


def _op_columns(rows: Rows, cells: Cells, phases: Sequence[str]) -> Columns:
    """Return columns of a trace with a row for each op of each slice's label, without its waits."""
    # A label of a fused pair has two ops. `phases` are the names that the column `phase` counts.
    step = np.zeros(len(rows.start), np.int64) if rows.step is None else rows.step
    start, end = _subtract_waits(rows, step, cells)
    op_rows = [
        (label, phases.index(op.phase), *op[1:]) for label, cell in enumerate(cells) for op in cell
    ]
    label_ops = np.array(op_rows, np.int64).reshape(-1, 5)
    # repeat each slice for each op of its label: two slices with labels of 2 and 1 ops give
    # slices 0 0 1 and positions 0 1 0 in the label
    first_op = np.searchsorted(label_ops[:, 0], np.arange(len(cells) + 1))
    counts = np.diff(first_op)[rows.label]
    slices = np.repeat(np.arange(len(rows.label)), counts)
    position = np.arange(len(slices)) - np.repeat(np.cumsum(counts) - counts, counts)
    ops = label_ops[first_op[rows.label[slices]] + position]
    columns = dict(zip(("phase", "stage", "microbatch", "chunk"), ops[:, 1:].T, strict=True))
    return columns | {"step": step[slices], "start": start[slices], "end": end[slices]}


def _subtract_waits(rows: Rows, step: Steps, cells: Cells) -> tuple[PerSlice, PerSlice]:
    """Return the starts and ends of slices without their waits for messages [us]."""
    # A RECV ends when its message arrives; then the op that waits for it starts. A slice whose
    # label has no stage waits for the receives that begin during it.
    labels = {op: label for label, cell in enumerate(cells) for op in cell}
    receive_labels = np.full((len(cells), 2), NONE)  # labels of the RECVs that an op waits for
    for label, cell in enumerate(cells):
        for k, op in enumerate(cell):
            receive = op._replace(phase=_RECEIVE_PHASES.get(op.phase, ""))
            receive_labels[label, k] = labels.get(receive, NONE)
    first_ops = [cell[0] if cell else LabelOp("", 0, 0) for cell in cells]
    is_receive = np.array([op.phase.startswith("RECV_") for op in first_ops], bool)
    can_receive = is_receive | np.array([op.stage < 0 for op in first_ops], bool)
    start, end, wait_end = rows.start, rows.end.copy(), np.full(len(rows.start), -np.inf)
    # the slice during which each receive began; at the arrival, the slice or its wait ends
    receivers = np.flatnonzero(can_receive[rows.label])
    receivers = receivers[np.argsort(start[receivers], kind="stable")]
    begin, arrival = rows.receives
    position = np.searchsorted(start[receivers], begin, "right") - 1
    is_inside = position >= 0
    if len(receivers):
        is_inside &= begin <= rows.end[receivers][position]
    receiver, arrival = receivers[position[is_inside]], arrival[is_inside]
    is_recv_cell = is_receive[rows.label[receiver]]
    np.maximum.at(end, receiver[is_recv_cell], arrival[is_recv_cell])
    np.maximum.at(wait_end, receiver[~is_recv_cell], arrival[~is_recv_cell])
    # last arrival of each step and label of a RECV; ops find those of labels that they wait for
    receives = np.flatnonzero(is_receive[rows.label])
    step_key = (step - OUTSIDE) * len(cells)
    keys, group = np.unique((step_key + rows.label)[receives], return_inverse=True)
    last_arrival = np.full(len(keys), -np.inf)
    np.maximum.at(last_arrival, group, end[receives])
    for label in receive_labels[rows.label].T:
        position = np.searchsorted(keys, step_key + label)
        # past the end there is no key to compare with
        has_receive = (label != NONE) & (position < len(keys))
        has_receive[has_receive] = keys[position[has_receive]] == (step_key + label)[has_receive]
        arrivals = last_arrival[position[has_receive]]
        wait_end[has_receive] = np.maximum(wait_end[has_receive], arrivals)
    return np.where((wait_end > start) & (wait_end <= end), wait_end, start), end
