"""Cases of parametrized tests, and the part of an expensive grid that runs every day."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TABLES = json.loads((Path(__file__).parent / "data" / "case_tables.json").read_text())


def with_cases(names: str, *cases: Any, **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test over cases; spaces separate the names of its arguments."""
    arguments = names.split()
    return pytest.mark.parametrize(arguments if arguments[1:] else names, cases, **options)


def read_cases(name: str) -> Any:
    """Return the rows of a table in case_tables.json, which says what its columns are."""
    return TABLES[name]["rows"]


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
