"""A solved problem as a certificate; whatever can be checked is checked on reading.

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

from pipejax.analysis.certificates import SIZES, certificate_checksum, new_certificate
from pipejax.base.checks import is_number, whole_number
from pipejax.base.data_files import parse_json
from pipejax.base.provenance import code_hash
from pipejax.checker.values import check_keys
from pipejax.checker.verify import read_envelope
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import check_json, from_json
from pipejax.search.schedule.plan import NEVER, Plan, fault_of, reached_by, to_plan
from pipejax.search.schedule.problem import NAMES, OBJECTIVES, Problem

OP_TIMES = {phase.name: name for phase, name in NAMES.items()}  # fields of a problem by letter
HOST = ("O", "L")  # letters of times that stand there where activations may go to the host
OTHER_TIMES = ("A", "U", "latency", "transmit")


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
    problem = entry.problem
    times = {letter: getattr(problem, name) for letter, name in OP_TIMES.items()}
    times |= {"A": problem.all_reduce, "U": problem.update}
    times |= {"latency": problem.lag, "transmit": problem.transmit}
    memory = problem.sizes, problem.kept / problem.sizes, np.zeros_like(problem.sizes)
    data = new_certificate(
        "optimum",
        entry.table,
        Links("queued" if problem.queues else "delay", host_links=problem.host_links),
        costs={
            "seconds": {key: time.tolist() for key, time in times.items() if time is not None},
            "memory": {name: size.tolist() for name, size in zip(SIZES, memory, strict=True)},
        },
        claim={
            "objective": problem.objective,
            "limits": problem.limits.tolist(),
            "offload": problem.offload is not None,
            "value": entry.objective,
            "lower_bounds": [{"by": "solver", "value": entry.bound}],
        },
        proof={
            "starts": _starts(to_plan(problem, entry.table)),
            "prover": dict(entry.prover),
            "seconds": entry.seconds,
            "source": entry.source,
        },
    )
    data["proof"]["checksum"] = certificate_checksum(data)
    return json.dumps(data)


def _starts(plan: Plan) -> dict[str, int]:
    """Start of each op by its name; a whole backward stands for its two halves."""
    found = {}
    for letter, starts in plan.starts.items():
        for (stage, microbatch), start in np.ndenumerate(starts):
            is_whole = letter in "IW" and plan.whole[stage, microbatch]
            if start != NEVER and not (is_whole and letter == "W"):
                found[f"{stage}{'B' if is_whole else letter}{microbatch}"] = int(start)
    return found


class Record(NamedTuple):
    """An entry whose schedule has not been run yet.

    Attributes:
      problem: the problem.
      objective: what the entry says that its schedule reaches [units].
      bound: as in `Entry`, 0 if other code proved it.
      data: the certificate.
    """

    problem: Problem
    objective: int
    bound: int
    data: Mapping[str, Any]

    def entry(self) -> Entry:
        """Run the schedule."""
        problem, claim, proof = self.problem, self.data["claim"], self.data["proof"]
        check_json(self.data["table"])
        table = from_json(self.data["table"])
        plan = check_plan(problem, table)
        reached = reached_by(problem, table)
        if reached != self.objective:
            raise ValueError(f"its schedule reaches {reached}, not {self.objective}")
        if _starts(plan) != proof["starts"]:
            raise ValueError("its ops do not start when it says")
        known = (proof[name] for name in ("prover", "seconds", "source"))
        return Entry(problem, table, reached, claim["lower_bounds"][0]["value"], *known)


def from_text(text: str) -> Record:
    """Read an entry and check all but its schedule."""
    data = parse_json(text)
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    read_envelope(data, "it")
    parts = data
    claim, proof = parts["claim"], parts["proof"]
    if parts["kind"] != "optimum":
        raise ValueError(f"it is a certificate of a {parts['kind']}, not of an optimum")
    if proof["checksum"] != certificate_checksum(parts):
        raise ValueError("its content does not agree with its checksum")
    problem = _problem(parts)
    if not isinstance(proof["source"], str) or not isinstance(proof["prover"], dict):
        raise ValueError("source or prover is not of its form")
    if not is_number(proof["seconds"]):
        raise ValueError(f"seconds must be a number of at least 0, got {proof['seconds']!r}")
    objective = whole_number(claim["value"], "value", least=0)
    if not isinstance(claim["lower_bounds"], list) or len(claim["lower_bounds"]) != 1:
        raise ValueError(f"lower_bounds must be one bound, got {claim['lower_bounds']!r}")
    bound = check_keys(claim["lower_bounds"][0], ("by", "value"), "its bound")["value"]
    bound = whole_number(bound, "bound", least=0)
    if bound > objective:
        raise ValueError(f"bound {bound} is above the objective, {objective}")
    return Record(problem, objective, bound if proof["prover"] == prover() else 0, parts)


def check_plan(problem: Problem, table: ScheduleTable) -> Plan:
    """Run a table and check that it keeps the limits."""
    plan = to_plan(problem, table)
    if fault := fault_of(problem, plan):
        raise ValueError(fault)
    return plan


def _problem(parts: Mapping[str, Any]) -> Problem:
    """Read the problem that a certificate is about; its table is not built."""
    costs, claim = parts["costs"], parts["claim"]
    if claim["objective"] not in OBJECTIVES:
        raise ValueError(f"unknown objective {claim['objective']!r}")
    host = HOST if claim["offload"] else ()
    letters = [key for key in (*OP_TIMES, *OTHER_TIMES) if key in host or key not in HOST]
    seconds = check_keys(costs["seconds"], letters, "its times")
    memory = check_keys(costs["memory"], SIZES, "its memory")
    table = {name: parts["table"].get(name) for name in ("placement", "pipe_of_microbatch")}
    given = {**table, **seconds, "limits": claim["limits"], "sizes": memory["sizes"]}
    found: dict[str, Any] = {name: _whole(value, name) for name, value in given.items()}
    placement, pipe_of, limits = (found[n] for n in (*table, "limits"))
    if placement.ndim != 2 or placement.size == 0:
        raise ValueError("placement is no table of workers")
    pipes, stages = placement.shape
    shapes = {"placement": (pipes, stages), "limits": (limits.size,)}
    shapes |= {"pipe_of_microbatch": (pipe_of.size,)}
    shapes |= dict.fromkeys(("latency", "transmit"), (2, pipes, stages - 1))
    for name, values in found.items():
        if values.shape != shapes.get(name, (stages,)):
            raise ValueError(f"its {name} has the wrong shape")
    if placement.max() >= limits.size or pipe_of.max(initial=0) >= pipes:
        raise ValueError("a worker or a pipe does not exist")
    shares = np.array(memory["weight_share"])
    if shares.shape != (stages,) or shares.dtype.kind not in "if":
        raise ValueError("its weight_share has the wrong shape")
    times: dict[str, Any] = {name: found.get(letter) for letter, name in OP_TIMES.items()}
    links = [field.name for field in dataclasses.fields(Links)]
    groups = Links(**check_keys(costs["links"], links, "its links")).host_links
    return Problem(
        placement=placement,
        pipe_of=pipe_of,
        **times,
        lag=found["latency"],
        transmit=found["transmit"],
        step_end=found["A"] + found["U"],
        update=found["U"],
        host_links=tuple(map(tuple, groups)),
        sizes=found["sizes"],
        kept=np.round(shares * found["sizes"]).astype(np.int64),
        limits=limits,
        objective=claim["objective"],
        unit=1.0,
        exact=True,
    )


def _whole(value: Any, name: str) -> Any:
    """Read nested lists of whole numbers of at least 0; what is ragged or not whole is refused."""
    values = np.array(value)
    if (values.size and values.dtype.kind != "i") or (values < 0).any():
        raise ValueError(f"its {name} must be whole numbers of at least 0")
    return values.astype(np.int64)
