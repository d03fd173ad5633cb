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
from pipejax.base.many_numbers import FUNCTIONS, Many
from pipejax.costs import array_functions as xp
from pipejax.engine.batched import makespans as module
from pipejax.schedules.table.links import LINKS

slow = pytest.mark.slow

SIZE = 3
BANDWIDTHS = np.array([1.0, 4.0, 20.0, 90.0]) * 1e9
FIELDS = ("forward", "backward", "input_grad", "weight_grad", "latency", "transmit")


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
BATCHES = {  # costs, batch_size -> makespans
    "said": (STAGES, 4, [33.0] * 4),
    "only scalars": ({"forward": 1.0, "backward": 2.0}, 2, [33.0] * 2),
    "not as long as stages": ({"forward": np.ones(2), "backward": 2.0}, None, [33.0] * 2),
    "two axes": ({"forward": np.ones((4, 4)), "backward": np.ones(4)}, None, [22.0] * 4),
}


@pytest.mark.parametrize("case", BATCHES)
def test_the_batch_axis_is_said_and_not_guessed(case):
    leaves, batch_size, expected = BATCHES[case]
    program, costs = lowered(), pj.Costs(**leaves)
    assert pj.makespans(program, costs, batch_size=batch_size).tolist() == expected
    values, counts = pj.makespans_and_grad(program, costs, batch_size=batch_size)
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


# Numbers of many configurations: against the same function of each, and against JAX's slopes

MEMBERS = 5
SHARED = np.array([[0.5, 2.0, 4.0]])
ONE = np.random.default_rng(0).uniform(0.5, 3.0, (MEMBERS, 3))
OTHER = np.random.default_rng(1).uniform(0.5, 3.0, (MEMBERS, 2, 3))


CASES = {
    "sums": lambda x, y, z: 2 - x + (y - 1.5) - z + 1.0,
    "products": lambda x, y, z: 3 * x * y / z / 2 + 1 / x,
    "powers": lambda x, y, z: x**2.5 + y**z + np.arange(3.0) ** (1 + z),
    "zero times": lambda x, y, z: np.zeros(3) * x + y * 0.0 + np.zeros((2, 3)) / z,
    "remainders": lambda x, y, z: x % 0.7 < 0.3,
    "comparisons": lambda x, y, z: ~((x >= 1) & (x <= 2)) & (y > z),
    "equals": lambda x, y, z: xp.equal(xp.floor(x), xp.round(y)) == (x < y),
    "extrema": lambda x, y, z: xp.maximum(x, y) - xp.minimum(z, xp.clip(x, 0.8, 1.2)),
    "choice": lambda x, y, z: xp.where(x > 1, y, z * x) + xp.where(np.arange(3) > 1, x, 0.0),
    "logarithms": lambda x, y, z: xp.log2(x) + xp.log1p(y) * xp.exp(-z),
    "stacked": lambda x, y, z: xp.stack([x, z, np.ones(3)], axis=-1) * y[0, 1],
    "joined": lambda x, y, z: xp.concatenate([y, x[None], z[None]], axis=0).sum(axis=0),
    "split": lambda x, y, z: xp.split(xp.concatenate([x, z, y.ravel()]), [2, 5])[1] * 2,
    "shapes": lambda x, y, z: xp.broadcast_to(x[:, None] * y[1], (4, 3, 3)).reshape(4, 9)[1:, ::2],
    "totals": lambda x, y, z: xp.sum(y) + x.sum() + xp.cumsum(y, axis=1)[:, :-1].sum(axis=-1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_function_of_many_is_that_of_each_with_the_slopes_of_jax(case):
    function = CASES[case]
    options = [
        Many(ONE, {"x": np.broadcast_to(np.eye(3)[None], (1, 3, 3))}),
        Many(OTHER),
        Many(SHARED, {"z": np.ones((1, 1, 3))}),  # one number moves all entries
    ]
    result = function(*options)
    value = np.broadcast_to(result.value, (MEMBERS, *result.shape))
    slopes = {"x": 3, "z": 1}
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        for row in range(MEMBERS):
            x, y, z = ONE[row], OTHER[row], SHARED[0]
            np.testing.assert_array_equal(value[row], function(x, y, z))
            if value.dtype == bool:
                continue
            along = jax.jacfwd(lambda x, m, y=y, z=z: function(x, jnp.array(y), z + m), (0, 1))
            for (name, count), slope in zip(
                slopes.items(), along(jnp.asarray(x), 0.0), strict=True
            ):
                is_own = np.zeros((count, *result.shape))
                if name in result.slopes:
                    part = result.slopes[name]
                    is_own = np.broadcast_to(part, (MEMBERS, *part.shape[1:]))[row]
                expected = np.moveaxis(np.asarray(slope).reshape(*result.shape, count), -1, 0)
                np.testing.assert_allclose(is_own, expected, rtol=1e-13, atol=1e-15, err_msg=name)


def test_what_all_share_is_computed_once():
    shared, apart = Many(SHARED, {"z": np.ones((1, 1, 3))}), Many(ONE, {"x": np.ones((1, 1, 3))})
    assert (shared * 2 + 1).value.shape == (1, 3)
    assert {*(apart * shared).slopes} == {"x", "z"}
    first, rest = xp.split(xp.concatenate([shared, apart]), [3])
    assert [part.value.shape for part in (first, rest)] == [(1, 3), (MEMBERS, 3)]
    assert [{*part.slopes} for part in (first, rest)] == [{"z"}, {"x"}]


def test_equal_ones_share_an_extremum_as_in_jax():
    tie = Many(np.ones((1, 1)), {"x": np.ones((1, 1, 1))})
    for name in ("maximum", "minimum"):
        assert FUNCTIONS[name](tie, 1.0).slopes["x"].item() == 0.5
