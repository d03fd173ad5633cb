"""Options of XLA's compiler for CPUs, where this XLA knows them."""

import functools
import os

import jax

Options = dict[str, int | bool]


def cpu_options(**options: int | bool) -> Options:
    """Return those options that hold here, for `jax.jit(..., compiler_options=...)`.

    On accelerators there are none. What XLA_FLAGS says about an option goes before.
    """
    if jax.default_backend() != "cpu":
        return {}
    said = os.environ.get("XLA_FLAGS", "")
    return {
        name: value for name, value in options.items() if name not in said and _knows(name, value)
    }


@functools.cache
def _knows(name: str, value: int | bool) -> bool:
    """Whether XLA knows an option; another version may not."""
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
