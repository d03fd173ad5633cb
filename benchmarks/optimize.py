"""Gain of each redundant constraint and setting of the search: `python -m benchmarks.optimize`.

Prints a table and writes JSON. A case is searched with everything, then with one thing changed, all
changes in turn, round after round: a machine that slows down for a while slows down all of them.
Every search begins at the same greedy plan. Times are medians over the rounds.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from ortools.sat.python import cp_model
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pipejax as pj
from benchmarks import prepare_output
from pipejax.base.files import write_file
from pipejax.search.schedule.cp_model import ScheduleModel, search
from pipejax.search.schedule.effort import Budget
from pipejax.search.schedule.initial_plans import greedy_plan
from pipejax.search.schedule.plan import plan_objective
from pipejax.search.schedule.problem import Problem, build_problem

SECONDS = 10.0  # of F, I and W, and of O and L


class Case(NamedTuple):
    """A pipe with F = I = W = 10 s."""

    workers: int
    microbatches: int
    limit: float
    offload: bool

    @property
    def label(self) -> str:
        """Name in the table."""
        link = "offload in 1 F" if self.offload else "nothing offloaded"
        return f"P={self.workers}, M={self.microbatches}, {self.limit:g} activations, {link}"

    def problem(self) -> Problem:
        """The problem in whole numbers."""
        table = pj.schedules.build(
            "1f1b", num_workers=self.workers, num_microbatches=self.microbatches
        )
        costs = pj.Costs.uniform(
            table, forward=SECONDS, input_grad=SECONDS, weight_grad=SECONDS, offload=SECONDS
        )
        return build_problem(table, costs, memory_limit=self.limit, offload=self.offload)


class Variant(NamedTuple):
    """One thing that is changed."""

    settings: dict[str, Any] = {}  # noqa: RUF012  of the solver
    parts: int = 1  # of a unit, on the grid that is searched
    start: bool = True  # whether the search begins at the greedy plan


CASES = (Case(4, 8, 2.0, False), Case(4, 8, 2.0, True), Case(8, 16, 4.0, False))
VARIANTS = {
    "everything": Variant(),
    "without a start": Variant(start=False),
    "with probing": Variant(settings={"cp_model_probing_level": 2}),
    "with symmetry": Variant(settings={"symmetry_level": 2}),
    "with linear relaxations": Variant(settings={"linearization_level": 1}),
    "grid 15 times finer": Variant(parts=15),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of a search, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", default="", help="numbers of cases, as '0 2'; all if none")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_optimize.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)  # before the work
    cases = [CASES[int(k)] for k in arguments.cases.split()] or CASES
    console = Console(stderr=True)
    work = [(case, name) for case in cases for _ in range(arguments.repeats) for name in VARIANTS]
    runs = [
        {"case": case.label, "variant": name, **measure(case, VARIANTS[name], arguments.seconds)}
        for case, name in track(work, "searching", console=console)
    ]
    result = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "seconds": arguments.seconds,
        "rows": [row(runs, case.label, name) for case in cases for name in VARIANTS],
    }
    write_file(arguments.out, json.dumps(result, indent=1))
    show(result)


def measure(case, variant, seconds):
    """Search once; when each better value came, and when it was proven."""
    plain = case.problem()
    plan = greedy_plan(plain, plain.limits)
    problem = plain.finer(variant.parts)
    value = plan_objective(plain, plan)
    horizon = value if variant.start else 2 * value
    began = time.perf_counter()
    model = ScheduleModel(problem, variant.parts * horizon)
    if variant.start:
        model.hint(plan.with_starts(lambda starts: variant.parts * starts))
    values, bound, proof = [], 0, None
    with mock.patch.object(Budget, "new_solver", changed(variant.settings)):
        for step in search(model, Budget.start(seconds=seconds), os.cpu_count() or 1):
            now = time.perf_counter() - began
            bound = max(bound, step.bound)
            if step.plan is not None:
                values.append((now, plan_objective(problem, step.plan) * problem.unit))
            if proof is None and values and bound * problem.unit >= values[-1][1]:
                proof = now
    best = values[-1][1] if values else None
    return {
        "values": values,
        "value": best,
        "start": value * plain.unit,
        "proof": proof,
        "bound": min(bound * problem.unit, np.inf if best is None else best),
    }


def changed(settings):
    """A maker of solvers with other settings."""
    make = Budget.new_solver

    def new_solver(budget: Budget, workers: int) -> cp_model.CpSolver:
        solver = make(budget, workers)
        for name, value in settings.items():
            setattr(solver.parameters, name, value)
        return solver

    return new_solver


def row(runs, case, name):
    """Medians of one case and variant; None where half of the runs did not get there."""
    chosen = [run for run in runs if (run["case"], run["variant"]) == (case, name)]
    values = [run["value"] for run in runs if run["case"] == case and run["value"] is not None]
    best = min(values)
    reached = [next((t for t, v in run["values"] if v <= best), None) for run in chosen]
    ends = [np.inf if run["value"] is None else run["value"] for run in chosen]
    return {
        "case": case,
        "variant": name,
        "start": chosen[0]["start"],
        "best": best,
        "value": statistics.median(ends),
        "bound": statistics.median(run["bound"] for run in chosen),
        "to_best": median(reached),
        "to_proof": median([run["proof"] for run in chosen]),
    }


def median(times):
    """The median where those that are None come last."""
    middle = statistics.median([np.inf if t is None else t for t in times])
    return middle if np.isfinite(middle) else None


def show(result):
    limit = result["seconds"]
    for case in dict.fromkeys(row["case"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["case"] == case]
        table = Table(title=f"{case}: start {rows[0]['start']:g} s, best {rows[0]['best']:g} s")
        for column in ("", "value [s]", "to the best [s]", "bound [s]", "to the proof [s]"):
            table.add_column(column, justify="left" if not column else "right")
        for row in rows:
            reached, proven = (
                f"{row[k]:.2f}" if row[k] is not None else f"> {limit:g}"
                for k in ("to_best", "to_proof")
            )
            table.add_row(row["variant"], f"{row['value']:g}", reached, f"{row['bound']:g}", proven)
        Console().print(table)


if __name__ == "__main__":
    main()
