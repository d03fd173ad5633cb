"""JSON Schemas of what commands print with `--json`: keys, their units and what they mean."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "schemas"
KeyPath = Sequence[str | int]  # keys of objects and places in lists


def read_schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints with `--json`."""
    schema: dict[str, Any] = json.loads((FOLDER / f"{command.replace(' ', '_')}.json").read_bytes())
    return schema


def split_path(text: str) -> list[str | int]:
    """Split the path of a value: "remedies[0].saves" is remedies, 0 and saves."""
    parts = re.findall(r"[^.\[\]]+|\[\d+\]", text)
    return [int(part[1:-1]) if part.startswith("[") else part for part in parts]


def inner_schema(schema: Mapping[str, Any], path: KeyPath) -> Mapping[str, Any] | None:
    """Return the schema of the values at a path, which may skip list indices; None if absent."""
    inner: Any = schema
    for part in path:
        if isinstance(part, int):
            inner = inner.get("items")
        else:
            inner = entries_schema(inner)
            any_key = inner.get("additionalProperties")
            inner = inner.get("properties", {}).get(part, any_key)
        if not isinstance(inner, dict):
            return None
    return entries_schema(inner)


def entries_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of the entries of a list, or of a list of lists."""
    while "items" in schema:
        schema = schema["items"]
    return schema


def inner_values(value: Any, path: KeyPath, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values at a path with their own paths; a key of a list stands for all entries.

    An entry of a list that lacks the key has null. `where` is the path up to this value.
    """
    if path and isinstance(path[0], int):
        if isinstance(value, list) and path[0] < len(value):
            yield from inner_values(value[path[0]], path[1:], f"{where}[{path[0]}]")
    elif isinstance(value, list):
        for place, entry in enumerate(value):
            yield from inner_values(entry, path, f"{where}[{place}]")
    elif path:
        if isinstance(value, dict) and path[0] in value:
            yield from inner_values(value[path[0]], path[1:], f"{where}.{path[0]}".lstrip("."))
        elif "[" in where:
            yield f"{where}.{path[0]}", None
    else:
        yield where, value


def has_list(value: Any, path: KeyPath) -> bool:
    """Return whether a path asks for all entries of a list, which may be empty."""
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return isinstance(value, list) and isinstance(part, str)
        value = value[part]
    return isinstance(value, list)


def leaf_paths(schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield the paths of all values that are neither objects nor lists."""
    schema = entries_schema(schema)
    for key, inner in schema.get("properties", {}).items():
        yield from leaf_paths(inner, f"{where}.{key}".lstrip("."))
    if not schema.get("properties") and "additionalProperties" not in schema:
        yield where
