"""Error of float32: `python -m benchmarks.precision`.

Every addition rounds, so the error grows with the ops and messages of the critical path; the bound
that `pj.makespans` states is one unit roundoff for each addition on it. A row is one number of
microbatches of 1F1B, and the largest relative error among configurations of random costs, against
float64. The command fails where an error is above its bound.
"""

import argparse

import numpy as np

import pipejax as pj

WORKERS = 4
CONFIGURATIONS = 64
ROUNDOFF = 2.0**-24  # of float32


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", default="100 1000 10000 100000")
    arguments = parser.parse_args()
    print("microbatches  kind of costs  additions  bound    measured")
    rows = [
        (count, kind, *measure(count, kind))
        for count in map(int, arguments.microbatches.split())
        for kind in ("random", "equal")
    ]
    for count, kind, additions, bound, error in rows:
        print(f"{count:12,d}  {kind:13s}  {additions:9,d}  {bound:.1e}  {error:.1e}")
    if any(error > bound for *_, bound, error in rows):
        raise SystemExit("an error is above its bound")


def measure(microbatches, kind):
    """Return the additions on the longest critical path, the bound of the error and the error."""
    table = pj.schedules.build("1f1b", num_workers=WORKERS, num_microbatches=microbatches)
    program = pj.lower(table, step_end=False)
    rng = np.random.default_rng(microbatches)
    shape = (CONFIGURATIONS, WORKERS) if kind == "random" else (CONFIGURATIONS, 1)
    single = {
        "forward": rng.random(shape, np.float32),
        "backward": rng.random(shape, np.float32),
        "transmit": rng.random((CONFIGURATIONS, 1, 1, 1), np.float32),
    }
    double = {name: leaf.astype(np.float64) for name, leaf in single.items()}
    exact, counts = pj.makespans_and_grad(program, pj.Costs(**double))
    rounded = pj.makespans(program, pj.Costs(**single))
    assert (rounded.dtype, exact.dtype) == (np.float32, np.float64)
    on_path = sum(
        np.asarray(getattr(counts, name)).reshape(CONFIGURATIONS, -1).sum(axis=1) for name in single
    )
    additions = int(on_path.max())
    error = float(np.abs(rounded / np.asarray(exact) - 1).max())
    return additions, additions * ROUNDOFF, error


if __name__ == "__main__":
    main()
