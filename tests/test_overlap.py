"""Exchanges beside compute: closed forms against the pipelines step by step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.costs.stage.exchanges import exposed_buckets, exposed_ring

SECONDS = (0.0, 0.3, 1.0, 1.7, 4.0)


def end_of_layers(compute, reduce, layers):
    """Links reduce the gradients of each layer behind its compute."""
    computed = links = 0.0
    for _ in range(layers):
        computed += compute
        links = max(links, computed) + reduce
    return links


def end_of_ring(transfer, compute, steps):
    computed = arrived = 0.0
    for _ in range(steps):
        computed = max(computed, arrived) + compute
        arrived += transfer
    return computed


def test_buckets_are_their_longest_path():
    cases = [*itertools.product(SECONDS[1:], SECONDS, range(1, 7))]
    compute, reduce, layers = map(np.array, zip(*cases, strict=True))
    ends = np.array([end_of_layers(*case) for case in cases])
    result = exposed_buckets(layers * reduce, layers * compute, layers)
    np.testing.assert_allclose(result, ends - layers * compute, atol=1e-12)


def test_ring_exchanges_are_their_longest_path():
    cases = [*itertools.product(SECONDS, SECONDS, range(1, 7))]
    transfer, compute, steps = map(np.array, zip(*cases, strict=True))
    ends = np.array([end_of_ring(*case) for case in cases])
    result = exposed_ring((steps - 1) * transfer, steps * compute, steps)
    np.testing.assert_allclose(result, ends - steps * compute, atol=1e-12)


def test_slopes_are_finite_differences():
    at = jnp.array([5.0, 7.0, 4.0])
    for function in (exposed_buckets, exposed_ring):
        point = at.at[0].set(9.0)
        slopes = jax.grad(lambda x, function=function: function(*x))(point)
        for k, slope in enumerate(slopes):
            step = 1e-5 * jnp.eye(3)[k]
            rise = function(*(point + step)) - function(*(point - step))
            assert float(slope) == pytest.approx(float(rise) / 2e-5, abs=1e-7)
