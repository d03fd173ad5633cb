"""Floating-point types of results, and checks that times and results are finite.

float32 has too few digits: after 20,000 additions the fourth digit may be wrong. So results are
computed in float64, whatever JAX's default type is. Results are NumPy arrays, which JAX does not
round unasked. A batch of float32 arrays stays in float32. In a trace, JAX's type rules hold.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import is_masked
from pipejax.base.display import abbreviated
from pipejax.base.jax_on_demand import is_array, is_loaded, jax, jnp, leaves, mapped, named_leaves
from pipejax.base.many_numbers import Many

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def is_traced(*trees: Any) -> bool:
    """Return whether a number in these trees is a JAX tracer, whose value is unknown."""
    if not is_loaded():
        return False
    tracer = jax.core.Tracer
    return any(isinstance(leaf, tracer) for leaf in leaves(trees))


def accept_type(dtype: np.dtype | type) -> AbstractContextManager[Any]:
    """Return a context in which JAX accepts a float type such as float64."""
    return jax.enable_x64(_has_float64() or dtype == np.float64)


def _has_float64() -> bool:
    return is_loaded() and bool(jax.config.read("jax_enable_x64"))


def float_type(*values: Any) -> np.dtype:
    """Return the float type to use for sums of these values."""
    # The type is float32 if there are arrays, all of them of float32 or smaller, else float64.
    # Python's numbers do not count. Tracers follow JAX's rules.
    if is_traced(values):
        with accept_type(np.float32):
            return np.dtype(jnp.promote_types(jnp.result_type(float, *values), np.float32))
    return _number_type(frozenset(map(_kind, values)))


def _kind(value: Any) -> Any:
    """Return a value's type for promotion: float or int for Python numbers and weak types."""
    if getattr(value, "weak_type", False):
        return float if jnp.issubdtype(value.dtype, jnp.floating) else int
    return getattr(value, "dtype", type(value))


@functools.lru_cache
def _number_type(kinds: frozenset[Any]) -> np.dtype:
    # as in JAX, floats decide the type, also floats such as bfloat16 that NumPy does not know
    floats = [kind for kind in kinds if isinstance(kind, np.dtype) and kind.kind not in "iub"]
    is_small = floats and all(kind.itemsize <= np.float32().itemsize for kind in floats)
    return np.dtype(np.float32 if is_small else np.float64)


@contextmanager
def _plain_numbers() -> Iterator[None]:
    """Open a context outside of all JAX traces, in which JAX accepts float64."""
    if not is_loaded():
        yield
        return
    with jax.core.eval_context(), accept_type(np.float64):
        yield


