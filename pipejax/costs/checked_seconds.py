"""What is a time: numbers at the front door, of Python, NumPy or JAX, finite and at least 0."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.base.display import abbreviated
from pipejax.costs.precision import is_traced, on_host


def checked_seconds(name: str, value: Any) -> Any:
    """Return a cost as a float or an array of floats [s]; refuse what is no time."""
    if type(value) is float and 0 <= value < np.inf:
        return value  # most costs are: a single evaluation is to take no time
    numbers = _as_array(value)
    dtype = np.dtype(bool) if numbers is None else numbers.dtype
    if not (dtype.kind in "iu" or jnp.issubdtype(dtype, jnp.floating)):
        raise ValueError(f"{name} must be a number or an array of them, got {abbreviated(value)}")
    if dtype not in (np.float32, np.float64):
        numbers = _as_float(numbers)
    if is_traced(numbers):
        return numbers
    here = on_host(numbers)
    if not _are_times(here):
        wrong = here[~(np.isfinite(here) & (here >= 0))].ravel()[0]
        unit = "" if name.endswith("factor") else " seconds"
        raise ValueError(f"{name} must be finite and at least 0{unit}, got {wrong}")
    if isinstance(numbers, jax.Array):
        return numbers
    return numbers[()] if numbers.ndim or hasattr(value, "dtype") else float(numbers)


def _are_times(numbers: NumpyArray) -> bool:
    """Return whether all numbers, of float32 or float64, are finite and at least 0.

    Read as whole numbers without a sign, the bits of such floats stand below those of infinity, and
    NaN and all with a sign above: one pass tells. Only -0 needs the second look.
    """
    if numbers.size == 0:
        return True
    bits = np.dtype(f"u{numbers.itemsize}")
    return bool(
        numbers.view(bits).max() < numbers.dtype.type(np.inf).view(bits)
        or (numbers.min() >= 0 and numbers.max() < np.inf)
    )


def _as_float(numbers: Any) -> Any:
    """Turn whole numbers into float64, and floats of other types into the nearest that can add."""
    if numbers.dtype.kind not in "iu":  # float16 and bfloat16 have too few digits, or long doubles
        return numbers.astype(np.float32 if numbers.dtype.itemsize < 4 else np.float64)
    if isinstance(numbers, jax.Array) and not is_traced(numbers) and numbers.is_fully_addressable:
        numbers = np.asarray(numbers)  # JAX's default has no float64 to hold them
    return numbers.astype(float)


def _as_array(value: Any) -> Any:
    """Convert a value to an array, or return None where it does not consist of numbers."""
    if isinstance(value, jax.Array):
        return value if isinstance(value.dtype, np.dtype) else None  # random keys have their own
    if isinstance(value, np.ma.MaskedArray):
        return None
    try:
        if isinstance(value, list | tuple):
            entries = jax.tree.leaves(value)
            if any(
                isinstance(entry, bool | np.ma.MaskedArray)
                or getattr(entry, "dtype", None) == "bool"
                for entry in entries
            ):
                return None  # among numbers NumPy reads them as such
            if any(isinstance(entry, jax.Array) for entry in entries):
                return jnp.asarray(value)
        return np.asarray(value)
    except (TypeError, ValueError):
        return None
