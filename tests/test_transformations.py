"""`makespans` under JAX's transformations: the same numbers and the same paths as `makespan`."""

import dataclasses
import functools
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from daily import daily

import pipejax as pj
from pipejax.engine.batched import makespans as module

slow = pytest.mark.slow

SIZE = 3
BANDWIDTHS = np.array([1.0, 4.0, 20.0, 90.0]) * 1e9
FIELDS = ("forward", "backward", "input_grad", "weight_grad", "latency", "transmit")
LINKS = ("delay", "queued", "blocking", "rendezvous")


@functools.cache
def lowered(link="delay", name="1f1b"):
    return pj.lower(pj.schedules.build(name, num_workers=4, num_microbatches=8), link=link)


def draw_samples(seed, *, dyadic, name="1f1b"):
    rng, layout = np.random.default_rng(seed), lowered(name=name).layout
    shapes = dict.fromkeys(FIELDS[:4], (SIZE, layout.num_stages))
    shapes |= dict.fromkeys(FIELDS[4:], (SIZE, 2, layout.num_pipes, layout.num_stages - 1))
    draw = lambda shape: rng.integers(0, 5, shape) / 4 if dyadic else rng.random(shape)  # noqa: E731
    return {name: jnp.asarray(draw(shape)) for name, shape in shapes.items()}


def total(program, leaves, **options):
    return pj.makespans(program, pj.Costs(**leaves), **options).sum()


@functools.cache
def get_gradient(program):
    return jax.jit(jax.grad(lambda leaves: pj.makespan(program, pj.Costs(**leaves))))


def one_by_one(program, leaves):
    run = get_gradient(program)
    values = [run({name: leaf[k] for name, leaf in leaves.items()}) for k in range(SIZE)]
    return {name: np.stack([value[name] for value in values]) for name in leaves}


WAYS = {
    "grad": lambda f: jax.grad(f),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "vmap of grad": lambda f: (
        lambda x: jax.tree.map(lambda g: g[0], jax.vmap(jax.grad(f))(stacked(x)))
    ),
    "jit of vmap of grad": lambda f: (
        lambda x: jax.tree.map(lambda g: g[0], jax.jit(jax.vmap(jax.grad(f)))(stacked(x)))
    ),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(stacked(x))[0]),
    "jacfwd": lambda f: jax.jacfwd(f),
}


def stacked(leaves):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1] + 0.25]), leaves)


SCHEDULES = ("1f1b", "chimera", "zb-h1")


@pytest.mark.parametrize(("link", "name"), daily(itertools.product(LINKS, SCHEDULES), total=6))
def test_gradients_are_those_of_makespan(link, name):  # ties included
    program = lowered(link, name)
    run = functools.partial(total, program)
    functions = {way: WAYS[way](run) for way in ("grad", "jit of grad")}
    for dyadic in (True, False):  # of one shape: what is compiled serves both
        leaves = draw_samples(SCHEDULES.index(name), dyadic=dyadic, name=name)
        expected = one_by_one(program, leaves)
        for way, gradient in functions.items():
            result = gradient(leaves)
            for field in FIELDS:
                np.testing.assert_array_equal(result[field], expected[field], f"{way} {field}")


@pytest.mark.parametrize("way", daily(WAYS))
def test_every_way_gives_the_same_gradient(way):
    program, leaves = lowered("queued"), draw_samples(7, dyadic=True)
    result = WAYS[way](functools.partial(total, program))(leaves)
    for field, expected in one_by_one(program, leaves).items():
        np.testing.assert_array_equal(result[field], expected, field)


def test_values_inside_of_traces():
    program, leaves = lowered("queued"), draw_samples(8, dyadic=False)
    run = lambda leaves: pj.makespans(program, pj.Costs(**leaves))  # noqa: E731
    expected = run(leaves)
    np.testing.assert_array_equal(jax.jit(run)(leaves), expected)
    both = jax.vmap(run)(stacked(leaves))
    np.testing.assert_array_equal(both[0], expected)
    np.testing.assert_array_equal(both, jax.jit(jax.vmap(run))(stacked(leaves)))
    values, moved = jax.jvp(run, (leaves,), (leaves,))
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_allclose(moved, expected, rtol=1e-12)  # Euler
    # costs that the trace does not see stay numbers
    np.testing.assert_allclose(jax.jit(lambda x: x + run(leaves))(1.0), expected + 1)
    scalars = jax.vmap(lambda f: pj.makespans(program, pj.Costs(forward=f, backward=2.0)))
    np.testing.assert_allclose(scalars(jnp.array([1.0, 3.0])), [[33.0], [55.0]])
    shared = {name: leaf if name == "forward" else leaf[:1] for name, leaf in leaves.items()}
    one_axis = dict.fromkeys(shared) | {"transmit": 0}
    result = jax.vmap(run, (one_axis,))(shared | {"transmit": leaves["transmit"][:, None]})
    alone = [run(shared | {"transmit": leaves["transmit"][k, None]}) for k in range(SIZE)]
    np.testing.assert_array_equal(result, np.stack(alone))


