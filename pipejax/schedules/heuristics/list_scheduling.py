"""Greedy list scheduling: the order that a placement and slot durations lead to.

Chimera and Hanayo are defined by their placement; the order of a row follows from running the
pipe in slots. Every worker that is free takes, among the ops whose inputs are there, a backward
before a forward and an earlier microbatch before a later one. A pipe admits a microbatch at its
first stage only while fewer than `in_flight_limit` of its microbatches are active, as 1F1B does.
"""

import heapq
from collections.abc import Mapping, Sequence

from pipejax.schedules.cells.ops import Cell, Op, Phase
from pipejax.schedules.cells.placement import Placement
from pipejax.schedules.table.slot_durations import check_slots


def list_schedule(
    placement: Placement,
    pipe_of: Sequence[int],
    slots: Mapping[str, float],
    stage_shares: Sequence[float],
    in_flight_limit: int,
) -> list[list[Cell]]:
    """Order the ops of all workers greedily."""
    check_slots(slots)
    num_pipes, num_stages = placement.shape
    worker_of = placement.tolist()
    rows: list[list[Cell]] = [[] for _ in range(int(placement.max()) + 1)]
    ready: list[list[tuple[bool, int, Op]]] = [[] for _ in rows]
    waiting = [[m for m, q in enumerate(pipe_of) if q == pipe][::-1] for pipe in range(num_pipes)]
    active = [0] * num_pipes
    ends: list[tuple[float, int, Op]] = []
    free = set(range(len(rows)))
    # ends closer than this are one moment: sums of slots that are no whole numbers are rounded
    same = 1e-9 * min(slots["F"], slots["B"]) * min(stage_shares)

    def offer(op: Op) -> None:
        worker = worker_of[pipe_of[op.microbatch]][op.stage]
        heapq.heappush(ready[worker], (op.phase is not Phase.B, op.microbatch, op))

    def admit(pipe: int) -> None:
        while waiting[pipe] and active[pipe] < in_flight_limit:
            active[pipe] += 1
            offer(Op(Phase.F, 0, waiting[pipe].pop()))

    def finish(op: Op) -> None:
        last = num_stages - 1
        if op.phase is Phase.F:
            offer(
                Op(Phase.F, op.stage + 1, op.microbatch)
                if op.stage < last
                else Op(Phase.B, last, op.microbatch)
            )
        elif op.stage > 0:
            offer(Op(Phase.B, op.stage - 1, op.microbatch))
        else:
            active[pipe_of[op.microbatch]] -= 1
            admit(pipe_of[op.microbatch])

    for pipe in range(num_pipes):
        admit(pipe)
    now = 0.0
    while True:
        for worker in sorted(free):
            if ready[worker]:
                op = heapq.heappop(ready[worker])[2]
                rows[worker].append((op,))
                end = now + slots[op.phase.name] * stage_shares[op.stage]
                heapq.heappush(ends, (end, worker, op))
                free.discard(worker)
        if not ends:
            return rows
        now = ends[0][0]
        while ends and ends[0][0] <= now + same:
            _, worker, op = heapq.heappop(ends)
            free.add(worker)
            finish(op)
