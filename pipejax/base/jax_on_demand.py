"""JAX where it is needed, and not before: its import takes longer than many a command.

A module that can do without JAX takes `jax` and `jnp` from here: their attributes import it. It
asks `is_array` for an array of JAX, which does not exist before JAX does, and leaves to
`after_import` what JAX is to know of its types as soon as it is there, whoever imports it.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

Action = Callable[[], object]
Context = Callable[[], AbstractContextManager[Any]]

_actions: list[Action] = []
_around: list[Context] = [nullcontext]


class _OnDemand:
    """Stands for a module, which is imported when one of its attributes is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
else:
    jax, jnp = _OnDemand("jax"), _OnDemand("jax.numpy")
__all__ = ["after_import", "around_import", "is_array", "is_loaded", "jax", "jnp"]


def is_loaded() -> bool:
    """Return whether JAX has been imported, to its end."""
    return "jax" in sys.modules and hasattr(sys.modules["jax"], "Array")


def is_array(value: Any) -> "TypeGuard[jax.Array]":
    """Return whether a value is an array of JAX, traced or not."""
    return is_loaded() and isinstance(value, sys.modules["jax"].Array)


def after_import(action: Action) -> None:
    """Have something done right after JAX is imported: now, if it has been."""
    if is_loaded():
        action()
    else:
        _actions.append(action)


def around_import(context: Context) -> None:
    """Have JAX imported in a context, if it is imported at all."""
    _around[:] = [context]


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds JAX as the other finders do, and has its loader do what waits for the import.

    A search alone, as of a tool that asks whether JAX is installed, changes nothing.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "jax":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                with _around[0]():
                    load(module)
                while _actions:
                    _actions.pop(0)()

            spec.loader.exec_module = load_and_act  # type: ignore[method-assign]  # of this loader
        return spec


if "jax" not in sys.modules:
    sys.meta_path.insert(0, _Watcher())
