"""Store of solved problems: a folder with one JSON file per problem, each written atomically.

A file is a certificate. A run checks its schedule. Its bound counts only for the versions of the
code that proved it; a checksum detects damage.
A plan is an order of ops, so it also runs in another problem of the same shape. If problem A
differs from problem B in its times alone, and none of them is above s times that of B, then the
best schedule of A takes at most s times as long as that of B: a bound of A, over s, is one of B.
"""

import dataclasses
import functools
import json
import math
import os
import warnings
from collections.abc import Mapping
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.analysis.certificates import SIZES, new_certificate
from pipejax.base.files import CACHE, cache_folder, code_hash, write_file
from pipejax.base.progress import Notice
from pipejax.checker.verify import certificate_checksum
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import from_json
from pipejax.search.schedule.plan import NEVER, Plan, broken_limit, table_objective, to_plan
from pipejax.search.schedule.problem import HOST_TIMES, NAMES, TIMES, Problem

MAX_READ = 20  # problems of one shape that are read, the newest first
PRICES = {phase.name: name for phase, name in NAMES.items()}  # fields of a problem by key
PRICES |= {"A": "all_reduce", "U": "update", "latency": "lag", "transmit": "transmit"}


class StoreWarning(Notice):
    """A file of the store was skipped, or could not be written."""


