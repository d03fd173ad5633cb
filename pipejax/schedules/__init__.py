"""Builders that make the table of a schedule, given the schedule's name and sizes.

Builders of one family share a file. `REGISTRY` lists the published ones of the usual ops with their
sources, so that commands, tests and sweeps cross over all of them, `EXTENDED` those whose tables
have a grammar of their own; a user's own are found by `find`.
"""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
