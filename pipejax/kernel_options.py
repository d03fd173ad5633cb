"""How XLA compiles the unrolled kernels."""

import functools
from collections.abc import Callable
from typing import Any

import jax

# XLA prefers vectors of 256 bits; where the CPU has 512, the kernels take two thirds of the time
WIDE = {"xla_cpu_prefer_vector_width": 512}


@functools.cache
def kernel_options() -> dict[str, int]:
    """Return the compiler options of this backend, none where XLA does not know them.

    Example:
      >>> set(kernel_options()) <= set(WIDE)
      True
    """
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=WIDE).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return WIDE


@functools.cache
def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a written-out kernel under jit; its options are known once there is a backend.

    Args:
      kernel: takes leaves, and by name the program and sizes `ops`, `rows` and `size`, each of
        which is a compilation of its own.

    Returns:
      The compiled kernel.

    Example:
      >>> longer = compiled(lambda leaves, *, ops, rows, size: leaves + size)
      >>> longer(1, ops=0, rows=0, size=2).item()
      3
    """
    static = ("ops", "rows", "size")
    return jax.jit(kernel, static_argnames=static, compiler_options=kernel_options())
