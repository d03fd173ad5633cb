"""JAX where it is needed, and not before: its import takes longer than many a command.

A module that can do without JAX takes `jax` and `jnp` from here: their attributes import it. It
asks `is_array` for an array of JAX, which does not exist before JAX does.

A record that JAX has to know imports it, as in any library on JAX. The command line calls `defer`:
then records wait until this module imports JAX, or sees that it has been imported.
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
    """Stands for a module, which is imported when one of its attributes is asked for."""

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
    """Return whether JAX has been imported, to its end."""
    loaded = "jax" in sys.modules and hasattr(sys.modules["jax"], "Array")
    if loaded:
        _catch_up()
    return loaded


def is_array(value: Any) -> "TypeGuard[jax.Array]":
    """Return whether a value is an array of JAX, traced or not."""
    return is_loaded() and isinstance(value, sys.modules["jax"].Array)


def defer() -> None:
    """Let actions wait for JAX from now on: for a process in which only this package uses it."""
    global _deferred
    _deferred = []


def with_jax(action: Action) -> None:
    """Do something that JAX is needed for: now, or when it is imported if that is deferred."""
    if _deferred is None or is_loaded():
        action()
    else:
        _deferred.append(action)


def _catch_up() -> None:
    """Do what has waited for JAX."""
    if _deferred:
        with _lock:
            while _deferred:
                _deferred.pop(0)()
