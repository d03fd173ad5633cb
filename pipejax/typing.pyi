"""Types of arrays."""

from pipejax.base.array_types import (
    Array as Array,
    Bool as Bool,
    Float as Float,
    Int as Int,
    Num as Num,
    NumpyArray as NumpyArray,
    UInt as UInt,
)
