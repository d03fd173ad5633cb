"""A sweep into a store against a loop of `evaluate` over its points: `python -m benchmarks.sweep`.

The loop does per point what scripts do: price the model on the system, and evaluate the table. It
builds each table once, as the sweep does, and does not write. A sample of points is enough for its
rate, and is compared with what the sweep wrote.
"""

import argparse
import dataclasses
import json
import math
import random
import resource
import tempfile
import time
from pathlib import Path

import xarray as xr
from rich.console import Console
from rich.progress import Progress

import pipejax as pj
from benchmarks import prepare_output
from pipejax.base.files import write_file
from pipejax.sweep import read_sweep, run_sweep

GRID = Path(__file__).with_name("sweep_10m.toml")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--sample", type=int, default=2000, help="points for the Python loop")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_sweep.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)  # before the work
    sweep = read_sweep(arguments.grid)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "sweep.zarr"
        seconds = timed_sweep(sweep, store)
        with xr.open_zarr(store, chunks=None) as data:
            loop_rate, difference = timed_loop(sweep, data, arguments.sample)
            size = sum(f.stat().st_size for f in store.rglob("*") if f.is_file())
    rate = sweep.num_points / seconds
    result = {
        "points": sweep.num_points,
        "seconds": seconds,
        "points_per_second": rate,
        "python_points_per_second": loop_rate,
        "ratio": rate / loop_rate,
        "largest_relative_difference": difference,
        "store_MB": size / 1e6,
        "peak_memory_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }
    write_file(arguments.out, json.dumps(result, indent=1))
    Console().print(
        f"{sweep.num_points:,} points in {seconds:.1f} s, compilation and writing included: "
        f"{rate:,.0f} points/s, {result['peak_memory_GB']:.2f} GB\n"
        f"loop of `evaluate`: {loop_rate:,.0f} points/s, without building and writing\n"
        f"ratio {rate / loop_rate:,.0f}; largest relative difference {difference:.1e} on "
        f"{arguments.sample} points",
        soft_wrap=True,
    )


def timed_sweep(sweep, store):
    began = time.perf_counter()
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("sweep", total=sweep.num_points)
        run_sweep(
            sweep, store, on_progress=lambda done, *_: bar.update(task, completed=done)
        ).close()
    return time.perf_counter() - began


def timed_loop(sweep, data, count):
    """Points per second of the Python loop, and how far its step times are from those written."""
    rng, axes = random.Random(0), [axis for axis in sweep.axes if axis.is_listed]
    programs, seconds, worst = {}, 0.0, 0.0
    done = 0
    with Console(stderr=True).status("loop of evaluate"):
        while done < count:
            at = {axis.name: rng.randrange(len(axis.values)) for axis in axes}
            point = {axis.name: axis.values[at.get(axis.name, 0)] for axis in sweep.axes}
            written = float(data.step_time.isel(at))
            if math.isnan(written):
                continue
            shape = point["schedule"], point["microbatch_size"]
            if shape not in programs:
                programs[shape] = built(point)
            began = time.perf_counter()
            ours = evaluate_point(point, *programs[shape])
            seconds += time.perf_counter() - began
            worst = max(worst, abs(ours / written - 1))
            done += 1
    return count / seconds, worst


def built(point):
    """Build the parts that do not depend on the system: a table, and the work of its model."""
    table = pj.schedules.build(
        point["schedule"].name,
        num_workers=point["workers"],
        num_microbatches=point["minibatch"] // point["microbatch_size"],
        **dict(point["schedule"].options),
    )
    workload = pj.Workload(
        point["model"],
        point["minibatch"],
        tensor_parallel=point["tensor_parallel"],
        recompute=point["recompute"],
    )
    return table, workload


def evaluate_point(point, table, workload):
    """Step time of one point [s]: priced and run by itself, as a script does."""
    system = point["system"]
    network = dataclasses.replace(
        system.network, bandwidth=point["network.bandwidth"], latency=point["network.latency"]
    )
    system = dataclasses.replace(system, network=network)
    return pj.evaluate(table, pj.stage_costs(workload, system, table)).makespan


if __name__ == "__main__":
    main()
