"""Joint spaces tuned by local search against others: `python -m benchmarks.tuning`.

Random models on random systems with memory that binds, and spaces of 10^5 settings and more. All
searches have the same batched engine. Exhaustive search evaluates all settings; random and
coordinate search get as many seconds for each case as the local search took. Prints, by kind, how
many times faster the local search is, and how much slower the steps are that each way ends with;
writes JSON. What is compiled is compiled before.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pipejax as pj
from benchmarks import prepare_output
from pipejax.base.files import provenance, write_file
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload import StageLayers
from pipejax.costs.system.system import Efficiency, Link, System
from pipejax.search.tuning.joint import (
    JointProblem,
    Settings,
    all_assignments,
    count_settings,
    improve_settings,
    search_jointly,
    search_locally,
)
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem

LAYERS = ("size", "layers")
RECOMPUTED = ("size", "layers", "recompute")
# schedule, workers, parts, layers
KINDS = (
    ("1f1b", 4, LAYERS, (48, 56)),
    ("gpipe", 4, RECOMPUTED, (12, 13)),
    ("1f1b", 4, RECOMPUTED, (12, 13)),
)
MINIBATCHES = (64, 96, 128, 144)
LEAST = 100_000  # settings of a space
SOURCE = "random, for a benchmark"
BLOCK = 512  # settings that a search at equal time draws at once


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=int, nargs="*", default=range(len(KINDS)))
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_tuning.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)  # before the work
    jax.config.update("jax_enable_x64", True)
    rows = [
        measure(*KINDS[k], arguments.cases, arguments.seed + k)
        for k in track(arguments.kinds, "tuning", console=Console(stderr=True))
    ]
    write_file(arguments.out, json.dumps({**provenance(), "rows": rows}, indent=1))
    show(rows)


def measure(schedule, workers, parts, layers, count, seed):
    """Tune random cases of one kind in every way."""
    joints = random_cases(ScheduleFamily(schedule, workers), parts, layers, count, seed)
    sizes = [count_settings(joint) for joint in joints]
    assert min(sizes) >= LEAST, sizes
    first, _ = timed(lambda: [search_locally(joint) for joint in joints])
    seconds, tuned = timed(lambda: [search_locally(joint) for joint in joints])
    problem = seconds / count
    rng = np.random.default_rng(seed)
    warm_up(joints[0], rng)
    searches = {"random": random_search, "coordinate": coordinate_search}
    ends = {
        name: np.array([way(joint, rng, problem) for joint in joints])
        for name, way in searches.items()
    }
    exhaustive, searched = timed(lambda: [search_jointly(joint) for joint in joints])
    best = np.array([case.step_time for case in searched])
    ends["local"] = np.array([case.step_time for case in tuned])
    return {
        "schedule": schedule,
        "workers": workers,
        "parts": parts,
        "settings": sizes,
        "seconds": {
            "local": seconds,
            "local_first": first,
            "exhaustive": exhaustive,
        },
        "faster": exhaustive / seconds,
        "loss": {name: (end / best - 1).tolist() for name, end in ends.items()},
    }


def timed(work):
    """Seconds that some work takes, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def random_cases(family, parts, layers, count, seed):
    """Cases whose memory lies between what full and what no recomputation need."""
    rng, joints = np.random.default_rng(seed), []
    for workload, system in random_pairs(family.schedule, family.num_workers, count, seed):
        model = dataclasses.replace(workload.model, layers=int(rng.choice(layers)))
        workload = dataclasses.replace(workload, model=model)
        problem = TuningProblem.from_workload(family, workload, system)
        size = int(rng.choice(JointProblem(problem, LAYERS).sizes[:4]))
        even = problem.assigned.layers
        largest, smallest = (
            problem.evaluate(workload.minibatch // size, StageLayers(even, share * even))[1]
            for share in (0, 1)
        )
        tight = rng.uniform(0.1, 0.9) if "recompute" in parts else rng.uniform(1, 2)
        room = smallest + tight * (largest - smallest)
        system = dataclasses.replace(system, memory_capacity=room, memory_reserve=0.0)
        joints.append(JointProblem(TuningProblem.from_workload(family, workload, system), parts))
    return joints


def random_pairs(schedule, workers, count, seed):
    """Random models and systems; each fits with some microbatch size, many not with all."""
    rng, family = np.random.default_rng(seed), ScheduleFamily(schedule, workers)
    split = (1, 8)[seed % 2]  # a worker is one accelerator, or a node of eight
    pairs = []
    for _ in range(count):
        minibatch = int(rng.choice(MINIBATCHES))
        workload = pj.Workload(random_model(rng), minibatch, tensor_parallel=split)
        system = random_system(rng, split)
        problem = TuningProblem.from_workload(family, workload, system, memory_limit=False)
        _, least = problem.evaluate(minibatch, problem.assigned)  # a size of 1
        room = float(least * between(rng, 1.4, 40))
        pairs.append((workload, dataclasses.replace(system, memory_capacity=room)))
    return pairs


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


def draw(joint, rng, count):
    """Random settings, each as likely as any other."""
    layers, recomputed = all_assignments(joint)
    which = rng.integers(len(layers), size=count)
    return Settings(rng.choice(joint.sizes, count), layers[which], recomputed[which])


def warm_up(joint, rng):
    """Compile what the searches at equal time need."""
    random_search(joint, rng, 1.0)
    coordinate_search(joint, rng, 1.0)


def random_search(joint, rng, seconds):
    """The best of random settings."""
    until, best = time.perf_counter() + seconds, np.inf
    settings = draw(joint, rng, 100_000)  # not counted: drawing is no search
    until = time.perf_counter() + seconds
    for low in range(0, len(settings.size), BLOCK):
        best = min(best, joint.times(settings.at(slice(low, low + BLOCK))).min())
        if time.perf_counter() > until:
            break
    return best


def coordinate_search(joint, rng, seconds):
    """The best that random settings lead to, by one layer or size.

    Each start is the best of a few random settings, for most of them do not fit the memory.
    """
    starts = draw(joint, rng, 64 * 200)  # not counted either
    until, best = time.perf_counter() + seconds, np.inf
    for low in range(0, len(starts.size), 64):
        settings = starts.at(slice(low, low + 64))
        times = joint.times(settings)
        settings, value = settings.at([times.argmin()]), times.min()
        while time.perf_counter() < until:
            settings, _ = improve_settings(joint, settings, joint.times)
            around = otherwise(joint, settings)
            times = joint.times(around)
            least = int(times.argmin())
            if not times[least] < value:
                break
            settings, value = around.at([least]), times[least]
        best = min(best, value)
        if time.perf_counter() > until:
            break
    return best


def otherwise(joint, setting):
    """A setting with every size."""
    sizes = np.array(joint.sizes)
    return setting.at(np.zeros(len(sizes), int))._replace(size=sizes)


def show(rows):
    """Print a line for each kind, and one for all."""
    grid = Table(title="joint spaces: losses against exhaustive search")
    headings = ("schedule", "P", "tuned", "cases", "settings", "local", "exhaustive", "faster")
    headings += ("loss <= 0.5 %", "worst", "random", "coordinate")
    for heading in headings:
        grid.add_column(heading, justify="right")
    for row in rows:
        loss = {name: np.array(losses) for name, losses in row["loss"].items()}
        count = len(loss["local"])
        grid.add_row(
            row["schedule"],
            str(row["workers"]),
            " ".join(part.split("_")[0] for part in row["parts"]),
            str(count),
            f"{np.mean(row['settings']):.3g}",
            f"{row['seconds']['local'] / len(loss['local']):.3f} s",
            f"{row['seconds']['exhaustive'] / len(loss['local']):.2f} s",
            f"{row['faster']:.1f}",
            str(int((loss["local"] <= 0.005).sum())),
            f"{100 * loss['local'].max():.2f} %",
            *(f"{100 * np.median(loss[name]):.2f} %" for name in ("random", "coordinate")),
        )
    console = Console(width=190)
    console.print(grid)
    losses = np.concatenate([row["loss"]["local"] for row in rows])
    seconds = [sum(row["seconds"][way] for row in rows) for way in ("exhaustive", "local")]
    console.print(
        f"{len(losses)} cases: loss at most 0.5 % on {(losses <= 0.005).sum()}, "
        f"{seconds[0] / seconds[1]:.1f} times faster than exhaustive"
    )


if __name__ == "__main__":
    main()
