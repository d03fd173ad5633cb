"""`check`: everything that a certificate claims, derived again and compared."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pipejax.checker.bounds import DERIVED, Question, derive_bounds
from pipejax.checker.claims import Discrepancy, derive, derive_optimum, differences, tolerance
from pipejax.checker.form import check_form, form_text, read_form
from pipejax.checker.prices import Prices, read_links, read_memory, read_seconds
from pipejax.checker.run import DeadlockError, Run
from pipejax.checker.table import Table
from pipejax.checker.values import (
    IllegalError,
    MalformedError,
    check_keys,
    check_numbers,
    check_word,
    is_time,
    require,
)

VERSION = 2
KEYS = ("kind", "version", "table", "costs", "claim", "proof")
QUESTION = ("objective", "limits", "offload")
KINDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "run": {
        "costs": ("links", "seconds", "memory"),
        "claim": (
            *QUESTION,
            *("makespan", "max_span", "busy", "peak_in_flight", "offloaded", "peak_memory"),
            "lower_bounds",
        ),
        "proof": ("ops", "transfers", "held_from", "held"),
    },
    "optimum": {
        "costs": ("links", "seconds", "memory"),
        "claim": (*QUESTION, "value", "lower_bounds"),
        "proof": ("starts", "prover", "seconds", "source", "checksum"),
    },
    "formula": {
        "costs": ("links", "parameters", "box"),
        "claim": ("facets", "gap"),
        "proof": ("points", "rays", "cells"),
    },
}
NOT_DERIVED = (
    "which needs a makespan (path), limits (memory), no offloads (chain), times of O and L"
)


class CheckedBound(NamedTuple):
    """A lower bound that a certificate claims."""

    value: float  # in the unit of the verdict
    by: str  # one of `DERIVED`, or another name that its author gives, as "solver"
    checked: bool  # whether it was derived again


class Verdict(NamedTuple):
    """Result of checking a certificate.

    Attributes:
      makespan: derived makespan, in `unit`; None if the schedule cannot run.
      problems: claims that do not hold.
      bounds: the claimed lower bounds.
      unit: of times: "seconds", or "units" of a solved problem.
      form: claim of a closed form, as "exact for F = 1, B from 1 to 3".
    """

    makespan: float | None
    problems: tuple[Discrepancy, ...]
    bounds: tuple[CheckedBound, ...] = ()
    unit: str = "seconds"
    form: str = ""

    @property
    def ok(self) -> bool:
        """Return whether all claims hold."""
        return not self.problems


def check(data: Mapping[str, Any], name: str = "certificate") -> Verdict:
    """Check all claims of a certificate; raise a `MalformedError` if it is none."""
    report, data = split_report(data)
    read_envelope(data, name)
    try:
        if data["kind"] == "formula":
            form = read_form(data, name)
            return Verdict(None, tuple(check_form(form, report)), form=form_text(form))
        return _check_run(data, name)
    except IllegalError as error:  # there is a table, and it cannot run
        return Verdict(None, (Discrepancy("table", "legal", str(error)),))


def split_report(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Split the report of a closed form into itself and its certificate; others have no report."""
    inner = data.get("certificate")
    is_report = isinstance(inner, dict) and inner.get("kind") == "formula"
    return (data, inner) if is_report and isinstance(inner, dict) else ({}, data)


def read_envelope(data: Mapping[str, Any], name: str) -> None:
    """Check kind, version and keys of a certificate."""
    kind, version = data.get("kind"), data.get("version")
    if not (isinstance(kind, str) and kind in KINDS) or repr(version) != repr(VERSION):
        kinds = ", ".join(f'"{kind}"' for kind in KINDS)
        raise MalformedError(
            f'{name} is not a certificate: expected "kind" {kinds} and "version" {VERSION}, '
            f"got {kind!r} and {version!r}"
        )
    check_keys({**data}, KEYS, name)
    for part, keys in KINDS[kind].items():
        check_keys(data[part], keys, f"{name}: {part}")


