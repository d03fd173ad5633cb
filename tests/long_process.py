"""Print memory maps and memory of a process that fits, formulates and sweeps many programs."""

import sys
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
from legal_sizes import build

import pipejax as pj
from pipejax.costs.measured.rows_file import read_rows

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "hanayo", "chimera")
COLUMNS = "layers,hidden,heads,sequence,tensor,data,pipeline,microbatch_size,global_batch,"
REST = "schedule,sequence_parallel,recompute,seconds\n"


def fit(table, folder):
    """Fit a number of a system to rows of a schedule of this size."""
    path = folder / "rows.csv"
    workers, count = 2 ** (table.num_workers % 3), table.num_microbatches
    rows = [
        f"{layers},1024,16,512,1,1,{workers},{size},{size * count},1f1b,0,none,"
        f"{layers * size * count / 2000}"
        for layers in (4, 8)
        for size in (1, 2)
    ]
    path.write_text(COLUMNS + REST + "\n".join(rows))
    pj.calibrate(read_rows(path), pj.load_system("a100"), fit=["compute.efficiency"])


def sweep(table, name, folder):
    """Sweep microbatch sizes of a schedule of this size."""
    grid = {
        "schedules": [name],
        "workers": table.num_workers,
        "minibatch": 4 * table.num_microbatches,
        "microbatch_size": [2, 4],
        "models": "tabular-128l",
        "systems": "fast_nw_slow_cp",
    }
    pj.run_sweep(grid, folder / "out.zarr", replace=True)


def meet(number, folder, rng):
    """Do everything with one program."""
    name, workers = SCHEDULES[number % len(SCHEDULES)], 2 * (1 + number % 4)
    table = build(name, workers, 2 * (2 + number // len(SCHEDULES)))
    program = pj.lower(table)
    halves = {"input_grad": 1.0, "weight_grad": 1.0, "backward": 2.0, "transmit": 0.1}
    costs = pj.Costs(forward=1.0 + rng.random(table.num_stages), **halves)
    jax.grad(lambda costs: pj.makespan(program, costs))(costs)
    pj.makespans(program, pj.Costs(forward=rng.random((64, 1)), **halves), unroll=number % 8 == 0)
    pj.finish_times(program, costs)
    if len(table.ops.phase) < 60:
        pj.formula(program)
    if number % 4 == 0:
        sweep(table, name, folder)
    if number % 10 == 0:
        fit(table, folder)


def main(count):
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            meet(number, Path(folder), rng)
        if number % 20 == 19:
            maps = Path("/proc/self/maps").read_bytes().count(b"\n")
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            print(number + 1, maps, pages * 4096 // 10**6, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
