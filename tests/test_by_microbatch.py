"""Costs per microbatch: what an op takes depends on its stage and on its microbatch."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from compilations import compilations
from daily import daily
from hypothesis import given, settings, strategies as st

import pipejax as pj
from pipejax.engine.pricing import by_microbatch
from pipejax.schedules.table.links import LINK_MODELS

LINKS = list(LINK_MODELS)
OPS = ("forward", "backward", "input_grad", "weight_grad", "recompute", "offload", "load", "pair")
MESSAGES = ("latency", "transmit")
SIZES = {"num_workers": 4, "num_microbatches": 8}


@functools.cache
def lowered(name="1f1b", link="delay"):
    return pj.lower(pj.schedules.build(name, **SIZES), link=link)


def random_costs(shape=(), *, stages=4, pipes=1, microbatches=8, seed=0):
    """Costs per microbatch, with the axes of a batch in front."""
    rng = np.random.default_rng(seed)
    shapes = {"forward": (stages, microbatches), "input_grad": (1, microbatches)}
    shapes |= {"weight_grad": (1, microbatches), "latency": (stages - 1,)}
    shapes["transmit"] = (2, pipes, stages - 1, microbatches)
    return pj.Costs(**{name: rng.random((*shape, *axes)) for name, axes in shapes.items()})


def repeated(costs, microbatches):
    """The same costs, written out for every microbatch."""

    def wide(name, leaf):
        if leaf is None or name not in (*OPS, *MESSAGES):
            return leaf
        axes = 3 if name in MESSAGES else 1
        whole = np.asarray(leaf).reshape((1,) * (axes - np.ndim(leaf)) + np.shape(leaf))
        return np.repeat(whole[..., None], microbatches, axis=-1)

    return pj.Costs(**{name: wide(name, leaf) for name, leaf in vars(costs).items()})


@settings(max_examples=20)
@given(
    case=st.booleans().flatmap(lambda pairs: strategies.cases(pairs=pairs, step_end=True)),
    link=st.sampled_from(LINKS),
)
def test_equal_costs_of_all_microbatches_are_costs_per_stage(case, link):
    expected = pj.evaluate(case.table, case.costs, link=link)
    many = pj.evaluate(case.table, repeated(case.costs, case.table.num_microbatches), link=link)
    for name in ("start", "finish", "message_start", "message_finish", "critical"):
        np.testing.assert_array_equal(getattr(expected, name), getattr(many, name))
    assert (expected.makespan, expected.max_span) == (many.makespan, many.max_span)
    np.testing.assert_allclose(expected.busy, many.busy, rtol=1e-14)
    assert expected.path_share == pytest.approx(many.path_share)
    for number, text in enumerate(expected.program.layout.cost_names):
        assert text in many.program.layout.cost_names, number


@pytest.mark.parametrize(
    ("name", "link"), daily(itertools.product(["zb-h1", "chimera"], LINKS), total=7)
)
def test_batches_and_gradients_are_those_of_one(name, link):
    program = lowered(name, link)
    many = random_costs((3,), pipes=program.layout.num_pipes)
    values, counts = pj.makespans_and_grad(program, many)
    np.testing.assert_array_equal(values, pj.makespans(program, many))
    for k, value in enumerate(values.tolist()):
        single = jax.tree.map(lambda leaf, k=k: leaf[k] if np.ndim(leaf) else leaf, many)
        assert pj.makespan(program, single) == value
        slopes = jax.grad(pj.makespan, argnums=1)(program, single)
        for field in ("forward", "backward", "input_grad", "weight_grad", *MESSAGES):
            np.testing.assert_array_equal(getattr(counts, field)[k], getattr(slopes, field))


def test_grad_of_a_batch_and_jit():
    program, many = lowered(), random_costs((5,))
    _, counts = pj.makespans_and_grad(program, many)

    def total(costs):
        return pj.makespans(program, costs).sum()

    for slopes in (jax.grad(total)(many), jax.jit(jax.grad(total))(many)):
        np.testing.assert_array_equal(slopes.forward, counts.forward)
        np.testing.assert_array_equal(slopes.transmit, counts.transmit)
    # scalars too get the axis of the batch
    wide = jax.tree.map(lambda x: jnp.asarray(x) if np.ndim(x) else jnp.full(5, x), many)
    one_each = jax.tree.map(lambda leaf: leaf[:, None], wide)
    inner = jax.vmap(lambda costs: pj.makespans(program, costs))(one_each)
    np.testing.assert_array_equal(inner[:, 0], pj.makespans(program, many))
    forms = [pj.makespans(program, many, unroll=unroll) for unroll in (True, False)]
    np.testing.assert_array_equal(*forms)


def test_values_compile_nothing():
    program = lowered("gpipe")
    runs = [
        lambda seed: pj.makespan(program, random_costs(seed=seed)),
        lambda seed: pj.makespans_and_grad(program, random_costs((4,), seed=seed)),
    ]
    for run in runs:
        run(0)
        run(0)  # in a long process the first may have let go what it had compiled before its last
        assert compilations(functools.partial(run, 1)) == 0


def test_a_program_holds_its_costs_per_microbatch_once():
    program = lowered()
    wide = by_microbatch(program)
    assert wide is by_microbatch(program) is by_microbatch(program)
    assert by_microbatch(wide) is wide
    assert pj.makespan(wide, pj.Costs(forward=1.0, backward=2.0)) == 33.0

    @jax.jit
    def traced(program, costs):
        return pj.makespan(program, costs)

    with pytest.raises(ValueError, match="costs per microbatch need a program that is not traced"):
        traced(program, random_costs())
    closed = jax.jit(functools.partial(pj.makespan, program))
    assert closed(random_costs()) == pj.makespan(program, random_costs())
    assert traced(wide, random_costs()) == pj.makespan(program, random_costs())
