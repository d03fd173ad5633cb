"""Arrays of a batch of configurations with their derivatives, in NumPy, without compilation.

`Many` evaluates a function as `jax.vmap` and `jax.jvp` would. A configuration gets the same bits
as in a batch of one. An array that all configurations share is computed once. Slopes are
derivatives; an array has them only for the inputs that it depends on. `array_functions` of costs
calls `FUNCTIONS` for arrays of this type.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pipejax.base.array_types import Int, NumpyArray

NO_SLOPES: Mapping[str, NumpyArray] = MappingProxyType({})
Slopes = Mapping[str, NumpyArray]
Function = Callable[[Any, Any], Any]
_ONE = 1.0  # this derivative multiplies nothing


def _operation(function: Function, slope_rule: Any = None) -> Callable[[Any, Any], "Many"]:
    """Make an operator of two arrays; without a `slope_rule`, the result has no slopes."""

    def apply(first: Any, second: Any) -> "Many":
        return _binary(function, first, second, slope_rule)

    return apply


def _reflected(operation: Callable[[Any, Any], "Many"]) -> Callable[[Any, Any], "Many"]:
    def apply(first: "Many", second: Any) -> "Many":
        return operation(_to_many(second), first)

    return apply


class Many:
    """Arrays of a batch of configurations, used like the array of one configuration."""

    # `value` has the shape (batch, ...), or (1, ...) if all configurations share it. `slopes` maps
    # the name of an input to derivatives (batch, numbers of the input, ...).

    __slots__ = ("slopes", "value")
    __array_ufunc__ = None  # NumPy's arrays leave operators to this class

    def __init__(self, value: NumpyArray, slopes: Slopes = NO_SLOPES) -> None:
        self.value, self.slopes = value, slopes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one configuration's array."""
        return self.value.shape[1:]

    @property
    def ndim(self) -> int:
        """Number of axes of one configuration's array."""
        return self.value.ndim - 1

    @property
    def dtype(self) -> np.dtype:
        """Type of the values."""
        return self.value.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NumpyArray:
        return np.asarray(self.value, dtype)

    def __len__(self) -> int:
        """Length of the first axis of one configuration's array."""
        return self.shape[0]

    def __getitem__(self, key: Any) -> "Many":
        key = key if isinstance(key, tuple) else (key,)
        return _map_linear(self, lambda array, batch_axes: array[(*batch_axes, *key)])

    __add__ = __radd__ = _operation(operator.add, lambda a, b, c: (_ONE, _ONE))
    __sub__ = _operation(operator.sub, lambda a, b, c: (_ONE, -1.0))
    __rsub__ = _reflected(__sub__)
    __mul__ = __rmul__ = _operation(operator.mul, lambda a, b, c: (b, a))
    __truediv__ = _operation(operator.truediv, lambda a, b, c: (1 / b, -c / b))
    __rtruediv__ = _reflected(__truediv__)
    __pow__ = _operation(
        operator.pow, lambda a, b, c: (b * a ** (b - 1), np.log(np.where(a == 0, 1.0, a)) * c)
    )
    __rpow__ = _reflected(__pow__)
    __mod__ = _operation(operator.mod)
    __and__ = __rand__ = _operation(operator.and_)
    __lt__, __le__ = _operation(operator.lt), _operation(operator.le)
    __gt__, __ge__ = _operation(operator.gt), _operation(operator.ge)
    __eq__ = _operation(operator.eq)  # type: ignore[assignment]  # of each entry, as NumPy
    __hash__ = object.__hash__

    def __neg__(self) -> "Many":
        return self * -1.0

    def __invert__(self) -> "Many":
        return Many(~self.value)

    def __matmul__(self, other: NumpyArray) -> "Many":
        """Multiply by a matrix, or a stack of them, that all configurations share."""
        return _map_linear(self, lambda array, _: np.tensordot(array, other, axes=(-1, -2)))

    @property
    def T(self) -> "Many":
        """Transpose of one configuration's array; the batch axes stay in front."""

        def transpose(array: NumpyArray, batch_axes: BatchAxes) -> NumpyArray:
            num_batch_axes = len(batch_axes)
            axes = range(num_batch_axes, array.ndim)
            return array.transpose(*range(num_batch_axes), *reversed(axes))

        return _map_linear(self, transpose)

    def astype(self, dtype: Any) -> "Many":
        """Convert the values to another type."""
        return Many(self.value.astype(dtype), self.slopes)

    def ravel(self) -> "Many":
        """Flatten one configuration's array."""
        return self.reshape(-1)

    def reshape(self, *shape: Any) -> "Many":
        """Reshape one configuration's array; the batch axes stay in front."""
        new_shape = np.empty(self.shape).reshape(*shape).shape  # NumPy replaces a -1
        return _map_linear(
            self,
            lambda array, batch_axes: array.reshape(*array.shape[: len(batch_axes)], *new_shape),
        )

    def sum(self, axis: int | None = None) -> "Many":
        """Sum over an axis of one configuration's array, or over all its axes."""
        if axis is None:
            return self.ravel().sum(axis=0) if self.ndim != 1 else self.sum(axis=0)
        return _map_linear(
            self, lambda array, batch_axes: array.sum(axis=_batch_axis(axis, batch_axes))
        )

    def max(self, axis: int = -1) -> "Many":
        """Return the maximum along the last axis; equal maxima share the slope, as in JAX."""
        assert axis == -1
        value = self.value.max(axis=-1)
        is_max = self.value == value[..., None]
        weight = (is_max / is_max.sum(axis=-1, keepdims=True))[:, None]
        slopes = {name: (weight * slope).sum(axis=-1) for name, slope in self.slopes.items()}
        return Many(value, slopes)


