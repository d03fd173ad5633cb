"""Array types with named axes, for signatures."""

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from pipejax.base import jax_on_demand

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, Num, Shaped, UInt

    NumpyArray = np.ndarray[Any, np.dtype[Any]]
else:
    NumpyArray = np.ndarray
    if "jaxtyping" in sys.modules or jax_on_demand.is_loaded():
        from jax import Array
    else:

        class _ArrayOfJax(type):
            def __instancecheck__(cls, value: Any) -> bool:
                return jax_on_demand.is_array(value)

        class Array(metaclass=_ArrayOfJax):
            """Stands for `jax.Array`."""

    if "jaxtyping" in sys.modules:
        from jaxtyping import Bool, Float, Int, Num, Shaped, UInt
    else:

        class _Unchecked:
            """Stand-in for types with axes: `Float[Array, "axes"]` is `Array`, without a check."""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = Num = Shaped = UInt = _Unchecked


Index = int | np.int32 | np.int64  # a worker, slot or cell, as Python's number or an array's entry

__all__ = ["Array", "Bool", "Float", "Index", "Int", "Num", "NumpyArray", "Shaped", "UInt"]