@pytest.mark.parametrize("wrap", [jax.jit, pytest.param(lambda f: f, marks=slow, id="eager")])
def test_second_derivatives_are_zero(wrap):
    program, leaves = lowered(), draw_samples(9, dyadic=False)
    square = lambda delay: jnp.sum(  # noqa: E731
        pj.makespans(program, pj.Costs(**leaves | {"latency": delay})) ** 2
    )
    plain = lambda delay: total(program, leaves | {"latency": delay})  # noqa: E731
    delay = jnp.array([0.5, 1.0, 2.0])
    counts = jax.grad(plain)(delay)
    assert not np.any(wrap(jax.hessian(plain))(delay))
    assert not np.any(wrap(jax.grad(lambda x: jax.grad(plain)(x).sum()))(delay))
    np.testing.assert_allclose(wrap(jax.hessian(square))(delay), np.diag(2 * counts**2), rtol=1e-12)


def test_smooth_makespans_have_first_derivatives():
    program, leaves = lowered(), draw_samples(10, dyadic=False)
    smooth = functools.partial(total, program, temperature=0.3)
    _, expected = pj.makespans_and_grad(program, pj.Costs(**leaves), temperature=0.3)
    for way in ("grad", "jit of grad"):
        result = WAYS[way](smooth)(leaves)
        for field in FIELDS:
            np.testing.assert_allclose(result[field], getattr(expected, field), rtol=1e-9)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.hessian(lambda f: smooth(leaves | {"forward": f}))(leaves["forward"])


def step_times(link):
    """From link bandwidths [byte/s] to step times, through the cost model."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    program, system = pj.lower(table, link=link), pj.load_system("mid_nw_mid_cp")
    workload = pj.Workload(pj.load_model("tabular-128l"), minibatch=8)

    def costs(bandwidth):
        network = dataclasses.replace(system.network, bandwidth=bandwidth)
        return pj.stage_costs(workload, dataclasses.replace(system, network=network), table)

    return lambda bandwidths: pj.makespans(program, jax.vmap(costs)(bandwidths))


@pytest.mark.slow
@pytest.mark.parametrize("link", ["rendezvous", *(pytest.param(n, marks=slow) for n in LINKS[:3])])
def test_from_bandwidths_to_step_time(link):
    times = step_times(link)
    step = 1e-6 * BANDWIDTHS
    slopes = (times(BANDWIDTHS + step) - times(BANDWIDTHS - step)) / (2 * step)
    assert np.all(slopes < 0)
    gradient = jax.grad(lambda bandwidths: times(bandwidths).sum())
    np.testing.assert_allclose(gradient(BANDWIDTHS), slopes, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(gradient)(BANDWIDTHS), slopes, rtol=1e-5)
    two = np.stack([BANDWIDTHS, BANDWIDTHS[::-1]])
    for many in (jax.vmap(gradient), jax.jit(jax.vmap(gradient))):
        np.testing.assert_allclose(many(two), np.stack([slopes, slopes[::-1]]), rtol=1e-5)


def test_a_traced_program_is_refused():
    costs = pj.Costs(forward=1.0, backward=2.0)
    with pytest.raises(ValueError, match=r"the program is traced: close over it, as in jax\.jit"):
        jax.jit(pj.makespans)(lowered(), costs)
    static = jax.jit(pj.makespans, static_argnums=0)
    assert static(lowered(), costs).tolist() == [33.0]


STAGES = {"forward": np.ones(4), "backward": np.full(4, 2.0)}
BATCHES = {  # costs, batch_size -> makespans, or what the error says
    "stages or batch": (STAGES, None, r"forward has shape \(4,\): a batch, or .* 4 stages"),
    "boundaries or batch": (
        {"forward": 1.0, "backward": 2.0, "transmit": np.zeros(3)},
        None,
        r"transmit has shape \(3,\): a batch, or .* 3 boundaries\? Give batch_size=3",
    ),
    "said": (STAGES, 4, [33.0] * 4),
    "only scalars": ({"forward": 1.0, "backward": 2.0}, 2, [33.0] * 2),
    "not as long as stages": ({"forward": np.ones(2), "backward": 2.0}, None, [33.0] * 2),
    "two axes": ({"forward": np.ones((4, 4)), "backward": np.ones(4)}, None, [22.0] * 4),
    "another length": (STAGES, 3, "forward has a batch axis of 4, batch_size is 3"),
    "no whole number": (STAGES, 0, "batch_size must be a whole number of at least 1, got 0"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_the_batch_axis_is_said_and_not_guessed(case):
    leaves, batch_size, expected = BATCHES[case]
    run = functools.partial(pj.makespans, lowered(), pj.Costs(**leaves), batch_size=batch_size)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            run()
    else:
        assert run().tolist() == expected
        values, counts = pj.makespans_and_grad(lowered(), pj.Costs(**leaves), batch_size=batch_size)
        assert values.tolist() == expected
        assert len(counts.forward) == len(expected)


@pytest.mark.slow
def test_programs_that_nobody_holds_are_let_go():
    table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=16)
    program, costs = pj.lower(table), pj.Costs(forward=np.ones(2), backward=2.0)
    for unroll in (True, False):
        pj.makespans(program, costs, unroll=unroll)
    pj.makespans_and_grad(program, costs)
    jax.jit(jax.grad(lambda f: pj.makespans(program, pj.Costs(forward=f, backward=2.0)).sum()))(  # noqa: F821  # deleted below
        jnp.ones(2)
    )
    pj.cycle_time(program, costs)
    pj.makespan(program, pj.Costs(forward=1.0, backward=2.0))
    (plan,) = module._plans[program].values()
    held = [weakref.ref(reference) for reference in (program, plan, plan.ops, plan.unrolled)]
    del table, program, plan  # a table keeps what it was lowered to
    gc.collect()
    assert [reference() for reference in held] == [None] * 4
