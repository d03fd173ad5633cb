"""A sweep into a store against a plain Python loop over its points: `python -m benchmarks.sweep`.

The loop does per point what scripts do: price every op and message by the same formulas in
floats, then run through the ops on lists. It builds each program once, as the sweep does, and does
not write. A sample of points is enough for its rate, and is compared with what the sweep wrote.
"""

import argparse
import json
import math
import random
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import Progress

import pipejax as pj
from benchmarks.alternatives import python_loop, recurrence
from pipejax.base.files import check_writable, write_file
from pipejax.costs.stage.stage_work import stage_work
from pipejax.engine.batched.binary_program import binary_ops
from pipejax.engine.batched.cost_rows import cost_rows
from pipejax.sweep import read_sweep, run_sweep

PER_STAGE = (
    "forward",
    "backward",
    "input_grad",
    "weight_grad",
    "recompute",
    "all_reduce",
    "update",
)
GRID = Path(__file__).with_name("sweep_10m.toml")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--sample", type=int, default=2000, help="points for the Python loop")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_sweep.json"))
    arguments = parser.parse_args()
    check_writable(arguments.out)  # before the work
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
        f"plain Python loop: {loop_rate:,.0f} points/s, without building and writing\n"
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
    with Console(stderr=True).status("python loop"):
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
    """What does not depend on the system: program and work of one microbatch, as plain numbers."""
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
    work = stage_work(workload, table)
    program = pj.lower(table)
    per_stage = np.zeros((1, table.num_stages))
    per_link = np.zeros((1, 2, table.num_pipes, table.num_stages - 1))
    shapes = pj.Costs(**dict.fromkeys(PER_STAGE, per_stage), latency=per_link, transmit=per_link)
    rows = cost_rows(program, shapes)
    lists = {
        name: np.asarray(value).tolist()
        for name, value in work._asdict().items()
        if not isinstance(value, tuple)
    }
    return recurrence(binary_ops(program), rows), rows.sources, work._replace(**lists)


def efficiency(curve, size):
    share = curve.shares[0]
    for least, value in zip(curve.sizes, curve.shares, strict=True):
        if size >= least:
            share = value
    return share


def evaluate_point(point, program, sources, work):
    """One point in floats: rooflines, Hockney messages, all-reduces, then the recurrence."""
    system = point["system"]
    network = (point["network.bandwidth"] * system.network.efficiency, point["network.latency"])
    node = (system.node.bandwidth * system.node.efficiency, system.node.latency)

    def roofline(flop, volume):
        compute = flop / (system.peak_flops * efficiency(system.compute_efficiency, flop))
        memory = volume / (system.memory_bandwidth * efficiency(system.memory_efficiency, volume))
        return max(compute + system.compute_latency, memory + system.memory_latency)

    def all_reduce(near, volume, count):
        rate, latency = node if near else network
        return 2 * math.log2(count) * latency + 2 * (count - 1) / count * volume / rate

    exchange = 2 * all_reduce(work.exchange_near, work.exchange_bytes, work.exchange_participants)
    layer = [roofline(f, v) for f, v in zip(work.flop, work.volume, strict=True)]
    head = [roofline(f, work.head_volume) for f in work.head_flop]
    again = layer[0] + exchange
    columns = {name: [] for name in PER_STAGE}
    for s, layers in enumerate(work.layers):
        forward = layers * again + work.has_head[s] * head[0]
        input_grad = (
            layers * (layer[1] + exchange) + work.has_head[s] * head[1] + work.recomputed[s] * again
        )
        weight_grad = layers * layer[2] + work.has_head[s] * head[2]
        reduction = all_reduce(
            work.gradient_near[s], work.gradient_bytes[s], work.gradient_participants[s]
        )
        for name, value in (
            ("forward", forward),
            ("input_grad", input_grad),
            ("weight_grad", weight_grad),
            ("backward", input_grad + weight_grad),
            ("recompute", layers * again),
            ("all_reduce", reduction),
            ("update", roofline(0.0, work.update_bytes[s])),
        ):
            columns[name].append(value)
    near = [flag for pipe in work.message_near for flag in pipe] * 2
    columns["latency"] = [(node if flag else network)[1] for flag in near]
    columns["transmit"] = [work.message_bytes / (node if flag else network)[0] for flag in near]
    rows = [sum(columns[name][entry] for name, entry in source) for source in sources]
    return python_loop(program, np.array(rows)[:, None])[0]


if __name__ == "__main__":
    main()
