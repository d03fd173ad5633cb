"""Numbers of many configurations at once with their slopes, on the host: nothing is compiled.

What `jax.vmap` and `jax.jvp` make of a function of arrays, NumPy does here while the function runs.
Every operation works on all configurations, as it would on one, and to the same last bit. What no
number of a batch differs in is computed once, and what does not depend on an input has no slope by
it: a price is a few thousand operations, of which a batch of systems changes few.

`array_functions` of costs hands these numbers here; operators are their own.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pipejax.base.array_types import NumpyArray

NO_SLOPES: Mapping[str, NumpyArray] = MappingProxyType({})
Slopes = Mapping[str, NumpyArray]
Function = Callable[[Any, Any], Any]


def _operation(function: Function, slope_rule: Any = None) -> Callable[[Any, Any], "Many"]:
    """An operator; without `slope_rule` its result has none."""

    def apply(first: Any, second: Any) -> "Many":
        return _binary(function, first, second, slope_rule)

    return apply


def _reversed(operation: Callable[[Any, Any], "Many"]) -> Callable[[Any, Any], "Many"]:
    def apply(first: "Many", second: Any) -> "Many":
        return operation(_lifted(second), first)

    return apply


def _product(first: Any, second: Any) -> "Many":
    first, second = _lifted(first), _lifted(second)
    if _is_nothing(first) or _is_nothing(second):
        return _nothing(first, second)
    return _binary(operator.mul, first, second, lambda a, b, c: (b, a))


def _quotient(first: Any, second: Any) -> "Many":
    first, second = _lifted(first), _lifted(second)
    if _is_nothing(first):
        return _nothing(first, second)
    return _binary(operator.truediv, first, second, lambda a, b, c: (1 / b, -c / b))


class Many:
    """An array of every configuration, whose shape, axes and indices are those of one."""

    # value (batch, ...), or (1, ...) where all configurations share it; slopes by the name of an
    # input that it depends on, (batch, numbers, ...)

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
        """Its axes."""
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
        return _mapped(self, lambda part, front: part[(*front, *key)])

    __add__ = __radd__ = _operation(operator.add, lambda a, b, c: (1.0, 1.0))
    __sub__ = _operation(operator.sub, lambda a, b, c: (1.0, -1.0))
    __rsub__ = _reversed(__sub__)
    __mul__ = __rmul__ = _product
    __truediv__, __rtruediv__ = _quotient, _reversed(_quotient)
    __pow__ = _operation(
        operator.pow,
        lambda a, b, c: (b * a ** (b - 1), np.log(np.where(a == 0, 1.0, a)) * c),
    )
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
        """The product with a matrix, or with several, that all configurations share."""
        return _mapped(self, lambda part, front: np.tensordot(part, other, axes=(-1, -2)))

    @property
    def T(self) -> "Many":
        """The axes of one configuration's array in reverse."""
        reversed_axes = range(self.ndim, 0, -1)
        return _mapped(
            self,
            lambda part, front: part.transpose(
                *range(len(front)), *[k + len(front) - 1 for k in reversed_axes]
            ),
        )

    def astype(self, dtype: Any) -> "Many":
        """The same in another type."""
        return Many(self.value.astype(dtype), self.slopes)

    def ravel(self) -> "Many":
        """All numbers along one axis."""
        return self.reshape(-1)

    def reshape(self, *shape: Any) -> "Many":
        """Return the same numbers in another shape."""
        new_shape = np.empty(self.shape).reshape(*shape).shape
        return _mapped(
            self, lambda part, front: part.reshape(*part.shape[: len(front)], *new_shape)
        )

    def sum(self, axis: int | None = None) -> "Many":
        """Sum over an axis, or over all."""
        if axis is None:
            return self.ravel().sum(axis=0) if self.ndim != 1 else self.sum(axis=0)
        return _mapped(self, lambda part, front: part.sum(axis=_batch_axis(axis, front)))

    def max(self, axis: int = -1) -> "Many":
        """The largest along the last axis; equal ones share the slope, as in JAX."""
        assert axis == -1
        value = self.value.max(axis=-1)
        largest = self.value == value[..., None]
        weight = (largest / largest.sum(axis=-1, keepdims=True))[:, None]
        return Many(value, {n: (weight * part).sum(axis=-1) for n, part in self.slopes.items()})


