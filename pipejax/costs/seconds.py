"""Seconds as users give them: numbers or arrays, refused where no time can be so long."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pipejax.base.array_types import Array, NumpyArray

Number = float | Array | NumpyArray | Sequence[float]


def checked_seconds(name: str, value: Number) -> Any:
    """Return a cost as a float or array; refuse a negative, NaN or infinite one."""
    if isinstance(value, jax.core.Tracer):
        return value
    try:
        numbers = _here(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number or an array, got {value!r}") from None
    # a NaN is neither: the smallest and the largest tell of it at less than a test of each
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < np.inf):
        wrong = numbers[~(np.isfinite(numbers) & (numbers >= 0))].ravel()[0]
        raise ValueError(f"{name} must be finite and at least 0 seconds, got {wrong}")
    if hasattr(value, "dtype"):
        return value
    return float(numbers) if numbers.ndim == 0 else numbers


def _here(value: Any) -> NumpyArray:
    """Numbers of a cost; of an array over several processes, those that this one holds."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return np.concatenate(
            [np.asarray(shard.data).ravel() for shard in value.addressable_shards]
        )
    return np.asarray(value, dtype=getattr(value, "dtype", float))
