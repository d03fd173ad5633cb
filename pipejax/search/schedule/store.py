"""Store of solved problems: a folder with one JSON file per problem, each written atomically.

A file is a certificate. A run checks the schedule in the file, and a checksum detects damage. The
lower bound in the file counts only if the present version of the code proved it.
"""

import dataclasses
import functools
import json
import os
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.certificates import SIZES, new_certificate
from pipejax.base.files import CACHE, cache_folder, code_hash, write_file
from pipejax.base.progress import Notice
from pipejax.checker.verify import certificate_checksum
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import from_json
from pipejax.search.schedule.plan import NEVER, Plan, broken_limit, table_objective, to_plan
from pipejax.search.schedule.problem import NAMES, Problem

PRICES = {phase.name: name for phase, name in NAMES.items()}  # {key in a file: problem's field}
PRICES |= {"A": "all_reduce", "U": "update", "latency": "lag", "transmit": "transmit"}


class StoreWarning(Notice):
    """A file of the store was skipped, or could not be written."""


@functools.cache
def prover() -> dict[str, str]:
    """Return the versions of the code that a bound depends on."""
    return {"ortools": version("ortools"), "code": code_hash(Path(__file__).parent)}


class Entry(NamedTuple):
    """A solved problem with unit 1, valid for equal problems in any unit of time."""

    problem: Problem
    table: ScheduleTable  # the best schedule, checked by a run
    objective: int  # objective of the schedule [units]
    proven_bound: int  # lower bound [units]; 0 if another version of the code proved it
    seconds: float  # time that searches have spent on the problem
    source: str  # step of the search that found the schedule


def certify(
    problem: Problem, table: ScheduleTable, bound: int, *, seconds: float, source: str
) -> dict[str, Any]:
    """Return a solution as the JSON content of a certificate, in units of the problem."""
    times = {key: getattr(problem, name) for key, name in PRICES.items()}
    memory = problem.sizes, problem.weight_sizes / problem.sizes, np.zeros_like(problem.sizes)
    starts = _starts(to_plan(problem, table))
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
        proof={"starts": starts, "prover": prover(), "seconds": seconds, "source": source},
    )
    data["proof"]["checksum"] = certificate_checksum(data)
    return data


def _starts(plan: Plan) -> dict[str, int]:
    """Return {name of an op, such as 0F2: start}; a full backward is one op B."""
    starts = {}
    for letter, times in plan.starts.items():
        for (stage, microbatch), start in np.ndenumerate(times):
            is_whole = plan.whole[stage, microbatch]
            name = {"I": "B", "W": ""}.get(letter, letter) if is_whole else letter  # W is in B
            if start != NEVER and name:
                starts[f"{stage}{name}{microbatch}"] = int(start)
    return starts


def read_entry(path: Path) -> Entry:
    """Read and check a stored entry; a damaged file may raise any error."""
    data = json.loads(path.read_bytes())
    table, costs, claim, proof = (data[key] for key in ("table", "costs", "claim", "proof"))
    if proof["checksum"] != certificate_checksum(data):
        raise ValueError("its content does not agree with its checksum")
    fields = {name: costs["seconds"].get(key) for key, name in PRICES.items()}
    fields |= {"placement": table["placement"], "microbatch_pipes": table["pipe_of_microbatch"]}
    fields |= {"limits": claim["limits"], "sizes": costs["memory"]["sizes"]}
    arrays: dict[str, Any] = {
        name: None if value is None else np.array(value, np.int64) for name, value in fields.items()
    }
    weight_sizes = np.round(np.array(costs["memory"]["weight_share"]) * arrays["sizes"])
    problem = Problem(
        **arrays | {"step_end": arrays.pop("all_reduce") + arrays["update"]},
        weight_sizes=weight_sizes.astype(np.int64),
        host_links=tuple(map(tuple, costs["links"]["host_links"])),
        objective=claim["objective"],
        unit=1.0,
        exact=True,
    )
    if problem.key != path.stem:
        raise ValueError("its problem does not match the name of its file")
    schedule = from_json(table)
    if fault := broken_limit(problem, to_plan(problem, schedule)):
        raise ValueError(fault)
    bound = int(claim["lower_bounds"][0]["value"]) if proof["prover"] == prover() else 0
    objective = table_objective(problem, schedule)
    if not bound <= objective == claim["value"]:
        raise ValueError(f"its schedule reaches {objective}, not {claim['value']}")
    return Entry(problem, schedule, objective, bound, proof["seconds"], proof["source"])


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
        """Store the shorter schedule and the higher bound of this solution and the stored one."""
        # If the folder cannot be written, warn (`StoreWarning`): no answer depends on the store.
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
                    seconds += old.seconds
                    if objective >= old.objective:
                        table, objective, source = old.table, old.objective, old.source
                    bound = min(max(bound, old.proven_bound), objective)
                new = certify(problem, table, bound, seconds=seconds, source=source)
                write_file(self._file(problem), json.dumps(new), is_locked=True)
        except OSError as error:
            self._warn(self.path, error.strerror or str(error))

    def _file(self, problem: Problem) -> Path:
        return self.path / f"{problem.key}.json"

    def _read(self, path: Path) -> Entry | None:
        """Return the entry of a file if its schedule runs as the file claims, else None."""
        try:
            return read_entry(path)
        except (FileNotFoundError, NotADirectoryError):  # `put` warns about a wrong folder
            return None
        except (OSError, ValueError) as error:
            self._warn(path, str(error))
        except Exception:  # a damaged file may hold anything
            self._warn(path, "its content is not a solved problem")
        return None

    def _warn(self, path: Path, reason: str) -> None:
        if path not in self._reported:
            line = reason.splitlines()[0]
            warnings.warn(f"store: {path} is not used: {line}", StoreWarning, stacklevel=3)
        self._reported.add(path)
