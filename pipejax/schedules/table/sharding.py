"""Sharded weights: cells that gather and drop weights of stages and reduce gradients.

UNSHARD gathers a stage's weights before its ops, RESHARD drops them, REDUCE_GRAD sums gradients.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.checks import check_types, resolve_choice, whole_number, wrong
from pipejax.schedules.cells.ops import (
    COMPUTING,
    NETWORK,
    SHARDING,
    WEIGHT_GRADS,
    AnyPhase,
    Cell,
    Op,
    Phase,
)
from pipejax.schedules.table.slot_simulation import with_host_order
from pipejax.schedules.table.table import ScheduleTable, dense_rows, without_phases

USES, STAGES = COUNTED = "uses", "stages"  # units of a lookahead
LANE_OPS = Phase.UNSHARD.name, Phase.REDUCE_GRAD.name  # sharding ops that may run on a lane
EachWorker = int | Sequence[int]


class Lookahead(NamedTuple):
    """Rule by which a worker gathers the weights of its stages ahead of use."""

    ahead: int  # how much earlier than its use a stage is gathered
    max_gathered_stages: int  # most stages whose weights are gathered at once
    # "uses": ops of the row; "stages": next stages, one more for a fused pair, as in PyTorch
    counted: str = USES


def insert_sharding(
    table: ScheduleTable,
    *,
    lookahead: EachWorker = 1,
    residency: EachWorker | None = None,
    counted: str = USES,
    lane: str = NETWORK,
    defer_reduce_grad_wait: bool = True,
) -> ScheduleTable:
    """Insert UNSHARD, RESHARD, REDUCE_GRAD and WAIT_REDUCE_GRAD cells into a table.

    Before an op, cells gather the weights of its stage and of the next stages, as far as lookahead
    and residency allow. Other cells drop the weights that are needed latest. If an op of the row
    updates the weights of a stage, these are dropped before the op and gathered again after it.

    Args:
      table: the schedule; its sharding cells are replaced.
      lookahead: by how many uses a gather precedes the op that needs it, for all workers or for
        each worker: 0 is right before this op, 1 before the previous op.
      residency: most stages of a worker that are gathered at once, for all workers or for each
        worker; None for all its stages.
      counted: unit of the lookahead: "uses" (ops), or "stages" (different next stages).
      lane: lane of UNSHARD and REDUCE_GRAD beside compute, or "compute" for the row.
      defer_reduce_grad_wait: whether a reduction is awaited only before the next one.

    Returns:
      The table, without idle cells unless it offloads; PyTorch's rule is lookahead 2, residency 3
      and counted "stages", on lane "compute" and without deferral.

    Raises:
      ValueError: if a number is wrong, or a fused pair needs more stages than residency allows.

    Example:
      >>> import pipejax as pj
      >>> table = pj.ScheduleTable.from_rows([["0F0", "1F0", "1B0", "0B0"]])
      >>> sharded = pj.schedules.insert_sharding(table, residency=1)
      >>> print(*(sharded.grammar.text(cell) for cell in list(sharded.rows())[0][:6]))
      0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0
    """
    check_types(table=(table, ScheduleTable), lane=(lane, str))
    check_types(defer_reduce_grad_wait=(defer_reduce_grad_wait, bool))
    counted = resolve_choice(counted, COUNTED, "counted")
    bare = without_phases(on_sharding_lane(table, COMPUTING), SHARDING)
    ahead = _per_worker(lookahead, table.num_workers, "lookahead", 0)
    max_stages = [max(table.num_stages, 1)] * table.num_workers
    if residency is not None:
        max_stages = _per_worker(residency, table.num_workers, "residency", 1)
    compute, rows = bare.grammar.compute_phases, []
    lookaheads = map(Lookahead, ahead, max_stages, itertools.repeat(counted))
    for row, worker_lookahead in zip(dense_rows(bare), lookaheads, strict=True):
        gathered_row = with_gathers(row, compute, worker_lookahead)
        ends = bare.grammar.backward_ends
        rows.append(with_reductions(gathered_row, defer_reduce_grad_wait, ends))
    sharded = bare.with_rows(with_host_order(bare, rows) if bare.offloads else rows)
    return on_sharding_lane(sharded, lane)


def on_sharding_lane(table: ScheduleTable, lane: str) -> ScheduleTable:
    """Return a table with gathers and reductions on a lane; the lane "compute" is the row."""
    lanes = {} if lane == COMPUTING else dict.fromkeys(LANE_OPS, lane)
    if lanes == table.grammar.lanes:
        return table
    return dataclasses.replace(table, grammar=dataclasses.replace(table.grammar, lanes=lanes))


def _per_worker(value: EachWorker, num_workers: int, name: str, least: int) -> list[int]:
    if isinstance(value, int | np.integer):
        return [whole_number(value, name, minimum=least)] * num_workers
    numbers = [whole_number(number, name, minimum=least) for number in value]
    if len(numbers) != num_workers:
        raise wrong(name, f"needs a number for each of the {num_workers} workers, got {value!r}")
    return numbers


def with_gathers(
    row: Sequence[Cell], compute: Sequence[AnyPhase], lookahead: Lookahead
) -> list[Cell]:
    """Return a row with cells that gather stages before their ops (UNSHARD) and drop them later."""
    # With lookahead 1 and room for one stage, 0F0 1F0 1B0 becomes
    # 0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD.
    cells: list[Cell] = []
    gathered: list[int] = []
    needs = _StageNeeds(row, compute, lookahead)
    for k, cell in enumerate(row):
        updated = [op.stage for op in cell if op.phase == Phase.U]
        if needs.stages[k]:
            resident, next_stages = needs.resident_and_gathered(k)
            cells += [(Op(Phase.RESHARD, stage),) for stage in gathered if stage not in resident]
            cells += [(Op(Phase.UNSHARD, stage),) for stage in next_stages if stage not in gathered]
            gathered = [stage for stage in gathered if stage in resident]
            gathered += [stage for stage in next_stages if stage not in gathered]
        cells += [(Op(Phase.RESHARD, stage),) for stage in updated if stage in gathered]
        gathered = [stage for stage in gathered if stage not in updated]
        cells.append(cell)
    return cells + [(Op(Phase.RESHARD, stage),) for stage in gathered]


class _StageNeeds:
    """Stages that a row's ops need, and stages that a lookahead gathers for these ops."""

    def __init__(
        self, row: Sequence[Cell], compute: Sequence[AnyPhase], lookahead: Lookahead
    ) -> None:
        """Find the stages of ops with phases in `compute`; check that they fit at once."""
        self._lookahead, self._row = lookahead, row
        # different stages of the ops of each cell
        self.stages = [
            list(dict.fromkeys(op.stage for op in cell if op.phase in compute)) for cell in row
        ]
        max_needed = max(map(len, self.stages), default=0)
        if max_needed > lookahead.max_gathered_stages:
            raise ValueError(
                f"residency must be at least {max_needed}, got {lookahead.max_gathered_stages}: "
                "a fused pair needs both of its stages"
            )
        self._num_later_stages = [0] * len(row)  # different stages from each cell to the end
        later_stages: set[int] = set()
        for k in reversed(range(len(row))):
            later_stages.update(self.stages[k])
            self._num_later_stages[k] = len(later_stages)

    def resident_and_gathered(self, first: int) -> tuple[list[int], list[int]]:
        """Return (next stages that may stay gathered at cell `first`, next stages that must be)."""
        ahead, max_stages, counted = self._lookahead
        resident = self._next_stages(first, max_stages, len(self._row))
        if counted == STAGES:
            return resident, self._next_stages(first, min(ahead + 1, max_stages), len(self._row))
        return resident, self._next_stages(first, max_stages, ahead + 1)

    def _next_stages(self, first: int, count: int, uses: int) -> list[int]:
        """Return up to `count` stages of the next `uses` compute cells, except updated stages."""
        # A fused pair whose stages would exceed `count` ends the search if the lookahead counts
        # uses; if it counts stages, the pair may exceed it.
        stages: dict[int, None] = {}
        updated: set[int] = set()
        for k in range(first, len(self._row)):
            cell, cell_stages = self._row[k], self.stages[k]
            updated |= {op.stage for op in cell if op.phase == Phase.U}
            new = [stage for stage in cell_stages if stage not in stages and stage not in updated]
            if stages and self._lookahead.counted == USES and len(stages) + len(new) > count:
                break
            stages |= dict.fromkeys(new)
            if cell_stages:
                uses -= 1
            if not uses or len(stages) >= min(count, self._num_later_stages[first]):
                break
        return list(stages)


