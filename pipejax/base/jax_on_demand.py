"""Import of JAX at first use, because the import is slow; pytrees that need no JAX.

A module that often runs without JAX imports `jax` and `jnp` from this module. After the command
line has called `defer`, registrations of pytrees wait until a module imports JAX.
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
    """Proxy of a module, which is imported at the first use of an attribute."""

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
    """Run an action that needs JAX now; after `defer`, run it once JAX is imported."""
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


# pytrees without JAX: a type is registered once, for JAX and for the functions of this module
Tree = Any
Names = tuple[str, ...]


class _Node(NamedTuple):
    """A node of a tree: names of its children, the children, and a function to rebuild it."""

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
    """Register a dataclass as a pytree, or any type with `flatten` and `unflatten`.

    Fields of a dataclass with the metadata `static` are not children. `flatten(record)` returns
    (names of children, children, hashable static data), and `unflatten(static data, children)`
    returns a record.
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
    """Build the functions that flatten and rebuild a dataclass; static fields are not leaves."""
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
    """List the leaves of a tree in the order of `jax.tree.leaves`."""
    if is_loaded():
        return jax.tree.leaves(tree)
    return [leaf for _, leaf in _walk(tree, "")]


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """List (name, leaf) of a tree; the name is the last field, key or index of the path."""
    if not is_loaded():
        return list(_walk(tree, ""))
    keystr = jax.tree_util.keystr
    return [
        (keystr(path, simple=True, separator=".").rpartition(".")[2], leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def mapped(function: Callable[..., Any], tree: Tree, *other_trees: Tree) -> Tree:
    """Apply a function to the leaves of trees of equal structure, like `jax.tree.map`."""
    if is_loaded():
        return jax.tree.map(function, tree, *other_trees)
    return _map(function, tree, other_trees)


def _node(tree: Tree) -> _Node | None:
    """Return the root node of a tree, or None if the tree is a leaf."""
    kind: Any = type(tree)
    if tree is None:
        return _Node((), (), lambda children: None)  # names, children, function that rebuilds
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
    """Apply a function to each leaf of `tree` and the leaves of other trees at the same path."""
    node = _node(tree)
    if node is None:
        return function(tree, *other_trees)
    other_children = (_children(other, node) for other in other_trees)
    children = zip(node.children, *other_children, strict=True)
    return node.unflatten([_map(function, child, others) for child, *others in children])


def _children(tree: Tree, expected: _Node) -> tuple[Tree, ...]:
    """Return the children of a tree; raise an error if their names differ from the expected."""
    node = _node(tree)
    if node is None or node.names != expected.names:
        raise ValueError(f"trees differ: one has the parts {expected.names}, another is {tree!r}")
    return node.children