def to_many(leaf: NumpyArray) -> Any:
    """Numbers (batch, ...) of configurations: those of one where all are the same."""
    return Many(leaf) if (leaf != leaf[:1]).any() else leaf[0]


def many_values(leaf: Any) -> NumpyArray:
    """Values (batch, ...), or (1, ...) where all configurations share them."""
    return leaf.value if isinstance(leaf, Many) else np.asarray(leaf)[None]


Front = tuple[slice, ...]  # one for each axis that stands in front
Linear = Callable[[NumpyArray, Front], NumpyArray]
_OF_VALUE, _OF_SLOPES = (slice(None),), (slice(None), slice(None))


def _mapped(many: Many, linear: Linear) -> Many:
    """A linear function, the same of values and slopes."""
    slopes = {name: linear(part, _OF_SLOPES) for name, part in many.slopes.items()}
    return Many(linear(many.value, _OF_VALUE), slopes)


def _batch_axis(axis: int, front: Front) -> int:
    """An axis of one configuration's array as one of all."""
    return axis if axis < 0 else axis + len(front)


def _lifted(numbers: Any) -> Many:
    return numbers if isinstance(numbers, Many) else Many(np.asarray(numbers)[None])


def _is_nothing(many: Many) -> bool:
    """Return whether an array is 0 everywhere, for all configurations and without slopes."""
    return len(many.value) == 1 and not many.slopes and not many.value.any()


def _nothing(first: Many, second: Many) -> Many:
    """Return 0 times anything, or 0 by anything: it has no slopes."""
    return Many(np.zeros((1, *np.broadcast_shapes(first.shape, second.shape))))


def _padded(part: NumpyArray, front: int, ndim: int) -> NumpyArray:
    """Put axes of one entry before those of one configuration's array, until it has so many."""
    missing = ndim + front - part.ndim
    return part.reshape(*part.shape[:front], *[1] * missing, *part.shape[front:])


def _binary(function: Function, first: Any, second: Any, slope_rule: Any, least: int = 0) -> Many:
    """Apply a function to two arrays of at least so many axes."""
    pair = _lifted(first), _lifted(second)
    ndim = max(least, *(operand.ndim for operand in pair))
    values = [_padded(operand.value, 1, ndim) for operand in pair]
    result = np.asarray(function(*values))
    if slope_rule is None or not (pair[0].slopes or pair[1].slopes):
        return Many(result)
    slopes: dict[str, NumpyArray] = {}
    for operand, weight in zip(pair, slope_rule(*values, result), strict=True):
        # one axis more: that of the numbers of the input
        by = weight[:, None] if np.ndim(weight) else weight
        for name, part in operand.slopes.items():
            slope = by * _padded(part, 2, ndim)
            slopes[name] = slopes[name] + slope if name in slopes else slope
    return Many(result, _spread(slopes, result.shape[1:]))


def _spread(slopes: dict[str, NumpyArray], shape: tuple[int, ...]) -> Slopes:
    """Give slopes all entries of the result, which may have more than what they came from."""
    return {
        name: part if part.shape[2:] == shape else np.broadcast_to(part, (*part.shape[:2], *shape))
        for name, part in slopes.items()
    }


def _unary(function: Callable[[Any], Any], slope: Callable[[Any, Any], Any]) -> Any:
    def apply(many: Many) -> Many:
        value = function(many.value)
        if not many.slopes:
            return Many(value)
        by = slope(many.value, value)[:, None]
        return Many(value, {name: by * part for name, part in many.slopes.items()})

    return apply