def with_reductions(
    row: Sequence[Cell], deferred: bool, ends: Sequence[AnyPhase] = WEIGHT_GRADS
) -> list[Cell]:
    """Return a row with REDUCE_GRAD and WAIT_REDUCE_GRAD after each stage's last backward."""
    # If U cells update weights, each update has its own last backward. One reduction runs at a
    # time; `deferred` puts its wait before the next reduction or update.
    last_gradients = set(_last_gradients(row, ends))
    cells: list[Cell] = []
    pending: list[Cell] = []
    for k, cell in enumerate(row):
        waits = {(Op(Phase.WAIT_REDUCE_GRAD, op.stage),) for op in cell if op.phase == Phase.U}
        cells += [wait for wait in pending if wait in waits]
        pending = [wait for wait in pending if wait not in waits]
        cells.append(cell)
        for op in cell:
            if (k, op) in last_gradients:
                cells += [*pending, (Op(Phase.REDUCE_GRAD, op.stage),)]
                pending = [(Op(Phase.WAIT_REDUCE_GRAD, op.stage),)]
                if not deferred:
                    cells.append(pending.pop())
    return cells + pending


def _last_gradients(row: Sequence[Cell], ends: Sequence[AnyPhase]) -> Iterator[tuple[int, Op]]:
    """Yield position and op of each stage's last backward, in the row or before an update U."""
    last: dict[int, tuple[int, Op]] = {}
    for k, cell in enumerate(row):
        for op in cell:
            if op.phase in ends:
                last[op.stage] = k, op
            elif op.phase == Phase.U and op.stage in last:
                yield last.pop(op.stage)
    yield from last.values()
