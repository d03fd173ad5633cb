"""pipejax: how long one LLM training step takes under a pipeline schedule, exactly and fast.

The names here are the library; `import pipejax as pj` is the convention. They follow the line
from a schedule to a number: build or read a table, lower it to a program, price it, evaluate. What
a question needs less often stands in namespaces, as `pj.schedules` and `pj.search`. `__init__.pyi`
lists the names, and a stub of each namespace its own. Each is imported when it is first used.
"""

import importlib
import warnings
from typing import Any

from pipejax.base import namespaces

# of searches, and of what scales costs, that had other names at the top
_RENAMED = {
    "scale_workers": "scaled_costs",
    "scale_microbatches": "scaled_costs",
    "order": "messages",
    "arrange": "microbatches",
    "place": "places",
    "partition": "layers",
}
__all__ = namespaces.names_of(__name__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        found = importlib.import_module("pipejax.base.provenance").own_version()
    elif name in __all__ or name.startswith("_"):
        found = namespaces.fetch(__name__, name)
    else:
        return _moved(name)
    globals()[name] = found
    return found


def _moved(name: str) -> Any:
    """Return what stood at the top before and has gone to a namespace, with a warning."""
    homes = namespaces.homes(__name__)
    new = _RENAMED.get(name, name)
    for each in (each for each, home in homes.items() if home == __name__):
        if new in namespaces.homes(f"{__name__}.{each}"):
            told = f"pj.{name} is pj.{each}.{new} now: the old name goes with the next release"
            warnings.warn(told, DeprecationWarning, stacklevel=3)
            return namespaces.fetch(f"{__name__}.{each}", new)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