def in_float64(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function convert its numbers to float64, unless JAX traces them."""

    # `function` gets copies: it may still compute while the caller changes the arrays.
    @functools.wraps(function)
    def run_in_float64(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if is_traced(arguments, options):
            return function(*arguments, **options)
        with _plain_numbers():
            exact = {name: _exact(option) for name, option in options.items()}
            result = function(*map(_exact, arguments), **exact)
        check_finite(result, (arguments, options))
        return to_output_dtype(result)

    return run_in_float64


def _exact(tree: Any) -> Any:
    """Copy a tree with its float arrays as float64; return trees without floats unchanged."""
    if not any(map(_is_real, leaves(tree))):
        return tree
    return mapped(lambda leaf: np.array(leaf, np.float64) if _is_real(leaf) else leaf, tree)


def _is_real(leaf: Any) -> bool:
    """Return whether a leaf is an unmasked array of floats."""
    if not (is_array(leaf) or isinstance(leaf, np.ndarray | np.generic)):
        return False
    if leaf.dtype.kind in "iub":
        return False
    # `Costs` refuses a masked array
    return not is_masked(leaf) and (
        leaf.dtype.kind == "f" or jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def to_output_dtype(tree: Any) -> Any:
    """Convert float64 results to NumPy arrays, unless `jax_enable_x64` lets JAX hold them."""
    if _has_float64():
        return tree
    # [()] makes an array without axes a NumPy scalar, which is a Python float
    return mapped(
        lambda leaf: np.asarray(leaf)[()] if _is_real(leaf) and leaf.dtype == np.float64 else leaf,
        tree,
    )


def as_float(number: Any) -> Any:
    """Convert integers to floats, because products of traced 32-bit integers overflow."""
    if isinstance(number, tuple):
        return tuple(map(as_float, number))
    if isinstance(number, int) and not isinstance(number, bool):
        return float(number)
    has_type = is_array(number) or isinstance(number, np.ndarray | np.integer)
    return number.astype(float) if has_type and number.dtype.kind in "iu" else number


def make_floats(record: Any, *, skip: type | tuple[type, ...] = ()) -> None:
    """Convert integers in a new frozen record to floats, except in static fields."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if not (field.metadata or isinstance(value, skip)):
            object.__setattr__(record, field.name, as_float(value))


class FloatFields:
    """Base of frozen records whose numbers are floats."""

    def __post_init__(self) -> None:
        make_floats(self)


def check_finite(results: Any, inputs: Any) -> None:
    """Refuse results that overflowed; the error names the largest input."""
    # The check waits for the results, so the caller may change its arrays afterwards.
    if all(_is_finite(on_host(leaf)) for leaf in leaves(results)):
        return
    named_results = _named_arrays(results)
    name, array = next((name, array) for name, array in named_results if not _is_finite(array))
    what = "makespan" if name.isdigit() or not name else name  # a result without a name
    text = f"the {what} is too large for a {array.dtype}: costs are too large or too far apart"
    maxima = {name: float(array.max(initial=0.0)) for name, array in _named_arrays(inputs)}
    if maxima:
        name = max(maxima, key=lambda name: maxima[name])
        text += f", the largest is {name} = {maxima[name]:g} s"
    raise ValueError(text)


def _named_arrays(tree: Any) -> list[tuple[str, NumpyArray]]:
    """List the floats and float arrays in a tree, each with the last part of its name."""
    return [
        (name, on_host(leaf))
        for name, leaf in named_leaves(tree)
        if isinstance(leaf, float) or _is_real(leaf)
    ]


def _is_finite(values: NumpyArray) -> bool:
    return values.size == 0 or bool(-np.inf < values.min() and values.max() < np.inf)


def on_host(value: Any) -> NumpyArray:
    """Convert a value to a NumPy array; for a multi-process array, only its local part."""
    if is_array(value) and not value.is_fully_addressable:
        shards = [np.asarray(shard.data).ravel() for shard in value.addressable_shards]
        return np.concatenate(shards)
    return np.asarray(value)


# valid times: numbers of Python, NumPy or JAX, checked where users pass them


def checked_seconds(name: str, value: Any) -> Any:
    """Return a cost [s] as a float or float array; refuse other types and negative values."""
    if type(value) is float and 0 <= value < np.inf:
        return value  # the usual case, for speed
    if isinstance(value, Many):  # the caller checks these values
        return value
    numbers = _as_array(value)
    kind = None if numbers is None else numbers.dtype
    if kind is None or not (kind.kind in "iuf" or jnp.issubdtype(kind, jnp.floating)):
        raise ValueError(f"{name} must be a number or an array of them, got {abbreviated(value)}")
    if kind not in (np.float32, np.float64):
        numbers = _as_float(numbers)
    if is_array(numbers) and is_traced(numbers):
        return numbers
    host_numbers = on_host(numbers)
    # NaN is the least and the largest number, and fails both comparisons
    if host_numbers.size and not (host_numbers.min() >= 0 and host_numbers.max() < np.inf):
        wrong = host_numbers[~(np.isfinite(host_numbers) & (host_numbers >= 0))].ravel()[0]
        unit = "" if name.endswith("factor") else " seconds"
        raise ValueError(f"{name} must be finite and at least 0{unit}, got {wrong}")
    if is_array(numbers):
        return numbers
    # Copy, because the caller may change its array later. The view tells whether it is read-only:
    # the flag of a result of `broadcast_arrays` would warn.
    if numbers.ndim and not memoryview(numbers).readonly:
        numbers = numbers.copy()
        numbers.flags.writeable = False
    is_scalar = numbers.ndim == 0 and not hasattr(value, "dtype")  # NumPy scalars keep their type
    return float(numbers) if is_scalar else numbers[()]


def _as_float(numbers: Any) -> Any:
    """Convert integers and long doubles to float64, and 16-bit floats to float32."""
    if numbers.dtype.kind not in "iu":  # 16-bit floats or long doubles
        return numbers.astype(np.float32 if numbers.dtype.itemsize < 4 else np.float64)
    if is_array(numbers) and not is_traced(numbers) and numbers.is_fully_addressable:
        numbers = np.asarray(numbers)  # by default JAX has no float64 to hold them
    return numbers.astype(float)


def _as_array(value: Any) -> Any:
    """Convert a value to an array; None if it is masked, ragged or holds booleans in a list."""
    if is_array(value):
        return value if isinstance(value.dtype, np.dtype) else None  # random keys are no numbers
    if is_masked(value):
        return None
    try:
        if isinstance(value, list | tuple):
            entries = leaves(value)
            for entry in entries:
                is_bool = isinstance(entry, bool) or getattr(entry, "dtype", None) == "bool"
                if is_bool or is_masked(entry):
                    return None  # NumPy would turn booleans among numbers into numbers
            if any(is_array(entry) for entry in entries):
                return jnp.asarray(value)
        return np.asarray(value)
    except (TypeError, ValueError):
        return None
