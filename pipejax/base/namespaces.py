"""Namespaces whose names are imported when they are first used, from where a stub says they live.

`__init__.pyi` beside `__init__.py`, or `costing.pyi` beside `costing.py`, is the one list of names:
people, type checkers and this module read it. So the command line can answer `--help` without JAX.
"""

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy(namespace: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a namespace: classes first."""
    stub = Path(str(sys.modules[namespace].__file__)).with_suffix(".pyi")
    homes = {
        alias.name: str(line.module)
        for line in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
        if alias.asname == alias.name
    }

    @functools.cache
    def fetch(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {namespace!r} has no attribute {name!r}")
        if homes[name] == namespace:
            return importlib.import_module(f"{namespace}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    names = sorted(homes, key=lambda name: (not name[0].isupper(), name))
    return fetch, lambda: names, names
