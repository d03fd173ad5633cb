"""The batched engine against what people write instead: `python -m benchmarks.engine`.

Prints each row when it is measured, and writes JSON after each row. A row is one program, precision
and kind of costs: uniform, per stage with one message time, or per stage and boundary, which the
C++ does not have; nor has it ops other than F and B. Tables other than 1F1B have costs per stage
alone. All programs take turns in the same process, round after round, and ratios are medians over
the rounds: a machine that slows down for a while slows down all of them. The Python loop and the
NumPy batch, ten to a thousand times slower, run once. Times are without compilation.
"""

import argparse
import functools
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

import pipejax as pj
from benchmarks import alternatives, compiled_simd, prepare_output
from pipejax.base.compiled import cpu_options
from pipejax.base.files import write_file
from pipejax.engine.batched.binary_program import binary_ops
from pipejax.engine.batched.cost_rows import batch_leaves, cost_rows

SIZES = "4x8 8x32 16x128"
WORK = 1e8  # ops times configurations of a measurement
MOST = 100_000  # configurations
KINDS = ("uniform", "per stage", "per boundary")
# further tables, with what they are asked for
OTHERS = {"chimera": {}, "interleaved-1f1b": {"stages_per_worker": 2}, "zb-v": {}, "zb-h1": {}}
NUMBA_BLOCKS = (256, 512, 1024, 2048)
LOOPED = 20  # configurations that the Python loop runs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes",
        default=SIZES,
        help=f"workers x microbatches, as '8x32 64x1024' (default: {SIZES})",
    )
    parser.add_argument("--schedules", default=" ".join(("1f1b", *OTHERS)))
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="seconds of all cores together, which other work on the machine changes little",
    )
    parser.add_argument("--repeats", type=int, default=5)
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
        "rows": [],
    }
    print(HEADINGS)
    for case in track(cases, "measuring", console=Console(stderr=True)):
        row = measure(*case, arguments.repeats, clock)
        print(row_text(row, result["machine"]), flush=True)
        result["rows"].append(row)
        result["peak_memory_GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        write_file(arguments.out, json.dumps(result, indent=1))
    print(limits_text(result))


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
        entries = [column for piece in rows.pieces(leaves) for column in piece.T]
        matrix = np.stack([np.broadcast_to(row, (size,)) for row in rows.sums(entries)])
        recurrence = alternatives.recurrence(binary_ops(program), rows)
        slow = {
            "Python loop": lambda: alternatives.python_loop(recurrence, matrix[:, :LOOPED]),
            "NumPy batch": lambda: alternatives.numpy_batch(recurrence, matrix),
        }
        fast, numba_block = best_numba(recurrence, matrix)
        if kind != "per boundary":
            arrays = map(np.asarray, (costs.forward, costs.backward, costs.transmit))
            solve = compiled_simd.blocked(program, *arrays)
            fast |= {} if solve is None else {"C++ blocked": solve}
        first, seconds = in_turn(ours | fast, repeats, clock)
        seconds |= {name: np.array([measure_seconds(run, clock)]) for name, run in slow.items()}
        check(ours["value"](), fast | slow)
    result = {
        "schedule": name,
        "workers": workers,
        "microbatches": microbatches,
        "dtype": dtype,
        "costs": kind,
        "ops": num_ops,
        "configurations": size,
    }
    seconds["Python loop"] *= size / min(size, LOOPED)
    result["numba_block"] = numba_block
    result["seconds"] = {name: float(np.median(times)) for name, times in seconds.items()}
    result["first_call_seconds"] = {name: first[name] for name in ours}
    result["times_the_value"] = {
        name: float(np.median(times / seconds["value"])) for name, times in seconds.items()
    }
    result["configurations_per_second"] = {n: size / s for n, s in result["seconds"].items()}
    return result


def best_numba(recurrence, matrix):
    """Return blocked Numba with the block that is fastest in two calls, and that block."""
    if alternatives.numba is None:
        return {}, None
    runs = {
        block: functools.partial(alternatives.numba_blocked, recurrence, matrix, block)
        for block in NUMBA_BLOCKS
    }
    _, seconds = in_turn(runs, 2)
    block = min(runs, key=lambda block: seconds[block].min())
    return {"Numba blocked": runs[block]}, block


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


ALTERNATIVES = ("C++ blocked", "Numba blocked", "NumPy batch", "Python loop")
HEADINGS = (
    "configurations per second; how many times those of C++, Numba, NumPy and the Python loop; "
    "seconds of values with gradients, over those of values;\nshare of the machine's rate of "
    "max-add ops in registers; seconds of the first call\n"
    f"{'schedule':16} {'P x M':>9} {'precision':9} {'costs':12} {'per second':>10} {'x C++':>6} "
    f"{'x Numba':>7} {'x NumPy':>7} {'x loop':>7} {'gradient':>8} {'of limit':>8} {'first':>6}"
)


def row_text(row, machine):
    rate, times = row["configurations_per_second"]["value"], row["times_the_value"]
    cpp, numba, numpy_batch, loop = (
        f"{times[name]:.2f}" if name in times else "-" for name in ALTERNATIVES
    )
    size = f"{row['workers']} x {row['microbatches']}"
    share = rate * row["ops"] / machine["max_add_ops_per_second"]
    return (
        f"{row['schedule']:16} {size:>9} {row['dtype']:9} {row['costs']:12} {rate:10.3g} {cpp:>6} "
        f"{numba:>7} {numpy_batch:>7} {loop:>7} {times['value and gradient']:8.2f} "
        f"{100 * share:6.0f} % {row['first_call_seconds']['value']:5.1f}s"
    )


def limits_text(result):
    machine = result["machine"]
    return (
        f"limit of this machine: {machine['max_add_ops_per_second']:.3g} max-add ops per second in "
        f"registers (float32), {machine['copied_bytes_per_second'] / 1e9:.1f} GB/s copied, "
        f"{machine.get('triad_bytes_per_second', np.nan) / 1e9:.1f} GB/s of triad; "
        f"{machine['cores']} cores; peak memory {result['peak_memory_GB']:.1f} GB"
    )


if __name__ == "__main__":
    main()
