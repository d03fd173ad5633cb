"""Randomized PipeDream in one call against a plain NumPy loop: `python -m benchmarks.pipedream`.

All step sizes, seeds and delays on the random quadratic. The loop does one run after the other, an
update at a time, on the block that is updated only; it is given the same draws, made before its
clock starts. A sample of runs is enough for its rate, which is scaled to all runs, and is compared
with what the one call returned.
"""

import argparse
import functools
import json
import os
import platform
import random
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pipejax.training as pt
from benchmarks import prepare_output
from pipejax.base.files import write_file

STAGES, DIMENSION, BATCHES = 8, 88, 60
STEP_SIZES = tuple(0.0025 * 2.0**k for k in range(7))
SEEDS = range(10)
DELTAS = (0, 8, 30, 60, 180, 420)
EVERY = 320
TOLERANCE = 1e-9  # of blocks, relative to the largest one, and of gaps, relative to the first


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=3200, help="of each run, a multiple of 320")
    parser.add_argument("--repeats", type=int, default=3, help="calls once it is compiled")
    parser.add_argument("--sample", type=int, default=12, help="runs for the NumPy loop")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_pipedream.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)  # before the work
    jax.config.update("jax_enable_x64", True)
    objective = pt.random_quadratic(STAGES, dimension=DIMENSION, num_batches=BATCHES, seed=0)
    with Console(stderr=True).status("one call"):
        runs, (first, *again) = timed_call(objective, arguments.updates, arguments.repeats)
    loop, difference = timed_loop(objective, runs, arguments.updates, arguments.sample)
    result = summary(runs, arguments, first, float(np.median(again)), loop, difference)
    write_file(arguments.out, json.dumps(result, indent=1))
    show(result)


def timed_call(objective, updates, repeats):
    """All runs, and the seconds of the first call and of those after it."""
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        runs = pt.sweep_randomized_pipedream(
            objective,
            step_sizes=STEP_SIZES,
            seeds=SEEDS,
            updates=updates,
            delta=list(DELTAS),
            interval=EVERY,
        )
        jax.block_until_ready(runs.blocks)
        seconds.append(time.perf_counter() - began)
    return runs, seconds


def timed_loop(objective, runs, updates, count):
    """Seconds of a run of the NumPy loop, and how far it is from the one call at most."""
    x, y = np.asarray(objective.features), np.asarray(objective.targets)
    places = list(np.argwhere(~np.asarray(runs.diverged)))
    sampled = random.Random(0).sample(places, min(count, len(places)))
    seconds, worst = 0.0, 0.0
    for d, g, s in track(sampled, "NumPy loop", console=Console(stderr=True)):
        choices = tuple(map(np.asarray, draws(DELTAS[d], SEEDS[s], updates)))
        began = time.perf_counter()
        gaps, blocks = numpy_run(x, y, STEP_SIZES[g], choices)
        seconds += time.perf_counter() - began
        expected = np.asarray(runs.blocks[d, g, s])
        start = runs.gap[d, g, s, 0]
        worst = max(
            worst,
            np.abs(blocks - expected).max() / np.abs(expected).max(),
            np.abs(gaps - runs.gap[d, g, s]).max() / start,
        )
    if not worst <= TOLERANCE:
        raise AssertionError(f"loop and call differ by {worst:.1e}, more than {TOLERANCE:.0e}")
    return seconds / len(sampled), float(worst)


@functools.partial(jax.jit, static_argnames="updates")
def draws(delta, seed, updates):
    """Stages, batches and models read of a run."""
    draw_update = functools.partial(pt.draw, num_stages=STAGES, num_batches=BATCHES, delays=delta)
    return jax.vmap(draw_update, (None, 0))(seed, jnp.arange(updates))


def numpy_run(x, y, step_size, choices):
    """One run: gaps and last model; `x` (batches, examples, stages, width), all models are kept."""
    update_stages, update_batches, models_read = choices
    batches, examples, stages, width = x.shape
    rows, all_x, all_y = x.reshape(batches, examples, -1), x.reshape(-1, stages * width), y.ravel()
    stage_blocks, places = np.ascontiguousarray(np.moveaxis(x, 2, 0)), np.arange(stages)
    models = np.zeros((len(update_stages) + 1, stages, width))
    gaps = [np.mean(all_y**2) / 2]
    for k, (stage, batch) in enumerate(
        zip(update_stages.tolist(), update_batches.tolist(), strict=True)
    ):
        mixed = models[models_read[k], places].ravel()
        residual = rows[batch] @ mixed - y[batch]
        models[k + 1] = models[k]
        models[k + 1, stage] -= step_size / examples * (residual @ stage_blocks[stage, batch])
        if (k + 1) % EVERY == 0:
            gaps.append(np.mean((all_x @ models[k + 1].ravel() - all_y) ** 2) / 2)
    return np.array(gaps), models[-1]


def summary(runs, arguments, first, again, loop, difference):
    updates = runs.diverged.size * arguments.updates
    return {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "versions": {"jax": jax.__version__, "numpy": np.__version__},
        "runs": runs.diverged.size,
        "updates_of_a_run": arguments.updates,
        "diverged": int(runs.diverged.sum()),
        "first_call_seconds": first,
        "seconds": again,
        "updates_per_second": updates / again,
        "numpy_sampled_runs": min(arguments.sample, int((~runs.diverged).sum())),
        "numpy_seconds_of_all": loop * runs.diverged.size,
        "numpy_updates_per_second": arguments.updates / loop,
        "ratio": loop * runs.diverged.size / again,
        "ratio_first_call": loop * runs.diverged.size / first,
        "largest_relative_difference": difference,
        "peak_memory_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def show(result):
    grid = Table(title=f"{result['runs']} runs of {result['updates_of_a_run']:,} block updates")
    for heading in ("", "seconds", "updates per second", "times the NumPy loop"):
        grid.add_column(heading, justify="right" if heading else "left")
    total = result["runs"] * result["updates_of_a_run"]
    for name, seconds in (
        ("first call", result["first_call_seconds"]),
        ("warm call", result["seconds"]),
        ("NumPy loop", result["numpy_seconds_of_all"]),
    ):
        grid.add_row(
            name,
            f"{seconds:.1f}",
            f"{total / seconds:,.0f}",
            f"{result['numpy_seconds_of_all'] / seconds:.1f}",
        )
    console = Console()
    console.print(grid)
    console.print(
        f"NumPy loop: scaled from {result['numpy_sampled_runs']} runs, without the draws; largest "
        f"relative difference {result['largest_relative_difference']:.1e}\n"
        f"{result['diverged']} runs diverged; peak memory {result['peak_memory_GB']:.2f} GB",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
