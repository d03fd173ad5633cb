"""Exports of tables to PyTorch's runtime, and to JAX runtimes with one program per worker.

Schedules of these JAX runtimes are Python objects, so an export is a Python module, with the rows
of the table as literals. Both JAX runtimes accept only tables with one pipe and F, B, I and W.
"""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from string import Template

import numpy as np

from pipejax.base.checks import check_types, resolve_choice
from pipejax.base.files import write_file
from pipejax.runtimes.formats import FORMATS
from pipejax.schedules.cells.ops import (
    CELL_PHASES,
    COMMUNICATION,
    COMPUTING,
    HOST,
    SHARDING,
    SPLIT,
    Cell,
    Op,
    Phase,
    matching_receive,
)
from pipejax.schedules.table.communication_cells import with_sharding, with_waits
from pipejax.schedules.table.sharding import on_sharding_lane
from pipejax.schedules.table.slot_simulation import with_idle_slots
from pipejax.schedules.table.table import ScheduleTable, check_usual, without_phases
from pipejax.schedules.table.table_files import LossWarning, RepairNotice, text_for, to_csv


def write_table(table: ScheduleTable, path: str | Path, *, format: str | None = None) -> None:
    """Write a table to a file; by default, the suffix .json or .csv decides the format.

    JSON holds the complete table. A CSV holds only the rows, and has no name but that of the file.
    If placement, slot durations, stage shares or weight rule do not follow from the rows, a
    warning says which of them are lost.

    Args:
      table: the schedule.
      path: the file; an existing file is replaced.
      format: format of `pipejax export`: "torch-csv", "jaxpp", "shardy" or "json". Cells that the
        other program lacks are left out, with a warning. None: by the suffix of the file.

    Raises:
      ValueError: if the format is unknown, if it cannot hold the table, or if the suffix is wrong.
      OSError: if the file cannot be written.

    Example:
      >>> import pathlib, tempfile, pipejax as pj
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "chimera.json"
      >>> pj.write_table(pj.schedules.build("chimera", num_workers=2, num_microbatches=2), path)
      >>> pj.read_table(path).num_pipes
      2
    """
    check_types(table=(table, ScheduleTable), path=(path, str, Path))
    if format is None:
        text = text_for(table, Path(path))
    else:
        formats = {name: form for name, form in FORMATS.items() if not form.is_run}
        text = formats[resolve_choice(format, formats, "format")].writer(table)
    write_file(path, text)


def with_known_cells(
    table: ScheduleTable, unknown: tuple[Phase, ...], runtime: str
) -> ScheduleTable:
    """Drop the cells whose phase is `unknown` to a runtime, with a warning."""
    counts = {phase: int((table.phase == phase).sum()) for phase in unknown}
    dropped = ", ".join(f"{count} {phase.name}" for phase, count in counts.items() if count)
    if not dropped:
        return table
    later = ": it updates after the whole table" if table.updates_within else ""
    warnings.warn(
        f"{dropped} cells are left out, {runtime} has none{later}; --format json keeps them",
        LossWarning,
        stacklevel=2,
    )
    return with_idle_slots(without_phases(table, unknown))


UNKNOWN = tuple(p for p in CELL_PHASES if p not in (*SPLIT, Phase.B))


def supported_table(table: ScheduleTable, runtime: str) -> ScheduleTable:
    """Drop cells that a runtime lacks, with a warning; refuse several pipes and grammars."""
    check_usual(table, runtime)
    if table.num_pipes > 1:
        raise ValueError(
            f"{runtime} places each stage on one worker, but {table.name} has {table.num_pipes} "
            "pipes; --format json holds them"
        )
    return with_known_cells(table, UNKNOWN, runtime)


def has_split_backwards(table: ScheduleTable) -> bool:
    """Return whether any backward is split into I and W."""
    return bool((table.op_cells[Phase.I] >= 0).any())


def cell_ops(cell: Cell, *, split: bool) -> list[Op]:
    """List the ops of a cell; with `split`, replace each B by an I and a W."""
    ops: list[Op] = []
    for op in cell:
        if split and op.phase is Phase.B:
            ops += [op._replace(phase=Phase.I), op._replace(phase=Phase.W)]
        else:
            ops.append(op)
    return ops


def literal(rows: Iterable[Sequence[object]]) -> str:
    """Write rows as a Python list with one line per row."""
    return "[\n" + "".join(f"    {row!r},\n" for row in rows) + "]"


