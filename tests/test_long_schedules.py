"""Schedules with more microbatches than they were lowered with, against building them in full."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from daily import daily
from legal_sizes import SLICED

import pipejax as pj
from pipejax.engine.lowering.program import run_on_host
from pipejax.engine.pricing import cost_vector
from pipejax.engine.steady_state import steady_state

FIELDS = ("forward", "backward", "all_reduce", "update", "latency", "transmit")
UPDATING = [("pipedream", 4, 16, 1), ("pipedream-2bw", 4, 16, 4), ("local-sgd", 4, 16, 4)]
# tables of 4 workers and 32 microbatches that do not repeat themselves; all others of the registry do
IRREGULAR = (
    *("looped-bfs", "circular", "chimera-asymmetric", "hanayo", "zero-bubble", "zb-2p"),
    "pipe-offload",
)
LINKS = {model: pj.Links(model) for model in ("delay", "queued", "blocking")} | {
    f"rendezvous-{q}": pj.Links("rendezvous", queues=q) for q in ("worker", "pair", "direction")
}
SHARED = {
    "posted": pj.Links("rendezvous", posting="program"),
    "posted by direction": pj.Links("rendezvous", "direction", posting="program"),
    "queued, shared": pj.Links("queued", shared_links="pairs"),
    "blocking, shared": pj.Links("blocking", shared_links=[[(0, 1), (1, 0)], [(1, 0), (0, 1)]]),
    "rendezvous, shared": pj.Links("rendezvous", shared_links="pairs"),
}
slow = pytest.mark.slow


def lowered(name, workers, microbatches, link="delay", **options):
    table = pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches)
    return pj.lower(table, link=link, **options)


def random_costs(program, size, seed):
    """Random costs per stage and link."""
    rng = np.random.default_rng(seed)
    stages, pipes = program.layout.num_stages, program.layout.num_pipes
    shapes = dict.fromkeys(FIELDS[:4], (size, stages))
    shapes |= dict.fromkeys(FIELDS[4:], (size, 2, pipes, stages - 1))
    return pj.Costs(**{name: rng.random(shape) for name, shape in shapes.items()})


def all_costs(program):
    """A batch of four in which every phase of the registry has a random time."""
    rng = np.random.default_rng(len(program.name))
    stages, pipes = program.layout.num_stages, program.layout.num_pipes
    ops = ("forward", "input_grad", "weight_grad", "recompute", "all_reduce", "update", "offload")
    costs = {name: rng.random((4, stages)) for name in ops}
    messages = {name: rng.random((4, 2, pipes, stages - 1)) for name in ("latency", "transmit")}
    return pj.Costs(**costs, **messages)


@pytest.mark.parametrize(
    ("name", "link"),
    daily(
        [
            (name, link)
            for name in pj.schedules.REGISTRY
            for link in LINKS | SHARED
            if name not in SLICED or "posted" not in link  # no cells carry messages of slices
        ],
        total=28,
    ),
)
def test_every_schedule_grows_as_it_is_built(name, link):
    links = (LINKS | SHARED)[link]
    program = lowered(name, 4, 32, links)
    if name in IRREGULAR:
        with pytest.raises(ValueError, match="have no period"):
            steady_state(program)
        return
    step = steady_state(program).microbatches
    batch = all_costs(program)
    costs = jax.tree.map(lambda leaf: leaf[0] if np.ndim(leaf) else leaf, batch)
    slices = program.layout.num_microbatches // 32
    for more in (step // slices, 3 * step // slices):
        count = slices * (32 + more)
        grown = pj.analysis.extrapolated_makespans(program, batch, num_microbatches=count)
        whole = lowered(name, 4, 32 + more, links)
        built = run_on_host(whole, np.asarray(cost_vector(whole, costs))).finish.max()
        assert float(grown[0]) == pytest.approx(built, rel=1e-13)


@pytest.mark.parametrize("name", daily(sorted(set(pj.schedules.REGISTRY) - set(IRREGULAR))))
def test_a_period_is_for_as_many_microbatches_under_every_link_model(name):
    periods = {q: steady_state(lowered(name, 4, 32, LINKS[q])) for q in LINKS}
    steps = {q: period.microbatches for q, period in periods.items()}
    assert set(steps.values()) == {steps["delay"]}, steps


def test_an_update_belongs_to_no_pipe():
    costs = pj.Costs(forward=1.0, backward=2.0)
    for name, workers, microbatches, step in UPDATING:
        program = lowered(name, workers, microbatches)
        assert steady_state(program).microbatches == step
        if name != "local-sgd":  # which flushes
            assert pj.cycle_time(program, costs).tolist() == [3.0]
            far = pj.analysis.extrapolated_makespans(program, costs, num_microbatches=1016)
            assert far.tolist() == [3.0 * (1016 + 3)]


def test_cycle_time_without_messages_is_the_slowest_worker():
    program = lowered("1f1b", 4, 16)
    forward, backward = np.array([[1.0, 2.0, 1.5, 1.0]]), np.array([[2.0, 2.0, 3.0, 2.0]])
    costs = pj.Costs(forward=forward, backward=backward)
    assert pj.cycle_time(program, costs).tolist() == [4.5]
    both = lowered("gpipe", 4, 16)  # the slowest forward and the slowest backward
    assert pj.cycle_time(both, costs).tolist() == [5.0]


def test_gradients_sum_to_the_makespan():
    program = lowered("1f1b", 4, 16)
    batch = random_costs(program, 1, 3)
    leaves = {name: jnp.asarray(getattr(batch, name)[0]) for name in FIELDS}

    def total(leaves):
        costs = pj.Costs(**{name: leaf[None] for name, leaf in leaves.items()})
        return pj.analysis.extrapolated_makespans(program, costs, num_microbatches=1000)[0]

    value, slopes = jax.value_and_grad(total)(leaves)
    result = sum(float((leaves[name] * slopes[name]).sum()) for name in FIELDS)
    assert result == pytest.approx(float(value), rel=1e-12)
    counts = jax.grad(pj.makespan, argnums=1)(lowered("1f1b", 4, 1000), pj.Costs(**leaves))
    for name in FIELDS:
        np.testing.assert_allclose(slopes[name], getattr(counts, name), err_msg=name)


@pytest.mark.parametrize("microbatches", [10**6, 10**9 + 7, 10**10, 2**48 + 1])
def test_a_default_without_float64_loses_no_digits(microbatches):
    program, exact = lowered("1f1b", 8, 32), [3.0 * (microbatches + 7)]
    with jax.enable_x64(False):
        for forward in (1, 1.0, np.float32(1), np.ones(1), jnp.ones(1)):
            costs = pj.Costs(forward=forward, backward=2.0)
            far = pj.analysis.extrapolated_makespans(program, costs, num_microbatches=microbatches)
            assert far.dtype == np.float64
            assert far.tolist() == exact
        assert pj.cycle_time(program, pj.Costs(forward=0.1, backward=0.2)).tolist() == [0.1 + 0.2]


@pytest.mark.parametrize(
    ("name", "link"),
    daily(itertools.product(sorted(set(pj.schedules.REGISTRY) - set(IRREGULAR)), LINKS), total=24),
)
def test_cycle_time_is_the_growth_of_the_makespan(name, link):
    program = lowered(name, 4, 32, LINKS[link])
    costs, step = all_costs(program), steady_state(program).microbatches
    few, many = (
        np.asarray(pj.analysis.extrapolated_makespans(program, costs, num_microbatches=count))
        for count in (
            32 + step * k for k in (2520 * 1000, 2520 * 2000)
        )  # periods up to 10 divide it
    )
    slope = (many - few) / (2520 * 1000 * step)
    np.testing.assert_allclose(pj.cycle_time(program, costs), slope, rtol=1e-9)