def _chosen(by: Any, first: Any, second: Any) -> Many:
    """Take entries of one array where a condition holds, else of another."""
    by = _lifted(by)
    ndim = max(by.ndim, np.ndim(first), np.ndim(second))
    here = _padded(by.value, 1, ndim)
    weights = (here, ~here)
    return _binary(lambda a, b: np.where(here, a, b), first, second, lambda a, b, c: weights, ndim)


def _larger(first: Any, second: Any) -> Many:
    return _binary(np.maximum, first, second, lambda a, b, c: _shares(a > b, a == b))


def _smaller(first: Any, second: Any) -> Many:
    return _binary(np.minimum, first, second, lambda a, b, c: _shares(a < b, a == b))


def _shares(wins: NumpyArray, ties: NumpyArray) -> Any:
    """Slopes of an extremum of two: equal ones share it, as in JAX."""
    first = wins + 0.5 * ties
    return first, 1 - first


def _together(function: Callable[..., NumpyArray]) -> Any:
    """A function that puts several arrays together along an axis."""

    def join(arrays: Sequence[Any], axis: int = 0) -> Many:
        parts = [_lifted(array) for array in arrays]

        def put(pieces: Sequence[NumpyArray], front: Front) -> NumpyArray:
            size = max(map(len, pieces))
            whole = [
                piece if len(piece) == size else np.broadcast_to(piece, (size, *piece.shape[1:]))
                for piece in pieces
            ]
            return function(whole, axis=_batch_axis(axis, front))

        numbers = {name: slope.shape[1] for part in parts for name, slope in part.slopes.items()}
        slopes = {
            name: put(
                [part.slopes.get(name, np.zeros((1, count, *part.shape))) for part in parts],
                _OF_SLOPES,
            )
            for name, count in numbers.items()
        }
        return Many(put([part.value for part in parts], _OF_VALUE), slopes)

    return join


def _broadcast(many: Many, shape: tuple[int, ...]) -> Many:
    def to(part: NumpyArray, front: Front) -> NumpyArray:
        count = len(front)
        return np.broadcast_to(_padded(part, count, len(shape)), (*part.shape[:count], *shape))

    return _mapped(many, to)


def _split(many: Many, ends: Sequence[int]) -> list[Many]:
    """Cut along the first axis; what of a part all configurations share is kept once."""
    pieces = [many[low:high] for low, high in zip([0, *ends], [*ends, len(many)], strict=True)]
    return [
        Many(_once(piece.value), {n: _once(s) for n, s in piece.slopes.items() if s.any()})
        for piece in pieces
    ]


def _once(part: NumpyArray) -> NumpyArray:
    return part[:1] if len(part) > 1 and (part == part[:1]).all() else part


# by the names that they have in NumPy
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "asarray": lambda many, dtype=None: (
        many if dtype is None or many.dtype == dtype else many.astype(dtype)
    ),
    "broadcast_to": _broadcast,
    "clip": lambda many, low, high: _smaller(_larger(many, low), high),
    "concatenate": _together(np.concatenate),
    "cumsum": lambda many, axis=0: _mapped(
        many, lambda part, front: np.cumsum(part, axis=_batch_axis(axis, front))
    ),
    "equal": _operation(operator.eq),
    "exp": _unary(np.exp, lambda value, result: result),
    "floor": lambda many: Many(np.floor(many.value)),
    "log1p": _unary(np.log1p, lambda value, result: 1 / (1 + value)),
    "log2": _unary(np.log2, lambda value, result: 1 / (value * np.log(2.0))),
    "max": lambda many, axis=-1: many.max(axis),
    "maximum": _larger,
    "minimum": _smaller,
    "round": lambda many: Many(np.round(many.value)),
    "split": _split,
    "stack": _together(np.stack),
    "sum": lambda many, axis=None: many.sum(axis),
    "where": _chosen,
}