def filled(name: str, **values: object) -> str:
    """Read the template `name` in this folder and fill in values."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def title(table: ScheduleTable, runtime: str) -> str:
    """Return the title of an exported module, with the escaped name of the table."""
    name = table.name.encode("unicode_escape").decode().replace('"', "'")
    sizes = f"{table.num_workers} workers, {table.num_stages} stages, {table.num_microbatches}"
    return f"{name}, {sizes} microbatches, written by pipejax for {runtime}"


# JaxPP: a module with a `schedule`, which JaxPP accepts like one of its own schedules.
#
# JaxPP gives every worker a list of tasks (github.com/NVIDIA/jaxpp, src/jaxpp/schedules.py). If
# any backward is split, JaxPP splits all backwards except those of the first stage, whose input
# needs no gradient. On the first stage, I and W are one task.

KINDS = {Phase.F: "FWD", Phase.B: "BWD", Phase.I: "BWD_I", Phase.W: "BWD_W"}  # members of TaskType


def to_jaxpp(table: ScheduleTable) -> str:
    """Write a table as a Python module for JaxPP; warn about dropped and moved cells."""
    table = supported_table(table, "JaxPP")
    split = has_split_backwards(table)
    rows = [
        [
            [(KINDS[op.phase], op.stage, op.microbatch) for op in cell_ops(cell, split=split)]
            for cell in row
        ]
        for row in _with_whole_first_stage(table)
    ]
    return filled(
        "jaxpp_module.txt",
        title=title(table, "JaxPP"),
        microbatches=table.num_microbatches,
        placement=tuple(table.placement[0].tolist()),
        split=split,
        rows=literal(rows),
    )


def _with_whole_first_stage(table: ScheduleTable) -> Iterator[list[Cell]]:
    """Yield the rows with unsplit backwards on stage 0; warn about W ops that run earlier."""
    # example: 0I0 1F1 0W0 becomes 0B0 1F1, so the weight gradient runs before 1F1
    num_moved = 0
    for row in table.rows():
        ops = [op for cell in row for op in cell]
        whole = {op: op._replace(phase=Phase.B) for op in ops if op[:2] == (Phase.I, 0)}
        for op, next_op in itertools.pairwise([*ops, None]):
            if op in whole and next_op != Op(Phase.W, 0, op.microbatch):
                num_moved += 1
        yield [tuple(whole.get(op, op) for op in cell if op[:2] != (Phase.W, 0)) for cell in row]
    if num_moved:
        warnings.warn(
            f"{num_moved} weight gradients of stage 0 move to its input gradients, because JaxPP "
            "does not split the backward of the first stage",
            LossWarning,
            stacklevel=2,
        )


# Shardy's MPMD: a module whose `schedule` is a PipelineSchedule with the orders of fragments.
#
# Shardy asks a schedule for rules about the fragments of each mesh, one mesh after another
# (github.com/openxla/shardy, shardy/integrations/python/jax/mpmd/pipeline.py). Users choose names
# and meshes of fragments, so the module finds fragments by stage, microbatch and direction.

TRANSPOSES = {Phase.F: 0, Phase.B: 1, Phase.I: 1, Phase.W: 1}  # how often a fragment is transposed
SPLIT_TYPES = {Phase.I: "KEEP_TRANSFERRED", Phase.W: "DROP_TRANSFERRED"}  # of split backwards


def to_shardy(table: ScheduleTable) -> str:
    """Write a table as a Python module for Shardy; warn about dropped cells."""
    table = supported_table(table, "Shardy")
    split = has_split_backwards(table)
    cells = [
        [
            [
                (op.stage, TRANSPOSES[op.phase], op.microbatch, SPLIT_TYPES.get(op.phase))
                for op in ops
            ]
            for ops in (cell_ops(cell, split=split) for cell in row)
        ]
        for row in table.rows()
    ]
    return filled(
        "shardy_module.txt",
        title=title(table, "Shardy"),
        placement=tuple(table.placement[0].tolist()),
        split=split,
        orders=literal([[fragment for cell in row for fragment in cell] for row in cells]),
        merged=literal(
            [cell for cell, is_fused in zip(row, row_is_fused, strict=True) if is_fused]
            for row, row_is_fused in zip(cells, table.is_fused, strict=True)
        ),
    )


# Tables for PyTorch's runtime, and reasons why the runtime cannot run a table.
#
# In PyTorch's runtime, a stage has one rank, and a rank has one sequence of cells. If a table has
# communication cells, each SEND needs a WAIT_SEND, and no cell may be idle. Messages between two
# ranks have no tags, so SENDs and RECVs match in the order in which they are posted.


KNOWN = (*SPLIT, Phase.B, *SHARDING, *COMMUNICATION)
ABSENT: dict[Phase, str] = {
    Phase.U: "it updates after the whole table",
    **dict.fromkeys((*HOST, Phase.WAIT_O), "it offloads nothing"),
    Phase.R: "it recomputes within the backward",
}
_OTHERS = [phase for phase in CELL_PHASES if phase not in {*KNOWN, *ABSENT}]
ABSENT |= dict.fromkeys(_OTHERS, "it has no such op")


def add_runtime_cells(table: ScheduleTable, *, sharding: bool) -> ScheduleTable:
    """Add the cells that PyTorch's runtime needs beside SEND and RECV, with a notice."""
    # These are a WAIT_SEND for every SEND and, with `sharding`, sharding cells.
    if not table.has_communication:
        return table
    result = with_sharding(table) if sharding else table
    result = result.with_rows([with_waits([cell for cell in row if cell]) for row in result.rows()])
    counts = np.bincount(result.phase.ravel(), minlength=len(Phase))
    counts -= np.bincount(table.phase.ravel(), minlength=len(Phase))
    counts[Phase.IDLE] = 0
    listed = ", ".join(f"{counts[phase]} {phase.name}" for phase in Phase if counts[phase])
    if listed:
        warnings.warn(
            f"{table.name}: {listed} cells are added, because PyTorch's runtime needs them beside "
            "SEND and RECV",
            RepairNotice,
            stacklevel=2,
        )
    return result


