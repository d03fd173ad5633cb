"""Tuned microbatch sizes against exhaustive search: `python -m benchmarks.tuning`.

Random models on random systems, over schedules and workers. Prints a table and writes JSON: how
often the tuned size is the best one, how much is lost at worst, and how long both ways take, in
their first run and once everything is compiled.
"""

import argparse
import dataclasses
import json
import os
import platform
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pipejax as pj
from benchmarks import prepare_output
from pipejax.base.files import write_file
from pipejax.costs.model.model import Model
from pipejax.costs.system.system import Efficiency, Link, System
from pipejax.search.tuning.microbatch import search_microbatches, size_objective, tune_microbatches
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem

SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "chimera")
WORKERS = (4, 8)
MINIBATCHES = (64, 96, 120, 128, 144, 180, 192, 240, 256, 360, 384, 480, 512, 720, 768, 840, 1024)
SOURCE = "random, for a benchmark"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10_000, help="over all schedules together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_tuning.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)  # before the work
    jax.config.update("jax_enable_x64", True)
    cases = [(schedule, workers) for workers in WORKERS for schedule in SCHEDULES]
    share = -(-arguments.pairs // len(cases))
    rows = [
        measure(*case, share, arguments.seed + k)
        for k, case in enumerate(track(cases, "tuning", console=Console(stderr=True)))
    ]
    result = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "versions": {"jax": jax.__version__, "numpy": np.__version__},
        "all": total(rows),
        "rows": rows,
    }
    write_file(arguments.out, json.dumps(result, indent=1))
    show(result)


def measure(schedule, workers, count, seed):
    """Tune random pairs under one schedule both ways."""
    workloads, systems = random_pairs(schedule, workers, count, seed)
    ways = {"tuned": tune_microbatches, "exhaustive": search_microbatches}
    families = {name: ScheduleFamily(schedule, workers) for name in ways}
    seconds, found = {}, {}
    for name, way in ways.items():
        jax.clear_caches()  # neither way finds anything that the other has compiled
        for again in ("first", "again"):
            began = time.perf_counter()
            found[name] = way(families[name], workloads, systems)
            seconds[f"{name}_{again}"] = time.perf_counter() - began
    return {"schedule": schedule, "workers": workers, **compare(found), "seconds": seconds}


def compare(found):
    """Hold tuned sizes against those of the exhaustive search."""
    tuned, best = found["tuned"], found["exhaustive"]
    loss = tuned.step_time / best.step_time - 1
    sizes = best.sizes
    legal = np.bincount(sizes.pair, sizes.is_legal)
    none_too_large = np.bincount(sizes.pair, sizes.is_legal & ~sizes.fits) == 0
    return {
        "pairs": len(loss),
        "equal": int((tuned.microbatch_size == best.microbatch_size).sum()),
        "worst_loss": float(loss.max()),
        "legal_sizes": float(legal.mean()),
        "evaluated_sizes": float(np.bincount(tuned.sizes.pair, tuned.sizes.is_known).mean()),
        "memory_binds": float(1 - none_too_large.mean()),
        "best_sizes": {
            int(b): int(n)
            for b, n in zip(*np.unique(best.microbatch_size, return_counts=True), strict=True)
        },
    }


def total(rows):
    pairs = sum(row["pairs"] for row in rows)
    seconds = {key: sum(row["seconds"][key] for row in rows) for key in rows[0]["seconds"]}
    return {
        "pairs": pairs,
        "equal": sum(row["equal"] for row in rows),
        "share_equal": sum(row["equal"] for row in rows) / pairs,
        "worst_loss": max(row["worst_loss"] for row in rows),
        "seconds": seconds,
        "tuned_over_exhaustive": {
            again: seconds[f"tuned_{again}"] / seconds[f"exhaustive_{again}"]
            for again in ("first", "again")
        },
    }


