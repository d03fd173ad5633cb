"""Builders that make the table of a schedule, given the schedule's name and sizes.

`REGISTRY` has the published schedules of the default ops, `EXTENDED` those whose tables extend the
grammar. `find` also finds a user's own schedule.
"""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