@functools.cache
def prover() -> dict[str, str]:
    """Return the versions of the code that a bound depends on."""
    try:
        solver = version("ortools")
    except PackageNotFoundError:
        solver = "none"
    return {"ortools": solver, "code": code_hash(Path(__file__).parent)}


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A solved problem with unit 1, valid for equal problems in any unit of time."""

    problem: Problem
    data: Mapping[str, Any]  # the certificate

    @property
    def objective(self) -> int:
        """Return the objective of the schedule [units]."""
        return int(self.data["claim"]["value"])

    @property
    def proven_bound(self) -> int:
        """Return the bound if this version of the code proved it, else 0 [units]."""
        is_ours = self.data["proof"]["prover"] == prover()
        return int(self.data["claim"]["lower_bounds"][0]["value"]) if is_ours else 0

    @functools.cached_property
    def table(self) -> ScheduleTable:
        """Return the schedule, after a check of limits and objective."""
        table = from_json(self.data["table"])
        if fault := broken_limit(self.problem, to_plan(self.problem, table)):
            raise ValueError(fault)
        objective = table_objective(self.problem, table)
        if not self.proven_bound <= objective == self.objective:
            raise ValueError(f"its schedule reaches {objective}, not {self.objective}")
        return table


def certify(
    problem: Problem, table: ScheduleTable, bound: int, *, seconds: float, source: str
) -> dict[str, Any]:
    """Write a solution as a certificate; times are whole units of the problem."""
    times = {key: getattr(problem, name) for key, name in PRICES.items()}
    memory = problem.sizes, problem.weight_sizes / problem.sizes, np.zeros_like(problem.sizes)
    data = new_certificate(
        "optimum",
        table,
        Links("queued" if problem.queues else "delay", host_links=problem.host_links),
        costs={
            "seconds": {key: time.tolist() for key, time in times.items() if time is not None},
            "memory": {name: size.tolist() for name, size in zip(SIZES, memory, strict=True)},
        },
        claim={
            "objective": problem.objective,
            "limits": problem.limits.tolist(),
            "offload": problem.offload is not None,
            "value": table_objective(problem, table),
            "lower_bounds": [{"by": "solver", "value": bound}],
        },
        proof={
            "starts": _starts(to_plan(problem, table)),
            "prover": prover(),
            "seconds": seconds,
            "source": source,
        },
    )
    data["proof"]["checksum"] = certificate_checksum(data)
    return data


def _starts(plan: Plan) -> dict[str, int]:
    """Return the start of each op by its name, such as 0F2; a whole backward is one op B."""
    starts = {}
    for letter, times in plan.starts.items():
        for (stage, microbatch), start in np.ndenumerate(times):
            is_whole = letter in "IW" and plan.whole[stage, microbatch]
            if start != NEVER and not (is_whole and letter == "W"):
                starts[f"{stage}{'B' if is_whole else letter}{microbatch}"] = int(start)
    return starts


def read_entry(path: Path) -> Entry:
    """Read a stored entry, without running its schedule."""
    data = json.loads(path.read_bytes())
    if data["proof"]["checksum"] != certificate_checksum(data):
        raise ValueError("its content does not agree with its checksum")
    costs, claim = data["costs"], data["claim"]
    fields = {name: costs["seconds"].get(key) for key, name in PRICES.items()}
    fields |= {"placement": data["table"]["placement"], "limits": claim["limits"]}
    fields |= {"microbatch_pipes": data["table"]["pipe_of_microbatch"]}
    fields |= {"sizes": costs["memory"]["sizes"]}
    arrays: dict[str, Any] = {
        name: None if value is None else np.array(value, np.int64) for name, value in fields.items()
    }
    shares = np.array(costs["memory"]["weight_share"])
    problem = Problem(
        **arrays | {"step_end": arrays.pop("all_reduce") + arrays["update"]},
        weight_sizes=np.round(shares * arrays["sizes"]).astype(np.int64),
        host_links=tuple(map(tuple, costs["links"]["host_links"])),
        objective=claim["objective"],
        unit=1.0,
        exact=True,
    )
    if problem.key != path.stem:
        raise ValueError("it is about another problem than its name says")
    return Entry(problem, data)


class SolvedProblems:
    """A folder of solved problems, created by the first write."""

    def __init__(self, path: str | Path | None = None) -> None:
        if path is None:
            path = os.environ.get(CACHE) or cache_folder("optimize")
        self.path = Path(path)
        self._reported: set[Path] = set()

    def get(self, problem: Problem) -> Entry | None:
        """Return the checked entry of a problem; None, with a warning, if it is invalid."""
        return self._read(self._file(problem))

    def put(
        self, problem: Problem, table: ScheduleTable, bound: int, *, seconds: float, source: str
    ) -> None:
        """Store the shorter schedule and the higher bound among this and the stored solution."""
        # A folder that cannot be written is a `StoreWarning`: the answer does not depend on it.
        problem = dataclasses.replace(problem, unit=1.0, exact=True)
        if fault := broken_limit(problem, to_plan(problem, table)):
            raise ValueError(fault)
        objective = table_objective(problem, table)
        if bound > objective:
            raise ValueError(f"bound {bound} is above the objective, {objective}")
        from pipejax.base.files import locked  # filelock is an extra

        try:
            with locked(self.path, wait=True):
                old = self.get(problem)
                if old is not None:
                    if objective >= old.objective and bound <= old.proven_bound:
                        return
                    proof = old.data["proof"]
                    seconds += proof["seconds"]
                    if objective >= old.objective:
                        table, objective, source = old.table, old.objective, proof["source"]
                    bound = min(max(bound, old.proven_bound), objective)
                new = certify(problem, table, bound, seconds=seconds, source=source)
                write_file(self._file(problem), json.dumps(new), is_locked=True)
        except OSError as error:
            self._warn(self.path, error.strerror or str(error))

    def similar(self, problem: Problem) -> tuple[list[ScheduleTable], int]:
        """Return the tables that keep the limits, and a bound [units] or 0, of similar problems."""
        path = self._file(problem)
        others = [other for other in path.parent.glob(f"{problem.shape}-*.json") if other != path]
        newest = sorted(others, key=lambda other: (_time(other), other.name), reverse=True)
        entries = [entry for other in newest[:MAX_READ] if (entry := self._read(other))]
        bounds = [scaled_bound(entry.problem, entry.proven_bound, problem) for entry in entries]
        tables = [entry.table for entry in entries]
        legal = [table for table in tables if not broken_limit(problem, to_plan(problem, table))]
        return legal, max(bounds, default=0)

    def _file(self, problem: Problem) -> Path:
        return self.path / f"{problem.key}.json"

    def _read(self, path: Path) -> Entry | None:
        """Return the entry of a file if its schedule runs as the file claims, else None."""
        try:
            entry = read_entry(path)
            _ = entry.table  # runs the schedule
            return entry
        except (FileNotFoundError, NotADirectoryError):  # `put` says the latter of the folder
            return None
        except OSError as error:
            self._warn(path, error.strerror or str(error))
        except ValueError as error:
            self._warn(path, str(error))
        except Exception:  # a damaged file may hold anything
            self._warn(path, "it is no solved problem")
        return None

    def _warn(self, path: Path, reason: str) -> None:
        if path not in self._reported:
            line = reason.splitlines()[0]
            warnings.warn(f"store: {path} is not used: {line}", StoreWarning, stacklevel=3)
        self._reported.add(path)


def _time(path: Path) -> float:
    """Return the modification time of a file [s]; a deleted file counts as the oldest."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def scaled_bound(other: Problem, bound: int, problem: Problem) -> int:
    """Return a bound of a problem from that of another one that differs in its times; 0 if none."""
    # If no time of `other` is above 3 times that of `problem`, its bound 60 gives the bound 20.
    both = problem, other
    names = [
        name
        for name in (*TIMES, *HOST_TIMES)
        if all(getattr(source, name) is not None for source in both)
    ]
    fields = {field.name for field in dataclasses.fields(Problem)} - {*names, "unit", "exact"}
    if any(not np.array_equal(getattr(other, name), getattr(problem, name)) for name in fields):
        return 0
    times, other_times = (
        np.concatenate([np.ravel(getattr(source, name)) for name in names]).tolist()
        for source in both
    )
    pairs = [pair for pair in zip(other_times, times, strict=True) if any(pair)]
    if any(time == 0 for _, time in pairs):
        return 0
    return math.ceil(bound / max((Fraction(*pair) for pair in pairs), default=Fraction(1)))
