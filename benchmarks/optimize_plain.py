"""The search against a plain CP-SAT model: `python -m benchmarks.optimize_plain`.

Random pipes whose limits and activations differ by stage, with offloads, loads that take another
time, and host links that workers may share. Both get the same seconds and threads. The plain model
is what one writes down first: an interval per op, no two at once on a worker or host link, memory
as a cumulative resource, an offload as a choice; no order of microbatches, no start, no bounds.
Every schedule of the search is derived again by the checker. Prints a table, writes JSON, and ends
with exit code 1 where the search is worse anywhere.
"""

import argparse
import json
import os
import platform
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pipejax as pj
from benchmarks import prepare_output
from pipejax.base.files import write_file

PARTS = 6  # of an activation of size 1, so that sizes and a third of each are whole
SHARE = 1 / 3  # of an activation, that stays for W


class Case(NamedTuple):
    """A random pipe; times in whole seconds, sizes in activations of size 1."""

    seed: int
    microbatches: int
    times: dict[str, np.ndarray]
    message: int
    sizes: np.ndarray
    limits: np.ndarray
    host_links: tuple[tuple[int, ...], ...]

    @property
    def workers(self) -> int:
        """One stage each."""
        return len(self.sizes)

    @property
    def label(self) -> str:
        """Describe the case in a line."""
        shared = " ".join("-".join(map(str, group)) for group in self.host_links) or "own"
        room = " ".join(
            f"{limit / size:g}" for limit, size in zip(self.limits, self.sizes, strict=True)
        )
        return f"P={self.workers}, M={self.microbatches}, holds {room}, links {shared}"


def random_case(seed: int) -> Case:
    """Draw a pipe: each worker holds one to three of its own activations."""
    rng = np.random.default_rng(seed)
    workers, microbatches = int(rng.integers(3, 6)), int(rng.choice([6, 8, 10, 12]))
    compute = {letter: rng.integers(4, 16, workers) for letter in "FIW"}
    host = {letter: rng.integers(4, 26, workers) for letter in "OL"}
    sizes = rng.choice([1.0, 1.5, 2.0, 3.0], workers)
    limits = sizes * rng.choice([1.0, 1.5, 2.0, 2.5, 3.0], workers)
    pairs = tuple((w, w + 1) for w in range(0, workers - 1, 2))
    shared = [(), ((0, 1),), pairs, (tuple(range(workers)),)][rng.integers(4)]
    return Case(seed, microbatches, compute | host, int(rng.integers(4)), sizes, limits, shared)