def to_many(leaf: NumpyArray) -> Any:
    """Wrap values (batch, ...) as `Many`, or return one entry if all entries are equal."""
    return Many(leaf) if (leaf != leaf[:1]).any() else leaf[0]


def many_values(leaf: Any) -> NumpyArray:
    """Return values (batch, ...), or (1, ...) if all configurations share them."""
    return leaf.value if isinstance(leaf, Many) else np.asarray(leaf)[None]


BatchAxes = tuple[slice, ...]  # a full slice for each axis before those of one configuration
Linear = Callable[[NumpyArray, BatchAxes], NumpyArray]
_VALUE_AXES, _SLOPE_AXES = (slice(None),), (slice(None), slice(None))


def _map_linear(many: Many, linear: Linear) -> Many:
    """Apply a linear function to the value and to all slopes."""
    slopes = {name: linear(slope, _SLOPE_AXES) for name, slope in many.slopes.items()}
    return Many(linear(many.value, _VALUE_AXES), slopes)


def _batch_axis(axis: int, batch_axes: BatchAxes) -> int:
    """Turn an axis of one configuration's array into an axis of the batch's array."""
    return axis if axis < 0 else axis + len(batch_axes)


def _to_many(numbers: Any) -> Many:
    return numbers if isinstance(numbers, Many) else Many(np.asarray(numbers)[None])


def _pad_axes(array: NumpyArray, num_batch_axes: int, ndim: int) -> NumpyArray:
    """Insert axes of length 1 after the batch axes, until a configuration has `ndim` axes."""
    missing = ndim + num_batch_axes - array.ndim
    if not missing:
        return array
    batch_shape, shape = array.shape[:num_batch_axes], array.shape[num_batch_axes:]
    return array.reshape(*batch_shape, *[1] * missing, *shape)


def _binary(
    function: Function, first: Any, second: Any, slope_rule: Any, min_ndim: int = 0
) -> Many:
    """Apply a function to two arrays that broadcast; compute slopes by the chain rule."""
    # For c = function(a, b), `slope_rule(a, b, c)` returns the derivatives of c by a and by b. The
    # arrays of one configuration get at least `min_ndim` axes.
    operands = first, second = _to_many(first), _to_many(second)
    if not (first.slopes or second.slopes) and first.value.ndim == second.value.ndim > min_ndim:
        return Many(np.asarray(function(first.value, second.value)))  # a shortcut for speed
    ndim = max(min_ndim, *(operand.ndim for operand in operands))
    values = [_pad_axes(operand.value, 1, ndim) for operand in operands]
    result = np.asarray(function(*values))
    if slope_rule is None or not any(operand.slopes for operand in operands):
        return Many(result)
    slopes: dict[str, NumpyArray] = {}
    for operand, partial in zip(operands, slope_rule(*values, result), strict=True):
        # (batch, ...) to (batch, 1, ...): slopes have an axis for the numbers of an input
        factor = partial[:, None] if np.ndim(partial) else partial
        for name, slope in operand.slopes.items():
            term = _pad_axes(slope, 2, ndim)
            term = term if factor is _ONE else factor * term
            slopes[name] = slopes[name] + term if name in slopes else term
    for name, slope in slopes.items():
        if slope.shape[2:] != result.shape[1:]:
            slopes[name] = np.broadcast_to(slope, (*slope.shape[:2], *result.shape[1:]))
    return Many(result, slopes)


def _unary(function: Callable[[Any], Any], derivative: Callable[[Any, Any], Any]) -> Any:
    """Make an elementwise function accept `Many`, values with slopes, by the chain rule."""
    # `derivative` is a function of (value, result).

    def apply_function(many: Many) -> Many:
        value = function(many.value)
        if not many.slopes:
            return Many(value)
        factor = derivative(many.value, value)[:, None]
        return Many(value, {name: factor * slope for name, slope in many.slopes.items()})

    return apply_function


