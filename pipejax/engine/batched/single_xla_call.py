"""Loops that XLA compiles to one function each on CPUs.

By default XLA runs every instruction of a loop body as a task of its own, about a microsecond
each, which is far more than adding two rows takes. It has a form for loops whose data are small,
in which the whole loop is one function; an attribute asks for it. What such a loop may hold is
limited to elementwise operations on slices, and it pays to update one buffer by one row at a time:
an instruction that reads a buffer after another one has written to it costs a copy.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from pipejax.base.array_types import Array, NumpyArray
from pipejax.base.machine import Options

LOOPS: Options = {
    # XLA prefers vectors of 256 bits; where the CPU has 512, the loops take two thirds of the time
    "xla_cpu_prefer_vector_width": 512,
    # at LLVM's highest level they compile twice as long, and run twice as long in float64
    "xla_backend_optimization_level": 2,
}
SINGLE_CALL = {"xla_cpu_small_call": "true", "inlineable": "false"}
Unsigned = jax.numpy.uint32  # an index without a sign needs no test for being negative
NONE = dict.fromkeys(SINGLE_CALL)

Number = Array | NumpyArray | int  # a row, or a bound of a loop


def as_single_xla_call(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Compile what a callable traces as one function, on a CPU."""

    def plain(*arrays: Any) -> Any:
        with set_xla_metadata(**NONE):
            return loops(*arrays)

    @functools.wraps(loops)
    def call(*arrays: Any) -> Any:
        with set_xla_metadata(**SINGLE_CALL):
            return jax.jit(plain)(*arrays)

    return call


def take_row(array: Array, index: Number) -> Array:
    """Return one row of an array: (1, ...)."""
    return jax.lax.dynamic_index_in_dim(array, index)


def put_row(array: Array, row: Array, index: Number) -> Array:
    """Return an array with one row replaced."""
    return jax.lax.dynamic_update_slice_in_dim(array, row, index, 0)


def count_up(first: Number, end: Number, body: Callable[[Array, Any], Any], start: Any) -> Any:
    """Loop over first, first + 1, ..., end - 1."""

    def step(k: Array, carry: Any) -> Any:
        return body(k.astype(Unsigned), carry)

    return jax.lax.fori_loop(Unsigned(first), Unsigned(end), step, start)
