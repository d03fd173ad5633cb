"""Small changes against whole evaluations: `python -m benchmarks.incremental`.

Prints a table and writes JSON. A change is another time of one op or two ops of a row swapped
(asked for, `makespan_if` and `makespan_if_swapped`, or made), or another message time of one stage
boundary (which all microbatches cross, so nearly all ops lie behind it), each drawn at random, and
undone if it was made. What it saves is one of

- evaluate: `pj.evaluate` of the changed costs or of the changed table, all that a user would call;
- recurrence: the bare recurrence on the host, of a program that is lowered and priced already.

All take turns in one process, change by change; rates are of all changes together.
"""

import argparse
import dataclasses
import itertools
import json
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import pipejax as pj
from benchmarks import prepare_output
from pipejax.base import longest_path
from pipejax.base.files import write_file
from pipejax.engine.pricing import price

SCHEDULES = {"1f1b": {}, "chimera": {}, "zb-h1": {}}
WORKERS, MICROBATCHES = 8, 32
CHANGES = (
    "if an op took another time",
    "if two ops were swapped",
    "time of an op",
    "swap of two ops",
    "cost of a boundary",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60, help="changes of each kind")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_incremental.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)  # before the work
    rows = [
        {"schedule": name, "change": change, **measure(name, change, arguments.repeats)}
        for name in SCHEDULES
        for change in CHANGES
    ]
    write_file(arguments.out, json.dumps({"rows": rows}, indent=1))
    show(rows)


def measure(name, change, repeats):
    """Changes per second, each with its undo, and whole evaluations per second."""
    table = pj.schedules.build(name, num_workers=WORKERS, num_microbatches=MICROBATCHES)
    table = table.with_rows([[cell for cell in row if cell] for row in table.rows()])
    rng = np.random.default_rng(0)
    costs = pj.Costs(
        forward=1 + 0.1 * rng.random(table.num_stages),
        backward=2 + 0.1 * rng.random(table.num_stages),
        transmit=0.1 + 0.01 * rng.random(table.num_stages - 1),
    )
    start = pj.evaluate(table, costs)
    run = pj.analysis.IncrementalRun(start)
    preds, priced = np.asarray(start.program.preds), price(start.program, costs)
    seconds = {"change": [], "evaluate": [], "recurrence": []}
    for _ in range(repeats):
        move, whole = draw(change, run, table, costs, rng)
        seconds["change"].append(timed(move))
        seconds["evaluate"].append(timed(whole))
        bare = timed(lambda: longest_path.finish_times(preds, priced.duration, priced.lag))
        seconds["recurrence"].append(bare)
    rate = {what: repeats / sum(times) for what, times in seconds.items()}
    return {"ops": len(run.finish), "per_second": rate}


def draw(change, run, table, costs, rng):
    """A random change, and the whole evaluation in its place."""
    if change in ("if an op took another time", "time of an op"):
        op = str(rng.choice([*run.finish]))
        time = rng.uniform(0.5, 1.5) * (1.0 if "F" in op else 2.0)
        if change != "time of an op":
            return lambda: run.makespan_if(op, time), lambda: pj.evaluate(table, costs)
        return lambda: (run.set_duration(op, time), run.undo()), lambda: pj.evaluate(table, costs)
    if change == "cost of a boundary":
        times = np.array(costs.transmit)
        times[rng.integers(len(times))] *= rng.uniform(0.5, 2.0)
        other = dataclasses.replace(costs, transmit=times)
        return lambda: (run.set_costs(other), run.undo()), lambda: pj.evaluate(table, other)
    while True:
        worker = rng.integers(table.num_workers)
        rows = [list(row) for row in table.rows()]
        first, second = list(itertools.pairwise(rows[worker]))[rng.integers(len(rows[worker]) - 1)]
        at = rows[worker].index(first)
        rows[worker][at : at + 2] = [second, first]
        try:
            run.swap(first[0], second[0])
        except pj.ScheduleError:
            continue
        run.undo()
        run.makespan_if_swapped(first[0], second[0])  # the paths around all ops are found once
        break
    swap = first[0], second[0]
    if change == "if two ops were swapped":
        whole = lambda: pj.evaluate(table.with_rows(rows), costs)  # noqa: E731
        return lambda: run.makespan_if_swapped(*swap), whole
    return lambda: (run.swap(*swap), run.undo()), lambda: pj.evaluate(table.with_rows(rows), costs)


def timed(run):
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def show(rows):
    grid = Table(title="per second, and how many times more changes than whole evaluations")
    for heading in ("schedule", "ops", "change", "changes", "pj.evaluate", "x", "recurrence", "x"):
        grid.add_column(
            heading, no_wrap=True, justify="left" if heading in ("schedule", "change") else "right"
        )
    for row in rows:
        rate = row["per_second"]
        whole = [(rate[name], rate["change"] / rate[name]) for name in ("evaluate", "recurrence")]
        grid.add_row(
            row["schedule"],
            str(row["ops"]),
            row["change"],
            f"{rate['change']:.0f}",
            *(
                text
                for per_second, times in whole
                for text in (f"{per_second:.0f}", f"{times:.1f}")
            ),
        )
    Console(width=100).print(grid)


if __name__ == "__main__":
    main()
