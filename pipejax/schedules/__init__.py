"""Builders: a schedule by name, as a table.

Builders of one family share a file. `REGISTRY` lists the published ones with their sources, so
that commands, tests and sweeps cross over all of them; a user's own are found by `find`.
"""

from pipejax.schedules.naming import build, find, listed, named, names, register
from pipejax.schedules.registry import REGISTRY, Builder

__all__ = [
    "REGISTRY",
    "Builder",
    "build",
    "find",
    "listed",
    "named",
    "names",
    "register",
]