def to_torch_csv(table: ScheduleTable) -> str:
    """Write a table as a CSV for PyTorch, without lanes; warn about dropped cells."""
    table = on_sharding_lane(table, COMPUTING)
    check_usual(table, "PyTorch's runtime")
    check_ranks(table)
    runnable = with_known_cells(table, tuple(ABSENT), "PyTorch")
    return to_csv(add_runtime_cells(runnable, sharding=True))


def check_exportable(table: ScheduleTable) -> None:
    """Raise an error with the reason if PyTorch's runtime cannot execute a table."""
    check_usual(table, "PyTorch's runtime")
    name = f"PyTorch's runtime cannot run {table.name}"
    for phase, reason in ABSENT.items():
        if number := int((table.phase == phase).sum()):
            raise ValueError(f"{name}: {number} {phase.name} cells, {reason}")
    check_ranks(table)
    last = table.num_stages - 1
    ends = [op.microbatch for op in _ops(table) if op.phase is Phase.F and op.stage == last]
    for first, second in itertools.pairwise(ends):
        if first > second:
            raise ValueError(
                f"{name}: {last}F{first} stands before {last}F{second}, but the runtime "
                "takes the losses of the last stage to be in the order of the microbatches"
            )
    _check_matching(table, name)


def check_ranks(table: ScheduleTable) -> None:
    """Raise an error if several workers of a table have the same stage."""
    for stage, workers in enumerate(table.placement.T.tolist()):
        if len({*workers}) > 1:
            where = " and ".join(map(str, sorted({*workers})))
            raise ValueError(
                f"PyTorch's runtime cannot run {table.name}: stage {stage} is on workers {where}, "
                "but a stage must be on one rank"
            )


def _ops(table: ScheduleTable) -> list[Op]:
    return [op for row in table.rows() for cell in row for op in cell]


def _check_matching(table: ScheduleTable, name: str) -> None:
    """Check that each rank receives messages in the order in which another rank sends them."""
    # by (sender, receiver): RECV cells in the order of their SENDs, and in the order of the row
    workers = table.placement[0]
    expected: dict[tuple[int, int], list[Op]] = {}
    posted: dict[tuple[int, int], list[Op]] = {}
    for op in _ops(table):
        if op.phase in (Phase.SEND_F, Phase.SEND_B):
            receive = matching_receive(op)
            pair = int(workers[op.stage]), int(workers[receive.stage])
            expected.setdefault(pair, []).append(receive)
        elif op.phase in (Phase.RECV_F, Phase.RECV_B):
            sender = op.stage + (-1 if op.phase is Phase.RECV_F else 1)
            posted.setdefault((int(workers[sender]), int(workers[op.stage])), []).append(op)
    for pair, order in expected.items():
        for receive, posted_receive in zip(order, posted[pair], strict=True):
            if receive != posted_receive:
                raise ValueError(
                    f"{name}: worker {pair[1]} posts {posted_receive} where worker {pair[0]} sends "
                    f"for {receive}; messages of a pair match in the order in which they are posted"
                )