def certificate_checksum(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a certificate without its own checksum."""
    proof = {key: value for key, value in data["proof"].items() if key != "checksum"}
    text = json.dumps({**data, "proof": proof}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_run(data: Mapping[str, Any], name: str) -> Verdict:
    """Check the claims of a run, or of a solved problem, by a run of its table."""
    costs, claims = data["costs"], {**data["claim"], **data["proof"]}
    is_optimum = data["kind"] == "optimum"
    _check_bounds_form(claims["lower_bounds"], name)
    table = Table(data["table"])
    question = _read_question(claims, table, name)
    links = read_links(costs["links"], table, f"{name}: links")
    bounds = claims["lower_bounds"]
    options = {"is_in_units": is_optimum, "has_bounds": bool(bounds)}
    seconds = read_seconds(costs["seconds"], table, f"{name}: seconds", **options)
    memory = read_memory(costs["memory"], table, f"{name}: memory")
    try:
        run = Run(table, links, seconds)
    except DeadlockError as error:
        return Verdict(None, (Discrepancy("run", "to the end", str(error)),))
    derived = derive(run, memory)
    tolerances = tolerance(derived, memory, table.rules)
    value = derived["max_span" if question.is_span else "makespan"]
    compared = derive_optimum(run, value, certificate_checksum(data)) if is_optimum else derived
    problems = [
        _explain(run, problem)
        for key, expected in compared.items()
        for problem in differences(claims[key], expected, tolerances.for_claim(key), key)
    ]
    peaks = derived["peak_memory"].items()
    for limit, (worker, peak) in zip(question.limits or (), peaks, strict=False):
        if peak > limit + tolerances.memory:
            problems.append(Discrepancy(f"limit: {worker}", limit, peak))
    derived_bounds = derive_bounds(table, links, seconds, memory, question) if bounds else {}
    problems += _check_bounds(bounds, derived_bounds, value, tolerances.time)
    checked = tuple(CheckedBound(b["value"], b["by"], b["by"] in derived_bounds) for b in bounds)
    unit = "units" if is_optimum else "seconds"
    return Verdict(derived["makespan"], tuple(problems), checked, unit)


def _read_question(claims: Prices, table: Table, name: str) -> Question:
    """Return the objective, memory limits and offloads that a claim is about."""
    check_word(claims["objective"], ("makespan", "span"), f"{name}: objective")
    is_valid = isinstance(claims["offload"], bool)
    require(is_valid, f"{name}: offload", "true or false", claims["offload"])
    if claims["limits"] is not None:
        check_numbers(claims["limits"], (len(table.rows),), f"{name}: limits")
    return Question(claims["objective"] == "span", claims["limits"], claims["offload"])


def _check_bounds_form(bounds: Any, name: str) -> None:
    """Check that lower bounds are a list of {"by": text, "value": number}."""
    require(isinstance(bounds, list), f"{name}: lower_bounds", "a list", bounds)
    for bound in bounds:
        check_keys(bound, ("by", "value"), f"{name}: a lower bound")
        require(isinstance(bound["by"], str), f"{name}: by of a lower bound", "a text", bound["by"])
        is_valid = is_time(bound["value"])
        require(is_valid, f"{name}: a lower bound", "a number of at least 0", bound["value"])


def _check_bounds(
    bounds: list[dict[str, Any]], derived: Mapping[str, float], value: float, tolerance: float
) -> Iterator[Discrepancy]:
    """List the bounds above the derived ones, or above the value of the run."""
    for claimed in bounds:
        by, bound = claimed["by"], claimed["value"]
        claim = f"lower bound by {by}"
        if by in DERIVED and bound > derived.get(by, -math.inf) + tolerance:
            yield Discrepancy(claim, bound, derived.get(by), "" if by in derived else NOT_DERIVED)
        if bound > value + tolerance:
            yield Discrepancy(claim, bound, value, "which was reached")


def _explain(run: Run, problem: Discrepancy) -> Discrepancy:
    """Add to the problem of a wrong start the op or transfer that arrived last before it."""
    _, _, name = problem.claim.partition(": ")
    if not name.endswith((": start", ": leaves")):
        return problem
    events = {run.name(event): event for event in run.end}
    event = events.get(name.rpartition(": ")[0])
    cause = None if event is None else run.last_wait.get(event)
    return problem if cause is None else problem._replace(why=f"behind {run.name(cause)}")
