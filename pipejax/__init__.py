"""pipejax: how long one LLM training step takes under a pipeline schedule, exactly and fast.

The names here are the library; `import pipejax as pj` is the convention. They follow the line
from a schedule to a number: build or read a table, lower it to a program, price it, evaluate. What
a question needs less often stands in namespaces, as `pj.schedules` and `pj.search`. `__init__.pyi`
lists the names, and a stub of each namespace its own. Each is imported when it is first used.
"""

from typing import Any

from pipejax.base import namespaces

_fetch, __dir__, __all__ = namespaces.lazy(__name__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from pipejax.base.files import own_version

        return own_version()
    return _fetch(name)