def _where(condition: Any, first: Any, second: Any) -> Many:
    """Select entries like `numpy.where`; slopes are those of the selected operand."""
    condition = _to_many(condition)
    ndim = max(condition.ndim, np.ndim(first), np.ndim(second))
    is_first = _pad_axes(condition.value, 1, ndim)
    weights = is_first, ~is_first
    return _binary(
        lambda a, b: np.where(is_first, a, b), first, second, lambda a, b, c: weights, ndim
    )


def _maximum(first: Any, second: Any) -> Many:
    return _binary(np.maximum, first, second, lambda a, b, c: _shares(a > b, a == b))


def _minimum(first: Any, second: Any) -> Many:
    return _binary(np.minimum, first, second, lambda a, b, c: _shares(a < b, a == b))


def _shares(wins: NumpyArray, ties: NumpyArray) -> Any:
    """Return derivatives of a maximum or minimum by its operands; at a tie 1/2 each, as in JAX."""
    first = wins + 0.5 * ties
    return first, 1 - first


def _joiner(function: Callable[..., NumpyArray]) -> Any:
    """Make `numpy.concatenate` or `numpy.stack` accept `Many`, values with slopes."""
    # value (batch or 1, *shape), slopes[name] (batch or 1, inputs, *shape)

    def join(operands: Sequence[Any], axis: int = 0) -> Many:
        parts = [_to_many(operand) for operand in operands]

        def join_arrays(arrays: Sequence[NumpyArray], batch_axes: BatchAxes) -> NumpyArray:
            """Join arrays, after arrays of shape (1, ..) are repeated for the whole batch."""
            batch = max(map(len, arrays))
            full_arrays = [np.broadcast_to(array, (batch, *array.shape[1:])) for array in arrays]
            return function(full_arrays, axis=_batch_axis(axis, batch_axes))

        sizes = {name: slope.shape[1] for part in parts for name, slope in part.slopes.items()}
        slopes = {}
        for name, size in sizes.items():
            arrays = [part.slopes.get(name, np.zeros((1, size, *part.shape))) for part in parts]
            slopes[name] = join_arrays(arrays, _SLOPE_AXES)
        return Many(join_arrays([part.value for part in parts], _VALUE_AXES), slopes)

    return join


def _broadcast(many: Many, shape: tuple[int, ...]) -> Many:
    def broadcast(array: NumpyArray, batch_axes: BatchAxes) -> NumpyArray:
        count = len(batch_axes)
        return np.broadcast_to(_pad_axes(array, count, len(shape)), (*array.shape[:count], *shape))

    return _map_linear(many, broadcast)


def _split(many: Many, ends: Int[NumpyArray, " cuts"]) -> list[Many]:
    """Split along the first axis at `ends`; reduce a piece to (1, ..) if all entries are equal."""
    pieces = []
    for low, high in itertools.pairwise((0, *ends, len(many))):
        piece = many[low:high]
        slopes = {
            name: _drop_equal_rows(slope) for name, slope in piece.slopes.items() if slope.any()
        }
        pieces.append(Many(_drop_equal_rows(piece.value), slopes))
    return pieces


def _drop_equal_rows(array: NumpyArray) -> NumpyArray:
    """Reduce an array (batch, ..) to (1, ..) if all its rows are equal."""
    return array[:1] if len(array) > 1 and (array == array[:1]).all() else array


# keys are NumPy's names
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "asarray": lambda many, dtype=None: (
        many if dtype is None or many.dtype == dtype else many.astype(dtype)
    ),
    "broadcast_to": _broadcast,
    "clip": lambda many, low, high: _minimum(_maximum(many, low), high),
    "concatenate": _joiner(np.concatenate),
    "cumsum": lambda many, axis=0: _map_linear(
        many, lambda array, batch_axes: np.cumsum(array, axis=_batch_axis(axis, batch_axes))
    ),
    "equal": _operation(operator.eq),
    "exp": _unary(np.exp, lambda value, result: result),
    "floor": lambda many: Many(np.floor(many.value)),
    "log1p": _unary(np.log1p, lambda value, result: 1 / (1 + value)),
    "log2": _unary(np.log2, lambda value, result: 1 / (value * np.log(2.0))),
    "maximum": _maximum,
    "minimum": _minimum,
    "round": lambda many: Many(np.round(many.value)),
    "split": _split,
    "stack": _joiner(np.stack),
    "sum": lambda many, axis=None: many.sum(axis),
    "where": _where,
}
