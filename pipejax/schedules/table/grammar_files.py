"""Grammars in files: the part of a table's JSON that says what it has of its own."""

from collections.abc import Callable, Mapping
from typing import Any

from pipejax.base.checks import one_of
from pipejax.schedules.cells.grammar import USUAL, Grammar
from pipejax.schedules.cells.ops import OpKind, ScheduleError

KEYS = ("kinds", "rules", "items", "slices", "forward_only", "graph", "lanes")
_FIELDS: Mapping[str, Any] = {  # of a kind, and what it may be in JSON
    "letters": str,
    "name": str,
    "time": str,
    "lane": str,
    "of": str,
    "together": bool,
    "slot": (int, float),
    "at_start": dict,
    "at_end": dict,
    "look": list,
}


def grammar_data(grammar: Grammar) -> dict[str, Any]:
    """What a table has of its own, for JSON; nothing of a usual one."""
    if grammar.is_usual:
        return {}
    parts = {part: name for name, part in grammar.parts.items()}
    kinds = []
    for phase in grammar.own:
        given = phase.kind._asdict() | {
            moment: {parts[part]: change for part, change in getattr(phase.kind, moment).items()}
            for moment in ("at_start", "at_end")
        }
        said = {name: given[name] for name in _FIELDS if given.get(name) not in (None, {}, False)}
        kinds.append({"letters": phase.name, **said})
    found = {
        "kinds": kinds,
        "rules": list(grammar.texts),
        "items": dict(grammar.items),
        "slices": grammar.slices,
        "forward_only": grammar.forward_only,
        "graph": [list(edge) for edge in grammar.graph],
        "lanes": dict(grammar.lanes),
    }
    usual = {"slices": 1, "forward_only": False}
    return {name: value for name, value in found.items() if value not in ([], {}, usual.get(name))}


def grammar_of(data: Mapping[str, Any]) -> Grammar:
    """Read what a table in JSON has of its own."""
    given = {name: data[name] for name in KEYS if name in data}
    if not given:
        return USUAL
    try:
        for name, value in given.items():
            fits, form = _FORMS[name]
            if not fits(value):
                raise ValueError(f"{name} must be {form}, got {value!r}")
        entries = [_kind(entry) for entry in given.pop("kinds", [])]
        kinds = dict(entries)
        if len(kinds) < len(entries):
            raise ValueError(f"letters of kinds stand once each, got {[k for k, _ in entries]}")
        graph = [tuple(edge) for edge in given.pop("graph", [])]
        return Grammar(kinds=kinds, graph=graph, **given)
    except ValueError as error:
        raise ScheduleError(f"the table's own kinds and rules: {error}") from None


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(x, kind) for x in value)


_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "kinds": (_is_list_of(dict), "a list of objects"),
    "rules": (_is_list_of(str), "a list of texts"),
    "items": (lambda value: isinstance(value, dict), "an object of numbers"),
    "slices": (lambda value: type(value) is int, "a whole number"),
    "forward_only": (lambda value: isinstance(value, bool), "true or false"),
    "graph": (
        lambda value: _is_list_of(list)(value) and all(len(edge) == 2 for edge in value),
        "a list of pairs of stages",
    ),
    "lanes": (lambda value: isinstance(value, dict), "an object of lanes by letters"),
}


def _kind(entry: Mapping[str, Any]) -> tuple[str, OpKind]:
    """Read a kind of op and its letters; what takes no name is called as its letters."""
    for name, value in entry.items():
        one_of(name, tuple(_FIELDS), "key of a kind")
        if not isinstance(value, _FIELDS[name]):
            raise ValueError(f"{name} of a kind cannot be {value!r}")
    fields = dict(entry)
    letters = fields.pop("letters", None)
    if "look" in fields:
        fields["look"] = tuple(fields["look"])
    return letters, OpKind(**{"name": letters, "time": letters, **fields})
