"""Trees of records: JAX's pytrees, which the host can walk before JAX is imported."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pipejax.base import jax_on_demand
from pipejax.base.jax_on_demand import jax

Tree = Any
Names = tuple[str, ...]


class _Node(NamedTuple):
    """A tree taken apart: the names of its parts, the parts, and what puts such parts together."""

    names: tuple[Any, ...]
    parts: tuple[Tree, ...]
    together: Callable[[Iterable[Tree]], Tree]


class _Record(NamedTuple):
    """Functions that take apart records of one type and put them together."""

    apart: Callable[[Any], tuple[Names, tuple[Tree, ...], Any]]
    together: Callable[[Any, Iterable[Tree]], Any]


_kinds: dict[type, _Record] = {}


def register(
    kind: type,
    apart: Callable[[Any], tuple[Names, tuple[Tree, ...], Any]] | None = None,
    together: Callable[[Any, Iterable[Tree]], Any] | None = None,
) -> None:
    """Make the records of a type trees.

    Args:
      kind: a dataclass, whose fields are parts but for those with the metadata `static`; or any
        type, with the two functions.
      apart: returns names and parts of a record, and its form: all else, which is hashable.
      together: makes a record of a form and its parts.
    """
    if apart is None or together is None:
        _kinds[kind] = _dataclass_record(kind)
        jax_on_demand.with_jax(lambda: jax.tree_util.register_dataclass(kind))
        return
    _kinds[kind] = _Record(apart, together)

    def with_keys(record: Any) -> tuple[tuple[tuple[Any, Tree], ...], Any]:
        names, parts, form = apart(record)
        keys = map(jax.tree_util.GetAttrKey, names)
        return tuple(zip(keys, parts, strict=True)), form

    jax_on_demand.with_jax(
        lambda: jax.tree_util.register_pytree_with_keys(
            kind, with_keys, together, lambda record: apart(record)[1:]
        )
    )


def _dataclass_record(kind: type) -> _Record:
    fields = dataclasses.fields(kind)
    fixed = tuple(field.name for field in fields if field.metadata.get("static"))
    names = tuple(field.name for field in fields if field.name not in fixed)

    def apart(record: Any) -> tuple[Names, tuple[Tree, ...], Any]:
        values = vars(record)
        form = tuple(values[name] for name in fixed)
        return names, tuple(values[name] for name in names), form

    def together(form: Any, parts: Iterable[Tree]) -> Any:
        return kind(**dict(zip(names, parts, strict=True)), **dict(zip(fixed, form, strict=True)))

    return _Record(apart, together)


def leaves(tree: Tree) -> list[Any]:
    """Leaves of a tree, as `jax.tree.leaves` lists them."""
    if jax_on_demand.is_loaded():
        return jax.tree.leaves(tree)
    return [leaf for _, leaf in _walk(tree, "")]


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """Leaves of a tree, each with the last part of its path: a field, a key or a number."""
    if not jax_on_demand.is_loaded():
        return list(_walk(tree, ""))
    keystr = jax.tree_util.keystr
    return [
        (keystr(path, simple=True, separator=".").rpartition(".")[2], leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply a function to the leaves of trees of one form, as `jax.tree.map`."""
    if jax_on_demand.is_loaded():
        return jax.tree.map(function, tree, *others)
    return _map(function, tree, others)


def _node(tree: Tree) -> _Node | None:
    """Take a tree apart; None stands for a leaf."""
    kind: Any = type(tree)
    if tree is None:
        return _Node((), (), lambda parts: None)
    if kind in _kinds:
        names, parts, form = _kinds[kind].apart(tree)
        return _Node(names, parts, lambda parts: _kinds[kind].together(form, parts))
    if kind is dict:
        keys = tuple(sorted(tree))
        values = tuple(tree[key] for key in keys)
        return _Node(keys, values, lambda parts: dict(zip(keys, parts, strict=True)))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return _Node(tree._fields, tuple(tree), lambda parts: kind(*parts))
    if kind in (tuple, list):
        return _Node(tuple(range(len(tree))), tuple(tree), kind)
    return None


def _walk(tree: Tree, name: Any) -> Iterator[tuple[str, Any]]:
    node = _node(tree)
    if node is None:
        yield str(name), tree
        return
    for part_name, part in zip(node.names, node.parts, strict=True):
        yield from _walk(part, part_name)


def _map(function: Callable[..., Any], tree: Tree, others: tuple[Tree, ...]) -> Tree:
    node = _node(tree)
    if node is None:
        return function(tree, *others)
    other_parts = [_parts_like(node, other) for other in others]
    return node.together(
        [
            _map(function, part, tuple(parts[k] for parts in other_parts))
            for k, part in enumerate(node.parts)
        ]
    )


def _parts_like(node: _Node, other: Tree) -> tuple[Tree, ...]:
    other_node = _node(other)
    if other_node is None or other_node.names != node.names:
        raise ValueError(f"trees differ: one has the parts {node.names}, another is {other!r}")
    return other_node.parts
