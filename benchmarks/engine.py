"""The batched engine against what people write instead: `python -m benchmarks.engine`.

Prints a table and writes JSON. Every row is one program, precision and kind of costs: uniform, per
stage with one message time, or per stage and boundary, which the C++ does not have; nor has it ops
other than F and B. Tables other than 1F1B have costs per stage alone. All programs
take turns in the same process, round after round, and ratios are medians over the rounds: a machine
that slows down for a while slows down all of them. Times are without compilation.
"""

import argparse
import json
import os
import platform
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pipejax as pj
from benchmarks import alternatives, compiled_simd, prepare_output
from pipejax.base.compiled import cpu_options
from pipejax.base.files import write_file
from pipejax.engine.batched.binary_program import binary_ops
from pipejax.engine.batched.cost_rows import batch_leaves, cost_rows

SIZES = ((4, 8), (8, 32), (16, 128), (64, 1024))
WORK = 1e8  # ops times configurations of a measurement
MOST = 100_000  # configurations
KINDS = ("uniform", "per stage", "per boundary")
# further tables, with what they are asked for
OTHERS = {"chimera": {}, "interleaved-1f1b": {"stages_per_worker": 2}, "zb-v": {}, "zb-h1": {}}
NUMBA_BLOCKS = (256, 512, 1024, 2048)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes",
        default=" ".join(f"{p}x{m}" for p, m in SIZES),
        help="workers x microbatches, as '8x32 16x128'",
    )
    parser.add_argument("--schedules", default=" ".join(("1f1b", *OTHERS)))
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="seconds of all cores together, which other work on the machine changes little",
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_engine.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)  # before the work
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    sizes = [tuple(map(int, text.split("x"))) for text in arguments.sizes.split()]
    cases = [
        (name, p, m, dtype, kind)
        for name in arguments.schedules.split()
        for p, m in sizes
        for dtype in ("float32", "float64")
        for kind in (KINDS if name == "1f1b" else ("per stage",))
    ]
    console = Console(stderr=True)
    rows = [
        measure(*case, arguments.repeats, clock)
        for case in track(cases, "measuring", console=console)
    ]
    result = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "backend": jax.default_backend(),
            **limits(),
        },
        "versions": {
            "jax": jax.__version__,
            "numpy": np.__version__,
            "numba": getattr(alternatives.numba, "__version__", None),
        },
        "peak_memory_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "rows": rows,
    }
    write_file(arguments.out, json.dumps(result, indent=1))
    show(result)


def measure(name, workers, microbatches, dtype, kind, repeats, clock):
    """Time one program on one batch with everything there is."""
    with jax.enable_x64(dtype == "float64"):
        table = pj.schedules.build(
            name,
            num_workers=workers,
            num_microbatches=microbatches,
            **OTHERS.get(name, {}),
        )
        program = pj.lower(table, step_end=False)
        num_ops = binary_ops(program).num_ops
        size = int(min(MOST, max(256, WORK / num_ops)))
        rng = np.random.default_rng(0)
        shape = (size,) if kind == "uniform" else (size, table.num_stages)
        links = (size, 2, 1, workers - 1) if kind == "per boundary" else (size,)
        costs = pj.Costs(
            forward=jnp.asarray(rng.random(shape), dtype),
            backward=jnp.asarray(rng.random(shape), dtype),
            transmit=jnp.asarray(rng.random(links), dtype),
        )
        ours = {
            "value": lambda: pj.makespans(program, costs),
            "value and gradient": lambda: jax.tree.leaves(pj.makespans_and_grad(program, costs)),
            "smooth": lambda: pj.makespans(program, costs, temperature=0.1),
        }
        if kind == "uniform":
            form = jax.jit(pj.formula(program, ("F", "B", "c")).at)
            ours["closed form"] = lambda: form(costs.forward, costs.backward, costs.transmit)
        rows = cost_rows(program, costs)
        leaves, _ = batch_leaves(costs, program.layout)
        matrix = np.stack([np.broadcast_to(row, (size,)) for row in rows.list(leaves)])
        theirs = competitors(alternatives.recurrence(binary_ops(program), rows), matrix)
        if kind != "per boundary":
            arrays = map(np.asarray, (costs.forward, costs.backward, costs.transmit))
            solve = compiled_simd.blocked(program, *arrays)
            theirs |= {} if solve is None else {"C++ blocked": solve}
        first, seconds = in_turn(ours | theirs, repeats, clock)
        check(ours["value"](), theirs)
    result = {
        "schedule": name,
        "workers": workers,
        "microbatches": microbatches,
        "dtype": dtype,
        "costs": kind,
        "ops": num_ops,
        "configurations": size,
    }
    # the Python loop is timed on a few configurations only
    seconds["Python loop"] *= size / min(size, 20)
    blocked = [name for name in seconds if name.startswith("Numba")]
    if blocked:
        best = min(blocked, key=lambda name: np.median(seconds[name]))
        result["numba_block"] = int(best.split()[-1])
        seconds = {n: s for n, s in seconds.items() if n not in blocked} | {
            "Numba blocked": seconds[best]
        }
    result["seconds"] = {name: float(np.median(times)) for name, times in seconds.items()}
    result["first_call_seconds"] = {name: first[name] for name in ours}
    result["times_the_value"] = {
        name: float(np.median(times / seconds["value"])) for name, times in seconds.items()
    }
    result["configurations_per_second"] = {n: size / s for n, s in result["seconds"].items()}
    return result


