"""Every way to a makespan equals a NumPy run to the last bit, over registry and link models."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jitter_cases import LINKS as MODELS
from legal_sizes import WHOLE, at_least

import pipejax as pj
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.engine.lowering import lower
from pipejax.engine.lowering.program import run_on_host
from pipejax.engine.pricing import cost_vector

WORKERS, MICROBATCHES = 4, 4
# positions in `pj.Links`: model, queues, host links, posting, shared links
LINKS = [*MODELS, ("rendezvous", "worker", (), "program"), ("rendezvous", "pair", (), "program")]
LINKS += [(model, "worker", (), "early", "pairs") for model in ("queued", "blocking", "rendezvous")]
DISTINCT = 5  # configurations of a batch: all others repeat them
SIZE = 128 * 3 + 5  # more than a row for each thread, and no whole number of rows


def build(name):
    legal = at_least(name, WORKERS, MICROBATCHES)
    return pj.schedules.build(name, num_workers=WORKERS, num_microbatches=legal)


table = functools.cache(build)


def configurations(stages, pipes):
    """The distinct costs: arrays (DISTINCT, ...) by field."""
    rng = np.random.default_rng(stages)
    shapes = dict.fromkeys(PHASE_FIELDS.values(), (DISTINCT, stages))
    links = (DISTINCT, 2, pipes, stages - 1)
    shapes |= {"latency": links, "transmit": links}
    return {name: rng.integers(0, 17, shape) / 8 for name, shape in shapes.items()}


def batch(program, size=SIZE):
    leaves = configurations(program.layout.num_stages, program.layout.num_pipes)
    return pj.Costs(**{name: leaf[np.arange(size) % DISTINCT] for name, leaf in leaves.items()})


def split_batch(costs, count=DISTINCT):
    return [jax.tree.map(lambda leaf, k=k: leaf[k], costs) for k in range(count)]


@functools.cache
def plain(name, links):
    """Makespans of the distinct configurations: nothing is remembered, batched or compiled."""
    program = lower._lower_with_mask.__wrapped__(build(name), links, True, b"")
    vectors = [np.asarray(cost_vector(program, single)) for single in split_batch(batch(program))]
    return np.array([run_on_host(program, vector).finish.max() for vector in vectors])


def interpreted(name, program, costs):
    return pj.makespans(program, costs, unroll=False)


def with_counts(name, program, costs):
    """The values that come with the counts, which have to add up to them."""
    values, counts = pj.makespans_and_grad(program, costs)
    leaves = ((getattr(costs, field), getattr(counts, field)) for field in vars(costs))
    products = ((leaf * count).reshape(SIZE, -1) for leaf, count in leaves if leaf is not None)
    np.testing.assert_array_equal(sum(product.sum(axis=1) for product in products), values)
    return values


def cached_method(name, program, costs):
    """A second call, after other costs of these shapes and other link models of this table."""
    for link in LINKS:
        pj.lower(table(name), link=pj.Links(*link))
    again = pj.lower(table(name), link=program.links)
    pj.makespans(again, jax.tree.map(lambda leaf: leaf[::-1] + 1, costs), unroll=False)
    return interpreted(name, again, costs)


IN_THREADS = {"interpreter.MIN_WORK_OF_THREAD": 1, "interpreter.os.cpu_count": lambda: 3}
BY_LEVEL = {"makespans.MIN_LEVELS_WORK": 0, "interpreter.MAX_OPS_RATIO": float("inf")}
WAYS = {  # how it is done, and which constants of the engine are other ones
    "interpreted": (interpreted, {}),
    "in parts": (lambda _, p, c: pj.makespans(p, c, unroll=False, max_bytes=40_000), {}),
    "in threads": (interpreted, IN_THREADS),
    "by level": (interpreted, BY_LEVEL),
    "counted": (with_counts, {}),
    "cached_method": (cached_method, {}),
}
COMPILED = {  # for each program or shape anew
    "unrolled": (lambda _, p, c: pj.makespans(p, c, unroll=True), {}),
    "of any size": (interpreted, {"makespans.MIN_UNCOPIED_NUMBERS": 0}),
    "traced": (lambda _, p, c: jax.jit(lambda c: pj.makespans(p, c))(c), {}),
    "alone": (lambda _, p, c: [pj.makespan(p, entry) for entry in split_batch(c)], {}),
    "mapped": (lambda _, p, c: jax.vmap(lambda entry: pj.makespan(p, entry))(c), {}),
}
ALL = {**WAYS, **COMPILED}


def sample(ways, step):
    """Return cases in which every way meets every link model, with one schedule in `step`."""
    names = list(WHOLE)
    cases = itertools.product(enumerate(ways), enumerate(LINKS))
    return [(way, link, names[(j + k) % step :: step]) for (j, way), (k, link) in cases]


CASES = [*sample([*WAYS][:1], 6), *sample([*WAYS][1:], 12)]
CASES += sample(COMPILED, 24)[::2]  # compiled for each: half of them
CASES += [("by level", LINKS[1], ["zb-h1", "zb-v"])]  # levels drop a W that only adds its time
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in sample(ALL, 1)]


@pytest.mark.parametrize(("way", "link", "names"), CASES)
def test_equals_the_plain_recurrence(way, link, names, monkeypatch):
    run, constants = ALL[way]
    for constant, value in constants.items():
        monkeypatch.setattr(f"pipejax.engine.batched.{constant}", value)
    for name in names:
        program = pj.lower(table(name), link=pj.Links(*link))
        result = np.asarray(run(name, program, batch(program)))
        expected = np.resize(plain(name, program.links), len(result))
        np.testing.assert_array_equal(result, expected, f"{way}: {name} {link}")
