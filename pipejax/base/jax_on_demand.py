"""Lazy import of JAX, because the import takes longer than many commands.

A module that often runs without JAX imports `jax` and `jnp` from here; their attributes import JAX.
It tests for an array of JAX by `is_array`.

The registration of a record as a pytree imports JAX. The command line calls `defer`: then all
registrations wait until this module imports JAX, or sees that another module has.
"""

import importlib
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

Action = Callable[[], object]

_deferred: list[Action] | None = None
_lock = threading.RLock()


class _OnDemand:
    """Proxy of a module: the first use of an attribute imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self._name)
        _catch_up()
        return getattr(module, name)


if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
else:
    jax, jnp = _OnDemand("jax"), _OnDemand("jax.numpy")
__all__ = ["defer", "is_array", "is_loaded", "jax", "jnp", "with_jax"]


def is_loaded() -> bool:
    """Return whether the import of JAX is complete."""
    loaded = "jax" in sys.modules and hasattr(sys.modules["jax"], "Array")
    if loaded:
        _catch_up()
    return loaded


def is_array(value: Any) -> "TypeGuard[jax.Array]":
    """Return whether a value is an array of JAX, traced or not."""
    return is_loaded() and isinstance(value, sys.modules["jax"].Array)


def defer() -> None:
    """From now on, delay actions that need JAX until it is imported."""
    global _deferred
    _deferred = []


def with_jax(action: Action) -> None:
    """Run an action that needs JAX: now, or after `defer`, when JAX is imported."""
    if _deferred is None or is_loaded():
        action()
    else:
        _deferred.append(action)


def _catch_up() -> None:
    """Run the delayed actions."""
    if _deferred:
        with _lock:
            while _deferred:
                _deferred.pop(0)()
