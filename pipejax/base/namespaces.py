"""Namespaces whose names are imported when they are first used, from where a stub says they live.

`__init__.pyi` beside `__init__.py`, or `costing.pyi` beside `costing.py`, is the one list of names:
people, type checkers and this module read it. So the command line can answer `--help` without JAX.
"""

import ast
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


@functools.cache
def homes(namespace: str) -> Mapping[str, str]:
    """Return the module of each name that a namespace's stub lists, as `from module import a as a`.

    Example:
      >>> homes("pipejax.schedules")["build"]
      'pipejax.schedules.naming'
    """
    found = importlib.util.find_spec(namespace)
    stub = Path(str(found and found.origin)).with_suffix(".pyi").read_text(encoding="utf-8")
    return {
        each.name: str(line.module)
        for line in ast.parse(stub).body
        if isinstance(line, ast.ImportFrom)
        for each in line.names
        if each.asname == each.name
    }


def names_of(namespace: str) -> list[str]:
    """Return the names of a namespace: classes first, then in the order of the alphabet."""
    return sorted(homes(namespace), key=lambda name: (not name[0].isupper(), name))


def fetch(namespace: str, name: str) -> Any:
    """Import a name of a namespace, which may be a module in it.

    Raises:
      AttributeError: if the namespace does not list it.
    """
    if name not in homes(namespace):
        raise AttributeError(f"module {namespace!r} has no attribute {name!r}")
    home = homes(namespace)[name]
    if home == namespace:
        return importlib.import_module(f"{home}.{name}")
    return getattr(importlib.import_module(home), name)


def lazy(namespace: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a namespace.

    Example:
      >>> get, _, names = lazy("pipejax.schedules")
      >>> "names" in names, len(get("names")()) > 20
      (True, True)
    """
    names = names_of(namespace)
    return functools.cache(functools.partial(fetch, namespace)), lambda: names, names
