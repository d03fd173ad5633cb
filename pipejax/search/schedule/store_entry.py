"""A solved problem as text; whatever can be checked is checked on reading.

A plan is checked by running it. A bound cannot be: it is kept with the versions of the code that
proved it, and a checksum tells a file that was damaged.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.checks import is_number, whole_number
from pipejax.base.data_files import parse_json
from pipejax.base.files import checksum
from pipejax.base.provenance import code_hash
from pipejax.schedules.cells.ops import format_cell
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.schedule.plan import Plan, objective_of, peaks, to_plan
from pipejax.search.schedule.problem import OBJECTIVES, Problem

FORMAT = "pipejax-optimized"
VERSION = 1
MAY_BE_MISSING = ("offload", "load")  # where nothing may leave


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """What is known of a problem. Times are whole units of it.

    Attributes:
      problem: the problem; its unit is 1, for it stands for those in all units of time.
      table: the best schedule known.
      objective: what the problem asks to be least, of this schedule.
      bound: what no schedule goes below.
      prover: versions of the code that proved the bound.
      seconds: spent on it, by all runs together.
      source: what made the schedule.
    """

    problem: Problem
    table: ScheduleTable
    objective: int
    bound: int
    prover: Mapping[str, str]
    seconds: float
    source: str

    @property
    def proven_bound(self) -> int:
        """The bound, if this version of the code proved it; 0 otherwise."""
        return self.bound if dict(self.prover) == prover() else 0


@functools.cache
def prover() -> dict[str, str]:
    """Return the versions of the code that a bound depends on."""
    try:
        solver = version("ortools")
    except PackageNotFoundError:
        solver = "none"
    return {"ortools": solver, "code": code_hash(Path(__file__).parent)}


def to_text(entry: Entry) -> str:
    """Write an entry as JSON."""
    plan = to_plan(entry.problem, entry.table)
    data = {name: getattr(entry, name) for name in KEPT} | {
        "format": FORMAT,
        "version": VERSION,
        "problem": entry.problem.content(),
        "name": entry.table.name,
        "rows": [[format_cell(cell) for cell in row] for row in entry.table.rows()],
        "starts": _starts(plan),
        "prover": dict(entry.prover),
    }
    return json.dumps(data | {"checksum": _checksum(data)})


def _starts(plan: Plan) -> dict[str, Any]:
    return {name: starts.tolist() for name, starts in dataclasses.asdict(plan).items()}


def _checksum(data: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in data.items() if key != "checksum"}
    return checksum(json.dumps(rest, sort_keys=True))


KEPT = ("objective", "bound", "seconds", "source")  # of an entry, as they are
_KEYS = {*KEPT, "format", "version", "problem", "name", "rows", "starts", "prover", "checksum"}


class Record(NamedTuple):
    """An entry whose schedule has not been run yet.

    Attributes:
      problem: the problem.
      objective: what the entry says that its schedule reaches [units].
      bound: as in `Entry`, 0 if other code proved it.
      data: the whole content.
    """

    problem: Problem
    objective: int
    bound: int
    data: Mapping[str, Any]

    def entry(self) -> Entry:
        """Run the schedule."""
        data, problem = self.data, self.problem
        table = ScheduleTable.from_rows(
            data["rows"],
            placement=problem.placement.astype(np.int32),
            pipe_of_microbatch=problem.pipe_of.astype(np.int32),
            name=data["name"],
        )
        plan = check_plan(problem, table)
        reached = objective_of(problem, plan)
        if reached != self.objective:
            raise ValueError(f"its schedule reaches {reached}, not {self.objective}")
        if _starts(plan) != data["starts"]:
            raise ValueError("its ops do not start when it says")
        known = (data[name] for name in ("bound", "prover", "seconds", "source"))
        return Entry(problem, table, reached, *known)


def from_text(text: str) -> Record:
    """Read an entry and check all but its schedule."""
    data = parse_json(text)
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    if (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f'expected "format": "{FORMAT}" and "version": {VERSION}, '
            f"got {data.get('format')!r} and {data.get('version')!r}"
        )
    if set(data) != _KEYS:
        raise ValueError(f"key {sorted(set(data) ^ _KEYS)[0]!r} is missing or unknown")
    if data["checksum"] != _checksum(data):
        raise ValueError("its content does not agree with its checksum")
    problem = _problem(data["problem"])
    rows, proved = data["rows"], data["prover"]
    texts = [*rows, [data["name"], data["source"]]] if isinstance(rows, list) else [rows]
    if not all(map(_are_texts, texts)) or not isinstance(proved, dict):
        raise ValueError("rows, name, source or prover is not of its form")
    if not is_number(data["seconds"]):
        raise ValueError(f"seconds must be a number of at least 0, got {data['seconds']!r}")
    objective, bound = (whole_number(data[key], key, least=0) for key in ("objective", "bound"))
    if bound > objective:
        raise ValueError(f"bound {bound} is above the objective, {objective}")
    return Record(problem, objective, bound if proved == prover() else 0, data)


def check_plan(problem: Problem, table: ScheduleTable) -> Plan:
    """Run a table and check that it keeps the limits."""
    plan = to_plan(problem, table)
    if plan.offloaded and problem.offload is None:
        raise ValueError("its schedule offloads, which the problem does not allow")
    for worker, (peak, limit) in enumerate(zip(peaks(problem, plan), problem.limits, strict=True)):
        if peak > limit:
            raise ValueError(
                f"its schedule takes {peak} of {limit} parts of the memory of worker {worker}"
            )
    return plan


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _problem(content: Any) -> Problem:
    names = {field.name for field in dataclasses.fields(Problem)} - {"unit", "exact"}
    if not isinstance(content, dict) or set(content) != names:
        raise ValueError(f"problem must be an object with {', '.join(sorted(names))}")
    hosts, objective = content["host_links"], content["objective"]
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}")
    if not (
        isinstance(hosts, list) and all(_whole(group, "host_links").ndim == 1 for group in hosts)
    ):
        raise ValueError("host_links are not groups of workers")
    given: dict[str, Any] = {
        name: None if value is None and name in MAY_BE_MISSING else _whole(value, name)
        for name, value in content.items()
        if name not in ("objective", "host_links")
    }
    if given["placement"].ndim != 2 or given["placement"].size == 0:
        raise ValueError("placement is no table of workers")
    pipes, stages = given["placement"].shape
    workers, microbatches = given["limits"].size, given["pipe_of"].size
    shapes = {"placement": (pipes, stages), "limits": (workers,), "pipe_of": (microbatches,)}
    shapes |= dict.fromkeys(("lag", "transmit"), (2, pipes, stages - 1))
    for name, values in given.items():
        if values is not None and values.shape != shapes.get(name, (stages,)):
            raise ValueError(f"problem: {name} has the wrong shape")
    if given["placement"].max() >= workers or given["pipe_of"].max(initial=0) >= pipes:
        raise ValueError("problem: a worker or a pipe does not exist")
    groups = tuple(tuple(group) for group in hosts)
    return Problem(**given, objective=objective, host_links=groups, unit=1.0, exact=True)


def _whole(value: Any, name: str) -> Any:
    """Read nested lists of whole numbers of at least 0; what is ragged or not whole is refused."""
    values = np.array(value)
    if (values.size and values.dtype.kind != "i") or (values < 0).any():
        raise ValueError(f"problem: {name} must be whole numbers of at least 0")
    return values.astype(np.int64)
