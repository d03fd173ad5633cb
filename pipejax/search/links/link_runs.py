"""Runs that tell link models apart: a table, what it costs, and a known extra delay somewhere.

They come from Python, or from a CSV file with a row each.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import MAX_COUNT, check_types, number, one_of
from pipejax.base.data_files import positive_cell, read_each, read_lines, whole_cell
from pipejax.base.display import short_repr
from pipejax.costs.costs import PHASE_FIELDS, Costs, check_backward
from pipejax.costs.measured.costs_file import read_costs
from pipejax.costs.measured.measured_rows import COLUMNS as OF_MODELS
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.communication_cells import messages_of
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import read_table

PARTS = ("latency", "transmit")
FORMS = "an op (0F1), a message (0SEND_F1), a link (0-1) or a worker (worker2)"
_OP = re.compile(r"(\d+)([FBIWR])(\d+)", re.ASCII)
_MESSAGE = re.compile(r"(\d+)SEND_([FB])(\d+)", re.ASCII)
_LINK = re.compile(r"(\d+)-(\d+)", re.ASCII)
_WORKER = re.compile(r"worker(\d+)", re.ASCII)


@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class LinkRun:
    """One run of a known table at known costs, with an extra delay that is known too.

    Attributes:
      table: the schedule.
      costs: unbatched costs without the delay [s].
      delay_on: what was delayed: an op ("0F1"), a message ("0SEND_F1"), all messages of a link
        ("0-1", one direction), all ops of a worker ("worker2"), or nothing ("").
      delay: by how much [s], each of them.
      delay_of: part of a message that is longer: "latency" (it arrives later) or "transmit".
      seconds: the measured step time, or NaN where it is still to be measured.

    Raises:
      ValueError: if what is delayed does not exist in the table, or a number is wrong.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.5)
      >>> run = pj.links.LinkRun(table, costs, "0SEND_F1", 3.0, seconds=13.4)
      >>> pj.evaluate(table, run.delayed).makespan
      13.0
    """

    table: ScheduleTable
    costs: Costs
    delay_on: str = ""
    delay: float = 0.0
    delay_of: str = "latency"
    seconds: float = float("nan")

    def __post_init__(self) -> None:
        """Check that there is something to delay."""
        check_types(table=(self.table, ScheduleTable), costs=(self.costs, Costs))
        check_types(delay_on=(self.delay_on, str))
        one_of(self.delay_of, PARTS, "delay_of")
        object.__setattr__(self, "delay", number(self.delay, "delay"))
        if not np.isnan(self.seconds):
            number(self.seconds, "seconds")
        self.costs.check_values()
        _places(self.table, self.delay_on)

    @property
    def delayed(self) -> Costs:
        """Costs with the delay: those that it is on differ by microbatch."""
        if not self.delay_on or not self.delay:
            return self.costs
        found: dict[str, Any] = {}
        fused_on = set()
        for place in _places(self.table, self.delay_on):
            field = self.delay_of if place.phase is None else PHASE_FIELDS[place.phase.name]
            if field not in found:
                found[field] = _by_microbatch(self.table, field, getattr(self.costs, field))
            found[field][place.entry] += self.delay
            fused_on |= {place.phase}
        if self.costs.pair is not None and fused_on - {None} and self.table.is_fused.any():
            raise ValueError(
                f"delay_on {self.delay_on}: ops of fused pairs with a cost of their own cannot be "
                "delayed one by one: leave the pair cost out"
            )
        return dataclasses.replace(self.costs, **found)


class _Place(NamedTuple):
    """One entry of the costs: of an op (stage, microbatch), or of a message, without a phase."""

    phase: Phase | None
    entry: tuple[int, ...]


def _places(table: ScheduleTable, target: str) -> list[_Place]:
    """Find the entries of costs by microbatch that a delay is on."""
    if not target:
        return []
    if found := _MESSAGE.fullmatch(target):
        way, stage, m = int(found[2] == "B"), int(found[1]), int(found[3])
        sent = messages_of(table)
        is_it = (sent.from_stage == stage) & (sent.microbatch == m) & (sent.direction == way)
    elif found := _LINK.fullmatch(target):
        sent = messages_of(table)
        ends = sent.producer // table.num_slots, sent.consumer // table.num_slots
        is_it = (ends[0] == int(found[1])) & (ends[1] == int(found[2]))
    elif (found := _OP.fullmatch(target)) or (worker := _WORKER.fullmatch(target)):
        ops = [op for row in table.rows() for cell in row for op in cell]
        if found:
            ops = [op for op in ops if str(op) == target]
        else:
            rows = [*table.rows()]
            row = rows[int(worker[1])] if worker and int(worker[1]) < len(rows) else []
            ops = [op for cell in row for op in cell if op.phase.name in "FBIWR"]
        places = [_Place(op.phase, (op.stage, op.microbatch)) for op in ops]
        return _some(places, target)
    else:
        raise ValueError(f"delay_on must be {FORMS}, got {target!r}")
    columns = sent.direction, sent.pipe, sent.boundary(table.grammar.graph), sent.microbatch
    places = [
        _Place(None, place)
        for place in zip(*(column[is_it].tolist() for column in columns), strict=True)
    ]
    return _some(places, target)


def _some(places: list[_Place], target: str) -> list[_Place]:
    if not places:
        raise ValueError(f"delay_on {target!r} is not in the table: give {FORMS}")
    return places


def _by_microbatch(table: ScheduleTable, field: str, value: Any) -> NumpyArray:
    """Write a time out for every microbatch."""
    array = np.asarray(value, np.float64)
    shape: tuple[int, ...] = (table.num_stages, table.num_microbatches)
    if field in PARTS:
        shape = 2, table.num_pipes, table.num_stages - 1, table.num_microbatches
    return np.array(np.broadcast_to(array if array.ndim == len(shape) else array[..., None], shape))


SIZE = ("workers", "microbatches", "stages_per_worker")
OPS = ("F", "B", "I", "W", "R")
DELAYS = ("delay_on", "delay", "delay_of")
TABLE = ("table", "schedule", *SIZE)
COLUMNS = (*TABLE, "costs", *OPS, *PARTS, *DELAYS, "seconds", "source")


def read_link_runs(path: Path, *, is_measured: bool = True) -> list[tuple[dict[str, str], LinkRun]]:
    """Read runs of known tables at known costs, with an extra delay that is known too.

    A row has a `table` (a file) or a `schedule` with `workers`, `microbatches` and, where it is
    interleaved, `stages_per_worker`; `costs` (a file) or times of ops `F B I W R` [s]; `latency`
    and `transmit` of a message [s], 0 or those of the costs if not given; `delay_on`, `delay` [s]
    and `delay_of` as `LinkRun` has them; `seconds`, the measured step time; `source`, free text.
    Files are looked for where the rows are.

    Args:
      path: the file.
      is_measured: whether every row must have its step time.

    Returns:
      Cells by column and the run, for each row.
    """
    tables: dict[tuple[str, ...], ScheduleTable] = {}  # rows share them: each is lowered once

    def read(_: int, cells: dict[str, str]) -> tuple[dict[str, str], LinkRun]:
        key = tuple(cells.get(name, "") for name in TABLE)
        table = tables[key] = tables.get(key) or _table(path, cells)
        return cells, _run(path, cells, table, is_measured)

    return read_each(path, COLUMNS, read)


def are_link_runs(path: Path, *, otherwise: bool = False) -> bool:
    """Return whether the rows of a file are of links, not of models, by the columns of each.

    `otherwise` is what they are if no column tells.
    """
    header, of_links, of_models = {*read_lines(path)[0]}, {*COLUMNS}, {*OF_MODELS}
    more = len(header & (of_links - of_models)) - len(header & (of_models - of_links))
    return more > 0 or (more == 0 and otherwise)


def _run(path: Path, cells: Mapping[str, str], table: ScheduleTable, is_measured: bool) -> LinkRun:
    if is_measured and "seconds" not in cells:
        raise ValueError("seconds is missing: the measured step time")
    delayed = [name for name in DELAYS[:2] if name in cells]
    if len(delayed) == 1 or ("delay_of" in cells and not delayed):
        missing = next(name for name in DELAYS[:2] if name not in cells)
        given = next(name for name in DELAYS if name in cells)
        raise ValueError(f"{missing} is missing: {given} is given")
    costs = _costs(path, cells, table)
    costs.check_known(phase for phase in map(Phase, np.unique(table.phase)) if phase.name in OPS)
    return LinkRun(
        table,
        costs,
        cells.get("delay_on", ""),
        positive_cell(cells, "delay") if delayed else 0.0,
        cells.get("delay_of", PARTS[0]),
        positive_cell(cells, "seconds"),
    )


def _table(path: Path, cells: Mapping[str, str]) -> ScheduleTable:
    """Read or build what was run."""
    _one_way(cells, TABLE[0], TABLE[1:])
    if "table" in cells:
        return read_table(path.parent / cells["table"])
    for name in ("schedule", *SIZE[:2]):
        if name not in cells:
            raise ValueError(f"{name} is missing: give schedule, workers, microbatches, or a table")
    counts = {name: whole_cell(cells[name], name, 1, MAX_COUNT) for name in SIZE if name in cells}
    workers, microbatches = (counts.pop(name) for name in SIZE[:2])
    return schedules.build(
        cells["schedule"], num_workers=workers, num_microbatches=microbatches, **counts
    )


def _costs(path: Path, cells: Mapping[str, str], table: ScheduleTable) -> Costs:
    """What the run costs without the delay [s]."""
    _one_way(cells, "costs", OPS)
    messages = {name: positive_cell(cells, name, or_zero=True) for name in PARTS if name in cells}
    if "costs" in cells:
        return dataclasses.replace(read_costs(path.parent / cells["costs"], table), **messages)
    if "F" not in cells:
        raise ValueError("F is missing: give times of ops, or costs")
    given = [name for name in OPS if name in cells]
    times: dict[str, Any] = {
        PHASE_FIELDS[name]: positive_cell(cells, name, or_zero=True) for name in given
    }
    check_backward(times)
    return Costs(**times, **messages)


def _one_way(cells: Mapping[str, str], one: str, others: tuple[str, ...]) -> None:
    """Refuse two ways to say the same."""
    for name in others:
        if one in cells and name in cells:
            raise ValueError(f"{one} and {name} are given: {one} says that already")
