"""Runs that tell link models apart, from a CSV file, a row each."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipejax import schedules
from pipejax.base.checks import MAX_COUNT
from pipejax.base.data_files import positive_cell, read_cells, whole_cell
from pipejax.costs.costs import PHASE_FIELDS, Costs, check_backward
from pipejax.costs.measured import read_costs
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import read_table
from pipejax.search.links.link_runs import PARTS, LinkRun

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
    found = []
    tables: dict[tuple[str, ...], ScheduleTable] = {}  # rows share them: each is lowered once
    for number, cells in enumerate(read_cells(path, COLUMNS), 1):
        key = tuple(cells.get(name, "") for name in TABLE)
        try:
            table = tables[key] = tables.get(key) or _table(path, cells)
            found.append((cells, _run(path, cells, table, is_measured)))
        except ValueError as error:
            reason = getattr(error, "reason", error)  # a ScheduleError keeps its table apart
            raise ValueError(f"{path}, row {number}: {reason}") from None
    return found


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
