"""What makes a schedule legal. A table runs these checks when it is made, in this order."""

from collections.abc import Callable

import numpy as np

from pipejax.cells import Content
from pipejax.dependencies import NOWHERE, find_dependencies, locate
from pipejax.graph import CycleError, topological_order
from pipejax.ops import CELL_PHASES, COMMUNICATION, SHARDING, Op, Phase, format_cell
from pipejax.shapes import Index, NumpyArray


class IllegalSchedule(ValueError):
    """A schedule that cannot run: a reason, and its place, `worker` and `slot`, or None."""

    def __init__(self, reason: str, worker: int | None = None, slot: int | None = None) -> None:
        """Keep the place."""
        super().__init__(reason)
        self.worker = worker
        self.slot = slot


def check(content: Content) -> None:
    """Check a schedule completely.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: for the first check that fails; the reason names the op.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"]]).content
      >>> check(content._replace(placement=np.array([[3]])))
      Traceback (most recent call last):
      pipejax.legality.IllegalSchedule: stage 0 of pipe 0 is placed on worker 3: ...
    """
    for rule in RULES:
        rule(content)


def check_arrays(content: Content) -> None:
    """The arrays fit together and hold phases and workers that exist.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: otherwise.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"]]).content
      >>> check_arrays(content._replace(placement=np.zeros((1, 0), int)))
      Traceback (most recent call last):
      pipejax.legality.IllegalSchedule: placement has shape (pipes, stages), got (1, 0): ...
    """
    shapes = {array.shape for array in (*content.cells, *content.partners)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise IllegalSchedule(
            f"the arrays of a table have one shape (workers, slots), got {shapes}"
        )
    if content.placement.ndim != 2 or 0 in content.placement.shape:
        raise IllegalSchedule(
            f"placement has shape (pipes, stages), got {content.placement.shape}: "
            "no stage is placed"
        )
    for cells in (content.cells, content.partners):
        wrong = ~np.isin(cells.phase, [Phase.IDLE, *CELL_PHASES])
        for worker, slot in np.argwhere(wrong):
            raise IllegalSchedule(
                f"{cells.phase[worker, slot]} is not the code of a phase that a cell can hold"
            )
    outside = (content.placement < 0) | (content.placement >= content.num_workers)
    for pipe, stage in np.argwhere(outside):
        raise IllegalSchedule(
            f"stage {stage} of pipe {pipe} is placed on worker {content.placement[pipe, stage]}: "
            f"the table has workers 0 to {content.num_workers - 1}"
        )


def check_rows(content: Content) -> None:
    """Every worker has an op; only a forward and a backward are fused.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: otherwise.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"]]).content
      >>> check_rows(content._replace(cells=content.cells._replace(phase=np.zeros((1, 2), int))))
      Traceback (most recent call last):
      pipejax.legality.IllegalSchedule: worker 0 has no op: every worker runs a stage
    """
    for worker in range(content.num_workers):
        if not np.isin(content.cells.phase[worker], CELL_PHASES).any():
            raise IllegalSchedule(f"worker {worker} has no op: every worker runs a stage", worker)
    for worker, slot in np.argwhere(content.partners.phase != Phase.IDLE):
        forward = content.cells.phase[worker, slot]
        backward = content.partners.phase[worker, slot]
        if forward != Phase.F or backward not in (Phase.B, Phase.I):
            cell = format_cell(content.cell(worker, slot))
            raise IllegalSchedule(
                f"{cell} on worker {worker} fuses other ops than a forward and a backward",
                int(worker),
                int(slot),
            )


def check_ranges(content: Content) -> None:
    """Stages, microbatches and pipes exist.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: otherwise.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"]]).content
      >>> check_ranges(content._replace(cells=content.cells._replace(stage=np.array([[0, 5]]))))
      Traceback (most recent call last):
      pipejax.legality.IllegalSchedule: op 5B0 on worker 0 has no place: stages are 0 to 0
    """
    for cells in (content.cells, content.partners):
        held = cells.phase != Phase.IDLE
        numbered = held & ~np.isin(cells.phase, SHARDING)
        for wrong, what in (
            (held & ((cells.stage < 0) | (cells.stage >= content.num_stages)),
             f"has no place: stages are 0 to {content.num_stages - 1}"),
            (numbered & ((cells.microbatch < 0) | (cells.microbatch >= content.num_microbatches)),
             f"has no forward: microbatches are 0 to {content.num_microbatches - 1}"),
            (numbered & ((cells.pipe < 0) | (cells.pipe >= content.num_pipes)),
             f"belongs to no pipe: pipes are 0 to {content.num_pipes - 1}"),
        ):  # fmt: skip
            for worker, slot in np.argwhere(wrong):
                op = format_cell(content.cell(worker, slot))
                raise IllegalSchedule(f"op {op} on worker {worker} {what}", int(worker), int(slot))


def check_workers(content: Content) -> None:
    """Every op stands on the worker of its stage, every microbatch keeps to one pipe.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: otherwise.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]]).content
      >>> check_workers(content._replace(placement=np.array([[1, 0]])))
      Traceback (most recent call last):
      pipejax.legality.IllegalSchedule: op 0F0 stands on worker 0, but stage 0 of pipe 0 is ...
    """
    row = np.arange(content.num_workers)[:, None]
    pipe_of = content.pipe_of_microbatch
    for cells in (content.cells, content.partners):
        held = (cells.phase != Phase.IDLE) & ~np.isin(cells.phase, SHARDING)
        should = np.where(held, content.placement[cells.pipe, cells.stage], row)
        for worker, slot in np.argwhere(should != row):
            op = format_cell(content.cell(worker, slot))
            raise IllegalSchedule(
                f"op {op} stands on worker {worker}, but stage {cells.stage[worker, slot]} of "
                f"pipe {cells.pipe[worker, slot]} is placed on worker {should[worker, slot]}",
                int(worker),
                int(slot),
            )
        for worker, slot in np.argwhere(held & (pipe_of[cells.microbatch] != cells.pipe)):
            raise IllegalSchedule(
                f"microbatch {cells.microbatch[worker, slot]} is in two pipes",
                int(worker),
                int(slot),
            )
        here = (content.placement[:, cells.stage] == row).any(axis=0)
        for worker, slot in np.argwhere(np.isin(cells.phase, SHARDING) & ~here):
            op = format_cell(content.cell(worker, slot))
            raise IllegalSchedule(
                f"op {op} stands on worker {worker}, which does not hold that stage",
                int(worker),
                int(slot),
            )


def check_once(content: Content) -> None:
    """No op stands twice.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: otherwise.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"]]).content
      >>> check_once(content._replace(cells=content.cells._replace(phase=np.array([[1, 1]]))))
      Traceback (most recent call last):
      pipejax.legality.IllegalSchedule: op 0F0 stands twice on worker 0: in slots 0 and 1
    """
    columns = []
    for cells in (content.cells, content.partners):
        held = (cells.phase != Phase.IDLE) & ~np.isin(cells.phase, SHARDING)
        place = np.flatnonzero(held)
        columns.append(
            np.stack([cells.phase[held], cells.stage[held], cells.microbatch[held], place])
        )
    keys = np.concatenate(columns, axis=1)
    keys = keys[:, np.lexsort(keys[::-1])]
    for k in np.flatnonzero((keys[:3, 1:] == keys[:3, :-1]).all(axis=0)):
        phase, stage, microbatch = map(int, keys[:3, k])
        (first, before), (worker, slot) = map(content.place, keys[3, k : k + 2])
        place_of = (
            f"on worker {worker}: in slots {before} and {slot}"
            if first == worker
            else f"on worker {first} in slot {before} and on worker {worker} in slot {slot}"
        )
        op = Op(Phase(phase), stage, microbatch)
        raise IllegalSchedule(f"op {op} stands twice {place_of}", worker, slot)


def check_complete(content: Content) -> None:
    """Every microbatch meets every stage: a forward, and a whole or a split backward.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: otherwise.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"]]).content
      >>> check_complete(content._replace(cells=content.cells._replace(phase=np.array([[1, 4]]))))
      Traceback (most recent call last):
      pipejax.legality.IllegalSchedule: missing op 0I0 on worker 0: there is a weight gradient alone
    """
    stages, microbatches = content.num_stages, content.num_microbatches
    forwards = content.cells.phase == Phase.F
    if stages * microbatches > forwards.sum():  # before anything of that size is allocated
        present = set(
            zip(
                content.cells.stage[forwards].tolist(),
                content.cells.microbatch[forwards].tolist(),
                strict=True,
            )
        )
        stage, microbatch = next(
            (s, m) for m in range(microbatches) for s in range(stages) if (s, m) not in present
        )
        raise _missing(content, Op(Phase.F, stage, microbatch), "there is no forward")
    where = locate(content)
    has = {phase: where[phase] != NOWHERE for phase in (Phase.B, Phase.I, Phase.W)}
    for phase, absent, why in (
        (Phase.B, ~has[Phase.B] & ~has[Phase.I] & ~has[Phase.W], "there is no backward"),
        (Phase.I, ~has[Phase.I] & has[Phase.W], "there is a weight gradient alone"),
        (Phase.W, has[Phase.I] & ~has[Phase.W], "there is an input gradient alone"),
    ):
        for stage, microbatch in np.argwhere(absent):
            raise _missing(content, Op(phase, int(stage), int(microbatch)), why)
    for stage, microbatch in np.argwhere(has[Phase.B] & (has[Phase.I] | has[Phase.W])):
        worker, slot = content.place(where[Phase.B][stage, microbatch])
        op = Op(Phase.B, int(stage), int(microbatch))
        raise IllegalSchedule(
            f"op {op} on worker {worker} does the backward twice: it is also split into I and W",
            worker,
            slot,
        )


def _missing(content: Content, op: Op, why: str) -> IllegalSchedule:
    worker = int(content.placement[content.pipe_of_microbatch[op.microbatch], op.stage])
    return IllegalSchedule(f"missing op {op} on worker {worker}: {why}", worker)


def check_order(content: Content) -> None:
    """The rows can be executed: no op waits for a later one of its row, and no cycle.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: otherwise; the reason names the cycle.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0B0"]]).content
      >>> check_order(content._replace(cells=content.cells._replace(phase=np.array([[2, 1]]))))
      Traceback (most recent call last):
      pipejax.legality.IllegalSchedule: deadlock: 0B0 on worker 0 waits for 0F0, which stands ...
    """
    edges = find_dependencies(content)
    tail_worker, tail_slot = np.divmod(edges.producer, content.num_slots)
    head_worker, head_slot = np.divmod(edges.consumer, content.num_slots)
    for k in np.flatnonzero((tail_worker == head_worker) & (tail_slot >= head_slot)):
        worker, slot = int(head_worker[k]), int(head_slot[k])
        first, then = (format_cell(content.cell(worker, int(s))) for s in (slot, tail_slot[k]))
        late = "is the same fused pair" if tail_slot[k] == slot else "stands after it in the row"
        raise IllegalSchedule(
            f"deadlock: {first} on worker {worker} waits for {then}, which {late}", worker, slot
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
        raise IllegalSchedule(
            f"deadlock: no op of this cycle can start: {cycle}", *places[0]
        ) from None


def check_communication(content: Content) -> None:
    """Each message between workers has one SEND after its producer, one RECV before its use.

    Args:
      content: cells and placement.

    Raises:
      IllegalSchedule: otherwise, unless there is no SEND or RECV at all.

    Example:
      >>> from pipejax.table import ScheduleTable
      >>> content = ScheduleTable.from_rows([["0F0", "0R0", "0B0"]]).content
      >>> sends = content.cells._replace(phase=np.array([[Phase.F, Phase.SEND_F, Phase.B]]))
      >>> check_communication(content._replace(cells=sends))
      Traceback (most recent call last):
      pipejax.legality.IllegalSchedule: op 0SEND_F0 on worker 0 belongs to no message ...
    """
    if not np.isin(content.cells.phase, COMMUNICATION).any():
        return
    messages = find_dependencies(content).messages()
    where = locate(content)
    expected: set[tuple[int, ...]] = set()
    for k in range(len(messages.producer)):
        forward = messages.direction[k] == 0
        send = Op(Phase.SEND_F if forward else Phase.SEND_B, int(messages.from_stage[k]),
                  int(messages.microbatch[k]))  # fmt: skip
        receive = Op(Phase.RECV_F if forward else Phase.RECV_B, int(messages.to_stage[k]),
                     send.microbatch)  # fmt: skip
        _check_transfer(content, where, send, messages.producer[k], after=True)
        _check_transfer(content, where, receive, messages.consumer[k], after=False)
        expected |= {tuple(map(int, send)), tuple(map(int, receive))}
    for worker, slot in np.argwhere(np.isin(content.cells.phase, COMMUNICATION)):
        (op,) = content.cell(worker, slot)
        if tuple(map(int, op)) not in expected:
            raise IllegalSchedule(
                f"op {op} on worker {worker} belongs to no message between workers",
                int(worker),
                int(slot),
            )


def _check_transfer(
    content: Content, where: dict[Phase, NumpyArray], op: Op, partner: Index, *, after: bool
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
        raise IllegalSchedule(
            f"missing op {op} on worker {worker}: {name} {why} a message", worker, slot
        )
    order = (
        f"before {name}, which makes its message"
        if after
        else f"after {name}, which waits for its message"
    )
    raise IllegalSchedule(f"deadlock: {op} on worker {worker} stands {order}", worker, own)


RULES: tuple[Callable[[Content], None], ...] = (
    check_arrays,
    check_rows,
    check_ranges,
    check_workers,
    check_once,
    check_complete,
    check_order,
    check_communication,
)
