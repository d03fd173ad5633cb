"""`--assert`: conditions on what a command answers, such as step_time < 0.75 s."""

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from pipejax.base.checks import nearest
from pipejax.base.conditions import compare, share_number, si_number, split_condition
from pipejax.base.data_files import parse_float, parse_ratio
from pipejax.cli.output.numbers import percent, quantity
from pipejax.cli.output.report import json_text
from pipejax.cli.output.schemas import (
    KeyPath,
    has_list,
    inner_schema,
    inner_values,
    leaf_paths,
    read_schema,
    split_path,
)


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
    types = key_schema.get("type", "array")  # of an axis of a sweep nothing is known
    kinds, unit = {types} if isinstance(types, str) else {*types}, key_schema.get("unit", "")
    is_open = "array" in kinds and math.isfinite(parse_float(value))  # of entries never seen
    if is_open or kinds & {"number", "integer"}:
        holder = inner_schema(schema, path[:-1]) or {}  # of critical_path.B, say
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
