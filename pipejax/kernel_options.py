"""How XLA compiles the unrolled kernels."""

import functools

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
