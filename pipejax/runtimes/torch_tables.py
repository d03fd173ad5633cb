"""What PyTorch's runtime can be given, and why it cannot be given some tables.

Its table has one rank for each stage and one sequence of cells for each rank. Where there is
communication in it, each SEND needs its wait and no cell may be idle; messages of a pair of ranks
have no tags, so SENDs and RECVs match in the order in which they are posted.
"""

import itertools
import warnings

import numpy as np

from pipejax.runtimes.mpmd import with_known_cells
from pipejax.schedules.cells.ops import (
    CELL_PHASES,
    COMMUNICATION,
    COMPUTING,
    HOST,
    SHARDING,
    SPLIT,
    Op,
    Phase,
    receive_of,
)
from pipejax.schedules.table.communication_cells import with_sharding, with_waits
from pipejax.schedules.table.sharding import on_lane
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.schedules.table.table_files import RepairNotice, to_csv

KNOWN = (*SPLIT, Phase.B, *SHARDING, *COMMUNICATION)
ABSENT: dict[Phase, str] = {
    Phase.U: "it updates after the whole table",
    **dict.fromkeys((*HOST, Phase.WAIT_O), "it offloads nothing"),
    Phase.R: "it recomputes within the backward",
}
_OTHERS = [phase for phase in CELL_PHASES if phase not in {*KNOWN, *ABSENT}]
ABSENT |= dict.fromkeys(_OTHERS, "it has no such op")


def absent(table: ScheduleTable) -> dict[Phase, int]:
    """Count the cells that PyTorch's tables do not have, by phase."""
    count = {phase: int((table.phase == phase).sum()) for phase in ABSENT}
    return {phase: number for phase, number in count.items() if number}


def complete(table: ScheduleTable, *, sharding: bool) -> ScheduleTable:
    """Put what PyTorch's runtime needs beside SEND and RECV into a table that has these."""
    # Every SEND needs its wait. What gathers parameters and reduces gradients is asked for where
    # parameters are sharded, or gradients are to be means. A notice says what was put in.
    if not table.has_communication:
        return table
    whole = with_sharding(table) if sharding else table
    whole = whole.with_rows([with_waits([cell for cell in row if cell]) for row in whole.rows()])
    more = np.bincount(whole.phase.ravel(), minlength=len(Phase))
    more -= np.bincount(table.phase.ravel(), minlength=len(Phase))
    more[Phase.IDLE] = 0
    named = ", ".join(f"{more[phase]} {phase.name}" for phase in Phase if more[phase])
    if named:
        warnings.warn(
            f"{table.name}: {named} cells are put in, PyTorch's runtime needs them beside SEND and "
            "RECV",
            RepairNotice,
            stacklevel=2,
        )
    return whole


def to_torch_csv(table: ScheduleTable) -> str:
    """Leave out what PyTorch's runtime does not know, put in what it needs, and say so."""
    # Where gathers and reductions run is no part of it.
    table = on_lane(table, COMPUTING)
    check_usual(table, "PyTorch's runtime")
    check_ranks(table)
    known = with_known_cells(table, tuple(ABSENT), "PyTorch")
    return to_csv(complete(known, sharding=True))


def check_sayable(table: ScheduleTable) -> None:
    """Refuse a table that PyTorch's runtime cannot execute, with the reason."""
    check_usual(table, "PyTorch's runtime")
    name = f"PyTorch's runtime cannot run {table.name}"
    for phase, number in absent(table).items():
        raise ValueError(f"{name}: {number} {phase.name} cells, {ABSENT[phase]}")
    check_ranks(table)
    last = table.num_stages - 1
    ends = [op.microbatch for op in _ops(table) if op.phase is Phase.F and op.stage == last]
    for before, after in itertools.pairwise(ends):
        if before > after:
            raise ValueError(
                f"{name}: {last}F{before} stands before {last}F{after}, but it takes the losses "
                "of the last stage to be in the order of the microbatches"
            )
    _check_matching(table, name)


def check_ranks(table: ScheduleTable) -> None:
    """Refuse a table that has a stage on several workers, as those of two pipes have."""
    for stage, workers in enumerate(table.placement.T.tolist()):
        if len({*workers}) > 1:
            where = " and ".join(map(str, sorted({*workers})))
            raise ValueError(
                f"PyTorch's runtime cannot run {table.name}: stage {stage} is on workers {where}, "
                "it has one rank each"
            )


def _ops(table: ScheduleTable) -> list[Op]:
    return [op for row in table.rows() for cell in row for op in cell]


def _check_matching(table: ScheduleTable, name: str) -> None:
    """SENDs of one rank to another stand in the order of their RECVs."""
    workers = table.placement[0]
    expected: dict[tuple[int, int], list[Op]] = {}
    posted: dict[tuple[int, int], list[Op]] = {}
    for op in _ops(table):
        if op.phase in (Phase.SEND_F, Phase.SEND_B):
            receive = receive_of(op)
            pair = int(workers[op.stage]), int(workers[receive.stage])
            expected.setdefault(pair, []).append(receive)
        elif op.phase in (Phase.RECV_F, Phase.RECV_B):
            sender = op.stage + (-1 if op.phase is Phase.RECV_F else 1)
            posted.setdefault((int(workers[sender]), int(workers[op.stage])), []).append(op)
    for pair, order in expected.items():
        for due, found in zip(order, posted[pair], strict=True):
            if due != found:
                raise ValueError(
                    f"{name}: worker {pair[1]} posts {found} where worker {pair[0]} sends for "
                    f"{due}; messages of a pair match in the order in which they are posted"
                )
