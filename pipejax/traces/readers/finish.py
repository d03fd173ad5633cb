"""Last part of every reader: complete the columns, place the ranks, and make the trace."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import ArgumentError, wrong
from pipejax.traces.readers.parts import (
    Columns,
    check_phases,
    number_groups,
    passing_rows,
    with_split_backwards,
)
from pipejax.traces.readers.readings import KINDS, RunSizes, complete
from pipejax.traces.readers.sources import Request
from pipejax.traces.record import INTEGERS, MESSAGES, NONE, OP_INPUTS, OPS, TIMES, Trace, transfers

_OP_ROLES = ("stage", "microbatch", "chunk")
_MAX_NUMBER = 1e9  # a larger number of a step, worker, .. is damage


def finish_trace(
    columns: Columns,
    phases: Sequence[str],
    request: Request,
    inferred: Sequence[str] = (),
    *,
    by_step: bool = False,
) -> Trace:
    """Drop invalid rows, infer missing numbers of ops, and return the trace."""
    # `columns` have one entry per slice; numbers may be NaN. A column `chunk`, the number of a
    # stage on its worker, may replace `stage`. With `by_step`, clocks restart in each step.
    kind = np.array([KINDS.get(name, NONE) for name in phases], np.int64)[columns["phase"]]
    is_op = np.array([name in OPS for name in phases], bool)[columns["phase"]]
    checks = [(~np.isfinite(columns[name]), f"its {name} is no finite number") for name in TIMES]
    checks.append((columns["end"] < columns["start"], "it ends before it starts"))
    roles = [name for name in (*INTEGERS, "chunk") if name in columns]
    for name in roles:
        minimum, values = 0, columns[name]
        if name in _OP_ROLES:  # NaN is an empty cell
            minimum, values = NONE, np.where(np.isnan(values), NONE, values)
        is_whole = (values >= minimum) & (values == np.rint(values)) & (values < _MAX_NUMBER)
        checks.append((~is_whole, f"its {name} is no whole number of at least {minimum}"))
        columns[name] = np.where(is_whole, values, NONE).astype(np.int64)
    for name in (name for name in _OP_ROLES if name in columns):
        checks.append((is_op & (columns[name] < 0), f"it is an op and has no {name}"))
    notes = _count_from_zero(columns, phases, request.sizes)
    is_valid, faults = passing_rows(checks, "rows", columns.pop("row", None))
    columns, kind = {name: values[is_valid] for name, values in columns.items()}, kind[is_valid]
    check_phases(columns, phases)
    notes += _restart_microbatches(columns, kind, request.sizes)
    try:
        notes += complete(columns, kind, request.sizes, by_step=by_step)
    except ArgumentError as error:
        rows = (part for part in (*request.left_out, *faults) if part.what.startswith("rows"))
        damage = [f"{part.count} damaged {part.what}: {part.why}" for part in rows]
        text = "; ".join([str(error), *damage])
        raise ArgumentError(error.argument, error.value, text) from None
    columns.pop("chunk", None)
    # `complete` leaves ops that it could not number without a microbatch
    is_surplus = (kind >= 0) & (columns["microbatch"] < 0)
    is_numbered, surplus = passing_rows([(is_surplus, "it is one op too many")], "ops")
    columns = {name: values[is_numbered] for name, values in columns.items()}
    # public traces also give garbage collections a microbatch, which has no meaning
    columns["microbatch"][(kind[is_numbered] < 0) & (columns["stage"] == NONE)] = NONE
    columns["phase"], phases = with_split_backwards(columns, phases)
    left_out = [*request.left_out, *faults, *surplus]
    fields: Any = {"known_workers": request.sizes.workers, "has_step_clocks": by_step}
    return Trace.from_columns(columns, phases, left_out, inferred=(*inferred, *notes), **fields)


def _count_from_zero(columns: Columns, phases: Sequence[str], sizes: RunSizes) -> list[str]:
    """Renumber microbatches of each step in place, from 0; return a note if this changes any."""
    # Files may number the microbatches of every step 1 2 3 4, or go on: 0 1 2 3, then 4 5 6 7.
    if "microbatch" not in columns:
        return []
    microbatch, phase_names = columns["microbatch"], np.array(phases, str)[columns["phase"]]
    is_op = np.isin(phase_names, OPS) & (microbatch >= 0)
    if not is_op.any():
        return []
    keys = [columns[role] for role in ("replica", "step") if role in columns]
    group = number_groups(*keys, np.zeros(len(microbatch)))  # of a step of a replica
    first = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    last = np.full_like(first, NONE)
    np.minimum.at(first, group[is_op], microbatch[is_op])
    np.maximum.at(last, group[is_op], microbatch[is_op])
    has_ops = last >= 0
    first_numbers, counts = first[has_ops], (last - first + 1)[has_ops]
    largest = int(counts.max())
    is_from_1 = (first_numbers == 1).all()
    # first numbers 4 0 8 with counts 4 4 4: they all differ, by multiples of the count
    has_equal_counts = (counts == largest).all()
    has_distinct_starts = 1 < len(first_numbers) == len(np.unique(first_numbers))
    has_equal_remainders = len(np.unique(first_numbers % largest)) == 1
    goes_on = has_equal_counts and has_distinct_starts and has_equal_remainders
    if not is_from_1 and not goes_on:
        return []
    has_message_0 = (np.isin(phase_names, MESSAGES) & (microbatch == 0)).any()
    if is_from_1 and (has_message_0 or sizes.microbatches == largest + 1):
        why = "messages are of 0" if has_message_0 else f"microbatches is {sizes.microbatches}"
        raise wrong("files", f"must hold ops of microbatch 0, not of 1 to {largest} alone: {why}")
    columns["microbatch"] = np.maximum(microbatch - np.where(has_ops, first, 0)[group], NONE)
    if is_from_1:
        text = f"1 to {largest} in the files are read as 0 to {largest - 1}"
        return [f"microbatches are counted from 1: {text}, unless microbatch 0 is missing"]
    return ["microbatches go on from step to step in the files, and begin at 0 in each step here"]


def _restart_microbatches(columns: Columns, kind: NumpyArray, sizes: RunSizes) -> list[str]:
    """Renumber microbatches in place, from 0 in each step, if no file says steps but idle times."""
    rows, lanes = np.flatnonzero(kind >= 0), columns.get("worker", columns.get("stage"))
    if "step" in columns or "microbatch" not in columns or lanes is None or not len(rows):
        return []
    lane = number_groups(columns.get("replica", np.zeros(len(lanes))), lanes)[rows]
    order = np.lexsort([columns["start"][rows], lane])
    numbers = columns["microbatch"][rows][order]
    count = int(numbers.max()) + 1
    if not np.ptp(lane) or count > len(rows):  # one lane, or a damaged number
        return []
    # A step can begin where every lane has ended all earlier microbatches: a lane that runs
    # 0 1 0 1 2 3 2 3 can begin one at 0 and 2, and one that runs 0 0 1 1 at 0 and 1.
    can_begin = np.ones(count, bool)
    for run in np.split(numbers, np.flatnonzero(np.diff(lane[order])) + 1):
        earlier, later = np.maximum.accumulate(run)[:-1], np.minimum.accumulate(run[::-1])[-2::-1]
        can_begin &= np.isin(np.arange(count), [0, *later[earlier < later]])
    steps = (size for size in range(1, count) if count % size == 0 and can_begin[::size].all())
    size = next(steps, 1)
    if size == 1 or sizes.microbatches not in (0, size) or sizes.steps not in (0, count // size):
        return []
    columns["microbatch"] = np.where(columns["microbatch"] < 0, NONE, columns["microbatch"] % size)
    return [f"microbatches are counted over all steps: workers end {size} before the next"]


# Functions that find the replica and worker of each rank if labels do not state them

Places = Sequence[tuple[int, int]]  # replica and worker of each rank
MAX_LEAD_SHARE = 0.1  # by which an op may start before its inputs end, relative to the median op
_OP_FIELDS = ("phase", "stage", "microbatch")


def place_ranks(
    ranks: Sequence[int],
    parts: Sequence[Columns],
    world: int,
    replicas: int,
    build: Callable[[Places, int], Trace],
) -> Trace:
    """Assign ranks to replicas so that every op starts after its inputs; return that trace."""
    # `parts` are the columns of each rank's ops; `replicas` is 0 if the user states none. `build`
    # makes the trace from (replica, worker) of each rank, and the number of workers.
    ops = [
        {*zip(*(part[name][part["stage"] >= 0].tolist() for name in _OP_FIELDS), strict=True)}
        for part in parts
    ]
    # a pipeline runs every op once, so there are as many replicas as ranks that share an op
    counts = Counter(op for rank_ops in ops for op in rank_ops if op[-1] >= 0)
    if replicas and world % replicas:
        raise wrong("replicas", f"must divide the {world} ranks of the run, got {replicas}")
    shared = max(counts.values(), default=0)
    is_whole = len(ranks) == world
    if replicas and shared and (replicas < shared or (is_whole and replicas > shared)):
        raise wrong("replicas", f"must be {shared}, as in the files, got {replicas}", replicas)
    faults: list[ArgumentError] = []

    def list_traces(replicas: int) -> list[Trace]:
        """Return the traces of the placements that fit; add the errors of others to `faults`."""
        traces = []
        for places in _list_placements(ranks, ops, world, replicas):
            try:
                traces.append(build(places, world // replicas))
            except ArgumentError as error:
                faults.append(error)
        return traces

    number = replicas or shared or 1
    traces = list_traces(number if world % number == 0 else 1)
    # if a trace is one pipeline in several readings (faults with a value), it needs no replicas
    is_stated = replicas or any(ops) or any(fault.value for fault in faults)
    if not is_stated and not any(map(_is_causal, traces)):
        divisors = [count for count in range(2, world // 2 + 1) if world % count == 0]
        possible = [count for count in divisors if any(map(_is_causal, list_traces(count)))]
        if possible:
            options = " or ".join(f"--replicas {count}" for count in possible)
            why = (
                f"in one pipeline of {world} ranks, ops would start before their inputs; give "
                f"{options}, or --replicas 1 if only the clocks differ"
            )
            raise wrong("files", f"must state their replicas: {why}")
    if faults and not traces:
        raise faults[0]
    return _select_trace(traces, number)


def _list_placements(
    ranks: Sequence[int], ops: Sequence[set[tuple[int, ...]]], world: int, replicas: int
) -> list[Places]:
    """List assignments of ranks to (replica, worker) in which no replica runs an op twice."""
    # Ranks 0 1 2 3 of two replicas are (0, 0) (1, 0) (0, 1) (1, 1) by turns, and
    # (0, 0) (0, 1) (1, 0) (1, 1) by blocks. `ops` has the ops of each rank.
    by_turns = [(rank % replicas, rank // replicas) for rank in ranks]
    by_blocks = [divmod(rank, world // replicas) for rank in ranks]
    placements: list[Places] = []
    for places in [by_turns] if by_turns == by_blocks else [by_turns, by_blocks]:
        runs = Counter[object]()
        for (replica, _), rank_ops in zip(places, ops, strict=True):
            runs.update((replica, op) for op in rank_ops if op[-1] >= 0)  # with a microbatch
        if replicas == 1 or max(runs.values(), default=1) == 1:
            placements.append(places)
    return placements


def _is_causal(trace: Trace) -> bool:
    """Return whether ops start after their inputs end, by the recorded clocks."""
    producers, consumers = transfers(trace, OP_INPUTS)
    lead = (trace.end[producers] - trace.start[consumers]).max(initial=0.0)
    seconds = (trace.end - trace.start)[trace.has_phase(OPS)]
    return bool(lead <= MAX_LEAD_SHARE * np.median(seconds)) if len(seconds) else True


def _select_trace(traces: Sequence[Trace], replicas: int) -> Trace:
    """Return the only plausible trace of several that differ in the replica and worker of ranks."""
    # Ops must start after their inputs. If replicas run in lockstep, this holds for every trace:
    # then workers must also be in the order of their stages.
    possible = traces
    for is_plausible in (_is_causal, _has_ordered_workers):
        if len(possible) > 1:
            possible = [trace for trace in possible if is_plausible(trace)]
    if len(possible) != 1:
        why = f"{replicas} replicas run the same ops, and {len(possible)} ways to number ranks fit"
        raise wrong("files", f"must tell replicas apart: {why}; give the files of one replica")
    return possible[0]


def _has_ordered_workers(trace: Trace) -> bool:
    """Return whether the workers of each replica are in the order of their first stages."""
    first_stage = np.full((len(trace.replicas), trace.workers), np.iinfo(np.int64).max)
    is_op = trace.stage >= 0
    np.minimum.at(first_stage, (trace.replica[is_op], trace.worker[is_op]), trace.stage[is_op])
    return bool((np.diff(first_stage) > 0).all())