def competitors(recurrence, matrix):
    few = np.ascontiguousarray(matrix[:, :20])
    runs = {
        "Python loop": lambda: alternatives.python_loop(recurrence, few),
        "NumPy batch": lambda: alternatives.numpy_batch(recurrence, matrix),
    }
    if alternatives.numba is not None:
        runs |= {
            f"Numba {block}": lambda block=block: alternatives.numba_blocked(
                recurrence, matrix, block
            )
            for block in NUMBA_BLOCKS
        }
    return runs


def check(ours, theirs):
    """All programs that are compared give the same numbers."""
    for name, run in theirs.items():
        other = run()
        np.testing.assert_allclose(np.asarray(ours)[: len(other)], other, rtol=1e-4, err_msg=name)


def in_turn(runs, repeats, clock=time.perf_counter):
    """Seconds of the first call of each, and of `repeats` later ones in rounds."""
    first = {name: measure_seconds(run, time.perf_counter) for name, run in runs.items()}
    rounds = [
        {name: measure_seconds(run, clock) for name, run in runs.items()} for _ in range(repeats)
    ]
    return first, {name: np.array([times[name] for times in rounds]) for name in runs}


def measure_seconds(run, clock):
    began = clock()
    jax.block_until_ready(run())
    return clock() - began


def median_seconds(run, repeats):
    _, seconds = in_turn({"it": run}, repeats)
    return np.median(seconds["it"])


def limits():
    """Measure the limits of the machine: additions and maxima in registers, and bytes copied."""

    def chains(x, y):
        """Sixteen chains that do not wait for each other, 64 ops of max and two additions long."""
        values = [x * k for k in range(16)]
        for _ in range(64):
            values = [jnp.where(v > y, v, y) + x + y for v in values]
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    size = 1 << 17
    x, y = jnp.ones(size, jnp.float32), jnp.full(size, 0.5, jnp.float32)
    run = jax.jit(chains, compiler_options=cpu_options(xla_cpu_prefer_vector_width=512))
    ops = 16 * 64 * size / median_seconds(lambda: run(x, y), 9)
    return {"max_add_ops_per_second": ops, **bandwidth(1 << 24)}


def bandwidth(size):
    """Bytes read and written per second by all cores, as STREAM counts them: copy and triad."""
    cores = os.cpu_count()
    target, source, other = (np.ones(size) for _ in range(3))
    parts = [slice(k * size // cores, (k + 1) * size // cores) for k in range(cores)]
    with ThreadPoolExecutor(cores) as pool:

        def copy():
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

        rates = {"copied_bytes_per_second": 2 * source.nbytes / median_seconds(copy, 7)}
    if alternatives.numba is not None:
        seconds = median_seconds(lambda: alternatives.triad(target, source, other), 7)
        rates["triad_bytes_per_second"] = 3 * source.nbytes / seconds
    return rates


def show(result):
    machine = result["machine"]
    grid = Table(title="configurations per second, and how many times those of each alternative")
    theirs = ("C++ blocked", "Numba blocked", "NumPy batch", "Python loop")
    names = ("value", "value and gradient", "smooth", "closed form", *theirs)
    for heading in (
        "schedule",
        "P x M",
        "precision",
        "costs",
        *names,
        "x C++",
        "x Numba",
        "x Python",
        "gradient / value",
        "of the limit",
        "first call",
    ):
        grid.add_column(heading, justify="right")
    for row in result["rows"]:
        rate, times = row["configurations_per_second"], row["times_the_value"]
        share = rate["value"] * row["ops"] / machine["max_add_ops_per_second"]
        over = [
            f"{times[name]:.2f}" if name in times else "-"
            for name in ("C++ blocked", "Numba blocked", "Python loop", "value and gradient")
        ]
        grid.add_row(
            row["schedule"],
            f"{row['workers']} x {row['microbatches']}",
            row["dtype"],
            row["costs"],
            *(f"{rate[name]:.3g}" if name in rate else "-" for name in names),
            *over,
            f"{100 * share:.0f} %",
            f"{row['first_call_seconds']['value']:.1f} s",
        )
    console = Console(width=240)
    console.print(grid)
    console.print(
        f"limit of this machine: {machine['max_add_ops_per_second']:.3g} max-add ops per second in "
        f"registers (float32), {machine['copied_bytes_per_second'] / 1e9:.1f} GB/s copied, "
        f"{machine.get('triad_bytes_per_second', np.nan) / 1e9:.1f} GB/s of triad; "
        f"{machine['cores']} cores; peak memory {result['peak_memory_GB']:.1f} GB"
    )


if __name__ == "__main__":
    main()
