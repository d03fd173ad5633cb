"""Numbers of workers and microbatches that each schedule says it can be built for."""

import itertools

import pipejax as pj
from pipejax.schedules import REGISTRY

LEGAL = {  # what is said, and what it means
    "any P and M": lambda p, m: True,
    "P and M even": lambda p, m: p % 2 == 0 and m % 2 == 0,
    "P even, any M": lambda p, m: p % 2 == 0,
    "P and M even, M at least 2P": lambda p, m: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
    "any P, M a multiple of P": lambda p, m: m % p == 0,
    "any P, M at least 2P": lambda p, m: m >= 2 * p,
    "P at least 3, any M": lambda p, m: p >= 3,
}
# schedules whose microbatches are in slices, which files and runtimes of others have no word for
SLICED = ("seq-1f1b", "terapipe", "slimpipe", "chunked-prefill")
WHOLE = tuple(name for name in REGISTRY if name not in SLICED)


def build(name="1f1b", workers=4, microbatches=8, **options):
    return pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches, **options)


def is_legal(name, workers, microbatches):
    return LEGAL[pj.schedules.find(name).legal](workers, microbatches)


def at_least(name, workers, microbatches):
    """Fewest microbatches, from so many on, that a registered schedule can be built for."""
    return next(m for m in itertools.count(microbatches) if is_legal(name, workers, m))
