"""Store of solved problems: a folder with one JSON file per problem, each written atomically.

A file is a certificate. A run checks its schedule. Its bound counts only for the versions of the
code that proved it; a checksum detects damage.

A plan is an order of ops, so it also runs in another problem of the same shape. If no time of a
problem A is above s times that of a problem B, and every set of activations that fits in B fits in
A, then the best schedule of A takes at most s times as long as that of B. So a bound of A, divided
by s, is a bound of B.
"""

import dataclasses
import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipejax.analysis.certificates import SIZES, certificate_checksum, new_certificate
from pipejax.base.files import CACHE, cache_folder, code_hash, write_file
from pipejax.base.progress import Notice
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import from_json
from pipejax.search.schedule.plan import NEVER, Plan, broken_limit, table_objective, to_plan
from pipejax.search.schedule.problem import HOST_TIMES, NAMES, TIMES, Problem

Result = TypeVar("Result")
MAX_READ = 500  # problems of one shape that are read, the newest first
MAX_STARTS = 3  # tables of other problems that the search starts from
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
        return self._check_entry(self._file(problem))

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

    def nearest(self, problem: Problem) -> tuple[list[Entry], int]:
        """Return start entries, and a bound [units] or 0, both from problems of this shape."""
        entries = self._entries_of_shape(problem)
        upper_bounds, lower_bounds = [], []
        for path, entry in entries.items():
            upper_bound = upper_bound_from(entry.problem, entry.objective, problem)
            if upper_bound is not None:
                upper_bounds.append((upper_bound, path))
            lower_bounds.append((bound_from(entry.problem, entry.proven_bound, problem), path))
        start_paths = [path for _, path in sorted(upper_bounds)[:MAX_STARTS]]
        starts = [entries[path] for path in start_paths if self._check_entry(path, entries[path])]
        for bound, path in sorted(lower_bounds, reverse=True):
            if bound and self._check_entry(path, entries[path]):
                return starts, bound
        return starts, 0

    def _file(self, problem: Problem) -> Path:
        return self.path / f"{problem.key}.json"

    def _entries_of_shape(self, problem: Problem) -> dict[Path, Entry]:
        """Read the newest entries of other problems of the same shape, by file."""
        problem_path = self._file(problem)
        paths = [path for path in self.path.glob(f"{problem.shape}-*.json") if path != problem_path]
        newest = sorted(paths, key=lambda path: (_time(path), path.name), reverse=True)
        entries = {path: self._try(path, read_entry) for path in newest[:MAX_READ]}
        return {path: entry for path, entry in entries.items() if entry is not None}

    def _check_entry(self, path: Path, entry: Entry | None = None) -> Entry | None:
        """Return the entry of a file if its schedule runs as the file claims, else None."""
        entry = entry or self._try(path, read_entry)
        return entry if entry and self._try(path, lambda _: entry.table) else None

    def _try(self, path: Path, read: Callable[[Path], Result]) -> Result | None:
        """Read a file or run its schedule; skip an invalid file with a warning."""
        try:
            return read(path)
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


def stretch(problem: Problem, other: Problem) -> Fraction | None:
    """Return the largest ratio of a time in `other` to that in `problem`; None if infinite."""
    # Times 1 2 in `problem` and 2 3 in `other` have the ratios 2 and 1.5: the result is 2.
    have_offloads = problem.offload is not None and other.offload is not None
    names = (*TIMES, *(HOST_TIMES if have_offloads else ()))
    times = np.concatenate([np.ravel(getattr(problem, name)) for name in names])
    other_times = np.concatenate([np.ravel(getattr(other, name)) for name in names])
    if (other_times[times == 0] > 0).any():
        return None
    pairs = zip(other_times.tolist(), times.tolist(), strict=True)
    ratios = (Fraction(other_time, time) for other_time, time in pairs if time > 0)
    return max(ratios, default=Fraction(1))


def fits_in(problem: Problem, other: Problem) -> bool:
    """Return whether `other` has memory for every set of activations that fits in `problem`."""
    stage = np.broadcast_to(np.arange(problem.num_stages), problem.placement.shape)
    limit, other_limit = problem.limits[problem.placement], other.limits[problem.placement]
    sizes = (problem.sizes, other.sizes), (problem.weight_sizes, other.weight_sizes)
    # other_size / other_limit <= size / limit, in whole numbers
    return all(
        bool((other_size[stage] * limit <= size[stage] * other_limit).all())
        for size, other_size in sizes
    )


def bound_from(easier: Problem, bound: int, problem: Problem) -> int:
    """Transfer a lower bound from an easier problem, whose times may differ by a factor."""
    # If every time of `easier` is at most 3 times that of `problem`, and its bound is 60, that of
    # `problem` is 20. The result is 0 if `easier` is not easier: memory, offloads or links.
    may_offload = easier.offload is not None or problem.offload is None
    if not (may_offload and fits_in(problem, easier) and _shares_less(easier, problem)):
        return 0
    factor = stretch(problem, easier)

    return math.ceil(bound / factor) if factor else 0


def _shares_less(easier: Problem, problem: Problem) -> bool:
    """Return whether workers that share a host link in `easier` also share one in `problem`."""
    return problem.offload is None or all(
        any({*group} <= {*other} for other in problem.host_links) for group in easier.host_links
    )


def upper_bound_from(source: Problem, objective: int, problem: Problem) -> Fraction | None:
    """Return an upper bound for a plan of `source` in `problem`; None if it may not fit."""
    can_offload = source.offload is None or (
        problem.offload is not None and source.host_links == problem.host_links
    )
    factor = stretch(source, problem)
    if factor is None or not can_offload or not fits_in(source, problem):
        return None
    return factor * objective
