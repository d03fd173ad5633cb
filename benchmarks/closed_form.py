"""Exact closed forms against the recurrence and the machine's memory.

    python -m benchmarks.closed_form

Four float32 parameters (F, B, c_F, c_B) come in, one makespan goes out: 20 bytes for each
configuration. The form, the batched recurrence of the same costs, and a triad of three arrays take
turns; figures are medians over the rounds. Where a form has many sums it computes rather than waits
for memory.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pipejax as pj
from benchmarks import prepare_output
from pipejax.base.files import write_file

CASES = (
    ("1f1b", "delay"),
    ("chimera", "delay"),
    ("zb-h1", "delay"),
    ("interleaved-1f1b", "queued"),
    ("1f1b", "rendezvous"),
    ("chimera-asymmetric", "delay"),
    ("hanayo", "delay"),
)
WORKERS, MICROBATCHES = 8, 32
MANY, FEWER = 1 << 24, 1 << 20  # configurations of the form and triad, and of the recurrence
BYTES = 4 * 5
PARAMETERS = ("F", "B", "c_F", "c_B")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_closed_form.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)
    rng = np.random.default_rng(0)
    theta = [jnp.asarray(rng.random(MANY, np.float32)) for _ in PARAMETERS]
    rows = [measure(name, link, theta, arguments.repeats) for name, link in CASES]
    print(f"{WORKERS} x {MICROBATCHES}, float32, {jax.local_device_count()} device")
    print(
        "schedule            link        sums  gap %      form  recurrence  ratio  GB/s  of triad"
    )
    for row in rows:
        print(
            f"{row['schedule']:18s}  {row['link']:10s}  {row['facets']:4d}  "
            f"{100 * row['gap']:5.2f}  {row['form']:8.1e}    {row['recurrence']:8.1e}  "
            f"{row['ratio']:5.1f}  {row['bandwidth'] / 1e9:4.1f}  {row['of_triad']:8.2f}"
        )
    write_file(arguments.out, json.dumps({"rows": rows}, indent=1))


@jax.jit
def triad(first, second):
    return first + 3.0 * second


def measure(name, link, theta, repeats):
    """One row: medians of rates, and ratios of neighbours in time."""
    table = pj.schedules.build(name, num_workers=WORKERS, num_microbatches=MICROBATCHES)
    program = pj.lower(table, link=link, step_end=False)
    form = pj.formula(program, PARAMETERS)
    value = jax.jit(form.at)
    fewer = [np.asarray(parameter[:FEWER]) for parameter in theta]
    forth = np.array([1.0, 0.0], np.float32).reshape(1, 2, 1, 1)
    sent = fewer[2][:, None, None, None] * forth + fewer[3][:, None, None, None] * forth[:, ::-1]
    costs = pj.Costs(forward=fewer[0][:, None], backward=fewer[1][:, None], transmit=sent)
    ways = {
        "form": (lambda: value(*theta), MANY),
        "recurrence": (lambda: pj.makespans(program, costs), FEWER),
        "triad": (lambda: triad(*theta[:2]), MANY),
    }
    rates = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, (call, count) in ways.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            if turn:  # the first compiles
                rates[way].append(count / (time.perf_counter() - begin))
    median = {way: float(np.median(way_rates)) for way, way_rates in rates.items()}
    triad_share = np.divide(rates["form"], rates["triad"]) * BYTES / 12
    return {
        "schedule": name,
        "link": link,
        "facets": len(form.facets),
        "gap": form.gap,
        "form": median["form"],
        "recurrence": median["recurrence"],
        "ratio": float(np.median(np.divide(rates["form"], rates["recurrence"]))),
        "bandwidth": median["form"] * BYTES,
        "of_triad": float(np.median(triad_share)),
    }


if __name__ == "__main__":
    main()
