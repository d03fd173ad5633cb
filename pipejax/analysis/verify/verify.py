"""`verify`: everything that a certificate claims, derived again and compared."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.analysis.verify.bounds import DERIVED, derived_bounds
from pipejax.analysis.verify.certificate_file import (
    FormulaContent,
    RunContent,
    checksum_of,
    read_certificate,
)
from pipejax.analysis.verify.event_run import (
    Event,
    EventRun,
    by_worker,
    memory_curves,
    peaks_in_flight,
)
from pipejax.analysis.verify.formula_check import formula_claim, formula_problems
from pipejax.base.checks import check_types, is_number
from pipejax.base.data_files import load_json
from pipejax.base.display import short_repr, short_repr_of
from pipejax.schedules.cells.ops import ScheduleError

NO_OPS = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B")
SEARCHED = ("F", "B", "I", "W", "O", "L")  # phases that an optimum has starts of
COUNTS = ("peak_in_flight", "offloaded")  # whole numbers, which nothing rounds
MEMORY = ("peak_memory", "held")  # in the unit of the sizes; all other numbers are times
UNPROVED = "which needs a makespan (path), limits (memory), no offloads (chain), times of O and L"
ROUNDING = 1e-9  # by which sums of floats may differ, of the largest time or memory (`_Rounding`)


@short_repr
class Discrepancy(NamedTuple):
    """One claim that does not hold.

    Attributes:
      claim: what is claimed, down to the op, with its worker and slot, or the worker.
      claimed: the value that the certificate states; None where it states none.
      derived: the value that was derived; None where there is none.
      why: what decides the derived value.
    """

    claim: str
    claimed: Any
    derived: Any
    why: str = ""

    def __str__(self) -> str:
        """Return one line."""
        claimed, derived = (
            "nothing" if value is None else value for value in (self.claimed, self.derived)
        )
        line = f"{self.claim}: claimed {claimed}, derived {derived}"
        return line + f", {self.why}" * bool(self.why)


@short_repr
class CheckedBound(NamedTuple):
    """A lower bound that a certificate claims.

    Attributes:
      value: the bound, in the unit of the verdict.
      by: what it rests on: "path", "worker", "stage", "memory chain" or "memory area"; anything
        else is the word of who found it, as "solver".
      checked: whether it was derived again.
    """

    value: float
    by: str
    checked: bool


@short_repr_of("ok makespan problems bounds")
class Verdict(NamedTuple):
    """What a certificate is worth.

    Attributes:
      makespan: as derived, in `unit`; None where the schedule cannot run.
      problems: claims that do not hold.
      bounds: the lower bounds that are claimed.
      unit: of times: "seconds", or "units" of a solved problem, which says no more of them.
      form: of a closed form what its claim is, as "exact for F = 1, B from 1 to 3".
    """

    makespan: float | None
    problems: tuple[Discrepancy, ...]
    bounds: tuple[CheckedBound, ...] = ()
    unit: str = "seconds"
    form: str = ""

    @property
    def ok(self) -> bool:
        """Whether all claims hold."""
        return not self.problems


def verify(certificate: str | Path | Mapping[str, Any]) -> Verdict:
    """Derive everything that a certificate claims by other means than the engine, and compare.

    The checker shares no code with the engine but the reader of tables: it runs the table as
    events that wait for events, in plain Python, as docs/semantics.md says.

    Args:
      certificate: of a run, of a closed form or of a solved problem, or a file that holds it.

    Returns:
      The makespan as derived, the claims that do not hold, and what lower bounds rest on.

    Raises:
      ValueError: if it is no certificate: another version, a key that is missing or unknown, costs
        that do not fit the table.
      OSError: if the file cannot be read.

    Cost:
      Linear in the ops of the table but for sorting: some seconds for a hundred thousand.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> claimed = pj.certificate(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)))
      >>> verdict = pj.verify(claimed)
      >>> verdict.ok, verdict.makespan
      (True, 15.0)
      >>> claimed["proof"]["ops"]["1F0 (worker 1, slot 1)"]["start"] = 0.5
      >>> print(*pj.verify(claimed).problems)
      ops: 1F0 (worker 1, slot 1): start: claimed 0.5, derived 1.0, behind 0SEND_F0 (worker 0 to 1)
    """
    check_types(certificate=(certificate, str, Path, Mapping))
    data = certificate if isinstance(certificate, Mapping) else load_json(Path(certificate))
    name = "certificate" if isinstance(certificate, Mapping) else str(certificate)
    try:
        content = read_certificate(data, name)
    except ScheduleError as error:  # there is a table, and it cannot run
        return Verdict(None, (Discrepancy("table", "legal", error.reason),))
    if isinstance(content, FormulaContent):
        found = tuple(Discrepancy(*each) for each in formula_problems(content))
        return Verdict(None, found, form=formula_claim(content))
    run = EventRun(content.table, content.costs, content.links)
    if cycle := run.deadlock():
        waits = " waits for ".join(map(run.name, [*cycle, cycle[0]]))
        return Verdict(None, (Discrepancy("run", "to the end", f"deadlock: {waits}"),))
    derived = derived_claims(run, content)
    within = _Rounding.of(content, derived)
    compared = derived if content.kind == "run" else _of_optimum(run, content, derived, data)
    problems = [
        problem
        for name, value in compared.items()
        for problem in _differences(content.claims[name], value, within.of_claim(name), name)
    ]
    above = _above_limits(content, derived["peak_memory"], within.memory)
    bounds, wrong = _check_bounds(content, derived, within.time)
    problems = [*_explained(run, problems), *above]
    unit = "units" if content.kind == "optimum" else "seconds"
    return Verdict(derived["makespan"], (*problems, *wrong), bounds, unit)


def derived_claims(run: EventRun, content: RunContent) -> dict[str, Any]:
    """Derive what a certificate claims of a run, in the form in which it does."""
    events = sorted(run.end, key=lambda event: run.start[event])  # so that causes come first
    own: list[list[Event]] = [[] for _ in run.rows]
    for event in events:
        if (worker := run.worker_of(event)) is not None:
            own[worker].append(event)
    no_ops = (*NO_OPS, *(k for k, kind in run.own.kinds.items() if kind.of == "stage"))
    spans = [
        max(run.end[e] for e in ops) - min(run.start[e] for e in ops) if ops else 0.0
        for ops in ([e for e in each if not run.holds(e, no_ops)] for each in own)
    ]
    curves = memory_curves(run, content.sizes)
    return {
        "makespan": max(run.end.values()),
        "max_span": max(spans),
        "busy": by_worker(sum(run.lasts[e] for e in each) for each in own),
        "peak_in_flight": by_worker(peaks_in_flight(run)),
        "offloaded": sum(op[0] == "O" for op in run.at),
        "ops": {
            run.name(e): {"start": run.start[e], "end": run.end[e]}
            for e in events
            if e not in run.message
        },
        "transfers": {
            run.name(e): {"leaves": run.start[e], "arrives": run.end[e] + run.message[e].later}
            for e in events
            if e in run.message
        },
        "peak_memory": by_worker(max([0.0, *(held for _, held in c)]) for c in curves),
        "held_from": by_worker([moment for moment, _ in curve] for curve in curves),
        "held": by_worker([held for _, held in curve] for curve in curves),
    }


def _of_optimum(
    run: EventRun, content: RunContent, derived: Mapping[str, Any], data: Mapping[str, Any]
) -> dict[str, Any]:
    """Derive what an optimum claims of its run: times are whole units."""
    starts = {
        f"{stage}{phase}{microbatch}": run.start[cell]
        for (phase, stage, microbatch), cell in run.at.items()
        if phase in SEARCHED
    }
    value = derived["max_span" if content.objective == "span" else "makespan"]
    return {"value": value, "starts": starts, "checksum": checksum_of(data)}


class _Rounding(NamedTuple):
    """By how much claims may differ from what is derived: the one tolerance of the checker.

    Attributes:
      time: of the makespan, the largest of all times [s].
      memory: of the most that a worker holds, or of the largest activation, in their unit.
      counts: of the most activations, where items are parts of them; else whole numbers.
    """

    time: float
    memory: float
    counts: float

    @classmethod
    def of(cls, content: RunContent, derived: Mapping[str, Any]) -> "_Rounding":
        """Take the largest number of each kind."""
        sizes, peaks = content.sizes, derived["peak_memory"].values()
        memory = _largest([sizes.whole, sizes.checkpoints, *peaks])
        counts = _largest([*derived["peak_in_flight"].values()])
        is_whole = not content.table.grammar.items
        return cls(
            *(ROUNDING * x for x in (derived["makespan"], memory, 0 if is_whole else counts))
        )

    def of_claim(self, name: str) -> float:
        """Return what holds for the numbers of a claim."""
        return self.counts if name in COUNTS else self.memory if name in MEMORY else self.time


def _largest(value: Any) -> float:
    """Largest number within lists."""
    if isinstance(value, list):
        return max(map(_largest, value), default=0.0)
    return float(value)


def _differences(claimed: Any, derived: Any, within: float, where: str) -> Iterator[Discrepancy]:
    """Compare a claim with what was derived, down to single numbers."""
    if claimed == derived and not _has_truth(claimed):  # to the last bit, as nearly always
        return
    if isinstance(claimed, Mapping) and isinstance(derived, Mapping):
        for key in [*derived, *(key for key in claimed if key not in derived)]:
            pair = claimed.get(key), derived.get(key)
            yield from _differences(*pair, within, f"{where}: {key}")
    elif isinstance(claimed, list) and isinstance(derived, list) and len(claimed) == len(derived):
        for number, pair in enumerate(zip(claimed, derived, strict=True)):
            yield from _differences(*pair, within, f"{where}[{number}]")
    elif not (_is_finite(claimed) and _is_finite(derived) and abs(claimed - derived) <= within):
        yield Discrepancy(where, claimed, derived)


def _has_truth(value: Any) -> bool:
    """Whether true or false stand within a claim: Python takes them for the numbers 1 and 0."""
    if isinstance(value, Mapping | list):
        return any(map(_has_truth, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return is_number(value, least=-math.inf)


def _explained(run: EventRun, problems: Iterable[Discrepancy]) -> Iterator[Discrepancy]:
    """Say of each wrong start what the op or transfer waits for."""
    events: dict[str, Event] = {}
    for problem in problems:
        events = events or {run.name(event): event for event in run.end}
        _, _, name = problem.claim.partition(": ")
        event = events.get(name.rpartition(": ")[0])
        if event in run.last and name.endswith(("start", "leaves")) and run.last[event] != event:
            problem = problem._replace(why=f"behind {run.name(run.last[event])}")
        yield problem


def _above_limits(
    content: RunContent, peaks: Mapping[str, float], within: float
) -> Iterator[Discrepancy]:
    for limit, (worker, peak) in zip(content.limits or (), peaks.items(), strict=False):
        if peak > limit + within:
            yield Discrepancy(f"limit: {worker}", limit, peak)


def _check_bounds(
    content: RunContent, derived: Mapping[str, Any], within: float
) -> tuple[tuple[CheckedBound, ...], list[Discrepancy]]:
    """Derive the bounds that are combinatorial; no bound is above what was reached."""
    reached = derived["max_span" if content.objective == "span" else "makespan"]
    bounds = [(bound["by"], bound["value"]) for bound in content.claims["lower_bounds"]]
    known = derived_bounds(content) if bounds else {}
    wrong = []
    for by, value in bounds:
        if by in DERIVED and not value <= known.get(by, -math.inf) + within:
            why = "" if by in known else UNPROVED
            wrong.append(Discrepancy(f"lower bound by {by}", value, known.get(by), why))
        if not value <= reached + within:
            wrong.append(Discrepancy(f"lower bound by {by}", value, reached, "which was reached"))
    return tuple(CheckedBound(value, by, by in known) for by, value in bounds), wrong