class PlainModel:
    """The plain model of a case."""

    def __init__(self, case: Case) -> None:
        """Build it."""
        self.case, self.model = case, cp_model.CpModel()
        ops = sum(int(times.sum()) for times in case.times.values())
        self.horizon = case.microbatches * (ops + 2 * case.message * case.workers)
        self.end = self._time()
        self.row, self.held = defaultdict(list), defaultdict(list)
        before: dict[tuple[str, int], cp_model.LinearExprT] = {}
        for m in range(case.microbatches):
            for s in range(case.workers):
                self._add(s, m, before)
        for resource in self.row.values():
            self.model.add_no_overlap(resource)
        for s, held in self.held.items():
            limit = int(np.floor(PARTS * case.limits[s] + 1e-9))
            self.model.add_cumulative([i for i, _ in held], [size for _, size in held], limit)
        self.model.minimize(self.end)

    def _time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def _add(self, s: int, m: int, before: dict[tuple[str, int], cp_model.LinearExprT]) -> None:
        """All ops of a microbatch on a stage; `before` knows those on the stage before."""
        model, case = self.model, self.case
        durations = {letter: int(times[s]) for letter, times in case.times.items()}
        start = {letter: self._time() for letter in "FIWOL"}
        end = {letter: start[letter] + durations[letter] for letter in "FIWOL"}
        out = model.new_bool_var("")
        group = next((g for g in case.host_links if s in g), (s,))
        for letter in "FIW":
            self.row[s].append(
                model.new_fixed_size_interval_var(start[letter], durations[letter], "")
            )
        for letter in "OL":
            interval = model.new_optional_fixed_size_interval_var(
                start[letter], durations[letter], out, ""
            )
            self.row["link", group].append(interval)
        for first, second in ("FO", "OL", "LI"):
            model.add(start[second] >= end[first]).only_enforce_if(out)
        model.add(start["I"] >= end["F"])
        model.add(start["W"] >= end["I"])
        model.add(self.end >= end["W"])
        if s:
            model.add(start["F"] >= before["F", m] + case.message)
            model.add(before["I", m] >= end["I"] + case.message)
        before["F", m], before["I", m] = end["F"], start["I"]
        size = round(PARTS * case.sizes[s])
        share_for_w = round(size * SHARE)
        for since, until, present, parts in (
            (start["F"], end["I"], ~out, size - share_for_w),
            (start["F"], end["W"], ~out, share_for_w),
            (start["F"], end["O"], out, size),
            (start["L"], end["I"], out, size - share_for_w),
            (start["L"], end["W"], out, share_for_w),
        ):
            interval = model.new_optional_interval_var(since, self._time(), until, present, "")
            self.held[s].append((interval, parts))

    def solve(self, seconds: float, threads: int) -> float:
        """Return the shortest makespan found; infinity if none was."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = threads
        is_solved = solver.solve(self.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return solver.objective_value if is_solved else np.inf


def search(case: Case, seconds: float, threads: int) -> tuple[float, list[str]]:
    """Return the makespan that the search finds, and what the checker has against it."""
    names = {"F": "forward", "I": "input_grad", "W": "weight_grad", "O": "offload", "L": "load"}
    table = pj.schedules.build("1f1b", num_workers=case.workers, num_microbatches=case.microbatches)
    times = {names[letter]: seconds.astype(float) for letter, seconds in case.times.items()}
    costs = pj.Costs(**times, transmit=float(case.message))
    links = pj.Links(host_links=case.host_links)
    result = pj.optimize(
        table,
        costs,
        memory_limit=case.limits,
        sizes=case.sizes,
        weight_share=SHARE,
        offload=True,
        link=links,
        time_limit=seconds,
        num_threads=threads,
    )
    run = pj.evaluate(result.best.table, costs, link=links)
    claimed = pj.certificate(
        run,
        memory=pj.analysis.activation_memory(run, sizes=case.sizes, weight_share=SHARE),
        limits=case.limits,
        offload=True,
        lower_bounds={result.best.bound_by: result.lower_bound},
    )
    return result.value, [str(problem) for problem in pj.verify(claimed).problems]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each search")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", default="0-19", help="first and last")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_optimize_plain.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)  # before the work
    first, last = map(int, arguments.seeds.split("-"))
    seeds = track(range(first, last + 1), "searching", console=Console(stderr=True))
    rows = [measure(random_case(seed), arguments.seconds, arguments.threads) for seed in seeds]
    result = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "seconds": arguments.seconds,
        "threads": arguments.threads,
        "rows": rows,
    }
    write_file(arguments.out, json.dumps(result, indent=1))
    show(result)
    sys.exit(any(row["verdict"] != "ok" for row in rows))


def measure(case, seconds, threads):
    plain = PlainModel(case).solve(seconds, threads)
    makespan, problems = search(case, seconds, threads)
    verdict = "not verified" if problems else "worse" if makespan > plain else "ok"
    return {
        "seed": case.seed,
        "case": case.label,
        "plain": plain if np.isfinite(plain) else None,
        "search": makespan,
        "ratio": makespan / plain,
        "verdict": verdict,
        "problems": problems,
    }


def show(result):
    title = f"{result['seconds']:g} s each, {result['threads']} threads"
    table = Table(title=title)
    for column in ("seed", "case", "plain [s]", "search [s]", "ratio", "verdict"):
        table.add_column(column, justify="left" if column in ("case", "verdict") else "right")
    for row in result["rows"]:
        plain = "-" if row["plain"] is None else f"{row['plain']:g}"
        values = plain, f"{row['search']:g}", f"{row['ratio']:.3f}", row["verdict"]
        table.add_row(str(row["seed"]), row["case"], *values)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
