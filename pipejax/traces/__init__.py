"""Measured runs: read, checked, replayed, explained and improved."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
