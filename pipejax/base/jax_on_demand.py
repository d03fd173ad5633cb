"""Import of JAX at first use, because it is slow, and pytrees that work before the import.

A module that often runs without JAX imports `jax` and `jnp` from here. The command line calls
`defer`: then registrations of pytrees wait until a module imports JAX.
"""

import dataclasses
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

Action = Callable[[], object]

_deferred: list[Action] | None = None
_lock = threading.RLock()


class _OnDemand:
    """Proxy of a module: the first use of an attribute imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if not is_loaded():
            importlib.import_module(self._name)
            _catch_up()
        return getattr(sys.modules[self._name], name)


if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
else:
    jax, jnp = _OnDemand("jax"), _OnDemand("jax.numpy")
__all__ = ["Tree", "defer", "is_array", "is_loaded", "jax", "jnp", "leaves", "mapped"]
__all__ += ["named_leaves", "register", "with_jax"]


def is_loaded() -> bool:
    """Return whether the import of JAX is complete."""
    loaded = "jax" in sys.modules and hasattr(sys.modules["jax"], "Array")
    if loaded:
        _catch_up()
    return loaded


def is_array(value: Any) -> "TypeGuard[jax.Array]":
    """Return whether a value is a JAX array, traced or not."""
    return is_loaded() and isinstance(value, sys.modules["jax"].Array)


def defer() -> None:
    """Delay all later actions that need JAX until JAX is imported."""
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


# pytrees before JAX is imported: each type is registered once, for JAX and for this module
Tree = Any
Names = tuple[str, ...]


class _Node(NamedTuple):
    """A node of a tree: names and subtrees of its children, and a function that rebuilds it."""

    names: tuple[Any, ...]
    children: tuple[Tree, ...]
    unflatten: Callable[[Iterable[Tree]], Tree]


class _Record(NamedTuple):
    """Functions that flatten and unflatten records of one type."""

    flatten: Callable[[Any], tuple[Names, tuple[Tree, ...], Any]]
    unflatten: Callable[[Any, Iterable[Tree]], Any]


_records: dict[type, _Record] = {}


def register(
    kind: type,
    flatten: Callable[[Any], tuple[Names, tuple[Tree, ...], Any]] | None = None,
    unflatten: Callable[[Any, Iterable[Tree]], Any] | None = None,
) -> None:
    """Register a type as a pytree: a dataclass, or any type with functions for both directions.

    Fields of a dataclass with the metadata `static` are no children. `flatten` returns names and
    values of a record's children, and static data, which is hashable; `unflatten` takes both.
    """
    if flatten is None or unflatten is None:
        _records[kind] = _dataclass_record(kind)
        with_jax(lambda: jax.tree_util.register_dataclass(kind))
        return
    _records[kind] = _Record(flatten, unflatten)

    def flatten_with_keys(record: Any) -> tuple[tuple[tuple[Any, Tree], ...], Any]:
        names, children, static = flatten(record)
        keys = map(jax.tree_util.GetAttrKey, names)
        return tuple(zip(keys, children, strict=True)), static

    with_jax(
        lambda: jax.tree_util.register_pytree_with_keys(
            kind, flatten_with_keys, unflatten, lambda record: flatten(record)[1:]
        )
    )


def _dataclass_record(kind: type) -> _Record:
    """Build the functions that flatten and rebuild a dataclass; static fields are no leaves."""
    fields = dataclasses.fields(kind)
    static_names = tuple(field.name for field in fields if field.metadata.get("static"))
    names = tuple(field.name for field in fields if field.name not in static_names)

    def flatten(record: Any) -> tuple[Names, tuple[Tree, ...], Any]:
        values = vars(record)
        static = tuple(values[name] for name in static_names)
        return names, tuple(values[name] for name in names), static

    def unflatten(static: Any, children: Iterable[Tree]) -> Any:
        fields = dict(zip(names, children, strict=True))
        return kind(**fields, **dict(zip(static_names, static, strict=True)))

    return _Record(flatten, unflatten)


def leaves(tree: Tree) -> list[Any]:
    """List the leaves of a tree, as `jax.tree.leaves`."""
    if is_loaded():
        return jax.tree.leaves(tree)
    return [leaf for _, leaf in _walk(tree, "")]


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """List the leaves of a tree, each with the last key of its path: a field, a key or an index."""
    if not is_loaded():
        return list(_walk(tree, ""))
    keystr = jax.tree_util.keystr
    return [
        (keystr(path, simple=True, separator=".").rpartition(".")[2], leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def mapped(function: Callable[..., Any], tree: Tree, *other_trees: Tree) -> Tree:
    """Apply a function to the leaves of trees with equal structure, as `jax.tree.map`."""
    if is_loaded():
        return jax.tree.map(function, tree, *other_trees)
    return _map(function, tree, other_trees)


def _node(tree: Tree) -> _Node | None:
    """Split a tree into its children; return None for a leaf."""
    kind: Any = type(tree)
    if tree is None:
        return _Node((), (), lambda children: None)
    if kind in _records:
        names, children, static = _records[kind].flatten(tree)
        return _Node(names, children, lambda children: _records[kind].unflatten(static, children))
    if kind is dict:
        keys = tuple(sorted(tree))
        values = tuple(tree[key] for key in keys)
        return _Node(keys, values, lambda children: dict(zip(keys, children, strict=True)))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return _Node(tree._fields, tuple(tree), lambda children: kind(*children))
    if kind in (tuple, list):
        return _Node(tuple(range(len(tree))), tuple(tree), kind)
    return None


def _walk(tree: Tree, name: Any) -> Iterator[tuple[str, Any]]:
    node = _node(tree)
    if node is None:
        yield str(name), tree
        return
    for child_name, child in zip(node.names, node.children, strict=True):
        yield from _walk(child, child_name)


def _map(function: Callable[..., Any], tree: Tree, other_trees: Sequence[Tree]) -> Tree:
    """Apply a function to each leaf of `tree`, with the leaves of other trees at its path."""
    node = _node(tree)
    if node is None:
        return function(tree, *other_trees)
    other_children = (_children(other, node) for other in other_trees)
    children = zip(node.children, *other_children, strict=True)
    return node.unflatten([_map(function, child, others) for child, *others in children])


def _children(tree: Tree, expected: _Node) -> tuple[Tree, ...]:
    """Return the children of a tree; raise if their names differ from the expected node's."""
    node = _node(tree)
    if node is None or node.names != expected.names:
        raise ValueError(f"trees differ: one has the parts {expected.names}, another is {tree!r}")
    return node.children
