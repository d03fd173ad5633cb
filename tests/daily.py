"""Cases of parametrized tests, and the part of an expensive grid that runs every day."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def with_cases(names: str, *cases: Any, **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test over cases; spaces separate the names of its arguments."""
    arguments = names.split()
    return pytest.mark.parametrize(arguments if arguments[1:] else names, cases, **options)


def read_cases(name: str) -> dict[str, list[Any]]:
    """Read tables of cases by test, from a file of tests/data; texts among the rows are notes."""
    tables = json.loads((Path(__file__).parent / "data" / name).read_text())
    rows = {test: [row for row in table if isinstance(row, list)] for test, table in tables.items()}
    return {test: [row if row[1:] else row[0] for row in table] for test, table in rows.items()}


def daily(cases: Iterable[Any], *, always: int = 1, total: int = 3) -> list[Any]:
    """Return cases for `parametrize`: the first `always` and one in `total` others; the rest is slow.

    The others are drawn by a fixed seed: every third case of a grid could share a value of an axis.
    """
    cases = list(cases)
    others = range(always, len(cases))
    chosen = {*range(always), *random.Random(0).sample(others, -(-len(others) // total))}
    return [case if k in chosen else _slow(case) for k, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):  # a `pytest.param` already
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
