"""Namespaces that import each name at its first use, from the module that a stub names.

The stub is `__init__.pyi` beside `__init__.py`, or `costing.pyi` beside `costing.py`. The
stub is the only list of names. By this late import, the command line answers `--help` without JAX.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy(namespace: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a namespace for the names in its stub."""
    stub = Path(str(sys.modules[namespace].__file__)).with_suffix(".pyi")
    modules = {}  # module by exported name, as in "from module import name as name"
    for statement in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            exports = [alias.name for alias in statement.names if alias.asname == alias.name]
            modules.update(dict.fromkeys(exports, str(statement.module)))

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {namespace!r} has no attribute {name!r}")
        if modules[name] == namespace:
            return importlib.import_module(f"{namespace}.{name}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[namespace], name, value)  # later uses do not call this function
        return value

    names = sorted(modules, key=lambda name: (not name[0].isupper(), name))  # classes first
    return get_attribute, lambda: names, names
