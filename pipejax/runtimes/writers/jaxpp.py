"""JaxPP's task lists: a module whose `schedule` is given where JaxPP takes one of its own.

JaxPP gives every worker a list of tasks (github.com/NVIDIA/jaxpp, src/jaxpp/schedules.py). Where
any backward is split it splits all of them but those of the first stage, whose input needs no
gradient: there both halves stand where I stands.
"""

import warnings
from collections.abc import Iterator
from string import Template

from pipejax.runtimes.writers.mpmd_rows import checked, literal, ops_in, splits, title
from pipejax.schedules.cells.ops import Cell, Op, Phase
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import LossWarning

KINDS = {Phase.F: "FWD", Phase.B: "BWD", Phase.I: "BWD_I", Phase.W: "BWD_W"}  # members of TaskType
MODULE = Template('''"""$title.

    from this_module import schedule  # for jaxpp.treduce(..., schedule=schedule)
"""

import dataclasses

from jaxpp.schedules import BaseSchedule, FusedTask, Task
from jaxpp.types import TaskType

NUM_MICROBATCHES = $microbatches
PLACEMENT = $placement  # worker of each stage
SPLIT = $split  # whether backwards are split into BWD_I and BWD_W
# kind, stage and microbatch of each task, a row for each worker; several in one slot are fused
ROWS = $rows


def slot(tasks):
    """Make the task of a slot, or the fused one; an empty slot is None."""
    made = [Task.make(stage, microbatch, TaskType[kind]) for kind, stage, microbatch in tasks]
    return FusedTask(made) if len(made) > 1 else made[0] if made else None


@dataclasses.dataclass(eq=True, frozen=True)
class TableSchedule(BaseSchedule):
    """The table."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "is_partial_bwd", SPLIT)

    def get_mpmd_idx(self, stage_id):
        return PLACEMENT[stage_id]

    def tasks(self, n_mubatches):
        if n_mubatches != NUM_MICROBATCHES:
            raise ValueError(f"the table is for {NUM_MICROBATCHES} microbatches, not {n_mubatches}")
        return [[slot(tasks) for tasks in row] for row in ROWS]


schedule = TableSchedule(num_stages=len(PLACEMENT))
''')


def to_jaxpp(table: ScheduleTable) -> str:
    """Return a table as a module of Python for JaxPP; warn of what is left out or moved."""
    own = checked(table, "JaxPP")
    split = splits(own)
    rows = [
        [[_task(op) for op in ops_in(cell, split=split)] for cell in row]
        for row in _with_whole_first_stage(own)
    ]
    return MODULE.substitute(
        title=title(own, "JaxPP"),
        microbatches=own.num_microbatches,
        placement=tuple(own.placement[0].tolist()),
        split=split,
        rows=literal(rows),
    )


def _task(op: Op) -> tuple[str, int, int]:
    return KINDS[op.phase], op.stage, op.microbatch


def _with_whole_first_stage(table: ScheduleTable) -> Iterator[list[Cell]]:
    """Yield rows where W of stage 0 stands with its I, and warn where it stood apart."""
    moved = 0
    for row in table.rows():
        ops = [op for cell in row for op in cell]
        followed = zip(ops, [*ops[1:], None], strict=True)
        moved += sum(
            op[:2] == (Phase.I, 0) and behind != Op(Phase.W, 0, op.microbatch)
            for op, behind in followed
        )
        yield [tuple(_whole(op) for op in cell if op[:2] != (Phase.W, 0)) for cell in row]
    if moved:
        warnings.warn(
            f"{moved} weight gradients of stage 0 stand with its input gradients: JaxPP does not "
            "split the backward of the first stage",
            LossWarning,
            stacklevel=2,
        )


def _whole(op: Op) -> Op:
    return op._replace(phase=Phase.B) if op[:2] == (Phase.I, 0) else op
