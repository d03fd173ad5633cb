"""Messages that do not say of which microbatch they are: told by the order of the ops.

A worker sends what its ops make in their order, and receives what they take. Interleaved schedules
of Megatron time a call also where nothing is sent: those are more slices than messages.
"""

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.traces.readers.parts import Columns, group_of
from pipejax.traces.record import MESSAGES, NONE, LeftOut

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
    group = group_of(*(columns[name] for name in ("step", "replica", "worker")))
    for name in MESSAGES:
        if name not in phases:
            continue
        untold = np.flatnonzero(
            (columns["phase"] == phases.index(name)) & (columns["microbatch"] == NONE)
        )
        ops, is_needed = _ops_of(name, columns, phases)
        op_of = _op_of(name, columns, group, untold, ops, is_needed)
        for key in ("stage", "microbatch"):
            columns[key][untold[op_of >= 0]] = columns[key][op_of[op_of >= 0]]
        stays[untold[op_of < 0]] = False
        for code, why in _WHY.items():
            if count := int(np.sum(op_of == code)):
                left_out.append(LeftOut(name, why, count))
    return columns, stays, left_out


_EXTRA, _UNTOLD = -1, -2
_WHY = {
    _EXTRA: "no op of its worker needs this message: a call without one",
    _UNTOLD: "which microbatch it is of cannot be told: its worker's messages and ops do not match",
}


def _ops_of(
    name: str, columns: Columns, phases: tuple[str, ...]
) -> tuple[Int[NumpyArray, " ops"], Bool[NumpyArray, " ops"]]:
    """Ops at this worker's end of messages, and which of them need one."""
    wanted = [phases.index(op) for op in ("F" if name.endswith("F") else "BI") if op in phases]
    ops = np.flatnonzero(np.isin(columns["phase"], wanted) & (columns["stage"] >= 0))
    stage, worker = columns["stage"][ops], columns["worker"][ops]
    worker_of = np.full(int(stage.max(initial=0)) + 1, NONE)
    worker_of[stage] = worker
    other = stage + _STEP_TO[name]
    inside = (other >= 0) & (other < len(worker_of))
    at_other = worker_of[np.where(inside, other, 0)]
    return ops, inside & (at_other != worker) & (at_other != NONE)


def _op_of(
    name: str,
    columns: Columns,
    group: Int[NumpyArray, " slices"],
    untold: Int[NumpyArray, " messages"],
    ops: Int[NumpyArray, " ops"],
    is_needed: Bool[NumpyArray, " ops"],
) -> Int[NumpyArray, " messages"]:
    """Op of each message, or why it has none."""
    size, is_send = int(group.max(initial=0)) + 1, name.startswith("SEND")
    found = np.full(len(untold), _EXTRA)
    have = np.bincount(group[untold], minlength=size)
    own = np.bincount(group[ops], minlength=size)
    needed = np.bincount(group[ops[is_needed]], minlength=size)
    found[have[group[untold]] < needed[group[untold]]] = _UNTOLD
    time = columns["end" if is_send else "start"]
    by_need = (have == needed) & (have > 0)
    by_call = (have == own) & (have > needed)
    for chosen, candidates in ((by_need, ops[is_needed]), (by_call, ops)):
        rows = np.flatnonzero(chosen[group[untold]])
        taken = candidates[chosen[group[candidates]]]
        rows = rows[np.lexsort([rows, columns["start"][untold[rows]], group[untold[rows]]])]
        found[rows] = taken[np.lexsort([taken, time[taken], group[taken]])]
    needs = np.zeros(len(group), bool)
    needs[ops[is_needed]] = True
    found[(found >= 0) & ~needs[found]] = _EXTRA
    for number in np.flatnonzero((have > needed) & ~by_call & (needed > 0)):
        rows = np.flatnonzero(group[untold] == number)
        rows = rows[np.argsort(columns["start"][untold[rows]], kind="stable")]
        mine = ops[is_needed & (group[ops] == number)]
        mine = mine[np.argsort(time[mine], kind="stable")]
        found[rows] = _first_that_can(columns, untold[rows], mine, is_send=is_send)
    return found


def _first_that_can(
    columns: Columns,
    messages: Int[NumpyArray, " messages"],
    ops: Int[NumpyArray, " ops"],
    *,
    is_send: bool,
) -> Int[NumpyArray, " messages"]:
    """Op of each message of one worker: a send after its op, a receive before it, in order."""
    found, at = np.full(len(messages), _EXTRA), 0
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
            return np.full(len(messages), _UNTOLD)
        found[at] = op
        at += 1
    return found if is_send else found[::-1]
