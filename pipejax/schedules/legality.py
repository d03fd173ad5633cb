"""What makes a schedule legal. A table runs these checks when it is made, in this order.

The arrays of a table fit together, and what they name exists; every op is there once, on the
worker of its stage; the rows can be executed; every gradient is applied, every version of the
weights that is read is there; messages stand between their producer and their use.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Index, NumpyArray
from pipejax.base.checks import are_positive
from pipejax.base.display import abbreviated
from pipejax.base.longest_path import CycleError, topological_order
from pipejax.schedules.cells.cells import NEWEST, NOWHERE, Content
from pipejax.schedules.cells.dependencies import (
    FORWARD,
    find_dependencies,
    find_versions,
    order_of_cells,
)
from pipejax.schedules.cells.ops import (
    CELL_PHASES,
    HOST,
    INPUT_GRADS,
    KINDS,
    MESSAGES,
    SHARDING,
    UNIT_SLOTS,
    WEIGHT_GRADS,
    Op,
    Phase,
    ScheduleError,
    Slots,
    format_cell,
)


def _wrong(content: Content, cell: Index, reason: str, *only: Phase) -> ScheduleError:
    """Return the error of one cell; {op} and {worker} in the reason stand for its own.

    Of a fused pair the op that has one of the phases is named, or both.
    """
    worker, slot = place = content.place(cell)
    ops = tuple(op for op in content.cell(worker, slot) if not only or op.phase in only)
    return ScheduleError(reason.format(op=format_cell(ops), worker=worker), place=place)


def _missing(content: Content, op: Op, why: str) -> ScheduleError:
    worker = int(content.placement[content.pipe_of_microbatch[op.microbatch], op.stage])
    return ScheduleError(f"missing op {op} on worker {worker}: {why}", place=(worker, None))


def check_arrays(content: Content) -> None:
    """The arrays fit together and hold phases and workers that exist."""
    shapes = {array.shape for array in (*content.cells, *content.partners)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ScheduleError(f"the arrays of a table have one shape (workers, slots), got {shapes}")
    placement, workers = content.placement, content.num_workers
    if placement.ndim != 2 or 0 in placement.shape:
        raise ScheduleError(
            f"placement has shape (pipes, stages), got {placement.shape}: no stage is placed"
        )
    for code in content.ops.phase[~np.isin(content.ops.phase, CELL_PHASES)]:
        raise ScheduleError(f"{code} is not the code of a phase that a cell can hold")
    for pipe, stage in np.argwhere((placement < 0) | (placement >= workers)):
        raise ScheduleError(
            f"stage {stage} of pipe {pipe} is placed on worker {placement[pipe, stage]}: "
            f"the table has workers 0 to {workers - 1}"
        )


def check_rows(content: Content) -> None:
    """Every worker has an op; only a forward and a backward are fused."""
    phase, partner = content.cells.phase, content.partners.phase
    for worker in np.flatnonzero(~(phase != Phase.IDLE).any(axis=1)):
        raise ScheduleError(
            f"worker {worker} has no op: every worker runs a stage", place=(worker, None)
        )
    is_pair = (phase == Phase.F) & np.isin(partner, INPUT_GRADS)
    for cell in np.flatnonzero((partner != Phase.IDLE) & ~is_pair):
        reason = "{op} on worker {worker} fuses other ops than a forward and a backward"
        raise _wrong(content, cell, reason)


def check_ranges(content: Content) -> None:
    """Stages, microbatches and pipes exist."""
    ops = content.ops
    numbered = ~np.isin(ops.phase, SHARDING)
    for held, values, count, what in (
        (ops.phase > 0, ops.stage, content.num_stages, "has no place: stages"),
        (numbered, ops.microbatch, content.num_microbatches, "has no forward: microbatches"),
        (numbered, ops.pipe, content.num_pipes, "belongs to no pipe: pipes"),
    ):
        for cell in ops.cell[held & ((values < 0) | (values >= count))]:
            where = f"op {{op}} on worker {{worker}} {what} are 0 to {count - 1}"
            raise _wrong(content, cell, where)


def check_workers(content: Content) -> None:
    """Every op stands on the worker of its stage, every microbatch keeps to one pipe."""
    sharded = np.isin(content.ops.phase, SHARDING)
    ops, sharding = content.ops.take(~sharded), content.ops.take(sharded)
    should = content.placement[ops.pipe, ops.stage]
    for k in np.flatnonzero(should != ops.cell // content.num_slots):
        where = (
            f"op {{op}} stands on worker {{worker}}, but stage {ops.stage[k]} of "
            f"pipe {ops.pipe[k]} is placed on worker {should[k]}"
        )
        raise _wrong(content, ops.cell[k], where)
    for k in np.flatnonzero(content.pipe_of_microbatch[ops.microbatch] != ops.pipe):
        raise _wrong(content, ops.cell[k], f"microbatch {ops.microbatch[k]} is in two pipes")
    holds = content.placement[:, sharding.stage] == sharding.cell // content.num_slots
    for cell in sharding.cell[~holds.any(axis=0)]:
        reason = "op {op} stands on worker {worker}, which does not hold that stage"
        raise _wrong(content, cell, reason)


def check_once(content: Content) -> None:
    """No op stands twice."""
    ops = content.ops.take(~np.isin(content.ops.phase, SHARDING))
    sizes = len(Phase), content.num_stages, content.num_microbatches
    key = np.ravel_multi_index((ops.phase, ops.stage, ops.microbatch), sizes)
    order = np.lexsort((ops.cell, key))
    for k in np.flatnonzero(np.diff(key[order]) == 0):
        phase, stage, microbatch = map(int, np.unravel_index(key[order[k]], sizes))
        (first, before), (worker, slot) = map(content.place, ops.cell[order[k : k + 2]])
        place_of = (
            f"on worker {worker}: in slots {before} and {slot}"
            if first == worker
            else f"on worker {first} in slot {before} and on worker {worker} in slot {slot}"
        )
        op = Op(Phase(phase), stage, microbatch)
        raise ScheduleError(f"op {op} stands twice {place_of}", place=(worker, slot))


def check_complete(content: Content) -> None:
    """Every microbatch meets every stage: a forward, and a whole or a split backward.

    An activation that is offloaded is loaded for its backward; loads have an offload, and waits
    have what they wait for.
    """
    stages, microbatches = content.num_stages, content.num_microbatches
    forwards = content.ops.take(content.ops.phase == Phase.F)
    if stages * microbatches > len(forwards.cell):  # before anything of that size is allocated
        present = set(zip(forwards.stage.tolist(), forwards.microbatch.tolist(), strict=True))
        stage, microbatch = next(
            (s, m) for m in range(microbatches) for s in range(stages) if (s, m) not in present
        )
        raise _missing(content, Op(Phase.F, stage, microbatch), "there is no forward")
    whole, grad, weight, offload, load = (
        content.where[phase] != NOWHERE for phase in (Phase.B, Phase.I, Phase.W, *HOST)
    )
    awaited = [(wait, kind.awaited) for wait, kind in KINDS.items() if kind.awaited]
    lone_waits = [
        (phase, (content.where[phase] == NOWHERE) & (content.where[wait] != NOWHERE))
        for wait, phase in awaited
    ]
    for phase, absent, why in (
        (Phase.B, ~(whole | grad | weight), "there is no backward"),
        (Phase.I, ~grad & weight, "there is a weight gradient alone"),
        (Phase.W, grad & ~weight, "there is an input gradient alone"),
        (Phase.L, offload & ~load, "the backward needs what is offloaded"),
        (Phase.O, ~offload & load, "there is a load alone"),
        *((phase, alone, "there is a wait for it alone") for phase, alone in lone_waits),
    ):
        for stage, microbatch in np.argwhere(absent).tolist():
            raise _missing(content, Op(phase, stage, microbatch), why)
    for cell in content.where[Phase.B][whole & (grad | weight)]:
        twice = "does the backward twice: it is also split into I and W"
        raise _wrong(content, cell, f"op {{op}} on worker {{worker}} {twice}", Phase.B)


def check_order(content: Content) -> None:
    """The rows can be executed: no op waits for a later one of its row, and no cycle."""
    edges, slots = find_dependencies(content), content.num_slots
    tail_worker, tail_slot = np.divmod(edges.producer, slots)
    head_worker, head_slot = np.divmod(edges.consumer, slots)
    for k in np.flatnonzero((tail_worker == head_worker) & (tail_slot >= head_slot)):
        is_pair = tail_slot[k] == head_slot[k]
        late = "is the same fused pair" if is_pair else "stands after it in the row"
        then = content.text(edges.producer[k])
        reason = f"deadlock: {{op}} on worker {{worker}} waits for {then}, which {late}"
        raise _wrong(content, edges.consumer[k], reason)
    if np.all(tail_slot < head_slot):
        return  # the columns are an order
    try:
        topological_order(content.cells.phase.size, *order_of_cells(content))
    except CycleError as error:
        reason = f"deadlock: no op of this cycle can start: {content.text_of_cycle(error.cycle)}"
        raise ScheduleError(reason, place=content.place(error.cycle[0])) from None


def check_updates(content: Content) -> None:
    """U cells apply every gradient once, and forwards read versions that exist."""
    rule, where = content.weights, content.where
    if not (content.cells.phase == Phase.U).any():
        if rule != NEWEST:
            raise ScheduleError(
                f"the table has a weight rule, {rule}, but no U cell updates weights"
            )
        return
    versions, forward, own = find_versions(content), where[Phase.F], where[Phase.U]
    gradient = content.last_of_backward
    for stage, microbatch in np.argwhere(versions.update_cell == NOWHERE):
        of_run = f", run {microbatch % rule.runs}," if rule.runs > 1 else ""
        reason = f"the gradient of {{op}} is never applied: no U of stage {stage}{of_run}"
        cell = gradient[stage, microbatch]
        raise _wrong(content, cell, f"{reason} stands after it", *WEIGHT_GRADS)
    for cell in own[(own != NOWHERE) & (own != versions.update_cell)]:
        reason = "op {op} does not apply the gradient that it is named after"
        raise _wrong(content, cell, f"{reason}: an update before it has done so", Phase.U)
    for place in zip(*np.nonzero(versions.read > versions.newest), strict=True):
        reason = (
            f"op {{op}} reads weights with {versions.read[place]} updates, but only "
            f"{versions.newest[place]} stand before it (behind={rule.behind})"
        )
        raise _wrong(content, forward[place], reason, Phase.F)
    for cell in forward[_reads_early(content, versions.newest)]:
        reason = (
            "op {op} begins a round before all runs have ended the one before it: a round is "
            f"{rule.runs} runs of {rule.local_steps} updates, then an average"
        )
        raise _wrong(content, cell, reason, Phase.F)


def _reads_early(content: Content, newest: NumpyArray) -> Bool[NumpyArray, "stages microbatches"]:
    """Where a forward of a round stands before an update of the rounds before it."""
    if content.weights.runs == 1:
        return np.zeros_like(newest, bool)
    where = content.where
    rounds = np.arange(content.num_microbatches) // content.weights.round_size
    # the last update of a copy of a stage in all rounds before one; a copy is a worker's
    last = np.full((content.num_workers, content.num_stages, rounds[-1] + 2), NOWHERE)
    stage, microbatch = np.nonzero(where[Phase.U] != NOWHERE)
    cell = where[Phase.U][stage, microbatch]
    np.maximum.at(last, (cell // content.num_slots, stage, rounds[microbatch] + 1), cell)
    last = np.maximum.accumulate(last, axis=2)
    worker = where[Phase.F] // content.num_slots
    return where[Phase.F] < last[worker, np.arange(content.num_stages)[:, None], rounds]


def check_communication(content: Content) -> None:
    """Each message between workers has one SEND after its producer, one RECV before its use."""
    is_message = np.isin(content.ops.phase, MESSAGES)
    if not is_message.any():
        return
    expected = np.zeros(content.cells.phase.size, bool)
    for producer, consumer, source, target, microbatch, _, direction, _ in zip(
        *(field.tolist() for field in find_dependencies(content).messages()), strict=True
    ):
        send, receive = MESSAGES[:2] if direction == FORWARD else MESSAGES[2:]
        expected[_transfer(content, Op(send, source, microbatch), producer, after=True)] = True
        expected[_transfer(content, Op(receive, target, microbatch), consumer, after=False)] = True
    cells = content.ops.cell[is_message]
    for cell in cells[~expected[cells]]:
        reason = "op {op} on worker {worker} belongs to no message between workers"
        raise _wrong(content, cell, reason)


def _transfer(content: Content, op: Op, partner: int, *, after: bool) -> int:
    """Find a SEND, after the op that makes its message, or a RECV, before the op that uses it."""
    cell = int(content.where[op.phase][op.stage, op.microbatch])
    is_before = cell % content.num_slots < partner % content.num_slots
    if cell != NOWHERE and is_before != after:
        return cell
    name = content.text(partner)
    if cell == NOWHERE:
        why = f"{name} {'sends' if after else 'waits for'} a message"
        raise _wrong(content, partner, f"missing op {op} on worker {{worker}}: {why}")
    side = f"before {name}, which makes" if after else f"after {name}, which waits for"
    raise _wrong(content, cell, f"deadlock: {{op}} on worker {{worker}} stands {side} its message")


RULES: tuple[Callable[[Content], None], ...] = (
    check_arrays,
    check_rows,
    check_ranges,
    check_workers,
    check_once,
    check_complete,
    check_order,
    check_updates,
    check_communication,
)


def check(content: Content) -> None:
    """Check a schedule completely."""
    for rule in RULES:
        rule(content)


def check_shares(shares: Sequence[float], num_stages: int) -> None:
    """Check that every stage has a positive share of the layers."""
    if not are_positive(shares, num_stages):
        raise ScheduleError(
            f"stage_shares needs {num_stages} positive numbers, got {abbreviated(shares)}",
            argument="stage_shares",
        )


def check_slots(slots: Slots) -> None:
    """Check that slot durations are positive and belong to phases that have one."""
    if not isinstance(slots, Mapping):
        raise ScheduleError(
            f"slots must be durations by phase letter, as {{'F': 1}}, got {slots!r}",
            argument="slots",
        )
    for letter, duration in slots.items():
        if letter not in UNIT_SLOTS:
            known = ", ".join(UNIT_SLOTS)
            raise ScheduleError(f"slots: unknown phase {letter!r}: known are {known}")
        if not are_positive([duration], 1):
            raise ScheduleError(
                f"slots: {letter} must be a finite number above 0, got {duration!r}"
            )
