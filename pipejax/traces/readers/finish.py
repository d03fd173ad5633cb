"""Last part of every reader: complete the columns, place the ranks, and make the trace."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.checks import ArgumentError, wrong
from pipejax.traces.readers.parts import (
    Columns,
    check_phases,
    number_groups,
    passing_rows,
    with_split_backwards,
)
from pipejax.traces.readers.readings import KINDS, RunSizes, complete
from pipejax.traces.record import INTEGERS, NONE, OP_INPUTS, OPS, TIMES, LeftOut, Trace, transfers

_OP_ROLES = ("stage", "microbatch", "chunk")
_MAX_NUMBER = 1e9  # a larger number of a step, worker, .. is damage


def finish_trace(
    columns: Columns,
    phases: Sequence[str],
    sizes: RunSizes,
    left_out: Sequence[LeftOut],
    inferred: Sequence[str] = (),
    *,
    by_step: bool = False,
) -> Trace:
    """Drop invalid rows, infer missing numbers of ops and messages, and return the trace.

    `columns` have one entry per slice; numbers may be NaN. A column `chunk`, the number of a stage
    on its worker, may replace `stage`. With `by_step`, the clock of a worker restarts in each step.
    """
    kind = np.array([KINDS.get(name, NONE) for name in phases], np.int64)[columns["phase"]]
    checks = [(~np.isfinite(columns[name]), f"its {name} is no finite number") for name in TIMES]
    checks.append((columns["end"] < columns["start"], "it ends before it starts"))
    roles = [name for name in (*INTEGERS, "chunk") if name in columns]
    for name in roles:
        minimum, values = 0, columns[name]
        if name in _OP_ROLES:  # an empty cell
            minimum, values = NONE, np.where(np.isnan(values), NONE, values)
        is_whole = (values >= minimum) & (values == np.rint(values)) & (values < _MAX_NUMBER)
        checks.append((~is_whole, f"its {name} is no whole number of at least {minimum}"))
        columns[name] = np.where(is_whole, values, NONE).astype(np.int64)
    checks += [
        ((kind >= 0) & (columns[name] < 0), f"it is an op and has no {name}")
        for name in _OP_ROLES
        if name in columns
    ]
    notes = _count_from_zero(columns, phases, sizes)
    is_valid, faults = passing_rows(checks, "rows", columns.pop("row", None))
    columns, kind = {name: values[is_valid] for name, values in columns.items()}, kind[is_valid]
    check_phases(columns, phases)
    try:
        notes += complete(columns, kind, sizes, by_step=by_step)
    except ArgumentError as error:
        rows = (part for part in (*left_out, *faults) if part.what.startswith("rows"))
        damage = [f"{part.count} damaged {part.what}: {part.why}" for part in rows]
        raise ArgumentError(error.argument, None, "; ".join([str(error), *damage])) from None
    columns.pop("chunk", None)
    # `complete` leaves ops that it could not number without a microbatch
    is_surplus = (kind >= 0) & (columns["microbatch"] < 0)
    is_numbered, surplus = passing_rows([(is_surplus, "it is one op too many")], "ops")
    columns = {name: values[is_numbered] for name, values in columns.items()}
    # public traces give garbage collections a microbatch too, which means nothing
    columns["microbatch"][(kind[is_numbered] < 0) & (columns["stage"] == NONE)] = NONE
    columns, is_matched, unmatched = match_messages(columns, phases)
    columns = {name: values[is_matched] for name, values in columns.items()}
    columns["phase"], phases = with_split_backwards(columns, phases)
    return Trace.from_columns(
        columns,
        phases,
        [*left_out, *faults, *surplus, *unmatched],
        known_workers=sizes.workers,
        inferred=(*inferred, *notes),
        has_step_clocks=by_step,
    )


def _count_from_zero(columns: Columns, phases: Sequence[str], sizes: RunSizes) -> list[str]:
    """Renumber microbatches, in place, so that each step has 0 .. M - 1; return a note on that."""
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
    has_message_0 = (np.isin(phase_names, [*_STAGE_STEP]) & (microbatch == 0)).any()
    if is_from_1 and (has_message_0 or sizes.microbatches == largest + 1):
        why = "messages are of 0" if has_message_0 else f"microbatches is {sizes.microbatches}"
        raise wrong("files", f"must hold ops of microbatch 0, not of 1 to {largest} alone: {why}")
    columns["microbatch"] = np.maximum(microbatch - np.where(has_ops, first, 0)[group], NONE)
    if is_from_1:
        text = f"1 to {largest} in the files are read as 0 to {largest - 1}"
        return [f"microbatches are counted from 1: {text}, unless microbatch 0 is missing"]
    return ["microbatches go on from step to step in the files, and begin at 0 in each step here"]


_STAGE_STEP = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}  # to the other end's stage
_CLOCK_ERROR = 1e-4  # time by which a message may begin before its op ends [s]


def match_messages(
    columns: Columns, phases: Sequence[str]
) -> tuple[Columns, Bool[NumpyArray, " slices"], list[LeftOut]]:
    """Assign stage and microbatch to messages without them; say which to keep, and why not."""
    # A worker's messages follow the order of its ops, but Megatron's interleaved schedules also
    # record calls without a message. So the number of messages of a phase, worker and step decides:
    # - as many as ops that need one: the k-th message belongs to the k-th of these ops;
    # - as many as all ops: the k-th belongs to the k-th op; messages that no op needs are dropped;
    # - more than needed: each op takes its first possible message;
    # - fewer than needed: no message is matched.
    stays, left_out = np.ones(len(columns["start"]), bool), []
    group = number_groups(*(columns[name] for name in ("step", "replica", "worker")))
    for name in _STAGE_STEP:
        if name not in phases:
            continue
        is_message = columns["phase"] == phases.index(name)
        unmatched = np.flatnonzero(is_message & (columns["microbatch"] == NONE))
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
    name: str, columns: Columns, phases: Sequence[str]
) -> tuple[Int[NumpyArray, " ops"], Bool[NumpyArray, " ops"]]:
    """Return the rows of ops that may use messages called `name`, and whether each op needs one."""
    # An op needs a message if the stage at the other end runs on another worker.
    codes = [phases.index(op) for op in ("F" if name.endswith("F") else "BI") if op in phases]
    ops = np.flatnonzero(np.isin(columns["phase"], codes) & (columns["stage"] >= 0))
    stage, worker = columns["stage"][ops], columns["worker"][ops]
    stage_workers = np.full(int(stage.max(initial=0)) + 1, NONE)
    stage_workers[stage] = worker
    other_stage = stage + _STAGE_STEP[name]
    exists = (other_stage >= 0) & (other_stage < len(stage_workers))
    other_worker = stage_workers[np.where(exists, other_stage, 0)]
    return ops, exists & (other_worker != worker) & (other_worker != NONE)


def _match_ops(
    name: str,
    columns: Columns,
    group: Int[NumpyArray, " slices"],
    unmatched: Int[NumpyArray, " messages"],
    ops: Int[NumpyArray, " ops"],
    is_needed: Bool[NumpyArray, " ops"],
) -> Int[NumpyArray, " messages"]:
    """Return for each message the row of its op, or the code _EXTRA or _UNMATCHED.

    `name` is the phase of the messages, and `unmatched` has their rows. `group` is a number for the
    step, replica and worker of each slice. `ops` are the rows of ops that may use these messages;
    `is_needed` says which of them do.
    """
    num_groups, is_send = int(group.max(initial=0)) + 1, name.startswith("SEND")
    result = np.full(len(unmatched), _EXTRA)
    message_group = group[unmatched]
    message_count = np.bincount(message_group, minlength=num_groups)
    op_count = np.bincount(group[ops], minlength=num_groups)
    needed_count = np.bincount(group[ops[is_needed]], minlength=num_groups)
    result[(message_count < needed_count)[message_group]] = _UNMATCHED
    start = columns["start"][unmatched]
    op_time = columns["end" if is_send else "start"]
    has_needed = (message_count == needed_count) & (message_count > 0)
    has_all_calls = (message_count == op_count) & (message_count > needed_count)
    # where numbers agree, sort messages and ops by group and time: then they stand one to one
    for is_selected, candidates in ((has_needed, ops[is_needed]), (has_all_calls, ops)):
        rows = np.flatnonzero(is_selected[message_group])
        rows = rows[np.lexsort([rows, start[rows], message_group[rows]])]
        group_ops = candidates[is_selected[group[candidates]]]
        result[rows] = group_ops[np.lexsort([group_ops, op_time[group_ops], group[group_ops]])]
    needs_message = np.zeros(len(group), bool)
    needs_message[ops[is_needed]] = True
    result[(result >= 0) & ~needs_message[result]] = _EXTRA
    has_surplus = (message_count > needed_count) & ~has_all_calls & (needed_count > 0)
    for number in np.flatnonzero(has_surplus):
        rows = np.flatnonzero(message_group == number)
        rows = rows[np.argsort(start[rows], kind="stable")]
        worker_ops = ops[is_needed & (group[ops] == number)]
        worker_ops = worker_ops[np.argsort(op_time[worker_ops], kind="stable")]
        result[rows] = _match_surplus(columns, unmatched[rows], worker_ops, is_send=is_send)
    return result


def _match_surplus(
    columns: Columns,
    messages: Int[NumpyArray, " messages"],
    ops: Int[NumpyArray, " ops"],
    *,
    is_send: bool,
) -> Int[NumpyArray, " messages"]:
    """Return the row of the op of each message, or a code: messages are more than ops."""
    # An op takes the first send that begins after the op ended, or the last receive that ended
    # before the op began. Receives run in reversed time: times 1 2 5 become -5 -2 -1.
    result, place = np.full(len(messages), _EXTRA), 0
    message_times, op_times = columns["start"][messages], columns["end"][ops]
    if not is_send:
        message_times, op_times = -columns["end"][messages][::-1], -columns["start"][ops][::-1]
        ops = ops[::-1]
    for op, op_time in zip(ops, op_times, strict=True):
        while place < len(messages) and message_times[place] < op_time - _CLOCK_ERROR:
            place += 1
        if place == len(messages):
            return np.full(len(messages), _UNMATCHED)
        result[place] = op
        place += 1
    return result if is_send else result[::-1]


# Replica and worker of each rank, where labels do not state them

Places = Sequence[tuple[int, int]]  # replica and worker of each rank
MAX_LEAD_SHARE = 0.1  # of an op before its inputs, relative to the median op
_OP_FIELDS = ("phase", "stage", "microbatch")


def place_ranks(
    ranks: Sequence[int],
    parts: Sequence[Columns],
    world: int,
    replicas: int,
    build: Callable[[Places, int], Trace],
) -> Trace:
    """Assign ranks to replicas so that every op starts after its inputs; return that trace.

    `parts` are the columns of each rank's ops; `replicas` is 0 if the user states none. `build`
    makes the trace from (replica, worker) of each rank, and the number of workers.
    """
    ops = [
        {*zip(*(part[name][part["stage"] >= 0].tolist() for name in _OP_FIELDS), strict=True)}
        for part in parts
    ]
    # a pipeline runs every op once, so the ranks that share an op are as many as the replicas
    counts = Counter(op for rank_ops in ops for op in rank_ops if op[-1] >= 0)
    if replicas and world % replicas:
        raise wrong("replicas", f"must divide the {world} ranks of the run, got {replicas}")
    shared = max(counts.values(), default=0)
    is_whole = len(ranks) == world
    if replicas and shared and (replicas < shared or (is_whole and replicas > shared)):
        raise wrong("replicas", f"must be {shared}, as in the files, got {replicas}", replicas)
    faults: list[ArgumentError] = []

    def list_traces(replicas: int) -> list[Trace]:
        """Return the traces of all placements, and collect the faults of others."""
        traces = []
        for places in _list_placements(ranks, ops, world, replicas):
            try:
                traces.append(build(places, world // replicas))
            except ArgumentError as error:
                faults.append(error)
        return traces

    number = replicas or shared or 1
    traces = list_traces(number if world % number == 0 else 1)
    is_stated = replicas or any(ops)
    if not is_stated and not any(map(_is_causal, traces)):
        divisors = [count for count in range(2, world // 2 + 1) if world % count == 0]
        possible = [count for count in divisors if any(map(_is_causal, list_traces(count)))]
        if possible:
            options = " or ".join(f"--replicas {count}" for count in possible)
            why = (
                f"in one pipeline of {world} ranks ops would start before their inputs; {options} "
                "would do, or --replicas 1 if only the clocks differ"
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
    """Return whether ops start after their inputs end, by the clocks as recorded."""
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
        why = f"{replicas} replicas run the same ops, and {len(possible)} deals of ranks can be"
        raise wrong("files", f"must tell replicas apart: {why}; give the files of one replica")
    return possible[0]


def _has_ordered_workers(trace: Trace) -> bool:
    """Return whether the workers of each replica are in the order of their first stages."""
    first_stage = np.full((len(trace.replicas), trace.workers), np.iinfo(np.int64).max)
    is_op = trace.stage >= 0
    np.minimum.at(first_stage, (trace.replica[is_op], trace.worker[is_op]), trace.stage[is_op])
    return bool((np.diff(first_stage) > 0).all())
