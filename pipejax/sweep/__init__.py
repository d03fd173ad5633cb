"""Sweeps: a declared grid of schedules, workloads and systems becomes a labelled dataset.

A point is one combination of values; a block is a part of the grid that is evaluated at once.
"""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
