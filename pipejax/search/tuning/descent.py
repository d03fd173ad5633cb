"""Gradient descent from many starts at once, each of which keeps its best point.

A step time has kinks and, where an efficiency is a step curve, jumps. So the step size shrinks to
0, and what counts is the best point on the way, not the last one.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import whole_number
from pipejax.base.compiled import compiled

try:
    import optax
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tuning needs optax: pip install 'pipejax[tuning]'", name=error.name
    ) from error

Points = Float[Array, "starts ..."] | Float[NumpyArray, "starts ..."]
Values = Float[Array, " starts"] | Float[NumpyArray, " starts"]
ValueAndGrad = Callable[[Points], tuple[Values, Points]]


class Descent(NamedTuple):
    """Best point of each start."""

    points: Float[NumpyArray, "starts ..."]  # (starts, ...) best point that each has seen
    values: Float[NumpyArray, " starts"]  # its value


def descend(
    value_and_grad: ValueAndGrad,
    starts: Points,
    *,
    steps: int = 40,
    rate: float = 0.3,
    lower: Points | float = -jnp.inf,
    upper: Points | float = jnp.inf,
) -> Descent:
    """Follow the gradients of a batch of starts with Adam, whose rate falls along a cosine."""
    whole_number(steps, "steps")
    points = jnp.clip(jnp.asarray(starts), lower, upper)
    state = _adam(rate, steps).init(points)
    best = np.array(points)
    values = np.full(len(best), np.inf)
    for step in range(steps + 1):
        value, gradient = value_and_grad(points)
        better = np.asarray(value) < values
        values = np.where(better, value, values)
        best[better] = np.asarray(points)[better]
        if step < steps:
            gradient = jnp.asarray(gradient, points.dtype)
            points, state = _move(points, state, gradient, rate, lower, upper, steps=steps)
    return Descent(best, values)


def _adam(rate: Array | float, steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(rate, steps, alpha=0.01), b1=0.8)


@functools.partial(compiled, static_argnames="steps")
def _move(
    points: Array,
    state: optax.OptState,
    gradient: Array,
    rate: Array | float,
    lower: Array | float,
    upper: Array | float,
    *,
    steps: int,
) -> tuple[Array, optax.OptState]:
    """Take one step; one compilation serves all descents of a shape."""
    updates, state = _adam(rate, steps).update(gradient, state, points)
    return jnp.clip(optax.apply_updates(points, updates), lower, upper), state
