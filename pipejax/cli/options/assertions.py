"""`--assert`: conditions on what a command answers, such as step_time < 0.75 s, by its schema."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.base.checks import nearest
from pipejax.base.conditions import compare, share_number, si_number, split_condition
from pipejax.base.data_files import parse_float, parse_ratio
from pipejax.cli.output.numbers import percent, quantity
from pipejax.cli.output.report import json_text

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


class Assertion(NamedTuple):
    """A condition on a value of an answer, or on all entries of a list."""

    text: str  # as it is written
    path: KeyPath
    sign: str
    value: float | str | bool  # a number in the unit of the key, a text or a truth
    unit: str

    def holds(self, value: Any) -> bool:
        """Return whether a value meets the condition; null meets none."""
        if value is None or isinstance(value, str) != isinstance(self.value, str):
            return False
        if isinstance(self.value, str):
            return (value == self.value) == (self.sign == "=")
        return bool(compare(value, self.sign, self.value))

    def verdict(self, result: Any) -> tuple[bool, str]:
        """Return whether all values meet the condition, and a line on the least favourable one."""
        values = [*inner_values(result, self.path)]
        if not values and not has_list(result, self.path):
            parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
            name = "".join(parts).lstrip(".")
            raise ValueError(f"--assert {self.text!r}: this answer has no {name}")
        failing = [(where, value) for where, value in values if not self.holds(value)]
        if not values:
            return True, f"assert: {self.text} holds"
        state, pick = ("does not hold", max) if failing else ("holds", min)
        numbers = [pair for pair in failing or values if isinstance(pair[1], int | float)]
        where, value = (failing or values)[0]
        if numbers and isinstance(self.value, float):
            limit = self.value
            where, value = pick(numbers, key=lambda pair: abs(pair[1] - limit))
        return not failing, f"assert: {self.text} {state}: {where} is {self._compared(value)}"

    def _compared(self, value: Any) -> str:
        """Write a value and how far it is from the one of the condition."""
        if isinstance(value, str | bool | None) or not isinstance(self.value, float):
            return json.dumps(value).strip('"')
        show = partial(quantity, unit=self.unit)
        if not self.value or compare(value, "=", self.value):
            return show(value)
        difference = value / self.value - 1
        side = "above" if value > self.value else "below"
        return f"{show(value)}, {percent(abs(difference))} {side} {show(self.value)}"


def verdicts(assertions: Sequence[Assertion], answer: Any) -> list[tuple[bool, str]]:
    """Return for each condition whether an answer meets it, and a line that says so."""
    result = json.loads(json_text(answer)) if assertions else None
    return [assertion.verdict(result) for assertion in assertions]


def parse_assertions(command: str, texts: Sequence[str]) -> list[Assertion]:
    """Read conditions on the answer of a command, before it runs."""
    return [_parse(command, text) for text in texts]


def _parse(command: str, text: str) -> Assertion:
    """Parse a condition such as "makespan < 0.75 s" by the schema of a command's answer."""
    option = f"--assert {text!r}"
    condition = split_condition(text)
    if condition is None:
        raise ValueError(f"--assert must be as 'makespan < 0.75 s', got {text!r}")
    name, sign, value = condition
    path, schema = split_path(name), read_schema(command)
    key_schema = inner_schema(schema, path)
    if key_schema is None or "properties" in key_schema:
        raise ValueError(
            f"{option}: {command} --json has no value {name!r}"
            f"{nearest(name, [*leaf_paths(schema)])} (all keys: pipejax schema {command})"
        )
    types = key_schema.get("type", "array")  # an axis of a sweep has no known type
    kinds, unit = {types} if isinstance(types, str) else {*types}, key_schema.get("unit", "")
    is_open = "array" in kinds and math.isfinite(parse_float(value))  # entries of unknown type
    if is_open or kinds & {"number", "integer"}:
        holder = inner_schema(schema, path[:-1]) or {}  # of critical_path.B: critical_path
        meaning = key_schema.get("description", holder.get("description", ""))
        is_share = unit == "1" and meaning.startswith("share")
        number = share_number(value, f"{option}:") if is_share else _number(value, unit, option)
        if math.isfinite(number):
            return Assertion(text, path, sign, number, unit)
        unit = {"1": "a number or a percentage", "": "a number"}.get(unit, f"a number of {unit}")
        raise ValueError(f"{option} must compare with {unit}, got {value!r}")
    if kinds & {"boolean"}:
        if value not in ("true", "false"):
            raise ValueError(f"{option}: {name} is true or false")
        return Assertion(text, path, sign, value == "true", "")
    if sign not in ("=", "!="):
        raise ValueError(f"{option}: texts are compared by = or !=")
    return Assertion(text, path, sign, value, "")


def _number(text: str, unit: str, option: str) -> float:
    """Read a number in the unit of a key: with a unit of the same dimension, or without one."""
    number = si_number(text, unit, f"{option}:")
    if number is not None:
        return number
    return parse_ratio(text) if unit == "1" else parse_float(text.removesuffix(unit).strip())
