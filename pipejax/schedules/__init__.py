"""Builders that make the table of a schedule, given the schedule's name and sizes.

`REGISTRY` lists the published ones of the usual ops, `EXTENDED` those whose tables have a grammar
of their own; `find` finds a user's own.
"""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
