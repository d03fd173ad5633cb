"""Loops that XLA compiles for CPUs into one function each.

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

from pipejax.shapes import Array, NumpyArray

# XLA prefers vectors of 256 bits; where the CPU has 512, the loops take two thirds of the time
WIDE = {"xla_cpu_prefer_vector_width": 512}
ONE_FUNCTION = {"xla_cpu_small_call": "true", "inlineable": "false"}
Unsigned = jax.numpy.uint32  # of an index
NONE = dict.fromkeys(ONE_FUNCTION)

Number = Array | NumpyArray | int  # a row, or a bound of a loop


@functools.cache
def wide_vectors() -> dict[str, int]:
    """Return the compiler options of this backend, none where XLA does not know them.

    Example:
      >>> set(wide_vectors()) <= set(WIDE)
      True
    """
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=WIDE).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return WIDE


def one_function(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Make one function of what a callable traces, where the backend can.

    Args:
      loops: takes and returns arrays; loops over rows, nothing that reduces or gathers.

    Returns:
      The same, compiled as one function on CPUs.

    Example:
      >>> count = one_function(lambda n: jax.lax.fori_loop(0, n, lambda k, total: total + k, 0))
      >>> int(jax.jit(count)(4))
      6
    """
    if jax.default_backend() != "cpu":
        return loops

    def plain(*arrays: Any) -> Any:
        with set_xla_metadata(**NONE):
            return loops(*arrays)

    @functools.wraps(loops)
    def call(*arrays: Any) -> Any:
        with set_xla_metadata(**ONE_FUNCTION):
            return jax.jit(plain)(*arrays)

    return call


def take_row(array: Array, index: Number) -> Array:
    """Return one row of an array, as an array of one row.

    Args:
      array: rows first.
      index: row, unsigned.

    Returns:
      (1, ...) the row.

    Example:
      >>> take_row(jax.numpy.arange(6).reshape(3, 2), 1).tolist()
      [[2, 3]]
    """
    return jax.lax.dynamic_index_in_dim(array, index)


def put_row(array: Array, row: Array, index: Number) -> Array:
    """Return an array with one row replaced.

    Args:
      array: rows first.
      row: (1, ...) new row.
      index: row, unsigned.

    Returns:
      The array.

    Example:
      >>> put_row(jax.numpy.zeros((2, 2)), jax.numpy.ones((1, 2)), 1).tolist()
      [[0.0, 0.0], [1.0, 1.0]]
    """
    return jax.lax.dynamic_update_slice_in_dim(array, row, index, 0)


def count_up(first: Number, end: Number, body: Callable[[Array, Any], Any], start: Any) -> Any:
    """Loop over first, first + 1, ..., end - 1.

    Args:
      first: first index.
      end: one past the last.
      body: takes an index, unsigned so that no slice tests for its sign, and what is carried.
      start: what is carried at first.

    Returns:
      What is carried at the end.

    Example:
      >>> int(count_up(0, 4, lambda k, total: total + k.astype(int), 0))
      6
    """

    def step(k: Array, carry: Any) -> Any:
        return body(k.astype(Unsigned), carry)

    return jax.lax.fori_loop(Unsigned(first), Unsigned(end), step, start)
