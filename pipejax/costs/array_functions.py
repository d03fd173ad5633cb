"""Array functions that use JAX if an argument is a JAX array (traced or not), else NumPy.

Pricing a table takes a few thousand operations on small arrays. In a JAX trace, the operations
become part of one program. Outside of a trace, JAX would compile each operation for each shape,
which takes seconds where NumPy takes milliseconds.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipejax.base.array_types import Array
from pipejax.base.jax_on_demand import is_array, jnp, mapped
from pipejax.base.many_numbers import FUNCTIONS, Many

# returned values
if TYPE_CHECKING:
    Computed = Array  # without np.ndarray: the union would double the time of mypy
else:
    Computed = Array | np.ndarray | Many  # `Many` has the shape of one configuration


def _dispatch(name: str) -> Callable[..., Any]:
    """Return a named array function that selects JAX, NumPy or `Many` by its arguments."""
    numpy_function = getattr(np, name)

    @functools.wraps(numpy_function)
    def call(*arguments: Any, **options: Any) -> Any:
        kind = _kind(arguments)
        if kind is None:
            return numpy_function(*arguments, **options)
        function = FUNCTIONS[name] if kind is Many else getattr(jnp, name)
        return function(*arguments, **options)

    return call


_NUMPY_TYPES = {float, int, bool, np.ndarray, np.float64}


def _kind(arguments: Any) -> type | None:
    """Return the first argument's type that is JAX's `Array` or `Many`, or None if none is."""
    for argument in arguments:
        if type(argument) in _NUMPY_TYPES:
            continue
        if isinstance(argument, list | tuple):
            kind = _kind(argument)
            if kind is not None:
                return kind
        elif is_array(argument):
            return Array
        elif isinstance(argument, Many):
            return Many
    return None


asarray = _dispatch("asarray")
broadcast_to = _dispatch("broadcast_to")
clip = _dispatch("clip")
concatenate = _dispatch("concatenate")
cumsum = _dispatch("cumsum")
equal = _dispatch("equal")
exp = _dispatch("exp")
floor = _dispatch("floor")
log1p = _dispatch("log1p")
log2 = _dispatch("log2")
maximum = _dispatch("maximum")
minimum = _dispatch("minimum")
round = _dispatch("round")
split = _dispatch("split")
stack = _dispatch("stack")
sum = _dispatch("sum")
where = _dispatch("where")


def stacked(values: Sequence[Any]) -> Any:
    """Stack numbers into an array: a JAX array if any number is a JAX array, else NumPy."""
    if _kind(values) is None:
        return np.array(values, float)
    return stack([asarray(value, float) for value in values])


def stacked_trees(trees: Sequence[Any]) -> Any:
    """Stack trees of numbers into a tree of arrays, with one entry per stacked tree."""
    return mapped(lambda *leaves: stacked(leaves), *trees)
