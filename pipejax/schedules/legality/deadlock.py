"""The rows can be executed, and messages stand between their producer and their use."""

from collections.abc import Mapping

import numpy as np

from pipejax.base.array_types import Index, NumpyArray
from pipejax.base.topological_sort import CycleError, topological_order
from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.dependencies import find_dependencies
from pipejax.schedules.cells.ops import COMMUNICATION, Op, Phase, format_cell
from pipejax.schedules.cells.schedule_error import ScheduleError


def check_order(content: Content) -> None:
    """The rows can be executed: no op waits for a later one of its row, and no cycle."""
    edges = find_dependencies(content)
    tail_worker, tail_slot = np.divmod(edges.producer, content.num_slots)
    head_worker, head_slot = np.divmod(edges.consumer, content.num_slots)
    for k in np.flatnonzero((tail_worker == head_worker) & (tail_slot >= head_slot)):
        worker, slot = int(head_worker[k]), int(head_slot[k])
        first, then = (format_cell(content.cell(worker, int(s))) for s in (slot, tail_slot[k]))
        late = "is the same fused pair" if tail_slot[k] == slot else "stands after it in the row"
        raise ScheduleError(
            f"deadlock: {first} on worker {worker} waits for {then}, which {late}",
            place=(worker, slot),
        )
    if np.all(tail_slot < head_slot):
        return  # the columns are an order
    busy = np.flatnonzero((content.cells.phase != Phase.IDLE).ravel())
    same_row = busy[1:] // content.num_slots == busy[:-1] // content.num_slots
    tail = np.concatenate([busy[:-1][same_row], edges.producer])
    head = np.concatenate([busy[1:][same_row], edges.consumer])
    try:
        topological_order(content.cells.phase.size, tail, head)
    except CycleError as error:
        places = [content.place(cell) for cell in error.cycle]
        names = [f"{format_cell(content.cell(w, t))} (worker {w})" for w, t in places]
        cycle = " -> ".join([*names, names[0]])
        raise ScheduleError(
            f"deadlock: no op of this cycle can start: {cycle}", place=places[0]
        ) from None


def check_communication(content: Content) -> None:
    """Each message between workers has one SEND after its producer, one RECV before its use."""
    if not np.isin(content.cells.phase, COMMUNICATION).any():
        return
    messages = find_dependencies(content).messages()
    where = content.where
    expected: set[tuple[int, ...]] = set()
    for k in range(len(messages.producer)):
        forward = messages.direction[k] == 0
        send = Op(
            Phase.SEND_F if forward else Phase.SEND_B,
            int(messages.from_stage[k]),
            int(messages.microbatch[k]),
        )
        receive = Op(
            Phase.RECV_F if forward else Phase.RECV_B, int(messages.to_stage[k]), send.microbatch
        )
        _check_transfer(content, where, send, messages.producer[k], after=True)
        _check_transfer(content, where, receive, messages.consumer[k], after=False)
        expected |= {tuple(map(int, send)), tuple(map(int, receive))}
    for worker, slot in np.argwhere(np.isin(content.cells.phase, COMMUNICATION)):
        (op,) = content.cell(worker, slot)
        if tuple(map(int, op)) not in expected:
            raise ScheduleError(
                f"op {op} on worker {worker} belongs to no message between workers",
                place=(worker, slot),
            )


def _check_transfer(
    content: Content, where: Mapping[Phase, NumpyArray], op: Op, partner: Index, *, after: bool
) -> None:
    """A SEND stands after the op that makes its message, a RECV before the op that uses it."""
    worker, slot = content.place(partner)
    cell = int(where[op.phase][op.stage, op.microbatch])
    own = cell % content.num_slots
    if cell != NOWHERE and not (own < slot if after else own > slot):
        return
    name = format_cell(content.cell(worker, slot))
    if cell == NOWHERE:
        why = "sends" if after else "waits for"
        raise ScheduleError(
            f"missing op {op} on worker {worker}: {name} {why} a message", place=(worker, slot)
        )
    order = (
        f"before {name}, which makes its message"
        if after
        else f"after {name}, which waits for its message"
    )
    raise ScheduleError(f"deadlock: {op} on worker {worker} stands {order}", place=(worker, own))
