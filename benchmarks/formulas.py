"""Closed forms of every synchronous schedule against the recurrence, and their certificates.

    python -m benchmarks.formulas [--points N] [--schedules a,b]

For P in {4, 8}, M in {P, 2P, 4P} and each link model: facets, gap, how many evaluations found them,
how far the form is from the batched recurrence at random parameters (borders included), and whether
the checker accepts the certificate. Exit code 1 if a form is wrong.
"""

import argparse
import itertools
import sys
import time

import numpy as np

import pipejax as pj
from pipejax.costs.costs import FIELDS, unchecked_costs
from pipejax.schedules import REGISTRY

ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "local-sgd")
LINKS = ("delay", "queued", "rendezvous")
ROUNDING = 1e-12  # of a sum of some thousand times


def random_points(form, count, rng):
    """Parameters (count, parameters): half over six decades with zeros, half on borders."""
    size = len(form.parameters)
    spread = 10 ** rng.uniform(-3, 3, (count // 2, size))
    spread[rng.random(spread.shape) < 0.25] = 0.0
    rays = form.envelope.cone.rays[:, :size].astype(float)
    rays = rays[rays.any(axis=1)] / rays[rays.any(axis=1)].sum(axis=1, keepdims=True)
    chosen = rays[rng.integers(len(rays), size=(count - count // 2, 3))]
    return np.concatenate([spread, np.einsum("nr,nrk->nk", rng.random(chosen.shape[:2]), chosen)])


def makespans(form, theta):
    """Makespans by the batched recurrence."""
    leaves = {}
    for field in FIELDS:
        parts = [getattr(costs, field) for costs in form.costs.costs]
        if all(part is not None for part in parts) and any(np.any(part) for part in parts):
            weights = np.stack(np.broadcast_arrays(*map(np.asarray, parts)))
            leaves[field] = np.tensordot(theta, weights, 1)
    return np.asarray(pj.makespans(form.program, unchecked_costs(leaves), batch_size=len(theta)))


def case(name, p, m, link, count, rng):
    """One row: what was found and whether it holds."""
    table = pj.schedules.build(name, num_workers=p, num_microbatches=m)
    program = pj.lower(table, link=link, step_end=False)
    begin = time.perf_counter()
    form = pj.formula(program)
    seconds = time.perf_counter() - begin
    theta = random_points(form, count, rng)
    length, value = makespans(form, theta), form(theta)
    ratio = length / np.where(value > 0, value, 1)
    ratio = ratio[value > 0]
    ok = (ratio > 1 - ROUNDING) & (ratio < 1 + form.gap + ROUNDING)
    accepted = pj.verify(form.certificate(table)).ok
    return form, seconds, ratio.max() - 1, bool(ok.all()) and accepted


def main():
    """Print a line for each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument(
        "--schedules", default=",".join(n for n in REGISTRY if n not in ASYNCHRONOUS)
    )
    options = parser.parse_args()
    rng, wrong, inexact = np.random.default_rng(0), 0, []
    print("schedule             P   M  link        facets  gap %   runs  seconds  above %  holds")
    cases = itertools.product(options.schedules.split(","), (4, 8), (1, 2, 4), LINKS)
    for name, p, more, link in cases:
        form, seconds, above, ok = case(name, p, more * p, link, options.points, rng)
        print(
            f"{name:18s} {p:3d} {more * p:3d}  {link:10s}  {len(form.facets):6d}  "
            f"{100 * form.gap:5.2f}  {form.evaluations:5d}  {seconds:7.2f}  {100 * above:7.3f}  "
            f"{ok}",
            flush=True,
        )
        wrong += not ok
        inexact += [form.gap] * (not form.exact)
    largest = 100 * max(inexact, default=0)
    print(f"{wrong} wrong; {len(inexact)} not exact, largest gap {largest:.2f} %")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