def random_pairs(schedule, workers, count, seed, minibatches=MINIBATCHES):
    """Random models and systems; each fits with some microbatch size, many not with all."""
    rng = np.random.default_rng(seed)
    split = (1, 8)[seed % 2]  # a worker is one accelerator, or a node of eight
    workloads = [
        pj.Workload(random_model(rng), int(rng.choice(minibatches)), tensor_parallel=split)
        for _ in range(count)
    ]
    systems = [random_system(rng, split) for _ in range(count)]
    problem = TuningProblem.of(
        ScheduleFamily(schedule, workers), workloads, systems, memory_limit=False
    )
    free = problem.given(np.arange(count), limited=False)
    _, least = size_objective(problem).evaluate(np.zeros(count), free)
    room = least * between(rng, 1.4, 40, count)
    systems = [
        dataclasses.replace(system, memory_capacity=float(each))
        for system, each in zip(systems, room, strict=True)
    ]
    return workloads, systems


def between(rng, low, high, size=None):
    """Random numbers whose logarithms are evenly spread."""
    return np.exp(rng.uniform(np.log(low), np.log(high), size))


def random_model(rng):
    heads = int(rng.integers(8, 129))
    hidden = 128 * heads
    return Model(
        name="random",
        source=SOURCE,
        layers=int(rng.integers(16, 129)),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden=4 * hidden,
        vocabulary=int(between(rng, 16_000, 256_000)),
        sequence=int(rng.choice([512, 1024, 2048, 4096, 8192])),
        gated_mlp=False,
        biases=True,
        learned_positions=True,
        tied_embeddings=True,
        dropout=True,
        flash_attention=True,
    )


def random_system(rng, gpus_per_node):
    """Rates and latencies over two to three orders of magnitude, efficiencies in four steps."""
    return System(
        peak_flops=float(between(rng, 3e13, 5e15)),
        compute_latency=float(between(rng, 1e-7, 1e-4)),
        compute_efficiency=random_steps(rng, 1e9, 1e13),
        memory_bandwidth=float(between(rng, 3e11, 2e13)),
        memory_latency=float(between(rng, 1e-8, 1e-5)),
        memory_efficiency=random_steps(rng, 1e6, 1e9),
        memory_capacity=1.0,
        node=Link(float(between(rng, 3e10, 3e12)), float(between(rng, 1e-6, 1e-4)), 0.8),
        network=Link(float(between(rng, 1e9, 1e12)), float(between(rng, 1e-6, 1e-3)), 0.9),
        gpus_per_node=gpus_per_node,
        name="random",
        source=SOURCE,
    )


def random_steps(rng, low, high):
    sizes = np.sort(between(rng, low, high, 3))
    shares = np.sort(rng.uniform(0.2, 0.95, 4))
    return Efficiency((0.0, *map(float, sizes)), tuple(map(float, shares)))


def show(result):
    grid = Table(title="tuned microbatch size against exhaustive search")
    for heading in (
        "schedule",
        "P",
        "pairs",
        "equal",
        "worst loss",
        "sizes",
        "evaluated",
        "memory binds",
        "tuned",
        "exhaustive",
        "tuned again",
        "exhaustive again",
    ):
        grid.add_column(heading, justify="right")
    for row in result["rows"]:
        seconds = row["seconds"]
        grid.add_row(
            row["schedule"],
            str(row["workers"]),
            str(row["pairs"]),
            f"{100 * row['equal'] / row['pairs']:.2f} %",
            f"{100 * row['worst_loss']:.3f} %",
            f"{row['legal_sizes']:.1f}",
            f"{row['evaluated_sizes']:.1f}",
            f"{100 * row['memory_binds']:.0f} %",
            *(
                f"{seconds[key]:.1f} s"
                for key in ("tuned_first", "exhaustive_first", "tuned_again", "exhaustive_again")
            ),
        )
    console = Console(width=160)
    console.print(grid)
    everything = result["all"]
    ratio = everything["tuned_over_exhaustive"]
    console.print(
        f"{everything['pairs']} pairs: {100 * everything['share_equal']:.2f} % equal, at worst "
        f"{100 * everything['worst_loss']:.3f} % slower; tuning takes {ratio['first']:.2f} times "
        f"as long as exhaustive search, {ratio['again']:.2f} times once compiled"
    )


if __name__ == "__main__":
    main()
