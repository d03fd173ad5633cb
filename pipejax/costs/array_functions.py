"""Functions of arrays: JAX's where an argument is an array of JAX, traced or not, else NumPy's.

A price is a few thousand operations on small arrays. In a trace they become part of one program.
Of numbers that are known, JAX would compile each operation by itself and anew for every shape,
which takes seconds where NumPy takes milliseconds.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipejax.base.array_types import Array
from pipejax.base.jax_on_demand import is_array, jnp
from pipejax.base.many_numbers import FUNCTIONS, Many
from pipejax.base.trees import mapped

# what they return
if TYPE_CHECKING:
    Computed = Array  # NumPy's arrays, too: in every product they double what mypy takes
else:
    Computed = Array | np.ndarray


def _of_either(name: str) -> Callable[..., Any]:
    """The function of that name of JAX, of NumPy, and of many configurations on the host."""
    known, of_many = getattr(np, name), FUNCTIONS[name]

    @functools.wraps(known)
    def choose(*arguments: Any, **options: Any) -> Any:
        kind = _kind(arguments)
        function = known if kind is None else of_many if kind is Many else getattr(jnp, name)
        return function(*arguments, **options)

    return choose


_PLAIN = {float, int, bool, np.ndarray, np.float64}


def _kind(arguments: Any) -> type | None:
    """What among these decides who computes; None where all are numbers and NumPy's arrays."""
    for each in arguments:
        if type(each) in _PLAIN:
            continue
        if isinstance(each, list | tuple):
            found = _kind(each)
            if found is not None:
                return found
        elif is_array(each):
            return Array
        elif isinstance(each, Many):
            return Many
    return None


asarray = _of_either("asarray")
broadcast_to = _of_either("broadcast_to")
clip = _of_either("clip")
concatenate = _of_either("concatenate")
cumsum = _of_either("cumsum")
equal = _of_either("equal")
exp = _of_either("exp")
floor = _of_either("floor")
log1p = _of_either("log1p")
log2 = _of_either("log2")
max = _of_either("max")
maximum = _of_either("maximum")
minimum = _of_either("minimum")
round = _of_either("round")
split = _of_either("split")
stack = _of_either("stack")
sum = _of_either("sum")
where = _of_either("where")


def softmax(logits: Any) -> Any:
    """Shares (...) that sum to 1."""
    weights = exp(logits - max(logits, axis=-1))
    return weights / sum(weights)


def stacked(values: Sequence[Any]) -> Any:
    """One array from several numbers, NumPy's unless one of them is JAX's."""
    return stack([asarray(value, float) for value in values])


def stacked_trees(trees: Sequence[Any]) -> Any:
    """One tree of arrays (trees) from several trees of numbers."""
    first, *others = trees
    return mapped(lambda *leaves: stacked(leaves), first, *others)
