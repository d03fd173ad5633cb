"""pipejax: how long one LLM training step takes under a pipeline schedule, exactly and fast.

The names here are the library; `import pipejax as pj` is the convention. They follow the line
from a schedule to a number: build or read a table, lower it to a program, price it, evaluate.
`__init__.pyi` lists them. Each is imported when it is first used, so that the command line can
answer `--help` without JAX.
"""

import importlib
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text()
_HOME = {  # name -> module
    name: module
    for module, names in re.findall(r"^from (\S+) import (\([^)]*\)|.*)", _STUB, re.MULTILINE)
    for name in re.findall(r"(\w+) as ", names)
}
__all__ = sorted(_HOME, key=lambda name: (not name[0].isupper(), name))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        found = importlib.import_module("pipejax.base.provenance").own_version()
    elif name not in _HOME:
        raise AttributeError(f"module 'pipejax' has no attribute {name!r}")
    elif _HOME[name] == "pipejax":  # a room: a builder is `pj.schedules.build`
        found = importlib.import_module(f"pipejax.{name}")
    else:
        found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
